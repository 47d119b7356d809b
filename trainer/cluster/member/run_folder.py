"""What a trainer reads from the run's folder and leaves there, directly or, on another host, over the rendezvous store."""

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
    """Of one trainer. identity: of the run, as the manifest has it."""

    identity: dict[str, Any]

    @abstractmethod
    def check_schedule(self, schedule: Schedule, resumes: bool) -> None:
        """Raise RunError unless a schedule is the one to be trained, with the segments that were trained on already where the run resumes."""

    @abstractmethod
    def check_stores(self, store: Store, namespace: str) -> None:
        """Raise StoreError unless the servers that answer are the run's shards, each in its place."""

    @abstractmethod
    def load_dense(self, dense: DenseModel, step: int) -> None:
        """Put the dense part of the last clean stop, after `step`, in its place. Raises RunError."""

    @abstractmethod
    def save_dense(self, dense: DenseModel, step: int, term: int, written: Callable[[], None]) -> None:
        """Leave the dense part after `step` for the run. written: called before it takes the place of the one before. Raises RunError."""

    @abstractmethod
    def keep(self, write: Callable[[Path], _Kept], step: int, term: int, trainer: int) -> _Kept:
        """Have files written below a run's folder (`kept_lanes`), and leave them for the run; returns what `write` does. Raises OSError."""


class OwnFolder(RunFolder):
    """The folder is here."""

    def __init__(self, path: Path) -> None:
        self._run = Run.open(path)
        self.identity = self._run.manifest.identity

    def check_schedule(self, schedule: Schedule, resumes: bool) -> None:
        """See RunFolder. Its launcher has opened the same schedule."""
        if resumes:
            check_same(self._run.manifest.stages[-1], schedule)

    def check_stores(self, store: Store, namespace: str) -> None:
        """See RunFolder. Its launcher has claimed the same servers."""

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
    """The folder is on another host."""

    def __init__(self, rendezvous: Rendezvous, facts: RunFacts) -> None:
        self._rendezvous, self._facts = rendezvous, facts
        self.identity = facts.identity

    def check_schedule(self, schedule: Schedule, resumes: bool) -> None:
        """See RunFolder."""
        stage = self._facts.stage
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
            raise RunError(f"dense part: must be of step {step}, is of {fact.step}; restore the run's folder")
        load_dense_bytes(data, dense.module, dense.optimizer)

    def save_dense(self, dense: DenseModel, step: int, term: int, written: Callable[[], None]) -> None:
        """See RunFolder: the coordinator writes it."""
        data = dense_bytes(dense.module, dense.optimizer, step)
        written()
        self._rendezvous.publish_bytes(DenseAtEnd.of(data, step), data, term)

    def keep(self, write: Callable[[Path], _Kept], step: int, term: int, trainer: int) -> _Kept:
        """See RunFolder: the coordinator writes them."""
        with tempfile.TemporaryDirectory() as folder:
            kept = write(Path(folder))
            for count, path in enumerate(sorted(folder_of(Path(folder)).glob("*"))):
                data = path.read_bytes()
                self._rendezvous.publish_bytes(KeptFileElsewhere.of(data, step, name=path.name), data, term, trainer, count)
        return kept


def open_folder(joined: JoinedTrainer) -> RunFolder:
    """A run's folder, as a trainer has it that is on a host where it is here, or is not. Raises RunError."""
    hosts = joined.spec.hosts
    return OwnFolder(joined.run) if joined.has_run or hosts is None else FolderElsewhere(joined.rendezvous, hosts)


_ROWS_STAY = (StoreUnavailable, StoreFull, StoreAuth, StoreTls, CommandRefused, ShardsRefuse)


class CannotGoOn(Exception):
    """A trainer failed, and its rows, and those of the others, are as after a step that was trained."""


def cannot_go_on(error: Exception | SystemExit, trainer: Trainer, number: int) -> CannotGoOn | None:
    """What becomes of an error that a trainer's steps ended with; None where another trainer, or rows that are lost, are why, or a step is half done.

    number: the trainer's, for messages.
    """
    if isinstance(error, PeerLost | DenseDiverged) or (trainer.commits is None and trainer.applying):
        return None
    if isinstance(error, CacheError):
        return CannotGoOn(str(error)) if rows_stay(error) else None
    if isinstance(error, SystemExit):
        error = exit_error(f"trainer {number}", error)
    if isinstance(error, ForeloadError):
        return CannotGoOn(str(error))
    traceback.print_exception(error, file=sys.stderr)
    return CannotGoOn(f"trainer {number}: {type(error).__name__}: {error} (see above)")


def rows_stay(error: CacheError) -> bool:
    """Whether the servers may have every row that they had."""
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
    """Leave what the store lacks of the lanes that a term gives a trainer, hosted or copied here, for the run; who leads, the dense part, too.

    trainer: who ran the last steps, up to last_step; None where this one had joined, and has nothing. Raises TrainerError, OSError.
    """
    commits = None if trainer is None else trainer.commits
    if trainer is not None and commits is None and last_step != term.committed:
        raise TrainerError(f"{term.keeps}; and the trainers have come to different steps, so what they have cannot be kept")

    def kept(lane: int) -> KeptLane:
        record = log.record_to_keep(lane)
        if lane in hosted.partitions:
            left = hosted.traffic.unwritten(lane)
            return KeptLane.of(
                hosted.partitions[lane], hosted.given_after(lane, term.committed), left.owed, left.released, record
            )
        assert commits is not None
        copy = commits.copies[lane]
        return KeptLane.of(copy.partition, copy.given, sorted(copy.owed.items()), (copy.released, copy.batch), record)

    def write(run: Path) -> tuple[KeptFile, ...]:
        files = tuple(write_lane(run, lane, kept(lane)) for lane in term.lanes_of(number))
        if term.leader == number:
            save_dense(folder_of(run) / DENSE, dense.module, dense.optimizer, term.committed)
        return files

    return folder.keep(write, term.committed, term.number, number)
