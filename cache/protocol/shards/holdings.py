"""What runs have rows on a store shard: every namespace there, with its size and whose it is."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from foreload.cache.client.resp import MARKER, MIGRATED, plain_of_any
from foreload.cache.client.store import Store
from foreload.cache.errors import (
    CommandRefused,
    ForeignKey,
    StoreAuth,
    StoreError,
    StoreUnavailable,
)
from foreload.cache.protocol.shards.namespace import NAME, FolderId, Note, epoch_key, is_run, lane_keys, owner, parse_epoch, scan

_LANE = re.compile(rb"\{(%b):(\d+)\}:\d+" % NAME.encode())
_NOTE = re.compile(rb"(%b):run" % NAME.encode())
_SAMPLES = 200  # values of a hash that Redis looks at to estimate its size


@dataclass(frozen=True, slots=True)
class Holding:
    """What a store shard holds of a namespace.

    note: what `claim` left there, None where that is gone. lanes: that have a hash; rows: with parity rows; bytes: as the server says, None where it
    may not be asked.
    """

    namespace: str
    note: Note | None
    lanes: int
    rows: int
    bytes: int | None


@dataclass(frozen=True, slots=True)
class Claim:
    """Who owns a run's rows by what a store shard says: the highest term in which its lanes were owned, and the run's folder, if it names one."""

    term: int
    folder: FolderId | None


def claims(store: Store, namespace: str, identity: Mapping[str, Any], lanes: int) -> list[Claim]:
    """What the store shards that answer, and have rows of the run with this identity, say of its owner. Raises StoreError."""
    found = []
    for shard in store.used:
        note = None
        with contextlib.suppress(ForeignKey):
            note = None if shard in store.down else owner(store, namespace, shard)
        if note is not None and is_run(note, identity):
            stored = store.commands_at_once(shard, [plain_of_any("GET", epoch_key(namespace, lane)) for lane in range(lanes)])
            terms = [known[1] for known in map(parse_epoch, stored) if known is not None]
            found.append(Claim(max(terms, default=0), note.folder))
    return found


def all_holdings(store: Store, shard: int) -> list[Holding]:
    """What a store shard holds of every namespace, in order of their names. Goes through all keys, some at a time. Raises StoreError."""
    keys_of: dict[str, set[bytes]] = {}
    for keys in scan(store, shard):
        for key in keys:
            if lane := _LANE.fullmatch(key):
                keys_of.setdefault(lane[1].decode(), set()).add(key)
            elif note := _NOTE.fullmatch(key):
                keys_of.setdefault(note[1].decode(), set())
    held = [_holding(store, shard, namespace, keys) for namespace, keys in sorted(keys_of.items())]
    # Other programs' keys may look alike.
    return [holding for holding in held if holding.note is not None or holding.lanes]


def holding_of(store: Store, shard: int, namespace: str) -> Holding:
    """What a store shard holds of one namespace: no lanes and no rows where that is not there. Raises StoreError."""
    keys = {key for page in lane_keys(store, shard, namespace) for key in page if _LANE.fullmatch(key)}
    return _holding(store, shard, namespace, keys)


def _holding(store: Store, shard: int, namespace: str, keys: set[bytes]) -> Holding:
    ordered = sorted(keys)
    # At the epochs before, a string stands in the place of each hash.
    kinds = store.commands_at_once(shard, [("TYPE", key) for key in ordered])
    hashes = [key for key, kind in zip(ordered, kinds, strict=True) if kind == "hash"]
    marked = store.commands_at_once(shard, [("HEXISTS", key, MARKER) for key in hashes])
    hashes = [key for key, there in zip(hashes, marked, strict=True) if there]
    fields = store.commands_at_once(shard, [("HLEN", key) for key in hashes])
    moved = store.commands_at_once(shard, [("HEXISTS", key, MIGRATED) for key in hashes])
    rows = sum(int(str(count)) - 1 for count in fields) - sum(int(str(there)) for there in moved)
    try:
        sizes = store.commands_at_once(shard, [("MEMORY", "USAGE", key, "SAMPLES", _SAMPLES) for key in hashes])
        used: int | None = sum(size for size in sizes if isinstance(size, int))
    except (StoreAuth, CommandRefused):
        used = None
    try:
        note = owner(store, namespace, shard)
    except ForeignKey:
        note = None
    except StoreUnavailable:
        raise
    except StoreError:  # of another version of this program
        note = None
    return Holding(namespace, note, len(hashes), rows, used)
