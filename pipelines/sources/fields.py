"""Cut delimited text into columns by compiled loops where it is plain: one line a record, no quotes, every line with all its fields.

What is not plain is left to the general reader, which knows quotes and says what is wrong where.

Where rows of quoted text start and end is decided as Arrow's reader does, which does not say where
that is. A quote opens a value only where the value begins; two quotes in a quoted value stand for
one; after the closing quote everything is taken as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from foreload.base.compiled import nb
from foreload.base.hashing import load_word, lowest_bit, store_word

_NEWLINE, _RETURN, _QUOTE, _MINUS, _POINT, _ZERO = (np.uint8(ord(c)) for c in '\n\r"-.0')
_CHUNK_LINES = 512  # lines whose bytes and bounds stay in cache while one column after the other is taken from them
_MOST_DIGITS = 15  # such an integer and such a power of ten are exact in float64, so that their quotient is rounded once
_POWERS = 10.0 ** np.arange(_MOST_DIGITS + 1)
_EVERY_BYTE, _LOW_BITS = np.uint64(0x0101010101010101), np.uint64(0x7F7F7F7F7F7F7F7F)
_GATHER = np.uint64(0x0102040810204080)  # a multiplication by it brings the lowest bits of 8 bytes together in the highest byte
_ZEROS, _HIGH_HALVES, _SIX_EACH = np.uint64(0x30) * _EVERY_BYTE, np.uint64(0xF0) * _EVERY_BYTE, np.uint64(6) * _EVERY_BYTE
_MOST_BYTES = (1 << 31) - 9  # places are int32

Holds = Callable[[np.ndarray], np.ndarray]
"""Whether each value of a column keeps a rule: float64 [n] -> bool [n]."""


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
        field_ends = np.empty(lines * columns + 128, np.int32)
        count = _find_ends(characters, np.uint8(ord(delimiter)), field_ends)
        if not data.endswith(b"\n") and count < len(field_ends):
            field_ends[count] = len(data)
            count += 1
        starts, ends = np.empty(lines, np.int32), field_ends[: lines * columns].reshape(lines, columns)
        if count != lines * columns or not _begin_lines(characters, returns, ends, starts):
            return None
        return Fields(characters, starts, ends)

    def columns(self, places: Iterable[int], numbers: Collection[int], rules: Sequence[tuple[int, Holds]]) -> dict[int, pa.Array]:
        """The columns at places: string [lines], null where empty, or float64 [lines], NaN where empty.

        numbers: the places of columns that are numbers wherever all their values are plain decimals of up to 15 digits, and keep all rules
        that their column has.
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
def _equal_bytes(word: np.uint64, repeated: np.uint64) -> np.uint64:
    """A bit for every byte in which two words are equal, 8 in all: bit k for byte k."""
    different = word ^ repeated
    # The top bit of every byte that is zero in `different`: adding 0x7F carries into it from any other bit, and never into the next byte.
    tops = ~(((different & _LOW_BITS) + _LOW_BITS) | different | _LOW_BITS)
    return ((tops >> np.uint64(7)) * _GATHER) >> np.uint64(56)


@nb.njit(nogil=True, cache=True)
def _find_ends(data: np.ndarray, delimiter: int, ends: np.ndarray) -> np.int64:
    """Where delimiters and line breaks stand; returns how many there are, or len(ends) where they may be too many for it.

    64 bytes at a time: a bit for each that separates fields, then the bits' places from the lowest on. The room left in ends is never below 64, so
    what is written behind the last place does no harm.
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
        # Eight at a time, wanted or not: a loop that ends with the last bit ends at a place that no processor guesses.
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
    """Fill starts from ends, and take line breaks of two characters for one; whether all lines are plain.

    ends: all delimiters and line breaks, as many as fields; there are as many line breaks as lines.
    """
    start = np.int64(0)
    for row in range(len(starts)):
        end = np.int64(ends[row, -1])
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
    """values float64 [places, lines]; plain bool [places]: made false where a value is no plain decimal.

    Up to eight digits are one word: each byte is checked to be a digit, and neighbours are put together three times, digits to pairs, pairs to fours,
    fours to eight, each by one multiplication that adds ten (a hundred, ten thousand) times the left one to the right one. Anything longer, or with
    a sign or a point, goes character by character.
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
                    # The digits to the top of the word, zeros before them.
                    shift = np.uint64(8 * (8 - (end - at)))
                    word = (load_word(data, at) << shift) | (_ZEROS & ((np.uint64(1) << shift) - np.uint64(1)))
                    # A digit is 0x30 .. 0x39: its high half is 3, and still is with 6 added.
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
    """data[at:end], not empty, as a number; NaN where it is no plain decimal of up to 15 digits."""
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


@dataclass(frozen=True, slots=True)
class Bounds:
    """The whole rows of a block.

    starts: int64 [rows + 1], bytes: where each begins, and where the last one ends. lines: int64 [rows], the line that each begins in, from
    0. broken: bool [rows], whether a row that must be one line is none: a quote is open at its end, or a carriage return stands outside
    of quotes. end_line: the line that follows the last row. open_line: the line of the quote that is open where the block ends, or -1.
    long_line: the line of a quote whose value spans more lines than it may, or -1; then nothing behind it was looked at.
    """

    starts: np.ndarray
    lines: np.ndarray
    broken: np.ndarray
    end_line: int
    open_line: int
    long_line: int

    @staticmethod
    def of(data: bytes, delimiter: str, quoting: bool, most_lines: int = 0, last: bool = True) -> Bounds:
        """The rows of a block that begins with one. most_lines: that a value may span; 0 where every line is a row, whatever is quoted.
        last: the file ends with the block, so that what is left at its end is a row.
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
    """Bool [256]: the characters that the rules of quoting are about; most are not, and pass by one look."""
    special = np.zeros(256, np.bool_)
    for character in (_NEWLINE, _RETURN, _QUOTE, delimiter):
        special[character] = True
    return special


@nb.njit(nogil=True, cache=True)
def _find_rows(
    data: np.ndarray, delimiter: int, quoting: bool, most_lines: int, last: bool,
    starts: np.ndarray, lines: np.ndarray, broken: np.ndarray,
) -> tuple[int, int, int, int]:  # fmt: skip
    """Fill starts, lines and broken; returns rows, end_line, open_line and long_line.

    One row a turn of the outer loop, one character a turn of the inner one. `begins`: a value begins with the next character, so a quote there
    opens it.
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
