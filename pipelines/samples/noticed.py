"""What `prepare` reports of the values of features: odd forms, mixed types, and separators that never occur."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from foreload.base.compiled import nb
from foreload.pipelines.samples.cells import is_text, present_in
from foreload.pipelines.samples.vocabulary import text_buffers
from foreload.pipelines.samples.whole_numbers import has_points, is_digit, whole_part

SEPARATORS = "|,;: \t/&+^~#"
"""What may part the values of a field, where the separator of the feature does not."""

TEXTS, NUMBERS, EXPONENTS, LARGE, FIELDS, CUT, OTHERS = range(7)
"""What is counted of a feature's values, malformed ones too: those of columns of text and those of other types; numbers with an exponent in texts,
which stay as they are written; floats from 2^53 on (of float32, 2^24), from where on several whole numbers are the same float. And of a multi-valued
feature in text: fields; those with its separator; and from OTHERS on, those with each of SEPARATORS, of pieces in which no field has its own."""

COUNTS = OTHERS + len(SEPARATORS)
_FIRST_LARGE = np.frombuffer(b"%d" % 2**53, np.uint8)
# By a float type's bits: from two to the power of these on, not every whole number is one of its values.
_WHOLE_BITS = {16: 11, 32: 24, 64: 53}
_MOST_EXPONENT_DIGITS = 3
_MINUS, _PLUS, _POINT, _E, _CAPITAL_E = (np.uint8(ord(c)) for c in "-+.eE")


def notice_values(column: pa.Array, counts: np.ndarray) -> None:
    """Add to counts, int64 [COUNTS], what is reported of single values, as `cells.plain` gives them."""
    present = present_in(column)
    if is_text(column.type):
        data, offsets = text_buffers(column)
        counts[TEXTS] += np.count_nonzero(present)
        _count_exponents(data, offsets, counts)
        if has_points(data, offsets):
            _count_large(data, offsets, counts)
        return
    if pa.types.is_floating(column.type):
        values = np.abs(pc.fill_null(column.cast(pa.float64()), np.nan).to_numpy())
        present &= ~np.isnan(values)
        counts[LARGE] += np.count_nonzero(values >= 2.0 ** _WHOLE_BITS[column.type.bit_width])
    counts[NUMBERS] += np.count_nonzero(present)


def notice_fields(column: pa.Array, separator: str, counts: np.ndarray) -> None:
    """Add to counts what is reported of fields of text that a separator is to cut into values."""
    counts[FIELDS] += np.count_nonzero(present_in(column))
    cut = _with(column, separator)
    counts[CUT] += cut
    if not cut:
        for place, other in enumerate(SEPARATORS):
            counts[OTHERS + place] += _with(column, other)


def warnings_of(counts: list[int], separator: str = "") -> list[str]:
    """What there is to say of values with these counts. separator: of a feature."""
    lines, values = [], counts[TEXTS] + counts[NUMBERS]
    if counts[EXPONENTS]:
        lines.append(
            f"{counts[EXPONENTS]:,} of {values:,} values are numbers written with an exponent, as 1e+05, and encoded as these texts; write whole "
            "numbers without one"
        )
    if counts[LARGE]:
        lines.append(
            f"{counts[LARGE]:,} of {values:,} values are floats from 2^53 on (of float32, 2^24), where several whole numbers are the same float; "
            "write the column as whole numbers, or as text"
        )
    if counts[TEXTS] and counts[NUMBERS]:
        lines.append(
            f"{counts[NUMBERS]:,} values are whole numbers and {counts[TEXTS]:,} are text, by file; a whole number is the same value as its text"
        )
    others = counts[OTHERS:]
    most = max(others)
    if not counts[CUT] and 2 * most > counts[FIELDS]:
        lines.append(
            f"its separator {separator!r} is in none of {counts[FIELDS]:,} fields, and {SEPARATORS[others.index(most)]!r} is in {most:,} of them; "
            'check separator, or give it pooling = "single"'
        )
    return lines


def _with(column: pa.Array, text: str) -> int:
    return int(pc.sum(pc.match_substring(column, text), min_count=0).as_py())


@nb.njit(nogil=True, cache=True)
def _has_exponent(data: np.ndarray, start: int, end: int) -> bool:
    """Whether a text is a number as programs write one with an exponent: 1e5, 1.5e17, -2E+05. An id such as 12e34567 is none."""
    at = start + 1 if data[start] == _MINUS else start
    if at + 2 >= end or not (data[at + 1] == _POINT or data[at + 1] == _E or data[at + 1] == _CAPITAL_E):
        return False
    if not is_digit(data[at]):
        return False
    at += 1
    if data[at] == _POINT:
        at += 1
        first = at
        while at < end and is_digit(data[at]):
            at += 1
        if at in (first, end) or (data[at] != _E and data[at] != _CAPITAL_E):
            return False
    at += 1
    if at < end and (data[at] == _PLUS or data[at] == _MINUS):
        at += 1
    digits = end - at
    while at < end and is_digit(data[at]):
        at += 1
    return at == end and 0 < digits <= _MOST_EXPONENT_DIGITS


@nb.njit(nogil=True, cache=True)
def _count_exponents(data: np.ndarray, offsets: np.ndarray, counts: np.ndarray) -> None:
    """Add to counts, int64 [2], how many texts are EXPONENTS."""
    for i in range(len(offsets) - 1):
        start, end = np.int64(offsets[i]), np.int64(offsets[i + 1])
        if start < end and _has_exponent(data, start, end):
            counts[EXPONENTS] += 1


@nb.njit(nogil=True, cache=True)
def _count_large(data: np.ndarray, offsets: np.ndarray, counts: np.ndarray) -> None:
    """Add how many are LARGE."""
    for i in range(len(offsets) - 1):
        start, end = np.int64(offsets[i]), np.int64(offsets[i + 1])
        first, point = whole_part(data, start, end)
        if point == end:
            continue
        if data[first] == _MINUS:
            first += 1
        large = point - first > len(_FIRST_LARGE)
        if point - first == len(_FIRST_LARGE):
            large = True
            for j in range(len(_FIRST_LARGE)):
                if data[first + j] != _FIRST_LARGE[j]:
                    large = data[first + j] > _FIRST_LARGE[j]
                    break
        counts[LARGE] += large
