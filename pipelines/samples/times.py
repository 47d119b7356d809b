"""Parts of the times in a column (docs/definitions.md, Parts of times)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from foreload.pipelines.errors import SourceError
from foreload.pipelines.samples.cells import is_text, present_in, shown
from foreload.pipelines.samples.transforms import TIME_UNITS, part_of, seconds_of_numbers, seconds_of_text, time_rule

_DAY_SECONDS = 86400


def parts_of_times(
    column: pa.Array, part: str, unit: str | None, where: str, report: Callable[[int, object, str], None]
) -> pa.Array:
    """Return a part of each time of a column.

    Args:
        column: single values, as returned by `cells.plain`.
        part: one of `transforms.PARTS`.
        unit: the unit of times that are numbers. If None, no number is a time.
        where: the file and the column, for messages.
        report: called with place, value and rule of each value that is no time.

    Returns:
        int64 [n], null where missing or no time.

    Raises:
        SourceError: the column is of a type that holds no times.
    """
    kind, present = column.type, present_in(column)
    if pa.types.is_null(kind):
        return column.cast(pa.int64())
    if pa.types.is_decimal(kind):
        column = column.cast(pa.string())
    if is_text(column.type):
        seconds, valid = _of_texts(column, unit)
    elif pa.types.is_timestamp(kind):
        seconds = column.cast(pa.int64()).fill_null(0).to_numpy() // TIME_UNITS[kind.unit]
        valid = present
    elif pa.types.is_date(kind):
        seconds = column.cast(pa.date32()).cast(pa.int32()).fill_null(0).to_numpy().astype(np.int64) * _DAY_SECONDS
        valid = present
    elif pa.types.is_integer(kind) or pa.types.is_floating(kind):
        if pa.types.is_floating(kind):
            column = column.cast(pa.float64())
            present &= ~np.isnan(column.fill_null(np.nan).to_numpy())
        elif not pa.types.is_uint64(kind):
            column = column.cast(pa.int64())
        seconds, valid = seconds_of_numbers(column.fill_null(0).to_numpy(), unit)
    else:
        raise SourceError(f"{where} must hold times to take the {part} of, not {kind}; convert it, or leave out part")
    for place in np.flatnonzero(present & ~valid):
        report(int(place), shown(column, place), time_rule(unit))
    return pa.array(part_of(seconds, part), pa.int64(), mask=~(present & valid))


def _of_texts(column: pa.Array, unit: str | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the seconds since 1970 of texts, int64 [n], and which of them are times, bool [n]."""
    # Values repeat, so parse each distinct text once.
    encoded = pc.dictionary_encode(column)
    parsed = [seconds_of_text(text, unit) for text in encoded.dictionary.to_pylist()]
    valid = np.array([seconds is not None for seconds in parsed], bool)
    places = encoded.indices.fill_null(len(parsed)).to_numpy()
    return np.array([seconds or 0 for seconds in parsed] + [0], np.int64)[places], np.append(valid, False)[places]
