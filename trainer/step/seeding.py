"""Seeding a copy of a lane from its owner's memory: stretches of slots, one after a step while training goes on, or all at once before it.

A stretch is as its step left it; from the next step on, replicas have what changes in it. Which stretch goes after which step both sides know, since
they begin with the term and are of fixed length.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from foreload.cache.rows.partition import Partition
from foreload.trainer.step.exchange import SEED
from foreload.trainer.step.hosted_lanes import HostedLanes
from foreload.trainer.step.replicas import LaneReplica
from foreload.trainer.step.transport import Transport, Work

SLOTS_AT_ONCE = 1 << 16  # of a stretch where nobody trains yet


@dataclass(frozen=True, slots=True)
class Stretch:
    """A lane's slots first .. first + slots - 1, from or for `peer`, as a message: uint8."""

    lane: int
    peer: int
    first: int
    slots: int
    message: Tensor


@dataclass(slots=True)
class Seeds:
    """The stretches that go and come after one step."""

    outgoing: list[Stretch] = field(default_factory=list)
    incoming: list[Stretch] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)


class Seeding:
    """One trainer's side of it, for one term. to: peer -> the lanes hosted here of which it holds copies; copies: those held here, by lane.

    seeded: (lane, rank) of the copies that hold every slot already. stretch: slots that go after a step while training goes on.
    """

    stretch = 4096

    def __init__(
        self,
        transport: Transport,
        lane_map: Sequence[int],
        to: Mapping[int, list[int]],
        lanes: HostedLanes,
        copies: Mapping[int, LaneReplica],
        seeded: Iterable[tuple[int, int]],
    ) -> None:
        self._transport, self._map, self._lanes, self._copies = transport, tuple(lane_map), lanes, copies
        whole = set(seeded)
        self._cursors = {
            (lane, peer): lanes.partitions[lane].slots if (lane, peer) in whole else 0 for peer in to for lane in to[peer]
        }

    def cursor(self, lane: int, peer: int) -> int:
        """A peer's copy has, or is being sent, the slots below it."""
        return self._cursors[lane, peer]

    def next_seeds(self, slots: int) -> Seeds:
        """The next stretch for each copy that lacks slots, and room for those that come here."""
        seeds = Seeds()
        for (lane, peer), cursor in self._cursors.items():
            partition = self._lanes.partitions[lane]
            count = min(slots, partition.slots - cursor)
            if count:
                message = torch.empty(_bytes(partition, count, self._lanes.given[lane].size), dtype=torch.uint8)
                self._write(message, lane, cursor, count)
                seeds.outgoing.append(Stretch(lane, peer, cursor, count, message.to(self._transport.device)))
                self._cursors[lane, peer] += count
        for lane, copy in self._copies.items():
            count = min(slots, copy.partition.slots - copy.cursor)
            if count:
                size = _bytes(copy.partition, count, copy.given.size)
                message = torch.empty(size, dtype=torch.uint8, device=self._transport.device)
                seeds.incoming.append(Stretch(lane, self._map[lane], copy.cursor, count, message))
        return seeds

    def _write(self, message: Tensor, lane: int, first: int, count: int) -> None:
        partition = self._lanes.partitions[lane]
        head, whole_numbers, values = _parts(message, partition, count, self._lanes.given[lane].size)
        head[:2] = self._lanes.traffic.released(lane)
        head[2:] = self._lanes.given[lane]
        for part, column in zip(whole_numbers, (*partition.occupants.columns(), partition.occupants.stored_tag), strict=True):
            part[:] = column[first : first + count]
        for tensor, rows in zip(values, (partition.weights, partition.state), strict=True):
            tensor.copy_(rows[first : first + count])

    def post(self, seeds: Seeds) -> None:
        """Send the stretches, and begin to receive: by lane, so in the same order on both sides."""
        for lane in range(len(self._map)):
            sends = {stretch.peer: stretch.message for stretch in seeds.outgoing if stretch.lane == lane}
            receives = {stretch.peer: stretch.message for stretch in seeds.incoming if stretch.lane == lane}
            if sends or receives:
                seeds.works.append(self._transport.post(sends, receives, SEED))

    def wait(self, seeds: Seeds) -> None:
        """Return when all have come and gone. Raises PeerLost."""
        for work in seeds.works:
            work.wait()
        seeds.works.clear()

    def install(self, seeds: Seeds, step: int) -> None:
        """Put the stretches that have come into their copies, which are those of `step` otherwise."""
        for stretch in seeds.incoming:
            copy = self._copies[stretch.lane]
            partition, slots = copy.partition, slice(stretch.first, stretch.first + stretch.slots)
            head, whole_numbers, values = _parts(stretch.message.cpu(), partition, stretch.slots, copy.given.size)
            for part, column in zip(whole_numbers, (*partition.occupants.columns(), partition.occupants.stored_tag), strict=True):
                column[slots] = part
            for tensor, rows in zip(values, (partition.weights, partition.state), strict=True):
                rows[slots].copy_(tensor)
            copy.cursor, copy.seeded_at = slots.stop, step
            copy.given[:] = head[2:]
            copy.note_released(int(head[0]), int(head[1]))

    def seed_all(self, step: int) -> None:
        """Bring every copy that lacks slots to the state after `step`, where nobody trains yet. Raises PeerLost."""
        while True:
            seeds = self.next_seeds(SLOTS_AT_ONCE)
            if not seeds.outgoing and not seeds.incoming:
                return
            self.post(seeds)
            self.wait(seeds)
            self.install(seeds, step)


def _bytes(partition: Partition, slots: int, tables: int) -> int:
    """Of a stretch: the head, who sits there, weights and states."""
    return 8 * (2 + tables) + slots * (26 + 4 * (partition.weights.shape[1] + partition.state.shape[1]))


def _parts(message: Tensor, partition: Partition, slots: int, tables: int) -> tuple[np.ndarray, list[np.ndarray], list[Tensor]]:
    """Views of a message in CPU memory: the head, int64 [released boundary, batch, ordinals given]; occupants' columns; weights and state."""
    start = 0

    def following(kind: torch.dtype, count: int) -> Tensor:
        nonlocal start
        size = count * kind.itemsize
        start += size
        return message[start - size : start].view(kind)

    head = following(torch.int64, 2 + tables).numpy()
    # Those of 8 bytes first, so that each is aligned.
    ordinal, number = (following(torch.int64, slots).numpy() for _ in range(2))
    values = [
        following(torch.float32, slots * rows.shape[1]).view(slots, rows.shape[1])
        for rows in (partition.weights, partition.state)
    ]
    tag, stored_tag = (following(torch.int32, slots).numpy() for _ in range(2))
    table = following(torch.int16, slots).numpy()
    return head, [table, ordinal, number, tag, stored_tag], values
