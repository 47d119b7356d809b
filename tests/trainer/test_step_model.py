"""The counts that a schedule states, those for other slots, and the model of step time that is fitted to runs."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from belady import belady_arrivals
from clicks import Clicks

from foreload.pipelines.compiler.other_slots import LaneUses, count_moves, lane_uses
from foreload.pipelines.errors import SlotsError
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.cluster.messages.facts import contiguous_lanes
from foreload.trainer.resources.features import lane_map, step_counts, with_slots
from foreload.trainer.resources.step_model import Load, Observation, Setup, StepModel, loads_of, non_negative_fit


def test_counts_are_those_that_the_schedule_states(clicks: Clicks) -> None:
    schedule = Schedule(clicks.schedule)
    counts, told = step_counts(schedule), dict[str, Any](schedule.manifest["counts"])
    assert counts.steps == told["training_steps"]
    totals = {"rows_used": counts.used, "arrivals": counts.arrived, "stored": counts.fetched}
    assert {name: int(values.sum()) for name, values in totals.items()} == {name: told[name] for name in totals}
    assert int(counts.ended.sum()) + counts.occupied == told["write_backs"]
    events = [event for event in schedule.events() if event.kind == "train"]
    for event in events[:: len(events) // 5]:
        moves = [schedule.lane(event, lane) for lane in range(2)]
        assert counts.used[event.step].tolist() == [of.slots.size for of in moves]
        assert counts.fetched[event.step].tolist() == [int((of.arrivals.tag != 0).sum()) for of in moves]
        assert counts.lookups[event.step] == sum(of.index.size for of in moves)
    # Two lanes: what another trainer uses of a lane is what the other lane uses of it.
    shared = sum(int((of.users & np.uint8(2 - lane)) .astype(bool).sum()) for event in events for lane, of in enumerate(
        schedule.lane(event, lane) for lane in range(2)))  # fmt: skip
    assert counts.exchanged[0].rows_out == 0
    assert counts.exchanged[1].rows_out == counts.exchanged[1].rows_back == pytest.approx(shared / counts.used.sum(), rel=0.1)


def test_counts_for_other_slots_are_those_of_a_schedule_prepared_with_them(clicks: Clicks) -> None:
    schedule = Schedule(clicks.schedule)
    accesses = [lane_uses(schedule, lane) for lane in range(2)]
    stated = step_counts(schedule)
    again = with_slots(stated, accesses, max(schedule.header.slots))
    assert schedule.manifest["lookahead"]["exact"]
    assert np.array_equal(again.arrived, stated.arrived)
    assert np.array_equal(again.fetched, stated.fetched)
    assert np.array_equal(again.ended, stated.ended)
    assert again.occupied == stated.occupied
    for slots in (max(one.least_slots for one in accesses), 60, 10_000):
        for one in accesses:
            steps = [one.rows[a:b].tolist() for a, b in zip(one.starts, one.starts[1:], strict=False)]
            assert count_moves(one, slots).arrived.sum() == belady_arrivals(steps, slots)
    with pytest.raises(SlotsError, match="largest step"):
        count_moves(accesses[0], accesses[0].least_slots - 1)


def test_rows_of_a_schedule_before_are_fetched_when_they_first_arrive() -> None:
    accesses = LaneUses(
        np.array([0, 1, 0, 2, 1], np.int32), np.array([0, 2, 4, 5]), np.array([True, False, True]), np.zeros(3, np.int16)
    )
    counted = count_moves(accesses, 2)
    assert counted.arrived.tolist() == [2, 1, 1]
    assert counted.fetched.tolist() == [1, 0, 1]
    assert (counted.ended.tolist(), counted.occupied) == ([0, 1, 1], 2)


@pytest.mark.parametrize("trainers", [1, 2, 3])
def test_lanes_are_where_training_has_them(trainers: int) -> None:
    assert lane_map(4, trainers).tolist() == contiguous_lanes(4, trainers)


def test_the_fit_is_the_best_without_negative_terms() -> None:
    random = np.random.default_rng(1)
    terms = random.random((30, 5))
    values = terms @ np.array([2.0, 0.0, 1.0, -3.0, 0.5]) + 0.01 * random.standard_normal(30)
    fitted = non_negative_fit(terms, values)
    # The conditions of Karush, Kuhn and Tucker: no term can be raised, or lowered where it is not 0, to any good.
    gradient = terms.T @ (values - terms @ fitted)
    assert (fitted >= 0).all()
    assert (gradient <= 1e-8).all()
    assert np.abs(gradient[fitted > 0]).max() < 1e-8
    assert non_negative_fit(np.zeros((3, 2)), np.ones(3)).tolist() == [0, 0]


def made_up(setup: Setup, load: Load) -> Observation:
    """What a machine would take whose time is a sum of such terms."""
    thread = 1.0 + 0.01 * load.samples * setup.share + 0.0004 * load.used * setup.share
    background = 0.002 * load.fetched + 0.001 * load.ended * (1 + setup.r / setup.k) + 0.1 * setup.shards
    processor = setup.trainers * thread + background
    wanted = np.maximum(processor / setup.cores - thread, 0)
    waits = 0.3 + wanted + 1e-6 * load.sent / setup.trainers + 0.5 * (setup.trainers > 1)
    return Observation(setup, load, thread + waits, thread, processor)


def test_what_was_not_run_is_predicted_within_the_interval() -> None:
    everything = []
    for place, (trainers, shards, r, fetched) in enumerate(product((1, 2, 4), (1, 3, 5), (0, 1), (50.0, 400.0, 900.0))):
        if r and shards < 3:
            continue
        setup = Setup(trainers, 1, min(trainers, 2), shards, 2 if r else 1, r, lanes=4, dense=1000, cores=2)
        used = np.array([4000.0 + 100 * (place % 7)])
        sent = used * 100.0 * (trainers - 1)
        load = Load(np.array([512.0]), used, np.array([fetched + 100]), np.array([fetched]), np.array([fetched + 50]), sent)
        everything.append(made_up(setup, load))
    np.random.default_rng(0).shuffle(everything)
    model = StepModel(everything[::3])
    rest = [one for place, one in enumerate(everything) if place % 3]
    errors = [abs(model.predict(one.setup, one.load).total[0] / one.total[0] - 1) for one in rest]
    assert max(errors) < 0.1
    assert 0 < model.margin < 0.2
    assert all(value >= 0 for terms in model.coefficients.values() for value in terms.values())
    of_two = StepModel(everything[:2])
    assert of_two.margin >= 0.3, "two runs tell little"


def test_loads_of_a_schedule_add_up(clicks: Clicks) -> None:
    counts = step_counts(Schedule(clicks.schedule))
    setup = Setup(2, 1, 2, 3, 2, 1, lanes=2, dense=50, cores=2)
    load, steps = loads_of(counts, setup, 4, 4, 50, windows=7)
    assert int(steps.sum()) == counts.steps
    assert float(load.fetched @ steps) == pytest.approx(counts.fetched.sum())
    assert float(load.sent @ steps) == pytest.approx(counts.trainers_bytes(2, 4, 4, 50, 2).sum())
    assert not loads_of(counts, replace(setup, trainers=1), 4, 4, 50)[0].sent.any()
