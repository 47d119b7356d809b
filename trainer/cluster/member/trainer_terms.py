"""A trainer's side of terms (docs/internals/trainer.md, Terms).

A trainer joins a term, forms its group, watches whether it is over, and moves to the next one.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch

from foreload.trainer.cluster.member.joined_trainer import JoinedTrainer
from foreload.trainer.cluster.messages.facts import (
    Admitted,
    EndsKeeping,
    Fingerprint,
    HandedOver,
    Lease,
    Orphaned,
    Term,
    TermBegins,
    TermOver,
)
from foreload.trainer.cluster.messages.rendezvous import Rendezvous
from foreload.trainer.cluster.messages.trainers import CanJoin, Departed, Ready, TermLeft
from foreload.trainer.compute import numerics
from foreload.trainer.errors import PeerLost, TrainerError, after_step
from foreload.trainer.run.directory import Run
from foreload.trainer.step.commits import Commits, TermPosition
from foreload.trainer.step.cuda_transport import NcclTransport, StagedTransport, share_devices
from foreload.trainer.step.term_session import TermSession
from foreload.trainer.step.transport import LinkedTransport, Transport

PAUSE = timedelta(milliseconds=20)  # between two polls whether the term is over
# Lease renewals within the time after which a silent trainer counts as lost.
RENEWALS = 10


class TermWatch:
    """A thread that renews one trainer's lease and notices the end of a term, while entered."""

    def __init__(self, connect: Callable[[], Any], trainer: int, silence: timedelta) -> None:
        """Prepare the thread.

        Args:
            connect: Opens a connection to the rendezvous store, for this thread alone.
            trainer: Number of the trainer.
            silence: Time without a lease renewal after which the coordinator counts a trainer as
                lost.
        """
        self._connect, self._trainer, self._silence = connect, trainer, silence
        self._watched: tuple[int, Transport, Callable[[], None]] | None = None
        self._broken = 0  # the term that this trainer itself found to be over
        self._changed = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="term watch", daemon=True)

    def __enter__(self) -> TermWatch:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stopping.set()
        self._thread.join()

    @contextlib.contextmanager
    def watching(self, term: int, transport: Transport, on_over: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Watch a term while entered.

        As soon as the term is over, the thread interrupts `transport` and calls `on_over`.
        """
        with self._changed:
            self._watched = term, transport, on_over
        try:
            yield
        finally:
            # The thread uses the transport only with this lock held, so not after this returns.
            with self._changed:
                self._watched = None

    def break_off(self, term: int) -> None:
        """Treat a term as over before the coordinator says so. Any thread may call this."""
        self._broken = term

    def _run(self) -> None:
        rendezvous = Rendezvous(self._connect())
        # If the rendezvous store does not answer, nobody reads leases and no further term comes.
        with contextlib.suppress(PeerLost):
            looks = 0
            every = max(int(self._silence / PAUSE / RENEWALS), 1)
            while not self._stopping.wait(PAUSE.total_seconds()):
                if looks % every == 0:
                    rendezvous.publish(Lease(looks // every), self._trainer)
                looks += 1
                with self._changed:
                    if self._watched is None:
                        continue
                    term, transport, on_over = self._watched
                    if self._broken == term or rendezvous.poll(TermOver, term) is not None:
                        transport.interrupt()
                        on_over()
                        self._watched = None


BOARD_PAUSE = timedelta(milliseconds=2)  # between two polls for an awaited fact
# Timeout for a peer's message where losses are survived. There the coordinator notices a lost peer,
# so this timeout need not.
PATIENCE = timedelta(hours=1)
# Timeout for forming the first group, while trainers are still starting.
FIRST_FORMING = timedelta(minutes=5)
# How long a step that one trainer has finished may take on the other trainers, which have all that
# they need for it.
STEP_PATIENCE = timedelta(seconds=1)
# Timeout for forming a later group, whose members have all left the term before a moment ago.
FORMING = timedelta(seconds=5)


class TrainerTerms:
    """The terms of one trainer. Only its main thread uses this.

    Attributes:
        term: The term that the trainer is in, or was in last.
        keeps_folder: `TermLog.keeps_folder` of the trainer's log, once the log is open.
        on_over: Called when a term is over, also by the thread that watches the term.
    """

    def __init__(self, joined: JoinedTrainer) -> None:
        self._joined, self._rendezvous, self._events, self._trainer = joined, joined.rendezvous, joined.events, joined.number
        self._come_to, self._first_term = joined.reach_point, joined.spec.first_term
        self.term = joined.rendezvous.read(Term, self._first_term)
        self._watch = None if joined.connect is None else TermWatch(joined.connect, joined.number, joined.job.peer_silence)
        self.keeps_folder: Callable[[Term], int | None] = lambda term: None
        self.on_over: Callable[[], None] = lambda: None
        self._closed: int | None = None  # a trainer whose connection was found closed in the term

    @property
    def survives(self) -> bool:
        """Whether this trainer continues in a further term if another trainer is lost."""
        return self._watch is not None and any(self.term.copies)

    @property
    def is_member(self) -> bool:
        """Whether this trainer is a member of the term."""
        return self._trainer in self.term.members

    def check_fingerprint(self, mine: dict[str, str], of_run: dict[str, str] | None) -> None:
        """Check that the numerics of this trainer are those that the run requires.

        Args:
            mine: Numerics fingerprint of this trainer.
            of_run: Fingerprint of the run. If None, the run has none yet or accepts another one;
                then the first trainer publishes its own, and the others must have the same.

        Raises:
            FingerprintError: The fingerprints differ.
        """
        if of_run is not None:
            numerics.check(mine, of_run, goes_on="--resume")
        elif self._joined.joins or self._trainer != self.term.members[0]:
            numerics.check(mine, self._rendezvous.read(Fingerprint).fields)
        else:
            self._rendezvous.publish(Fingerprint(mine))

    def join(self) -> None:
        """Report that this trainer can join, and wait until it is a member of a term.

        Raises:
            PeerLost: The launcher is gone, so no further term comes.
        """
        self._events.send(CanJoin())
        while (admitted := self._rendezvous.poll(Admitted, self._trainer)) is None:
            if self._rendezvous.poll(Orphaned) is not None:
                raise PeerLost(f"trainer {self._trainer}: the launcher has died, so there is nothing to join")
            time.sleep(BOARD_PAUSE.total_seconds())
        self.term = self._rendezvous.read(Term, admitted.term)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Renew this trainer's lease while entered, unless it runs under a scheduler."""
        with self._watch or contextlib.nullcontext():
            yield

    @contextlib.contextmanager
    def transport(self) -> Iterator[Transport]:
        """Form the term's group, which exists while entered. The term's end interrupts it.

        Raises:
            PeerLost: A member is gone, or does not answer in time.
            SettingError: The trainer's address is not one of this machine.
        """
        joined, job, number, members = self._joined, self._joined.job, self.term.number, self.term.members
        silence = PATIENCE if self.survives else job.peer_silence
        transport: Transport
        forming = (FIRST_FORMING if number == self._first_term else FORMING) if self.survives else silence
        store, trainer, address, device = joined.store, self._trainer, joined.start.address, torch.device(joined.device)
        token = None if joined.start.on_host is None else joined.start.on_host.token
        if job.device == "cpu":
            transport = LinkedTransport(store, number, trainer, members, silence, address, forming, self.check, token)
        elif share_devices(store, number, trainer, members, device, forming, self.check):
            transport = StagedTransport(device, store, number, trainer, members, silence, address, forming, self.check, token)
        else:
            transport = NcclTransport(store, number, trainer, members, silence, device)
        self._closed = None
        try:
            with self._watch.watching(number, transport, self.on_over) if self._watch is not None else contextlib.nullcontext():
                yield transport
        finally:
            self._closed = transport.closed
            transport.close()

    def await_begin(self, fingerprint: dict[str, str], session: TermSession) -> None:
        """Report that this trainer is ready for the term's steps, and wait until all members are.

        Raises:
            PeerLost: The term is over, or a member is gone.
        """
        self._events.send(Ready(self.term.number, fingerprint))
        self._come_to("ready")
        while self._rendezvous.poll(TermBegins, self.term.number) is None:
            self.check()
            # The coordinator may have published TermBegins just before it died, so that is polled
            # once more after Orphaned was seen.
            if self._rendezvous.poll(Orphaned) is not None and self._rendezvous.poll(TermBegins, self.term.number) is None:
                # The coordinator is gone, so the members wait for each other by a barrier.
                session.barrier()
                return
            time.sleep(BOARD_PAUSE.total_seconds())

    def hand_over(self, commits: Commits | None, hosted: list[int]) -> None:
        """Hand over the lanes hosted here that the term gives to other trainers.

        Args:
            commits: Commits of the term before. Not None where there are lanes to hand over.
            hosted: Lanes hosted here so far.

        Raises:
            CacheError: The rows of these lanes cannot be written to the store.
        """
        given = [lane for lane in hosted if self.term.hosts[lane] != self._trainer]
        if given:
            assert commits is not None
            # `give_away` returns when all rows that were given to the traffic are stored. Only then
            # may the next owner fence the lanes.
            commits.give_away(given)
            self._rendezvous.publish(HandedOver(), self.term.number, self._trainer)

    def await_handed_over(self, lanes: list[int]) -> None:
        """Wait until the former hosts of these lanes, where the term names them, handed them over.

        Raises:
            PeerLost: The term is over, or the launcher is gone.
        """
        number = self.term.number
        for trainer in sorted({former for lane in lanes if self.term.former and (former := self.term.former[lane]) is not None}):
            while self._rendezvous.poll(HandedOver, number, trainer) is None:
                self.check()
                if self._rendezvous.poll(Orphaned) is not None:
                    raise PeerLost(
                        f"trainer {self._trainer}: the launcher has died, and trainer {trainer} has not handed over its lanes"
                    )
                time.sleep(BOARD_PAUSE.total_seconds())

    def depart(self, departed: Departed) -> None:
        """Publish the totals of this trainer, which is no longer a member and hosts no lane."""
        self._rendezvous.publish(departed, self._trainer)

    def break_off(self) -> None:
        """Treat the term as over before the coordinator says so. Any thread may call this."""
        if self._watch is not None:
            self._watch.break_off(self.term.number)

    def check(self) -> None:
        """Raise PeerLost if the term is over.

        Every wait for another trainer over the rendezvous calls this repeatedly.
        """
        if self.survives and self._rendezvous.poll(TermOver, self.term.number) is not None:
            raise PeerLost(f"trainer {self._trainer}: term {self.term.number} is over")

    def check_waiting(self, transport: Transport) -> None:
        """Raise PeerLost if the term is over or a peer is gone, while no member may leave.

        The peers' connections are checked where no other process would notice a lost peer: under a
        scheduler, whose launcher starts only one trainer, and after the launcher has died.
        """
        self.check()
        if not self.survives or self._rendezvous.poll(Orphaned) is not None:
            transport.check_peers()

    def end_keeping(self, together: bool) -> None:
        """Announce that this trainer cannot go on, so the next term keeps what the store lacks.

        To be called before this trainer leaves, so that the others do not count it as lost.

        Args:
            together: No step can be undone. So this trainer gives the others time to finish the
                step that it has finished.
        """
        self._rendezvous.publish(EndsKeeping(), self.term.number)
        if together and len(self.term.members) > 1:
            time.sleep(STEP_PATIENCE.total_seconds())

    @property
    def ends_keeping(self) -> bool:
        """Whether a trainer announced in this term that it cannot go on (`end_keeping`)."""
        return self._rendezvous.poll(EndsKeeping, self.term.number) is not None

    def next(self, position: TermPosition | None, why: str | None, keeps: bool = False) -> None:
        """Leave the term, and wait for the next one, which becomes `term`.

        A trainer that leaves the job in order is no member of the next term. It then hands over its
        lanes.

        Args:
            position: Where this trainer stands. If None, it has no state yet.
            why: Why the term ended. If None, the end was planned.
            keeps: This trainer cannot go on, so the next term keeps what the store lacks.

        Raises:
            PeerLost: No further term comes, because the launcher and a trainer are gone.
            TrainerError: The others counted this trainer as lost and went on without it.
        """
        number = self.term.number
        if position is None:
            self._events.send(TermLeft(number, -1, (), False, why, joins=True, closed=self._closed))
        else:
            at = position.step, position.copies, position.stopping
            self._events.send(TermLeft(number, *at, why, keeps=keeps, closed=self._closed))
        self._come_to("left")
        number += 1
        while (term := self._rendezvous.poll(Term, number)) is None:
            if self._rendezvous.poll(Orphaned) is not None:
                # The coordinator may have published the term before it died, after the poll above.
                term = self._rendezvous.poll(Term, number) or self._last_term(position, why)
                break
            time.sleep(BOARD_PAUSE.total_seconds())
        if self._trainer not in (*term.members, *term.left):
            raise TrainerError(
                f"trainer {self._trainer}: was taken for lost {after_step(term.committed)}, and the others went on without it; it stops"
            )
        self.term = term

    def _last_term(self, position: TermPosition | None, why: str | None) -> Term:
        """Return the next term where the launcher died before it published one.

        This is possible after a term whose end was planned so that lanes change owners. All its
        members then stand at the same step. So each of them knows, without any message, that they
        continue with the same lanes until the stop that the rendezvous host asks for.

        Args:
            position: Where this trainer stands. If None, it has no state yet.
            why: Why the term ended. If None, the end was planned.

        Raises:
            PeerLost: A trainer was lost, this trainer has no state, or no member has the run's
                folder.
        """
        before, nobody = self.term, ((),) * len(self.term.hosts)
        keeps_folder = self.keeps_folder(before)
        if why is not None or position is None or keeps_folder is None:
            raise PeerLost(f"{why or 'the term is over'}; and the launcher has died, so no further term begins")
        if keeps_folder == self._trainer:
            # The term must be on disk before any server sees it. It is, because the others wait for
            # this trainer before they own a lane in that term.
            Run(self._joined.run).raise_term(before.number + 1)
        return Term(
            before.number + 1, before.members, before.hosts, nobody, nobody, position.step, position.stopping, left=before.left
        )
