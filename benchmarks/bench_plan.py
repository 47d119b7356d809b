"""Whether the choice that `foreload plan` calls best is the best: it, its front and eight more are trained to the end.

python benchmarks/bench_plan.py [--quick] [--out DIR] [--pairs N] [--minutes M]

What was trained stays in DIR/plan_runs.jsonl: called again, it goes on from there. TalkingData needs FORELOAD_DATA, the folder with talkingdata/.
"""

from __future__ import annotations

import itertools
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comparison import Cell, Claim, Results, Table, arguments, save, tell
from step_configurations import Piece
from workload import ROOT

FURTHER = 8  # choices that are trained besides the front
QUICK_FURTHER = 2
MOST = 1.1  # times the best of those that were trained
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


@dataclass(frozen=True, slots=True)
class Planned:
    """A schedule to plan for. prepare, train: words of the commands."""

    name: str
    prepare: str
    train: str = ""


def workloads(quick: bool) -> list[Planned]:
    """TalkingData where it is there, made-up rows in Criteo's shape, and the reference workload's."""
    if quick:
        return [
            Planned(
                "quick", "--format synthetic --rows 60000 --batch-size 1024 --lanes 2 --slots 12000 --table-rows 20000", "--dim 8"
            )
        ]
    wanted = [
        Planned("criteo-shaped", "--format synthetic --rows 2000000 --batch-size 2048 --lanes 4 --slots 30000", "--dim 16"),
        Planned(
            "reference",
            "--format synthetic --rows 800000 --batch-size 2048 --lanes 2 --slots 100000",
            "--dim 32 --row-optimizer rowwise_adagrad",
        ),
    ]
    if data := os.environ.get("FORELOAD_DATA"):
        source = shlex.quote(str(Path(data).absolute() / "talkingdata" / "train_sample.csv"))
        features = shlex.quote(str(ROOT / "docs" / "talkingdata.toml"))
        words = f"{source} --format csv --features {features} --batch-size 256 --lanes 2 --epochs 2 --slots 4000"
        wanted.insert(0, Planned("talkingdata", words, "--dim 8"))
    return wanted


def foreload(words: str, folder: Path) -> str:
    """Call the command line there; its stdout. Raises SystemExit where it fails."""
    module = "foreload.pipelines.prepare" if words.startswith("prepare ") else "foreload.trainer.cli"
    given = words.removeprefix("prepare ") if words.startswith("prepare ") else words
    done = subprocess.run(
        [sys.executable, "-m", module, *shlex.split(given)],
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"foreload {words}: {done.stderr.strip().splitlines()[-1:]}")
    return done.stdout


def plan_of(work: Planned, folder: Path) -> dict[str, Any]:
    """Prepare the schedule and plan for it, where that was not done yet."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "schedule" / "schedule.json").exists():
        tell(f"{work.name}: preparing")
        foreload(f"prepare {work.prepare} --out schedule --overwrite", folder)
    if not (folder / "plan.json").exists():
        tell(f"{work.name}: planning")
        foreload(f"plan schedule {work.train} --history history.sqlite --json plan.tmp.json", folder)
        (folder / "plan.tmp.json").rename(folder / "plan.json")
    planned: dict[str, Any] = json.loads((folder / "plan.json").read_text())
    return planned


def to_train(plan: Mapping[str, Any], further: int) -> list[dict[str, Any]]:
    """The choice, the front, and so many more, from the fastest predicted to the slowest; those that need not be prepared again first of these."""
    chosen = {key_of(one): one for one in [plan["choice"], *plan["front"]]}
    rest = [one for one in sorted(plan["choices"], key=lambda one: one["seconds"]) if key_of(one) not in chosen]
    own = [one for one in rest if one["prepared"]] or rest
    for number in range(further):
        one = own[number * (len(own) - 1) // max(further - 1, 1)]
        chosen.setdefault(key_of(one), one)
    return list(chosen.values())


def key_of(one: Mapping[str, Any]) -> str:
    """What tells choices apart."""
    return f"{one['trainers']} {one['shards']} {one['parity']} {one['slots']}"


def train_to_end(one: Mapping[str, Any], work: Planned, folder: Path, piece: Piece) -> dict[str, float]:
    """Train a choice to the end: seconds of its steps, and the same in units of the pieces of work before and after."""
    schedule = "schedule" if one["prepared"] else f"schedule-{one['slots']}"
    if not (folder / schedule / "schedule.json").exists():
        tell(f"{work.name}: preparing {one['slots']} slots")
        foreload(f"prepare {work.prepare} --slots {one['slots']} --out {schedule} --overwrite", folder)
    before = [piece.seconds() for _ in range(3)]
    words = f"{work.train} --store local:{one['shards']} --parity {one['parity']} --trainers {one['trainers']}"
    foreload(f"train {schedule} --run run --overwrite --history off {words} --json summary.json", folder)
    unit = statistics.mean(before + [piece.seconds() for _ in range(3)])
    seconds = json.loads((folder / "summary.json").read_text())["seconds"]
    shutil.rmtree(folder / "run")
    return {"seconds": seconds, "units": seconds / unit}


Runs = dict[tuple[str, str], list[dict[str, float]]]


def trained_before(log: Path) -> Runs:
    """What an earlier call has trained: of each workload and choice, its runs."""
    runs: Runs = {}
    if log.exists():
        for line in log.read_text(encoding="utf-8").splitlines():
            told = json.loads(line)
            runs.setdefault((told["workload"], told["choice"]), []).append(told["run"])
    return runs


def judged(
    work: Planned, plan: Mapping[str, Any], choices: Sequence[Mapping[str, Any]], runs: Runs
) -> tuple[list[list[Cell]], list[Claim]]:
    """The rows of the table, and the claim, of a workload as far as it was trained."""
    units = {
        key: statistics.median(run["units"] for run in runs[work.name, key])
        for key in map(key_of, choices)
        if runs.get((work.name, key))
    }
    rows: list[list[Cell]] = []
    best, chosen = min(units.values(), default=0.0), key_of(plan["choice"])
    for one in choices:
        if (key := key_of(one)) in units:
            seconds = statistics.median(run["seconds"] for run in runs[work.name, key])
            rows.append([
                work.name, one["trainers"], one["shards"], one["parity"], one["slots"], "yes" if one["on_front"] else "",
                "chosen" if key == chosen else "", f"{one['seconds']:.1f}", f"{seconds:.1f}", f"{units[key] / best:.3f}",
            ])  # fmt: skip
    if chosen not in units:
        return rows, []
    what = f"{work.name}: time of the choice called best"
    return rows, [
        Claim(what, "the best choice", f"<= {MOST}", units[chosen] / best, most=MOST, note=f"{len(units)} choices were trained.")
    ]


def main() -> None:
    """Plan, train as far as the time goes, and save."""
    given = arguments(__doc__, pairs=(2, 1))
    log = given.out / ("plan_runs_quick.jsonl" if given.quick else "plan_runs.jsonl")
    runs, piece, rows, claims = trained_before(log), Piece(), list[list[Cell]](), list[Claim]()
    for work in workloads(given.quick):
        folder = (given.out / "work" / f"plan-{work.name}").absolute()
        plan = plan_of(work, folder)
        choices = to_train(plan, QUICK_FURTHER if given.quick else FURTHER)
        for number, one in itertools.product(range(given.pairs), choices):
            done = runs.setdefault((work.name, key_of(one)), [])
            if len(done) > number or time.monotonic() > given.budget.until(0.95):
                continue
            done.append(train_to_end(one, work, folder, piece))
            tell(
                f"{work.name}: {key_of(one)}: {done[-1]['seconds']:.1f} s, {done[-1]['units']:.0f} units; predicted {one['seconds']:.1f} s"
            )
            with open(log, "a", encoding="utf-8") as file:
                file.write(json.dumps({"workload": work.name, "choice": key_of(one), "run": done[-1]}) + "\n")
        further = judged(work, plan, choices, runs)
        rows, claims = rows + further[0], claims + further[1]
    columns = [
        "schedule",
        "trainers",
        "shards",
        "parity",
        "slots a lane",
        "front",
        "",
        "predicted, s",
        "taken, s",
        "units, of the best's",
    ]
    notes = [
        "Each is trained to the schedule's end, between pieces of fixed work, in whose units times are compared; a plan has what short runs told it.",
    ]
    tables = [Table("Choices trained", columns, rows)]
    save(Results("plan", "Plans", claims, tables, notes=notes), given.out)


if __name__ == "__main__":
    main()
