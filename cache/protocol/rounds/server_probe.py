"""Looking for servers that are to have a lost store shard's rows again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from foreload.cache.client.store import Store
from foreload.cache.client.url import StoreUrl
from foreload.cache.errors import NamespaceInUse, StoreError
from foreload.cache.protocol.ownership.ownership import Ownership
from foreload.cache.protocol.shards.namespace import join
from foreload.cache.protocol.shards.reading import StoredRows
from foreload.cache.protocol.shards.shard_status import ServerUnreachable

PROBE_PAUSE = timedelta(milliseconds=200)
UNREACHABLE = timedelta(seconds=5)  # after which a server that is looked for is said not to be there


@dataclass(slots=True)
class Wanted:
    """A server that is looked for, since when, and not before when (time.monotonic()), and whether it was said that it is not there."""

    url: StoreUrl
    since: float
    not_before: float
    reported: bool = False


class ServerProbe:
    """Tries, in a thread of its own, to reach the servers of lost shards, so that nobody waits for one that does not answer.

    found is called, by that thread, when there is one to be had from `ready`; on_unreachable with those that are not there for 5 s.
    """

    def __init__(
        self,
        stored: StoredRows,
        ownership: Ownership,
        found: Callable[[], None],
        on_unreachable: Callable[[ServerUnreachable], None],
    ) -> None:
        self._stored, self._ownership, self._found, self._on_unreachable = stored, ownership, found, on_unreachable
        self._condition = threading.Condition()
        self._noting = threading.Lock()  # held while a server is noted as a shard of the run
        self._wanted: dict[int, Wanted] = {}
        self._ready: dict[int, Store] = {}
        self._closed = False
        self._thread: threading.Thread | None = None

    def want(self, shard: int, url: StoreUrl, pause: timedelta = timedelta()) -> None:
        """Look for the server of a shard at a URL from now on, or after a pause."""
        with self._condition:
            now = time.monotonic()
            self._wanted[shard] = Wanted(url, now, now + pause.total_seconds())
            stale = self._ready.pop(shard, None)
            if self._thread is None:
                self._thread = threading.Thread(target=self._look, name="server-probe", daemon=True)
                self._thread.start()
            self._condition.notify_all()
        if stale is not None:
            stale.close()

    def forget(self, shard: int) -> None:
        """Look for the server of a shard no more: from now on none is noted as that."""
        with self._noting, self._condition:
            self._wanted.pop(shard, None)
            found = self._ready.pop(shard, None)
        if found is not None:
            found.close()

    def ready(self) -> dict[int, Store]:
        """The shards whose server answers, each with a Store of its own; they are looked for no more."""
        with self._condition:
            answering, self._ready = self._ready, {}
            for shard in answering:
                self._wanted.pop(shard, None)
            return answering

    def close(self) -> None:
        """Stop looking."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        if self._thread is not None:
            self._thread.join()
        for store in self._ready.values():
            store.close()

    def _look(self) -> None:
        while True:
            with self._condition:
                if self._closed:
                    return
                now = time.monotonic()
                everyone = {
                    shard: wanted
                    for shard, wanted in self._wanted.items()
                    if shard not in self._ready and wanted.not_before <= now
                }
            for shard, wanted in everyone.items():
                try:
                    store = self._reach(shard, wanted)
                except StoreError as error:
                    waited = isinstance(error, NamespaceInUse) or time.monotonic() - wanted.since >= UNREACHABLE.total_seconds()
                    if waited and not wanted.reported:
                        wanted.reported = True
                        self._on_unreachable(ServerUnreachable(shard, wanted.url.plain, str(error)))
                    continue
                with self._condition:
                    current = self._is_wanted(shard, wanted)
                    if current:
                        self._ready[shard] = store
                if current:
                    self._found()
                else:
                    store.close()
            with self._condition:
                if not self._closed:
                    self._condition.wait(PROBE_PAUSE.total_seconds())

    def _is_wanted(self, shard: int, wanted: Wanted) -> bool:
        return self._wanted.get(shard) is wanted

    def _reach(self, shard: int, wanted: Wanted) -> Store:
        """A Store of the one server, noted as this shard of the run, if it is still wanted. Raises StoreError, NamespaceInUse where it is noted as
        another.
        """
        store = Store([wanted.url], self._stored.store.timeout, timedelta())
        identity, namespace = self._ownership.identity, self._stored.namespace
        try:
            with self._noting:
                if (
                    identity is not None
                    and self._is_wanted(shard, wanted)
                    and not join(store, namespace, identity, shard, self._stored.placement.shard_count)
                ):
                    raise NamespaceInUse(
                        f"store {wanted.url}: namespace {namespace} belongs to another run there, or to another shard"
                    )
        except StoreError:
            store.close()
            raise
        return store
