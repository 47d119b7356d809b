"""How many rows are moved at once while training goes on."""

from __future__ import annotations

import pytest

from foreload.cache.client.store import COMMAND_ROWS
from foreload.cache.protocol.migration import FEWEST_ROWS, ChunkSize


@pytest.mark.parametrize(
    ("fixed", "of_row", "least", "most"),
    [
        # Few rows, where it is they that take the time; all there may be, where it is the way there and back.
        (0.001, 0.02 / 500, 256, 512),
        (0.06, 0.0, COMMAND_ROWS, COMMAND_ROWS),
        (0.06, 0.02 / 500, 512, COMMAND_ROWS),
        (1.0, 0.001, FEWEST_ROWS, 2 * FEWEST_ROWS),
    ],
)
def test_a_chunk_has_as_many_rows_as_its_time_allows(fixed: float, of_row: float, least: int, most: int) -> None:
    sized = ChunkSize()
    for _ in range(20):
        sized.note(fixed + of_row * sized.rows)
    for _ in range(10):
        sized.note(fixed + of_row * sized.rows)
        assert least <= sized.rows <= most
