"""What a drill puts into a training, and what it sees of it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from foreload.cache.client.local import LocalStores
from foreload.trainer.errors import TrainerError

if TYPE_CHECKING:
    from foreload.trainer.cluster.messages import TrainerEvent


@dataclass(frozen=True, slots=True)
class Fault:
    """A signal for the server of a local store shard, sent by the trainer that hosts lane 0 as soon as it has trained a step."""

    step: int
    shard: int
    signal_number: int

    def inject(self, stores: Path) -> None:
        """Send it. stores: the folder of the servers. Raises TrainerError where there is no such process."""
        local = LocalStores.find(stores)
        pid = local.pids[self.shard] if local is not None else None
        if pid is None:
            raise TrainerError(f"drill: store shard {self.shard} has no server for a fault after step {self.step}; see {stores}")
        os.kill(pid, self.signal_number)


class RunObserver:
    """Sees what happens in a call of `foreload train`, in the launcher's thread. This one only lets it happen."""

    faults: Sequence[Fault] = ()
    """What the trainer that hosts lane 0 injects."""

    def see(self, trainer: int, event: TrainerEvent) -> None:
        """An event of a trainer."""

    def may_start(self, shard: int) -> bool:
        """Whether the dead server of a local store shard may be started again now."""
        return True
