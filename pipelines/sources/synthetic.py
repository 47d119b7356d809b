"""Synthetic data in Criteo's shape, of any length.

Row i is a pure function of (seed, i) and the tables' sizes. There are 26 categorical columns, whose
ranks follow a Zipf law and are scattered over the ids, 13 dense columns, and labels from a hidden
linear model over ranks and dense values. Random numbers are key(seed, i, column). Everything
derived from them is integer arithmetic on tables that are built once, so the rows do not depend on
how a machine computes powers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pyarrow as pa

from foreload.base.compiled import nb
from foreload.base.hashing import key, mix
from foreload.pipelines.errors import FeatureError, SourceError
from foreload.pipelines.samples.convert import convert
from foreload.pipelines.samples.features import (
    CRITEO_CATEGORICAL,
    CRITEO_COLUMNS,
    CRITEO_DENSE,
    KAGGLE_ROWS,
    FeatureSpec,
)
from foreload.pipelines.samples.records import Records
from foreload.pipelines.sources.splits import PIECE_ROWS, Source, Split

SPLIT_ROWS = 4 * PIECE_ROWS
"""The rows of a split."""

_EXPONENT = 1.1  # of the Zipf law: the probability of rank r falls as r ** -_EXPONENT
# The first ranks have a probability each. Further ranks share one within buckets a few percent
# wide.
_HEAD_RANKS = 1024
_BUCKET_GROWTH = 1.02  # ratio of one bucket's first rank to the next one's
_MOST_VALUES = 1 << 31  # a rank times the scattering factor stays below 2^63
_GUIDE_BITS = 12  # leading bits of a random number that choose the bucket where the search begins

_ONE = 1 << 16  # a logit of 1 in the hidden model's fixed-point arithmetic
_HEAD_WEIGHT = 0.45  # largest hidden weight of a frequent rank
_TAIL_WEIGHT = 0.1
_DENSE_WEIGHT = 0.5
_CLICK_LOGIT = -1.5  # logit of a row whose hidden weights cancel out
_LOGIT_STEP_BITS = 8  # logits are looked up in steps of 2^-8
_LARGEST_LOGIT = 8

# key(seed, _COLUMN_SEEDS - column) seeds the constants of a column. Rows use numbers from 0, so the
# two never collide.
_COLUMN_SEEDS = -1


def plan_synthetic(source: Source, spec: FeatureSpec) -> list[Split]:
    """Return splits of SPLIT_ROWS rows each.

    Raises:
        FeatureError: the spec needs a column that the generator does not have.
    """
    for name in spec.columns:
        if name not in CRITEO_COLUMNS:
            raise FeatureError(f"column {name}: synthetic data has label, I1 .. I13 and C1 .. C26 only; change the feature file")
    starts = range(0, source.rows, SPLIT_ROWS)
    return [
        Split("synthetic", "synthetic", 0, number, start, min(start + SPLIT_ROWS, source.rows), source=source)
        for number, start in enumerate(starts)
    ]


def read_synthetic(split: Split, spec: FeatureSpec) -> Iterator[Records]:
    """Yield rows start .. end - 1 in pieces of PIECE_ROWS."""
    if split.source is None:
        raise SourceError("source: a synthetic split needs its source")
    generator = _generator(split.source.seed, _sizes(spec), split.source.values)
    for start in range(split.start, split.end, PIECE_ROWS):
        labels, dense, ids = generator.rows(start, min(start + PIECE_ROWS, split.end))
        columns = {"label": pa.array(labels)}
        columns |= {name: pa.array(dense[place]) for place, name in enumerate(CRITEO_DENSE)}
        columns |= {name: pa.array(ids[place]) for place, name in enumerate(CRITEO_CATEGORICAL)}
        wanted = {name: columns[name] for name in spec.columns}

        def row_of(places: np.ndarray, start: int = start) -> np.ndarray:
            return places + start + 1

        yield convert(wanted, spec, split.path, row_of)


def _sizes(spec: FeatureSpec) -> tuple[int, ...]:
    """Return the number of ids of each categorical column.

    It is the rows of the smallest table that uses the column by encoding `id`, else Criteo's.
    """
    sizes = list(KAGGLE_ROWS)
    for place, name in enumerate(CRITEO_CATEGORICAL):
        rows = [spec.tables[f.table].rows for f in spec.features if f.column == name and f.encoding == "id"]
        sizes[place] = min((r for r in rows if r is not None), default=sizes[place])
    return tuple(sizes)


@lru_cache(maxsize=4)
def _generator(seed: int, sizes: tuple[int, ...], values: int | None) -> Generator:
    return Generator(seed, sizes, values)


@dataclass(frozen=True, slots=True)
class _Column:
    """How one categorical column draws its ids.

    The id of a rank is (rank * factor + offset) mod size.

    Attributes:
        limits: uint64 [buckets], 2^32 times the cumulative probability up to and including each
            bucket.
        firsts: int64 [buckets + 1], the first rank of each bucket.
        guide: int32 [2^_GUIDE_BITS], the first bucket that a number with these leading bits can
            fall into.
        weight_seed: the seed of the hidden weights.
    """

    limits: np.ndarray
    firsts: np.ndarray
    guide: np.ndarray
    size: int
    factor: int
    offset: int
    weight_seed: int


class Generator:
    """Generates the rows of the synthetic data.

    The ranks that occur in a row, and its label, depend on `values` and not on the sizes, as long
    as `values` does not exceed them.

    Args:
        sizes: the number of ids of each of the 26 columns.
        values: the most distinct values of a column. If None, as many as it has ids.
    """

    def __init__(self, seed: int, sizes: tuple[int, ...], values: int | None = None) -> None:
        self._row_seed = key(seed)
        self._columns = [_column(seed, place, size, min(values or size, size, _MOST_VALUES)) for place, size in enumerate(sizes)]
        hashes = [key(seed, _COLUMN_SEEDS - len(sizes) - place) for place in range(len(CRITEO_DENSE))]
        # Every second dense weight is positive. All lie between half of the largest one and the
        # largest one.
        self._dense_weights = np.array(
            [(1 - 2 * (place % 2)) * int(_ONE * _DENSE_WEIGHT * (0.5 + (h >> 40) / 2**25)) for place, h in enumerate(hashes)],
            np.int64,
        )
        self._bias = int(_CLICK_LOGIT * _ONE) - sum(_mean_weight(column) for column in self._columns)
        steps = np.arange(-_LARGEST_LOGIT << _LOGIT_STEP_BITS, _LARGEST_LOGIT << _LOGIT_STEP_BITS) / 2.0**_LOGIT_STEP_BITS
        # Round to 24 bits, far above the last bits, in which exp differs between machines.
        self._click = np.round(2.0**24 / (1.0 + np.exp(-steps))).astype(np.uint64)

    def rows(self, start: int, end: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Generate rows start .. end - 1.

        Returns:
            Labels, float32 [n]. Dense values, float64 [13, n], NaN where missing. Ids, int64 [26,
            n].
        """
        count = end - start
        keys = np.empty(count, np.uint64)
        _row_keys(np.uint64(self._row_seed), start, keys)
        logits = np.full(count, self._bias, np.int64)
        ids = np.empty((len(self._columns), count), np.int64)
        for place, c in enumerate(self._columns):
            _draw(
                keys,
                np.uint64(place),
                c.limits,
                c.firsts,
                c.guide,
                c.size,
                c.factor,
                c.offset,
                np.uint64(c.weight_seed),
                logits,
                ids[place],
            )
        dense = np.empty((len(self._dense_weights), count), np.float64)
        for place, weight in enumerate(self._dense_weights):
            _draw_dense(keys, np.uint64(len(self._columns) + place), weight, logits, dense[place])
        labels = np.empty(count, np.float32)
        _draw_labels(keys, np.uint64(len(self._columns) + len(self._dense_weights)), logits, self._click, labels)
        return labels, dense, ids


def _column(seed: int, place: int, size: int, values: int) -> _Column:
    """Build the tables of column `place`.

    Args:
        size: the number of ids. Ids are below it.
        values: the number of distinct values that occur.
    """
    firsts = list(range(min(values, _HEAD_RANKS) + 1))
    while firsts[-1] < values:
        firsts.append(min(values, max(firsts[-1] + 1, int(firsts[-1] * _BUCKET_GROWTH))))
    bounds = np.array(firsts, np.int64)
    # The integral of the Zipf density over each bucket's ranks, half a rank to either side.
    power = (bounds + 0.5) ** (1 - _EXPONENT)
    limits = np.round(np.cumsum(power[:-1] - power[1:]) / (power[0] - power[-1]) * 2.0**32).astype(np.uint64)
    limits[-1] = 1 << 32
    guide = np.searchsorted(limits, np.arange(1 << _GUIDE_BITS, dtype=np.uint64) << np.uint64(32 - _GUIDE_BITS), side="right")
    h = key(seed, _COLUMN_SEEDS - place)
    # The factor has no divisor in common with the size, so different ranks get different ids.
    factor = max(1, min(size, _MOST_VALUES) * 618 // 1000)
    while math.gcd(factor, size) > 1:
        factor += 1
    return _Column(limits, bounds, guide.astype(np.int32), size, factor, h % size % (1 << 62), key(h, 1))


def _mean_weight(column: _Column) -> int:
    """Return what the frequent ranks add to the logit on average.

    The bias subtracts it again.
    """
    heads = min(_HEAD_RANKS, len(column.limits))
    weights = np.empty(heads, np.int64)
    _weights(np.uint64(column.weight_seed), weights)
    shares = np.diff(column.limits[:heads].astype(np.int64), prepend=0)
    return int(np.sum(np.right_shift(weights * shares, 32)))


@nb.njit(nogil=True, cache=True)
def _row_keys(seed: np.uint64, start: int, out: np.ndarray) -> None:
    """Fill out with key(seed, row) of consecutive rows.

    The column's number is mixed in when the column is drawn.
    """
    for i in range(len(out)):
        out[i] = mix(seed ^ np.uint64(start + i))


@nb.njit(nogil=True, cache=True)
def _weight(seed: np.uint64, rank: int) -> int:
    """Return the hidden weight of a rank, which is uniformly distributed.

    Rare ranks have smaller weights, since no model could learn them.
    """
    centred = int(mix(seed ^ np.uint64(rank)) >> np.uint64(40)) - (1 << 23)
    largest = int(_ONE * _HEAD_WEIGHT) if rank < _HEAD_RANKS else int(_ONE * _TAIL_WEIGHT)
    return (centred * largest) >> 23


@nb.njit(nogil=True, cache=True)
def _weights(seed: np.uint64, out: np.ndarray) -> None:
    for rank in range(len(out)):
        out[rank] = _weight(seed, rank)


@nb.njit(nogil=True, cache=True)
def _draw(
    keys: np.ndarray,
    column: np.uint64,
    limits: np.ndarray,
    firsts: np.ndarray,
    guide: np.ndarray,
    size: int,
    factor: int,
    offset: int,
    weight_seed: np.uint64,
    logits: np.ndarray,
    ids: np.ndarray,
) -> None:
    """Draw the ids of a column, and add its hidden weights to the logits. See `_Column`.

    There is one hash a row. Its upper half picks the bucket, starting from the bucket in the guide.
    Its lower half picks a rank within the bucket, all with the same probability.
    """
    low = np.uint64(0xFFFFFFFF)
    for i in range(len(keys)):
        h = mix(keys[i] ^ column)
        number = h >> np.uint64(32)
        bucket = guide[number >> np.uint64(32 - _GUIDE_BITS)]
        while limits[bucket] <= number:
            bucket += 1
        width = np.uint64(firsts[bucket + 1] - firsts[bucket])
        rank = firsts[bucket] + np.int64(((h & low) * width) >> np.uint64(32))
        ids[i] = (rank * factor + offset) % size
        logits[i] += _weight(weight_seed, rank)


@nb.njit(nogil=True, cache=True)
def _draw_dense(keys: np.ndarray, column: np.uint64, weight: int, logits: np.ndarray, out: np.ndarray) -> None:
    """Draw dense values, and add their hidden weights to the logits.

    A value lies in (-1, 1). It comes from two uniform numbers of 16 bits and is exact in float32.
    One value in sixteen is missing.
    """
    for i in range(len(keys)):
        h = mix(keys[i] ^ column)
        if h & np.uint64(15) == np.uint64(0):
            out[i] = np.nan
            continue
        value = np.int64(h >> np.uint64(48)) + np.int64((h >> np.uint64(32)) & np.uint64(0xFFFF)) - 65535
        out[i] = value / 65536.0
        logits[i] += (value * weight) >> 16


@nb.njit(nogil=True, cache=True)
def _draw_labels(keys: np.ndarray, column: np.uint64, logits: np.ndarray, click: np.ndarray, out: np.ndarray) -> None:
    """Draw labels that are 1 with the probability that `click` holds for the logit.

    Probabilities are in units of 2^-24. A logit beyond either end of `click` has the probability of
    that end.
    """
    for i in range(len(keys)):
        step = (logits[i] >> (16 - _LOGIT_STEP_BITS)) + len(click) // 2
        step = min(max(step, 0), len(click) - 1)
        out[i] = 1.0 if mix(keys[i] ^ column) >> np.uint64(40) < click[step] else 0.0
