"""Rows of which it is not known whether the store has them: what their tags there show to who takes their lane over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from foreload.cache.client.store import Read
from foreload.cache.errors import RowError
from foreload.cache.parity.decoding import Decoding, StripePlaces, plan_decoding
from foreload.cache.parity.stripes import LaneStripes
from foreload.cache.protocol.shards.reading import Expected, PlannedRead, StoredRows, plan_reads
from foreload.cache.rows.fields import fields
from foreload.cache.rows.row_bytes import decode_rows
from foreload.cache.rows.staging import EndedRows, Rows, put_rows

REMEDY = "go on from a checkpoint, or start again with --overwrite"


@dataclass(frozen=True, slots=True)
class UnsureRows:
    """Rows of a lane that ended, and may be written already, all together: those of each boundary, then those that are ending, n in all.

    boundaries: of the former; starts: where the rows of each begin, those that are ending last, and n. newest: int64 [m], the places of the last
    version of each row; version_of: int64 [n], which of them is the last of the same row: only that counts, since its own arrival has waited for
    the one before.
    """

    lane: int
    boundaries: Sequence[int]
    starts: Sequence[int]
    rows: EndedRows
    newest: np.ndarray
    version_of: np.ndarray

    @classmethod
    def of(cls, lane: int, owed: Sequence[tuple[int, EndedRows]], ending: EndedRows) -> UnsureRows:
        """owed: by boundary, ascending."""
        parts = [*(rows for _, rows in owed), ending]
        names = ("table", "ordinal", "id", "tag", "stored_tag", "weights", "state")
        rows = EndedRows(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))
        _, version_of = np.unique(fields(rows.table, rows.ordinal), return_inverse=True)
        newest = np.zeros(int(version_of.max(initial=-1)) + 1, np.int64)
        np.maximum.at(newest, version_of, np.arange(len(rows)))
        starts = np.cumsum([0, *map(len, parts)]).tolist()
        return cls(lane, [boundary for boundary, _ in owed], starts, rows, newest, version_of)

    @property
    def latest(self) -> EndedRows:
        """The last version of each row: [m]."""
        return self.rows.select(self.newest)

    def sorted_out(self, found: Rows) -> tuple[list[tuple[int, EndedRows]], EndedRows, np.ndarray]:
        """Of each boundary the rows that are to be written, with their base; those that are ending, with it; and which of these are stored.

        found: [m], the rows as the store has them, tag 0 where it has none.
        """
        is_newest = self.newest[self.version_of] == np.arange(len(self.rows))
        to_write = is_newest & (found.tag[self.version_of] != self.rows.tag)
        rows = replace(self.rows, base_weights=found.weights[self.version_of], base_state=found.state[self.version_of])
        places = [np.arange(start, end) for start, end in pairwise(self.starts)]
        owed = [(boundary, rows.select(own[to_write[own]])) for boundary, own in zip(self.boundaries, places[:-1], strict=True)]
        return owed, rows.select(places[-1]), ~to_write[places[-1]]


class Look:
    """The reads that show which version of each row the store has, and what they bring. given: the lane's stripes, of all rows that may be written.

    reads: to be done before `finish`. The shards that are not readable for the lane, in stored.shards, are not asked: their rows are decoded; a
    row of a stripe that is not there where it is asked for counts as zeros.
    """

    def __init__(self, stored: StoredRows, unsure: UnsureRows, given: LaneStripes) -> None:
        self._stored, self._unsure = stored, unsure
        self._latest = unsure.latest
        own, k = stored.shards.of(unsure.lane), stored.placement.k
        self._planned = plan_reads(stored, Expected(*self._latest.columns(), unsure.lane)) if len(self._latest) else []
        self._decodings: dict[int, Decoding] = {}
        for place, planned in enumerate(self._planned):
            if not own.readable(planned.read.shard):
                rows = self._latest.select(planned.places)
                wanted = StripePlaces.of_rows(rows.table, rows.ordinal, k)
                survivors, keys = stored.shards.survivors(unsure.lane), stored.keys(unsure.lane)
                self._decodings[place] = plan_decoding(given, survivors, wanted, planned.read.rows.shape[1], keys)

    @property
    def reads(self) -> list[Read]:
        """What is to be read."""
        direct = [planned.read for place, planned in enumerate(self._planned) if place not in self._decodings]
        return direct + [read for decoding in self._decodings.values() for read in decoding.reads]

    def finish(self, distrust: Callable[[int, RowError], None]) -> Rows | None:
        """The rows as the store has them, [m]; tag 0 for one that it never had.

        distrust: called for a shard that has what it must not have; then None is returned, and another look is to be taken without it.
        Raises RowError where a decoded row is none of its versions.
        """
        found = Rows.zeros(len(self._latest), self._stored.shapes)
        for place, planned in enumerate(self._planned):
            decoding = self._decodings.get(place)
            if decoding is not None:
                for read in decoding.reads:
                    _clear_missing(read)
                planned.read.rows[:] = decoding.decode()
            else:
                _clear_missing(planned.read)
            error = self._take(planned, found)
            if error is None:
                continue
            if decoding is not None:
                raise error
            distrust(planned.read.shard, error)
            return None
        return found

    def _take(self, planned: PlannedRead, found: Rows) -> RowError | None:
        """Take rows that were read, all zeros for those that are not there, apart; an error where one is neither version of its row."""
        read, latest = planned.read, self._latest.select(planned.places)
        width, state_width = self._stored.shapes.shapes[planned.shape]
        weights, state = np.empty((len(latest), width), np.float32), np.empty((len(latest), state_width), np.float32)
        ids, tags = np.empty(len(latest), np.int64), np.empty(len(latest), np.int32)
        decode_rows(read.rows, width, state_width, weights, state, ids, tags)
        nothing = ~read.rows.any(axis=1)
        right = ((tags == latest.tag) | (tags == latest.stored_tag)) & ((ids == latest.id) & (tags > 0) | nothing)
        if not right.all():
            return self._error(planned, latest, int(np.flatnonzero(~right)[0]), tags)
        put_rows(weights, planned.places, found.weights)
        put_rows(state, planned.places, found.state)
        found.tag[planned.places] = tags
        return None

    def _error(self, planned: PlannedRead, latest: EndedRows, place: int, tags: np.ndarray) -> RowError:
        table = self._stored.layouts[int(latest.table[place])].name
        row = f"table {table}, row id {int(latest.id[place])} (lane {self._unsure.lane}, ordinal {int(latest.ordinal[place])})"
        return RowError(
            f"{row} is none of its versions on store {self._stored.shards.urls[planned.read.shard]}: tag must be {int(latest.tag[place])} or "
            f"{int(latest.stored_tag[place])}, found {int(tags[place]) or 'none'}; the store lost or mixed up writes: {REMEDY}"
        )


def _clear_missing(read: Read) -> None:
    """Have zeros where a shard has no row."""
    if read.missing is not None:
        read.rows[read.missing] = 0
