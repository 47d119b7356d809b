"""A brute-force twin of the oracle: what docs/definitions.md says of owners, ordinals, tags and masks, in dicts, and a checker of schedules.

`check_program` runs through a compiled schedule as a trainer would, with a dict for every partition and for the store, and fails at the first
thing that is not so. It takes events and lane events as foreload.pipelines.schedule.reader gives them, and uses nothing else of the project.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from reference_data import Placement, Row, owner


@dataclass(frozen=True, slots=True)
class Step:
    """One event's accesses.

    kind: train or evaluate; slices: per lane the places of its samples in the batch; lookups: per lane the rows of its slice, in order; order:
    the distinct rows by first lookup, samples in the batch's order.
    """

    kind: str
    slices: tuple[tuple[int, ...], ...]
    lookups: tuple[tuple[Row, ...], ...]
    order: tuple[Row, ...]

    def users(self, row: Row) -> int:
        """Bit v: the slice of lane v uses the row."""
        return sum(1 << lane for lane, rows in enumerate(self.lookups) if row in rows)


@dataclass(slots=True)
class Trained:
    """What is known of a row that was trained."""

    lane: int
    ordinal: int
    tag: int
    last_end: int = -1
    """Boundary at which its residency last ended; -1: stored before the schedule."""


@dataclass(frozen=True, slots=True)
class Occupant:
    """Who sits in a slot. stored: tag of the version in the store, 0 for none."""

    row: Row
    ordinal: int
    tag: int
    stored: int


@dataclass(slots=True)
class Outcome:
    """What the checker saw.

    before: per event, per lane, slot -> occupant as it stood before the event; ordinals: per event, (lane, table) -> ordinals given before.
    """

    rows: dict[Row, Trained]
    arrivals: int = 0
    initial: int = 0
    write_backs: int = 0
    rows_used: int = 0
    before: list[list[dict[int, Occupant]]] = field(default_factory=list)
    ordinals: list[dict[tuple[int, int], int]] = field(default_factory=list)


def steps_of(kind: str, samples: Sequence[Sequence[Row]], batch_size: int, placement: Placement) -> list[Step]:
    """Consecutive samples, each the rows that it looks up, cut into steps and slices; evaluation steps are placed in order."""
    steps = []
    for first in range(0, len(samples), batch_size):
        batch = samples[first : first + batch_size]
        slices = placement.slices(batch) if kind == "train" else Placement(placement.lanes, "order").slices(batch)
        lookups = tuple(tuple(row for place in places for row in batch[place]) for places in slices)
        order = tuple(dict.fromkeys(row for rows in batch for row in rows))
        steps.append(Step(kind, tuple(map(tuple, slices)), lookups, order))
    return steps


def own_rows(program: Sequence[Step], lane: int, rows: dict[Row, Trained]) -> list[list[Row]]:
    """Per training step, the rows that a lane owns; `rows` as check_program's outcome has it."""
    return [[row for row in step.order if rows[row].lane == lane] for step in program if step.kind == "train"]


def check_program(
    events: Sequence[Any],
    lane_event: Callable[[Any, int], Any],
    program: Sequence[Step],
    slots: Sequence[int],
    evaluation_slots: Sequence[int],
    occupied: Sequence[int],
    first_step: int = 0,
    parent: dict[Row, Trained] | None = None,
) -> Outcome:
    """Run through a schedule's events and assert every invariant against the accesses it was compiled from.

    program: one entry per event; slots, evaluation_slots: per lane; first_step: the first training step's number; parent: the rows of the
    schedule it continues, all of them stored.
    """
    lanes = len(slots)
    run = _Run(lanes, {row: Trained(t.lane, t.ordinal, t.tag) for row, t in (parent or {}).items()}, slots, evaluation_slots)
    training = [step for step in program if step.kind == "train"]
    assert [event.kind for event in events] == [step.kind for step in program]
    trained_steps = 0
    for event, step in zip(events, program, strict=True):
        parts = [lane_event(event, lane) for lane in range(lanes)]
        run.outcome.before.append([dict(partition) for partition in run.partitions])
        run.outcome.ordinals.append(dict(run.given))
        if step.kind == "train":
            number = first_step + trained_steps
            assert event.step == number, "training steps are numbered without gaps"
            following = training[trained_steps + 1] if trained_steps + 1 < len(training) else None
            run.train(number, step, following, parts)
            trained_steps += 1
        else:
            run.evaluate(first_step + trained_steps, step, parts)
    for lane in range(lanes):
        assert list(range(occupied[lane])) == sorted(run.partitions[lane]), (
            "the end of a schedule ends every residency, each once"
        )
        run.outcome.write_backs += occupied[lane]
    return run.outcome


class _Run:
    """The state of a run through a schedule: what every partition holds, and what is known of every row."""

    def __init__(self, lanes: int, rows: dict[Row, Trained], slots: Sequence[int], evaluation_slots: Sequence[int]) -> None:
        self.lanes, self.slots, self.evaluation_slots = lanes, slots, evaluation_slots
        self.outcome = Outcome(rows)
        self.rows = rows
        # (lane, table) -> how many ordinals are given.
        self.given: dict[tuple[int, int], int] = {}
        for place in [(known.lane, row[0]) for row, known in rows.items()]:
            self.given[place] = self.given.get(place, 0) + 1
        self.partitions: list[dict[int, Occupant]] = [{} for _ in range(lanes)]

    def train(self, number: int, step: Step, following: Step | None, parts: Sequence[Any]) -> None:
        """One training step, with the boundary before it."""
        order = step.order
        known = {row: self.rows.get(row) for row in order}
        for row in order:
            if row not in self.rows:
                lane = owner(row, [lane for lane in range(self.lanes) if step.users(row) >> lane & 1])
                ordinal = self.given.get((lane, row[0]), 0)
                self.given[lane, row[0]] = ordinal + 1
                self.rows[row] = Trained(lane, ordinal, 0)
        for lane, part in enumerate(parts):
            self._boundary(number, lane, part, known)
            partition = self.partitions[lane]
            owned = [row for row in order if self.rows[row].lane == lane]
            assert len(part.slots) == len(part.users) == len(part.early) == len(part.next_users) == len(owned)
            used = [int(slot) for slot in part.slots]
            assert [partition[slot].row if slot in partition else None for slot in used] == owned, (
                "every row used sits in the slot named"
            )
            for place, row in enumerate(owned):
                assert int(part.users[place]) == step.users(row)
                assert int(part.next_users[place]) == (following.users(row) if following else 0)
                critical = (self.rows[row].tag == number and number > 0) or self._left_at(row, number - 1, part)
                assert bool(part.early[place]) == (not critical), (
                    "early: not changed by the step before, nor gone at its boundary"
                )
            for slot, row in zip(used, owned, strict=True):
                was = partition[slot]
                partition[slot] = Occupant(row, was.ordinal, number + 1, was.stored)
            self.outcome.rows_used += len(owned)
        self._check_index(step, parts, order, {row: self.rows[row].lane for row in order})
        for row in order:
            self.rows[row].tag = number + 1

    def _left_at(self, row: Row, boundary: int, part: Any) -> bool:
        """Whether a row arrives now after it left a slot at that boundary."""
        left = [
            int(a)
            for t, i, a in zip(part.arrivals.table, part.arrivals.id, part.arrivals.after, strict=True)
            if (int(t), int(i)) == row
        ]
        return self.rows[row].tag > 0 and boundary >= 0 and left == [boundary]

    def _boundary(self, number: int, lane: int, part: Any, known: dict[Row, Trained | None]) -> None:
        """The residencies that end, and then the rows that arrive, before a training step."""
        partition = self.partitions[lane]
        for slot in map(int, part.ends):
            assert slot in partition, "a residency ends once, in an occupied slot"
            left = partition.pop(slot)
            assert left.tag > left.stored, "a row that is written back was changed"
            assert left.row not in known, "no row that the step uses leaves before it"
            self.rows[left.row].last_end = number
            self.outcome.write_backs += 1
        for slot, row, ordinal, tag, after in _arrivals(part):
            assert 0 <= slot < self.slots[lane], "training rows sit in training slots"
            assert slot not in partition, "no slot holds two rows"
            assert row in known, "only rows that the step uses arrive"
            assert row not in [occupant.row for occupant in partition.values()], "no row sits in two slots"
            before = known[row]
            now = self.rows[row]
            assert now.lane == lane
            assert ordinal == now.ordinal
            assert tag == (before.tag if before else 0), "initial or stored, with the tag of its last change"
            assert after == (before.last_end if before else -1), "a fetch names the boundary of its row's last write-back"
            assert after < number, "which precedes it"
            partition[slot] = Occupant(row, ordinal, tag, tag)
            self.outcome.arrivals += 1
            self.outcome.initial += tag == 0

    def evaluate(self, boundary: int, step: Step, parts: Sequence[Any]) -> None:
        """One evaluation step; `boundary`: number of the next training step, whose boundary has not been passed."""
        order = step.order
        lane_of: dict[Row, int] = {}
        for lane, part in enumerate(parts):
            assert not len(part.ends), "evaluation ends no residency"
            view = dict(self.partitions[lane])
            for slot, row, ordinal, tag, after in _arrivals(part):
                assert self.slots[lane] <= slot < self.slots[lane] + self.evaluation_slots[lane], (
                    "evaluation has slots of its own"
                )
                assert slot not in view, "no slot holds two rows"
                assert row in order
                assert row not in [occupant.row for occupant in view.values()]
                known = self.rows.get(row)
                if known is None:
                    assert (ordinal, tag, after) == (-1, 0, -1), "a row that was never trained is initial, and has no ordinal"
                else:
                    assert (ordinal, tag, after) == (known.ordinal, known.tag, known.last_end)
                    assert after < boundary
                view[slot] = Occupant(row, ordinal, tag, tag)
            used = [view[int(slot)] for slot in part.slots]
            for place, occupant in enumerate(used):
                known = self.rows.get(occupant.row)
                assert occupant.tag == (known.tag if known else 0), "evaluation sees the newest version"
                assert occupant.row not in lane_of, "a row has one lane"
                assert known is None or known.lane == lane
                assert int(part.users[place]) == step.users(occupant.row)
                lane_of[occupant.row] = lane
            assert [o.row for o in used] == [row for row in order if lane_of.get(row) == lane], (
                "rows stand in order of first lookup"
            )
        assert set(lane_of) == set(order)
        self._check_index(step, parts, order, lane_of)

    def _check_index(self, step: Step, parts: Sequence[Any], order: Sequence[Row], lane_of: dict[Row, int]) -> None:
        """Every lookup's place among its lane's local rows: by owner lane, then by first lookup in the step."""
        for lane, part in enumerate(parts):
            used = set(step.lookups[lane])
            local = [row for owner_lane in range(self.lanes) for row in order if lane_of[row] == owner_lane and row in used]
            assert [local[int(place)] for place in part.index] == list(step.lookups[lane])


def _arrivals(part: Any) -> list[tuple[int, Row, int, int, int]]:
    """(slot, row, ordinal, tag, after) of every arrival."""
    a = part.arrivals
    columns = zip(a.slot, a.table, a.id, a.ordinal, a.tag, a.after, strict=True)
    return [
        (int(slot), (int(table), int(i)), int(ordinal), int(tag), int(after)) for slot, table, i, ordinal, tag, after in columns
    ]
