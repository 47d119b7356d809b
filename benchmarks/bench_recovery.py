"""Losing a store shard: the gap between steps, throughput meanwhile, what parity costs, and restarting from a checkpoint instead.

python benchmarks/bench_recovery.py [--quick] [--out DIR] [--pairs N]
"""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
from pathlib import Path

from bench_step import DISCARDED, Contest, Plan, contest, step_table
from comparison import Budget, Claim, Results, Table, arguments, ratio, save, tell
from contenders import PROTECTED
from foreload.cache.client.local import LocalStores
from foreload.cache.client.store import Store
from foreload.trainer.run.timeline import Timeline
from shard_gaps import KEPT, Findings, figures, gaps
from shard_loss import Injection, ShardInjector, run_training, stopped_run
from traffic_volume import rows_moved
from workload import FULL, PARITY, QUICK, SHARDS, Workload, describe

MILLION_5 = 5_000_000
REBUILD_SECONDS = 300  # that a rebuild of 5 million rows may take
CHECKPOINT_SECONDS = 600  # between two checkpoints
RECOVERED_STEPS = 20  # whose rate tells that the training is back at its own
MOVED_STEPS = 60


def memory_bytes(work: Workload, kind: str) -> int:
    """What the servers take that hold the store's rows, without or with parity."""
    with work.stores("parity" if kind == "parity" else "rows") as stores, Store(stores.urls) as store:
        return sum(int(store.info(shard)["used_memory"]) for shard in range(SHARDS))


def cost(work: Workload, quick: bool, pairs: int, budget: Budget) -> Findings:
    """What parity costs without failures: step time, samples/s, rows moved to and from the store, memory."""
    second = work.second()
    contenders = ["floor", "one table", "foreload", PROTECTED]
    small = contest(work, second, "small", contenders, Plan(pairs, 30, 8) if quick else Plan(pairs, 120, 15, budget.until(0.25)))
    results = Findings(tables=[step_table("Small model, with and without parity", small)])
    large: Contest | None = None
    if not quick:
        large = contest(work, second, "Bagpipe's", ["floor", "foreload", PROTECTED], Plan(pairs, 12, 6, budget.until(0.37)))
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


def recovered_after(timeline: Timeline, injected: float, rate: float) -> float:
    """Seconds from an injected fault to the first step from which on the training has its rate again, over so many steps."""
    ends = timeline.ended[timeline.ended > injected]
    for first, last in zip(ends[:-RECOVERED_STEPS], ends[RECOVERED_STEPS:], strict=True):
        if timeline.throughput((first, last)) >= KEPT * rate:
            return float(first - injected)
    return float("inf")


def checkpoint(work: Workload, quick: bool) -> Findings:
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
    return Findings(claims, [table], [], [note])


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
    results.insert(0, gaps(work.folder, quick, given.budget.until(0.85)))
    shutil.rmtree(work.folder / "gaps", ignore_errors=True)
    settings: dict[str, str | int | float | bool] = {
        "store shards": SHARDS,
        "parity": "2+1",
        "discarded steps a run": DISCARDED,
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
