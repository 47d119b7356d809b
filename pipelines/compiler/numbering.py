"""The kernels of the serial pass: distinct rows, their lanes and ordinals, and local numbers.

The kernels are pure functions on arrays. In training, the row table itself yields a step's distinct
rows. Every record has the number of the row's last access, and an access within this step is a
place among the step's distinct rows. So the pass fetches each row's record once a step, with a
prefetch, and copies the parts that later kernels need. Evaluation does not count as an access, so
it finds the distinct rows in a hash table of the step. See docs/definitions.md, "Ownership".
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from foreload.base.compiled import nb
from foreload.base.hashing import mix
from foreload.base.intrinsics import prefetch
from foreload.pipelines.compiler.row_table import (
    ACCESS_BITS,
    ACCESS_MASK,
    AHEAD,
    FIELDS,
    NUMBER,
    ORDINAL,
    OWNER,
    TAG,
    Rows,
    find_all_hashed,
    find_hashed,
    home,
    row_hash,
)

LANE_ROW = np.dtype([("id", np.int64), ("ordinal", np.int32), ("tag", np.int32), ("table", np.int16)], align=True)
"""A row of a lane; arrays of this dtype are indexed by the row's number in the lane.

`ordinal` is -1 if the row was never trained. `tag` is that of the version that the store had before
this schedule, 0 for none.
"""
_HASH_BITS = 64
_LOOKUPS_AHEAD = 64  # lookups between the prefetch of a record, or of its index entry, and its use


class Scratch(NamedTuple):
    """The working space of the serial pass, as large as the largest step so far needs.

    Attributes:
        records: int64 [lookups + _LOOKUPS_AHEAD], in training the record of each lookup.
        words: uint64 [lookups + _LOOKUPS_AHEAD], the hash of each lookup if any table is hashed.
        places: uint32 [a power of two], in evaluation a step's hash table: distinct row + 1, 0 for
            free.
        table: int16 [distinct].
        id: int64 [distinct].
        record: int64 [distinct], in evaluation -1 for a row that was never trained.
        state: int32 [distinct, FIELDS], the row's record before the step, zeros if it was never
            trained.
        lane: int32 [distinct], the owner, -1 before it is known.
        given: int32 [distinct], 1 + the ordinal that the row gets in this step, 0 if it has one
            already.
        numbers: int32 [distinct], in the order of `order`, each row's number in its lane. For a row
            that was never trained, -1 - its place among such rows of the lane.
        newcomers: LANE_ROW [distinct], by lane, the rows that get their number in this step.
        users: uint64 [distinct], bit v is set if the slice of lane v uses the row.
        order: int32 [distinct], the distinct rows by owner lane, then by number.
        inverse: int32 [lookups], the distinct row of each lookup.
        local: int32 [lanes, distinct], the row's place among the local rows of a lane that uses it.
    """

    records: np.ndarray
    words: np.ndarray
    places: np.ndarray
    table: np.ndarray
    id: np.ndarray
    record: np.ndarray
    state: np.ndarray
    lane: np.ndarray
    given: np.ndarray
    numbers: np.ndarray
    newcomers: np.ndarray
    users: np.ndarray
    order: np.ndarray
    inverse: np.ndarray
    local: np.ndarray


def scratch(lookups: int, lanes: int) -> Scratch:
    """Allocate the space for steps of at most `lookups` lookups."""
    # The hash table of evaluation is at most four fifths full, even if every lookup is of another
    # row.
    size = 16
    while 4 * size < 5 * lookups:
        size *= 2
    return Scratch(
        np.zeros(lookups + _LOOKUPS_AHEAD, np.int64),
        np.zeros(lookups + _LOOKUPS_AHEAD, np.uint64),
        np.zeros(size, np.uint32),
        np.zeros(lookups, np.int16),
        np.zeros(lookups, np.int64),
        np.full(lookups, -1, np.int64),
        np.zeros((lookups, FIELDS), np.int32),
        np.zeros(lookups, np.int32),
        np.zeros(lookups, np.int32),
        np.zeros(lookups, np.int32),
        np.zeros(lookups, LANE_ROW),
        np.zeros(lookups, np.uint64),
        np.zeros(lookups, np.int32),
        np.zeros(lookups, np.int32),
        np.zeros((lanes, lookups), np.int32),
    )


@nb.njit(nogil=True, cache=True)
def _find_records(rows: Rows, ids: np.ndarray, tables: np.ndarray, s: Scratch) -> None:
    """Find the record of every lookup, and fill s.records.

    Rows without a record get one. The entries after the last lookup repeat it, so that prefetches
    may read beyond the end. See `number_training_rows`.
    """
    lookup_record, words = s.records, s.words
    width = tables.size
    firsts = rows.bases[tables]
    for begin in range(0, ids.size, width):
        for f in range(width):
            lookup_record[np.uint64(begin + f)] = firsts[np.uint64(f)] + ids[np.uint64(begin + f)]
    # The sums above are the records of lookups in directly addressed tables. Those in hashed tables
    # are overwritten with what the index says.
    if rows.direct < len(rows.records):
        for begin in range(0, ids.size, width):
            for f in range(width):
                words[np.uint64(begin + f)] = row_hash(tables[f], ids[np.uint64(begin + f)])
        words[ids.size : ids.size + _LOOKUPS_AHEAD] = words[ids.size - 1]
        find_all_hashed(rows, ids, tables, words, lookup_record, _LOOKUPS_AHEAD)
    lookup_record[ids.size : ids.size + _LOOKUPS_AHEAD] = lookup_record[ids.size - 1]


@nb.njit(nogil=True, cache=True)
def number_training_rows(rows: Rows, ids: np.ndarray, tables: np.ndarray, access: int, tag: int, s: Scratch) -> int:
    """Number the distinct rows of a training step by first lookup.

    Marks the rows' records as accessed. Fills s.table, s.id, s.record, s.state, s.lane (-1 if the
    row was never trained) and s.inverse. `number_rows` enters the lanes, ordinals and numbers of
    new rows later.

    Before: a record holds the low bits of the number of its row's last access, which was in a step
    before this one. After: it holds those of the access in this step, which is `access` + the row's
    number here, and s.state holds the record as it was. So during the step, a record whose access
    lies in this step says which distinct row it is, and no hash table is needed. The low bits may
    match by chance; comparing the record detects that.

    Args:
        rows: The row table.
        ids: int64 [lookups], at least one.
        tables: int16 [lookups or features], the table of each lookup, or of each feature if every
            sample has one value of each.
        access: The number of the first distinct row's access.
        tag: 1 + the step, which the records get.

    Returns:
        The number of distinct rows.
    """
    _find_records(rows, ids, tables, s)
    records, lookup_record, distinct_record, state = rows.records, s.records, s.record, s.state
    distinct_table, distinct_id, distinct_lane, inverse = s.table, s.id, s.lane, s.inverse
    low = np.uint32(ACCESS_MASK)
    begun = np.uint32(access & np.int64(ACCESS_MASK))
    width = tables.size
    count = np.uint32(0)
    for begin in range(0, ids.size, width):
        for f in range(width):
            i = np.uint64(begin + f)
            prefetch(records, lookup_record[i + np.uint64(_LOOKUPS_AHEAD)] * FIELDS)
            record = lookup_record[i]
            r = np.uint64(record)
            owner = np.uint32(records[r, OWNER])
            # If an earlier lookup of this step accessed the row, this is its number in the step.
            d = (owner - begun) & low
            if d < count and distinct_record[np.uint64(d)] == record:
                inverse[i] = d
                continue
            at = np.uint64(count)
            for k in range(FIELDS):
                state[at, k] = records[r, k]
            distinct_record[at] = record
            distinct_table[at] = tables[f]
            distinct_id[at] = ids[i]
            inverse[i] = count
            records[r, OWNER] = np.int32((owner & ~low) | ((begun + count) & low))
            records[r, TAG] = tag
            count = np.uint32(count + np.uint32(1))
    # The lane counts only if the row has an ordinal; the OWNER field of other records names no lane
    # yet.
    for n in range(count):
        owner = np.uint32(state[n, OWNER])
        distinct_lane[n] = np.int32(owner >> np.uint32(ACCESS_BITS)) if state[n, ORDINAL] != 0 else np.int32(-1)
    return int(count)


@nb.njit(nogil=True, cache=True)
def number_evaluation_rows(rows: Rows, ids: np.ndarray, tables: np.ndarray, s: Scratch) -> int:
    """Number the distinct rows of an evaluation step, as `number_training_rows` does for training.

    The row table does not change. s.record is -1 if a row was never trained.
    """
    places, distinct_table, distinct_id, inverse = s.places, s.table, s.id, s.inverse
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
                break
            d = entry - 1
            if distinct_id[d] == row and distinct_table[d] == table:
                inverse[i] = d
                break
            place = (place + np.uint64(1)) & last
    _look_up_lanes(rows, count, s)
    return count


@nb.njit(nogil=True, cache=True)
def _look_up_lanes(rows: Rows, count: int, s: Scratch) -> None:
    """Look up the record, its contents and the lane of each distinct row.

    Record and lane are -1 if the row was never trained.
    """
    records, bases, index, keys, hashed, direct = rows.records, rows.bases, rows.entries, rows.keys, rows.hashed, rows.direct
    distinct_table, distinct_id, distinct_record, distinct_lane = s.table, s.id, s.record, s.lane
    for d in range(count):
        e = min(d + AHEAD, count - 1)
        base = bases[distinct_table[e]]
        if base >= 0:
            prefetch(records, (base + distinct_id[e]) * FIELDS)
        else:
            prefetch(index, home(index, distinct_table[e], distinct_id[e]))
        table = distinct_table[d]
        base = bases[table]
        if base >= 0:
            record = base + distinct_id[d]
        else:
            k = find_hashed(index, keys, hashed, table, distinct_id[d], False)
            record = direct + k if k >= 0 else k
        if record < 0 or records[record, ORDINAL] == 0:
            distinct_record[d] = -1
            distinct_lane[d] = -1
            s.state[d, :] = 0
        else:
            distinct_record[d] = record
            distinct_lane[d] = np.int32(np.uint32(records[record, OWNER]) >> np.uint32(ACCESS_BITS))
            for k in range(FIELDS):
                s.state[d, k] = records[record, k]


@nb.njit(nogil=True, cache=True)
def find_users(inverse: np.ndarray, bounds: np.ndarray, count: int, users: np.ndarray) -> None:
    """Find the lanes whose slices use each distinct row.

    Args:
        inverse: int32 [lookups], the distinct row of each lookup, slice by slice.
        bounds: int64 [V + 1], the first lookup of each slice.
        count: The number of distinct rows.
        users: uint64 [distinct], filled with a bit for each lane.
    """
    users[:count] = np.uint64(0 if bounds.size > 2 else 1)
    if bounds.size == 2:
        return
    for lane in range(bounds.size - 1):
        bit = np.uint64(1) << np.uint64(lane)
        for i in range(bounds[lane], bounds[lane + 1]):
            users[np.uint64(inverse[np.uint64(i)])] |= bit


@nb.njit(nogil=True, cache=True)
def owner_by_hash(table: int, row: int, users: int) -> int:
    """Return the lane, among those in the mask `users`, that owns a row seen for the first time."""
    bits = np.uint64(users)
    n = 0
    left = bits
    # Count the bits. Each turn clears the lowest bit that is set.
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
def assign_owners(count: int, counts: np.ndarray, train: bool, owned: np.ndarray, s: Scratch) -> int:
    """Give a lane to each distinct row that has none, and sort the rows by lane.

    In training, such a row gets an ordinal, too. Fills s.lane, s.given and s.order.

    Before: s.lane is -1 for a row without a lane, and s.users has the lanes whose slices use each
    row. After: every row has a lane. s.order lists the rows lane by lane, and within a lane by
    their numbers in this step, so by first lookup. In training, `counts` includes the ordinals
    given here, and s.given holds them row by row.

    Args:
        count: The number of distinct rows.
        counts: int64 [V, tables], the numbers of ordinals given so far, advanced in training.
        train: Whether this is a training step.
        owned: int64 [V], filled with the number of rows that each lane owns.

    Returns:
        The number of rows seen for the first time, or -1 if a table's ordinals no longer fit.
    """
    distinct_table, distinct_id, distinct_lane, users, order, given = s.table, s.id, s.lane, s.users, s.order, s.given
    fresh = 0
    owned[:] = 0
    for n in range(count):
        d = np.uint64(n)
        lane = distinct_lane[d]
        given[d] = 0
        if lane < 0:
            table = distinct_table[d]
            lane = owner_by_hash(table, distinct_id[d], users[d])
            distinct_lane[d] = lane
            fresh += 1
            if train:
                ordinal = counts[lane, table]
                # The row table holds ordinal + 1 as int32.
                if ordinal >= 2**31 - 2:
                    return -1
                counts[lane, table] = ordinal + 1
                given[d] = ordinal + 1
        owned[np.uint64(lane)] += 1
    if owned.size == 1:
        for n in range(count):
            order[n] = n
        return fresh
    # A counting sort by lane. It is stable, so the rows of a lane stay in the order of first
    # lookup.
    ends = np.zeros(owned.size, np.int64)
    for lane in range(1, owned.size):
        ends[lane] = ends[lane - 1] + owned[lane - 1]
    for n in range(count):
        owner = np.uint64(distinct_lane[np.uint64(n)])
        order[np.uint64(ends[owner])] = n
        ends[owner] += 1
    return fresh


@nb.njit(nogil=True, cache=True)
def number_rows(rows: Rows, count: int, access: int, numbers: np.ndarray, newcomers: np.ndarray, s: Scratch) -> None:
    """Give every row of a step its number in its lane, and enter what is new into the row table.

    Numbers follow s.order. Before: s.state has the records as they were before the step.

    Args:
        rows: The row table.
        count: The number of distinct rows.
        access: The number of the first row's access, or -1 in evaluation, where no row gets a lane
            or an ordinal.
        numbers: int64 [2, V], for each lane the number of rows numbered so far, and the number of
            rows looked up that were never trained. Advanced.
        newcomers: int64 [V], filled with the number of entries of s.newcomers that are each lane's.
    """
    records, record_of, lane_of, given, order, state = rows.records, s.record, s.lane, s.given, s.order, s.state
    newcomers[:] = 0
    added = 0
    for k in range(count):
        d = np.uint64(order[k])
        known = state[d, NUMBER]
        # An earlier step of this schedule numbered the row.
        if known != 0:
            s.numbers[k] = known - 1
            continue
        lane, record = np.uint64(lane_of[d]), record_of[d]
        ordinal = state[d, ORDINAL]
        if given[d] != 0:
            ordinal = given[d]
            low = np.uint32((access + np.int64(d)) & np.int64(ACCESS_MASK))
            records[np.uint64(record), ORDINAL] = ordinal
            records[np.uint64(record), OWNER] = np.int32(np.uint32(lane) << np.uint32(ACCESS_BITS) | low)
        # In evaluation, a row that was never trained has no record. It is numbered within the step.
        if record < 0:
            s.numbers[k] = -1 - numbers[1, lane]
            numbers[1, lane] += 1
        else:
            s.numbers[k] = numbers[0, lane]
            numbers[0, lane] += 1
            records[np.uint64(record), NUMBER] = numbers[0, lane]
        s.newcomers[added].id = s.id[d]
        s.newcomers[added].ordinal = ordinal - 1
        s.newcomers[added].tag = state[d, TAG]
        s.newcomers[added].table = s.table[d]
        newcomers[lane] += 1
        added += 1


@nb.njit(nogil=True, cache=True)
def local_index(inverse: np.ndarray, bounds: np.ndarray, count: int, s: Scratch, index: np.ndarray) -> None:
    """Number each lane's local rows, and write every lookup's place among them.

    A lane's local rows are those that its slice uses, whichever lane owns them. They are in order
    of owner lane, then of first lookup in the step. Before: s.order and s.users are those of the
    step. The loop does not branch on which lanes use a row. A row that the lane does not use gets
    the number of the next one that it does use, and no lookup of the lane reads it.

    Args:
        inverse: int32 [lookups], see `find_users`.
        bounds: int64 [V + 1], see `find_users`.
        count: The number of distinct rows.
        index: int32 [lookups], filled.
    """
    lanes = bounds.size - 1
    if lanes == 1:
        index[:] = inverse
        return
    order, all_users, all_local = s.order, s.users, s.local
    for lane in range(lanes):
        local = all_local[lane]
        given = np.int32(0)
        for place in range(count):
            d = np.uint64(order[place])
            local[d] = given
            given += np.int32((all_users[d] >> np.uint64(lane)) & np.uint64(1))
        for i in range(bounds[lane], bounds[lane + 1]):
            index[np.uint64(i)] = local[np.uint64(inverse[np.uint64(i)])]


@nb.njit(nogil=True, cache=True)
def placed_lookups(order: np.ndarray, inverse: np.ndarray, starts: np.ndarray, placed: np.ndarray, bounds: np.ndarray) -> None:
    """Put the lookups of a batch into the order of its slices.

    Args:
        order: int64 [samples], the samples in the new order.
        inverse: int32 [lookups], the distinct row of each lookup in the batch's own order.
        starts: int64 [samples + 1], the first lookup of each sample in the batch's own order.
        placed: int32 [lookups], filled with `inverse` in the new order.
        bounds: int64 [samples + 1], filled with the first lookup of each sample in the new order.
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
    """Count the lookups of each distinct row.

    Args:
        inverse: int32 [lookups], the distinct row of each lookup.
        count: int32 [distinct], increased by the lookups of each row.
    """
    for i in range(inverse.size):
        count[inverse[i]] += 1
