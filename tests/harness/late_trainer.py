"""`foreload train` as a scheduler's trainer 1: a store shard dies when trainer 0 is done and has found all whole, and before this one looks.

Run as a module by test_lost_shards.py. The fault is put between two calls of the trainer's own, so no time decides whether it comes between them.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from unittest import mock

from foreload.trainer.cli import main
from foreload.trainer.cluster.member.coordinator_link import CoordinatorLink
from foreload.trainer.cluster.messages.facts import ShardsLooked, Term
from foreload.trainer.cluster.messages.faults import Fault
from foreload.trainer.run.directory import STORES

finish = CoordinatorLink.finish


def lose_a_shard_first(self: CoordinatorLink, term: Term, check: Callable[[], None]) -> list[int]:
    """In place of `finish`: once trainer 0 has looked, kill shard 1, and do as it does."""
    while self._rendezvous.poll(ShardsLooked, term.number, 0, 0) is None:
        time.sleep(0.01)
    Fault(0, 1, signal.SIGKILL).inject(self._run / STORES)
    return finish(self, term, check)


if __name__ == "__main__":
    with mock.patch.object(CoordinatorLink, "finish", lose_a_shard_first):
        sys.exit(main())
