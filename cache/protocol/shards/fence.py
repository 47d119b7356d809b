"""Fencing: a new owner, and an owner with a new connection, first makes every older connection harmless at the server.

A lane's hash on a store shard is {namespace:lane}:e, e being the fence epoch there. A new connection renames it to e + 1 and leaves a string at
e, in one transaction: what an older connection still sends, or has in a stopped server's buffer, is then answered with WRONGTYPE. (CLIENT
KILL is no fence: a client that reconnects writes again.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from foreload.cache.client.resp import MARKER, MIGRATED, WRONG_TYPE, plain_of_any
from foreload.cache.client.store import Store
from foreload.cache.client.url import StoreUrl
from foreload.cache.errors import Fenced, ForeignKey, StoreError
from foreload.cache.protocol.shards.marker import Marker, Migrated
from foreload.cache.protocol.shards.namespace import epoch_key, highest_epoch, lane_key, parse_epoch

_ATTEMPTS = 10
_EPOCHS = 1 << 20  # of a term, more than its owners will ever need
_FENCED = b"fenced"
_LOOK = timedelta(milliseconds=200)  # for a server to say why it refuses


def read_epochs(store: Store, shard: int, namespace: str, lanes: Sequence[int]) -> list[int | None]:
    """The fence epoch of each lane on a store shard: 0 where it was never fenced, None where another program wrote the key."""
    stored = store.commands_at_once(shard, [plain_of_any("GET", epoch_key(namespace, lane)) for lane in lanes])
    known = map(parse_epoch, stored)
    return [None if one is None else one[0] for one in known]


@dataclass(frozen=True, slots=True)
class Found:
    """What a fence found of a lane on a store shard, or `look_at` without one.

    epoch: the fence epoch from now on; marker: the lane's, that of batch 0 where there is none; marked: whether there is one; rows: how many rows
    and parity rows. migrated: the last chunk of a move there, None where there was none. foreign: of `look_at`, why the shard is lost if another
    program wrote the lane's hash or epoch key; then there is no marker and no row. A fence fails there.
    """

    epoch: int
    marker: Marker
    marked: bool
    rows: int
    migrated: Migrated | None = None
    foreign: ForeignKey | None = None

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


def _closes(old: bytes, known: bytes, new: bytes | None) -> list[tuple[bytes | str, ...]]:
    """The commands that leave a string where a lane's hash was, and where an owner that knew a later epoch may still write. new: for the hash."""
    rename: list[tuple[bytes | str, ...]] = [] if new is None else [("RENAME", old, new)]
    return [*rename, *(("SET", key, _FENCED) for key in dict.fromkeys((old, known)))]


def foreign_key(found: Mapping[int, Found]) -> ForeignKey | None:
    """Return why a store shard is lost on which another program wrote a key of a lane, or None if none is. found: by lane."""
    return next((there.foreign for there in found.values() if there.foreign is not None), None)


def _foreign(store: Store, shard: int, key: bytes, lane: int) -> ForeignKey:
    return ForeignKey(
        f"store {store.urls[shard]}: the key {key.decode()} is not the hash of lane {lane}'s rows, but of another type, so another program wrote it; "
        "the rows of this shard are lost"
    )


def _foreign_epoch(store: Store, shard: int, namespace: str, lane: int) -> ForeignKey:
    key = epoch_key(namespace, lane).decode()
    return ForeignKey(
        f"store {store.urls[shard]}: the key {key} is not the fence epoch and term of lane {lane}, so another program wrote it; the rows of "
        f"this shard cannot be found; to have them again, write it again, in the server's redis-cli: "
        f"SET {key} '{highest_epoch(store, shard, namespace, lane)} 0'"
    )


def judge_wrong_type(url: StoreUrl, namespace: str, epochs: Mapping[int, int], refusal: StoreError) -> StoreError:
    """Why a server answers an owner of lanes that a key is of another type: returns ForeignKey where that is another program's.

    epochs: of the lanes on this server, as their owner knows them. Returns `refusal`, Fenced, where another owner has fenced any of them.
    """
    try:
        with Store([url], _LOOK, _LOOK) as store:
            found = look_at(store, 0, namespace, list(epochs))
            fenced = any(there.epoch > epochs[lane] for lane, there in found.items())
            return refusal if fenced else foreign_key(found) or refusal
    except StoreError as error:
        return error


def fence_everywhere(
    store: Store, shards: Sequence[int], namespace: str, lane: int, term: int, known: Mapping[int, int], empty: bool = False
) -> tuple[dict[int, Found], dict[int, StoreError]]:
    """Make a lane's older connections to store shards harmless, on all at once. Returns what was found by shard, and why there is nothing of others.

    known: by shard, 0 or an epoch that was set there before, which must not be used again, though a server that was emptied does not remember it.
    empty: the shards are to be emptied of the lane, so another program's key is replaced; else it stays, and the shard fails with ForeignKey.
    Raises Fenced where an owner of a higher term was there first, and StoreError.
    """
    name = epoch_key(namespace, lane)
    found: dict[int, Found] = {}
    failures: dict[int, StoreError] = {}
    left = list(shards)
    for _ in range(_ATTEMPTS):
        stored, failed = store.ask({shard: [("WATCH", name), plain_of_any("GET", name)] for shard in left})
        failures |= failed
        epochs = {}
        for shard, (_, value) in stored.items():
            known_there = parse_epoch(value)
            if known_there is None and not empty:
                # Lost with its older connections: those cannot finish a batch without the other shards.
                failures[shard] = _foreign_epoch(store, shard, namespace, lane)
                continue
            epochs[shard], owner = known_there or (highest_epoch(store, shard, namespace, lane), 0)
            if owner > term:
                raise Fenced(
                    f"store {store.urls[shard]}: lane {lane} has an owner of term {owner}, this one's is {term}; it stops"
                )
        old = {shard: lane_key(namespace, lane, epoch) for shard, epoch in epochs.items()}
        # Sent before the commands that it holds together: a server that is not ready for it would do them one by one.
        begun, failed = store.ask({shard: [plain_of_any("HLEN", old[shard]), ("MULTI",)] for shard in epochs})
        failures |= failed
        # No owner of an earlier term can have come to such an epoch, also where a server that was emptied does not remember any.
        last = {shard: max(epochs[shard], known[shard], term * _EPOCHS) for shard in begun}
        queued: dict[int, list[tuple[bytes | str, ...]]] = {}
        foreign = {shard for shard, (fields, _) in begun.items() if fields is WRONG_TYPE and not empty}
        for shard, (there, _) in begun.items():
            if shard in foreign:
                # No older connection can write there, and nothing is the run's: only the term is noted.
                queued[shard] = [("SET", name, b"%d %d" % (epochs[shard], term)), ("EXEC",)]
                continue
            new, is_hash = lane_key(namespace, lane, last[shard] + 1), bool(there) and there is not WRONG_TYPE
            closed = _closes(old[shard], lane_key(namespace, lane, known[shard]), new if is_hash else None)
            queued[shard] = [*closed, ("SET", name, b"%d %d" % (last[shard] + 1, term)), *_looks(new), ("EXEC",)]
        done, failed = store.ask(queued)
        failures |= failed
        for shard, answers in done.items():
            if answers[-1] is None:
                continue  # another fence came between: look again
            assert isinstance(answers[-1], list)
            if shard in foreign:
                failures[shard] = _foreign(store, shard, old[shard], lane)
            else:
                found[shard] = Found.of(last[shard] + 1, answers[-1][-3:])
        left = [shard for shard in left if shard not in found and shard not in failures]
        if not left:
            return found, failures
    raise StoreError(
        f"store {store.urls[left[0]]}: lane {lane} is being fenced by others all the time; is the run trained twice?"
    )


def look_at(store: Store, shard: int, namespace: str, lanes: Sequence[int]) -> dict[int, Found]:
    """What lanes have on a store shard, by lane, for who does not fence them. Raises StoreError and StoreUnavailable as `Store.command` does."""
    epochs = read_epochs(store, shard, namespace, lanes)
    keys = [lane_key(namespace, lane, epoch or 0) for lane, epoch in zip(lanes, epochs, strict=True)]
    answers = store.commands_at_once(shard, [plain_of_any(*command) for key in keys for command in _looks(key)])
    if WRONG_TYPE in answers and read_epochs(store, shard, namespace, lanes) != epochs:
        raise Fenced(f"store {store.urls[shard]}: another owner takes the lanes of {namespace} over right now; try again")
    found: dict[int, Found] = {}
    for i, (lane, epoch) in enumerate(zip(lanes, epochs, strict=True)):
        of_lane = answers[3 * i : 3 * i + 3]
        foreign = None
        if epoch is None:
            foreign = _foreign_epoch(store, shard, namespace, lane)
        elif WRONG_TYPE in of_lane:
            foreign = _foreign(store, shard, keys[i], lane)
        nothing = Found(epoch or 0, Marker.parse(None), False, 0, foreign=foreign)
        found[lane] = Found.of(epoch or 0, of_lane) if foreign is None else nothing
    return found


def fence_all(
    store: Store,
    shard: int,
    namespace: str,
    lanes: Sequence[int],
    term: int,
    known: Mapping[int, int] | None = None,
    empty: bool = False,
) -> dict[int, Found]:
    """`fence_everywhere` of several lanes on one shard, whose failure is raised. Returns what was found, by lane. known: by lane."""
    found = {}
    for lane in lanes:
        there, failures = fence_everywhere(store, [shard], namespace, lane, term, {shard: (known or {}).get(lane, 0)}, empty)
        if failures:
            raise failures[shard]
        found[lane] = there[shard]
    return found
