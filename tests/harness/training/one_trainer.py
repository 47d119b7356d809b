"""One trainer of a training in one process: its terms, and the points at which it may die."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING

import numpy as np

from foreload.cache.client.store import Store
from foreload.cache.protocol.ownership.batch_log import FileLog
from foreload.cache.protocol.ownership.ownership import Ownership
from foreload.cache.rows.partition import Partition
from foreload.pipelines.schedule.format import Event
from foreload.trainer.assembly.assembly import StoreAccess, begin_term, join_term, open_no_lanes
from foreload.trainer.assembly.next_term import continue_term, receive_state, send_state
from foreload.trainer.cluster.messages.faults import STEP_POINTS, TRAINER_POINTS
from foreload.trainer.cluster.messages.trainers import TermLeft
from foreload.trainer.compute.reports import EvaluationReport, StepReport, Totals
from foreload.trainer.errors import LossNotFinite, PeerLost
from foreload.trainer.step.commits import Commits, TermPosition
from foreload.trainer.step.hosted_lanes import HostedLanes
from foreload.trainer.step.program import Trainer
from training.coordinator import Died

if TYPE_CHECKING:
    from training.in_threads import Training


@dataclass(frozen=True, slots=True)
class Death:
    """A trainer's death the first time it reaches a point once training step `step` has begun.

    Attributes:
        trainer: the trainer's number. If None, the trainer that reaches the point first.
        point: a point of a step, of the traffic with the store, of a takeover or of the end, one of TRAINER_POINTS.
        step: a training step, -1 for any.
        dies: if False, the trainer only loses its peers there, and they lose it; all go on in the next term.
        term: the number of the term in which it happens. If None, any.
    """

    trainer: int | None
    point: str
    step: int
    dies: bool = True
    term: int | None = None

    def __post_init__(self) -> None:
        assert self.point in TRAINER_POINTS, self.point


class CopyCheck:
    """Compares every copy of a lane with what its owner had after the same step, at every commit.

    Attributes:
        compared: how many comparisons were made.
    """

    def __init__(self) -> None:
        self.compared = 0
        self._kept: dict[tuple[int, int], tuple[np.ndarray, ...]] = {}  # by lane and step

    def keep(self, trainer: Trainer, step: int) -> None:
        """Keep what a trainer's lanes are after a step that it has applied."""
        for lane, partition in trainer.lanes.partitions.items():
            self._kept[lane, step] = self._of(partition)
            self._kept.pop((lane, step - 4), None)

    def compare(self, commits: Commits) -> None:
        """Compare a trainer's complete copies, which are those of the step just installed."""
        for lane, copy in commits.copies.items():
            if copy.complete:
                for own, other in zip(self._of(copy.partition), self._kept[lane, commits.installed], strict=True):
                    assert own.tobytes() == other.tobytes()
                self.compared += 1

    @staticmethod
    def _of(partition: Partition) -> tuple[np.ndarray, ...]:
        """Return the occupied training slots, their occupants, and the rows in them."""
        slots, here = partition.occupied(), partition.occupants
        rows = (partition.weights.numpy()[slots], partition.state.numpy()[slots])
        return slots, *here.columns(slots), here.stored_tag[slots], *rows


class OneTrainer:
    """One trainer, over its terms."""

    def __init__(self, training: Training, number: int) -> None:
        self._training, self._number, self._coordinator = training, number, training.coordinator
        self.hosted: HostedLanes | None = None
        self._term = self._coordinator.term
        self._begun = -1  # the last training step that began
        self._last_step = training.start.step  # the last one that was reported
        self._dying = False
        self._goes_on = False  # whether it was the term alone that ended last

    def run(self, store: Store) -> None:
        """Train in one term after the other."""
        training, coordinator = self._training, self._coordinator
        parts = training.denses[self._number].parts(training.job, training.schedule)
        access = StoreAccess(
            store, training.placement, training.job.run_namespace, FileLog(training.logs),
            Ownership(self._term.number), on_action=self._reach_in_traffic,
        )  # fmt: skip
        trainer: Trainer | None = None
        if self._term is not coordinator.terms[0]:
            self.hosted = open_no_lanes(parts, access)
        while self._number in self._term.members:
            term, why = self._term, None
            try:
                session = join_term(parts, coordinator.transport(self._number), term.lane_map, term.copy_map)
                self._reach("group formed")
                if self.hosted is None:
                    trainer, events = begin_term(parts, access, session, training.start)
                    self.hosted = trainer.lanes
                else:
                    if trainer is None:
                        receive_state(session.transport, term.members.index(term.leader), parts)
                        self._last_step = term.committed
                    elif term.joined and session.leads:
                        ranks = [term.members.index(joined) for joined in term.joined]
                        send_state(session.transport, ranks, parts, term.committed, Totals())
                    coordinator.await_handed_over(term, [lane for lane in session.hosted if lane not in self.hosted.partitions])
                    access = replace(access, ownership=Ownership(term.number))
                    copies = dict(trainer.commits.copies) if trainer is not None and trainer.commits is not None else {}
                    trainer, events = continue_term(
                        parts, access, session, self.hosted, copies, term.committed, term.seeded, term.stopping, term.dead
                    )
                if not self._run_term(trainer, events):
                    return
            except PeerLost as error:
                if not any(term.copies):
                    raise
                why = str(error)
                self._reach("term over")
            self._next_term(trainer, why)
        assert self._number in self._term.left

    def _next_term(self, trainer: Trainer | None, why: str | None) -> None:
        """Leave the term, and come to the next at the committed step, without the lanes that go to others."""
        number, commits = self._term.number, None if trainer is None else trainer.commits
        if trainer is None:
            left = TermLeft(number, -1, (), False, why, joins=True)
        else:
            standing = TermPosition(self._last_step, (), False) if commits is None else commits.position()
            left = TermLeft(number, standing.step, standing.copies, standing.stopping, why)
        self._term = self._coordinator.next(self._number, left)
        if trainer is not None and commits is not None:
            commits.roll_back(self._term.committed)
            commits.give_away([lane for lane in trainer.lanes.numbers if self._term.hosts[lane] != self._number])
        self._coordinator.hand_over(self._number)
        self._reach("rolled back")

    def _run_term(self, trainer: Trainer, events: Iterator[Event]) -> bool:
        """Train to the end of the term or of the training; returns whether there is a further term."""
        self._reach("ready")
        training, coordinator, lanes, session = self._training, self._coordinator, trainer.lanes, trainer.session
        self._watch(trainer)
        training.break_it(self._number, trainer)
        self._report_copies(trainer)
        session.barrier()
        coordinator.plan_end(self._number, self._term.committed)
        stopped, failure = self._train(trainer, events)
        if self._goes_on:
            # A trainer that leaves disconnects; another one may still wait for a message of the last step.
            session.barrier()
            return True
        last = training.schedule.header.end_step - 1 if stopped is None else stopped
        self._reach("last write-back")
        lanes.write_everything_back(last + 1, at_stop=stopped is not None)
        self._reach("last rows written")
        # What the leader does after the last step has happened before any trainer looks for lost shards.
        session.barrier()
        assert lanes.traffic.repair_shards(timedelta(seconds=30)) == []
        training.last_batches.update(lanes.last_batches())
        training.stopped_at, training.failure = stopped, failure
        coordinator.finish()
        return False

    def _train(self, trainer: Trainer, events: Iterator[Event]) -> tuple[int | None, str | None]:
        """Run the program; returns the step it stopped after, or None, and the loss that was not finite, if that is why."""
        training, coordinator, term = self._training, self._coordinator, self._term
        self._goes_on = False

        def on_step(report: StepReport) -> None:
            self._last_step = report.step
            # The leader may die before it reports a step that others have.
            if trainer.session.leads or report.step not in training.steps:
                training.steps[report.step] = report
            if trainer.session.leads:
                training.on_step(report)
            if term.targets != term.hosts:
                # A copy is complete once the rows that its owner owed are stored, and steps here are faster than the store.
                trainer.lanes.traffic.flush()
            self._report_copies(trainer)

        def ends_after(step: int) -> bool:
            stops = training.stop_after(step)
            self._goes_on = coordinator.ends_after(step) and not stops
            coordinator.plan_end(self._number, step)
            return stops or self._goes_on

        def on_evaluation(report: EvaluationReport) -> None:
            training.evaluations[report.step, report.set] = report

        if term is not coordinator.terms[0] and training.stop_after(term.committed):
            # The stop was reached in an earlier term.
            trainer.commit_last()
            return term.committed, None
        try:
            return trainer.run(events, ends_after, on_step, on_evaluation, lambda: self._goes_on), None
        except LossNotFinite as error:
            trainer.commit_last()
            return self._last_step, str(error)

    def _watch(self, trainer: Trainer) -> None:
        """Check the trainer's copies, and have deaths happen at the points of its steps."""
        check, commits = self._training.copy_check, trainer.commits

        def on_point(point: str, step: int) -> None:
            if commits is not None and point == "dense part applied":
                check.keep(trainer, step)
            self._begun = step
            self._reach(point)

        trainer.on_point = on_point
        if commits is not None:
            commits.on_install = lambda: check.compare(commits)

    def _report_copies(self, trainer: Trainer) -> None:
        if trainer.commits is not None:
            complete = [lane for lane, copy in trainer.commits.copies.items() if copy.complete]
            self._coordinator.report_copies(self._number, complete)

    def _reach(self, point: str) -> None:
        """Reach a point in the trainer's own thread. Raises Died or PeerLost if it is to happen here."""
        death = self._draw_death(point)
        if death is not None and not death.dies:
            raise PeerLost(f"trainer {self._number}: lost its peers at {point} of step {self._begun}")
        self._dying |= death is not None
        if self._dying:
            raise Died

    def _reach_in_traffic(self, action: str) -> None:
        """Reach a point in the thread of the traffic, which has a point of the same name as one of a step."""
        if action not in STEP_POINTS and self._draw_death(action) is not None:
            self._dying = True
            raise Died

    def _draw_death(self, point: str) -> Death | None:
        return self._training.draw_death(self._number, point, self._begun, self._term.number)
