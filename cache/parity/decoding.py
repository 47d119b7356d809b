"""Decode rows from the rest of their stripes: rows of lost store shards, and rows that are wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import NamedTuple

import numpy as np

from foreload.base.compiled import nb
from foreload.cache.client.store import Read
from foreload.cache.errors import RowsLost
from foreload.cache.parity.erasure import Code, accumulate
from foreload.cache.parity.placement import Placement
from foreload.cache.parity.stripes import LaneStripes, placement_group, stripe_hash
from foreload.cache.rows.row_bytes import PARITY_BIT, pack


class Survivors(NamedTuple):
    """From which rows of a stripe the lost ones are decoded, for each placement group.

    pattern: int64 [groups], which of the patterns of lost places a group has; known: int64 [patterns, k], the places that are read; factors: uint8
    [patterns, k + r, k], with which they add up to the row at a place.
    """

    pattern: np.ndarray
    known: np.ndarray
    factors: np.ndarray

    @classmethod
    def of(cls, placement: Placement, lost: np.ndarray, every_group: bool = True) -> Survivors:
        """Those where the shards `lost` (bool [shards]) cannot be read. Raises RowsLost where a group has lost more than r of its shards.

        every_group=False: rows of such groups will not be asked for, and it is no error.
        """
        code = Code.of(placement)
        assert code is not None
        gone = lost[placement.table]
        if every_group and gone.sum(axis=1).max() > code.r:
            raise RowsLost(np.flatnonzero(lost).tolist(), code.r)
        patterns, pattern = np.unique(gone, axis=0, return_inverse=True)
        # A group that has lost too many gets any k places, which nobody uses.
        known = np.array(
            [np.flatnonzero(~gone if gone.sum() <= code.r else gone | True)[: code.k] for gone in patterns], np.int64
        )
        factors = [[code.decoding(own.tolist(), place) for place in range(code.k + code.r)] for own in known]
        return cls(pattern.reshape(-1).astype(np.int64), known, np.array(factors, np.uint8))


class StripePlaces(NamedTuple):
    """Rows by their stripes: table int16, stripe int64, and place in the stripe int64 (0 .. k-1 a member, k .. a parity row), [n] each."""

    table: np.ndarray
    stripe: np.ndarray
    place: np.ndarray

    @classmethod
    def of_rows(cls, table: np.ndarray, ordinal: np.ndarray, k: int) -> StripePlaces:
        """Those of rows: table int16 [n], ordinal int64 [n]."""
        return cls(table, ordinal // k, ordinal % k)


class _Sources(NamedTuple):
    """What is read to decode rows, by shard: of shard s those at bounds[s] : bounds[s + 1].

    fields: uint64 [m]; targets: int64 [m], the place of the row among those wanted that each goes into; factors: uint8 [m], times which.
    """

    bounds: np.ndarray
    fields: np.ndarray
    targets: np.ndarray
    factors: np.ndarray


@nb.njit(nogil=True, cache=True)
def _sources(stripes, survivors, wanted):  # type: ignore[no-untyped-def]
    """What to read for the rows wanted: k sources each, less the members that were never written, which count as zeros.

    A stripe without any written row has no parity rows either, so nothing is asked for it, and its rows decode to zeros. Afterwards the sources
    stand by shard, and in each in the order of the rows wanted.
    """
    table, stripe, members, k = wanted.table, wanted.stripe, stripes.members, stripes.k
    n = wanted.place.size
    shards_of, names = np.empty(n * k, np.int64), np.empty(n * k, np.uint64)
    targets, scales = np.empty(n * k, np.int64), np.empty(n * k, np.uint8)
    count, shards = 0, 0
    for i in range(n):
        group = placement_group(stripe_hash(stripes.prefix, table[i], stripe[i]), pack(table[i], stripe[i]), stripes.migrated)
        own = survivors.pattern[group]
        begin, start = stripe[i] * k, stripes.starts[table[i]]
        exists = False
        for j in range(begin, min(begin + k, stripes.room[table[i]])):
            exists |= stripes.flags[start + j] == 1
        if not exists:
            continue
        for q in range(k):
            source = survivors.known[own, q]
            if source >= k:
                name = pack(table[i], stripe[i]) | PARITY_BIT
            elif stripes.flags[start + begin + source]:
                name = pack(table[i], begin + source)
            else:
                continue
            shards_of[count] = members[group, source]
            shards = max(shards, shards_of[count] + 1)
            names[count] = name
            targets[count] = i
            scales[count] = survivors.factors[own, wanted.place[i], q]
            count += 1
    bounds = np.zeros(shards + 1, np.int64)
    for i in range(count):
        bounds[shards_of[i] + 1] += 1
    for shard in range(shards):
        bounds[shard + 1] += bounds[shard]
    nexts = bounds.copy()
    sorted_fields, sorted_targets, sorted_scales = (
        np.empty(count, np.uint64),
        np.empty(count, np.int64),
        np.empty(count, np.uint8),
    )
    for i in range(count):
        at = nexts[shards_of[i]]
        nexts[shards_of[i]] += 1
        sorted_fields[at] = names[i]
        sorted_targets[at] = targets[i]
        sorted_scales[at] = scales[i]
    return _Sources(bounds, sorted_fields, sorted_targets, sorted_scales)


@dataclass(slots=True)
class Decoding:
    """Rows of one shape to be decoded: what to read, and how it adds up.

    wanted: how many are decoded. rows: uint8 [sources, row_bytes], which the reads fill; targets: int64 [sources], factors: uint8 [sources]: row i
    counts factors[i] times in the wanted row targets[i].
    """

    wanted: int
    reads: list[Read]
    rows: np.ndarray
    targets: np.ndarray
    factors: np.ndarray

    def decode(self) -> np.ndarray:
        """The rows wanted, uint8 [n, row_bytes], once the reads are done and nothing is missing."""
        out = np.zeros((self.wanted, self.rows.shape[1]), np.uint8)
        accumulate(self.rows, np.arange(len(self.rows)), self.factors, out, self.targets)
        return out


def plan_decoding(
    stripes: LaneStripes, survivors: Survivors, wanted: StripePlaces, row_bytes: int, keys: list[bytes]
) -> Decoding:
    """How to decode rows of one shape and lane. keys: of the lane's hash on each store shard.

    A row that was never written, and the parity of a stripe without rows, decodes to zeros.
    """
    sources: _Sources = _sources(stripes.map, survivors, wanted)
    rows = np.empty((len(sources.fields), row_bytes), np.uint8)
    reads = [
        Read(shard, keys[shard], sources.fields[first:last], rows[first:last], any_length=True)
        for shard, (first, last) in enumerate(pairwise(sources.bounds.tolist()))
        if last > first
    ]
    return Decoding(len(wanted.place), reads, rows, sources.targets, sources.factors)


def plan_alone(
    stripes: LaneStripes,
    placement: Placement,
    lost: np.ndarray,
    wanted: StripePlaces,
    row_bytes: int,
    keys: list[bytes],
) -> Decoding | None:
    """`plan_decoding` for single rows where more shards are lost (bool [shards]) than parity covers everywhere.

    None if a stripe of these rows itself has lost more than r.
    """
    for one in np.unique(wanted.table).tolist():
        if (lost[stripes.shards(one, wanted.stripe[wanted.table == one])].sum(axis=1) > placement.r).any():
            return None
    return plan_decoding(stripes, Survivors.of(placement, lost, every_group=False), wanted, row_bytes, keys)


@nb.njit(nogil=True, cache=True)
def _count_lost(stripes, table, count, gone):  # type: ignore[no-untyped-def]
    """How many rows of a table, ordinals below count, are on shards that are gone, in stripes that have lost more than their parity covers."""
    members, k, start = stripes.members, stripes.k, stripes.starts[table]
    covered = members.shape[1] - k
    lost = 0
    for ordinal in range(count):
        stripe = ordinal // k
        group = placement_group(stripe_hash(stripes.prefix, table, stripe), pack(table, stripe), stripes.migrated)
        missing = 0
        for place in range(members.shape[1]):
            missing += gone[members[group, place]]
        if stripes.flags[start + ordinal] and missing > covered and gone[members[group, ordinal - stripe * k]]:
            lost += 1
    return lost


def lost_rows(stripes: LaneStripes, tables: int, gone: np.ndarray) -> np.ndarray:
    """How many rows of each table cannot be had where the shards `gone` (bool [shards]) are lost: int64 [tables]."""
    counts = stripes.written.counts
    return np.array([_count_lost(stripes.map, table, int(counts[table]), gone) for table in range(tables)])


@dataclass(frozen=True, slots=True)
class Verdict:
    """What n stripes show of their rows.

    restored: bool [n, k + r], rows that were wrong or not there, and are now as the rest of their stripe says. uncorrectable: bool [n],
    stripes that do not agree and do not show which of their rows is wrong.
    """

    restored: np.ndarray
    uncorrectable: np.ndarray


def locate_errors(code: Code, rows: np.ndarray, erased: np.ndarray) -> Verdict:
    """Check stripes, and restore in place what is known for certain.

    rows: uint8 [n, k + r, row_bytes], contiguous, members first, row_bytes a multiple of 4, zeros where nothing was ever stored; erased:
    bool [n, k + r], rows that are known to be wrong. With e of these in a stripe, up to (r - e) / 2 further wrong rows are singled out: the
    code's distance is r + 1, so no two sets of that many rows explain the same stripe. Other stripes stay as they are.
    """
    count = len(rows)
    restored, uncorrectable = np.zeros(erased.shape, bool), np.zeros(count, bool)
    for gone, left in _patterns(erased):
        for apart in _explanations(code, gone):
            known = [place for place in range(code.k + code.r) if place not in apart]
            # With exactly k rows known there is nothing left to compare, and any stripe agrees: callers check what was restored.
            agree = _agree(code, rows, left, known)
            of = left[agree]
            for place in apart:
                rows[of, place] = combined(code, rows, of, known[: code.k], place)
                restored[of, place] = True
            left = left[~agree]
            if not left.size:
                break
        uncorrectable[left] = True
    return Verdict(restored, uncorrectable)


def _patterns(erased: np.ndarray) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
    """The sets of places that are erased together, and the stripes (int64 [m]) of each."""
    any_erased = erased.any(axis=1)
    clean = np.flatnonzero(~any_erased)
    if clean.size:
        yield (), clean
    others = np.flatnonzero(any_erased)
    patterns, pattern = np.unique(erased[others], axis=0, return_inverse=True)
    for number, places in enumerate(patterns):
        yield tuple(np.flatnonzero(places).tolist()), others[pattern.reshape(-1) == number]


def _explanations(code: Code, gone: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The sets of places that may be wrong, each with those that are gone: fewest first; none where more than r are gone."""
    width = code.k + code.r
    others = [place for place in range(width) if place not in gone]
    for more in range((code.r - len(gone)) // 2 + 1):
        for suspects in combinations(others, more):
            yield tuple(sorted((*gone, *suspects)))


def _agree(code: Code, rows: np.ndarray, stripes: np.ndarray, known: list[int]) -> np.ndarray:
    """Whether the rows at the known places, at least k, are those of one stripe of the code: bool [stripes]."""
    agree = np.ones(len(stripes), bool)
    for place in known[code.k :]:
        agree &= (combined(code, rows, stripes, known[: code.k], place) == rows[stripes, place]).all(axis=1)
    return agree


def combined(code: Code, rows: np.ndarray, stripes: np.ndarray, known: list[int], place: int) -> np.ndarray:
    """What the rows at k known places of stripes (int64 [m]) say of the one at `place`: uint8 [m, row_bytes]."""
    width, row_bytes = rows.shape[1:]
    count = len(stripes)
    out = np.zeros((count, row_bytes), np.uint8)
    sources = (stripes[:, None] * width + np.array(known)).reshape(-1)
    factors = np.tile(code.decoding(known, place), count)
    accumulate(rows.reshape(-1, row_bytes), sources, factors, out, np.repeat(np.arange(count), code.k))
    return out
