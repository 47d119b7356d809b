"""How jobs share a pool: what each is to have, and that no job is ever told of more than there is room for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreload.trainer.adjusting.decision import Costs, Resize, Situation, choices, decide
from foreload.trainer.adjusting.prediction import Ahead, Machine, Measured
from foreload.trainer.adjusting.shares import Bid, Choice, Grant, Needs, Resources, Shares, divided
from foreload.trainer.adjusting.size import Size

GB = 1e9
NEEDS = Needs(trainer=Resources(1, GB), server=Resources(1, GB))


def job(weight: float = 1, uses: int = 0, most: int = 8, memory: float = 0, exponent: float = 1) -> Bid:
    """A job with one server that is `exponent`-fold faster with more trainers, up to `most`. memory: of a trainer."""
    sizes = [Choice(Resources(1 + count, memory * count), 100 / count**exponent) for count in range(1, most + 1)]
    return Bid(weight, Resources(2, memory), Resources(uses, 0), tuple(sizes))


def cores(of: list[Resources | None]) -> list[float | None]:
    return [None if one is None else one.cores for one in of]


@pytest.mark.parametrize(
    ("bids", "pool", "given"),
    [
        # By weight, for what comes on top of the least.
        ([job(2), job(1), job(1)], 12, [6, 3, 3]),
        ([job(), job(), job()], 12, [4, 4, 4]),
        ([job(3), job(1)], 10, [7, 3]),
        # What one cannot use goes to the others.
        ([job(), job(most=2), job()], 16, [7, 3, 6]),
        ([job(), job(exponent=0)], 9, [7, 2]),
        # Who comes last waits, and so does who comes after.
        ([job(), replace(job(), least=Resources(7)), job()], 8, [8, None, None]),
        # A job that has begun never waits for one that has not.
        ([job(uses=2), replace(job(), least=Resources(7)), job(uses=2)], 8, [4, None, 4]),
        # Nothing is known of a new job.
        ([job(), replace(job(), choices=())], 8, [6, 2]),
    ],
)
def test_who_gets_what(bids: list[Bid], pool: float, given: list[float | None]) -> None:
    assert cores(divided(bids, Resources(pool))) == given


def test_memory_counts_where_it_is_scarcer_than_cores() -> None:
    """Each piece of the first is a tenth of the memory, one of the second a twentieth of the cores."""
    first, second = divided([job(memory=GB), job()], Resources(20, 10 * GB))
    assert first is not None
    assert second is not None
    assert (first.memory, second.cores) == (8 * GB, 9)
    # With weights, the memory is what limits.
    assert divided([job(memory=4 * GB, most=8), job()], Resources(20, 10 * GB))[0] == Resources(3, 8 * GB)


POWERS = st.floats(0, 1)
JOBS = st.lists(
    st.builds(job, st.sampled_from([0.5, 1, 2]), st.just(0), st.integers(1, 8), st.sampled_from([0, GB]), POWERS),
    min_size=1,
    max_size=5,
)


@settings(max_examples=200, deadline=None)
@given(bids=JOBS, pool=st.integers(2, 24))
def test_no_more_than_there_is_and_no_less_than_is_needed(bids: list[Bid], pool: int) -> None:
    whole = Resources(pool, 8 * GB)
    given = divided(bids, whole)
    assert sum(one.cores for one in given if one) <= pool
    assert sum(one.memory for one in given if one) <= 8 * GB
    assert all(bid.least.fits(one) for bid, one in zip(bids, given, strict=True) if one)
    # Nobody has more than it can use, nor is anything left that would make a job faster.
    free = whole
    for one in given:
        free = free.less(one or Resources())
    for bid, has in zip(bids, given, strict=True):
        if has is not None:
            assert not any(c.seconds < bid.seconds(has) and c.takes.less(has).fits(free) for c in bid.choices)


@settings(max_examples=200, deadline=None)
@given(
    pool=st.integers(4, 16),
    happens=st.lists(
        st.tuples(st.sampled_from(["bid", "grow", "shrink", "end"]), st.integers(0, 3), st.sampled_from([1, 2])), max_size=60
    ),
)
def test_what_jobs_may_use_never_exceeds_the_pool(pool: int, happens: list[tuple[str, int, int]]) -> None:
    """Jobs come, use what they may, give back late, and end. Only what a job still uses beyond its share may exceed the pool."""
    shares, uses, granted = Shares(), dict[int, float](), dict[int, float]()
    for what, name, weight in happens:
        if what == "end":
            if name in uses:
                shares.leave(str(name))
                del uses[name], granted[name]
            continue
        if what == "grow" and name in granted:
            uses[name] = max(uses[name], granted[name])
        if what == "shrink" and name in granted:
            uses[name] = min(uses[name], granted[name])
        uses.setdefault(name, 0)
        share = shares.bid(str(name), job(weight, uses=int(uses[name])), Resources(pool))
        granted[name] = share.granted.cores if share.granted else 0
        for other, _, theirs in shares.all(Resources(pool)):
            granted[int(other)] = min(granted[int(other)], theirs.granted.cores if theirs.granted else 0)
        assert sum(max(uses[one], granted[one]) for one in uses) <= pool
        assert uses[name] == 0 or granted[name] >= 2


def test_shares_follow_a_job_that_comes_and_one_that_ends() -> None:
    shares, pool = Shares(), Resources(8)

    def granted(name: str, uses: int, weight: float = 1) -> float | None:
        share = shares.bid(name, job(weight, uses), pool)
        return share.granted.cores if share.granted else None

    assert granted("a", 0, 2) == 8
    # The second waits until the first, which hears of it, has given something back.
    assert granted("a", 8, 2) == 8
    assert granted("b", 0) is None
    assert granted("a", 8, 2) == 5
    assert granted("b", 0) is None
    assert granted("a", 5, 2) == 5
    assert granted("b", 0) == 3
    # The third needs 2, and so on.
    assert granted("c", 0) is None
    assert [granted("a", 5, 2), granted("b", 3)] == [4, 2]
    assert [granted("a", 4, 2), granted("b", 2), granted("c", 0)] == [4, 2, 2]
    shares.leave("a")
    assert [granted("b", 2), granted("c", 2), granted("b", 2)] == [4, 4, 4]


def test_shares_stay_where_little_would_be_gained() -> None:
    shares, pool = Shares(), Resources(9)

    def aim(name: str, each: float) -> Resources | None:
        bid = job()
        return shares.bid(
            name, replace(bid, choices=tuple(Choice(c.takes, c.seconds * each**c.takes.cores) for c in bid.choices)), pool
        ).aim

    aim("a", 1.0)
    aim("b", 1.0)
    before = aim("a", 1.0)
    assert [aim("a", 0.99), aim("b", 1.01), aim("a", 1.0)] == [before, Resources(9 - (before or Resources()).cores), before]
    # A job that no core makes faster leaves its part.
    shares.bid("a", job(exponent=0), pool)
    assert aim("b", 1.0) == Resources(7)


def situation(now: Size, granted: float, known: bool = True) -> Situation:
    """A job that is bound by its trainers, with equal steps ahead."""
    measured = Measured(0.1, 0.1, 0.0, 0.0, 0.1, 1000.0, 3000.0)
    costs = Costs(stored_bytes=1e7, bytes_per_second=1e7, moving_share=0.5, trainer_seconds=1.0, start_seconds=5.0)
    ahead = Ahead(np.array([1000]), np.array([1000.0]), np.array([3000.0]))
    return Situation(
        now, Size(1, 1), Size(4, 4), Machine(4, None), ahead, costs, {now: measured} if known else {},
        grant=Grant(NEEDS, Resources(granted, 1000 * GB)),
    )  # fmt: skip


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(
    ("now", "granted", "to"),
    [
        (Size(4, 1), 5, None),
        (Size(4, 1), 4, Size(3, 1)),
        (Size(4, 1), 2, Size(1, 1)),
        (Size(4, 1), 1, Size(1, 1)),
        (Size(1, 1), 1, None),
    ],
)
def test_a_job_gives_back_what_is_beyond_its_share(now: Size, granted: float, to: Size | None, known: bool) -> None:
    action = decide(situation(now, granted, known))
    if to is None:
        assert action is None or (isinstance(action, Resize) and action.trial is not None)
    else:
        assert isinstance(action, Resize)
        assert (action.to, action.trial, action.for_memory) == (to, None, False)
        assert action.reason == f"the pool leaves {granted:g} cores to this run, which uses {NEEDS.of(now).cores:g}"


def test_trainers_leave_before_rows_move() -> None:
    """Here trainers are what makes it fast, so shards go; but only one at a time, and never below the least."""
    action = decide(situation(Size(2, 3), 4))
    assert isinstance(action, Resize)
    assert action.to == Size(2, 2)
    bound_by_store = {Size(3, 3): Measured(0.1, 0.01, 0.0, 0.09, 0.1, 1000.0, 3000.0)}
    action = decide(replace(situation(Size(3, 3), 4), known=bound_by_store))
    assert isinstance(action, Resize)
    assert action.to == Size(1, 3)


def test_a_job_asks_for_what_makes_it_faster_whatever_its_share_is() -> None:
    asked = choices(situation(Size(1, 1), 2))
    # 4 lanes: three trainers are as fast as two.
    assert [one.takes.cores for one in asked] == [2, 3, 5]
    assert choices(situation(Size(1, 1), 2, known=False)) == ()
    assert choices(replace(situation(Size(1, 1), 2), grant=None)) == ()
    # What did not pay is not asked for again.
    rejected = frozenset(Size(4, shards) for shards in range(1, 5))
    assert [one.takes.cores for one in choices(replace(situation(Size(1, 1), 2), rejected=rejected))] == [2, 3]
