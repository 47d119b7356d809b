"""The launcher's forecast of servers that will run out of memory.

It reports them before training begins, watches the servers during training, and determines the step
by which training must stop.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Sequence
from datetime import timedelta

import numpy as np

from foreload.base.memory import available_bytes
from foreload.cache.client.store import Store
from foreload.cache.errors import CacheError
from foreload.cache.parity.placement import Placement
from foreload.cache.protocol.shards.fence import look_at
from foreload.cache.rows.layout import RowLayout
from foreload.pipelines.errors import ScheduleError
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.errors import StoreTooSmall
from foreload.trainer.job.job import TrainJob
from foreload.trainer.job.memory_check import readable, store_bytes
from foreload.trainer.memory.row_timeline import RowTimeline
from foreload.trainer.memory.store_memory import (
    ShardServer,
    Shortage,
    StoreMemory,
    counted_bytes,
    remedy,
    shards_needed,
    shortage_text,
)
from foreload.trainer.run.manifest import Status
from foreload.trainer.run.servers import asked
from foreload.trainer.saved.model_rows import given_ordinals

_LOOK = timedelta(seconds=2)  # between two measurements of the servers
# The least of so many measurements counts, since memory for data in transit comes and goes.
_LOOKS = 3
# The fewest steps that a call can train: the leader names the last step one step before it.
_LEAST_STEPS = 2


class StoreWatch:
    """The forecast of the servers' memory for the steps to come of one call.

    A thread measures the servers from `begin` to `close` and updates the forecast. If no server has
    a memory limit, it looks again only after rows have moved to another placement.

    Attributes:
        shortages: The servers that will be full.
        shards_needed: How many shards like these would have enough memory, if there are shortages; else 0.
        step: The last step known to be trained. The launcher sets it.
        used: shard -> the bytes that its server uses, and their limit, as last measured. Only for
            servers with a limit, and not during a migration.
    """

    def __init__(
        self,
        job: TrainJob,
        store: Store,
        schedule: Schedule,
        placement: Placement,
        layouts: Sequence[RowLayout],
        start: Status,
        most_shards: int = 0,
    ) -> None:
        """Make a forecast before training begins, from the rows of the last clean stop.

        Args:
            store: Connections to the run's servers.
            placement: The placement of the rows.
            start: How the call begins.
            most_shards: How many shards --auto can have.

        Raises:
            StoreTooSmall: The memory will not suffice and the job does not have `--until-full`, or
                not even the fewest steps fit.
        """
        self._job, self._schedule, self._layouts, self._start = job, schedule, layouts, start
        self._placement = self._known = self._concluded = placement
        self._most_shards = most_shards
        self._stop_by: int | None = None
        self.shortages: Sequence[Shortage] = ()
        self.shards_needed = 0
        self.step = start.step
        self.used: dict[int, tuple[int, int]] = {}
        self._urls: Sequence[str] = ()
        self._warned: set[int] = set()  # shards of which the user was warned
        self._seen: dict[int, deque[float]] = {}
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._memory = self._forecast(placement, store)
        self._conclude()
        self._refuse_or_warn()

    def _forecast(self, placement: Placement, store: Store) -> StoreMemory | None:
        """Return the forecast for rows in a placement, or None if no server has a memory limit.

        Raises:
            CacheError, ScheduleError: The servers or the schedule cannot be read.
        """
        up = [shard for shard in store.used if shard not in store.down]
        if not any(int(store.info(shard).get("maxmemory", 0)) for shard in up):
            return None
        step = self._start.step
        timeline = RowTimeline(self._schedule, placement, self._layouts, step, _ordinals(self._schedule, step))
        memory = StoreMemory.ask(timeline, store, self._job.run_namespace, self._job.trainers)
        memory.advance()
        return memory

    def _refuse_or_warn(self) -> None:
        if not self.shortages:
            return
        first, others = self.shortages[0], len(self.shortages) - 1
        problem = shortage_text(first) + (f" (and that of {others} more shards)" if others else "")
        assert self._memory is not None
        assert self.stop_by is not None
        help_ = remedy(self._memory, self.shortages)
        if self.stop_by < self._start.step + _LEAST_STEPS:
            raise StoreTooSmall(f"{problem}; the rows of one more step would not fit: {help_}")
        if self._job.auto is True and 0 < self.shards_needed <= self._most_shards:
            self._warned.update(one.shard for one in self.shortages)
            sys.stderr.write(f"{problem}; --auto adds store shards before, up to {self.shards_needed} in all\n")
            return
        if not self._job.until_full:
            raise StoreTooSmall(
                f"{problem}; {help_}, or train with --until-full, which stops cleanly after step {self.stop_by:,}"
            )
        self._warned.update(one.shard for one in self.shortages)
        sys.stderr.write(f"{problem}; training stops after step {self.stop_by:,}\n")

    def use(self, placement: Placement) -> None:
        """Set the placement. While a migration is under way, the forecast is not updated."""
        self._placement = placement

    @property
    def is_current(self) -> bool:
        """Whether the forecast is for the present placement, and no rows move."""
        return self._placement is self._concluded and not self._placement.migrating

    @property
    def stop_by(self) -> int | None:
        """The step after which training must stop, so that all rows can be written back.

        None while everything known of the schedule fits. While rows move, the forecast of the
        placement before counts. Once they have moved, and until there is a forecast for the new
        placement, nothing is known to be full: the move was allowed because all rows will fit.
        """
        return self._stop_by if self.is_current or self._placement.migrating else None

    def begin(self, urls: Sequence[str]) -> None:
        """Start the thread that measures the servers at regular intervals.

        Args:
            urls: The URLs of all shards, with passwords. The caller updates this list in place.
        """
        self._urls = urls
        self._thread = threading.Thread(target=self._serve, name="store memory", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop measuring, and wait for the thread."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def why_stopped(self, step: int) -> str | None:
        """Return why training stopped after this step, or None if it was not for lack of memory."""
        memory = self._memory
        if memory is None or not self._job.stops_before_full or self.stop_by is None or step < self.stop_by or not self.shortages:
            return None
        return f"store shard {self.shortages[0].shard} would be full later: {remedy(memory, self.shortages)}"

    def _serve(self) -> None:
        while not self._over.wait(_LOOK.total_seconds()):
            try:
                self.look()
            except (CacheError, ScheduleError):
                # The parts that work with a failing shard, or a damaged schedule, report it.
                continue

    def look(self) -> None:
        """Measure the servers' memory and update the forecast.

        Raises:
            CacheError, ScheduleError: The servers or the schedule cannot be read.
        """
        # `anew` is true once after each migration: the forecast is then made for its placement.
        placement, lanes = self._placement, range(self._schedule.header.lanes)
        anew = placement is not self._known
        # During a migration the placement does not say where each row is.
        if placement.migrating or (self._memory is None and not anew):
            self.used = {}
            return
        with Store.connect(asked(self._urls), self._job.store_silence, 1) as store:
            if anew:
                self._memory, self._known = self._forecast(placement, store), placement
                self._seen.clear()
            if (memory := self._memory) is None:
                self.used = {}
                self._conclude()
                return
            memory.advance()
            up = [server for server in memory.servers if server.shard not in store.down]
            found = {server.shard: look_at(store, server.shard, self._job.run_namespace, lanes) for server in up}
            infos = {server.shard: store.info(server.shard) for server in up}
        for server in up if memory.timeline.known else ():
            info = infos[server.shard]
            # The user may have changed the limit of a running server.
            server.limit_bytes = int(info.get("maxmemory", 0)) or None
            rows = np.array([found[server.shard][lane].rows for lane in lanes])
            self._correct(memory, server, rows, counted_bytes(info), anew)
        limits = {shard: int(info.get("maxmemory", 0)) for shard, info in infos.items()}
        self.used = {shard: (counted_bytes(infos[shard]), limit) for shard, limit in limits.items() if limit}
        self._conclude()
        for shortage in self.shortages:
            if shortage.shard not in self._warned:
                self._warned.add(shortage.shard)
                then = f"; training stops after step {self.stop_by:,}" if self._job.stops_before_full else ""
                sys.stderr.write(f"foreload: warning: {shortage_text(shortage)}{then}\n")

    def _correct(self, memory: StoreMemory, server: ShardServer, rows: np.ndarray, used_bytes: int, anew: bool) -> None:
        """Correct the forecast of a server by a measurement.

        Args:
            rows: The rows that it has of each lane: int64 [lanes].
            used_bytes: The bytes that it uses.
            anew: Whether the forecast is new, so that the server's other data is not known yet.
        """
        expected = float(memory.used_when(server, memory.reached(server, rows, self.step)))
        # What a first measurement finds beyond the run's rows counts as the server's other data.
        if anew:
            server.used_bytes += used_bytes - expected
            expected = used_bytes
        looks = self._seen.setdefault(server.shard, deque(maxlen=_LOOKS))
        looks.append(used_bytes - expected + server.correction_bytes)
        if len(looks) == _LOOKS:
            server.correction_bytes = min(looks)

    def _conclude(self) -> None:
        memory = self._memory
        self.shortages = () if memory is None else memory.shortages()
        self._stop_by = None if memory is None else memory.last_step()
        self.shards_needed = 0 if memory is None or not self.shortages else shards_needed(memory) or 0
        self._concluded = self._known


def _ordinals(schedule: Schedule, step: int) -> np.ndarray:
    """Return how many ordinals were given up to the last trained step: int64 [lanes, tables]."""
    if step < schedule.header.first_step:
        first = schedule.segment(0)
        assert first is not None
        assert first.ordinals is not None  # the first segment always has an entry state
        return np.array(first.ordinals, np.int64)
    return given_ordinals(schedule, step)


def warn_of_machine(job: TrainJob, schedule: Schedule, placement: Placement) -> None:
    """Warn if local stores will hardly fit into this machine's memory.

    They have no memory limit of their own, so `StoreWatch` does not cover them.
    """
    needed = store_bytes(job, schedule, placement.k, placement.r)
    if (available := available_bytes()) and needed > available:
        sys.stderr.write(
            f"foreload: warning: local store shards will take about {readable(needed)} in all, and {readable(available)} are available here; "
            "name servers on others with --store\n"
        )
