"""The log of each lane's last write-back batch, until that batch is released.

The log is in files or, if trainers run on several hosts, in the memory of the trainers that have
replicas of the lane.

A record names its batch and the batch before. From these numbers follow the markers that a store
shard may have. The record of batch n therefore stays whole until that of the next batch is whole: a
writer that dies while it writes a record leaves the one before. Each term has its own files, so an
owner that does not know yet that it was replaced changes no record of its successor.

In memory (`CopiedLog`), the lane's owner and every trainer that has a replica of the lane hold the
record. The owner sends nothing to the store before all of them have acknowledged the record, so
from then on the record survives its writer. A trainer that takes a lane over has a replica of it,
so it has the record as well. A trainer that holds a record of a later term refuses records of
earlier terms, because their writer no longer owns the lane.
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
# FLLOG1. Earlier versions wrote neither the number of the batch before nor a checksum.
_FIRST_MAGIC = 0x31474F4C4C46
_HEADER_BYTES = 64
# The words (int64) of the header. After it come fields, old, new and held (24 bytes per shard).
_MAGIC_AT, _NUMBER, _COUNT, _ROW_BYTES, _WHOLE, _SHARDS, _BEFORE, _CHECKSUM = range(8)
# The words of the header that the checksum covers.
_SUMMED = [_MAGIC_AT, _NUMBER, _COUNT, _ROW_BYTES, _SHARDS, _BEFORE]
_NAME = re.compile(r"lane-\d+-(?:term-(\d+)-)?[01]\.log")
_PRIME = np.uint64(0x9E3779B185EBCA87)
_SEEDS = tuple(np.uint64(seed) for seed in (0x60EA27EEADC0B5D6, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x27D4EB2F165667C5))


@nb.njit(nogil=True, cache=True)
def _checksum(words, tail):  # type: ignore[no-untyped-def]
    """Compute a checksum of words (uint64 [n]) and tail (uint8 [m]).

    It takes four words at a time, in independent chains, so that it runs as fast as memory does.
    """
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
    """Compute the checksum of a record.

    Args:
        header: int64 [8].
        content: uint8 [n], 8-byte-aligned.
    """
    whole = len(content) // 8 * 8
    of_content = _checksum(content[:whole].view(np.uint64), content[whole:])
    words = np.append(header[_SUMMED].view(np.uint64), np.uint64(of_content))
    return np.uint64(_checksum(words, content[:0])).astype(np.int64)


@dataclass(frozen=True, slots=True)
class LoggedBatch:
    """A write-back batch as the log holds it.

    Attributes:
        number: The batch's number.
        fields: uint64 [n].
        old: uint8 [n, row_bytes], the rows as the store had them before, all zeros where it had
            none.
        new: uint8 [n, row_bytes].
        held: int64 [shards, 3], how many rows and parity rows a shard has that lacks none: before
            the batch, with its parity, and with its rows. None in a log that an earlier version
            wrote.
        previous: The number of the batch before. If None, it is number - 1.
    """

    number: int
    fields: np.ndarray
    old: np.ndarray
    new: np.ndarray
    held: np.ndarray | None = None
    previous: int | None = None

    @classmethod
    def empty(cls, number: int, previous: int, held: np.ndarray | None) -> LoggedBatch:
        """Make a batch without rows, such as an owner's first.

        Args:
            held: int64 [shards], what the shards have, before and after it. If None, that is not
                known.
        """
        rows = np.empty((0, 4), np.uint8)
        return cls(number, np.empty(0, np.uint64), rows, rows, None if held is None else np.stack([held] * 3, axis=1), previous)

    @property
    def before(self) -> int:
        """The number of the batch before."""
        return self.number - 1 if self.previous is None else self.previous


def _number(path: Path) -> int | None:
    """Return the number of the record in a file, or None if the record is not whole."""
    with open(path, "rb") as file:
        header = np.frombuffer(file.read(_HEADER_BYTES).ljust(_HEADER_BYTES, b"\0"), np.int64)
    return int(header[_NUMBER]) if header[_WHOLE] else None


class BatchLog(Protocol):
    """Holds each lane's last write-back batch until the next one replaces it.

    By then the batch is released.
    """

    def hold(self, lane: int, batch: LoggedBatch) -> None:
        """Hold a batch. When this returns, the batch survives the death of its writer.

        The batch belongs to an owner of the term in its number.
        """

    def held(self, lane: int) -> LoggedBatch | None:
        """Return the last batch of the highest term that has one for the lane, or None."""

    def adopt(self, lane: int, term: int) -> LoggedBatch | None:
        """Return what `held` returns, and hold it for an owner of this term as well.

        From then on, batches that earlier owners log do not count.
        """


class FileLog:
    """A BatchLog in memory-mapped files, which survive the process that writes them.

    Each lane and term has two files, which are used in turn.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._maps: dict[Path, mmap.mmap] = {}
        # The lanes and terms of which this object has held a batch.
        self._begun: set[tuple[int, int]] = set()

    def hold(self, lane: int, batch: LoggedBatch) -> None:
        """Hold a batch.

        If the writer dies meanwhile, the batch before stays in the log. No byte of the new one has
        been sent to the store by then.
        """
        self._hold(lane, batch, term_of(batch.number))

    def _hold(self, lane: int, batch: LoggedBatch, term: int) -> None:
        held = np.zeros((0, 3), np.int64) if batch.held is None else batch.held
        parts = [np.ascontiguousarray(part).view(np.uint8).reshape(-1) for part in (batch.fields, batch.old, batch.new, held)]
        file = self._mapped(self._turn(lane, term), _HEADER_BYTES + sum(part.nbytes for part in parts))
        header = np.frombuffer(file, np.int64, _HEADER_BYTES // 8)
        # Bytes that a process has stored in a mapped file survive when the process is killed, and
        # they were stored in program order. So a record is whole once _WHOLE says so. If the host
        # loses power, that order does not hold; then the checksum shows that the record is not
        # whole.
        header[_WHOLE] = 0
        at = _HEADER_BYTES
        for part in parts:
            np.frombuffer(file, np.uint8, part.nbytes, at)[:] = part
            at += part.nbytes
        header[:_WHOLE] = (_MAGIC, batch.number, len(batch.fields), batch.new.shape[1])
        header[_SHARDS], header[_BEFORE] = len(held), batch.before
        header[_CHECKSUM] = checksum(header, np.frombuffer(file, np.uint8, at - _HEADER_BYTES, _HEADER_BYTES))
        header[_WHOLE] = 1
        # Only now, with a whole record of this term, may the files of earlier terms go.
        if (lane, term) not in self._begun:
            self._begun.add((lane, term))
            for earlier, path in self._files(lane):
                if earlier < term:
                    path.unlink(missing_ok=True)

    def held(self, lane: int) -> LoggedBatch | None:
        """Return the newest whole record of the highest term that has one for the lane, or None.

        Raises:
            CacheError: A file is not a log.
        """
        return self._held(lane)[1]

    def adopt(self, lane: int, term: int) -> LoggedBatch | None:
        """Return what `held` returns, after copying it to the files of this term."""
        found, record = self._held(lane)
        if record is not None and found < term:
            self._hold(lane, record, term)
        return record

    def _held(self, lane: int) -> tuple[int, LoggedBatch | None]:
        """Return the term and the valid record of a lane, or (0, None) if no record is valid.

        The term is that in whose files the record is.
        """
        while True:
            try:
                places = [(term, number, path) for term, path in self._files(lane) if (number := _number(path)) is not None]
                for term, _, path in sorted(places, reverse=True):
                    record = self._record(path)
                    if record is not None:
                        return term, record
                return 0, None
            except FileNotFoundError:
                # A later term has begun meanwhile and deleted this file. Look again.
                continue

    def _files(self, lane: int) -> list[tuple[int, Path]]:
        """Return all files of a lane, with their terms."""
        named = ((_NAME.fullmatch(path.name), path) for path in self._directory.glob(f"lane-{lane}-*.log"))
        return [(int(name[1] or 0), path) for name, path in named if name is not None]

    def _record(self, path: Path) -> LoggedBatch | None:
        # A writable array, like those whose checksum is computed when a record is held: numba has
        # compiled `_checksum` for such arrays only.
        data = np.fromfile(path, np.uint8)
        header = np.frombuffer(data, np.int64, _HEADER_BYTES // 8)
        number, count, row_bytes, shards = (int(header[place]) for place in (_NUMBER, _COUNT, _ROW_BYTES, _SHARDS))
        end = _HEADER_BYTES + count * (8 + 2 * row_bytes)
        if header[_MAGIC_AT] not in (_MAGIC, _FIRST_MAGIC) or len(data) < end + 24 * shards:
            raise CacheError(f"{path}: is not the log of a write-back batch; it belongs to the run and cannot be recreated")
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
        """Close the files. Their content stays."""
        for file in self._maps.values():
            file.close()
        self._maps.clear()

    def _turn(self, lane: int, term: int) -> Path:
        """Return the file to write next: not the one with the valid record."""
        paths = [self._directory / f"lane-{lane}-term-{term}-{turn}.log" for turn in range(2)]
        numbers = []
        for path in paths:
            number, file = None, self._maps.get(path)
            if file is not None:
                header = np.frombuffer(file, np.int64, _HEADER_BYTES // 8)
                number = int(header[_NUMBER]) if header[_WHOLE] else None
            elif path.exists() and _number(path) is not None and (record := self._record(path)) is not None:
                # An earlier owner left the file, and may have died with its host. A record that
                # fails its checksum does not count.
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
            # Allocate the space beforehand. A full disk is then noticed here, where `persist` waits
            # for space, and not later by a signal when the mapped memory is written.
            size = max(2 * size, os.fstat(descriptor).st_size)
            persist(path, lambda: os.posix_fallocate(descriptor, 0, size))
            self._maps[path] = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        return self._maps[path]


PURPOSE = "batch log"
# The one-byte answers to a record.
_HELD, _REFUSED = b"\1", b"\0"
# The most bytes of a record.
_MOST_BYTES = 1 << 31
# The most bytes of one send.
_PART = 1 << 20


class HeldRecords:
    """The last record of each lane, in memory, and the term for which it counts.

    Any thread may use it.
    """

    def __init__(self) -> None:
        self._changed = threading.Lock()
        self._records: dict[int, tuple[int, LoggedBatch]] = {}

    def hold(self, lane: int, term: int, batch: LoggedBatch) -> bool:
        """Hold a record of an owner of this term. Returns False if a later term has a record.

        A record that arrives late, after its successor, changes nothing.
        """
        with self._changed:
            known, last = self._records.get(lane, (term, batch))
            if known > term:
                return False
            if known < term or last.number <= batch.number:
                self._records[lane] = term, batch
            return True

    def held(self, lane: int) -> tuple[int, LoggedBatch] | None:
        """Return a lane's record and the term for which it counts, or None."""
        with self._changed:
            return self._records.get(lane)


class LogService:
    """Receives the records of other trainers' lanes into `records`, until `close`.

    It accepts only connections that present the job's token. The constructor starts it, and raises
    OSError if it cannot listen.

    Attributes:
        address: The host at which it listens.
        port: The port at which it listens.
    """

    def __init__(self, host: str, token: str, records: HeldRecords) -> None:
        self._records = records
        self._server = TokenServer(host, 0, token, PURPOSE, self._serve)
        self.address, self.port = self._server.address, self._server.port

    def close(self) -> None:
        """Stop receiving."""
        self._server.close()

    def _serve(self, peer: socket.socket, _: str) -> None:
        while (message := receive(peer, _MOST_BYTES)) is not None:
            try:
                lane, term, batch = _unpacked(message.values, message.payload)
            except (KeyError, TypeError, ValueError):
                # The peer is not a trainer of this version.
                return
            peer.sendall(_HELD if self._records.hold(lane, term, batch) else _REFUSED)


def _packed(lane: int, term: int, batch: LoggedBatch) -> bytes:
    held = np.zeros((0, 3), np.int64) if batch.held is None else batch.held
    parts = [np.ascontiguousarray(part).tobytes() for part in (batch.fields, batch.old, batch.new, held)]
    values = {
        "lane": lane,
        "term": term,
        "number": batch.number,
        "before": batch.before,
        "rows": len(batch.fields),
        "row_bytes": batch.new.shape[1],
        "shards": None if batch.held is None else len(batch.held),
    }
    return b"".join([packed_head(values, sum(map(len, parts))), *parts])


def _unpacked(values: Mapping[str, Any], payload: bytearray) -> tuple[int, int, LoggedBatch]:
    rows, row_bytes, shards = int(values["rows"]), int(values["row_bytes"]), values["shards"]
    sizes = [8 * rows, rows * row_bytes, rows * row_bytes, 24 * int(shards or 0)]
    if min(rows, row_bytes, int(shards or 0)) < 0 or sum(sizes) != len(payload):
        raise ValueError("record: its sizes do not match its parts")
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
    """The trainers that hold each lane's log in a term, besides the lane's owner.

    Attributes:
        of: The holders of each lane.
        places: The host and port of each trainer's LogService.
    """

    of: Mapping[int, Collection[int]]
    places: Mapping[int, tuple[str, int]]


class CopiedLog:
    """A BatchLog of one trainer, which sends each record to all holders of its lane.

    `hold` returns once all of them have the record.

    Args:
        records: The records in this trainer's memory. Its LogService adds those of other trainers.
        silence: How long a holder may take to answer.
        on_lost: Called with the reason when a holder does not answer, in the thread that holds a
            batch. It must not call methods of this object. It should end the term; the thread then
            waits for `begin_term` of the next one. Records of a takeover do not wait: for them,
            CopyLost is raised.
    """

    def __init__(self, records: HeldRecords, token: str, silence: timedelta, on_lost: Callable[[str], None]) -> None:
        self._records, self._token, self._silence, self._on_lost = records, token, silence, on_lost
        self._changed = threading.Condition()
        # Each `begin_term` raises it by one.
        self._generation = 0
        self._interrupted: str | None = None
        self._closed = False
        # A pipe. The thread that waits for answers polls its read end, and `interrupt` writes to
        # the other. None once closed.
        self._wake: tuple[int, int] | None = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        # This lock guards the fields below, except for `_adopted`.
        self._sending = threading.Lock()
        self._holders = Holders({}, {})
        self._connections: dict[int, socket.socket] = {}
        # The term in which each lane was taken over.
        self._adopted: dict[int, int] = {}
        # For each lane of this trainer, the term for which its records count.
        self._owned: dict[int, int] = {}

    def begin_term(self, holders: Holders, hosted: Collection[int]) -> None:
        """Switch to the holders of the next term, and send them the records they need.

        When this returns, the holders have the last records of the lanes that this trainer hosted
        before and goes on to host. Threads that wait in `hold` then try again.

        Args:
            hosted: The lanes that this trainer hosts in the term.

        Raises:
            CopyLost: A holder cannot be reached. Threads that wait in `hold` go on waiting for a
                further term.
        """
        self.interrupt("the next term begins")
        # `interrupt` ends the wait for answers, so a thread that holds the lock soon releases it.
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
        """Stop waiting for the holders of this term, because it is over. Any thread may call it."""
        with self._changed:
            self._interrupted = why
            if self._wake is not None:
                with contextlib.suppress(BlockingIOError):
                    os.write(self._wake[1], b"!")

    def hold(self, lane: int, batch: LoggedBatch) -> None:
        """See BatchLog.

        Raises:
            CopyLost: The batch is a takeover's, and a holder does not answer.
            CacheError: The log was closed meanwhile.
        """
        term = term_of(batch.number)
        taken = self._adopted.get(lane) == term and batch.number == first_number(term)
        if lane in self._adopted and not taken:
            del self._adopted[lane]
        # A lane that this trainer goes on to host keeps the term in its batch numbers, so `term`
        # may be older than the current one.
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
                # The record may not have reached every holder. Wait for the next term, which may
                # have other holders, and send it again.
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
        """Close the log. Threads that wait get an error; the records stay with their holders."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.interrupt("the batch log is closed")
        with self._sending, self._changed:
            self._disconnect(list(self._connections))
            if self._wake is not None:
                for end in self._wake:
                    os.close(end)
                self._wake = None

    def begin_with(self, lane: int, number: int) -> None:
        """Set the record from which the next owner of a stopped run's lane starts.

        Every shard has batch `number` of the lane. The record counts until the next owner holds its
        own first record.
        """
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
            raise CopyLost(f"trainer {trainer}: has not published the address of its batch log")
        try:
            connection = connected(*place, self._token, PURPOSE, self._silence.total_seconds())
        except WrongToken as error:
            raise CopyLost(f"trainer {trainer}: at {place[0]}:{place[1]}: {error}") from error
        except OSError as error:
            raise CopyLost(
                f"trainer {trainer}: cannot be reached for the batch log at {place[0]}:{place[1]} ({error})"
            ) from error
        connection.setblocking(False)
        self._connections[trainer] = connection

    def _replicate(self, lane: int, term: int, batch: LoggedBatch) -> None:
        """Send a record to all holders of its lane, and return when all have acknowledged it.

        Raises:
            CopyLost: A holder does not take the record. The connections to the lane's holders are
                closed.
        """
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
                raise CopyLost(f"trainer {silent}: did not acknowledge the batch log of lane {lane}")
            for descriptor, event in poll.poll(1000 * patience + 1):
                if descriptor not in left:
                    # `interrupt` has written to the pipe. The loop checks that next.
                    continue
                trainer, unsent = left[descriptor]
                connection = self._connections[trainer]
                try:
                    if unsent and event & select.POLLOUT:
                        unsent = unsent[connection.send(unsent[:_PART]) :]
                        left[descriptor] = trainer, unsent
                        if not unsent:
                            poll.modify(descriptor, select.POLLIN)
                    # A holder answers only after the whole record. An earlier answer, or the end of
                    # the connection, means that it does not hold the record.
                    if event & ~select.POLLOUT:
                        answer = connection.recv(1)
                        if answer != _HELD or unsent:
                            why = "another trainer owns the lane in a later term" if answer == _REFUSED else "it has left"
                            raise CopyLost(f"trainer {trainer}: did not store the batch log of lane {lane}: {why}")
                        del left[descriptor]
                        poll.unregister(descriptor)
                except BlockingIOError:
                    continue
                except OSError as error:
                    raise CopyLost(f"trainer {trainer}: did not store the batch log of lane {lane} ({error})") from error

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake is not None and os.read(self._wake[0], 64):
                pass

    def _disconnect(self, trainers: Collection[int]) -> None:
        for trainer in trainers:
            connection = self._connections.pop(trainer, None)
            if connection is not None:
                connection.close()
