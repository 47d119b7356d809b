"""Values that a model has never seen: what `predict` and `evaluate` count of each feature, and warn of where hardly any value is known."""

from __future__ import annotations

import sys

import numpy as np

from foreload.pipelines.samples.features import FeatureSpec

_FEWEST, _HARDLY = 10, 0.9  # values of a feature from which on, and the share of unknown ones beyond which, that is warned of


class UnknownValues:
    """Counts of each feature's lookups: values, missing ones aside, and those unknown.

    By a vocabulary, values that it does not have; by hash and as ids, values whose row was never trained. Values that share a row are not
    distinguished, nor is id 0, which stands for a missing value; so that is the least that there are.
    """

    def __init__(self, features: FeatureSpec) -> None:
        self._features = features.features
        self._by_vocabulary = np.array([feature.encoding == "vocabulary" for feature in self._features])
        self.values: np.ndarray = np.zeros(len(self._features), np.int64)
        self.unknown: np.ndarray = np.zeros(len(self._features), np.int64)

    def add(self, ids: np.ndarray, offsets: np.ndarray | None, trained: np.ndarray) -> None:
        """Count the lookups of some samples, in order: ids int [n], and whether their rows were trained, bool [n]; offsets as Samples has them."""
        count = len(self._features)
        place = np.tile(np.arange(count), len(ids) // count)
        if offsets is not None:
            place = np.repeat(np.tile(np.arange(count), (len(offsets) - 1) // count), np.diff(offsets))
        unknown = np.where(self._by_vocabulary[place], ids == 1, ~trained)
        self.values += np.bincount(place[ids != 0], minlength=count)
        self.unknown += np.bincount(place[unknown & (ids != 0)], minlength=count)

    def to_dict(self) -> dict[str, dict[str, int]]:
        """By feature, values and how many are unknown, JSON-able."""
        counts = zip(self._features, self.values.tolist(), self.unknown.tolist(), strict=True)
        return {feature.name: {"values": values, "unknown": unknown} for feature, values, unknown in counts}

    def warn(self, command: str) -> None:
        """Warn on stderr of the features of which hardly any value is known."""
        for feature, values, unknown in zip(self._features, self.values.tolist(), self.unknown.tolist(), strict=True):
            if values >= _FEWEST and unknown > _HARDLY * values:
                least = "" if feature.encoding == "vocabulary" else "at least "
                sys.stderr.write(
                    f"foreload: warning: {command}: feature {feature.name}: {least}{unknown:,} of {values:,} values ({unknown / values:.2%}) are "
                    f"unknown to the model; check that column {feature.column} is written as it was for training\n"
                )
