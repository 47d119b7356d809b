"""The rendezvous, over which the coordinator and the trainers of a job agree on facts.

The coordinator is the launcher; under a scheduler, it is the launcher of rank 0. The facts are in
the rendezvous store. A process beside the launcher holds the store (`rendezvous_host`), or it is
the store at which a scheduler's trainers meet. Only the coordinator decides who hosts which lane in
which term.

A stop is agreed so that all trainers stop after the same step. When the trainer that hosts lane 0
sees after its step t that a stop is wanted, it publishes t + 1 before it takes part in that step.
No trainer finishes step t + 1 without it. So every trainer reads the number after step t + 1 at the
latest.
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

PART_BYTES = 1 << 22  # the most bytes beside a fact in one message of the rendezvous store


def host_store(address: str, timeout: timedelta, listening: int | None = None) -> Any:
    """Host the rendezvous store of a job, which exists as long as the returned object.

    Args:
        address: Host name or address at which it listens.
        timeout: How long a read waits for a fact.
        listening: Descriptor of a bound socket, which the store takes over. If None, the store
            listens at a free port.

    Returns:
        A TCPStore of torch.
    """
    if listening is None:
        return dist.TCPStore(address, 0, None, True, timeout, wait_for_workers=False)
    with socket.socket(fileno=listening) as bound:
        port = bound.getsockname()[1]
        return dist.TCPStore(address, port, None, True, timeout, wait_for_workers=False, master_listen_fd=bound.detach())


def join_store(address: str, timeout: timedelta) -> Any:
    """Connect a trainer to the rendezvous store.

    Args:
        address: Address of the store, "HOST:PORT".
        timeout: Timeout of the connection attempt, and of every read of a fact.

    Returns:
        A TCPStore of torch.

    Raises:
        PeerLost: The store cannot be reached.
    """
    host, _, port = address.rpartition(":")
    try:
        return dist.TCPStore(host, int(port), None, False, timeout)
    except RuntimeError as error:
        raise PeerLost(f"coordinator at {address}: cannot be reached; is the launcher still running?") from error


class Rendezvous:
    """The facts of a job, which are published once and read by every process.

    Each fact is a message of its own class. Where there are several facts of a class, the argument
    `place` of a method distinguishes them by numbers, such as (trainer,) or (segment, trainer). The
    docstring of the class says which numbers.

    One thread uses an object. If the rendezvous store does not answer, every call raises PeerLost.
    A call that reads raises MessageError if the store has something else in the fact's place.
    """

    def __init__(self, store: Any) -> None:
        self._store = dist.PrefixStore("foreload", store)

    def publish(self, fact: Any, *place: int) -> None:
        """Publish a fact. When this returns, every reader sees it."""
        name = _name(type(fact), place)
        with _reachable():
            self._store.set(name, encode(fact))
            # `set` does not wait for the server. A query on the same connection does.
            self._store.check([name])

    def read(self, kind: type[_Fact], *place: int) -> _Fact:
        """Read a fact, and wait for it if necessary.

        Raises:
            PeerLost: The store's timeout is over.
        """
        with _reachable():
            text = self._store.get(_name(kind, place))
        return decode(text, kind)

    def poll(self, kind: type[_Fact], *place: int) -> _Fact | None:
        """Read a fact, or return None if it is not published yet."""
        with _reachable():
            stated = self._store.check([_name(kind, place)])
        return self.read(kind, *place) if stated else None

    def take(self, kind: type[_Fact], *place: int) -> _Fact | None:
        """Read and delete a fact that has only one reader, or return None if it does not exist yet.

        Deleting keeps the rendezvous store from growing.
        """
        fact = self.poll(kind, *place)
        if fact is not None:
            with _reachable():
                self._store.delete_key(_name(kind, place))
        return fact

    def publish_bytes(self, fact: Bytes, data: bytes, *place: int) -> None:
        """Publish a fact with any number of bytes, which `read_bytes` returns."""
        name = _name(type(fact), place)
        store: Any = self._store  # torch's stubs do not allow bytes
        # The bytes come before the fact, so that a reader who sees the fact finds all of them.
        with _reachable():
            for part, first in enumerate(range(0, len(data), PART_BYTES)):
                store.set(f"{name}/{part}", data[first : first + PART_BYTES])
        self.publish(fact, *place)

    def read_bytes(self, kind: type[_Bytes], *place: int) -> tuple[_Bytes, bytes]:
        """Read a fact and its bytes, and wait for them if necessary.

        Raises:
            PeerLost: The store's timeout is over.
            MessageError: The bytes do not match the fact's size and checksum.
        """
        fact, name = self.read(kind, *place), _name(kind, place)
        with _reachable():
            data = b"".join(self._store.get(f"{name}/{part}") for part in range(-(-fact.size // PART_BYTES)))
        if len(data) != fact.size or hashlib.sha256(data).hexdigest() != fact.checksum:
            raise MessageError(
                f"{name}: must be {fact.size} bytes with checksum {fact.checksum}; got {len(data)} bytes that differ"
            )
        return fact, data


class StopAgreement:
    """A trainer's side of the agreement on the step after which training stops or the term ends."""

    def __init__(self, rendezvous: Rendezvous, leads: bool, term: int, stop_by: Callable[[], int | None] = lambda: None) -> None:
        """Read what was agreed in an earlier term.

        Args:
            leads: Whether this trainer hosts lane 0, and so names the step.
            term: Number of the term.
            stop_by: Returns the step by which training must stop, or None.
        """
        self._rendezvous, self._leads, self._term, self._stop_by = rendezvous, leads, term, stop_by
        self._after: StopAfter | None = None
        # The leader of an earlier term may have named the step after which training stops.
        named = rendezvous.poll(StopAfter)
        self._named = named if named is not None and named.term is None else None

    def reached(self, step: int) -> bool:
        """Return whether an earlier term named a last step, and `step` has reached it."""
        return self._named is not None and step >= self._named.step

    def stop_after(self, step: int) -> bool:
        """Return whether training stops, or the term ends, after `step`.

        Every trainer must call this after every step.
        """
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
        """Note that training stops after `step`, the last step trained, as all trainers know.

        The leader publishes it, so that a further term knows it, too.
        """
        self._after = StopAfter(step)
        if self._leads:
            self._rendezvous.publish(self._after)

    def goes_on(self) -> bool:
        """Return whether only the term ends, and training goes on."""
        return self._after is not None and self._after.term is not None


def clear_agreement(rendezvous: Rendezvous, term: Term) -> None:
    """Delete the request for the end of a term, and the agreed step, from the rendezvous.

    The coordinator calls this when the term is over, before it publishes the next one.
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
        raise PeerLost(f"coordinator: the rendezvous store does not answer ({line}); is the launcher still running?") from error


FLUSH_SECONDS = 0.1  # a step is held back if events were sent less than this time ago


class EventSender:
    """A trainer's reports to the coordinator."""

    def __init__(self, rendezvous: Rendezvous, trainer: int) -> None:
        self._rendezvous = rendezvous
        self._trainer = trainer
        self._held: list[TrainerEvent] = []
        self._sent = 0
        self._sent_at = time.monotonic()

    def send(self, event: TrainerEvent) -> None:
        """Send an event at once, except a step, which may be held back for a moment."""
        self._held.append(event)
        if not isinstance(event, StepEnded) or time.monotonic() - self._sent_at > FLUSH_SECONDS:
            self.flush()

    def send_last(self, event: TrainerEvent) -> None:
        """Send the last event that the coordinator waits for."""
        # The coordinator may exit as soon as it has the event, before the store confirms it.
        with contextlib.suppress(PeerLost):
            self.send(event)

    def flush(self) -> None:
        """Send the events that are held back."""
        if self._held:
            self._rendezvous.publish(Events(tuple(self._held)), self._trainer, self._sent)
            self._sent += 1
            self._held = []
            self._sent_at = time.monotonic()


class EventReceiver:
    """The coordinator's side of the events of trainers."""

    def __init__(self, rendezvous: Rendezvous, members: Iterable[int]) -> None:
        self._rendezvous = rendezvous
        self._next = dict.fromkeys(members, 0)

    def add(self, trainer: int) -> None:
        """Receive the events of a further trainer from now on, beginning with its first."""
        self._next[trainer] = 0

    def poll(self) -> Iterator[tuple[int, TrainerEvent]]:
        """Yield (trainer, event) for each event since the last call, in each trainer's order."""
        for trainer in list(self._next):
            while (taken := self._rendezvous.take(Events, trainer, self._next[trainer])) is not None:
                self._next[trainer] += 1
                for event in taken.events:
                    yield trainer, event
