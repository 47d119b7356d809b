"""What trainers send each other in a step: rows, gradients of rows, and sums of dense gradients.

Rows go to the lanes that use them, and gradients go back to the owners. A row's *owner* is its
lane, or the trainer that hosts this lane. A *peer* is the rank of another trainer. An owner lane's
*list of rows* is the list of its rows that a step uses: U rows in the order of first lookup, as in
LaneEvent. `users` [U] holds the masks of the lanes that use each row.

Both sides derive from the schedule's masks and the lane map what is sent, so no index and no size
is ever sent. A row goes at most once to a trainer: early, while the step before still computes, or
on the critical path. Gradients go back in one part per lane, since parts are added in lane order
(docs/definitions.md, A step's arithmetic).

A lane's dense gradients are one vector. It is cut into one chunk per trainer, and that trainer adds
the chunk over all lanes (docs/internals/trainer.md, A step). A *parcel* is a lane's chunk followed
by the lane's loss.
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
    """Return the places, int32, of the rows that some lane of `bits` uses."""
    out = np.empty(users.size, np.int32)
    count = 0
    for i in range(users.size):
        if users[i] & bits:
            out[count] = i
            count += 1
    return out[:count]


@nb.njit(nogil=True, cache=True)
def _split(users: np.ndarray, bits: np.uint64, early: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the places that `_select` returns, in two lists.

    The first list has the places where `early`, bool [U], is set, and the second one has the
    others.
    """
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
    """What one trainer sends and receives for one event.

    Places are int32 indices into an owner lane's list of rows.

    Attributes:
        events: every lane's part of the event.
        sends: by peer, for each hosted lane: (lane, early places, critical places).
        buffers: by peer, float32 [early rows, then critical rows; W], which receives the peer's
            rows.
        early_rows: by peer, the number of rows in its buffer that come early.
        at: by lane of a peer, int32 [U], where the lane's rows are in the peer's buffer.
        local: by hosted lane, for each owner lane the places of the rows that the hosted lane uses.
            These are the lane's local rows, in this order.
        early: the early messages, while they are under way.
        held: the buffers of the early rows, kept alive until they have been sent.
    """

    events: Sequence[LaneEvent]
    sends: dict[int, list[tuple[int, np.ndarray, np.ndarray]]]
    buffers: dict[int, Tensor]
    early_rows: dict[int, int]
    at: dict[int, np.ndarray]
    local: dict[int, list[np.ndarray]]
    early: Work | None = None
    held: list[Tensor] = field(default_factory=list)


@dataclass(slots=True)
class DenseSum:
    """The sum of the lanes' dense gradients while it is under way.

    First the lanes' chunks go to the trainers that add them. Then each trainer sends its sum to all
    others.

    Attributes:
        parcels: the argument of `begin_dense`.
        bounds: where each trainer's chunk begins, and where the last one ends.
        outgoing: the tensors being sent, which must live until that is done.
        incoming: the tensors being received, which must live until that is done.
        work: the messages under way.
        total: float32 [GradientBucket.length], or None until `add_dense` is called.
    """

    parcels: Mapping[int, Sequence[Tensor]]
    bounds: list[int]
    outgoing: dict[int, Tensor]
    incoming: dict[int, Tensor]
    work: Work
    total: Tensor | None = None


def _joined(parts: list[Tensor], device: torch.device) -> Tensor:
    """Return the parts as one contiguous tensor.

    A single part is not copied. Without parts the tensor is empty.
    """
    return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else torch.empty(0, device=device)


class Exchange:
    """One trainer's side of the exchange, for one term.

    The leader is the trainer that hosts lane 0.
    """

    def __init__(self, transport: Transport, lane_map: Sequence[int], kernels: Kernels, width: int) -> None:
        """Set up the exchange for a term's lane map.

        Args:
            lane_map: for each lane, the rank that hosts it.
            width: W, the columns of the rows that are exchanged.
        """
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
        """Return what the exchange of one event sends and receives.

        Args:
            events: every lane's part of the event.
            early: whether any rows may go before the event's step. If false, all go on the critical
                path.
        """
        flags = [event.early if early else np.zeros_like(event.early) for event in events]
        sends = {
            peer: [(lane, *_split(events[lane].users, self._masks[peer], flags[lane])) for lane in self.hosted]
            for peer in self._peers
        }
        buffers, early_rows, at = {}, {}, {}
        for peer in self._peers:
            hosted_here = self._masks[self._transport.rank]
            parts = [(lane, *_split(events[lane].users, hosted_here, flags[lane])) for lane in self._lanes[peer]]
            # A peer sends two messages into one buffer: first the early rows of all its lanes, then
            # their critical rows.
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
        """Start the early messages of the next step.

        Args:
            plan: the plan of the next step.
            fill: `fill(lane, places, out)` writes the rows of a hosted lane at `places` into `out`.
        """
        outgoing = {}
        for peer, parts in plan.sends.items():
            buffer = self._empty(sum(first.size for _, first, _ in parts))
            start = 0
            for lane, first, _ in parts:
                fill(lane, first, buffer[start : start + first.size])
                start += first.size
            outgoing[peer] = buffer
        # In a peer's buffer, the early rows come first and the critical rows follow.
        incoming = {peer: buffer[: plan.early_rows[peer]] for peer, buffer in plan.buffers.items()}
        # The buffers must live until they have been sent.
        plan.held = list(outgoing.values())
        plan.early = self._transport.post(outgoing, incoming, EARLY)

    def finish_rows(self, plan: ExchangePlan, weights: Mapping[int, Tensor], meanwhile: Callable[[], None] | None = None) -> None:
        """Exchange the critical rows, and wait until all rows of the step have arrived.

        Args:
            weights: by hosted lane, float32 [slots, W].
            meanwhile: called once all messages are on their way.
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
        """Wait for the early messages of a plan, if any are under way."""
        if plan.early is not None:
            plan.early.wait()
            plan.early = None
            plan.held.clear()

    def local_rows(self, plan: ExchangePlan, lane: int, weights: Mapping[int, Tensor]) -> tuple[Tensor, np.ndarray | None]:
        """Return a hosted lane's local rows, by owner lane and then by first lookup in the step.

        Returns:
            The rows, float32 [n, W], and None. If there is a single lane, its partition and the
            slots of the rows, int32 [n]: then nothing is copied.
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
        """Return views of a lane's gradients, one for each owner lane.

        The gradients of the lane's local rows are ordered by owner lane.
        """
        return list(gradients.split([part.size for part in plan.local[lane]]))

    def sum_row_gradients(
        self, plan: ExchangePlan, gradients: Mapping[int, Tensor], meanwhile: Callable[[], None] | None = None
    ) -> dict[int, Tensor]:
        """Return every lane's gradients to the owners, and add them there in lane order.

        Args:
            gradients: by hosted lane, float32 [n, W], the gradients of its local rows.
            meanwhile: called once all messages are on their way.

        Returns:
            By hosted lane, float32 [U, W], the sums for its list of rows.
        """
        if len(self._map) == 1:
            return dict(gradients)
        parts = {lane: self._owner_parts(plan, lane, gradient) for lane, gradient in gradients.items()}
        outgoing = {
            peer: _joined([parts[lane][owner] for lane in self.hosted for owner in self._lanes[peer]], self._transport.device)
            for peer in self._peers
        }
        # For each hosted owner, the number of its rows that each lane elsewhere uses. This is the
        # length of the part that comes back from that lane.
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
        # Cut each message as the peer joined it: by lane, and then by owner.
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
                # Floating-point addition is not associative. Adding in lane order gives the same
                # bits whichever trainer hosts a lane.
                part = parts[lane][owner] if lane in parts else received[lane, owner]
                self._kernels.add_part(totals[owner], users, lane, part)
        return totals

    def begin_dense(self, parcels: Mapping[int, Sequence[Tensor]], sizes: Sequence[int]) -> DenseSum:
        """Begin to add the dense vectors of two or more lanes in lane order.

        Every trainer adds one chunk and gets each lane's part of it. A trainer without lanes sends
        each other trainer a message with a single value. A trainer that has everyone's messages of
        a step therefore knows that all trainers reached this point.

        Args:
            parcels: by hosted lane, for each trainer a float32 [chunk + 1]: the lane's part of this
                trainer's chunk, followed by the lane's loss. They must not change until
                `finish_dense` returns.
            sizes: for each trainer, the size of its parcels, which is that of its chunk + 1.
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
        """Add this trainer's chunk over all lanes, and start sending the sum to the others.

        Returns:
            The losses of all lanes, float32 [lanes].
        """
        rank, bounds = self._transport.rank, dense.bounds
        dense.work.wait()
        parts = {lane: parcels[rank] for lane, parcels in dense.parcels.items()}
        for peer, buffer in dense.incoming.items():
            if lanes := self._lanes[peer]:
                parts.update(zip(lanes, buffer.split(buffer.numel() // len(lanes)), strict=True))
        total = dense.total = torch.empty(bounds[-1], device=self._transport.device)
        own = total[bounds[rank] : bounds[rank + 1]]
        # Add in lane order. The last value of each part is the lane's loss, which is not added.
        torch.add(parts[0][:-1], parts[1][:-1], out=own)
        for lane in range(2, len(self._map)):
            own.add_(parts[lane][:-1])
        dense.outgoing = dict.fromkeys(self._peers, own)
        dense.incoming = {peer: total[bounds[peer] : bounds[peer + 1]] for peer in self._peers}
        dense.work = self._transport.post(dense.outgoing, dense.incoming, DENSE_SUM)
        return torch.stack([parts[lane][-1] for lane in range(len(self._map))])

    def finish_dense(self, dense: DenseSum) -> Tensor:
        """Wait for the sum of the lanes' dense vectors and return it.

        It is float32 [GradientBucket.length], with the same bits on every trainer.
        """
        dense.work.wait()
        assert dense.total is not None
        return dense.total

    def collect_outputs(self, outputs: Mapping[int, Tensor], shapes: Sequence[tuple[int, ...]]) -> list[Tensor] | None:
        """Bring every lane's outputs of an evaluation step to the leader.

        Args:
            outputs: by hosted lane, float32 of its shape.
            shapes: for every lane, the shape of its outputs.

        Returns:
            On the leader, the outputs of each lane, float32 of `shapes[lane]`. Elsewhere None.
        """
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
        """Return the leader's `found` on every trainer.

        On the other trainers `found` is overwritten. It must have the same shape and dtype on all.
        """
        leads = self._transport.rank == self._leader
        sends, receives = (dict.fromkeys(self._peers, found), {}) if leads else ({}, {self._leader: found})
        self._transport.post(sends, receives, VERDICT).wait()
        return found

    def gather(self, own: Tensor) -> list[Tensor]:
        """Return every trainer's tensor by rank, on the CPU.

        Args:
            own: this trainer's tensor, of the same shape and dtype on all trainers.
        """
        own = own.to(self._transport.device)
        received = {peer: torch.empty_like(own) for peer in self._peers}
        self._transport.post(dict.fromkeys(self._peers, own), received, GATHERED).wait()
        received[self._transport.rank] = own
        return [received[rank].cpu() for rank in range(self._transport.world)]


# In float32 values. Each gradient begins at a multiple of 64 bytes, so that it is aligned as a
# tensor of its own would be.
_ALIGNED = 16


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of a parameter's gradient that lies in one chunk.

    Attributes:
        parameter: the parameter's number, in order.
        start: the first element in the chunk.
        end: the element behind the last one in the chunk.
        place: where the part begins in the memory of the parcels.
        whole: whether the part is the whole gradient.
    """

    parameter: int
    start: int
    end: int
    place: int
    whole: bool


class GradientBucket:
    """The place of each parameter's gradient in one vector, and the chunk that each trainer adds.

    The vector is float32 [length]. A lane's parcel for a trainer is that trainer's chunk of the
    lane's vector, followed by the lane's loss. So a trainer knows all losses as soon as it has all
    parcels meant for it.
    """

    def __init__(self, parameters: Sequence[Tensor], chunks: int) -> None:
        """Lay out the vector.

        Args:
            parameters: the trained parameters, in order.
            chunks: the number of chunks, which is the number of trainers.
        """
        self._shapes = [parameter.shape for parameter in parameters]
        sizes = [-(-parameter.numel() // _ALIGNED) * _ALIGNED for parameter in parameters]
        self._starts = list(accumulate(sizes, initial=0))
        self.length = self._starts[-1]
        self._bounds = [self.length * k // chunks for k in range(chunks + 1)]
        self._memory = self.length + chunks * _ALIGNED
        # Every parcel before this one adds a loss. A loss takes _ALIGNED values of memory, so that
        # the gradients behind it stay aligned.
        self._parcels = [slice(begin + k * _ALIGNED, end + k * _ALIGNED + 1) for k, (begin, end) in enumerate(self._chunks())]
        self._pieces = [
            piece for k, (begin, end) in enumerate(self._chunks()) for piece in self._pieces_of(begin, end, k * _ALIGNED)
        ]
        self._packed: dict[int, tuple[Tensor, list[Tensor]]] = {}

    @property
    def parcel_sizes(self) -> list[int]:
        """For each trainer, the number of values in a parcel for it."""
        return [end - begin + 1 for begin, end in self._chunks()]

    def _chunks(self) -> list[tuple[int, int]]:
        return list(zip(self._bounds[:-1], self._bounds[1:], strict=True))

    def _pieces_of(self, begin: int, end: int, shift: int) -> list[Piece]:
        """Return the pieces of gradients between `begin` and `end` of the vector.

        In the parcels' memory, each piece lies `shift` values further on than in the vector.
        """
        pieces = []
        for number, (first, shape) in enumerate(zip(self._starts[:-1], self._shapes, strict=True)):
            start, stop = max(begin, first), min(end, first + shape.numel())
            if start < stop:
                pieces.append(Piece(number, start - first, stop - first, start + shift, stop - start == shape.numel()))
        return pieces

    def gradients(self, flat: Tensor) -> list[Tensor]:
        """Return views of a vector [length], one for each parameter, in its shape."""
        return [
            flat[start : start + shape.numel()].view(shape) for start, shape in zip(self._starts[:-1], self._shapes, strict=True)
        ]

    def pack(self, gradients: Sequence[Tensor], loss: Tensor, lane: int) -> list[Tensor]:
        """Return a lane's parcels, one for each trainer, float32 [chunk + 1].

        They are in the same memory each time, so the lane's next call overwrites them. The gaps
        between gradients, which exist for alignment, are 0.

        Args:
            gradients: one for each parameter, in its shape.
            loss: the lane's loss, without dimensions.
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
