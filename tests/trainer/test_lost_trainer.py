"""Trainers are lost at every point of a step: the others go on, and what comes out is that of an undisturbed training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import small_terms
from small_terms import assert_same
from training import Death, Trained, train

from foreload.cache.client import frames, resp
from foreload.cache.client.local import LocalStores
from foreload.cache.protocol.handover.takeover import warm_up_takeover
from foreload.cache.protocol.ownership import batch_log
from foreload.cache.rows import row_bytes
from foreload.pipelines.schedule.reader import Schedule

POINTS = (
    *("before fetch", "rows staged", "exchanged", "early rows sent", "forward done", "replicated", "gradients sent", "committed"),
    *("rows applied", "dense part applied"),
)


STEPS = (0, 1, 5, 11, 12, 22, 23)
"""The first, the second, one amid a segment, those around an evaluation, the last but one, the last."""
CODES = ((1, 0), (2, 1))
CACHE_POINTS = {
    (1, 0): ("fetch leaves", "data leaves", "data acknowledged"),
    (2, 1): ("batch logged", "parity leaves", "parity acknowledged", "data leaves", "data acknowledged"),
}
ENDS = ("last write-back", "last rows written")


def _cases() -> Iterator[tuple[int, int, str, int, tuple[int, int]]]:
    """Trainers, which of them dies, where, after which step, parity."""
    for trainers in (2, 3, 4):
        for trainer in range(trainers):
            for code in CODES:
                for step in STEPS:
                    for point in (*POINTS, *CACHE_POINTS[code]):
                        yield trainers, trainer, point, step, code
                for point in ENDS:
                    yield trainers, trainer, point, -1, code


CASES = list(_cases())
Case = tuple[int, int, str, int, tuple[int, int]]
COVERING = CASES[:: len(CASES) // 12]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def schedule(tmp_path_factory: pytest.TempPathFactory) -> Schedule:
    return small_terms.schedule(tmp_path_factory.mktemp("lost"))


@pytest.fixture(scope="module")
def undisturbed(schedule: Schedule, servers: LocalStores, one_thread: None) -> dict[tuple[int, int], Trained]:
    """One trainer, without copies, by parity."""
    return {code: train(small_terms.job(), schedule, servers.urls, parity=code) for code in CODES}


def _lose(schedule: Schedule, stores: LocalStores, trainers: int, *deaths: Death, copies: int = 2, **rest: Any) -> Trained:
    return train(small_terms.job(), schedule, stores.urls, trainers, copies=copies, deaths=deaths, **rest)


@pytest.mark.parametrize("point", POINTS[::3])
def test_a_term_that_ends_without_a_loss_is_rolled_back_and_run_again(
    schedule: Schedule, servers: LocalStores, undisturbed: dict[tuple[int, int], Trained], point: str
) -> None:
    outcome = _lose(schedule, servers, 2, Death(0, point, 7, dies=False))
    assert_same(outcome, undisturbed[1, 0])
    assert [term.committed for term in outcome.terms[1:]] in ([5], [6], [7])


def _check_a_death(
    schedule: Schedule,
    servers: LocalStores,
    undisturbed: dict[tuple[int, int], Trained],
    trainers: int,
    trainer: int,
    point: str,
    step: int,
    code: tuple[int, int],
) -> None:
    outcome = _lose(schedule, servers, trainers, Death(trainer, point, step), parity=code)
    assert_same(outcome, undisturbed[code])
    assert outcome.stored == undisturbed[code].stored
    # A traffic's point may come after the last one of its trainer, and at the end of a segment no rows go early.
    assert len(outcome.terms) == 2 or point in (*CACHE_POINTS[code], "early rows sent")
    assert len(outcome.terms) == 1 or trainer not in outcome.terms[-1].hosts


@pytest.mark.parametrize("case", COVERING, ids=str)
def test_a_trainer_dies(
    schedule: Schedule, servers: LocalStores, undisturbed: dict[tuple[int, int], Trained], case: Case
) -> None:
    _check_a_death(schedule, servers, undisturbed, *case)


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_trainer_dies_at_every_point(
    schedule: Schedule, servers: LocalStores, undisturbed: dict[tuple[int, int], Trained], case: Case
) -> None:
    _check_a_death(schedule, servers, undisturbed, *case)


@pytest.mark.parametrize("code", CODES)
def test_two_die_one_after_the_other(
    schedule: Schedule, servers: LocalStores, undisturbed: dict[tuple[int, int], Trained], code: tuple[int, int]
) -> None:
    """The second held the only copies of lanes of which others are seeded meanwhile, a few slots after each step."""
    deaths = (Death(1, "gradients sent", 2), Death(3, "rows applied", 16))
    outcome = _lose(schedule, servers, 4, *deaths, parity=code, break_it=small_terms.seeding(5))
    assert_same(outcome, undisturbed[code])
    assert outcome.stored == undisturbed[code].stored
    assert set(outcome.terms[-1].hosts) == {0, 2}


@pytest.mark.parametrize("point", ["exchanged", "rows applied"])
def test_two_that_die_together_are_survived_with_three_copies(
    schedule: Schedule, servers: LocalStores, undisturbed: dict[tuple[int, int], Trained], point: str
) -> None:
    deaths = (Death(0, point, 6), Death(2, point, 6))
    outcome = _lose(schedule, servers, 4, *deaths, copies=3)
    assert_same(outcome, undisturbed[1, 0])
    assert outcome.stored == undisturbed[1, 0].stored


@pytest.mark.parametrize("code", CODES)
def test_who_took_lanes_over_dies_before_the_next_step(
    schedule: Schedule, servers: LocalStores, undisturbed: dict[tuple[int, int], Trained], code: tuple[int, int]
) -> None:
    """The step to go on from is the same in both terms; lanes that nobody wrote a row of in between have a third owner."""
    deaths = (Death(1, "rows applied", 6), Death(0, "before fetch", 6, term=2))
    outcome = _lose(schedule, servers, 4, *deaths, copies=3, parity=code)
    assert_same(outcome, undisturbed[code])
    assert outcome.stored == undisturbed[code].stored
    assert [term.committed for term in outcome.terms] == [-1, 5, 5]


TAKEOVERS = [
    *((code, point) for code in CODES for point in ("rolled back", "group formed", "ready", "fenced", "marker written")),
    ((1, 0), "rows looked at"),
    *(((2, 1), point) for point in ("record held", "batch finished", "rows looked at", "empty record held", "base read")),
]


@pytest.mark.parametrize(
    ("code", "point"),
    [pytest.param(*case, marks=pytest.mark.full if place % 4 else ()) for place, case in enumerate(TAKEOVERS)],
)
@pytest.mark.parametrize("dead", [1, pytest.param(3, marks=pytest.mark.full)])
def test_who_takes_lanes_over_dies_on_the_way(
    schedule: Schedule,
    servers: LocalStores,
    undisturbed: dict[tuple[int, int], Trained],
    dead: int,
    code: tuple[int, int],
    point: str,
) -> None:
    deaths = (Death(dead, "rows applied", 6), Death(None, point, 0, term=2))
    outcome = _lose(schedule, servers, 4, *deaths, copies=3, parity=code)
    assert_same(outcome, undisturbed[code])
    assert outcome.stored == undisturbed[code].stored
    assert len(outcome.terms[-1].members) == 2


@pytest.mark.parametrize(
    ("point", "step", "code"),
    [
        ("dense part applied", 8, (1, 0)),
        ("committed", 8, (2, 1)),
        ("last write-back", -1, (1, 0)),
        ("last rows written", -1, (2, 1)),
    ],
)
def test_a_trainer_dies_as_training_stops(
    schedule: Schedule, servers: LocalStores, point: str, step: int, code: tuple[int, int]
) -> None:
    stopped = train(small_terms.job(), schedule, servers.urls, parity=code, stop_after=lambda step: step == 8)
    outcome = _lose(schedule, servers, 3, Death(1, point, step), parity=code, stop_after=lambda step: step == 8)
    assert_same(outcome, stopped)
    assert outcome.stored == stopped.stored
    assert (outcome.stopped_at, len(outcome.terms)) == (8, 2)


@pytest.mark.parametrize("code", CODES)
def test_a_takeover_compiles_nothing_that_was_not_rehearsed(
    schedule: Schedule, servers: LocalStores, code: tuple[int, int]
) -> None:
    compiled: list[Any] = [frames.take, resp._parse, batch_log._checksum, row_bytes._encode, row_bytes._decode]
    warm_up_takeover()
    rehearsed = [list(function.signatures) for function in compiled]
    assert all(rehearsed)
    _lose(schedule, servers, 2, Death(1, "gradients sent", 5), parity=code)
    assert [list(function.signatures) for function in compiled] == rehearsed
