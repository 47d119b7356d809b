"""The batch log where trainers share no file system: it lives in the memory of a lane's owner and of every trainer that has a copy of the lane.

A record survives its writer once all of them have acknowledged it, and not before is anything sent to the store. Whoever takes a lane over has a
copy of it, and so has the record in its own memory. One that has a record of a later term refuses those of earlier ones, whose writer owns the lane
no more.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np

from foreload.base.job_token import WrongToken
from foreload.base.socket_messages import packed_head, receive
from foreload.base.token_server import TokenServer, connected
from foreload.cache.errors import CacheError, CopyLost
from foreload.cache.protocol.ownership.batch_log import LoggedBatch
from foreload.cache.protocol.shards.marker import first_number, term_of

PURPOSE = "batch log"
_HELD, _REFUSED = b"\1", b"\0"  # the answers to a record
_MOST_BYTES = 1 << 31  # of a record
_PART = 1 << 20  # bytes that are sent at once


class HeldRecords:
    """Of each lane, the last record and the term that it counts for, in memory. Any thread may use it."""

    def __init__(self) -> None:
        self._changed = threading.Lock()
        self._records: dict[int, tuple[int, LoggedBatch]] = {}

    def hold(self, lane: int, term: int, batch: LoggedBatch) -> bool:
        """Hold a record of an owner of this term; False where a later term has one. What comes late, behind the record after it, changes nothing."""
        with self._changed:
            known, last = self._records.get(lane, (term, batch))
            if known > term:
                return False
            if known < term or last.number <= batch.number:
                self._records[lane] = term, batch
            return True

    def held(self, lane: int) -> tuple[int, LoggedBatch] | None:
        """The record of a lane, and the term that it counts for."""
        with self._changed:
            return self._records.get(lane)


class LogService:
    """Takes records of other trainers' lanes into `records`, from those who have the job's token, from the beginning until `close`.

    address, port: where. Raises OSError where it cannot listen.
    """

    def __init__(self, host: str, token: str, records: HeldRecords) -> None:
        self._records = records
        self._server = TokenServer(host, 0, token, PURPOSE, self._serve)
        self.address, self.port = self._server.address, self._server.port

    def close(self) -> None:
        """Take no more."""
        self._server.close()

    def _serve(self, peer: socket.socket, _: str) -> None:
        while (message := receive(peer, _MOST_BYTES)) is not None:
            try:
                lane, term, batch = _unpacked(message.values, message.payload)
            except (KeyError, TypeError, ValueError):
                return  # it is no trainer of this version
            peer.sendall(_HELD if self._records.hold(lane, term, batch) else _REFUSED)


def _packed(lane: int, term: int, batch: LoggedBatch) -> bytes:
    held = np.zeros((0, 3), np.int64) if batch.held is None else batch.held
    parts = [np.ascontiguousarray(part).tobytes() for part in (batch.fields, batch.old, batch.new, held)]
    values = {
        "lane": lane, "term": term, "number": batch.number, "before": batch.before, "rows": len(batch.fields),
        "row_bytes": batch.new.shape[1], "shards": None if batch.held is None else len(batch.held),
    }  # fmt: skip
    return b"".join([packed_head(values, sum(map(len, parts))), *parts])


def _unpacked(values: Mapping[str, Any], payload: bytearray) -> tuple[int, int, LoggedBatch]:
    rows, row_bytes, shards = int(values["rows"]), int(values["row_bytes"]), values["shards"]
    sizes = [8 * rows, rows * row_bytes, rows * row_bytes, 24 * int(shards or 0)]
    if min(rows, row_bytes, int(shards or 0)) < 0 or sum(sizes) != len(payload):
        raise ValueError("record: its sizes are not those of its parts")
    fields, old, new, held = (payload[end - size : end] for size, end in zip(sizes, np.cumsum(sizes).tolist(), strict=True))
    batch = LoggedBatch(
        int(values["number"]),
        np.frombuffer(fields, np.uint64),
        np.frombuffer(old, np.uint8).reshape(rows, row_bytes),
        np.frombuffer(new, np.uint8).reshape(rows, row_bytes),
        None if shards is None else np.frombuffer(held, np.int64).reshape(-1, 3),
        int(values["before"]),
    )
    return int(values["lane"]), int(values["term"]), batch


@dataclass(frozen=True, slots=True)
class Holders:
    """Who holds the log of which lane in a term, beside its owner. of: lane -> the trainers; places: trainer -> host and port of its LogService."""

    of: Mapping[int, Collection[int]]
    places: Mapping[int, tuple[str, int]]


class CopiedLog:
    """A BatchLog of one trainer: of the lanes that it owns, each record goes to all of their holders before `hold` returns.

    records: of this trainer, into which its LogService takes those of others. silence: how long a holder may take. on_lost: called with the reason
    when one does not answer, in the thread that holds a batch, and calls nothing here: the term must end then, and that thread waits for `begin_term`
    of the next. A takeover's records are not waited for so; there CopyLost is raised.
    """

    def __init__(self, records: HeldRecords, token: str, silence: timedelta, on_lost: Callable[[str], None]) -> None:
        self._records, self._token, self._silence, self._on_lost = records, token, silence, on_lost
        self._changed = threading.Condition()
        self._generation = 0  # raised by every term that has begun
        self._interrupted: str | None = None
        self._closed = False
        # Read by who waits for answers, written to by who interrupts that; None once it is closed.
        self._wake: tuple[int, int] | None = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        # Who has this uses all that follows.
        self._sending = threading.Lock()
        self._holders = Holders({}, {})
        self._connections: dict[int, socket.socket] = {}
        self._adopted: dict[int, int] = {}  # lane -> the term in which it was taken over
        self._owned: dict[int, int] = {}  # lane -> the term that its records here count for, of lanes of this trainer

    def begin_term(self, holders: Holders, hosted: Collection[int]) -> None:
        """From now on, these are the holders. They have the last records of the lanes that this trainer goes on to host when this returns.

        hosted: these lanes. Raises CopyLost where a holder is not there; what waits for a further term then goes on waiting.
        """
        self.interrupt("the next term begins")
        with self._sending:
            for trainer, connection in list(self._connections.items()):
                if self._holders.places.get(trainer) != holders.places.get(trainer):
                    del self._connections[trainer]
                    connection.close()
            self._holders = holders
            self._owned = {lane: term for lane, term in self._owned.items() if lane in hosted}
            with self._changed:
                self._interrupted = None
            self._drain()
            for trainer in sorted({trainer for lane in holders.of for trainer in holders.of[lane]}):
                self._connect(trainer)
            for lane, term in self._owned.items():
                held = self._records.held(lane)
                if held is not None and held[0] == term:
                    self._replicate(lane, term, held[1])
        with self._changed:
            self._generation += 1
            self._changed.notify_all()

    def interrupt(self, why: str) -> None:
        """Have nobody wait for a holder of this term any more, since it is over; any thread may."""
        with self._changed:
            self._interrupted = why
            if self._wake is not None:
                with contextlib.suppress(BlockingIOError):
                    os.write(self._wake[1], b"!")

    def hold(self, lane: int, batch: LoggedBatch) -> None:
        """See BatchLog. Raises CopyLost where the batch is a takeover's and a holder does not answer, CacheError when this is closed meanwhile."""
        term = term_of(batch.number)
        taken = self._adopted.get(lane) == term and batch.number == first_number(term)
        if lane in self._adopted and not taken:
            del self._adopted[lane]
        # A lane that this trainer goes on to host keeps the term that its numbers are of.
        while True:
            with self._changed:
                generation = self._generation
            try:
                self._hold(lane, term, batch)
                return
            except CopyLost as error:
                if taken:
                    raise
                lost = error
            with self._changed:
                if not lost.over and self._generation == generation:
                    self._on_lost(str(lost))
                while self._generation == generation and not self._closed:
                    self._changed.wait()
                if self._closed:
                    raise CacheError("batch log: is closed")

    def held(self, lane: int) -> LoggedBatch | None:
        """See BatchLog."""
        held = self._records.held(lane)
        return None if held is None else held[1]

    def adopt(self, lane: int, term: int) -> LoggedBatch | None:
        """See BatchLog. Raises CopyLost."""
        self._adopted[lane] = term
        held = self._records.held(lane)
        if held is None:
            return None
        self._hold(lane, max(term, held[0]), held[1])
        return held[1]

    def close(self) -> None:
        """Whoever waits gets an error; the records stay with who has them."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.interrupt("it is closed")
        with self._sending, self._changed:
            self._disconnect(list(self._connections))
            if self._wake is not None:
                for end in self._wake:
                    os.close(end)
                self._wake = None

    def begin_with(self, lane: int, number: int) -> None:
        """A lane is at rest with batch `number` everywhere: its next owner goes by that until it holds its own first record."""
        self._records.hold(lane, term_of(number), LoggedBatch.empty(number, number, None))

    def _hold(self, lane: int, term: int, batch: LoggedBatch) -> None:
        if not self._records.hold(lane, term, batch):
            raise CopyLost(f"lane {lane}: another trainer owns it in a later term")
        with self._sending:
            self._owned[lane] = term
            self._replicate(lane, term, batch)

    def _connect(self, trainer: int) -> None:
        if trainer in self._connections:
            return
        place = self._holders.places.get(trainer)
        if place is None:
            raise CopyLost(f"trainer {trainer}: has told no place at which it holds the batch log")
        try:
            connection = connected(*place, self._token, PURPOSE, self._silence.total_seconds())
        except WrongToken as error:
            raise CopyLost(f"trainer {trainer}: at {place[0]}:{place[1]}: {error}") from error
        except OSError as error:
            raise CopyLost(f"trainer {trainer}: does not take the batch log at {place[0]}:{place[1]} ({error})") from error
        connection.setblocking(False)
        self._connections[trainer] = connection

    def _replicate(self, lane: int, term: int, batch: LoggedBatch) -> None:
        """Send a record to all holders of its lane, and return when they have it. Raises CopyLost, after which those connections are closed."""
        trainers = sorted(self._holders.of.get(lane, ()))
        try:
            for trainer in trainers:
                self._connect(trainer)
            if trainers:
                self._send(lane, trainers, _packed(lane, term, batch))
        except CopyLost:
            self._disconnect(trainers)
            raise

    def _send(self, lane: int, trainers: Sequence[int], data: bytes) -> None:
        left = {self._connections[trainer].fileno(): (trainer, memoryview(data)) for trainer in trainers}
        deadline = time.monotonic() + self._silence.total_seconds()
        poll = select.poll()
        if self._wake is not None:
            poll.register(self._wake[0], select.POLLIN)
        for descriptor in left:
            poll.register(descriptor, select.POLLIN | select.POLLOUT)
        while left:
            with self._changed:
                if self._interrupted is not None:
                    raise CopyLost(self._interrupted, over=True)
            patience = deadline - time.monotonic()
            if patience <= 0:
                silent = ", ".join(str(trainer) for trainer, _ in left.values())
                raise CopyLost(f"trainer {silent}: does not say that it holds the batch log of lane {lane}")
            for descriptor, event in poll.poll(1000 * patience + 1):
                if descriptor not in left:
                    continue  # woken
                trainer, unsent = left[descriptor]
                connection = self._connections[trainer]
                try:
                    if unsent and event & select.POLLOUT:
                        unsent = unsent[connection.send(unsent[:_PART]) :]
                        left[descriptor] = trainer, unsent
                        if not unsent:
                            poll.modify(descriptor, select.POLLIN)
                    if event & ~select.POLLOUT:
                        answer = connection.recv(1)
                        if answer != _HELD or unsent:
                            why = "another trainer owns the lane in a later term" if answer == _REFUSED else "it is gone"
                            raise CopyLost(f"trainer {trainer}: does not hold the batch log of lane {lane}: {why}")
                        del left[descriptor]
                        poll.unregister(descriptor)
                except BlockingIOError:
                    continue
                except OSError as error:
                    raise CopyLost(f"trainer {trainer}: does not hold the batch log of lane {lane} ({error})") from error

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake is not None and os.read(self._wake[0], 64):
                pass

    def _disconnect(self, trainers: Collection[int]) -> None:
        for trainer in trainers:
            connection = self._connections.pop(trainer, None)
            if connection is not None:
                connection.close()
