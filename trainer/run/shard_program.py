"""The order of steps in which a run's store shards change: shards are added, or one is removed or moved.

The program is pure, and has two drivers, which carry out its steps: `foreload stores` for a stopped run (`commands.migrate`), and the coordinator
for a run that trains (`cluster.coordinator.row_migration`). A driver may die between any two steps. Once the placement is published, the run's folder
tells either driver how to go on. A change that was asked for, but not published, must be asked for again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from foreload.cache.parity.placement import Placement
from foreload.trainer.run.manifest import Manifest
from foreload.trainer.run.servers import left_over, with_servers


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
