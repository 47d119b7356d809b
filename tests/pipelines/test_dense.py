"""Exact statistics and the three transforms, against rational arithmetic and the documented formulas."""

from __future__ import annotations

import json
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreload.base.codec import of_json, to_stored
from foreload.pipelines.samples.dense import (
    DenseStatistics,
    Scale,
    exact_sums,
    transform,
)
from foreload.pipelines.samples.features import Dense

floats = st.floats(allow_nan=False, allow_infinity=False, width=64, min_value=-1e150, max_value=1e150)


@given(st.lists(floats | st.sampled_from([5e-324, -5e-324, 2.0**-1022, 0.1, -0.0, 1e150, -1e150]), max_size=40))
def test_sums_are_exact(values: list[float]) -> None:
    total, squares = exact_sums(np.array(values, np.float64))
    exact = list(map(Fraction, values))
    assert Fraction(total, 1 << 1074) == sum(exact, Fraction())
    assert Fraction(squares, 1 << 2148) == sum((x * x for x in exact), Fraction())


@given(st.lists(st.lists(floats | st.just(math.nan), min_size=2, max_size=2), max_size=30), st.integers(0, 30))
def test_statistics_do_not_depend_on_the_pieces(rows: list[list[float]], cut: int) -> None:
    dense = np.array(rows, np.float64).reshape(-1, 2)
    whole = DenseStatistics.of(dense)
    parts = DenseStatistics.of(dense[cut:]).merge(DenseStatistics.of(dense[:cut])).merge(DenseStatistics.empty(2))
    assert parts == whole
    assert of_json(json.loads(json.dumps(to_stored(whole))), DenseStatistics) == whole
    of_ranges = whole.scales([Dense("x", "x", "min_max"), Dense("y", "y", "min_max")])
    for place, scale in enumerate(whole.scales([Dense("x", "x", "standard"), Dense("y", "y", "standard")])):
        known = [x for x in dense[:, place] if not math.isnan(x)]
        if not known:
            assert scale == of_ranges[place] == Scale(0.0, 1.0)
            continue
        assert of_ranges[place] == Scale(min(known), (max(known) - min(known)) or 1.0)
        mean = math.fsum(known) / len(known)
        exact = list(map(Fraction, known))
        variance = float((len(exact) * sum(x * x for x in exact) - sum(exact) ** 2) / len(exact) ** 2)
        assert scale == Scale(mean, math.sqrt(variance) or 1.0)


@pytest.mark.parametrize(
    ("values", "deviation"),
    [
        (1.7e12 + np.arange(60_000), math.sqrt((60_000**2 - 1) / 12)),  # milliseconds of an epoch, within a minute
        (1e8 + np.array([0.0, 1.0, 2.0]), 0.816496580927726),
        (1 + 1e-9 * np.array([0.0, 1.0]), 5.0000004137018233e-10),
        (np.full(1000, 0.1), 1.0),
    ],
)
def test_a_deviation_does_not_cancel(values: np.ndarray, deviation: float) -> None:
    (scale,) = DenseStatistics.of(values[:, None]).scales([Dense("x", "x", "standard")])
    assert scale.unit == pytest.approx(deviation, rel=1e-15)
    exact = list(map(Fraction, values.tolist()))
    mean = sum(exact) / len(exact)
    two_pass = math.sqrt(sum((x - mean) ** 2 for x in exact) / len(exact))
    assert scale.unit == pytest.approx(two_pass or 1.0, rel=1e-15)


def test_each_transform_is_as_documented_and_missing_is_zero_behind_it() -> None:
    values = np.array([[x] * 4 for x in (-2.0, 0.0, 3.0, 1e6, math.nan)])
    columns = (Dense("a", "a", "log"), Dense("b", "b", "standard"), Dense("c", "c", "none"), Dense("d", "d", "min_max"))
    out = transform(values, columns, (Scale(0, 1), Scale(1.5, 4.0), Scale(0, 1), Scale(-2.0, 5.0)))
    assert out.dtype == np.float32
    assert out[:, 0].tolist() == [0, 0, np.float32(math.log1p(3)), np.float32(math.log1p(1e6)), 0]
    assert out[:, 1].tolist() == [np.float32((x - 1.5) / 4) for x in (-2, 0, 3, 1e6)] + [0]
    assert out[:, 2].tolist() == [-2, 0, 3, 1e6, 0]
    assert out[:, 3].tolist() == [np.float32((x + 2) / 5) for x in (-2, 0, 3, 1e6)] + [0]
    with pytest.raises(ValueError, match="needs the statistics"):
        transform(values, columns, None)
