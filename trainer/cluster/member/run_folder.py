"""What a trainer takes from the run's folder, and leaves there: it has that folder, or gets and gives the same over the rendezvous store."""

from __future__ import annotations

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from foreload.cache.client.store import Store
from foreload.cache.errors import StoreError
from foreload.cache.protocol.shards.namespace import are_of
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.assembly.assembly import DenseModel
from foreload.trainer.assembly.dense_file import dense_bytes, load_dense, load_dense_bytes, save_dense
from foreload.trainer.cluster.member.joined_trainer import JoinedTrainer
from foreload.trainer.cluster.messages.facts import DenseAtEnd, DenseAtStart, KeptFileElsewhere
from foreload.trainer.cluster.messages.rendezvous import Rendezvous
from foreload.trainer.cluster.messages.trainers import RunFacts
from foreload.trainer.errors import RunError
from foreload.trainer.run.directory import Run
from foreload.trainer.run.resume import check_same
from foreload.trainer.saved.kept_lanes import folder_of

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
