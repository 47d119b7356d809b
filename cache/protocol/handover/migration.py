"""Migration of rows to other store shards while their owner trains, and refill tasks in general.

A migration runs in chunks, each between two rounds (docs/protocol.md). The owner reads the rows of
a chunk, copies them to their new shards, and, once that is acknowledged, deletes them on the old
ones. Each hash records the step that changed it (`marker`). Afterwards the lane's cursor stands
behind the chunk, and rounds go by the cursor. With parity, a shard that all rows leave keeps its
rows until the whole shard leaves: to name each row takes time on a link that may be slow.

There are two refill tasks: `repair.rebuild` fills a shard that came back empty, and `Migration`
moves rows to other shards. Each chunk goes through four stages. The task selects the rows; it reads
them from their shards, or decodes them from their stripes; it writes them to their new shards; and
it moves the lane's cursor behind the chunk. If a shard is lost before the task has the rows of a
chunk, nothing has changed, and the task tries again.
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
from foreload.cache.parity.stripes import LaneStripes
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
    """Rows of one table of a lane that a refill task brings to their shards together.

    Attributes:
        writes: the writes of the lane.
        selected: the rows. If there are none, no rows are left.
        begin: the cursor before the rows.
        end: the cursor behind the rows.
        shard: the only shard that the rows go to. If None, they go to several.
    """

    writes: LaneWrites
    selected: Selected
    begin: int
    end: int
    shard: int | None


class Refill(Task):
    """Brings all rows of the lanes that a traffic serves to the shards that must have them.

    Args:
        on_rows: called with the number of rows of each chunk.
    """

    def __init__(self, stored: StoredRows, lanes: Lanes, rounds: Rounds, on_rows: Callable[[int], None]) -> None:
        super().__init__()
        self._stored, self._shards, self._lanes, self._rounds = stored, stored.shards, lanes, rounds
        self._on_rows = on_rows

    def chunk(self) -> None:
        """Bring the next rows to their shards.

        Raises:
            RowsLost: more shards are lost than parity covers.
            RowError: a row is missing and cannot be decoded.
            StoreError: a server failed.
        """
        begun = time.monotonic()
        chunk = self._select()
        if chunk is not None:
            self._on_rows(self._bring(chunk))
            self._note(time.monotonic() - begun)

    def _bring(self, chunk: Chunk) -> int:
        """Bring the rows of a chunk to their shards.

        Returns how many rows were brought: 0 if the chunk has none, or if the task must try again.
        """
        count = len(chunk.selected.fields)
        if count:
            rows = self._get(chunk)
            if rows is None or not self._put(chunk, rows):
                return 0
        self._advance(chunk)
        return count

    @abstractmethod
    def _select(self) -> Chunk | None:
        """Return the next chunk, or None if no rows are left."""

    @abstractmethod
    def _survivors(self, chunk: Chunk) -> Survivors | None:
        """Return what to decode a chunk's rows from, or None to read them from their shards."""

    @abstractmethod
    def _all_came(self, chunk: Chunk, reads: Sequence[tuple[int, Read]]) -> bool:
        """Return whether the reads of a chunk, each given with its lane, brought all rows.

        A shard that lacks a row is lost; if parity does not cover that, the error is raised.
        """

    @abstractmethod
    def _put(self, chunk: Chunk, rows: np.ndarray) -> bool:
        """Write a chunk's rows (uint8 [n, row_bytes]) to their new shards.

        Returns False if the task must bring them again.
        """

    @abstractmethod
    def _advance(self, chunk: Chunk) -> None:
        """Record on the shards that a chunk is done, and move the lane's cursor to its end."""

    @abstractmethod
    def _note(self, seconds: float) -> None:
        """Report the progress after a chunk, which took this many seconds."""

    def _chunk(self, writes: LaneWrites, begin: int, most: int, shard: int | None = None) -> Chunk:
        """Select the next rows of a lane, from a cursor on.

        Args:
            writes: the writes of the lane.
            begin: the cursor.
            most: the most rows that go to one shard.
            shard: the shard whose rows to select. If None, the rows that migrate are selected.
        """
        tables, shards = len(self._stored.layouts), self._stored.placement.shard_count
        selected, (table, first) = Selected.none(), cursor_place(begin)
        while table < tables and not len(selected.fields):
            selected = select_rows(writes.stripes, table, first, most, shards, shard)
            # At the end of the table the cursor moves on to the next table. Rows of this table that
            # are written later go to their new shards at once.
            table, first = (table + 1, 0) if selected.whole else (table, selected.end)
        return Chunk(writes, selected, begin, cursor_at(table, first), shard)

    def _get(self, chunk: Chunk) -> np.ndarray | None:
        """Return a chunk's rows, uint8 [n, row_bytes].

        Returns None if a shard was lost meanwhile, so that the task must try again.
        """
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
        """Perform the reads of a chunk. Returns what `_all_came` returns."""
        of_lane = [(chunk.writes.lane, read) for read in reads]
        self._rounds.exchange(of_lane, [])
        return self._all_came(chunk, of_lane)

    def _passed(self, cursor: Callable[[int], int]) -> tuple[int, int]:
        """Count the stripes that lie before their lane's cursor, and all stripes.

        Args:
            cursor: returns the cursor of a lane.
        """
        passed = total = 0
        for writes in (state.writes for state in self._lanes.all):
            stripes = -(-writes.stripes.written.counts // writes.stripes.k)
            table, stripe = cursor_place(cursor(writes.lane))
            total += int(stripes.sum())
            passed += int(stripes[:table].sum()) + (min(stripe, int(stripes[table])) if table < len(stripes) else 0)
        return passed, total


def by_shard(shard: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield each shard in int64 [n], ascending, with its places."""
    for one in np.unique(shard).tolist():
        yield one, np.flatnonzero(shard == one)


# How long a chunk takes while training continues, roughly. Training's reads and writes wait for it.
CHUNK_SECONDS = 0.02
MOST_CHUNK_SECONDS = 0.1  # at most, where fewer rows would take hardly less
MOVING_SHARE = 0.125  # of the traffic thread's time at most: rows stay protected during a migration
# The shares where training waits for the store until the migration is over: rows leave a shard that
# is far slower than others, or come to further shards. What that takes from training is the same in
# all, and training is faster earlier. Where rows leave, no step shall take long either.
LEAVING_SHARE, COMING_SHARE = 0.5, 0.8
# In a hurry: in a longer chunk less of the time is spent on ending the batches under way before it.
_HURRIED_SECONDS, _MOST_HURRIED_SECONDS = 0.1, 0.2
# Rows of a chunk to one shard: at first, and at least, where chunks take too long.
FIRST_ROWS, FEWEST_ROWS = 256, 32
# Rows are no longer read from the shard that they leave if its recent answers take this many times
# as long as those of other shards, and this many seconds longer.
_FAR_SLOWER, _FAR_SLOWER_SECONDS = 3.0, 0.015


class Migration(Refill):
    """Moves the rows of all lanes that a traffic serves to the shards of the placement's target.

    Args:
        on_action: the traffic's; called at "rows to move read", "rows copied" and "rows moved".
        on_rows: called with the number of rows of each chunk.
        on_news: called with the status of the shards after every step of the migration.
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
        self.share = MOVING_SHARE

    # Called by any thread but the traffic thread.

    def begin(self, placement: Placement, urls: Sequence[str | StoreUrl | None]) -> None:
        """Begin to migrate rows to the target of a placement, beside the training.

        On return the new shards take part. A placement that is already known changes nothing. A new
        server that cannot be reached counts as a lost shard; without parity that ends the traffic.

        Args:
            placement: the placement with its target.
            urls: the addresses of all shards; None for a shard that was removed.
        """
        parsed = [parse_url(url) if isinstance(url, str) else url for url in urls]
        self._monitor.ask(lambda: self._begin(placement, parsed))

    def hurry(self) -> None:
        """Let the migration under way take more of the traffic's time."""
        self.share = LEAVING_SHARE if self._stored.placement.leaving else COMING_SHARE
        self._size.seconds, self._size.most_seconds = _HURRIED_SECONDS, _MOST_HURRIED_SECONDS

    def complete(self, placement: Placement) -> None:
        """Switch to a placement once all owners have migrated all rows.

        The shards that the placement has removed are no longer used.
        """
        self._monitor.ask(lambda: self._complete(placement))

    def lanes_changed(self) -> None:
        """Report the progress again after the traffic began to serve other lanes.

        The last report, of the lanes before, may say that all rows have migrated. So the new report
        is made before this returns; only if the trainer is interrupted, it follows later.
        """
        if not self._stored.placement.migrating:
            return
        try:
            self._monitor.ask(self._report)
        except CopyLost:
            self._monitor.post(self._report)

    # Called by the traffic thread.

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
        self.share, self._size.seconds, self._size.most_seconds = MOVING_SHARE, CHUNK_SECONDS, MOST_CHUNK_SECONDS
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
        """Have a new shard take part in a lane.

        From then on the shard counts as having every batch so far, although none of their rows are
        its own.
        """
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
        """Whether rows are left to migrate, even if the migration cannot proceed now."""
        return self._stored.placement.migrating and any(int(self._places(state)) != ALL for state in self._lanes.all)

    @property
    def wanted(self) -> bool:
        """Whether a chunk can be done: rows are left to migrate, and every shard is whole.

        Lost shards are rebuilt first.
        """
        return self.under_way and self._shards.whole

    def _places(self, state: LaneTraffic) -> np.uint64:
        return self._shards.of(state.lane).places.migrated

    def look_at_source(self) -> None:
        """Avoid the shard that all migrating rows leave, if it is far slower than the others.

        With parity, the chunks and the rows that training fetches from that shard are decoded from
        then on. The traffic thread calls this between two rounds.
        """
        placement, shards = self._stored.placement, self._shards
        if not placement.r or shards.avoided is not None or not self.wanted or len(placement.leaving) != 1:
            return
        (leaving,) = placement.leaving
        if slower(leaving, self._stored.store.recent_seconds, _FAR_SLOWER, _FAR_SLOWER_SECONDS) is not None:
            shards.avoid(leaving)
            self.share, self._not_before = LEAVING_SHARE, 0.0

    def _select(self) -> Chunk | None:
        for state in self._lanes.all:
            begin = int(self._places(state))
            if begin != ALL:
                chunk = self._chunk(state.writes, begin, self._size.rows if self.throttled else COMMAND_ROWS)
                return replace(chunk, end=ALL) if cursor_place(chunk.end)[0] == len(self._stored.layouts) else chunk
        return None

    def _survivors(self, chunk: Chunk) -> Survivors | None:
        """Return what to decode a chunk's rows from if their old shard is avoided, else None."""
        return None if self._shards.avoided is None else self._shards.without(self._stored.placement.leaving[0])

    def _all_came(self, chunk: Chunk, reads: Sequence[tuple[int, Read]]) -> bool:
        for lane, read in reads:
            if read.shard not in self._shards.lost and read.missing is not None:
                self._rounds.failover.lose(read.shard, StoreUnavailable(str(missing_value(self._stored, lane, read))))
        return not self._shards.lost

    def _put(self, chunk: Chunk, rows: np.ndarray) -> bool:
        """Copy a chunk's rows to their new shards.

        A shard that fails is lost: like all rows of a lost shard, the rows then live in the parity
        on other shards.
        """
        self._on_action("rows to move read")
        stored, lane, selected = self._stored, chunk.writes.lane, chunk.selected
        marker = Marker(chunk.writes.last_batch, chunk.writes.last_batch)
        # The copies, the marker and the record of the chunk go in one command, so no shard has one
        # without the others.
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
        # Nothing is deleted before `_put` has every copy acknowledged, and the cursor does not move
        # before every deletion is acknowledged.
        self._delete(chunk, self._stamps(chunk, copied=False))
        own, keeping = self._shards.of(chunk.writes.lane), self._stored.placement.mask(self._stored.placement.keeping)
        arrive, leave = self._counts(chunk)
        chunk.writes.held = chunk.writes.held + arrive - leave
        own.leftover = np.where(self._stored.placement.mask(self._shards.lost), 0, own.leftover + np.where(keeping, leave, 0))
        own.places.migrated = np.uint64(chunk.end)
        self._on_action("rows moved")

    def _counts(self, chunk: Chunk) -> tuple[np.ndarray, np.ndarray]:
        """Count the rows of a chunk that come to each shard, and those that leave it.

        Each count is int64 [shards].
        """
        shards = self._stored.placement.shard_count
        return np.bincount(chunk.selected.target, minlength=shards), np.bincount(chunk.selected.source, minlength=shards)

    def _stamps(self, chunk: Chunk, copied: bool) -> dict[int, Migrated]:
        """Return what the shards record of a chunk.

        Args:
            copied: if True, the shards that get rows record that these are copied. If False, all
                shards record that the chunk is done.
        """
        placement, own, number = self._stored.placement, self._shards.of(chunk.writes.lane), chunk.writes.last_batch
        arrive, leave = self._counts(chunk)
        # Rows that have left a shard but are kept there still count as rows of its hash.
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
        """Delete a chunk's rows on their old shards, and record on every shard that it is done."""
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
            # How many rows must have been deleted, and how many fields of the marker and the record
            # must have been new. Any other answer shows that the shard lost fields.
            must = len(leaving.get(shard, nothing)), (own.held[shard] is None) + (own.migrated[shard] is None)
            if error is None and (there := changed(answers[shard])) != must:
                why = f"of {must[0]} rows that migrated away, {there[0]} were still there"
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
        """Report how much has migrated."""
        passed, total = self._passed(lambda lane: int(self._shards.of(lane).places.migrated))
        # The share stays below 1 while any row is left, however few: a share of 1 reports a
        # complete migration.
        share = min(passed / total, 1 - 1e-9) if self.under_way and total else 0.0
        self._shards.note_migrated(share if self.under_way else 1.0)
        self._on_news(self._shards.snapshot)

    def status_of(self, lane: int, shard: int, number: int) -> Migrated | None:
        """Return what a rebuilt shard records of a lane's migration, or None if no row ever moved.

        Args:
            lane: the lane, all of whose rows the shard has again.
            number: the number of the lane's last write-back batch.
        """
        version = self._stored.placement.version
        if not version:
            return None
        own = self._shards.of(lane)
        end = int(own.places.migrated) if self._stored.placement.migrating else ALL
        return Migrated(version, self.term, end, end, False, number, own.held[shard] or 0)


def warm_up_migration(placement: Placement) -> None:
    """Compile the kernels that select and decode migrating rows, or load them from numba's cache.

    This is done once in a process, and loading takes about 0.1 s.

    Args:
        placement: the run's.
    """
    if not placement.migrating:
        placement = placement.with_migrated(placement.live[0])
    stripes = LaneStripes.of(placement, 0, np.array([placement.k]))
    selected = select_rows(stripes, 0, 0, 1, placement.shard_count)
    if placement.r:
        survivors = Survivors.of(placement, placement.mask(placement.leaving[:1]))
        plan_decoding(stripes, survivors, selected.stripe_places, 16, [b""] * placement.shard_count).decode()
