"""Scrubbing: check every stripe of a lane, and repair rows that the rest of a stripe determines.

A chunk of stripes plans the reads, judges their results, and plans the writes. The owner of the
lane performs the reads and writes while no write-back batch is under way. No server is scanned: the
stripes follow from the ordinals.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from foreload.cache.client.store import COMMAND_ROWS, Read, Write
from foreload.cache.parity.decoding import Verdict, locate_errors
from foreload.cache.parity.erasure import Code
from foreload.cache.parity.stripes import LaneStripes
from foreload.cache.protocol.shards.marker import Marker
from foreload.cache.protocol.shards.reading import StoredRows, check_answer, check_marker
from foreload.cache.repair.findings import NAMED, Finding, Findings
from foreload.cache.rows.row_bytes import PARITY_BIT, fields
from foreload.pipelines.planning.sizing import TRAILER_BYTES

CHUNK_STRIPES = 8192  # stripes that are read at once
NEVER, MAY, MUST = 0, 1, 2  # whether the store has a row: no, maybe, yes
# What is wrong with a row. _APART: the row itself looks right, but the rest of its stripe shows
# that it is wrong.
_FINE, _MISSING, _WRONG, _APART = range(4)
_WHAT = {_MISSING: "is missing", _WRONG: "has another id or tag", _APART: "does not match the other rows of its stripe"}

_DISAGREES = "its rows and parity rows do not match, and nothing shows which of them is wrong"


@dataclass(frozen=True, slots=True)
class TableRows:
    """What is known of the rows of one table in a lane, by ordinal.

    Attributes:
        presence: uint8 [n], NEVER, MAY or MUST: whether the row was written.
        id: int64 [n].
        tag: int32 [n], the latest tag that the row may have.
        exact: bool [n], whether the row must have exactly that tag.
    """

    table: int
    presence: np.ndarray
    id: np.ndarray
    tag: np.ndarray
    exact: np.ndarray

    def part(self, first: int, count: int) -> TableRows:
        """Return ordinals first .. first + count - 1.

        Ordinals beyond the last one were never written.
        """
        arrays = []
        for whole in (self.presence, self.id, self.tag, self.exact):
            array = np.zeros(count, whole.dtype)
            inside = whole[first : first + count]
            array[: len(inside)] = inside
            arrays.append(array)
        return TableRows(self.table, *arrays)


@dataclass(slots=True)
class StripeChunk:
    """Consecutive stripes of one table in a lane that are being checked.

    Arrays [n, k + r] have the members of a stripe first, then its parity rows.

    Attributes:
        known: what is known of the n * k members.
        stripe: int64 [n], the numbers of the stripes.
        shards: int32 [n, k + r], the store shard of each row.
        wanted: bool [n, k + r], the rows that are read.
        absent: bool [n, k + r], the rows on shards that cannot be read.
        reads: the reads to do before `judge`.
        places: for each read, int64 [rows of the read], the places of its rows in [n, k + r],
            flattened.
    """

    stored: StoredRows
    lane: int
    known: TableRows
    stripe: np.ndarray
    shards: np.ndarray
    wanted: np.ndarray
    absent: np.ndarray
    reads: list[Read]
    places: list[np.ndarray]

    @classmethod
    def plan(cls, stored: StoredRows, stripes: LaneStripes, first: int, known: TableRows, unreadable: np.ndarray) -> StripeChunk:
        """Plan the check of the stripes of these rows.

        Args:
            first: the number of the first stripe.
            known: what is known of the rows.
            unreadable: bool [shards], the shards that are lost or being rebuilt.
        """
        k, width = stripes.k, stripes.members.shape[1]
        count = len(known.id) // k
        stripe = np.arange(first, first + count)
        shards = stripes.shards(known.table, stripe)
        may_exist = known.presence.reshape(count, k) != NEVER
        there = np.concatenate([may_exist, np.repeat(may_exist.any(axis=1, keepdims=True), width - k, axis=1)], axis=1)
        absent = there & unreadable[shards]
        wanted = there & ~absent
        places = np.flatnonzero(wanted.reshape(-1))
        order = np.argsort(shards.reshape(-1)[places], kind="stable")
        bounds = np.searchsorted(shards.reshape(-1)[places][order], np.arange(stored.placement.shard_count + 1))
        row_bytes = stored.layouts[known.table].row_bytes
        names = _fields(known.table, stripe, k, width).reshape(-1)
        reads, of_reads = [], []
        for shard, (start, end) in enumerate(pairwise(bounds.tolist())):
            if end > start:
                own = places[order[start:end]]
                values = np.zeros((len(own), row_bytes), np.uint8)
                reads.append(Read(shard, stored.key(stripes.lane, shard), names[own], values, any_length=True))
                of_reads.append(own)
        return cls(stored, stripes.lane, known, stripe, shards, wanted, absent, reads, of_reads)

    def judge(self) -> tuple[Findings, list[Write]]:
        """Judge the stripes once the reads are done.

        Returns:
            The findings, and the writes that repair the stripes: at most 2,048 rows in a Write,
            with no marker.
        """
        code = Code.of(self.stored.placement)
        assert code is not None
        shape = self.shards.shape
        rows = np.zeros((*shape, self.stored.layouts[self.known.table].row_bytes), np.uint8)
        missing = np.zeros(shape, bool)
        flat_rows, flat_missing = rows.reshape(self.shards.size, -1), missing.reshape(-1)
        for read, places in zip(self.reads, self.places, strict=True):
            flat_rows[places] = read.rows
            if read.missing is not None:
                flat_missing[places] = read.missing
        # A missing row counts as zeros, as if it had never been written.
        rows[missing] = 0
        wrong = self._wrong(rows, missing)
        erased = (wrong != _FINE) | self.absent
        verdict = locate_errors(code, rows, erased)
        self._try_absent(rows, missing, erased, verdict)
        # A restored member must have the id and tag that belong there. Otherwise the code corrected
        # the wrong rows, and the stripe is left unchanged.
        members = verdict.restored[:, : code.k]
        verdict.uncorrectable[:] |= (members & ~self._valid(rows[:, : code.k])).any(axis=1)
        verdict.restored[verdict.uncorrectable] = False
        # Rows that were restored although they looked right: missing where that is possible, or
        # singled out by the stripe.
        fine = verdict.restored & (wrong == _FINE)
        wrong[fine] = np.where(missing[fine], _MISSING, _APART)
        restored = verdict.restored & ~self.absent
        return self._findings(wrong, restored, verdict.uncorrectable, missing), self._writes(rows, restored, missing)

    def _wrong(self, rows: np.ndarray, missing: np.ndarray) -> np.ndarray:
        """Return what is wrong with each row by itself, without regard to its stripe.

        The result is uint8 [n, k + r].
        """
        k = self.stored.placement.k
        presence = self.known.presence.reshape(-1, k)
        wrong = np.zeros(missing.shape, np.uint8)
        here = self.wanted[:, :k] & ~missing[:, :k]
        wrong[:, :k][here & ~self._valid(rows[:, :k])] = _WRONG
        wrong[:, :k][missing[:, :k] & (presence == MUST)] = _MISSING
        # A stripe has parity rows if it has any row. A stripe whose rows may all be unwritten need
        # not have any.
        not_empty = ((presence == MUST) | here).any(axis=1, keepdims=True)
        wrong[:, k:][missing[:, k:] & not_empty] = _MISSING
        return wrong

    def _valid(self, members: np.ndarray, which: np.ndarray | slice = slice(None)) -> np.ndarray:
        """Return whether members have the id and a tag of the row that belongs there: bool [m, k].

        Args:
            members: uint8 [m, k, row_bytes].
            which: the stripes of the chunk that the members belong to.
        """
        trailer = np.ascontiguousarray(members[..., -TRAILER_BYTES:])
        ids = np.ascontiguousarray(trailer[..., :8]).view(np.int64)[..., 0]
        tags = np.ascontiguousarray(trailer[..., 8:]).view(np.int32)[..., 0]
        known, k = self.known, self.stored.placement.k
        presence, id, latest, exact = (
            array.reshape(-1, k)[which] for array in (known.presence, known.id, known.tag, known.exact)
        )
        tag_right = np.where(exact, tags == latest, (tags >= 1) & (tags <= latest))
        valid: np.ndarray = (presence != NEVER) & (ids == id) & tag_right
        return valid

    def _try_absent(self, rows: np.ndarray, missing: np.ndarray, erased: np.ndarray, verdict: Verdict) -> None:
        """Restore rows that may or may not be written, where their stripe needs them to agree.

        Each such row is decoded in turn as if it were lost. The result is accepted if the stripe
        then agrees, if all decoded rows have the id and tag that belong there, and if this holds
        for only one row of the stripe.
        """
        code = Code.of(self.stored.placement)
        assert code is not None
        k = code.k
        doubtful = missing[:, :k] & (self.known.presence.reshape(-1, k) == MAY) & verdict.uncorrectable[:, None]
        # `fits` counts, for each stripe, the rows whose decoding explains it. More than one
        # explanation is none.
        fits, solved, apart = np.zeros(len(rows), np.int64), rows.copy(), erased.copy()
        for place in range(k):
            suspects = np.flatnonzero(doubtful[:, place])
            trial, gone = rows[suspects], erased[suspects]
            gone[:, place] = True
            tried = locate_errors(code, trial, gone)
            right = ~tried.uncorrectable & (tried.restored == gone).all(axis=1)
            right &= (self._valid(trial[:, :k], suspects) | ~gone[:, :k]).all(axis=1)
            fits[suspects[right]] += 1
            solved[suspects[right]], apart[suspects[right]] = trial[right], gone[right]
        once = fits == 1
        rows[once], verdict.restored[once], verdict.uncorrectable[once] = solved[once], apart[once], False

    def _findings(self, wrong: np.ndarray, restored: np.ndarray, uncorrectable: np.ndarray, missing: np.ndarray) -> Findings:
        k = self.stored.placement.k
        there = self.wanted & ~missing
        repaired = restored.any(axis=1)
        findings = Findings(
            len(self.stripe), int(there[:, :k].sum()), int(there[:, k:].sum()), int(repaired.sum()), int(uncorrectable.sum())
        )
        findings.repaired = [self._finding(i, wrong[i]) for i in np.flatnonzero(repaired)[:NAMED].tolist()]
        findings.damaged = [
            replace(
                one, what=f"{one.what}; the other rows of the stripe are not enough to restore it" if one.what else _DISAGREES
            )
            for one in (self._finding(i, wrong[i]) for i in np.flatnonzero(uncorrectable)[:NAMED].tolist())
        ]
        return findings

    def _finding(self, i: int, wrong: np.ndarray) -> Finding:
        """Describe the mismatch found in stripe `i`.

        Args:
            i: the place of the stripe in the chunk.
            wrong: uint8 [k + r], what is wrong with each of its rows.
        """
        k, stripe = self.stored.placement.k, int(self.stripe[i])
        first = stripe * k
        last = first + int(np.flatnonzero(self.known.presence.reshape(-1, k)[i] != NEVER)[-1])
        what = []
        for place in np.flatnonzero(wrong).tolist():
            name = f"row {first + place}" if place < k else f"parity row {place - k}"
            what.append(f"{name} (shard {self.shards[i, place]}) {_WHAT[int(wrong[place])]}")
        lost = int(self.absent[i].sum())
        if lost:
            what.append(f"{lost} more on lost shards")
        return Finding(self.lane, self.known.table, first, last, tuple(self.shards[i].tolist()), "; ".join(what))

    def _writes(self, rows: np.ndarray, restored: np.ndarray, missing: np.ndarray) -> list[Write]:
        """Return the writes of the restored rows.

        At most as many fields are new to a shard as were missing there.
        """
        names = _fields(self.known.table, self.stripe, self.stored.placement.k, self.shards.shape[1])
        writes = []
        for shard in np.unique(self.shards[restored]).tolist():
            own = restored & (self.shards == shard)
            of_rows, values, lacked = names[own], rows[own], missing[own]
            for start in range(0, len(of_rows), COMMAND_ROWS):
                part = slice(start, start + COMMAND_ROWS)
                new = range(int(lacked[part].sum()) + 1)
                # The write carries no marker. If the shard lost its marker meanwhile, the repair
                # must not put the marker back, because that would hide the loss.
                writes.append(Write(int(shard), self.stored.key(self.lane, shard), of_rows[part], values[part], None, new))
        return writes


def _fields(table: int, stripe: np.ndarray, k: int, width: int) -> np.ndarray:
    """Return the fields of all rows and parity rows of stripes: uint64 [n, k + r]."""
    members = fields(table, stripe[:, None] * k + np.arange(k))
    parity = np.repeat(fields(table, stripe)[:, None] | PARITY_BIT, width - k, axis=1)
    return np.concatenate([members, parity], axis=1)


def scrub_table(
    stored: StoredRows, lane: int, rows: TableRows, last_batch: int | None = None, repair: bool = True
) -> Iterator[Findings]:
    """Check all stripes of one table of a lane that no trainer writes, in chunks.

    Rows on lost shards are left out. A row that is missing or has a wrong id or tag, and a parity
    row that is missing, is decoded from its stripe. So is any other row that the parity rows single
    out, where r >= 2.

    Args:
        rows: what is known of the table's rows.
        last_batch: the number of the lane's last write-back batch, checked on every shard that is
            read. If None, it is not checked.
        repair: whether to write the repairs.

    Yields:
        The findings of each chunk.

    Raises:
        StoreError: a shard is stale, lost rows, or failed.
    """
    stripes = stored.lane_stripes(lane, np.zeros(len(stored.layouts), np.int64))
    unreadable = stored.shards.of(lane).unreadable
    end = -(-len(rows.id) // stripes.k)
    for first in range(0, end, CHUNK_STRIPES):
        count = min(CHUNK_STRIPES, end - first)
        chunk = StripeChunk.plan(stored, stripes, first, rows.part(first * stripes.k, count * stripes.k), unreadable)
        stored.store.exchange(chunk.reads, [])
        if last_batch is not None:
            for read in chunk.reads:
                check_marker(stored, lane, read, [Marker(last_batch, last_batch)])
        findings, writes = chunk.judge()
        if repair and writes:
            stored.store.exchange([], writes)
            for write in writes:
                check_answer(stored, lane, write)
        yield findings
