"""The row table: what the serial pass remembers about every row.

A record is four int32 fields, 16 bytes, so it lies within one cache line:

- ORDINAL: the row's ordinal + 1, or 0 if the row was never trained.
- OWNER: the row's lane in the upper six bits, and in the lower ACCESS_BITS bits the low bits of the
  number of the row's last access.
- NUMBER: 1 + the row's place among the rows of its lane that this schedule uses, or 0 if it has
  none yet.
- TAG: 1 + the last step that used the row.

Rows of small tables are addressed directly. Tables with more than DIRECT_ROWS ids, or with far more
ids than there are samples, go through a hash index, so that memory grows with the rows trained and
not with the ids that exist. Arrays that fit in memory are memory of the process, in huge pages
where the kernel offers them. Larger arrays are memory-mapped files, whose pages the kernel writes
out when it needs the memory. See docs/internals/pipelines.md, "The serial pass".
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
_BATCH_ROWS = 1 << 20  # of `by_table_and_id`
# A hash index entry holds the number of the hashed row + 1 in its low bits and bits of the row's
# hash above them. Comparing the hash bits rules out most other rows before their keys are read.
_ENTRY_BITS = 40
_ENTRY_MASK = (1 << _ENTRY_BITS) - 1


class Rows(NamedTuple):
    """The arrays of the row table, in the form that the kernels take.

    Attributes:
        records: int32 [capacity, FIELDS].
        bases: int64 [tables + 1], the first record of each directly addressed table, -1 for a
            hashed one.
        sizes: int64 [tables], the number of rows of each table.
        entries: int64 [a power of two], the hash index of the hashed rows; 0 is a free entry.
        keys: int64 [capacity - direct, 2], the (table, id) of each hashed row.
        hashed: int64 [1], the number of hashed rows.
        direct: The number of directly addressed records.
    """

    records: np.ndarray
    bases: np.ndarray
    sizes: np.ndarray
    entries: np.ndarray
    keys: np.ndarray
    hashed: np.ndarray
    direct: int


@nb.njit(nogil=True, cache=True, inline="always")
def row_hash(table: int, row_id: int) -> np.uint64:
    """Return the hash of a row; its low bits say where the search in the index begins."""
    return mix(np.uint64(row_id) ^ (np.uint64(table) << np.uint64(48)))


@nb.njit(nogil=True, cache=True, inline="always")
def _mark(word: np.uint64) -> np.int64:
    """Return the bits of a row's hash that its index entry holds above the record number."""
    return np.int64(word >> np.uint64(_ENTRY_BITS + 1)) << np.int64(_ENTRY_BITS)


@nb.njit(nogil=True, cache=True)
def home(index: np.ndarray, table: int, row_id: int) -> int:
    """Return the place in the index where the search for a hashed row begins."""
    return int(np.int64(row_hash(table, row_id)) & (index.size - 1))


@nb.njit(nogil=True, cache=True, inline="always")
def _row_of(entry: int) -> int:
    """Return the hashed row, from 0, that an index entry names; -1 for a free entry."""
    return int((entry & np.int64(_ENTRY_MASK)) - 1)


@nb.njit(nogil=True, cache=True)
def find_hashed(index: np.ndarray, keys: np.ndarray, hashed: np.ndarray, table: int, row_id: int, add: bool) -> int:
    """Return the number, from 0, of a hashed row.

    If the row has no number yet, it gets the next one if `add` is set (RowTable.reserve must have
    reserved the room); otherwise the result is -1.
    """
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
    """Find the records of all lookups of hashed rows in a step.

    Rows without a record get one; RowTable.reserve must have reserved the room. The kernel does
    what `find_hashed` does, in one loop without calls.

    Args:
        rows: The row table.
        ids: int64 [lookups].
        tables: int16 [a divisor of lookups], the tables of the lookups, repeated.
        words: uint64 [lookups + ahead], the hashes of the lookups, then copies of the last one.
        lookup_record: int64 [lookups or more], filled except for lookups in directly addressed
            tables.
        ahead: How many lookups ahead the kernel prefetches.
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
            # The index entry is prefetched `ahead` lookups early. It has arrived by the time half
            # of them have passed, and then says which key to prefetch.
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
                    # The search met a free entry, so the row is new. It takes the next number.
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
    """Enter the first `count` hashed rows into an empty index."""
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
    """Enter rows of an earlier schedule, as rows that were written back before this one begins.

    See `RowTable.load`.
    """
    for i in range(ids.size):
        base = rows.bases[table[i]]
        if base >= 0:
            r = base + ids[i]
        else:
            r = rows.direct + find_hashed(rows.entries, rows.keys, rows.hashed, table[i], ids[i], True)
        # NUMBER stays 0: the row has no place among its lane's rows until this schedule uses it.
        rows.records[r, ORDINAL] = ordinal[i] + 1
        rows.records[r, OWNER] = np.int32(np.uint32(lane[i]) << np.uint32(ACCESS_BITS))
        rows.records[r, TAG] = tag[i]
        counts[lane[i], table[i]] = max(counts[lane[i], table[i]], ordinal[i] + 1)


def direct_rows(rows: int) -> int:
    """Return the most rows that a table can have and still be addressed directly.

    The records of unused ids in a directly addressed table take memory and are zeroed, too. So a
    table with far more ids than lookups is better hashed.

    Args:
        rows: An upper bound on the rows that are looked up.
    """
    return min(max(ROWS_A_LOOKUP * rows, FEWEST_DIRECT_ROWS), DIRECT_ROWS)


class RowTable:
    """The records of all rows of all tables.

    Arrays that do not fit in memory are files in `directory`. The caller deletes that folder.
    """

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
        # Arrays grow by being replaced with larger ones. The generation counts that, and is part of
        # the files' names.
        self._generation = 0
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
        """Return an array of zeros.

        The array is memory of the process if it takes less than half of the memory available,
        otherwise a mapped file of the current generation.
        """
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        if 2 * size <= available_bytes():
            # The memory is left out of core dumps. benchmarks/bench_memory.py recognises the row
            # table by that, too.
            return zeros_in_huge_pages(shape, dtype, dumped=False)
        path = self._directory / f"{name}-{self._generation}"
        self._files.append(path)
        return np.memmap(path, dtype=dtype, mode="w+", shape=shape).view(np.ndarray)

    def reserve(self, more: int) -> None:
        """Make room for `more` rows that may be new.

        Raises:
            OSError: ENOSPC, if the disk may have no room for them.
        """
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
        # The index has twice as many entries as there is room for rows, so searches in it stay
        # short.
        records = self._map("records", (old.direct + room, FIELDS), np.int32)
        keys = self._map("keys", (room, 2), np.int64)
        index = self._map("index", (2 * room,), np.int64)
        records[: old.direct + count] = old.records[: old.direct + count]
        keys[:count] = old.keys[:count]
        _reindex(keys, count, index)
        self.rows = old._replace(records=records, keys=keys, entries=index)
        # The old generation's mappings stay valid until the last reference to them goes, so its
        # files can be deleted now.
        for path in before:
            path.unlink()

    def _check_disk(self, more: int) -> None:
        """Raise OSError (ENOSPC) if the disk may lack room for `more` rows.

        The files are sparse. A write through a mapping that meets a full disk kills the process
        with no error message, so the room is checked beforehand.
        """
        if not self._files:
            return
        stats = [os.stat(file) for file in self._files]
        unwritten = sum(max(stat.st_size - 512 * stat.st_blocks, 0) for stat in stats)
        # In each file a row may straddle two pages, and both may be unwritten so far.
        if min(unwritten, 2 * len(stats) * more * mmap.PAGESIZE) > shutil.disk_usage(self._directory).free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def load(self, batches: Iterator[dict[str, np.ndarray]], counts: np.ndarray) -> None:
        """Take over the rows of an earlier schedule's row table.

        Args:
            batches: The rows, in the form of `by_table_and_id`.
            counts: int64 [lanes, tables], raised to the numbers of ordinals given in that schedule.
        """
        for batch in batches:
            self.reserve(len(batch["id"]))
            _load(self.rows, batch["table"], batch["id"], batch["lane"], batch["ordinal"], batch["tag"], counts)

    def by_table_and_id(self) -> Iterator[dict[str, np.ndarray]]:
        """Yield every row ever trained, by ascending (table, id), in batches.

        The columns are table int16, id int64, lane uint8, ordinal int64 and tag int32.
        """
        for k, size in enumerate(self._sizes):
            base = int(self.rows.bases[k])
            if base >= 0:
                for start in range(0, int(size), _BATCH_ROWS):
                    records = self.rows.records[base + start : base + min(start + _BATCH_ROWS, int(size))]
                    chosen = np.flatnonzero(records[:, ORDINAL])
                    if chosen.size:
                        yield self._batch(k, chosen.astype(np.int64) + start, np.asarray(records[chosen]))
            else:
                count = int(self.rows.hashed[0])
                of_table = np.flatnonzero(self.rows.keys[:count, 0] == k)
                ids = np.asarray(self.rows.keys[of_table, 1])
                order = np.argsort(ids)
                for start in range(0, order.size, _BATCH_ROWS):
                    part = order[start : start + _BATCH_ROWS]
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
