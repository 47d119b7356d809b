"""What the coordinator and the trainers of a job agree on, through the rendezvous store that the coordinator holds.

The coordinator is the launcher, under a scheduler that of rank 0; the store is held by a process beside it (`rendezvous host`), or is the one at
which a scheduler's trainers meet. The coordinator alone says who hosts which lane in which term. A stop is agreed so that all trainers end after the
same step: the trainer that hosts lane 0 sees after its step t that a stop is wanted, and publishes t + 1 before it takes part in that step; nobody
finishes step t + 1 without it, so everybody reads this number after step t + 1 at the latest.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from foreload.trainer.cluster.messages.codec import decode, encode
from foreload.trainer.cluster.messages.facts import Bytes, StopAfter, StopWanted, Term
from foreload.trainer.cluster.messages.trainers import Events, StepEnded, TrainerEvent
from foreload.trainer.errors import MessageError, PeerLost

_Fact = TypeVar("_Fact")
_Bytes = TypeVar("_Bytes", bound=Bytes)

PART_BYTES = 1 << 22  # of bytes beside a fact, in one message of the rendezvous store


def host_store(address: str, timeout: timedelta, listening: int | None = None) -> Any:
    """The rendezvous store of a job, which lives as long as the object. listening: the descriptor of a
    bound socket, which the store takes over; None: a free port is taken.
    """
    if listening is None:
        return dist.TCPStore(address, 0, None, True, timeout, wait_for_workers=False)
    with socket.socket(fileno=listening) as bound:
        port = bound.getsockname()[1]
        return dist.TCPStore(address, port, None, True, timeout, wait_for_workers=False, master_listen_fd=bound.detach())


def join_store(address: str, timeout: timedelta) -> Any:
    """A trainer's connection to the rendezvous store at "HOST:PORT". timeout: for this, and for every read of a fact. Raises PeerLost if it is not
    there.
    """
    host, _, port = address.rpartition(":")
    try:
        return dist.TCPStore(host, int(port), None, False, timeout)
    except RuntimeError as error:
        raise PeerLost(f"coordinator at {address}: cannot be reached; is the launcher still there?") from error


class Rendezvous:
    """Facts of the job, each a message of a class of its own, published once and read by everybody. place: where there are
    several facts of a class, the numbers that tell them apart, as (trainer,) or (segment, trainer); the class says which.

    One thread uses it. Where the coordinator has gone, every call raises PeerLost; MessageError where what stands there is something else.
    """

    def __init__(self, store: Any) -> None:
        self._store = dist.PrefixStore("foreload", store)

    def publish(self, fact: Any, *place: int) -> None:
        """State a fact. When this returns, whoever asks sees it."""
        name = _name(type(fact), place)
        with _reachable():
            self._store.set(name, encode(fact))
            # `set` does not wait for the server; a question on the same connection does.
            self._store.check([name])

    def read(self, kind: type[_Fact], *place: int) -> _Fact:
        """A fact, waited for as long as the store's timeout allows. Raises PeerLost when that is over."""
        with _reachable():
            text = self._store.get(_name(kind, place))
        return decode(text, kind)

    def poll(self, kind: type[_Fact], *place: int) -> _Fact | None:
        """A fact, or None if it was not stated yet."""
        with _reachable():
            stated = self._store.check([_name(kind, place)])
        return self.read(kind, *place) if stated else None

    def take(self, kind: type[_Fact], *place: int) -> _Fact | None:
        """A fact that has one reader: it is deleted, so that the rendezvous does not grow. None if it was not stated yet."""
        fact = self.poll(kind, *place)
        if fact is not None:
            with _reachable():
                self._store.delete_key(_name(kind, place))
        return fact

    def publish_bytes(self, fact: Bytes, data: bytes, *place: int) -> None:
        """State a fact with bytes of any number beside it, which `read_bytes` gives."""
        name = _name(type(fact), place)
        store: Any = self._store  # torch's stubs know no bytes
        with _reachable():
            for part, first in enumerate(range(0, len(data), PART_BYTES)):
                store.set(f"{name}/{part}", data[first : first + PART_BYTES])
        self.publish(fact, *place)

    def read_bytes(self, kind: type[_Bytes], *place: int) -> tuple[_Bytes, bytes]:
        """What `publish_bytes` stated, waited for as `read` does. Raises PeerLost, and MessageError where the bytes are other ones."""
        fact, name = self.read(kind, *place), _name(kind, place)
        with _reachable():
            data = b"".join(self._store.get(f"{name}/{part}") for part in range(-(-fact.size // PART_BYTES)))
        if len(data) != fact.size or hashlib.sha256(data).hexdigest() != fact.checksum:
            raise MessageError(f"{name}: must be {fact.size} bytes with checksum {fact.checksum}; got {len(data)} others")
        return fact, data


class StopAgreement:
    """A trainer's side of the agreement on the step after which training stops, or the term ends. leads: whether this is the trainer that hosts lane
    0, and so names the step; term: the number of the one that it is for; stop_by: gives the step by which training must stop, if there is one.
    """

    def __init__(self, rendezvous: Rendezvous, leads: bool, term: int, stop_by: Callable[[], int | None] = lambda: None) -> None:
        self._rendezvous, self._leads, self._term, self._stop_by = rendezvous, leads, term, stop_by
        self._after: StopAfter | None = None
        # In an earlier term, by who led then.
        named = rendezvous.poll(StopAfter)
        self._named = named if named is not None and named.term is None else None

    def reached(self, step: int) -> bool:
        """Whether the step after which training stops was named in an earlier term, and is none after `step`."""
        return self._named is not None and step >= self._named.step

    def stop_after(self, step: int) -> bool:
        """Whether training stops after `step`; to be asked by every trainer after every step."""
        if self._after is None:
            if not self._leads:
                after = self._rendezvous.poll(StopAfter)
                self._after = after if after is not None and after.term in (None, self._term) else None
            elif self._named is not None:
                self._after = self._named
            elif (wanted := self._rendezvous.poll(StopWanted)) is not None and wanted.term in (None, self._term):
                self._after = StopAfter(step + 1, wanted.term)
                self._rendezvous.publish(self._after)
            elif (stop_by := self._stop_by()) is not None and step + 1 >= stop_by:
                self._after = StopAfter(step + 1)
                self._rendezvous.publish(self._after)
        return self._after is not None and step >= self._after.step

    def stop_now(self, step: int) -> None:
        """Training stops after `step`, the last one trained, as every trainer knows; a further term is to know it, too."""
        self._after = StopAfter(step)
        if self._leads:
            self._rendezvous.publish(self._after)

    def goes_on(self) -> bool:
        """Whether it is the term alone that ends, and not training."""
        return self._after is not None and self._after.term is not None


def clear_agreement(rendezvous: Rendezvous, term: Term) -> None:
    """Take what was asked for, and agreed, on the end of a term from the rendezvous: it is over. The coordinator calls this, before it states the
    next.
    """
    for fact in (rendezvous.poll(StopWanted), rendezvous.poll(StopAfter)):
        if fact is not None and fact.term == term.number:
            rendezvous.take(type(fact))


def _name(kind: type, place: tuple[int, ...]) -> str:
    return "/".join([kind.__name__, *map(str, place)])


@contextlib.contextmanager
def _reachable() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        line = str(error).strip().splitlines()[0]
        raise PeerLost(f"coordinator: the rendezvous store does not answer ({line}); is the launcher still there?") from error


FLUSH_SECONDS = 0.1


class EventSender:
    """A trainer's reports to the coordinator."""

    def __init__(self, rendezvous: Rendezvous, trainer: int) -> None:
        self._rendezvous = rendezvous
        self._trainer = trainer
        self._held: list[TrainerEvent] = []
        self._sent = 0
        self._sent_at = time.monotonic()

    def send(self, event: TrainerEvent) -> None:
        """Report something; steps may be held back for a moment, all else goes at once."""
        self._held.append(event)
        if not isinstance(event, StepEnded) or time.monotonic() - self._sent_at > FLUSH_SECONDS:
            self.flush()

    def send_last(self, event: TrainerEvent) -> None:
        """Report what the coordinator waits for last: it may leave as soon as it has that, before it confirms it."""
        with contextlib.suppress(PeerLost):
            self.send(event)

    def flush(self) -> None:
        """Send what is held back."""
        if self._held:
            self._rendezvous.publish(Events(tuple(self._held)), self._trainer, self._sent)
            self._sent += 1
            self._held = []
            self._sent_at = time.monotonic()


class EventReceiver:
    """The coordinator's side, for the trainers of these numbers."""

    def __init__(self, rendezvous: Rendezvous, members: Iterable[int]) -> None:
        self._rendezvous = rendezvous
        self._next = dict.fromkeys(members, 0)

    def add(self, trainer: int) -> None:
        """Take in a further trainer's events, from its beginning."""
        self._next[trainer] = 0

    def poll(self) -> Iterator[tuple[int, TrainerEvent]]:
        """What has come in since, with the number of who sent it, in each trainer's order."""
        for trainer in list(self._next):
            while (taken := self._rendezvous.take(Events, trainer, self._next[trainer])) is not None:
                self._next[trainer] += 1
                for event in taken.events:
                    yield trainer, event
