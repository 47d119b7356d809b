"""Fencing: a new owner, and an owner with a new connection, first makes every older connection harmless at the server.

A lane's hash on a store shard is {namespace:lane}:e, e being the fence epoch there. A new connection renames it to e + 1 and leaves a string at
e, in one transaction: what an older connection still sends, or has in a stopped server's buffer, is then answered with WRONGTYPE. (CLIENT
KILL is no fence: a client that reconnects writes again.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from foreload.cache.client.resp import MARKER, MIGRATED
from foreload.cache.client.store import Store
from foreload.cache.errors import Fenced, StoreError
from foreload.cache.protocol.marker import Marker
from foreload.cache.protocol.migrated import Migrated
from foreload.cache.protocol.namespace import EPOCH, lane_key

_ATTEMPTS = 10
_EPOCHS = 1 << 20  # of a term, more than its owners will ever need
_FENCED = b"fenced"


def epoch_key(namespace: str, lane: int) -> bytes:
    """The key of a lane's fence epoch and of the term of who set it, "e t"; it is in the same slot of a cluster as the lane's hashes."""
    return b"{%b:%d}%b" % (namespace.encode(), lane, EPOCH)


def parse_epoch(stored: object) -> tuple[int, int]:
    """The fence epoch and the term of an epoch key's value; 0, 0 where there is none."""
    if stored is None:
        return 0, 0
    assert isinstance(stored, bytes)
    epoch, _, term = stored.partition(b" ")
    return int(epoch), int(term)


def read_epochs(store: Store, shard: int, namespace: str, lanes: int) -> np.ndarray:
    """The fence epochs of lanes 0 .. lanes - 1 on a store shard: int64 [lanes], 0 where none was ever fenced."""
    return np.array(_epochs(store, shard, namespace, range(lanes)), np.int64)


def _epochs(store: Store, shard: int, namespace: str, lanes: Sequence[int]) -> list[int]:
    stored = store.commands_at_once(shard, [("GET", epoch_key(namespace, lane)) for lane in lanes])
    return [parse_epoch(value)[0] for value in stored]


@dataclass(frozen=True, slots=True)
class Found:
    """What a fence found of a lane on a store shard, or `look_at` without one.

    epoch: the fence epoch from now on; marker: the lane's, that of batch 0 where there is none; marked: whether there is one; rows: how many rows
    and parity rows. migrated: the last chunk of a move there, None where there was none.
    """

    epoch: int
    marker: Marker
    marked: bool
    rows: int
    migrated: Migrated | None = None

    @classmethod
    def of(cls, epoch: int, answers: Sequence[object]) -> Found:
        """From the answers to `_looks`."""
        marker, stored, fields = answers
        assert marker is None or isinstance(marker, bytes)
        assert stored is None or isinstance(stored, bytes)
        assert isinstance(fields, int)
        others = (marker is not None) + (stored is not None)
        return cls(epoch, Marker.parse(marker), marker is not None, fields - others, Migrated.parse(stored))


def _looks(key: bytes) -> list[tuple[bytes | str, ...]]:
    """The commands that look at a lane's hash."""
    return [("HGET", key, MARKER), ("HGET", key, MIGRATED), ("HLEN", key)]


def fence(store: Store, shard: int, namespace: str, lane: int, term: int, known: int = 0) -> Found:
    """Make a lane's older connections to a store shard harmless.

    known: an epoch that was set there before, which must not be used again, though a server that was emptied does not remember it. Raises
    Fenced where an owner of a higher term was there first, StoreError and StoreUnavailable as `Store.command` does.
    """
    found, failures = fence_everywhere(store, [shard], namespace, lane, term, {shard: known})
    if failures:
        raise failures[shard]
    return found[shard]


def fence_everywhere(
    store: Store, shards: Sequence[int], namespace: str, lane: int, term: int, known: Mapping[int, int]
) -> tuple[dict[int, Found], dict[int, StoreError]]:
    """`fence` on several shards at once: what was found by shard, and why there is nothing of the others. known: by shard. Raises Fenced."""
    name = epoch_key(namespace, lane)
    found: dict[int, Found] = {}
    failures: dict[int, StoreError] = {}
    left = list(shards)
    for _ in range(_ATTEMPTS):
        stored, failed = store.ask({shard: [("WATCH", name), ("GET", name)] for shard in left})
        failures |= failed
        epochs = {}
        for shard, (_, value) in stored.items():
            epochs[shard], owner = parse_epoch(value)
            if owner > term:
                raise Fenced(
                    f"store {store.urls[shard]}: lane {lane} has an owner of term {owner}, this one's is {term}; it stops"
                )
        old = {shard: lane_key(namespace, lane, epoch) for shard, epoch in epochs.items()}
        # Sent before the commands that it holds together: a server that is not ready for it would do them one by one.
        begun, failed = store.ask({shard: [("EXISTS", old[shard]), ("MULTI",)] for shard in epochs})
        failures |= failed
        # No owner of an earlier term can have come to such an epoch, also where a server that was emptied does not remember any.
        last = {shard: max(epochs[shard], known.get(shard, 0), term * _EPOCHS) for shard in begun}
        queued: dict[int, list[tuple[bytes | str, ...]]] = {}
        for shard, (there, _) in begun.items():
            new = lane_key(namespace, lane, last[shard] + 1)
            rename: list[tuple[bytes | str, ...]] = [("RENAME", old[shard], new)] if there else []
            # The string stands where the hash was, and where an owner that knew the later epoch may still write.
            passed = dict.fromkeys((old[shard], lane_key(namespace, lane, known.get(shard, epochs[shard]))))
            closed: list[tuple[bytes | str, ...]] = [("SET", key, _FENCED) for key in passed]
            looked: list[tuple[bytes | str, ...]] = [*_looks(new), ("EXEC",)]
            queued[shard] = [*rename, *closed, ("SET", name, b"%d %d" % (last[shard] + 1, term)), *looked]
        done, failed = store.ask(queued)
        failures |= failed
        for shard, answers in done.items():
            if answers[-1] is None:
                continue  # another fence came between: look again
            assert isinstance(answers[-1], list)
            found[shard] = Found.of(last[shard] + 1, answers[-1][-3:])
        left = [shard for shard in left if shard not in found and shard not in failures]
        if not left:
            return found, failures
    raise StoreError(
        f"store {store.urls[left[0]]}: lane {lane} is being fenced by others all the time; is the run trained twice?"
    )


def look_at(store: Store, shard: int, namespace: str, lanes: Sequence[int]) -> dict[int, Found]:
    """What lanes have on a store shard, by lane, for who does not fence them. Raises StoreError and StoreUnavailable as `Store.command` does."""
    epochs = _epochs(store, shard, namespace, lanes)
    keys = [lane_key(namespace, lane, epoch) for lane, epoch in zip(lanes, epochs, strict=True)]
    answers = store.commands_at_once(shard, [command for key in keys for command in _looks(key)])
    three = zip(answers[::3], answers[1::3], answers[2::3], strict=True)
    return {lane: Found.of(epoch, found) for lane, epoch, found in zip(lanes, epochs, three, strict=True)}


def fence_all(
    store: Store, shard: int, namespace: str, lanes: Sequence[int], term: int, known: Mapping[int, int] | None = None
) -> dict[int, Found]:
    """`fence` of several lanes."""
    return {lane: fence(store, shard, namespace, lane, term, (known or {}).get(lane, 0)) for lane in lanes}
