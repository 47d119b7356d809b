"""Prepare the servers for a change of a run's store shards (`shard_change`)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Protocol

from foreload.base.at_once import at_once, results_of
from foreload.cache.client.local import LocalStores
from foreload.cache.client.store import Store
from foreload.cache.client.url import parse_url
from foreload.cache.errors import CacheError, StoreError
from foreload.cache.parity.placement import Placement
from foreload.cache.protocol.shards.namespace import check_spare, is_run, join, owner, remove
from foreload.trainer.errors import RunError
from foreload.trainer.run.manifest import Manifest
from foreload.trainer.run.shard_change import LOCAL, OWN_WORDS

_CONNECT = timedelta(seconds=1)


class OwnServers(Protocol):
    """The servers that a run has of its own, of which there can be more or fewer.

    Attributes:
        word: What users give in place of a further server's URL: LOCAL or ENGINE.
    """

    word: str

    def add(self, shard: int) -> str:
        """Start an empty server for a further shard, and return its URL, with password.

        Raises:
            CacheError: It does not start.
        """

    def take_back(self, shard: int, url: str) -> None:
        """End the server that was added last, and undo its addition."""

    def remove(self, shard: int, url: str) -> None:
        """End, unsaved, the server of a shard that no longer has rows."""


class LocalServers:
    """A run's local servers, all running: OwnServers."""

    word = LOCAL

    def __init__(self, stores: LocalStores) -> None:
        self._stores = stores

    def add(self, shard: int) -> str:
        """See OwnServers."""
        added = self._stores.add()
        assert added == shard
        return self._stores.urls[shard]

    def take_back(self, shard: int, url: str) -> None:
        """See OwnServers."""
        self._stores.take_back(shard)

    def remove(self, shard: int, url: str) -> None:
        """See OwnServers."""
        self._stores.remove(shard)


class NewServers:
    """Prepares the servers that a run is to have, before anything depends on them.

    Args:
        manifest: The run's manifest.
        silence: How long a server may be silent.
        own: The run's own servers. None if it has none, or none can be started.
        check_room: Raises RunError if the servers of a placement, given their URLs, will not hold
            their rows.
    """

    def __init__(
        self,
        manifest: Manifest,
        silence: timedelta,
        own: OwnServers | None,
        check_room: Callable[[Placement, Sequence[str]], None],
    ) -> None:
        self._manifest, self._silence, self._own, self._check_room = manifest, silence, own, check_room

    def made_ready(
        self, wanted: Sequence[str], placement: Placement, in_use: Sequence[str], further: Sequence[tuple[int, str]] = ()
    ) -> tuple[str, ...]:
        """Prepare further servers, note them as the run's, and return the URLs of all shards.

        If one server cannot be used, none is noted.

        Args:
            wanted: The further servers: URLs, or the word for each of the run's own.
            placement: The placement that has these servers.
            in_use: The URLs of the present servers, by number.
            further: Servers that are about to take a shard's place, with its number.

        Returns:
            The URLs by number. Those of other servers than its own have no passwords.

        Raises:
            RunError: The run's servers are of the other kind, or the rows would not fit.
            CacheError: A server cannot be used.
        """
        word = None if self._own is None else self._own.word
        if any(text != word if word else text in OWN_WORDS for text in wanted):
            raise RunError(
                f"its servers are its own; give {word} instead of a URL"
                if word
                else "its servers are not its own, or it must train to have more of them; give the URLs of further servers"
            )
        first = placement.shard_count - len(wanted)
        urls = (list(in_use) + [""] * first)[:first]
        new: list[str] = []
        try:
            for shard, text in enumerate(wanted, first):
                if self._own is not None:
                    new.append(self._own.add(shard))
                else:
                    # Check the server with the environment's password, as trainers will reach it.
                    url = parse_url(parse_url(text).plain)
                    there = [(number, parse_url(used)) for number, used in [*enumerate([*urls, *new]), *further] if used]
                    manifest = self._manifest
                    check_spare(url, there, manifest.namespace, manifest.lanes, self._silence, manifest.identity)
                    new.append(url.plain)
            self._check_room(placement, (*urls, *new))
            # Nothing is noted before every server has passed all checks.
            for shard, text in enumerate(new, first):
                self._note(text, shard, placement.shard_count)
        except BaseException:
            self.give_back(new, first)
            raise
        return (*urls, *new)

    def _note(self, url: str, shard: int, shards: int) -> None:
        namespace, identity = self._manifest.namespace, self._manifest.identity
        with Store([url], self._silence, _CONNECT) as store:
            if owner(store, namespace, 0) is not None:
                # The server was the run's before, or was to be. Nothing there is of use now.
                remove(store, namespace)
            if not join(store, namespace, identity, shard, shards):
                raise StoreError(f"store {url}: another run has taken namespace {namespace} there; name another server")

    def give_back(self, urls: Sequence[str], first: int) -> None:
        """Undo `made_ready` for these servers, numbered from `first` on."""
        for shard, url in reversed(list(enumerate(urls, first))):
            if self._own is not None:
                self._own.take_back(shard, url)
            elif (why := self._left(url)) is not None:
                sys.stderr.write(f"store shard {shard}: was not added, and the run's data on it could not be deleted: {why}\n")

    def leave(self, servers: Mapping[int, str]) -> set[str]:
        """End the run's own servers of removed shards; delete the run's rows from others.

        Args:
            servers: Their URLs, by number.

        Returns:
            The URLs of the servers on which nothing is left.
        """
        if self._own is not None:
            for shard, url in servers.items():
                self._own.remove(shard, url)
            return {*servers.values()}
        emptied = set()
        left = results_of(at_once({shard: partial(self._left, url) for shard, url in servers.items()}))
        for shard, url in servers.items():
            if (why := left[shard]) is None:
                emptied.add(url)
            else:
                sys.stderr.write(f"store shard {shard}: was removed, but the run's rows there could not all be deleted: {why}\n")
        return emptied

    def _left(self, url: str) -> str | None:
        """Delete the run's rows from a server the run no longer uses.

        Returns None on success, else the reason why it failed.
        """
        manifest = self._manifest
        try:
            with Store([url], max(self._silence, timedelta(seconds=10)), _CONNECT) as store:
                note = owner(store, manifest.namespace, 0)
                if note is not None and is_run(note, manifest.identity):
                    remove(store, manifest.namespace)
        except CacheError as error:
            return f"{error}; delete what is left there with: foreload stores delete {url} {manifest.namespace}"
        return None


def check_whole(
    lost: Sequence[int], rebuilding: Sequence[int], remedy: str = "replace its server (foreload stores replace)"
) -> None:
    """Raise RunError if rows cannot begin to move, because shards are lost or being rebuilt.

    Args:
        lost: The lost shards.
        rebuilding: The shards that are being rebuilt.
        remedy: What helps against lost shards, for the message.
    """
    if lost or rebuilding:
        what = f"store shard {', '.join(map(str, [*lost, *rebuilding]))} is {'lost' if lost else 'being rebuilt'}"
        raise RunError(f"{what}; {remedy if lost else 'wait until it is whole'}, and ask again")
