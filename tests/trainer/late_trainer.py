"""`foreload train` as a scheduler's trainer 1: a store shard dies when trainer 0 is done and has found all whole, and before this one looks.

Run as a module by test_lost_shards.py. The fault is put between two calls of the trainer's own, so no time decides whether it comes between them.
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

repair_shards = TrainerProcess._repair_shards


def lose_a_shard_first(self: TrainerProcess, traffic: Traffic) -> list[int]:
    """In place of `_repair_shards`: once trainer 0 has looked, kill shard 1, and do as it does."""
    while self._board.poll(ShardsLooked, 0, 0) is None:
        time.sleep(0.01)
    Fault(self._last_step, 1, signal.SIGKILL).inject(self._run / STORES)
    return repair_shards(self, traffic)


if __name__ == "__main__":
    with mock.patch.object(TrainerProcess, "_repair_shards", lose_a_shard_first):
        sys.exit(main())
