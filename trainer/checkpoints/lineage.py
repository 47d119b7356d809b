"""The checkpoints of a run in a folder: which one the next increment builds on, which ones may be deleted, and which had the best evaluation."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from foreload.base.codec import Count, FormError, finite, of_json, parse_json, to_stored
from foreload.base.files import canonical
from foreload.trainer.checkpoints.contents import MANIFEST, Checkpoint, bases_in, checkpoints_in, run_of
from foreload.trainer.checkpoints.draft import folder_of, holding, removed
from foreload.trainer.checkpoints.files import LEAST_BITS, baseline_is_due, bits_for_job, deletable, dependents
from foreload.trainer.errors import CheckpointError, CheckpointUnreachable
from foreload.trainer.job.job_values import Policy
from foreload.trainer.run.manifest import Manifest
from foreload.trainer.storage import AnyFolder, place, write_whole

if TYPE_CHECKING:
    from foreload.trainer.checkpoints.changed_rows import Plan


@dataclass(frozen=True, slots=True)
class Increment:
    """What the next checkpoint is to be: an increment of a base. sizes: of those since the last checkpoint with all rows, as `Contents.sizes`."""

    base: Checkpoint
    sizes: tuple[float, ...]

    def check_base(self) -> None:
        """Raise CheckpointError where the base, or what that needs, is not there any more."""
        try:
            there = Checkpoint.open(self.base.place).sha256 == self.base.sha256
        except CheckpointUnreachable:
            raise
        except CheckpointError:
            there = False
        if not there:
            raise CheckpointError(
                f"checkpoint {self.base.place}: was taken away while an increment of it was being saved; the next one will do without it"
            )


def of_run(folder: AnyFolder, run: Manifest) -> list[Checkpoint]:
    """The checkpoints of a run in a folder that can be opened, by step. Raises CheckpointError where it cannot be read."""
    opened: dict[str, Checkpoint] = {}
    for path in _there(folder):
        try:
            checkpoint = Checkpoint.open(path, opened)
        except CheckpointUnreachable:
            raise  # what is there is not known
        except CheckpointError:
            continue
        opened[checkpoint.sha256] = checkpoint
    own = (checkpoint for checkpoint in opened.values() if checkpoint.contents.run.run_id == run.run_id)
    return sorted(own, key=lambda checkpoint: checkpoint.contents.step)


def newest_of_run(folder: AnyFolder, run: Manifest, after: int = -1) -> Checkpoint | None:
    """The checkpoint of a run in a folder that is of its latest step; None if there is none after that step.

    Raises CheckpointError where it cannot be used, so that whoever can put that right does not lose the steps since an older one.
    """
    for path in reversed(_there(folder)):
        try:
            checkpoint = Checkpoint.open(path)
        except CheckpointError as error:
            if run_of(path) in (None, run.run_id) and _step_of(path) > after:
                raise unusable(path, error) from error
            continue
        if checkpoint.contents.run.run_id == run.run_id:
            return checkpoint if checkpoint.contents.step > after else None
    return None


def named_or_newest(path: str) -> Checkpoint:
    """The checkpoint in a folder, or the newest one in a folder of checkpoints that can be opened and has its files; says which on stderr.

    Raises CheckpointError where there is neither.
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
    return Checkpoint.open(folder)  # says that it is none


def unusable(path: AnyFolder, why: CheckpointError) -> CheckpointError:
    """The error about a checkpoint from which a run that was broken off would go on."""
    return CheckpointError(
        f"{why}; or have --resume go on from what there is before it, with `foreload checkpoint delete {path}`"
    )


def _step_of(path: AnyFolder) -> float:
    """The step that the name of a checkpoint's folder gives; beyond all others where it gives none."""
    number = path.name.rpartition("-")[2]
    return int(number) if number.isascii() and number.isdigit() else math.inf


def _there(folder: AnyFolder) -> list[AnyFolder]:
    """The checkpoints in a folder, by step. Raises CheckpointError where it cannot be read."""
    try:
        return list(checkpoints_in(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(
            f"checkpoints in {folder}: cannot be read: {error.strerror}; make that readable, or choose another folder"
        ) from error


def why_no_base(base: Checkpoint, run: Manifest, step: int, bits: int) -> str:
    """Why a checkpoint cannot be the base of one of a run after a step, whose weights are to have so many bits; "" where it can."""
    contents = base.contents
    if contents.run.run_id != run.run_id:
        return f"is of run {contents.run.run_id}, not of this one, {run.run_id}"
    if contents.step >= step:
        return f"is of step {contents.step}, and must be of one before {step}"
    if contents.run.inexact != run.inexact:
        # What was trained after the checkpoint that the run went on from is not what it is now.
        return "was saved before the run went on from a rounded checkpoint"
    if base.bits < bits:
        return f"has weights of {base.bits} bits, fewer than {bits}"
    return "" if base.files_there else "lacks files"


def next_bits(
    bits: int | Literal["auto"], run: Manifest, steps: int, seconds: float, failures_a_day: float, least: int = LEAST_BITS
) -> int:
    """How many bits a weight of the next checkpoint of a run has: `bits`, or with "auto" what the restores to expect allow, `least` at least.

    steps, seconds: trained so far, and the time that took.
    """
    if bits != "auto":
        return bits
    return bits_for_job(steps, seconds, run.steps, failures_a_day, run.rounded_restores, least)


def next_increment(
    own: Sequence[Checkpoint], run: Manifest, step: int, policy: Policy, bits: int, plan: Plan | None = None
) -> Increment | None:
    """What a policy makes of the next checkpoint of a run, after a step; None: one with all rows.

    own: those that it has, as `of_run` gives them; plan: of policy planned, with this step first. With a plan, raises ScheduleError.
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
    """The next increment of a base. usable: checkpoints of the run by step, of which the last one with the same baseline gives the sizes so far."""
    baseline = base.chain[-1].sha256
    newest = [one for one in usable if one.chain[-1].sha256 == baseline]
    return Increment(base, newest[-1].contents.sizes if newest else base.contents.sizes)


def prune(folder: AnyFolder, run: Manifest, keep: int, further: Sequence[str] = ()) -> list[str]:
    """Delete the checkpoints of a run in a folder that are neither among its `keep` newest, or the further ones, nor needed by one of these; returns
    their names.

    Raises CheckpointError.
    """
    with _deleting(folder, "--keep"):
        own = of_run(folder, run)
        gone = deletable({one.place.name: None if one.base is None else one.base.place.name for one in own}, keep, further)
        # Those that need others first: whoever is killed in between leaves none that is not whole.
        for name in reversed(gone):
            removed(folder / name)
    return gone


def delete(path: AnyFolder, with_increments: bool) -> list[AnyFolder]:
    """Delete a checkpoint, also a damaged one; and those that need it, or refuse to where there are any. Returns what was deleted, itself last.

    Raises CheckpointError.
    """
    folder = path.resolve()
    with _deleting(folder.parent, f"checkpoint {path}"):
        needing = dependents(bases_in(folder.parent), folder.name)
        if needing and not with_increments:
            raise CheckpointError(
                f"checkpoint {path}: must not be needed by others; {', '.join(needing)} is made of it; delete that first, or give "
                "--with-increments, or make one that needs none of it with `foreload checkpoint compact`"
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
    """Raise CheckpointError where a folder is no checkpoint; a damaged one is one."""
    if not (path / MANIFEST).is_file():
        Checkpoint.open(path)  # says that it is none


BEST = "best.json"  # in the folder of checkpoints


@dataclass(frozen=True, slots=True)
class Best:
    """The best evaluation of a run so far: metric and value, after a training step. run: the run's id."""

    run: str
    metric: str
    value: Annotated[float, finite]
    step: Count

    def write(self, folder: AnyFolder) -> None:
        """Note it in a folder of checkpoints, where there is one of its step, durably. Raises OSError and CheckpointUnreachable."""
        write_whole(folder / BEST, canonical(to_stored(self)))


def best_in(folder: AnyFolder, run_id: str | None = None) -> Best | None:
    """Return what is noted in a folder of checkpoints, of a run if one is named.

    Returns None if nothing is, if what it names is not there, or if the file is damaged: the next best evaluation then replaces it.
    """
    try:
        best = _read(folder)
    except (OSError, FormError):
        return None
    return best if run_id in (None, best.run) and (folder / folder_of(best.step) / MANIFEST).is_file() else None


def _read(folder: AnyFolder) -> Best:
    """Raises OSError and FormError."""
    return of_json(parse_json((folder / BEST).read_bytes()), Best)


def best_checkpoint(folder: AnyFolder) -> AnyFolder:
    """The folder of the best checkpoint in a folder of checkpoints. Raises CheckpointError where none is noted, or the note is damaged."""
    try:
        _read(folder)
    except OSError:
        pass
    except FormError as error:
        raise CheckpointError(
            f"--best: {folder / BEST} is damaged: {error}; name a checkpoint, or delete the file: training with --keep-best writes it anew"
        ) from error
    best = best_in(folder)
    if best is None:
        raise CheckpointError(
            f"--best: no best checkpoint is noted in {folder}; train with --keep-best METRIC, on a schedule with evaluation"
        )
    return folder / folder_of(best.step)
