"""Predict the memory of a job before anything runs.

Predicts the peak of a trainer, and the memory of the store's servers at the end of the schedule.
"""

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
from foreload.pipelines.planning.sizing import slot_bytes, staging_rows, stored_bytes
from foreload.pipelines.schedule.format import OCCUPANT_BYTES, Segment
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.memory.hash_memory import HashMemory
from foreload.trainer.memory.row_timeline import counts_of, sizes_of
from foreload.trainer.memory.store_memory import hash_bytes
from foreload.trainer.resources.features import StepCounts
from foreload.trainer.resources.step_model import Setup, setup_of
from foreload.trainer.run.history import Profile

# The measured memory of a trainer without lanes: interpreter, torch, compiled kernels, connections.
BASE_BYTES = 432 << 20
_LEAST_BASE_BYTES = BASE_BYTES // 2
# Segments that are mapped at once. Threads read ahead and behind by some steps.
_SEGMENTS = 3
# The floats of a dense parameter: itself, its gradient, the sum over all trainers, and two of the
# optimizer's state.
_DENSE_COPIES = 5
_OF_AVERAGE = 2  # a moving average, and the value that is added to it
_SHARD_BYTES = (1 << 17) + (1 << 18)  # buffers of a connection to a store shard
# The most steps whose rows are staged, on their way in and out.
_STEPS_ARRIVING, _STEPS_LEAVING = 8, 4
# How many times rows in transit are in memory, because they are created, sent, and kept for the
# next of their kind. The factors were measured on 34 jobs (docs/measurements.md).
# During training: rows of a replica; rows of a step and staged rows.
_OF_COPY, _OF_STEP = 1.7, 2.0
# At the end: rows of a step and staged rows; rows that leave their slots; rows of a write-back
# batch, and in addition to these with parity.
_STEP_AT_END, _OF_LEAVING, _OF_BATCH, _OF_PARITY_BATCH = 1.1, 0.9, 2.5, 6.0
# With parity, memory of each lane during training; and the part of the base that is only used at
# the end.
_LANE_WITH_PARITY_BYTES, _END_BYTES = 3 << 20, 7 << 20


@dataclass(frozen=True, slots=True)
class LaneLoad:
    """The load of an average lane.

    Attributes:
        slots: its number of slots.
        occupied: the number of these slots that are ever occupied.
        used: rows used per step.
        arrived: rows that arrive per step.
        ended: rows whose residency ends per step.
    """

    slots: int
    occupied: float
    used: float
    arrived: float
    ended: float

    @classmethod
    def of_schedule(cls, counts: StepCounts) -> LaneLoad:
        """Return the load over the whole schedule."""
        lanes = counts.used.shape[1]
        a_step = (float(column.sum()) / max(counts.steps * lanes, 1) for column in (counts.used, counts.arrived, counts.ended))
        return cls(counts.slots, counts.occupied / lanes, *a_step)

    @classmethod
    def of_profile(cls, profile: Profile) -> LaneLoad:
        """Return the load over the steps of a profile."""
        lanes, slots = int(profile.settings["lanes"]), int(profile.settings["slots"])
        used, arrived, ended = (profile.mean(name) / lanes for name in ("rows_used", "rows_arrived", "rows_written_back"))
        return cls(slots, min((arrived - ended) * profile.points * profile.stride, slots), used, arrived, ended)


@dataclass(frozen=True, slots=True)
class TrainerMemory:
    """The properties of a schedule that determine the memory of its trainers.

    Attributes:
        columns: the number of columns of a slot.
        evaluation_slots: the number of evaluation slots of a lane.
        batch_size: samples per step.
        mapped_bytes: the most bytes of the schedule that are mapped at once.
        base_bytes: the memory of a trainer without lanes.
        averaged: whether the dense part has a moving average.
    """

    columns: int
    evaluation_slots: int
    batch_size: int
    mapped_bytes: int
    base_bytes: int = BASE_BYTES
    averaged: bool = False

    @classmethod
    def of(cls, schedule: Schedule, layouts: Sequence[RowLayout]) -> TrainerMemory:
        """Read the properties from a complete schedule."""
        evaluation = max(schedule.manifest["evaluation_slots"], default=0)
        return cls(slot_columns(layouts), evaluation, schedule.header.batch_size, _mapped_bytes(schedule))

    def with_profiles(self, profiles: Iterable[Profile]) -> TrainerMemory:
        """Return the same, with a base estimated from the peaks of trainers in similar jobs.

        The base is the median of the memory that the lanes of these trainers do not explain.
        """
        bare = replace(self, base_bytes=0)
        bases = [
            peak - bare.peak_bytes(LaneLoad.of_profile(one), setup_of(one), bool(one.settings["saves_checkpoints"]))
            for one in profiles
            if (peak := one.peak_bytes("trainer")) and one.points
        ]
        return replace(self, base_bytes=max(round(median(bases)), _LEAST_BASE_BYTES)) if bases else self

    def peak_bytes(self, load: LaneLoad, setup: Setup, snapshots: bool = False) -> int:
        """Return the peak of resident memory of the trainer with the most lanes.

        Args:
            load: the load of a lane.
            snapshots: whether checkpoints are saved during training.
        """
        lanes = -(-setup.lanes // setup.trainers)
        copies, with_base = lanes * (setup.copies - 1), setup.r > 0
        plain, protected = slot_bytes(self.columns, False), slot_bytes(self.columns, with_base)
        # Slots that are never occupied have no resident memory.
        held = (lanes * protected + (_OF_COPY * copies + snapshots * lanes) * plain) * load.occupied
        staged = staging_rows(load.slots)
        arriving = min(staged, _STEPS_ARRIVING * load.arrived + self.batch_size)
        leaving = min(staged, _STEPS_LEAVING * load.ended + self.batch_size)
        # The local rows of a step: their weights in a block, their gradients, and their data for
        # undoing the step.
        block = 4 * (4 * self.columns + OCCUPANT_BYTES) * load.used
        a_step = lanes * (protected * leaving + plain * (self.evaluation_slots + arriving) + block) + copies * block
        training = _OF_STEP * a_step + with_base * lanes * _LANE_WITH_PARITY_BYTES - _END_BYTES
        # At the end all rows have left their slots and are on their way to the store at once.
        leave = 4 * self.columns * (1 + with_base) * load.occupied
        batch = stored_bytes(self.columns) * min(BATCH_ROWS * setup.shards, load.occupied)
        of_lane = _OF_LEAVING * leave + (_OF_BATCH + _OF_PARITY_BATCH * with_base) * batch
        at_end = _STEP_AT_END * a_step + lanes * of_lane
        dense = 4 * (_DENSE_COPIES + _OF_AVERAGE * self.averaged) * setup.dense
        return self.base_bytes + round(held + max(training, at_end)) + dense + setup.shards * _SHARD_BYTES + self.mapped_bytes


def _mapped_bytes(schedule: Schedule) -> int:
    """Return the most bytes of the schedule that are mapped at once.

    These bytes are page cache, which counts as memory of the trainer as long as it is mapped.
    """
    sizes = [_bytes_of(segment) for segment in schedule.segments()]
    return max((sum(sizes[first : first + _SEGMENTS]) for first in range(max(len(sizes) - _SEGMENTS + 1, 1))), default=0)


def _bytes_of(segment: Segment) -> int:
    return sum(int(lane[part]["bytes"]) for lane in segment.files for part in ("samples", "moves"))


_SERVER_BYTES = 2 << 20  # an empty server and its clients


@dataclass(slots=True)
class JobMemory:
    """The memory of the trainers and servers of a job.

    Attributes:
        layouts: the layouts of the tables' rows.
        ordinals: the number of ordinals assigned by the end of the schedule, int64 [lanes, tables].
        trainers: the properties that determine the memory of trainers.
        snapshots: whether checkpoints are saved during training.
    """

    layouts: Sequence[RowLayout]
    ordinals: np.ndarray
    trainers: TrainerMemory
    snapshots: bool
    _stores: dict[tuple[int, int, int], int] = field(default_factory=dict)

    @classmethod
    def of(
        cls, schedule: Schedule, layouts: Sequence[RowLayout], profiles: Iterable[Profile], snapshots: bool, averaged: bool
    ) -> JobMemory:
        """Read the properties of a complete schedule.

        Args:
            profiles: profiles of similar jobs.
            snapshots: whether checkpoints are to be saved during training.
            averaged: whether the dense part has a moving average.
        """
        ordinals = np.zeros((schedule.header.lanes, len(layouts)), np.int64)
        for batch in schedule.rows():
            np.maximum.at(ordinals, (batch["lane"].astype(np.int64), batch["table"].astype(np.int64)), batch["ordinal"] + 1)
        trainers = TrainerMemory.of(schedule, layouts).with_profiles(profiles)
        return cls(layouts, ordinals, replace(trainers, averaged=averaged), snapshots)

    def trainer_bytes(self, setup: Setup, counts: StepCounts) -> int:
        """Return the peak memory of the trainer with the most lanes."""
        return self.trainers.peak_bytes(LaneLoad.of_schedule(counts), setup, self.snapshots)

    def store_bytes(self, setup: Setup) -> int:
        """Return the memory of all servers once every row has been written.

        The servers are of the kind that `local:N` starts.
        """
        key = (setup.shards, setup.k, setup.r)
        if key not in self._stores:
            counts = counts_of(Placement.spread(*key), self.ordinals, self.layouts)
            hashes = HashMemory.known(_local_server(), sizes_of(self.layouts))
            taken = hash_bytes(hashes, counts[counts.sum(axis=2) > 0])
            self._stores[key] = round(float(taken.sum())) + setup.shards * _SERVER_BYTES
        return self._stores[key]


def _local_server() -> dict[str, str]:
    """Return the fields of INFO that state a local server's kind, version and allocator.

    Returns an empty dict if no local server is installed or it cannot be identified.
    """
    try:
        executable = find_executable()
        kind, _, version = version_of(executable).partition(" ")
        return {f"{kind}_version": version, "mem_allocator": allocator_of(executable)}
    except CacheError:
        return {}
