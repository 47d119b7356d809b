"""Taking all rows of an owner's lanes as they are after a training step, while training goes on.

What sits in slots is copied at that moment, by the trainer's thread; everything else is read from the store later, beside the traffic's own fetches.
Nothing is read too late, with parity or without: a row that changes after the step must first be in a slot. It was there at that moment, or staged,
or it is *fetched* later, and so passes through this trainer's memory as it was after the step, which its tag shows; it is taken there, unless the
store was asked for it before.
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

CHUNK_ROWS = 2048  # that are asked of the store in one round, besides what training needs
HELD_ROWS = 1 << 14  # of what is at hand that are given at once
QUEUE_BYTES = 1 << 26  # of rows taken that wait for who writes them: the store is asked for no more meanwhile
MOST_BYTES = 1 << 29  # of rows that training's fetches bring meanwhile: the snapshot is given up beyond that


@nb.njit(nogil=True, cache=True)
def _mark(have: np.ndarray, starts: np.ndarray, table: np.ndarray, ordinal: np.ndarray, which: np.ndarray) -> None:
    """Note rows as there, and leave in `which`, bool [n], only those that were not; one beyond a table's ordinals is none."""
    for i in range(table.size):
        place = starts[table[i]] + ordinal[i]
        if which[i] and ordinal[i] >= 0 and place < starts[table[i] + 1] and not have[place]:
            have[place] = 1
        else:
            which[i] = False


@nb.njit(nogil=True, cache=True)
def _next_missing(have: np.ndarray, start: int, out: np.ndarray) -> tuple[int, int]:
    """The next places from `start` on that are 0, into `out`; returns how many, and where to go on."""
    count = 0
    while start < have.size and count < out.size:
        if not have[start]:
            out[count] = start
            count += 1
        start += 1
    return count, start


@dataclass(frozen=True, slots=True)
class TakenRows(RowColumns):
    """Rows of a lane as they were: weights float32 [n, Wmax], state float32 [n, Smax], beyond a row's own width undefined."""

    lane: int
    weights: np.ndarray
    state: np.ndarray

    @property
    def bytes(self) -> int:
        """Memory of the values."""
        return self.weights.nbytes + self.state.nbytes


@dataclass(frozen=True, slots=True)
class _Staged:
    """Rows of a coming event that were there when the snapshot began: places int64 [n] in its staging."""

    event: EventStaging
    places: np.ndarray


class _Lane:
    """Of one lane, what is taken. have: uint8, by table (from starts[table] on) and ordinal: taken, or not to be taken."""

    def __init__(self, state: LaneTraffic, held: SlotRows, given: np.ndarray) -> None:
        """With the monitor held. held: what sits in slots; given: int64 [tables], the ordinals given so far."""
        self.writes, self.held = state.writes, held
        self.starts = np.concatenate([[0], np.cumsum(given)]).astype(np.int64)
        self.have = np.zeros(int(self.starts[-1]), np.uint8)
        self.cursor = 0
        # What was handed over is in the store once this is released.
        self.boundary = state.last_boundary
        self.staged = [_Staged(event, np.flatnonzero(event.ready)) for event in state.events.values()]


class Snapshot:
    """The rows of an owner's lanes after a training step.

    step: that step. Three threads have to do with it: the trainer's begins it, the
    traffic's takes rows, and one of its own reads `rows`.
    """

    def __init__(
        self,
        step: int,
        lanes: Mapping[int, tuple[SlotRows, np.ndarray]],
        states: Lanes,
        stored: StoredRows,
        monitor: Monitor,
    ) -> None:
        """lanes: lane -> what sits in its slots, in memory that is left alone until it was read, and int64 [tables], the ordinals given. With the
        monitor held.
        """
        self.step = step
        self._since = -1  # of what changed up to this step, nothing is wanted
        self._states, self._stored, self._monitor = states, stored, monitor
        self._lanes = {lane: _Lane(states[lane], held, given) for lane, (held, given) in lanes.items()}
        self._left = deque(self._lanes.values())  # that the store is still to be asked for
        self._not_before = 0.0  # time.monotonic()
        self.throttled = True  # no more than its share of the traffic's time goes into it
        self.share = SHARE
        self._asked: tuple[PlannedFetch, float] | None = None  # what is under way, and since when
        self._begun = False
        self._wanted: Mapping[int, np.ndarray] | None = None  # as `want` has it, until the traffic's thread has seen it
        self._may_ask = False
        # What follows is shared by the traffic's thread and the reader's.
        self._shared = threading.Condition()
        self._taken: deque[TakenRows] = deque()
        self._bytes = 0  # of what waits in `_taken`
        self._done = False
        self._why: str | None = None  # it was abandoned

    # The reader's thread.

    def starts(self, lane: int) -> np.ndarray:
        """Where the ordinals of a lane's tables begin in `want`'s masks, and where they end: int64 [tables + 1]."""
        return self._lanes[lane].starts

    def want(self, since: int = -1, wanted: Mapping[int, np.ndarray] | None = None) -> None:
        """Have the store asked from now on for what is not at hand; to be called before `rows`.

        since: only rows that changed after this step are wanted, which `wanted` marks, by lane (of these, at least): bool, by table and ordinal.
        """
        with self._monitor:
            self._since, self._wanted, self._may_ask = since, wanted, True
            self._monitor.signal()

    def rows(self) -> Iterator[TakenRows]:
        """All rows that are to be taken, each once, in no order. Raises SnapshotAbandoned."""
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
        """Of rows, those that changed since; what was taken before `want` may be others, and slots may be free."""
        changed = (rows.tag > self._since + 1) & (rows.table != FREE)
        if changed.all():
            yield rows
        elif changed.any():
            yield TakenRows(*rows.columns(changed), rows.lane, rows.weights[changed], rows.state[changed])

    # Any thread.

    def hurry(self) -> None:
        """Ask the store for all that is left at once, since nothing else does any more."""
        self.throttled = False
        self._monitor.wake()

    def abandon(self, why: str) -> None:
        """Take no more: whoever reads `rows` has SnapshotAbandoned raised. Does nothing once all is taken."""
        with self._shared:
            if not self._done and self._why is None:
                self._why = why
                self._shared.notify_all()

    @property
    def over(self) -> bool:
        """Whether nothing is to be taken any more."""
        return self._done or self._why is not None

    # The traffic's thread.

    def delay(self) -> float | None:
        """Seconds until the store is to be asked for more; None where that is not known: whoever makes it so wakes the thread."""
        if self.over or self._asked is not None or self._bytes >= QUEUE_BYTES or (self._begun and not self._may_scan()):
            return None
        return max(self._not_before - time.monotonic(), 0.0) if self.throttled and self._begun else 0.0

    def _may_scan(self) -> bool:
        return self._may_ask and all(self._states[lane].released_boundary >= own.boundary for lane, own in self._lanes.items())

    def fetches(self) -> list[PlannedFetch]:
        """What the next round is to ask the store for besides the traffic's own."""
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
        """Note what was there when the snapshot began."""
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
        """Take what a round brought; returns the traffic's own fetches."""
        if not self._begun:
            # What is staged goes first; nothing of it can have been given away before.
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
            self._not_before = now + (now - since) * share * (1 / self.share - 1)
        return own

    def _take(self, lane: int, event: EventStaging, who: RowColumns, places: np.ndarray) -> None:
        """Take rows of an event's staging, at places int64 [n], where they are as after the step, and not taken yet.

        who: these rows, or all of the event's where it is its arrivals.
        """
        own, tag = self._lanes[lane], event.rows.tag[places]
        table, ordinal, row_id, _ = who.columns(places) if who is event.arrivals else who.columns()
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
            self.abandon("what training fetches meanwhile comes faster than it can be written")


def warm_up() -> None:
    """Compile what a snapshot needs, or load it, so that no step waits for that."""
    none = np.zeros(0, np.uint8)
    _mark(none, np.zeros(1, np.int64), np.zeros(0, np.int16), np.zeros(0, np.int64), np.zeros(0, bool))
    _next_missing(none, 0, np.zeros(1, np.int64))


class Snapshots:
    """The snapshot of one traffic that is under way, if any: one at a time."""

    def __init__(self, stored: StoredRows, lanes: Lanes, monitor: Monitor) -> None:
        self._stored, self._lanes, self._monitor = stored, lanes, monitor
        self._current: Snapshot | None = None

    def begin(self, step: int, lanes: Mapping[int, tuple[SlotRows, np.ndarray]]) -> Snapshot:
        """Begin one, of the rows after a step, as `Snapshot` has it; one before is abandoned. The trainer's thread calls this, between two steps,
        when what that step wrote is handed over.
        """
        self.abandon("another one began")
        with self._monitor:
            self._current = Snapshot(step, lanes, self._lanes, self._stored, self._monitor)
            self._monitor.signal()
            return self._current

    def abandon(self, why: str) -> None:
        """Take no more of the one under way, if there is one: lanes changed, or the traffic is over."""
        current, self._current = self._current, None
        if current is not None:
            current.abandon(why)

    # The traffic's thread.

    def _under_way(self) -> Snapshot | None:
        if self._current is None:
            return None
        with self._monitor:
            if self._current is not None and self._current.over:
                self._current = None  # and with it the copy
            return self._current

    def delay(self) -> float | None:
        """As `Snapshot.delay`."""
        current = self._under_way()
        return None if current is None else current.delay()

    def fetches(self) -> list[PlannedFetch]:
        """As `Snapshot.fetches`."""
        current = self._under_way()
        return [] if current is None else current.fetches()

    def receive(self, fetched: Sequence[PlannedFetch]) -> Sequence[PlannedFetch]:
        """As `Snapshot.receive`. With the monitor held until what was brought is noted as there, so that none begins in between."""
        current = self._under_way()
        return fetched if current is None else current.receive(fetched)
