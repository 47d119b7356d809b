"""Reading rows at rest and checking each against what the schedule expects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from cache.decoding import Decoding, Survivors, plan_decoding
from cache.errors import RowError, StoreError
from cache.marker import Marker
from cache.namespace import lane_key
from cache.placement import Placement, fields
from cache.rows import RowLayout, decode_rows
from cache.staging import Rows, RowShapes, put_rows
from cache.store import Read, Store
from cache.stripes import LaneStripes

READ_ROWS = 1 << 16  # of one exchange when many rows are read at once


@dataclass(slots=True)
class StoredRows:
    """Where the rows of a run rest: the store, the placement, the layout of each table, and the namespace.

    epochs: the fence epoch of a (lane, store shard), 0 for those not there; whoever fences one notes it here. lost: shards whose rows are decoded
    from their stripes by `read_rows`, for which stripes(lane) tells what was written.
    """

    store: Store
    placement: Placement
    layouts: Sequence[RowLayout]
    namespace: str
    epochs: dict[tuple[int, int], int] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    stripes: Callable[[int], LaneStripes] | None = None
    shapes: RowShapes = field(init=False)

    def __post_init__(self) -> None:
        if self.placement.shard_count != self.store.shards:
            raise StoreError(
                f"store shards: must be as many as the run's placement has, {self.placement.shard_count}; got {self.store.shards}; "
                "name those that the run was started with, in order"
            )
        self.shapes = RowShapes.of(self.layouts)

    def key(self, lane: int, shard: int) -> bytes:
        """The key of a lane's hash on a store shard."""
        return lane_key(self.namespace, lane, self.epochs.get((lane, shard), 0))

    def keys(self, lane: int) -> list[bytes]:
        """The key of a lane's hash on every store shard."""
        return [self.key(lane, shard) for shard in range(self.placement.shard_count)]


@dataclass(frozen=True, slots=True)
class Expected:
    """Rows of one lane and what the schedule says of them: table int16, ordinal int64, id int64, tag int32, all [n].

    Any tag from 1 to `tag` is right where `tag_at_most` is set, else only `tag` itself.
    """

    lane: int
    table: np.ndarray
    ordinal: np.ndarray
    id: np.ndarray
    tag: np.ndarray
    tag_at_most: bool = False

    def __len__(self) -> int:
        return len(self.table)

    def select(self, which: np.ndarray | slice) -> Expected:
        """The rows of a mask, of places or of a slice."""
        arrays = (self.table[which], self.ordinal[which], self.id[which], self.tag[which])
        return Expected(self.lane, *arrays, tag_at_most=self.tag_at_most)


@dataclass(slots=True)
class Request:
    """A Read of rows of one shape, and the places (int64 [n]) of its rows among those that were asked for."""

    read: Read
    places: np.ndarray
    shape: int


def plan_reads(stored: StoredRows, expected: Expected) -> list[Request]:
    """The reads that fetch these rows: one per shape and store shard."""
    shards = stored.placement.shard_count
    shard_of = stored.placement.shards(expected.lane, expected.table, expected.ordinal)
    owner = stored.shapes.of_table[expected.table] * shards + shard_of
    order = np.argsort(owner, kind="stable")
    owner = owner[order]
    names = fields(expected.table, expected.ordinal)[order]
    starts = np.flatnonzero(np.diff(owner, prepend=-1))
    requests = []
    for start, end in pairwise([*starts, len(owner)]):
        shape, shard = divmod(int(owner[start]), shards)
        rows = np.empty((end - start, stored.shapes.row_bytes(shape)), np.uint8)
        requests.append(Request(Read(shard, stored.key(expected.lane, shard), names[start:end], rows), order[start:end], shape))
    return requests


def check_marker(stored: StoredRows, lane: int, read: Read, markers: Sequence[Marker]) -> None:
    """Refuse a store shard whose marker for the lane is none of `markers`, those that it may have now."""
    found = Marker.parse(read.marker)
    if found not in markers:
        raise StoreError(
            f"store {stored.store.urls[read.shard]}: stale shard: its last write-back batch of lane {lane} is {found}, must be {markers[0]}; "
            "it was emptied, restarted from an older save, or belongs to another run: restore it and --resume, or start again with --overwrite"
        )


def accept(stored: StoredRows, expected: Expected, request: Request, into: Rows, places: np.ndarray, check_tags: bool) -> None:
    """Check the rows that a finished Read brought and copy them to `into` at `places` (int64 [n], for the rows of `expected`).

    Raises RowError for a missing row and, with check_tags, for a wrong id or tag.
    """
    read = request.read
    if read.missing is not None:
        raise _row_error(stored, expected, request, int(np.flatnonzero(read.missing)[0]), "is missing", None)
    width, state_width = stored.shapes.shapes[request.shape]
    count = len(read.rows)
    weights, state = np.empty((count, width), np.float32), np.empty((count, state_width), np.float32)
    ids, tags = np.empty(count, np.int64), np.empty(count, np.int32)
    decode_rows(read.rows, width, state_width, weights, state, ids, tags)
    if check_tags:
        wanted = expected.select(request.places)
        wrong = np.flatnonzero(ids != wanted.id)
        if len(wrong):
            what = f"is not there, but id {ids[wrong[0]]}"
            raise _row_error(stored, expected, request, int(wrong[0]), what, int(tags[wrong[0]]))
        wrong = np.flatnonzero((tags < 1) | (tags > wanted.tag) if expected.tag_at_most else tags != wanted.tag)
        if len(wrong):
            raise _row_error(stored, expected, request, int(wrong[0]), "is another version", int(tags[wrong[0]]))
    targets = places[request.places]
    put_rows(weights, targets, into.weights)
    put_rows(state, targets, into.state)
    into.tag[targets] = tags


def _row_error(stored: StoredRows, expected: Expected, request: Request, row: int, what: str, found: int | None) -> RowError:
    place = int(request.places[row])
    layout = stored.layouts[int(expected.table[place])]
    tag = ("at most " if expected.tag_at_most else "") + str(int(expected.tag[place]))
    return RowError(
        f"table {layout.name}, row id {int(expected.id[place])} (lane {expected.lane}, ordinal {int(expected.ordinal[place])}) {what} on store "
        f"{stored.store.urls[request.read.shard]}: tag must be {tag}, found {'none' if found is None else found}; the store lost or mixed up "
        "writes: restore its data and --resume, or start again with --overwrite"
    )


def read_rows(stored: StoredRows, expected: Expected, batches: int | None = None, check_tags: bool = True) -> Rows:
    """Read rows of one lane, in the order of `expected`, 65,536 at a time; those on lost shards are decoded.

    batches: the number of the lane's last write-back batch, checked against every store shard that is asked; None: not checked. Raises
    RowError for a row that is missing or has another id or tag, StoreError for a stale shard or what the store answers, RowsLost where
    too many shards are lost.
    """
    count = len(expected)
    rows = Rows.zeros(count, stored.shapes)
    for start in range(0, count, READ_ROWS):
        part = expected.select(slice(start, start + READ_ROWS))
        requests = plan_reads(stored, part)
        lost = [request for request in requests if request.read.shard in stored.lost]
        decodings = [_plan_lost(stored, part, request) for request in lost]
        reads = [request.read for request in requests if request.read.shard not in stored.lost]
        further = [read for decoding in decodings for read in decoding.reads]
        stored.store.exchange(reads + further, [])
        if batches is not None:
            for read in reads + further:
                check_marker(stored, part.lane, read, [Marker(batches, batches)])
        for read in further:
            if read.missing is not None:
                raise missing_value(stored, part.lane, read)
        for request, decoding in zip(lost, decodings, strict=True):
            request.read.rows[:] = decoding.decode()
        places = np.arange(start, start + len(part))
        for request in requests:
            accept(stored, part, request, rows, places, check_tags)
    return rows


def _plan_lost(stored: StoredRows, expected: Expected, request: Request) -> Decoding:
    assert stored.stripes is not None
    gone = stored.placement.mask(stored.lost)
    ordinal, k = expected.ordinal[request.places], stored.placement.k
    wanted = expected.table[request.places], ordinal // k, ordinal % k
    survivors = Survivors.of(stored.placement, gone)
    return plan_decoding(stored.stripes(expected.lane), survivors, wanted, request.read.rows.shape[1], stored.keys(expected.lane))


def missing_value(stored: StoredRows, lane: int, read: Read) -> RowError:
    """The error for a row or parity row that a shard with the right marker lacks."""
    assert read.missing is not None
    name = int(read.fields[int(np.flatnonzero(read.missing)[0])])
    return RowError(
        f"store {stored.store.urls[read.shard]}: the value of field {name:#018x} of lane {lane} is missing: the store lost writes; "
        "restore its data and --resume, or start again with --overwrite"
    )
