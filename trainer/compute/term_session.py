"""A trainer's part in one term. Lanes, dense part and process outlive it."""

from __future__ import annotations

from collections.abc import Sequence

from foreload.trainer.compute.exchange import Exchange
from foreload.trainer.compute.kernels import Kernels
from foreload.trainer.compute.transport import Transport


class TermSession:
    """The group of a term's trainers, who of them hosts which lane, and the exchange between them.

    lane_map[v]: the rank that hosts lane v; the trainer that hosts lane 0 leads. A rank is an address within the term, and no trainer's number: in
    the next term the same trainer may have another one. width: columns of the rows that are exchanged, W. One thread uses it. Raises ValueError if a
    rank hosts no lane.
    """

    def __init__(self, transport: Transport, lane_map: Sequence[int], kernels: Kernels, width: int) -> None:
        if set(lane_map) != set(range(transport.world)):
            raise ValueError(f"lane map: must name each rank of 0 .. {transport.world - 1}, and no other; got {list(lane_map)}")
        self.transport = transport
        self.exchange = Exchange(transport, lane_map, kernels, width)
        self.hosted = self.exchange.hosted
        self.leads = transport.rank == lane_map[0]

    @property
    def bytes_sent(self) -> int:
        """Payload to the others, in this term so far."""
        return sum(self.transport.bytes_sent.values())

    def barrier(self) -> None:
        """Return after every trainer of the term has called this. Raises PeerLost."""
        self.transport.barrier()

    def close(self) -> None:
        """Leave the term. What is under way between the trainers is dropped; those that still wait for this one see PeerLost."""
        self.transport.close()
