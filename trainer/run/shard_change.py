"""Changes of a run's store shards: the user's requests, and the steps that carry them out.

The program of steps is pure, and has two drivers: `foreload stores` for a stopped run
(`commands.migrate`), and the coordinator for a run that trains
(`cluster.coordinator.row_migration`). A driver may die between any two steps. Once the placement is
published, either driver can continue from the run's folder. A change that was requested but not
published must be requested again.
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

LOCAL, ENGINE = (
    "local",
    "engine",
)  # each stands for a URL: one more of the run's local servers, or one more that its engine starts
OWN_WORDS = frozenset({LOCAL, ENGINE})

Change = Literal["add", "remove", "move"]


@dataclass(frozen=True, slots=True)
class ShardChange:
    """A requested change of the shards.

    The change adds shards on `urls`, removes `shard`, or moves it to the only one of `urls`.

    Attributes:
        shard: the shard's number or URL; "" if shards are added.
        urls: the URLs of servers, or one of OWN_WORDS.
    """

    change: Change
    shard: str = ""
    urls: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The request as on the command line, without the run."""
        return " ".join(("stores", self.change, *((self.shard,) if self.shard else ()), *_plain_or_word(self.urls)))

    def placement_after(self, placement: Placement, urls: Sequence[str]) -> Placement:
        """Return the run's placement with this change under way.

        Args:
            urls: the URLs of the run's shards, by number.

        Raises:
            RunError: no shard of the run is named `shard`.
            CacheError: the placement does not allow the change.
        """
        if self.change == "add":
            return placement.with_added(len(self.urls))
        shard = shard_named(self.shard, plain(urls))
        return placement.without(shard) if self.change == "remove" else placement.with_migrated(shard)

    def is_under_way(self, placement: Placement, urls: Sequence[str]) -> bool:
        """Return whether the run is already making this change.

        Args:
            urls: the URLs of the run's shards, by number, including those that join.
        """
        joining = tuple(plain(urls)[shard] for shard in placement.joining)
        wanted = _plain_or_word(self.urls)
        same_servers = len(joining) == len(wanted) if OWN_WORDS & {*wanted} else joining == wanted
        leaving = [] if self.change == "add" else [shard_named(self.shard, plain(urls))]
        return same_servers and list(placement.leaving) == leaving


def _plain_or_word(urls: Sequence[str]) -> tuple[str, ...]:
    """Return the URLs without passwords; OWN_WORDS stay."""
    return tuple(url if url in OWN_WORDS else parse_url(url, {}).plain for url in urls)


def shard_named(text: str, urls: Sequence[str]) -> int:
    """Return the number of the store shard that a number or a server's URL names.

    Args:
        urls: the URLs of the run's shards, by number, without passwords.

    Raises:
        RunError: no shard of the run is named so.
    """
    there = {shard: url for shard, url in enumerate(urls) if url}
    if text.isdigit() and int(text) in there:
        return int(text)
    for shard, url in there.items():
        if text and not text.isdigit() and _plain(text) == url:
            return shard
    named = ", ".join(f"{shard} ({url})" for shard, url in there.items())
    raise RunError(f"the run has no store shard {text}; it has {named}")


def _plain(text: str) -> str:
    try:
        return parse_url(text, {}).plain
    except CacheError:
        return text


class Step(Enum):
    """The step that a driver does next."""

    NAME = auto()
    """Publish the manifest that names the run's servers (`ShardProgram.named_in`).

    These include the servers that the run has yet to leave.
    """
    PLACE = auto()
    """Publish the placement by which rows migrate."""
    MOVE = auto()
    """Migrate the rows, or wait until their owners have migrated them."""
    COMPLETE = auto()
    """Publish the placement after the migration, without the shards that the rows left."""
    LEAVE = auto()
    """Delete the run's data from the servers of removed shards."""


@dataclass(frozen=True, slots=True)
class ShardProgram:
    """The progress of a change of a run's store shards.

    Each method with the name of a step returns the program after that step.

    Attributes:
        placement: the placement in the run's folder.
        leaving: by shard, the URLs of removed shards' servers, which may still hold data of the
            run.
        wanted: the placement of the requested migration, whose servers are ready. If None, no
            change is requested.
        emptied: the URLs of servers that the run has left and that hold none of its data.
        named: whether the manifest names the servers accordingly.
    """

    placement: Placement
    leaving: Mapping[int, str] = field(default_factory=dict)
    wanted: Placement | None = None
    emptied: frozenset[str] = frozenset()
    named: bool = True

    @classmethod
    def found(cls, manifest: Manifest, placement: Placement) -> ShardProgram:
        """Return the program of a run from its folder."""
        return cls(placement, left_over(manifest, placement))

    def next_step(self, moved: bool, unused: bool) -> Step | None:
        """Return the next step, or None if there is nothing to do.

        Args:
            moved: whether all rows are where the placement has them migrate to.
            unused: whether all trainers have stopped using the servers of removed shards.
        """
        # The manifest comes before the placement: it may name a server that the placement does not
        # know yet, but it must never lack one that the placement uses.
        if not self.named:
            return Step.NAME
        if self.wanted is not None:
            return Step.PLACE
        if self.placement.migrating:
            return Step.COMPLETE if moved else Step.MOVE
        return Step.LEAVE if self.leaving and unused else None

    def ask(self, placement: Placement) -> ShardProgram:
        """Request a change: rows are to migrate by this placement."""
        return replace(self, wanted=placement, named=False)

    def named_in(self, manifest: Manifest, urls: Sequence[str]) -> Manifest:
        """Return the manifest that names the servers.

        Args:
            urls: the URLs of the shards by number, without passwords. Those of removed shards are
                ignored.
        """
        placement = self.placement if self.wanted is None else self.wanted
        numbered = enumerate(urls[: placement.shard_count])
        named = [self.leaving.get(shard, "") if shard in placement.removed else url for shard, url in numbered]
        return with_servers(manifest, placement, named, self.emptied)

    def name(self) -> ShardProgram:
        """Return the program after the manifest that names the servers was published."""
        return replace(self, named=True)

    def place(self) -> ShardProgram:
        """Return the program after the requested placement was published."""
        assert self.wanted is not None
        return replace(self, placement=self.wanted, wanted=None)

    def complete(self, urls: Sequence[str]) -> ShardProgram:
        """Return the program after the placement without the left shards was published.

        Args:
            urls: the URLs of the shards by number, without passwords, before that step.
        """
        leaving = {shard: urls[shard] for shard in self.placement.leaving}
        # The run may have left one of these servers before, and added it again since.
        emptied = self.emptied - {*leaving.values()}
        return replace(self, placement=self.placement.completed(), leaving=leaving, emptied=emptied, named=False)

    def leave(self, emptied: Collection[str]) -> ShardProgram:
        """Return the program after the run left the servers of removed shards.

        Args:
            emptied: the URLs of those servers that hold none of the run's data.
        """
        return replace(self, leaving={}, emptied=self.emptied | {*emptied}, named=False)
