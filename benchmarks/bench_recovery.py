"""Losing a store shard: the gap between steps, throughput meanwhile, what parity costs, and restarting from a checkpoint instead.

python benchmarks/bench_recovery.py [--quick] [--out DIR] [--pairs N]
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench_step import DISCARDED, Contest, Plan, contest, step_table
from comparison import Budget, Cell, Claim, Results, Series, Table, arguments, ratio, save, spread, tell
from contenders import PROTECTED
from foreload.cache.client.local import LocalStores
from foreload.cache.client.store import Store
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.run.job import TrainJob
from foreload.trainer.run.timeline import Timeline
from shard_loss import Injection, Pulse, ShardInjector, ShardLoss, launched, run_training, stopped_run
from traffic_volume import rows_moved
from workload import BATCH, FULL, PARITY, QUICK, ROOT, SEED, SHARDS, Workload, describe

TIMEOUT_SECONDS = 1.0  # --store-timeout's default with parity
LEAST_SECONDS = (60.0, 10.0)  # that `gaps` has, in full and with --quick, whatever the other parts took
GAP_SECONDS, GAP_STEPS = 0.5, 5  # the longest gap may be the larger of so many seconds and so many median steps
KEPT = 0.93  # the share of its usual throughput that a training must keep, or have again
MILLION_5 = 5_000_000
REBUILD_SECONDS = 300  # that a rebuild of 5 million rows may take
CHECKPOINT_SECONDS = 600  # between two checkpoints
RECOVERED_STEPS = 20  # whose rate tells that the training is back at its own
MOVED_STEPS = 60
GAP_ROWS = "--rows {rows} --values 20000 --epochs {epochs} --slots 40000"


@dataclass(slots=True)
class Found:
    """What one part of this benchmark (`gaps`, `checkpoint`, `cost`) adds to the results."""

    claims: list[Claim] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    plots: list[Series] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def memory_bytes(work: Workload, kind: str) -> int:
    """What the servers take that hold the store's rows, without or with parity."""
    with work.stores("parity" if kind == "parity" else "rows") as stores, Store(stores.urls) as store:
        return sum(int(store.info(shard)["used_memory"]) for shard in range(SHARDS))


def cost(work: Workload, quick: bool, pairs: int, budget: Budget) -> Found:
    """What parity costs without failures: step time, samples/s, rows moved to and from the store, memory."""
    second = work.second()
    contenders = ["floor", "one table", "foreload", PROTECTED]
    small = contest(work, second, "small", contenders, Plan(pairs, 30, 8) if quick else Plan(pairs, 120, 15, budget.until(0.53)))
    results = Found(tables=[step_table("Small model, with and without parity", small)])
    large: Contest | None = None
    if not quick:
        large = contest(work, second, "Bagpipe's", ["floor", "foreload", PROTECTED], Plan(pairs, 12, 6, budget.until(0.72)))
        results.tables.append(step_table("Bagpipe's model, with and without parity", large))

    def step_time_claim(of: Contest | None, model: str, most: float) -> Claim:
        value = None if of is None else ratio(of.ms(PROTECTED), of.ms("foreload"))
        note = "" if of is not None else "not with --quick"
        return Claim(f"step time with 2+1, {model}", "without parity", f"<= {most}", value, most=most, note=note)

    k, r = PARITY
    row_counts = rows_moved(work, work.second(steps=MOVED_STEPS))
    plain, protected = (memory_bytes(work, kind) for kind in ("rows", "parity"))
    most = (1 + r / k) * 1.1
    results.claims = [
        step_time_claim(large, "Bagpipe's model", 1.05),
        step_time_claim(small, "small model", 1.10),
        Claim("trained samples/s with 2+1, small model", "in memory (one table)", ">= 1.08",
              ratio(small.ms("one table"), small.ms(PROTECTED)), least=1.08),
        Claim("rows moved to and from the store", "fetches + write-backs + R x (parity rows read + written)", "equal",
              row_counts["moved"] / row_counts["accounted"], least=1.0, most=1.0),
        Claim("store memory with 2+1", "without parity", f"<= {most:.2f}", protected / plain, most=most),
    ]  # fmt: skip
    results.tables.append(
        Table(
            f"Rows moved in {MOVED_STEPS} steps",
            list(row_counts),
            [[f"{value:,}" for value in row_counts.values()]],
            "Fetches and write-backs are the schedule's; moved is what the store client asked for and sent.",
        )
    )
    results.notes.append(
        f"{describe(work)} Memory of the servers as they have loaded these rows: {plain / 2**20:,.0f} MiB without, "
        f"{protected / 2**20:,.0f} MiB with 2+1."
    )
    return results


def gap_schedule(folder: Path, quick: bool) -> Schedule:
    """Epochs over the same samples, with so few slots that rows are fetched and written back in every step."""
    out = folder / "gaps"
    if not (out / "schedule.json").exists():
        words = GAP_ROWS.format(rows=200_000 if quick else 400_000, epochs=6 if quick else 24).split()
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


def gap_claim(name: str, shard_losses: Sequence[ShardLoss], all_figures: Sequence[Figures], more: float) -> Claim:
    """The claim about the longest gap over all losses by one signal, `name`. more: seconds that the bar allows beyond its own."""
    by_signal = [
        of
        for loss, of in zip(shard_losses, all_figures, strict=True)
        if signal.Signals(loss.injection.signal_number).name == name
    ]
    longest = max((of.gap for of in by_signal), default=None)
    steps = statistics.median(of.median_step for of in all_figures)
    most = max(GAP_SECONDS, GAP_STEPS * steps) + more
    bar = f"<= {most:.2f}: the larger of 0.5 and 5 median steps{f', and the timeout of {more:g}' if more else ''}"
    return Claim(
        f"longest gap between two steps, s, over {len(by_signal)} x {name}", "counted from the signal", bar, longest, most=most
    )


def gaps(folder: Path, quick: bool, seconds: float) -> Found:
    """Losses one after the other in one training, over rows that are all fetched and written back again and again."""
    schedule = gap_schedule(folder, quick)
    kill, slow_kill, stop = (
        Injection(signal.SIGKILL, 0),
        Injection(signal.SIGKILL, 2),
        Injection(signal.SIGSTOP, TIMEOUT_SECONDS + 1),
    )
    injections = [kill, slow_kill, stop] if quick else [kill, slow_kill, kill, slow_kill, stop, kill] * 5
    with tempfile.TemporaryDirectory(dir=folder, prefix="gaps-") as name:
        run = Path(name) / "run"
        injector = ShardInjector(run, injections, 0.7 if quick else 1.0, seconds)
        with Pulse() as pulse:
            summary = run_training(TrainJob.of(launched(schedule, run)), injector)
    shard_losses, timeline = injector.shard_losses, injector.timeline
    if not shard_losses:
        raise SystemExit("the training ended before a store shard was lost and rebuilt")
    all_figures = figures(shard_losses, timeline)
    begin = float(timeline.ended[0])
    rebuilt = summary["store_traffic"]["rows_rebuilt"]
    took = sum(loss.whole - loss.back for loss in shard_losses)
    degraded, rebuilding = [of.degraded for of in all_figures], [of.rebuilding for of in all_figures]
    edges, rates = timeline.bins(0.5)
    tell(f"{len(shard_losses)} losses, {rebuilt:,} rows rebuilt in {took:.1f} s, unexpected losses: {injector.unexpected}")
    claims = [
        gap_claim("SIGKILL", shard_losses, all_figures, 0.0),
        gap_claim("SIGSTOP", shard_losses, all_figures, TIMEOUT_SECONDS),
    ]
    for when, values in (("while a shard is lost", degraded), ("while it is rebuilt", rebuilding)):
        told = [value for value in values if value is not None]
        claims.append(
            Claim(f"throughput {when}", "normal, in the same run", f">= {KEPT}", spread(told) if told else None, least=KEPT,
                  note="" if told else "every time was too short to tell")
        )  # fmt: skip
    return Found(
        claims,
        [loss_table("Losses in one training", shard_losses, all_figures, begin, pulse)],
        [Series("Throughput while shards are lost and rebuilt", "s", "samples/s", "lines",
                {"samples/s": [(float(edge - begin), float(rate)) for edge, rate in zip(edges, rates, strict=False)]})],
        [f"Gaps: one training by the launcher, {summary['steps']:,} steps, one trainer, three local store shards, 2+1, one after the other "
         f"killed or stopped; in all {rebuilt:,} rows and parity rows were rebuilt in {took:.1f} s ({rebuilt / took:,.0f} a second), training at the "
         f"same time. A killed server is started again at once or 2 s later, a stopped one goes on after {TIMEOUT_SECONDS + 1:g} s. Shards lost "
         f"that nothing was done to: {injector.unexpected}."],
    )  # fmt: skip


def recovered_after(timeline: Timeline, injected: float, rate: float) -> float:
    """Seconds from an injected fault to the first step from which on the training has its rate again, over so many steps."""
    ends = timeline.ended[timeline.ended > injected]
    for first, last in zip(ends[:-RECOVERED_STEPS], ends[RECOVERED_STEPS:], strict=True):
        if timeline.throughput((first, last)) >= KEPT * rate:
            return float(first - injected)
    return float("inf")


def checkpoint(work: Workload, quick: bool) -> Found:
    """The same loss handled by parity and by restarting from a checkpoint, on the store with all rows."""
    second = work.second(steps=work.size.steps if quick else 2 * work.size.steps)
    with tempfile.TemporaryDirectory(dir=work.folder, prefix="lost-") as name:
        run = Path(name) / "run"
        training = stopped_run(work, second, run, protected=True)
        injector = ShardInjector(run, [Injection(signal.SIGKILL, 0)], 1.5 if quick else 5.0, 600)
        tell("losing a shard of the whole store")
        summary = run_training(training, injector)
    if not injector.shard_losses:
        raise SystemExit("the training ended before the store shard was lost and rebuilt")
    (loss,), timeline = injector.shard_losses, injector.timeline
    (of_loss,) = figures([loss], timeline)
    rate = timeline.throughput((loss.since, loss.injected))
    # Where the rate over so many steps never falls, the longest gap is what was lost.
    recovered = max(recovered_after(timeline, loss.injected, rate), of_loss.gap)
    rebuilt, took = summary["store_traffic"]["rows_rebuilt"], loss.whole - loss.back
    scaled = took * MILLION_5 / work.rows

    with tempfile.TemporaryDirectory(dir=work.folder, prefix="restored-") as name:
        run = Path(name) / "run"
        training = stopped_run(work, second, run, protected=False)
        redo = ShardInjector(run, [], 3.0 if quick else 12.0, 0.0)
        tell("restarting from a checkpoint of the whole store")
        begun = time.monotonic()
        run_training(training, redo)
    restore = redo.first_step_at - begun
    redone = redo.timeline
    redo_rate = redone.throughput((float(redone.ended[0]), float(redone.ended[-1])))
    half = CHECKPOINT_SECONDS / 2
    restart = restore + half * rate / redo_rate
    big = work.rows >= MILLION_5
    small = "" if big else f"the store has {work.rows:,} rows"
    load = load_seconds(work)
    claims = [
        Claim("5 million rows: full redundancy restored after, s", "training at the same time", f"<= {REBUILD_SECONDS}", scaled,
              most=REBUILD_SECONDS, note=f"{rebuilt:,} rows and parity rows of a store of {work.rows:,} rows in {took:.1f} s"),
        Claim("recovery, x faster", "restart from a checkpoint half of 10 minutes old", ">= 10", restart / recovered if big else None,
              least=10, note=small),
    ]  # fmt: skip
    table = Table(
        f"The loss of a store shard of {work.rows:,} rows",
        ["", "parity, s", "checkpoint, s"],
        [
            ["until the training is at the step and rate of the loss", f"{recovered:.3f}", f"{restart:.1f}"],
            ["of it restoring, until the first step", f"{of_loss.gap:.3f}", f"{restore:.1f}"],
            ["of that loading the rows alone", None, f"{load:.1f}"],
            ["full redundancy again (rebuilt; restored)", f"{loss.whole - loss.injected:.1f}", f"{restore:.1f}"],
        ],
        f"Throughput while rebuilding: {of_loss.rebuilding if of_loss.rebuilding is None else round(of_loss.rebuilding, 3)} of normal.",
    )
    note = (
        "The checkpoint is a plain one: a snapshot (RDB) of every server, and the dense part with its optimizer in one file. It is restored by "
        "the launcher: servers load their rows, a trainer starts. What taking it costs, and noticing the loss, are not counted. Redoing half of "
        f"10 minutes is scaled from {len(redone.ended):,} steps, {float(redone.ended[-1] - redone.ended[0]):.1f} s. Recovered is the first step "
        f"from which on {RECOVERED_STEPS} steps run at {KEPT:.0%} of the rate before the loss; the longest gap between steps is the least counted."
    )
    return Found(claims, [table], [], [note])


def load_seconds(work: Workload) -> float:
    """How long the servers take to load all rows."""
    with tempfile.TemporaryDirectory(dir=work.folder, prefix="load-") as name:
        work.copy_store("rows", Path(name))
        begun = time.monotonic()
        stores = LocalStores(SHARDS, Path(name)).start()
        seconds = time.monotonic() - begun
        stores.stop(save=False)
    return seconds


def main() -> None:
    """Measure and save."""
    given = arguments(__doc__, pairs=(14, 3))
    quick: bool = given.quick
    work = Workload(given.out / "work", QUICK if quick else FULL)
    # The rows come first: what making them takes is not known, and the gaps have what the others leave.
    results = [checkpoint(work, quick), cost(work, quick, given.pairs, given.budget)]
    left = given.budget.until(0.95) - time.monotonic()
    results.insert(0, gaps(work.folder, quick, max(left, LEAST_SECONDS[quick])))
    shutil.rmtree(work.folder / "gaps", ignore_errors=True)
    settings: dict[str, str | int | float | bool] = {
        "store shards": SHARDS,
        "parity": "2+1",
        "discarded steps a run": DISCARDED,
        "quick": quick,
    }
    save(
        Results(
            "recovery",
            "Losing a store shard",
            [claim for of in results for claim in of.claims],
            [table for of in results for table in of.tables],
            [plot for of in results for plot in of.plots],
            settings,
            [note for of in results for note in of.notes],
        ),
        given.out,
    )


if __name__ == "__main__":
    main()
