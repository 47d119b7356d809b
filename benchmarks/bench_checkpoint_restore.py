"""Restoring checkpoints to a store with parity: a chain of ten increments, compacted, and beside one with all rows; beside the servers' own loading.

python benchmarks/bench_checkpoint_restore.py [--quick] [--pairs N] [--out DIR]
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median

from comparison import Cell, Claim, Results, Table, alternate, arguments, ratio, save, tell
from foreload.cache.client.local import LocalStores
from foreload.cache.client.store import Store
from foreload.cache.parity.placement import Placement
from foreload.cache.protocol.ownership.batch_log import FileLog
from foreload.cache.protocol.ownership.ownership import Ownership
from foreload.cache.protocol.shards.namespace import claim
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.checkpoints import writer
from foreload.trainer.checkpoints.changed_rows import increment_sizes
from foreload.trainer.checkpoints.contents import Checkpoint
from foreload.trainer.checkpoints.files import EXACT_BITS
from foreload.trainer.checkpoints.lineage import next_increment, of_run
from foreload.trainer.checkpoints.restoring import restore_rows
from foreload.trainer.checkpoints.row_files import compact
from saved_runs import stopped_after
from workload import BATCH, DIM, prepare_first_steps

STEPS = (4800, 240)  # trained, in full and with --quick
INCREMENTS = 10
INCREMENT = 0.25  # of the model, the last one
SHARDS, PARITY = 3, 1
NAMESPACE = "restored"
ALL, CHAIN, COMPACTED = "all rows", f"chain of {INCREMENTS} increments", "compacted"


def choose_steps(schedule: Schedule) -> list[int]:
    """After which steps checkpoints are saved: at even intervals up to the last but one step, the last increment nearest to INCREMENT."""
    last = schedule.header.end_step - 2
    tables = [1] * len(schedule.header.features.tables)

    def increment(interval: int) -> float:
        full, increments = increment_sizes(schedule, [last - interval, last], tables)
        return float(increments[0, 1] / full[1])

    low, high = 1, (last - 1) // (INCREMENTS + 1)
    while low < high:  # the longer the interval, the more changes in it
        middle = (low + high) // 2
        low, high = (middle + 1, high) if increment(middle) < INCREMENT else (low, middle)
    return [last - (INCREMENTS - number) * low for number in range(INCREMENTS + 1)]


def train_and_save(schedule: Schedule, folder: Path) -> tuple[Checkpoint, Checkpoint]:
    """One training, stopped and resumed; returns its end as the last of a chain, and with all rows."""
    for saved in stopped_after(schedule.path, choose_steps(schedule), folder / "run"):
        own = of_run(folder / "chain", saved.manifest)
        increment = next_increment(own, saved.manifest, saved.status.step, "consecutive", EXACT_BITS)
        made = writer.save(saved, folder / "chain", lambda rows, total: None, increment=increment)
        part = sum(file.rows for file in made.contents.rows) / made.row_count
        tell(
            f"saved after step {made.contents.step}: {made.row_count:,} rows, {part:.3f} of them, {made.own_bytes / 2**20:,.0f} MiB"
        )
        if len(made.chain) > INCREMENTS:
            full = writer.save(saved, folder / "full", lambda rows, total: None)
    return made, full


def restore(checkpoint: Checkpoint, stores: LocalStores, log: Path) -> dict[str, float]:
    """Seconds of bringing a checkpoint to empty servers, comparison with its checksums included, and of that part."""
    shutil.rmtree(log, ignore_errors=True)
    begun = time.perf_counter()
    checkpoint.verify()
    verified = time.perf_counter()
    with Store(stores.urls, timedelta(seconds=60)) as store:
        claim(store, NAMESPACE, {"run": "r", "lanes": 1}, "new")
        placement = Placement.spread(SHARDS, SHARDS - PARITY, PARITY)
        restore_rows(checkpoint, store, placement, NAMESPACE, FileLog(log), Ownership(1), lambda rows: None)
    return {"verify": verified - begun, "restore": time.perf_counter() - begun}


def on_new_servers(checkpoint: Checkpoint, folder: Path, loaded: bool = False) -> dict[str, float]:
    """As `restore`; loaded: and then how long the same servers take to load the same rows from what they save of them, all at once."""
    stores = LocalStores(SHARDS, folder / "servers")
    stores.start()
    try:
        told = restore(checkpoint, stores, folder / "log")
        if loaded:
            stores.stop(save=True)
            begun = time.perf_counter()
            stores.start()
            told["load"] = time.perf_counter() - begun
    finally:
        stores.stop(save=False)
        shutil.rmtree(folder / "servers")
    return told


def measure(given: argparse.Namespace, folder: Path) -> Results:
    """Train, save, compact, and restore each in turn."""
    steps = STEPS[given.quick]
    tell(f"preparing and training {steps} steps, with {INCREMENTS + 1} checkpoints")
    schedule = prepare_first_steps(folder / "schedule", steps)
    chain, full = train_and_save(schedule, folder)
    begun = time.perf_counter()
    compacted = compact(chain, folder / "compacted")
    compacting = time.perf_counter() - begun
    kinds = {ALL: full, CHAIN: chain, COMPACTED: compacted}
    told = alternate(
        {name: partial(on_new_servers, checkpoint, folder, name == ALL) for name, checkpoint in kinds.items()},
        given.pairs,
        least=1,
    )

    def seconds(name: str, what: str = "restore") -> list[float]:
        return [one[what] for one in told[name]]

    against_all = {name: ratio(seconds(name), seconds(ALL)) for name in (CHAIN, COMPACTED)}
    loading = seconds(ALL, "load")
    claims = [
        Claim(f"restore of a {CHAIN}", f"of {ALL}", "at most 1.5 x", against_all[CHAIN], most=1.5),
        Claim(f"restore of the chain, {COMPACTED}", f"of {ALL}", "at most 1.05 x", against_all[COMPACTED], most=1.05),
        Claim(f"restore of {ALL}", "the servers' own loading from RDB", "at most 2 x", ratio(seconds(ALL), loading), most=2.0),
    ]
    rows: list[list[Cell]] = []
    for name, checkpoint in kinds.items():
        taken = median(seconds(name))
        size = checkpoint.total_bytes / 2**20
        rows.append(
            [name, checkpoint.row_count, size, median(seconds(name, "verify")), taken, checkpoint.row_count / taken / 1e6]
        )
    rows.append(["loading from RDB", full.row_count, None, None, median(loading), full.row_count / median(loading) / 1e6])
    table = Table("Restoring", ["what", "rows", "MiB", "verified (s)", "in all (s)", "million rows/s"], rows)
    note = (
        f"26 synthetic tables of the Kaggle sizes, batch {BATCH:,}, dim {DIM}, row-wise Adagrad, one lane; {SHARDS} servers of this machine, "
        f"2+1, new and empty each time; the last increment has {INCREMENT:.0%} of all rows. Compacting took {compacting:.1f} s."
    )
    settings = {"steps": steps, "pairs": given.pairs}
    return Results("checkpoint_restore", "Restoring checkpoints", claims, [table], [], settings, [note])


def main() -> None:
    """Measure and save."""
    given = arguments(__doc__, pairs=(3, 1))
    with tempfile.TemporaryDirectory(dir=given.out, prefix="checkpoint-restore-") as name:
        results = measure(given, Path(name).absolute())
    save(results, given.out)


if __name__ == "__main__":
    main()
