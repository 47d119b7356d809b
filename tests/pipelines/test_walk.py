"""Going through a schedule lane by lane says of its steps what going through them one after the other does, wherever it is cut."""

from __future__ import annotations

import numpy as np
import pytest

from foreload.pipelines import prepare
from foreload.pipelines.schedule.reader import Schedule
from foreload.pipelines.schedule.walk import walk


@pytest.fixture(scope="module")
def schedule(tmp_path_factory: pytest.TempPathFactory) -> Schedule:
    """Of two lanes and several segments, with evaluations amid them."""
    out = tmp_path_factory.mktemp("schedule")
    options = ("--batch-size=50", "--lanes=2", "--slots=min", "--epochs=2", "--eval-fraction=0.2", "--eval-every=7")
    prepare.run(["--format=synthetic", "--rows=1500", "--table-rows=80", "--segment-bytes=20000", *options, f"--out={out}"])
    return Schedule(out)


@pytest.mark.parametrize(("after", "until"), [(-1, None), (4, [30]), (3, [9, 10, 41])])
def test_parts_are_the_steps_one_after_the_other(schedule: Schedule, after: int, until: list[int] | None) -> None:
    bounds = until or [schedule.header.end_step - 1]
    steps = [event for event in schedule.events() if event.kind == "train" and after < event.step <= bounds[-1]]
    for lane in range(2):
        parts = list(walk(schedule, lane, after, until))
        assert [step for part in parts for step in range(part.first, part.last + 1)] == [event.step for event in steps]
        assert set(bounds) <= {part.last for part in parts}
        moves = [schedule.lane(event, lane) for event in steps]
        for name, of_steps in (("slots", [m.slots for m in moves]), ("arrival_id", [m.arrivals.id for m in moves])):
            assert np.array_equal(np.concatenate([part.values(name) for part in parts]), np.concatenate(of_steps))
            assert (
                np.concatenate([part.steps(name) for part in parts]).tolist()
                == np.repeat([event.step for event in steps], [len(values) for values in of_steps]).tolist()
            )
        counts = [(len(m.slots), len(m.arrivals), np.count_nonzero(m.arrivals.tag), len(m.ends)) for m in moves]
        assert np.concatenate([part.counts() for part in parts], axis=1).T.tolist() == [list(of_step) for of_step in counts]


def test_rows_sit_in_their_slots_from_their_arrival_to_their_end(schedule: Schedule) -> None:
    for lane in range(2):
        used, ended = (np.full(schedule.header.slots[lane], -1) for _ in range(2))
        found: dict[str, list[int]] = {"slots": [], "ends": []}
        for part in walk(schedule, lane):
            found["slots"] += part.occupants("slots", used, part.values("arrival_id")).tolist()
            found["ends"] += part.occupants("ends", ended, part.values("arrival_id")).tolist()
        expected: dict[str, list[int]] = {"slots": [], "ends": []}
        sits: dict[int, int] = {}
        for event in schedule.events():
            if event.kind == "train":
                moves = schedule.lane(event, lane)
                expected["ends"] += [sits[slot] for slot in moves.ends.tolist()]
                sits.update(zip(moves.arrivals.slot.tolist(), moves.arrivals.id.tolist(), strict=True))
                expected["slots"] += [sits[slot] for slot in moves.slots.tolist()]
        assert found == expected
