"""Copies of lanes on other trainers: after every commit they are what their owners have, and training comes out as without them."""

from __future__ import annotations

from typing import Any

import pytest
import small_terms
from small_terms import LANES, STEPS, assert_same
from training import Trained, train

from foreload.cache.client.local import LocalStores
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.cluster.coordinator.terms import Change

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def schedule(tmp_path_factory: pytest.TempPathFactory) -> Schedule:
    return small_terms.schedule(tmp_path_factory.mktemp("copies"))


def _train(schedule: Schedule, stores: LocalStores, **rest: Any) -> Trained:
    return train(small_terms.job(), schedule, stores.urls, **rest)


@pytest.fixture(scope="module")
def undisturbed(schedule: Schedule, servers: LocalStores, one_thread: None) -> Trained:
    """One trainer, without copies."""
    return _train(schedule, servers)


@pytest.mark.parametrize("parity", [(1, 0), (2, 1)])
@pytest.mark.parametrize(("trainers", "copies"), [(2, 2), (3, 2), (4, 2), (4, 3)])
def test_copies_are_what_their_owners_have_and_change_nothing(
    schedule: Schedule, servers: LocalStores, undisturbed: Trained, trainers: int, copies: int, parity: tuple[int, int]
) -> None:
    outcome = _train(schedule, servers, trainers=trainers, copies=copies, parity=parity)
    assert_same(outcome, undisturbed)
    assert outcome.compared == STEPS * LANES * (copies - 1)


@pytest.mark.parametrize("last", [0, 5, 11, 16])
def test_copies_are_seeded_where_a_stopped_training_goes_on(
    schedule: Schedule, servers: LocalStores, undisturbed: Trained, last: int
) -> None:
    job = small_terms.job()
    stopped = train(job, schedule, servers.urls, 2, stop_after=lambda step: step == last, copies=2)
    assert stopped.stopped_at == last
    assert stopped.compared == (last + 1) * LANES
    outcome = train(job, schedule, servers.urls, 3, resume=stopped, copies=3)
    assert outcome.digest == undisturbed.digest
    assert [step.loss for step in stopped.steps + outcome.steps] == [step.loss for step in undisturbed.steps]
    assert outcome.compared == (STEPS - last - 1) * LANES * 2


def test_copies_follow_lanes_that_move_between_terms(schedule: Schedule, servers: LocalStores, undisturbed: Trained) -> None:
    hosts = (0, 0, 1, 1), (1, 2, 0, 0), (0, 1, 2, 3)
    changes = {3: Change(joining=(2,), targets=hosts[1]), 13: Change(joining=(3,), targets=hosts[2])}
    outcome = _train(schedule, servers, trainers=2, changes=changes, copies=2)
    assert_same(outcome, undisturbed)
    assert set(hosts) <= {term.hosts for term in outcome.terms}
    assert outcome.compared > (STEPS - 4) * LANES
