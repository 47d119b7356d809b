"""Predict each store shard's memory use over a schedule, and when it exceeds the limit."""

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

CLIENT_BYTES = 16 << 10  # about the bytes of a trainer's connection
# A server keeps about this much for each connection once rows came over it.
_BUFFER_BYTES, _VALKEY_BUFFER_BYTES = 40 << 10, 24 << 10
# Valkey reads all commands into one buffer, which is as large as the longest command was.
_SHARED_BYTES = 128 << 10
# A server takes this much besides each row of a command that it has read but not executed: two
# strings and their objects.
_ARGUMENT_BYTES = 120
_UNCERTAIN = 0.005  # the relative error of a rehearsal's sizes
# Markers of a lane per shard and step: one with the rows that it fetches, one with those that it
# writes back.
_MARKERS = 2
# The work for a row that is read or written again, on each parity shard; a new row takes half as
# much. Rows of a stripe share its parity row.
_PARITY_WORK = 0.75


@dataclass(slots=True)
class ShardServer:
    """The server of a store shard.

    Attributes:
        hashes: the memory that hashes take on it.
        used_bytes: its use when the forecast was made, without the rows that the run had there.
        limit_bytes: its maxmemory, or None if it has none.
        correction_bytes: by how much its observed use has exceeded the forecast since.
    """

    shard: int
    url: str
    hashes: HashMemory
    used_bytes: float
    limit_bytes: int | None
    correction_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Shortage:
    """A store shard whose server has too little memory.

    Attributes:
        step: the first training step after which its use would exceed limit_bytes. If None, that
            happens only when all rows are written back at the end.
        needed_bytes: the memory for all steps of the schedule that are known.
    """

    shard: int
    url: str
    step: int | None
    limit_bytes: int
    needed_bytes: int


def hash_bytes(hashes: HashMemory, counts: np.ndarray, moved: np.ndarray | None = None) -> np.ndarray:
    """Return the bytes of one shard's hashes: float64 [...].

    Args:
        counts: int64 [..., sizes], the rows and parity rows of each hash.
        moved: [...], as in `Growth.table_bytes`. If None, it is computed as if rows were only ever
            added.
    """
    entries = counts.sum(axis=-1) + 1  # with the marker
    growth = hashes.growth
    if moved is None:
        moved = (entries - started(hashes, entries)) * growth.steps / growth.moving(growth.size(entries))
    of_rows: np.ndarray = counts @ np.array([hashes.entry_bytes[size] for size in sorted(hashes.entry_bytes)])
    total: np.ndarray = of_rows + growth.table_bytes(entries, moved) + KEY_BYTES
    return total


def started(hashes: HashMemory, entries: np.ndarray) -> np.ndarray:
    """Return with how many entries a hash began to move to its present table."""
    size = hashes.growth.size(entries)
    begun: np.ndarray = size // 2 * (7 if hashes.growth.buckets else 1)
    return begun


@dataclass(slots=True)
class StoreMemory:
    """A run's memory forecast, for the steps that its timeline knows.

    Attributes:
        servers: the servers of the shards that are asked.
        trainers: the number of trainers that write.
    """

    timeline: RowTimeline
    servers: Sequence[ShardServer]
    trainers: int
    # By shard, the bytes of its rows during training: [known, lanes].
    _stored: dict[int, np.ndarray] = field(default_factory=dict)
    # By shard, the peak bytes of its rows up to a clean stop: [known].
    _given: dict[int, np.ndarray] = field(default_factory=dict)

    @classmethod
    def ask(cls, timeline: RowTimeline, store: Store, namespace: str, trainers: int) -> StoreMemory:
        """Ask each server that is up. Raises CacheError."""
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
        """Extend the forecast to the segments published since."""
        before = self.timeline.known
        if self.timeline.advance() != before:
            self._stored.clear()
            self._given.clear()

    @property
    def headroom_bytes(self) -> int:
        """The memory that commands and replies under way may take on a server.

        Each trainer may have a command of as many rows as fit, in both directions.
        """
        row = max(sizes_of(self.timeline.layouts), default=0)
        placement = self.timeline.placement
        slots = max(self.timeline.schedule.slots)
        a_command = min(
            COMMAND_ROWS, math.ceil(1.5 * slots * (placement.k + placement.r) / placement.k / max(len(self.servers), 1)) + 64
        )
        return _SHARED_BYTES + self.trainers * (CLIENT_BYTES + _BUFFER_BYTES + a_command * (2 * row + _ARGUMENT_BYTES))

    def used(self, server: ShardServer) -> np.ndarray:
        """Return a server's use during training, after each known step.

        Returns:
            float64 [known], for `timeline.steps`.
        """
        lanes = self.timeline.stored.shape[1]
        return self.used_when(server, np.repeat(np.arange(self.timeline.known)[:, None], lanes, axis=1))

    def used_when(self, server: ShardServer, moments: np.ndarray) -> np.ndarray:
        """Return a server's use if each lane's hash is in its state after a step of its own.

        Args:
            moments: int64 [..., lanes], indices into `timeline.steps`.

        Returns:
            float64 [...].
        """
        if server.shard not in self._stored:
            self._stored[server.shard] = self._of_rows(server, self.timeline.stored, exact=True)
        lanes = np.arange(moments.shape[-1])
        buffer = _VALKEY_BUFFER_BYTES if server.hashes.growth.buckets else _BUFFER_BYTES
        buffers = np.where(self.timeline.stored[moments, lanes, server.shard].any(axis=(-1, -2)), buffer, 0)
        of_rows: np.ndarray = self._stored[server.shard][moments, lanes].sum(axis=-1)
        return of_rows + server.used_bytes + server.correction_bytes + self.trainers * (CLIENT_BYTES + buffers)

    def reached(self, server: ShardServer, rows: np.ndarray, step: int) -> np.ndarray:
        """Return the step whose state each lane's hash on a server has, by the number of its rows.

        The store lags behind the training by the rows that are on their way to it. At least one
        moment must be known.

        Args:
            rows: int64 [lanes], including parity rows.
            step: the last step trained.

        Returns:
            int64 [lanes], indices into `timeline.steps`.
        """
        timeline = self.timeline
        last = min(int(np.searchsorted(timeline.steps, step)), timeline.known - 1)
        stored = timeline.stored[: last + 1, :, server.shard].sum(axis=-1)
        after = [int(np.searchsorted(own, there, side="right")) for own, there in zip(stored.T, rows, strict=True)]
        return np.maximum(np.array(after) - 1, 0)

    def at_stop(self, server: ShardServer) -> np.ndarray:
        """Return a server's peak use up to a clean stop after each known step.

        After the stop, every row is written back.

        Returns:
            float64 [known].
        """
        if server.shard not in self._given:
            grown = self._of_rows(server, self.timeline.given, exact=False).sum(axis=1)
            # A hash takes more while its table moves than a little later, so the peak so far
            # counts.
            self._given[server.shard] = np.maximum.accumulate(grown) * (1 + _UNCERTAIN)
        return self._given[server.shard] + server.used_bytes + max(server.correction_bytes, 0.0) + self.headroom_bytes

    def _of_rows(self, server: ShardServer, counts: np.ndarray, exact: bool) -> np.ndarray:
        """Return the bytes of each lane's hash on a shard: float64 [known, lanes].

        Args:
            exact: whether reads and writes move tables too. Otherwise only added rows do.
        """
        own = counts[: self.timeline.known, :, server.shard]
        of_lanes = (
            hash_bytes(server.hashes, own[:, lane], self._share_moved(server, lane, own[:, lane]) if exact else None)
            for lane in range(own.shape[1])
        )
        return np.stack(list(of_lanes), axis=1)

    def _share_moved(self, server: ShardServer, lane: int, own: np.ndarray) -> np.ndarray:
        """Return how much of its previous table a lane's hash has moved, after each known step.

        Returns:
            float64 [known], as a share; from 1 on, all has moved.
        """
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
        # A table that existed before training began had all the time it needed to move.
        moved[size == growth.size(self.timeline.before[lane, server.shard].sum() + 1)] = 1.0
        return moved

    def shortages(self) -> list[Shortage]:
        """Return the servers that lack memory for the known steps, the first to fill up first."""
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
        """Return the last step after which a clean stop fits the memory of every server.

        After a clean stop, all rows are written back.

        Returns:
            The step, or None if all known steps fit. If no step can be trained, the step before the
            timeline's first one.
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
    """Return the memory that counts against a server's `maxmemory`, by its INFO.

    That is its use without replicas' output buffers. If the server has replicas, the rest of its
    replication backlog is added, because any write fills it.
    """
    backlog = int(info.get("repl_backlog_size", 0)) - int(info.get("mem_replication_backlog", 0))
    to_come = max(backlog, 0) if info.get("repl_backlog_active") == "1" else 0
    return int(info["used_memory"]) - int(info.get("mem_not_counted_for_evict", 0)) + to_come


def server_of(timeline: RowTimeline, shard: int, url: str, hashes: HashMemory, info: Mapping[str, str]) -> ShardServer:
    """Return a server as its INFO describes it.

    It must hold the rows that the timeline begins with. Raises CacheError if INFO lacks the used
    memory.
    """
    if "used_memory" not in info:
        raise CacheError(f"store {url}: does not say how much memory it uses; INFO must have used_memory")
    before = timeline.before[:, shard]
    rows = float(hash_bytes(hashes, before).sum()) if before.sum() else 0.0
    return ShardServer(shard, url, hashes, counted_bytes(info) - rows, int(info.get("maxmemory", 0)) or None)


def shortage_text(shortage: Shortage) -> str:
    """Describe a shortage in one line."""
    when = "as all rows are written back at the end" if shortage.step is None else f"at step {shortage.step:,}"
    return (
        f"store shard {shortage.shard}: its maxmemory, {readable(shortage.limit_bytes)}, would be reached {when}; "
        f"in all it needs {readable(shortage.needed_bytes)}"
    )


def shards_needed(memory: StoreMemory) -> int | None:
    """Return how many shards like these have enough memory together, or None if no number has."""
    of_rows = sum(float(memory.at_stop(server)[-1]) - server.used_bytes - memory.headroom_bytes for server in memory.servers)
    room = min(
        (server.limit_bytes - server.used_bytes - memory.headroom_bytes for server in memory.servers if server.limit_bytes),
        default=0.0,
    )
    return math.ceil(1.02 * of_rows / room) if room > 0 else None


def remedy(memory: StoreMemory, shortages: Sequence[Shortage]) -> str:
    """Describe what would help: more memory for the same servers, or more servers."""
    needed = max(shortage.needed_bytes for shortage in shortages)
    words = f"give each server {math.ceil(needed / 2**20)} MiB (CONFIG SET maxmemory {math.ceil(needed / 2**20)}mb)"
    shards = shards_needed(memory)
    return words if shards is None or shards <= len(memory.servers) else f"{words}, or have {shards} shards"
