"""How many rows a piece of work has while training goes on."""

from __future__ import annotations

import pytest

from foreload.cache.protocol.rounds.background import AdaptiveSize

FEWEST, MOST = 32, 2048


def sized_from(rows: int) -> AdaptiveSize:
    return AdaptiveSize(rows, FEWEST, MOST, 0.02, 0.1)


@pytest.mark.parametrize("first", [256, MOST])
@pytest.mark.parametrize(
    ("fixed", "of_row", "least", "most"),
    [
        # Few rows, where it is they that take the time; all there may be, where it is the way there and back.
        (0.001, 0.02 / 500, 256, 512),
        (0.06, 0.0, MOST, MOST),
        (0.06, 0.02 / 500, 512, MOST),
        (1.0, 0.001, FEWEST, 2 * FEWEST),
    ],
)
def test_a_piece_has_as_many_rows_as_its_time_allows(fixed: float, of_row: float, least: int, most: int, first: int) -> None:
    sized = sized_from(first)
    for _ in range(20):
        sized.note(fixed + of_row * sized.rows)
    for _ in range(10):
        sized.note(fixed + of_row * sized.rows)
        assert least <= sized.rows <= most


def test_a_small_piece_tells_nothing_of_larger_ones_unless_it_is_slow() -> None:
    sized = sized_from(MOST)
    for _ in range(10):
        sized.note(0.0001, 40)
    assert sized.rows == MOST
    sized.note(0.5, 40)  # from here on no piece has more than half of what took that long
    assert sized.rows == FEWEST
    for _ in range(20):
        sized.note(0.0001 * sized.rows / 40, sized.rows)
    assert sized.rows in (MOST, MOST // 2, MOST // 4)
