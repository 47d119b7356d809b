"""A trainer: it runs the schedule's program over the lanes that it hosts (docs/internals/trainer.md, A step)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numba as nb
import numpy as np
import torch
from torch import Tensor, nn

from foreload.cache.rows.partition import Partition
from foreload.cache.traffic import Traffic
from foreload.pipelines.base.hashing import key
from foreload.pipelines.schedule.format import Event, LaneEvent
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.compute import dense_optimizers
from foreload.trainer.compute.exchange import Exchange, ExchangePlan
from foreload.trainer.compute.gradient_bucket import GradientBucket
from foreload.trainer.compute.kernels import Kernels
from foreload.trainer.compute.layouts import BlockLayout, Lookups, UpdateRules
from foreload.trainer.compute.metrics import BinaryMetrics
from foreload.trainer.errors import LossNotFinite


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a trainer tells of a training step. Rows are of its own lanes; loss is of the whole step, the same on every trainer."""

    step: int
    epoch: int
    samples: int
    loss: float
    rows_used: int
    rows_arrived: int
    rows_fetched: int
    rows_written_back: int
    seconds: float
    seconds_compute: float
    seconds_exchange: float
    seconds_waiting: float
    bytes_sent: int


@dataclass(frozen=True, slots=True)
class EvaluationReport:
    """An evaluation pass, on rank 0: the metrics after `epoch`, whose last training step was `step`."""

    step: int
    epoch: int
    samples: int
    log_loss: float
    auc: float
    normalized_entropy: float


@dataclass(frozen=True, slots=True)
class TrainerParts:
    """What a Trainer is made of; everything in it belongs to that trainer alone."""

    schedule: Schedule
    module: nn.Module
    optimizer: torch.optim.Optimizer
    block: BlockLayout
    rules: UpdateRules
    kernels: Kernels
    exchange: Exchange
    traffic: Traffic
    partitions: Mapping[int, Partition]
    seed: int
    device: torch.device
    allow_nan: bool
    bytes_sent: Callable[[], int]


@nb.njit(nogil=True, cache=True)
def _arrival_of(slots: np.ndarray, arriving: np.ndarray, scratch: np.ndarray, out: np.ndarray) -> None:
    """out[i]: which arrival takes slots[i], or -1. scratch int32 [slots]: all -1, before and after."""
    for a in range(arriving.size):
        scratch[arriving[a]] = a
    for i in range(slots.size):
        out[i] = scratch[slots[i]]
    for a in range(arriving.size):
        scratch[arriving[a]] = -1


def _aligned(view: np.ndarray) -> Tensor:
    """A copy in torch's own memory: a mapped view may lie at any address, and the bits of a product depend on its alignment."""
    copy = torch.empty(view.shape, dtype=torch.float32)
    copy.numpy()[...] = view
    return copy


@dataclass(slots=True)
class _Clock:
    """Where the time of a step goes."""

    compute: float = 0.0
    exchange: float = 0.0
    waiting: float = 0.0
    last: float = field(default_factory=time.perf_counter)

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        setattr(self, name, getattr(self, name) + now - self.last)
        self.last = now


class Trainer:
    """Runs events over its lanes. One thread uses it; the traffic with the store has a thread of its own."""

    def __init__(self, part: TrainerParts) -> None:
        self.parts = part
        self.lanes = list(part.partitions)
        self._parameters = [parameter for parameter in part.module.parameters() if parameter.requires_grad]
        self._bucket = GradientBucket(self._parameters, part.exchange.trainers)
        self._scratch = {lane: np.full(p.slots, -1, np.int32) for lane, p in part.partitions.items()}
        self._metrics: BinaryMetrics | None = None
        self._not_finite: tuple[int, int] | None = None  # of this evaluation pass: the first step and lane with such a loss
        self._boundary = -1  # the last one whose ended residencies left for write-back

    def run(
        self,
        events: Iterator[Event],
        stop_after: Callable[[int], bool],
        on_step: Callable[[StepReport], None],
        on_evaluation: Callable[[EvaluationReport], None],
    ) -> int | None:
        """Run events until they end, or until stop_after(step), asked after every training step, says so.

        All trainers must get the same answers. Returns the last step if stopped, None at the end. on_evaluation is called on rank 0 alone.
        Raises LossNotFinite, on every trainer alike, with the rows and the dense part as the last step reported left them.
        """
        event = next(events, None)
        ahead: ExchangePlan | None = None
        last_step = None
        while event is not None:
            if event.kind == "train":
                following, ahead = self._train(event, events, ahead, on_step)
                last_step = event.step
                if stop_after(event.step):
                    _finish_early(ahead)
                    return last_step
            else:
                following = next(events, None)
                last = following is None or following.kind == "train"
                self._evaluate(event, last, last_step, on_evaluation)
            event = following
        return None

    def _lanes_of(self, event: Event) -> list[LaneEvent]:
        return [self.parts.schedule.lane(event, lane) for lane in range(self.parts.schedule.header.lanes)]

    def _move(self, event: Event, lanes: Sequence[LaneEvent], clock: _Clock) -> None:
        """The boundary before an event: rows of ended residencies leave for write-back, arrived rows take their slots."""
        for lane, partition in self.parts.partitions.items():
            moves = lanes[lane]
            if event.kind == "train":
                self.parts.traffic.write_back(lane, event.step, partition.end(moves.ends))
                self._boundary = event.step
            clock.lap("compute")
            staged = self.parts.traffic.take(lane, event.index)
            clock.lap("waiting")
            partition.admit(moves.arrivals, staged)

    def _weights(self) -> dict[int, Tensor]:
        return {lane: partition.weights for lane, partition in self.parts.partitions.items()}

    def _post_early(self, event: Event) -> ExchangePlan:
        """Send rows of the next step while this one computes."""
        plan = self.parts.exchange.plan(self._lanes_of(event), early=True)

        def fill(lane: int, places: np.ndarray, out: Tensor) -> None:
            moves, partition = plan.events[lane], self.parts.partitions[lane]
            slots = moves.slots[places]
            arrival = np.empty(slots.size, np.int32)
            _arrival_of(slots, moves.arrivals.slot, self._scratch[lane], arrival)
            self.parts.kernels.take_rows(partition.weights, slots, out)
            arriving = np.flatnonzero(arrival >= 0)
            if arriving.size:
                wanted = np.zeros(len(moves.arrivals), bool)
                wanted[arrival[arriving]] = True
                values = self.parts.traffic.rows_ready(lane, event.index, wanted).weights[arrival[arriving]]
                self.parts.kernels.put_rows(out, arriving.astype(np.int32), torch.from_numpy(values).to(out.device))

        self.parts.exchange.post_early(plan, fill)
        return plan

    def _train(
        self, event: Event, events: Iterator[Event], ahead: ExchangePlan | None, on_step: Callable[[StepReport], None]
    ) -> tuple[Event | None, ExchangePlan | None]:
        clock, begun = _Clock(), time.perf_counter()
        part = self.parts
        before = part.bytes_sent()
        plan = ahead if ahead is not None else part.exchange.plan(self._lanes_of(event), early=False)
        lanes = plan.events
        self._move(event, lanes, clock)
        clock.lap("compute")
        part.exchange.finish_rows(plan, self._weights())
        clock.lap("exchange")
        # A following segment may not be published yet, so rows go early within a segment only; the end of a segment is known to all.
        following: Event | None = None
        ahead = None
        segment = part.schedule.segment(event.segment)
        assert segment is not None
        inside = event.row + 1 < len(segment.samples)
        if inside:
            following = next(events)
            ahead = self._post_early(following)
            clock.lap("exchange")
        gradients, flat = {}, {}
        for lane in self.lanes:
            gradients[lane], flat[lane] = self._learn(event, lane, plan)
        clock.lap("compute")
        # The dense sums are under way while rows are exchanged, added and updated.
        under_way = None
        if len(lanes) > 1:
            under_way = part.exchange.begin_dense({lane: self._bucket.pack(*flat[lane], lane) for lane in self.lanes})
        totals = part.exchange.sum_row_gradients(plan, gradients)
        losses = flat[0][1].reshape(1) if under_way is None else part.exchange.add_dense(under_way)
        clock.lap("exchange")
        if not part.allow_nan and not all(map(math.isfinite, losses.tolist())):  # on CUDA this waits for the backward pass
            # Every trainer has the same losses, so all stop here; what is under way between them comes to its end.
            if under_way is not None:
                part.exchange.finish_dense(under_way)
            _finish_early(ahead)
            lane = losses.isfinite().tolist().index(False)
            raise LossNotFinite(f"step {event.step}", lane, float(losses[lane]))
        for lane, partition in part.partitions.items():
            slots = lanes[lane].slots
            tables = partition.mark_trained(slots, event.step)
            part.kernels.apply(partition.weights, partition.state, slots, tables, totals[lane], part.rules)
        clock.lap("compute")
        dense = flat[0][0] if under_way is None else self._bucket.gradients(part.exchange.finish_dense(under_way))
        clock.lap("exchange")
        for parameter, gradient in zip(self._parameters, dense, strict=True):
            parameter.grad = gradient
        dense_optimizers.step(part.optimizer)
        clock.lap("compute")
        mine = [lanes[lane] for lane in self.lanes]
        on_step(
            StepReport(
                step=event.step,
                epoch=event.epoch,
                samples=event.samples,
                loss=float(sum(losses.tolist())),
                rows_used=sum(moves.slots.size for moves in mine),
                rows_arrived=sum(len(moves.arrivals) for moves in mine),
                rows_fetched=sum(int((moves.arrivals.tag != 0).sum()) for moves in mine),
                rows_written_back=sum(moves.ends.size for moves in mine),
                seconds=time.perf_counter() - begun,
                seconds_compute=clock.compute,
                seconds_exchange=clock.exchange,
                seconds_waiting=clock.waiting,
                bytes_sent=part.bytes_sent() - before,
            )
        )
        return (following if inside else next(events, None)), ahead

    def _forward(self, lane: int, plan: ExchangePlan, requires_grad: bool) -> tuple[Tensor, Tensor, Tensor]:
        """(block, logits, labels) of a lane's slice, which has samples."""
        part, moves = self.parts, plan.events[lane]
        rows, places = part.exchange.local_rows(plan, lane, self._weights())
        block = torch.empty(
            (len(moves.labels), len(part.block.names), part.block.width), device=part.device, requires_grad=requires_grad
        )
        part.kernels.gather_block(rows, Lookups(moves.index, moves.offsets, part.block), block, places)
        dense, labels = (_aligned(view).to(part.device) for view in (moves.dense, moves.labels))
        return block, part.module(dense, part.block.embeddings(block)), labels

    def _learn(self, event: Event, lane: int, plan: ExchangePlan) -> tuple[Tensor, tuple[list[Tensor], Tensor]]:
        """Forward and backward of a lane's slice: gradients of its local rows [n, W], and (those of the parameters, the loss)."""
        part, moves = self.parts, plan.events[lane]
        width = part.block.width
        count = sum(places.size for places in plan.local[lane])
        if not len(moves.labels):
            nothing = [torch.zeros_like(parameter) for parameter in self._parameters]
            return torch.empty((0, width), device=part.device), (nothing, torch.zeros((), device=part.device))
        seed = key(part.seed, event.step, lane) >> 1
        if part.device.type == "cpu":
            # As torch.manual_seed does, which also keeps the call's stack trace for devices that may yet be used: 0.2 ms.
            torch.default_generator.manual_seed(seed)
        else:
            torch.manual_seed(seed)
        part.module.train()
        block, logits, labels = self._forward(lane, plan, requires_grad=True)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum") / event.samples
        found = torch.autograd.grad(loss, [block, *self._parameters], allow_unused=True)
        dense = [g if g is not None else torch.zeros_like(p) for g, p in zip(found[1:], self._parameters, strict=True)]
        gradient = found[0] if found[0] is not None else torch.zeros_like(block)
        out = torch.empty((count, width), device=part.device)
        part.kernels.row_gradients(gradient, Lookups(moves.index, moves.offsets, part.block), out)
        return out, (dense, loss.detach())

    def _evaluate(self, event: Event, last: bool, step: int | None, on_evaluation: Callable[[EvaluationReport], None]) -> None:
        part = self.parts
        segment = part.schedule.segment(event.segment)
        assert segment is not None
        for lane, partition in part.partitions.items():
            partition.reserve_evaluation(segment.evaluation_slots[lane])
        plan = part.exchange.plan(self._lanes_of(event), early=False)
        self._move(event, plan.events, _Clock())
        part.exchange.finish_rows(plan, self._weights())
        part.module.eval()
        logits = {}
        with torch.no_grad():
            for lane in self.lanes:
                if len(plan.events[lane].labels):
                    logits[lane] = self._forward(lane, plan, requires_grad=False)[1]
                else:
                    logits[lane] = torch.empty(0, device=part.device)
        gathered = part.exchange.collect_logits(logits, [len(moves.labels) for moves in plan.events])
        if gathered is not None:
            self._metrics = self._metrics or BinaryMetrics()
            for lane, (moves, values) in enumerate(zip(plan.events, gathered, strict=True)):
                self._metrics.add(values.cpu().numpy(), moves.labels)
                if self._not_finite is None and not values.isfinite().all():
                    self._not_finite = event.step, lane
        if last:
            self._agree_on_evaluation()
        if last and self._metrics is not None:
            found = self._metrics.result()
            self._metrics = None
            on_evaluation(
                EvaluationReport(
                    step=-1 if step is None else step,
                    epoch=event.epoch,
                    samples=found.samples,
                    log_loss=found.log_loss,
                    auc=found.auc,
                    normalized_entropy=found.normalized_entropy,
                )
            )

    def _agree_on_evaluation(self) -> None:
        """At the end of an evaluation pass: raise LossNotFinite on every trainer where a loss of the pass is not finite."""
        if self.parts.allow_nan:
            return
        found = torch.tensor(self._not_finite or (-1, -1), dtype=torch.int64, device=self.parts.device)
        step, lane = self.parts.exchange.agree(found).tolist()
        if step >= 0:
            raise LossNotFinite(f"evaluation step {step}", lane, math.nan)

    def write_everything_back(self, boundary: int, at_stop: bool) -> int:
        """End every residency and wait until the store has all rows. Returns how many sat in slots, beyond the schedule only changed ones.

        boundary: of the step after the last one trained. at_stop: on a clean stop; these write-backs are none of the schedule's and are counted
        apart.
        """
        count = 0
        # That of a step which was not finished is behind already.
        boundary = max(boundary, self._boundary + 1)
        for lane, partition in self.parts.partitions.items():
            ended = partition.end(partition.occupied())
            count += int((ended.tag != ended.stored_tag).sum()) if at_stop else len(ended)
            self.parts.traffic.write_back(lane, boundary, ended, at_stop)
        self.parts.traffic.flush()
        return count


def _finish_early(ahead: ExchangePlan | None) -> None:
    """Wait for the rows of a step that will not come."""
    if ahead is not None and ahead.early is not None:
        ahead.early.wait()
