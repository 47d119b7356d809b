"""Delimited text cut into columns by compiled loops, where it is plain: one line a record, no quotes, every line with all its fields.

What is not plain is left to the general reader, which knows quotes and says what is wrong where.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numba as nb
import numpy as np
import pyarrow as pa

from pipelines.mixing import load_word, store_word

_NEWLINE, _RETURN, _MINUS, _POINT, _ZERO = (np.uint8(ord(c)) for c in "\n\r-.0")
_CHUNK_LINES = 512  # lines whose bytes and bounds stay in cache while one column after the other is taken from them
_MOST_DIGITS = 15  # such an integer and such a power of ten are exact in float64, so that their quotient is rounded once
_POWERS = 10.0 ** np.arange(_MOST_DIGITS + 1)
_MOST_BYTES = (1 << 31) - 9


class Fields:
    """Where the fields of plain lines stand.

    data: uint8 [bytes]. starts: int32 [lines], where a line starts. ends: int32 [lines, columns], where its fields end.
    """

    def __init__(self, data: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> None:
        self._data, self._starts, self._ends = data, starts, ends

    def __len__(self) -> int:
        return len(self._starts)

    @staticmethod
    def of(data: bytes, delimiter: str, columns: int, quoting: bool) -> Fields | None:
        """The fields of whole lines of UTF-8; None where they are not plain, or a line is blank or lacks fields or has too many."""
        if len(data) > _MOST_BYTES or (quoting and b'"' in data):
            return None
        returns = b"\r" in data
        if returns and data.count(b"\r") != data.count(b"\r\n"):
            return None
        lines = data.count(b"\n") + (not data.endswith(b"\n"))
        characters = np.frombuffer(data, np.uint8)
        starts, ends = np.empty(lines, np.int32), np.empty((lines, columns), np.int32)
        if not _find_fields(characters, np.uint8(ord(delimiter)), returns, starts, ends):
            return None
        return Fields(characters, starts, ends)

    def columns(self, places: Iterable[int], numbers: Collection[int], binary: Collection[int]) -> dict[int, pa.Array]:
        """The columns at places: string [lines], null where empty, or float64 [lines], NaN where empty.

        numbers: the places of columns that are numbers wherever all their values are plain decimals of up to 15 digits. binary: those
        of them that are text unless all their values are 0 or 1.
        """
        wanted = np.array(sorted(set(places) & set(numbers)), np.int64)
        values = np.empty((len(wanted), len(self)), np.float64)
        plain = np.ones(len(wanted), np.bool_)
        _parse_numbers(self._data, self._starts, self._ends, wanted, values, plain)
        result = {}
        for place, column, good in zip(wanted.tolist(), values, plain.tolist(), strict=True):
            if good and (place not in binary or bool(((column == 0) | (column == 1)).all())):
                result[place] = pa.array(column)
        texts = np.array([place for place in places if place not in result], np.int64)
        sizes = np.zeros(len(texts), np.int64)
        offsets = np.empty((len(texts), len(self) + 1), np.int32)
        _find_texts(self._starts, self._ends, texts, sizes)
        # Words are copied whole, so up to 7 bytes behind a column's last one are written too.
        bases = np.concatenate(([0], np.cumsum(sizes + 8)))
        out = np.empty(bases[-1], np.uint8)
        _copy_texts(self._data, self._starts, self._ends, texts, bases, offsets, out)
        for k, place in enumerate(texts.tolist()):
            present = offsets[k, 1:] > offsets[k, :-1]
            valid = None if present.all() else pa.py_buffer(np.packbits(present, bitorder="little"))
            buffers = [valid, pa.py_buffer(offsets[k]), pa.py_buffer(out[bases[k] : bases[k] + sizes[k]])]
            result[place] = pa.Array.from_buffers(pa.string(), len(self), buffers)
        return result


@nb.njit(nogil=True, cache=True)
def _find_fields(data: np.ndarray, delimiter: int, returns: bool, starts: np.ndarray, ends: np.ndarray) -> bool:
    """Fill starts and ends; whether every line has as many fields as ends has columns, and a character."""
    columns = ends.shape[1]
    size = len(data)
    start = row = column = 0
    for at in range(size + 1):
        if at < size:
            character = data[at]
            if character == delimiter:
                if column == columns - 1:
                    return False
                ends[row, column] = at
                column += 1
                continue
            if character != _NEWLINE:
                continue
        elif start == size:
            break
        end = at - 1 if returns and at > start and data[at - 1] == _RETURN else at
        if column != columns - 1 or end == start:
            return False
        starts[row] = start
        ends[row, column] = end
        start = at + 1
        row += 1
        column = 0
    return True


@nb.njit(nogil=True, cache=True)
def _parse_numbers(
    data: np.ndarray, starts: np.ndarray, ends: np.ndarray, places: np.ndarray, values: np.ndarray, plain: np.ndarray
) -> None:
    """values float64 [places, lines]; plain bool [places]: made false where a value is no plain decimal."""
    lines = len(starts)
    for first in range(0, lines, _CHUNK_LINES):
        for k in range(len(places)):
            place = places[k]
            if not plain[k]:
                continue
            for row in range(first, min(first + _CHUNK_LINES, lines)):
                at = starts[row] if place == 0 else ends[row, place - 1] + 1
                end = ends[row, place]
                if at == end:
                    values[k, row] = np.nan
                    continue
                negative = data[at] == _MINUS
                if negative:
                    at += 1
                mantissa = np.int64(0)
                digits = behind = 0
                point = False
                good = at < end and data[end - 1] != _POINT and data[at] != _POINT
                for i in range(at, end):
                    digit = np.int64(data[i]) - np.int64(_ZERO)
                    if 0 <= digit <= 9:
                        mantissa = mantissa * 10 + digit
                        digits += 1
                        behind += point
                        if digits > _MOST_DIGITS:
                            good = False
                            break
                    elif data[i] == _POINT and not point:
                        point = True
                    else:
                        good = False
                        break
                if not good:
                    plain[k] = False
                    break
                value = np.float64(mantissa) / _POWERS[behind]
                values[k, row] = -value if negative else value


@nb.njit(nogil=True, cache=True)
def _find_texts(starts: np.ndarray, ends: np.ndarray, places: np.ndarray, sizes: np.ndarray) -> None:
    """sizes int64 [places]: the bytes of each column."""
    for row in range(len(starts)):
        for k in range(len(places)):
            place = places[k]
            sizes[k] += ends[row, place] - (starts[row] if place == 0 else ends[row, place - 1] + 1)


@nb.njit(nogil=True, cache=True)
def _copy_texts(
    data: np.ndarray,
    starts: np.ndarray,
    ends: np.ndarray,
    places: np.ndarray,
    bases: np.ndarray,
    offsets: np.ndarray,
    out: np.ndarray,
) -> None:
    """Write each column's bytes to out from bases[k] on, and offsets int32 [places, lines + 1] into them."""
    lines = len(starts)
    offsets[:, 0] = 0
    for first in range(0, lines, _CHUNK_LINES):
        for k in range(len(places)):
            place = places[k]
            to = bases[k] + offsets[k, first]
            for row in range(first, min(first + _CHUNK_LINES, lines)):
                start = np.int64(starts[row]) if place == 0 else np.int64(ends[row, place - 1]) + 1
                size = ends[row, place] - start
                if start + size + 8 <= len(data):
                    for i in range(0, size, 8):
                        store_word(out, to + i, load_word(data, start + i))
                else:
                    for i in range(size):
                        out[to + i] = data[start + i]
                to += size
                offsets[k, row + 1] = to - bases[k]
