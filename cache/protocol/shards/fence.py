"""Fencing: cut off every older connection to a lane's rows on a store shard.

A new owner fences a lane before anything else. So does an owner that has lost its connection and
made a new one.

A lane's hash on a store shard has the key `{namespace:lane}:e`, where e is the fence epoch there. A
fence renames the hash to epoch e + 1 and leaves a string under the old key, in one transaction. The
server then answers WRONGTYPE to every write that an older connection still sends, or that still
waits in the buffer of a stopped server. (CLIENT KILL is no fence: a client that reconnects writes
again.)
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
# Epochs of a term begin at term * _EPOCHS. One term never needs this many.
_EPOCHS = 1 << 20
_FENCED = b"fenced"
# The timeout for asking a server why it refused a command.
_LOOK = timedelta(milliseconds=200)


def read_epochs(store: Store, shard: int, namespace: str, lanes: Sequence[int]) -> list[int | None]:
    """Return the fence epoch of each lane on a store shard.

    An epoch is 0 if the lane was never fenced there, and None if another program wrote the key.
    """
    stored = store.commands_at_once(shard, [plain_of_any("GET", epoch_key(namespace, lane)) for lane in lanes])
    known = map(parse_epoch, stored)
    return [None if one is None else one[0] for one in known]


@dataclass(frozen=True, slots=True)
class Found:
    """The state of a lane on a store shard, as a fence or `look_at` found it.

    Attributes:
        epoch: The fence epoch, after the fence if there was one.
        marker: The lane's marker. If the hash has none, that of batch 0.
        marked: Whether the hash has a marker.
        rows: The number of rows and parity rows in the hash.
        migrated: The last chunk of a migration that the hash records, or None.
        foreign: Set by `look_at` only. If another program wrote the lane's hash or its epoch key,
            the reason the shard is lost; the other fields then describe an empty hash. A fence
            fails on such a shard instead.
    """

    epoch: int
    marker: Marker
    marked: bool
    rows: int
    migrated: Migrated | None = None
    foreign: ForeignKey | None = None

    @classmethod
    def of(cls, epoch: int, answers: Sequence[object]) -> Found:
        """Parse the answers to the commands of `_looks`."""
        marker, stored, fields = answers
        assert marker is None or isinstance(marker, bytes)
        assert stored is None or isinstance(stored, bytes)
        assert isinstance(fields, int)
        # HLEN counts the marker and the migration record, which are not rows.
        others = (marker is not None) + (stored is not None)
        return cls(epoch, Marker.parse(marker), marker is not None, fields - others, Migrated.parse(stored))


def _looks(key: bytes) -> list[tuple[bytes | str, ...]]:
    """Return the commands that read the state of a lane's hash."""
    return [("HGET", key, MARKER), ("HGET", key, MIGRATED), ("HLEN", key)]


def _closes(old: bytes, known: bytes, new: bytes | None) -> list[tuple[bytes | str, ...]]:
    """Return the commands that close a lane's older keys to writers.

    They leave a string in the place of the hash (`old`), and one at the latest epoch that an owner
    knew (`known`), since that owner may still write there. If `new` is not None, the hash is
    renamed to it first.
    """
    rename: list[tuple[bytes | str, ...]] = [] if new is None else [("RENAME", old, new)]
    return [*rename, *(("SET", key, _FENCED) for key in dict.fromkeys((old, known)))]


def foreign_key(found: Mapping[int, Found]) -> ForeignKey | None:
    """Return why a store shard is lost if another program wrote a key of a lane there, else None.

    Args:
        found: By lane.
    """
    return next((there.foreign for there in found.values() if there.foreign is not None), None)


def _foreign(store: Store, shard: int, key: bytes, lane: int) -> ForeignKey:
    return ForeignKey(
        f"store {store.urls[shard]}: the key {key.decode()} must be the hash of lane {lane}'s rows, but has another type: another program wrote it; "
        "the rows of this shard are lost"
    )


def _foreign_epoch(store: Store, shard: int, namespace: str, lane: int) -> ForeignKey:
    key = epoch_key(namespace, lane).decode()
    return ForeignKey(
        f"store {store.urls[shard]}: the key {key} must be the fence epoch and term of lane {lane}, but another program wrote it; the rows of "
        f"this shard cannot be found; to recover them, restore the key in the server's redis-cli: "
        f"SET {key} '{highest_epoch(store, shard, namespace, lane)} 0'"
    )


def judge_wrong_type(url: StoreUrl, namespace: str, epochs: Mapping[int, int], refusal: StoreError) -> StoreError:
    """Find out why a server answered WRONGTYPE to the owner of lanes.

    Args:
        epochs: The fence epochs of the owner's lanes on this server, as the owner knows them.
        refusal: The error that the answer stands for at first: Fenced.

    Returns:
        `refusal` if another owner has fenced any of the lanes, or if the server shows no other
        reason. ForeignKey if another program wrote a key of a lane. The StoreError that occurred if
        the server cannot be asked.
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
    """Cut off a lane's older connections to several store shards, on all of them at once.

    Args:
        term: The term of the new owner.
        known: By shard, the latest fence epoch that the owner knows of there, or 0. The fence must
            not use it again, even if the server was emptied and does not remember it.
        empty: Whether the caller is about to empty the shards of the lane. If so, a key that
            another program wrote is replaced. Otherwise the key stays, and the shard fails with
            ForeignKey.

    Returns:
        What the fence found, by shard, and the errors of the shards it could not fence.

    Raises:
        Fenced: An owner of a later term has fenced the lane.
        StoreError: Other fences interfered in every attempt, or a shard failed while its keys were
            scanned for the highest fence epoch.
    """
    name = epoch_key(namespace, lane)
    found: dict[int, Found] = {}
    failures: dict[int, StoreError] = {}
    left = list(shards)
    for _ in range(_ATTEMPTS):
        # WATCH makes the transaction below fail if another fence changes the epoch key meanwhile.
        stored, failed = store.ask({shard: [("WATCH", name), plain_of_any("GET", name)] for shard in left})
        failures |= failed
        epochs = {}
        for shard, (_, value) in stored.items():
            known_there = parse_epoch(value)
            if known_there is None and not empty:
                # The shard is lost, and with it whatever older connections write there. They cannot
                # finish a batch without the other shards.
                failures[shard] = _foreign_epoch(store, shard, namespace, lane)
                continue
            epochs[shard], owner = known_there or (highest_epoch(store, shard, namespace, lane), 0)
            if owner > term:
                raise Fenced(
                    f"store {store.urls[shard]}: lane {lane} has an owner of a later term, {owner}; this one is of term {term} and stops"
                )
        old = {shard: lane_key(namespace, lane, epoch) for shard, epoch in epochs.items()}
        # MULTI is sent ahead of the transaction's commands. If a server refused it together with
        # them (because it is not ready), it would execute them one by one.
        begun, failed = store.ask({shard: [plain_of_any("HLEN", old[shard]), ("MULTI",)] for shard in epochs})
        failures |= failed
        # No owner of an earlier term can have reached this epoch, even if the server was emptied
        # and remembers no epoch at all.
        last = {shard: max(epochs[shard], known[shard], term * _EPOCHS) for shard in begun}
        queued: dict[int, list[tuple[bytes | str, ...]]] = {}
        foreign = {shard for shard, (fields, _) in begun.items() if fields is WRONG_TYPE and not empty}
        for shard, (there, _) in begun.items():
            if shard in foreign:
                # The key has another type, so no older connection can write to it, and nothing in
                # it belongs to the run. Only the term is recorded.
                queued[shard] = [("SET", name, b"%d %d" % (epochs[shard], term)), ("EXEC",)]
                continue
            new, is_hash = lane_key(namespace, lane, last[shard] + 1), bool(there) and there is not WRONG_TYPE
            closed = _closes(old[shard], lane_key(namespace, lane, known[shard]), new if is_hash else None)
            queued[shard] = [*closed, ("SET", name, b"%d %d" % (last[shard] + 1, term)), *_looks(new), ("EXEC",)]
        done, failed = store.ask(queued)
        failures |= failed
        for shard, answers in done.items():
            if answers[-1] is None:
                # EXEC returned nil: another fence changed the epoch key. Try again.
                continue
            assert isinstance(answers[-1], list)
            if shard in foreign:
                failures[shard] = _foreign(store, shard, old[shard], lane)
            else:
                found[shard] = Found.of(last[shard] + 1, answers[-1][-3:])
        left = [shard for shard in left if shard not in found and shard not in failures]
        if not left:
            return found, failures
    raise StoreError(f"store {store.urls[left[0]]}: other processes keep fencing lane {lane}; is the run trained twice?")


def look_at(store: Store, shard: int, namespace: str, lanes: Sequence[int]) -> dict[int, Found]:
    """Return the state of lanes on a store shard, by lane, without fencing them.

    Raises:
        Fenced: Another owner is taking the lanes over at this moment.
        StoreError, StoreUnavailable: As `Store.command` raises them.
    """
    epochs = read_epochs(store, shard, namespace, lanes)
    keys = [lane_key(namespace, lane, epoch or 0) for lane, epoch in zip(lanes, epochs, strict=True)]
    answers = store.commands_at_once(shard, [plain_of_any(*command) for key in keys for command in _looks(key)])
    # A fence between the two requests leaves strings at the epochs just read. Only if the epochs
    # have not changed is the key another program's.
    if WRONG_TYPE in answers and read_epochs(store, shard, namespace, lanes) != epochs:
        raise Fenced(f"store {store.urls[shard]}: another process is taking over the lanes of {namespace}; try again")
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
    """Fence several lanes on one shard, as `fence_everywhere` fences one. Raises the shard's error.

    Args:
        known: By lane, as `fence_everywhere` has it by shard. If None, no epoch is known.

    Returns:
        What the fence found, by lane.
    """
    found = {}
    for lane in lanes:
        there, failures = fence_everywhere(store, [shard], namespace, lane, term, {shard: (known or {}).get(lane, 0)}, empty)
        if failures:
            raise failures[shard]
        found[lane] = there[shard]
    return found
