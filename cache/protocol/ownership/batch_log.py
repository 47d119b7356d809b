"""The log of the write-back batch that is not yet released, in files or, over several hosts, in the memory of trainers with copies.

It also says which batch that is, and which came before, and with that which markers a store shard
may have. So the record of batch n stays whole until the next one's is: a writer that dies while it
writes a record leaves the one before. Each term has files of its own, so an owner that does not
know yet that it is none any more changes no record of its successor's.

In memory (`CopiedLog`), a record is at the lane's owner and at every trainer that has a copy of the
lane. It survives its writer once all of them have acknowledged it, and nothing is sent to the store
before that. Whoever takes a lane over has a copy of it, and so has the record. A trainer that has a
record of a later term refuses those of earlier ones, whose writer no longer owns the lane.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import select
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from foreload.base.compiled import nb
from foreload.base.files import persist
from foreload.base.hashing import mix
from foreload.base.job_token import TokenServer, WrongToken, connected
from foreload.base.socket_messages import packed_head, receive
from foreload.cache.errors import CacheError, CopyLost
from foreload.cache.protocol.shards.marker import first_number, term_of

_MAGIC = 0x32474F4C4C46  # FLLOG2
_FIRST_MAGIC = 0x31474F4C4C46  # FLLOG1: of earlier versions, which wrote neither the number before nor a checksum
_HEADER_BYTES = 64
# The words (int64) of the header; fields, old, new and held (24 bytes a shard) follow it.
_MAGIC_AT, _NUMBER, _COUNT, _ROW_BYTES, _WHOLE, _SHARDS, _BEFORE, _CHECKSUM = range(8)
_SUMMED = [_MAGIC_AT, _NUMBER, _COUNT, _ROW_BYTES, _SHARDS, _BEFORE]
_NAME = re.compile(r"lane-\d+-(?:term-(\d+)-)?[01]\.log")
_PRIME = np.uint64(0x9E3779B185EBCA87)
_SEEDS = tuple(np.uint64(seed) for seed in (0x60EA27EEADC0B5D6, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x27D4EB2F165667C5))


@nb.njit(nogil=True, cache=True)
def _checksum(words, tail):  # type: ignore[no-untyped-def]
    """A checksum of words uint64 [n] and of tail uint8 [m]. Four at a time, so that it runs as fast as memory does."""
    a, b, c, d = _SEEDS
    whole = words.size // 4 * 4
    for i in range(0, whole, 4):
        a = (a ^ words[i]) * _PRIME
        b = (b ^ words[i + 1]) * _PRIME
        c = (c ^ words[i + 2]) * _PRIME
        d = (d ^ words[i + 3]) * _PRIME
    for i in range(whole, words.size):
        a = (a ^ words[i]) * _PRIME
    for i in range(tail.size):
        b = (b ^ np.uint64(tail[i])) * _PRIME
    return mix(mix(mix(mix(a) ^ b) ^ c) ^ d)


def checksum(header: np.ndarray, content: np.ndarray) -> np.int64:
    """The checksum of a record: header int64 [8], content uint8 [n], 8-byte-aligned."""
    whole = len(content) // 8 * 8
    of_content = _checksum(content[:whole].view(np.uint64), content[whole:])
    words = np.append(header[_SUMMED].view(np.uint64), np.uint64(of_content))
    return np.uint64(_checksum(words, content[:0])).astype(np.int64)


@dataclass(frozen=True, slots=True)
class LoggedBatch:
    """A write-back batch: fields uint64 [n], old and new uint8 [n, row_bytes], old all zeros where nothing was stored.

    held: int64 [shards, 3], how many rows and parity rows a store shard has that lacks none: before the batch, with its parity, and with its
    rows. None in a log that an earlier version wrote. previous: the number of the batch before; None stands for number - 1.
    """

    number: int
    fields: np.ndarray
    old: np.ndarray
    new: np.ndarray
    held: np.ndarray | None = None
    previous: int | None = None

    @classmethod
    def empty(cls, number: int, previous: int, held: np.ndarray | None) -> LoggedBatch:
        """A batch of no rows, with which an owner begins. held: int64 [shards], what the shards have before it, and after."""
        rows = np.empty((0, 4), np.uint8)
        return cls(number, np.empty(0, np.uint64), rows, rows, None if held is None else np.stack([held] * 3, axis=1), previous)

    @property
    def before(self) -> int:
        """The number of the batch before."""
        return self.number - 1 if self.previous is None else self.previous


def _number(path: Path) -> int | None:
    """The number of the record in a file, None if it is not whole."""
    with open(path, "rb") as file:
        header = np.frombuffer(file.read(_HEADER_BYTES).ljust(_HEADER_BYTES, b"\0"), np.int64)
    return int(header[_NUMBER]) if header[_WHOLE] else None


class BatchLog(Protocol):
    """Holds, per lane, the last write-back batch until the next replaces it; by then it is released."""

    def hold(self, lane: int, batch: LoggedBatch) -> None:
        """Hold a batch of an owner of the term that its number names; on return it survives the writer."""

    def held(self, lane: int) -> LoggedBatch | None:
        """The batch that is held for a lane: of the highest term that has any, the last; None if there is none."""

    def adopt(self, lane: int, term: int) -> LoggedBatch | None:
        """`held`, and hold it on behalf of an owner of this term: what owners before log from now on counts no more."""


class FileLog:
    """A BatchLog in memory-mapped files, two a lane and term that are used in turn, which survive the process that writes them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._maps: dict[Path, mmap.mmap] = {}
        self._begun: set[tuple[int, int]] = set()  # lanes and terms that this one has held a batch of

    def hold(self, lane: int, batch: LoggedBatch) -> None:
        """Hold a batch. A writer that dies meanwhile leaves the batch before, and no byte of this one has left by then."""
        self._hold(lane, batch, term_of(batch.number))

    def _hold(self, lane: int, batch: LoggedBatch, term: int) -> None:
        held = np.zeros((0, 3), np.int64) if batch.held is None else batch.held
        parts = [np.ascontiguousarray(part).view(np.uint8).reshape(-1) for part in (batch.fields, batch.old, batch.new, held)]
        file = self._mapped(self._turn(lane, term), _HEADER_BYTES + sum(part.nbytes for part in parts))
        header = np.frombuffer(file, np.int64, _HEADER_BYTES // 8)
        # What a process has stored in a mapped file stays when it is killed, in the order in which it was: a record is whole once it says so. (Not
        # so when the host loses power: then the checksum shows it.)
        header[_WHOLE] = 0
        at = _HEADER_BYTES
        for part in parts:
            np.frombuffer(file, np.uint8, part.nbytes, at)[:] = part
            at += part.nbytes
        header[:_WHOLE] = (_MAGIC, batch.number, len(batch.fields), batch.new.shape[1])
        header[_SHARDS], header[_BEFORE] = len(held), batch.before
        header[_CHECKSUM] = checksum(header, np.frombuffer(file, np.uint8, at - _HEADER_BYTES, _HEADER_BYTES))
        header[_WHOLE] = 1
        if (lane, term) not in self._begun:
            self._begun.add((lane, term))
            for earlier, path in self._files(lane):
                if earlier < term:
                    path.unlink(missing_ok=True)  # no record there will count again

    def held(self, lane: int) -> LoggedBatch | None:
        """The newest whole record of a lane, of the highest term that has one; None if there is none. Raises CacheError for a file that is no log."""
        return self._held(lane)[1]

    def adopt(self, lane: int, term: int) -> LoggedBatch | None:
        """`held`, of which the files of this term then have a copy."""
        found, record = self._held(lane)
        if record is not None and found < term:
            self._hold(lane, record, term)
        return record

    def _held(self, lane: int) -> tuple[int, LoggedBatch | None]:
        """The term in whose files it is, and the record."""
        while True:
            try:
                places = [(term, number, path) for term, path in self._files(lane) if (number := _number(path)) is not None]
                for term, _, path in sorted(places, reverse=True):
                    record = self._record(path)
                    if record is not None:
                        return term, record
                return 0, None
            except FileNotFoundError:
                continue  # of a term that has just passed: there is a later one

    def _files(self, lane: int) -> list[tuple[int, Path]]:
        """All files of a lane, with their terms."""
        named = ((_NAME.fullmatch(path.name), path) for path in self._directory.glob(f"lane-{lane}-*.log"))
        return [(int(name[1] or 0), path) for name, path in named if name is not None]

    def _record(self, path: Path) -> LoggedBatch | None:
        # An array that may be written, as those that are summed when a record is held: `_checksum` is compiled for these.
        data = np.fromfile(path, np.uint8)
        header = np.frombuffer(data, np.int64, _HEADER_BYTES // 8)
        number, count, row_bytes, shards = (int(header[place]) for place in (_NUMBER, _COUNT, _ROW_BYTES, _SHARDS))
        end = _HEADER_BYTES + count * (8 + 2 * row_bytes)
        if header[_MAGIC_AT] not in (_MAGIC, _FIRST_MAGIC) or len(data) < end + 24 * shards:
            raise CacheError(f"{path}: is not the log of a write-back batch; it belongs to the run and cannot be made anew")
        previous = None
        if header[_MAGIC_AT] == _MAGIC:
            if header[_CHECKSUM] != checksum(
                header, np.frombuffer(data, np.uint8, end + 24 * shards - _HEADER_BYTES, _HEADER_BYTES)
            ):
                return None
            previous = int(header[_BEFORE])
        fields = np.frombuffer(data, np.uint64, count, _HEADER_BYTES)
        rows = np.frombuffer(data, np.uint8, 2 * count * row_bytes, _HEADER_BYTES + 8 * count).reshape(2, count, row_bytes)
        held = np.frombuffer(data[end : end + 24 * shards], np.int64).reshape(shards, 3) if shards else None
        return LoggedBatch(number, fields, rows[0], rows[1], held, previous)

    def close(self) -> None:
        """Let go of the files, which stay."""
        for file in self._maps.values():
            file.close()
        self._maps.clear()

    def _turn(self, lane: int, term: int) -> Path:
        """The file whose turn it is: not that of the record that counts."""
        paths = [self._directory / f"lane-{lane}-term-{term}-{turn}.log" for turn in range(2)]
        numbers = []
        for path in paths:
            number, file = None, self._maps.get(path)
            if file is not None:
                header = np.frombuffer(file, np.int64, _HEADER_BYTES // 8)
                number = int(header[_NUMBER]) if header[_WHOLE] else None
            elif path.exists() and _number(path) is not None and (record := self._record(path)) is not None:
                # An owner before this one left it, who may have died with its host: what is not what was written does not count.
                number = record.number
            numbers.append(-1 if number is None else number)
        return paths[0] if numbers[0] <= numbers[1] else paths[1]

    def _mapped(self, path: Path, size: int) -> mmap.mmap:
        file = self._maps.get(path)
        if file is not None and len(file) >= size:
            return file
        self._directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            # Room beforehand: a full disk is noticed here, and waited for, and not later, by a signal.
            size = max(2 * size, os.fstat(descriptor).st_size)
            persist(path, lambda: os.posix_fallocate(descriptor, 0, size))
            self._maps[path] = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        return self._maps[path]


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
