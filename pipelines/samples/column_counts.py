"""What is in a source's columns: labels, missing and unknown values, counted as samples are encoded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any

import numba as nb
import numpy as np

from foreload.pipelines.samples.features import FeatureSpec
from foreload.pipelines.samples.pieces import Samples
from foreload.pipelines.samples.records import Records

VALUES, MISSING, UNKNOWN = range(3)  # rows of ColumnCounts.features
_BLOCK_SAMPLES = 128  # whose ids stay in cache while one feature after the other is counted


@dataclass(frozen=True, slots=True)
class ColumnCounts:
    """What is in the columns of some samples.

    samples: how many there are; ones: how many are labelled 1. dense: int64 [dense], each column's missing values. features: int64 [3, features],
    by feature: VALUES (a missing one is one, too), MISSING of them, and UNKNOWN: those that its vocabulary does not have.
    """

    samples: int
    ones: int
    dense: np.ndarray
    features: np.ndarray

    @staticmethod
    def none(spec: FeatureSpec) -> ColumnCounts:
        """The counts of no samples."""
        return ColumnCounts(0, 0, np.zeros(len(spec.dense), np.int64), np.zeros((3, len(spec.features)), np.int64))

    @staticmethod
    def of(records: Records, samples: Samples, spec: FeatureSpec) -> ColumnCounts:
        """The counts of records, which the samples are in the same order."""
        features = np.zeros((3, len(spec.features)), np.int64)
        if samples.offsets is None:
            features[VALUES] = len(samples)
            _count_single(samples.ids, features[MISSING], features[UNKNOWN])
        else:
            _count_lists(samples.ids, samples.offsets, *features)
        for place, (feature, column) in enumerate(zip(spec.features, records.categorical, strict=True)):
            if feature.encoding == "id":  # where 0 is a value too
                features[MISSING, place] = column.null_count
                if feature.pooling != "single":
                    features[MISSING, place] = column.flatten().null_count + np.count_nonzero(
                        np.diff(column.offsets.to_numpy()) == 0
                    )
            if feature.encoding != "vocabulary":
                features[UNKNOWN, place] = 0
        dense = np.isnan(records.dense).sum(axis=0, dtype=np.int64)
        return ColumnCounts(len(samples), int(np.count_nonzero(samples.labels)), dense, features)

    def __add__(self, other: ColumnCounts) -> ColumnCounts:
        return ColumnCounts(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able form."""
        return {"samples": self.samples, "ones": self.ones, "dense": self.dense.tolist(), "features": self.features.tolist()}

    @staticmethod
    def from_dict(d: Mapping[str, Any]) -> ColumnCounts:
        """The inverse of to_dict."""
        features = np.array(d["features"], np.int64).reshape(3, -1)
        return ColumnCounts(d["samples"], d["ones"], np.array(d["dense"], np.int64), features)

    def told(self, spec: FeatureSpec) -> dict[str, Any]:
        """For people and programs, JSON-able: samples, label_rate (None without samples), and for each column, by name, its values and how many are
        missing and, with a vocabulary, unknown.
        """
        columns: list[dict[str, Any]] = [
            {"name": dense.name, "values": self.samples, "missing": missing}
            for dense, missing in zip(spec.dense, self.dense.tolist(), strict=True)
        ]
        for feature, (values, missing, unknown) in zip(spec.features, self.features.T.tolist(), strict=True):
            column = {"name": feature.name, "table": spec.tables[feature.table].name, "values": values, "missing": missing}
            columns.append(column | ({"unknown": unknown} if feature.encoding == "vocabulary" else {}))
        return {
            "samples": self.samples,
            "label_rate": self.ones / self.samples if self.samples else None,
            "columns": columns,
        }


@nb.njit(nogil=True, cache=True)
def _count_single(ids: np.ndarray, zeros: np.ndarray, ones: np.ndarray) -> None:
    """Add to each feature's zeros and ones, int64 [features], how many of its ids they are; every feature has one id a sample.

    Where values are encoded, id 0 is a missing one and, with a vocabulary, id 1 an unknown one.
    """
    features = len(zeros)
    for first in range(0, len(ids), _BLOCK_SAMPLES * features):
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
    """The same, and the number of values, where there may be several a sample."""
    features = len(values)
    for first in range(0, len(offsets) - 1, features):
        for k in range(features):
            for i in range(offsets[first + k], offsets[first + k + 1]):
                values[k] += 1
                zeros[k] += ids[i] == 0
                ones[k] += ids[i] == 1
