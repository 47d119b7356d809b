"""Encoding typed records as samples (docs/definitions.md, Encoding).

Values become ids by hash, by vocabulary or unchanged, and dense values are transformed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from foreload.base.compiled import nb
from foreload.base.hashing import (
    hash_bytes,
    high_product,
    load_word,
    mix,
)
from foreload.pipelines.errors import FeatureError
from foreload.pipelines.samples.dense import Scale, rows_of, transform
from foreload.pipelines.samples.features import Feature, FeatureSpec
from foreload.pipelines.samples.pieces import Samples
from foreload.pipelines.samples.records import Records
from foreload.pipelines.samples.vocabulary import Vocabulary, text_buffers


class Encoder:
    """Encodes the records of a spec in which the rows of all tables are known.

    Args:
        vocabularies: place of the table -> vocabulary, for every table that has one.
        scales: for each dense column its scale, if one is scaled.

    Raises:
        FeatureError: a vocabulary or the scales are missing.
    """

    def __init__(
        self, spec: FeatureSpec, vocabularies: Mapping[int, Vocabulary] | None = None, scales: Sequence[Scale] | None = None
    ) -> None:
        self._spec = spec
        self._rows = spec.table_rows
        # int32 suffices for most specs, and takes half the bytes to write and to read again.
        self._id_type = np.int32 if max(self._rows, default=0) <= 2**31 else np.int64
        self._vocabularies = dict(vocabularies or {})
        self._scales = scales
        for table in spec.vocabulary_tables:
            if table not in self._vocabularies:
                raise FeatureError(f"table {spec.tables[table].name}: its vocabulary is missing; count its values first")
        for d in spec.dense:
            if scales is None and d.scaled:
                raise FeatureError(
                    f'dense {d.name}: transform = "{d.transform}" needs the statistics of the training data; count them first'
                )
        # Of a click that is written as -1 and 1, -1 becomes 0.
        self._clicks = [place for place, label in enumerate(spec.labels) if label.kind == "click"]

    @property
    def vocabularies(self) -> Mapping[int, Vocabulary]:
        """Place of the table -> vocabulary, for every table that has one."""
        return self._vocabularies

    @property
    def scales(self) -> Sequence[Scale]:
        """The scale of each dense column if one is scaled, else an empty sequence."""
        return self._scales or ()

    def encode(self, records: Records) -> Samples:
        """Encode records as samples, in the same order."""
        dense = transform(records.dense, self._spec.dense, self._scales)
        labels = records.labels
        # Records that are read for their features alone have no labels.
        if labels.shape[1] and (labels[:, self._clicks] < 0).any():
            labels = labels.copy()
            labels[:, self._clicks] = np.maximum(labels[:, self._clicks], 0)
        if not self._spec.multi_valued:
            columns = [self.ids(f, column) for f, column in zip(self._spec.features, records.categorical, strict=True)]
            ids = rows_of(columns, len(records), self._id_type).reshape(-1)
            return Samples(labels, dense, ids, None, records.weights, records.groups)
        bounds, values = [], []
        for feature, column in zip(self._spec.features, records.categorical, strict=True):
            if not feature.listed:
                bounds.append(np.arange(len(records) + 1))
                values.append(self.ids(feature, column))
            else:
                bounds.append(column.offsets.to_numpy() - column.offsets[0].as_py())
                values.append(self.ids(feature, column.flatten()))
        offsets = _offsets(bounds, [0 if feature.padding else 1 for feature in self._spec.features], len(records))
        ids = np.zeros(offsets[-1], self._id_type)
        for place, (starts, column_ids) in enumerate(zip(bounds, values, strict=True)):
            _scatter(column_ids, starts, place, len(bounds), offsets, ids)
        return Samples(labels, dense, ids, offsets, records.weights, records.groups)

    def ids(self, feature: Feature, values: pa.Array) -> np.ndarray:
        """Return the ids of single values of a feature.

        Args:
            values: as in `Records`, [n].

        Returns:
            Whole numbers [n], int64 or narrower, 0 where missing.
        """
        if feature.encoding == "id":
            return values.fill_null(0).to_numpy()
        if feature.encoding == "vocabulary":
            return self._vocabularies[feature.table].ids(values)
        return hashed_ids(values, self._rows[feature.table])


def hashed_ids(texts: pa.Array, rows: int) -> np.ndarray:
    """Return the ids of texts by hash: 1 + hash64(text) mod (rows - 1), and 0 where missing.

    Args:
        texts: string or large_string [n].
        rows: the rows of the table.

    Returns:
        int64 [n].
    """
    data, offsets = text_buffers(texts)
    ids = np.empty(len(texts), np.int64)
    known = texts.buffers()[0] if texts.null_count else None
    bits = np.empty(0, np.uint8) if known is None else np.frombuffer(known, np.uint8)
    _hash_ids(data, offsets, bits, texts.offset, np.uint64(rows - 1), ids)
    return ids


@nb.njit(nogil=True, cache=True)
def _hash_ids(data: np.ndarray, offsets: np.ndarray, known: np.ndarray, first: int, others: np.uint64, out: np.ndarray) -> None:
    """Fill out, int64 [n], as `hashed_ids` defines it.

    Args:
        data: see `text_buffers`.
        offsets: see `text_buffers`.
        known: uint8, Arrow's validity bits, one a value from bit `first` on. A bit is 0 if the
            value is missing. Empty if no value is missing.
        others: rows - 1, the number of ids for values that are not missing.
    """
    inverse = np.uint64(0xFFFFFFFFFFFFFFFF) // others
    for i in range(len(out)):
        start, end = np.int64(offsets[i]), np.int64(offsets[i + 1])
        if start == end or (len(known) and not known[(first + i) >> 3] >> ((first + i) & 7) & 1):
            out[i] = 0
            continue
        # Most texts are one word. Hash it as `hash_bytes` does, without its loop.
        if end - start <= 8 and start + 8 <= len(data):
            word = load_word(data, start) & (np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - 8 * (end - start)))
            h = mix(mix(np.uint64(end - start)) ^ word)
        else:
            h = hash_bytes(data, start, end)
        # Compute the remainder without a division. The quotient by the rounded-down inverse is at
        # most 2 too small.
        rest = h - high_product(h, inverse) * others
        while rest >= others:
            rest -= others
        out[i] = 1 + np.int64(rest)


def _offsets(bounds: Sequence[np.ndarray], fewest: Sequence[int], samples: int) -> np.ndarray:
    """Combine one CSR over samples for each feature into one CSR over (sample, feature).

    A feature without values in a sample gets one lookup, for the missing value, unless it has
    padding.

    Args:
        bounds: for each of the F features its offsets, int64 [samples + 1].
        fewest: for each feature, how many lookups a sample has at least.

    Returns:
        int64 [samples * F + 1].
    """
    counts = np.empty((samples, len(bounds)), np.int64)
    for place, starts in enumerate(bounds):
        counts[:, place] = np.maximum(np.diff(starts), fewest[place])
    offsets = np.zeros(counts.size + 1, np.int64)
    np.cumsum(counts.reshape(-1), out=offsets[1:])
    return offsets


@nb.njit(nogil=True, cache=True)
def _scatter(values: np.ndarray, starts: np.ndarray, place: int, features: int, offsets: np.ndarray, out: np.ndarray) -> None:
    """Write the ids of the feature at `place` into out, which holds the lookups of all features.

    If a sample has no value of the feature, its lookup stays 0.

    Args:
        values: the feature's ids.
        starts: [samples + 1], CSR over samples into values.
        features: the number of features.
        offsets: as returned by `_offsets`.
    """
    for i in range(len(starts) - 1):
        to = offsets[i * features + place]
        for j in range(starts[i + 1] - starts[i]):
            out[to + j] = values[starts[i] + j]
