"""What trainers send each other in a step: rows to the lanes that use them, gradients back to the owners, dense sums.

A row's *owner* is its lane, or the trainer that hosts that. A *peer* is the rank of another trainer. An owner lane's *list of rows* is what a step
uses of it, U rows in the order of first lookup, as LaneEvent has them; `users` [U] are the masks of the lanes that use each.

Who sends what follows from the schedule's masks and the lane map, on both sides alike, so no index and no size is ever sent. A row goes at
most once to a trainer: early, while the step before still computes, or on the critical path. Gradients go back one part per lane, since
parts are added in lane order (docs/definitions.md, A step's arithmetic).

A lane's dense gradients are one vector, cut into one chunk per trainer, which adds that chunk over all lanes (docs/internals/trainer.md, A step). A
parcel is a lane's chunk with the lane's loss behind it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from foreload.base.compiled import nb
from foreload.pipelines.schedule.format import LaneEvent
from foreload.trainer.compute.kernels import Kernels
from foreload.trainer.step.transport import Transport, Work

# Kinds of messages.
EARLY, CRITICAL, GRADIENTS, DENSE, DENSE_SUM, OUTPUTS, VERDICT, REPLICA, SEED, STATE, GATHERED = range(11)


@nb.njit(nogil=True, cache=True)
def _select(users: np.ndarray, bits: np.uint64) -> np.ndarray:
    """Places, int32, of the rows that some lane of `bits` uses."""
    out = np.empty(users.size, np.int32)
    count = 0
    for i in range(users.size):
        if users[i] & bits:
            out[count] = i
            count += 1
    return out[:count]


@nb.njit(nogil=True, cache=True)
def _split(users: np.ndarray, bits: np.uint64, early: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`_select` in two lists: the places where early, bool [U], is set, and the others."""
    first, second = np.empty(users.size, np.int32), np.empty(users.size, np.int32)
    a = b = 0
    for i in range(users.size):
        if users[i] & bits:
            if early[i]:
                first[a] = i
                a += 1
            else:
                second[b] = i
                b += 1
    return first[:a], second[:b]


@dataclass(slots=True)
class ExchangePlan:
    """What one trainer sends and receives for one event; places are int32 indices into an owner lane's list of rows.

    events: every lane's part of the event. sends: peer -> per hosted lane (lane, early places, critical places). buffers: peer -> float32 [early,
    then critical rows; W]. early_rows: peer -> rows of the buffer that come early. at: lane of a peer -> int32 [U], where its rows stand in the
    peer's buffer. local: hosted lane -> per owner lane, the places of the rows that it uses, which are its local rows in this order.
    """

    events: Sequence[LaneEvent]
    sends: dict[int, list[tuple[int, np.ndarray, np.ndarray]]]
    buffers: dict[int, Tensor]
    early_rows: dict[int, int]
    at: dict[int, np.ndarray]
    local: dict[int, list[np.ndarray]]
    early: Work | None = None
    held: list[Tensor] = field(default_factory=list)  # what is being sent early, until it is gone


@dataclass(slots=True)
class DenseSum:
    """The sum of the lanes' dense gradients while it is under way: first the lanes' chunks to who adds them, then each sum to all.

    parcels: as `begin_dense` got them; bounds: where each trainer's chunk begins, and where the last one ends; outgoing, incoming: the messages under
    way, which must live as long; total: float32 [GradientBucket.length], once `add_dense` was called.
    """

    parcels: Mapping[int, Sequence[Tensor]]
    bounds: list[int]
    outgoing: dict[int, Tensor]
    incoming: dict[int, Tensor]
    work: Work
    total: Tensor | None = None


def _joined(parts: list[Tensor], device: torch.device) -> Tensor:
    """One contiguous tensor of the parts; a single one is not copied, and of none it is empty."""
    return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else torch.empty(0, device=device)


class Exchange:
    """One trainer's side of the exchange, for one term: lane_map[v] is the rank that hosts lane v. The leader is the one that hosts lane 0."""

    def __init__(self, transport: Transport, lane_map: Sequence[int], kernels: Kernels, width: int) -> None:
        self._transport, self._kernels, self._width = transport, kernels, width
        self._map = tuple(lane_map)
        self._leader = self._map[0]
        self.hosted = [lane for lane, host in enumerate(lane_map) if host == transport.rank]
        self._peers = [peer for peer in range(transport.world) if peer != transport.rank]
        self._lanes = {peer: [lane for lane, host in enumerate(lane_map) if host == peer] for peer in range(transport.world)}
        self._masks = {peer: np.uint64(sum(1 << lane for lane in lanes)) for peer, lanes in self._lanes.items()}

    def _empty(self, rows: int) -> Tensor:
        return torch.empty((rows, self._width), dtype=torch.float32, device=self._transport.device)

    def plan(self, events: Sequence[LaneEvent], early: bool) -> ExchangePlan:
        """What an event's exchange consists of. events: every lane's part of it; early: whether rows may go before the step, at all."""
        flags = [event.early if early else np.zeros_like(event.early) for event in events]
        sends = {
            peer: [(lane, *_split(events[lane].users, self._masks[peer], flags[lane])) for lane in self.hosted]
            for peer in self._peers
        }
        buffers, early_rows, at = {}, {}, {}
        for peer in self._peers:
            hosted_here = self._masks[self._transport.rank]
            parts = [(lane, *_split(events[lane].users, hosted_here, flags[lane])) for lane in self._lanes[peer]]
            # A peer sends two messages into one buffer: the early rows of all its lanes, and behind them the critical ones.
            early_rows[peer] = place = sum(first.size for _, first, _ in parts)
            total, start = place + sum(second.size for _, _, second in parts), 0
            for lane, first, second in parts:
                at[lane] = np.empty(events[lane].users.size, np.int32)
                at[lane][first] = np.arange(start, start + first.size)
                at[lane][second] = np.arange(place, place + second.size)
                start, place = start + first.size, place + second.size
            buffers[peer] = self._empty(total)
        local = {lane: [_select(event.users, np.uint64(1 << lane)) for event in events] for lane in self.hosted}
        return ExchangePlan(events, sends, buffers, early_rows, at, local)

    def post_early(self, plan: ExchangePlan, fill: Callable[[int, np.ndarray, Tensor], None]) -> None:
        """Start the early messages of the next step, whose plan this is. fill(lane, places, out): write a hosted lane's rows into out."""
        outgoing = {}
        for peer, parts in plan.sends.items():
            buffer = self._empty(sum(first.size for _, first, _ in parts))
            start = 0
            for lane, first, _ in parts:
                fill(lane, first, buffer[start : start + first.size])
                start += first.size
            outgoing[peer] = buffer
        incoming = {peer: buffer[: plan.early_rows[peer]] for peer, buffer in plan.buffers.items()}
        plan.held = list(outgoing.values())
        plan.early = self._transport.post(outgoing, incoming, EARLY)

    def finish_rows(self, plan: ExchangePlan, weights: Mapping[int, Tensor], meanwhile: Callable[[], None] | None = None) -> None:
        """Send and receive what goes on the critical path, and wait until all rows of the step are here. weights: hosted lane -> [slots, W].

        meanwhile: called once all is on its way.
        """
        outgoing = {}
        for peer, parts in plan.sends.items():
            buffer = self._empty(sum(second.size for _, _, second in parts))
            start = 0
            for lane, _, second in parts:
                self._kernels.take_rows(weights[lane], plan.events[lane].slots[second], buffer[start : start + second.size])
                start += second.size
            outgoing[peer] = buffer
        incoming = {peer: buffer[plan.early_rows[peer] :] for peer, buffer in plan.buffers.items()}
        critical = self._transport.post(outgoing, incoming, CRITICAL)
        if meanwhile is not None:
            meanwhile()
        self.finish_early(plan)
        critical.wait()

    def finish_early(self, plan: ExchangePlan) -> None:
        """Wait for the early messages of a plan, if they are under way."""
        if plan.early is not None:
            plan.early.wait()
            plan.early = None
            plan.held.clear()

    def local_rows(self, plan: ExchangePlan, lane: int, weights: Mapping[int, Tensor]) -> tuple[Tensor, np.ndarray | None]:
        """The local rows of a hosted lane, by owner lane and then by first lookup in the step: (rows float32 [n, W], None).

        Of a single lane, (its partition, the slots int32 [n] of the rows).
        """
        if len(self._map) == 1:
            return weights[lane], plan.events[lane].slots
        parts = plan.local[lane]
        rows = self._empty(sum(part.size for part in parts))
        start = 0
        for owner, part in enumerate(parts):
            out = rows[start : start + part.size]
            if owner in weights:
                self._kernels.take_rows(weights[owner], plan.events[owner].slots[part], out)
            else:
                self._kernels.take_rows(plan.buffers[self._map[owner]], plan.at[owner][part], out)
            start += part.size
        return rows, None

    def _owner_parts(self, plan: ExchangePlan, lane: int, gradients: Tensor) -> list[Tensor]:
        """Gradients of a lane's local rows, which stand by owner lane, cut into a view per owner."""
        return list(gradients.split([part.size for part in plan.local[lane]]))

    def sum_row_gradients(
        self, plan: ExchangePlan, gradients: Mapping[int, Tensor], meanwhile: Callable[[], None] | None = None
    ) -> dict[int, Tensor]:
        """Return every lane's gradients to the owners and add them there in lane order.

        gradients: hosted lane -> float32 [n, W] of its local rows. Returns hosted lane -> float32 [U, W] of its list of rows. meanwhile: called once
        all is on its way.
        """
        if len(self._map) == 1:
            return dict(gradients)
        parts = {lane: self._owner_parts(plan, lane, gradient) for lane, gradient in gradients.items()}
        outgoing = {
            peer: _joined([parts[lane][owner] for lane in self.hosted for owner in self._lanes[peer]], self._transport.device)
            for peer in self._peers
        }
        # How many rows of a hosted owner each lane elsewhere uses: so long is the part that comes back.
        used = {
            owner: {
                lane: _select(plan.events[owner].users, np.uint64(1 << lane)).size
                for peer in self._peers
                for lane in self._lanes[peer]
            }
            for owner in self.hosted
        }
        incoming = {
            peer: self._empty(sum(used[owner][lane] for lane in self._lanes[peer] for owner in self.hosted))
            for peer in self._peers
        }
        work = self._transport.post(outgoing, incoming, GRADIENTS)
        if meanwhile is not None:
            meanwhile()
        work.wait()
        received: dict[tuple[int, int], Tensor] = {}
        for peer, buffer in incoming.items():
            start = 0
            for lane in self._lanes[peer]:
                for owner in self.hosted:
                    received[lane, owner] = buffer[start : start + used[owner][lane]]
                    start += used[owner][lane]
        totals = {}
        for owner in self.hosted:
            users = plan.events[owner].users
            totals[owner] = self._empty(users.size)
            for lane in range(len(self._map)):
                part = parts[lane][owner] if lane in parts else received[lane, owner]
                self._kernels.add_part(totals[owner], users, lane, part)
        return totals

    def begin_dense(self, parcels: Mapping[int, Sequence[Tensor]], sizes: Sequence[int]) -> DenseSum:
        """Begin to add the dense vectors of two or more lanes in lane order: every trainer adds one chunk, of which it gets each lane's part.

        parcels: hosted lane -> for each trainer, float32 [its chunk + 1], the lane's part of the chunk and then the lane's loss; they must stay
        as they are until `finish_dense`. sizes: of each trainer its chunk + 1.

        A trainer without lanes sends each other one a message of a single value: who has everyone's messages of a step knows that all came so far.
        """
        rank, device = self._transport.rank, self._transport.device
        bounds = list(accumulate((size - 1 for size in sizes), initial=0))
        token = [] if self.hosted else [torch.zeros(1, device=device)]
        outgoing = {peer: _joined([parcels[lane][peer] for lane in self.hosted] + token, device) for peer in self._peers}
        incoming = {
            peer: torch.empty(sizes[rank] * len(lanes) if (lanes := self._lanes[peer]) else 1, device=device)
            for peer in self._peers
        }
        return DenseSum(parcels, bounds, outgoing, incoming, self._transport.post(outgoing, incoming, DENSE))

    def add_dense(self, dense: DenseSum) -> Tensor:
        """Add this trainer's chunk, and send the others what came out. Returns the losses of all lanes, float32 [lanes]."""
        rank, bounds = self._transport.rank, dense.bounds
        dense.work.wait()
        parts = {lane: parcels[rank] for lane, parcels in dense.parcels.items()}
        for peer, buffer in dense.incoming.items():
            if lanes := self._lanes[peer]:
                parts.update(zip(lanes, buffer.split(buffer.numel() // len(lanes)), strict=True))
        total = dense.total = torch.empty(bounds[-1], device=self._transport.device)
        own = total[bounds[rank] : bounds[rank + 1]]
        torch.add(parts[0][:-1], parts[1][:-1], out=own)
        for lane in range(2, len(self._map)):
            own.add_(parts[lane][:-1])
        dense.outgoing = dict.fromkeys(self._peers, own)
        dense.incoming = {peer: total[bounds[peer] : bounds[peer + 1]] for peer in self._peers}
        dense.work = self._transport.post(dense.outgoing, dense.incoming, DENSE_SUM)
        return torch.stack([parts[lane][-1] for lane in range(len(self._map))])

    def finish_dense(self, dense: DenseSum) -> Tensor:
        """The sum of the lanes' dense vectors, float32 [GradientBucket.length], the same on every trainer."""
        dense.work.wait()
        assert dense.total is not None
        return dense.total

    def collect_outputs(self, outputs: Mapping[int, Tensor], shapes: Sequence[tuple[int, ...]]) -> list[Tensor] | None:
        """Bring every lane's outputs of an evaluation step to the leader: there, per lane float32 of shapes[lane]; elsewhere None."""
        device = self._transport.device
        if self._transport.rank != self._leader:
            self._transport.post(
                {self._leader: _joined([outputs[lane].contiguous() for lane in self.hosted], device)}, {}, OUTPUTS
            ).wait()
            return None
        sizes = [math.prod(shape) for shape in shapes]
        incoming = {peer: torch.empty(sum(sizes[lane] for lane in self._lanes[peer]), device=device) for peer in self._peers}
        self._transport.post({}, incoming, OUTPUTS).wait()
        by_lane = dict(outputs)
        for peer, buffer in incoming.items():
            for lane, values in zip(self._lanes[peer], buffer.split([sizes[lane] for lane in self._lanes[peer]]), strict=True):
                by_lane[lane] = values.view(shapes[lane])
        return [by_lane[lane] for lane in range(len(self._map))]

    def agree(self, found: Tensor) -> Tensor:
        """The leader's `found`, on every trainer: elsewhere it is overwritten. Of the same shape and dtype everywhere."""
        leads = self._transport.rank == self._leader
        sends, receives = (dict.fromkeys(self._peers, found), {}) if leads else ({}, {self._leader: found})
        self._transport.post(sends, receives, VERDICT).wait()
        return found

    def gather(self, own: Tensor) -> list[Tensor]:
        """Every trainer's tensor, by rank, on the CPU of each. own: this one's, of the same shape and dtype on all."""
        own = own.to(self._transport.device)
        received = {peer: torch.empty_like(own) for peer in self._peers}
        self._transport.post(dict.fromkeys(self._peers, own), received, GATHERED).wait()
        received[self._transport.rank] = own
        return [received[rank].cpu() for rank in range(self._transport.world)]


_ALIGNED = 16  # float32 values: each gradient begins 64 bytes on, so that it is aligned like a tensor of its own


@dataclass(frozen=True, slots=True)
class Piece:
    """What of a parameter lies in one chunk: its elements start .. end - 1, at `place` of the memory of the parcels; whole: all of them."""

    parameter: int
    start: int
    end: int
    place: int
    whole: bool


class GradientBucket:
    """Where the gradient of each parameter stands in a vector float32 [length], and which chunk of that each trainer adds.

    A lane's parcel for a trainer is that trainer's chunk of the lane's vector, and behind it the lane's loss, so that every trainer knows all
    losses as soon as it has the parcels meant for it.
    """

    def __init__(self, parameters: Sequence[Tensor], chunks: int) -> None:
        """parameters: those that are trained, in order; chunks: as many as trainers."""
        self._shapes = [parameter.shape for parameter in parameters]
        sizes = [-(-parameter.numel() // _ALIGNED) * _ALIGNED for parameter in parameters]
        self._starts = list(accumulate(sizes, initial=0))
        self.length = self._starts[-1]
        self._bounds = [self.length * k // chunks for k in range(chunks + 1)]
        self._memory = self.length + chunks * _ALIGNED
        # Every parcel before it adds a loss, which takes _ALIGNED values of memory, so that gradients behind it stay aligned.
        self._parcels = [slice(begin + k * _ALIGNED, end + k * _ALIGNED + 1) for k, (begin, end) in enumerate(self._chunks())]
        self._pieces = [
            piece for k, (begin, end) in enumerate(self._chunks()) for piece in self._pieces_of(begin, end, k * _ALIGNED)
        ]
        self._packed: dict[int, tuple[Tensor, list[Tensor]]] = {}

    @property
    def parcel_sizes(self) -> list[int]:
        """Of each trainer, how many values a parcel for it has."""
        return [end - begin + 1 for begin, end in self._chunks()]

    def _chunks(self) -> list[tuple[int, int]]:
        return list(zip(self._bounds[:-1], self._bounds[1:], strict=True))

    def _pieces_of(self, begin: int, end: int, shift: int) -> list[Piece]:
        """What lies between begin and end of the vector, which stand `shift` values further on in the parcels' memory."""
        pieces = []
        for number, (first, shape) in enumerate(zip(self._starts[:-1], self._shapes, strict=True)):
            start, stop = max(begin, first), min(end, first + shape.numel())
            if start < stop:
                pieces.append(Piece(number, start - first, stop - first, start + shift, stop - start == shape.numel()))
        return pieces

    def gradients(self, flat: Tensor) -> list[Tensor]:
        """Views of a vector [length], one a parameter, in its shape."""
        return [
            flat[start : start + shape.numel()].view(shape) for start, shape in zip(self._starts[:-1], self._shapes, strict=True)
        ]

    def pack(self, gradients: Sequence[Tensor], loss: Tensor, lane: int) -> list[Tensor]:
        """A lane's parcels, one per trainer, float32 [chunk + 1]; in the lane's same memory each time, so the next call overwrites them.

        gradients: one per parameter, in its shape; loss: of the lane, without dimensions. What lies between gradients, for alignment, is 0.
        """
        if lane not in self._packed:
            memory = torch.zeros(self._memory, device=loss.device)
            views = [memory[piece.place : piece.place + piece.end - piece.start] for piece in self._pieces]
            for place, piece in enumerate(self._pieces):
                if piece.whole:
                    views[place] = views[place].view(self._shapes[piece.parameter])
            self._packed[lane] = memory, views
        memory, views = self._packed[lane]
        values = [
            gradients[piece.parameter] if piece.whole else gradients[piece.parameter].reshape(-1)[piece.start : piece.end]
            for piece in self._pieces
        ]
        torch._foreach_copy_(views, values)
        parcels = [memory[parcel] for parcel in self._parcels]
        for parcel in parcels:
            parcel[-1] = loss
        return parcels
