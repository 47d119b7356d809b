"""Compiled loops that cut plain delimited text into columns, and that find rows of quoted text.

Text is plain if every line is one record, with all its fields and no quotes. Other text is left to
the general reader, which knows quotes and reports what is wrong where.

Arrow's reader does not say where rows of quoted text start and end, so `Bounds` finds them by the
same rules. A quote opens a value only where the value begins. Two quotes in a quoted value stand
for one. After the closing quote everything is taken as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from foreload.base.compiled import nb
from foreload.base.hashing import load_word, lowest_bit, store_word

_NEWLINE, _RETURN, _QUOTE, _MINUS, _POINT, _ZERO = (np.uint8(ord(c)) for c in '\n\r"-.0')
# Lines of a chunk. Its bytes and bounds stay in cache while one column after the other is taken.
_CHUNK_LINES = 512
# An integer of so many digits and such a power of ten are exact in float64, so their quotient is
# rounded once.
_MOST_DIGITS = 15
_POWERS = 10.0 ** np.arange(_MOST_DIGITS + 1)
_EVERY_BYTE, _LOW_BITS = np.uint64(0x0101010101010101), np.uint64(0x7F7F7F7F7F7F7F7F)
# Multiplying by this gathers the lowest bits of 8 bytes in the highest byte.
_GATHER = np.uint64(0x0102040810204080)
_ZEROS, _HIGH_HALVES, _SIX_EACH = np.uint64(0x30) * _EVERY_BYTE, np.uint64(0xF0) * _EVERY_BYTE, np.uint64(6) * _EVERY_BYTE
_MOST_BYTES = (1 << 31) - 9  # places are int32

Holds = Callable[[np.ndarray], np.ndarray]
"""A rule for the values of a column: float64 [n] -> bool [n], whether each value keeps it."""


class Fields:
    """Where the fields of plain lines are.

    Args:
        data: uint8 [bytes].
        starts: int32 [lines], where each line starts.
        ends: int32 [lines, columns], where its fields end.
    """

    def __init__(self, data: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> None:
        self._data, self._starts, self._ends = data, starts, ends

    def __len__(self) -> int:
        return len(self._starts)

    @staticmethod
    def of(data: bytes, delimiter: str, columns: int, quoting: bool) -> Fields | None:
        """Find the fields of whole lines of UTF-8.

        Args:
            data: the lines.
            delimiter: one ASCII character.
            columns: the number of fields of a line.
            quoting: whether quotes have a meaning.

        Returns:
            The fields. None if the lines are not plain, or one is blank or has too few or too many
            fields.
        """
        if len(data) > _MOST_BYTES or (quoting and b'"' in data):
            return None
        returns = b"\r" in data
        if returns and data.count(b"\r") != data.count(b"\r\n"):
            return None
        lines = data.count(b"\n") + (not data.endswith(b"\n"))
        characters = np.frombuffer(data, np.uint8)
        # _find_ends needs room for 64 more ends at every turn.
        field_ends = np.empty(lines * columns + 128, np.int32)
        count = _find_ends(characters, np.uint8(ord(delimiter)), field_ends)
        # The last line may end without a line break. Its last field then ends with the data.
        if not data.endswith(b"\n") and count < len(field_ends):
            field_ends[count] = len(data)
            count += 1
        starts, ends = np.empty(lines, np.int32), field_ends[: lines * columns].reshape(lines, columns)
        if count != lines * columns or not _begin_lines(characters, returns, ends, starts):
            return None
        return Fields(characters, starts, ends)

    def columns(self, places: Iterable[int], numbers: Collection[int], rules: Sequence[tuple[int, Holds]]) -> dict[int, pa.Array]:
        """Return the columns at places.

        Args:
            places: the columns to return.
            numbers: the columns to parse as numbers. A column stays text unless all its values are
                plain decimals of up to 15 digits and keep the column's rules.
            rules: (place, rule) pairs. A column may have several rules.

        Returns:
            place -> string [lines], null where empty, or float64 [lines], NaN where empty.
        """
        wanted = np.array(sorted(set(places) & set(numbers)), np.int64)
        values = np.empty((len(wanted), len(self)), np.float64)
        plain = np.ones(len(wanted), np.bool_)
        _parse_numbers(self._data, self._starts, self._ends, wanted, values, plain)
        result = {}
        for place, column, good in zip(wanted.tolist(), values, plain.tolist(), strict=True):
            if good and all(bool(holds(column).all()) for at, holds in rules if at == place):
                result[place] = pa.array(column)
        texts = np.array([place for place in places if place not in result], np.int64)
        sizes = np.zeros(len(texts), np.int64)
        offsets = np.empty((len(texts), len(self) + 1), np.int32)
        _find_texts(self._starts, self._ends, texts, sizes)
        # Texts are copied in words of 8 bytes, so up to 7 bytes behind a column's last one are
        # written too.
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
def _equal_bytes(word: np.uint64, repeated: np.uint64) -> np.uint64:
    """Return which bytes of two words are equal: bit k is set if byte k is.

    Args:
        repeated: the byte to find, 8 times.
    """
    different = word ^ repeated
    # Set the top bit of every byte that is zero in `different`. Adding 0x7F carries into the top
    # bit from any other bit, and never into the next byte.
    tops = ~(((different & _LOW_BITS) + _LOW_BITS) | different | _LOW_BITS)
    return ((tops >> np.uint64(7)) * _GATHER) >> np.uint64(56)


@nb.njit(nogil=True, cache=True)
def _find_ends(data: np.ndarray, delimiter: int, ends: np.ndarray) -> np.int64:
    """Find all delimiters and line breaks.

    The loop takes 64 bytes at a time: it first sets a bit for each separator, then writes the
    places of the bits from the lowest on. Room for 64 ends is left at every turn, so the places
    written behind the last one do no harm.

    Args:
        data: uint8 [bytes].
        ends: int32, filled with the places.

    Returns:
        The number of places, or len(ends) if they may not fit.
    """
    delimiters, newlines = np.uint64(delimiter) * _EVERY_BYTE, np.uint64(_NEWLINE) * _EVERY_BYTE
    count = np.int64(0)
    for first in range(0, len(data), 64):
        separators = np.uint64(0)
        if first + 64 <= len(data):
            for k in range(8):
                word = load_word(data, first + 8 * k)
                separators |= (_equal_bytes(word, delimiters) | _equal_bytes(word, newlines)) << np.uint64(8 * k)
        else:
            for at in range(first, len(data)):
                if data[at] == delimiter or data[at] == _NEWLINE:
                    separators |= np.uint64(1) << np.uint64(at - first)
        if count + 64 > len(ends):
            return np.int64(len(ends))
        # Write eight places at a time, needed or not. A loop that stops at the last bit stops at a
        # point that no processor can predict.
        kept = count
        while separators != np.uint64(0):
            for k in range(8):
                ends[kept + k] = first + lowest_bit(separators)
                count += separators != np.uint64(0)
                separators &= separators - np.uint64(1)
            kept += 8
    return count


@nb.njit(nogil=True, cache=True)
def _begin_lines(data: np.ndarray, returns: bool, ends: np.ndarray, starts: np.ndarray) -> bool:
    """Fill starts, and treat a line break of two characters as one.

    Args:
        returns: whether the data has carriage returns.
        ends: all delimiters and line breaks. There must be as many as fields, and as many line
            breaks as lines. Adjusted for carriage returns.

    Returns:
        Whether all lines are plain.
    """
    start = np.int64(0)
    for row in range(len(starts)):
        end = np.int64(ends[row, -1])
        # The last field of a row must end with the line. If not, a line has another number of
        # fields.
        if end < len(data) and data[end] != _NEWLINE:
            return False
        starts[row] = start
        next_start = end + 1
        if returns and end > start and data[end - 1] == _RETURN:
            end -= 1
            ends[row, -1] = end
        if end == start:
            return False
        start = next_start
    return True


@nb.njit(nogil=True, cache=True)
def _parse_numbers(
    data: np.ndarray, starts: np.ndarray, ends: np.ndarray, places: np.ndarray, values: np.ndarray, plain: np.ndarray
) -> None:
    """Parse columns of plain decimals.

    Up to eight digits fit one word. Each byte is checked to be a digit. Neighbours are then
    combined three times: digits to pairs, pairs to fours, fours to eight. Each time, one
    multiplication adds ten (a hundred, ten thousand) times the left number to the right one. Longer
    values, and values with a sign or a point, are parsed character by character.

    Args:
        places: int64, the columns to parse.
        values: float64 [places, lines], filled. NaN where empty.
        plain: bool [places], set to False for a column with a value that is not a plain decimal.
    """
    lines = len(starts)
    for first in range(0, lines, _CHUNK_LINES):
        for k in range(len(places)):
            place = places[k]
            if not plain[k]:
                continue
            for row in range(first, min(first + _CHUNK_LINES, lines)):
                at = np.int64(starts[row]) if place == 0 else np.int64(ends[row, place - 1]) + 1
                end = np.int64(ends[row, place])
                if at == end:
                    values[k, row] = np.nan
                    continue
                if end - at <= 8 and at + 8 <= len(data):
                    # Shift the digits to the top of the word and put zeros before them.
                    shift = np.uint64(8 * (8 - (end - at)))
                    word = (load_word(data, at) << shift) | (_ZEROS & ((np.uint64(1) << shift) - np.uint64(1)))
                    # A digit is 0x30 .. 0x39. Its high half is 3, and still is after adding 6.
                    if (word & _HIGH_HALVES) == _ZEROS and ((word + _SIX_EACH) & _HIGH_HALVES) == _ZEROS:
                        word = ((word & np.uint64(0x0F0F0F0F0F0F0F0F)) * np.uint64(2561)) >> np.uint64(8)
                        word = ((word & np.uint64(0x00FF00FF00FF00FF)) * np.uint64(6553601)) >> np.uint64(16)
                        word = ((word & np.uint64(0x0000FFFF0000FFFF)) * np.uint64(42949672960001)) >> np.uint64(32)
                        values[k, row] = np.int64(word)
                        continue
                values[k, row] = _decimal(data, at, end)
                if np.isnan(values[k, row]):
                    plain[k] = False
                    break


@nb.njit(nogil=True, cache=True)
def _decimal(data: np.ndarray, at: int, end: int) -> float:
    """Return data[at:end], which is not empty, as a number.

    Returns NaN if it is not a plain decimal of up to 15 digits.
    """
    negative = data[at] == _MINUS
    if negative:
        at += 1
    if at == end or data[at] == _POINT or data[end - 1] == _POINT:
        return np.nan
    mantissa = digits = behind = np.int64(0)
    point = False
    for i in range(at, end):
        digit = np.int64(data[i]) - np.int64(_ZERO)
        if 0 <= digit <= 9:
            mantissa = mantissa * 10 + digit
            digits += 1
            behind += point
        elif data[i] == _POINT and not point:
            point = True
        else:
            return np.nan
        if digits > _MOST_DIGITS:
            return np.nan
    value = np.float64(mantissa) / _POWERS[behind]
    return -value if negative else value


@nb.njit(nogil=True, cache=True)
def _find_texts(starts: np.ndarray, ends: np.ndarray, places: np.ndarray, sizes: np.ndarray) -> None:
    """Add up the bytes of each column at places, in sizes, int64 [places]."""
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
    """Copy the bytes of each column at places to out.

    Args:
        bases: [places + 1], where each column begins in out.
        offsets: int32 [places, lines + 1], filled: where each value begins, counted from the base
            of its column.
        out: uint8, with room for 8 more bytes behind each column.
    """
    lines = len(starts)
    offsets[:, 0] = 0
    for first in range(0, lines, _CHUNK_LINES):
        for k in range(len(places)):
            place = places[k]
            to = bases[k] + offsets[k, first]
            for row in range(first, min(first + _CHUNK_LINES, lines)):
                start = np.int64(starts[row]) if place == 0 else np.int64(ends[row, place - 1]) + 1
                size = ends[row, place] - start
                # Copy words, unless one would read behind the end of the data.
                if start + size + 8 <= len(data):
                    for i in range(0, size, 8):
                        store_word(out, to + i, load_word(data, start + i))
                else:
                    for i in range(size):
                        out[to + i] = data[start + i]
                to += size
                offsets[k, row + 1] = to - bases[k]


@dataclass(frozen=True, slots=True)
class Bounds:
    """The whole rows of a block.

    Attributes:
        starts: int64 [rows + 1], the byte at which each row begins, and the byte at which the last
            one ends.
        lines: int64 [rows], the line in which each row begins, from 0.
        broken: bool [rows], whether a row that must be one line is not: a quote is open at its end,
            or a carriage return is outside of quotes.
        end_line: the line after the last row.
        open_line: the line of the quote that is open at the end of the block, or -1.
        long_line: the line of a quote whose value spans too many lines, or -1. Nothing behind it
            was looked at.
    """

    starts: np.ndarray
    lines: np.ndarray
    broken: np.ndarray
    end_line: int
    open_line: int
    long_line: int

    @staticmethod
    def of(data: bytes, delimiter: str, quoting: bool, most_lines: int = 0, last: bool = True) -> Bounds:
        """Find the rows of a block that begins with a row.

        Args:
            most_lines: the lines that a value may span. If 0, every line is a row, with or without
                quotes.
            last: whether the file ends with the block, so that the rest at its end is a row.
        """
        most = data.count(b"\n") + data.count(b"\r") + 1
        starts, lines, broken = np.empty(most + 1, np.int64), np.empty(most, np.int64), np.zeros(most, np.bool_)
        characters = np.frombuffer(data, np.uint8)
        rows, end_line, open_line, long_line = _find_rows(
            characters, np.uint8(ord(delimiter)), quoting, most_lines, last, starts, lines, broken
        )
        return Bounds(starts[: rows + 1], lines[:rows], broken[:rows], end_line, open_line, long_line)


@nb.njit(nogil=True, cache=True)
def _special_characters(delimiter: int) -> np.ndarray:
    """Return the characters that the rules of quoting depend on, as bool [256].

    Most characters are not special, and take a single check.
    """
    special = np.zeros(256, np.bool_)
    for character in (_NEWLINE, _RETURN, _QUOTE, delimiter):
        special[character] = True
    return special


@nb.njit(nogil=True, cache=True)
def _find_rows(
    data: np.ndarray,
    delimiter: int,
    quoting: bool,
    most_lines: int,
    last: bool,
    starts: np.ndarray,
    lines: np.ndarray,
    broken: np.ndarray,
) -> tuple[int, int, int, int]:
    """Fill starts, lines and broken, as `Bounds` describes them.

    The outer loop takes one row a turn, the inner loop one character. While `begins` is true, the
    next character begins a value, so a quote there opens it.

    Returns:
        The number of rows, end_line, open_line and long_line.
    """
    rows = at = line = 0
    size = len(data)
    special = _special_characters(delimiter)
    while at < size:
        starts[rows], lines[rows] = at, line
        begins = True
        ended = quoted = False
        open_line = -1
        while at < size and not ended:
            character = data[at]
            at += 1
            if not special[character]:
                begins = False
            elif quoted:
                if character == _QUOTE:
                    if at < size and data[at] == _QUOTE:
                        at += 1
                    else:
                        quoted = False
                elif character == _NEWLINE:
                    line += 1
                    if not most_lines:
                        broken[rows] = ended = True
                    elif line - open_line >= most_lines:
                        return rows, line, open_line, open_line
            elif character == _NEWLINE:
                line += 1
                ended = True
            elif character == _RETURN and at < size and data[at] == _NEWLINE:
                pass
            elif character == _RETURN and most_lines and (at < size or last):
                line += 1
                ended = True
            elif character == _RETURN:
                broken[rows] |= at < size
            elif character == _QUOTE and quoting and begins:
                quoted = True
                open_line = line
            begins = not quoted and character == delimiter
        if not ended:
            if not last or (quoted and most_lines):
                return rows, int(lines[rows]), open_line if quoted else -1, -1
            broken[rows] |= quoted
            line += 1
        rows += 1
        starts[rows] = at
    starts[rows] = at
    return rows, line, -1, -1
