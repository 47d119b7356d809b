"""Fencing: a new owner, and an owner with a new connection, first makes every older connection harmless at the server.

A lane's hash on a store shard is {namespace:lane}:e, e being the fence epoch there. A new connection renames it to e + 1 and leaves a string at
e, in one transaction: what an older connection still sends, or has in a stopped server's buffer, is then answered with WRONGTYPE. (CLIENT
KILL is no fence: a client that reconnects writes again.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from foreload.cache.client.resp import MARKER
from foreload.cache.client.store import Store
from foreload.cache.errors import Fenced, StoreError
from foreload.cache.protocol.marker import Marker
from foreload.cache.protocol.namespace import EPOCH, lane_key

_ATTEMPTS = 10
_FENCED = b"fenced"


def epoch_key(namespace: str, lane: int) -> bytes:
    """The key of a lane's fence epoch and of the term of who set it, "e t"; it is in the same slot of a cluster as the lane's hashes."""
    return b"{%b:%d}%b" % (namespace.encode(), lane, EPOCH)


def _parse(stored: object) -> tuple[int, int]:
    """The fence epoch and the term of an epoch key's value; 0, 0 where there is none."""
    if stored is None:
        return 0, 0
    assert isinstance(stored, bytes)
    epoch, _, term = stored.partition(b" ")
    return int(epoch), int(term)


def read_epochs(store: Store, shard: int, namespace: str, lanes: int) -> np.ndarray:
    """The fence epochs of lanes 0 .. lanes - 1 on a store shard: int64 [lanes], 0 where none was ever fenced."""
    stored = store.commands_at_once(shard, [("GET", epoch_key(namespace, lane)) for lane in range(lanes)])
    return np.array([_parse(value)[0] for value in stored], np.int64)


@dataclass(frozen=True, slots=True)
class Found:
    """What a fence found of a lane on a store shard, or `look_at` without one.

    epoch: the fence epoch from now on; marker: the lane's, that of batch 0 where there is none; marked: whether there is one; rows: how many rows
    and parity rows.
    """

    epoch: int
    marker: Marker
    marked: bool
    rows: int


def fence(store: Store, shard: int, namespace: str, lane: int, term: int, known: int = 0) -> Found:
    """Make a lane's older connections to a store shard harmless.

    known: an epoch that was set there before, which must not be used again, though a server that was emptied does not remember it. Raises
    Fenced where an owner of a higher term was there first, StoreError and StoreUnavailable as `Store.command` does.
    """
    name = epoch_key(namespace, lane)
    for _ in range(_ATTEMPTS):
        store.command(shard, "WATCH", name)
        epoch, owner = _parse(store.command(shard, "GET", name))
        if owner > term:
            store.command(shard, "UNWATCH")
            raise Fenced(f"store {store.urls[shard]}: lane {lane} has an owner of term {owner}, this one's is {term}; it stops")
        last = max(epoch, known)
        old, new = lane_key(namespace, lane, epoch), lane_key(namespace, lane, last + 1)
        there = store.command(shard, "EXISTS", old)
        store.command(shard, "MULTI")
        if there:
            store.command(shard, "RENAME", old, new)
        # The string stands where the hash was, and where an owner that knew the later epoch may still write.
        for passed in dict.fromkeys((old, lane_key(namespace, lane, last))):
            store.command(shard, "SET", passed, _FENCED)
        store.command(shard, "SET", name, b"%d %d" % (last + 1, term))
        store.command(shard, "HGET", new, MARKER)
        store.command(shard, "HLEN", new)
        answers = store.command(shard, "EXEC")
        if answers is not None:
            assert isinstance(answers, list)
            marker, fields = answers[-2:]
            return Found(last + 1, Marker.parse(marker), marker is not None, fields - (marker is not None))
        # EXEC answers nil where another fence came between: look again.
    raise StoreError(f"store {store.urls[shard]}: lane {lane} is being fenced by others all the time; is the run trained twice?")


def look_at(store: Store, shard: int, namespace: str, lanes: Sequence[int]) -> dict[int, Found]:
    """What lanes have on a store shard, by lane, for who does not fence them. Raises StoreError and StoreUnavailable as `Store.command` does."""
    epochs = [
        _parse(value)[0] for value in store.commands_at_once(shard, [("GET", epoch_key(namespace, lane)) for lane in lanes])
    ]
    keys = [lane_key(namespace, lane, epoch) for lane, epoch in zip(lanes, epochs, strict=True)]
    answers = store.commands_at_once(shard, [command for key in keys for command in (("HGET", key, MARKER), ("HLEN", key))])
    by_lane = {}
    for lane, epoch, marker, fields in zip(lanes, epochs, answers[::2], answers[1::2], strict=True):
        assert marker is None or isinstance(marker, bytes)
        assert isinstance(fields, int)
        by_lane[lane] = Found(epoch, Marker.parse(marker), marker is not None, fields - (marker is not None))
    return by_lane


def fence_all(
    store: Store, shard: int, namespace: str, lanes: Sequence[int], term: int, known: Mapping[int, int] | None = None
) -> dict[int, Found]:
    """`fence` of several lanes."""
    return {lane: fence(store, shard, namespace, lane, term, (known or {}).get(lane, 0)) for lane in lanes}
