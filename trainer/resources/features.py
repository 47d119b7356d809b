"""What a schedule states of its training steps: samples, lookups, rows used, fetched, written back, and what trainers have to exchange.

Counts of all steps are read from the offsets of the schedule's files. Who uses whose rows is counted in some steps, evenly spread, and taken in
proportion to the rows used for the others, since that share hardly changes from step to step.
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

MASKED_STEPS = 64  # in which it is counted who uses whose rows
_FLOAT = 4


@dataclass(frozen=True, slots=True)
class Exchanged:
    """What trainers send each other in a step, a row used, all trainers together.

    rows_out: rows sent to a trainer that uses them; rows_back: gradients of rows returned, one a lane that uses the row; replicas: rows whose
    weights a copy needs beyond what comes anyway, of the one further copy that each lane has.
    """

    rows_out: float
    rows_back: float
    replicas: float


@dataclass(frozen=True, slots=True)
class StepCounts:
    """Of each training step of a schedule, int64 [steps] or [steps, lanes]. slots: of a lane; lanes' rows add up to the step's.

    exchanged: of each number of trainers, 1 to lanes. occupied: slots that are taken at the end, all lanes together.
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
        """Training steps."""
        return len(self.samples)

    def trainers_bytes(self, trainers: int, weights: int, state: int, dense: int, copies: int) -> np.ndarray:
        """Payload that trainers send each other, all of them together, float64 [steps].

        weights, state: floats of a row and of its optimizer state; dense: dense parameters; copies: trainers that hold a lane, its own included.
        """
        if trainers == 1:
            return np.zeros(self.steps)
        lanes, shares = self.used.shape[1], self.exchanged[trainers - 1]
        rows = self.used.sum(axis=1).astype(np.float64)
        # Every lane's part of the dense gradient goes to those who add it, but for the own chunk; sums come back.
        further = dense * (lanes * (trainers - 1) / trainers + (trainers - 1))
        replicas = (copies - 1) * rows * (state + shares.replicas * weights) if copies > 1 else 0.0
        return _FLOAT * (rows * (shares.rows_out + shares.rows_back) * weights + further + replicas)


def step_counts(schedule: Schedule) -> StepCounts:
    """Read them from a complete schedule. Raises ScheduleError."""
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
        samples=np.array(samples, np.int64), lookups=np.concatenate(lookups), used=used, arrived=arrived, fetched=fetched, ended=ended,
        slots=max(schedule.slots), occupied=sum(schedule.manifest["occupied"]), exchanged=exchanged,
    )  # fmt: skip


def with_slots(counts: StepCounts, accesses: Sequence[LaneUses], slots: int) -> StepCounts:
    """The counts with another number of slots in each lane. accesses: of each lane. Raises SlotsError where they do not suffice."""
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
    """Of each lane the trainer that hosts it when training begins: blocks that differ by at most one lane. int64 [lanes]."""
    return np.arange(lanes) * trainers // lanes


def _mask_counts(parts: Sequence[tuple[MappedLists, MappedLists]], row: int) -> list[np.ndarray]:
    """Of each lane in a step, its rows by users and next users: (users, next users, how many), int64 [3, kinds]."""
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
