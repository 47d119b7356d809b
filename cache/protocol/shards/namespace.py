"""A run's namespace on each store shard.

A run claims a namespace by a note on every shard. This module also lists the namespaces on a shard
and checks a server that is to replace one.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from foreload.base.codec import Count, FormError, Natural, of_json, parse_json, to_json
from foreload.cache.client.resp import MARKER, MIGRATED, WRONG_TYPE, Request, plain_of_any
from foreload.cache.client.store import Store
from foreload.cache.client.url import PASSWORD_VARIABLE, StoreUrl, parse_url
from foreload.cache.errors import (
    CommandRefused,
    ForeignKey,
    NamespaceInUse,
    RowsLost,
    StoreAuth,
    StoreError,
    StoreUnavailable,
)

FORMAT = 1
NAME = "[A-Za-z0-9_.-]{1,100}"
_SCAN_KEYS = 1000
# The suffix of the key that holds a lane's fence epoch.
EPOCH = b":epoch"
_EPOCH_KEY = re.compile(rb"\{.+:(\d+)\}%b" % EPOCH)
_NUMBER = re.compile(rb"\d{1,18}")
_EPOCH_AND_TERM = re.compile(rb"(\d{1,18}) (\d{1,18})")


@dataclass(frozen=True, slots=True)
class FolderId:
    """The folder that a run's rows belong to.

    A copy of the folder has the same run id but another inode.
    """

    host: str
    device: int
    inode: int
    path: str

    @classmethod
    def of(cls, path: Path) -> FolderId:
        """Identify the folder at a path on this host. Raises OSError."""
        path = path.resolve()
        status = path.stat()
        return cls(socket.gethostname(), status.st_dev, status.st_ino, os.fspath(path))

    def is_same(self, other: FolderId) -> bool:
        """Return whether both identify the same folder.

        `mv` within a file system changes only the path. Mounting the file system again may change
        only the device.
        """
        at_one_place = self.device == other.device or self.path == other.path
        return self.host == other.host and self.inode == other.inode and at_one_place

    def __str__(self) -> str:
        return f"{self.path} on host {self.host}"


@dataclass(frozen=True, slots=True)
class Note:
    """The value of a run's key, as JSON. Earlier versions wrote no folder."""

    format: int
    shard: Count
    shards: Natural
    identity: dict[str, Any]
    folder: FolderId | None = None


def check_name(namespace: str) -> None:
    """Raise StoreError unless the namespace is valid: 1 to 100 letters, digits, '.', '-' or '_'."""
    if not re.fullmatch(NAME, namespace):
        raise StoreError(f"namespace: must be 1 to 100 letters, digits, '.', '-' or '_'; got {namespace!r}")


def lane_key(namespace: str, lane: int, epoch: int) -> bytes:
    """Return the key of a lane's hash, the same on every store shard.

    The braces are a Redis hash tag: they keep a lane's keys in one slot of a Redis cluster.
    """
    return b"{%b:%d}:%d" % (namespace.encode(), lane, epoch)


def run_key(namespace: str) -> bytes:
    """Return the key of the note that says which run the namespace belongs to."""
    return b"%b:run" % namespace.encode()


def epoch_key(namespace: str, lane: int) -> bytes:
    """Return the key that holds a lane's fence epoch and the term of the owner that set it.

    The value is "e t". In a Redis cluster the key is in the same slot as the lane's hashes.
    """
    return b"{%b:%d}%b" % (namespace.encode(), lane, EPOCH)


def parse_epoch(stored: object) -> tuple[int, int] | None:
    """Parse the value of an epoch key into fence epoch and term.

    Returns (0, 0) if the key does not exist, and None if another program wrote the value.
    """
    if stored is None:
        return 0, 0
    matched = _EPOCH_AND_TERM.fullmatch(stored) if isinstance(stored, bytes) else None
    return None if matched is None else (int(matched[1]), int(matched[2]))


def highest_epoch(store: Store, shard: int, namespace: str, lane: int) -> int:
    """Return the highest fence epoch for which a store shard has a key of the lane, or 0.

    Scans all keys of the server.
    """
    head = epoch_key(namespace, lane).removesuffix(EPOCH) + b":"
    numbers = (key.removeprefix(head) for keys in lane_keys(store, shard, namespace) for key in keys if key.startswith(head))
    return max((int(number) for number in numbers if _NUMBER.fullmatch(number)), default=0)


def owner(store: Store, namespace: str, shard: int) -> Note | None:
    """Return the note of `claim` on a store shard, or None if the namespace does not exist there.

    Raises:
        ForeignKey: Another program wrote the key.
        StoreError: Another version of this program wrote it, or the shard cannot be read.
    """
    check_name(namespace)
    return _note(store, namespace, shard, store.commands_at_once(shard, [_read_note(namespace)])[0])


def foreign_note(store: Store, shard: int, namespace: str) -> ForeignKey | None:
    """Return why a store shard is lost if another program wrote the run's key there, else None."""
    try:
        owner(store, namespace, shard)
    except ForeignKey as error:
        return error
    return None


def _read_note(namespace: str) -> Request:
    return plain_of_any("GET", run_key(namespace))


def _note(store: Store, namespace: str, shard: int, text: object) -> Note | None:
    """Parse the value of a run's key. Raises as `owner` does."""
    if text is None:
        return None
    key, what = f"store {store.urls[shard]}: the key {run_key(namespace).decode()}", "is of another type"
    if text is not WRONG_TYPE:
        what = "has other content"
        with contextlib.suppress(FormError):
            stored = parse_json(text if isinstance(text, bytes) else b"")
            version = stored.get("format") if isinstance(stored, dict) else None
            if isinstance(version, int) and version != FORMAT:
                raise StoreError(f"{key} was written by another version of this program (format {version}, must be {FORMAT})")
            return of_json(stored, Note)
    raise ForeignKey(f"{key} must be the note of a run, but {what}: another program wrote it")


def claim(
    store: Store,
    namespace: str,
    identity: Mapping[str, Any],
    mode: Literal["new", "resume", "overwrite"],
    spared: int = 0,
    folder: FolderId | None = None,
) -> None:
    """Claim the namespace for a run, on all store shards or on none.

    Args:
        identity: What must not change between sessions of the run ("run", its id, lanes, layout
            ...), as JSON values.
        mode: "new" refuses a namespace that another run has on any shard. "overwrite" removes the
            existing namespace first. "resume" requires that every shard has the namespace, with
            this identity, under the same shard number.
        spared: For "resume", the number of shards that may be down or without the namespace.
        folder: The run's folder. It is recorded only where the namespace is new.

    Raises:
        NamespaceInUse: The namespace belongs to another run.
        RowsLost: More than `spared` shards are down or have lost the namespace.
        StoreError: A shard is another server than before, or fails.
    """
    check_name(namespace)
    if mode == "resume":
        _claim_again(store, namespace, identity, spared, folder)
        return
    if mode == "overwrite":
        remove(store, namespace)
    claimed: list[int] = []
    for shard in store.used:
        text = _text(identity, shard, store.shards, folder)
        if store.command(shard, "SET", run_key(namespace), text, "NX") is None:
            holder, whose = None, "already belongs to a run; --resume continues that run, --overwrite removes its rows"
            try:
                holder = owner(store, namespace, shard)
            except ForeignKey:
                name = run_key(namespace).decode()
                whose = f"is in use: another program wrote the key {name}; give another --namespace, or replace that key with --overwrite"
            except StoreError:
                pass
            if holder is not None and "run" in identity and holder.identity.get("run") == identity["run"]:
                # This run claimed the shard in an earlier attempt, which was killed.
                store.command(shard, "SET", run_key(namespace), text)
                continue
            # All or none: release the shards claimed so far.
            for earlier in claimed:
                store.command(earlier, "UNLINK", run_key(namespace))
            raise NamespaceInUse(f"store {store.urls[shard]}: namespace {namespace} {whose}")
        claimed.append(shard)


def _claim_again(store: Store, namespace: str, identity: Mapping[str, Any], spared: int, folder: FolderId | None) -> None:
    """Check the claim of a run that resumes.

    Gives up the shards where another program wrote the run's key.
    """
    # The lost shards. The value is set where another program wrote the run's note.
    gone: dict[int, ForeignKey | None] = {}
    for shard in store.used:
        try:
            if shard in store.down or ((note := owner(store, namespace, shard)) is None and spared > 0):
                gone[shard] = None
            else:
                _check_owner(store, namespace, identity, shard, note, spared)
        except ForeignKey as error:
            text = _text(identity, shard, store.shards, folder)
            gone[shard] = ForeignKey(
                f"{error}; if the run's rows are on that server, restore the note in its redis-cli: "
                f"SET {run_key(namespace).decode()} '{text}'"
            )
    for shard, why in gone.items():
        if why is not None and len(gone) > spared:
            raise why
        if why is not None:
            store.give_up(shard, why)
    if len(gone) > spared:
        urls = ", ".join(str(store.urls[shard].plain) for shard in gone)
        raise RowsLost([*gone], spared, why=f"{urls}: no answer, or no namespace {namespace}")


def _text(identity: Mapping[str, Any], shard: int, shards: int, folder: FolderId | None) -> str:
    """Return the value of a run's key on a store shard."""
    return json.dumps(to_json(Note(FORMAT, shard, shards, dict(identity), folder)), sort_keys=True)


def name_folder(store: Store, namespace: str, identity: Mapping[str, Any], folder: FolderId) -> None:
    """Record a run's folder on every store shard that answers and belongs to the run.

    Shards that already name this folder are left alone.
    """
    notes, _ = _notes(store, namespace)
    store.ask(
        {
            shard: [("SET", run_key(namespace), _text(identity, note.shard, note.shards, folder))]
            for shard, note in notes.items()
            if note is not None and is_run(note, identity) and note.folder != folder
        }
    )


def _notes(store: Store, namespace: str) -> tuple[dict[int, Note | None], dict[int, ForeignKey]]:
    """Read the notes of all store shards at once, as `owner` does for one.

    Returns:
        The notes of the shards that answer, and the errors of those where another program wrote the
        key.
    """
    answers, _ = store.ask({shard: [_read_note(namespace)] for shard in store.used})
    notes: dict[int, Note | None] = {}
    foreign: dict[int, ForeignKey] = {}
    for shard, (text,) in answers.items():
        try:
            notes[shard] = _note(store, namespace, shard, text)
        except ForeignKey as error:
            foreign[shard] = error
    return notes, foreign


def join(store: Store, namespace: str, identity: Mapping[str, Any], shard: int, shards: int) -> bool:
    """Claim a single server as shard `shard` of a run, unless the namespace exists there.

    The caller is about to empty the server of the lanes, so the note may replace a key that another
    program wrote. No folder is recorded; the next command that opens the run records it.

    Args:
        store: A Store of that one server.
        shards: The number of the run's shards.

    Returns:
        Whether the server is now noted as that shard of that run.
    """
    set_note = ("SET", run_key(namespace), _text(identity, shard, shards, None))
    store.command(0, *set_note, "NX")
    try:
        # The shard's note may give another number of shards, since that can change after the note
        # was written.
        return is_of(store, namespace, identity, shard, 0)
    except ForeignKey:
        store.command(0, *set_note)
        return is_of(store, namespace, identity, shard, 0)


def is_of(store: Store, namespace: str, identity: Mapping[str, Any], shard: int, at: int | None = None) -> bool:
    """Return whether a shard of the Store is noted as shard `shard` of the run with this identity.

    Args:
        at: The number of the shard in the Store. If None, it is `shard`.
    """
    note = owner(store, namespace, shard if at is None else at)
    return note is not None and is_run(note, identity) and note.shard == shard


def are_of(store: Store, namespace: str, identity: Mapping[str, Any]) -> dict[int, bool]:
    """Ask `is_of` of all store shards at once.

    Shards that do not answer are left out of the result. Shards where another program wrote the key
    are given up.
    """
    notes, foreign = _notes(store, namespace)
    for shard, error in foreign.items():
        store.give_up(shard, error)
    return {shard: note is not None and is_run(note, identity) and note.shard == shard for shard, note in notes.items()}


def is_run(note: Note, identity: Mapping[str, Any]) -> bool:
    """Return whether a note belongs to the run with this identity."""
    # The identity takes the same way through JSON as the note, so that tuples compare equal to
    # lists.
    return bool(note.identity == json.loads(json.dumps(dict(identity))))


def _check_owner(store: Store, namespace: str, identity: Mapping[str, Any], shard: int, note: Note | None, spared: int) -> None:
    url = store.urls[shard]
    if note is None:
        raise StoreError(
            f"store {url}: has no namespace {namespace}, so its rows are lost or it is another server; check --store"
        )
    if note.shard != shard or note.shards > store.shards:
        raise StoreError(
            f"store {url}: is shard {note.shard} of {note.shards} of namespace {namespace}, not {shard} of {store.shards}; "
            "give --store the same servers in the same order as before"
        )
    wanted = json.loads(json.dumps(dict(identity)))
    different = sorted(name for name in wanted.keys() | note.identity.keys() if wanted.get(name) != note.identity.get(name))
    if different:
        name = different[0]
        instead = "give another server in its place (--resume --store URL,...), or " if spared else ""
        raise NamespaceInUse(
            f"store {url}: namespace {namespace} belongs to another run: {name} there is {note.identity.get(name)!r}, here "
            f"{wanted.get(name)!r}; {instead}remove its rows with --overwrite"
        )


def lane_keys(store: Store, shard: int, namespace: str) -> Iterator[list[bytes]]:
    """Yield the keys of a namespace's lanes on a store shard, page by page.

    They are hashes, the strings that fences left in the place of earlier hashes, and fence epochs.
    """
    check_name(namespace)
    # The SCAN pattern may match more keys than these. The regular expression decides.
    pattern = b"{%b:*}:*" % re.sub(rb"([\[\]?*\\])", rb"\\\1", namespace.encode())
    of_a_lane = re.compile(rb"\{%b:\d+\}:.*" % re.escape(namespace.encode()))
    for keys in scan(store, shard, pattern):
        yield [key for key in keys if of_a_lane.fullmatch(key)]


def scan(store: Store, shard: int, pattern: bytes = b"*") -> Iterator[list[bytes]]:
    """Yield the keys of a store shard that match a pattern, page by page. A key may come twice."""
    cursor = b"0"
    while True:
        page = store.command(shard, "SCAN", cursor, "MATCH", pattern, "COUNT", _SCAN_KEYS)
        assert isinstance(page, list)
        cursor, keys = page
        yield keys
        if cursor == b"0":
            return


def remove(store: Store, namespace: str) -> int:
    """Remove a namespace from all store shards, and leave other keys alone.

    Returns:
        The number of keys of lanes that were removed. Fence epochs stay and do not count.
    """
    check_name(namespace)
    removed = 0
    for shard in store.used:
        keys = {key for page in lane_keys(store, shard, namespace) for key in page}
        # The fence epoch stays. A stopped owner of an earlier run may still write under its own
        # epoch, so that epoch must never be used again. Its term is reset, because it belongs to
        # the earlier run.
        for key, matched in ((key, _EPOCH_KEY.fullmatch(key)) for key in keys.copy()):
            if matched is not None:
                keys.discard(key)
                (stored,) = store.commands_at_once(shard, [plain_of_any("GET", key)])
                epoch, _ = parse_epoch(stored) or (highest_epoch(store, shard, namespace, int(matched[1])), 0)
                store.command(shard, "SET", key, b"%d 0" % epoch)
        # UNLINK frees memory in the background. DEL would block the server for all clients.
        store.commands_at_once(shard, [("UNLINK", key) for key in keys])
        removed += len(keys)
        # The note goes last. Until then the namespace counts as taken.
        store.command(shard, "UNLINK", run_key(namespace))
    return removed


_LANE = re.compile(rb"\{(%b):(\d+)\}:\d+" % NAME.encode())
_NOTE = re.compile(rb"(%b):run" % NAME.encode())
# The number of a hash's values that Redis samples to estimate its size.
_SAMPLES = 200


@dataclass(frozen=True, slots=True)
class Holding:
    """What a store shard holds of a namespace.

    Attributes:
        note: The note that `claim` left, or None if it was lost.
        lanes: The number of lanes that have a hash.
        rows: The number of rows and parity rows.
        bytes: The memory they take by the server's estimate, or None if the server does not allow
            asking.
    """

    namespace: str
    note: Note | None
    lanes: int
    rows: int
    bytes: int | None


@dataclass(frozen=True, slots=True)
class Claim:
    """The owner of a run's rows, as one store shard records it.

    Attributes:
        term: The latest term in which one of the lanes had an owner.
        folder: The run's folder, or None if the shard names none.
    """

    term: int
    folder: FolderId | None


def claims(store: Store, namespace: str, identity: Mapping[str, Any], lanes: int) -> list[Claim]:
    """Return what the store shards record about a run's owner.

    Only shards that answer and have rows of the run with this identity are in the result. Raises
    StoreError.
    """
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
    """Return what a store shard holds of every namespace, in order of their names.

    Scans all keys, page by page. Raises StoreError.
    """
    keys_of: dict[str, set[bytes]] = {}
    for keys in scan(store, shard):
        for key in keys:
            if lane := _LANE.fullmatch(key):
                keys_of.setdefault(lane[1].decode(), set()).add(key)
            elif note := _NOTE.fullmatch(key):
                keys_of.setdefault(note[1].decode(), set())
    held = [_holding(store, shard, namespace, keys) for namespace, keys in sorted(keys_of.items())]
    # Keys of other programs may look like keys of lanes. Such a namespace has neither note nor
    # lanes.
    return [holding for holding in held if holding.note is not None or holding.lanes]


def holding_of(store: Store, shard: int, namespace: str) -> Holding:
    """Return what a store shard holds of one namespace. Raises StoreError.

    If the namespace does not exist there, the result has no lanes and no rows.
    """
    keys = {key for page in lane_keys(store, shard, namespace) for key in page if _LANE.fullmatch(key)}
    return _holding(store, shard, namespace, keys)


def memory_of(store: Store, shard: int, keys: Sequence[bytes]) -> int | None:
    """Return the bytes that keys take on a store shard. None if the user may not ask for it.

    Raises StoreError.
    """
    try:
        sizes = store.commands_at_once(shard, [("MEMORY", "USAGE", key, "SAMPLES", _SAMPLES) for key in keys])
    except (StoreAuth, CommandRefused):
        return None
    return sum(size for size in sizes if isinstance(size, int))


def _holding(store: Store, shard: int, namespace: str, keys: set[bytes]) -> Holding:
    ordered = sorted(keys)
    # Fences left a string in the place of the hash at each earlier epoch.
    kinds = store.commands_at_once(shard, [("TYPE", key) for key in ordered])
    hashes = [key for key, kind in zip(ordered, kinds, strict=True) if kind == "hash"]
    marked = store.commands_at_once(shard, [("HEXISTS", key, MARKER) for key in hashes])
    hashes = [key for key, there in zip(hashes, marked, strict=True) if there]
    fields = store.commands_at_once(shard, [("HLEN", key) for key in hashes])
    moved = store.commands_at_once(shard, [("HEXISTS", key, MIGRATED) for key in hashes])
    # The marker and the migration record are fields, but not rows.
    rows = sum(int(str(count)) - 1 for count in fields) - sum(int(str(there)) for there in moved)
    used = memory_of(store, shard, hashes)
    try:
        note = owner(store, namespace, shard)
    except ForeignKey:
        note = None
    except StoreUnavailable:
        raise
    except StoreError:
        # Another version of this program wrote the note.
        note = None
    return Holding(namespace, note, len(hashes), rows, used)


_CONNECT = timedelta(seconds=1)
# No hash of a lane ever has this epoch.
_PROBE_EPOCH = -1
# A probe expires after this time, even if its writer died.
_PROBE_MILLISECONDS = 1000


def check_spare(
    url: StoreUrl,
    in_use: Iterable[tuple[int, StoreUrl]],
    namespace: str,
    lanes: int,
    timeout: timedelta,
    identity: Mapping[str, Any] | None = None,
) -> None:
    """Raise StoreError unless a server can replace a store shard.

    The server must not be in use by this run, must answer and take writes, and must not hold
    another run's namespace of this name. Rows of other namespaces do no harm. The check uses the
    password of the environment, as trainers will.

    Args:
        in_use: The run's servers, with the numbers of their shards.
        lanes: The number of the run's lanes.
        timeout: How long the server may be silent.
        identity: The identity of this run, whose namespace may exist on the server. If None, the
            namespace must not exist there.
    """
    url = parse_url(url.plain)
    for shard, used in in_use:
        if used.place == url.place:
            raise StoreError(f"store {url}: is already the server of store shard {shard}; give another one")
    try:
        reached = Store([url], timeout, _CONNECT)
    except StoreAuth as error:
        raise StoreAuth(f"{error}; this command uses only the one in {PASSWORD_VARIABLE}, like the trainers") from error
    with reached as store:
        note = owner(store, namespace, 0)
        if note is not None and (identity is None or not is_run(note, identity)):
            raise NamespaceInUse(
                f"store {url}: namespace {namespace} belongs to a run there; name another server, or remove its rows first"
            )
        for lane in range(lanes):
            # The probe's key is in the same cluster slot as the lane's hash will be.
            probe = lane_key(namespace, lane, _PROBE_EPOCH)
            store.command(0, "SET", probe, "", "PX", _PROBE_MILLISECONDS)
            store.command(0, "UNLINK", probe)
