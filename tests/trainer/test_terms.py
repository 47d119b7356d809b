"""Terms: one ends after a step, another begins with other lanes on other trainers, and what comes out is that of an undisturbed training."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import small_terms
from small_terms import LANES, assert_same
from training import Trained, train

from foreload.cache.client.local import LocalStores
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.cluster.coordinator.terms import Change
from foreload.trainer.cluster.messages.facts import contiguous_lanes
from foreload.trainer.compute.choose_kernels import kernels_for
from foreload.trainer.step.program import Trainer
from foreload.trainer.step.term_session import TermSession
from foreload.trainer.step.transport import LocalHub, LocalTransport

PARITY = ((1, 0), (2, 1))
ONE, FOUR, CROSSED, THREE = (0, 0, 0, 0), tuple(contiguous_lanes(LANES, LANES)), (1, 0, 1, 0), (2, 2, 3, 0)
"""Who hosts which lane: one trainer; each its own; two with every other lane; three, lane 0 with one that hosts it in none of the others."""
LAST_STEPS = {
    "the first step": 0,
    "within a segment": 5,
    "before an evaluation": 11,
    "after one": 12,
    "the last step but one": 22,
    "the last step": 23,
}
"""After which step the first term ends."""

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def schedule(tmp_path_factory: pytest.TempPathFactory) -> Schedule:
    return small_terms.schedule(tmp_path_factory.mktemp("terms"))


def _train(schedule: Schedule, stores: LocalStores, **rest: Any) -> Trained:
    return train(small_terms.job(), schedule, stores.urls, **rest)


@pytest.fixture(scope="module")
def undisturbed(schedule: Schedule, servers: LocalStores, one_thread: None) -> Trained:
    """One trainer, one term."""
    outcome = _train(schedule, servers)
    assert [e.step for e in outcome.evaluations] == [11, 23]
    return outcome


def _change(before: tuple[int, ...], after: tuple[int, ...]) -> Change:
    """Return the change by which lanes hosted as in `before` get hosted as in `after`."""
    joining, leaving = sorted(set(after) - set(before)), sorted(set(before) - set(after))
    return Change(tuple(joining), tuple(leaving), after)


CHANGES = [(before, after) for before, after in itertools.product((ONE, FOUR), (ONE, FOUR, CROSSED, THREE)) if before != after]
# Every change, and every place with and without parity.
COVERING = [
    (CHANGES[(i + 3 * j) % len(CHANGES)], last, parity) for i, last in enumerate(LAST_STEPS) for j, parity in enumerate(PARITY)
]
GRID = [
    pytest.param(*change, last, parity, marks=() if (change, last, parity) in COVERING else pytest.mark.full)
    for change, last, parity in itertools.product(CHANGES, LAST_STEPS, PARITY)
]


@pytest.mark.parametrize(("before", "after", "last", "parity"), GRID)
def test_lanes_that_move_between_two_terms_change_nothing(
    schedule: Schedule,
    servers: LocalStores,
    undisturbed: Trained,
    before: tuple[int, ...],
    after: tuple[int, ...],
    last: str,
    parity: tuple[int, int],
) -> None:
    """Four trainers have copies of all lanes, so these move at once; one has none, so copies are made first."""
    step, trainers = LAST_STEPS[last], len(set(before))
    changes = {step: _change(before, after)}
    outcome = _train(schedule, servers, trainers=trainers, copies=trainers, changes=changes, parity=parity)
    assert_same(outcome, undisturbed)
    hosts = [term.hosts for term in outcome.terms]
    assert outcome.terms[1].committed == step
    if before == FOUR:
        assert hosts == [before, after]
    elif step < 22:
        # After a later step there is no time to make copies.
        assert hosts == [before, before, after]


@pytest.mark.parametrize("parity", PARITY)
def test_a_term_after_every_few_steps_changes_nothing(
    schedule: Schedule, servers: LocalStores, undisturbed: Trained, parity: tuple[int, int]
) -> None:
    """Lanes go round between three trainers, and return to who had them."""
    maps = (0, 0, 1, 2), (2, 0, 1, 0), (1, 1, 0, 2)
    steps = (0, 1, 4, 8, 11, 15, 16)
    hosts = list(itertools.islice(itertools.cycle(maps), len(steps) + 1))
    changes = {step: Change(targets=targets) for step, targets in zip(steps, hosts[1:], strict=True)}
    outcome = _train(schedule, servers, trainers=3, copies=3, changes=changes, parity=parity)
    assert_same(outcome, undisturbed)
    assert [term.hosts for term in outcome.terms] == hosts
    assert [term.committed for term in outcome.terms] == [-1, *steps]


def test_a_stop_in_a_later_term_is_gone_on_from(schedule: Schedule, servers: LocalStores, undisturbed: Trained) -> None:
    job, changes = small_terms.job(), {3: _change(FOUR, CROSSED)}
    stopped = train(job, schedule, servers.urls, 4, copies=4, changes=changes, stop_after=lambda step: step == 8)
    assert (stopped.stopped_at, [term.hosts for term in stopped.terms]) == (8, [FOUR, CROSSED])
    assert stopped.digest != undisturbed.digest
    resumed = train(job, schedule, servers.urls, 3, resume=stopped)
    assert [step.loss for step in stopped.steps + resumed.steps] == [step.loss for step in undisturbed.steps]
    assert resumed.digest == undisturbed.digest


def test_no_message_is_left_over_where_training_stops_within_a_segment(schedule: Schedule, servers: LocalStores) -> None:
    transports: list[LocalTransport] = []

    def keep(number: int, trainer: Trainer) -> None:
        assert isinstance(trainer.session.transport, LocalTransport)
        transports.append(trainer.session.transport)

    _train(schedule, servers, trainers=4, stop_after=lambda step: step == 5, break_it=keep)
    assert len(transports) == 4
    assert not transports[0].hub.messages


def test_a_lane_map_names_ranks_of_the_group_and_no_other() -> None:
    first, _ = LocalHub(range(2)).transports()
    with pytest.raises(ValueError, match=r"must name ranks of 0 \.\. 1"):
        TermSession(first, [0, 1, 2], kernels_for("cpu"), 8)
    assert TermSession(first, [1, 1], kernels_for("cpu"), 8).hosted == []
    assert TermSession(first, [1, 0], kernels_for("cpu"), 8).hosted == [1]
    assert not TermSession(first, [1, 0], kernels_for("cpu"), 8).leads
