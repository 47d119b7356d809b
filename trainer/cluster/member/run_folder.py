"""What a trainer reads from the run's folder and writes to it.

A trainer on a host without the folder does both over the rendezvous store.
"""

from __future__ import annotations

import sys
import tempfile
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from foreload.base.errors import ForeloadError
from foreload.cache.client.store import Store
from foreload.cache.errors import (
    CacheError,
    CommandRefused,
    ForeignKey,
    ShardsRefuse,
    StoreAuth,
    StoreError,
    StoreFull,
    StoreTls,
    StoreUnavailable,
)
from foreload.cache.protocol.shards.namespace import are_of
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.assembly.assembly import DenseModel
from foreload.trainer.assembly.dense_file import dense_bytes, load_dense, load_dense_bytes, save_dense
from foreload.trainer.cluster.member.hosted_log import TermLog
from foreload.trainer.cluster.member.joined_trainer import JoinedTrainer
from foreload.trainer.cluster.messages.facts import DenseAtEnd, DenseAtStart, KeptFileElsewhere, Term
from foreload.trainer.cluster.messages.rendezvous import Rendezvous
from foreload.trainer.cluster.messages.trainers import RunFacts
from foreload.trainer.errors import DenseDiverged, PeerLost, RunError, TrainerError
from foreload.trainer.run.directory import Run
from foreload.trainer.run.model_code import exit_error
from foreload.trainer.run.resume import check_same
from foreload.trainer.saved.kept_lanes import DENSE, KeptLane, folder_of, write_lane
from foreload.trainer.saved.kept_manifest import KeptFile
from foreload.trainer.step.hosted_lanes import HostedLanes
from foreload.trainer.step.program import Trainer

_Kept = TypeVar("_Kept")


class RunFolder(ABC):
    """One trainer's access to the run's folder.

    Attributes:
        identity: Identity of the run, as in the manifest.
    """

    identity: dict[str, Any]

    @abstractmethod
    def check_schedule(self, schedule: Schedule, resumes: bool) -> None:
        """Check that a schedule is the one to train.

        Args:
            resumes: The run is resumed, so the schedule must also have the segments that were
                trained before.

        Raises:
            RunError: It is a different schedule.
        """

    @abstractmethod
    def check_stores(self, store: Store, namespace: str) -> None:
        """Check that the servers that answer are the run's shards, in the right order.

        Raises:
            StoreError: A server is not the shard that its place says.
        """

    @abstractmethod
    def load_dense(self, dense: DenseModel, step: int) -> None:
        """Load the dense part of the last clean stop, which was after `step`, into `dense`.

        Raises:
            RunError: The dense part cannot be read, or is of another step or another model.
        """

    @abstractmethod
    def save_dense(self, dense: DenseModel, step: int, term: int, written: Callable[[], None]) -> None:
        """Save the dense part after `step` for the run.

        Args:
            written: Called before the new dense part replaces the former one.

        Raises:
            RunError: The dense part cannot be written.
        """

    @abstractmethod
    def keep(self, write: Callable[[Path], _Kept], step: int, term: int, trainer: int) -> _Kept:
        """Write files that the run is to keep (`saved.kept_lanes`).

        Args:
            write: Writes the files below a run's folder, given as its argument.
            step: Training step after which the files are.
            term: Number of the current term.
            trainer: Number of this trainer.

        Returns:
            What `write` returns.

        Raises:
            OSError: A file cannot be written.
        """


class OwnFolder(RunFolder):
    """Access to a run's folder that exists on this host."""

    def __init__(self, path: Path) -> None:
        self._run = Run.open(path)
        self.identity = self._run.manifest.identity

    def check_schedule(self, schedule: Schedule, resumes: bool) -> None:
        """See RunFolder. Checks only a resumed run: the launcher has opened the same schedule."""
        if resumes:
            check_same(self._run.manifest.stages[-1], schedule)

    def check_stores(self, store: Store, namespace: str) -> None:
        """See RunFolder. Does nothing: the launcher has claimed the same servers."""

    def load_dense(self, dense: DenseModel, step: int) -> None:
        """See RunFolder."""
        load_dense(self._run.dense(step), dense.module, dense.optimizer, step)

    def save_dense(self, dense: DenseModel, step: int, term: int, written: Callable[[], None]) -> None:
        """See RunFolder."""
        save_dense(self._run.dense(step), dense.module, dense.optimizer, step, written)

    def keep(self, write: Callable[[Path], _Kept], step: int, term: int, trainer: int) -> _Kept:
        """See RunFolder."""
        return write(self._run.path)


class FolderElsewhere(RunFolder):
    """Access, over the rendezvous store, to a run's folder on another host."""

    def __init__(self, rendezvous: Rendezvous, facts: RunFacts) -> None:
        self._rendezvous, self._facts = rendezvous, facts
        self.identity = facts.identity

    def check_schedule(self, schedule: Schedule, resumes: bool) -> None:
        """See RunFolder."""
        stage = self._facts.stage
        # The checksum of a schedule is known only once it is complete; until then, only the
        # checksum of its header can be compared.
        same = schedule.identity == stage.identity
        if same and schedule.complete and stage.checksum is not None:
            same = schedule.checksum == stage.checksum
        if not same:
            raise RunError(
                f"schedule {schedule.path}: is not the one that the job trains, {stage.path} on the coordinator's host; give a copy of that "
                "with --schedule"
            )
        if resumes:
            check_same(stage, schedule)

    def check_stores(self, store: Store, namespace: str) -> None:
        """See RunFolder."""
        for shard, is_it in are_of(store, namespace, self.identity).items():
            if not is_it:
                raise StoreError(
                    f"store {store.urls[shard]}: is not shard {shard} of the job's run; give --store the servers that the coordinator has, in the "
                    "same order, or leave it out"
                )

    def load_dense(self, dense: DenseModel, step: int) -> None:
        """See RunFolder."""
        fact, data = self._rendezvous.read_bytes(DenseAtStart)
        if fact.step != step:
            raise RunError(f"dense part: must be from step {step}; it is from step {fact.step}; restore the run's folder")
        load_dense_bytes(data, dense.module, dense.optimizer)

    def save_dense(self, dense: DenseModel, step: int, term: int, written: Callable[[], None]) -> None:
        """See RunFolder. Publishes the dense part, which the coordinator writes to the folder."""
        data = dense_bytes(dense.module, dense.optimizer, step)
        written()
        self._rendezvous.publish_bytes(DenseAtEnd.of(data, step), data, term)

    def keep(self, write: Callable[[Path], _Kept], step: int, term: int, trainer: int) -> _Kept:
        """See RunFolder. Publishes the files, which the coordinator writes to the folder."""
        with tempfile.TemporaryDirectory() as folder:
            kept = write(Path(folder))
            for count, path in enumerate(sorted(folder_of(Path(folder)).glob("*"))):
                data = path.read_bytes()
                self._rendezvous.publish_bytes(KeptFileElsewhere.of(data, step, name=path.name), data, term, trainer, count)
        return kept


def open_folder(joined: JoinedTrainer) -> RunFolder:
    """Open a trainer's access to the run's folder, whether this host has it or not.

    Raises RunError.
    """
    hosts = joined.spec.hosts
    return OwnFolder(joined.run) if joined.has_run or hosts is None else FolderElsewhere(joined.rendezvous, hosts)


# Errors after which the servers may still have every row that they had.
_ROWS_STAY = (StoreUnavailable, StoreFull, StoreAuth, StoreTls, CommandRefused, ShardsRefuse)


class CannotGoOn(Exception):
    """A trainer failed, but all trainers' rows are as after a trained step, and can be kept."""


def cannot_go_on(error: Exception | SystemExit, trainer: Trainer, number: int) -> CannotGoOn | None:
    """Turn an error of a trainer's steps into CannotGoOn, if the run can be kept after it.

    Args:
        error: The error that ended the trainer's steps.
        trainer: The trainer that ran them.
        number: Number of the trainer, for messages.

    Returns:
        None if the cause is another trainer or lost rows, or if a step is half applied.
    """
    # Without commits no step can be undone, so a half applied step cannot be kept.
    if isinstance(error, PeerLost | DenseDiverged) or (trainer.commits is None and trainer.applying):
        return None
    if isinstance(error, CacheError):
        return CannotGoOn(str(error)) if rows_stay(error) else None
    if isinstance(error, SystemExit):
        error = exit_error(f"trainer {number}", error)
    if isinstance(error, ForeloadError):
        return CannotGoOn(str(error))
    # foreload's own errors are messages for the user. Any other error needs its traceback.
    traceback.print_exception(error, file=sys.stderr)
    return CannotGoOn(f"trainer {number}: {type(error).__name__}: {error} (see above)")


def rows_stay(error: CacheError) -> bool:
    """Return whether the servers may still have every row that they had before this error."""
    return isinstance(error, _ROWS_STAY) and not isinstance(error, ForeignKey)


def keep(
    folder: RunFolder,
    log: TermLog,
    term: Term,
    number: int,
    hosted: HostedLanes,
    trainer: Trainer | None,
    last_step: int,
    dense: DenseModel,
) -> tuple[KeptFile, ...]:
    """Write the rows that the store lacks to files that the run keeps.

    The trainer does this for the lanes that the term gives it, of which it is the owner or holds a
    replica. The leader also writes the dense part.

    Args:
        folder: Access to the run's folder.
        log: Batch log of this trainer.
        term: The last term, in which no step is trained.
        number: Number of this trainer.
        hosted: Lanes that this trainer hosts.
        trainer: What ran the last steps, up to `last_step`. None if this trainer has just joined
            and holds no state.
        last_step: Last training step applied here.
        dense: Dense part after the committed step.

    Returns:
        The files written, one for each lane.

    Raises:
        TrainerError: Steps cannot be undone, and the trainers stopped after different steps.
        OSError: A file cannot be written.
    """
    commits = None if trainer is None else trainer.commits
    if trainer is not None and commits is None and last_step != term.committed:
        raise TrainerError(f"{term.keeps}; and the trainers are at different steps, so their rows cannot be kept")

    def kept(lane: int) -> KeptLane:
        record = log.record_to_keep(lane)
        if lane in hosted.partitions:
            left = hosted.traffic.unwritten(lane)
            return KeptLane.of(
                hosted.partitions[lane], hosted.given_after(lane, term.committed), left.owed, left.released, record
            )
        # The term gives this trainer a lane whose owner is gone, of which it holds a replica.
        assert commits is not None
        copy = commits.copies[lane]
        return KeptLane.of(copy.partition, copy.given, sorted(copy.owed.items()), (copy.released, copy.batch), record)

    def write(run: Path) -> tuple[KeptFile, ...]:
        files = tuple(write_lane(run, lane, kept(lane)) for lane in term.lanes_of(number))
        if term.leader == number:
            save_dense(folder_of(run) / DENSE, dense.module, dense.optimizer, term.committed)
        return files

    return folder.keep(write, term.committed, term.number, number)
