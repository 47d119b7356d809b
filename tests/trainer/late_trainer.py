"""`foreload train` as a scheduler's second trainer: a store shard dies when the first trainer is done and has found all whole, and before this one
looks.
"""

from __future__ import annotations

import signal
import sys
import time
from unittest import mock

from foreload.cache.traffic import Traffic
from foreload.trainer.cli import main
from foreload.trainer.cluster.facts import ShardsLooked
from foreload.trainer.cluster.faults import Fault
from foreload.trainer.cluster.worker import TrainerProcess
from foreload.trainer.run.directory import STORES

in_time = TrainerProcess._repair_shards


def late(self: TrainerProcess, traffic: Traffic) -> list[int]:
    """Strike, then do as `_repair_shards` does."""
    while self._board.poll(ShardsLooked, 0, 0) is None:
        time.sleep(0.01)
    Fault(self._last_step, 1, signal.SIGKILL).inject(self._run / STORES)
    return in_time(self, traffic)


if __name__ == "__main__":
    with mock.patch.object(TrainerProcess, "_repair_shards", late):
        sys.exit(main())
