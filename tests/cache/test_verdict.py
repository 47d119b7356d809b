"""Which store shards a new owner, or a reader, trusts with a lane, by what is there: every rule, without a server."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import product

import numpy as np
import protocol_model
import pytest
from hypothesis import given
from hypothesis import strategies as st
from takeover_model import Record
from takeover_owner import trusts

from foreload.cache.errors import StoreError
from foreload.cache.parity.placement import Placement
from foreload.cache.protocol.ownership.batch_log import LoggedBatch
from foreload.cache.protocol.ownership.verdict import Expect, judge
from foreload.cache.protocol.shards.fence import Found
from foreload.cache.protocol.shards.marker import ALL, Marker, Migrated, first_number

N = first_number(2) + 7
NO_ROWS = np.empty((0, 4), np.uint8)
SPREAD = Placement.spread(3, 2, 1)
JOINING = SPREAD.with_added(1)
"""Rows move to shard 3, which comes in."""
COMPLETED = JOINING.completed()


def logged(number: int, before: int, held: np.ndarray | None = None) -> LoggedBatch:
    """A batch in the log, whose rows do not matter here."""
    return LoggedBatch(number, np.empty(0, np.uint64), NO_ROWS, NO_ROWS, held, before)


def marked(marker: Marker, rows: int = 0, migrated: Migrated | None = None) -> Found:
    return Found(1, marker, True, rows, migrated)


def whole(number: int, rows: int = 0, migrated: Migrated | None = None) -> Found:
    return marked(Marker(number, number), rows, migrated)


NOTHING = Found(1, Marker.parse(None), False, 0)
"""A shard that never had the lane, or was emptied."""


@pytest.mark.parametrize(
    ("there", "trusted"),
    [
        (whole(N), True),
        (marked(Marker(N, N - 1)), True),
        (whole(N - 1), True),
        (whole(N - 2), False),  # a snapshot
        (marked(Marker(N - 1, N - 2)), False),
        (whole(N + 1), False),  # of an owner that went on where this one does not reach
        (marked(Marker(N + 1, N)), False),
        (whole(first_number(1) + 7), False),
        (marked(Marker(N, N, rebuilding=True)), False),
        (marked(Marker(N - 1, N - 1, rebuilding=True)), False),
        (NOTHING, False),
    ],
    ids=lambda value: str(value.marker) if isinstance(value, Found) else None,
)
def test_a_dead_owners_shard_is_trusted_at_its_last_batch_and_the_one_before(there: Found, trusted: bool) -> None:
    verdict = judge(SPREAD, {0: whole(N), 1: there}, Expect.logged(logged(N, N - 1)))
    assert (1 in verdict.trusted, verdict.refused) == (trusted, [] if trusted else [1])
    assert not verdict.stale
    assert verdict.move is None


def test_the_batch_before_the_first_of_an_owner_is_the_last_of_another() -> None:
    first, before = first_number(3), first_number(2) + 9
    verdict = judge(SPREAD, {0: whole(first), 1: whole(before), 2: whole(first - 1)}, Expect.logged(logged(first, before)))
    assert (list(verdict.trusted), verdict.refused) == ([0, 1], [2])


@pytest.mark.parametrize(("released", "trusted"), [(0, [0, 1, 2]), (N - 1, [0, 1, 2]), (N, [0])])
def test_a_shard_that_lacks_what_was_released_is_not_trusted(released: int, trusted: list[int]) -> None:
    found = {0: whole(N), 1: marked(Marker(N, N - 1)), 2: whole(N - 1)}
    assert list(judge(SPREAD, found, Expect.logged(logged(N, N - 1), released)).trusted) == trusted


def test_shards_are_trusted_as_in_the_model_of_takeovers() -> None:
    numbers = range(4)
    for number, before, parity, data, rebuilding in product(numbers, numbers, numbers, numbers, (False, True)):
        found = {0: marked(Marker(parity, data, rebuilding))}
        verdict = judge(SPREAD, found, Expect.logged(logged(number, before)))
        model = trusts(Record(number, before, (), ()), protocol_model.Marker(parity, data, rebuilding))
        assert (0 in verdict.trusted) == model


@pytest.mark.parametrize("number", [N, 0])
def test_a_stopped_runs_shard_is_trusted_at_its_last_batch_alone(number: int) -> None:
    found = {0: whole(number), 1: whole(N - 1), 2: NOTHING}
    verdict = judge(SPREAD, found, Expect.stopped(number))
    assert (list(verdict.trusted), verdict.refused) == (([0], [1, 2]) if number else ([0, 2], [1]))
    assert not verdict.doubtful(), "how many rows a stopped run has is counted elsewhere"


def test_without_parity_every_batch_since_the_released_one_is_as_good() -> None:
    found = {shard: whole(number) for shard, number in enumerate((N - 3, N - 2, N, first_number(3)))}
    verdict = judge(Placement.spread(4), found, Expect(N, range(N - 2, first_number(3))))
    assert (list(verdict.trusted), verdict.refused) == ([1, 2], [0, 3])


HELD = np.array([[10, 12, 15], [20, 20, 21], [30, 33, 33]])
"""Of shards 0 to 2: how many rows before batch N, with its parity, and with its data."""


@pytest.mark.parametrize(
    ("there", "doubtful"),
    [
        (whole(N, 21), False),
        (whole(N, 20), True),  # a row was lost
        (whole(N, 22), True),  # there is one too many
        (marked(Marker(N, N - 1), 20), False),
        (marked(Marker(N, N - 1), 21), True),
        (whole(N - 1, 20), False),
        # A chunk of a migration since changes the number, and says so; one before the batch says nothing any more.
        (whole(N, 17, Migrated(1, 2, 0, ALL, False, N, 17)), False),
        (whole(N, 21, Migrated(1, 2, 0, ALL, False, N, 17)), True),
        (whole(N, 21, Migrated(1, 2, 0, ALL, False, N - 1, 17)), False),
        (marked(Marker(N, N - 1), 20, Migrated(1, 2, 0, ALL, False, N, 17)), False),
    ],
    ids=lambda value: f"{value.marker}, {value.rows} rows, {value.migrated}" if isinstance(value, Found) else None,
)
def test_a_trusted_shard_with_another_number_of_rows_than_the_log_says_is_doubtful(there: Found, doubtful: bool) -> None:
    verdict = judge(SPREAD, {1: there}, Expect.logged(logged(N, N - 1, HELD)))
    assert verdict.doubtful() == ([1] if doubtful else [])
    assert not judge(SPREAD, {1: there}, Expect.logged(logged(N, N - 1))).doubtful(), "the log of an earlier version"


def test_of_a_shard_that_came_in_since_the_log_knows_of_no_rows() -> None:
    said = Migrated(1, 2, 0, 5, False, N, 4)
    found = {shard: whole(N, rows, replace(said, held=rows)) for shard, rows in enumerate((13, 21, 30, 4))}
    verdict = judge(JOINING, found, Expect.logged(logged(N, N - 1, HELD)))
    assert not verdict.doubtful()
    verdict.trusted[3] = replace(verdict.trusted[3], migrated=None)
    assert verdict.doubtful() == [3]


def test_a_shard_that_comes_in_has_nothing_to_lack_until_rows_have_moved() -> None:
    begun = Migrated(1, 1, 0, 0, False, N, 0)
    found = {0: whole(N), 1: whole(N, 0, begun), 2: marked(Marker(N, N - 1)), 3: NOTHING}
    verdict = judge(JOINING, found, Expect.logged(logged(N, N - 1)))
    assert (verdict.coming, verdict.refused, verdict.stale) == ([3], [], [])
    assert verdict.trusted[3].marker == Marker(N, N)
    assert verdict.move is not None
    assert verdict.move.cursor == 0
    found[1] = whole(N, 0, replace(begun, end=9))
    verdict = judge(JOINING, found, Expect.logged(logged(N, N - 1)))
    assert (verdict.coming, verdict.refused) == ([], [3])


def test_where_rows_have_moved_a_shard_must_say_so() -> None:
    through = Migrated(COMPLETED.version, 1, 7, ALL, False, N - 5, 0)
    found = {
        0: whole(N, 0, through),
        1: whole(N),  # from before the move
        2: whole(N, 0, replace(through, end=9)),  # from the middle of it
        3: whole(N, 0, replace(through, copied=True)),
    }
    verdict = judge(COMPLETED, found, Expect.stopped(N))
    assert (list(verdict.trusted), verdict.refused, verdict.stale) == ([0], [], [1, 2, 3])
    nothing = {shard: replace(there, marker=Marker(0, 0)) for shard, there in found.items()}
    assert list(judge(COMPLETED, nothing, Expect.stopped(0)).trusted) == [0, 1, 2, 3], (
        "a lane without a batch has nothing to lack"
    )


def test_what_shards_say_of_a_migration_decides_who_is_trusted_and_how_far_it_is() -> None:
    before, done = Migrated(1, 1, 0, 100, False, N, 9), Migrated(1, 1, 100, 200, False, N, 9, (3,))
    copied = replace(done, copied=True)
    found = {0: whole(N, 9, done), 1: whole(N, 9, before), 2: whole(N - 1, 9, before), 3: whole(N, 9, copied)}
    verdict = judge(JOINING, found, Expect.logged(logged(N, N - 1)))
    assert verdict.move is not None
    assert (verdict.move.cursor, verdict.move.chunk, verdict.move.unfinished) == (200, done, [1, 3])
    assert (list(verdict.trusted), verdict.stale) == ([0, 1, 3], [2]), "a batch never goes before all have the chunk"


def test_what_a_shard_with_another_marker_says_of_a_migration_does_not_count() -> None:
    before, done = Migrated(1, 1, 0, 100, False, N, 0), Migrated(1, 1, 100, 200, False, N, 0, (3,))
    found = {shard: whole(N, 0, before) for shard in range(3)} | {3: whole(N - 5, 0, done)}
    verdict = judge(JOINING, found, Expect.logged(logged(N, N - 1)))
    assert verdict.move is not None
    assert (verdict.move.cursor, list(verdict.trusted), verdict.refused) == (100, [0, 1, 2], [3])


@pytest.mark.parametrize("placement", [JOINING, COMPLETED], ids=["rows move", "rows moved"])
def test_where_no_shard_is_trusted_none_is(placement: Placement) -> None:
    verdict = judge(placement, {0: whole(N - 5), 1: NOTHING}, Expect.logged(logged(N, N - 1)))
    assert (verdict.trusted, verdict.refused) == ({}, [0, 1])
    assert judge(placement, {}, Expect.stopped(N)).trusted == {}


def test_rows_that_moved_by_a_later_placement_are_an_error() -> None:
    found = {0: whole(N, 0, Migrated(JOINING.version + 1, 1, 0, 5, False, N, 0))}
    with pytest.raises(StoreError, match="put the newest one back"):
        judge(JOINING, found, Expect.stopped(N))


@st.composite
def _histories(draw: st.DrawFn) -> tuple[LoggedBatch, Mapping[int, Found], Collection[int], Collection[int]]:
    """An owner's death, and losses: its log, what shards then have, which of them can be trusted, and which of these lack a row.

    Each shard has executed commands up to some place: what the owner's last batch needs, or less, as when it was restored from a snapshot.
    """
    count, shards = draw(st.integers(1, 5)), range(3)
    first = first_number(draw(st.integers(0, 2)))
    brought = draw(st.lists(st.lists(st.integers(0, 3), min_size=6, max_size=6), min_size=count, max_size=count))
    states = {shard: [(Marker(first, first), 0)] for shard in shards}
    held = np.zeros((3, 3), np.int64)
    for number, rows in enumerate(brought, first + 1):
        for shard in shards:
            there = states[shard][-1][1]
            with_parity, with_data = there + rows[2 * shard], there + rows[2 * shard] + rows[2 * shard + 1]
            held[shard] = there, with_parity, with_data
            states[shard] += [(Marker(number, number - 1), with_parity), (Marker(number, number), with_data)]
    found, trusted, doubtful = {}, [], []
    for shard in shards:
        place = draw(st.integers(-min(len(states[shard]), 6), -1))
        marker, rows_there = states[shard][place]
        lost, rebuilding = draw(st.integers(0, min(rows_there, 1))), draw(st.integers(0, 4)) == 0
        found[shard] = marked(replace(marker, rebuilding=rebuilding), rows_there - lost)
        if place >= -3 and not rebuilding:
            trusted.append(shard)
            doubtful += [shard] * lost
    return logged(first + count, first + count - 1, held), found, trusted, doubtful


@given(_histories())
def test_what_a_dead_owners_commands_made_is_trusted_and_nothing_else(
    history: tuple[LoggedBatch, Mapping[int, Found], Collection[int], Collection[int]],
) -> None:
    batch, found, trusted, doubtful = history
    as_given = dict(found)
    verdict = judge(SPREAD, found, Expect.logged(batch))
    assert found == as_given
    assert (list(verdict.trusted), verdict.doubtful()) == (trusted, doubtful)
    assert sorted([*verdict.trusted, *verdict.refused]) == sorted(found)
    assert all(verdict.trusted[shard] == found[shard] for shard in trusted)
