"""Count values that a model has never seen.

`predict` and `evaluate` count them for each feature, and warn if hardly any value is known.
"""

from __future__ import annotations

import sys

import numpy as np

from foreload.pipelines.samples.features import FeatureSpec

# A warning needs this many values of a feature, and more than this share of them unknown.
_FEWEST, _HARDLY = 10, 0.9


class UnknownValues:
    """Counts, per feature, the values looked up and how many of them are unknown.

    Missing values are not counted. With a vocabulary, a value is unknown if the vocabulary lacks
    it; with a hash, and for ids as they are, if its row was never trained. Values that share a row
    are not distinguished, nor is id 0, which stands for a missing value. The count is therefore a
    lower bound.

    Attributes:
        values: int64 [features].
        unknown: int64 [features].
    """

    def __init__(self, features: FeatureSpec) -> None:
        self._features = features.features
        self._by_vocabulary = np.array([feature.encoding == "vocabulary" for feature in self._features])
        self.values: np.ndarray = np.zeros(len(self._features), np.int64)
        self.unknown: np.ndarray = np.zeros(len(self._features), np.int64)

    def add(self, ids: np.ndarray, offsets: np.ndarray | None, trained: np.ndarray) -> None:
        """Count the lookups of some samples, in order.

        Args:
            ids: int [n].
            offsets: As in Samples.
            trained: bool [n], whether the rows of the ids were trained.
        """
        count = len(self._features)
        if not count:
            return
        # The feature of each lookup. Without offsets, every sample has one lookup for each feature.
        place = np.tile(np.arange(count), len(ids) // count)
        if offsets is not None:
            place = np.repeat(np.tile(np.arange(count), (len(offsets) - 1) // count), np.diff(offsets))
        # Id 1 of a vocabulary stands for values that it lacks.
        unknown = np.where(self._by_vocabulary[place], ids == 1, ~trained)
        self.values += np.bincount(place[ids != 0], minlength=count)
        self.unknown += np.bincount(place[unknown & (ids != 0)], minlength=count)

    def to_dict(self) -> dict[str, dict[str, int]]:
        """Return the counts by feature, ready for JSON."""
        counts = zip(self._features, self.values.tolist(), self.unknown.tolist(), strict=True)
        return {feature.name: {"values": values, "unknown": unknown} for feature, values, unknown in counts}

    def warn(self, command: str) -> None:
        """Warn on stderr of features of which hardly any value is known."""
        for feature, values, unknown in zip(self._features, self.values.tolist(), self.unknown.tolist(), strict=True):
            if values >= _FEWEST and unknown > _HARDLY * values:
                least = "" if feature.encoding == "vocabulary" else "at least "
                sys.stderr.write(
                    f"foreload: warning: {command}: feature {feature.name}: {least}{unknown:,} of {values:,} values ({unknown / values:.2%}) are "
                    f"unknown to the model; check that column {feature.column} is written as it was for training\n"
                )
