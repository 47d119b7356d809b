"""One training step of a trainer's lanes, in phases (docs/internals/trainer.md, A step).

It also undoes what a step began if training stops before the step is complete.
"""

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
    """A step in phases: `boundary`, `exchange`, `compute`, `reduce`, `apply`.

    Each is called once, in this order. `break_off` is called if the step does not get that far, or
    if training stops after it. Weights, row states and the dense part have the values of the step
    before until `apply`, and of this step after it.

    Attributes:
        event: the training step's event.
        ahead: the plan of the next step, if rows of that step went early. Otherwise None.
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
        """Prepare a step, without starting it.

        Args:
            bucket: how dense gradients are cut for this term's trainers.
            event: the training step's event.
            plan: `ahead` of the step before. If None, no rows of this step went early.
            commits: the commit state, if lanes have replicas.
            on_point: called with each point that the step reaches, and the step's number.
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
        """Pass the boundary: ended rows leave for write-back, and arrived rows take their slots."""
        self._point("before fetch")
        self._lanes.pass_boundary(self.event, self._plan.events, self._clock)
        self._point("rows staged")

    def exchange(self, following: Event | None) -> None:
        """Wait for this step's rows from other lanes, and send early rows of the next step.

        Early rows are those that this step does not change. They travel while it computes.

        Args:
            following: the event of the next step. If None, all rows of the next step go after this
                one.
        """
        commits = self._commits
        # Replica updates of the step before go behind this step's critical rows, for which trainers
        # wait.
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
        """Run forward and backward of every hosted lane, each on its slice alone.

        Raises ModelError if the first slices show that samples depend on each other.
        """
        weights = self._lanes.weights()
        # The lowest lane that has samples: a batch with fewer samples than lanes leaves some empty.
        with_penalty = next(lane for lane, moves in enumerate(self._plan.events) if len(moves.labels))
        for lane in self._session.hosted:
            local = LocalRows(*self._session.exchange.local_rows(self._plan, lane, weights))
            # Check the model once, in the first step, on its real samples.
            if self.event.step == self._parts.schedule.header.first_step and len(self._plan.events[lane].labels) > 1:
                slices.check_samples(self._parts, self._plan.events[lane], local, self.event.step)
            self._gradients[lane] = slices.learn(
                self._parts, self.event, lane, self._plan.events[lane], local, lane == with_penalty
            )
        self._clock.lap("compute")
        self._point("forward done")

    def reduce(self) -> None:
        """Return the gradients of rows to their owners, and add them there.

        Every trainer gets the losses of all lanes. The dense sum is under way while rows are
        exchanged and added and, in `apply`, updated. With a single lane there is nothing to add.

        If lanes have replicas, this trainer first waits until its replicas have all of the step
        before. Once all gradients and losses are here, that step is committed.

        Raises:
            LossNotFinite: on all trainers alike, before anything of the step is applied.
            PeerLost: another trainer was lost.
        """
        exchange, gradients, commits = self._session.exchange, self._gradients, self._commits
        if commits is not None:
            # Gradients that leave here report to others that this trainer applied the step before
            # and its replicas have it. So none may leave earlier.
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
                # The old dense part is saved while this trainer waits for the others' gradients.
                commits.save_dense()

        self._totals = exchange.sum_row_gradients(self._plan, rows, meanwhile)
        losses = gradients[0].loss.reshape(1) if self._dense_sum is None else exchange.add_dense(self._dense_sum)
        if commits is not None:
            # Everyone's gradients and losses are here, so every trainer has applied the step
            # before.
            commits.commit()
            self._point("committed")
        self._clock.lap("exchange")
        # On CUDA this waits for the backward pass.
        self._loss_of_lane = losses.tolist()
        # All trainers have the same losses and raise alike. Nothing of the step is applied yet.
        if not self._parts.allow_nan and not all(map(math.isfinite, self._loss_of_lane)):
            lane = next(lane for lane, loss in enumerate(self._loss_of_lane) if not math.isfinite(loss))
            raise LossNotFinite(f"step {self.event.step}", lane, self._loss_of_lane[lane])

    def apply(self) -> None:
        """Update each row that the step used, once, and the dense part.

        Each trainer updates the rows of its own lanes. All trainers update the dense part alike.
        """
        parts, commits = self._parts, self._commits
        if commits is not None:
            commits.begin_apply(self.event)
        rules = parts.rates.rules_at(self.event.step)
        for lane, partition in self._lanes.partitions.items():
            slots = self._plan.events[lane].slots
            # The kernel saves the rows that it changes, so that the step can be undone.
            tags, before = (None, None) if commits is None else commits.keep(lane, slots)
            tables = partition.mark_trained(slots, self.event.step, tags)
            parts.kernels.apply(partition.weights, partition.state, slots, tables, self._totals[lane], rules, before)
        self._clock.lap("compute")
        self._point("rows applied")
        # The dense sum was under way while the rows were updated.
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
        """Send the replicas of this trainer's lanes what was applied.

        The report is kept until the step is committed.

        Args:
            whole: whether to send all weights, also of rows that the next step's exchange would
                bring.
        """
        assert self._commits is not None
        self._commits.end_apply(self.report(), self._plan, whole)

    def break_off(self) -> None:
        """Abort the step: wait for the messages that are under way, and discard them.

        Use this where all trainers abort alike, before `apply` (a loss that is not finite) or after
        it (a stop). Then no message is left over that could be taken for a later one of its kind,
        and the buffers are free. The boundary stays passed, as `HostedLanes` knows. A clean stop
        writes back the state before or after the step, and nothing in between.

        If a peer is lost, no trainer can wait. The term is over and its session is closed, along
        with its messages. A step that was being applied at that time is lost with this trainer's
        rows.
        """
        if self._dense_sum is not None:
            self._session.exchange.finish_dense(self._dense_sum)
            self._dense_sum = None
        if self.ahead is not None:
            self._session.exchange.finish_early(self.ahead)
            self.ahead = None

    def report(self) -> StepReport:
        """Return this trainer's report of the step, which has been applied."""
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
