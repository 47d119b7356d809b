"""Trainers join and leave while others train, in one process: what comes out is that of an undisturbed training, in the store, too."""

from __future__ import annotations

from typing import Any

import pytest
import small_terms
from small_terms import assert_same
from training import Death, Trained, train

from foreload.cache.client.local import LocalStores
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.cluster.coordinator.terms import Change
from foreload.trainer.cluster.messages.facts import Term

CODES = ((1, 0), (2, 1))
JOINS = Change(joining=(1,)), Change(joining=(2, 3))
LEAVES = Change(leaving=(2, 3)), Change(leaving=(1,))

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def schedule(tmp_path_factory: pytest.TempPathFactory) -> Schedule:
    return small_terms.schedule(tmp_path_factory.mktemp("scaled"))


@pytest.fixture(scope="module")
def undisturbed(schedule: Schedule, servers: LocalStores, one_thread: None) -> dict[tuple[int, int], Trained]:
    """One trainer, by parity."""
    return {code: train(small_terms.job(), schedule, servers.urls, parity=code) for code in CODES}


def _scale(
    schedule: Schedule,
    stores: LocalStores,
    undisturbed: dict[tuple[int, int], Trained],
    trainers: int,
    changes: dict[int, Change],
    **rest: Any,
) -> list[Term]:
    outcome = train(small_terms.job(), schedule, stores.urls, trainers, changes=changes, **rest)
    print("\n".join(map(str, outcome.terms)))
    expected = undisturbed[rest.get("parity", (1, 0))]
    assert_same(outcome, expected)
    assert outcome.stored == expected.stored
    return outcome.terms


def _hosting(terms: list[Term]) -> list[int]:
    """How many trainers host lanes, term by term, without repetitions."""
    counts = [len(set(term.hosts)) for term in terms]
    return [count for place, count in enumerate(counts) if not place or counts[place - 1] != count]


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize(
    ("first", "changes", "hosting"),
    [
        pytest.param(1, {1: JOINS[0], 11: JOINS[1]}, [1, 2, 4], id="up"),
        pytest.param(4, {1: LEAVES[0], 12: LEAVES[1]}, [4, 2, 1], id="down"),
        pytest.param(1, {1: JOINS[0], 6: JOINS[1], 11: LEAVES[0], 17: LEAVES[1]}, None, id="before what was begun is done"),
    ],
)
def test_scaling_changes_nothing(
    schedule: Schedule,
    servers: LocalStores,
    undisturbed: dict[tuple[int, int], Trained],
    first: int,
    changes: dict[int, Change],
    hosting: list[int] | None,
    copies: int,
    code: tuple[int, int],
) -> None:
    terms = _scale(schedule, servers, undisturbed, first, changes, copies=copies, parity=code)
    assert hosting in (None, _hosting(terms)), "\n".join(map(str, terms))


@pytest.mark.parametrize("code", CODES)
def test_copies_are_seeded_bit_by_bit_before_lanes_move(
    schedule: Schedule, servers: LocalStores, undisturbed: dict[tuple[int, int], Trained], code: tuple[int, int]
) -> None:
    changes = {2: Change(joining=(2,))}
    terms = _scale(schedule, servers, undisturbed, 2, changes, copies=2, parity=code, break_it=small_terms.seeding(9))
    assert _hosting(terms) == [2, 3]
    joined, moved = (next(term for term in terms if len(set(term.hosts)) == count) for count in (2, 3))
    assert moved.committed > joined.committed + 4


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize(
    "death",
    [
        pytest.param(Death(1, "exchanged", -1, term=2), id="who joins, in its first step"),
        pytest.param(Death(0, "gradients sent", 3), id="a lane's owner, while another trainer joins"),
    ],
)
def test_a_trainer_dies_while_one_joins(
    schedule: Schedule, servers: LocalStores, undisturbed: dict[tuple[int, int], Trained], death: Death, code: tuple[int, int]
) -> None:
    first = 1 if death.trainer == 1 else 2
    changes = {1: Change(joining=(first,))}
    terms = _scale(schedule, servers, undisturbed, first, changes, copies=2, parity=code, deaths=[death])
    assert death.trainer not in terms[-1].members


@pytest.mark.parametrize("copies", [1, 2])
def test_one_that_joins_and_dies_before_it_hosts_a_lane_is_not_missed(
    schedule: Schedule, servers: LocalStores, undisturbed: dict[tuple[int, int], Trained], copies: int
) -> None:
    changes = {3: Change(joining=(2,))}
    terms = _scale(schedule, servers, undisturbed, 2, changes, copies=copies, deaths=[Death(2, "before fetch", -1)])
    assert terms[-1].hosts == terms[0].hosts
    assert set(terms[-1].members) == {0, 1}
