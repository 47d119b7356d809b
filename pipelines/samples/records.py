"""Typed records, with every malformed one located."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pyarrow as pa

MOST_REJECTS = 100
"""Malformed records of a piece that are kept with all their details; more are only counted."""

_MOST_TEXT = 80  # characters of a malformed value that are shown


class Cause(NamedTuple):
    """Why a record is malformed: the column at fault, its value as text, and the rule broken."""

    field: str
    value: str
    reason: str


@dataclass(frozen=True, slots=True)
class RejectedRecord:
    """A malformed record: the file, the line (or Parquet row) from 1, the column at fault, its value as text, and the rule broken."""

    file: str
    line: int
    field: str
    value: str
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.field}: {self.reason}, not {self.value!r}"


@dataclass(frozen=True, slots=True)
class Records:
    """Well-formed records, not encoded yet.

    labels: float32 [n, labels]. dense: float64 [n, dense width], NaN where missing. categorical: per feature an Arrow array [n] of
    values, or large lists of values where the feature is multi-valued: integers for the encoding id, else string or large_string; null
    or "" where missing. keys: an Arrow array [n] of the order_by column, null where missing: integers, decimals, float64 or string; None
    without order_by. weights: float32 [n], None without a column of them. groups: int64 [n], hash64 of the texts of the group column, 0 where
    missing; None without one. noticed: int64 [features + 1, COUNTS], what samples/noticed counts of each feature, and of group; None where nothing
    is. rejects: the first of the malformed records among these, at most MOST_REJECTS; causes: of all of them, and how many each has.
    """

    labels: np.ndarray
    dense: np.ndarray
    categorical: tuple[pa.Array, ...]
    keys: pa.Array | None
    weights: np.ndarray | None = None
    groups: np.ndarray | None = None
    noticed: np.ndarray | None = None
    rejects: tuple[RejectedRecord, ...] = ()
    causes: Mapping[Cause, int] = field(default_factory=dict)

    @property
    def rejected(self) -> int:
        """How many records among these are malformed."""
        return sum(self.causes.values())

    def __len__(self) -> int:
        return len(self.labels)

    def filter(self, mask: np.ndarray) -> Records:
        """The records where mask (bool [n]) holds."""
        chosen = pa.array(mask)
        return Records(
            self.labels[mask],
            self.dense[mask],
            tuple(column.filter(chosen) for column in self.categorical),
            None if self.keys is None else self.keys.filter(chosen),
            None if self.weights is None else self.weights[mask],
            None if self.groups is None else self.groups[mask],
            self.noticed,
            self.rejects,
            self.causes,
        )


class Faults:
    """Malformed rows of one piece: for each the first field at fault, in the order of the checks."""

    def __init__(self) -> None:
        self._rows: dict[int, Cause] = {}

    def add(self, row: int, field: str, value: object, reason: str) -> None:
        """Note that the row's field breaks a rule: `reason` says what the value must be."""
        self._rows.setdefault(row, Cause(field, "" if value is None else str(value)[:_MOST_TEXT], reason))

    def __bool__(self) -> bool:
        return bool(self._rows)

    @property
    def rows(self) -> np.ndarray:
        """The malformed rows, ascending, int64."""
        return np.array(sorted(self._rows), np.int64)

    @property
    def causes(self) -> Counter[Cause]:
        """How many malformed rows each cause has."""
        return Counter(self._rows.values())

    def rejected(self, file: str, line_of: Callable[[np.ndarray], np.ndarray]) -> list[RejectedRecord]:
        """The first malformed records, at most MOST_REJECTS, by line. line_of: rows -> lines."""
        rows = self.rows[:MOST_REJECTS]
        return [RejectedRecord(file, int(line), *self._rows[int(row)]) for row, line in zip(rows, line_of(rows), strict=True)]
