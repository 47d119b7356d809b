"""`foreload train` as a scheduler's second trainer: a store shard dies when the first trainer is done and has found all whole, and before this one
looks.
"""

from __future__ import annotations

import signal
import sys
import time
from unittest import mock

from cache.traffic import Traffic
from trainer.cli import main
from trainer.faults import Fault
from trainer.run import STORES
from trainer.worker import TrainerProcess

in_time = TrainerProcess._mend


def late(self: TrainerProcess, traffic: Traffic) -> list[int]:
    """Strike, then do as `_mend` does."""
    while self._board.poll("mended/0/0") is None:
        time.sleep(0.01)
    Fault(self._last_step, 1, signal.SIGKILL).strike(self._run / STORES)
    return in_time(self, traffic)


if __name__ == "__main__":
    with mock.patch.object(TrainerProcess, "_mend", late):
        sys.exit(main())
