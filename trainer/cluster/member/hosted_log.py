"""A trainer's batch log where trainers are on several hosts (`cache.protocol.copied_log`), from term to term."""

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
    """Of one trainer, whose main thread uses it. log: what the traffic holds batches in; trainer: which one it is."""

    log: BatchLog
    trainer: int

    @abstractmethod
    def begin_term(self, term: Term, hosted: Collection[int]) -> None:
        """Hold what is logged from now on where the term says. hosted: the lanes that are hosted here as it begins, also those that it gives away.

        Raises CopyLost, PeerLost.
        """

    @abstractmethod
    def interrupt(self, why: str) -> None:
        """Have nobody wait for other trainers any more, since the term is over; any thread may."""

    @abstractmethod
    def record_to_keep(self, lane: int) -> LoggedBatch | None:
        """The last record of a lane, where it is not in the run's folder."""

    @abstractmethod
    def keeps_folder(self, term: Term) -> int | None:
        """The member that does in the run's folder what is to be done there, where the launcher was killed; None where no member has that folder.

        Raises PeerLost.
        """

    @abstractmethod
    def close(self) -> None:
        """Have nobody wait for a further term."""


class FolderLog(TermLog):
    """In a folder, which all trainers have: the run's."""

    def __init__(self, folder: Path, trainer: int) -> None:
        self.log, self.trainer = FileLog(folder), trainer

    def begin_term(self, term: Term, hosted: Collection[int]) -> None:
        """See TermLog: nothing is to be done."""

    def interrupt(self, why: str) -> None:
        """See TermLog: nobody waits."""

    def record_to_keep(self, lane: int) -> LoggedBatch | None:
        """See TermLog: it is there."""
        return None

    def keeps_folder(self, term: Term) -> int | None:
        """See TermLog: all have it."""
        return term.leader

    def close(self) -> None:
        """See TermLog: nobody waits."""


class HostedLog(TermLog):
    """With the copies. Takes records of others at `address` until `close`.

    on_lost: as CopiedLog has it. Raises SettingError where it cannot listen.
    """

    def __init__(self, joined: JoinedTrainer, on_host: OnHost, on_lost: Callable[[str], None]) -> None:
        rendezvous, trainer, address = joined.rendezvous, joined.number, joined.start.address
        self._rendezvous, self.trainer = rendezvous, trainer
        records = HeldRecords()
        self.log: CopiedLog = CopiedLog(records, on_host.token, joined.job.peer_silence, on_lost)
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
        """See TermLog. Waits until every member has published its place."""
        for trainer in term.members:
            self._place(trainer)
        of = {}
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
        """See TermLog. Takes no records any more, either."""
        self.log.close()
        self._service.close()


def open_log(joined: JoinedTrainer, on_lost: Callable[[str], None]) -> TermLog:
    """The log of a trainer. on_lost: as `HostedLog` has it. Raises SettingError."""
    on_host = joined.start.on_host
    return FolderLog(joined.run / LOG, joined.number) if on_host is None else HostedLog(joined, on_host, on_lost)
