"""`foreload checkpoint save` and `compact` (docs/checkpoints.md)."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Literal

from foreload.base.errors import SettingError
from foreload.base.progress import progress_bar
from foreload.pipelines.schedule.kept import POSITION
from foreload.trainer.checkpoints.changed_rows import Plan
from foreload.trainer.checkpoints.contents import Checkpoint
from foreload.trainer.checkpoints.draft import check_absent
from foreload.trainer.checkpoints.files import EXACT_BITS, FAILURES_A_DAY
from foreload.trainer.checkpoints.lineage import (
    Increment,
    increment_of,
    next_bits,
    next_increment,
    of_run,
    prune,
    why_no_base,
)
from foreload.trainer.checkpoints.row_files import compact
from foreload.trainer.checkpoints.writer import save
from foreload.trainer.cluster.messages.control import (
    AskCheckpoint,
    AskCheckpointed,
    CheckpointBegun,
    CheckpointProgress,
    Refused,
    ask,
    training_status,
)
from foreload.trainer.commands.checkpoints import Saved
from foreload.trainer.errors import CheckpointError, RunError
from foreload.trainer.job.job_values import Policy
from foreload.trainer.run.directory import Run
from foreload.trainer.saved.stopped_run import StoppedRun, open_stopped
from foreload.trainer.storage import AnyFolder, place

_PAUSE_SECONDS = 0.2  # between two polls of the progress


def save_while_training(run: Run, to: str | None, folder: AnyFolder) -> Checkpoint:
    """Have a run that trains save a checkpoint, and return it when it is saved.

    Args:
        to: the folder of checkpoints, as the user gave it. If None, the run's own.
        folder: the same folder, resolved.

    Raises:
        CheckpointError: the checkpoint was not saved, or the folder cannot be read.
        MessageError: the run's answer is malformed.
    """
    before = {checkpoint.sha256 for checkpoint in of_run(folder, run.manifest)}
    try:
        answer = _asked_for(run.path, to)
    except RunError as error:
        # The run has received the request. It saves the checkpoint when it responds again.
        raise CheckpointError(
            f"{error} If it goes on, it still saves the checkpoint: `foreload checkpoint list {folder}` shows it then"
        ) from error
    if isinstance(answer, Refused):
        raise CheckpointError(f"run {run.path}: {answer.error}")
    if answer is None:
        saved = [checkpoint for checkpoint in of_run(folder, run.manifest) if checkpoint.sha256 not in before]
        if saved:
            return saved[-1]
        raise CheckpointError(f"run {run.path}: its training ended meanwhile; save a checkpoint of it now that it is stopped")
    if answer.path is None:
        raise CheckpointError(f"run {run.path}: the checkpoint was not saved: {answer.failed}")
    return Checkpoint.open(answer.path)


def _asked_for(run: Path, to: str | None) -> CheckpointProgress | Refused | None:
    """Ask a run for a checkpoint, and return the final answer.

    Returns None if training ended meanwhile.

    Raises:
        RunError: the run does not answer.
    """
    begun = ask(run, AskCheckpoint(None if to is None else str(place(to).absolute())))
    while isinstance(begun, CheckpointBegun):
        answer = ask(run, AskCheckpointed(begun.checkpoint))
        if not isinstance(answer, CheckpointProgress) or answer.done:
            return answer
        time.sleep(_PAUSE_SECONDS)
    return begun


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
    """Save a checkpoint of a run into a folder of checkpoints.

    Args:
        path: the folder of the run.
        store: the URLs of the run's servers. If None, the run's own.
        to: the folder of checkpoints. If None, the run's own.
        policy: decides whether the checkpoint is an increment, and of which base.
        bits: the bits of a weight.
        base: the name of the base in that folder. If None, the policy decides.
        keep: how many checkpoints stay in the folder. If None, all.
        failures_a_day: the expected number of failures a day, from which "auto" derives the bits.
        every: with policy "planned", the number of steps between the checkpoints to come.

    Raises:
        CheckpointError: the checkpoint cannot be saved.
        RunError: the run cannot be opened.
        SettingError: the settings do not go together.
        CacheError: a server failed.
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
                f"{flags[0]}: is for a stopped run; run {path} is being trained, as --checkpoint-policy and --checkpoint-bits say; leave it out"
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
    """Return the checkpoints to come, the last one at the end of the run's schedule.

    Raises:
        CheckpointError: the run's schedule no longer exists.
    """
    if (saved.schedule.path / POSITION).exists():
        raise CheckpointError(
            f"--policy: planned needs the steps of schedule {saved.manifest.stages[-1].path}, which no longer exists; give another policy"
        )
    return Plan.of(saved.schedule, saved.status.step, every, saved.layouts, at_end=True)


def _increment_of(path: AnyFolder, saved: StoppedRun, bits: int) -> Increment:
    base = Checkpoint.open(path)
    if why := why_no_base(base, saved.manifest, saved.status.step, bits):
        raise CheckpointError(f"--base: checkpoint {path} {why}; give another one, or leave it out")
    return increment_of(base, of_run(path.parent, saved.manifest))


def compacted(path: str, to: str) -> Saved:
    """Make a checkpoint with all rows of a checkpoint and its bases, in the folder `to`.

    Raises:
        CheckpointError: the checkpoint is damaged, or the new one cannot be saved.
    """
    checkpoint = Checkpoint.open(path)
    check_absent(place(to), checkpoint.contents.step)
    with progress_bar(checkpoint.total_bytes, "B") as bar:
        checkpoint.verify(bar.update)
    with progress_bar(checkpoint.row_count, "row") as bar:
        return Saved.of(compact(checkpoint, place(to), bar.update))
