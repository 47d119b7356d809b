"""`foreload pool status`: the jobs that share a Ray cluster."""

from __future__ import annotations

from dataclasses import dataclass

from foreload.trainer.adjusting.shares import PoolState, Resources
from foreload.trainer.cluster.engines.opened import pool_state
from foreload.trainer.commands.history import aligned

_HEAD = ("run", "weight", "least", "uses", "share", "aims at")


@dataclass(frozen=True, slots=True)
class Pooled:
    """The jobs that share a cluster.

    Attributes:
        state: None if no job has shared it yet.
    """

    state: PoolState | None

    def text(self) -> str:
        """Return a table of the jobs and their cores."""
        if self.state is None or not self.state.jobs:
            return "no job shares the cluster; those of `foreload train --engine ray --auto` do"
        cluster, others = self.state.cluster, self.state.others
        lines = [f"the cluster has {cluster.cores:g} cores, of which {others.cores:g} serve others; cores of each job:"]
        rows = [
            (
                one.run,
                f"{one.bid.weight:g}",
                _cores(one.bid.least),
                _cores(one.bid.uses),
                _cores(one.share.granted),
                _cores(one.share.aim),
            )
            for one in self.state.jobs
        ]
        return "\n".join([*lines, *aligned([_HEAD, *rows])])


def _cores(amount: Resources | None) -> str:
    return "waits" if amount is None else f"{amount.cores:g}"


def run(address: str | None) -> Pooled:
    """Ask a cluster for the jobs that share it.

    Args:
        address: as --ray-address of `foreload train`.

    Raises:
        SettingError: the cluster cannot be reached.
    """
    return Pooled(pool_state(address))
