"""The state of one lane in the traffic: rows that arrive, rows that are staged, and its batches.

`WriteBackStaging` cuts ended rows into write-back batches. `LaneTraffic` is the state of a lane,
part of it shared between the traffic thread and the trainer. `Lanes` is the list of all lanes that
a traffic serves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

import numpy as np

from foreload.cache.errors import CacheError
from foreload.cache.parity.erasure import Code, accumulate, difference
from foreload.cache.parity.shard_contents import count_rows
from foreload.cache.parity.stripes import Arrangement, Fresh, LaneStripes, Written
from foreload.cache.protocol.rounds.monitor import Monitor
from foreload.cache.protocol.shards.marker import first_number, term_of
from foreload.cache.protocol.shards.reading import Expected, PlannedRead, StoredRows
from foreload.cache.rows.row_bytes import encode_rows_at
from foreload.cache.rows.staging import EndedRows, EventStaging, Rows, RowShapes
from foreload.pipelines.schedule.format import Arrivals, RowColumns

# The most rows, and the most parity rows, of a write-back batch on one store shard: each fit one
# atomic command.
BATCH_ROWS = 2048


@dataclass(slots=True)
class _Chunk:
    """Rows of one shape that ended at a boundary.

    Attributes:
        boundary: the boundary at which the rows ended.
        ended: all rows that ended at the boundary.
        places: int64 [n], the places in `ended` of the rows of this shape.
        first: the rows at places[first:] still wait for a batch.
    """

    boundary: int
    ended: EndedRows
    places: np.ndarray
    first: int = 0


@dataclass(frozen=True, slots=True)
class Baseless:
    """Rows of a batch whose base is not known.

    Attributes:
        rows: the rows as the store must have them; `tag` is the stored tag.
        positions: int64 [n], the positions of the rows in the batch.
    """

    rows: RowColumns
    positions: np.ndarray


@dataclass(slots=True)
class WriteBackBatch:
    """One numbered write-back batch.

    All rows of a batch have one shape. A store shard gets at most 2,048 of its rows and 2,048 of
    its parity rows.

    Attributes:
        number: the batch number.
        table: int16 [n], of the rows in the order in which they came.
        ordinal: int64 [n], of the rows in the order in which they came.
        arrangement: where the rows and the parity rows go.
        new: uint8 [n, row_bytes] in the order of the arrangement, the rows to write.
        old: uint8 [n, row_bytes] in the order of the arrangement, the rows that are replaced: zeros
            where nothing was stored. If None, no base is kept.
        parity: uint8 [entries, row_bytes]. The reads fill in the parity rows that are updated;
            `update` then computes all of them.
        rows_of: boundary -> how many of its rows are in this batch.
        fresh: the rows and parity rows of the batch that the store does not have yet.
        shape: the shape of the rows, as in `RowShapes`.
        pieces: the ended rows that the batch was cut from: (boundary, ended, places int64 [n]).
        baseless: the rows of which `old` must be read first. If None, there are none.
    """

    number: int
    table: np.ndarray
    ordinal: np.ndarray
    arrangement: Arrangement
    new: np.ndarray
    old: np.ndarray | None
    parity: np.ndarray
    rows_of: dict[int, int]
    fresh: Fresh
    shape: int
    pieces: Sequence[tuple[int, EndedRows, np.ndarray]]
    baseless: Baseless | None = None

    @property
    def rows(self) -> int:
        """The number of rows on all store shards."""
        return len(self.new)

    def part(self, shard: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of a store shard: fields uint64 [n] and rows uint8 [n, row_bytes].

        n may be 0.
        """
        own = self.arrangement.rows_of(shard)
        return self.arrangement.row_fields[own], self.new[own]

    def updated_parity(self, shard: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the parity rows of a store shard that are updated, as views to be read into.

        The fields are uint64 [n], the rows uint8 [n, row_bytes].
        """
        own = self.arrangement.updated_of(shard)
        return self.arrangement.entry_fields[own], self.parity[own]

    def parity_part(self, shard: int) -> tuple[np.ndarray, np.ndarray]:
        """Return all parity rows of a store shard: fields uint64 [n], rows uint8 [n, row_bytes]."""
        own = self.arrangement.entries_of(shard)
        return self.arrangement.entry_fields[own], self.parity[own]

    def put_base(self, rows: Rows, shapes: RowShapes) -> None:
        """Fill in the base of the baseless rows, given in their order."""
        assert self.baseless is not None
        assert self.old is not None
        who = self.baseless.rows
        base = (rows.weights, rows.state, who.id, rows.tag)
        encode_rows_at(base, np.arange(len(who)), self.baseless.positions, *shapes.shapes[self.shape], self.old)
        self.baseless = None

    def update(self, code: Code) -> None:
        """Compute the parity rows.

        A parity row that was read becomes parity_i ^= c_ij * (new ^ old). Any other parity row
        becomes the sum of c_ij * new.
        """
        assert self.old is not None
        placed = self.arrangement
        # Parity rows that were not read are zeros here, and `placed.updates` is False for their
        # stripes, so that the difference there is the new row itself.
        delta = difference(self.new, self.old, placed.updates)
        for i in range(code.r):
            factors = code.coefficients[i][placed.member]
            accumulate(delta, placed.position, factors, self.parity, placed.entry_of[:, i][placed.stripe_of])


@dataclass(slots=True)
class WriteBackStaging:
    """The write-back staging of one lane: ended rows in one queue for each shape, cut into batches.

    A batch has one shape, so that it is one atomic command on each store shard. Rows of several
    boundaries share a batch if the store is slower than the trainer.

    Attributes:
        shapes: the row shapes of the run.
        with_base: whether a batch has the rows that it replaces, too.
        number: the number of the last batch that was cut.
    """

    shapes: RowShapes
    stripes: LaneStripes
    with_base: bool
    number: int = 0
    _queues: dict[int, deque[_Chunk]] = field(default_factory=dict)
    _under_way: deque[WriteBackBatch] = field(default_factory=deque)

    def add(self, boundary: int, ended: EndedRows) -> None:
        """Queue rows that ended at a boundary."""
        if not len(ended):
            return
        if len(self.shapes.shapes) == 1:
            self._queue(0, boundary, ended, np.arange(len(ended)))
            return
        shape_of = self.shapes.of_table[ended.table]
        for shape in range(len(self.shapes.shapes)):
            places = np.flatnonzero(shape_of == shape)
            if len(places):
                self._queue(shape, boundary, ended, places)

    def _queue(self, shape: int, boundary: int, ended: EndedRows, places: np.ndarray) -> None:
        self._queues.setdefault(shape, deque()).append(_Chunk(boundary, ended, places))

    @property
    def waiting(self) -> bool:
        """Whether there is a batch to cut."""
        return any(self._queues.values())

    def cut(self, cursors: np.ndarray, most: int = BATCH_ROWS) -> WriteBackBatch | None:
        """Cut the next batch, of the shape that has waited longest. Returns None if no row waits.

        Args:
            cursors: uint64 [shards], as `LaneStripes.arrange` has it.
            most: the most rows, and the most parity rows, on a store shard.
        """
        waiting = [(queue[0].boundary, shape) for shape, queue in self._queues.items() if queue]
        if not waiting:
            return None
        # The queue whose first rows ended at the earliest boundary has waited longest.
        shape = min(waiting)[1]
        pieces = self._take(self._queues[shape], len(cursors), most)
        self.number += 1
        rows_of: dict[int, int] = {}
        for boundary, _, places in pieces:
            rows_of[boundary] = rows_of.get(boundary, 0) + len(places)
        table = np.concatenate([ended.table[places] for _, ended, places in pieces])
        ordinal = np.concatenate([ended.ordinal[places] for _, ended, places in pieces])
        stored = np.concatenate([ended.stored_tag[places] != 0 for _, ended, places in pieces])
        placed = self.stripes.arrange(table, ordinal, cursors)
        fresh = self.stripes.fresh(placed, stored, len(cursors))
        row_bytes = self.shapes.row_bytes(shape)
        new = np.empty((len(table), row_bytes), np.uint8)
        # Rows are encoded straight to their positions in the arrangement, that is, by store shard.
        old = np.empty_like(new) if self.with_base else None
        first, baseless = 0, []
        for _, ended, places in pieces:
            at = placed.position[first : first + len(places)]
            encode_rows_at((ended.weights, ended.state, ended.id, ended.tag), places, at, *self.shapes.shapes[shape], new)
            if old is not None:
                assert ended.base_weights is not None
                assert ended.base_state is not None
                base = (ended.base_weights, ended.base_state, ended.id, ended.stored_tag)
                encode_rows_at(base, places, at, *self.shapes.shapes[shape], old)
                if ended.base_known is not None:
                    # A row that was never stored has the known base zero.
                    missing = ~ended.base_known[places] & (ended.stored_tag[places] != 0)
                    baseless.append((ended, places[missing], at[missing]))
            first += len(places)
        parity = np.zeros((len(placed.entry_fields), row_bytes), np.uint8)
        batch = WriteBackBatch(
            self.number, table, ordinal, placed, new, old, parity, rows_of, fresh, shape, pieces, _baseless(baseless)
        )
        self._under_way.append(batch)
        return batch

    def acknowledge(self, batch: WriteBackBatch) -> None:
        """Drop a batch that the store has, and all batches that were cut before it."""
        while self._under_way and self._under_way[0].number <= batch.number:
            self._under_way.popleft()

    def unwritten(self) -> Iterator[tuple[int, EndedRows]]:
        """Yield the rows that the store may lack, by boundary, in no particular order.

        These are the rows of batches under way and the rows that still wait.
        """
        for batch in self._under_way:
            yield from ((boundary, ended.select(places)) for boundary, ended, places in batch.pieces)
        for queue in self._queues.values():
            yield from ((chunk.boundary, chunk.ended.select(chunk.places[chunk.first :])) for chunk in queue)

    def _take(self, queue: deque[_Chunk], shards: int, most: int) -> list[tuple[int, EndedRows, np.ndarray]]:
        """Take rows from the front of a queue, as many as a batch may have.

        Returns a list of (boundary, ended rows, places).
        """
        counts = np.zeros(shards, np.int64), np.zeros(shards, np.int64)
        pieces = []
        while queue:
            chunk = queue[0]
            ended, left = chunk.ended, len(chunk.places) - chunk.first
            fits = self.stripes.room_for(ended.table, ended.ordinal, chunk.places, chunk.first, most, counts)
            if fits:
                pieces.append((chunk.boundary, ended, chunk.places[chunk.first : chunk.first + fits]))
                chunk.first += fits
            if fits < left:
                break
            queue.popleft()
        return pieces


def _baseless(pieces: Sequence[tuple[EndedRows, np.ndarray, np.ndarray]]) -> Baseless | None:
    """Collect the baseless rows of a batch. Returns None if there are none.

    Args:
        pieces: (ended rows, int64 [n] places of the baseless ones, int64 [n] their positions in the
            batch).
    """
    if not sum(len(places) for _, places, _ in pieces):
        return None
    columns = [(*ended.columns(places)[:3], ended.stored_tag[places]) for ended, places, _ in pieces]
    table, ordinal, ids, tag = (np.concatenate(column) for column in zip(*columns, strict=True))
    return Baseless(RowColumns(table, ordinal, ids, tag), np.concatenate([positions for _, _, positions in pieces]))


Plan = Iterator[tuple[int, Arrivals] | None]


@dataclass(frozen=True, slots=True)
class LanePlan:
    """The coming arrivals of one lane, and the state in which its traffic starts.

    Attributes:
        plan: yields (event index, arrivals) in program order, or None while the next event is not
            known yet; the traffic then asks again later. An exception that it raises is raised by
            the `take` of the event in whose place it stands.
        last_batch: the number of the lane's last write-back batch, as in RUN.
        released_boundary: all boundaries up to this one were written back before.
        written: which rows the store has. An int64 [tables] array means all ordinals below its
            values. If None, the store has no row.
        held: int64 [shards], how many rows and parity rows each shard has. If None, they are
            counted.
    """

    lane: int
    plan: Plan
    last_batch: int = 0
    released_boundary: int = -1
    written: np.ndarray | Written | None = None
    held: np.ndarray | None = None


@dataclass(slots=True)
class Boundary:
    """A boundary at which rows ended.

    Attributes:
        number: the boundary.
        left: how many of its rows are not yet acknowledged.
        at_stop: whether its rows are written beyond the schedule, on a clean stop.
    """

    number: int
    left: int
    at_stop: bool


@dataclass(slots=True)
class LaneWrites:
    """The progress of one lane's writes.

    Attributes:
        staging: its write-back staging.
        last_batch: the number of the last batch that is released.
        held: int64 [shards], how many rows and parity rows a shard has that lacks none.
        first: the number of the owner's opening (empty) batch. None once it is written, or if the
            numbers go on from `last_batch` because both are of one term.
        pending: a batch whose parity, if there is any, is acknowledged, and whose rows are not.
    """

    lane: int
    stripes: LaneStripes
    staging: WriteBackStaging
    last_batch: int
    held: np.ndarray
    first: int | None = None
    pending: WriteBackBatch | None = None

    def begin(self) -> None:
        """Number batches as this owner's from now on."""
        assert self.first is not None
        self.staging.number, self.first = self.first, None

    def send_next(self, batch: WriteBackBatch) -> None:
        """Send the rows of a batch in the next exchange.

        The caller ensures that everything that must be in the store before them is acknowledged.
        """
        self.stripes.written.note(batch.table, batch.ordinal)
        self.pending = batch


@dataclass(slots=True)
class Fetch:
    """Arrivals of an event, at places int64 [n], that were not yet requested from the store."""

    event: EventStaging
    places: np.ndarray


@dataclass(slots=True)
class PlannedFetch:
    """A fetch that is due.

    Attributes:
        writes: the writes of the lane.
        expected: what the schedule says of the rows.
        event: the staging that the rows go to.
        places: int64 [n], the places of the rows in that staging.
        reads: the reads that fetch the rows.
    """

    writes: LaneWrites
    expected: Expected
    event: EventStaging
    places: np.ndarray
    reads: list[PlannedRead] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Ahead:
    """How far ahead of the trainer a lane's arrivals are staged.

    Attributes:
        seed: the seed of the rows that were never written.
        events: the most events that are staged.
        rows: the most rows that are staged.
    """

    seed: int
    events: int
    rows: int


class LaneTraffic:
    """The state of one lane's traffic.

    The traffic thread alone uses the fields of the first group. The monitor guards the others.

    Args:
        plan: the lane's coming arrivals, and the state in which its traffic starts.
        term: the term of the lane's owner.
    """

    def __init__(self, plan: LanePlan, stored: StoredRows, term: int = 0) -> None:
        self.lane = plan.lane
        self.plan = plan.plan
        self.next: tuple[int, Arrivals] | None = None
        self.unknown = False  # the plan's next event is not known yet
        self.fetches: list[Fetch] = []
        written = plan.written if plan.written is not None else np.zeros(len(stored.layouts), np.int64)
        stripes = stored.lane_stripes(plan.lane, written)
        staging = WriteBackStaging(stored.shapes, stripes, stored.placement.r > 0, plan.last_batch)
        held = plan.held
        if held is None:
            held = count_rows(stripes, len(stored.layouts), stored.placement.shard_count).fields
        first = first_number(term) if first_number(term) > plan.last_batch else None
        self.writes = LaneWrites(plan.lane, stripes, staging, plan.last_batch, held, first)

        self.pulled = -1  # index of the last event staged or taken
        self.wanted = -1  # index of the last event that the trainer waits for
        self.ended = False  # the plan has no further event
        self.plan_error: Exception | None = None
        self.events: dict[int, EventStaging] = {}
        self.staged_rows = 0
        # Boundary and rows that the trainer handed over and that are not yet in write-back staging.
        self.handed: deque[tuple[int, EndedRows]] = deque()
        self.last_boundary = plan.released_boundary  # the last boundary handed over
        # Boundaries handed over that have unacknowledged rows, or that follow one that has.
        self.boundaries: deque[Boundary] = deque()
        self.unwritten_rows = 0
        self.last_batch = plan.last_batch  # as in `writes`, but guarded by the monitor
        self.released_boundary = plan.released_boundary

    # Called by the traffic thread.

    def advance(self, monitor: Monitor) -> bool:
        """Get the plan's next event into `next`.

        Returns False if there is none, or none yet. An exception of the plan is kept for
        `Traffic.take`.
        """
        if self.ended:
            return False
        error = None
        try:
            self.next = next(self.plan)
            self.unknown = self.next is None
            return not self.unknown
        except StopIteration:
            pass
        except Exception as failure:
            error = failure
        with monitor:
            self.ended, self.plan_error = True, error
            self.unknown = False
            monitor.notify_all()
        return False

    def pull(self, monitor: Monitor, stored: StoredRows, ahead: Ahead, on_initial: Callable[[int], None]) -> None:
        """Stage the arrivals of coming events as far as there is room, and make the initial rows.

        Args:
            monitor: guards the shared state.
            ahead: how far ahead of the trainer to stage.
            on_initial: called under the monitor with the number of initial rows made.
        """
        while self.next is not None or self.advance(monitor):
            assert self.next is not None
            index, arrivals = self.next
            with monitor:
                room = len(self.events) < ahead.events and self.staged_rows + len(arrivals) <= ahead.rows
                # An event that the trainer waits for is staged whatever room there is, or the
                # trainer would wait forever.
                if self.events and not room and index > self.wanted:
                    return
            self.next = None
            event = EventStaging(arrivals, stored.shapes)
            made = event.fill_initial(ahead.seed, stored.layouts)
            places = np.flatnonzero(arrivals.tag)
            if len(places):
                self.fetches.append(Fetch(event, places))
            with monitor:
                event.ready[made] = True
                # A row may only be fetched after its last write-back is released.
                event.not_due = int(np.count_nonzero(arrivals.after[places] > self.released_boundary))
                self.events[index] = event
                self.pulled = index
                self.staged_rows += len(arrivals)
                on_initial(len(made))
                monitor.notify_all()

    def stage(self, monitor: Monitor) -> None:
        """Move the rows that the trainer handed over to write-back staging."""
        while True:
            with monitor:
                if not self.handed:
                    return
                boundary, ended = self.handed.popleft()
            self.writes.staging.add(boundary, ended)

    def due(self, monitor: Monitor) -> list[PlannedFetch]:
        """Return the fetches that may leave now. The others stay queued.

        A row may be fetched once the boundary of its last write-back is released.
        """
        due, not_due = [], []
        for fetch in self.fetches:
            late = fetch.event.arrivals.after[fetch.places] > self.released_boundary
            if not late.all():
                due.append(self._planned(fetch.event, fetch.places[~late]))
            if late.any():
                not_due.append(Fetch(fetch.event, fetch.places[late]))
            with monitor:
                fetch.event.not_due = int(np.count_nonzero(late))
        self.fetches = not_due
        return due

    def _planned(self, event: EventStaging, places: np.ndarray) -> PlannedFetch:
        return PlannedFetch(self.writes, Expected(*event.arrivals.columns(places), self.lane), event, places)

    # Called by a thread that holds the monitor.

    def replan(self, plan: Plan) -> None:
        """Restart the arrivals with another plan.

        This must run between two rounds, because the rows of a fetch under way would reach no
        event.
        """
        self.plan, self.next, self.unknown, self.ended, self.plan_error = plan, None, False, False, None
        self.fetches, self.events, self.staged_rows = [], {}, 0
        self.pulled = self.wanted = -1

    def opened(self) -> None:
        """Record that the owner's opening (empty) batch is acknowledged."""
        self.last_batch = self.writes.last_batch

    def unwritten(self) -> Unwritten:
        """Return the rows that the store may lack. The traffic thread must be over."""
        owed = sorted([*self.writes.staging.unwritten(), *self.handed], key=itemgetter(0))
        return Unwritten((self.released_boundary, self.last_batch), owed)

    @property
    def batches_under_way(self) -> int:
        """The number of batches that were cut and are not acknowledged."""
        # An owner's numbers begin at that of its opening batch, and `last_batch` may still be of an
        # earlier term.
        cut = self.writes.staging.number
        return cut - max(self.last_batch, first_number(term_of(cut)))

    def acknowledge(self, batch: WriteBackBatch) -> int:
        """Record that a batch is acknowledged.

        Returns how many of its rows were written beyond the schedule.
        """
        self.last_batch = batch.number
        self.writes.staging.acknowledge(batch)
        self.unwritten_rows -= batch.rows
        at_stop = 0
        for boundary in self.boundaries:
            rows = batch.rows_of.get(boundary.number, 0)
            boundary.left -= rows
            at_stop += rows if boundary.at_stop else 0
        self.release()
        return at_stop

    def release(self) -> None:
        """Release each boundary whose rows, and those of all earlier boundaries, are acknowledged.

        A boundary at which rows were written beyond the schedule does not count as released: the
        rows that the schedule writes back there are still to come, and a fetch that must follow
        them must wait.
        """
        while self.boundaries and not self.boundaries[0].left:
            done = self.boundaries.popleft()
            if not done.at_stop:
                self.released_boundary = done.number


@dataclass(frozen=True, slots=True)
class Unwritten:
    """The rows of a lane that the store may lack, after the lane's traffic ended.

    Attributes:
        released: the last boundary for which the store has all rows of it and of all earlier
            boundaries; and the number of the last batch that the store has.
        owed: the rows that ended at later boundaries, by boundary, ascending.
    """

    released: tuple[int, int]
    owed: Sequence[tuple[int, EndedRows]]


class Lanes:
    """The lanes that a traffic serves: one list, shared by all parts of the traffic.

    A thread that adds or removes a lane holds the monitor.
    """

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor
        self._states: dict[int, LaneTraffic] = {}

    def add(self, state: LaneTraffic) -> None:
        """Serve a lane.

        Raises:
            CacheError: the lane is already served.
        """
        if state.lane in self._states:
            raise CacheError(f"lane {state.lane}: is served already")
        self._states[state.lane] = state

    def remove(self, lane: int) -> None:
        """Stop serving a lane."""
        del self._states[lane]

    def __getitem__(self, lane: int) -> LaneTraffic:
        state = self._states.get(lane)
        if state is None:
            raise CacheError(f"lane {lane}: is not served here")
        return state

    def serves(self, writes: LaneWrites) -> bool:
        """Return whether these writes belong to a lane that is served."""
        state = self._states.get(writes.lane)
        return state is not None and state.writes is writes

    @property
    def all(self) -> list[LaneTraffic]:
        """A copy of the list of the lanes that are served now."""
        with self._monitor:
            return list(self._states.values())
