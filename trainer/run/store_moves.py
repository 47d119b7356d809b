"""What a user may ask of a run's store shards, that further ones are added, or that one is removed or moved, and the servers that this takes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from foreload.cache.client.local import LocalStores
from foreload.cache.client.store import Store
from foreload.cache.client.url import parse_url
from foreload.cache.errors import CacheError, StoreError
from foreload.cache.parity.placement import Placement
from foreload.cache.protocol.namespace import is_run, join, owner, remove
from foreload.cache.protocol.spare import check_spare
from foreload.trainer.errors import RunError
from foreload.trainer.run.manifest import Manifest
from foreload.trainer.run.servers import plain

LOCAL = "local"  # in the place of a URL: one more server of the run's own
_CONNECT = timedelta(seconds=1)

Change = Literal["add", "remove", "move"]


@dataclass(frozen=True, slots=True)
class ShardChange:
    """What is asked: add shards on `urls`, remove `shard`, or move it to the only one of `urls`. shard: number or URL; urls: of servers, or LOCAL."""

    change: Change
    shard: str = ""
    urls: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """As the command line has it, but for the run."""
        return " ".join(("stores", self.change, *((self.shard,) if self.shard else ()), *plain_or_local(self.urls)))

    def placement_after(self, placement: Placement, urls: Sequence[str]) -> Placement:
        """The run's placement with this under way. urls: of its shards, by number. Raises RunError, CacheError."""
        if self.change == "add":
            return placement.with_added(len(self.urls))
        shard = shard_named(self.shard, plain(urls))
        return placement.without(shard) if self.change == "remove" else placement.with_migrated(shard)

    def is_under_way(self, placement: Placement, urls: Sequence[str]) -> bool:
        """Whether it is what the run is at already. urls: of its shards, by number, those joining among them."""
        joining = tuple(plain(urls)[shard] for shard in placement.joining)
        wanted = plain_or_local(self.urls)
        same_servers = len(joining) == len(wanted) if LOCAL in wanted else joining == wanted
        leaving = [] if self.change == "add" else [shard_named(self.shard, plain(urls))]
        return same_servers and list(placement.leaving) == leaving


def plain_or_local(urls: Sequence[str]) -> tuple[str, ...]:
    """URLs without passwords; LOCAL as it is."""
    return tuple(url if url == LOCAL else parse_url(url, {}).plain for url in urls)


def shard_named(text: str, urls: Sequence[str]) -> int:
    """The number of a store shard, told as that or as its server's URL. urls: by number, without passwords. Raises RunError."""
    there = {shard: url for shard, url in enumerate(urls) if url}
    if text.isdigit() and int(text) in there:
        return int(text)
    for shard, url in there.items():
        if text and not text.isdigit() and _plain(text) == url:
            return shard
    named = ", ".join(f"{shard} ({url})" for shard, url in there.items())
    raise RunError(f"no store shard of the run is {text}; there are {named}")


def _plain(text: str) -> str:
    try:
        return parse_url(text, {}).plain
    except CacheError:
        return text


class NewServers:
    """The servers that a run is to have, made ready before anything depends on them. silence: for which one may be silent.

    local: the run's own servers, where it has such, all running. check_room: raises RunError where the servers of a placement, given their URLs, will
    not hold their rows.
    """

    def __init__(
        self,
        manifest: Manifest,
        silence: timedelta,
        local: LocalStores | None,
        check_room: Callable[[Placement, Sequence[str]], None],
    ) -> None:
        self._manifest, self._silence, self._local, self._check_room = manifest, silence, local, check_room

    def made_ready(
        self, wanted: Sequence[str], placement: Placement, in_use: Sequence[str], further: Sequence[tuple[int, str]] = ()
    ) -> tuple[str, ...]:
        """The URLs, by number and without passwords, of the shards of a placement with these further servers, which are noted as the run's.

        in_use: of those before, by number; further: those about to take a shard's place. Where one cannot be used, none is noted. Raises RunError,
        CacheError.
        """
        if (LOCAL in wanted) != (self._local is not None) and wanted:
            raise RunError(
                "its servers are its own, in its folder; give local in the place of a URL"
                if self._local is not None
                else "its servers are not its own; give the URLs of further ones"
            )
        first = placement.shard_count - len(wanted)
        urls = (list(in_use) + [""] * first)[:first]
        new: list[str] = []
        try:
            for shard, text in enumerate(wanted, first):
                if self._local is not None:
                    added = self._local.add()
                    assert added == shard
                    new.append(self._local.urls[shard])
                else:
                    url = parse_url(parse_url(text).plain)
                    there = [(number, parse_url(used)) for number, used in [*enumerate([*urls, *new]), *further] if used]
                    manifest = self._manifest
                    check_spare(url, there, manifest.namespace, manifest.lanes, self._silence, manifest.identity)
                    new.append(url.plain)
            self._check_room(placement, (*urls, *new))
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
                # It was the run's before, or was to be: nothing there is of any use.
                remove(store, namespace)
            if not join(store, namespace, identity, shard, shards):
                raise StoreError(f"store {url}: another run has taken namespace {namespace} there; name another server")

    def give_back(self, urls: Sequence[str], first: int) -> None:
        """These servers, from this number on, are not the run's after all."""
        for shard, url in reversed(list(enumerate(urls, first))):
            if self._local is not None:
                self._local.take_back(shard)
            elif (why := self.leave(url)) is not None:
                sys.stderr.write(f"store shard {shard}: is not added, and is not as it was: {why}\n")

    def leave(self, url: str) -> str | None:
        """Remove what a run has on a server that is none of its any more; returns why it cannot be, None where nothing is left."""
        manifest = self._manifest
        try:
            with Store([url], max(self._silence, timedelta(seconds=10)), _CONNECT) as store:
                note = owner(store, manifest.namespace, 0)
                if note is not None and is_run(note, manifest.identity):
                    remove(store, manifest.namespace)
        except CacheError as error:
            return f"{error}; what is left there goes with: foreload stores delete {url} {manifest.namespace}"
        return None


def check_whole(
    lost: Sequence[int], rebuilding: Sequence[int], remedy: str = "have a server take its place (foreload stores replace)"
) -> None:
    """Raise RunError where rows cannot begin to move, since shards are not whole. remedy: for those that are lost."""
    if lost or rebuilding:
        what = f"store shard {', '.join(map(str, [*lost, *rebuilding]))} is {'lost' if lost else 'being rebuilt'}"
        raise RunError(f"{what}; {remedy if lost else 'wait until it is whole'}, and ask again")
