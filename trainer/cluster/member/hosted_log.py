"""A trainer's batch log from term to term: in the run's folder, or in the memory of other trainers.

The second form is for trainers on several hosts (`cache.protocol.ownership.batch_log.CopiedLog`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from pathlib import Path

from foreload.base.errors import SettingError
from foreload.cache.protocol.ownership.batch_log import (
    BatchLog,
    CopiedLog,
    FileLog,
    HeldRecords,
    Holders,
    LoggedBatch,
    LogService,
)
from foreload.trainer.cluster.member.joined_trainer import JoinedTrainer
from foreload.trainer.cluster.messages.facts import Term, TrainerPlace
from foreload.trainer.cluster.processes.starting import OnHost
from foreload.trainer.run.directory import LOG


class TermLog(ABC):
    """One trainer's batch log.

    Only the trainer's main thread uses it, except where a method says otherwise.

    Attributes:
        log: The log to which the traffic writes its batches.
        trainer: Number of the trainer.
    """

    log: BatchLog
    trainer: int

    @abstractmethod
    def begin_term(self, term: Term, hosted: Collection[int]) -> None:
        """Keep new log records where the new term says.

        Args:
            term: The term that begins.
            hosted: Lanes hosted here when the term begins, including those that the term gives to
                other trainers.

        Raises:
            CopyLost: A trainer that must hold a lane's records does not answer.
            PeerLost: The rendezvous store does not answer.
        """

    @abstractmethod
    def interrupt(self, why: str) -> None:
        """Stop every wait for other trainers, because the term is over. Any thread may call this.

        Args:
            why: The reason, for error messages.
        """

    @abstractmethod
    def record_to_keep(self, lane: int) -> LoggedBatch | None:
        """Return the last record of a lane, or None if the run's folder has it."""

    @abstractmethod
    def keeps_folder(self, term: Term) -> int | None:
        """Return the member that updates the run's folder if the launcher was killed.

        Returns None if no member has the folder. Raises PeerLost.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop every wait for a further term."""


class FolderLog(TermLog):
    """A batch log in the run's folder, to which all trainers have access."""

    def __init__(self, folder: Path, trainer: int) -> None:
        self.log, self.trainer = FileLog(folder), trainer

    def begin_term(self, term: Term, hosted: Collection[int]) -> None:
        """See TermLog. Does nothing: the files stay where they are."""

    def interrupt(self, why: str) -> None:
        """See TermLog. Does nothing: a log in files waits for no other trainer."""

    def record_to_keep(self, lane: int) -> LoggedBatch | None:
        """See TermLog. The run's folder has every record."""
        return None

    def keeps_folder(self, term: Term) -> int | None:
        """See TermLog. All members have the folder, so the leader updates it."""
        return term.leader

    def close(self) -> None:
        """See TermLog. Does nothing: a log in files waits for no other trainer."""


class HostedLog(TermLog):
    """A batch log in the memory of the trainers that hold replicas of a lane.

    The object listens at the trainer's address and stores records of other trainers until `close`.
    """

    def __init__(self, joined: JoinedTrainer, on_host: OnHost, on_lost: Callable[[str], None]) -> None:
        """Start listening, and publish the address and port to the other trainers.

        Args:
            on_lost: As in `CopiedLog`.

        Raises:
            SettingError: The trainer cannot listen at its address.
        """
        rendezvous, trainer, address = joined.rendezvous, joined.number, joined.start.address
        self._rendezvous, self.trainer = rendezvous, trainer
        records = HeldRecords()
        self.log: CopiedLog = CopiedLog(records, on_host.token, joined.job.peer_silence, on_lost)
        # The log starts in memory, so it must learn where each lane's batches ended before.
        for lane, number in enumerate(joined.spec.last_batches):
            if number:
                self.log.begin_with(lane, number)
        try:
            self._service = LogService(address, on_host.token, records)
        except OSError as error:
            raise SettingError(
                f"trainer {trainer}: --address: must be an address of the machine that it is on; got {address} ({error.strerror or error})"
            ) from error
        self._places: dict[int, TrainerPlace] = {}
        rendezvous.publish(TrainerPlace(address, self._service.port, on_host.has_run), trainer)

    def _place(self, trainer: int) -> TrainerPlace:
        if trainer not in self._places:
            self._places[trainer] = self._rendezvous.read(TrainerPlace, trainer)
        return self._places[trainer]

    def begin_term(self, term: Term, hosted: Collection[int]) -> None:
        """See TermLog. Waits until every member has published its address."""
        for trainer in term.members:
            self._place(trainer)
        of = {}
        # The host of a lane and every trainer with a replica of it hold its records, so that
        # the lane's next owner finds the records in its own memory.
        for lane in {*hosted, *term.lanes_of(self.trainer)}:
            holders = {term.hosts[lane], *term.copies[lane], *term.complete[lane]} - {self.trainer}
            of[lane] = sorted(holders & set(term.members))
        places = {trainer: self._place(trainer) for holders in of.values() for trainer in holders}
        self.log.begin_term(Holders(of, {trainer: (place.host, place.port) for trainer, place in places.items()}), hosted)

    def interrupt(self, why: str) -> None:
        """See TermLog."""
        self.log.interrupt(why)

    def record_to_keep(self, lane: int) -> LoggedBatch | None:
        """See TermLog."""
        return self.log.held(lane)

    def keeps_folder(self, term: Term) -> int | None:
        """See TermLog."""
        return min((trainer for trainer in term.members if self._place(trainer).has_run), default=None)

    def close(self) -> None:
        """See TermLog. Also stops taking records of other trainers."""
        self.log.close()
        self._service.close()


def open_log(joined: JoinedTrainer, on_lost: Callable[[str], None]) -> TermLog:
    """Open a trainer's log: in the run's folder, or, for a job over several hosts, with replicas.

    Args:
        on_lost: As in `CopiedLog`; only a job over several hosts uses it.

    Raises:
        SettingError: The trainer cannot listen at its address.
    """
    on_host = joined.start.on_host
    return FolderLog(joined.run / LOG, joined.number) if on_host is None else HostedLog(joined, on_host, on_lost)
