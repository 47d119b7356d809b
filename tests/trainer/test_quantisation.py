"""Weights in few bits: never further off than without the search, near the best that its grid has, and exact where no width can hold them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from foreload.trainer.checkpoints.files import WIDTHS
from foreload.trainer.checkpoints.quantisation import BINS, MOST_CUT, decode, encode, packed_bytes

SEARCHED = [bits for bits in WIDTHS if bits <= 4]
LARGEST = float(np.finfo(np.float32).max)


def plain(weights: np.ndarray, bits: int) -> np.ndarray:
    """What rows of one part become with the ends of their range: float32 [n, W]."""
    low = weights.min(axis=1, keepdims=True)
    scale = ((weights.max(axis=1, keepdims=True) - low) / np.float32((1 << bits) - 1)).astype(np.float32)
    wide = weights.astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        codes = np.floor((wide - low) / scale.astype(np.float64) + 0.5)
    codes = np.where(scale > 0, np.clip(codes, 0, (1 << bits) - 1), 0)
    return np.asarray(low + scale * codes.astype(np.float32), np.float32)


def squared_error(weights: np.ndarray, decoded: np.ndarray) -> np.ndarray:
    return np.asarray(((weights.astype(np.float64) - decoded) ** 2).sum(axis=1))


def best_of_the_grid(weights: np.ndarray, bits: int) -> np.ndarray:
    """The least squared error of each row over all pairs of ends, in float64, one pair after the other."""
    wide = weights.astype(np.float64)
    least, spread = wide.min(axis=1, keepdims=True), np.ptp(wide, axis=1, keepdims=True)
    errors = []
    for low in range(MOST_CUT + 1):
        for high in range(MOST_CUT + 1 - low):
            bias, scale = least + spread * low / BINS, spread * (1 - (low + high) / BINS) / ((1 << bits) - 1)
            codes = np.clip(np.round((wide - bias) / scale), 0, (1 << bits) - 1)
            errors.append(((wide - bias - scale * codes) ** 2).sum(axis=1))
    return np.asarray(np.min(errors, axis=0))


def some(count: int, width: int, seed: int = 0) -> np.ndarray:
    """Rows as trained ones are, and more crooked ones."""
    random = np.random.default_rng(seed)
    rows = random.normal(size=(count, width)) * random.lognormal(sigma=3, size=(count, 1))
    rows[::3] += random.normal(size=(len(rows[::3]), 1)) * 100
    rows[1::3] = random.standard_t(2, size=rows[1::3].shape)
    return rows.astype(np.float32)


@given(
    st.sampled_from(SEARCHED),
    arrays(np.float32, st.tuples(st.integers(1, 4), st.integers(1, 40)), elements=st.floats(width=32, allow_nan=False)),
)
@settings(deadline=None, max_examples=100)
def test_the_search_is_never_worse_than_the_ends_of_the_range(bits: int, weights: np.ndarray) -> None:
    rows = encode(weights, [weights.shape[1]], bits)
    decoded = decode(rows, [weights.shape[1]])
    held = np.setdiff1d(np.arange(len(weights)), rows.exact)
    assert np.isfinite(decoded[held]).all()
    with np.errstate(over="ignore"):
        without = squared_error(weights[held], plain(weights[held], bits))
    assert (squared_error(weights[held], decoded[held]) <= without).all()
    assert np.array_equal(decoded[rows.exact].view(np.uint32), weights[rows.exact].view(np.uint32))


@pytest.mark.parametrize("bits", SEARCHED)
@pytest.mark.parametrize("width", [3, 8, 32])
def test_the_search_is_within_a_hundredth_of_the_best_on_its_grid(bits: int, width: int) -> None:
    weights = some(300, width)
    rows = encode(weights, [width], bits)
    assert not len(rows.exact)
    # Of rows far from zero and close together, what is decoded is rounded to float32, which the grid is not.
    rounding = 1.5 * np.sqrt(width) * np.spacing(np.abs(weights).max(axis=1)).astype(np.float64)
    error = np.sqrt(squared_error(weights, decode(rows, [width])))
    assert (error <= np.sqrt(1.01 * best_of_the_grid(weights, bits)) + rounding).all()


def test_fewer_bits_are_as_far_off_as_they_may_be() -> None:
    """Of normally distributed rows, which is about what trained ones are; the ends of the range alone are 0.005, 0.078, 0.17 and 0.39 off."""
    weights = np.random.default_rng(0).normal(size=(2000, 32)).astype(np.float32)
    norm = np.linalg.norm(weights)
    off = [float(np.linalg.norm(weights - decode(encode(weights, [32], bits), [32])) / norm) for bits in WIDTHS]
    assert all(one < most for one, most in zip(off, (0.0048, 0.073, 0.147, 0.298), strict=True)), off


@pytest.mark.parametrize("bits", WIDTHS)
def test_what_no_width_holds_is_exact(bits: int) -> None:
    weights = some(20, 6)
    for row, value in enumerate((np.nan, np.inf, -np.inf, np.float32(1e-40), -np.float32(1e-42))):
        weights[row] = np.abs(weights[row]) * (1e-39 if row > 2 else 1)
        weights[row, 3] = value
    weights[0].view(np.uint32)[3] = 0x7FA12345  # a NaN with a payload
    weights[5, :2] = LARGEST, -LARGEST
    weights[6] = [1e-44, 0, 0, 0, 0, 0]
    weights[7] = np.float32(1e-39)
    weights[8, 4:] = 0, np.float32(2e-38)
    rows = encode(weights, [4, 2], bits)
    decoded = decode(rows, [4, 2])
    assert set(range(9)) <= set(rows.exact.tolist()) | {8}
    assert not set(range(9, 20)) & set(rows.exact.tolist())
    assert np.array_equal(decoded[rows.exact].view(np.uint32), weights[rows.exact].view(np.uint32))
    assert np.isfinite(decoded[8:]).all()


@pytest.mark.parametrize("bits", WIDTHS)
def test_large_weights_stay_finite(bits: int) -> None:
    weights = (some(50, 8) % 1 * np.float32(3e38)).astype(np.float32)
    weights[0] = [LARGEST, 0, 1, 2, 3, 4, 5, 6]
    decoded = decode(encode(weights, [8], bits), [8])
    assert np.isfinite(decoded).all()
    assert (np.abs(decoded.astype(np.float64) - weights) <= 1.01 * np.ptp(weights.astype(np.float64), axis=1)[:, None]).all()


@pytest.mark.parametrize("bits", WIDTHS)
def test_every_width_is_packed(bits: int) -> None:
    """Weights that are codes, so that nothing is rounded, in two parts with ends of their own."""
    random = np.random.default_rng(bits)
    for width in range(1, 71):
        first = width // 2
        parts = [first, width - first] if first else [width]
        weights = random.integers(0, 1 << bits, (9, width)).astype(np.float32)
        for columns in np.split(np.arange(width), [first]):
            weights[:, columns[:1]], weights[:, columns[1:][-1:]] = 0, (1 << bits) - 1
        weights[:, first:] *= 2
        rows = encode(weights, parts, bits)
        assert rows.codes.shape == (9, packed_bytes(width, bits))
        assert rows.scale.shape == (9, len(parts))
        assert np.array_equal(decode(rows, parts), weights), (width, bits)


@pytest.mark.parametrize("bits", WIDTHS)
def test_constants_are_exact(bits: int) -> None:
    constants = np.array([0.0, -0.0, 1 / 3, -1e-38, LARGEST, -LARGEST, 1e-45], np.float32)
    weights = np.repeat(constants[:, None], 5, axis=1)
    assert np.array_equal(decode(encode(weights, [5], bits), [5]).view(np.uint32), weights.view(np.uint32))


def test_none_and_other_bits() -> None:
    assert decode(encode(np.empty((0, 4), np.float32), [4], 2), [4]).shape == (0, 4)
    with pytest.raises(ValueError, match=r"bits must be one of .*; got 5"):
        encode(np.zeros((1, 4), np.float32), [4], 5)
    with pytest.raises(ValueError, match="must have 3 columns; got 4"):
        encode(np.zeros((1, 4), np.float32), [3], 4)
