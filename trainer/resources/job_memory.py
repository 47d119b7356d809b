"""Memory that a choice takes, before anything of it runs: of a trainer, and of the store's servers at the schedule's end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from foreload.cache.client.servers import find_executable, version_of
from foreload.cache.errors import CacheError
from foreload.cache.parity.placement import Placement
from foreload.cache.rows.layout import RowLayout
from foreload.pipelines.planning.sizing import lane_bytes, slot_bytes
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.resources.hash_memory import KEY_BYTES, HashMemory
from foreload.trainer.resources.history import Profile
from foreload.trainer.resources.row_timeline import counts_of, sizes_of
from foreload.trainer.resources.step_model import Setup

_BASE_BYTES = 420 << 20  # of a trainer with no lane: interpreter, torch, kernels; where no profile tells
_SERVER_BYTES = 2 << 20  # of an empty server, and its clients


@dataclass(slots=True)
class JobMemory:
    """Of trainers and servers of a job. ordinals: int64 [lanes, tables], given by the schedule's end; base_bytes: of a trainer without lanes."""

    layouts: Sequence[RowLayout]
    ordinals: np.ndarray
    base_bytes: int
    _stores: dict[tuple[int, int, int], int] = field(default_factory=dict)

    @classmethod
    def of(cls, schedule: Schedule, layouts: Sequence[RowLayout], profiles: Iterable[Profile]) -> JobMemory:
        """profiles: of a like job; what a trainer has beyond its lanes is the most that they tell of."""
        ordinals = np.zeros((schedule.header.lanes, len(layouts)), np.int64)
        for batch in schedule.rows():
            np.maximum.at(ordinals, (batch["lane"].astype(np.int64), batch["table"].astype(np.int64)), batch["ordinal"] + 1)
        columns = _columns(layouts)
        names = ("lanes", "trainers", "copies", "r", "slots")
        held = [(one.peak_bytes("trainer"), {name: int(one.settings[name]) for name in names}) for one in profiles]
        beyond = [peak - _lanes_bytes(**of_it, columns=columns) for peak, of_it in held if peak]
        return cls(layouts, ordinals, max(*beyond, _BASE_BYTES // 2) if beyond else _BASE_BYTES)

    def trainer_bytes(self, setup: Setup, slots: int) -> int:
        """At most, of the trainer with most lanes."""
        return self.base_bytes + _lanes_bytes(setup.lanes, setup.trainers, setup.copies, setup.r, slots, _columns(self.layouts))

    def store_bytes(self, setup: Setup) -> int:
        """Of all servers, of the kind that `local:N` starts, when every row was written."""
        key = (setup.shards, setup.k, setup.r)
        if key not in self._stores:
            counts = counts_of(Placement.spread(*key), self.ordinals, self.layouts)
            hashes = HashMemory.known(_local_server(), sizes_of(self.layouts))
            entries = counts.sum(axis=2)[counts.sum(axis=2) > 0]
            rows = float(
                (counts.sum(axis=(0, 1)) * np.array([hashes.entry_bytes[size] for size in sizes_of(self.layouts)])).sum()
            )
            tables = float(hashes.growth.table_bytes(entries, np.ones(len(entries))).sum())
            self._stores[key] = round(rows + tables) + KEY_BYTES * len(entries) + setup.shards * _SERVER_BYTES
        return self._stores[key]


def _columns(layouts: Sequence[RowLayout]) -> int:
    return max(row.width for row in layouts) + max(row.state_width for row in layouts)


def _local_server() -> dict[str, str]:
    """What INFO would say of the kind, version and allocator of a local server."""
    try:
        kind, _, version = version_of(find_executable()).partition(" ")
    except CacheError:
        return {}
    return {f"{kind}_version": version, "mem_allocator": "jemalloc"}


def _lanes_bytes(lanes: int, trainers: int, copies: int, r: int, slots: int, columns: int) -> int:
    """Of the lanes and copies of the trainer that has most."""
    hosted = -(-lanes // trainers)
    return hosted * (lane_bytes(slots, columns, with_base=r > 0) + (copies - 1) * slot_bytes(columns, with_base=False) * slots)
