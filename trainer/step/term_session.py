"""A trainer's parts, which live as long as its process; its part in one term; and the clock of a step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from foreload.cache.rows.layout import RowLayout
from foreload.pipelines.schedule.format import Event, LaneEvent
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.compute.kernels import Kernels
from foreload.trainer.compute.layouts import BlockLayout, UpdateRules
from foreload.trainer.compute.rates import Rates
from foreload.trainer.compute.training_loss import TrainingLoss
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


@dataclass(frozen=True, slots=True)
class TrainerParts:
    """The schedule, the dense part of the model, and the settings of a step; nothing in it is shared with another trainer.

    takes_step: whether the module's forward gets the number of steps done before; parameters: those of the module that are trained, in its order;
    layouts: of the rows, by table; block: of the embedding block; rules: the row optimizers; rates: learning rates by step; clip_dense: the most
    that the norm of the dense gradients may be, or None; dense_ema: how much of the parameters' moving average stays at each step, or None for none;
    loss: what is trained; seed: of the run; allow_nan: whether training goes on after a loss that is not finite.
    """

    schedule: Schedule
    module: nn.Module
    takes_step: bool
    parameters: Sequence[Tensor]
    optimizer: torch.optim.Optimizer
    layouts: Sequence[RowLayout]
    block: BlockLayout
    rules: UpdateRules
    rates: Rates
    clip_dense: float | None
    dense_ema: float | None
    kernels: Kernels
    loss: TrainingLoss
    seed: int
    device: torch.device
    allow_nan: bool

    def moves(self, event: Event) -> list[LaneEvent]:
        """Every lane's part of an event, by lane: also of the lanes that others host, from whose masks follows what comes from them."""
        return [self.schedule.lane(event, lane) for lane in range(self.schedule.header.lanes)]


@dataclass(slots=True)
class Clock:
    """Seconds of a step by what they went to: the time between two calls of `lap` is added to what the later one names.

    process, thread: processor time of this process, and of the thread that made the clock, when it was made.
    """

    compute: float = 0.0
    exchange: float = 0.0
    waiting: float = 0.0
    begun: float = field(default_factory=time.perf_counter)
    last: float = field(default_factory=time.perf_counter)
    process: float = field(default_factory=time.process_time)
    thread: float = field(default_factory=time.thread_time)

    def lap(self, name: str) -> None:
        """Add the time since the last lap to `name`: compute, exchange or waiting."""
        now = time.perf_counter()
        setattr(self, name, getattr(self, name) + now - self.last)
        self.last = now

    def held_up(self, seconds: float, name: str) -> None:
        """So much of what was added to `name` was waiting for the store."""
        seconds = min(seconds, getattr(self, name))
        setattr(self, name, getattr(self, name) - seconds)
        self.waiting += seconds

    @property
    def seconds(self) -> float:
        """In all, so far."""
        return time.perf_counter() - self.begun

    @property
    def processor_seconds(self) -> tuple[float, float]:
        """Processor time so far of this process, and of it of the thread that runs the step, which must be the one that asks."""
        return time.process_time() - self.process, time.thread_time() - self.thread
