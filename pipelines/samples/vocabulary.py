"""Vocabularies: values counted in pieces, merged, ordered by frequency, looked up by hash (docs/definitions.md, Encoding)."""

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
"""Columns of a table of counts: each value once, in no particular order."""

_FORMAT = b"foreload vocabulary 1"


def count_values(records: Records, spec: FeatureSpec, table: int) -> pa.Table:
    """How often each value of the features of a table occurs in the records: COUNTS. Missing values are not counted."""
    parts = []
    for feature, column in zip(spec.features, records.categorical, strict=True):
        if feature.table != table:
            continue
        values = column.flatten() if pa.types.is_large_list(column.type) else column
        counted = pc.value_counts(values.cast(pa.large_string()).cast(pa.large_binary()))
        parts.append(pa.table([counted.field("values"), counted.field("counts").cast(pa.int64())], schema=COUNTS))
    return merge_counts(parts)


def merge_counts(parts: Sequence[pa.Table]) -> pa.Table:
    """The counts of all parts together, by ascending value, so that the result does not depend on the order of the parts."""
    merged = pa.concat_tables([COUNTS.empty_table(), *parts]).combine_chunks()
    merged = merged.filter(pc.greater(pc.fill_null(pc.binary_length(merged["value"]), 0), 0))
    merged = merged.group_by("value", use_threads=False).aggregate([("count", "sum")])
    merged = merged.select(["value", "count_sum"]).cast(pa.schema([("value", pa.large_binary()), ("count_sum", pa.int64())]))
    return merged.rename_columns(COUNTS.names).sort_by("value").combine_chunks()


class Vocabulary:
    """The values kept for one table, by id: values[i] has id 2 + i; 0 is missing, 1 is any other value.

    values: large_binary [kept]. Looking up takes a hash table of 4 to 8 bytes a value, built once per process.
    """

    def __init__(self, values: pa.Array) -> None:
        self._values = values.cast(pa.large_binary())
        self._data, self._offsets = text_buffers(self._values)
        size = 1 << max(1, 2 * len(values) - 1).bit_length()
        self._places = np.full(size, -1, np.int32 if len(values) < 1 << 31 else np.int64)
        _insert(hash_strings(self._data, self._offsets), self._places)

    @staticmethod
    def of(counts: pa.Table, min_count: int) -> Vocabulary:
        """The values that occur at least min_count times, by descending count, then by bytes ascending."""
        kept = counts.filter(pc.greater_equal(counts["count"], min_count))
        kept = kept.sort_by([("count", "descending"), ("value", "ascending")])
        return Vocabulary(_whole(kept["value"]))

    def __len__(self) -> int:
        return len(self._values)

    @property
    def values(self) -> pa.Array:
        """The values in the order of their ids: large_binary."""
        return self._values

    def ids(self, texts: pa.Array) -> np.ndarray:
        """string or large_string [n], null or "" where missing -> int64 [n]."""
        data, offsets = text_buffers(texts)
        out = np.empty(len(texts), np.int64)
        _look_up(data, offsets, hash_strings(data, offsets), self._data, self._offsets, self._places, out)
        out[np.asarray(texts.is_null())] = 0
        return out

    def texts(self, ids: np.ndarray) -> pa.Array:
        """The values of ids (int64 [n]): string [n], null for 0 and 1, which no single value has."""
        places = pa.array(ids - 2, mask=ids < 2)
        return self._values.take(places).cast(pa.string())

    def save(self, path: str | Path) -> None:
        """Write the values as an Arrow IPC file, by temporary name and rename."""
        path = Path(path)
        batch = pa.record_batch([self._values], ["value"]).replace_schema_metadata({"format": _FORMAT})
        with replacing(path) as temporary, pa.OSFile(str(temporary), "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
            writer.write_batch(batch)

    @staticmethod
    def load(path: str | Path) -> Vocabulary:
        """Read what save wrote, by memory map. Raises FeatureError."""
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
    """A column as one array; an empty one has no chunk to take."""
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


def text_buffers(texts: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """An array of texts as bytes uint8 and offsets [n + 1] (int32 or int64) into them."""
    _, offsets, data = texts.buffers()
    large = pa.types.is_large_string(texts.type) or pa.types.is_large_binary(texts.type)
    if offsets is None or not offsets.size:
        return np.empty(0, np.uint8), np.zeros(1, np.int64)
    places = np.frombuffer(offsets, np.int64 if large else np.int32)[texts.offset : texts.offset + len(texts) + 1]
    return np.frombuffer(data, np.uint8) if data is not None and data.size else np.empty(0, np.uint8), places


@nb.njit(nogil=True, cache=True)
def _insert(hashes: np.ndarray, places: np.ndarray) -> None:
    """Enter values by their hashes into an open hash table: places is -1 where free, else a value's place."""
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
    """The ids of texts: 0 for an empty one, 1 for an unknown one. known_data and known_offsets: the values that places names."""
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
