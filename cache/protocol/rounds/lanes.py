"""What the traffic's thread and the trainer know of one lane: what is to come, what is staged, and what waits for its write-back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

import numpy as np

from foreload.cache.errors import CacheError
from foreload.cache.parity.row_counts import count_rows
from foreload.cache.parity.stripes import LaneStripes, Written
from foreload.cache.protocol.rounds.batches import WriteBackBatch, WriteBackStaging
from foreload.cache.protocol.rounds.monitor import Monitor
from foreload.cache.protocol.shards.marker import first_number, term_of
from foreload.cache.protocol.shards.reading import Expected, PlannedRead, StoredRows
from foreload.cache.rows.staging import EndedRows, EventStaging
from foreload.pipelines.schedule.format import Arrivals

Plan = Iterator[tuple[int, Arrivals] | None]


@dataclass(frozen=True, slots=True)
class LanePlan:
    """What one lane will need, and where its traffic stands at the start.

    plan: (event index, arrivals) in order of the program; None where the next event is not known yet (it is asked for again, after a
    while). An exception that it raises is raised by the `take` of the event that it stands for. last_batch: the number of the lane's last
    write-back batch, as in RUN; released_boundary: all boundaries up to it were written back before. written: which rows the store has;
    int64 [tables]: all ordinals below it; None: none. held: int64 [shards], how many rows and parity rows that is, None: to be counted.
    """

    lane: int
    plan: Plan
    last_batch: int = 0
    released_boundary: int = -1
    written: np.ndarray | Written | None = None
    held: np.ndarray | None = None


@dataclass(slots=True)
class Boundary:
    """Rows that ended at a boundary. left: how many are not yet acknowledged; at_stop: they are written beyond the schedule, on a clean stop."""

    number: int
    left: int
    at_stop: bool


@dataclass(slots=True)
class LaneWrites:
    """Where one lane's writes stand.

    last_batch: the number of the last batch that is released; pending: one whose parity, if there is any, is acknowledged, and whose rows are
    not. held: int64 [shards], how many rows and parity rows a shard has that lacks none. first: the number of the empty batch with which the
    owner's begin, None once it is written; its numbers go on from the last batch's where both are of one term.
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
        """Have the rows of a batch leave next: whatever must be in the store before them is there."""
        self.stripes.written.note(batch.table, batch.ordinal)
        self.pending = batch


@dataclass(slots=True)
class Fetch:
    """Arrivals of an event, at places int64 [n], that nothing was asked for yet."""

    event: EventStaging
    places: np.ndarray


@dataclass(slots=True)
class PlannedFetch:
    """A fetch that is due: what is expected of its rows, which go to its places (int64 [n]) in the event's staging, and its reads."""

    writes: LaneWrites
    expected: Expected
    event: EventStaging
    places: np.ndarray
    reads: list[PlannedRead] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Ahead:
    """How far ahead of the trainer a lane's arrivals are staged: events, and rows. seed: of the rows that were never written."""

    seed: int
    events: int
    rows: int


class LaneTraffic:
    """The state of one lane's traffic. The fields of the first group belong to the thread, the others to whoever holds the monitor.

    term: of its owner.
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
        self.handed: deque[tuple[int, EndedRows]] = deque()  # boundary and rows, handed over, and not yet in write-back staging
        self.last_boundary = plan.released_boundary  # the last that was handed over
        self.boundaries: deque[Boundary] = deque()  # handed over, with rows that are not acknowledged, or after one that has such
        self.unwritten_rows = 0
        self.last_batch = plan.last_batch  # as in `writes`, for whoever holds the monitor
        self.released_boundary = plan.released_boundary

    # The traffic's thread.

    def advance(self, monitor: Monitor) -> bool:
        """Ask the plan for its next event, for `next`; False if there is none, or not yet. What the plan raises is kept for `Traffic.take`."""
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
        """Stage the arrivals of coming events, as far as there is room; make the initial ones, and report, under the monitor, how many."""
        while self.next is not None or self.advance(monitor):
            assert self.next is not None
            index, arrivals = self.next
            with monitor:
                room = len(self.events) < ahead.events and self.staged_rows + len(arrivals) <= ahead.rows
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
                event.not_due = int(np.count_nonzero(arrivals.after[places] > self.released_boundary))
                self.events[index] = event
                self.pulled = index
                self.staged_rows += len(arrivals)
                on_initial(len(made))
                monitor.notify_all()

    def stage(self, monitor: Monitor) -> None:
        """Move what the trainer handed over to write-back staging."""
        while True:
            with monitor:
                if not self.handed:
                    return
                boundary, ended = self.handed.popleft()
            self.writes.staging.add(boundary, ended)

    def due(self, monitor: Monitor) -> list[PlannedFetch]:
        """The fetches that may leave now; the others stay."""
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

    # Whoever holds the monitor.

    def replan(self, plan: Plan) -> None:
        """Begin anew with the arrivals; between two rounds, for a fetch under way would bring its rows to nobody."""
        self.plan, self.next, self.unknown, self.ended, self.plan_error = plan, None, False, False, None
        self.fetches, self.events, self.staged_rows = [], {}, 0
        self.pulled = self.wanted = -1

    def opened(self) -> None:
        """The empty batch with which the owner's begin is acknowledged."""
        self.last_batch = self.writes.last_batch

    def unwritten(self) -> Unwritten:
        """What the store may lack, once the thread is over."""
        owed = sorted([*self.writes.staging.unwritten(), *self.handed], key=itemgetter(0))
        return Unwritten((self.released_boundary, self.last_batch), owed)

    @property
    def batches_under_way(self) -> int:
        """How many were cut, and are not acknowledged."""
        cut = self.writes.staging.number
        return cut - max(self.last_batch, first_number(term_of(cut)))

    def acknowledge(self, batch: WriteBackBatch) -> int:
        """A batch is acknowledged; returns how many of its rows were written beyond the schedule."""
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
        """Note the boundaries all of whose rows are acknowledged, as far as every earlier one's are.

        A boundary at which rows were written beyond the schedule does not count: those that the schedule writes back there are still to come, and
        a fetch that must follow these must wait.
        """
        while self.boundaries and not self.boundaries[0].left:
            done = self.boundaries.popleft()
            if not done.at_stop:
                self.released_boundary = done.number


@dataclass(frozen=True, slots=True)
class Unwritten:
    """What the store may lack of a lane that is served no more.

    released: the last boundary all of whose rows it has, and of those before it, and the number of the last batch that it has. owed: the rows that
    ended at later ones, by boundary, ascending.
    """

    released: tuple[int, int]
    owed: Sequence[tuple[int, EndedRows]]


class Lanes:
    """The lanes that a traffic serves, the one list of them that all its parts share. Whoever adds or removes one holds the monitor."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor
        self._states: dict[int, LaneTraffic] = {}

    def add(self, state: LaneTraffic) -> None:
        """Serve a lane. Raises CacheError for one that is served."""
        if state.lane in self._states:
            raise CacheError(f"lane {state.lane}: is served already")
        self._states[state.lane] = state

    def remove(self, lane: int) -> None:
        """Serve a lane no more."""
        del self._states[lane]

    def __getitem__(self, lane: int) -> LaneTraffic:
        state = self._states.get(lane)
        if state is None:
            raise CacheError(f"lane {lane}: is not served here")
        return state

    def serves(self, writes: LaneWrites) -> bool:
        """Whether these are of a lane that is served."""
        state = self._states.get(writes.lane)
        return state is not None and state.writes is writes

    @property
    def all(self) -> list[LaneTraffic]:
        """All of them, as they are now."""
        with self._monitor:
            return list(self._states.values())
