"""A simulated schedule for tests of the traffic: random residencies over steps, with a truth to compare every row with."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from foreload.cache.rows.layout import RowLayout
from foreload.cache.rows.partition import Partition
from foreload.cache.rows.row_bytes import initial_weights
from foreload.pipelines.schedule.format import Arrivals

# Tables of one width and of others, with each kind of optimizer state.
LAYOUTS = [
    RowLayout(0, "wide", 50, (("weights", 6), ("linear", 1)), "adagrad"),
    RowLayout(1, "narrow", 40, (("weights", 3),), "sgd"),
    RowLayout(2, "wide too", 30, (("weights", 6), ("linear", 1)), "adagrad"),
    RowLayout(3, "summed", 20, (("weights", 5), ("linear", 1)), "rowwise_adagrad"),
]
WIDTH, STATE_WIDTH = 7, 7  # of the widest row: 6 + 1 weights, and Adagrad's state of each
SEED = 11
SLOTS, EVALUATION_SLOTS = 12, 6  # of a lane's partition, where a test does not say otherwise


@dataclass(slots=True)
class LaneEvent:
    """One event of one lane: the slots whose residencies end, what arrives, the slots used and the rows (table, id) in them.

    step is None for an evaluation step.
    """

    step: int | None
    ends: np.ndarray
    arrivals: Arrivals
    slots: np.ndarray
    rows: list[tuple[int, int]]


@dataclass(slots=True)
class LaneProgram:
    """The events of one lane; the slots taken after them; and of every row (table, id) trained its ordinal and its tag then."""

    events: list[LaneEvent] = field(default_factory=list)
    final_ends: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    ordinals: dict[tuple[int, int], int] = field(default_factory=dict)
    tags: dict[tuple[int, int], int] = field(default_factory=dict)


def initial(row: tuple[int, int]) -> np.ndarray:
    """weights and state of a row that was never written, float32 [WIDTH + STATE_WIDTH]."""
    out = np.zeros((1, WIDTH + STATE_WIDTH), np.float32)
    layout = LAYOUTS[row[0]]
    initial_weights(SEED, layout, np.array([row[1]]), out[:, :WIDTH])
    return out[0]


def after_step(values: np.ndarray, row_tables: np.ndarray, step: int) -> np.ndarray:
    """Rows as they are after a step, a stand-in for training: every one of a row's own columns changes, otherwise at every step."""
    out = values.copy()
    for i, table in enumerate(row_tables):
        layout = LAYOUTS[table]
        out[i, : layout.width] = out[i, : layout.width] * np.float32(0.75) + np.float32(step + 1)
        out[i, WIDTH : WIDTH + layout.state_width] += np.float32(1.0 / (step + 1))
    return out


def make_program(
    seed: int, steps: int, slots: int = SLOTS, uses: int = SLOTS, evaluation_slots: int = EVALUATION_SLOTS
) -> LaneProgram:
    """Random residencies: at each step up to `uses` rows; some rows leave though they could have stayed, some come back at once.

    Behind about every third step there is an evaluation.
    """
    random = np.random.default_rng(seed)
    program = LaneProgram()
    slot_of: dict[tuple[int, int], int] = {}
    ended_at: dict[tuple[int, int], int] = {}
    counts = [0] * len(LAYOUTS)
    for step in range(steps):
        # The square favours low ids, so rows return.
        wanted = dict.fromkeys(
            (table, int(LAYOUTS[table].rows * random.random() ** 2))
            for table in random.integers(0, len(LAYOUTS), random.integers(1, uses + 1)).tolist()
        )
        others = [row for row in slot_of if row not in wanted]
        arriving = [row for row in wanted if row not in slot_of]
        excess = len(slot_of) + len(arriving) - slots
        leaving = random.permutation(len(others))[: max(excess, int(random.integers(0, 3)), 0)].tolist()
        if random.random() < 0.2 and slot_of:
            # A row that leaves and is used by the very next step: its fetch follows the boundary at which it is due.
            back = next((row for row in wanted if row in slot_of), None)
            if back is not None and len(slot_of) + len(arriving) <= slots + len(leaving):
                arriving.append(back)
        ending = [others[i] for i in leaving] + [row for row in arriving if row in slot_of]
        ends = np.array([slot_of.pop(row) for row in ending], np.int32)
        for row in ending:
            ended_at[row] = step
        free = iter(sorted(set(range(slots)) - set(slot_of.values())))
        for row in arriving:
            slot_of[row] = next(free)
            if row not in program.ordinals:
                program.ordinals[row] = counts[row[0]]
                counts[row[0]] += 1
        arrivals = _arrivals(arriving, [slot_of[row] for row in arriving], program, ended_at)
        used = np.array([slot_of[row] for row in wanted], np.int32)
        program.events.append(LaneEvent(step, ends, arrivals, used, list(wanted)))
        for row in wanted:
            program.tags[row] = step + 1
        if random.random() < 0.3:
            program.events.append(_evaluation(random, program, slot_of, ended_at, slots, evaluation_slots))
    program.final_ends = np.array(sorted(slot_of.values()), np.int32)
    return program


def _evaluation(
    random: np.random.Generator,
    program: LaneProgram,
    slot_of: dict[tuple[int, int], int],
    ended_at: dict[tuple[int, int], int],
    slots: int,
    count: int,
) -> LaneEvent:
    """An evaluation of `count` lookups: rows in slots are used where they are, the others arrive in evaluation slots, behind `slots`."""
    looked_at = {
        (table, int(random.integers(0, LAYOUTS[table].rows))) for table in random.integers(0, len(LAYOUTS), count).tolist()
    }
    apart = [row for row in sorted(looked_at) if row not in slot_of]
    places = list(range(slots, slots + len(apart)))
    where = dict(zip(apart, places, strict=True)) | slot_of
    rows = sorted(looked_at)
    used = np.array([where[row] for row in rows], np.int32)
    return LaneEvent(None, np.empty(0, np.int32), _arrivals(apart, places, program, ended_at), used, rows)


def _arrivals(
    rows: list[tuple[int, int]], slots: list[int], program: LaneProgram, ended_at: dict[tuple[int, int], int]
) -> Arrivals:
    return Arrivals(
        np.array([table for table, _ in rows], np.int16),
        np.array([program.ordinals.get(row, -1) for row in rows], np.int64),
        np.array([id for _, id in rows], np.int64),
        np.array([program.tags.get(row, 0) for row in rows], np.int32),
        np.array(slots, np.int32),
        np.array([ended_at.get(row, -1) for row in rows], np.int32),
    )


@dataclass(slots=True)
class Truth:
    """The value that every row should have: whole tables in memory."""

    values: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)

    def of(self, rows: list[tuple[int, int]]) -> np.ndarray:
        """float32 [n, WIDTH + STATE_WIDTH]."""
        return np.stack([self.values[row] if row in self.values else initial(row) for row in rows])

    def train(self, rows: list[tuple[int, int]], step: int) -> None:
        """Train rows at a step."""
        new = after_step(self.of(rows), np.array([table for table, _ in rows]), step)
        self.values.update(zip(rows, new, strict=True))


def values(partition: Partition, slots: np.ndarray) -> np.ndarray:
    """weights and state in slots: float32 [n, WIDTH + STATE_WIDTH]."""
    return np.concatenate([partition.weights.numpy()[slots], partition.state.numpy()[slots]], axis=1)


def train_slots(partition: Partition, slots: np.ndarray, step: int) -> None:
    """Train the rows in slots as `Truth.train` does."""
    new = after_step(values(partition, slots), partition.occupants.table[slots], step)
    partition.weights.numpy()[slots] = new[:, :WIDTH]
    partition.state.numpy()[slots] = new[:, WIDTH:]
    partition.mark_trained(slots, step)
