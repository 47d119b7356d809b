"""The serial pass: distinct rows of a step, their lanes and ordinals, each lane's local numbering (docs/definitions.md, Ownership).

Pure kernels over arrays. In training the row table itself gives a step's distinct rows: every record has the number of the row's last access,
and an access of this step is a place among its distinct rows. So each row's record is fetched once a step, and asked for ahead; what later
kernels need of it is copied. Evaluation, which changes nothing, finds distinct rows in a hash table of the step's.
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
"""A row of a lane, by its number there. ordinal: -1: never trained; tag: of the version that the store had before this schedule, 0: none."""
_HASH_BITS = 64
_LOOKUPS_AHEAD = 64  # lookups between asking for a record, or for the index entry that says which it is, and using it


class Scratch(NamedTuple):
    """Working space of the serial pass, grown to the largest step."""

    records: np.ndarray  # int64 [lookups and _LOOKUPS_AHEAD more]: the record of each lookup, in training
    words: np.ndarray  # uint64 [lookups and _LOOKUPS_AHEAD more]: the hash of each lookup, where any table is hashed
    places: np.ndarray  # uint32 [power of two]: a step's hash table in evaluation: distinct row + 1, 0 free
    table: np.ndarray  # int16 [distinct]
    id: np.ndarray  # int64 [distinct]
    record: np.ndarray  # int64 [distinct]: -1 for a row that was never trained, in evaluation
    state: np.ndarray  # int32 [distinct, FIELDS]: the row's record before the step; zeros where it was never trained
    lane: np.ndarray  # int32 [distinct]: owner, -1 before it is known
    given: np.ndarray  # int32 [distinct]: 1 + the ordinal that a row gets in this step, 0 where it has one
    # int32 [distinct], in the order of `order`: each row's number in its lane; of a row never trained -1 - its place among the lane's such rows
    numbers: np.ndarray
    newcomers: np.ndarray  # LANE_ROW [distinct], by lane: rows that get their number in this step
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
    """The record of every lookup into s.records, and some more of the last; rows without one get it. See number_training_rows."""
    lookup_record, words = s.records, s.words
    width = tables.size
    firsts = rows.bases[tables]
    for begin in range(0, ids.size, width):
        for f in range(width):
            lookup_record[np.uint64(begin + f)] = firsts[np.uint64(f)] + ids[np.uint64(begin + f)]
    if rows.direct < len(rows.records):
        for begin in range(0, ids.size, width):
            for f in range(width):
                words[np.uint64(begin + f)] = row_hash(tables[f], ids[np.uint64(begin + f)])
        words[ids.size : ids.size + _LOOKUPS_AHEAD] = words[ids.size - 1]
        find_all_hashed(rows, ids, tables, words, lookup_record, _LOOKUPS_AHEAD)
    lookup_record[ids.size : ids.size + _LOOKUPS_AHEAD] = lookup_record[ids.size - 1]


@nb.njit(nogil=True, cache=True)
def number_training_rows(rows: Rows, ids: np.ndarray, tables: np.ndarray, access: int, tag: int, s: Scratch) -> int:
    """Number the distinct rows of a training step by first lookup, and note in their records that they are accessed.

    ids int64 [lookups], at least one; tables int16 [lookups or features]: the table of each lookup, or of each feature when every sample has
    one value of each; access: the number of the first distinct row's access; tag: 1 + the step, which the records get. Fills s.table, s.id, s.record,
    s.state, s.lane (-1 where the row was never trained) and s.inverse; returns how many. Lanes, ordinals and numbers of new rows are entered by
    `number_rows`.

    Before: a record has the low bits of the number of its row's last access, in a step before this one. After: of the access in this step, which is
    `access` + the row's number here; s.state has the record as it was. So while the step is gone through, a record whose access lies in this step
    says which distinct row it is, and no hash table is needed; that the bits fit by chance is found out by comparing the record.
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
            # The row's number in this step, if it has one.
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
    for n in range(count):
        owner = np.uint32(state[n, OWNER])
        distinct_lane[n] = np.int32(owner >> np.uint32(ACCESS_BITS)) if state[n, ORDINAL] != 0 else np.int32(-1)
    return int(count)


@nb.njit(nogil=True, cache=True)
def number_evaluation_rows(rows: Rows, ids: np.ndarray, tables: np.ndarray, s: Scratch) -> int:
    """Number the distinct rows of an evaluation step; see number_training_rows. s.record is -1 where a row was never trained."""
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
    """The record, what it says, and the lane of each distinct row; -1 where it was never trained."""
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
            users[np.uint64(inverse[np.uint64(i)])] |= bit


@nb.njit(nogil=True, cache=True)
def owner_by_hash(table: int, row: int, users: int) -> int:
    """The lane, of those in the mask `users`, that a row seen for the first time belongs to."""
    bits = np.uint64(users)
    n = 0
    left = bits
    while left != np.uint64(0):  # takes the lowest bit away
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
    """Give a lane to each distinct row that has none, and in training an ordinal; sort the rows by lane.

    counts int64 [V, tables]: the ordinals given so far; owned int64 [V]: filled with the rows of each lane. Fills s.lane, s.given and s.order.
    Returns the number of rows seen for the first time, or -1 where a table's ordinals no longer fit.

    Before: s.lane is -1 where a row has none, s.users has the lanes whose slices use it. After: every row has a lane; s.order has the rows lane by
    lane, within a lane by their numbers, so by first lookup; in training, counts have the ordinals given here, too, which s.given has row by row.
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
                if ordinal >= 2**31 - 2:
                    return -1
                counts[lane, table] = ordinal + 1
                given[d] = ordinal + 1
        owned[np.uint64(lane)] += 1
    if owned.size == 1:
        for n in range(count):
            order[n] = n
        return fresh
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
    """Give every row of a step its number in its lane, in the order of s.order; enter what is new into the row table.

    access: the number of the first row's access, -1 in evaluation, where no row gets a lane or an ordinal; numbers int64 [2, V]: of each lane the
    rows numbered so far, and the rows looked up that were never trained, advanced; newcomers int64 [V]: filled with how many lines of s.newcomers
    are each lane's. Before: s.state has the records before the step.
    """
    records, record_of, lane_of, given, order, state = rows.records, s.record, s.lane, s.given, s.order, s.state
    newcomers[:] = 0
    added = 0
    for k in range(count):
        d = np.uint64(order[k])
        known = state[d, NUMBER]
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
    """Number each lane's local rows, by owner lane and then by first lookup in the step, and write every lookup's place among them.

    A lane's local rows are those that its slice uses, wherever they live. Before: s.order and s.users are those of the step. No branch on who uses
    a row: one that the lane does not use gets a number too, which is the next one's, and no lookup of the lane asks for it.
    inverse int32 [lookups] and bounds int64 [V + 1]: see find_users; index int32 [lookups]: filled.
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
