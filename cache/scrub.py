"""Reading every stripe of a lane that rests, checking its parity, and repairing what the rest of the stripe tells."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from cache.erasure import Code, accumulate
from cache.reading import StoredRows
from cache.store import Read, Write
from cache.stripes import PARITY_BIT

CHUNK_STRIPES = 4096
_TABLE_SHIFT = np.uint64(48)


@dataclass(frozen=True, slots=True)
class TableRows:
    """What one table of a lane should hold, by ordinal: id int64 [n]; tag int32 [n], the latest that a row may have, 0: it may be absent.

    exact: a row's tag must be this one.
    """

    table: int
    id: np.ndarray
    tag: np.ndarray
    exact: bool


@dataclass(slots=True)
class Findings:
    """stripes: how many were read; repaired, damaged: (lane, table, stripe, what)."""

    stripes: int = 0
    repaired: list[tuple[int, int, int, str]] = field(default_factory=list)
    damaged: list[tuple[int, int, int, str]] = field(default_factory=list)


@dataclass(slots=True)
class _Stripes:
    """Stripes as they lie in the store: rows uint8 [n, k + r, row_bytes], zeros where missing (bool [n, k + r]); fields, shards [n, k + r]."""

    stripe: np.ndarray
    fields: np.ndarray
    shards: np.ndarray
    rows: np.ndarray
    missing: np.ndarray


def scrub_table(stored: StoredRows, lane: int, expected: TableRows, repair: bool) -> Findings:
    """Read and check all stripes of one table of a lane, which nobody writes; repair what can be told for certain, if `repair`.

    A member that is missing, or has a wrong id or tag, and a parity row that is missing, is decoded from the others, at most r of a stripe; where
    none of that is so and the parity does not agree, and r >= 2, the one row that the parity singles out. Raises StoreError.
    """
    code = stored.placement.code
    assert code is not None
    found = Findings()
    for stripes in _read(stored, lane, expected, code):
        found.stripes += len(stripes.stripe)
        wrong = _wrong(stripes, expected, code)
        off = _syndromes(stripes.rows, code).any(axis=(1, 2))
        for i in np.flatnonzero(off | wrong.any(axis=1)):
            _see_to(stored, lane, expected, code, stripes, int(i), wrong[i], found, repair)
    return found


def _read(stored: StoredRows, lane: int, expected: TableRows, code: Code) -> Iterator[_Stripes]:
    stripes = stored.placement.stripes(lane, np.zeros(len(stored.layouts), np.int64))
    row_bytes = stored.layouts[expected.table].row_bytes
    name = np.uint64(expected.table) << _TABLE_SHIFT
    count = -(-len(expected.id) // code.k)
    for first in range(0, count, CHUNK_STRIPES):
        stripe = np.arange(first, min(first + CHUNK_STRIPES, count))
        shards = stripes.shards(expected.table, stripe)
        members = (stripe[:, None] * code.k + np.arange(code.k)).astype(np.uint64) | name
        parity = np.repeat(stripe.astype(np.uint64)[:, None] | name | PARITY_BIT, code.r, axis=1)
        fields = np.concatenate([members, parity], axis=1)
        order = np.argsort(shards.reshape(-1), kind="stable")
        rows = np.zeros((fields.size, row_bytes), np.uint8)
        bounds = np.searchsorted(shards.reshape(-1)[order], np.arange(stored.placement.shard_count + 1))
        sorted_fields = fields.reshape(-1)[order]
        reads = [
            Read(shard, stored.key(lane, shard), sorted_fields[start:end], rows[start:end])
            for shard, (start, end) in enumerate(pairwise(bounds.tolist()))
            if end > start
        ]
        stored.store.exchange(reads, [])
        missing = np.concatenate([np.zeros(len(r.fields), bool) if r.missing is None else r.missing for r in reads])
        inverse = np.argsort(order)
        shape = fields.shape
        yield _Stripes(stripe, fields, shards, rows[inverse].reshape(*shape, row_bytes), missing[inverse].reshape(shape))


def _syndromes(rows: np.ndarray, code: Code) -> np.ndarray:
    """What the parity rows are off: uint8 [n, r, row_bytes], zeros where they agree with the members."""
    count, width, row_bytes = rows.shape
    out = rows[:, code.k :].reshape(-1, row_bytes).copy()
    members = np.ascontiguousarray(rows).reshape(-1, row_bytes)
    for i in range(code.r):
        for j in range(code.k):
            places = np.arange(count) * width + j
            factors = np.full(count, code.coefficients[i, j], np.uint8)
            accumulate(members, places, factors, out, np.arange(count) * code.r + i)
    return out.reshape(count, code.r, row_bytes)


def _valid(rows: np.ndarray, ordinal: np.ndarray, expected: TableRows) -> np.ndarray:
    """Whether rows (uint8 [..., row_bytes]) are what the ordinals should hold: their ids, and tags that they may have."""
    inside = ordinal < len(expected.id)
    at = np.where(inside, ordinal, 0)
    ids = np.ascontiguousarray(rows[..., -12:-4]).view(np.int64)[..., 0]
    tags = np.ascontiguousarray(rows[..., -4:]).view(np.int32)[..., 0]
    latest = expected.tag[at]
    right = (tags == latest) if expected.exact else (tags >= 1) & ((tags <= latest) | (latest == 0))
    found: np.ndarray = inside & (ids == expected.id[at]) & right
    return found


def _wrong(stripes: _Stripes, expected: TableRows, code: Code) -> np.ndarray:
    """Rows that are known to be wrong by themselves: bool [n, k + r]."""
    ordinal = stripes.stripe[:, None] * code.k + np.arange(code.k)
    must = (ordinal < len(expected.id)) & (expected.tag[np.minimum(ordinal, len(expected.id) - 1)] > 0)
    missing = stripes.missing[:, : code.k]
    members = np.where(missing, must, ~_valid(stripes.rows[:, : code.k], ordinal, expected))
    some = ~missing.all(axis=1, keepdims=True)
    return np.concatenate([members, stripes.missing[:, code.k :] & some], axis=1)


def _see_to(
    stored: StoredRows,
    lane: int,
    expected: TableRows,
    code: Code,
    stripes: _Stripes,
    i: int,
    wrong: np.ndarray,
    found: Findings,
    repair: bool,
) -> None:
    """Repair one stripe, or name it."""
    rows = stripes.rows[i].copy()
    places = np.flatnonzero(wrong).tolist()
    if not places:
        # A row that is there, and by itself right, only several parity rows can call wrong.
        among = range(code.k + code.r) if code.r > 1 else np.flatnonzero(stripes.missing[i]).tolist()
        candidates = [place for place in among if _decode(rows.copy(), [place], code, int(stripes.stripe[i]), expected)]
        places = candidates if len(candidates) == 1 else []
    names = ", ".join(f"member {place}" if place < code.k else f"parity row {place - code.k}" for place in places)
    where = (lane, expected.table, int(stripes.stripe[i]))
    if not places or len(places) > code.r or not _decode(rows, places, code, int(stripes.stripe[i]), expected):
        found.damaged.append((*where, f"wrong: {names}" if places else "its parity does not agree"))
        return
    if repair:
        writes = [
            Write(
                int(stripes.shards[i, place]),
                stored.key(lane, int(stripes.shards[i, place])),
                stripes.fields[i, place : place + 1],
                rows[place : place + 1],
            )
            for place in places
        ]
        stored.store.exchange([], writes)
    found.repaired.append((*where, names))


def _decode(rows: np.ndarray, places: list[int], code: Code, stripe: int, expected: TableRows) -> bool:
    """Fill the rows at `places` from the others; whether what comes out is a stripe, with the ids that it should have."""
    known = [place for place in range(code.k + code.r) if place not in places]
    if len(known) < code.k:
        return False
    for place in places:
        rows[place] = 0
        accumulate(rows, np.array(known[: code.k]), code.decoding(known[: code.k], place), rows, np.full(code.k, place, np.int64))
    if _syndromes(rows[None], code).any():
        return False
    members = [place for place in places if place < code.k]
    ordinals = stripe * code.k + np.array(members, np.int64)
    return bool(_valid(rows[members], ordinals, expected).all())
