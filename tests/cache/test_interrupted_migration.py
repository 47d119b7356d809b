"""What the shards of a lane say of a move that was broken off, put together: how far it is, and who cannot be trusted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from foreload.cache.errors import StoreError
from foreload.cache.parity.placement import Placement
from foreload.cache.protocol.ownership.verdict import agreed, halfway
from foreload.cache.protocol.shards.fence import Found
from foreload.cache.protocol.shards.marker import Marker, Migrated

NUMBER, C1, C2 = 7, 100, 200
BEFORE = Migrated(1, 1, 50, C1, False, NUMBER, 30, (2,))
COPIED = Migrated(1, 1, C1, C2, True, NUMBER, 40, (2, 3))
DONE = Migrated(1, 1, C1, C2, False, NUMBER, 35, (2, 3))
TAKEN = Migrated(1, 2, C1, C1, False, NUMBER, 30)


def found(said: Sequence[Migrated | None], number: int = NUMBER) -> Mapping[int, Found]:
    return {shard: Found(1, Marker(number, number), True, 30, one) for shard, one in enumerate(said)}


@pytest.mark.parametrize(
    ("said", "cursor", "stale", "unfinished", "undone"),
    [
        ((BEFORE, BEFORE, BEFORE, BEFORE), C1, [], [], []),
        ((None, None, None, None), 0, [], [], []),
        ((BEFORE, BEFORE, COPIED, BEFORE), C1, [], [], [2]),
        ((BEFORE, BEFORE, COPIED, COPIED), C1, [], [], [2, 3]),
        ((DONE, BEFORE, COPIED, COPIED), C2, [], [1, 2, 3], []),
        ((DONE, DONE, DONE, DONE), C2, [], [], []),
        # A target that lacks its copies where another has the chunk done is a snapshot of before.
        ((DONE, BEFORE, BEFORE, COPIED), C2, [2], [1, 3], []),
        ((DONE, None, DONE, DONE), C2, [1], [], []),
        # The next owner undid the chunk, and died before it had come to all; or did not reach one where it is done.
        ((TAKEN, TAKEN, COPIED, TAKEN), C1, [], [], [2]),
        ((TAKEN, DONE, TAKEN, TAKEN), C1, [1], [], []),
    ],
)
def test_what_shards_say_is_put_together(
    said: Sequence[Migrated | None], cursor: int, stale: list[int], unfinished: list[int], undone: list[int]
) -> None:
    at = halfway(1, found(said), NUMBER)
    assert (at.cursor, at.stale, at.unfinished, at.undone) == (cursor, stale, unfinished, undone)


def test_where_a_batch_came_after_the_chunk_who_lacks_it_is_stale() -> None:
    at = halfway(1, found((DONE, BEFORE, DONE, COPIED), NUMBER + 1), NUMBER + 1)
    assert (at.cursor, at.stale, at.unfinished, at.undone) == (C2, [1, 3], [], [])


def test_what_one_shard_alone_says_does_not_count_where_too_many_would_be_stale() -> None:
    """An owner whose links to both targets broke went on where the next one did not reach: 2 parity rows cover one shard lost besides."""
    placement = Placement.spread(5, 2, 2).with_added(1)
    said = found((DONE, BEFORE, BEFORE, BEFORE, BEFORE))
    assert halfway(1, said, NUMBER).stale == [2, 3]
    at = agreed(placement, said, NUMBER)  # five of six: one is lost
    assert (at.cursor, at.stale) == (C1, [0])


def test_rows_that_moved_by_a_later_placement_are_an_error() -> None:
    with pytest.raises(StoreError, match="put the newest one back"):
        halfway(0, found((DONE,)), NUMBER)
