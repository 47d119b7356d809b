"""Reading rows at rest and checking each against what the schedule expects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from foreload.cache.client.store import (
    COMMAND_ROWS,
    Read,
    Store,
    Write,
)
from foreload.cache.errors import RowError, StoreError
from foreload.cache.parity.decoding import Decoding, StripePlaces, plan_alone, plan_decoding
from foreload.cache.parity.placement import Placement
from foreload.cache.parity.shard_contents import count_rows
from foreload.cache.parity.stripes import LaneStripes, Written, shards_of
from foreload.cache.protocol.shards.fence import judge_wrong_type
from foreload.cache.protocol.shards.marker import Marker, Migrated
from foreload.cache.protocol.shards.namespace import lane_key
from foreload.cache.protocol.shards.shard_table import ShardTable
from foreload.cache.rows.layout import RowLayout
from foreload.cache.rows.row_bytes import PARITY_BIT, decode_rows, fields, unpack
from foreload.cache.rows.staging import Rows, RowShapes, put_rows
from foreload.pipelines.schedule.format import RowColumns

READ_ROWS = 1 << 16  # of one exchange when many rows are read at once


@dataclass(slots=True)
class StoredRows:
    """Where the rows of a run rest: the store, the placement, the layout of each table, and the namespace.

    shards: how each store shard is; rows on those that are lost are decoded from their stripes by `read_rows`, for which stripes(lane) says
    what was written.
    """

    store: Store
    placement: Placement
    layouts: Sequence[RowLayout]
    namespace: str
    stripes: Callable[[int], LaneStripes] | None = None
    shapes: RowShapes = field(init=False)
    shards: ShardTable = field(init=False)

    def __post_init__(self) -> None:
        if self.placement.shard_count != self.store.shards:
            raise StoreError(
                f"store shards: must be as many as the run's placement has, {self.placement.shard_count}; got {self.store.shards}; "
                "name those that the run was started with, in order"
            )
        self.shapes = RowShapes.of(self.layouts)
        self.shards = ShardTable(self.store.urls, self.placement)
        self.store.judge_wrong_type(self._judge_wrong_type)

    def _judge_wrong_type(self, shard: int, refusal: StoreError) -> StoreError:
        epochs = {lane: self.shards.of(lane).epochs[shard] for lane in self.shards.lanes}
        return judge_wrong_type(self.store.urls[shard], self.namespace, epochs, refusal)

    def stripes_of(self, lane: int) -> LaneStripes:
        """A lane's stripes, where they are now."""
        assert self.stripes is not None
        stripes = self.stripes(lane)
        stripes.places = self.shards.of(lane).places
        return stripes

    def lane_stripes(self, lane: int, written: Written | np.ndarray) -> LaneStripes:
        """A lane's stripes, where they are now. written: or int64 [tables], all ordinals below which were."""
        kept = written if isinstance(written, Written) else Written(written, self.placement.k)
        return LaneStripes(lane, self.placement.k, self.shards.of(lane).places, kept)

    def shards_of(self, lane: int, table: np.ndarray, ordinal: np.ndarray) -> np.ndarray:
        """The store shard of each row of a lane, as `Placement.shards` has it, where they are now."""
        return shards_of(self.placement, lane, table, ordinal, self.shards.of(lane).places)

    def key(self, lane: int, shard: int) -> bytes:
        """The key of a lane's hash on a store shard."""
        return lane_key(self.namespace, lane, self.shards.of(lane).epochs[shard])

    def keys(self, lane: int) -> list[bytes]:
        """The key of a lane's hash on every store shard."""
        return [lane_key(self.namespace, lane, epoch) for epoch in self.shards.of(lane).epochs]

    def write(
        self,
        lane: int,
        shard: int,
        fields: np.ndarray,
        rows: np.ndarray,
        marker: Marker,
        fresh: int,
        migrated: Migrated | None = None,
    ) -> Write:
        """A Write of rows of a lane, `fresh` of which the shard has not, with the marker, and `migrated` if that is given, too; where it has no
        marker yet, or nothing that says how far the lane has moved, these are new as well."""
        own = self.shards.of(lane)
        new = fresh + (own.held[shard] is None) + (migrated is not None and own.migrated[shard] is None)
        stamp = None if migrated is None else migrated.stored()
        return Write(shard, self.key(lane, shard), fields, rows, marker.stored(), range(new, new + 1), migrated=stamp)

    def note(self, lane: int, write: Write) -> None:
        """Count in `held` what a write that was acknowledged brought to its shard; a repair, which has no marker, brings nothing new."""
        if write.new is not None and write.marker is not None:
            own = self.shards.of(lane)
            before, new = own.held[write.shard], write.new.start
            if write.migrated is not None:
                new -= own.migrated[write.shard] is None
                own.migrated[write.shard] = Migrated.parse(write.migrated)
            # The first write to a hash brings the marker, too, which is no row.
            own.held[write.shard] = new - 1 if before is None else before + new

    def lose(self, shard: int, why: str) -> bool:
        """Read without a shard from now on, if parity covers that; whether it does."""
        covered = self.shards.covers(shard)
        if covered:
            self.shards.lose(shard, why)
        return covered

    def go_without(self, shard: int, error: StoreError) -> None:
        """Lose a shard, whether parity covers that or not. Without parity, raise the error instead."""
        if not self.placement.r:
            raise error
        self.shards.lose(shard, str(error))

    def expected(self, lane: int) -> np.ndarray:
        """How many rows and parity rows of a lane every shard has, by arithmetic: int64 [shards]."""
        return count_rows(self.stripes_of(lane), len(self.layouts), self.placement.shard_count).fields


@dataclass(frozen=True, slots=True)
class Expected(RowColumns):
    """Rows of one lane and what the schedule says of them.

    Any tag from 1 to `tag` is right where `tag_at_most` is set, else only `tag` itself. any_id: the ids are not known; `accept` puts them there.
    """

    lane: int
    tag_at_most: bool = False
    any_id: bool = False

    def select(self, which: np.ndarray | slice) -> Expected:
        """The rows of a mask, of places or of a slice."""
        return Expected(*self.columns(which), self.lane, self.tag_at_most, self.any_id)


@dataclass(slots=True)
class PlannedRead:
    """A Read of rows of one shape from one store shard.

    places: int64 [n], of its rows among those that are wanted; shape: as in `RowShapes`; asked: the read was made; decoded: the stripes gave the
    rows, not the read.
    """

    read: Read
    places: np.ndarray
    shape: int
    asked: bool = False
    decoded: bool = False


def plan_reads(stored: StoredRows, expected: Expected) -> list[PlannedRead]:
    """The reads that fetch these rows: one per shape and store shard."""
    shards = stored.placement.shard_count
    shard_of = stored.shards_of(expected.lane, expected.table, expected.ordinal)
    shape_and_shard = stored.shapes.of_table[expected.table] * shards + shard_of
    order = np.argsort(shape_and_shard, kind="stable")
    shape_and_shard = shape_and_shard[order]
    names = fields(expected.table, expected.ordinal)[order]
    starts = np.flatnonzero(np.diff(shape_and_shard, prepend=-1))
    planned_reads = []
    for start, end in pairwise([*starts, len(shape_and_shard)]):
        shape, shard = divmod(int(shape_and_shard[start]), shards)
        rows = np.empty((end - start, stored.shapes.row_bytes(shape)), np.uint8)
        # Where there is parity, a value that is no row is as good as none.
        read = Read(shard, stored.key(expected.lane, shard), names[start:end], rows, any_length=stored.placement.r > 0)
        planned_reads.append(PlannedRead(read, order[start:end], shape))
    return planned_reads


def check_marker(stored: StoredRows, lane: int, read: Read, markers: Sequence[Marker]) -> None:
    """Refuse a store shard whose marker for the lane is none of `markers`, those that it may have now."""
    marker = Marker.parse(read.marker)
    if marker not in markers:
        raise StoreError(
            f"store {stored.shards.urls[read.shard]}: stale shard: its last write-back batch of lane {lane} is {marker}, must be {markers[0]}; "
            "it was emptied, restarted from an older save, or belongs to another run: restore it and --resume, or start again with --overwrite"
        )


def check_answer(stored: StoredRows, lane: int, write: Write) -> None:
    """Refuse a store shard whose answer to a write says that it lost rows."""
    if write.surprise is not None:
        raise StoreError(
            f"store {stored.shards.urls[write.shard]}: lost rows of lane {lane}: {write.surprise}; it was emptied, or rows were deleted there: "
            "restore it and --resume, or start again with --overwrite"
        )


def wrong_rows(wanted: Expected, ids: np.ndarray, tags: np.ndarray) -> np.ndarray:
    """Which rows, by their ids (int64 [n]) and tags (int32 [n]), are not those that are wanted: bool [n]."""
    return (ids != wanted.id) | ((tags < 1) | (tags > wanted.tag) if wanted.tag_at_most else tags != wanted.tag)


def accept(stored: StoredRows, expected: Expected, planned: PlannedRead, into: Rows, places: np.ndarray) -> None:
    """Check the rows that a finished Read brought and copy them to `into` at `places` (int64 [n], for the rows of `expected`).

    Raises RowError for a row that is missing or has another id or tag.
    """
    read = planned.read
    if read.missing is not None:
        raise _row_error(stored, expected, planned, read.missing, "is missing", None)
    width, state_width = stored.shapes.shapes[planned.shape]
    count = len(read.rows)
    weights, state = np.empty((count, width), np.float32), np.empty((count, state_width), np.float32)
    ids, tags = np.empty(count, np.int64), np.empty(count, np.int32)
    decode_rows(read.rows, width, state_width, weights, state, ids, tags)
    if expected.any_id:
        expected.id[planned.places] = ids
    wanted = expected.select(planned.places)
    if (wrong := wrong_rows(wanted, ids, tags)).any():
        first = int(np.flatnonzero(wrong)[0])
        what = f"is not there, but id {ids[first]}" if ids[first] != wanted.id[first] else "is another version"
        raise _row_error(stored, expected, planned, wrong, what, int(tags[first]))
    targets = places[planned.places]
    put_rows(weights, targets, into.weights)
    put_rows(state, targets, into.state)
    into.tag[targets] = tags


def _row_error(
    stored: StoredRows, expected: Expected, planned: PlannedRead, wrong: np.ndarray, what: str, found: int | None
) -> RowError:
    place = int(planned.places[np.flatnonzero(wrong)[0]])
    layout = stored.layouts[int(expected.table[place])]
    tag = ("at most " if expected.tag_at_most else "") + str(int(expected.tag[place]))
    return RowError(
        f"table {layout.name}, row id {int(expected.id[place])} (lane {expected.lane}, ordinal {int(expected.ordinal[place])}) {what} on store "
        f"{stored.shards.urls[planned.read.shard]}: tag must be {tag}, found {'none' if found is None else found}; the store lost or mixed up "
        "writes: restore its data and --resume, or start again with --overwrite",
        wrong,
    )


def read_rows(stored: StoredRows, expected: Expected, last_batch: int | None = None) -> Rows:
    """Read rows of one lane, in the order of `expected`, 65,536 at a time; those on lost shards are decoded.

    A shard that is stale, or lacks a row, is lost from then on; where more are than parity covers, the row alone is decoded. last_batch: the
    number of the lane's last write-back batch, checked against every store shard that is asked; None: not checked. Raises RowError for a row
    that is missing or has another id or tag, and cannot be decoded, StoreError for a stale shard or what the store answers.
    """
    count = len(expected)
    rows = Rows.zeros(count, stored.shapes)
    for start in range(0, count, READ_ROWS):
        part = expected.select(slice(start, start + READ_ROWS))
        places = np.arange(start, start + len(part))
        while not _read_part(stored, part, rows, places, last_batch):
            pass
    return rows


def _read_part(stored: StoredRows, part: Expected, rows: Rows, places: np.ndarray, last_batch: int | None) -> bool:
    """Read rows once, each from its shard or, where that is lost, from its stripe; False if a shard is lost since, and all must be read again."""
    planned_reads = plan_reads(stored, part)
    own = stored.shards.of(part.lane)
    lost = [planned for planned in planned_reads if not own.readable(planned.read.shard)]
    decodings = [_plan_lost(stored, part, planned) for planned in lost]
    reads = [planned.read for planned in planned_reads if own.readable(planned.read.shard)]
    further = [read for decoding in decodings for read in decoding.reads]
    stored.store.exchange(reads + further, [])
    if last_batch is not None:
        for read in reads + further:
            try:
                check_marker(stored, part.lane, read, [Marker(last_batch, last_batch)])
            except StoreError as error:
                if stored.lose(read.shard, str(error)):
                    return False
                raise
    for read in further:
        if read.missing is not None:
            missing = missing_value(stored, part.lane, read)
            if stored.lose(read.shard, str(missing)):
                return False
            raise missing
    for planned, decoding in zip(lost, decodings, strict=True):
        planned.read.rows[:] = decoding.decode()
    for planned in planned_reads:
        try:
            accept(stored, part, planned, rows, places)
        except RowError as error:
            if not own.readable(planned.read.shard):
                raise
            if stored.lose(planned.read.shard, str(error)):
                return False
            _read_alone(stored, part, planned, error)
            accept(stored, part, planned, rows, places)
    return True


def _read_alone(stored: StoredRows, expected: Expected, planned: PlannedRead, error: RowError) -> None:
    """Decode the wrong rows of a read of a shard that is one too many to be lost, and repair them, if this is the lane's owner. Raises RowError."""
    if not stored.placement.r:
        raise error
    lane, read = expected.lane, planned.read
    unreadable = stored.shards.of(lane).unreadable | stored.placement.mask([read.shard])
    wrong_rows = decode_wrong(stored, stored.stripes_of(lane), expected, planned, error, unreadable)
    stored.store.exchange(wrong_rows.reads, [])
    if any(one.missing is not None for one in wrong_rows.reads):
        raise error
    repairs = wrong_rows.put(stored, lane, read)
    if stored.shards.of(lane).held[read.shard] is not None:  # only who took the lane over knows how many rows are there
        stored.store.exchange([], repairs)


@dataclass(frozen=True, slots=True)
class WrongRows:
    """Rows of a read that are wrong, at places int64 [n] of it, and how they are decoded."""

    places: np.ndarray
    decoding: Decoding

    @property
    def reads(self) -> list[Read]:
        """What must be read first."""
        return self.decoding.reads

    def put(self, stored: StoredRows, lane: int, read: Read) -> list[Write]:
        """Put what was decoded in the place of what was read; returns the Writes that repair the store, with no marker."""
        read.rows[self.places] = self.decoding.decode()
        read.missing = None
        names, rows = read.fields[self.places], read.rows[self.places]
        parts = [slice(start, start + COMMAND_ROWS) for start in range(0, len(names), COMMAND_ROWS)]
        key = stored.key(lane, read.shard)
        return [Write(read.shard, key, names[part], rows[part], None, range(len(names[part]) + 1)) for part in parts]


def decode_wrong(
    stored: StoredRows, stripes: LaneStripes, expected: Expected, planned: PlannedRead, error: RowError, lost: np.ndarray
) -> WrongRows:
    """How the wrong rows of a read are decoded alone. lost: bool [shards], the read's among them. Raises the error where they cannot be."""
    assert error.wrong is not None
    places, k = np.flatnonzero(error.wrong), stored.placement.k
    ordinal = expected.ordinal[planned.places[places]]
    wanted = StripePlaces.of_rows(expected.table[planned.places[places]], ordinal, k)
    row_bytes = planned.read.rows.shape[1]
    decoding = plan_alone(stripes, stored.placement, lost, wanted, row_bytes, stored.keys(expected.lane))
    if decoding is None:
        raise error
    return WrongRows(places, decoding)


def _plan_lost(stored: StoredRows, expected: Expected, planned: PlannedRead) -> Decoding:
    """How the rows of a read of a lost shard are decoded. Raises RowsLost."""
    ordinal, k = expected.ordinal[planned.places], stored.placement.k
    wanted = StripePlaces.of_rows(expected.table[planned.places], ordinal, k)
    survivors, row_bytes = stored.shards.survivors(expected.lane), planned.read.rows.shape[1]
    return plan_decoding(stored.stripes_of(expected.lane), survivors, wanted, row_bytes, stored.keys(expected.lane))


def missing_value(stored: StoredRows, lane: int, read: Read) -> RowError:
    """The error for a row or parity row that a shard with the right marker lacks."""
    assert read.missing is not None
    first = read.fields[read.missing][:1]
    (place,), (number,) = unpack(first)
    table = stored.layouts[place].name
    what = f"the parity of stripe {number}" if first[0] & PARITY_BIT else f"the row with ordinal {number}"
    return RowError(
        f"table {table}: {what} (lane {lane}) is missing on store {stored.shards.urls[read.shard]}: the store lost writes; restore its data and "
        "--resume, or start again with --overwrite"
    )
