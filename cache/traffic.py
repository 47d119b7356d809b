"""The traffic of one trainer with the store: a background thread that serves its lanes in rounds.

The rounds are in `protocol/rounds`. A fetch is due once the boundary of its row's last write-back
is *released*, that is, once all shards have acknowledged it in an earlier round. So no read can
pass the write that it depends on.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from types import TracebackType

import numpy as np

from foreload.cache.errors import CacheError, RowsLost
from foreload.cache.protocol.handover.migration import Migration
from foreload.cache.protocol.ownership.batch_log import BatchLog
from foreload.cache.protocol.ownership.ownership import UNFENCED, Ownership
from foreload.cache.protocol.rounds.background import Background, Task
from foreload.cache.protocol.rounds.failover import Failover, counted
from foreload.cache.protocol.rounds.lanes import Ahead, Boundary, LanePlan, Lanes, LaneTraffic, Plan, PlannedFetch, Unwritten
from foreload.cache.protocol.rounds.monitor import Answer, Monitor
from foreload.cache.protocol.rounds.rounds import Rounds, RoundStats
from foreload.cache.protocol.rounds.snapshot import Snapshots
from foreload.cache.protocol.shards.reading import StoredRows
from foreload.cache.protocol.shards.shard_status import PATIENCE, Patience, ShardNews, ShardSnapshot
from foreload.cache.repair.inspection import Inspection
from foreload.cache.repair.rebuild import Rebuild
from foreload.cache.rows.staging import EndedRows, EventStaging, Staged


@dataclass(slots=True)
class Counters:
    """Counts of the traffic so far, over all lanes.

    Attributes:
        rows_initial: rows that were made because they were never written.
        rows_fetched: rows that were read from the store or decoded, without parity rows.
        rows_written: rows that were written back, without parity rows and without
            `rows_written_at_stop`.
        rows_written_at_stop: rows that were written beyond the schedule, on a clean stop.
        rows_decoded: fetched rows that were decoded from their stripes.
        rows_rebuilt: rows and parity rows that were rebuilt.
        rows_migrated: rows and parity rows that migrated.
        bytes_fetched: bytes of the rows and parity rows read in rounds, without what decoding reads.
        bytes_written: bytes of the rows and parity rows written in rounds.
        rounds: exchanges of rounds: two in a round with parity and a batch.
        batches: acknowledged write-back batches.
        stalled_rows: arrivals whose fetch was not yet due when the trainer took their event.
        waited: how long the trainer waited for arrivals.
    """

    rows_initial: int = 0
    rows_fetched: int = 0
    rows_written: int = 0
    rows_written_at_stop: int = 0
    parity_rows_read: int = 0
    parity_rows_written: int = 0
    rows_decoded: int = 0
    rows_rebuilt: int = 0
    rows_migrated: int = 0
    bytes_fetched: int = 0
    bytes_written: int = 0
    rounds: int = 0
    batches: int = 0
    stalled_rows: int = 0
    waited: timedelta = timedelta()

    def count(self, stats: RoundStats, rows_at_stop: int) -> None:
        """Add an exchange of a round.

        Args:
            stats: the results of the exchange.
            rows_at_stop: how many of its rows were written beyond the schedule.
        """
        self.rounds += 1
        self.batches += len(stats.written)
        self.parity_rows_read += stats.parity_rows_read
        self.parity_rows_written += stats.parity_rows_written
        self.rows_decoded += stats.rows_decoded
        self.bytes_fetched += stats.bytes_read
        self.bytes_written += stats.bytes_written
        self.rows_fetched += sum(len(fetch.places) for fetch in stats.fetched)
        self.rows_written += sum(batch.rows for _, batch in stats.written) - rows_at_stop
        self.rows_written_at_stop += rows_at_stop


EVERY = timedelta(seconds=30)  # between two requests of `KeepAlive`


class KeepAlive(Task):
    """Sends a request to every store shard every 30 s.

    Args:
        ask: sends a request to each shard once.
    """

    def __init__(self, ask: Callable[[], None]) -> None:
        super().__init__()
        self._ask = ask
        self._at = time.monotonic()

    @property
    def wanted(self) -> bool:
        """True: there is always a next request."""
        return True

    def delay(self) -> float:
        """Return the seconds until the next request."""
        return max(self._at + EVERY.total_seconds() - time.monotonic(), 0.0)

    def chunk(self) -> None:
        """Send a request to each shard.

        Raises as the rounds do.
        """
        self._ask()
        self._at = time.monotonic()


NICENESS = 10  # of the traffic thread
# How often to ask a plan again for an event that was not known yet.
PLAN_POLL = timedelta(milliseconds=100)
REPAIR_POLL = timedelta(milliseconds=50)  # how often `repair_shards` checks its deadline


class Traffic:
    """Serves lanes over one Store, in a background thread.

    The Store belongs to the thread from the constructor until `close` or `abort`, which leave it
    open. If the thread fails, every later call raises its failure.

    Args:
        seed: the seed of the rows that were never written.
        lead_events: how many events ahead of the trainer a lane's arrivals are staged at most. Only
            an event that the trainer waits for may pass this limit.
        staging_rows: how many rows are staged ahead at most, with the same exception. The limit
            also bounds a lane's rows that wait for their write-back; at the limit `write_back`
            blocks.
        log: holds the batches under way. Required with parity.
        ownership: the term and identity of the lanes' owner.
        on_action: called by the thread at "data leaves", "fetch leaves", "data acknowledged" and
            "rows staged"; with parity also at "parity rows asked for", "parity rows read", "batch
            logged", "parity leaves" and "parity acknowledged"; and at "rows decoded" and "rows
            rebuilt" if a shard is lost.
        on_shards: called with each change of the shards' status, by the thread or one beside it.
        patience: how long to wait for shards that do not answer.
    """

    def __init__(
        self,
        stored: StoredRows,
        seed: int,
        *,
        lead_events: int = 8,
        staging_rows: int = 1 << 18,
        log: BatchLog | None = None,
        ownership: Ownership = UNFENCED,
        on_action: Callable[[str], None] | None = None,
        on_shards: Callable[[ShardNews], None] | None = None,
        patience: Patience = PATIENCE,
    ) -> None:
        if lead_events < 1 or staging_rows < 1:
            raise CacheError(f"traffic: lead_events and staging_rows must be at least 1; got {lead_events} and {staging_rows}")
        if log is None and stored.placement.r:
            raise CacheError("traffic: needs a batch log if there is parity")
        self._stored = stored
        self._staging_rows = staging_rows
        self._ahead = Ahead(seed, lead_events, staging_rows)
        self._on_action = on_action or (lambda action: None)
        self._on_shards = on_shards or (lambda news: None)
        self._term = ownership.term
        self._counters = Counters()
        self._monitor = Monitor()
        # Any thread may call this. The traffic thread continues, and accepts the rows that are
        # handed over.
        self.interrupt = self._monitor.interrupt
        self._lanes = Lanes(self._monitor)
        self._background = Background(self._monitor)
        self.snapshots = Snapshots(stored, self._lanes, self._monitor)
        self._failover = Failover(stored, ownership, self._monitor, self._tell_shards, patience)
        self._rounds = Rounds(stored, self._lanes, self._on_action, self._note, self._failover, log)
        on_rows = partial(self._note_rows, "rows_migrated")
        self.migration = Migration(
            stored, self._lanes, self._rounds, self._monitor, ownership.term, self._on_action, on_rows, self._tell_shards
        )
        on_rows = partial(self._note_rows, "rows_rebuilt")
        self._rebuild = Rebuild(stored, self._lanes, self._rounds, self.migration, self._on_action, on_rows)
        self._background.add(self._rebuild)
        self._background.add(self.migration)
        self.inspection = Inspection(stored, self._rounds, self._lanes, self._background, self._monitor)
        self._background.add(KeepAlive(self.inspection.ask_all))
        self._thread = threading.Thread(target=self._serve, name="traffic", daemon=True)
        self._thread.start()

    # Called by the trainer.

    def add_lane(self, plan: LanePlan) -> None:
        """Serve a lane from the next round on. The caller has taken the lane over.

        Raises:
            CacheError: the lane is already served.
        """
        state = LaneTraffic(plan, self._stored, self._term)
        with self._monitor:
            self._monitor.wait_until(lambda: True)  # raises where the thread is over
            self._lanes.add(state)
            self._monitor.signal()
        self.migration.lanes_changed()

    def release_lane(self, lane: int) -> int:
        """Stop serving a lane, once all rows handed over are acknowledged.

        Rows that were staged for the lane and not taken are dropped. Afterwards another owner may
        take the lane over.

        Returns:
            The number of the lane's last write-back batch.
        """
        self.snapshots.abandon("the trainer's lanes change")
        with self._monitor:
            state = self._lanes[lane]
            self._monitor.wait_until(lambda: not state.boundaries)

        def release() -> int:
            with self._monitor:
                self._lanes.remove(lane)
            self._stored.shards.forget(lane)
            return state.last_batch

        number = self.between_rounds(release)
        self.migration.lanes_changed()
        return number

    def between_rounds(self, work: Callable[[], Answer]) -> Answer:
        """Run some work while the traffic thread pauses and no batch of any lane is under way.

        This is for work that needs the store, or changes `stored.shards`, beside lanes that are
        served, such as taking over a lane or reading its rows. An error of the work ends the
        traffic, unless it is CopyLost.

        Returns:
            What `work` returns.
        """
        return self._monitor.beside_rounds(self._rounds.flush_pending, work)

    def take(self, lane: int, event_index: int) -> Staged:
        """Take all arrivals of the lane's next event, and wait for them if necessary.

        Events are taken in the order of the plan.
        """
        started = time.monotonic()
        with self._monitor:
            state = self._lanes[lane]
            event = self._await_event(state, event_index)
            if next(iter(state.events)) != event_index:
                raise CacheError(f"lane {lane}: event {next(iter(state.events))} must be taken before event {event_index}")
            self._counters.stalled_rows += event.not_due
            self._monitor.wait_until(lambda: bool(event.ready.all()))
            del state.events[event_index]
            state.staged_rows -= len(event.arrivals)
            self._monitor.signal()
            return self._staged(event, started)

    def rows_ready(self, lane: int, event_index: int, which: np.ndarray) -> Staged:
        """Return the arrivals of a coming event once some of its rows have arrived.

        None of these rows may have a fetch that must follow a boundary not yet handed over, or this
        never returns.

        Args:
            event_index: the event, which stays staged.
            which: a mask or the places of the rows to wait for. Only these rows are valid.
        """
        started = time.monotonic()
        with self._monitor:
            event = self._await_event(self._lanes[lane], event_index)
            self._monitor.wait_until(lambda: bool(event.ready[which].all()))
            return self._staged(event, started)

    def write_back(self, lane: int, boundary: int, ended: EndedRows, at_stop: bool = False) -> float:
        """Hand over all rows whose residency ended at a boundary.

        A row whose version the store has (tag = stored tag) is not written. Blocks while too many
        rows wait.

        Args:
            boundary: the boundary; boundaries come in ascending order.
            ended: the rows, possibly none.
            at_stop: whether the rows are written beyond the schedule, on a clean stop. These are
                counted apart.

        Returns:
            How many seconds this blocked.
        """
        mask = ended.tag != ended.stored_tag
        changed = ended if mask.all() else ended.select(mask)
        with self._monitor:
            state = self._lanes[lane]
            if boundary <= state.last_boundary:
                raise CacheError(f"lane {lane}: boundary {boundary} must follow {state.last_boundary}")
            room = max(self._staging_rows - len(changed), 0)
            began = time.monotonic()
            try:
                self._monitor.wait_until(lambda: state.unwritten_rows <= room or self._monitor.interrupted is not None)
            finally:
                # Keep the rows even if the wait failed, because no other object has them:
                # `unwritten` returns them.
                state.last_boundary = boundary
                state.unwritten_rows += len(changed)
                state.boundaries.append(Boundary(boundary, len(changed), at_stop))
                state.handed.append((boundary, changed))
                state.release()
                self._monitor.signal()
            return time.monotonic() - began

    def flush(self) -> None:
        """Wait until all rows handed over are acknowledged."""
        with self._monitor:
            self._monitor.wait_until(lambda: not any(state.boundaries for state in self._lanes.all))

    def replace(self, shard: int, url: str) -> None:
        """Use another server for a store shard from now on, and rebuild the shard's rows there.

        Raises:
            CacheError: there is no parity.
        """
        self._failover.replace(shard, url)

    def repair_shards(self, patience: timedelta) -> list[int]:
        """Wait until every shard is whole and all migrating rows have migrated, at full speed.

        Without parity this waits for no shard, but a shard that lacks what it acknowledged is an
        error.

        Args:
            patience: the longest time to wait.

        Returns:
            The shards that are lost at the end.
        """
        self.migration.throttled = False
        self._rebuild.throttled = False
        self.inspection.probe()
        deadline = time.monotonic() + patience.total_seconds()
        with self._monitor:
            self._monitor.wait_until(
                lambda: (self._failover.all_whole and self.shards.migrated == 1.0) or time.monotonic() >= deadline, REPAIR_POLL
            )
        return self.shards.lost

    def probe(self) -> None:
        """Find out now which store shards failed since the last round.

        Does nothing without parity.
        """
        if self._stored.placement.r:
            self.inspection.probe()

    @property
    def shards(self) -> ShardSnapshot:
        """The status of the store shards."""
        return self._stored.shards.snapshot

    def last_batch(self, lane: int) -> int:
        """Return the number of the lane's last write-back batch that all shards acknowledged.

        RUN keeps it for a resume.
        """
        with self._monitor:
            return self._lanes[lane].last_batch

    def released(self, lane: int) -> tuple[int, int]:
        """Return the lane's last released boundary and its `last_batch`, for the lane's replicas.

        All rows of that boundary and of all earlier ones are acknowledged.
        """
        with self._monitor:
            state = self._lanes[lane]
            return state.released_boundary, state.last_batch

    def replan(self, lane: int, plan: Plan) -> None:
        """Restart a lane's arrivals with another plan.

        Rows that are staged and were not taken are dropped. Rows that were handed over are still
        written back.

        Args:
            plan: as in `LanePlan`. Its first event may be any event.
        """

        def begin_anew() -> None:
            with self._monitor:
                self._lanes[lane].replan(plan)
                self._monitor.signal()

        self.snapshots.abandon("the trainer's lanes change")
        self._monitor.ask(begin_anew)

    def raise_term(self, term: int) -> None:
        """Act as an owner of this term from now on: add lanes, and fence, in this term.

        The lanes that the traffic serves already are written as before.
        """

        def use() -> None:
            self._term = self.migration.term = term
            self._failover.raise_term(term)

        self._monitor.ask(use)

    def counters(self) -> Counters:
        """Return a copy of the counters."""
        with self._monitor:
            return replace(self._counters)

    def close(self) -> None:
        """Flush, then stop the thread."""
        try:
            if self._thread.is_alive() or self._monitor.failure is not None:
                self.flush()
        finally:
            self.abort()

    def abort(self) -> None:
        """Stop the thread after its current exchange, even if rows still wait.

        A second call does nothing.
        """
        self.snapshots.abandon("training is over")
        with self._monitor:
            self._monitor.stopping = True
            self._monitor.signal()
        self._thread.join()
        self._failover.close()

    def end_unwritten(self) -> None:
        """Stop the thread, whatever error it failed with.

        Rows that are handed over from then on stay here, for `unwritten`. No other call is useful
        afterwards.
        """
        self.abort()
        self._monitor.over = True

    def unwritten(self, lane: int) -> Unwritten:
        """Return the rows of a lane that the store may lack, after `end_unwritten`."""
        return self._lanes[lane].unwritten()

    def __enter__(self) -> Traffic:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def _await_event(self, state: LaneTraffic, event_index: int) -> EventStaging:
        # An event that the trainer waits for is staged even beyond the limits, so wake the thread.
        if event_index > state.wanted:
            state.wanted = event_index
            if event_index > state.pulled:
                self._monitor.signal()
        self._monitor.wait_until(lambda: state.pulled >= event_index or state.ended)
        event = state.events.get(event_index)
        if event is None:
            if state.plan_error is not None and state.pulled < event_index:
                raise state.plan_error
            raise CacheError(f"lane {state.lane}: event {event_index} is not in the plan, or was taken before")
        return event

    def _staged(self, event: EventStaging, started: float) -> Staged:
        waited = timedelta(seconds=time.monotonic() - started)
        self._counters.waited += waited
        return Staged(event.rows.weights, event.rows.state, waited)

    # Called by the traffic thread.

    def _serve(self) -> None:
        if sys.platform == "linux":
            # Without this, the thread, when the training thread wakes it, sometimes takes that
            # thread's core for a few milliseconds.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        seen = 0
        try:
            while True:
                with self._monitor:
                    # Compare the counter of signals, so that a signal sent during a round is not
                    # missed.
                    while self._monitor.signals == seen:
                        if not self._monitor.wait(self._patience()):
                            break
                    seen = self._monitor.signals
                while not self._monitor.stopping and self._round():
                    pass
                if self._monitor.stopping:
                    return
        except RowsLost as error:
            self._monitor.fail(counted(error, self._stored, [state.writes.stripes for state in self._lanes.all]))
        except BaseException as error:
            self._monitor.fail(error)
        finally:
            self.snapshots.abandon("the traffic with the store has ended")

    def _patience(self) -> float | None:
        """Return the seconds after which the thread looks for work without a signal.

        If None, the thread waits for a signal.
        """
        waits = [PLAN_POLL.total_seconds()] if any(state.unknown for state in self._lanes.all) else []
        due = [self._background.delay(), self.snapshots.delay()]
        return min([*waits, *(delay for delay in due if delay is not None)], default=None)

    def _round(self) -> bool:
        """Do one round with the store, after the work that must precede it.

        Returns False if there was nothing to do.
        """
        worked = self._rounds.see_to_shards()
        worked |= self._monitor.run_posted()
        self.migration.look_at_source()
        worked |= self._background.work(self._rounds.flush_pending)
        fetches: list[PlannedFetch] = []
        for state in self._lanes.all:
            state.pull(self._monitor, self._stored, self._ahead, partial(self._note_rows, "rows_initial"))
            state.stage(self._monitor)
            fetches += state.due(self._monitor)
        return self._rounds.run(fetches + self.snapshots.fetches()) or worked

    def _tell_shards(self, news: ShardNews) -> None:
        self._on_shards(news)
        self._monitor.wake()

    def _note_rows(self, counter: str, rows: int) -> None:
        """Add rows to a counter, a field of Counters."""
        with self._monitor:
            setattr(self._counters, counter, getattr(self._counters, counter) + rows)
            self._monitor.notify_all()

    def _note(self, stats: RoundStats) -> None:
        """Count an exchange of a round, and wake the threads that wait for its rows."""
        with self._monitor:
            # A snapshot must not miss these rows. Under the monitor, it either has begun, and the
            # rows pass through it here, or it begins later and finds them staged.
            stats.fetched = self.snapshots.receive(stats.fetched)
            for fetch in stats.fetched:
                fetch.event.ready[fetch.places] = True
            for state in stats.begun:
                state.opened()
            at_stop = sum(self._lanes[writes.lane].acknowledge(batch) for writes, batch in stats.written)
            self._counters.count(stats, at_stop)
            self._monitor.notify_all()
