"""Where the rows of delimited text start and end, by the rules of quoting: as Arrow's reader cuts them, which does not say where.

A quote opens a value only where the value begins; two in a quoted value stand for one; after the closing quote all is taken as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foreload.base.compiled import nb

_NEWLINE, _RETURN, _QUOTE = (np.uint8(ord(c)) for c in '\n\r"')


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
