"""`foreload drill lost-shard`: a training during which a store shard is killed or stopped."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from foreload.base.errors import SettingError
from foreload.cache.client.local import LocalStores
from foreload.cache.protocol.shards.shard_status import LOST, OK, REBUILDING, ShardSnapshot
from foreload.trainer.cluster.messages.faults import Fault
from foreload.trainer.cluster.messages.trainers import FaultInjected, ShardsTold, TrainerEvent
from foreload.trainer.commands.drill import FaultDrill, Moments, after, milliseconds, percent
from foreload.trainer.job.job import TrainJob
from foreload.trainer.run.directory import STORES
from foreload.trainer.run.timeline import Timeline

if TYPE_CHECKING:
    from foreload.trainer.cluster.ending import Ending

MOST_DOWN_SECONDS = 20.0  # a run that is over waits for a server no longer than 30


class LostShard(FaultDrill):
    """The server of a store shard is killed, or stopped and later continued, after a step.

    down_seconds: how long it stays away; if None, a second, or when it is stopped, one more than it may be silent. at, shard and stop: as FaultDrill
    has at, number and stop.
    """

    kind = "shard"
    title = "Store shard {shard} {done} after step {step}"
    words: ClassVar = {"lost": "lost", "back": "server back", "whole": "rebuilt"}
    spans = (("lost", "back"), ("back", "whole"))
    shares: ClassVar = {"degraded": spans[0], "rebuilding": spans[1]}
    over = "whole"
    normal_again = True

    def __init__(
        self,
        job: TrainJob,
        at: int | None = None,
        shard: int | None = None,
        stop: bool = False,
        down_seconds: float | None = None,
    ) -> None:
        count = job.store.local
        if count is None:
            raise SettingError("--store: a drill kills servers of its own only; give local:N")
        if not job.code(count)[1]:
            raise SettingError(
                f"--store: a drill needs parity, which {job.store} has not; give local:3 or more without --parity off, or --parity 1+1"
            )
        super().__init__(job, at, shard, count, stop)
        if shard is not None and not 0 <= shard < count:
            raise SettingError(f"--shard: must be a store shard of {job.store}, 0 to {count - 1}; got {shard}")
        if down_seconds is None:
            down_seconds = 1.0 + (job.store_silence.total_seconds() if stop else 0.0)
        elif not 0 <= down_seconds <= MOST_DOWN_SECONDS:
            raise SettingError(f"--down: must be 0 to {MOST_DOWN_SECONDS:g} seconds; got {down_seconds:g}")
        self._down = down_seconds
        self._return = threading.Timer(down_seconds, self._come_back)
        self._may_start = stop
        self._snapshots: dict[int, ShardSnapshot] = {}
        """The last snapshot of each trainer."""
        self._since: dict[str, dict[int, float]] = {LOST: {}, REBUILDING: {}, OK: {}}
        """By state: since when each trainer has had the shard in it."""

    def fault(self) -> Fault:
        """A signal for the server of a shard."""
        return Fault(self.step, self.number, self.signal_number)

    def on_event(self, trainer: int, event: TrainerEvent) -> None:
        """Note what becomes of the shard; once the fault is injected, see to its return."""
        super().on_event(trainer, event)
        match event:
            case FaultInjected(at=at):
                self.injected = at
                self._return.start()
            case ShardsTold(shards, at):
                changed = shards.changes_since(self._snapshots.get(trainer)).get(self.number)
                self._snapshots[trainer] = shards
                if changed is not None:
                    self._since[changed.state][trainer] = at

    def may_start(self, shard: int) -> bool:
        """Not before the server was down for long enough."""
        return shard != self.number or self._may_start

    def _come_back(self) -> None:
        self._may_start = True
        self.release()

    def release(self) -> None:
        """Whatever happened, no server stays stopped."""
        self._return.cancel()
        local = LocalStores.find(Path(self.job.run) / STORES) if self.signal_number == signal.SIGSTOP else None
        pid = local.pids[self.number] if local is not None else None
        if pid is not None:
            os.kill(pid, signal.SIGCONT)

    @property
    def followed(self) -> Moments:
        """Lost and back when they were so for the first trainer, whole when it is for every trainer that had lost it."""
        lost, back, whole = self._since[LOST], self._since[REBUILDING], self._since[OK]
        return {
            "lost": min(lost.values(), default=None),
            "back": min(back.values(), default=None),
            "whole": max(whole.values()) if lost and whole.keys() >= lost.keys() else None,
        }

    def measured(self, timeline: Timeline, struck_at_seconds: float, ending: Ending) -> dict[str, Any]:
        """With how long the server was away, and how much was rebuilt."""
        return {
            "down_seconds": self._down,
            "struck_at_seconds": struck_at_seconds,
            **self.account(timeline, self.moments),
            "rows_rebuilt": ending.summary["store_traffic"]["rows_rebuilt"],
        }

    def lines(self, figures: Mapping[str, Any]) -> list[str]:
        """The fault, how the shard came back, and what the training felt of that."""
        fault = f"{figures['signal']} after step {figures['step']}, {figures['struck_at_seconds']:.2f} s into the training"
        return [
            f"store shard {figures['shard']}: {fault}; its server was away for {figures['down_seconds']:g} s",
            f"given up {after(figures, 'lost')}, back {after(figures, 'back')}, whole {after(figures, 'whole')}: {figures['rows_rebuilt']:,} rows "
            "rebuilt",
            f"longest gap between steps {milliseconds(figures['longest_gap_seconds'])}, counted from the fault; "
            f"median step {milliseconds(figures['median_step_seconds'])}",
            f"throughput, of {figures['samples_per_second_normal'] or 0:,.0f} samples a second: {percent(figures['throughput_degraded'])} while the "
            f"shard was lost, {percent(figures['throughput_rebuilding'])} while it was rebuilt",
        ]
