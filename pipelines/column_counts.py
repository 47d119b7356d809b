"""What is in a source's columns: labels, missing and unknown values, counted as samples are encoded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any

import numba as nb
import numpy as np

from pipelines.features import FeatureSpec
from pipelines.records import Records
from pipelines.samples import Samples


@dataclass(frozen=True, slots=True)
class ColumnCounts:
    """Of some samples: how many there are, how many are labelled 1, and

    dense: int64 [dense], each column's missing values. features: int64 [features, 3], each one's values (a missing one is one), those that
    are missing, and those that its vocabulary does not have.
    """

    samples: int
    ones: int
    dense: np.ndarray
    features: np.ndarray

    @staticmethod
    def none(spec: FeatureSpec) -> ColumnCounts:
        """The counts of no samples."""
        return ColumnCounts(0, 0, np.zeros(len(spec.dense), np.int64), np.zeros((len(spec.features), 3), np.int64))

    @staticmethod
    def of(records: Records, samples: Samples, spec: FeatureSpec) -> ColumnCounts:
        """The counts of records, which the samples are in the same order."""
        features = np.zeros((len(spec.features), 3), np.int64)
        _count_ids(samples.ids, np.empty(0, np.int64) if samples.offsets is None else samples.offsets, features)
        for place, (feature, column) in enumerate(zip(spec.features, records.categorical, strict=True)):
            if feature.encoding == "id":  # where 0 is a value too
                features[place, 1] = column.null_count
                if feature.pooling != "single":
                    features[place, 1] = column.flatten().null_count + np.count_nonzero(np.diff(column.offsets.to_numpy()) == 0)
            if feature.encoding != "vocabulary":
                features[place, 2] = 0
        dense = np.isnan(records.dense).sum(axis=0, dtype=np.int64)
        return ColumnCounts(len(samples), int(np.count_nonzero(samples.labels)), dense, features)

    def __add__(self, other: ColumnCounts) -> ColumnCounts:
        return ColumnCounts(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able form."""
        return {"samples": self.samples, "ones": self.ones, "dense": self.dense.tolist(), "features": self.features.tolist()}

    @staticmethod
    def from_dict(d: Mapping[str, Any]) -> ColumnCounts:
        """The inverse of to_dict."""
        features = np.array(d["features"], np.int64).reshape(-1, 3)
        return ColumnCounts(d["samples"], d["ones"], np.array(d["dense"], np.int64), features)

    def told(self, spec: FeatureSpec) -> dict[str, Any]:
        """For people and programs: samples, label_rate, and for each column, by name, its values and how many are missing and unknown."""
        columns: list[dict[str, Any]] = [
            {"name": dense.name, "values": self.samples, "missing": missing}
            for dense, missing in zip(spec.dense, self.dense.tolist(), strict=True)
        ]
        for feature, (values, missing, unknown) in zip(spec.features, self.features.tolist(), strict=True):
            column = {"name": feature.name, "table": spec.tables[feature.table].name, "values": values, "missing": missing}
            columns.append(column | ({"unknown": unknown} if feature.encoding == "vocabulary" else {}))
        return {
            "samples": self.samples,
            "label_rate": self.ones / self.samples if self.samples else None,
            "columns": columns,
        }


@nb.njit(nogil=True, cache=True)
def _count_ids(ids: np.ndarray, offsets: np.ndarray, counts: np.ndarray) -> None:
    """Add to counts int64 [features, 3]: values, ids that are 0, ids that are 1. offsets: as in Samples, empty where all are single."""
    features = len(counts)
    entries = len(offsets) - 1 if len(offsets) else len(ids)
    for first in range(0, entries, features):
        for k in range(features):
            start, end = first + k, first + k + 1
            if len(offsets):
                start, end = offsets[start], offsets[end]
            for i in range(start, end):
                counts[k, 0] += 1
                counts[k, 1] += ids[i] == 0
                counts[k, 2] += ids[i] == 1
