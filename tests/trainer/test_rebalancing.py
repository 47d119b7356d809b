"""`--rebalance`: lanes leave a trainer that is persistently slower than the others, and the model does not change."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from command_line import main
from held import Hold
from small_call import small_call
from small_job import arguments, summary, synthetic_schedule
from test_changed_terms import until_done
from test_membership import Coordinator

from foreload.trainer.cluster.coordinator.membership import Membership
from foreload.trainer.cluster.coordinator.scaling import GAIN, WINDOW, WINDOWS, Rebalancing, better_hosts
from foreload.trainer.cluster.coordinator.terms import Change, first_term
from foreload.trainer.compute.reports import StepReport
from foreload.trainer.run.event_log import read_events


def longest(hosts: tuple[int, ...], each: dict[int, float]) -> float:
    """The time of the trainer that computes longest, given what a lane takes each of them."""
    return max(hosts.count(trainer) * each[trainer] for trainer in each)


@pytest.mark.parametrize("lanes", range(2, 9))
@pytest.mark.parametrize("speeds", list(itertools.product((1.0, 1.5, 4.0), repeat=3)))
def test_no_placement_of_the_lanes_would_be_better(lanes: int, speeds: tuple[float, ...]) -> None:
    each = dict(enumerate(speeds[: min(lanes, 3)]))
    hosts = first_term(1, range(len(each)), lanes, 1, -1).hosts
    seconds = {trainer: hosts.count(trainer) * each[trainer] for trainer in each}
    targets = better_hosts(hosts, [()] * lanes, seconds)
    placements = [placed for placed in itertools.product(each, repeat=lanes) if set(placed) == set(each)]
    best = min(longest(placed, each) for placed in placements)
    if targets is None:
        assert best > (1 - GAIN) * longest(hosts, each)
    else:
        assert longest(targets, each) == best
        assert set(targets) == set(each)


def test_lanes_go_where_there_are_copies_and_the_first_one_stays() -> None:
    held = [(1,), (1,), (2,), (), (), ()]
    targets = better_hosts((0, 0, 0, 0, 1, 2), held, {0: 4.0, 1: 0.5, 2: 2.0})
    assert targets == (0, 1, 0, 1, 1, 2)


@pytest.mark.parametrize("copies", [1, 2])
def test_lanes_that_are_to_move_have_copies_first(copies: int) -> None:
    first = first_term(1, range(2), 4, copies, 9)
    targets = (0, 1, 1, 1)
    terms = until_done(first, Change(targets=targets), copies)
    assert terms[-1].hosts == targets
    assert len(terms) == (3 if copies == 1 else 2)


class Slow:
    """A job of two trainers with four lanes of which the steps are told, each after what its trainers took to compute."""

    def __init__(self, tmp_path: Path) -> None:
        self.job = Coordinator(2)
        self.job.ready()
        self.told: list[str] = []
        self.events = tmp_path
        call = small_call(tmp_path, step=7, rebalance=True)
        call.say = self.told.append
        self.rebalancing = Rebalancing(call)
        self.rebalancing.poll(self.members)

    @property
    def members(self) -> Membership:
        return self.job.of

    def window(self, *seconds: float) -> tuple[int, ...] | None:
        """Steps as many as one look takes; returns where lanes are to go then."""
        for _ in range(round(WINDOW.total_seconds() / max(seconds))):
            for trainer, took in enumerate(seconds):
                self.rebalancing.add(trainer, StepReport(0, 0, 1, 0.0, 0, 0, 0, 0, max(seconds), took, 0.0, 0.0, 0))
            self.rebalancing.poll(self.members)
        return self.members.change.targets


def test_only_who_is_slow_for_long_gives_lanes_away(tmp_path: Path) -> None:
    slow = Slow(tmp_path)
    assert slow.members.term.hosts == (0, 0, 1, 1)
    # For a while; then the other one; then at last the same one again and again.
    looks = [(0.5, 0.25)] * (WINDOWS - 1) + [(0.25, 0.25)] + [(0.25, 0.5)] * (WINDOWS - 1) + [(0.5, 0.25)] * (WINDOWS - 1)
    assert {slow.window(*seconds) for seconds in looks} == {None}
    assert slow.window(0.5, 0.25) == (0, 1, 1, 1)
    cause = "trainer 0 computes 500.0 ms a step, the others 250.0 at most"
    assert slow.told == [f"{cause}; lanes move: 1 from trainer 0 to trainer 1"]
    assert slow.rebalancing.moves == [{"step": 7, "lanes": [0, 1, 1, 1], "cause": cause}]
    assert [(event["kind"], event["cause"]) for event in read_events(slow.events)] == [("rebalanced", cause)]
    # It is told once, and asked for as long as the term is.
    assert slow.window(0.5, 0.25) == (0, 1, 1, 1)
    assert len(slow.told) == 1


SLOW_MODEL = """
import os, time
from foreload.trainer.models.dlrm import DLRM

class Model(DLRM):
    def forward(self, *inputs):
        if os.environ.get("FORELOAD_TRAINER") == "1" and os.path.exists("{slow}"):
            time.sleep(0.03)
        return super().forward(*inputs)
"""


@pytest.mark.full  # a trainer is slow for a quarter of a minute
def test_a_slow_trainer_keeps_a_lane_and_the_model_is_the_same(tmp_path: Path, hold: Hold) -> None:
    schedule = synthetic_schedule(tmp_path, 3000 * 64, lanes=4, slots=500, further="--batch-size 64")
    slow = tmp_path / "slow"
    (tmp_path / "slow_model.py").write_text(SLOW_MODEL.format(slow=slow))
    model = ("--model", f"{tmp_path / 'slow_model.py'}:Model")
    undisturbed, run = tmp_path / "undisturbed", tmp_path / "run"
    assert main(arguments(schedule, undisturbed, "--store", "local:1", "--digest", *model)) == 0
    slow.touch()
    # Segment after segment is published until the lane has moved, however many steps that takes on this machine.
    job = hold(arguments(schedule, run, "--store", "local:1", "--trainers", "2", "--rebalance", "--digest", *model))
    job.train_until(lambda reported: tuple(reported.lanes) == (0, 0, 1, 0))
    slow.unlink()
    status, _, err = job.end()
    assert status == 0, err
    assert summary(run)["digest"] == summary(undisturbed)["digest"]
    told, *_ = summary(run)["rebalanced"]
    assert told["lanes"] == [0, 0, 1, 0]
    assert told["cause"].startswith("trainer 1 computes ")
    assert told["cause"] in err
