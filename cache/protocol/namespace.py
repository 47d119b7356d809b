"""A namespace per run: two jobs share a store without touching each other's rows, and a run left over is never taken for a new one."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from foreload.cache.client.store import Store
from foreload.cache.errors import NamespaceInUse, RowsLost, StoreError

FORMAT = 1
NAME = "[A-Za-z0-9_.-]{1,100}"
_SCAN_KEYS = 1000
EPOCH = b":epoch"  # how the key of a lane's fence epoch ends


@dataclass(frozen=True, slots=True)
class FolderId:
    """Which folder a run's rows belong to: a copy of it has the same run id, and another inode."""

    host: str
    device: int
    inode: int
    path: str

    @classmethod
    def of(cls, path: Path) -> FolderId:
        """The folder at a path of this host. Raises OSError."""
        path = path.resolve()
        status = path.stat()
        return cls(socket.gethostname(), status.st_dev, status.st_ino, os.fspath(path))

    @classmethod
    def parse(cls, stored: object) -> FolderId | None:
        """The folder that a run's key names; None for a key of an earlier version, which names none."""
        try:
            return cls(**stored)  # type: ignore[arg-type]
        except TypeError:
            return None

    def is_same(self, other: FolderId) -> bool:
        """Whether both are one folder. `mv` within a file system changes its path alone; mounting that again may change its device alone."""
        at_one_place = self.device == other.device or self.path == other.path
        return self.host == other.host and self.inode == other.inode and at_one_place

    def __str__(self) -> str:
        return f"{self.path} on host {self.host}"


def check_name(namespace: str) -> None:
    """Raise StoreError unless the namespace is 1 to 100 letters, digits, dots, dashes and underscores."""
    if not re.fullmatch(NAME, namespace):
        raise StoreError(f"namespace: must be 1 to 100 letters, digits, '.', '-' or '_'; got {namespace!r}")


def lane_key(namespace: str, lane: int, epoch: int) -> bytes:
    """The key of a lane's hash on every store shard; the braces keep its epochs in one slot of a Redis cluster."""
    return b"{%b:%d}:%d" % (namespace.encode(), lane, epoch)


def run_key(namespace: str) -> bytes:
    """The key that says whose the namespace is."""
    return b"%b:run" % namespace.encode()


def owner(store: Store, namespace: str, shard: int) -> dict[str, Any] | None:
    """What `claim` noted on a store shard: {"format", "shard", "shards", "identity", "folder"}; None if the namespace is not there.

    folder: as `FolderId.parse` reads it; earlier versions noted none.
    """
    check_name(namespace)
    return _note(store, namespace, shard, store.command(shard, "GET", run_key(namespace)))


def _note(store: Store, namespace: str, shard: int, text: object) -> dict[str, Any] | None:
    """What stands in the value of a run's key."""
    if text is None:
        return None
    try:
        stored = json.loads(text if isinstance(text, bytes) else b"")
        if stored["format"] == FORMAT and isinstance(stored["identity"], dict):
            return dict(stored)
    except (ValueError, KeyError, TypeError):
        pass
    raise StoreError(
        f"store {store.urls[shard]}: the key {run_key(namespace).decode()} was not written by this program's version"
    )


def claim(
    store: Store,
    namespace: str,
    identity: Mapping[str, Any],
    mode: Literal["new", "resume", "overwrite"],
    spared: int = 0,
    folder: FolderId | None = None,
) -> None:
    """Make the namespace this run's, on all store shards or on none.

    identity: what must be the same for the run to go on ("run", its id, lanes, layout ...), JSON. new: refused with NamespaceInUse if a shard
    has it for another run. overwrite: what is there is removed. resume: every shard must have it, in its place, with this identity; NamespaceInUse
    if another run has it, RowsLost if more than `spared` shards have lost it or are down. folder: the run's, noted where the namespace is new.
    """
    check_name(namespace)
    if mode == "resume":
        everyone = store.used
        gone = [s for s in everyone if s in store.down or (spared > 0 and owner(store, namespace, s) is None)]
        for shard in everyone:
            if shard not in gone:
                _check_owner(store, namespace, identity, shard)
        if len(gone) > spared:
            urls = ", ".join(str(store.urls[shard].plain) for shard in gone)
            raise RowsLost(gone, spared, why=f"{urls}: no answer there, or no namespace {namespace}")
        return
    if mode == "overwrite":
        remove(store, namespace)
    claimed: list[int] = []
    for shard in store.used:
        text = _text(identity, shard, store.shards, folder)
        if store.command(shard, "SET", run_key(namespace), text, "NX") is None:
            holder = None
            with contextlib.suppress(StoreError):
                holder = owner(store, namespace, shard)
            if holder is not None and "run" in identity and holder["identity"].get("run") == identity["run"]:
                # Claimed by the same run before, which then was killed.
                store.command(shard, "SET", run_key(namespace), text)
                continue
            for earlier in claimed:
                store.command(earlier, "UNLINK", run_key(namespace))
            raise NamespaceInUse(
                f"store {store.urls[shard]}: namespace {namespace} belongs to a run already; "
                "--resume goes on with that run, --overwrite removes its rows"
            )
        claimed.append(shard)


def _text(identity: Mapping[str, Any], shard: int, shards: int, folder: FolderId | None) -> str:
    """The value of a run's key."""
    note = {"format": FORMAT, "shard": shard, "shards": shards, "identity": dict(identity)}
    if folder is not None:
        note["folder"] = asdict(folder)
    return json.dumps(note, sort_keys=True)


def name_folder(store: Store, namespace: str, identity: Mapping[str, Any], folder: FolderId) -> None:
    """Note a run's folder on all store shards that are this run's, answer, and name none or another."""
    asked = {shard: [("GET", run_key(namespace))] for shard in store.used if shard not in store.down}
    answers, _ = store.ask(asked)
    notes = {shard: _note(store, namespace, shard, text) for shard, (text,) in answers.items()}
    store.ask(
        {
            shard: [("SET", run_key(namespace), _text(identity, note["shard"], note["shards"], folder))]
            for shard, note in notes.items()
            if note is not None and is_run(note, identity) and FolderId.parse(note.get("folder")) != folder
        }
    )


def join(store: Store, namespace: str, identity: Mapping[str, Any], shard: int, shards: int) -> bool:
    """Note on the one server of a Store that it is shard `shard` of a run's `shards`, unless it has a namespace of this name already.

    Returns whether it is noted as that shard of that run then. The next call notes the run's folder there.
    """
    store.command(0, "SET", run_key(namespace), _text(identity, shard, shards, None), "NX")
    # How many shards there are may be another number by now than when it was noted.
    return is_of(store, namespace, identity, shard, 0)


def is_of(store: Store, namespace: str, identity: Mapping[str, Any], shard: int, at: int | None = None) -> bool:
    """Whether the store's shard (its number `at` of the Store, the same by default) is shard `shard` of the run with this identity."""
    note = owner(store, namespace, shard if at is None else at)
    return note is not None and is_run(note, identity) and note["shard"] == shard


def are_of(store: Store, namespace: str, identity: Mapping[str, Any]) -> dict[int, bool]:
    """`is_of`, asked of all store shards at once; those that do not answer are left out. Raises StoreError for a note that is none."""
    answers, _ = store.ask({shard: [("GET", run_key(namespace))] for shard in store.used})
    notes = {shard: _note(store, namespace, shard, text) for shard, (text,) in answers.items()}
    return {shard: note is not None and is_run(note, identity) and note["shard"] == shard for shard, note in notes.items()}


def is_run(note: Mapping[str, Any], identity: Mapping[str, Any]) -> bool:
    """Whether a note of `owner` is of the run with this identity."""
    return bool(note["identity"] == json.loads(json.dumps(dict(identity))))


def _check_owner(store: Store, namespace: str, identity: Mapping[str, Any], shard: int) -> None:
    note = owner(store, namespace, shard)
    url = store.urls[shard]
    if note is None:
        raise StoreError(
            f"store {url}: has no namespace {namespace}, so its rows are lost or it is another server; check --store"
        )
    if note["shard"] != shard or note["shards"] > store.shards:
        raise StoreError(
            f"store {url}: is shard {note['shard']} of {note['shards']} of namespace {namespace}, not {shard} of {store.shards}; "
            "give --store the same servers in the same order as before"
        )
    wanted = json.loads(json.dumps(dict(identity)))
    different = sorted(name for name in wanted.keys() | note["identity"].keys() if wanted.get(name) != note["identity"].get(name))
    if different:
        name = different[0]
        raise NamespaceInUse(
            f"store {url}: namespace {namespace} is another run's: {name} there is {note['identity'].get(name)!r}, here "
            f"{wanted.get(name)!r}; --overwrite removes its rows"
        )


def lane_keys(store: Store, shard: int, namespace: str) -> Iterator[list[bytes]]:
    """The keys of a namespace's lanes on a store shard, some at a time: hashes, strings in the place of those of epochs before, fence epochs."""
    check_name(namespace)
    # The pattern finds at least these; the expression decides.
    pattern = b"{%b:*}:*" % re.sub(rb"([\[\]?*\\])", rb"\\\1", namespace.encode())
    of_a_lane = re.compile(rb"\{%b:\d+\}:.*" % re.escape(namespace.encode()))
    for keys in scan(store, shard, pattern):
        yield [key for key in keys if of_a_lane.fullmatch(key)]


def scan(store: Store, shard: int, pattern: bytes = b"*") -> Iterator[list[bytes]]:
    """The keys of a store shard that match a pattern, some at a time; one may come twice."""
    cursor = b"0"
    while True:
        page = store.command(shard, "SCAN", cursor, "MATCH", pattern, "COUNT", _SCAN_KEYS)
        assert isinstance(page, list)
        cursor, keys = page
        yield keys
        if cursor == b"0":
            return


def remove(store: Store, namespace: str) -> int:
    """Remove a namespace from all store shards; returns how many keys of lanes there were. Others' keys are not touched."""
    check_name(namespace)
    removed = 0
    for shard in store.used:
        for keys in lane_keys(store, shard, namespace):
            # A fence epoch stays: a stopped owner of an earlier run may still write under its own, which must never be used again. The term
            # of who set it goes: it is the earlier run's.
            for key in (key for key in keys if key.endswith(EPOCH)):
                epoch = store.command(shard, "GET", key)
                assert isinstance(epoch, bytes)
                store.command(shard, "SET", key, epoch.partition(b" ")[0] + b" 0")
            keys = [key for key in keys if not key.endswith(EPOCH)]
            # UNLINK frees in the background; DEL would block the server for everyone.
            store.commands_at_once(shard, [("UNLINK", key) for key in keys])
            removed += len(keys)
        # Last: while lanes are left, the namespace is still taken.
        store.command(shard, "UNLINK", run_key(namespace))
    return removed
