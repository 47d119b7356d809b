"""A lane's owner stops anywhere in its work, and who has a copy of the lane goes on: every row is as if nothing had been, and parity agrees."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product
from pathlib import Path

import pytest
from grids import covering
from lane_owners import TIMEOUT, Died, History, Mortal, Owner, check_all, dies_at, of_phase
from lane_program import make_program

from foreload.cache.client.local import LocalStores
from foreload.cache.client.store import Store
from foreload.cache.protocol.ownership import Ownership

LANES = (0, 3)
STEPS = 30
PARITIES = ((2, 1), (1, 0))


@pytest.fixture(scope="module")
def histories() -> Mapping[int, History]:
    """Two lanes."""
    return {lane: History.of(make_program(lane + 50, STEPS)) for lane in LANES}


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStores]:
    """Three servers."""
    with LocalStores(3, tmp_path_factory.mktemp("three")) as stores:
        yield stores


@pytest.fixture
def urls(three: LocalStores) -> Sequence[str]:
    """Three empty servers."""
    with Store(three.urls, TIMEOUT) as store:
        for shard in range(3):
            store.command(shard, "FLUSHALL")
    return three.urls


def flush(urls: Sequence[str], shard: int) -> None:
    """A server loses everything, and goes on."""
    with Store(urls, TIMEOUT) as store:
        store.command(shard, "FLUSHALL")


def until_dead(owner: Owner) -> None:
    with pytest.raises(Died):
        owner.train()


def to_the_end(owner: Owner, urls: Sequence[str], parity: tuple[int, int]) -> None:
    """Train, and look at everything."""
    owner.train()
    assert owner.traffic is not None
    assert owner.traffic.repair_shards(TIMEOUT) == []
    last = {lane: owner.traffic.last_batch(lane) for lane in owner.histories}
    owner.abandon()
    check_all(urls, owner.histories, parity, last)


ACTIONS = [
    "parity rows asked for", "parity rows read", "batch logged", "parity leaves", "parity acknowledged", "data leaves", "data acknowledged",
    "fetch leaves", "rows staged",
]  # fmt: skip
CASES = [
    (action, early, lag, parity)
    for action, early, lag, parity in product(ACTIONS, (False, True), (0, 1, 4), PARITIES)
    if parity[1] or action in ("data leaves", "data acknowledged", "fetch leaves", "rows staged")
]


@pytest.mark.parametrize(("action", "early", "lag", "parity"), covering(CASES, 5))
def test_an_owner_that_stops_at_a_point_is_followed_by_another(
    urls: Sequence[str],
    histories: Mapping[int, History],
    tmp_path: Path,
    action: str,
    early: bool,
    lag: int,
    parity: tuple[int, int],
) -> None:
    first = Owner(Store(urls, TIMEOUT), histories, tmp_path, parity, Ownership(1), dies_at(action, 12)).begin()
    until_dead(first)
    step, copies = first.copies(lag, early)
    first.abandon()
    second = Owner(Store(urls, TIMEOUT), histories, tmp_path, parity, Ownership(2))
    second.take_over(step, copies)
    to_the_end(second, urls, parity)


SUBSETS = [reached for count in range(4) for reached in combinations(range(3), count)]


@pytest.mark.parametrize(
    ("phase", "reached", "lag", "lost"), covering(list(product(["parity", "data"], SUBSETS, (0, 3), (None, 0, 1, 2))), 7)
)
def test_an_owner_stops_with_shards_at_several_stages_and_one_loses_all_it_has(
    urls: Sequence[str],
    histories: Mapping[int, History],
    tmp_path: Path,
    phase: str,
    reached: tuple[int, ...],
    lag: int,
    lost: int | None,
) -> None:
    first = Owner(Mortal(urls, of_phase(phase), 14, reached), histories, tmp_path, (2, 1), Ownership(1)).begin()
    until_dead(first)
    step, copies = first.copies(lag, all_ending=lag > 0)
    first.abandon()
    if lost is not None:
        flush(urls, lost)
    second = Owner(Store(urls, TIMEOUT), histories, tmp_path, (2, 1), Ownership(2))
    second.take_over(step, copies)
    assert [shard for shard in range(3) if not all(second.stored.shards.readable(lane, shard) for lane in LANES)] == (
        [] if lost is None else [lost]
    )
    to_the_end(second, urls, (2, 1))


@pytest.mark.parametrize(("reached", "early"), covering(list(product(SUBSETS, (False, True))), 3))
def test_without_parity_whatever_a_batch_has_reached_is_written_again(
    urls: Sequence[str], histories: Mapping[int, History], tmp_path: Path, reached: tuple[int, ...], early: bool
) -> None:
    first = Owner(Mortal(urls, of_phase("data"), 14, reached), histories, tmp_path, (1, 0), Ownership(1)).begin()
    until_dead(first)
    step, copies = first.copies(2, early)
    first.abandon()
    second = Owner(Store(urls, TIMEOUT), histories, tmp_path, (1, 0), Ownership(2))
    taken = second.take_over(step, copies)
    assert all(one.stored.all() and not sum(len(rows) for _, rows in one.to_write) for one in taken.values())
    to_the_end(second, urls, (1, 0))


# What a takeover asks the store for, with parity: parity rows, their new values, rows, the unsure rows, the empty batch's markers.
ASKED = range(1, 6)


@pytest.mark.parametrize(
    ("asked", "reached", "phase", "parity"),
    covering([*product(ASKED, SUBSETS, ("parity", "data"), PARITIES[:1]), *product((1, 2), SUBSETS, ("data",), PARITIES[1:])], 5),
)
def test_who_takes_over_dies_meanwhile_and_a_third_one_does_it(
    urls: Sequence[str],
    histories: Mapping[int, History],
    tmp_path: Path,
    asked: int,
    reached: tuple[int, ...],
    phase: str,
    parity: tuple[int, int],
) -> None:
    first = Owner(Mortal(urls, of_phase(phase), 14, (1,)), histories, tmp_path, parity, Ownership(1)).begin()
    until_dead(first)
    step, copies = first.copies(1)
    first.abandon()
    second = Owner(Mortal(urls, lambda writes: True, asked, reached), histories, tmp_path, parity, Ownership(2))
    with pytest.raises(Died):
        second.take_over(step, copies)
    second.abandon()
    third = Owner(Store(urls, TIMEOUT), histories, tmp_path, parity, Ownership(3))
    third.take_over(step, copies)
    to_the_end(third, urls, parity)


@pytest.mark.parametrize(
    ("action", "count", "parity"),
    covering(
        [
            (action, count, parity)
            for action, count, parity in product(ACTIONS, (1, 3), PARITIES)
            if parity[1] or not action.startswith(("parity", "batch"))
        ],
        3,
    ),
)
def test_owner_after_owner_dies(
    urls: Sequence[str], histories: Mapping[int, History], tmp_path: Path, action: str, count: int, parity: tuple[int, int]
) -> None:
    """Each goes on for a few steps, and finds what is left of the one before; at last a lane's numbers are those of the last term."""
    owner = Owner(Store(urls, TIMEOUT), histories, tmp_path, parity, Ownership(1), dies_at(action, 14)).begin()
    until_dead(owner)
    for term in range(2, 6):
        step, copies = owner.copies(term % 3, early=bool(term % 2))
        owner.abandon()
        owner = Owner(Store(urls, TIMEOUT), histories, tmp_path, parity, Ownership(term), dies_at(action, count))
        try:
            owner.take_over(step, copies)
            owner.train()
        except Died:
            continue
        break
    step, copies = owner.copies(1)
    owner.abandon()
    last = Owner(Store(urls, TIMEOUT), histories, tmp_path, parity, Ownership(9))
    if step + 1 < STEPS:
        last.take_over(step, copies)
        to_the_end(last, urls, parity)
        assert last.traffic is not None
