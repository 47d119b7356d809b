"""Read stored rows and check each of them against the schedule."""

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

# The most rows of one exchange when many rows are read at once.
READ_ROWS = 1 << 16


@dataclass(slots=True)
class StoredRows:
    """A run's rows on the store, and where they are.

    Attributes:
        layouts: The row layout of each table.
        stripes: Returns the stripes of a lane, which say which of its rows were written. Needed
            wherever rows of lost shards are decoded.
        shards: The state of every store shard. `read_rows` decodes the rows of lost shards from
            their stripes.
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
                "give the URLs that the run was started with, in order"
            )
        self.shapes = RowShapes.of(self.layouts)
        self.shards = ShardTable(self.store.urls, self.placement)
        self.store.judge_wrong_type(self._judge_wrong_type)

    def _judge_wrong_type(self, shard: int, refusal: StoreError) -> StoreError:
        epochs = {lane: self.shards.of(lane).epochs[shard] for lane in self.shards.lanes}
        return judge_wrong_type(self.store.urls[shard], self.namespace, epochs, refusal)

    def stripes_of(self, lane: int) -> LaneStripes:
        """Return a lane's stripes, as `stripes` has them, at their current places."""
        assert self.stripes is not None
        stripes = self.stripes(lane)
        stripes.places = self.shards.of(lane).places
        return stripes

    def lane_stripes(self, lane: int, written: Written | np.ndarray) -> LaneStripes:
        """Return a lane's stripes at their current places.

        Args:
            written: Which rows were written. If int64 [tables]: of each table, all ordinals below
                this.
        """
        kept = written if isinstance(written, Written) else Written(written, self.placement.k)
        return LaneStripes(lane, self.placement.k, self.shards.of(lane).places, kept)

    def shards_of(self, lane: int, table: np.ndarray, ordinal: np.ndarray) -> np.ndarray:
        """Return the store shard of each row of a lane at its current place.

        Shapes and dtypes are those of `stripes.shards_of`.
        """
        return shards_of(self.placement, lane, table, ordinal, self.shards.of(lane).places)

    def key(self, lane: int, shard: int) -> bytes:
        """Return the key of a lane's hash on a store shard."""
        return lane_key(self.namespace, lane, self.shards.of(lane).epochs[shard])

    def keys(self, lane: int) -> list[bytes]:
        """Return the key of a lane's hash on every store shard."""
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
        """Make a Write of rows of a lane, with its marker.

        Args:
            fresh: How many of the rows the shard does not have yet. If the hash has no marker yet,
                or no migration record while one is written, those fields count as new as well.
            migrated: The migration record to write in the same command. If None, none is written.
        """
        own = self.shards.of(lane)
        # The marker and the migration record are fields, so the server counts them as new, too.
        new = fresh + (own.held[shard] is None) + (migrated is not None and own.migrated[shard] is None)
        stamp = None if migrated is None else migrated.stored()
        return Write(shard, self.key(lane, shard), fields, rows, marker.stored(), range(new, new + 1), migrated=stamp)

    def note(self, lane: int, write: Write) -> None:
        """Count in `held` what an acknowledged write added to its shard.

        A repair has no marker and adds nothing.
        """
        if write.new is not None and write.marker is not None:
            own = self.shards.of(lane)
            before, new = own.held[write.shard], write.new.start
            if write.migrated is not None:
                new -= own.migrated[write.shard] is None
                own.migrated[write.shard] = Migrated.parse(write.migrated)
            # The first write to a hash also adds the marker, which is not a row.
            own.held[write.shard] = new - 1 if before is None else before + new

    def lose(self, shard: int, why: str) -> bool:
        """Count a shard as lost if parity covers that. Returns whether it does."""
        covered = self.shards.covers(shard)
        if covered:
            self.shards.lose(shard, why)
        return covered

    def go_without(self, shard: int, error: StoreError) -> None:
        """Count a shard as lost even if parity does not cover that.

        Without parity, raise the error instead.
        """
        if not self.placement.r:
            raise error
        self.shards.lose(shard, str(error))

    def expected(self, lane: int) -> np.ndarray:
        """Compute how many rows and parity rows of a lane each shard must have: int64 [shards]."""
        return count_rows(self.stripes_of(lane), len(self.layouts), self.placement.shard_count).fields


@dataclass(frozen=True, slots=True)
class Expected(RowColumns):
    """Rows of one lane and what the schedule says about them.

    Attributes:
        tag_at_most: If True, any tag from 1 to `tag` is right. Otherwise only `tag` is.
        any_id: If True, the ids are not known, and `accept` fills them in.
    """

    lane: int
    tag_at_most: bool = False
    any_id: bool = False

    def select(self, which: np.ndarray | slice) -> Expected:
        """Select rows by a mask, by places or by a slice."""
        return Expected(*self.columns(which), self.lane, self.tag_at_most, self.any_id)


@dataclass(slots=True)
class PlannedRead:
    """A Read of rows of one shape from one store shard.

    Attributes:
        places: int64 [n], the places of the read's rows among the wanted rows.
        shape: The shape's number in `RowShapes`.
        asked: Whether the read was made.
        decoded: Whether the rows came from their stripes and not from the read.
    """

    read: Read
    places: np.ndarray
    shape: int
    asked: bool = False
    decoded: bool = False


def plan_reads(stored: StoredRows, expected: Expected) -> list[PlannedRead]:
    """Plan the reads that fetch these rows: one per shape and store shard."""
    shards = stored.placement.shard_count
    shard_of = stored.shards_of(expected.lane, expected.table, expected.ordinal)
    # One stable sort groups the rows: each run of equal keys is one read.
    shape_and_shard = stored.shapes.of_table[expected.table] * shards + shard_of
    order = np.argsort(shape_and_shard, kind="stable")
    shape_and_shard = shape_and_shard[order]
    names = fields(expected.table, expected.ordinal)[order]
    starts = np.flatnonzero(np.diff(shape_and_shard, prepend=-1))
    planned_reads = []
    for start, end in pairwise([*starts, len(shape_and_shard)]):
        shape, shard = divmod(int(shape_and_shard[start]), shards)
        rows = np.empty((end - start, stored.shapes.row_bytes(shape)), np.uint8)
        # With parity, a value that is no row is treated as a missing row.
        read = Read(shard, stored.key(expected.lane, shard), names[start:end], rows, any_length=stored.placement.r > 0)
        planned_reads.append(PlannedRead(read, order[start:end], shape))
    return planned_reads


def check_marker(stored: StoredRows, lane: int, read: Read, markers: Sequence[Marker]) -> None:
    """Raise StoreError if a store shard's marker for the lane is none of the expected ones.

    Args:
        markers: The markers that the shard may have now.
    """
    marker = Marker.parse(read.marker)
    if marker not in markers:
        raise StoreError(
            f"store {stored.shards.urls[read.shard]}: stale shard: its last write-back batch of lane {lane} is {marker}, must be {markers[0]}; "
            "it was emptied, restarted from an older save, or belongs to another run: restore its data and --resume, or start again with --overwrite"
        )


def check_answer(stored: StoredRows, lane: int, write: Write) -> None:
    """Raise StoreError if a store shard's answer to a write shows that the shard lost rows."""
    if write.surprise is not None:
        raise StoreError(
            f"store {stored.shards.urls[write.shard]}: lost rows of lane {lane}: {write.surprise}; it was emptied, or rows were deleted there: "
            "restore its data and --resume, or start again with --overwrite"
        )


def wrong_rows(wanted: Expected, ids: np.ndarray, tags: np.ndarray) -> np.ndarray:
    """Find the rows that are not the wanted ones, by id and tag.

    Args:
        ids: int64 [n].
        tags: int32 [n].

    Returns:
        bool [n].
    """
    return (ids != wanted.id) | ((tags < 1) | (tags > wanted.tag) if wanted.tag_at_most else tags != wanted.tag)


def accept(stored: StoredRows, expected: Expected, planned: PlannedRead, into: Rows, places: np.ndarray) -> None:
    """Check the rows that a finished Read brought, and copy them to `into`.

    Args:
        places: int64 [n], the place in `into` of each row of `expected`.

    Raises:
        RowError: A row is missing or has another id or tag.
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
        what = f"has been replaced by id {ids[first]}" if ids[first] != wanted.id[first] else "has another version"
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
        f"{stored.shards.urls[planned.read.shard]}: tag must be {tag}; got {'none' if found is None else found}; the store lost or mixed up "
        "writes: restore its data and --resume, or start again with --overwrite",
        wrong,
    )


def read_rows(stored: StoredRows, expected: Expected, last_batch: int | None = None) -> Rows:
    """Read rows of one lane, 65,536 at a time, and decode those on lost shards.

    A shard that is stale or lacks a row counts as lost from then on. If parity does not cover that,
    only the missing rows are decoded.

    Args:
        last_batch: The number of the lane's last write-back batch, which every shard that is read
            must have. If None, markers are not checked.

    Returns:
        The rows, in the order of `expected`.

    Raises:
        RowError: A row is missing or has another id or tag, and cannot be decoded.
        RowsLost: A placement group has lost more shards than parity covers.
        StoreError: A shard is stale, or the store answers with an error.
    """
    count = len(expected)
    rows = Rows.zeros(count, stored.shapes)
    for start in range(0, count, READ_ROWS):
        part = expected.select(slice(start, start + READ_ROWS))
        places = np.arange(start, start + len(part))
        # Each pass that fails has lost one more shard, so the loop ends.
        while not _read_part(stored, part, rows, places, last_batch):
            pass
    return rows


def _read_part(stored: StoredRows, part: Expected, rows: Rows, places: np.ndarray, last_batch: int | None) -> bool:
    """Read each row from its shard or, if the shard is lost, decode it from its stripe.

    Returns False if a shard was lost meanwhile: then the caller must read all rows again.
    """
    planned_reads = plan_reads(stored, part)
    own = stored.shards.of(part.lane)
    lost = [planned for planned in planned_reads if not own.readable(planned.read.shard)]
    decodings = [_plan_lost(stored, part, planned) for planned in lost]
    reads = [planned.read for planned in planned_reads if own.readable(planned.read.shard)]
    further = [read for decoding in decodings for read in decoding.reads]
    stored.store.exchange(reads + further, [])
    # Check markers first: what a stale shard brought must not be decoded with.
    if last_batch is not None:
        for read in reads + further:
            try:
                check_marker(stored, part.lane, read, [Marker(last_batch, last_batch)])
            except StoreError as error:
                if stored.lose(read.shard, str(error)):
                    return False
                raise
    # Decoding needs every source. A missing one means that its shard lost rows.
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
            # The row was already decoded, so there is no other source for it.
            if not own.readable(planned.read.shard):
                raise
            if stored.lose(planned.read.shard, str(error)):
                return False
            # Parity does not cover the loss of this shard. Decode only the rows that are wrong.
            _read_alone(stored, part, planned, error)
            accept(stored, part, planned, rows, places)
    return True


def _read_alone(stored: StoredRows, expected: Expected, planned: PlannedRead, error: RowError) -> None:
    """Decode the wrong rows of a read from a shard whose loss parity does not cover.

    If this process owns the lane, it also repairs the rows on the shard. Raises `error`, a
    RowError, if the rows cannot be decoded.
    """
    if not stored.placement.r:
        raise error
    lane, read = expected.lane, planned.read
    unreadable = stored.shards.of(lane).unreadable | stored.placement.mask([read.shard])
    wrong_rows = decode_wrong(stored, stored.stripes_of(lane), expected, planned, error, unreadable)
    stored.store.exchange(wrong_rows.reads, [])
    if any(one.missing is not None for one in wrong_rows.reads):
        raise error
    repairs = wrong_rows.put(stored, lane, read)
    # Only the process that took the lane over knows how many rows the shard has.
    if stored.shards.of(lane).held[read.shard] is not None:
        stored.store.exchange([], repairs)


@dataclass(frozen=True, slots=True)
class WrongRows:
    """The wrong rows of a read, and how to decode them.

    Attributes:
        places: int64 [n], the places of the wrong rows in the read.
    """

    places: np.ndarray
    decoding: Decoding

    @property
    def reads(self) -> list[Read]:
        """The reads that must be done before `put`."""
        return self.decoding.reads

    def put(self, stored: StoredRows, lane: int, read: Read) -> list[Write]:
        """Replace the wrong rows of the read with the decoded ones.

        Returns:
            The Writes that repair the store. They have no marker.
        """
        read.rows[self.places] = self.decoding.decode()
        read.missing = None
        names, rows = read.fields[self.places], read.rows[self.places]
        # A repair carries no marker. If the shard has lost its marker meanwhile, a repair must not
        # restore it, for then the loss would not show.
        parts = [slice(start, start + COMMAND_ROWS) for start in range(0, len(names), COMMAND_ROWS)]
        key = stored.key(lane, read.shard)
        return [Write(read.shard, key, names[part], rows[part], None, range(len(names[part]) + 1)) for part in parts]


def decode_wrong(
    stored: StoredRows, stripes: LaneStripes, expected: Expected, planned: PlannedRead, error: RowError, lost: np.ndarray
) -> WrongRows:
    """Plan the decoding of only the wrong rows of a read.

    Args:
        error: Says which rows are wrong. It is raised if they cannot be decoded.
        lost: bool [shards], the shards to do without. The shard of the read is among them.
    """
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
    """Plan the decoding of all rows of a read from a lost shard. Raises RowsLost."""
    ordinal, k = expected.ordinal[planned.places], stored.placement.k
    wanted = StripePlaces.of_rows(expected.table[planned.places], ordinal, k)
    survivors, row_bytes = stored.shards.survivors(expected.lane), planned.read.rows.shape[1]
    return plan_decoding(stored.stripes_of(expected.lane), survivors, wanted, row_bytes, stored.keys(expected.lane))


def missing_value(stored: StoredRows, lane: int, read: Read) -> RowError:
    """Return the error for a row or parity row that is missing on a shard with the right marker."""
    assert read.missing is not None
    first = read.fields[read.missing][:1]
    (place,), (number,) = unpack(first)
    table = stored.layouts[place].name
    what = f"the parity of stripe {number}" if first[0] & PARITY_BIT else f"the row with ordinal {number}"
    return RowError(
        f"table {table}: {what} (lane {lane}) is missing on store {stored.shards.urls[read.shard]}: the store lost writes; restore its data and "
        "--resume, or start again with --overwrite"
    )
