"""A trainer's part in one term. Lanes, dense part and process outlive it."""

from __future__ import annotations

from collections.abc import Sequence

from foreload.trainer.compute.kernels import Kernels
from foreload.trainer.step.exchange import Exchange
from foreload.trainer.step.transport import Transport


class TermSession:
    """The group of a term's trainers, who of them hosts which lane, and the exchange between them.

    lane_map[v]: the rank that hosts lane v; the trainer that hosts lane 0 leads. A rank is an address within the term, and no trainer's number: in
    the next term the same trainer may have another one. width: columns of the rows that are exchanged, W. copy_map[v]: the ranks that hold a copy
    of lane v, none by default. A rank may host no lane: it takes part in every step all the same. One thread uses it. Raises ValueError for a rank
    that is none of the group's, or that holds a copy of its own lane.
    """

    def __init__(
        self,
        transport: Transport,
        lane_map: Sequence[int],
        kernels: Kernels,
        width: int,
        copy_map: Sequence[Sequence[int]] = (),
    ) -> None:
        ranks_there = set(range(transport.world))
        if not set(lane_map) <= ranks_there:
            raise ValueError(f"lane map: must name ranks of 0 .. {transport.world - 1}, and no other; got {list(lane_map)}")
        self.copy_map = tuple(tuple(ranks) for ranks in copy_map) or ((),) * len(lane_map)
        if len(self.copy_map) != len(lane_map) or any(
            host in ranks or not set(ranks) <= ranks_there for host, ranks in zip(lane_map, self.copy_map, strict=True)
        ):
            raise ValueError(
                f"copy map: must name, for each lane, ranks that do not host it; got {self.copy_map} for {list(lane_map)}"
            )
        self.transport, self.lane_map = transport, tuple(lane_map)
        self.copied = [lane for lane, ranks in enumerate(self.copy_map) if transport.rank in ranks]
        self.exchange = Exchange(transport, lane_map, kernels, width)
        self.hosted = self.exchange.hosted
        self.leads = transport.rank == lane_map[0]

    @property
    def has_copies(self) -> bool:
        """Whether there is a copy of any lane, on any trainer."""
        return any(self.copy_map)

    @property
    def bytes_sent(self) -> int:
        """Payload to the others, in this term so far."""
        return sum(self.transport.bytes_sent.values())

    def barrier(self) -> None:
        """Return after every trainer of the term has called this. Raises PeerLost."""
        self.transport.barrier()
