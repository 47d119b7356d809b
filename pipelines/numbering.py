"""The serial pass: distinct rows of a step, their lanes and ordinals, each lane's local numbering (docs/definitions.md, Ownership).

Pure kernels over arrays. A step's distinct rows are found in a small hash table that stays in cache, so the row table is touched once per
distinct row rather than once per lookup.
"""

from __future__ import annotations

from typing import NamedTuple

import numba as nb
import numpy as np

from pipelines.mixing import mix
from pipelines.row_table import LANE, ORDINAL, TAG, Rows, find, find_or_add


class Scratch(NamedTuple):
    """Working space of the serial pass, grown to the largest step."""

    stamps: np.ndarray  # int32 [power of two]: the pass that filled a place of the step's hash table
    places: np.ndarray  # int32 [power of two]: distinct row in that place
    table: np.ndarray  # int16 [distinct]
    id: np.ndarray  # int64 [distinct]
    users: np.ndarray  # uint64 [distinct]: bit v: the slice of lane v uses the row
    record: np.ndarray  # int64 [distinct]
    lane: np.ndarray  # int32 [distinct]: owner
    ordinal: np.ndarray  # int64 [distinct]: -1 for a row that was never trained
    inverse: np.ndarray  # int32 [lookups]: distinct row of a lookup
    local: np.ndarray  # int32 [lanes, distinct]: place in a using lane's local rows


def scratch(lookups: int, lanes: int) -> Scratch:
    """Space for steps of at most `lookups` lookups."""
    size = 16
    while size < 2 * lookups:
        size *= 2
    return Scratch(
        np.zeros(size, np.int32),
        np.zeros(size, np.int32),
        np.zeros(lookups, np.int16),
        np.zeros(lookups, np.int64),
        np.zeros(lookups, np.uint64),
        np.zeros(lookups, np.int64),
        np.zeros(lookups, np.int32),
        np.zeros(lookups, np.int64),
        np.zeros(lookups, np.int32),
        np.zeros((lanes, lookups), np.int32),
    )


@nb.njit(nogil=True, cache=True)
def distinct_rows(ids: np.ndarray, tables: np.ndarray, bounds: np.ndarray, stamp: int, s: Scratch) -> int:
    """Number the distinct rows of a step by first lookup.

    ids int64 [lookups]; tables int16 [lookups or features]: the table of each lookup, or of each feature when every sample has one value of
    each; bounds int64 [V + 1]: the lanes' first lookups; stamp: different for every call on this scratch. Fills s.table, s.id, s.users and
    s.inverse; returns how many.
    """
    mask = s.stamps.size - 1
    per_feature = tables.size
    count = 0
    for lane in range(bounds.size - 1):
        bit = np.uint64(1) << np.uint64(lane)
        feature = 0
        for i in range(bounds[lane], bounds[lane + 1]):
            if per_feature == ids.size:
                table = tables[i]
            else:
                table = tables[feature]
                feature += 1
                if feature == per_feature:
                    feature = 0
            row = ids[i]
            word = (np.uint64(row) ^ (np.uint64(table) << np.uint64(52))) * np.uint64(0x9E3779B97F4A7C15)
            place = np.int64((word >> np.uint64(29)) & np.uint64(mask))
            while True:
                if s.stamps[place] != stamp:
                    s.stamps[place] = stamp
                    s.places[place] = count
                    s.table[count] = table
                    s.id[count] = row
                    s.users[count] = bit
                    s.inverse[i] = count
                    count += 1
                    break
                d = s.places[place]
                if s.id[d] == row and s.table[d] == table:
                    s.users[d] |= bit
                    s.inverse[i] = d
                    break
                place = (place + 1) & mask
    return count


@nb.njit(nogil=True, cache=True)
def owner_by_hash(table: int, row: int, users: int) -> int:
    """The lane, of those in the mask `users`, that a row seen for the first time belongs to."""
    bits = np.uint64(users)
    n = 0
    left = bits
    while left != np.uint64(0):
        left &= left - np.uint64(1)
        n += 1
    pick = np.int64(mix(mix(np.uint64(table)) ^ np.uint64(row)) % np.uint64(n))
    lane = 0
    while True:
        if (bits >> np.uint64(lane)) & np.uint64(1):
            if pick == 0:
                return lane
            pick -= 1
        lane += 1


@nb.njit(nogil=True, cache=True)
def assign(rows: Rows, count: int, counts: np.ndarray, s: Scratch) -> int:
    """Give lanes and ordinals to the distinct rows of a training step; counts int64 [V, tables] are the ordinals given so far.

    Fills s.record, s.lane, s.ordinal. Returns the number of rows trained for the first time, or -1 where a table's ordinals no longer fit.
    """
    fresh = 0
    for d in range(count):
        s.record[d] = find_or_add(rows, s.table[d], s.id[d])
    for d in range(count):
        record = rows.records[s.record[d]]
        if record[ORDINAL] == 0:
            lane = owner_by_hash(s.table[d], s.id[d], s.users[d])
            ordinal = counts[lane, s.table[d]]
            if ordinal >= 2**31 - 2:
                return -1
            counts[lane, s.table[d]] = ordinal + 1
            record[ORDINAL] = ordinal + 1
            record[LANE] = lane
            fresh += 1
        s.lane[d] = record[LANE]
        s.ordinal[d] = record[ORDINAL] - 1
    return fresh


@nb.njit(nogil=True, cache=True)
def look_up(rows: Rows, count: int, s: Scratch) -> None:
    """Lanes and ordinals of an evaluation step's distinct rows, as trained so far; changes nothing.

    A row that was never trained has record -1, ordinal -1, and the lane that it would belong to.
    """
    for d in range(count):
        record = find(rows, s.table[d], s.id[d])
        if record < 0 or rows.records[record, TAG] == 0:
            s.record[d] = -1
            s.ordinal[d] = -1
            s.lane[d] = owner_by_hash(s.table[d], s.id[d], s.users[d])
        else:
            s.record[d] = record
            s.ordinal[d] = rows.records[record, ORDINAL] - 1
            s.lane[d] = rows.records[record, LANE]


@nb.njit(nogil=True, cache=True)
def local_index(count: int, bounds: np.ndarray, s: Scratch, owned: np.ndarray, index: np.ndarray) -> None:
    """Number each lane's local rows, by owner lane and then by first lookup in the step, and write every lookup's place among them.

    bounds int64 [V + 1]; owned int64 [V]: filled with the rows that each lane owns; index int32 [lookups]: filled.
    """
    lanes = bounds.size - 1
    starts = np.zeros((lanes, lanes + 1), np.int32)
    owned[:] = 0
    one = np.uint64(1)
    for d in range(count):
        owner = s.lane[d]
        owned[owner] += 1
        users = s.users[d]
        lane = 0
        while users != np.uint64(0):
            if users & one:
                starts[lane, owner + 1] += 1
            users >>= one
            lane += 1
    for lane in range(lanes):
        for owner in range(lanes):
            starts[lane, owner + 1] += starts[lane, owner]
    for d in range(count):
        owner = s.lane[d]
        users = s.users[d]
        lane = 0
        while users != np.uint64(0):
            if users & one:
                s.local[lane, d] = starts[lane, owner]
                starts[lane, owner] += 1
            users >>= one
            lane += 1
    for lane in range(lanes):
        for i in range(bounds[lane], bounds[lane + 1]):
            index[i] = s.local[lane, s.inverse[i]]
