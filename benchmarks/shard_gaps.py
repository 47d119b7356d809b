"""Trainings in which store shards are killed or stopped one after the other, run by run: the gaps between steps, and throughput meanwhile."""

from __future__ import annotations

import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from comparison import Cell, Claim, Series, Table, spread, tell
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.job.job import TrainJob
from foreload.trainer.run.timeline import Timeline
from shard_loss import Injection, Pulse, ShardInjector, ShardLoss, launched, run_training
from workload import BATCH, ROOT, SEED

TIMEOUT_SECONDS = 1.0  # --store-timeout's default with parity
GAP_SECONDS = 0.5  # that the longest gap may take, and after SIGSTOP the timeout besides
KEPT = 0.93  # the share of its usual throughput that a training must keep, or have again
RUNS, LEAST_RUNS = (5, 2), (3, 1)  # in full and with --quick: how many trainings, and how many whatever the time
GAP_ROWS = "--rows {rows} --values 20000 --epochs {epochs} --slots 40000"


@dataclass(slots=True)
class Findings:
    """What one part of bench_recovery.py (`gaps`, `checkpoint`, `cost`) adds to the results."""

    claims: list[Claim] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    plots: list[Series] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def gap_schedule(folder: Path, quick: bool) -> Schedule:
    """Epochs over the same samples, with so few slots that rows are fetched and written back in every step."""
    out = folder / "gaps"
    if not (out / "schedule.json").exists():
        words = GAP_ROWS.format(rows=200_000 if quick else 400_000, epochs=6 if quick else 40).split()
        tell(f"preparing the schedule of the gaps: {out}")
        command = [
            sys.executable,
            "-m",
            "foreload.pipelines.prepare",
            "--format",
            "synthetic",
            "--batch-size",
            str(BATCH),
            "--seed",
            str(SEED),
        ]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run(
            [*command, *words, "--out", str(out), "--overwrite"], env=environment, stdout=subprocess.DEVNULL, check=True
        )
    return Schedule(out)


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one loss: the longest gap between steps and the median step before, in seconds; throughput while the shard is lost (degraded) and while it
    is rebuilt, over that of the calm before and after (None: too short to tell).
    """

    gap: float
    median_step: float
    degraded: float | None
    rebuilding: float | None


def figures(shard_losses: Sequence[ShardLoss], timeline: Timeline) -> list[Figures]:
    """The figures of each loss of a run, in order. timeline: of all its steps."""
    all_figures = []
    for loss, end in zip(shard_losses, [*(later.injected for later in shard_losses[1:]), float(timeline.ended[-1])], strict=True):
        rate = timeline.throughput((loss.since, loss.injected), (loss.whole, end))
        degraded, rebuilding = (timeline.throughput(span) / rate for span in ((loss.lost, loss.back), (loss.back, loss.whole)))
        all_figures.append(
            Figures(
                timeline.longest_gap(loss.injected, loss.whole),
                timeline.median_step(loss.since, loss.injected),
                degraded if math.isfinite(degraded) else None,
                rebuilding if math.isfinite(rebuilding) else None,
            )
        )
    return all_figures


def loss_table(
    title: str, shard_losses: Sequence[ShardLoss], all_figures: Sequence[Figures], begin: float, pulse: Pulse
) -> Table:
    """A line for every loss. begin: of the training, by time.monotonic."""
    rows: list[list[Cell]] = []
    for loss, of in zip(shard_losses, all_figures, strict=True):
        rows.append([
            f"{loss.injected - begin:.1f}", signal.Signals(loss.injection.signal_number).name, loss.shard, f"{1000 * of.gap:.0f}",
            f"{1000 * pulse.longest_pause(loss.injected, loss.whole):.0f}", f"{1000 * of.median_step:.1f}",
            f"{1000 * (loss.lost - loss.injected):.0f}", f"{loss.back - loss.injected:.2f}",
            f"{loss.whole - loss.back:.2f}",
            None if of.degraded is None else f"{of.degraded:.3f}", None if of.rebuilding is None else f"{of.rebuilding:.3f}",
        ])  # fmt: skip
    columns = [
        "at, s", "signal", "shard", "longest gap, ms", "machine's pause, ms", "median step, ms", "lost after, ms",
        "server back after, s", "rebuilt in, s", "throughput while lost", "while rebuilding",
    ]  # fmt: skip
    note = (
        "Throughput is over that of the calm steps before and after. The machine's pause is the longest time from the signal until the shard is "
        f"whole in which a thread of the launcher that sleeps {1000 * Pulse.PERIOD_SECONDS:g} ms at a time was not run."
    )
    return Table(title, columns, rows, note)


@dataclass(frozen=True, slots=True)
class GapRun:
    """One training: its losses with their figures, its steps, what a sleeping thread saw, the rows rebuilt, and losses of shards left alone."""

    shard_losses: Sequence[ShardLoss]
    all_figures: Sequence[Figures]
    timeline: Timeline
    pulse: Pulse
    rebuilt: int
    unexpected: int

    def longest(self, name: str) -> tuple[float, float, int]:
        """After this signal: the longest gap and the machine's own pause in its window, in seconds; and how often the signal was sent."""
        gaps = [
            (of.gap, self.pulse.longest_pause(loss.injected, loss.whole))
            for loss, of in zip(self.shard_losses, self.all_figures, strict=True)
            if signal.Signals(loss.injection.signal_number).name == name
        ]
        return (*max(gaps, default=(0.0, 0.0)), len(gaps))

    def throughput(self, rebuilding: bool) -> float | None:
        """While a shard is rebuilt, or lost, over the calm's: the median of the losses that were long enough to tell."""
        told = [of.rebuilding if rebuilding else of.degraded for of in self.all_figures]
        return statistics.median(values) if (values := [value for value in told if value is not None]) else None


def gap_run(schedule: Schedule, folder: Path, quick: bool) -> GapRun:
    """Train once; 25 x SIGKILL, servers back at once or later, and 5 x SIGSTOP."""
    kill, slow_kill, stop = (
        Injection(signal.SIGKILL, 0),
        Injection(signal.SIGKILL, 2),
        Injection(signal.SIGSTOP, TIMEOUT_SECONDS + 1),
    )
    injections = [kill, slow_kill, stop] if quick else [kill, slow_kill, kill, slow_kill, stop, kill] * 5
    with tempfile.TemporaryDirectory(dir=folder, prefix="gaps-") as name:
        run = Path(name) / "run"
        injector = ShardInjector(run, injections, 0.7 if quick else 0.8, math.inf)
        with Pulse() as pulse:
            summary = run_training(TrainJob.of(launched(schedule, run)), injector)
    if not injector.shard_losses:
        raise SystemExit("the training ended before a store shard was lost and rebuilt")
    all_figures = figures(injector.shard_losses, injector.timeline)
    rebuilt = summary["store_traffic"]["rows_rebuilt"]
    return GapRun(injector.shard_losses, all_figures, injector.timeline, pulse, rebuilt, injector.unexpected)


def gap_claims(runs: Sequence[GapRun]) -> list[Claim]:
    """Gaps in all runs, and throughput as the median of the runs' medians."""
    claims = []
    for name, most in (("SIGKILL", GAP_SECONDS), ("SIGSTOP", GAP_SECONDS + TIMEOUT_SECONDS)):
        longest = [run.longest(name) for run in runs]
        value = max((gap for gap, _, count in longest if count), default=None)
        told = ", ".join(f"{1000 * gap:.0f} ({1000 * pause:.0f})" for gap, pause, _ in longest)
        note = f"{' + '.join(str(count) for *_, count in longest)} times. Of each run, ms (the machine's own pause in the same window): {told}."
        claims.append(
            Claim(
                f"longest gap between two steps, s, {name}", "counted from the signal", f"<= {most:g} in every run", value,
                most=most, note=note,
            )
        )  # fmt: skip
    for rebuilding, when in ((False, "while a shard is lost"), (True, "while it is rebuilt")):
        values = [value for run in runs if (value := run.throughput(rebuilding)) is not None]
        note = (
            f"The median of {len(values)} runs, of each the median of its losses."
            if values
            else "every time was too short to tell"
        )
        bar, against = f">= {KEPT}", "normal, in the same run"
        claims.append(Claim(f"throughput {when}", against, bar, spread(values) if values else None, least=KEPT, note=note))
    return claims


def run_table(runs: Sequence[GapRun]) -> Table:
    """A line for every training."""
    rows: list[list[Cell]] = []
    for number, run in enumerate(runs, 1):
        (gap, pause, kills), (stop_gap, stop_pause, stops) = run.longest("SIGKILL"), run.longest("SIGSTOP")
        shares = [run.throughput(False), run.throughput(True)]
        steps = statistics.median(run.timeline.took)
        whole = run.pulse.longest_pause(run.timeline.begin, run.timeline.end)
        rows.append([
            number, len(run.timeline.ended), f"{1000 * steps:.1f}", kills, f"{1000 * gap:.0f}", f"{1000 * pause:.0f}",
            stops, f"{1000 * stop_gap:.0f}", f"{1000 * stop_pause:.0f}", f"{1000 * whole:.0f}",
            *(None if share is None else f"{share:.3f}" for share in shares),
        ])  # fmt: skip
    columns = [
        "training", "steps", "median step, ms", "x SIGKILL", "longest gap, ms", "machine's pause then, ms", "x SIGSTOP", "longest gap, ms ",
        "machine's pause then, ms ", "machine's longest pause, ms", "throughput while lost, median", "while rebuilding",
    ]  # fmt: skip
    return Table("Trainings with losses", columns, rows)


def gaps(folder: Path, quick: bool, until: float) -> Findings:
    """Losses one after the other in trainings over rows that are all fetched and written back again and again. until: when no training begins any
    more, by time.monotonic, but those that there must be.
    """
    schedule = gap_schedule(folder, quick)
    runs: list[GapRun] = []
    while len(runs) < RUNS[quick] and (len(runs) < LEAST_RUNS[quick] or time.monotonic() < until):
        runs.append(gap_run(schedule, folder, quick))
        gap, pause, kills = runs[-1].longest("SIGKILL")
        tell(
            f"training {len(runs)}: {kills} x SIGKILL, longest gap {1000 * gap:.0f} ms, the machine's pause then {1000 * pause:.0f}"
        )
    last = runs[-1]
    begin = float(last.timeline.ended[0])
    took = sum(loss.whole - loss.back for run in runs for loss in run.shard_losses)
    rebuilt = sum(run.rebuilt for run in runs)
    edges, rates = last.timeline.bins(0.5)
    return Findings(
        gap_claims(runs),
        [run_table(runs), loss_table("Losses in the last training", last.shard_losses, last.all_figures, begin, last.pulse)],
        [Series("Throughput while shards are lost and rebuilt", "s", "samples/s", "lines",
                {"samples/s": [(float(edge - begin), float(rate)) for edge, rate in zip(edges, rates, strict=False)]})],
        [f"Gaps: {len(runs)} trainings by the launcher, one trainer, three local store shards, 2+1, one after the other killed or stopped; in "
         f"all {rebuilt:,} rows and parity rows were rebuilt in {took:.1f} s ({rebuilt / took:,.0f} a second), training at the same time. A killed "
         f"server is started again at once or 2 s later, a stopped one goes on after {TIMEOUT_SECONDS + 1:g} s. Shards lost that nothing was done "
         f"to: {sum(run.unexpected for run in runs)}."],
    )  # fmt: skip
