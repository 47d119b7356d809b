"""`foreload drill lost-shard`: kill or stop a store shard during training."""

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
from foreload.trainer.cluster.messages.trainers import FaultInjected, ShardsReport, TrainerEvent
from foreload.trainer.commands.drill import FaultDrill, Moments, after, milliseconds, percent
from foreload.trainer.job.job import TrainJob
from foreload.trainer.run.directory import STORES
from foreload.trainer.run.timeline import Timeline

if TYPE_CHECKING:
    from foreload.trainer.cluster.ending import Ending

# A run waits at its end for a server for at most 30 s, so the drill brings the server back earlier.
MOST_DOWN_SECONDS = 20.0


class LostShard(FaultDrill):
    """A drill that kills the server of a store shard after a step, or stops and later continues it.

    Args:
        at: as in FaultDrill, like `stop`.
        shard: the number of the shard. If None, it is drawn from the job's seed.
        down_seconds: how long the server stays away. If None, one second; if the server is stopped,
            one second longer than a server may be silent.
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
            raise SettingError("--store: a drill only kills servers that it started; give local:N")
        if not job.code(count)[1]:
            raise SettingError(
                f"--store: a drill needs parity, which {job.store} does not have; give local:3 or more without --parity off, or --parity 1+1"
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
        # A server that is only stopped needs no start. A killed one must not be started again
        # before it was away for long enough.
        self._may_start = stop
        self._snapshots: dict[int, ShardSnapshot] = {}
        """The last snapshot of each trainer, by the trainer's number."""
        self._since: dict[str, dict[int, float]] = {LOST: {}, REBUILDING: {}, OK: {}}
        """By state and trainer: when the trainer last saw the shard enter the state."""

    def fault(self) -> Fault:
        """Return a signal for the server of the shard."""
        return Fault(self.step, self.number, self.signal_number)

    def on_event(self, trainer: int, event: TrainerEvent) -> None:
        """Record the shard's state changes, and start the timer of its return with the fault."""
        super().on_event(trainer, event)
        match event:
            case FaultInjected(at=at):
                self.injected = at
                self._return.start()
            case ShardsReport(shards, at):
                changed = shards.changes_since(self._snapshots.get(trainer)).get(self.number)
                self._snapshots[trainer] = shards
                if changed is not None:
                    self._since[changed.state][trainer] = at

    def may_start(self, shard: int) -> bool:
        """Return whether a dead server may be started.

        The drill's own server may be, once its time away is over.
        """
        return shard != self.number or self._may_start

    def _come_back(self) -> None:
        self._may_start = True
        self.release()

    def release(self) -> None:
        """Continue the server if it is stopped, whatever happened before."""
        self._return.cancel()
        local = LocalStores.find(Path(self.job.run) / STORES) if self.signal_number == signal.SIGSTOP else None
        pid = local.pids[self.number] if local is not None else None
        if pid is not None:
            os.kill(pid, signal.SIGCONT)

    @property
    def followed(self) -> Moments:
        """When the shard was lost, when it was back, and when it was whole again.

        It is lost and back when the first trainer sees it so. It is whole when every trainer that
        had lost it sees it whole.
        """
        lost, back, whole = self._since[LOST], self._since[REBUILDING], self._since[OK]
        return {
            "lost": min(lost.values(), default=None),
            "back": min(back.values(), default=None),
            "whole": max(whole.values()) if lost and whole.keys() >= lost.keys() else None,
        }

    def measured(self, timeline: Timeline, struck_at_seconds: float, ending: Ending) -> dict[str, Any]:
        """Return the effect of the fault, the server's time away, and the rows rebuilt."""
        return {
            "down_seconds": self._down,
            "struck_at_seconds": struck_at_seconds,
            **self.account(timeline, self.moments),
            "rows_rebuilt": ending.summary["store_traffic"]["rows_rebuilt"],
        }

    def lines(self, figures: Mapping[str, Any]) -> list[str]:
        """Return lines on the fault, the shard's return and the effect on the training."""
        fault = f"{figures['signal']} after step {figures['step']}, {figures['struck_at_seconds']:.2f} s into the training"
        return [
            f"store shard {figures['shard']}: {fault}; its server was away for {figures['down_seconds']:g} s",
            f"considered lost {after(figures, 'lost')}, back {after(figures, 'back')}, complete {after(figures, 'whole')}: "
            f"{figures['rows_rebuilt']:,} rows rebuilt",
            f"longest gap between steps {milliseconds(figures['longest_gap_seconds'])}, counted from the fault; "
            f"median step {milliseconds(figures['median_step_seconds'])}",
            f"throughput, where normal is {figures['samples_per_second_normal'] or 0:,.0f} samples a second: "
            f"{percent(figures['throughput_degraded'])} while the shard was lost, {percent(figures['throughput_rebuilding'])} while it was rebuilt",
        ]
