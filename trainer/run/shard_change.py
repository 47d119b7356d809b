"""What a user may ask of a run's store shards: that further ones are added, or that one is removed or moved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from foreload.cache.client.url import parse_url
from foreload.cache.errors import CacheError
from foreload.cache.parity.placement import Placement
from foreload.trainer.errors import RunError
from foreload.trainer.run.servers import plain

LOCAL = "local"  # in the place of a URL: one more server of the run's own

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
    """The number of a store shard, given as that or as its server's URL. urls: by number, without passwords. Raises RunError."""
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
