"""Counts of what the columns of a source hold, taken while samples are encoded.

They cover labels, missing and unknown values, unusual forms and mixed types.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from foreload.base.arrays import Int64s
from foreload.base.compiled import nb
from foreload.pipelines.samples.cells import has_points, is_digit, is_text, present_in, whole_part
from foreload.pipelines.samples.dense import DenseStatistics
from foreload.pipelines.samples.features import FeatureSpec
from foreload.pipelines.samples.pieces import Samples
from foreload.pipelines.samples.records import Records
from foreload.pipelines.samples.vocabulary import text_buffers

SEPARATORS = "|,;: \t/&+^~#"
"""Characters that may separate the values of a field if the feature's separator does not."""

TEXTS, NUMBERS, EXPONENTS, LARGE, FIELDS, CUT, OTHERS = range(7)
"""The places of the counts that are kept for each feature. Malformed values are counted too.

TEXTS: values in text columns.
NUMBERS: values in columns of other types.
EXPONENTS: texts that are numbers with an exponent. They are encoded as they are written.
LARGE: floats from 2^53 on (2^24 for float32), where several whole numbers are the same float.
FIELDS: fields of a multi-valued feature in text.
CUT: fields that hold the feature's separator.
OTHERS: from here on, one count for each of SEPARATORS: the fields that hold it, in pieces in which
    no field holds the feature's separator.
"""

COUNTS = OTHERS + len(SEPARATORS)
_FIRST_LARGE = np.frombuffer(b"%d" % 2**53, np.uint8)
# Bits of a float type -> exponent of 2 from which on the type cannot hold every whole number.
_WHOLE_BITS = {16: 11, 32: 24, 64: 53}
_MOST_EXPONENT_DIGITS = 3
_MINUS, _PLUS, _POINT, _E, _CAPITAL_E = (np.uint8(ord(c)) for c in "-+.eE")


def notice_values(column: pa.Array, counts: np.ndarray) -> None:
    """Count the forms of single values.

    Args:
        column: values as returned by `cells.plain`.
        counts: int64 [COUNTS], added to.
    """
    present = present_in(column)
    if is_text(column.type):
        data, offsets = text_buffers(column)
        counts[TEXTS] += np.count_nonzero(present)
        _count_exponents(data, offsets, counts)
        if has_points(data, offsets):
            _count_large(data, offsets, counts)
        return
    if pa.types.is_floating(column.type):
        values = np.abs(pc.fill_null(column.cast(pa.float64()), np.nan).to_numpy())
        present &= ~np.isnan(values)
        counts[LARGE] += np.count_nonzero(values >= 2.0 ** _WHOLE_BITS[column.type.bit_width])
    counts[NUMBERS] += np.count_nonzero(present)


def notice_fields(column: pa.Array, separator: str, counts: np.ndarray) -> None:
    """Count the text fields of a multi-valued feature, and the separators in them.

    Args:
        separator: the feature's separator.
        counts: int64 [COUNTS], added to.
    """
    counts[FIELDS] += np.count_nonzero(present_in(column))
    cut = _with(column, separator)
    counts[CUT] += cut
    if not cut:
        for place, other in enumerate(SEPARATORS):
            counts[OTHERS + place] += _with(column, other)


def warnings_of(counts: list[int], separator: str = "") -> list[str]:
    """Return the warnings that these counts call for, one line each.

    Args:
        counts: [COUNTS].
        separator: the feature's separator.
    """
    lines, values = [], counts[TEXTS] + counts[NUMBERS]
    if counts[EXPONENTS]:
        lines.append(
            f"{counts[EXPONENTS]:,} of {values:,} values are numbers written with an exponent, such as 1e+05, and encoded as text; write whole "
            "numbers without one"
        )
    if counts[LARGE]:
        lines.append(
            f"{counts[LARGE]:,} of {values:,} values are floats of at least 2^53 (float32: 2^24), where several whole numbers become one float; "
            "write the column as whole numbers, or as text"
        )
    if counts[TEXTS] and counts[NUMBERS]:
        lines.append(
            f"{counts[NUMBERS]:,} values are whole numbers and {counts[TEXTS]:,} are text, depending on the file; both count as the same value"
        )
    others = counts[OTHERS:]
    most = max(others)
    if not counts[CUT] and 2 * most > counts[FIELDS]:
        lines.append(
            f"its separator {separator!r} is in none of {counts[FIELDS]:,} fields, and {SEPARATORS[others.index(most)]!r} is in {most:,} of them; "
            'check separator, or give it pooling = "single"'
        )
    return lines


def _with(column: pa.Array, text: str) -> int:
    return int(pc.sum(pc.match_substring(column, text), min_count=0).as_py())


@nb.njit(nogil=True, cache=True)
def _has_exponent(data: np.ndarray, start: int, end: int) -> bool:
    """Return whether a text is a number with an exponent, in a form that programs write.

    Such forms are 1e5, 1.5e17 and -2E+05. An id such as 12e34567 is not one: there is one digit
    before the point or the e, and the exponent has up to three digits.
    """
    at = start + 1 if data[start] == _MINUS else start
    if at + 2 >= end or not (data[at + 1] == _POINT or data[at + 1] == _E or data[at + 1] == _CAPITAL_E):
        return False
    if not is_digit(data[at]):
        return False
    at += 1
    if data[at] == _POINT:
        at += 1
        first = at
        while at < end and is_digit(data[at]):
            at += 1
        if at in (first, end) or (data[at] != _E and data[at] != _CAPITAL_E):
            return False
    at += 1
    if at < end and (data[at] == _PLUS or data[at] == _MINUS):
        at += 1
    digits = end - at
    while at < end and is_digit(data[at]):
        at += 1
    return at == end and 0 < digits <= _MOST_EXPONENT_DIGITS


@nb.njit(nogil=True, cache=True)
def _count_exponents(data: np.ndarray, offsets: np.ndarray, counts: np.ndarray) -> None:
    """Add to counts, int64 [COUNTS], how many texts are EXPONENTS."""
    for i in range(len(offsets) - 1):
        start, end = np.int64(offsets[i]), np.int64(offsets[i + 1])
        if start < end and _has_exponent(data, start, end):
            counts[EXPONENTS] += 1


@nb.njit(nogil=True, cache=True)
def _count_large(data: np.ndarray, offsets: np.ndarray, counts: np.ndarray) -> None:
    """Add to counts, int64 [COUNTS], how many texts are LARGE."""
    for i in range(len(offsets) - 1):
        start, end = np.int64(offsets[i]), np.int64(offsets[i + 1])
        first, point = whole_part(data, start, end)
        if point == end:
            continue
        if data[first] == _MINUS:
            first += 1
        # Without leading zeros, a number with more digits is larger. With equally many digits, the
        # first different digit decides.
        large = point - first > len(_FIRST_LARGE)
        if point - first == len(_FIRST_LARGE):
            large = True
            for j in range(len(_FIRST_LARGE)):
                if data[first + j] != _FIRST_LARGE[j]:
                    large = data[first + j] > _FIRST_LARGE[j]
                    break
        counts[LARGE] += large


VALUES, MISSING, UNKNOWN = range(3)  # rows of ColumnCounts.features
_MOST_CLIPPED = 0.01  # share of a column's values above which a warning is given
# Samples of a block. Its ids stay in cache while one feature after the other is counted.
_BLOCK_SAMPLES = 128


@dataclass(frozen=True, slots=True)
class ColumnCounts:
    """What the columns of some samples hold.

    Attributes:
        samples: the number of samples.
        ones: int64 [labels], samples labelled 1. It is 0 for a label that is not a click.
        negatives: int64 [labels], clicks that are written as -1.
        numbers: statistics of the labels that are numbers, in order, and then of the weights, if
            there are any.
        dense: int64 [2, dense], for each column the missing values and the values that its
            transform clips.
        features: int64 [3, features]. VALUES: all values, where a missing value counts as one.
            MISSING: samples without any other value. UNKNOWN: values that the vocabulary does not
            contain.
        noticed: int64 [features + 1, COUNTS], as in `Records`.
    """

    samples: int
    ones: Int64s
    negatives: Int64s
    numbers: DenseStatistics
    dense: Int64s
    features: Int64s
    noticed: Int64s

    @staticmethod
    def none(spec: FeatureSpec) -> ColumnCounts:
        """Return the counts of no samples."""
        width = len(_number_labels(spec)) + (spec.weight is not None)
        return ColumnCounts(
            0,
            np.zeros(len(spec.labels), np.int64),
            np.zeros(len(spec.labels), np.int64),
            DenseStatistics.empty(width),
            np.zeros((2, len(spec.dense)), np.int64),
            np.zeros((3, len(spec.features)), np.int64),
            np.zeros((len(spec.features) + 1, COUNTS), np.int64),
        )

    @staticmethod
    def of(records: Records, samples: Samples, spec: FeatureSpec) -> ColumnCounts:
        """Count the columns of some records.

        Args:
            samples: the same records, encoded, in the same order.
        """
        features = np.zeros((3, len(spec.features)), np.int64)
        if samples.offsets is None:
            features[VALUES] = len(samples)
            _count_single(samples.ids, features[MISSING], features[UNKNOWN])
        else:
            _count_lists(samples.ids, samples.offsets, *features)
        for place, (feature, column) in enumerate(zip(spec.features, records.categorical, strict=True)):
            # Id 0 is an ordinary value under this encoding, so missing values are counted as nulls.
            if feature.encoding == "id":
                features[MISSING, place] = column.null_count
                if feature.listed:
                    known = np.concatenate(([0], np.cumsum(np.asarray(column.flatten().is_valid()))))
                    bounds = column.offsets.to_numpy() - column.offsets[0].as_py()
                    features[MISSING, place] = np.count_nonzero(known[bounds[1:]] == known[bounds[:-1]])
            if feature.encoding != "vocabulary":
                features[UNKNOWN, place] = 0
        clipped = [np.count_nonzero(records.dense[:, k] < 0) if d.transform == "log" else 0 for k, d in enumerate(spec.dense)]
        dense = np.array([np.isnan(records.dense).sum(axis=0), clipped], np.int64).reshape(2, -1)
        ones = np.count_nonzero(samples.labels, axis=0)
        negatives = np.count_nonzero(records.labels == -1, axis=0)
        ones[_number_labels(spec)] = negatives[_number_labels(spec)] = 0
        numbers = samples.labels[:, _number_labels(spec)]
        if samples.weights is not None:
            numbers = np.column_stack((numbers, samples.weights))
        noticed = np.zeros((len(spec.features) + 1, COUNTS), np.int64) if records.noticed is None else records.noticed
        statistics = DenseStatistics.of(numbers.astype(np.float64))
        return ColumnCounts(len(samples), ones, negatives, statistics, dense, features, noticed)

    def __add__(self, other: ColumnCounts) -> ColumnCounts:
        return ColumnCounts(
            self.samples + other.samples,
            self.ones + other.ones,
            self.negatives + other.negatives,
            self.numbers.merge(other.numbers),
            self.dense + other.dense,
            self.features + other.features,
            self.noticed + other.noticed,
        )

    def report(self, spec: FeatureSpec) -> dict[str, Any]:
        """Return the counts by name, as JSON values for people and programs.

        There must be at least one sample.

        Returns:
            `samples`: their number. `label_rate`: the rate of ones, if the only label is a click.
            Otherwise `labels`: for each label its rate of ones, or the mean, deviation, least and
            largest of its numbers. `weights`, if there are any: their sum, least and largest.
            `columns`: for each dense value and feature its name, how many values it has, how many
            samples have none, and how many values the transform clipped or the vocabulary does not
            contain.
        """
        columns: list[dict[str, Any]] = [
            {"name": dense.name, "values": self.samples, "missing": missing}
            | ({"clipped": clipped} if dense.transform == "log" else {})
            for dense, missing, clipped in zip(spec.dense, *self.dense.tolist(), strict=True)
        ]
        for feature, (values, missing, unknown) in zip(spec.features, self.features.T.tolist(), strict=True):
            column = {"name": feature.name, "table": spec.tables[feature.table].name, "values": values, "missing": missing}
            columns.append(column | ({"unknown": unknown} if feature.encoding == "vocabulary" else {}))
        return {"samples": self.samples, **self._label_report(spec), "columns": columns}

    def warnings(self, spec: FeatureSpec) -> list[str]:
        """Return what is probably not intended, one line each."""
        lines = []
        for dense, missing, clipped in zip(spec.dense, *self.dense.tolist(), strict=True):
            if clipped > _MOST_CLIPPED * (self.samples - missing):
                lines.append(
                    f'dense {dense.name}: {_of(clipped, self.samples - missing)} values are negative, and transform = "log" reads them as 0; give it '
                    'transform = "standard" or "none"'
                )
        for feature, counts in zip(spec.features, self.noticed[:-1].tolist(), strict=True):
            lines += [f"feature {feature.name}: {what}" for what in warnings_of(counts, feature.separator)]
        lines += [f"group: {what}" for what in warnings_of(self.noticed[-1].tolist())]
        return lines

    def _label_report(self, spec: FeatureSpec) -> dict[str, Any]:
        rates = [int(ones) / self.samples for ones in self.ones]
        labels: list[dict[str, Any]] = [
            {"name": label.name, "rate": rate} for label, rate in zip(spec.labels, rates, strict=True)
        ]
        numbers = [
            {"sum": total, "mean": mean, "deviation": deviation, "least": least, "largest": largest}
            for (total, mean, deviation), least, largest in zip(
                self.numbers.moments(), self.numbers.least, self.numbers.largest, strict=True
            )
        ]
        for place, figures in zip(_number_labels(spec), numbers, strict=False):
            labels[place] = {
                "name": spec.labels[place].name,
                **{key: figures[key] for key in ("mean", "deviation", "least", "largest")},
            }
        plain = len(labels) == 1 and spec.labels[0].kind == "click"
        of_labels: dict[str, Any] = {"label_rate": rates[0]} if plain else {"labels": labels}
        if spec.weight is None:
            return of_labels
        return of_labels | {"weights": {key: numbers[-1][key] for key in ("sum", "least", "largest")}}


def _number_labels(spec: FeatureSpec) -> list[int]:
    """Return the places of the labels that are numbers."""
    return [place for place, label in enumerate(spec.labels) if label.kind == "number"]


def _of(part: int, whole: int) -> str:
    return f"{part:,} of {whole:,} ({part / whole:.2%})"


@nb.njit(nogil=True, cache=True)
def _count_single(ids: np.ndarray, zeros: np.ndarray, ones: np.ndarray) -> None:
    """Count the ids 0 and 1 of each feature, where every feature has one id a sample.

    Id 0 is a missing value, unless ids are taken as they are. With a vocabulary, id 1 is an unknown
    value.

    Args:
        ids: [samples * features].
        zeros: int64 [features], added to.
        ones: int64 [features], added to.
    """
    features = len(zeros)
    # Without features there are no ids, and a range must not have a step of 0.
    for first in range(0, len(ids), _BLOCK_SAMPLES * max(features, 1)):
        end = min(first + _BLOCK_SAMPLES * features, len(ids))
        for k in range(features):
            zeros_here = ones_here = 0
            for i in range(first + k, end, features):
                zeros_here += ids[i] == 0
                ones_here += ids[i] == 1
            zeros[k] += zeros_here
            ones[k] += ones_here


@nb.njit(nogil=True, cache=True)
def _count_lists(ids: np.ndarray, offsets: np.ndarray, values: np.ndarray, zeros: np.ndarray, ones: np.ndarray) -> None:
    """Count the ids of each feature, where a feature may have several ids a sample.

    Args:
        ids: [lookups].
        offsets: int64 [samples * features + 1], CSR over (sample, feature) into ids.
        values: int64 [features], ids. Added to.
        zeros: int64 [features], samples whose ids are all 0. Added to.
        ones: int64 [features], ids that are 1. Added to.
    """
    features = len(values)
    for first in range(0, len(offsets) - 1, features):
        for k in range(features):
            known = False
            for i in range(offsets[first + k], offsets[first + k + 1]):
                values[k] += 1
                known |= ids[i] != 0
                ones[k] += ids[i] == 1
            zeros[k] += not known
