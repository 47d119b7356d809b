"""A trainer's side of terms: the one that it is in, its group, whether it is over, and the way into the next (docs/internals/trainer.md, Terms)."""

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

PAUSE = timedelta(milliseconds=20)  # between two looks whether the term is over
RENEWALS = 10  # of a lease, within the time after which a silent trainer counts as lost


class TermWatch:
    """Of one trainer, while entered. connect: makes a connection to the rendezvous store for this thread alone; silence: after which the coordinator
    takes a trainer for lost that renews no lease.
    """

    def __init__(self, connect: Callable[[], Any], trainer: int, silence: timedelta) -> None:
        self._connect, self._trainer, self._silence = connect, trainer, silence
        self._watched: tuple[int, Transport, Callable[[], None]] | None = None
        self._broken = 0  # the term that this trainer has found to be over
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
        """While entered, `transport` is interrupted as soon as the term is over, and `on_over` called, in the thread."""
        with self._changed:
            self._watched = term, transport, on_over
        try:
            yield
        finally:
            # The thread is not at the transport any more when this returns.
            with self._changed:
                self._watched = None

    def break_off(self, term: int) -> None:
        """A term is over for this trainer, though nobody has said so: any thread may call this."""
        self._broken = term

    def _run(self) -> None:
        rendezvous = Rendezvous(self._connect())
        # Where the coordinator is gone, there is nobody to tell, and no further term.
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


BOARD_PAUSE = timedelta(milliseconds=2)  # between two looks for a fact that is waited for
PATIENCE = timedelta(hours=1)  # for a peer's message where losses are survived: whether it is gone, the coordinator knows
FIRST_FORMING = timedelta(minutes=5)  # for the first group to be formed: trainers are still starting
STEP_PATIENCE = timedelta(seconds=1)  # for a step that one trainer has ended to end on the others, which have all that it takes
FORMING = timedelta(seconds=5)  # for a later one; when it begins, all members were there a moment ago


class TrainerTerms:
    """The terms of one trainer; its main thread uses it.

    term: the one that it is in, or was in last. keeps_folder: `TermLog.keeps_folder`, once there is that log.
    """

    def __init__(self, joined: JoinedTrainer) -> None:
        self._joined, self._rendezvous, self._events, self._trainer = joined, joined.rendezvous, joined.events, joined.number
        self._come_to, self._first_term = joined.reach_point, joined.spec.first_term
        self.term = joined.rendezvous.read(Term, self._first_term)
        self._watch = None if joined.connect is None else TermWatch(joined.connect, joined.number, joined.job.peer_silence)
        self.keeps_folder: Callable[[Term], int | None] = lambda term: None
        self.on_over: Callable[[], None] = lambda: None  # called, in another thread, when a term is over

    @property
    def survives(self) -> bool:
        """Whether this trainer goes on in a further term where another one is lost."""
        return self._watch is not None and any(self.term.copies)

    @property
    def is_member(self) -> bool:
        """Whether the term is one that this trainer takes part in."""
        return self._trainer in self.term.members

    def check_fingerprint(self, mine: dict[str, str], of_run: dict[str, str] | None) -> None:
        """Raise FingerprintError unless the numerics here are the run's, or, where it has none or others are accepted, the first trainer's."""
        if of_run is not None:
            numerics.check(mine, of_run, goes_on="--resume")
        elif self._joined.joins or self._trainer != self.term.members[0]:
            numerics.check(mine, self._rendezvous.read(Fingerprint).fields)
        else:
            self._rendezvous.publish(Fingerprint(mine))

    def join(self) -> None:
        """Report that this trainer can join, and wait until a term has it as a member. Raises PeerLost where training is over before."""
        self._events.send(CanJoin())
        while (admitted := self._rendezvous.poll(Admitted, self._trainer)) is None:
            if self._rendezvous.poll(Orphaned) is not None:
                raise PeerLost(f"trainer {self._trainer}: the launcher is gone, so there is nothing to join")
            time.sleep(BOARD_PAUSE.total_seconds())
        self.term = self._rendezvous.read(Term, admitted.term)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """While entered, the coordinator knows that this trainer is alive, where that matters."""
        with self._watch or contextlib.nullcontext():
            yield

    @contextlib.contextmanager
    def transport(self) -> Iterator[Transport]:
        """The group of the term, formed while entered, and interrupted when the term is over. Raises PeerLost, TrainerError."""
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
        try:
            with self._watch.watching(number, transport, self.on_over) if self._watch is not None else contextlib.nullcontext():
                yield transport
        finally:
            transport.close()

    def await_begin(self, fingerprint: dict[str, str], session: TermSession) -> None:
        """Report that this trainer is ready for the term's steps, and wait until all members are. Raises PeerLost."""
        self._events.send(Ready(self.term.number, fingerprint))
        self._come_to("ready")
        while self._rendezvous.poll(TermBegins, self.term.number) is None:
            self.check()
            if self._rendezvous.poll(Orphaned) is not None and self._rendezvous.poll(TermBegins, self.term.number) is None:
                # The coordinator is gone, so the members find out among themselves.
                session.barrier()
                return
            time.sleep(BOARD_PAUSE.total_seconds())

    def hand_over(self, commits: Commits | None, hosted: list[int]) -> None:
        """Hand over the lanes hosted here that the term gives to others. Raises CacheError."""
        given = [lane for lane in hosted if self.term.hosts[lane] != self._trainer]
        if given:
            assert commits is not None
            commits.give_away(given)
            self._rendezvous.publish(HandedOver(), self.term.number, self._trainer)

    def await_handed_over(self, lanes: list[int]) -> None:
        """Wait until the trainers that hosted these lanes, and are there, have handed them over. Raises PeerLost."""
        number = self.term.number
        for trainer in sorted({former for lane in lanes if self.term.former and (former := self.term.former[lane]) is not None}):
            while self._rendezvous.poll(HandedOver, number, trainer) is None:
                self.check()
                if self._rendezvous.poll(Orphaned) is not None:
                    raise PeerLost(f"trainer {self._trainer}: the launcher is gone, and trainer {trainer} hands nothing over")
                time.sleep(BOARD_PAUSE.total_seconds())

    def depart(self, departed: Departed) -> None:
        """Publish what this trainer has done, which is no member any more and has handed its lanes over."""
        self._rendezvous.publish(departed, self._trainer)

    def break_off(self) -> None:
        """The term is over for this trainer, though nobody has said so; any thread may call this."""
        if self._watch is not None:
            self._watch.break_off(self.term.number)

    def check(self) -> None:
        """Raise PeerLost if the term is over: whoever waits for another trainer by the rendezvous calls this again and again."""
        if self.survives and self._rendezvous.poll(TermOver, self.term.number) is not None:
            raise PeerLost(f"trainer {self._trainer}: term {self.term.number} is over")

    def check_waiting(self, transport: Transport) -> None:
        """The same, while none may leave; also where nobody else would find a peer gone: under a scheduler, whose launcher starts one trainer alone,
        and when the launcher has died.
        """
        self.check()
        if not self.survives or self._rendezvous.poll(Orphaned) is not None:
            transport.check_peers()

    def end_keeping(self, together: bool) -> None:
        """Tell the others that this trainer cannot go on, before they find it gone: the next term is to keep what the store lacks.

        together: no step can be undone, so they are given the time to end the one that this trainer has ended.
        """
        self._rendezvous.publish(EndsKeeping(), self.term.number)
        if together and len(self.term.members) > 1:
            time.sleep(STEP_PATIENCE.total_seconds())

    @property
    def ends_keeping(self) -> bool:
        """Whether a trainer has reported that, in this term."""
        return self._rendezvous.poll(EndsKeeping, self.term.number) is not None

    def next(self, position: TermPosition | None, why: str | None, keeps: bool = False) -> None:
        """Leave the term, and come to the next, which `term` then is. position: None where this trainer has nothing yet. why: what was noticed, None
        where the end was planned. keeps: it cannot go on.

        This trainer may be no member of the next term if it has left in order: then it hands its lanes over. Raises PeerLost where there will be
        none, since the coordinator is gone, and a trainer too, and TrainerError where it was taken for lost.
        """
        number = self.term.number
        if position is None:
            self._events.send(TermLeft(number, -1, (), False, why, joins=True))
        else:
            self._events.send(TermLeft(number, position.step, position.copies, position.stopping, why, keeps=keeps))
        self._come_to("left")
        number += 1
        while (term := self._rendezvous.poll(Term, number)) is None:
            if self._rendezvous.poll(Orphaned) is not None:
                # It may have stated one before it died.
                term = self._rendezvous.poll(Term, number) or self._last_term(position, why)
                break
            time.sleep(BOARD_PAUSE.total_seconds())
        if self._trainer not in (*term.members, *term.left):
            raise TrainerError(
                f"trainer {self._trainer}: was taken for lost {after_step(term.committed)}, and the others went on without it; it stops"
            )
        self.term = term

    def _last_term(self, position: TermPosition | None, why: str | None) -> Term:
        """The term after one that was to end for lanes to change hands, where the launcher died before it stated one: its members stand at the same
        step, so each of them knows that they go on as they were, to the stop that the rendezvous host asks for. Raises PeerLost where one was lost,
        or where none has the run's folder.
        """
        before, nobody = self.term, ((),) * len(self.term.hosts)
        keeps_folder = self.keeps_folder(before)
        if why is not None or position is None or keeps_folder is None:
            raise PeerLost(f"{why or 'the term is over'}; and the launcher is gone, so there is no further one")
        if keeps_folder == self._trainer:
            # On disk before it is on a server, for the others wait for this trainer before they own anything in it.
            Run(self._joined.run).raise_term(before.number + 1)
        return Term(
            before.number + 1, before.members, before.hosts, nobody, nobody, position.step, position.stopping, left=before.left
        )
