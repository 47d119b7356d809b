"""What the launcher does about servers that will be full: it says so before training begins, looks at them meanwhile, and says when to stop."""

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
from foreload.trainer.job.memory_check import readable
from foreload.trainer.memory.row_timeline import RowTimeline
from foreload.trainer.memory.store_memory import ShardServer, Shortage, StoreMemory, counted_bytes, remedy, shortage_text
from foreload.trainer.run.manifest import Status
from foreload.trainer.run.servers import asked
from foreload.trainer.saved.model_rows import given_ordinals

_LOOK = timedelta(seconds=2)  # between two looks at the servers
_LOOKS = 3  # of which the least counts: what is on its way comes and goes
_LEAST_STEPS = 2  # of a call: who leads names the step one before it


class StoreWatch:
    """The memory of the servers of one call, over the steps to come.

    stop_by: the step after which training must stop, so that all rows can be written back; None while all that is known of the schedule fits. A
    thread of its own looks at the servers from `begin` to `close`; what it finds goes into `stop_by`. Where none has a limit, it does so again only
    once rows have moved.
    """

    def __init__(
        self, job: TrainJob, store: Store, schedule: Schedule, placement: Placement, layouts: Sequence[RowLayout], start: Status
    ) -> None:
        """Look at the servers before training begins, after the last clean stop.

        Raises StoreTooSmall where the memory will not suffice and the job does not say `--until-full`; and where not even a step would fit.
        """
        self._job, self._schedule, self._layouts, self._start = job, schedule, layouts, start
        self._placement = self._known = placement
        self.stop_by: int | None = None
        self.shortages: Sequence[Shortage] = ()
        self.step = start.step  # the last that is known to be trained; the launcher says so
        self._urls: Sequence[str] = ()
        self._warned: set[int] = set()  # shards that the user was warned of
        self._seen: dict[int, deque[float]] = {}
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._memory = self._forecast(placement, store)
        self._conclude()
        self._refuse_or_tell()

    def _forecast(self, placement: Placement, store: Store) -> StoreMemory | None:
        """Of rows that are where a placement has them; None where no server has a limit. Raises CacheError, ScheduleError."""
        up = [shard for shard in store.used if shard not in store.down]
        if not any(int(store.info(shard).get("maxmemory", 0)) for shard in up):
            return None
        step = self._start.step
        timeline = RowTimeline(self._schedule, placement, self._layouts, step, _ordinals(self._schedule, step))
        memory = StoreMemory.ask(timeline, store, self._job.run_namespace, self._job.trainers)
        memory.advance()
        return memory

    def _refuse_or_tell(self) -> None:
        if not self.shortages:
            return
        first, others = self.shortages[0], len(self.shortages) - 1
        problem = shortage_text(first) + (f" (and so would {others} more)" if others else "")
        assert self._memory is not None
        assert self.stop_by is not None
        help_ = remedy(self._memory, self.shortages)
        if self.stop_by < self._start.step + _LEAST_STEPS:
            raise StoreTooSmall(f"{problem}; there is no room for the rows of a further step: {help_}")
        if not self._job.until_full:
            raise StoreTooSmall(
                f"{problem}; {help_}, or train with --until-full, which stops cleanly after step {self.stop_by:,}"
            )
        self._warned.update(one.shard for one in self.shortages)
        sys.stderr.write(f"{problem}; training stops after step {self.stop_by:,}\n")

    def use(self, placement: Placement) -> None:
        """Rows are where a placement has them from now on; while they are on their way there, nothing is said of what is to come."""
        self._placement = placement

    def begin(self, urls: Sequence[str]) -> None:
        """Look at the servers now and then. urls: with passwords; those of all shards, as they change."""
        self._urls = urls
        self._thread = threading.Thread(target=self._serve, name="store memory", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def why_stopped(self, step: int) -> str | None:
        """Why training stopped after this step, in words, if that was for want of memory."""
        memory = self._memory
        if memory is None or not self._job.until_full or self.stop_by is None or step < self.stop_by or not self.shortages:
            return None
        return f"store shard {self.shortages[0].shard} would be full later: {remedy(memory, self.shortages)}"

    def _serve(self) -> None:
        while not self._over.wait(_LOOK.total_seconds()):
            try:
                self.look()
            except (CacheError, ScheduleError):
                # Who has to do with shards that fail, or a schedule that is damaged, says so.
                continue

    def look(self) -> None:
        """Ask the servers what they use, and reckon anew. Raises CacheError, ScheduleError."""
        placement, lanes = self._placement, range(self._schedule.header.lanes)
        anew = placement is not self._known
        if placement.migrating or (self._memory is None and not anew):
            return
        with Store.connect(asked(self._urls), self._job.store_silence, 1) as store:
            if anew:
                self._memory, self._known = self._forecast(placement, store), placement
                self._seen.clear()
            if (memory := self._memory) is None:
                self._conclude()
                return
            memory.advance()
            up = [server for server in memory.servers if server.shard not in store.down]
            found = {server.shard: look_at(store, server.shard, self._job.run_namespace, lanes) for server in up}
            infos = {server.shard: store.info(server.shard) for server in up}
        for server in up if memory.timeline.known else ():
            info = infos[server.shard]
            server.limit_bytes = int(info.get("maxmemory", 0)) or None
            rows = np.array([found[server.shard][lane].rows for lane in lanes])
            self._correct(memory, server, rows, counted_bytes(info), anew)
        self._conclude()
        for shortage in self.shortages:
            if shortage.shard not in self._warned:
                self._warned.add(shortage.shard)
                then = f"; training stops after step {self.stop_by:,}" if self._job.until_full else ""
                sys.stderr.write(f"foreload: warning: {shortage_text(shortage)}{then}\n")

    def _correct(self, memory: StoreMemory, server: ShardServer, rows: np.ndarray, used_bytes: int, anew: bool) -> None:
        """A server uses so much, with so many rows of each lane (int64 [lanes]). anew: what it has beside them is not known yet."""
        expected = float(memory.used_when(server, memory.reached(server, rows, self.step)))
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
        self.stop_by = None if memory is None else memory.last_step()


def _ordinals(schedule: Schedule, step: int) -> np.ndarray:
    """How many ordinals were given up to a step, the last one trained: int64 [lanes, tables]."""
    if step < schedule.header.first_step:
        first = schedule.segment(0)
        assert first is not None
        assert first.ordinals is not None  # the first segment always has an entry state
        return np.array(first.ordinals, np.int64)
    return given_ordinals(schedule, step)


def warn_of_machine(schedule: Schedule, placement: Placement, layouts: Sequence[RowLayout]) -> None:
    """Say so where local stores will hardly fit this machine's memory: they have no limit of their own."""
    if not schedule.complete or not (available := available_bytes()):
        return
    rows = schedule.rows_per_table()
    widest = sum(count * (layout.row_bytes + 64) for count, layout in zip(rows, layouts, strict=True))
    needed = widest * (placement.k + placement.r) / placement.k
    if needed > available:
        sys.stderr.write(
            f"foreload: warning: local store shards will take about {readable(needed)} in all, and {readable(available)} are available here; "
            "name servers on others with --store\n"
        )
