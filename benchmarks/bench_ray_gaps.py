"""What losses cost on a Ray cluster of four nodes, beside the same losses on the local engine: the gap between two steps, and the time to repair.

    python benchmarks/bench_ray_gaps.py [--quick] [--out DIR] [--pairs N]

All nodes are this machine's. A trainer and a store server are killed, each alone and both at once; on Ray the latter is the loss of their node.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import ray

from bench_lost_trainer import schedule_of
from comparison import Cell, Results, Table, arguments, save, tell
from foreload.base.errors import ForeloadError
from foreload.cache.client.store import Store
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.cluster.messages.control import AskStatus, AskStop, RunStatus, ask
from foreload.trainer.cluster.messages.faults import RunObserver
from foreload.trainer.cluster.messages.trainers import StepEnded, TrainerEvent
from foreload.trainer.job.job import TrainJob
from foreload.trainer.run.directory import Run
from foreload.trainer.run.servers import asked, servers_of
from foreload.trainer.run.timeline import StepTimes
from ray_nodes import CORES, RayNodes, nodes_of, used_actors
from shard_loss import launched, run_training
from workload import BATCH

TRAINERS, SHARDS, NODES = 3, 3, 4
KINDS = ("trainer", "server", "both")
CALM_SECONDS = 3.0
PATIENCE_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Gap:
    """What a loss did, in seconds: the longest gap between two steps, the median step before it, and the time until everything was whole again."""

    engine: str
    lost: str
    seconds: float
    median_step: float
    whole_after: float


class Injections(RunObserver):
    """Loses what is named, one after the other, each once the run is whole; then the run stops.

    Args:
        lose: takes the run's folder, one of KINDS, and the run's status; returns the moment (time.monotonic()).
    """

    def __init__(self, engine: str, run: Path, lost: Sequence[str], lose: Callable[[Path, str, RunStatus], float]) -> None:
        self._engine, self._run, self._lost, self._lose = engine, run, lost, lose
        self._steps = StepTimes()
        self.gaps: list[Gap] = []
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def on_event(self, trainer: int, event: TrainerEvent) -> None:
        """Note when steps end."""
        if isinstance(event, StepEnded):
            self._steps.note(event.report, event.at)

    def close(self) -> None:
        """Wait until the last loss is over."""
        self._thread.join()

    def _work(self) -> None:
        try:
            self._lose_all()
        finally:
            ask(self._run, AskStop())

    def _lose_all(self) -> None:
        for lost in self._lost:
            status = self._until(_is_whole)
            since = time.monotonic()
            time.sleep(CALM_SECONDS)
            at = self._lose(self._run, lost, status)
            # First it is noticed.
            self._until(lambda now: not _is_whole(now))
            self._until(partial(_is_whole_after, lost, status))
            whole = time.monotonic()
            timeline = self._steps.timeline
            gap = Gap(self._engine, lost, timeline.longest_gap(at, whole), timeline.median_step(since, at), whole - at)
            tell(
                f"{gap.engine}, {lost}: gap {1000 * gap.seconds:.0f} ms, step {1000 * gap.median_step:.0f}, whole after {gap.whole_after:.1f} s"
            )
            self.gaps.append(gap)

    def _until(self, satisfied: Callable[[RunStatus], bool]) -> RunStatus:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(ForeloadError, OSError):
                status = ask(self._run, AskStatus())
                if isinstance(status, RunStatus) and satisfied(status):
                    return status
            time.sleep(0.02)
        raise SystemExit(f"{self._engine}: nothing came of a loss in {PATIENCE_SECONDS:.0f} s")


def _is_whole(status: RunStatus) -> bool:
    members = {*status.members}
    return (
        status.state == "training"
        and len(members) == TRAINERS
        and {*status.lanes} == members
        and status.shards.whole
        and not status.exposed
    )


def _is_whole_after(lost: str, before: RunStatus, now: RunStatus) -> bool:
    return _is_whole(now) and (lost == "server" or now.members != before.members)


def kill(run: Path, lost: str, status: RunStatus) -> float:
    """Kill a trainer, a server or both, whichever engine has started them on this machine; returns when (time.monotonic())."""
    with Store(asked(servers_of(Run.open(run), None))) as store:
        pids = {"server": int(store.info(SHARDS - 1)["process_id"]), "trainer": status.trainers[max(status.members)]}
    at = time.monotonic()
    for kind, pid in pids.items():
        if lost in (kind, "both"):
            os.kill(pid, signal.SIGKILL)
    return at


def lose_on_ray(cluster: RayNodes, run: Path, lost: str, status: RunStatus) -> float:
    """Kill a trainer or a server, or lose a node that has one of each, or nearly so.

    Returns when that was (time.monotonic()). A node's processes end a second after its raylet is killed; the first of them counts.
    """
    if lost != "both":
        return kill(run, lost, status)
    used = used_actors(run, status.members)
    places = nodes_of(used)
    there = Counter((node, name.split("-")[0]) for name, node in places.items())
    nodes = {*places.values()} - {cluster.head}
    may_go = [node for node in nodes if there[node, "trainer"] == 1 and there[node, "server"] < 2]
    goes = max(may_go, key=lambda node: there[node, "server"])
    pids = [ray.get(used[name].pid.remote()) for name, node in places.items() if node == goes]
    losing = threading.Thread(target=cluster.lose, args=(goes,))
    losing.start()
    while all(map(_runs, pids)):
        time.sleep(0.001)
    at = time.monotonic()
    losing.join()
    return at


def _runs(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def train(schedule: Schedule, folder: Path, engine: str, lost: Sequence[str], cluster: RayNodes) -> list[Gap]:
    """One training in which all of this is lost."""
    with tempfile.TemporaryDirectory(dir=folder, prefix="gaps-") as name:
        run = Path(name) / "run"
        settings: dict[str, Any] = launched(schedule, run, trainers=TRAINERS, copies=2, parity="2+1")
        if engine == "ray":
            settings |= {"store": f"engine:{SHARDS}", "engine": "ray", "ray_address": cluster.address}
        injected = Injections(engine, run, lost, partial(lose_on_ray, cluster) if engine == "ray" else kill)
        run_training(TrainJob.of(settings), injected)
        injected.close()
        if len(injected.gaps) < len(lost):
            raise SystemExit("the training ended before all that was to happen to it had happened")
        if engine == "ray":
            subprocess.run([sys.executable, "-m", "foreload.trainer.cli", "delete", str(run)], check=True, capture_output=True)
            cluster.restore(NODES)
        return injected.gaps


def table_of(gaps: Sequence[Gap]) -> Table:
    """A line for each engine and kind of loss."""
    rows: list[list[Cell]] = []
    for lost in KINDS:
        for engine in ("local", "ray"):
            of = [gap for gap in gaps if (gap.engine, gap.lost) == (engine, lost)]
            what = "a node, with both" if (engine, lost) == ("ray", "both") else lost
            beyond = [1000 * (gap.seconds - gap.median_step) for gap in of]
            rows.append(
                [
                    what,
                    engine,
                    len(of),
                    f"{statistics.median(beyond):.0f}",
                    f"{max(beyond):.0f}",
                    f"{1000 * statistics.median(gap.median_step for gap in of):.0f}",
                    f"{statistics.median(gap.whole_after for gap in of):.1f}",
                ]
            )
    columns = [
        "lost",
        "engine",
        "times",
        "gap beyond a step, ms, median",
        "longest",
        "median step, ms",
        "all whole after, s, median",
    ]
    return Table(
        "Losses on a Ray cluster and on the local engine",
        columns,
        rows,
        "Whole: all trainers, replicas and shards are there again.",
    )


def main() -> None:
    """Measure and save."""
    given = arguments(__doc__, pairs=(4, 1))
    folder = (given.out / "work").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    schedule = schedule_of(folder, given.quick)
    gaps: list[Gap] = []
    cluster = RayNodes(NODES)
    try:
        for number in range(given.pairs):
            if number and given.budget.until(1.0) < time.monotonic():
                break
            for engine in ("local", "ray"):
                gaps += train(schedule, folder, engine, KINDS, cluster)
    finally:
        cluster.close()
    notes = [
        f"Synthetic Criteo-shaped rows, 26 tables, batch {BATCH:,}, 4 lanes, the small model, {TRAINERS} trainers, {SHARDS} shards with parity "
        f"2+1, --copies 2. Ray: {NODES} nodes of {CORES} cores by Ray's count, all on this machine; it takes 3 s to give up a node."
    ]
    save(Results("ray_gaps", "Losses on Ray", [], [table_of(gaps)], notes=notes), given.out)


if __name__ == "__main__":
    main()
