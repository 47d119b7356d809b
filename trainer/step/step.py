"""One training step of a trainer's lanes, in phases, and what is undone where it is broken off (docs/internals/trainer.md, A step)."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from torch import Tensor

from foreload.pipelines.schedule.format import Event, LaneEvent
from foreload.trainer.compute import dense_average, dense_optimizers
from foreload.trainer.compute.rates import clip
from foreload.trainer.compute.reports import StepReport, moved_rows
from foreload.trainer.errors import LossNotFinite
from foreload.trainer.step import slices
from foreload.trainer.step.commits import Commits
from foreload.trainer.step.exchange import DenseSum, ExchangePlan, GradientBucket
from foreload.trainer.step.hosted_lanes import HostedLanes
from foreload.trainer.step.slices import LocalRows, SliceGradients
from foreload.trainer.step.term_session import Clock, TermSession, TrainerParts


class TrainingStep:
    """A step: `boundary`, `exchange`, `compute`, `reduce`, `apply`, each once and in this order; `break_off` where it does not come that far.

    Weights, row states and the dense part are those of the step before until `apply`, and those of this step after it. `ahead`: the plan of the next
    step, where rows of it went early.
    """

    def __init__(
        self,
        parts: TrainerParts,
        lanes: HostedLanes,
        session: TermSession,
        bucket: GradientBucket,
        event: Event,
        plan: ExchangePlan | None,
        commits: Commits | None = None,
        on_point: Callable[[str, int], None] = lambda point, step: None,
    ) -> None:
        """bucket: how dense gradients are cut for this term's trainers; plan: `ahead` of the step before; None if it had none.

        commits: where lanes have copies; on_point: called with each point that the step reaches.
        """
        self._clock = Clock()
        self._commits = commits
        self._point = lambda name: on_point(name, event.step)
        self._parts, self._lanes, self._session, self._bucket = parts, lanes, session, bucket
        self.event = event
        self._bytes_before = session.bytes_sent
        self._plan = plan if plan is not None else session.exchange.plan(parts.moves(event), early=False)
        self.ahead: ExchangePlan | None = None
        self._gradients: dict[int, SliceGradients] = {}
        self._totals: dict[int, Tensor] = {}
        self._loss_of_lane: list[float] = []
        self._dense_sum: DenseSum | None = None

    def boundary(self) -> None:
        """Rows of ended residencies leave for write-back, arrived rows take their slots."""
        self._point("before fetch")
        self._lanes.pass_boundary(self.event, self._plan.events, self._clock)
        self._point("rows staged")

    def exchange(self, following: Event | None) -> None:
        """Wait until the rows of other lanes that this step uses are here, and send those of the step `following` that may go early.

        Early rows are not changed by this step, and go while it computes. None: the next step's rows go after this one.
        """
        commits = self._commits
        self._session.exchange.finish_rows(self._plan, self._lanes.weights(), None if commits is None else commits.send)
        if commits is not None:
            commits.exchanged(self._plan)
        self._clock.lap("exchange")
        self._point("exchanged")
        if following is None:
            return
        exchange, kernels, lanes = self._session.exchange, self._parts.kernels, self._lanes
        plan = exchange.plan(self._parts.moves(following), early=True)

        def fill(lane: int, places: np.ndarray, out: Tensor) -> None:
            lanes.take_early(following, lane, plan.events[lane], places, out, kernels)

        exchange.post_early(plan, fill)
        self.ahead = plan
        self._clock.lap("exchange")
        self._point("early rows sent")

    def compute(self) -> None:
        """Forward and backward of every hosted lane, alone on its slice. Raises ModelError where the first slices show that samples are not apart."""
        weights = self._lanes.weights()
        for lane in self._session.hosted:
            local = LocalRows(*self._session.exchange.local_rows(self._plan, lane, weights))
            if self.event.step == self._parts.schedule.header.first_step and len(self._plan.events[lane].labels) > 1:
                slices.check_samples(self._parts, self._plan.events[lane], local, self.event.step)
            self._gradients[lane] = slices.learn(self._parts, self.event, lane, self._plan.events[lane], local)
        self._clock.lap("compute")
        self._point("forward done")

    def reduce(self) -> None:
        """Gradients of rows return to their owners and are added there; every trainer learns all losses. Raises LossNotFinite, on all alike.

        The dense sum is under way while rows are exchanged, added and, in `apply`, updated. With a single lane there is nothing to add.

        Where lanes have copies: these first have all of the step before; and when all gradients and losses are here, that step is committed.
        """
        exchange, gradients, commits = self._session.exchange, self._gradients, self._commits
        if commits is not None:
            commits.wait()
            self._clock.lap("exchange")
            self._point("replicated")
        if len(self._plan.events) > 1:
            parcels = {lane: self._bucket.pack(of_lane.dense, of_lane.loss, lane) for lane, of_lane in gradients.items()}
            self._dense_sum = exchange.begin_dense(parcels, self._bucket.parcel_sizes)
        rows = {lane: of_lane.rows for lane, of_lane in gradients.items()}

        def meanwhile() -> None:
            self._point("gradients sent")
            if commits is not None:
                commits.save_dense()

        self._totals = exchange.sum_row_gradients(self._plan, rows, meanwhile)
        losses = gradients[0].loss.reshape(1) if self._dense_sum is None else exchange.add_dense(self._dense_sum)
        if commits is not None:
            commits.commit()
            self._point("committed")
        self._clock.lap("exchange")
        self._loss_of_lane = losses.tolist()  # on CUDA this waits for the backward pass
        if not self._parts.allow_nan and not all(map(math.isfinite, self._loss_of_lane)):
            lane = next(lane for lane, loss in enumerate(self._loss_of_lane) if not math.isfinite(loss))
            raise LossNotFinite(f"step {self.event.step}", lane, self._loss_of_lane[lane])

    def apply(self) -> None:
        """Update every row that this trainer's lanes own and the step used, once, and the dense part, which all trainers update alike."""
        parts, commits = self._parts, self._commits
        if commits is not None:
            commits.begin_apply(self.event)
        rules = parts.rates.rules_at(self.event.step)
        for lane, partition in self._lanes.partitions.items():
            slots = self._plan.events[lane].slots
            tags, before = (None, None) if commits is None else commits.keep(lane, slots)
            tables = partition.mark_trained(slots, self.event.step, tags)
            parts.kernels.apply(partition.weights, partition.state, slots, tables, self._totals[lane], rules, before)
        self._clock.lap("compute")
        self._point("rows applied")
        dense_sum, self._dense_sum = self._dense_sum, None
        if dense_sum is None:
            dense = self._gradients[0].dense
        else:
            dense = self._bucket.gradients(self._session.exchange.finish_dense(dense_sum))
        self._clock.lap("exchange")
        if parts.clip_dense is not None:
            clip(dense, parts.clip_dense)
        for parameter, gradient in zip(parts.parameters, dense, strict=True):
            parameter.grad = gradient
        parts.rates.set_dense(parts.optimizer, self.event.step)
        if parts.dense_ema is None:
            dense_optimizers.step(parts.optimizer)
        else:
            dense_average.step(parts.optimizer, parts.parameters, parts.dense_ema)
        self._clock.lap("compute")
        self._point("dense part applied")

    def replicate(self, whole: bool) -> None:
        """Send the copies of this trainer's lanes what was applied, and keep the report until the step is committed.

        whole: all weights, also of rows that the next step's exchange will bring.
        """
        assert self._commits is not None
        self._commits.end_apply(self.report(), self._plan, whole)

    def break_off(self) -> None:
        """Undo what the step began and nothing will follow: wait for what is under way between the trainers, and leave it unused.

        For where all trainers break off alike, before `apply` (a loss that is not finite) or after it (a stop). Then no message is left over that a
        later one of its kind could be taken for, and the buffers are free. The boundary stays behind, as `HostedLanes` knows; what a clean stop
        writes back is the state before or after the step, and nothing between. Where a peer is lost, nobody can wait: the term is over, its session
        is closed, and with it go its messages; a step that was being applied then is lost with this trainer's rows.
        """
        if self._dense_sum is not None:
            self._session.exchange.finish_dense(self._dense_sum)
            self._dense_sum = None
        if self.ahead is not None:
            self._session.exchange.finish_early(self.ahead)
            self.ahead = None

    def report(self) -> StepReport:
        """What this trainer reports of the step, which has been applied."""
        event, clock = self.event, self._clock
        processor, thread = clock.processor_seconds
        clock.held_up(self._lanes.take_held_up(), "exchange" if self._lanes.keeps else "compute")
        own: list[LaneEvent] = [self._plan.events[lane] for lane in self._session.hosted]
        return StepReport(
            step=event.step,
            epoch=event.epoch,
            samples=event.samples,
            loss=float(sum(self._loss_of_lane)),
            **moved_rows([(moves.slots, moves.arrivals.tag, moves.ends) for moves in own]),
            seconds=clock.seconds,
            seconds_compute=clock.compute,
            seconds_exchange=clock.exchange,
            seconds_waiting=clock.waiting,
            bytes_sent=self._session.bytes_sent - self._bytes_before,
            seconds_processor=processor,
            seconds_thread=thread,
        )
