"""Typed records, with the location of every malformed one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pyarrow as pa

MOST_REJECTS = 100
"""How many malformed records of a piece are kept in full. Further ones are only counted."""

_MOST_TEXT = 80  # characters of a malformed value that are shown


class Cause(NamedTuple):
    """Why a record is malformed.

    Attributes:
        field: the malformed column.
        value: the value as text.
        reason: the rule that the value breaks.
    """

    field: str
    value: str
    reason: str


@dataclass(frozen=True, slots=True)
class RejectedRecord:
    """A malformed record.

    Attributes:
        file: the path of the file.
        line: the line, or the row of a Parquet file, from 1.
        field: the malformed column.
        value: the value as text.
        reason: the rule that the value breaks.
    """

    file: str
    line: int
    field: str
    value: str
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.field}: {self.reason}, not {self.value!r}"


@dataclass(frozen=True, slots=True)
class Records:
    """Well-formed records before encoding.

    Attributes:
        labels: float32 [n, labels].
        dense: float64 [n, dense width], NaN where missing.
        categorical: for each feature an Arrow array [n] of values, or large lists of values if the
            feature is multi-valued. Values are integers for the encoding `id`, else string or
            large_string. Missing ones are null or "".
        keys: an Arrow array [n] of the order_by column: integers, decimals, float64 or string, null
            where missing. None without order_by.
        weights: float32 [n]. None without a column of weights.
        groups: int64 [n], hash64 of the texts of the group column, 0 where missing. None without a
            group column.
        noticed: int64 [features + 1, COUNTS], the counts of `samples/column_counts` for each
            feature and for group. None if nothing was counted.
        rejects: the first malformed records among the rows, at most MOST_REJECTS.
        causes: cause -> how many of all malformed records have it.
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
        """The number of malformed records among the rows."""
        return sum(self.causes.values())

    def __len__(self) -> int:
        return len(self.labels)

    def filter(self, mask: np.ndarray) -> Records:
        """Return the records for which mask, bool [n], is true."""
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
    """The malformed rows of one piece.

    For each row the first malformed field is kept, in the order of the checks.
    """

    def __init__(self) -> None:
        self._rows: dict[int, Cause] = {}

    def add(self, row: int, field: str, value: object, reason: str) -> None:
        """Record that a field of a row breaks a rule.

        Args:
            reason: the rule, saying what the value must be.
        """
        self._rows.setdefault(row, Cause(field, "" if value is None else str(value)[:_MOST_TEXT], reason))

    def __bool__(self) -> bool:
        return bool(self._rows)

    @property
    def rows(self) -> np.ndarray:
        """The malformed rows, ascending, int64."""
        return np.array(sorted(self._rows), np.int64)

    @property
    def causes(self) -> Counter[Cause]:
        """The number of malformed rows for each cause."""
        return Counter(self._rows.values())

    def rejected(self, file: str, line_of: Callable[[np.ndarray], np.ndarray]) -> list[RejectedRecord]:
        """Return the first malformed records by line, at most MOST_REJECTS.

        Args:
            line_of: maps rows to lines.
        """
        rows = self.rows[:MOST_REJECTS]
        return [RejectedRecord(file, int(line), *self._rows[int(row)]) for row, line in zip(rows, line_of(rows), strict=True)]
