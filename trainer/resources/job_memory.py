"""Predict memory before anything runs: of a trainer at its peak, and of the store's servers at the schedule's end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

import numpy as np

from foreload.cache.client.local_server import allocator_of, find_executable, version_of
from foreload.cache.errors import CacheError
from foreload.cache.parity.placement import Placement
from foreload.cache.protocol.rounds.lanes import BATCH_ROWS
from foreload.cache.rows.layout import RowLayout, slot_columns
from foreload.pipelines.planning.sizing import OCCUPANT_BYTES, slot_bytes, staging_rows, stored_bytes
from foreload.pipelines.schedule.format import Segment
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.memory.hash_memory import HashMemory
from foreload.trainer.memory.row_timeline import counts_of, sizes_of
from foreload.trainer.memory.store_memory import hash_bytes
from foreload.trainer.resources.features import StepCounts
from foreload.trainer.resources.step_model import Setup, setup_of
from foreload.trainer.run.history import Profile

BASE_BYTES = 432 << 20  # of a trainer without lanes: interpreter, torch, compiled kernels, connections; by measurement
_LEAST_BASE_BYTES = BASE_BYTES // 2
_SEGMENTS = 3  # that are mapped at once: threads read ahead and behind by some steps
_DENSE_COPIES = 5  # of a parameter: itself, its gradient, the sum of all trainers', and two of an optimizer's state
_OF_AVERAGE = 2  # a moving average, and what is added to it
_SHARD_BYTES = (1 << 17) + (1 << 18)  # buffers of a connection to a store shard
_STEPS_ARRIVING, _STEPS_LEAVING = 8, 4  # whose rows are staged at most, on their way in and out
# How often what comes and goes is there, as it is made, sent and kept for the next of its kind; by measurement of 34 jobs (docs/measurements.md).
# While training goes on: rows of a copy; rows of a step, and those staged. At the end: the latter; rows that leave their slots; those of a write-back
# batch, and how often more with parity.
_OF_COPY, _OF_STEP = 1.7, 2.0
_STEP_AT_END, _OF_LEAVING, _OF_BATCH, _OF_PARITY_BATCH = 1.1, 0.9, 2.5, 6.0
_LANE_WITH_PARITY_BYTES, _END_BYTES = 3 << 20, 7 << 20  # of each lane while training goes on; of the base, what comes at the end


@dataclass(frozen=True, slots=True)
class LaneLoad:
    """Of a lane, on average. slots: that it has; occupied: of these, that rows ever sit in; used, arrived, ended: rows a step."""

    slots: int
    occupied: float
    used: float
    arrived: float
    ended: float

    @classmethod
    def of_schedule(cls, counts: StepCounts) -> LaneLoad:
        """Over the whole of it."""
        lanes = counts.used.shape[1]
        a_step = (float(column.sum()) / max(counts.steps * lanes, 1) for column in (counts.used, counts.arrived, counts.ended))
        return cls(counts.slots, counts.occupied / lanes, *a_step)

    @classmethod
    def of_profile(cls, profile: Profile) -> LaneLoad:
        """Over the steps that it has."""
        lanes, slots = int(profile.settings["lanes"]), int(profile.settings["slots"])
        used, arrived, ended = (profile.mean(name) / lanes for name in ("rows_used", "rows_arrived", "rows_written_back"))
        return cls(slots, min((arrived - ended) * profile.points * profile.stride, slots), used, arrived, ended)


@dataclass(frozen=True, slots=True)
class TrainerMemory:
    """Of the trainers of a schedule.

    columns: of a slot; evaluation_slots: of a lane; batch_size: samples of a step; mapped_bytes: the most of the schedule that is mapped at once;
    base_bytes: of a trainer without lanes; averaged: the dense part has a moving average.
    """

    columns: int
    evaluation_slots: int
    batch_size: int
    mapped_bytes: int
    base_bytes: int = BASE_BYTES
    averaged: bool = False

    @classmethod
    def of(cls, schedule: Schedule, layouts: Sequence[RowLayout]) -> TrainerMemory:
        """Read what it needs from a complete schedule."""
        evaluation = max(schedule.manifest["evaluation_slots"], default=0)
        return cls(slot_columns(layouts), evaluation, schedule.header.batch_size, _mapped_bytes(schedule))

    def with_profiles(self, profiles: Iterable[Profile]) -> TrainerMemory:
        """The same, knowing what trainers of like jobs had at their peaks: what their lanes do not explain is the base's, the median of it."""
        bare = replace(self, base_bytes=0)
        bases = [
            peak - bare.peak_bytes(LaneLoad.of_profile(one), setup_of(one), bool(one.settings["saves_checkpoints"]))
            for one in profiles
            if (peak := one.peak_bytes("trainer")) and one.points
        ]
        return replace(self, base_bytes=max(round(median(bases)), _LEAST_BASE_BYTES)) if bases else self

    def peak_bytes(self, load: LaneLoad, setup: Setup, snapshots: bool = False) -> int:
        """The most that the trainer with most lanes holds at once, resident. snapshots: checkpoints are saved while it trains."""
        lanes = -(-setup.lanes // setup.trainers)
        copies, with_base = lanes * (setup.copies - 1), setup.r > 0
        plain, protected = slot_bytes(self.columns, False), slot_bytes(self.columns, with_base)
        # Of slots that no row ever sits in, nothing is resident.
        held = (lanes * protected + (_OF_COPY * copies + snapshots * lanes) * plain) * load.occupied
        staged = staging_rows(load.slots)
        arriving = min(staged, _STEPS_ARRIVING * load.arrived + self.batch_size)
        leaving = min(staged, _STEPS_LEAVING * load.ended + self.batch_size)
        # Local rows of a step: their weights in a block, gradients, and what can be undone of them.
        block = 4 * (4 * self.columns + OCCUPANT_BYTES) * load.used
        a_step = lanes * (protected * leaving + plain * (self.evaluation_slots + arriving) + block) + copies * block
        training = _OF_STEP * a_step + with_base * lanes * _LANE_WITH_PARITY_BYTES - _END_BYTES
        # All rows are on their way to the store at once, out of their slots.
        leave = 4 * self.columns * (1 + with_base) * load.occupied
        batch = stored_bytes(self.columns) * min(BATCH_ROWS * setup.shards, load.occupied)
        of_lane = _OF_LEAVING * leave + (_OF_BATCH + _OF_PARITY_BATCH * with_base) * batch
        at_end = _STEP_AT_END * a_step + lanes * of_lane
        dense = 4 * (_DENSE_COPIES + _OF_AVERAGE * self.averaged) * setup.dense
        return self.base_bytes + round(held + max(training, at_end)) + dense + setup.shards * _SHARD_BYTES + self.mapped_bytes


def _mapped_bytes(schedule: Schedule) -> int:
    """The most of the schedule that is mapped at once; it is page cache, and counts as the trainer's as long as it is mapped."""
    sizes = [_bytes_of(segment) for segment in schedule.segments()]
    return max((sum(sizes[first : first + _SEGMENTS]) for first in range(max(len(sizes) - _SEGMENTS + 1, 1))), default=0)


def _bytes_of(segment: Segment) -> int:
    return sum(int(lane[part]["bytes"]) for lane in segment.files for part in ("samples", "moves"))


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
