"""A snapshot of all rows of an owner's lanes after a training step, taken while training continues.

The trainer's thread copies the rows that sit in slots at that moment. All other rows are read from
the store later, beside the traffic's own fetches.

No row is read too late, with parity or without. A row that changes after the step must first be in
a slot. Either the row was in a slot or staged when the snapshot began, or a fetch brings it later.
Such a fetch passes through this trainer's memory with the version of the step, as the row's tag
shows, and the snapshot takes the row there, unless it asked the store for the row before.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from foreload.base.compiled import nb
from foreload.cache.errors import SnapshotAbandoned
from foreload.cache.protocol.rounds.background import SHARE
from foreload.cache.protocol.rounds.lanes import Lanes, LaneTraffic, PlannedFetch
from foreload.cache.protocol.rounds.monitor import Monitor
from foreload.cache.protocol.shards.reading import Expected, StoredRows
from foreload.cache.rows.partition import FREE
from foreload.cache.rows.slot_copy import SlotRows
from foreload.cache.rows.staging import EventStaging
from foreload.pipelines.schedule.format import Arrivals, RowColumns

CHUNK_ROWS = 2048  # rows requested from the store in one round, besides those that training needs
HELD_ROWS = 1 << 14  # slot rows that `Snapshot.rows` yields at once
# Bytes of taken rows that wait for the reader of `Snapshot.rows`. At this limit the snapshot
# requests no more rows from the store.
QUEUE_BYTES = 1 << 26
# Training's own fetches still add to these bytes. Beyond this limit the snapshot is abandoned.
MOST_BYTES = 1 << 29


@nb.njit(nogil=True, cache=True)
def _mark(have: np.ndarray, starts: np.ndarray, table: np.ndarray, ordinal: np.ndarray, which: np.ndarray) -> None:
    """Mark rows as taken, and keep in `which` only the rows that were not marked before.

    A row beyond its table's ordinals is not part of the snapshot.

    Args:
        have: uint8, 1 where a row is taken; written to.
        starts: int64 [tables + 1], where each table begins in `have`, and the end.
        table: int16 [n].
        ordinal: int64 [n]; negative for a row that was never trained.
        which: bool [n], the rows to mark; written to.
    """
    for i in range(table.size):
        place = starts[table[i]] + ordinal[i]
        if which[i] and ordinal[i] >= 0 and place < starts[table[i] + 1] and not have[place]:
            have[place] = 1
        else:
            which[i] = False


@nb.njit(nogil=True, cache=True)
def _next_missing(have: np.ndarray, start: int, out: np.ndarray) -> tuple[int, int]:
    """Find the next places whose entry in `have` is 0, from `start` on.

    Args:
        have: uint8, by place.
        start: the first place to look at.
        out: int64 [m], receives the places.

    Returns:
        How many places were found, and the place at which to continue.
    """
    count = 0
    while start < have.size and count < out.size:
        if not have[start]:
            out[count] = start
            count += 1
        start += 1
    return count, start


@dataclass(frozen=True, slots=True)
class TakenRows(RowColumns):
    """Rows of a lane as they were after the step.

    Attributes:
        weights: float32 [n, Wmax]; undefined beyond a row's own width.
        state: float32 [n, Smax]; undefined beyond a row's own width.
    """

    lane: int
    weights: np.ndarray
    state: np.ndarray

    @property
    def bytes(self) -> int:
        """Bytes of memory of the weights and the state."""
        return self.weights.nbytes + self.state.nbytes


@dataclass(frozen=True, slots=True)
class _Staged:
    """Rows of a coming event that had arrived when the snapshot began.

    Attributes:
        event: the staging of the event.
        places: int64 [n], the places of the rows in that staging.
    """

    event: EventStaging
    places: np.ndarray


class _Lane:
    """The progress of a snapshot on one lane.

    Attributes:
        have: uint8, by table (from starts[table] on) and ordinal: 1 for a row that is taken, or
            that is not to be taken.
    """

    def __init__(self, state: LaneTraffic, held: SlotRows, given: np.ndarray) -> None:
        """Note what is in slots and staged. The caller holds the monitor.

        Args:
            state: the lane's traffic.
            held: the rows that sit in slots.
            given: int64 [tables], the ordinals given so far.
        """
        self.writes, self.held = state.writes, held
        self.starts = np.concatenate([[0], np.cumsum(given)]).astype(np.int64)
        self.have = np.zeros(int(self.starts[-1]), np.uint8)
        self.cursor = 0
        # The rows handed over so far are in the store once this boundary is released.
        self.boundary = state.last_boundary
        self.staged = [_Staged(event, np.flatnonzero(event.ready)) for event in state.events.values()]


class Snapshot:
    """The rows of an owner's lanes after a training step.

    Three threads use a Snapshot: the trainer's thread begins it, the traffic thread takes rows, and
    a thread of its own reads `rows`.
    """

    def __init__(
        self,
        step: int,
        lanes: Mapping[int, tuple[SlotRows, np.ndarray]],
        states: Lanes,
        stored: StoredRows,
        monitor: Monitor,
    ) -> None:
        """Begin a snapshot. The caller holds the monitor.

        Args:
            lanes: lane -> the rows that sit in its slots, in memory that stays unchanged until it
                is read; and int64 [tables], the ordinals given so far.
            states: the lanes of the traffic.
        """
        self.step = step
        self._since = -1  # rows last changed at or before this step are not wanted
        self._states, self._stored, self._monitor = states, stored, monitor
        self._lanes = {lane: _Lane(states[lane], held, given) for lane, (held, given) in lanes.items()}
        self._left = deque(self._lanes.values())  # lanes with rows still to be requested
        self._not_before = 0.0  # time.monotonic()
        self.throttled = True  # whether it takes at most `share` of the traffic thread's time
        self.share = SHARE
        self._asked: tuple[PlannedFetch, float] | None = None  # the fetch under way, and its start
        self._begun = False
        # The masks given to `want`, until the traffic thread has applied them.
        self._wanted: Mapping[int, np.ndarray] | None = None
        self._may_ask = False
        # The traffic thread and the reader's thread share the following fields.
        self._shared = threading.Condition()
        self._taken: deque[TakenRows] = deque()
        self._bytes = 0  # of the rows in `_taken`
        self._done = False
        self._why: str | None = None  # why the snapshot was abandoned

    # Called by the reader's thread.

    def starts(self, lane: int) -> np.ndarray:
        """Return where each table of a lane begins in the masks of `want`, and their end.

        The result is int64 [tables + 1].
        """
        return self._lanes[lane].starts

    def want(self, since: int = -1, wanted: Mapping[int, np.ndarray] | None = None) -> None:
        """Start requesting rows from the store. To be called before `rows`.

        Args:
            since: only rows that changed after this step are wanted.
            wanted: lane -> bool mask by table and ordinal, which marks at least the rows that
                changed after `since`. If None, every row is wanted.
        """
        with self._monitor:
            self._since, self._wanted, self._may_ask = since, wanted, True
            self._monitor.signal()

    def rows(self) -> Iterator[TakenRows]:
        """Yield all wanted rows, each once, in no particular order.

        Raises:
            SnapshotAbandoned: the snapshot was abandoned.
        """
        for lane, own in self._lanes.items():
            held = own.held
            for first in range(0, len(held), HELD_ROWS):
                part = slice(first, first + HELD_ROWS)
                yield from self._changed(TakenRows(*held.columns(part), lane, held.weights[part], held.state[part]))
        while True:
            with self._shared:
                while not self._taken and not self._done and self._why is None:
                    self._shared.wait()
                if self._why is not None:
                    raise SnapshotAbandoned(self._why)
                if not self._taken:
                    return
                rows = self._taken.popleft()
                was_full = self._bytes >= QUEUE_BYTES
                self._bytes -= rows.bytes
                room = was_full and self._bytes < QUEUE_BYTES
            if room:
                self._monitor.wake()
            yield from self._changed(rows)

    def _changed(self, rows: TakenRows) -> Iterator[TakenRows]:
        """Yield those of the rows that changed after the `since` of `want`.

        Rows taken before the call of `want` may be older, and slots may be free.
        """
        changed = (rows.tag > self._since + 1) & (rows.table != FREE)
        if changed.all():
            yield rows
        elif changed.any():
            yield TakenRows(*rows.columns(changed), rows.lane, rows.weights[changed], rows.state[changed])

    # Called by any thread.

    def hurry(self) -> None:
        """Request all remaining rows at once, because nothing else needs the store any longer."""
        self.throttled = False
        self._monitor.wake()

    def abandon(self, why: str) -> None:
        """Stop taking rows, and make the reader of `rows` raise SnapshotAbandoned.

        Does nothing once all rows are taken.
        """
        with self._shared:
            if not self._done and self._why is None:
                self._why = why
                self._shared.notify_all()

    @property
    def over(self) -> bool:
        """Whether all rows are taken, or the snapshot was abandoned."""
        return self._done or self._why is not None

    # Called by the traffic thread.

    def delay(self) -> float | None:
        """Return the seconds until the next rows are to be requested from the store.

        Returns None if that time is not known. The event that makes it known wakes the traffic
        thread.
        """
        if self.over or self._asked is not None or self._bytes >= QUEUE_BYTES or (self._begun and not self._may_scan()):
            return None
        return max(self._not_before - time.monotonic(), 0.0) if self.throttled and self._begun else 0.0

    def _may_scan(self) -> bool:
        return self._may_ask and all(self._states[lane].released_boundary >= own.boundary for lane, own in self._lanes.items())

    def fetches(self) -> list[PlannedFetch]:
        """Return the fetches that the snapshot adds to the next round."""
        if self.delay() != 0.0:
            return []
        if not self._begun:
            self._begin()
            if not self._may_scan():
                return []
        if self._wanted is not None:
            for lane, own in self._lanes.items():
                own.have |= ~self._wanted[lane]
            self._wanted = None
        while self._left:
            own = self._left[0]
            places = np.empty(CHUNK_ROWS, np.int64)
            count, own.cursor = _next_missing(own.have, own.cursor, places)
            if count:
                fetch = self._fetch(own, places[:count])
                self._asked = fetch, time.monotonic()
                return [fetch]
            self._left.popleft()
        with self._shared:
            self._done = True
            self._shared.notify_all()
        return []

    def _begin(self) -> None:
        """Take the rows that were in slots or staged when the snapshot began."""
        self._begun = True
        for lane, own in self._lanes.items():
            _mark(own.have, own.starts, own.held.table, own.held.ordinal, own.held.table != FREE)
            for staged in own.staged:
                self._take(lane, staged.event, staged.event.arrivals, staged.places)
            own.staged.clear()

    def _fetch(self, own: _Lane, places: np.ndarray) -> PlannedFetch:
        table = (np.searchsorted(own.starts, places, side="right") - 1).astype(np.int16)
        count, lane = len(places), own.writes.lane
        columns = table, places - own.starts[table], np.zeros(count, np.int64), np.full(count, self.step + 1, np.int32)
        nowhere = np.full(count, -1, np.int32)
        event = EventStaging(Arrivals(*columns, nowhere, nowhere), self._stored.shapes)
        return PlannedFetch(own.writes, Expected(*columns, lane, tag_at_most=True, any_id=True), event, np.arange(count))

    def receive(self, fetched: Sequence[PlannedFetch]) -> list[PlannedFetch]:
        """Take the rows that a round fetched.

        Returns:
            The fetches of the traffic itself.
        """
        if not self._begun:
            # Take the rows that were staged at the beginning first. Until then the snapshot has
            # taken no row.
            self._begin()
        own = [fetch for fetch in fetched if self._asked is None or fetch is not self._asked[0]]
        for fetch in own:
            lane = self._lanes.get(fetch.writes.lane)
            if lane is not None and lane.writes is fetch.writes:
                self._take(fetch.writes.lane, fetch.event, fetch.expected, fetch.places)
        if self._asked is not None and len(own) < len(fetched):
            (asked, since), self._asked = self._asked, None
            self._take(asked.writes.lane, asked.event, asked.expected, asked.places)
            now = time.monotonic()
            share = len(asked.places) / sum(len(fetch.places) for fetch in fetched)
            # The exchange also served the traffic's own fetches, so only the snapshot's share of
            # the rows counts.
            self._not_before = now + (now - since) * share * (1 / self.share - 1)
        return own

    def _take(self, lane: int, event: EventStaging, who: RowColumns, places: np.ndarray) -> None:
        """Take those rows of an event's staging that have the step's version and are not taken yet.

        Args:
            event: the staging.
            who: the columns of these rows; or the event's arrivals, of which `places` selects these
                rows.
            places: int64 [n], the places of the rows in the staging.
        """
        own, tag = self._lanes[lane], event.rows.tag[places]
        table, ordinal, row_id, _ = who.columns(places) if who is event.arrivals else who.columns()
        # A tag is 1 + the step that last changed the row; tag 0 is a row that was never trained. A
        # higher tag than step + 1 is a version after the step.
        which = (tag >= 1) & (tag <= self.step + 1)
        _mark(own.have, own.starts, table, ordinal, which)
        which &= tag > self._since + 1
        if not which.any():
            return
        taken = places[which]
        rows = TakenRows(
            table[which], ordinal[which], row_id[which], tag[which], lane, event.rows.weights[taken], event.rows.state[taken]
        )
        with self._shared:
            self._taken.append(rows)
            self._bytes += rows.bytes
            self._shared.notify_all()
        if self._bytes > MOST_BYTES:
            self.abandon("training fetches rows faster than they can be written")


def warm_up() -> None:
    """Compile the kernels of a snapshot, or load them, so that no step waits for that."""
    none = np.zeros(0, np.uint8)
    _mark(none, np.zeros(1, np.int64), np.zeros(0, np.int16), np.zeros(0, np.int64), np.zeros(0, bool))
    _next_missing(none, 0, np.zeros(1, np.int64))


class Snapshots:
    """The current snapshot of one traffic, if any. There is at most one at a time."""

    def __init__(self, stored: StoredRows, lanes: Lanes, monitor: Monitor) -> None:
        self._stored, self._lanes, self._monitor = stored, lanes, monitor
        self._current: Snapshot | None = None

    def begin(self, step: int, lanes: Mapping[int, tuple[SlotRows, np.ndarray]]) -> Snapshot:
        """Begin a snapshot of the rows after a step, and abandon the one before.

        The trainer's thread calls this between two steps, after it handed over the rows that end at
        the step.

        Args:
            lanes: as `Snapshot` has it.
        """
        self.abandon("another snapshot began")
        with self._monitor:
            self._current = Snapshot(step, lanes, self._lanes, self._stored, self._monitor)
            self._monitor.signal()
            return self._current

    def abandon(self, why: str) -> None:
        """Abandon the current snapshot, if there is one: lanes changed, or the traffic is over."""
        current, self._current = self._current, None
        if current is not None:
            current.abandon(why)

    # Called by the traffic thread.

    def _under_way(self) -> Snapshot | None:
        if self._current is None:
            return None
        with self._monitor:
            if self._current is not None and self._current.over:
                self._current = None  # this frees the copy of the slots too
            return self._current

    def delay(self) -> float | None:
        """Return what `Snapshot.delay` of the current snapshot returns."""
        current = self._under_way()
        return None if current is None else current.delay()

    def fetches(self) -> list[PlannedFetch]:
        """Return what `Snapshot.fetches` of the current snapshot returns."""
        current = self._under_way()
        return [] if current is None else current.fetches()

    def receive(self, fetched: Sequence[PlannedFetch]) -> Sequence[PlannedFetch]:
        """Pass what a round fetched to the current snapshot, as `Snapshot.receive`.

        The caller holds the monitor until the fetched rows are marked as ready, so that no snapshot
        begins in between and misses them.
        """
        current = self._under_way()
        return fetched if current is None else current.receive(fetched)
