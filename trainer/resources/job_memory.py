"""Memory that a choice takes, before anything of it runs: of a trainer, and of the store's servers at the schedule's end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from foreload.cache.client.servers import allocator_of, find_executable, version_of
from foreload.cache.errors import CacheError
from foreload.cache.parity.placement import Placement
from foreload.cache.rows.layout import RowLayout
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.memory.hash_memory import HashMemory
from foreload.trainer.memory.row_timeline import counts_of, sizes_of
from foreload.trainer.memory.store_memory import hash_bytes
from foreload.trainer.resources.features import StepCounts
from foreload.trainer.resources.step_model import Setup
from foreload.trainer.resources.trainer_memory import LaneLoad, TrainerMemory
from foreload.trainer.run.history import Profile

_SERVER_BYTES = 2 << 20  # of an empty server, and its clients


@dataclass(slots=True)
class JobMemory:
    """Of trainers and servers of a job. ordinals: int64 [lanes, tables], given by the schedule's end."""

    layouts: Sequence[RowLayout]
    ordinals: np.ndarray
    trainers: TrainerMemory
    snapshots: bool
    _stores: dict[tuple[int, int, int], int] = field(default_factory=dict)

    @classmethod
    def of(
        cls, schedule: Schedule, layouts: Sequence[RowLayout], profiles: Iterable[Profile], snapshots: bool, averaged: bool
    ) -> JobMemory:
        """profiles: of a like job; snapshots: checkpoints are to be saved while it trains; averaged: the dense part has a moving average."""
        ordinals = np.zeros((schedule.header.lanes, len(layouts)), np.int64)
        for batch in schedule.rows():
            np.maximum.at(ordinals, (batch["lane"].astype(np.int64), batch["table"].astype(np.int64)), batch["ordinal"] + 1)
        trainers = TrainerMemory.of(schedule, layouts).with_profiles(profiles)
        return cls(layouts, ordinals, replace(trainers, averaged=averaged), snapshots)

    def trainer_bytes(self, setup: Setup, counts: StepCounts) -> int:
        """At most, of the trainer with most lanes."""
        return self.trainers.peak_bytes(LaneLoad.of_schedule(counts), setup, self.snapshots)

    def store_bytes(self, setup: Setup) -> int:
        """Of all servers, of the kind that `local:N` starts, when every row was written."""
        key = (setup.shards, setup.k, setup.r)
        if key not in self._stores:
            counts = counts_of(Placement.spread(*key), self.ordinals, self.layouts)
            hashes = HashMemory.known(_local_server(), sizes_of(self.layouts))
            taken = hash_bytes(hashes, counts[counts.sum(axis=2) > 0])
            self._stores[key] = round(float(taken.sum())) + setup.shards * _SERVER_BYTES
        return self._stores[key]


def _local_server() -> dict[str, str]:
    """What INFO would say of the kind, version and allocator of a local server."""
    try:
        executable = find_executable()
        kind, _, version = version_of(executable).partition(" ")
        return {f"{kind}_version": version, "mem_allocator": allocator_of(executable)}
    except CacheError:
        return {}
