"""Migrate rows to other store shards while their owner trains, a chunk between two rounds (docs/protocol.md); and refill tasks in general.

A chunk is read from where its rows are, copied to where they go, and, when that is acknowledged,
deleted where they were; each step is recorded in the hash that it changes (`marker`). From then on
the lane's cursor stands behind it, and rounds go by that. With parity, a shard that all rows leave
keeps them until it is left as a whole: to name each of them takes time of a link that may be slow.

There are two refill tasks: `repair.rebuild` fills a shard that came back empty, and `Migration`
moves rows to other shards. Each chunk goes through four stages. Its rows are selected; they are
read from where they are, or decoded from their stripes; they are written where they go; and the
lane's cursor moves behind the chunk. Where a shard is lost before the rows of a chunk are at hand,
nothing has changed, and the task tries again.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from foreload.cache.client.load import slower
from foreload.cache.client.resp import MARKER, MIGRATED
from foreload.cache.client.store import COMMAND_ROWS, Read, Store
from foreload.cache.client.url import StoreUrl, parse_url
from foreload.cache.errors import CopyLost, StoreUnavailable
from foreload.cache.parity.decoding import Survivors, plan_decoding
from foreload.cache.parity.placement import Placement
from foreload.cache.parity.shard_contents import Selected, select_rows
from foreload.cache.protocol.rounds.background import AdaptiveSize, Task
from foreload.cache.protocol.rounds.lanes import Lanes, LaneTraffic, LaneWrites
from foreload.cache.protocol.rounds.monitor import Monitor
from foreload.cache.protocol.rounds.rounds import Rounds
from foreload.cache.protocol.shards.fence import fence_all
from foreload.cache.protocol.shards.marker import ALL, Marker, Migrated, changed, deletion
from foreload.cache.protocol.shards.reading import StoredRows, missing_value
from foreload.cache.protocol.shards.shard_status import ShardSnapshot
from foreload.cache.protocol.shards.shard_table import cursor_at, cursor_place


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows of one table of a lane that are brought at once; there are none where no rows are left. begin, end: the cursors before and behind them.

    shard: the only shard that they go to. If None, they go to several.
    """

    writes: LaneWrites
    selected: Selected
    begin: int
    end: int
    shard: int | None


class Refill(Task):
    """Brings all rows of the lanes that a traffic serves to where they are to be. on_rows: called with how many rows a chunk had."""

    def __init__(self, stored: StoredRows, lanes: Lanes, rounds: Rounds, on_rows: Callable[[int], None]) -> None:
        super().__init__()
        self._stored, self._shards, self._lanes, self._rounds = stored, stored.shards, lanes, rounds
        self._on_rows = on_rows

    def chunk(self) -> None:
        """Bring the next rows. Raises RowsLost, RowError, StoreError."""
        begun = time.monotonic()
        chunk = self._select()
        if chunk is not None:
            self._on_rows(self._bring(chunk))
            self._note(time.monotonic() - begun)

    def _bring(self, chunk: Chunk) -> int:
        """Bring the rows of a chunk to where they go; returns how many there are now."""
        count = len(chunk.selected.fields)
        if count:
            rows = self._get(chunk)
            if rows is None or not self._put(chunk, rows):
                return 0
        self._advance(chunk)
        return count

    @abstractmethod
    def _select(self) -> Chunk | None:
        """Return the next chunk; None where nothing is left to do."""

    @abstractmethod
    def _survivors(self, chunk: Chunk) -> Survivors | None:
        """Return what a chunk's rows are decoded from. If None, they are read from where they are."""

    @abstractmethod
    def _all_came(self, chunk: Chunk, reads: Sequence[tuple[int, Read]]) -> bool:
        """Return whether the reads of a chunk, each with its lane, brought all rows. A shard that lacks a row is lost, or the error is raised."""

    @abstractmethod
    def _put(self, chunk: Chunk, rows: np.ndarray) -> bool:
        """Write a chunk's rows (uint8 [n, row_bytes]) where they go; returns False where the task must bring them again."""

    @abstractmethod
    def _advance(self, chunk: Chunk) -> None:
        """Record that a chunk's rows are where they go, on the shards that must know, and move the lane's cursor to the chunk's end."""

    @abstractmethod
    def _note(self, seconds: float) -> None:
        """Report the progress after a chunk, which took so many seconds."""

    def _chunk(self, writes: LaneWrites, begin: int, most: int, shard: int | None = None) -> Chunk:
        """Return the next rows of a lane from a cursor on, at most `most` to a shard. shard: whose rows to select. If None, those that move."""
        tables, shards = len(self._stored.layouts), self._stored.placement.shard_count
        selected, (table, first) = Selected.none(), cursor_place(begin)
        while table < tables and not len(selected.fields):
            selected = select_rows(writes.stripes, table, first, most, shards, shard)
            # Where the table ends, the cursor goes on to the next: rows of this one that are written later are where they go to, too.
            table, first = (table + 1, 0) if selected.whole else (table, selected.end)
        return Chunk(writes, selected, begin, cursor_at(table, first), shard)

    def _get(self, chunk: Chunk) -> np.ndarray | None:
        """Return a chunk's rows, uint8 [n, row_bytes]; None where a shard was lost meanwhile, and the task must try again."""
        lane, selected = chunk.writes.lane, chunk.selected
        keys, row_bytes = self._stored.keys(lane), self._stored.layouts[selected.table].row_bytes
        survivors = self._survivors(chunk)
        if survivors is not None:
            plan = plan_decoding(chunk.writes.stripes, survivors, selected.stripe_places, row_bytes, keys)
            return plan.decode() if self._done(chunk, plan.reads) else None
        sources = list(by_shard(selected.source))
        reads = [
            Read(shard, keys[shard], selected.fields[at], np.empty((len(at), row_bytes), np.uint8), any_length=True)
            for shard, at in sources
        ]
        if not self._done(chunk, reads):
            return None
        rows = np.empty((len(selected.fields), row_bytes), np.uint8)
        for (_, at), read in zip(sources, reads, strict=True):
            rows[at] = read.rows
        return rows

    def _done(self, chunk: Chunk, reads: Sequence[Read]) -> bool:
        """Do the reads of a chunk; returns as `_all_came`."""
        of_lane = [(chunk.writes.lane, read) for read in reads]
        self._rounds.exchange(of_lane, [])
        return self._all_came(chunk, of_lane)

    def _passed(self, cursor: Callable[[int], int]) -> tuple[int, int]:
        """Return how many stripes lie before the cursors of their lanes, and how many there are. cursor: gives that of a lane."""
        passed = total = 0
        for writes in (state.writes for state in self._lanes.all):
            stripes = -(-writes.stripes.written.counts // writes.stripes.k)
            table, stripe = cursor_place(cursor(writes.lane))
            total += int(stripes.sum())
            passed += int(stripes[:table].sum()) + (min(stripe, int(stripes[table])) if table < len(stripes) else 0)
        return passed, total


def by_shard(shard: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the shards among int64 [n], ascending, each with its places."""
    for one in np.unique(shard).tolist():
        yield one, np.flatnonzero(shard == one)


CHUNK_SECONDS = 0.02  # of a chunk while training goes on, about: what is to be read or written meanwhile waits for it
MOST_CHUNK_SECONDS = 0.1  # where fewer rows would take hardly less
_SHARE = 0.125  # of the traffic thread's time, at most: nothing is unprotected meanwhile
_SHARE_OF_SLOW = 0.5  # where rows leave a shard that is far slower than others: training waits for that the longer the less of the time this has
FIRST_ROWS, FEWEST_ROWS = 256, 32  # of a chunk to a shard, at first, and where that takes longer
# A shard that rows leave is not read from any more where its answers of late take so many times as long as others', and so many seconds longer.
_FAR_SLOWER, _FAR_SLOWER_SECONDS = 3.0, 0.015


class Migration(Refill):
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
        super().__init__(stored, lanes, rounds, on_rows)
        self._monitor, self._on_action, self._on_news = monitor, on_action, on_news
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
            self._monitor.ask(self._report)
        except CopyLost:
            self._monitor.post(self._report)

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
        self._report()

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

    def _select(self) -> Chunk | None:
        for state in self._lanes.all:
            begin = int(self._places(state))
            if begin != ALL:
                chunk = self._chunk(state.writes, begin, self._size.rows if self.throttled else COMMAND_ROWS)
                return replace(chunk, end=ALL) if cursor_place(chunk.end)[0] == len(self._stored.layouts) else chunk
        return None

    def _survivors(self, chunk: Chunk) -> Survivors | None:
        """From what a chunk's rows are decoded, as if the shard that they leave were lost, where its answers take long."""
        return None if self._shards.avoided is None else self._shards.without(self._stored.placement.leaving[0])

    def _all_came(self, chunk: Chunk, reads: Sequence[tuple[int, Read]]) -> bool:
        for lane, read in reads:
            if read.shard not in self._shards.lost and read.missing is not None:
                self._rounds.failover.lose(read.shard, StoreUnavailable(str(missing_value(self._stored, lane, read))))
        return not self._shards.lost

    def _put(self, chunk: Chunk, rows: np.ndarray) -> bool:
        """Copy a chunk's rows. A shard that fails is lost: the rows live in the parity on others, as any of its rows do."""
        self._on_action("rows to move read")
        stored, lane, selected = self._stored, chunk.writes.lane, chunk.selected
        marker = Marker(chunk.writes.last_batch, chunk.writes.last_batch)
        stamps = self._stamps(chunk, copied=True)
        writes = [
            stored.write(lane, shard, selected.fields[at], rows[at], marker, len(at), stamps[shard])
            for shard, at in by_shard(selected.target)
        ]
        failures = stored.store.attempt([], writes)
        for write in writes:
            error = failures.get(write.shard)
            if error is None and write.surprise is not None:
                error = StoreUnavailable(f"store {self._shards.urls[write.shard]}: lost rows of lane {lane}: {write.surprise}")
            if error is not None:
                self._rounds.failover.lose(write.shard, error)
                continue
            stored.note(lane, write)
        self._on_action("rows copied")
        return True

    def _advance(self, chunk: Chunk) -> None:
        self._delete(chunk, self._stamps(chunk, copied=False))
        own, keeping = self._shards.of(chunk.writes.lane), self._stored.placement.mask(self._stored.placement.keeping)
        arrive, leave = self._counts(chunk)
        chunk.writes.held = chunk.writes.held + arrive - leave
        own.leftover = np.where(self._stored.placement.mask(self._shards.lost), 0, own.leftover + np.where(keeping, leave, 0))
        own.places.migrated = np.uint64(chunk.end)
        self._on_action("rows moved")

    def _counts(self, chunk: Chunk) -> tuple[np.ndarray, np.ndarray]:
        """How many rows of a chunk come to each shard, and how many leave it: int64 [shards] each."""
        shards = self._stored.placement.shard_count
        return np.bincount(chunk.selected.target, minlength=shards), np.bincount(chunk.selected.source, minlength=shards)

    def _stamps(self, chunk: Chunk, copied: bool) -> dict[int, Migrated]:
        """What shards record of a chunk: those that get rows, that these are copied; or all, that it is done."""
        placement, own, number = self._stored.placement, self._shards.of(chunk.writes.lane), chunk.writes.last_batch
        arrive, leave = self._counts(chunk)
        # What a shard keeps of the rows that leave it counts as if it stayed.
        change = arrive if copied else -np.where(placement.mask(placement.keeping), 0, leave)
        targets = tuple(np.flatnonzero(arrive).tolist())
        return {
            shard: Migrated(
                placement.version,
                self.term,
                chunk.begin,
                chunk.end,
                copied,
                number,
                (own.held[shard] or 0) + int(change[shard]),
                targets,
            )
            for shard in (targets if copied else placement.live)
        }

    def _delete(self, chunk: Chunk, stamps: dict[int, Migrated]) -> None:
        """Delete a chunk's rows where they were, and record on every shard that it is done."""
        stored, lane, own = self._stored, chunk.writes.lane, self._shards.of(chunk.writes.lane)
        marker, keeping = Marker(chunk.writes.last_batch, chunk.writes.last_batch), stored.placement.keeping
        leaving = {shard: chunk.selected.fields[at] for shard, at in by_shard(chunk.selected.source) if shard not in keeping}
        nothing = np.empty(0, np.uint64)
        commands = {
            shard: deletion(stored.key(lane, shard), leaving.get(shard, nothing), marker, migrated)
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
                error = StoreUnavailable(f"store {self._shards.urls[shard]}: lost rows of lane {lane}: {why}")
            if error is not None:
                self._rounds.failover.lose(shard, error)
                continue
            own.held[shard], own.migrated[shard] = stamps[shard].held, stamps[shard]

    def _note(self, seconds: float) -> None:
        self._size.note(seconds)
        if not self.under_way:
            self._stored.store.forget_loads()
        self._report()

    def _report(self) -> None:
        """Report how much has moved."""
        passed, total = self._passed(lambda lane: int(self._shards.of(lane).places.migrated))
        # Not through, however little is left, while any lane is not: this reports the whole.
        share = min(passed / total, 1 - 1e-9) if self.under_way and total else 0.0
        self._shards.note_migrated(share if self.under_way else 1.0)
        self._on_news(self._shards.snapshot)

    def status_of(self, lane: int, shard: int, number: int) -> Migrated | None:
        """What a shard records of a lane that has just got all of its rows there; None where rows never moved."""
        version = self._stored.placement.version
        if not version:
            return None
        own = self._shards.of(lane)
        end = int(own.places.migrated) if self._stored.placement.migrating else ALL
        return Migrated(version, self.term, end, end, False, number, own.held[shard] or 0)
