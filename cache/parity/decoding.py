"""Decode rows from the other rows of their stripes: rows of lost store shards, and wrong rows."""

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
    """The rows of a stripe from which its lost rows are decoded, for each placement group.

    Attributes:
        pattern: int64 [groups], the pattern of lost places that each group has.
        known: int64 [patterns, k], the places that are read.
        factors: uint8 [patterns, k + r, k], the factors with which the known rows add up to the row
            at each place.
    """

    pattern: np.ndarray
    known: np.ndarray
    factors: np.ndarray

    @classmethod
    def of(cls, placement: Placement, lost: np.ndarray, every_group: bool = True) -> Survivors:
        """Return the survivors if certain shards cannot be read.

        Args:
            lost: bool [shards], the shards that cannot be read.
            every_group: If False, a group that has lost more than r shards is no error. The caller
                must not decode rows of such a group.

        Raises:
            RowsLost: A group has lost more than r of its shards.
        """
        code = Code.of(placement)
        assert code is not None
        gone = lost[placement.table]
        if every_group and gone.sum(axis=1).max() > code.r:
            raise RowsLost(np.flatnonzero(lost).tolist(), code.r)
        patterns, pattern = np.unique(gone, axis=0, return_inverse=True)
        # Groups share few patterns of lost places, so factors are computed once per pattern. A
        # group that has lost too many shards gets any k places, which nobody uses.
        known = np.array(
            [np.flatnonzero(~gone if gone.sum() <= code.r else gone | True)[: code.k] for gone in patterns], np.int64
        )
        factors = [[code.decoding(own.tolist(), place) for place in range(code.k + code.r)] for own in known]
        return cls(pattern.reshape(-1).astype(np.int64), known, np.array(factors, np.uint8))


class StripePlaces(NamedTuple):
    """Rows, named by their places in stripes.

    Attributes:
        table: int16 [n].
        stripe: int64 [n].
        place: int64 [n], 0 .. k-1 for a member, k .. k+r-1 for a parity row.
    """

    table: np.ndarray
    stripe: np.ndarray
    place: np.ndarray

    @classmethod
    def of_rows(cls, table: np.ndarray, ordinal: np.ndarray, k: int) -> StripePlaces:
        """Return the places of rows: table int16 [n], ordinal int64 [n]."""
        return cls(table, ordinal // k, ordinal % k)


class _Sources(NamedTuple):
    """The rows to read in order to decode others, sorted by shard.

    Attributes:
        bounds: int64 [shards + 1]. The sources on shard s are those at bounds[s] : bounds[s + 1].
            Shards after the last one with a source are left out.
        fields: uint64 [m].
        targets: int64 [m], the wanted row that each source is added to.
        factors: uint8 [m], the factor with which it is added.
    """

    bounds: np.ndarray
    fields: np.ndarray
    targets: np.ndarray
    factors: np.ndarray


@nb.njit(nogil=True, cache=True)
def _sources(stripes, survivors, wanted):  # type: ignore[no-untyped-def]
    """Find the rows to read for the wanted rows: k sources each.

    Members that were never written are left out, since they count as zeros. A stripe without any
    written row has no parity rows either, so nothing is read for it, and its rows decode to zeros.
    The result is sorted by shard and, within a shard, by wanted row.
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
        # A stripe without any written row needs no sources.
        exists = False
        for j in range(begin, min(begin + k, stripes.room[table[i]])):
            exists |= stripes.flags[start + j] == 1
        if not exists:
            continue
        # survivors.known names k places of the stripe. All of their shards can be read.
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
    # A counting sort by shard. It is stable, so each shard's sources stay in the order of the
    # wanted rows.
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
    """The plan to decode rows of one shape.

    Attributes:
        wanted: The number of rows to decode.
        reads: The reads to do first.
        rows: uint8 [sources, row_bytes], filled by the reads.
        targets: int64 [sources], the wanted row to which each source is added.
        factors: uint8 [sources], the factor with which it is added.
    """

    wanted: int
    reads: list[Read]
    rows: np.ndarray
    targets: np.ndarray
    factors: np.ndarray

    def decode(self) -> np.ndarray:
        """Return the wanted rows, uint8 [n, row_bytes].

        The reads must be done, with no row missing.
        """
        out = np.zeros((self.wanted, self.rows.shape[1]), np.uint8)
        accumulate(self.rows, np.arange(len(self.rows)), self.factors, out, self.targets)
        return out


def plan_decoding(
    stripes: LaneStripes, survivors: Survivors, wanted: StripePlaces, row_bytes: int, keys: list[bytes]
) -> Decoding:
    """Plan the decoding of rows of one shape and lane.

    A row that was never written decodes to zeros, and so does a parity row of a stripe without
    rows.

    Args:
        keys: The key of the lane's hash on each store shard.
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
    """Plan as `plan_decoding` does, for single rows, if parity does not cover all lost shards.

    Args:
        lost: bool [shards].

    Returns:
        The plan, or None if a stripe of the wanted rows has lost more than r of its shards.
    """
    for one in np.unique(wanted.table).tolist():
        if (lost[stripes.shards(one, wanted.stripe[wanted.table == one])].sum(axis=1) > placement.r).any():
            return None
    return plan_decoding(stripes, Survivors.of(placement, lost, every_group=False), wanted, row_bytes, keys)


@nb.njit(nogil=True, cache=True)
def _count_lost(stripes, table, count, gone):  # type: ignore[no-untyped-def]
    """Count the rows of a table that are lost, among ordinals below `count`.

    A row is lost if it was written, its shard is gone, and its stripe has lost more shards than its
    parity covers.
    """
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
    """Count the rows of each table that cannot be read or decoded without certain shards.

    Args:
        gone: bool [shards], the lost shards.

    Returns:
        int64 [tables].
    """
    counts = stripes.written.counts
    return np.array([_count_lost(stripes.map, table, int(counts[table]), gone) for table in range(tables)])


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of checking n stripes.

    Attributes:
        restored: bool [n, k + r], the rows that were wrong or missing and were restored from the
            rest of their stripe.
        uncorrectable: bool [n], the stripes whose rows do not agree, where it cannot be determined
            which row is wrong.
    """

    restored: np.ndarray
    uncorrectable: np.ndarray


def locate_errors(code: Code, rows: np.ndarray, erased: np.ndarray) -> Verdict:
    """Check stripes, and restore in place the rows that are wrong for certain.

    With e rows of a stripe known to be wrong, up to (r - e) / 2 further wrong rows are located. The
    code's distance is r + 1, so no two sets of that many rows explain the same stripe. Stripes with
    more errors stay as they are.

    Args:
        rows: uint8 [n, k + r, row_bytes], contiguous, members first, row_bytes a multiple of 4,
            zeros where nothing was ever stored.
        erased: bool [n, k + r], the rows that are known to be wrong.
    """
    count = len(rows)
    restored, uncorrectable = np.zeros(erased.shape, bool), np.zeros(count, bool)
    for gone, left in _patterns(erased):
        for apart in _explanations(code, gone):
            known = [place for place in range(code.k + code.r) if place not in apart]
            # If exactly k rows are known, nothing is left to compare, and every stripe agrees. So
            # the caller must check what was restored.
            agree = _agree(code, rows, left, known)
            of = left[agree]
            for place in apart:
                rows[of, place] = combined(code, rows, of, known[: code.k], place)
                restored[of, place] = True
            # Stripes that this set of places does not explain are tried with the next set.
            left = left[~agree]
            if not left.size:
                break
        uncorrectable[left] = True
    return Verdict(restored, uncorrectable)


def _patterns(erased: np.ndarray) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
    """Yield each set of places that are erased together, with its stripes (int64 [m])."""
    any_erased = erased.any(axis=1)
    clean = np.flatnonzero(~any_erased)
    if clean.size:
        yield (), clean
    others = np.flatnonzero(any_erased)
    patterns, pattern = np.unique(erased[others], axis=0, return_inverse=True)
    for number, places in enumerate(patterns):
        yield tuple(np.flatnonzero(places).tolist()), others[pattern.reshape(-1) == number]


def _explanations(code: Code, gone: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield the sets of places that may be wrong, smallest first.

    Each contains the places in `gone`. If more than r are gone, there is no such set.
    """
    width = code.k + code.r
    others = [place for place in range(width) if place not in gone]
    for more in range((code.r - len(gone)) // 2 + 1):
        for suspects in combinations(others, more):
            yield tuple(sorted((*gone, *suspects)))


def _agree(code: Code, rows: np.ndarray, stripes: np.ndarray, known: list[int]) -> np.ndarray:
    """Return whether the rows at the known places belong to one stripe of the code: bool [stripes].

    At least k places must be known. The first k determine all others.
    """
    agree = np.ones(len(stripes), bool)
    for place in known[code.k :]:
        agree &= (combined(code, rows, stripes, known[: code.k], place) == rows[stripes, place]).all(axis=1)
    return agree


def combined(code: Code, rows: np.ndarray, stripes: np.ndarray, known: list[int], place: int) -> np.ndarray:
    """Compute the row at `place` from the rows at k known places, for each of m stripes.

    Args:
        stripes: int64 [m].

    Returns:
        uint8 [m, row_bytes].
    """
    width, row_bytes = rows.shape[1:]
    count = len(stripes)
    out = np.zeros((count, row_bytes), np.uint8)
    sources = (stripes[:, None] * width + np.array(known)).reshape(-1)
    factors = np.tile(code.decoding(known, place), count)
    accumulate(rows.reshape(-1, row_bytes), sources, factors, out, np.repeat(np.arange(count), code.k))
    return out
