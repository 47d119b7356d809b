"""A trainer within a term: it runs the schedule's events over the lanes that it hosts.

The events are training steps and evaluation steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from foreload.pipelines.schedule.format import Event, Header, LaneEvent
from foreload.trainer.compute import dense_average
from foreload.trainer.compute.reports import EvaluationReport, StepReport
from foreload.trainer.compute.training_loss import EvaluationSamples, TrainingLoss
from foreload.trainer.errors import LossNotFinite
from foreload.trainer.step import slices
from foreload.trainer.step.commits import Commits
from foreload.trainer.step.dense_agreement import check_agreement
from foreload.trainer.step.exchange import ExchangePlan, GradientBucket
from foreload.trainer.step.hosted_lanes import HostedLanes
from foreload.trainer.step.slices import LocalRows
from foreload.trainer.step.step import TrainingStep
from foreload.trainer.step.term_session import Clock, TermSession, TrainerParts


class EvaluationPass:
    """The slices of an evaluation pass, collected until its reports are made."""

    def __init__(self, header: Header, loss: TrainingLoss) -> None:
        """Begin a pass.

        Args:
            header: the header of the schedule.
            loss: the loss that was trained.
        """
        self._header, self._loss = header, loss
        self._sets = {name: EvaluationSamples(loss.kinds) for name in header.set_names}

    def add(self, step: int, moves: LaneEvent, outputs: Tensor) -> None:
        """Add a slice of an evaluation step.

        Args:
            step: the number of the evaluation step.
            outputs: float32 [b] or [b, labels], as forward returned them.
        """
        if len(moves.labels):
            losses = self._loss.of_evaluation(outputs, moves.labels, moves.weights)
            self._sets[self._header.set_of(step)].add(outputs.cpu().numpy(), moves.labels, moves.groups, losses)

    def reports(self, step: int, epoch: int) -> list[EvaluationReport]:
        """Return the metrics of all added slices, one report for each evaluation set in order.

        Args:
            step: the last training step before the pass.
            epoch: the epoch before the pass.
        """
        labels, reports = [label.name for label in self._header.features.labels], []
        for name, samples in self._sets.items():
            of_labels = dict(zip(labels, samples.metrics(), strict=True))
            reports.append(EvaluationReport.of(step, epoch, samples.samples, of_labels, samples.mean_loss(), name))
        return reports


class Trainer:
    """Runs events over hosted lanes, in one term.

    One thread uses it; the traffic with the store has a thread of its own. Parts, lanes and
    replicas outlive a Trainer: in the next term another Trainer goes on with them, in that term's
    session.

    Attributes:
        commits: the commit state, if lanes have replicas. Otherwise None.
        applying: whether a step is half applied. It stays true if applying failed.
        on_point: called with each named point of a step and the step, for tests and drills. In an
            evaluation pass, the step is the training step before the pass.
        ends_after: called on every trainer after an evaluation pass, with the training step before
            the pass and, on the leader only, the metrics of each set. If it returns true, training
            ends there.
    """

    def __init__(
        self, parts: TrainerParts, lanes: HostedLanes, session: TermSession, last_step: int, commits: Commits | None = None
    ) -> None:
        """Make the trainer of one term.

        Args:
            last_step: the last step trained before, in any term or call. -1 before any step.
            commits: the commit state, needed if lanes have replicas.
        """
        if sorted(lanes.numbers) != sorted(session.hosted):
            raise ValueError(f"lanes: must be those of the term, {session.hosted}; {lanes.numbers} are open")
        self.parts, self.lanes, self.session = parts, lanes, session
        self.commits = commits
        lanes.keeps = commits is not None
        self.on_point: Callable[[str, int], None] = lambda point, step: None
        # See the class. It must return the same on every trainer.
        self.ends_after: Callable[[int, Sequence[EvaluationReport]], bool] = lambda step, reports: False
        self._bucket = GradientBucket(parts.parameters, session.transport.world)
        self._last_step = last_step
        self.applying = False
        self._evaluation: EvaluationPass | None = None
        # On the leader: the first step and lane of this evaluation pass with an output that is not
        # finite.
        self._not_finite: tuple[int, int] | None = None

    def run(
        self,
        events: Iterator[Event],
        stop_after: Callable[[int], bool],
        on_step: Callable[[StepReport], None],
        on_evaluation: Callable[[EvaluationReport], None],
        goes_on: Callable[[], bool] = lambda: False,
    ) -> int | None:
        """Run events until there are no more, or until training stops.

        The dense parts of the trainers are compared before the first step, behind each segment and
        each evaluation pass, and at the end.

        Args:
            events: the events to run.
            stop_after: called after every training step with its number. If it returns true,
                training stops. It must answer alike on all trainers, and so must `ends_after`.
            on_step: called with the report of each step when the step is committed. Without
                replicas, that is at once.
            on_evaluation: called on the leader only, with the report of each evaluation set in
                order.
            goes_on: called when training stops. If it returns true, only the term ends.

        Returns:
            The last step if training stopped, or None if the events ended.

        Raises:
            LossNotFinite: on every trainer alike. Rows and the dense part are as the last applied
                step left them, and `commit_last` can then commit that step.
            PeerLost: another trainer was lost, and the term is over.
            DenseDiverged: on every trainer alike.
        """
        check_agreement(self.parts, self.session, self._last_step)
        if self.commits is not None:
            self.commits.on_commit = on_step
            self.commits.begin()
        event = next(events, None)
        ahead: ExchangePlan | None = None
        while event is not None:
            if event.kind == "train":
                step = TrainingStep(self.parts, self.lanes, self.session, self._bucket, event, ahead, self.commits, self.on_point)
                following, stopped = self._train(step, events, stop_after, on_step)
                ahead = step.ahead
                if stopped:
                    step.break_off()
                    self.commit_last(stopping=not goes_on())
                    return event.step
            else:
                following = next(events, None)
                # A training event, or the end, follows the last step of an evaluation pass.
                last = following is None or following.kind == "train"
                reports = self._evaluate(event, last, on_evaluation)
                if last and self.ends_after(self._last_step, reports) and following is not None:
                    self.commit_last(stopping=not goes_on())
                    return self._last_step
            event = following
        self.commit_last()
        return None

    def commit_last(self, stopping: bool = True) -> None:
        """Commit the last step by a barrier.

        Every trainer calls this before it writes back the remaining rows.

        Args:
            stopping: whether training ends. If false, this may be only a pause.

        Raises:
            PeerLost: another trainer was lost.
            DenseDiverged: the trainers' dense parts differ.
        """
        check_agreement(self.parts, self.session, self._last_step)
        if self.commits is not None:
            self.commits.commit_last(stopping)

    def _train(
        self,
        step: TrainingStep,
        events: Iterator[Event],
        stop_after: Callable[[int], bool],
        on_step: Callable[[StepReport], None],
    ) -> tuple[Event | None, bool]:
        """Run the phases of one training step.

        Returns:
            The event after the step, if training goes on, and whether training stops here.
        """
        # The next segment may not be published yet, and asking for it may wait. So rows go early
        # only within a segment, whose length all trainers know.
        segment = self.parts.schedule.segment(step.event.segment)
        assert segment is not None
        following = next(events) if step.event.row + 1 < len(segment.samples) else None
        try:
            step.boundary()
            step.exchange(following)
            step.compute()
            step.reduce()
            self.applying = True
            step.apply()
            self.applying = False
        except LossNotFinite:
            # Every trainer has the same losses, so all of them abort the step here.
            step.break_off()
            raise
        self._last_step = step.event.step
        if self.commits is None:
            on_step(step.report())
        stopped = stop_after(step.event.step)
        if self.commits is not None:
            step.replicate(whole=stopped or following is None)
        if stopped or following is not None:
            return following, stopped
        check_agreement(self.parts, self.session, self._last_step)
        if self.parts.schedule.follow:
            # It may take long until the next segment is published.
            self.commit_last(stopping=False)
        return next(events, None), False

    def _evaluate(self, event: Event, last: bool, on_evaluation: Callable[[EvaluationReport], None]) -> list[EvaluationReport]:
        """Run an evaluation step, which changes nothing that is trained.

        Args:
            last: whether the step is the last one of its pass.

        Returns:
            On the leader after the last step, the metrics of each set. Otherwise an empty list.
        """
        parts, exchange = self.parts, self.session.exchange
        segment = parts.schedule.segment(event.segment)
        assert segment is not None
        # The number of evaluation slots may not have been known when the lanes were opened.
        for lane, partition in self.lanes.partitions.items():
            partition.reserve_evaluation(segment.evaluation_slots[lane])
        plan = exchange.plan(parts.moves(event), early=False)
        self.lanes.pass_boundary(event, plan.events, Clock())
        weights = self.lanes.weights()
        exchange.finish_rows(plan, weights)
        self.on_point("evaluating", self._last_step)
        parts.module.eval()
        outputs, shapes = {}, [slices.output_shape(moves) for moves in plan.events]
        with torch.no_grad(), dense_average.averaged(parts.optimizer, parts.parameters):
            for lane in self.session.hosted:
                if len(plan.events[lane].labels):
                    local = LocalRows(*exchange.local_rows(plan, lane, weights))
                    outputs[lane] = slices.evaluate(parts, plan.events[lane], local, self._last_step + 1)
                else:
                    outputs[lane] = torch.empty(shapes[lane], device=parts.device)
        gathered = exchange.collect_outputs(outputs, shapes)
        if gathered is not None:
            self._evaluation = self._evaluation or EvaluationPass(parts.schedule.header, parts.loss)
            for lane, (moves, values) in enumerate(zip(plan.events, gathered, strict=True)):
                self._evaluation.add(event.step, moves, values)
                if self._not_finite is None and not values.isfinite().all():
                    self._not_finite = event.step, lane
        if last:
            check_agreement(self.parts, self.session, self._last_step)
            self._agree_on_evaluation()
        if not last or self._evaluation is None:
            return []
        evaluation, self._evaluation = self._evaluation, None
        reports = evaluation.reports(self._last_step, event.epoch)
        for report in reports:
            on_evaluation(report)
        return reports

    def _agree_on_evaluation(self) -> None:
        """End an evaluation pass, and stop all trainers if an output was not finite.

        If the leader saw such an output, every trainer raises LossNotFinite.
        """
        if self.parts.allow_nan:
            return
        step_and_lane = torch.tensor(self._not_finite or (-1, -1), dtype=torch.int64, device=self.parts.device)
        step, lane = self.session.exchange.agree(step_and_lane).tolist()
        if step >= 0:
            raise LossNotFinite(f"evaluation step {step}", lane, math.nan)
