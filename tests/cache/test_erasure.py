"""The erasure code against a twin in plain Python, whose arithmetic is polynomials bit by bit."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreload.cache.errors import CacheError
from foreload.cache.parity.erasure import Code, accumulate, difference


def product(a: int, b: int) -> int:
    """a * b in GF(2^8): the product of polynomials over GF(2), reduced by x^8 + x^4 + x^3 + x^2 + 1."""
    total = 0
    for bit in range(8):
        if b >> bit & 1:
            total ^= a << bit
    for bit in range(14, 7, -1):
        if total >> bit & 1:
            total ^= 0b1_0001_1101 << (bit - 8)
    return total


def twin_parity(code: Code, members: np.ndarray) -> np.ndarray:
    """Parity rows of a stripe, byte by byte."""
    out = np.zeros((code.r, members.shape[1]), np.uint8)
    for i, j, b in itertools.product(range(code.r), range(code.k), range(members.shape[1])):
        out[i, b] ^= product(int(code.coefficients[i, j]), int(members[j, b]))
    return out


CODES = [(1, 1), (2, 1), (4, 1), (2, 2), (4, 2), (5, 3), (10, 4)]


@st.composite
def stripes(draw: st.DrawFn) -> tuple[Code, np.ndarray]:
    """A code and the members of a stripe of it."""
    k, r = draw(st.sampled_from(CODES))
    row_bytes = 4 * draw(st.integers(1, 12))
    data = draw(st.binary(min_size=k * row_bytes, max_size=k * row_bytes))
    return Code(k, r), np.frombuffer(data, np.uint8).reshape(k, row_bytes)


@given(stripes())
@settings(deadline=None)
def test_parity_is_the_twins(stripe: tuple[Code, np.ndarray]) -> None:
    code, members = stripe
    assert np.array_equal(code.encode(members), twin_parity(code, members))


@given(st.integers(0, 255))
def test_a_row_times_every_factor_is_the_twins(factor: int) -> None:
    source = np.arange(256, dtype=np.uint8).reshape(1, 256)
    target = np.zeros((1, 256), np.uint8)
    accumulate(source, np.zeros(1, np.int64), np.array([factor], np.uint8), target, np.zeros(1, np.int64))
    assert target[0].tolist() == [product(factor, byte) for byte in range(256)]


@given(stripes(), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_an_update_gives_the_parity_of_the_new_members(stripe: tuple[Code, np.ndarray], random: object) -> None:
    code, old = stripe
    new = old.copy()
    changed = np.arange(0, code.k, 2)
    new[changed] = np.roll(old[changed], 1, axis=1) ^ np.uint8(0x5A)  # anything else
    parity = code.encode(old)
    delta = difference(new, old, np.ones(code.k, bool))
    for i in range(code.r):
        # All changed members at once: the same target comes several times.
        accumulate(delta, changed, code.coefficients[i, changed], parity, np.full(len(changed), i))
    assert np.array_equal(parity, twin_parity(code, new))


@given(stripes(), st.data())
@settings(deadline=None)
def test_a_difference_is_to_nothing_where_there_is_nothing_to_update(
    stripe: tuple[Code, np.ndarray], data: st.DataObject
) -> None:
    _, old = stripe
    new = old ^ np.uint8(0xA5)
    where = np.array(data.draw(st.lists(st.booleans(), min_size=len(old), max_size=len(old))))
    assert np.array_equal(difference(new, old, where), np.where(where[:, None], new ^ old, new))


@given(stripes(), st.data())
@settings(deadline=None)
def test_any_r_lost_rows_are_decoded(stripe: tuple[Code, np.ndarray], data: st.DataObject) -> None:
    code, members = stripe
    rows = np.concatenate([members, twin_parity(code, members)])
    lost = data.draw(st.permutations(range(code.k + code.r)))[: code.r]
    known = [place for place in range(code.k + code.r) if place not in lost][: code.k]
    for wanted in lost:
        found = np.zeros((1, rows.shape[1]), np.uint8)
        accumulate(rows, np.array(known), code.decoding(known, wanted), found, np.zeros(code.k, np.int64))
        assert np.array_equal(found[0], rows[wanted])


@pytest.mark.parametrize(("k", "r"), [(2, 1), (4, 2), (3, 3)])
def test_every_pattern_of_losses_is_decoded(k: int, r: int) -> None:
    code = Code(k, r)
    members = np.random.default_rng(k).integers(0, 256, (k, 132), np.uint8)
    rows = np.concatenate([members, code.encode(members)])
    for known in itertools.combinations(range(k + r), k):
        for wanted in set(range(k + r)) - set(known):
            found = np.zeros((1, 132), np.uint8)
            accumulate(rows, np.array(known), code.decoding(known, wanted), found, np.zeros(k, np.int64))
            assert np.array_equal(found[0], rows[wanted]), (known, wanted)


def test_one_parity_row_is_xor() -> None:
    assert (Code(7, 1).coefficients == 1).all()
    assert (Code(4, 2).coefficients[0] == 1).all()


def test_a_negative_target_is_left_out() -> None:
    target = np.zeros((1, 8), np.uint8)
    accumulate(np.ones((2, 8), np.uint8), np.arange(2), np.array([1, 3], np.uint8), target, np.array([-1, -1]))
    assert not target.any()


def test_too_few_known_rows_and_too_long_stripes_are_refused() -> None:
    with pytest.raises(CacheError, match="needs 2 different rows"):
        Code(2, 1).decoding([0, 0], 1)
    with pytest.raises(CacheError, match="k \\+ r <= 256"):
        Code(255, 2)
