"""What `train --auto` does about a slow store shard and a slow trainer: beside a person who acts at once, and beside nobody.

    python benchmarks/bench_aftercare.py [--quick] [--out DIR]

Needs root: every server has a network namespace, and a link that tc's token bucket filter holds to its rate. The trainer is slowed down by signals
that stop it for two thirds of the time.
"""

from __future__ import annotations

import argparse
import os
import signal
import threading
from collections.abc import Callable

from bench_auto import QUICK_ROWS, Ran, Runs, command, measure_behind_links, prepared
from comparison import Cell, Claim, Results, Table, save, tell
from foreload.trainer.cluster.messages.control import AskStatus, RunStatus, ask
from store_links import StoreLinks

ROWS = 2_000_000
MEGABITS = 200.0
SHARDS = 3  # 2+1, and a spare
RUNS_SECONDS, STANDS_SECONDS = 0.01, 0.02


class SlowProcess:
    """Has a process stand still for two thirds of the time, until it ends or this is closed."""

    def __init__(self, pid: int) -> None:
        self._pid, self._over = pid, threading.Event()
        self._thread = threading.Thread(target=self._slow_down)
        self._thread.start()

    def _slow_down(self) -> None:
        try:
            while not self._over.wait(RUNS_SECONDS):
                os.kill(self._pid, signal.SIGSTOP)
                self._over.wait(STANDS_SECONDS)
                os.kill(self._pid, signal.SIGCONT)
        except ProcessLookupError:
            pass

    def close(self) -> None:
        """Let it go on."""
        self._over.set()
        self._thread.join()


class Cases:
    """The runs, by name."""

    def __init__(self, runs: Runs, links: StoreLinks) -> None:
        self.runs, self.links = runs, links
        self.ran: dict[str, Ran] = {}

    def shard(self, name: str, *further: str, then: Callable[[], None] = lambda: None, slows: bool = True) -> Ran:
        """One trainer with 2+1. The link of shard 0 drops to a tenth after a quarter of the steps."""
        self.links.limit(0, MEGABITS)

        def at_a_quarter() -> None:
            self.links.limit(0, MEGABITS / 10)
            then()

        at_step = (self.runs.steps // 4, at_a_quarter) if slows else None
        return self._keep(name, self.runs.run(f"run-{len(self.ran)}", 1, SHARDS, *further, parity="2+1", at_step=at_step))

    def trainer(self, name: str, *further: str, slows: bool = True) -> Ran:
        """Two trainers, one of which gets a third of its processor after a quarter of the steps."""
        self.links.limit(0, MEGABITS)
        run, slow = f"run-{len(self.ran)}", list[SlowProcess]()

        def at_a_quarter() -> None:
            status = ask(self.runs.folder / run, AskStatus())
            assert isinstance(status, RunStatus)
            slow.append(SlowProcess(status.trainers[1]))

        at_step = (self.runs.steps // 4, at_a_quarter) if slows else None
        try:
            return self._keep(name, self.runs.run(run, 2, SHARDS, *further, at_step=at_step))
        finally:
            for one in slow:
                one.close()

    def _keep(self, name: str, ran: Ran) -> Ran:
        self.ran[name] = ran
        tell(f"{name}: {ran}")
        return ran


def measure(given: argparse.Namespace, links: StoreLinks) -> None:
    """Both cases."""
    work = given.out / "work"
    cases = Cases(Runs(links, prepared(work, QUICK_ROWS if given.quick else ROWS), work), links)
    auto = ("--auto", "--pool", f"cores=2,stores={SHARDS + 1}", "--spare", links.urls[SHARDS])

    def move() -> None:
        command("stores", "move", str(cases.runs.folder / f"run-{len(cases.ran)}"), "0", links.urls[SHARDS])

    cases.shard("a shard: nothing happens", slows=False)
    moved = cases.shard("a shard is slow: moved by --auto", *auto)
    by_hand = cases.shard("a shard is slow: moved by hand at once", then=move)
    cases.trainer("a trainer: nothing happens", slows=False)
    left = cases.trainer("a trainer is slow: left alone")
    cared_for = cases.trainer("a trainer is slow: --auto", "--auto", "--pool", f"cores=2,stores={SHARDS}")
    digests = {ran.digest for ran in cases.ran.values()}
    claims = [
        Claim("time with a slow shard", "moved by hand at once", "<= 1.15", moved.seconds / by_hand.seconds, most=1.15),
        Claim("longest step with a slow shard, s", "-", "<= 0.5", moved.longest, most=0.5),
        Claim("time with a slow trainer", "left alone", "< 1", cared_for.seconds / left.seconds, most=1.0),
        Claim("digests", "-", "1", float(len(digests)), most=1.0),
    ]
    rows: list[list[Cell]] = [[name, of.seconds, of.later, of.longest, of.adjusted] for name, of in cases.ran.items()]
    head = ["run", "from the first step", "after the first quarter", "longest step in that", "changes"]
    note = (
        f"{cases.runs.steps:,} steps; links of {MEGABITS:g} Mbit/s, that of a slow shard has a tenth after a quarter of the steps; a slow trainer "
        f"stands still for {1000 * STANDS_SECONDS:g} of every {1000 * (STANDS_SECONDS + RUNS_SECONDS):g} ms from then on."
    )
    save(Results("aftercare", "Slow shards and slow trainers", claims, [Table("Seconds", head, rows)], notes=[note]), given.out)


if __name__ == "__main__":
    measure_behind_links(__doc__, SHARDS + 1, MEGABITS, measure)
