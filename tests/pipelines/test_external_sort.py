"""Sort keys compare as their values do; buckets cut any runs into consecutive parts of bounded size; orders slice like lists."""

from __future__ import annotations

import random
from decimal import Decimal, localcontext
from fractions import Fraction
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreload.base.codec import of_json, to_stored
from foreload.base.hashing import key
from foreload.pipelines.samples import external_sort, pieces
from foreload.pipelines.samples.pieces import Samples, write_piece

INT64 = st.integers(-(2**63), 2**63 - 1) | st.sampled_from([2**53, 2**53 + 1, 2**63 - 1, -(2**63), -(2**53) - 1, 0])


def sorted_by_key(column: pa.Array) -> list[object]:
    order = external_sort.stable_order(external_sort.order_keys(column))
    return column.take(pa.array(order)).to_pylist()


@given(st.lists(INT64 | st.none()))
def test_integers_sort_by_value_with_missing_ones_first(values: list[int | None]) -> None:
    assert sorted_by_key(pa.array(values, pa.int64())) == sorted(values, key=lambda v: (v is not None, v or 0))


@given(st.lists(st.integers(0, 2**64 - 1) | st.sampled_from([2**53 + 1, 2**63, 2**64 - 1])))
def test_unsigned_integers_sort_by_value(values: list[int]) -> None:
    assert sorted_by_key(pa.array(values, pa.uint64())) == sorted(values)


@given(st.lists(st.integers(0, 2**63 - 1)))
def test_an_integer_has_one_key_whatever_its_type(values: list[int]) -> None:
    signed, unsigned = (
        external_sort.order_keys(pa.array(values, pa.int64())),
        external_sort.order_keys(pa.array(values, pa.uint64())),
    )
    assert signed.to_pylist() == unsigned.to_pylist()


@given(st.lists(st.floats(allow_nan=False) | INT64))
def test_integers_and_floats_of_two_sources_sort_together_by_value(values: list[float]) -> None:
    keys = [
        external_sort.order_keys(pa.array([v], pa.int64() if isinstance(v, int) else pa.float64()))[0].as_py() for v in values
    ]
    by_key = sorted(range(len(values)), key=lambda i: keys[i])
    assert [values[i] for i in by_key] == sorted(values)


def near(value: float) -> st.SearchStrategy[Fraction]:
    """Numbers so close to another that float64 does not tell them apart."""
    return st.builds(lambda n, s: Fraction(value) + Fraction(n, 10**s), st.integers(-30, 30), st.integers(0, 20))


@given(
    st.lists(
        st.tuples(st.integers(-(10**55), 10**55), st.integers(0, 20)).map(lambda d: Fraction(d[0], 10 ** d[1]))
        | st.sampled_from([0.0, 0.5, -0.5, 2.0**53, -(2.0**53), 2.0**64, 1e30, -1e30]).flatmap(near)
        | st.floats(-1e50, 1e50).map(Fraction)
        | st.integers(0, 2**64 - 1).map(Fraction)
    )
)
def test_decimals_sort_by_value_among_integers_and_floats(values: list[Fraction]) -> None:
    keys = []
    for value in values:
        columns = []
        if value.denominator == 1 and 0 <= value < 2**64:
            columns.append(pa.array([int(value)], pa.uint64()))
        if abs(value) < 2**1000 and Fraction(float(value)) == value:
            columns.append(pa.array([float(value)]))
        for scale in (0, 1, 20):
            if (value * 10**scale).denominator == 1:
                with localcontext(prec=100):
                    decimal = Decimal(int(value * 10**scale)).scaleb(-scale)
                # A slice: its values do not begin where its buffers do.
                columns.append(pa.array([None, decimal, decimal], pa.decimal256(76, scale)).slice(1))
        found = {external_sort.order_keys(column)[0].as_py() for column in columns}
        assert len(found) == 1, value
        keys.append(found.pop())
    assert [values[i] for i in sorted(range(len(values)), key=lambda i: keys[i])] == sorted(values)


def test_missing_decimals_come_first() -> None:
    column = pa.array([Decimal("1.5"), None, Decimal("-0.000001"), Decimal("1.500001")], pa.decimal128(18, 6))
    assert sorted_by_key(column) == [None, Decimal("-0.000001"), Decimal("1.5"), Decimal("1.500001")]


@given(st.lists(st.text() | st.none()))
def test_texts_sort_by_their_bytes_after_missing_ones(values: list[str | None]) -> None:
    expected = sorted(values, key=lambda v: (v is not None, (v or "").encode()))
    assert sorted_by_key(pa.array(values, pa.string())) == expected


def test_times_and_booleans_sort_by_value() -> None:
    stamps = pa.array([5, None, -3, 2**62], pa.timestamp("ns"))
    assert external_sort.stable_order(external_sort.order_keys(stamps)).tolist() == [1, 2, 0, 3]
    assert external_sort.stable_order(external_sort.order_keys(pa.array([True, False]))).tolist() == [1, 0]


@given(st.integers(0, 2**64 - 1), st.integers(0, 9), st.lists(st.integers(0, 2**62), max_size=20))
def test_shuffle_keys_are_the_documented_chain(seed: int, epoch: int, numbers: list[int]) -> None:
    found = external_sort.shuffle_keys(seed, epoch, np.array(numbers, np.int64))
    assert found.tolist() == [key(seed, epoch, n) for n in numbers]


def runs_of(lists: list[list[int]], binary: bool) -> list[external_sort.Keys]:
    ordered = [sorted(values) for values in lists]
    if binary:
        return [pa.array([v.to_bytes(4, "big") for v in values], pa.large_binary()) for values in ordered]
    return [np.array(values, np.uint64) for values in ordered]


@given(st.lists(st.lists(st.integers(0, 30), max_size=40), min_size=1, max_size=6), st.integers(1, 20), st.booleans())
def test_buckets_follow_each_other_in_key_order_and_are_bounded(lists: list[list[int]], target: int, binary: bool) -> None:
    runs = runs_of(lists, binary)
    starts, ends = np.zeros(len(runs), np.int64), np.array([len(r) for r in runs], np.int64)
    expected = sorted((v, run, row) for run, values in enumerate(lists) for row, v in enumerate(sorted(values)))
    found = []
    for begin, end in external_sort.buckets(runs, starts, ends, target):
        part = [(sorted(lists[r])[row], r, row) for r in range(len(runs)) for row in range(begin[r], end[r])]
        assert len(part) <= 2 * target
        found += sorted(part)
    assert found == expected


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("rows", [1, 997, 3000])
def test_the_first_of_an_order_are_found_in_every_run(rows: int, binary: bool) -> None:
    generator = random.Random(rows)
    lists = [[generator.randrange(50) for _ in range(n)] for n in (0, 500, 1200, 1300)]
    expected = sorted((v, run, row) for run, values in enumerate(lists) for row, v in enumerate(sorted(values)))[:rows]
    counts = external_sort.first_rows(runs_of(lists, binary), rows, target=64)
    assert counts.tolist() == [sum(run == r for _, run, _ in expected) for r in range(len(lists))]


def test_stable_order_keeps_ties_as_they_stood() -> None:
    keys = pa.array([b"b", b"a", b"b", b"a"], pa.large_binary())
    assert external_sort.stable_order(keys).tolist() == [1, 3, 0, 2]
    assert external_sort.stable_order(np.array([2, 1, 2, 1])).tolist() == [1, 3, 0, 2]


@given(st.lists(st.integers(0, 7), max_size=8), st.integers(0, 60), st.integers(0, 60))
def test_slices_of_an_order_are_slices_of_its_samples(rows: list[int], first: int, last: int) -> None:
    order = pieces.PieceOrder.whole([(str(i), n) for i, n in enumerate(rows)])
    last = max(first, last)

    def samples(o: pieces.PieceOrder) -> list[tuple[str, int]]:
        return [(name, row) for name, a, b in zip(o.names, o.starts, o.ends, strict=True) for row in range(a, b)]

    cut = order.slice(first, last)
    assert samples(cut) == samples(order)[first:last]
    assert samples(cut.slice(1, 3)) == samples(order)[first:last][1:3]
    assert of_json(to_stored(cut), pieces.PieceOrder).rows == cut.rows


def test_a_source_of_pieces_counts_numbers_through_pieces(tmp_path: Path) -> None:
    for name, rows in (("a", 3), ("b", 4)):
        labels = np.arange(rows, dtype=np.float32).reshape(rows, 1)
        write_piece(tmp_path / name, Samples(labels, np.zeros((rows, 1), np.float32), np.arange(rows), None), None, {})
    order = pieces.PieceOrder.whole([("a", 3), ("b", 4)])
    source = pieces.PieceSource(tmp_path, order.slice(0, 5), order.slice(5, 7))
    chunks = list(source.training(0))
    assert np.concatenate([n for _, n in chunks]).tolist() == [0, 1, 2, 3, 4]
    assert np.concatenate([s.labels for s, _ in chunks]).tolist() == [[0], [1], [2], [0], [1]]
    assert [(s.labels.tolist(), n.tolist()) for s, n in source.evaluation()] == [([[2], [3]], [0, 1])]
    assert (source.training_samples, source.evaluation_samples, source.shuffled) == (5, 2, False)


@pytest.mark.parametrize(("fraction", "rows", "held"), [(0.1, 100_000, 10_000), (0.1, 19, 1), (0.5, 1, 0), (0.0, 7, 0)])
def test_the_tail_held_out_is_rounded_down(fraction: float, rows: int, held: int) -> None:
    assert pieces.held_out(rows, fraction) == held
