"""A run's checkpoints in a folder: the next increment's base, those to delete, and the best one."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from foreload.trainer.checkpoints.contents import MANIFEST, Checkpoint, bases_in, checkpoints_in, run_of
from foreload.trainer.checkpoints.draft import holding, removed
from foreload.trainer.checkpoints.files import LEAST_BITS, baseline_is_due, bits_for_job, deletable, dependents
from foreload.trainer.errors import CheckpointError, CheckpointUnreachable
from foreload.trainer.job.job_values import Policy
from foreload.trainer.run.manifest import Manifest
from foreload.trainer.storage import AnyFolder, place

if TYPE_CHECKING:
    from foreload.trainer.checkpoints.changed_rows import Plan


@dataclass(frozen=True, slots=True)
class Increment:
    """The plan for the next checkpoint: an increment of a base.

    Attributes:
        sizes: The sizes of the increments since the last checkpoint with all rows, as in
            `Contents.sizes`.
    """

    base: Checkpoint
    sizes: tuple[float, ...]

    def check_base(self) -> None:
        """Raise CheckpointError if the base, or a checkpoint that it needs, no longer exists."""
        try:
            there = Checkpoint.open(self.base.place).sha256 == self.base.sha256
        except CheckpointUnreachable:
            raise
        except CheckpointError:
            there = False
        if not there:
            raise CheckpointError(
                f"checkpoint {self.base.place}: was removed while an increment of it was being saved; the next checkpoint will not need it"
            )


def of_run(folder: AnyFolder, run: Manifest) -> list[Checkpoint]:
    """Return the checkpoints of a run in a folder that can be opened, by step.

    Raises CheckpointError if the folder cannot be read.
    """
    opened: dict[str, Checkpoint] = {}
    for path in _there(folder):
        try:
            checkpoint = Checkpoint.open(path, opened)
        # A store that does not answer says nothing about which checkpoints exist.
        except CheckpointUnreachable:
            raise
        except CheckpointError:
            continue
        opened[checkpoint.sha256] = checkpoint
    own = (checkpoint for checkpoint in opened.values() if checkpoint.contents.run.run_id == run.run_id)
    return sorted(own, key=lambda checkpoint: checkpoint.contents.step)


def newest_of_run(folder: AnyFolder, run: Manifest, after: int = -1) -> Checkpoint | None:
    """Return the checkpoint of a run's latest step in a folder, if it is later than `after`.

    If that checkpoint cannot be used, an error is raised, so that a user who can repair it does not
    lose the steps since an older one.

    Args:
        folder: The folder of checkpoints.
        run: The run's manifest.
        after: Return only a checkpoint of a later step.

    Returns:
        The checkpoint, or None if there is none of a later step than `after`.

    Raises:
        CheckpointError: The folder, or the checkpoint, cannot be used.
    """
    for path in reversed(_there(folder)):
        try:
            checkpoint = Checkpoint.open(path)
        except CheckpointError as error:
            # A checkpoint whose run is not known may be this run's.
            if run_of(path) in (None, run.run_id) and _step_of(path) > after:
                raise unusable(path, error) from error
            continue
        if checkpoint.contents.run.run_id == run.run_id:
            return checkpoint if checkpoint.contents.step > after else None
    return None


def named_or_newest(path: str) -> Checkpoint:
    """Return the checkpoint in a folder, or the newest usable one in a folder of checkpoints.

    A checkpoint is usable if it can be opened and its files exist. For a folder of checkpoints, the
    function reports on stderr which one it chose, and why it skipped newer ones.

    Raises:
        CheckpointError: The folder is neither a checkpoint nor has a usable one.
    """
    folder = place(path)
    if (folder / MANIFEST).is_file():
        return Checkpoint.open(folder)
    for candidate in reversed(_there(folder)):
        try:
            checkpoint = Checkpoint.open(candidate)
            why = "" if checkpoint.files_there else f"checkpoint {candidate}: lacks files"
        except CheckpointUnreachable:
            raise
        except CheckpointError as error:
            why = str(error)
        if not why:
            sys.stderr.write(f"foreload: the newest complete checkpoint in {path} is {candidate.name}\n")
            return checkpoint
        sys.stderr.write(f"foreload: warning: {why}\n")
    # This raises the error that the folder is no checkpoint.
    return Checkpoint.open(folder)


def unusable(path: AnyFolder, why: CheckpointError) -> CheckpointError:
    """Return the error for an unusable checkpoint from which a crashed run would go on."""
    return CheckpointError(
        f"{why}; or delete it with `foreload checkpoint delete {path}`, so that --resume goes on from the one before it"
    )


def _step_of(path: AnyFolder) -> float:
    """Return the step that the name of a checkpoint's folder gives; infinity if it gives none."""
    number = path.name.rpartition("-")[2]
    return int(number) if number.isascii() and number.isdigit() else math.inf


def _there(folder: AnyFolder) -> list[AnyFolder]:
    """Return the checkpoints in a folder, by step; none if the folder does not exist.

    Raises CheckpointError if the folder cannot be read.
    """
    try:
        return list(checkpoints_in(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(
            f"checkpoints in {folder}: cannot be read: {error.strerror}; make it readable, or choose another folder"
        ) from error


def why_no_base(base: Checkpoint, run: Manifest, step: int, bits: int) -> str:
    """Return why a checkpoint cannot be the base of the next one; "" if it can.

    Args:
        base: The checkpoint.
        run: The manifest of the run that saves the next one.
        step: The step of the next one.
        bits: Bits per weight in the next one.
    """
    contents = base.contents
    if contents.run.run_id != run.run_id:
        return f"belongs to run {contents.run.run_id}, not to this one, {run.run_id}"
    if contents.step >= step:
        return f"is from step {contents.step}; it must be from a step before {step}"
    if contents.run.inexact != run.inexact:
        # The run has gone on from a rounded checkpoint since. It trained the steps after that
        # again, so this checkpoint's rows may not be the run's.
        return "was saved before the run was restored from a rounded checkpoint"
    if base.bits < bits:
        return f"has weights of {base.bits} bits, fewer than {bits}"
    return "" if base.files_there else "lacks files"


def next_bits(
    bits: int | Literal["auto"], run: Manifest, steps: int, seconds: float, failures_a_day: float, least: int = LEAST_BITS
) -> int:
    """Return how many bits a weight of a run's next checkpoint has.

    Args:
        bits: The number, or "auto" for what the expected restores allow.
        run: The run's manifest.
        steps: Trained so far.
        seconds: The time that they took.
        least: The fewest bits that "auto" gives.
    """
    if bits != "auto":
        return bits
    return bits_for_job(steps, seconds, run.steps, failures_a_day, run.rounded_restores, least)


def next_increment(
    own: Sequence[Checkpoint], run: Manifest, step: int, policy: Policy, bits: int, plan: Plan | None = None
) -> Increment | None:
    """Return which increment a policy makes of a run's next checkpoint; None if it has all rows.

    Args:
        own: The run's checkpoints, as `of_run` returns them.
        run: The run's manifest.
        step: The step of the next checkpoint.
        bits: Bits per weight in the next checkpoint.
        plan: The coming checkpoints, this one first, for policy planned.

    Raises:
        ScheduleError: The plan's schedule cannot be read.
    """
    usable = [one for one in own if not why_no_base(one, run, step, bits)]
    if policy == "full" or not usable:
        return None
    if policy == "consecutive":
        return increment_of(usable[-1], usable)
    baselines = [one for one in usable if one.base is None]
    if not baselines:
        return None
    increment = increment_of(baselines[-1], usable)
    if policy == "intermittent" and baseline_is_due(increment.sizes):
        return None
    if plan is not None and plan.baseline_is_due(increment.base.contents.step):
        return None
    return increment


def increment_of(base: Checkpoint, usable: list[Checkpoint]) -> Increment:
    """Return the next increment of a base.

    Args:
        usable: The run's checkpoints that can be a base, by step. The last one with the same
            baseline gives the sizes so far.
    """
    baseline = base.chain[-1].sha256
    newest = [one for one in usable if one.chain[-1].sha256 == baseline]
    return Increment(base, newest[-1].contents.sizes if newest else base.contents.sizes)


def prune(folder: AnyFolder, run: Manifest, keep: int, further: Sequence[str] = ()) -> list[str]:
    """Delete the checkpoints of a run in a folder that need not be kept, and return their names.

    Kept are its `keep` newest ones, the further ones, and all that these need.

    Args:
        folder: The folder of checkpoints.
        run: The run's manifest.
        keep: How many of the newest to keep.
        further: Names of other checkpoints to keep.

    Raises:
        CheckpointError: The folder cannot be read or written to, or is locked.
    """
    with _deleting(folder, "--keep"):
        own = of_run(folder, run)
        gone = deletable({one.place.name: None if one.base is None else one.base.place.name for one in own}, keep, further)
        # Delete increments before their bases: if the process is killed in between, every
        # checkpoint that is left is complete.
        for name in reversed(gone):
            removed(folder / name)
    return gone


def delete(path: AnyFolder, with_increments: bool) -> list[AnyFolder]:
    """Delete a checkpoint, even a damaged one, and return what was deleted, itself last.

    Args:
        path: The checkpoint's folder.
        with_increments: If True, the checkpoints that need it are deleted first. If False, their
            existence is an error.

    Raises:
        CheckpointError: Others need the checkpoint, or the folder cannot be written to or is
            locked.
    """
    folder = path.resolve()
    with _deleting(folder.parent, f"checkpoint {path}"):
        needing = dependents(bases_in(folder.parent), folder.name)
        if needing and not with_increments:
            raise CheckpointError(
                f"checkpoint {path}: must not be needed by other checkpoints; {', '.join(needing)} builds on it; delete that first, or give "
                "--with-increments, or make one that does not need it with `foreload checkpoint compact`"
            )
        gone = [*(folder.parent / name for name in reversed(needing)), path]
        for one in gone:
            removed(one)
    return gone


@contextmanager
def _deleting(folder: AnyFolder, what: str) -> Iterator[None]:
    try:
        with holding(folder, what):
            yield
    except OSError as error:
        raise CheckpointError(f"{what}: cannot be deleted: {error.strerror}; make its folder writable") from error


def check_there(path: AnyFolder) -> None:
    """Raise CheckpointError if a folder is not a checkpoint; a damaged checkpoint passes."""
    if not (path / MANIFEST).is_file():
        # This raises the error that the folder is no checkpoint.
        Checkpoint.open(path)
