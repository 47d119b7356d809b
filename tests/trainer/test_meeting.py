"""Where a scheduler's trainers meet: only those of this call, though others met at the same store before."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from foreload.trainer.cluster.messages.rendezvous import host_store, join_store
from foreload.trainer.errors import PeerLost
from foreload.trainer.job.scheduler import FAILED, NO_STEPS, Meeting, meet_at

TIMEOUT = timedelta(seconds=60)
WORLD = 3


@pytest.fixture
def store() -> Any:
    """That of a scheduler which outlives the trainers that it starts."""
    return host_store("127.0.0.1", TIMEOUT)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2 * WORLD) as threads:
        yield threads


def joined(store: Any) -> Any:
    return join_store(f"127.0.0.1:{store.port}", TIMEOUT)


def met(store: Any, pool: ThreadPoolExecutor) -> list[Meeting]:
    """All trainers of a call, which come to the store as connections of their own."""
    meetings = [pool.submit(meet_at, joined(store), rank, WORLD, TIMEOUT) for rank in range(WORLD)]
    return [one.result() for one in meetings]


def test_each_call_meets_apart_and_learns_what_its_own_first_tells(store: Any, pool: ThreadPoolExecutor) -> None:
    for what in ("10.0.0.1:5000", FAILED, "10.0.0.1:6000", NO_STEPS):
        first, *others = met(store, pool)
        heard = [pool.submit(other.receive) for other in others]
        first.announce(what)
        assert [one.result() for one in heard] == [what] * (WORLD - 1)


def test_who_comes_early_waits_for_a_first_of_its_own_call(store: Any, pool: ThreadPoolExecutor) -> None:
    met(store, pool)[0].store.set("told", "of the call before")
    early = [pool.submit(meet_at, joined(store), rank, WORLD, TIMEOUT) for rank in range(1, WORLD)]
    # Both have left their word, and there is a meeting of before.
    while len({store.get(f"meetings/word/{rank}") for rank in range(1, WORLD)}) < WORLD - 1:
        pass
    assert not any(one.done() for one in early)
    first = meet_at(joined(store), 0, WORLD, TIMEOUT)
    heard = [pool.submit(one.result().receive) for one in early]
    first.announce("10.0.0.1:7000")
    assert [one.result() for one in heard] == ["10.0.0.1:7000"] * (WORLD - 1)


def test_one_that_does_not_come_is_named(store: Any, pool: ThreadPoolExecutor) -> None:
    here = pool.submit(meet_at, joined(store), 1, WORLD, TIMEOUT)
    with pytest.raises(RuntimeError, match="trainer 2 has not come within 1 s"):
        meet_at(joined(store), 0, WORLD, timedelta(seconds=1))
    # It left its word and found it taken.
    assert here.result().rank == 1


def test_where_the_first_is_gone_with_the_store_the_others_leave(store: Any, pool: ThreadPoolExecutor) -> None:
    own = host_store("127.0.0.1", TIMEOUT)
    _, other, _ = met(own, pool)
    del own
    with pytest.raises(PeerLost, match="rank 0 has died"):
        other.receive()
