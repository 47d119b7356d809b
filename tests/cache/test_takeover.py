"""A lane's owner stops anywhere in its work, and who has a copy of the lane goes on: every row is as if nothing had been, and parity agrees."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from itertools import combinations, product
from pathlib import Path

import pytest
from grids import covering
from lane_owners import NAMESPACE, TIMEOUT, Died, Gate, History, Mortal, Owner, check_all, dies_at, of_phase
from lane_program import make_program
from lost_shards import kill
from waiting import DEADLINE_SECONDS

from foreload.cache.client.local import LocalStores
from foreload.cache.client.resp import MARKER
from foreload.cache.client.store import NO_ROWS, Store, Write
from foreload.cache.errors import CacheError, Fenced, RowsLost, StoreError
from foreload.cache.protocol.ownership.ownership import Ownership
from foreload.cache.protocol.shards.marker import Marker
from foreload.cache.protocol.shards.namespace import claim
from foreload.cache.rows.row_bytes import fields
from foreload.cache.rows.staging import EndedRows

LANES = (0, 3)
STEPS = 30
PARITIES = ((2, 1), (1, 0))


@pytest.fixture(scope="module")
def histories() -> Mapping[int, History]:
    """Two lanes."""
    return {lane: History.of(make_program(lane + 50, STEPS)) for lane in LANES}


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
def test_without_parity_a_takeover_itself_writes_no_rows(
    urls: Sequence[str], histories: Mapping[int, History], tmp_path: Path, reached: tuple[int, ...], early: bool
) -> None:
    first = Owner(Mortal(urls, of_phase("data"), 14, reached), histories, tmp_path, (1, 0), Ownership(1)).begin()
    until_dead(first)
    step, copies = first.copies(2, early)
    first.abandon()
    second = Owner(Store(urls, TIMEOUT), histories, tmp_path, (1, 0), Ownership(2))
    written = second.stored.store.rows_written
    second.take_over(step, copies)
    assert second.stored.store.rows_written == written
    to_the_end(second, urls, (1, 0))


@pytest.mark.parametrize("parity", PARITIES)
def test_connections_that_broke_before_a_takeover_are_made_again(
    urls: Sequence[str], histories: Mapping[int, History], tmp_path: Path, parity: tuple[int, int]
) -> None:
    first = Owner(Store(urls, TIMEOUT), histories, tmp_path, parity, Ownership(1), dies_at("data leaves", 12)).begin()
    until_dead(first)
    step, copies = first.copies(1, all_ending=False)
    first.abandon()
    second = Owner(Store(urls, TIMEOUT), histories, tmp_path, parity, Ownership(2))
    with Store(urls, TIMEOUT) as store:
        for shard in range(2):
            store.command(shard, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    # With parity one shard more may be lost now: those whose connections broke are not.
    if parity[1]:
        flush(urls, 2)
    second.take_over(step, copies)
    assert not second.stored.shards.lost
    to_the_end(second, urls, parity)


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


@pytest.mark.parametrize("parity", PARITIES)
@pytest.mark.parametrize("action", ["batch logged", "data acknowledged"])
def test_who_owns_other_lanes_takes_over_between_two_rounds(
    urls: Sequence[str], histories: Mapping[int, History], tmp_path: Path, parity: tuple[int, int], action: str
) -> None:
    if not parity[1] and action == "batch logged":
        action = "data leaves"
    own, lost = ({lane: histories[lane]} for lane in LANES)
    stays = Owner(Store(urls, TIMEOUT), own, tmp_path, parity, Ownership(1)).begin()
    gone = Owner(Store(urls, TIMEOUT), lost, tmp_path, parity, Ownership(1), dies_at(action, 12)).begin()
    until_dead(gone)
    step, copies = gone.copies(1)
    gone.abandon()
    stays.train(step)
    stays.ownership, stays.histories, stays.told = Ownership(2), histories, {lane: {} for lane in LANES}
    stays.take_over(step, copies)
    to_the_end(stays, urls, parity)


def test_a_shard_that_lacks_a_lane_taken_over_is_rebuilt_for_that_lane_alone(
    urls: Sequence[str], histories: Mapping[int, History], tmp_path: Path
) -> None:
    """As where an owner dies while it rebuilds a shard: those of other lanes have that one whole."""
    own, lost = ({lane: histories[lane]} for lane in LANES)
    stays = Owner(Store(urls, TIMEOUT), own, tmp_path, (2, 1), Ownership(1)).begin()
    gone = Owner(Store(urls, TIMEOUT), lost, tmp_path, (2, 1), Ownership(1), dies_at("data leaves", 12)).begin()
    until_dead(gone)
    step, copies = gone.copies(1)
    assert gone.store.command(1, "UNLINK", gone.stored.key(LANES[1], 1)) == 1
    gone.abandon()
    stays.train(step)
    stays.ownership, stays.histories, stays.told = Ownership(2), histories, {lane: {} for lane in LANES}
    stays.take_over(step, copies)
    assert stays.traffic is not None
    assert not stays.traffic.shards.lost
    own_lane, _ = LANES
    assert stays.traffic.between_rounds(lambda: stays.stored.shards.readable(own_lane, 1))
    to_the_end(stays, urls, (2, 1))


@pytest.mark.parametrize("how", ["gone", "emptied", "emptied, as one of the run's"])
def test_a_server_that_is_lost_with_the_owner_is_rebuilt(
    three: LocalStores, urls: Sequence[str], histories: Mapping[int, History], tmp_path: Path, how: str
) -> None:
    identity = {"run": "x"} if how != "emptied" else None
    if identity is not None:
        with Store(urls, TIMEOUT) as store:
            claim(store, NAMESPACE, identity, "new")
    first = Owner(Mortal(urls, of_phase("data"), 14, (0, 2)), histories, tmp_path, (2, 1), Ownership(1, identity)).begin()
    until_dead(first)
    step, copies = first.copies(1)
    first.abandon()
    # It is there when the successor connects, and is not when that is asked to take over.
    second = Owner(Mortal(urls), histories, tmp_path, (2, 1), Ownership(2, identity))
    if how == "gone":
        kill(three, 1)
    else:
        flush(urls, 1)
    try:
        second.take_over(step, copies)
        assert list(second.stored.shards.lost) == ([] if identity is None else [1])
    finally:
        if how == "gone":
            assert three.restart(1)
    to_the_end(second, urls, (2, 1))


@pytest.mark.parametrize("parity", PARITIES)
def test_servers_that_lost_more_than_parity_covers_are_refused(
    urls: Sequence[str], histories: Mapping[int, History], tmp_path: Path, parity: tuple[int, int]
) -> None:
    first = Owner(Store(urls, TIMEOUT), histories, tmp_path, parity, Ownership(1), dies_at("data leaves", 14)).begin()
    until_dead(first)
    step, copies = first.copies(1)
    first.abandon()
    for shard in range(1 + parity[1]):
        flush(urls, shard)
    second = Owner(Store(urls, TIMEOUT), histories, tmp_path, parity, Ownership(2))
    with pytest.raises(RowsLost if parity[1] else StoreError, match="are lost" if parity[1] else "lost rows"):
        second.take_over(step, copies)
    second.abandon()


def test_rows_that_vanish_from_a_server_without_parity_are_noticed(
    urls: Sequence[str], histories: Mapping[int, History], tmp_path: Path
) -> None:
    """The marker is the right one, but not all rows stand beside it that were written before."""
    first = Owner(Store(urls, TIMEOUT), histories, tmp_path, (1, 0), Ownership(1), dies_at("data leaves", 14)).begin()
    until_dead(first)
    step, copies = first.copies(1)
    keys = first.stored.keys(0)
    first.abandon()
    with Store(urls, TIMEOUT) as store:
        unsure = {bytes(name) for rows in (*(rows for _, rows in copies[0].owed), copies[0].ending) for name in names(rows)}
        # Some shard has a row that nobody doubts.
        stored = [(shard, name) for shard, key in enumerate(keys) for name in fields_there(store, shard, key)]
        shard, sure = next((shard, name) for shard, name in stored if name != MARKER and name not in unsure)
        store.command(shard, "HDEL", keys[shard], sure)
    second = Owner(Store(urls, TIMEOUT), histories, tmp_path, (1, 0), Ownership(2))
    with pytest.raises(StoreError, match="lost rows of lane 0"):
        second.take_over(step, copies)
    second.abandon()


def fields_there(store: Store, shard: int, key: bytes) -> list[bytes]:
    """The fields of a hash on a shard."""
    there = store.command(shard, "HKEYS", key)
    assert isinstance(there, list)
    return there


def names(rows: EndedRows) -> list[bytes]:
    """The fields of rows."""
    return [int(one).to_bytes(8, "big") for one in fields(rows.table, rows.ordinal)]


@pytest.mark.parametrize("dead", [True, False])
def test_an_owner_that_may_live_is_followed_only_where_it_cannot_go_on(
    three: LocalStores, urls: Sequence[str], histories: Mapping[int, History], tmp_path: Path, dead: bool
) -> None:
    """With 1 + 2 on 3 shards it could go on with one; so two must be fenced for it to be stopped by that."""
    parity = (1, 2)
    first = Owner(Store(urls, TIMEOUT), histories, tmp_path, parity, Ownership(1), dies_at("data leaves", 14)).begin()
    until_dead(first)
    step, copies = first.copies(1)
    first.abandon()
    second = Owner(Mortal(urls), histories, tmp_path, parity, Ownership(2))
    kill(three, 0)
    kill(three, 1)
    try:
        if dead:
            second.take_over(step, copies, dead)
        else:
            with pytest.raises(CacheError, match="1 of 3 store shards could be fenced, must be more than 2"):
                second.take_over(step, copies, dead)
    finally:
        assert three.restart(0)
        assert three.restart(1)
    if dead:
        to_the_end(second, urls, parity)
    second.abandon()


@pytest.mark.parametrize(
    ("action", "parity"),
    [(action, parity) for action in ACTIONS for parity in PARITIES if parity[1] or not action.startswith(("parity", "batch"))],
)
def test_what_an_owner_that_was_stopped_still_does_changes_nothing(
    urls: Sequence[str], histories: Mapping[int, History], tmp_path: Path, action: str, parity: tuple[int, int]
) -> None:
    gate = Gate(action, 14)
    stopped = Owner(Store(urls, TIMEOUT), histories, tmp_path, parity, Ownership(1), gate).begin()
    failures: list[BaseException] = []

    def train() -> None:
        try:
            stopped.train()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    assert gate.reached.wait(DEADLINE_SECONDS)
    # What it told its copies it told before; one step less than it may have committed is what they surely have.
    step, copies = stopped.copies(1, early=True)
    second = Owner(Store(urls, TIMEOUT), histories, tmp_path, parity, Ownership(2))
    second.take_over(step, copies, dead=False)
    second.train(step + 2)
    gate.open.set()
    thread.join()
    assert [type(failure) for failure in failures] == [Fenced]
    with Store(urls, TIMEOUT) as store:
        for lane in LANES:
            for shard in range(3):
                late = Write(shard, stopped.stored.key(lane, shard), *NO_ROWS, Marker(99, 99).stored())
                with pytest.raises(Fenced):
                    store.exchange([], [late])
    # Another one finds the second's records, whatever the stopped one has logged meanwhile.
    step, copies = second.copies(0)
    second.abandon()
    third = Owner(Store(urls, TIMEOUT), histories, tmp_path, parity, Ownership(3))
    third.take_over(step, copies)
    to_the_end(third, urls, parity)
    stopped.abandon()


def test_an_owner_of_an_earlier_term_takes_nothing_over(
    urls: Sequence[str], histories: Mapping[int, History], tmp_path: Path
) -> None:
    first = Owner(Store(urls, TIMEOUT), histories, tmp_path, (2, 1), Ownership(1), dies_at("data leaves", 14)).begin()
    until_dead(first)
    step, copies = first.copies(1)
    first.abandon()
    second = Owner(Store(urls, TIMEOUT), histories, tmp_path, (2, 1), Ownership(3))
    second.take_over(step, copies)
    late = Owner(Store(urls, TIMEOUT), histories, tmp_path, (2, 1), Ownership(2))
    with pytest.raises(Fenced, match="has an owner of a later term, 3; this one is of term 2"):
        late.take_over(step, copies)
    late.abandon()
    to_the_end(second, urls, (2, 1))


@pytest.mark.parametrize("parity", PARITIES)
def test_arrivals_are_planned_anew_from_any_event_on(
    urls: Sequence[str], histories: Mapping[int, History], tmp_path: Path, parity: tuple[int, int]
) -> None:
    """Before each step what was staged for it is thrown away, with whatever was asked for ahead."""
    owner = Owner(Store(urls, TIMEOUT), histories, tmp_path, parity, Ownership(1)).begin()
    assert owner.traffic is not None
    for step in range(STEPS - 1):
        for lane in LANES:
            owner.traffic.replan(lane, owner.plan_from(lane, step))
        owner.train(step)
        assert all(owner.traffic.released(lane)[0] <= step for lane in LANES)
    to_the_end(owner, urls, parity)
