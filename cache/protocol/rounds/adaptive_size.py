"""How many rows one piece of work has, so that what waits behind it need not wait long."""

from __future__ import annotations

from dataclasses import dataclass, field

_ROWS_COUNT = 0.7  # half as many rows take less than this share of the time: it is they that take it


@dataclass(slots=True)
class AdaptiveSize:
    """A number of rows, from `fewest` to `most`: as many as take `seconds`, unless it is answers that take the time, not rows, as behind a link with
    a long delay: then as many as take `most_seconds`. rows: at first.
    """

    rows: int
    fewest: int
    most: int
    seconds: float
    most_seconds: float
    _took: dict[int, float] = field(default_factory=dict)  # seconds of the last piece of so many rows

    def note(self, took: float, had: int | None = None) -> None:
        """A piece has taken so many seconds. had: rows; None: as many as there may be."""
        while had is not None and self.rows // 2 >= max(had, self.fewest):
            if took <= self.seconds:
                return  # it says nothing of one with more rows
            self.rows //= 2
        rows = self.rows
        self._took[rows] = took
        half, twice = self._took.get(rows // 2, 0.0), self._took.get(2 * rows, 0.0)
        if took > self.seconds and rows > self.fewest and half < _ROWS_COUNT * took:
            self.rows = rows // 2
        elif took < self.seconds / 2 or (took < self.most_seconds and _ROWS_COUNT * twice < took):
            self.rows = min(2 * rows, self.most)
