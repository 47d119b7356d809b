"""The plan of one call, as the coordinator changes it (`messages.trainers.Plan`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from foreload.cache.parity.placement import Placement
from foreload.trainer.cluster.messages.rendezvous import Rendezvous
from foreload.trainer.cluster.messages.trainers import PlacementText, Plan


class PublishedPlan:
    """now: the newest version."""

    def __init__(self, rendezvous: Rendezvous, placement: Placement, servers: Sequence[str], stop_by: int | None) -> None:
        self._rendezvous, self._placement = rendezvous, placement
        self.now = Plan(0, 0, tuple(servers), stop_by=stop_by)

    def begin(self) -> None:
        """Publish the first version."""
        self._rendezvous.publish(PlacementText(self._placement.text), self.now.placement)
        self._rendezvous.publish(self.now, self.now.version)

    def change(self, **fields: Any) -> None:
        """Publish a version in which these fields of a Plan are others, if they are. When this returns, whoever asks sees it."""
        changed = replace(self.now, **fields)
        if changed == self.now:
            return
        self.now = replace(changed, version=self.now.version + 1)
        self._rendezvous.publish(self.now, self.now.version)

    def move_rows(self, placement: Placement, servers: Sequence[str]) -> None:
        """Rows are, or move, where another placement has them, on these servers."""
        number = self.now.placement + 1
        self._rendezvous.publish(PlacementText(placement.text), number)
        self.change(placement=number, servers=tuple(servers))
