"""The traffic of one trainer with the store: one background thread that serves its lanes in rounds.

Without parity a round is one exchange with all store shards: of each lane the next write-back batch (its rows and the marker, to every
shard), and all fetches that are due. A fetch is due once the boundary of its row's last write-back is *released*, that is, acknowledged by all
shards in an earlier round; so no read can pass the write that it depends on.

With parity a round has three phases. Read phase: the parity rows of the stripes that the batch touches, and the fetches. Parity phase: the
new parity rows, once all is read, the rows of the batch before are acknowledged, and the batch is in the log. Data phase: the rows,
in one exchange with the next read phase.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from types import TracebackType

import numpy as np

from cache.batch_log import BatchLog, LoggedBatch
from cache.batches import WriteBackBatch, WriteBackStaging
from cache.errors import CacheError, RowError
from cache.marker import Marker
from cache.reading import Expected, Request, StoredRows, accept, check_marker, plan_reads
from cache.staging import EndedRows, EventStaging, Staged
from cache.store import Read, Write
from cache.stripes import ALL_STRIPES
from pipelines.schedule_format import Arrivals

NICENESS = 10  # of the thread
PLAN_POLL = timedelta(milliseconds=100)

Plan = Iterator[tuple[int, Arrivals] | None]


@dataclass(frozen=True, slots=True)
class LanePlan:
    """What one lane will need, and where its traffic stands at the start.

    plan: (event index, arrivals) in order of the program; None where the next event is not known yet (it is asked for again, after a
    while). An exception that it raises is raised by the `take` of the event that it stands for. batches: the number of the lane's last
    write-back batch, as in RUN; released_boundary: all boundaries up to it were written back before. written: int64 [tables], the lane's
    ordinals that the store has, all below it (None: none).
    """

    lane: int
    plan: Plan
    batches: int = 0
    released_boundary: int = -1
    written: np.ndarray | None = None


@dataclass(slots=True)
class Counters:
    """What the traffic did so far, all lanes together.

    rows_written is without the rows written beyond the schedule; parity rows are counted apart. stalled_rows: arrivals whose fetch was
    not yet allowed to leave when the trainer took their event.
    """

    rows_initial: int = 0
    rows_fetched: int = 0
    rows_written: int = 0
    rows_written_beyond: int = 0
    parity_rows_read: int = 0
    parity_rows_written: int = 0
    bytes_fetched: int = 0
    bytes_written: int = 0
    rounds: int = 0
    batches: int = 0
    stalled_rows: int = 0
    waited: timedelta = timedelta()


@dataclass(slots=True)
class _Boundary:
    number: int
    left: int  # rows not yet acknowledged
    beyond: bool


@dataclass(slots=True)
class _Fetch:
    event: EventStaging
    places: np.ndarray  # int64 [n], of arrivals that nothing was asked for yet


@dataclass(slots=True)
class _PlannedFetch:
    """A fetch that leaves, with what it expects and its reads."""

    state: _Lane
    fetch: _Fetch
    expected: Expected
    requests: list[Request]


class _Lane:
    """One lane. The fields of the first group belong to the thread, the others to whoever holds the condition."""

    def __init__(self, plan: LanePlan, stored: StoredRows) -> None:
        self.lane = plan.lane
        self.plan = plan.plan
        self.next: tuple[int, Arrivals] | None = None
        self.unknown = False  # the plan's next event is not known yet
        self.fetches: list[_Fetch] = []
        self.stripes = stored.placement.stripes(
            plan.lane, plan.written if plan.written is not None else np.zeros(len(stored.layouts), np.int64)
        )
        self.writes = WriteBackStaging(stored.shapes, self.stripes, stored.placement.code, plan.batches)
        self.pending: WriteBackBatch | None = None  # its parity, if any, is acknowledged, its rows are not sent yet

        self.pulled = -1  # index of the last event staged or taken
        self.wanted = -1  # index of the last event that the trainer waits for
        self.ended = False
        self.plan_error: Exception | None = None
        self.events: dict[int, EventStaging] = {}
        self.staged_rows = 0
        self.handed: deque[tuple[int, EndedRows]] = deque()
        self.last_boundary = plan.released_boundary
        self.boundaries: deque[_Boundary] = deque()
        self.unwritten_rows = 0
        self.batches = plan.batches
        self.released_boundary = plan.released_boundary


class Traffic:
    """Serves lanes over one Store, which belongs to the thread from here until `close` or `abort`, and is not closed by it.

    lead_events, staging_rows: how far ahead of the trainer a lane's arrivals are staged; both are passed only for an event that the trainer
    waits for. staging_rows also bounds a lane's rows that wait for their write-back: `write_back` blocks meanwhile. check_tags=False leaves
    out the check of ids and tags (for tests of the tests). log: where the batches under way are held, needed with parity. on_action is called
    by the thread at "data leaves", "fetch leaves", "data acknowledged", "rows staged", and with parity also "parity rows asked for", "parity
    rows read", "batch logged", "parity leaves" and "parity acknowledged".

    Whatever the thread fails with is raised by every later call.
    """

    def __init__(
        self,
        stored: StoredRows,
        plans: Sequence[LanePlan],
        seed: int,
        *,
        lead_events: int = 8,
        staging_rows: int = 1 << 18,
        check_tags: bool = True,
        log: BatchLog | None = None,
        on_action: Callable[[str], None] | None = None,
    ) -> None:
        if lead_events < 1 or staging_rows < 1:
            raise CacheError(f"traffic: lead_events and staging_rows must be at least 1; got {lead_events} and {staging_rows}")
        if stored.placement.r and log is None:
            raise CacheError("traffic: needs a log of its batches where there is parity")
        self._stored = stored
        self._code = stored.placement.code
        self._log = log
        self._cursors = np.full(stored.placement.shard_count, ALL_STRIPES, np.uint64)
        self._seed = seed
        self._lead_events = lead_events
        self._staging_rows = staging_rows
        self._check_tags = check_tags
        self._on_action = on_action or (lambda action: None)
        self._lanes = {plan.lane: _Lane(plan, stored) for plan in plans}
        self._counters = Counters()
        self._condition = threading.Condition()
        self._signals = 1  # raised by whatever may give the thread something to do
        self._stopping = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name="traffic", daemon=True)
        self._thread.start()

    # The trainer's side.

    def take(self, lane: int, event_index: int) -> Staged:
        """All arrivals of the lane's next event, waiting for them where need be. Events are taken in the order of the plan."""
        started = time.monotonic()
        with self._condition:
            state = self._lanes[lane]
            event = self._await_event(state, event_index)
            if next(iter(state.events)) != event_index:
                raise CacheError(f"lane {lane}: event {next(iter(state.events))} must be taken before event {event_index}")
            self._counters.stalled_rows += event.undue
            self._wait(lambda: bool(event.ready.all()))
            del state.events[event_index]
            state.staged_rows -= len(event.arrivals)
            self._signal()
            return self._staged(event, started)

    def rows_ready(self, lane: int, event_index: int, which: np.ndarray) -> Staged:
        """Arrivals of a coming event, of which only the rows in `which` (a mask or places) are waited for, and are valid.

        None of them may have a fetch that must follow a boundary not yet handed over, or this never returns.
        """
        started = time.monotonic()
        with self._condition:
            event = self._await_event(self._lanes[lane], event_index)
            self._wait(lambda: bool(event.ready[which].all()))
            return self._staged(event, started)

    def write_back(self, lane: int, boundary: int, ended: EndedRows, beyond: bool = False) -> None:
        """Hand over all rows whose residency ended at a boundary, possibly none; boundaries come in ascending order.

        A row that is as the store has it (tag = stored tag) is not written. beyond: these rows are written beyond the schedule, on a clean
        stop, and counted apart. Blocks while too many rows wait.
        """
        mask = ended.tag != ended.stored_tag
        changed = ended if mask.all() else ended.select(mask)
        with self._condition:
            state = self._lanes[lane]
            if boundary <= state.last_boundary:
                raise CacheError(f"lane {lane}: boundary {boundary} must follow {state.last_boundary}")
            self._wait(lambda: not state.unwritten_rows or state.unwritten_rows + len(changed) <= self._staging_rows)
            state.last_boundary = boundary
            state.unwritten_rows += len(changed)
            state.boundaries.append(_Boundary(boundary, len(changed), beyond))
            state.handed.append((boundary, changed))
            self._release(state)
            self._signal()

    def flush(self) -> None:
        """Wait until every row handed over is acknowledged."""
        with self._condition:
            self._wait(lambda: not any(state.boundaries for state in self._lanes.values()))

    def batches(self, lane: int) -> int:
        """The number of the lane's last write-back batch that all shards acknowledged; RUN keeps it for a resume."""
        with self._condition:
            return self._lanes[lane].batches

    def counters(self) -> Counters:
        """A copy of the counters."""
        with self._condition:
            return replace(self._counters)

    def close(self) -> None:
        """Flush, then stop the thread."""
        try:
            if self._thread.is_alive() or self._failure is not None:
                self.flush()
        finally:
            self.abort()

    def abort(self) -> None:
        """Stop the thread once its exchange under way is over, whatever still waits. Does nothing the second time."""
        with self._condition:
            self._stopping = True
            self._signal()
        self._thread.join()

    def __enter__(self) -> Traffic:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def _await_event(self, state: _Lane, event_index: int) -> EventStaging:
        if event_index > state.wanted:
            state.wanted = event_index
            if event_index > state.pulled:
                self._signal()
        self._wait(lambda: state.pulled >= event_index or state.ended)
        event = state.events.get(event_index)
        if event is None:
            if state.plan_error is not None and state.pulled < event_index:
                raise state.plan_error
            raise CacheError(f"lane {state.lane}: event {event_index} is not in the plan, or was taken before")
        return event

    def _wait(self, satisfied: Callable[[], bool]) -> None:
        while True:
            if self._failure is not None:
                raise self._failure
            if self._stopping:
                raise CacheError("traffic: is closed")
            if satisfied():
                return
            self._condition.wait()

    def _staged(self, event: EventStaging, started: float) -> Staged:
        waited = timedelta(seconds=time.monotonic() - started)
        self._counters.waited += waited
        return Staged(event.rows.weights, event.rows.state, waited)

    def _signal(self) -> None:
        self._signals += 1
        self._condition.notify_all()

    # The thread's side.

    def _serve(self) -> None:
        if sys.platform == "linux":
            # Woken by the training thread, it would otherwise now and then take that thread's core from it for some milliseconds.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        seen = 0
        try:
            while True:
                with self._condition:
                    while self._signals == seen:
                        polls = any(state.unknown for state in self._lanes.values())
                        if not self._condition.wait(PLAN_POLL.total_seconds() if polls else None):
                            break
                    seen = self._signals
                while not self._stopping and self._round():
                    pass
                if self._stopping:
                    return
        except BaseException as error:
            with self._condition:
                self._failure = error
                self._condition.notify_all()

    def _round(self) -> bool:
        """One round with the store; False if there was nothing to exchange."""
        fetches: list[_PlannedFetch] = []
        cut: list[tuple[_Lane, WriteBackBatch]] = []
        for state in self._lanes.values():
            self._pull(state)
            self._stage(state)
            fetches += [_PlannedFetch(state, fetch, *self._request(state, fetch)) for fetch in self._due(state)]
            batch = state.writes.cut(self._cursors)
            if batch is not None and self._code is None:
                state.pending = batch
            elif batch is not None:
                cut.append((state, batch))
        sent = [(state, state.pending) for state in self._lanes.values() if state.pending is not None]
        if not sent and not fetches and not cut:
            return False
        parity = [(state, read) for state, batch in cut for read in self._parity_reads(state, batch)]
        self._exchange_data(fetches, parity, sent)
        for state, batch in cut:
            self._send_parity(state, batch)
        if cut:
            self._exchange_parity(cut)
        return True

    def _exchange_data(
        self, fetches: list[_PlannedFetch], parity: list[tuple[_Lane, Read]], sent: list[tuple[_Lane, WriteBackBatch]]
    ) -> None:
        """Read phase, and the data phase of the batches whose parity is acknowledged."""
        reads = [request.read for fetch in fetches for request in fetch.requests]
        writes = [write for state, batch in sent for write in self._data_writes(state, batch)]
        if writes:
            self._on_action("data leaves")
        if reads:
            self._on_action("fetch leaves")
        if parity:
            self._on_action("parity rows asked for")
        self._stored.store.exchange(reads + [read for _, read in parity], writes)
        if writes:
            self._on_action("data acknowledged")
        markers = {state.lane: self._markers(state) for state in self._lanes.values()}
        for fetch in fetches:
            for request in fetch.requests:
                check_marker(self._stored, fetch.state.lane, request.read, markers[fetch.state.lane])
                accept(self._stored, fetch.expected, request, fetch.fetch.event.rows, fetch.fetch.places, self._check_tags)
        for state, read in parity:
            check_marker(self._stored, state.lane, read, markers[state.lane])
            if read.missing is not None:
                raise self._parity_missing(state, read)
        with self._condition:
            self._note(fetches, parity, sent)
            self._condition.notify_all()
        if reads:
            self._on_action("rows staged")
        if parity:
            self._on_action("parity rows read")

    def _markers(self, state: _Lane) -> list[Marker]:
        """What the marker of a store shard may be in this read phase."""
        if state.pending is None:
            return [Marker(state.batches, state.batches)]
        # The reads go first, but a server may do them last.
        number = state.pending.number
        return [Marker(number, number), Marker(number if self._code is not None else state.batches, state.batches)]

    def _data_writes(self, state: _Lane, batch: WriteBackBatch) -> list[Write]:
        marker, key = Marker(batch.number, batch.number).stored(), self._stored.key(state.lane)
        return [Write(shard, key, *batch.part(shard), marker) for shard in range(len(self._cursors))]

    def _parity_reads(self, state: _Lane, batch: WriteBackBatch) -> list[Read]:
        parts = ((shard, *batch.existing_parity(shard)) for shard in range(len(self._cursors)))
        return [Read(shard, self._stored.key(state.lane), fields, rows) for shard, fields, rows in parts if len(fields)]

    def _send_parity(self, state: _Lane, batch: WriteBackBatch) -> None:
        """Compute the parity rows of a batch, and hold it where it survives this process."""
        assert self._code is not None
        assert self._log is not None
        assert batch.old is not None
        batch.update(self._code)
        self._log.hold(state.lane, LoggedBatch(batch.number, batch.arrangement.row_fields, batch.old, batch.new))
        self._on_action("batch logged")

    def _exchange_parity(self, cut: list[tuple[_Lane, WriteBackBatch]]) -> None:
        """Parity phase: every shard gets its parity rows and the marker, also where it has none of them."""
        writes = []
        for state, batch in cut:
            marker, key = Marker(batch.number, batch.number - 1).stored(), self._stored.key(state.lane)
            writes += [Write(shard, key, *batch.parity_part(shard), marker) for shard in range(len(self._cursors))]
        self._on_action("parity leaves")
        self._stored.store.exchange([], writes)
        self._on_action("parity acknowledged")
        for state, batch in cut:
            state.stripes.written.note(batch.table, batch.ordinal)
            state.pending = batch
        with self._condition:
            self._counters.rounds += 1
            self._counters.parity_rows_written += sum(len(write.fields) for write in writes)
            self._counters.bytes_written += sum(write.rows.nbytes for write in writes)

    def _parity_missing(self, state: _Lane, read: Read) -> RowError:
        assert read.missing is not None
        name = int(read.fields[int(np.flatnonzero(read.missing)[0])])
        return RowError(
            f"parity row {name:#018x} of lane {state.lane} is missing on store {self._stored.store.urls[read.shard]}: the store lost writes; "
            "restore its data and --resume, or start again with --overwrite"
        )

    def _note(
        self, fetches: list[_PlannedFetch], parity: list[tuple[_Lane, Read]], sent: list[tuple[_Lane, WriteBackBatch]]
    ) -> None:
        counters = self._counters
        counters.rounds += self._code is None
        counters.batches += len(sent)
        for planned in fetches:
            planned.fetch.event.ready[planned.fetch.places] = True
            counters.rows_fetched += len(planned.fetch.places)
            counters.bytes_fetched += sum(request.read.rows.nbytes for request in planned.requests)
        for _, read in parity:
            counters.parity_rows_read += len(read.fields)
            counters.bytes_fetched += read.rows.nbytes
        for state, batch in sent:
            state.pending = None
            state.batches = batch.number
            state.unwritten_rows -= batch.rows
            counters.bytes_written += batch.new.nbytes
            for boundary in state.boundaries:
                rows = batch.rows_of.get(boundary.number, 0)
                boundary.left -= rows
                if boundary.beyond:
                    counters.rows_written_beyond += rows
                else:
                    counters.rows_written += rows
            self._release(state)

    def _release(self, state: _Lane) -> None:
        while state.boundaries and not state.boundaries[0].left:
            state.released_boundary = state.boundaries.popleft().number

    def _pull(self, state: _Lane) -> None:
        """Stage the arrivals of coming events, as far as there is room; make the initial ones."""
        while state.next is not None or self._advance(state):
            assert state.next is not None
            index, arrivals = state.next
            with self._condition:
                room = len(state.events) < self._lead_events and state.staged_rows + len(arrivals) <= self._staging_rows
                if state.events and not room and index > state.wanted:
                    return
            state.next = None
            event = EventStaging(arrivals, self._stored.shapes)
            made = event.fill_initial(self._seed, self._stored.layouts)
            places = np.flatnonzero(arrivals.tag)
            if len(places):
                state.fetches.append(_Fetch(event, places))
            with self._condition:
                event.ready[made] = True
                event.undue = int(np.count_nonzero(arrivals.after[places] > state.released_boundary))
                self._counters.rows_initial += len(made)
                state.events[index] = event
                state.pulled = index
                state.staged_rows += len(arrivals)
                self._condition.notify_all()

    def _advance(self, state: _Lane) -> bool:
        """Ask the plan for its next event; False if there is none, or not yet."""
        if state.ended:
            return False
        error = None
        try:
            state.next = next(state.plan)
            state.unknown = state.next is None
            return not state.unknown
        except StopIteration:
            pass
        except Exception as failure:
            error = failure
        with self._condition:
            state.ended, state.plan_error = True, error
            state.unknown = False
            self._condition.notify_all()
        return False

    def _stage(self, state: _Lane) -> None:
        """Move what the trainer handed over to write-back staging."""
        while True:
            with self._condition:
                if not state.handed:
                    return
                boundary, ended = state.handed.popleft()
            state.writes.add(boundary, ended)

    def _due(self, state: _Lane) -> list[_Fetch]:
        """The fetches that may leave now; the others stay."""
        due, undue = [], []
        for fetch in state.fetches:
            late = fetch.event.arrivals.after[fetch.places] > state.released_boundary
            if not late.all():
                due.append(_Fetch(fetch.event, fetch.places[~late]))
            if late.any():
                undue.append(_Fetch(fetch.event, fetch.places[late]))
            with self._condition:
                fetch.event.undue = int(np.count_nonzero(late))
        state.fetches = undue
        return due

    def _request(self, state: _Lane, fetch: _Fetch) -> tuple[Expected, list[Request]]:
        arrivals, places = fetch.event.arrivals, fetch.places
        arrays = (arrivals.table[places], arrivals.ordinal[places], arrivals.id[places], arrivals.tag[places])
        expected = Expected(state.lane, *arrays)
        return expected, plan_reads(self._stored, expected)
