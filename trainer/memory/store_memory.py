"""What each store shard's server uses of its memory after each step of a schedule, and when that is more than it may."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from foreload.cache.client.store import COMMAND_ROWS, Store
from foreload.cache.errors import CacheError
from foreload.trainer.job.memory_check import readable
from foreload.trainer.memory.hash_memory import KEY_BYTES, HashMemory, statistics_bytes
from foreload.trainer.memory.row_timeline import RowTimeline, sizes_of

CLIENT_BYTES = 16 << 10  # of a trainer's connection, about
_BUFFER_BYTES, _VALKEY_BUFFER_BYTES = 40 << 10, 24 << 10  # that a server keeps for each once rows came by it, about
_SHARED_BYTES = 128 << 10  # a buffer that Valkey reads all commands into, as long as the longest was
_ARGUMENT_BYTES = (
    120  # of a row in a command that a server has read but not yet done, beside the row: two strings and their objects
)
_UNCERTAIN = 0.005  # of what rows take: how far a rehearsal may be wrong
_MARKERS = 2  # of a lane on each shard at a step: with the rows that it fetches, and with those that it writes back
_PARITY_WORK = 0.75  # of a row read or written again, on each parity shard, and half as much of a new one: rows of a stripe share its parity row


@dataclass(slots=True)
class ShardServer:
    """The server of a store shard. used_bytes: when the forecast was made, without the rows that the run had there; limit_bytes: its maxmemory, None
    for none. correction_bytes: by how much more than expected it was seen to use since.
    """

    shard: int
    url: str
    hashes: HashMemory
    used_bytes: float
    limit_bytes: int | None
    correction_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Shortage:
    """A store shard's server has too little memory. step: the first training step after which it would have used more than limit_bytes; None: only
    when all is written back at the end; needed_bytes: for all of the schedule that is known.
    """

    shard: int
    url: str
    step: int | None
    limit_bytes: int
    needed_bytes: int


def hash_bytes(hashes: HashMemory, counts: np.ndarray, moved: np.ndarray | None = None) -> np.ndarray:
    """What hashes of one shard take: float64 [...]. counts: int64 [..., sizes], rows and parity rows of each; moved: as `Growth.table_bytes` has it,
    [...]; None: as where rows were only added.
    """
    entries = counts.sum(axis=-1) + 1  # the marker
    growth = hashes.growth
    if moved is None:
        moved = (entries - started(hashes, entries)) * growth.steps / growth.moving(growth.size(entries))
    of_rows: np.ndarray = counts @ np.array([hashes.entry_bytes[size] for size in sorted(hashes.entry_bytes)])
    total: np.ndarray = of_rows + growth.table_bytes(entries, moved) + KEY_BYTES
    return total


def started(hashes: HashMemory, entries: np.ndarray) -> np.ndarray:
    """With how many entries a hash began to move to the table that it has."""
    size = hashes.growth.size(entries)
    begun: np.ndarray = size // 2 * (7 if hashes.growth.buckets else 1)
    return begun


@dataclass(slots=True)
class StoreMemory:
    """A run's forecast, of the steps that its timeline knows. trainers: how many write; servers: of the shards that are asked."""

    timeline: RowTimeline
    servers: Sequence[ShardServer]
    trainers: int
    _stored: dict[int, np.ndarray] = field(default_factory=dict)  # by shard: bytes of its rows meanwhile, [known, lanes]
    _given: dict[int, np.ndarray] = field(default_factory=dict)  # and the most on the way to a clean stop, [known]

    @classmethod
    def ask(cls, timeline: RowTimeline, store: Store, namespace: str, trainers: int) -> StoreMemory:
        """Look at each server that is there. Raises CacheError."""
        sizes, servers = sizes_of(timeline.layouts), []
        for shard in store.used:
            if shard in store.down:
                continue
            info = store.info(shard)
            hashes = HashMemory.ask(store, shard, namespace, sizes, info)
            server = server_of(timeline, shard, str(store.urls[shard]), hashes, info)
            server.used_bytes += statistics_bytes(store, shard, info)
            servers.append(server)
        return cls(timeline, servers, trainers)

    def advance(self) -> None:
        """Take in what has become known of the schedule."""
        before = self.timeline.known
        if self.timeline.advance() != before:
            self._stored.clear()
            self._given.clear()

    @property
    def headroom_bytes(self) -> int:
        """What commands and answers under way may take of a server: each trainer's, of as many rows as fit a command, both ways."""
        row = max(sizes_of(self.timeline.layouts))
        placement = self.timeline.placement
        slots = max(self.timeline.schedule.slots)
        a_command = min(
            COMMAND_ROWS, math.ceil(1.5 * slots * (placement.k + placement.r) / placement.k / max(len(self.servers), 1)) + 64
        )
        return _SHARED_BYTES + self.trainers * (CLIENT_BYTES + _BUFFER_BYTES + a_command * (2 * row + _ARGUMENT_BYTES))

    def used(self, server: ShardServer) -> np.ndarray:
        """What a server uses while training goes on, after each step that is known (`timeline.steps`): float64 [known]."""
        lanes = self.timeline.stored.shape[1]
        return self.used_when(server, np.repeat(np.arange(self.timeline.known)[:, None], lanes, axis=1))

    def used_when(self, server: ShardServer, moments: np.ndarray) -> np.ndarray:
        """What it uses when each lane's hash there is as after a step of its own: float64 [...]. moments: int64 [..., lanes], places in
        `timeline.steps`.
        """
        if server.shard not in self._stored:
            self._stored[server.shard] = self._of_rows(server, self.timeline.stored, exact=True)
        lanes = np.arange(moments.shape[-1])
        buffer = _VALKEY_BUFFER_BYTES if server.hashes.growth.buckets else _BUFFER_BYTES
        buffers = np.where(self.timeline.stored[moments, lanes, server.shard].any(axis=(-1, -2)), buffer, 0)
        of_rows: np.ndarray = self._stored[server.shard][moments, lanes].sum(axis=-1)
        return of_rows + server.used_bytes + server.correction_bytes + self.trainers * (CLIENT_BYTES + buffers)

    def reached(self, server: ShardServer, rows: np.ndarray, step: int) -> np.ndarray:
        """As after which step each lane's hash on a server is, by the rows that it has: int64 [lanes], places in `timeline.steps`, of which one must
        be known. rows: int64 [lanes], with parity rows; step: the last one trained. The store is behind it by what is on its way there.
        """
        timeline = self.timeline
        last = min(int(np.searchsorted(timeline.steps, step)), timeline.known - 1)
        stored = timeline.stored[: last + 1, :, server.shard].sum(axis=-1)
        after = [int(np.searchsorted(own, there, side="right")) for own, there in zip(stored.T, rows, strict=True)]
        return np.maximum(np.array(after) - 1, 0)

    def at_stop(self, server: ShardServer) -> np.ndarray:
        """The most that a server has used once training has stopped after a step, every row written back: float64 [known]."""
        if server.shard not in self._given:
            grown = self._of_rows(server, self.timeline.given, exact=False).sum(axis=1)
            # While a table moves it takes more than a little later.
            self._given[server.shard] = np.maximum.accumulate(grown) * (1 + _UNCERTAIN)
        return self._given[server.shard] + server.used_bytes + max(server.correction_bytes, 0.0) + self.headroom_bytes

    def _of_rows(self, server: ShardServer, counts: np.ndarray, exact: bool) -> np.ndarray:
        """What each lane's hash on a shard takes: float64 [known, lanes]. exact: tables move with what is read and written, too; else with what is
        added alone.
        """
        own = counts[: self.timeline.known, :, server.shard]
        of_lanes = (
            hash_bytes(server.hashes, own[:, lane], self._share_moved(server, lane, own[:, lane]) if exact else None)
            for lane in range(own.shape[1])
        )
        return np.stack(list(of_lanes), axis=1)

    def _share_moved(self, server: ShardServer, lane: int, own: np.ndarray) -> np.ndarray:
        """How much of the table before a lane's hash has moved, after each step that is known: float64 [known]; from 1 on all has."""
        growth, placement = server.hashes.growth, self.timeline.placement
        entries = own.sum(axis=-1) + 1
        size = growth.size(entries)
        first = np.searchsorted(size, size)  # the first moment with this table
        parity = placement.r * _PARITY_WORK
        added = entries - started(server.hashes, entries)
        work = self.timeline.work[: len(own), lane]
        done = growth.steps * added + (work - work[first]) * (1 + parity) / placement.shard_count + parity * 0.5 * added
        steps = self.timeline.steps[: len(own)]
        done += (steps - steps[first]) * (_MARKERS + (placement.r > 0))
        moved: np.ndarray = done / growth.moving(size)
        # One that was there when training began had all the time that it needed.
        moved[size == growth.size(self.timeline.before[lane, server.shard].sum() + 1)] = 1.0
        return moved

    def shortages(self) -> list[Shortage]:
        """The servers whose memory does not suffice for what is known, in the order in which they are full."""
        found = []
        for server in self.servers:
            if not server.limit_bytes or not self.timeline.known:
                continue
            needed = self.at_stop(server)[-1]
            if needed > server.limit_bytes:
                full = np.flatnonzero(self.used(server) > server.limit_bytes)
                step = int(self.timeline.steps[full[0]]) if len(full) else None
                found.append(Shortage(server.shard, server.url, step, server.limit_bytes, math.ceil(needed)))
        return sorted(found, key=lambda one: (one.step is None, one.step or 0))

    def last_step(self) -> int | None:
        """The last step after which training can stop with all rows written back, on every server; None where all that is known fits.

        One step less than the timeline's first one: none can be trained.
        """
        fitting = self.timeline.known
        for server in self.servers:
            if server.limit_bytes and fitting:
                over = np.flatnonzero(self.at_stop(server)[:fitting] > server.limit_bytes)
                fitting = int(over[0]) if len(over) else fitting
        if fitting == self.timeline.known:
            return None
        return int(self.timeline.steps[fitting - 1]) if fitting else self.timeline.start_step


def counted_bytes(info: Mapping[str, str]) -> int:
    """What counts against a server's `maxmemory`, by its INFO: what it uses, without replicas' output buffers, and with what its replication backlog,
    where it has replicas, is yet to take: that fills with whatever is written.
    """
    backlog = int(info.get("repl_backlog_size", 0)) - int(info.get("mem_replication_backlog", 0))
    to_come = max(backlog, 0) if info.get("repl_backlog_active") == "1" else 0
    return int(info["used_memory"]) - int(info.get("mem_not_counted_for_evict", 0)) + to_come


def server_of(timeline: RowTimeline, shard: int, url: str, hashes: HashMemory, info: Mapping[str, str]) -> ShardServer:
    """A server as its INFO describes it, where the run has the rows that the timeline begins with."""
    if "used_memory" not in info:
        raise CacheError(f"store {url}: does not say how much memory it uses; INFO must have used_memory")
    before = timeline.before[:, shard]
    rows = float(hash_bytes(hashes, before).sum()) if before.sum() else 0.0
    return ShardServer(shard, url, hashes, counted_bytes(info) - rows, int(info.get("maxmemory", 0)) or None)


def shortage_text(shortage: Shortage) -> str:
    """A line about a server that has too little."""
    when = "as all rows are written back at the end" if shortage.step is None else f"at step {shortage.step:,}"
    return (
        f"store shard {shortage.shard}: its maxmemory, {readable(shortage.limit_bytes)}, would be reached {when}; "
        f"in all it needs {readable(shortage.needed_bytes)}"
    )


def remedy(memory: StoreMemory, shortages: Sequence[Shortage]) -> str:
    """What would help: more memory of the same servers, or more servers."""
    needed = max(shortage.needed_bytes for shortage in shortages)
    words = f"give each server {math.ceil(needed / 2**20)} MiB (CONFIG SET maxmemory {math.ceil(needed / 2**20)}mb)"
    of_rows = sum(float(memory.at_stop(server)[-1]) - server.used_bytes - memory.headroom_bytes for server in memory.servers)
    room = min(
        (server.limit_bytes - server.used_bytes - memory.headroom_bytes for server in memory.servers if server.limit_bytes),
        default=0.0,
    )
    if room > 0 and (shards := math.ceil(1.02 * of_rows / room)) > len(memory.servers):
        words += f", or have {shards} shards"
    return words
