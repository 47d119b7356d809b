"""Whether a server can take the place of a store shard's, found out before anything depends on it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

from foreload.cache.client.store import Store
from foreload.cache.client.url import PASSWORD_VARIABLE, StoreUrl, parse_url
from foreload.cache.errors import NamespaceInUse, StoreAuth, StoreError
from foreload.cache.protocol.shards.namespace import is_run, lane_key, owner

_CONNECT = timedelta(seconds=1)
_PROBE_EPOCH = -1  # no hash of a lane is ever of this one
_PROBE_MILLISECONDS = 1000  # after which a probe is gone, whatever became of who wrote it


def check_spare(
    url: StoreUrl,
    in_use: Iterable[tuple[int, StoreUrl]],
    namespace: str,
    lanes: int,
    timeout: timedelta,
    identity: Mapping[str, Any] | None = None,
) -> None:
    """Raise StoreError unless a server can take a store shard's place: none of those in use, it answers, takes writes, and has no run of that name.

    Trainers reach it with the password of the environment, and so does this. Other runs may have rows there. in_use: the run's servers, with the
    numbers of their shards. lanes: of the run. timeout: for the server's silence. identity: of this run, whose namespace may be there already.
    """
    url = parse_url(url.plain)
    for shard, used in in_use:
        if used.place == url.place:
            raise StoreError(f"store {url}: is the server of store shard {shard} already; name another one")
    try:
        reached = Store([url], timeout, _CONNECT)
    except StoreAuth as error:
        raise StoreAuth(f"{error}; here only the one in {PASSWORD_VARIABLE} is used, as trainers were given it") from error
    with reached as store:
        note = owner(store, namespace, 0)
        if note is not None and (identity is None or not is_run(note, identity)):
            raise NamespaceInUse(
                f"store {url}: namespace {namespace} belongs to a run there; name another server, or remove its rows first"
            )
        for lane in range(lanes):
            # In the slots that the lanes' hashes will have, should it be part of a cluster.
            probe = lane_key(namespace, lane, _PROBE_EPOCH)
            store.command(0, "SET", probe, "", "PX", _PROBE_MILLISECONDS)
            store.command(0, "UNLINK", probe)
