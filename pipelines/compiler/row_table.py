"""The row table: what the serial pass remembers of every row (docs/internals/pipelines.md, The serial pass).

A record is four int32, so that it lies in one cache line: ORDINAL (ordinal + 1; 0: never trained), OWNER (its lane, and the low ACCESS_BITS bits of
the number of its last access), NUMBER (1 + its place among the rows of its lane that this schedule uses; 0: not yet) and TAG (1 + the last step that
used it). Rows of small tables are addressed directly; rows of tables with more ids than DIRECT_ROWS, or far more than samples, through a hash
index, so that memory follows the rows trained. Arrays that fit are memory of the process, in huge pages where the kernel has them; larger ones are
mapped files, whose pages the kernel writes out when it needs the memory.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from foreload.base.compiled import nb
from foreload.base.hashing import mix
from foreload.base.intrinsics import prefetch
from foreload.base.memory import available_bytes, zeros_in_huge_pages
from foreload.pipelines.samples.features import FeatureSpec

ORDINAL, OWNER, NUMBER, TAG = range(4)
FIELDS = 4
ACCESS_BITS = 26  # the other six bits of OWNER are the lane
ACCESS_MASK = (1 << ACCESS_BITS) - 1
DIRECT_ROWS, FEWEST_DIRECT_ROWS, ROWS_A_LOOKUP = 1 << 26, 1 << 16, 8
AHEAD = 16  # rows between a prefetch and its use
# A hash index entry: record + 1 of the hashed rows in the low bits, bits of the row's hash above, so that most other rows are ruled out by them.
_ENTRY_BITS = 40
_ENTRY_MASK = (1 << _ENTRY_BITS) - 1


class Rows(NamedTuple):
    """The row table's arrays, as the kernels take them."""

    records: np.ndarray  # int32 [capacity, FIELDS]
    bases: np.ndarray  # int64 [tables + 1]: first record of a directly addressed table, -1 for a hashed one
    sizes: np.ndarray  # int64 [tables]: rows of each table
    entries: np.ndarray  # int64 [power of two]: the hash index: entries of hashed rows, 0 free
    keys: np.ndarray  # int64 [capacity - direct, 2]: (table, id) of hashed rows
    hashed: np.ndarray  # int64 [1]: number of hashed rows
    direct: int  # number of directly addressed records


@nb.njit(nogil=True, cache=True, inline="always")
def row_hash(table: int, row_id: int) -> np.uint64:
    """What a hashed row is found by; its low bits say where the search in the index begins."""
    return mix(np.uint64(row_id) ^ (np.uint64(table) << np.uint64(48)))


@nb.njit(nogil=True, cache=True, inline="always")
def _mark(word: np.uint64) -> np.int64:
    """The bits of a row's hash that its index entry has, above the record."""
    return np.int64(word >> np.uint64(_ENTRY_BITS + 1)) << np.int64(_ENTRY_BITS)


@nb.njit(nogil=True, cache=True)
def home(index: np.ndarray, table: int, row_id: int) -> int:
    """Where the search for a hashed row begins in the index."""
    return int(np.int64(row_hash(table, row_id)) & (index.size - 1))


@nb.njit(nogil=True, cache=True, inline="always")
def _row_of(entry: int) -> int:
    """The hashed row, from 0, that an entry of the index is of; -1 for a free one."""
    return int((entry & np.int64(_ENTRY_MASK)) - 1)


@nb.njit(nogil=True, cache=True)
def find_hashed(index: np.ndarray, keys: np.ndarray, hashed: np.ndarray, table: int, row_id: int, add: bool) -> int:
    """The number of a hashed row, from 0. One without gets it if `add` (room is reserved, RowTable.reserve), or else has -1."""
    word = row_hash(table, row_id)
    mark = _mark(word)
    last = index.size - 1
    place = np.int64(word) & last
    while True:
        entry = index[place]
        if entry == 0:
            break
        if entry & ~np.int64(_ENTRY_MASK) == mark:
            k = _row_of(entry)
            if keys[k, 1] == row_id and keys[k, 0] == table:
                return k
        place = (place + 1) & last
    if not add:
        return -1
    k = hashed[0]
    hashed[0] = k + 1
    keys[k, 0] = table
    keys[k, 1] = row_id
    index[place] = mark | (k + 1)
    return k


@nb.njit(nogil=True, cache=True)
def find_all_hashed(
    rows: Rows, ids: np.ndarray, tables: np.ndarray, words: np.ndarray, lookup_record: np.ndarray, ahead: int
) -> None:
    """The records of a step's lookups of hashed rows; rows without one get it (room is reserved, RowTable.reserve).

    ids int64 [lookups]; tables int16 [a divisor of lookups]: their tables, again and again; words uint64 [lookups + ahead]: their hashes, and
    the last one's; lookup_record int64 [lookups or more]: filled, but for tables that are directly addressed. What `find_hashed` does, in one
    loop without calls.
    """
    index, keys, bases, direct = rows.entries, rows.keys, rows.bases, rows.direct
    count = np.uint64(rows.hashed[0])
    last = np.uint64(index.size - 1)
    row_bits, mark_bits = np.uint64(_ENTRY_MASK), ~np.uint64(_ENTRY_MASK)
    bits, one = np.uint64(_ENTRY_BITS), np.uint64(1)
    near = np.uint64(ahead // 2)
    far = np.uint64(ahead)
    width = tables.size
    for begin in range(0, ids.size, width):
        for f in range(width):
            i = np.uint64(begin + f)
            prefetch(index, np.int64(words[i + far] & last))
            # The index entry is asked for `ahead` lookups early; it has come half of them later, and says which key to ask for.
            following = np.uint64(index[words[i + near] & last]) & row_bits
            prefetch(keys, np.int64(following) * 2 - 2)
            table, row_id, word = tables[np.uint64(f)], ids[i], words[i]
            if bases[np.uint64(table)] >= 0:
                continue
            mark = (word >> (bits + one)) << bits
            place = word & last
            while True:
                entry = np.uint64(index[place])
                k = (entry & row_bits) - one
                if entry == np.uint64(0):
                    k = count
                    count += one
                    keys[k, 0] = table
                    keys[k, 1] = row_id
                    index[place] = np.int64(mark | count)
                    break
                if entry & mark_bits == mark and keys[k, 1] == row_id and keys[k, 0] == table:
                    break
                place = (place + one) & last
            lookup_record[i] = direct + np.int64(k)
    rows.hashed[0] = np.int64(count)


@nb.njit(nogil=True, cache=True)
def _reindex(keys: np.ndarray, count: int, index: np.ndarray) -> None:
    """Enter the first `count` hashed rows into an index that has none yet."""
    last = index.size - 1
    for k in range(count):
        if k + AHEAD < count:
            prefetch(index, home(index, keys[k + AHEAD, 0], keys[k + AHEAD, 1]))
        word = row_hash(keys[k, 0], keys[k, 1])
        place = np.int64(word) & last
        while index[place] != 0:
            place = (place + 1) & last
        index[place] = _mark(word) | (k + 1)


@nb.njit(nogil=True, cache=True)
def _load(
    rows: Rows, table: np.ndarray, ids: np.ndarray, lane: np.ndarray, ordinal: np.ndarray, tag: np.ndarray, counts: np.ndarray
) -> None:
    """Enter rows of an earlier schedule, as rows that were written back before this one begins. See RowTable.load."""
    for i in range(ids.size):
        base = rows.bases[table[i]]
        if base >= 0:
            r = base + ids[i]
        else:
            r = rows.direct + find_hashed(rows.entries, rows.keys, rows.hashed, table[i], ids[i], True)
        rows.records[r, ORDINAL] = ordinal[i] + 1
        rows.records[r, OWNER] = np.int32(np.uint32(lane[i]) << np.uint32(ACCESS_BITS))
        rows.records[r, TAG] = tag[i]
        counts[lane[i], table[i]] = max(counts[lane[i], table[i]], ordinal[i] + 1)


def direct_rows(rows: int) -> int:
    """Up to how many rows of a table are addressed directly where so many are looked up, at most: what lies between them is zeroed as well."""
    return min(max(ROWS_A_LOOKUP * rows, FEWEST_DIRECT_ROWS), DIRECT_ROWS)


class RowTable:
    """The records of all rows of all tables. What does not fit in memory is in files under `directory`, which are removed with it."""

    def __init__(self, spec: FeatureSpec, directory: Path, direct_rows: int = DIRECT_ROWS) -> None:
        self._directory = directory
        directory.mkdir(exist_ok=True)
        self._sizes = np.array([table.rows for table in spec.tables], np.int64)
        bases = np.full(len(self._sizes) + 1, -1, np.int64)
        direct = 0
        for k, size in enumerate(self._sizes):
            if size <= direct_rows:
                bases[k] = direct
                direct += int(size)
        self._generation = 0  # of the arrays, which grow by making new ones; in the files' names
        self._files: list[Path] = []
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
        """Zeros: in memory where that is less than half of what is available, else a mapped file of the present generation."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        if 2 * size <= available_bytes():
            # That it is not dumped is also what benchmarks/bench_memory.py knows the row table by.
            return zeros_in_huge_pages(shape, dtype, dumped=False)
        path = self._directory / f"{name}-{self._generation}"
        self._files.append(path)
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
        before, self._files = self._files, []
        records = self._map("records", (old.direct + room, FIELDS), np.int32)
        keys = self._map("keys", (room, 2), np.int64)
        index = self._map("index", (2 * room,), np.int64)
        records[: old.direct + count] = old.records[: old.direct + count]
        keys[:count] = old.keys[:count]
        _reindex(keys, count, index)
        self.rows = old._replace(records=records, keys=keys, entries=index)
        for path in before:
            path.unlink()

    def _check_disk(self, more: int) -> None:
        """The files are sparse, and a write through a mapping that meets a full disk ends the process without a word: look before it."""
        if not self._files:
            return
        stats = [os.stat(file) for file in self._files]
        unwritten = sum(max(stat.st_size - 512 * stat.st_blocks, 0) for stat in stats)
        # A row may lie across two pages of each file, all of them new.
        if min(unwritten, 2 * len(stats) * more * mmap.PAGESIZE) > shutil.disk_usage(self._directory).free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def load(self, batches: Iterator[dict[str, np.ndarray]], counts: np.ndarray) -> None:
        """Take over the rows of an earlier schedule's row table; counts int64 [lanes, tables] becomes the ordinals given there."""
        for batch in batches:
            self.reserve(len(batch["id"]))
            _load(self.rows, batch["table"], batch["id"], batch["lane"], batch["ordinal"], batch["tag"], counts)

    def by_table_and_id(self, batch_rows: int = 1 << 20) -> Iterator[dict[str, np.ndarray]]:
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
                of_table = np.flatnonzero(self.rows.keys[:count, 0] == k)
                ids = np.asarray(self.rows.keys[of_table, 1])
                order = np.argsort(ids)
                for start in range(0, order.size, batch_rows):
                    part = order[start : start + batch_rows]
                    yield self._batch(k, ids[part], np.asarray(self.rows.records[self.rows.direct + of_table[part]]))

    @staticmethod
    def _batch(table: int, ids: np.ndarray, records: np.ndarray) -> dict[str, np.ndarray]:
        return {
            "table": np.full(ids.size, table, np.int16),
            "id": ids,
            "lane": (records[:, OWNER].view(np.uint32) >> ACCESS_BITS).astype(np.uint8),
            "ordinal": records[:, ORDINAL].astype(np.int64) - 1,
            "tag": records[:, TAG].astype(np.int32),
        }
