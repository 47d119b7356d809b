"""Ask the servers of store shards for their state, and check their room for the rows to come."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import TypedDict

import numpy as np

from foreload.base.at_once import at_once, results_of
from foreload.cache.client.store import Store, server_version
from foreload.cache.client.url import parse_url
from foreload.cache.errors import CacheError
from foreload.cache.parity.placement import Placement
from foreload.cache.protocol.shards.fence import foreign_key, look_at
from foreload.cache.protocol.shards.namespace import foreign_note, lane_key, memory_of
from foreload.cache.rows.layout import RowLayout
from foreload.pipelines.errors import ScheduleError
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.errors import RunError
from foreload.trainer.job.memory_check import readable
from foreload.trainer.memory.hash_memory import HashMemory
from foreload.trainer.memory.row_timeline import counts_of, sizes_of
from foreload.trainer.memory.store_memory import ShardServer, counted_bytes, hash_bytes
from foreload.trainer.run.manifest import Manifest
from foreload.trainer.saved.model_rows import given_ordinals

_TIMEOUT, _CONNECT = timedelta(seconds=5), timedelta(seconds=1)


class ShardReport(TypedDict, total=False):
    """The report on a shard.

    It has what the shard's server reports of itself and of the lanes there, or why the server
    cannot be asked. Commands add what trainers report of the shard.

    Attributes:
        state: up, down, lost, degraded, or a state that trainers report. A stopped local server
            whose rows are saved has a state of its own.
        foreign: a key of another run.
        lane_entries: the number of entries in each lane's hash.
        hash_bytes: the memory of these hashes. Missing if the user may not ask for it.
        markers: each lane's marker.
        rebuilt: the share of the rows that is rebuilt.
    """

    shard: int
    url: str
    state: str
    why: str
    foreign: str
    version: str
    allocator: str
    entries: int
    lane_entries: list[int]
    hash_bytes: int
    markers: list[str]
    memory_bytes: int
    counted_bytes: int
    limit_bytes: int | None
    saved_bytes: int | None
    rebuilt: float
    rows: int | None
    parity_rows: int | None
    row_bytes: int | None


def ask_servers(urls: Mapping[int, str], namespace: str, lanes: int) -> list[ShardReport]:
    """Return what each server reports of itself and of a run's lanes, in the order of the shards.

    All servers are asked at the same time.

    Args:
        urls: shard -> its URL, with password.
        namespace: the run's.
        lanes: the number of the run's lanes.
    """
    asked = at_once({shard: partial(_ask_server, shard, url, namespace, lanes) for shard, url in urls.items()})
    return list(results_of(asked).values())


def _ask_server(shard: int, url: str, namespace: str, lanes: int) -> ShardReport:
    """Return what a server reports of itself and of the namespace's lanes.

    If it cannot be asked, the state is "down", with the reason.
    """
    try:
        with Store([url], _TIMEOUT, _CONNECT) as store:
            info = store.info(0)
            found = look_at(store, 0, namespace, range(lanes))
            keys = [lane_key(namespace, lane, one.epoch) for lane, one in found.items()]
            rows = [one.rows for one in found.values()]
            foreign = foreign_key(found) or foreign_note(store, 0, namespace)
            report: ShardReport = {
                "shard": shard,
                "url": str(store.urls[0]),
                "state": "up",
                "version": server_version(info),
                "allocator": info.get("mem_allocator", ""),
                "entries": sum(rows),
                "lane_entries": rows,
                "markers": [str(one.marker) for one in found.values()],
                "memory_bytes": int(info["used_memory"]),
                "counted_bytes": counted_bytes(info),
                "limit_bytes": int(info.get("maxmemory", 0)) or None,
            }
            if (used := memory_of(store, 0, keys)) is not None:
                report["hash_bytes"] = used
            return report if foreign is None else {**report, "foreign": str(foreign)}
    except CacheError as error:
        return {"shard": shard, "url": str(parse_url(url)), "state": "down", "why": str(error)}


def server_seen(report: ShardReport, at_end: np.ndarray, sizes: Sequence[int]) -> ShardServer:
    """Return a server, by its report of what it holds now.

    If it does not report the memory of its hashes, that is taken from measured sizes of rows.

    Args:
        at_end: int64 [lanes, sizes], the rows that it will hold. The rows that it holds now are
            taken to have the same mix of sizes.
        sizes: the sizes of rows, in bytes.
    """
    version = report.get("version", "")
    kind, _, number = version.partition(" ")
    info = {f"{kind}_version": number, "mem_allocator": report.get("allocator", "")} if version else {}
    hashes = HashMemory.known(info, sizes)
    there = np.array(report.get("lane_entries", []), np.int64)
    held = float(report.get("hash_bytes", 0))
    if there.sum():
        shares = at_end.sum(axis=0) / max(at_end.sum(), 1)
        if "hash_bytes" in report:
            tables = float(hash_bytes(HashMemory(hashes.growth, {0: 0.0}, False), there[:, None]).sum())
            mixed = {size: float(share) for size, share in zip(sizes, shares, strict=True)}
            hashes = hashes.fitted(int(there.sum()), tables, mixed, held)
        else:
            held = float(hash_bytes(hashes, np.rint(there[:, None] * shares).astype(np.int64)).sum())
    used = report.get("counted_bytes", 0) - held
    return ShardServer(report["shard"], report["url"], hashes, max(used, 0.0), report.get("limit_bytes"))


def check_room(
    manifest: Manifest, schedule: Schedule, layouts: Sequence[RowLayout], placement: Placement, urls: Sequence[str]
) -> None:
    """Raise RunError if a server's memory limit is too low for the rows after a migration.

    The rows are all rows of the schedule. Local servers have no limit. Servers that do not answer
    are skipped, and so is the check if the schedule does not know its number of rows yet.

    Args:
        placement: the placement of the migration.
        urls: the URLs of all shards, with passwords.
    """
    if manifest.local_stores is not None:
        return
    after = placement.completed()
    reports = ask_servers({shard: urls[shard] for shard in after.live}, manifest.namespace, manifest.lanes)
    limited = [(one, limit) for one in reports if (limit := one.get("limit_bytes"))]
    if not limited:
        return
    try:
        counts = counts_of(after, given_ordinals(schedule, None), layouts)
    except ScheduleError:
        return
    for one, limit in limited:
        server = server_seen(one, counts[:, one["shard"]], sizes_of(layouts))
        needed = server.used_bytes + float(hash_bytes(server.hashes, counts[:, server.shard]).sum())
        if needed > limit:
            raise RunError(
                f"store shard {server.shard} ({server.url}): its maxmemory must be at least what it needs once the rows have moved, "
                f"{readable(math.ceil(needed))}; got {readable(limit)}; give it more "
                f"(CONFIG SET maxmemory {math.ceil(needed / 2**20)}mb), or have more shards"
            )
