"""Which rows of stripes are wrong, as far as the stripes themselves show, and what they must be. Pure functions on arrays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from foreload.cache.parity.erasure import Code, accumulate


@dataclass(frozen=True, slots=True)
class Verdict:
    """What n stripes show of their rows.

    restored: bool [n, k + r], rows that were wrong or not there, and are now as the rest of their stripe says. uncorrectable: bool [n],
    stripes that do not agree and do not show which of their rows is wrong.
    """

    restored: np.ndarray
    uncorrectable: np.ndarray


def locate_errors(code: Code, rows: np.ndarray, erased: np.ndarray) -> Verdict:
    """Check stripes, and restore in place what is known for certain.

    rows: uint8 [n, k + r, row_bytes], contiguous, members first, row_bytes a multiple of 4, zeros where nothing was ever stored; erased:
    bool [n, k + r], rows that are known to be wrong. With e of these in a stripe, up to (r - e) / 2 further wrong rows are singled out: the
    code's distance is r + 1, so no two sets of that many rows explain the same stripe. Other stripes stay as they are.
    """
    count = len(rows)
    restored, uncorrectable = np.zeros(erased.shape, bool), np.zeros(count, bool)
    for gone, left in _patterns(erased):
        for apart in _explanations(code, gone):
            known = [place for place in range(code.k + code.r) if place not in apart]
            # With exactly k rows known there is nothing left to compare, and any stripe agrees: callers check what was restored.
            agree = _agree(code, rows, left, known)
            of = left[agree]
            for place in apart:
                rows[of, place] = combined(code, rows, of, known[: code.k], place)
                restored[of, place] = True
            left = left[~agree]
            if not left.size:
                break
        uncorrectable[left] = True
    return Verdict(restored, uncorrectable)


def _patterns(erased: np.ndarray) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
    """The sets of places that are erased together, and the stripes (int64 [m]) of each."""
    any_erased = erased.any(axis=1)
    clean = np.flatnonzero(~any_erased)
    if clean.size:
        yield (), clean
    others = np.flatnonzero(any_erased)
    patterns, pattern = np.unique(erased[others], axis=0, return_inverse=True)
    for number, places in enumerate(patterns):
        yield tuple(np.flatnonzero(places).tolist()), others[pattern.reshape(-1) == number]


def _explanations(code: Code, gone: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The sets of places that may be wrong, each with those that are gone: fewest first; none where more than r are gone."""
    width = code.k + code.r
    others = [place for place in range(width) if place not in gone]
    for more in range((code.r - len(gone)) // 2 + 1):
        for suspects in combinations(others, more):
            yield tuple(sorted((*gone, *suspects)))


def _agree(code: Code, rows: np.ndarray, stripes: np.ndarray, known: list[int]) -> np.ndarray:
    """Whether the rows at the known places, at least k, are those of one stripe of the code: bool [stripes]."""
    agree = np.ones(len(stripes), bool)
    for place in known[code.k :]:
        agree &= (combined(code, rows, stripes, known[: code.k], place) == rows[stripes, place]).all(axis=1)
    return agree


def combined(code: Code, rows: np.ndarray, stripes: np.ndarray, known: list[int], place: int) -> np.ndarray:
    """What the rows at k known places of stripes (int64 [m]) say of the one at `place`: uint8 [m, row_bytes]."""
    width, row_bytes = rows.shape[1:]
    count = len(stripes)
    out = np.zeros((count, row_bytes), np.uint8)
    sources = (stripes[:, None] * width + np.array(known)).reshape(-1)
    factors = np.tile(code.decoding(known, place), count)
    accumulate(rows.reshape(-1, row_bytes), sources, factors, out, np.repeat(np.arange(count), code.k))
    return out
