"""`foreload checkpoint save` and `compact` (docs/checkpoints.md)."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from foreload.base.errors import SettingError
from foreload.pipelines.schedule.kept import POSITION
from foreload.trainer.checkpoints.chain import compact
from foreload.trainer.checkpoints.changed_rows import Plan
from foreload.trainer.checkpoints.draft import check_absent
from foreload.trainer.checkpoints.format import Checkpoint
from foreload.trainer.checkpoints.lineage import (
    Increment,
    increment_of,
    next_bits,
    next_increment,
    of_run,
    prune,
    why_no_base,
)
from foreload.trainer.checkpoints.policies import EXACT_BITS, FAILURES_A_DAY
from foreload.trainer.checkpoints.writer import save
from foreload.trainer.cluster.messages.control import training_status
from foreload.trainer.commands.checkpoints import Saved
from foreload.trainer.commands.live_checkpoint import save_while_training
from foreload.trainer.errors import CheckpointError
from foreload.trainer.job.job_values import Policy
from foreload.trainer.run.directory import Run
from foreload.trainer.run.progress_bar import progress_bar
from foreload.trainer.saved.stopped_run import StoppedRun, open_stopped
from foreload.trainer.storage import AnyFolder, place


def saved(
    path: str,
    store: str | None,
    to: str | None,
    policy: Policy = "intermittent",
    bits: int | Literal["auto"] = 32,
    base: str | None = None,
    keep: int | None = None,
    failures_a_day: float = FAILURES_A_DAY,
    every: int | None = None,
) -> Saved:
    """Save a checkpoint of a run into a folder of checkpoints, that of the run by default.

    base: the name of the one there of which it is to be an increment; None: as the policy says. keep: how many stay; None: all. every: with policy
    planned, how many steps lie between those to come. Raises CheckpointError, RunError, SettingError and CacheError.
    """
    if (policy == "planned") != (every is not None):
        raise SettingError("--every: goes with --policy planned, and that with it: give both, or neither")
    run = Run.open(path)
    folder = run.checkpoint_folders()[0] if to is None else place(to)
    if training_status(run.path) is not None:
        given = {
            "--policy": policy != "intermittent",
            "--bits": bits != EXACT_BITS,
            "--base": base is not None,
            "--keep": keep is not None,
        }
        if flags := [flag for flag, is_given in given.items() if is_given]:
            raise SettingError(
                f"{flags[0]}: is for a run that rests; run {path} is being trained, as --checkpoint-policy and --checkpoint-bits say; leave it out"
            )
        return replace(Saved.of(save_while_training(run, to, folder)), deleted=())
    step = run.saved_status().step
    check_absent(folder, step)
    with open_stopped(path, store) as opened, progress_bar(0, "row") as bar:
        totals = opened.status.totals
        width = next_bits(bits, opened.manifest, int(totals.get("steps", 0)), totals.get("seconds", 0.0), failures_a_day)
        plan = None if every is None else _plan(opened, every)
        increment = next_increment(of_run(folder, run.manifest), run.manifest, step, policy, width, plan)
        if base is not None:
            increment = _increment_of(folder / base, opened, width)

        def show(rows: int, total: int) -> None:
            bar.total = total
            bar.update(rows)

        about = Saved.of(save(opened, folder, show, width, increment))
    return replace(about, deleted=() if keep is None else tuple(prune(folder, run.manifest, keep)))


def _plan(saved: StoppedRun, every: int) -> Plan:
    """The checkpoints to come, up to the end of the run's schedule, where its last one is."""
    if (saved.schedule.path / POSITION).exists():
        raise CheckpointError(
            f"--policy: planned needs the steps of schedule {saved.manifest.stages[-1].path}, which is not there any more; give another policy"
        )
    return Plan.of(saved.schedule, saved.status.step, every, saved.layouts, at_end=True)


def _increment_of(path: AnyFolder, saved: StoppedRun, bits: int) -> Increment:
    base = Checkpoint.open(path)
    if why := why_no_base(base, saved.manifest, saved.status.step, bits):
        raise CheckpointError(f"--base: checkpoint {path} {why}; give another one, or leave it out")
    return increment_of(base, of_run(path.parent, saved.manifest))


def compacted(path: str, to: str) -> Saved:
    """Make a checkpoint that needs no other, in a folder of checkpoints. Raises CheckpointError."""
    checkpoint = Checkpoint.open(path)
    check_absent(place(to), checkpoint.contents.step)
    with progress_bar(checkpoint.total_bytes, "B") as bar:
        checkpoint.verify(bar.update)
    with progress_bar(checkpoint.row_count, "row") as bar:
        return Saved.of(compact(checkpoint, place(to), bar.update))
