"""Rows move to other store shards while their owner trains: a chunk at a time, between two rounds (docs/protocol.md, Rows move).

A chunk is read from where its rows are, copied to where they go, and, when that is acknowledged, deleted where they were; each step is recorded
in the hash that it changes (`migrated`). From then on the lane's cursor stands behind it, and rounds go by that. With parity, a shard that all rows
leave keeps them until it is left as a whole: to name each of them takes time of a link that may be slow.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from foreload.cache.client.load import slower
from foreload.cache.client.resp import MARKER, MIGRATED
from foreload.cache.client.store import COMMAND_ROWS, Read, Store
from foreload.cache.client.url import StoreUrl, parse_url
from foreload.cache.errors import CopyLost, StoreUnavailable
from foreload.cache.parity.decoding import StripePlaces, plan_decoding
from foreload.cache.parity.migrating_rows import MigratingRows, migrating_rows
from foreload.cache.parity.placement import Placement
from foreload.cache.parity.stripes import LaneStripes
from foreload.cache.protocol.rounds.adaptive_size import AdaptiveSize
from foreload.cache.protocol.rounds.background import Task
from foreload.cache.protocol.rounds.lanes import Lanes, LaneTraffic, LaneWrites
from foreload.cache.protocol.rounds.monitor import Monitor
from foreload.cache.protocol.rounds.rounds import Rounds
from foreload.cache.protocol.shards.fence import fence_all
from foreload.cache.protocol.shards.marker import Marker
from foreload.cache.protocol.shards.migrated import ALL, Migrated, changed, deletion
from foreload.cache.protocol.shards.reading import StoredRows, missing_value
from foreload.cache.protocol.shards.shard_status import ShardSnapshot
from foreload.cache.protocol.shards.shard_table import cursor_at, cursor_place

CHUNK_SECONDS = 0.02  # of a chunk while training goes on, about: what is to be read or written meanwhile waits for it
MOST_CHUNK_SECONDS = 0.1  # where fewer rows would take hardly less
_SHARE = 0.125  # of the traffic thread's time, at most: nothing is unprotected meanwhile
_SHARE_OF_SLOW = 0.5  # where rows leave a shard that is far slower than others: training waits for that the longer the less of the time this has
FIRST_ROWS, FEWEST_ROWS = 256, 32  # of a chunk to a shard, at first, and where that takes longer
# A shard that rows leave is not read from any more where its answers of late take so many times as long as others', and so many seconds longer.
_FAR_SLOWER, _FAR_SLOWER_SECONDS = 3.0, 0.015


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Rows of one table (none where nothing of what is left moves), and the cursor behind them. rows: uint8 [n, row_bytes], once read."""

    lane: int
    table: int
    migrating: MigratingRows | None
    end: int
    rows: np.ndarray


class Migration(Task):
    """Moves the rows of all lanes that a traffic serves to where the placement's target has them. term: of the owner.

    on_action: the traffic's; called at "rows to move read", "rows copied" and "rows moved". on_rows: called with how many rows a chunk had; on_news:
    with how the shards are, whenever they have moved further.
    """

    def __init__(
        self,
        stored: StoredRows,
        lanes: Lanes,
        rounds: Rounds,
        monitor: Monitor,
        term: int,
        on_action: Callable[[str], None],
        on_rows: Callable[[int], None],
        on_news: Callable[[ShardSnapshot], None],
    ) -> None:
        super().__init__()
        self._stored, self._shards, self._lanes, self._rounds = stored, stored.shards, lanes, rounds
        self._monitor, self._on_action, self._on_rows, self._on_news = monitor, on_action, on_rows, on_news
        self.term = term
        self._size = AdaptiveSize(min(FIRST_ROWS, COMMAND_ROWS), FEWEST_ROWS, COMMAND_ROWS, CHUNK_SECONDS, MOST_CHUNK_SECONDS)
        self.share = _SHARE

    # Any thread but the traffic's.

    def begin(self, placement: Placement, urls: Sequence[str | StoreUrl | None]) -> None:
        """Move rows to where the target of a placement has them from now on, beside the training; on return its new shards take part.

        urls: of all shards, None for those that were removed. A placement that is known already changes nothing. A server that comes in and cannot be
        reached is a lost shard; without parity that ends the traffic.
        """
        parsed = [parse_url(url) if isinstance(url, str) else url for url in urls]
        self._monitor.ask(lambda: self._begin(placement, parsed))

    def complete(self, placement: Placement) -> None:
        """All rows of all owners are where they were to go to: go by this placement, and use the shards that it has removed no more."""
        self._monitor.ask(lambda: self._complete(placement))

    def lanes_changed(self) -> None:
        """Others are served than before; on return it has reported how far these are: its report of those before may say that all has moved."""
        if not self._stored.placement.migrating:
            return
        try:
            self._monitor.ask(self._note)
        except CopyLost:
            self._monitor.post(self._note)

    # The traffic's thread.

    def _begin(self, placement: Placement, urls: Sequence[StoreUrl | None]) -> None:
        if placement.version <= self._stored.placement.version:
            return
        self._rounds.flush_pending()
        further = [url for url in urls[self._stored.placement.shard_count : placement.shard_count] if url is not None]
        servers = [Store.connect([url], self._stored.store.timeout, placement.r) for url in further]
        down = [server.down for server in servers]
        self._stored.store.extend(servers)
        first = self._stored.placement.shard_count
        self._stored.placement = placement
        self._shards.place(placement, further)
        self.share = _SHARE
        for shard, why in enumerate(down, first):
            if why:
                self._rounds.failover.lose(shard, why[0])
        for state in self._lanes.all:
            state.writes.held = np.concatenate([state.writes.held, np.zeros(len(further), np.int64)])
            for shard in range(first, placement.shard_count):
                if shard not in self._shards.lost:
                    self._join(state, shard)
        self._note()

    def _join(self, state: LaneTraffic, shard: int) -> None:
        """Have a further shard take part in a lane: from then on it has every batch so far, none of whose rows are its."""
        stored, own = self._stored, self._shards.of(state.lane)
        number = state.writes.last_batch
        try:
            there = fence_all(stored.store, shard, stored.namespace, [state.lane], self.term)[state.lane]
            own.epochs[shard] = there.epoch
            stamp = Migrated(stored.placement.version, self.term, 0, 0, False, number, 0)
            fields = (MARKER, Marker(number, number).stored(), MIGRATED, stamp.stored())
            stored.store.command(shard, "HSET", stored.key(state.lane, shard), *fields)
            own.held[shard], own.migrated[shard] = 0, stamp
        except StoreUnavailable as error:
            self._rounds.failover.lose(shard, error)

    def _complete(self, placement: Placement) -> None:
        self._rounds.flush_pending()
        for shard in set(placement.removed) - set(self._stored.placement.removed):
            self._rounds.failover.forget(shard)
            self._stored.store.remove(shard)
        self._stored.placement = placement
        self._shards.place(placement)
        self._on_news(self._shards.snapshot)

    @property
    def under_way(self) -> bool:
        """Whether there are rows left to move, whatever keeps them."""
        return self._stored.placement.migrating and any(int(self._places(state)) != ALL for state in self._lanes.all)

    @property
    def wanted(self) -> bool:
        """Whether there are, and every shard is there: what is lost is rebuilt first."""
        return self.under_way and self._shards.whole

    def _places(self, state: LaneTraffic) -> np.uint64:
        return self._shards.of(state.lane).places.migrated

    def look_at_source(self) -> None:
        """Between two rounds: where the rows that move all leave one shard that answers far later than others, with parity they are decoded from now
        on, and so is what training fetches of them.
        """
        placement, shards = self._stored.placement, self._shards
        if not placement.r or shards.avoided is not None or not self.wanted or len(placement.leaving) != 1:
            return
        (leaving,) = placement.leaving
        if slower(leaving, self._stored.store.recent_seconds, _FAR_SLOWER, _FAR_SLOWER_SECONDS) is not None:
            shards.avoid(leaving)
            self.share, self._not_before = _SHARE_OF_SLOW, 0.0

    def chunk(self) -> None:
        """Move the next rows. Raises RowsLost, RowError, StoreError."""
        for state in self._lanes.all:
            if int(self._places(state)) != ALL:
                begun = time.monotonic()
                self._move(state)
                self._size.note(time.monotonic() - begun)
                if not self.under_way:
                    self._stored.store.forget_loads()
                self._note()
                return

    def _note(self) -> None:
        """Report how much has moved."""
        passed = total = 0
        for state in self._lanes.all:
            stripes = -(-state.writes.stripes.written.counts // state.writes.stripes.k)
            table, stripe = cursor_place(int(self._places(state)))
            total += int(stripes.sum())
            passed += int(stripes[:table].sum()) + (min(stripe, int(stripes[table])) if table < len(stripes) else 0)
        # Not through, however little is left, while any lane is not: this reports the whole.
        share = min(passed / total, 1 - 1e-9) if self.under_way and total else 0.0
        self._shards.note_migrated(share if self.under_way else 1.0)
        self._on_news(self._shards.snapshot)

    def _move(self, state: LaneTraffic) -> None:
        """Move a lane's next rows."""
        stored, lane, stripes = self._stored, state.lane, state.writes.stripes
        begin = int(self._places(state))
        chunk = self._next(lane, stripes, begin)
        if chunk.migrating is not None and not self._get(stripes, chunk, chunk.migrating):
            return
        if chunk.migrating is not None:
            self._on_action("rows to move read")
        own = self._shards.of(lane)
        shards = stored.placement.shard_count
        arrive, leave = np.zeros(shards, np.int64), np.zeros(shards, np.int64)
        if chunk.migrating is not None:
            arrive, leave = (np.bincount(which, minlength=shards) for which in (chunk.migrating.target, chunk.migrating.source))
        targets = tuple(np.flatnonzero(arrive).tolist())
        leftover = np.where(stored.placement.mask(stored.placement.keeping), leave, 0)
        deleted = leave - leftover

        def stamp(shard: int, copied: bool) -> Migrated:
            held = (own.held[shard] or 0) + (int(arrive[shard]) if copied else 0) - (0 if copied else int(deleted[shard]))
            return Migrated(stored.placement.version, self.term, begin, chunk.end, copied, state.writes.last_batch, held, targets)

        if chunk.migrating is not None:
            self._copy(state.writes, chunk, chunk.migrating, {shard: stamp(shard, True) for shard in targets})
            self._on_action("rows copied")
        self._delete(state.writes, chunk.migrating, {shard: stamp(shard, False) for shard in stored.placement.live})
        state.writes.held = state.writes.held + arrive - leave
        own.leftover = np.where(stored.placement.mask(self._shards.lost), 0, own.leftover + leftover)
        own.places.migrated = np.uint64(chunk.end)
        self._on_action("rows moved")
        self._on_rows(int(arrive.sum()))

    def _next(self, lane: int, stripes: LaneStripes, begin: int) -> _Chunk:
        """The next rows of a lane that move, at most 2,048 to a shard, of one table."""
        tables, shards = len(self._stored.layouts), self._stored.placement.shard_count
        table, first = cursor_place(begin)
        most = self._size.rows if self.throttled else COMMAND_ROWS
        while table < tables:
            migrating = migrating_rows(stripes, table, first, most, shards)
            # Where the table ends, the cursor goes on to the next: rows of this one that are written later are where they go to, too.
            following = (table + 1, 0) if migrating.whole else (table, migrating.end)
            if len(migrating.fields):
                end = ALL if following[0] == tables else cursor_at(*following)
                return _Chunk(
                    lane,
                    table,
                    migrating,
                    end,
                    np.empty((len(migrating.fields), self._stored.layouts[table].row_bytes), np.uint8),
                )
            table, first = following
        return _Chunk(lane, tables, None, ALL, np.empty((0, 4), np.uint8))

    def _get(self, stripes: LaneStripes, chunk: _Chunk, migrating: MigratingRows) -> bool:
        """Get a chunk's rows; False where a shard is lost since, and another attempt is to be made later."""
        return self._read(chunk, migrating) if self._shards.avoided is None else self._decode(stripes, chunk, migrating)

    def _decode(self, stripes: LaneStripes, chunk: _Chunk, migrating: MigratingRows) -> bool:
        """Decode a chunk's rows, as if the shard that they leave were lost; returns as `_get`."""
        table = np.full(len(migrating.fields), chunk.table, np.int16)
        wanted = StripePlaces(table, migrating.stripe, migrating.place)
        survivors = self._shards.without(self._stored.placement.leaving[0])
        plan = plan_decoding(stripes, survivors, wanted, chunk.rows.shape[1], self._stored.keys(chunk.lane))
        reads = [(chunk.lane, read) for read in plan.reads]
        if not self._done(reads):
            return False
        chunk.rows[:] = plan.decode()
        return True

    def _done(self, reads: Sequence[tuple[int, Read]]) -> bool:
        """Do reads; False where a shard is lost since."""
        self._rounds.exchange(reads, [])
        for lane, read in reads:
            if read.shard not in self._shards.lost and read.missing is not None:
                self._rounds.failover.lose(read.shard, StoreUnavailable(str(missing_value(self._stored, lane, read))))
        return not self._shards.lost

    def _read(self, chunk: _Chunk, migrating: MigratingRows) -> bool:
        """Read a chunk's rows from where they are; returns as `_get`."""
        stored = self._stored
        found = [np.empty((len(at), chunk.rows.shape[1]), np.uint8) for _, at in _by(migrating.source)]
        reads = [
            (chunk.lane, Read(shard, stored.key(chunk.lane, shard), migrating.fields[at], rows, any_length=True))
            for (shard, at), rows in zip(_by(migrating.source), found, strict=True)
        ]
        if not self._done(reads):
            return False
        for (_, at), rows in zip(_by(migrating.source), found, strict=True):
            chunk.rows[at] = rows
        return True

    def _copy(self, lane: LaneWrites, chunk: _Chunk, migrating: MigratingRows, stamps: dict[int, Migrated]) -> None:
        """Write a chunk's rows where they go. A shard that fails is lost: the rows live in the parity on others, as any of its rows do."""
        stored, marker = self._stored, Marker(lane.last_batch, lane.last_batch)
        writes = [
            stored.write(lane.lane, shard, migrating.fields[at], chunk.rows[at], marker, len(at), stamps[shard])
            for shard, at in _by(migrating.target)
        ]
        failures = stored.store.attempt([], writes)
        for write in writes:
            error = failures.get(write.shard)
            if error is None and write.surprise is not None:
                error = StoreUnavailable(
                    f"store {self._shards.urls[write.shard]}: lost rows of lane {lane.lane}: {write.surprise}"
                )
            if error is not None:
                self._rounds.failover.lose(write.shard, error)
                continue
            stored.note(lane.lane, write)

    def _delete(self, lane: LaneWrites, migrating: MigratingRows | None, stamps: dict[int, Migrated]) -> None:
        """Delete a chunk's rows where they were, and record on every shard that it is done."""
        stored, own, marker = self._stored, self._shards.of(lane.lane), Marker(lane.last_batch, lane.last_batch)
        keeping = stored.placement.keeping
        leaving = (
            {}
            if migrating is None
            else {shard: migrating.fields[at] for shard, at in _by(migrating.source) if shard not in keeping}
        )
        nothing = np.empty(0, np.uint64)
        commands = {
            shard: deletion(stored.key(lane.lane, shard), leaving.get(shard, nothing), marker, migrated)
            for shard, migrated in stamps.items()
            if shard not in self._shards.lost
        }
        answers, failures = stored.store.ask(commands)
        for shard in commands:
            error = failures.get(shard)
            # Rows that are there, and what is new of the marker and of what records the chunk.
            must = len(leaving.get(shard, nothing)), (own.held[shard] is None) + (own.migrated[shard] is None)
            if error is None and (there := changed(answers[shard])) != must:
                why = f"of {must[0]} rows that moved away {there[0]} were there"
                error = StoreUnavailable(f"store {self._shards.urls[shard]}: lost rows of lane {lane.lane}: {why}")
            if error is not None:
                self._rounds.failover.lose(shard, error)
                continue
            own.held[shard], own.migrated[shard] = stamps[shard].held, stamps[shard]

    def status_of(self, lane: int, shard: int, number: int) -> Migrated | None:
        """What a shard records of a lane that has just got all of its rows there; None where rows never moved."""
        version = self._stored.placement.version
        if not version:
            return None
        own = self._shards.of(lane)
        end = int(own.places.migrated) if self._stored.placement.migrating else ALL
        return Migrated(version, self.term, end, end, False, number, own.held[shard] or 0)


def _by(shard: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """The shards among int64 [n], ascending, each with its places."""
    for one in np.unique(shard).tolist():
        yield one, np.flatnonzero(shard == one)
