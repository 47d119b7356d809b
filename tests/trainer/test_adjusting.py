"""What --auto decides: a simulated job whose true speed is known is measured, changed and judged by the very code that a run uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import ceil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreload.trainer.adjusting.adviser import AGREED, Advice, Adviser
from foreload.trainer.adjusting.decision import (
    LEAST_GAIN,
    Costs,
    MoveShard,
    ReplaceTrainer,
    Resize,
    Situation,
    SlowShard,
    Trial,
    decide,
    judged,
    remembered,
    slow_trainer,
)
from foreload.trainer.adjusting.prediction import Ahead, Machine, Measured, predicted
from foreload.trainer.adjusting.size import Size
from foreload.trainer.adjusting.window import Window
from foreload.trainer.compute.reports import StepReport

LANES = 4
LEAST, MOST = Size(1, 1), Size(4, 4)
COSTS = Costs(stored_bytes=1e7, bytes_per_second=1e7, moving_share=0.5, trainer_seconds=1.0, start_seconds=5.0)
WINDOW = 20  # steps
STEPS = 4_000
SAMPLES, ROWS = 1000.0, 3000.0


def ahead(steps: int) -> Ahead:
    """So many steps like those that were measured."""
    return Ahead(np.array([steps]), np.array([SAMPLES]), np.array([ROWS]))


@dataclass
class Job:
    """A job whose steps take what they take: computing is shared by lanes, the store's links by shards, and the cores by all.

    compute: seconds of one trainer with all lanes; link: seconds of all rows over one link; work: seconds of processor time; overhead: what each
    further trainer adds to a step, which is not foreseen.
    """

    compute: float
    link: float
    work: float
    overhead: float = 0.0
    cores: int = 4
    noise: Callable[[], float] = lambda: 1.0
    size: Size = LEAST
    adviser: Adviser = field(default_factory=Adviser)
    steps: int = STEPS
    seconds: float = 0.0
    actions: list[Resize] = field(default_factory=list)
    sizes: list[Size] = field(default_factory=list)

    def step_seconds(self, size: Size) -> float:
        """What a step truly takes."""
        compute = self.compute * ceil(LANES / size.trainers) / LANES
        return max(compute, self.link / size.shards, self.work / self.cores) + self.overhead * (size.trainers - 1)

    def window(self) -> Measured:
        """Train some steps, and measure them."""
        size, true = self.size, self.step_seconds(self.size)
        seconds = true * self.noise()
        compute = self.compute * ceil(LANES / size.trainers) / LANES
        waiting = max(self.link / size.shards - compute, 0.0)
        self.steps -= WINDOW
        self.seconds += WINDOW * true
        return Measured(seconds, compute, self.overhead * (size.trainers - 1), waiting, self.work, SAMPLES, ROWS)

    def situation(self, **given: object) -> Situation:
        """What the adviser sees."""
        known = {
            "machine": Machine(LANES, self.cores),
            "ahead": ahead(self.steps),
            "costs": COSTS,
            "trained_seconds": self.seconds,
        }
        return Situation(**{"now": self.size, "least": LEAST, "most": MOST, **known, **given})  # type: ignore[arg-type]

    def train(self) -> None:
        """Train to the end, doing what is advised at the end of each window."""
        while self.steps > WINDOW:
            action = self.adviser.look(self.window(), self.situation()).action
            if action is not None:
                assert isinstance(action, Resize)
                assert (action.to.trainers == self.size.trainers) != (action.to.shards == self.size.shards)
                self.adviser.acts(action, self.seconds)
                self.seconds += COSTS.of(self.size, action.to)
                self.size = action.to
                self.actions.append(action)
            self.sizes.append(self.size)


SPEEDS = st.floats(0.001, 0.3)


@settings(max_examples=100, deadline=None)
@given(compute=SPEEDS, link=SPEEDS, work=SPEEDS, overhead=st.sampled_from([0.0, 0.002, 0.05]), start=st.tuples(*[st.integers(1, 4)] * 2),
       off=st.lists(st.floats(0.97, 1.03), min_size=7, max_size=7))  # fmt: skip
def test_a_job_ends_with_a_size_that_is_nearly_the_best_of_all(
    compute: float, link: float, work: float, overhead: float, start: tuple[int, int], off: list[float]
) -> None:
    """Whatever is wrong in a prediction, what is tried in vain is undone, and trying costs little."""
    turns = iter(off * 1_000)
    job = Job(compute, link, work, overhead, noise=lambda: next(turns), size=Size(*start))
    first = job.step_seconds(job.size)
    job.train()
    assert all(
        LEAST.trainers <= size.trainers <= MOST.trainers and LEAST.shards <= size.shards <= MOST.shards for size in job.sizes
    )
    assert job.step_seconds(job.size) <= 1.03 * first
    assert job.adviser.spent_seconds <= 0.05 * job.seconds + 2 * COSTS.of(LEAST, MOST) + 0.1 * first * STEPS
    if not overhead:
        best = min(job.step_seconds(Size(t, s)) for t in range(1, 5) for s in range(1, 5))
        worth = STEPS * (job.step_seconds(Size(*start)) - best)
        if worth > 4 * COSTS.of(LEAST, MOST) + 4 * COSTS.until_done(LEAST, MOST):
            assert job.step_seconds(job.size) <= max(1.12 * best, (1 - LEAST_GAIN) * first), (job.sizes[-1], job.actions)


@settings(max_examples=50, deadline=None)
@given(
    link=SPEEDS,
    work=SPEEDS,
    start=st.tuples(*[st.integers(1, 4)] * 2),
    off=st.lists(st.floats(0.97, 1.03), min_size=7, max_size=7),
)
def test_a_job_that_needs_no_change_is_not_changed(link: float, work: float, start: tuple[int, int], off: list[float]) -> None:
    turns = iter(off * 1_000)
    job = Job(1.0, link, work, noise=lambda: next(turns), size=Size(4, start[1]))
    job.compute = max(4.4 * job.link / start[1], 1.1 * work)
    job.train()
    assert not job.actions


def test_both_numbers_grow_where_one_alone_would_gain_nothing() -> None:
    job = Job(compute=0.1, link=0.1, work=0.01, steps=8_000)
    job.train()
    assert job.size == Size(4, 4)
    assert len(job.actions) == 2


def test_a_trial_that_does_not_pay_is_undone_and_not_repeated_until_that_costs_little() -> None:
    job = Job(compute=0.1, link=0.001, work=0.01, overhead=0.09)
    job.train()
    assert job.size == LEAST
    assert [(action.to.trainers, action.trial is not None and action.trial.undoes) for action in job.actions[:2]] == [
        (4, False),
        (1, True),
    ]
    assert len(job.actions) == 2
    assert Size(4, 1) in job.adviser.rejected


def test_what_is_known_of_other_sizes_is_forgotten_once_conditions_change() -> None:
    before = Measured(0.1, 0.1, 0.0, 0.0, 0.05, SAMPLES, ROWS)
    known, rejected = {Size(1, 1): before, Size(2, 1): before}, frozenset({Size(2, 1)})
    same = remembered(known, rejected, Size(1, 1), replace(before, seconds=0.11, compute=0.11), Machine(LANES, 4))
    assert same[0].keys() == known.keys()
    assert same[1] == rejected
    slower = replace(before, seconds=0.2, compute=0.2)
    assert remembered(known, rejected, Size(1, 1), slower, Machine(LANES, 4)) == ({Size(1, 1): slower}, frozenset())
    # Twice the samples take twice as long: nothing has changed.
    larger = replace(before, seconds=0.2, compute=0.2, samples=2 * SAMPLES)
    assert remembered(known, rejected, Size(1, 1), larger, Machine(LANES, 4))[0].keys() == known.keys()


def test_a_trial_is_judged_by_the_work_of_its_own_steps() -> None:
    before = Measured(0.1, 0.1, 0.0, 0.0, 0.05, SAMPLES, ROWS)
    trial = Trial(Size(1, 1), Size(2, 1), before, "")
    half = replace(before, seconds=0.06, compute=0.06, samples=0.5 * SAMPLES)
    assert not judged(trial, half, Machine(LANES, 4)).paid
    assert judged(trial, replace(half, samples=SAMPLES), Machine(LANES, 4)).gain == pytest.approx(0.4)


@pytest.mark.parametrize(("needed", "most", "to"), [(3, 5, 3), (0, 5, 2), (9, 4, 4)])
def test_a_store_that_would_be_full_comes_first(needed: int, most: int, to: int) -> None:
    job = Job(0.1, 0.1, 0.1)
    given = {"full_after": 50, "shards_needed": needed, "most": Size(4, most), "slow_shard": SlowShard(0, 9.0)}
    action = decide(job.situation(**given))
    assert isinstance(action, Resize)
    assert (action.to, action.trial) == (Size(1, to), None)
    assert "full after step 50" in action.reason
    assert decide(job.situation(full_after=50, most=Size(4, 1), slow_shard=None)) is None


def test_a_slow_shard_is_moved_once_two_windows_in_a_row_say_so() -> None:
    job = Job(0.1, 0.001, 0.01, size=Size(4, 3))
    slow = SlowShard(2, 8.0)
    seen = [job.adviser.look(job.window(), job.situation(slow_shard=one)).action for one in (slow, None, slow, slow)]
    assert seen[:3] == [None] * 3
    assert isinstance(seen[3], MoveShard)
    assert (seen[3].shard, AGREED) == (2, 2)


def test_a_change_is_not_judged_while_a_slow_shard_holds_up_the_steps() -> None:
    """More trainers pay, but a shard becomes slow meanwhile. It is moved, and then the change is judged."""
    job, shards = Job(compute=0.1, link=0.001, work=0.01, size=Size(1, 3)), {"least": Size(1, 3), "most": Size(4, 3)}
    action = job.adviser.look(job.window(), job.situation(**shards)).action
    assert isinstance(action, Resize)
    job.adviser.acts(action, job.seconds)
    job.size = action.to
    held_up = replace(job.window(), seconds=1.0, waiting=0.9)
    seen = [job.adviser.look(held_up, job.situation(**shards, slow_shard=SlowShard(2, 8.0))) for _ in range(AGREED)]
    assert [advice.judged for advice in seen] == [None] * AGREED
    assert isinstance(seen[-1].action, MoveShard)
    job.adviser.acts(seen[-1].action, job.seconds)
    after = job.adviser.look(job.window(), job.situation(**shards))
    assert after.judged is not None
    assert after.judged.verdict.paid
    assert after.action is None


@pytest.mark.parametrize(("work", "windows"), [(0.01, 1), (0.2, 2)])
def test_what_plainly_pays_is_done_after_one_window(work: float, windows: int) -> None:
    """More trainers take a quarter of the time, or, since there are four cores, more than half."""
    job = Job(0.1, 0.001, work, size=Size(1, 1))
    seen = [job.adviser.look(job.window(), job.situation()).action for _ in range(windows)]
    assert seen[:-1] == [None] * (windows - 1)
    assert isinstance(seen[-1], Resize)


@pytest.mark.parametrize(
    ("seconds", "steps"), [(1 / 64, 128), (1 / 8, 16), (1 / 4, 10), (1 / 2, 8), (1.0, 4), (1.5, 3), (10.0, 3)]
)
def test_a_window_has_enough_steps_of_enough_seconds_of_every_member(seconds: float, steps: int) -> None:
    window = Window()

    def add(trainer: int) -> None:
        window.add(trainer, StepReport(0, 0, 1, 0.0, 0, 0, 0, 0, seconds, seconds, 0.0, 0.0, 0))

    for _ in range(1000):
        add(1)
    for before in range(steps):
        assert window.is_over((0, 1)) is (before >= steps)
        add(0)
    assert window.is_over((0, 1))
    assert not window.is_warmed_up((0, 1))
    assert Window(reports=window.reports, warm_up_steps=5).is_warmed_up((0, 1))
    assert not Window(reports=window.reports, warm_up_steps=5).is_over((0, 1))


@pytest.mark.parametrize(("seconds", "trainers"), [(10_000.0, 1), (300.0, 2), (150.0, 4), (1.0, 4)])
def test_with_a_deadline_nothing_is_added_that_it_does_not_need(seconds: float, trainers: int) -> None:
    job = Job(compute=0.1, link=0.001, work=0.001)
    action = decide(job.situation(known={Size(1, 1): job.window()}, trained_seconds=10.0, seconds_left=seconds))
    assert action is None or isinstance(action, Resize)
    assert (1 if action is None else action.to.trainers) == trainers


@pytest.mark.parametrize(
    ("compute", "lanes", "slow"),
    [
        ({0: 0.3, 1: 0.3}, {0: 3, 1: 1}, 1),  # three times as long for its only lane
        ({0: 0.3, 1: 0.15}, {0: 3, 1: 1}, None),  # one and a half times
        ({0: 0.2, 1: 0.6}, {0: 2, 1: 2}, None),  # a lane may still leave it
        ({0: 0.1, 1: 0.1, 2: 0.4}, {0: 1, 1: 1, 2: 1}, 2),  # none can
        ({0: 0.4}, {0: 4}, None),
    ],
)
def test_a_slow_trainer_has_given_up_lanes_before_it_is_replaced(
    compute: dict[int, float], lanes: dict[int, int], slow: int | None
) -> None:
    late = slow_trainer(compute, lanes)
    assert (None if late is None else late.trainer) == slow
    if late is not None:
        job = Job(0.1, 0.001, 0.01, size=Size(len(lanes), 1))
        seen = [job.adviser.look(job.window(), job.situation(slow_trainer=late)).action for _ in range(AGREED)]
        assert seen[:-1] == [None]
        assert isinstance(seen[-1], ReplaceTrainer)
        assert decide(job.situation(slow_trainer=late, ahead=ahead(5))) is None


def test_what_a_user_changes_meanwhile_is_not_changed_back() -> None:
    """A trial of two steps is half way when someone asks for another number of trainers."""
    job = Job(compute=0.1, link=0.1, work=0.01, steps=8_000)
    while not job.actions:
        action = job.adviser.look(job.window(), job.situation()).action
        if isinstance(action, Resize):
            job.adviser.acts(action, job.seconds)
            job.actions.append(action)
            job.size = action.to
    assert job.actions[0].trial is not None
    job.adviser.look(job.window(), job.situation(most=job.size))
    job.adviser.trial, job.size = job.actions[0].trial, Size(3, 2)
    assert job.adviser.look(job.window(), job.situation()) == Advice()
    assert job.adviser.trial is None


def test_nothing_is_changed_when_too_few_steps_are_left_to_pay_it_back() -> None:
    job = Job(compute=0.1, link=0.001, work=0.01, steps=100)
    job.train()
    assert not job.actions


@given(
    compute=SPEEDS, waiting=st.floats(0.0, 0.3), rows=st.floats(1.0, 1e4), trainers=st.integers(1, 4), shards=st.integers(1, 4)
)
def test_the_present_size_is_predicted_as_measured(
    compute: float, waiting: float, rows: float, trainers: int, shards: int
) -> None:
    measured = Measured(compute + waiting, compute, 0.0, waiting, compute, SAMPLES, rows)
    now, machine = Size(trainers, shards), Machine(LANES, None)
    work = Ahead(np.array([1]), np.array([SAMPLES]), np.array([rows]))
    # A step takes at most twice its busiest resource: the rest of a longer one is not the steps' own.
    assert predicted(measured, now, now, machine, work)[0] == pytest.approx(
        min(measured.seconds, 2 * max(compute, measured.seconds * measured.waits_for_store))
    )
