"""A randomised campaign on a Ray cluster of four nodes: nodes, actors, processes and drivers are lost, until so many faults are done.

    python tests/campaigns/ray_campaign.py --seed 1 --faults 100 [--run NUMBER] [--json FILE]

Each fault is one that must be survived: it comes once the run is whole after the one before. Every run must end with the digest of one that nothing
happened to, and `foreload delete` must leave none of its actors.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), *(str(ROOT / folder) for folder in ("tests/harness", "tests/servers", "benchmarks"))]

from foreload.trainer.compute import numerics  # noqa: E402

numerics.set_environment()
import ray  # noqa: E402
from command_line import Command  # noqa: E402
from held import HeldRun, Hold, holding  # noqa: E402
from small_job import arguments, check_end, summary, synthetic_schedule, train_undisturbed  # noqa: E402
from waiting import wait_until  # noqa: E402

from foreload.trainer.run.directory import METRICS, Run  # noqa: E402
from foreload.trainer.run.engine_record import EngineRecord  # noqa: E402
from foreload.trainer.run.report import reported_step  # noqa: E402
from ray_nodes import RayNodes, connected_nodes, nodes_of, pid_of, used_actors  # noqa: E402

NODES, TRAINERS, SHARDS, AN_EPISODE = 4, 2, 3, 8


class Episode:
    """One run. done: the faults, in order."""

    def __init__(self, cluster: RayNodes, schedule: Path, run: Path, hold: Hold, chance: random.Random) -> None:
        self._cluster, self._schedule, self._path, self._hold, self._chance = cluster, schedule, run, hold, chance
        self.done: list[str] = []
        self._job = self._begin()

    def _begin(self, *further: str) -> HeldRun:
        spares = str(self._chance.randint(0, 1))
        words = arguments(
            self._schedule, self._path, *self._cluster.flags, "--store", f"engine:{SHARDS}", "--trainers", str(TRAINERS),
            "--spare-servers", spares, "--digest", *further,
        )  # fmt: skip
        before = Run.open(self._path).status if self._path.exists() else None
        through = 6 if before is None else (reported_step(self._path / METRICS) or 0) + 6
        return self._hold(words, through, anew=True)

    def play(self, faults: int, digest: str) -> None:
        """Inflict so many faults, and let the run go on to its end."""
        kinds: dict[str, Callable[[], None]] = {
            "node": self._node,
            "node that drains": self._drain,
            "trainer": partial(self._kill_process, "trainer"),
            "trainer's actor": lambda: ray.kill(self._one("trainer")[1]),
            "server": partial(self._kill_process, "server"),
            "server's actor": lambda: ray.kill(self._one("server")[1]),
            "driver": self._driver,
            "driver stopped, server lost": self._stopped,
        }
        for _ in range(faults):
            self._become_whole()
            if self._job.schedule.left < 12:
                break
            of_nodes = () if self._nodes() else ("node", "node that drains")
            kind = self._chance.choice([kind for kind in kinds if kind not in of_nodes])
            self.done.append(kind)
            kinds[kind]()
        self._become_whole()
        check_end(self._job, digest, TRAINERS)

    def _used(self, kind: str) -> dict[str, Any]:
        """The actors of a kind that the run uses: "trainer" or "server"."""
        members = self._job.status.members if kind == "trainer" else ()
        return {name: actor for name, actor in used_actors(self._path, members).items() if name.startswith(kind)}

    def _one(self, kind: str) -> tuple[str, Any]:
        """The name and the handle of an actor that the run uses."""
        return self._chance.choice(sorted(self._used(kind).items(), key=itemgetter(0)))

    def _kill_process(self, kind: str) -> None:
        os.kill(pid_of(self._path, self._one(kind)[0]), signal.SIGKILL)

    def _places(self) -> dict[str, str]:
        """The node of each actor that the run uses; a spare server is not among them."""
        return nodes_of(self._used("trainer") | self._used("server"))

    def _nodes(self) -> list[str]:
        """The nodes that may be lost: those with no more of the run than it survives the loss of."""
        places = self._places()
        there = Counter((name.split("-")[0], node) for name, node in places.items())
        return sorted(
            node for node in {*places.values()} - {self._cluster.head} if there["server", node] < 2 and there["trainer", node] < 2
        )

    def _node(self) -> None:
        self._cluster.lose(self._chance.choice(self._nodes()))
        self._become_whole()
        self._cluster.restore(NODES)

    def _drain(self) -> None:
        node = self._chance.choice(self._nodes())
        self._cluster.drain(node)
        wait_until(lambda: node not in self._places().values())
        self._cluster.lose(node)
        self._cluster.restore(NODES)

    def _driver(self) -> None:
        self._job.process.kill()
        self._job.process.wait()
        self._job = self._begin("--resume=auto")

    def _stopped(self) -> None:
        self._job.interrupt(self._job.waits)
        self._job.stopped()
        self._kill_process("server")
        self._job = self._begin("--resume")

    def _become_whole(self) -> None:
        """Train until all shards are whole, and all trainers and replicas there."""
        # A driver that was killed may have trained beyond what it had reported, and so beyond what is published.
        self._job.train_until(lambda status: status.state == "training")
        self._job.advance()
        self._job.until(lambda: len(self._job.status.members) == TRAINERS)
        self._job.train_until(lambda status: {*status.lanes} == {*status.members})
        self._job.until(lambda: self._job.status.shards.whole and not self._job.status.exposed)


def _is_gone(namespace: str) -> bool:
    return namespace not in {one["namespace"] for one in ray.util.list_named_actors(all_namespaces=True)}


def main() -> int:
    """Play the campaign; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--run", type=int, default=0, help="the number of the first one; they are the same for the same seed")
    parser.add_argument("--json")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="frc"))
    schedule = synthetic_schedule(
        folder, 30_000, lanes=4, slots=500, further="--eval-fraction 0.1 --epochs 2 --segment-bytes 50KB"
    )
    digest = str(summary(train_undisturbed(schedule, folder))["digest"])
    faults: Counter[str] = Counter()
    number, began = given.run, time.monotonic()
    with connected_nodes(NODES) as cluster:
        while faults.total() < given.faults:
            cluster.restore(NODES)
            place = folder / str(number)
            place.mkdir()
            with holding(place) as hold:
                episode = Episode(cluster, schedule, place / "run", hold, random.Random(f"{given.seed} {number}"))
                try:
                    episode.play(min(AN_EPISODE, given.faults - faults.total()), digest)
                finally:
                    print(f"{number}: {', '.join(episode.done)}", flush=True)
            record = EngineRecord.read(place / "run")
            assert record is not None
            status, _, err = Command("delete", place / "run").end()
            assert status == 0, err
            wait_until(partial(_is_gone, record.namespace))
            faults.update(episode.done)
            number += 1
    result = {
        "runs": number - given.run,
        "faults": dict(faults),
        "total": faults.total(),
        "seconds": round(time.monotonic() - began),
    }
    print(json.dumps(result))
    if given.json:
        Path(given.json).write_text(json.dumps(result), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
