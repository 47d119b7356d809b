"""A randomised campaign from outside: trainings on which a bad day is inflicted, through the command line and the servers alone.

    python tests/campaigns/campaign.py --seed 1 --minutes 5 [--focus members|stores] [--episode N] [--json FILE]

An episode is a pure function of (seed, number, focus): a kind of store, a code, trainers, and a list of faults, each at a step or a moment. Its log
has the plan, and what was done when: as far as timing allows, --episode plays it again. After each
call of `foreload train` it is looked at what is left, and the run is gone on with, until it ends with the digest of an undisturbed run, or a
command refuses with one clear line where it may. What may not be: another digest, a traceback, a stop that the fault does not excuse,
`--overwrite` as the only way on, a trainer left behind, a server left behind that is not the only one to hold rows.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / folder) for folder in ("harness", "servers", "trainer"))]

from foreload.trainer.compute import numerics  # noqa: E402

# Before torch is imported, here and in the process that forks.
numerics.set_environment()
from campaign_episode import Episode  # noqa: E402
from campaign_plan import LANES, LOOKS, MEMBER_FAULTS, MEMBER_LANES, MEMBER_STEPS, STEPS, Plan  # noqa: E402
from campaign_run import OWN_MODEL, Violation, model_words  # noqa: E402
from forking import FORKER  # noqa: E402
from tls import write_certificates  # noqa: E402

from foreload.trainer.run.event_log import read_events  # noqa: E402

PREPARE = "--format synthetic --values 3000 --batch-size 64 --slots 700"


@dataclass(slots=True)
class Result:
    """What a campaign found."""

    episodes: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)  # of the runs, by kind
    endings: Counter[str] = field(default_factory=Counter)
    violations: list[dict[str, Any]] = field(default_factory=list)


def campaign(
    seed: int,
    minutes: float,
    only: int | None = None,
    say: Callable[[str], object] = print,
    focus: str | None = None,
    forked: bool = False,
) -> Result:
    """Play episodes for so long (or one), one after the other; their folders stay where something may not be. forked: as the command line has it."""
    folder = Path(tempfile.mkdtemp(prefix="flc"))
    result = Result()
    deadline = time.monotonic() + 60 * minutes
    undisturbed: dict[tuple[bool, bool], tuple[Path, str]] = {}
    certificates = folder / "tls"
    certificates.mkdir()
    write_certificates(certificates)
    number = only if only is not None else 0
    while True:
        plan = Plan.draw(seed, number, focus)
        kind = (plan.members, plan.own)
        if kind not in undisturbed:
            undisturbed[kind] = _undisturbed(folder, *kind)
        place = folder / str(number)
        place.mkdir()
        episode = Episode(plan, *undisturbed[kind], place, certificates, forked)
        try:
            ending = episode.play()
        except Violation as error:
            ending = "VIOLATION"
            result.violations.append({"seed": seed, "episode": number, "what": str(error), "log": str(place / "log")})
            say(f"VIOLATION: {error}")
        result.episodes += 1
        result.faults.update(episode.done)
        result.events.update(event["kind"] for event in read_events(episode.path))
        result.endings[ending if ending in ("digest", "VIOLATION") else "refused: " + _without_figures(ending)] += 1
        say(
            f"{number}: {plan.store} {plan.shards} shards, parity {plan.parity}, {plan.trainers} trainers, copies {plan.copies}; "
            f"{', '.join(episode.done)} "
            f"-> {ending}{f' (excused: {episode.excuses})' if ending != 'digest' else ''}"
        )
        if ending != "VIOLATION":
            shutil.rmtree(place, ignore_errors=True)
        number += 1
        if only is not None or time.monotonic() >= deadline:
            break
    FORKER.close()
    if not result.violations:
        shutil.rmtree(folder, ignore_errors=True)
    return result


def _undisturbed(folder: Path, members: bool, own: bool) -> tuple[Path, str]:
    """The schedule of episodes that are about trainers, or about stores, and the digest of a run to which nothing happened."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    name = ("members" if members else "stores") + ("-own" if own else "")
    (folder / "net.py").write_text(OWN_MODEL)
    schedule, run = folder / name, folder / f"undisturbed-{name}"
    command = [sys.executable, "-m", "foreload.trainer.cli"]
    steps, lanes = (MEMBER_STEPS, MEMBER_LANES) if members else (STEPS, LANES)
    words = f"prepare {PREPARE} --rows {steps * 64} --lanes {lanes} --out {schedule}".split()
    subprocess.run([*command, *words], check=True, env=environment, capture_output=True)
    words = f"train {schedule} --run {run} --store local:1 --digest {model_words(folder if own else None)}".split()
    subprocess.run([*command, *words], check=True, env=environment, capture_output=True)
    return schedule, str(json.loads((run / "summary.json").read_text())["digest"])


def _without_figures(line: str) -> str:
    return re.sub(r"(unix|rediss?)://\S+|/\S+|[0-9]+", "N", line.removeprefix("foreload: error: "))[:160]


def main(argv: list[str] | None = None) -> int:
    """The command line; 0 if nothing was that may not be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--episode", type=int, help="play this one only")
    parser.add_argument("--focus", choices=("members", "stores"), help="episodes about trainers, or about stores, alone")
    parser.add_argument(
        "--forked", action="store_true", help="commands in processes forked from one, which need no time to import"
    )
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(argv)
    result = campaign(given.seed, given.minutes, given.episode, lambda text: print(text, flush=True), given.focus, given.forked)
    figures = {
        "episodes": result.episodes, "faults": dict(result.faults),
        "faults_in_all": sum(count for kind, count in result.faults.items() if kind not in LOOKS),
        "faults_of_trainers": sum(result.faults[kind] for kind in (*MEMBER_FAULTS, "kill_launcher")),
        "events": dict(result.events),
        "endings": dict(result.endings), "violations": result.violations,
    }  # fmt: skip
    print(json.dumps(figures, indent=1))
    if given.json is not None:
        given.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 1 if result.violations else 0


if __name__ == "__main__":
    sys.exit(main())
