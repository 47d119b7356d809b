"""The counts that a schedule states for its training steps.

These are samples, lookups, rows used, fetched and written back, and the exchange between trainers.
Counts of all steps are read from the offsets of the schedule's files. The rows that each trainer
uses of others are counted only in some steps, evenly spread. For other steps they are taken in
proportion to the rows used, because that share hardly changes from step to step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from foreload.pipelines.compiler.other_slots import LaneUses, count_moves
from foreload.pipelines.schedule.arrow_files import MappedLists
from foreload.pipelines.schedule.reader import Schedule
from foreload.pipelines.schedule.walk import LaneMoves
from foreload.trainer.job.succession import next_copies

MASKED_STEPS = 64  # about how many steps are sampled for the rows that trainers use of each other
_FLOAT = 4  # bytes


@dataclass(frozen=True, slots=True)
class Exchanged:
    """The numbers of rows that trainers send each other, per row used, for all trainers together.

    Attributes:
        rows_out: the rows sent to a trainer that uses them.
        rows_back: the gradients of rows returned, one for each lane that uses the row.
        replicas: the rows whose weights a replica needs in addition to the rows that arrive anyway,
            for one replica per lane.
    """

    rows_out: float
    rows_back: float
    replicas: float


@dataclass(frozen=True, slots=True)
class StepCounts:
    """The counts of each training step of a schedule.

    Attributes:
        samples: int64 [steps].
        lookups: int64 [steps].
        used: rows used, int64 [steps, lanes], as are the next three. The sum over lanes is the
            number of the step.
        arrived: rows that arrived in slots.
        fetched: arrived rows that were fetched from the store.
        ended: rows whose residency ended.
        slots: the number of slots of a lane.
        occupied: the number of slots occupied at the end, in all lanes together.
        exchanged: the exchange for each number of trainers, from 1 to the number of lanes.
    """

    samples: np.ndarray
    lookups: np.ndarray
    used: np.ndarray
    arrived: np.ndarray
    fetched: np.ndarray
    ended: np.ndarray
    slots: int
    occupied: int
    exchanged: Sequence[Exchanged]

    @property
    def steps(self) -> int:
        """The number of training steps."""
        return len(self.samples)

    def trainers_bytes(self, trainers: int, weights: int, state: int, dense: int, copies: int) -> np.ndarray:
        """Return the payload that all trainers together send each other, in bytes: float64 [steps].

        Args:
            trainers: the number of trainers.
            weights: floats per row.
            state: floats of optimizer state per row.
            dense: the number of dense parameters.
            copies: the number of trainers that hold a lane, including its owner.
        """
        if trainers == 1:
            return np.zeros(self.steps)
        lanes, shares = self.used.shape[1], self.exchanged[trainers - 1]
        rows = self.used.sum(axis=1).astype(np.float64)
        # Each lane's part of the dense gradient goes to the trainers that add it, except for the
        # chunk that its own trainer adds. The sums are then sent back.
        further = dense * (lanes * (trainers - 1) / trainers + (trainers - 1))
        replicas = (copies - 1) * rows * (state + shares.replicas * weights) if copies > 1 else 0.0
        return _FLOAT * (rows * (shares.rows_out + shares.rows_back) * weights + further + replicas)


def step_counts(schedule: Schedule) -> StepCounts:
    """Read the counts from a complete schedule.

    Raises:
        ScheduleError: the schedule cannot be read.
    """
    lanes = schedule.header.lanes
    lookups: list[np.ndarray] = [np.zeros(0, np.int64)]
    counts: list[np.ndarray] = [np.zeros((4, 0, lanes), np.int64)]
    samples: list[int] = []
    masks: list[list[np.ndarray]] = []
    every = max(sum(len(s.samples) for s in schedule.segments() if s.kind == "train") // MASKED_STEPS, 1)
    for index, segment in enumerate(schedule.segments()):
        if segment.kind != "train":
            continue
        parts = [schedule.columns(index, lane) for lane in range(lanes)]
        of_lanes = (np.diff(of_lane.whole("index")[0]) for of_lane, _ in parts)
        lookups.append(sum(of_lanes, np.zeros(len(segment.samples), np.int64)))
        counts.append(np.stack([LaneMoves(segment.first, segment.last, moves).counts() for _, moves in parts], axis=-1))
        masked = [row for row in range(len(segment.samples)) if (len(samples) + row) % every == 0]
        masks += [_mask_counts(parts, row) for row in masked]
        samples += segment.samples
    used, arrived, fetched, ended = np.concatenate(counts, axis=1)
    exchanged = [_exchanged(masks, lanes, trainers) for trainers in range(1, lanes + 1)]
    return StepCounts(
        samples=np.array(samples, np.int64),
        lookups=np.concatenate(lookups),
        used=used,
        arrived=arrived,
        fetched=fetched,
        ended=ended,
        slots=max(schedule.slots),
        occupied=sum(schedule.manifest["occupied"]),
        exchanged=exchanged,
    )


def with_slots(counts: StepCounts, accesses: Sequence[LaneUses], slots: int) -> StepCounts:
    """Return the counts for another number of slots per lane.

    Args:
        accesses: the accesses of each lane.
        slots: the number of slots of a lane.

    Raises:
        SlotsError: the slots do not suffice.
    """
    lanes = [count_moves(one, slots) for one in accesses]
    return replace(
        counts,
        arrived=np.stack([lane.arrived for lane in lanes], axis=1),
        fetched=np.stack([lane.fetched for lane in lanes], axis=1),
        ended=np.stack([lane.ended for lane in lanes], axis=1),
        slots=slots,
        occupied=sum(lane.occupied for lane in lanes),
    )


def lane_map(lanes: int, trainers: int) -> np.ndarray:
    """Return the trainer that hosts each lane when training begins: int64 [lanes].

    Lanes are assigned in blocks whose sizes differ by at most one lane.
    """
    return np.arange(lanes) * trainers // lanes


def _mask_counts(parts: Sequence[tuple[MappedLists, MappedLists]], row: int) -> list[np.ndarray]:
    """Count the rows of each lane in a step by their users and next users.

    Returns per lane (users, next users, count), uint64 [3, kinds].
    """
    result = []
    for samples, moves in parts:
        users, following = samples.column("users", row).astype(np.uint64), moves.column("next_users", row).astype(np.uint64)
        kinds, counts = np.unique(np.stack([users, following]), axis=1, return_counts=True)
        result.append(np.concatenate([kinds, counts[None].astype(np.uint64)]))
    return result


def _exchanged(masks: Sequence[Sequence[np.ndarray]], lanes: int, trainers: int) -> Exchanged:
    hosts = lane_map(lanes, trainers)
    bits = np.uint64(1) << np.arange(lanes, dtype=np.uint64)
    of_trainer = [np.bitwise_or.reduce(bits[hosts == trainer]) for trainer in range(trainers)]
    holders = next_copies(hosts.tolist(), [()] * lanes, range(trainers), copies=2)
    out = back = replicas = used = 0
    for step in masks:
        for lane, (users, following, counts) in enumerate(step):
            used += int(counts.sum())
            for trainer in range(trainers):
                if trainer == hosts[lane]:
                    continue
                out += int(counts[(users & of_trainer[trainer]) != 0].sum())
                back += sum(int(counts[(users & bits[other]) != 0].sum()) for other in np.flatnonzero(hosts == trainer))
            for holder in holders[lane]:
                replicas += int(counts[(following & of_trainer[holder]) == 0].sum())
    return Exchanged(out / max(used, 1), back / max(used, 1), replicas / max(used, 1))
