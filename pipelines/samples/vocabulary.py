"""Vocabularies: values are counted in pieces, merged, ordered by frequency and looked up by hash.

See docs/definitions.md, Encoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from foreload.base.compiled import nb
from foreload.base.files import replacing
from foreload.base.hashing import hash_strings
from foreload.pipelines.errors import FeatureError
from foreload.pipelines.samples.features import FeatureSpec
from foreload.pipelines.samples.records import Records

COUNTS = pa.schema([("value", pa.large_binary()), ("count", pa.int64())])
"""The columns of a table of counts. Each value occurs once, in no particular order."""

_FORMAT = b"foreload vocabulary 1"


def count_values(records: Records, spec: FeatureSpec, table: int) -> pa.Table:
    """Count how often each value of the features of a table occurs in the records.

    Missing values are not counted.

    Returns:
        A table with the columns COUNTS.
    """
    parts = []
    for feature, column in zip(spec.features, records.categorical, strict=True):
        if feature.table != table:
            continue
        values = column.flatten() if pa.types.is_large_list(column.type) else column
        counted = pc.value_counts(values.cast(pa.large_string()).cast(pa.large_binary()))
        parts.append(pa.table([counted.field("values"), counted.field("counts").cast(pa.int64())], schema=COUNTS))
    return merge_counts(parts)


def merge_counts(parts: Sequence[pa.Table]) -> pa.Table:
    """Add up the counts of all parts.

    The result is ordered by value, so it does not depend on the order of the parts.
    """
    merged = pa.concat_tables([COUNTS.empty_table(), *parts]).combine_chunks()
    merged = merged.filter(pc.greater(pc.fill_null(pc.binary_length(merged["value"]), 0), 0))
    merged = merged.group_by("value", use_threads=False).aggregate([("count", "sum")])
    merged = merged.select(["value", "count_sum"]).cast(pa.schema([("value", pa.large_binary()), ("count_sum", pa.int64())]))
    return merged.rename_columns(COUNTS.names).sort_by("value").combine_chunks()


class Vocabulary:
    """The values kept for one table: values[i] has id 2 + i, 0 is missing, 1 is any other value.

    The lookup uses a hash table with 2 to 4 entries a value, of 4 bytes each (8 from 2^31 values
    on), built once per process.

    Args:
        values: large_binary [kept].
    """

    def __init__(self, values: pa.Array) -> None:
        self._values = values.cast(pa.large_binary())
        self._data, self._offsets = text_buffers(self._values)
        # A power of two, so that the low bits of a hash name an entry. At most half of the entries
        # are filled, so searches are short and always reach a free one.
        size = 1 << max(1, 2 * len(values) - 1).bit_length()
        self._places = np.full(size, -1, np.int32 if len(values) < 1 << 31 else np.int64)
        _insert(hash_strings(self._data, self._offsets), self._places)

    @staticmethod
    def of(counts: pa.Table, min_count: int) -> Vocabulary:
        """Return the vocabulary of the values that occur at least min_count times.

        They are ordered by descending count, then by ascending bytes.

        Args:
            counts: a table with the columns COUNTS.
        """
        kept = counts.filter(pc.greater_equal(counts["count"], min_count))
        kept = kept.sort_by([("count", "descending"), ("value", "ascending")])
        return Vocabulary(_whole(kept["value"]))

    def __len__(self) -> int:
        return len(self._values)

    @property
    def values(self) -> pa.Array:
        """The values in the order of their ids, large_binary."""
        return self._values

    def ids(self, texts: pa.Array) -> np.ndarray:
        """Look up the ids of texts.

        Args:
            texts: string or large_string [n], null or "" where missing.

        Returns:
            int64 [n].
        """
        data, offsets = text_buffers(texts)
        out = np.empty(len(texts), np.int64)
        _look_up(data, offsets, hash_strings(data, offsets), self._data, self._offsets, self._places, out)
        out[np.asarray(texts.is_null())] = 0
        return out

    def texts(self, ids: np.ndarray) -> pa.Array:
        """Return the values of ids.

        Args:
            ids: int64 [n].

        Returns:
            string [n]. Ids 0 and 1 stand for no single value and become null.
        """
        places = pa.array(ids - 2, mask=ids < 2)
        return self._values.take(places).cast(pa.string())

    def save(self, path: str | Path) -> None:
        """Write the values as an Arrow IPC file, under a temporary name that is then renamed."""
        path = Path(path)
        batch = pa.record_batch([self._values], ["value"]).replace_schema_metadata({"format": _FORMAT})
        with replacing(path) as temporary, pa.OSFile(str(temporary), "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
            writer.write_batch(batch)

    @staticmethod
    def load(path: str | Path) -> Vocabulary:
        """Memory-map a file that `save` wrote.

        Raises:
            FeatureError: the file is not a vocabulary of this version.
        """
        try:
            batch = pa.ipc.open_file(pa.memory_map(str(path))).get_batch(0)
        except (OSError, pa.ArrowException) as error:
            raise FeatureError(f"{path}: not a readable vocabulary ({error}); prepare the schedule again") from error
        if (batch.schema.metadata or {}).get(b"format") != _FORMAT:
            raise FeatureError(f"{path}: not a vocabulary of this version; prepare the schedule again")
        return Vocabulary(batch.column(0))

    def __reduce__(self) -> tuple[type[Vocabulary], tuple[pa.Array]]:
        return Vocabulary, (self._values,)


def _whole(column: pa.ChunkedArray) -> pa.Array:
    """Return a column as one array. An empty column has no chunk to return."""
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


def text_buffers(texts: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes and offsets of an array of texts, as views.

    Returns:
        The bytes, uint8, and the offsets [n + 1] into them, int32 or int64.
    """
    _, offsets, data = texts.buffers()
    large = pa.types.is_large_string(texts.type) or pa.types.is_large_binary(texts.type)
    if offsets is None or not offsets.size:
        return np.empty(0, np.uint8), np.zeros(1, np.int64)
    places = np.frombuffer(offsets, np.int64 if large else np.int32)[texts.offset : texts.offset + len(texts) + 1]
    return np.frombuffer(data, np.uint8) if data is not None and data.size else np.empty(0, np.uint8), places


@nb.njit(nogil=True, cache=True)
def _insert(hashes: np.ndarray, places: np.ndarray) -> None:
    """Enter values by their hashes into an open-addressing hash table.

    Args:
        hashes: uint64 [values].
        places: the table, its size a power of two. A free entry is -1, another one the place of a
            value.
    """
    mask = np.uint64(len(places) - 1)
    for i in range(len(hashes)):
        at = hashes[i] & mask
        while places[at] >= 0:
            at = (at + np.uint64(1)) & mask
        places[at] = i


@nb.njit(nogil=True, cache=True)
def _look_up(
    data: np.ndarray,
    offsets: np.ndarray,
    hashes: np.ndarray,
    known_data: np.ndarray,
    known_offsets: np.ndarray,
    places: np.ndarray,
    out: np.ndarray,
) -> None:
    """Write the ids of texts to out: 0 for an empty text, 1 for an unknown one.

    Args:
        known_data: the bytes of the values in the hash table.
        known_offsets: the offsets of the values into known_data.
        places: as in `_insert`.
    """
    mask = np.uint64(len(places) - 1)
    for i in range(len(out)):
        start, length = offsets[i], offsets[i + 1] - offsets[i]
        out[i] = 0
        if length == 0:
            continue
        at = hashes[i] & mask
        out[i] = 1
        while places[at] >= 0:
            place = places[at]
            first = known_offsets[place]
            if known_offsets[place + 1] - first == length:
                same = True
                for j in range(length):
                    if data[start + j] != known_data[first + j]:
                        same = False
                        break
                if same:
                    out[i] = place + 2
                    break
            at = (at + np.uint64(1)) & mask
