"""Changes of a run's store shards: what a user may ask for, and the order of steps in which it is done.

The program of steps is pure, and has two drivers: `foreload stores` for a stopped run
(`commands.migrate`), and the coordinator for a run that trains
(`cluster.coordinator.row_migration`). A driver may die between any two steps. Once the placement is
published, the run's folder tells either driver how to go on. A change that was asked for, but not
published, must be asked for again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Literal

from foreload.cache.client.url import parse_url
from foreload.cache.errors import CacheError
from foreload.cache.parity.placement import Placement
from foreload.trainer.errors import RunError
from foreload.trainer.run.manifest import Manifest
from foreload.trainer.run.servers import left_over, plain, with_servers

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


class Step(Enum):
    """What a driver does next."""

    NAME = auto()
    """Publish the manifest that names the run's servers, with those that it has yet to leave (`ShardProgram.named_in`)."""
    PLACE = auto()
    """Publish the placement by which rows move."""
    MOVE = auto()
    """Move the rows, or wait until their owners have."""
    COMPLETE = auto()
    """Publish the placement of the rows that have moved, without the shards that they left."""
    LEAVE = auto()
    """Remove what the run has on the servers of removed shards."""


@dataclass(frozen=True, slots=True)
class ShardProgram:
    """How far a change of a run's store shards has come. Each method that is named after a step returns the program after that step.

    placement: the one in the run's folder. wanted: the placement by which rows are to move next, whose servers are ready. If None, no change is asked
    for. leaving: by shard, the URLs of servers of removed shards, which may still hold something of the run. emptied: the URLs of servers that the
    run has left and that hold nothing of it. named: whether the manifest names the servers accordingly.
    """

    placement: Placement
    leaving: Mapping[int, str] = field(default_factory=dict)
    wanted: Placement | None = None
    emptied: frozenset[str] = frozenset()
    named: bool = True

    @classmethod
    def found(cls, manifest: Manifest, placement: Placement) -> ShardProgram:
        """Return the program of a run as its folder has it."""
        return cls(placement, left_over(manifest, placement))

    def next_step(self, moved: bool, unused: bool) -> Step | None:
        """Return the next step, None where nothing is to be done.

        Args:
            moved: whether all rows are where the placement has them move to.
            unused: whether no trainer uses the servers of removed shards any more.
        """
        # Before the placement: the manifest may name a server more than the placement knows, not one less.
        if not self.named:
            return Step.NAME
        if self.wanted is not None:
            return Step.PLACE
        if self.placement.migrating:
            return Step.COMPLETE if moved else Step.MOVE
        return Step.LEAVE if self.leaving and unused else None

    def ask(self, placement: Placement) -> ShardProgram:
        """Ask for a change: rows are to move by this placement."""
        return replace(self, wanted=placement, named=False)

    def named_in(self, manifest: Manifest, urls: Sequence[str]) -> Manifest:
        """Return the manifest that names the servers. urls: of the shards by number, without passwords; those of removed ones are not looked at."""
        placement = self.placement if self.wanted is None else self.wanted
        numbered = enumerate(urls[: placement.shard_count])
        named = [self.leaving.get(shard, "") if shard in placement.removed else url for shard, url in numbered]
        return with_servers(manifest, placement, named, self.emptied)

    def name(self) -> ShardProgram:
        """The manifest that names the servers is published."""
        return replace(self, named=True)

    def place(self) -> ShardProgram:
        """The placement that was wanted is published."""
        assert self.wanted is not None
        return replace(self, placement=self.wanted, wanted=None)

    def complete(self, urls: Sequence[str]) -> ShardProgram:
        """The placement of the rows that have moved is published. urls: of the shards by number, without passwords, as before that."""
        leaving = {shard: urls[shard] for shard in self.placement.leaving}
        # A server that the run left before may have been added again since.
        emptied = self.emptied - {*leaving.values()}
        return replace(self, placement=self.placement.completed(), leaving=leaving, emptied=emptied, named=False)

    def leave(self, emptied: Collection[str]) -> ShardProgram:
        """The servers of removed shards are left; those with the URLs `emptied` hold nothing of the run."""
        return replace(self, leaving={}, emptied=self.emptied | {*emptied}, named=False)
