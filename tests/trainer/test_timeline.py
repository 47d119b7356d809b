"""The timeline of a training: gaps between steps, and throughput."""

from __future__ import annotations

import math

import numpy as np
import pytest
from small_job import step_report

from foreload.trainer.compute.reports import StepReport
from foreload.trainer.run.timeline import StepTimes, Timeline

STEP = 0.5
"""Seconds that a step takes."""
GAP = 3.0
"""Seconds from one step's end to the next where something holds it up."""


def told(step: int, at: float, epoch: int = 0) -> tuple[StepReport, float]:
    """What a trainer tells of a step of STEP seconds that ended at this moment."""
    return step_report(step, epoch=epoch, seconds=STEP), at


def steady(count: int, begin: float = 0.0) -> Timeline:
    """Steps of STEP seconds and 100 samples each, one after the other."""
    ended = begin + STEP * np.arange(1, count + 1)
    return Timeline(ended, np.full(count, STEP), np.full(count, 100))


def joined(*parts: Timeline) -> Timeline:
    return Timeline(*(np.concatenate([getattr(part, name) for part in parts]) for name in ("ended", "took", "samples")))


def test_a_step_has_ended_when_the_last_trainer_has_ended_it() -> None:
    times = StepTimes()
    for event in (told(7, 10.0), told(8, 11.0), told(7, 10.25), told(8, 11.5)):
        times.note(*event)
    assert times.timeline.ended.tolist() == [10.25, 11.5]
    assert times.timeline.took.tolist() == [STEP, 1.25]


def test_evaluation_between_epochs_is_no_step_s_time() -> None:
    times = StepTimes()
    for event in (told(0, 1.0), told(1, 1.5), told(2, 9.0, epoch=1), told(3, 9.5, epoch=1)):
        times.note(*event)
    assert times.timeline.took.tolist() == [STEP] * 4


def test_the_longest_gap_begins_with_the_fault_and_may_end_after_the_time_asked_for() -> None:
    pause = Timeline(np.array([10 * STEP + GAP]), np.array([GAP]), np.array([100]))
    timeline = joined(steady(10), pause, steady(10, 10 * STEP + GAP))
    injected = 10 * STEP + 1.0
    assert timeline.longest_gap(10 * STEP, 20.0) == pytest.approx(GAP)
    assert timeline.longest_gap(injected, injected) == pytest.approx(GAP - 1.0)
    assert timeline.longest_gap(0.0, 2.0) == pytest.approx(STEP)
    assert math.isnan(timeline.longest_gap(100.0, 200.0))


def test_throughput_cuts_steps_at_the_ends_of_a_span_and_is_not_told_of_too_few() -> None:
    timeline = joined(steady(20), Timeline(np.array([14.0]), np.array([4.0]), np.array([100])))
    assert timeline.throughput((0.25, 9.75)) == pytest.approx(200)
    # 10 whole steps, and half of the samples of the slow one in half of its time.
    assert timeline.throughput((5.0, 12.0)) == pytest.approx((1000 + 50) / 7)
    assert math.isnan(timeline.throughput((0.0, 1.0)))
    assert timeline.throughput((0.0, 1.0), (2.0, 4.0)) == pytest.approx(200)


def test_bins_hold_all_samples() -> None:
    timeline = joined(steady(20), Timeline(np.array([14.0]), np.array([4.0]), np.array([100])))
    edges, rates = timeline.bins(0.3)
    assert (rates * np.diff(edges)).sum() == pytest.approx(timeline.samples.sum())
