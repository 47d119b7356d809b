"""The serial pass: distinct rows of a step, their lanes and ordinals, each lane's local numbering (docs/definitions.md, Ownership).

Pure kernels over arrays. A step's distinct rows are found in a small hash table that stays in cache, so the row table is touched once per
distinct row rather than once per lookup, and asked for ahead.
"""

from __future__ import annotations

from typing import NamedTuple

import numba as nb
import numpy as np

from pipelines.mixing import mix
from pipelines.prefetch import prefetch
from pipelines.row_table import ACCESS_BITS, ACCESS_MASK, AHEAD, FIELDS, ORDINAL, OWNER, TAG, Rows, find_hashed, home, named

_HASH_BITS = 64


class Scratch(NamedTuple):
    """Working space of the serial pass, grown to the largest step."""

    places: np.ndarray  # uint32 [power of two]: the step's hash table: distinct row + 1, 0 free
    table: np.ndarray  # int16 [distinct]
    id: np.ndarray  # int64 [distinct]
    record: np.ndarray  # int64 [distinct]: -1 for a row that was never trained, in evaluation
    lane: np.ndarray  # int32 [distinct]: owner, -1 before it is known
    last: np.ndarray  # int32 [distinct]: the low bits of the number of the row's last access
    given: np.ndarray  # int32 [distinct]: 1 + the ordinal that a row gets in this step, 0 where it has one
    users: np.ndarray  # uint64 [distinct]: bit v: the slice of lane v uses the row
    order: np.ndarray  # int32 [distinct]: distinct rows by owner lane, then by number
    inverse: np.ndarray  # int32 [lookups]: distinct row of a lookup
    local: np.ndarray  # int32 [lanes, distinct]: place in a using lane's local rows


def scratch(lookups: int, lanes: int) -> Scratch:
    """Space for steps of at most `lookups` lookups."""
    size = 16
    while 4 * size < 5 * lookups:
        size *= 2
    return Scratch(
        np.zeros(size, np.uint32),
        np.zeros(lookups, np.int16),
        np.zeros(lookups, np.int64),
        np.zeros(lookups, np.int64),
        np.zeros(lookups, np.int32),
        np.zeros(lookups, np.int32),
        np.zeros(lookups, np.int32),
        np.zeros(lookups, np.uint64),
        np.zeros(lookups, np.int32),
        np.zeros(lookups, np.int32),
        np.zeros((lanes, lookups), np.int32),
    )


@nb.njit(nogil=True, cache=True)
def distinct_rows(rows: Rows, ids: np.ndarray, tables: np.ndarray, s: Scratch) -> int:
    """Number the distinct rows of a step by first lookup.

    ids int64 [lookups]; tables int16 [lookups or features]: the table of each lookup, or of each feature when every sample has one value of
    each. Fills s.table, s.id and s.inverse; returns how many. Of the row table nothing is read, but what will be is asked for.
    """
    places, distinct_table, distinct_id, inverse = s.places, s.table, s.id, s.inverse
    records, bases, index = rows.records, rows.bases, rows.index
    bits = 0
    while 1 << bits < places.size:
        bits += 1
    shift = np.uint64(_HASH_BITS - bits)
    last = np.uint64(places.size - 1)
    places[:] = 0
    per_feature = tables.size
    per_lookup = per_feature == ids.size
    count = 0
    feature = 0
    for i in range(ids.size):
        if per_lookup:
            table = tables[i]
        else:
            table = tables[feature]
            feature += 1
            if feature == per_feature:
                feature = 0
        row = ids[i]
        place = ((np.uint64(row) ^ (np.uint64(table) << np.uint64(52))) * np.uint64(0x9E3779B97F4A7C15)) >> shift
        while True:
            entry = places[place]
            if entry == 0:
                places[place] = count + 1
                distinct_table[count] = table
                distinct_id[count] = row
                inverse[i] = count
                count += 1
                base = bases[table]
                if base >= 0:
                    prefetch(records, (base + row) * FIELDS)
                else:
                    prefetch(index, home(index, table, row))
                break
            d = entry - 1
            if distinct_id[d] == row and distinct_table[d] == table:
                inverse[i] = d
                break
            place = (place + np.uint64(1)) & last
    return count


@nb.njit(nogil=True, cache=True)
def known_lanes(rows: Rows, count: int, train: bool, access: int, s: Scratch) -> None:
    """The record and the lane of each distinct row as trained so far; lane -1 where it was never trained.

    train: rows without a record get one, and the others' last access becomes this one, numbered from `access` on. Fills s.record, s.lane and
    s.last; lanes and ordinals of new rows are entered by `remember`.
    """
    records, bases, index, keys, hashed, direct = rows.records, rows.bases, rows.index, rows.keys, rows.hashed, rows.direct
    distinct_table, distinct_id, distinct_record, distinct_lane = s.table, s.id, s.record, s.lane
    last = s.last
    low = np.int64(ACCESS_MASK)
    any_hashed = direct < len(records)
    for d in range(count):
        if any_hashed:
            e = min(d + AHEAD, count - 1)
            if bases[distinct_table[e]] < 0:
                k = max(named(index[home(index, distinct_table[e], distinct_id[e])]), 0)
                prefetch(keys, 2 * k)
                prefetch(records, (direct + k) * FIELDS)
        table = distinct_table[d]
        base = bases[table]
        if base >= 0:
            record = base + distinct_id[d]
        else:
            k = find_hashed(index, keys, hashed, table, distinct_id[d], train)
            record = direct + k if k >= 0 else k
        # An ordinal is given by the serial pass, which is ahead; a tag by the oracle, whose steps have passed.
        if record < 0 or records[record, ORDINAL if train else TAG] == 0:
            distinct_record[d] = record if train else -1
            distinct_lane[d] = -1
        else:
            distinct_record[d] = record
            owner = np.uint32(records[record, OWNER])
            distinct_lane[d] = owner >> np.uint32(ACCESS_BITS)
            last[d] = owner & np.uint32(low)
            if train:
                records[record, OWNER] = np.int32((owner & ~np.uint32(low)) | np.uint32((access + d) & low))


@nb.njit(nogil=True, cache=True)
def find_users(inverse: np.ndarray, bounds: np.ndarray, count: int, users: np.ndarray) -> None:
    """The lanes whose slices use each distinct row.

    inverse int32 [lookups]: distinct row of each lookup, slice by slice; bounds int64 [V + 1]: first lookup of each slice; users uint64
    [distinct]: filled.
    """
    users[:count] = np.uint64(0 if bounds.size > 2 else 1)
    if bounds.size == 2:
        return
    for lane in range(bounds.size - 1):
        bit = np.uint64(1) << np.uint64(lane)
        for i in range(bounds[lane], bounds[lane + 1]):
            users[inverse[i]] |= bit


@nb.njit(nogil=True, cache=True)
def owner_by_hash(table: int, row: int, users: int) -> int:
    """The lane, of those in the mask `users`, that a row seen for the first time belongs to."""
    bits = np.uint64(users)
    n = 0
    left = bits
    while left != np.uint64(0):
        left &= left - np.uint64(1)
        n += 1
    pick = np.int64(0)
    if n > 1:
        pick = np.int64(mix(mix(np.uint64(table)) ^ np.uint64(row)) % np.uint64(n))
    lane = 0
    while True:
        if (bits >> np.uint64(lane)) & np.uint64(1):
            if pick == 0:
                return lane
            pick -= 1
        lane += 1


@nb.njit(nogil=True, cache=True)
def settle(count: int, counts: np.ndarray, train: bool, owned: np.ndarray, s: Scratch) -> int:
    """Give a lane to each distinct row that has none, and in training an ordinal; sort the rows by lane.

    counts int64 [V, tables]: the ordinals given so far; owned int64 [V]: filled with the rows of each lane. Fills s.lane, s.given and s.order.
    Returns the number of rows seen for the first time, or -1 where a table's ordinals no longer fit.
    """
    distinct_table, distinct_id, distinct_lane, users, order, given = s.table, s.id, s.lane, s.users, s.order, s.given
    fresh = 0
    owned[:] = 0
    for d in range(count):
        lane = distinct_lane[d]
        if lane < 0:
            table = distinct_table[d]
            lane = owner_by_hash(table, distinct_id[d], users[d])
            distinct_lane[d] = lane
            fresh += 1
            if train:
                ordinal = counts[lane, table]
                if ordinal >= 2**31 - 2:
                    return -1
                counts[lane, table] = ordinal + 1
                given[d] = ordinal + 1
        else:
            given[d] = 0
        owned[lane] += 1
    if owned.size == 1:
        for d in range(count):
            order[d] = d
        return fresh
    ends = np.zeros(owned.size, np.int64)
    for lane in range(1, owned.size):
        ends[lane] = ends[lane - 1] + owned[lane - 1]
    for d in range(count):
        lane = distinct_lane[d]
        order[ends[lane]] = d
        ends[lane] += 1
    return fresh


@nb.njit(nogil=True, cache=True)
def remember(rows: Rows, count: int, access: int, s: Scratch) -> None:
    """Enter lanes and ordinals that were given into the row table; access: the number of the first row's access."""
    records, distinct_record, lane, given = rows.records, s.record, s.lane, s.given
    for d in range(count):
        if given[d] != 0:
            low = np.uint32((access + d) & np.int64(ACCESS_MASK))
            records[distinct_record[d], ORDINAL] = given[d]
            records[distinct_record[d], OWNER] = np.int32(np.uint32(lane[d]) << np.uint32(ACCESS_BITS) | low)


@nb.njit(nogil=True, cache=True)
def local_index(inverse: np.ndarray, bounds: np.ndarray, count: int, s: Scratch, index: np.ndarray) -> None:
    """Number each lane's local rows, by owner lane and then by first lookup in the step, and write every lookup's place among them.

    inverse int32 [lookups] and bounds int64 [V + 1]: see find_users; index int32 [lookups]: filled.
    """
    lanes = bounds.size - 1
    if lanes == 1:
        index[:] = inverse
        return
    order, all_users, all_local = s.order, s.users, s.local
    given = np.zeros(lanes, np.int32)
    for place in range(count):
        d = order[place]
        users = all_users[d]
        lane = 0
        while users != np.uint64(0):
            if users & np.uint64(1):
                all_local[lane, d] = given[lane]
                given[lane] += 1
            users >>= np.uint64(1)
            lane += 1
    for lane in range(lanes):
        local = all_local[lane]
        for i in range(bounds[lane], bounds[lane + 1]):
            index[i] = local[inverse[i]]


@nb.njit(nogil=True, cache=True)
def placed_lookups(order: np.ndarray, inverse: np.ndarray, starts: np.ndarray, placed: np.ndarray, bounds: np.ndarray) -> None:
    """The lookups of a batch whose samples are put into another order, and where they begin.

    order int64 [samples]; inverse int32 [lookups]: distinct row of each lookup in the batch's own order; starts int64 [samples + 1]: first
    lookup of each sample there. Fills placed int32 [lookups] and bounds int64 [samples + 1], likewise in the new order.
    """
    k = np.uint64(0)
    for n in range(order.size):
        bounds[n] = k
        sample = np.uint64(order[n])
        first = np.uint64(starts[sample])
        size = np.uint64(starts[sample + np.uint64(1)]) - first
        for i in range(size):
            placed[k + np.uint64(i)] = inverse[first + np.uint64(i)]
        k += size
    bounds[order.size] = k


@nb.njit(nogil=True, cache=True)
def lookups_of_rows(inverse: np.ndarray, count: np.ndarray) -> None:
    """Add to count int32 [distinct] the lookups of each row; inverse int32 [lookups]."""
    for i in range(inverse.size):
        count[inverse[i]] += 1
