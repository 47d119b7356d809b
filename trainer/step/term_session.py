"""A trainer's parts, its session in one term, and the clock of a step.

The parts live as long as the trainer's process, a session as long as its term.
"""

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
    """The group of a term's trainers, its lane map, and the exchange between the trainers.

    The trainer that hosts lane 0 leads. A rank is an address within the term, not the trainer's
    number, and in the next term the same trainer may have another rank. A rank that hosts no lane
    still takes part in every step. One thread uses a session.

    Attributes:
        transport: carries the messages between the term's trainers.
        lane_map: for each lane, the rank that hosts it.
        copy_map: for each lane, the ranks that hold a replica of it. By default there are none.
        copied: the lanes of which this trainer holds replicas.
        exchange: passes rows and gradients between the lanes.
        hosted: the lanes that this trainer hosts.
        leads: whether this trainer hosts lane 0.
    """

    def __init__(
        self,
        transport: Transport,
        lane_map: Sequence[int],
        kernels: Kernels,
        width: int,
        copy_map: Sequence[Sequence[int]] = (),
    ) -> None:
        """Begin this trainer's part in the term whose group `transport` is.

        Args:
            lane_map: for each lane, the rank that hosts it.
            width: W, the columns of the rows that are exchanged.
            copy_map: for each lane, the ranks that hold a replica of it. If empty, there are none.

        Raises:
            ValueError: a rank is not in the group, or holds a replica of a lane that it hosts.
        """
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
        """Whether any trainer holds a replica of any lane."""
        return any(self.copy_map)

    @property
    def bytes_sent(self) -> int:
        """The payload bytes sent to other trainers in this term so far."""
        return sum(self.transport.bytes_sent.values())

    def barrier(self) -> None:
        """Wait until every trainer of the term has called this. Raises PeerLost."""
        self.transport.barrier()


@dataclass(frozen=True, slots=True)
class TrainerParts:
    """The schedule, the dense part of the model, and the settings of a step.

    Trainers share nothing of it with each other.

    Attributes:
        takes_step: whether the module's forward gets the number of steps done before.
        parameters: the trained parameters of the module, in its order.
        layouts: the layout of the rows, by table.
        block: the layout of the embedding block.
        rules: the row optimizers.
        rates: the learning rates by step.
        clip_dense: the largest allowed norm of the dense gradients. If None, they are not clipped.
        dense_ema: the share of the parameters' moving average that stays at each step. If None,
            there is no moving average.
        loss: the loss that is trained.
        seed: the seed of the run.
        allow_nan: whether training goes on after a loss that is not finite.
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
        """Return every lane's part of an event, by lane.

        This includes the lanes that other trainers host: their masks determine which rows come from
        them.
        """
        return [self.schedule.lane(event, lane) for lane in range(self.schedule.header.lanes)]


@dataclass(slots=True)
class Clock:
    """Seconds of a step, by what they were spent on.

    The time between two calls of `lap` is added to the name that the later call gives.

    Attributes:
        compute: seconds of computing.
        exchange: seconds of exchanging data with other trainers.
        waiting: seconds of waiting for the store.
        begun: time.perf_counter when the clock was made.
        last: time.perf_counter at the last lap.
        process: processor time of this process when the clock was made.
        thread: processor time of the thread that made the clock, at that time.
    """

    compute: float = 0.0
    exchange: float = 0.0
    waiting: float = 0.0
    begun: float = field(default_factory=time.perf_counter)
    last: float = field(default_factory=time.perf_counter)
    process: float = field(default_factory=time.process_time)
    thread: float = field(default_factory=time.thread_time)

    def lap(self, name: str) -> None:
        """Add the time since the last lap to `name`: "compute", "exchange" or "waiting"."""
        now = time.perf_counter()
        setattr(self, name, getattr(self, name) + now - self.last)
        self.last = now

    def held_up(self, seconds: float, name: str) -> None:
        """Move `seconds` from `name` to `waiting`, since they were spent waiting for the store.

        At most the seconds that were added to `name` are moved.
        """
        # The time waited cannot be longer than the time measured.
        seconds = min(seconds, getattr(self, name))
        setattr(self, name, getattr(self, name) - seconds)
        self.waiting += seconds

    @property
    def seconds(self) -> float:
        """The seconds since the clock was made."""
        return time.perf_counter() - self.begun

    @property
    def processor_seconds(self) -> tuple[float, float]:
        """The processor time since the clock was made, of this process and of the calling thread.

        The caller must be the thread that made the clock, which runs the step.
        """
        return time.process_time() - self.process, time.thread_time() - self.thread
