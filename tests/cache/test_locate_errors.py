"""What stripes tell by themselves: everything that the code's distance allows is restored, and nothing else is touched."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreload.cache.parity.decoding import locate_errors
from foreload.cache.parity.erasure import Code

CODES = [(1, 1), (2, 1), (4, 1), (2, 2), (3, 2), (4, 2), (2, 4)]


def stripes(code: Code, count: int, row_bytes: int, seed: int) -> np.ndarray:
    """Random stripes of the code."""
    random = np.random.default_rng(seed)
    members = random.integers(0, 256, (count, code.k, row_bytes), np.uint8)
    return np.stack([np.concatenate([own, code.encode(own)]) for own in members])


@pytest.mark.parametrize(("k", "r"), CODES)
def test_whole_stripes_are_left_as_they_are(k: int, r: int) -> None:
    code = Code(k, r)
    rows = stripes(code, 30, 20, 1)
    before = rows.copy()
    verdict = locate_errors(code, rows, np.zeros((30, k + r), bool))
    assert not verdict.restored.any()
    assert not verdict.uncorrectable.any()
    assert np.array_equal(rows, before)


@given(st.sampled_from(CODES), st.integers(0, 1 << 30), st.data())
def test_erased_and_wrong_rows_are_restored_as_far_as_the_distance_goes(
    k_r: tuple[int, int], seed: int, data: st.DataObject
) -> None:
    code = Code(*k_r)
    width, random = code.k + code.r, np.random.default_rng(seed)
    rows = stripes(code, 8, 16, seed)
    before, erased, wrong = rows.copy(), np.zeros((8, width), bool), np.zeros((8, width), bool)
    for i in range(8):
        gone = data.draw(st.integers(0, code.r))
        more = data.draw(st.integers(0, (code.r - gone) // 2))
        places = random.permutation(width)
        erased[i, places[:gone]] = True
        wrong[i, places[gone : gone + more]] = True
    rows[erased] = random.integers(0, 256, (int(erased.sum()), 16), np.uint8)
    rows[wrong, random.integers(0, 16)] ^= np.uint8(1 << int(random.integers(0, 8)))
    verdict = locate_errors(code, rows, erased)
    assert np.array_equal(rows, before)
    assert np.array_equal(verdict.restored, erased | wrong)
    assert not verdict.uncorrectable.any()


@pytest.mark.parametrize(("k", "r"), CODES)
def test_what_cannot_be_told_is_left_as_it_is(k: int, r: int) -> None:
    code = Code(k, r)
    rows = stripes(code, 3, 16, 2)
    erased = np.zeros((3, k + r), bool)
    erased[0, : r + 1] = True  # more than parity covers
    # One more wrong row than is singled out, each in bytes of its own, of which no other set of rows gives an account.
    for place in range(r // 2 + 1):
        rows[1, place, 4 * place] ^= 0x55
        rows[1, place, 4 * place + 1] ^= 0xAA
    changed = rows.copy()
    verdict = locate_errors(code, rows, erased)
    assert verdict.uncorrectable.tolist() == [True, True, False]
    assert not verdict.restored.any()
    assert np.array_equal(rows, changed)
