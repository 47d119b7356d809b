"""The row table: what the serial pass remembers of every row, in memory-mapped files (docs/architecture.md, The serial pass).

A record is five int32: ORDINAL (ordinal + 1; 0: never trained), ACCESS (the low bits of the row's last access number in its lane), PLACE
(its slot, or -(boundary + 2) of the end of its last residency), TAG (1 + the last step that the oracle has passed) and LANE. Rows of small
tables are addressed directly; rows of tables with more ids than DIRECT_ROWS through a hash index, so that memory follows the rows trained.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numba as nb
import numpy as np

from pipelines.features import FeatureSpec
from pipelines.mixing import mix

ORDINAL, ACCESS, PLACE, TAG, LANE = range(5)
FIELDS = 5
DIRECT_ROWS = 1 << 26


class Rows(NamedTuple):
    """The row table's arrays, as the kernels take them."""

    records: np.ndarray  # int32 [capacity, FIELDS]
    bases: np.ndarray  # int64 [tables + 1]: first record of a directly addressed table, -1 for a hashed one
    sizes: np.ndarray  # int64 [tables]: rows of each table
    places: np.ndarray  # int64 [power of two]: record + 1 of hashed rows, 0 free
    keys: np.ndarray  # int64 [capacity - direct, 2]: (table, id) of hashed rows
    hashed: np.ndarray  # int64 [1]: number of hashed rows
    direct: int  # number of directly addressed records


@nb.njit(nogil=True, cache=True, inline="always")
def _home(table: int, row_id: int, size: int) -> np.int64:
    return np.int64(mix(np.uint64(row_id) ^ (np.uint64(table) << np.uint64(48))) & np.uint64(size - 1))


@nb.njit(nogil=True, cache=True)
def find(rows: Rows, table: int, row_id: int) -> int:
    """The record of a row, or -1 where a hashed row has none."""
    base = rows.bases[table]
    if base >= 0:
        return int(base + row_id)
    place = _home(table, row_id, rows.places.size)
    while True:
        entry = rows.places[place]
        if entry == 0:
            return -1
        k = entry - 1 - rows.direct
        if rows.keys[k, 1] == row_id and rows.keys[k, 0] == table:
            return int(entry - 1)
        place = (place + 1) & (rows.places.size - 1)


@nb.njit(nogil=True, cache=True)
def find_or_add(rows: Rows, table: int, row_id: int) -> int:
    """The record of a row; a hashed row without one gets it. The caller has reserved room (RowTable.reserve)."""
    base = rows.bases[table]
    if base >= 0:
        return int(base + row_id)
    place = _home(table, row_id, rows.places.size)
    while True:
        entry = rows.places[place]
        if entry == 0:
            k = rows.hashed[0]
            rows.hashed[0] = k + 1
            rows.keys[k, 0] = table
            rows.keys[k, 1] = row_id
            rows.places[place] = rows.direct + k + 1
            return int(rows.direct + k)
        k = entry - 1 - rows.direct
        if rows.keys[k, 1] == row_id and rows.keys[k, 0] == table:
            return int(entry - 1)
        place = (place + 1) & (rows.places.size - 1)


@nb.njit(nogil=True, cache=True, inline="always")
def table_of(rows: Rows, record: int) -> int:
    """The table of a record."""
    if record >= rows.direct:
        return int(rows.keys[record - rows.direct, 0])
    table = 0
    for k in range(rows.sizes.size):
        if rows.bases[k] >= 0 and rows.bases[k] <= record:
            table = k
    return table


@nb.njit(nogil=True, cache=True)
def _reindex(keys: np.ndarray, count: int, direct: int, index: np.ndarray) -> None:
    for k in range(count):
        place = _home(keys[k, 0], keys[k, 1], index.size)
        while index[place] != 0:
            place = (place + 1) & (index.size - 1)
        index[place] = direct + k + 1


@nb.njit(nogil=True, cache=True)
def _load(
    rows: Rows, table: np.ndarray, ids: np.ndarray, lane: np.ndarray, ordinal: np.ndarray, tag: np.ndarray, counts: np.ndarray
) -> None:
    for i in range(ids.size):
        r = find_or_add(rows, table[i], ids[i])
        rows.records[r, ORDINAL] = ordinal[i] + 1
        rows.records[r, PLACE] = -1
        rows.records[r, TAG] = tag[i]
        rows.records[r, LANE] = lane[i]
        counts[lane[i], table[i]] = max(counts[lane[i], table[i]], ordinal[i] + 1)


class RowTable:
    """The records of all rows of all tables, in files under `directory` that are removed with it."""

    def __init__(self, spec: FeatureSpec, directory: Path, direct_rows: int = DIRECT_ROWS) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._sizes = np.array([table.rows for table in spec.tables], np.int64)
        bases = np.full(len(self._sizes) + 1, -1, np.int64)
        direct = 0
        for k, size in enumerate(self._sizes):
            if size <= direct_rows:
                bases[k] = direct
                direct += int(size)
        self._generation = 0
        self._any_hashed = bool((bases[:-1] < 0).any())
        room = 1 << 16 if self._any_hashed else 0
        self.rows = Rows(
            self._map("records", (max(direct + room, 1), FIELDS), np.int32),
            bases,
            self._sizes,
            self._map("index", (max(2 * room, 2),), np.int64),
            self._map("keys", (max(room, 1), 2), np.int64),
            np.zeros(1, np.int64),
            direct,
        )

    def _map(self, name: str, shape: tuple[int, ...], dtype: type) -> np.ndarray:
        path = self._directory / f"{name}-{self._generation}"
        return np.memmap(path, dtype=dtype, mode="w+", shape=shape).view(np.ndarray)

    def reserve(self, more: int) -> None:
        """Make room for `more` rows that may be new. Raises OSError (ENOSPC) where the disk may have no room for them."""
        self._check_disk(more)
        if not self._any_hashed:
            return
        old, count = self.rows, int(self.rows.hashed[0])
        room = old.keys.shape[0]
        if count + more <= room:
            return
        while room < count + more:
            room *= 2
        self._generation += 1
        records = self._map("records", (old.direct + room, FIELDS), np.int32)
        keys = self._map("keys", (room, 2), np.int64)
        index = self._map("index", (2 * room,), np.int64)
        records[: old.direct + count] = old.records[: old.direct + count]
        keys[:count] = old.keys[:count]
        _reindex(keys, count, old.direct, index)
        self.rows = old._replace(records=records, keys=keys, places=index)
        for name in ("records", "keys", "index"):
            (self._directory / f"{name}-{self._generation - 1}").unlink()

    def _check_disk(self, more: int) -> None:
        """The files are sparse, and a write through a mapping that meets a full disk ends the process without a word: look before it."""
        stats = [os.stat(self._directory / f"{name}-{self._generation}") for name in ("records", "keys", "index")]
        unwritten = sum(max(stat.st_size - 512 * stat.st_blocks, 0) for stat in stats)
        # A row may lie across two pages of each file, all of them new.
        if min(unwritten, 2 * len(stats) * more * mmap.PAGESIZE) > shutil.disk_usage(self._directory).free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def load(self, batches: Iterator[dict[str, np.ndarray]], counts: np.ndarray) -> None:
        """Take over the rows of an earlier schedule's row table; counts int64 [lanes, tables] becomes the ordinals given there."""
        for batch in batches:
            self.reserve(len(batch["id"]))
            _load(self.rows, batch["table"], batch["id"], batch["lane"], batch["ordinal"], batch["tag"], counts)

    def trained(self, batch_rows: int = 1 << 20) -> Iterator[dict[str, np.ndarray]]:
        """Every row ever trained by (table, id) ascending, in batches: table int16, id int64, lane uint8, ordinal int64, tag int32."""
        for k, size in enumerate(self._sizes):
            base = int(self.rows.bases[k])
            if base >= 0:
                for start in range(0, int(size), batch_rows):
                    records = self.rows.records[base + start : base + min(start + batch_rows, int(size))]
                    chosen = np.flatnonzero(records[:, ORDINAL])
                    if chosen.size:
                        yield self._batch(k, chosen.astype(np.int64) + start, np.asarray(records[chosen]))
            else:
                count = int(self.rows.hashed[0])
                mine = np.flatnonzero(self.rows.keys[:count, 0] == k)
                ids = np.asarray(self.rows.keys[mine, 1])
                order = np.argsort(ids)
                for start in range(0, order.size, batch_rows):
                    part = order[start : start + batch_rows]
                    yield self._batch(k, ids[part], np.asarray(self.rows.records[self.rows.direct + mine[part]]))

    @staticmethod
    def _batch(table: int, ids: np.ndarray, records: np.ndarray) -> dict[str, np.ndarray]:
        return {
            "table": np.full(ids.size, table, np.int16),
            "id": ids,
            "lane": records[:, LANE].astype(np.uint8),
            "ordinal": records[:, ORDINAL].astype(np.int64) - 1,
            "tag": records[:, TAG].astype(np.int32),
        }
