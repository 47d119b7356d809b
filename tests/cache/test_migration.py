"""Rows move to other store shards while their owner trains: every row used is the true one, wherever it is, and whoever dies."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from grids import covering
from lane_owners import NAMESPACE, TIMEOUT, Died, History, Owner, check_all, dies_at
from lane_program import make_program
from lost_shards import kill, restart
from waiting import DEADLINE_SECONDS

from foreload.cache.client.local import LocalStores
from foreload.cache.client.resp import MARKER, MIGRATED
from foreload.cache.client.store import Command, Read, Store, Write
from foreload.cache.errors import StoreError
from foreload.cache.parity import decoding, erasure, shard_contents
from foreload.cache.parity.placement import Placement
from foreload.cache.protocol.handover import migration
from foreload.cache.protocol.handover.migration import warm_up_migration
from foreload.cache.protocol.ownership.ownership import Ownership
from foreload.cache.protocol.rounds.failover import PROBE_PAUSE
from foreload.cache.protocol.shards import marker
from foreload.cache.protocol.shards.namespace import claim, lane_key
from foreload.cache.rows.row_bytes import PARITY_BIT

LANES = (0, 3)
STEPS = 30
SERVERS = 5
ACTIONS = ("rows to move read", "rows copied", "rows moved")


@pytest.fixture(scope="module")
def histories() -> Mapping[int, History]:
    """Two lanes."""
    return {lane: History.of(make_program(lane + 50, STEPS)) for lane in LANES}


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[LocalStores]:
    """Five servers of a test's own."""
    with LocalStores(SERVERS, tmp_path / "stores") as stores:
        yield stores


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks are small, so that many lie between the steps."""
    monkeypatch.setattr(migration, "COMMAND_ROWS", 7)
    monkeypatch.setattr(marker, "COMMAND_ROWS", 7)


@pytest.fixture
def slow_source(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the shard that rows leave counts as far slower than others, or as no slower, whatever its answers take."""
    slow: bool = request.param
    monkeypatch.setattr(migration, "slower", lambda *given: 10.0 if slow else None)
    return slow


class LateAnswers(Store):
    """It says that answers of shard 1 took a minute longer than they did. A busy machine may keep any shard's answers for a second."""

    @property
    def recent_seconds(self) -> dict[int, float]:
        return {shard: seconds + 60 * (shard == 1) for shard, seconds in super().recent_seconds.items()}


@dataclass(frozen=True)
class Case:
    """A placement, and the one that rows move to; shards: how many there are at first."""

    name: str
    shards: int
    k: int
    r: int

    @property
    def before(self) -> Placement:
        return Placement.spread(self.shards, self.k, self.r)

    @property
    def migrating(self) -> Placement:
        what = self.name.split()[0]
        if what == "add":
            return self.before.with_added(2)
        return self.before.without(1) if what == "remove" else self.before.with_migrated(1)

    def __str__(self) -> str:
        return f"{self.name} {self.k}+{self.r}"


CASES = [
    Case("add", 1, 1, 0),
    Case("remove", 3, 1, 0),
    Case("move", 2, 1, 0),
    Case("add", 3, 2, 1),
    Case("remove", 4, 2, 1),
    Case("move", 3, 2, 1),
    Case("move", 3, 1, 2),
]
PROTECTED = [case for case in CASES if case.r == 1]


def move(owner: Owner, placement: Placement, urls: Sequence[str]) -> None:
    assert owner.traffic is not None
    owner.traffic.migration.begin(placement, urls[: placement.shard_count])


def through(owner: Owner) -> Placement:
    """Wait until all has moved, and settle; returns the placement from then on."""
    assert owner.traffic is not None
    assert owner.traffic.repair_shards(TIMEOUT) == []
    assert owner.traffic.shards.migrated == 1.0
    settled = owner.stored.placement.completed()
    owner.traffic.migration.complete(settled)
    return settled


def until_dead(owner: Owner, placement: Placement, urls: Sequence[str]) -> None:
    """Train, and move, until the owner dies."""

    def go_on() -> None:
        move(owner, placement, urls)
        owner.train()
        through(owner)

    with pytest.raises(Died):
        go_on()


def live(urls: Sequence[str], placement: Placement) -> list[str | None]:
    return [None if shard in placement.removed else url for shard, url in enumerate(urls[: placement.shard_count])]


def finished(owner: Owner, urls: Sequence[str], settled: Placement) -> None:
    """The owner is through with its training: look at everything."""
    assert owner.traffic is not None
    owner.traffic.flush()
    last = {lane: owner.traffic.last_batch(lane) for lane in owner.histories}
    epochs = {lane: list(owner.stored.shards.of(lane).epochs) for lane in LANES}
    owner.abandon()
    check_all(live(urls, settled), owner.histories, settled, last)
    with Store(urls, TIMEOUT) as store:
        for lane, shard in product(LANES, settled.removed):
            names = store.command(shard, "HKEYS", lane_key(NAMESPACE, lane, epochs[lane][shard]))
            assert isinstance(names, list)
            # With parity they stay until the server is left.
            assert settled.r or sorted(names) == [MARKER, MIGRATED], "rows are left where all have moved away"


@pytest.mark.parametrize("began", [False, True], ids=["that comes amid a move", "that is there"])
def test_of_an_owner_without_lanes_all_has_moved(stores: LocalStores, tmp_path: Path, began: bool) -> None:
    case = CASES[3]
    placement = case.before if began else case.migrating
    owner = Owner(Store(stores.urls[: placement.shard_count], TIMEOUT), {}, tmp_path, placement, Ownership(1)).begin()
    assert owner.traffic is not None
    if began:
        move(owner, case.migrating, stores.urls)
    shards = owner.traffic.shards
    assert (shards.version, shards.migrated) == (case.migrating.version, 1.0)
    owner.abandon()


@pytest.mark.parametrize(("case", "slow_source"), list(product(CASES, (False, True))), ids=str, indirect=["slow_source"])
def test_rows_move_while_their_owner_trains(
    stores: LocalStores, histories: Mapping[int, History], tmp_path: Path, case: Case, slow_source: bool
) -> None:
    owner = Owner(Store(stores.urls[: case.shards], TIMEOUT), histories, tmp_path, case.before, Ownership(1)).begin()
    owner.train(8)
    move(owner, case.migrating, stores.urls)
    owner.train()
    settled = through(owner)
    assert owner.traffic is not None
    # Of a shard that is slow training reads nothing, if it can help it.
    assert (owner.traffic.counters().rows_decoded > 0) == bool(slow_source and case.r and case.migrating.leaving)
    finished(owner, stores.urls, settled)


def test_a_source_whose_answers_take_long_is_read_no_more(
    stores: LocalStores, histories: Mapping[int, History], tmp_path: Path
) -> None:
    case = Case("move", 3, 2, 1)
    owner = Owner(LateAnswers(stores.urls[:3], TIMEOUT), histories, tmp_path, case.before, Ownership(1)).begin()
    assert owner.traffic is not None
    owner.train(8)
    assert not owner.traffic.counters().rows_decoded
    move(owner, case.migrating, stores.urls)
    owner.train()
    settled = through(owner)
    assert owner.traffic.counters().rows_decoded > 0
    assert owner.stored.shards.avoided is None
    finished(owner, stores.urls, settled)


@pytest.mark.parametrize("shard", range(3))
def test_what_is_decoded_only_to_be_faster_is_read_where_others_have_it_wrong(
    stores: LocalStores, histories: Mapping[int, History], tmp_path: Path, shard: int
) -> None:
    placement = Placement.spread(3, 2, 1)
    owner = Owner(Store(stores.urls[:3], TIMEOUT), histories, tmp_path, placement, Ownership(1)).begin()
    assert owner.traffic is not None
    owner.train(12)
    wrong = 0
    with Store(stores.urls, TIMEOUT) as store:
        for lane, other in product(LANES, {0, 1, 2} - {shard}):
            key = lane_key(NAMESPACE, lane, owner.stored.shards.of(lane).epochs[other])
            names = store.command(other, "HKEYS", key)
            assert isinstance(names, list)
            for name in names:
                value = store.command(other, "HGET", key, name)
                assert isinstance(value, bytes)
                if name not in (MARKER, MIGRATED) and int.from_bytes(name, "big") & int(PARITY_BIT):
                    wrong += 1
                    store.command(other, "HSET", key, name, bytes(byte ^ 0x5A for byte in value))
    assert wrong
    owner.stored.shards.avoid(shard)
    owner.train()  # which looks at every row
    assert owner.traffic.counters().rows_decoded > 0
    assert owner.traffic.shards.whole
    owner.abandon()


@pytest.mark.parametrize("case", [Case("move", 2, 1, 0), Case("move", 3, 2, 1)], ids=str)
def test_a_move_compiles_nothing_that_was_not_rehearsed(
    stores: LocalStores, histories: Mapping[int, History], tmp_path: Path, case: Case
) -> None:
    compiled: list[Any] = [shard_contents._select, *([decoding._sources, erasure._accumulate] if case.r else [])]
    warm_up_migration(case.before)
    rehearsed = [list(function.signatures) for function in compiled]
    assert all(rehearsed)
    test_rows_move_while_their_owner_trains(stores, histories, tmp_path, case, slow_source=False)
    assert [list(function.signatures) for function in compiled] == rehearsed


@pytest.mark.parametrize(("shards", "k", "r"), [(1, 1, 0), (3, 2, 1)])
def test_one_move_after_the_other(
    stores: LocalStores, histories: Mapping[int, History], tmp_path: Path, shards: int, k: int, r: int
) -> None:
    owner = Owner(Store(stores.urls[:shards], TIMEOUT), histories, tmp_path, Placement.spread(shards, k, r), Ownership(1)).begin()
    owner.train(5)
    move(owner, owner.stored.placement.with_added(5 - shards), stores.urls)
    owner.train(12)
    settled = through(owner)
    owner.train(15)
    move(owner, settled.without(0), stores.urls)
    owner.train(20)
    settled = through(owner)
    assert settled.live == [1, 2, 3, 4]
    owner.train()
    finished(owner, stores.urls, settled)


DEATHS = [(case, action, count, lag) for case, action, count, lag in product(CASES, ACTIONS, (1, 2, 5), (0, 3))]


@pytest.mark.parametrize(("case", "action", "count", "lag"), covering(DEATHS, 23), ids=str)
def test_an_owner_dies_amid_a_move_and_the_next_goes_on_with_it(
    stores: LocalStores, histories: Mapping[int, History], tmp_path: Path, case: Case, action: str, count: int, lag: int
) -> None:
    first = Owner(
        Store(stores.urls[: case.shards], TIMEOUT), histories, tmp_path, case.before, Ownership(1), dies_at(action, count)
    ).begin()
    first.train(8)
    until_dead(first, case.migrating, stores.urls)
    step, copies = first.copies(lag)
    first.abandon()
    then_another(stores, histories, tmp_path, case, step, copies)


def then_another(
    stores: LocalStores, histories: Mapping[int, History], tmp_path: Path, case: Case, step: int, copies: Mapping[int, object]
) -> Owner:
    placement = case.migrating
    second = Owner(
        Store(stores.urls[: placement.shard_count], TIMEOUT, optional=bool(case.r)), histories, tmp_path, placement, Ownership(2)
    )
    second.take_over(step, copies)  # type: ignore[arg-type]
    # Nothing had to be given up: whoever dies leaves every shard to be trusted.
    assert not second.stored.shards.lost
    assert all(second.stored.shards.complete(shard) for shard in placement.live)
    second.train()
    finished(second, stores.urls, through(second))
    return second


class Torn(Store):
    """A Store whose n-th command of a move, copies or deletions, reaches only some shards, and then its owner dies."""

    def __init__(self, urls: Sequence[str], what: str, last: int, reached: Sequence[int]) -> None:
        super().__init__(urls, TIMEOUT)
        self._what, self._left, self._reached = what, last, reached

    def attempt(self, reads: Sequence[Read], writes: Sequence[Write]) -> dict[int, StoreError]:
        if self._what == "copies" and any(write.migrated is not None for write in writes):
            self._left -= 1
            if not self._left:
                super().attempt([], [write for write in writes if write.shard in self._reached])
                raise Died
        return super().attempt(reads, writes)

    def ask(self, commands: Mapping[int, Sequence[Command]]) -> tuple[dict[int, list[object]], dict[int, StoreError]]:
        if self._what == "deletions" and any(one and one[0] == ("MULTI",) for one in commands.values()):
            self._left -= 1
            if not self._left:
                super().ask({shard: one for shard, one in commands.items() if shard in self._reached})
                raise Died
        return super().ask(commands)


TORN = [
    (case, what, last, reached, lost)
    for case, what, last, reached, lost in product(
        CASES, ("copies", "deletions"), (1, 3), ((), (0,), (1, 2), (0, 3), (1,)), (None, 0, 2)
    )
    if lost is None or case.r == 1
]


@pytest.mark.parametrize(("case", "what", "last", "reached", "lost"), covering(TORN, 29), ids=str)
def test_an_owner_dies_with_shards_at_several_stages_of_a_chunk(
    stores: LocalStores,
    histories: Mapping[int, History],
    tmp_path: Path,
    case: Case,
    what: str,
    last: int,
    reached: tuple[int, ...],
    lost: int | None,
) -> None:
    first = Owner(Torn(stores.urls[: case.shards], what, last, reached), histories, tmp_path, case.before, Ownership(1)).begin()
    first.train(8)
    until_dead(first, case.migrating, stores.urls)
    step, copies = first.copies(1)
    first.abandon()
    if lost is None:
        then_another(stores, histories, tmp_path, case, step, copies)
        return
    with Store(stores.urls, TIMEOUT) as store:
        store.command(lost, "FLUSHALL")
    placement = case.migrating
    second = Owner(Store(stores.urls[: placement.shard_count], TIMEOUT), histories, tmp_path, placement, Ownership(2))
    second.take_over(step, copies)
    assert [shard for shard in placement.live if not second.stored.shards.complete(shard)] == [lost]
    second.train()
    finished(second, stores.urls, through(second))


@pytest.mark.parametrize("looks", ["then", pytest.param("already", id="while it was being looked for")])
def test_a_shard_that_dies_once_its_rows_have_left_it_is_not_looked_for(
    stores: LocalStores, histories: Mapping[int, History], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks: str
) -> None:
    case = Case("remove", 4, 2, 1)
    ownership = Ownership(1, {"run": "x"})
    store = Store(stores.urls[: case.shards], TIMEOUT)
    claim(store, NAMESPACE, {"run": "x"}, "new")
    owner = Owner(store, histories, tmp_path, case.before, ownership).begin()
    assert owner.traffic is not None
    connected, seen, over = threading.Event(), threading.Event(), threading.Event()

    class HeldStore(Store):
        """It has reached the server, which is not noted yet."""

        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            connected.set()
            seen.wait()

        def close(self) -> None:
            super().close()
            if connected.is_set():
                over.set()

    owner.train(8)
    move(owner, case.migrating, stores.urls)
    assert owner.traffic.repair_shards(TIMEOUT) == []
    if looks == "already":
        # Before the shard dies: whoever looks for it waits for the server, and may have begun to.
        monkeypatch.setattr("foreload.cache.protocol.rounds.failover.Store", HeldStore)
    kill(stores, 1)
    owner.traffic.probe()
    assert owner.traffic.shards.lost == [1]
    settled = owner.stored.placement.completed()
    if looks == "already":
        assert stores.restart(1)
        assert connected.wait(DEADLINE_SECONDS)
        owner.traffic.migration.complete(settled)
        seen.set()
        assert over.wait(DEADLINE_SECONDS)
    else:
        owner.traffic.migration.complete(settled)
        assert stores.restart(1)
    assert owner.traffic.shards.whole
    with Store(stores.urls, TIMEOUT) as other:
        # Who looks for a server notes there whose it is.
        until = time.monotonic() + 10 * PROBE_PAUSE.total_seconds()
        while time.monotonic() < until:
            assert other.command(1, "DBSIZE") == 0
    owner.train()
    last = {lane: owner.traffic.last_batch(lane) for lane in LANES}
    owner.abandon()
    check_all(live(stores.urls, settled), histories, settled, last)


LOST_SHARDS = list(product(PROTECTED, ACTIONS, (1, 4), range(5), ("dies", "forgets"), (False, True)))


@pytest.mark.parametrize(
    ("case", "action", "count", "shard", "how", "slow_source"), covering(LOST_SHARDS, 61), ids=str, indirect=["slow_source"]
)
def test_a_shard_is_lost_amid_a_move(
    stores: LocalStores,
    histories: Mapping[int, History],
    tmp_path: Path,
    case: Case,
    action: str,
    count: int,
    shard: int,
    how: str,
    slow_source: bool,
) -> None:
    placement = case.migrating
    shard = min(shard, placement.shard_count - 1)
    left = count

    def act(happened: str) -> None:
        nonlocal left
        left -= happened == action
        if left or happened != action:
            return
        if how == "dies":
            restart(stores, shard)
        else:
            with Store(stores.urls, TIMEOUT) as store:
                store.command(shard, "FLUSHALL")

    owner = Owner(Store(stores.urls[: case.shards], TIMEOUT), histories, tmp_path, case.before, Ownership(1), act).begin()
    owner.train(8)
    move(owner, placement, stores.urls)
    owner.train()
    settled = through(owner)
    assert left <= 0
    finished(owner, stores.urls, settled)


OUT_OF_REACH = list(
    product(PROTECTED, ("copies", "deletions"), (1, 3), range(4), ("record held", "empty record held", "marker written"))
)


@pytest.mark.parametrize(("case", "what", "last", "shard", "dies"), covering(OUT_OF_REACH, 41), ids=str)
def test_a_shard_that_the_second_owner_does_not_reach_says_another_thing_to_the_third(
    stores: LocalStores,
    histories: Mapping[int, History],
    tmp_path: Path,
    case: Case,
    what: str,
    last: int,
    shard: int,
    dies: str,
) -> None:
    placement = case.migrating
    shard = min(shard, placement.shard_count - 1)
    first = Owner(Torn(stores.urls[: case.shards], what, last, (shard,)), histories, tmp_path, case.before, Ownership(1)).begin()
    first.train(8)
    until_dead(first, placement, stores.urls)
    step, copies = first.copies(1)
    first.abandon()
    urls = stores.urls[: placement.shard_count]
    pid = stores.pids[shard]
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        store = Store(urls, timedelta(seconds=0.3), timedelta(seconds=0.3), optional=True)
        second = Owner(store, histories, tmp_path, placement, Ownership(2), dies_at(dies, 1))
        with pytest.raises(Died):
            second.take_over(step, copies)
        second.abandon()
    finally:
        os.kill(pid, signal.SIGCONT)
    third = Owner(Store(urls, TIMEOUT), histories, tmp_path, placement, Ownership(3))
    third.take_over(step, copies)
    assert {one for one in placement.live if not third.stored.shards.complete(one)} <= {shard}
    third.train()
    finished(third, stores.urls, through(third))
