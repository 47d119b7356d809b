"""Commit and undo, on one trainer's side (docs/internals/trainer.md, Copies).

A step is *committed* when every trainer has applied it, and every copy has what it changed. A trainer knows that when it has everyone's gradients of
the next step, since nobody sends those before it has the copies' parts of this one. Until then the step can be undone, with the boundaries around it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from foreload.pipelines.schedule.format import Event
from foreload.trainer.compute.reports import StepReport
from foreload.trainer.step.exchange import ExchangePlan
from foreload.trainer.step.hosted_lanes import HostedLanes
from foreload.trainer.step.parts import TrainerParts
from foreload.trainer.step.replicas import LaneReplica
from foreload.trainer.step.replication import Replica, Replication
from foreload.trainer.step.term_session import TermSession
from foreload.trainer.step.undo import StepUndo


@dataclass(frozen=True, slots=True)
class TermPosition:
    """Where a trainer stands when its term is over.

    step: the last step applied here of which its copies have all, too; copies: the lanes whose copies here lack nothing. stopping: training was to
    end, so an owner may have handed over all that sat in its slots.
    """

    step: int
    copies: tuple[int, ...]
    stopping: bool


class Commits:
    """Of one trainer in one term: which step is committed, what of the one applied since can be undone, and what its copies get.

    committed, applied, installed: steps; applied is committed or the one after it; installed, of which the copies here are, committed or the one
    before.
    """

    def __init__(
        self,
        parts: TrainerParts,
        lanes: HostedLanes,
        session: TermSession,
        copies: dict[int, LaneReplica],
        step: int,
        seeded: Iterable[tuple[int, int]],
        seeds_first: bool,
        stopping: bool = False,
    ) -> None:
        """step: the last one committed; copies: those held here, of the state after it; seeded: as `Replication` has it.

        seeds_first: whether the others are seeded before training begins, or while it goes on; stopping: as the term before left it in
        `TermPosition`.
        """
        self._seeds_first = seeds_first
        self._lanes, self._session, self.copies = lanes, session, copies
        self._replication = Replication(
            session.transport, session.lane_map, session.copy_map, parts.kernels, lanes, copies, seeded
        )
        self._undo = StepUndo(parts)
        self.committed = self.applied = self.installed = step
        self._stopping = stopping
        self._replica: Replica | None = None  # of the step applied
        self._following: ExchangePlan | None = None  # of the step after it, once its rows are here
        self._report: StepReport | None = None
        # Of a committed step, what is not yet in the copies.
        self._due: tuple[Replica, ExchangePlan | None] | None = None
        self.on_commit: Callable[[StepReport], None] = lambda report: None
        self.on_install: Callable[[], None] = lambda: None

    def begin(self) -> None:
        """Before anyone trains: fill the copies that lack slots, if that is to be done first. Raises PeerLost."""
        if self._seeds_first:
            self._replication.seeding.seed_all(self.committed)

    def save_dense(self) -> None:
        """Save the dense part that a step is about to change, while its gradients are under way."""
        self._undo.save_dense()

    def keep(self, lane: int, slots: np.ndarray) -> tuple[np.ndarray, tuple[Tensor, Tensor]]:
        """Room for what a lane's rows were before the step that begins to change them: as `StepUndo.keep` has it."""
        return self._undo.keep(lane, self._lanes.partitions[lane], slots)

    def begin_apply(self, event: Event) -> None:
        """A step begins to change what was saved; the one before is committed."""
        assert self.applied == self.committed
        self._undo.begin()
        self.applied, self._stopping = event.step, False
        self._replica = self._following = self._report = None

    def end_apply(self, report: StepReport, plan: ExchangePlan, whole: bool) -> None:
        """Send the copies what the step changed: at once where that is all of it (`whole`), else behind the next step's critical rows."""
        self._report = report
        self._replica = self._replication.fill(self.applied, plan.events, whole)
        if whole:
            self.send()

    def send(self) -> None:
        """Send what `end_apply` has left; and bring the copies to the step that was committed last, while the others' rows are under way."""
        if self._replica is not None and self._replica.work is None:
            self._replication.post(self._replica)
        self._install()

    def _install(self) -> None:
        """Bring the copies to the committed step."""
        if self._due is not None:
            due, self._due = self._due, None
            self._replication.install(*due)
            self.installed = due[0].step
            self.on_install()

    def exchanged(self, plan: ExchangePlan) -> None:
        """The rows of the step after the one applied are here."""
        self._following = plan

    def wait(self) -> None:
        """Return when the copies here have all of the step applied. Raises PeerLost."""
        if self._replica is not None and not self._replica.arrived:
            self._replication.wait(self._replica)

    def commit(self) -> None:
        """The step applied is committed: every trainer has it, and every copy what it changed. So rows that ended behind it may go to the store."""
        if self.applied == self.committed:
            # The first step of a term: the one before it was committed in an earlier term.
            self._lanes.commit(self.committed)
            return
        assert self._replica is not None
        assert self._report is not None
        assert self._due is None
        self._due = self._replica, self._following
        if not all(copy.seeded for copy in self.copies.values()):
            # What comes next depends on how far they are.
            self._install()
        self.committed = self.applied
        self._undo.forget()
        self._lanes.commit(self.committed)
        report, self._replica, self._following, self._report = self._report, None, None, None
        self.on_commit(report)

    def commit_last(self, stopping: bool) -> None:
        """Commit the step applied by a barrier, where no next one reports it. Every trainer calls this. Raises PeerLost.

        stopping: training ends. Then there is a barrier in any case, so that nobody ends residencies beyond the schedule of which another does not
        know that it might.
        """
        if self.applied == self.committed and (self._stopping or not stopping):
            return
        self.wait()
        self._stopping = stopping
        self._session.barrier()
        if self.applied > self.committed:
            self.commit()
        self._install()

    def give_away(self, lanes: Iterable[int]) -> None:
        """Host lanes no more that go to trainers with copies of them, and hold copies of them instead, of the step that is committed.

        To be called when the term is over, after `roll_back` where a step is applied that is not committed. Raises CacheError.
        """
        for lane in lanes:
            self.copies[lane] = self._lanes.give_away(lane)

    def position(self) -> TermPosition:
        """What this trainer reports when the term is over."""
        self._install()
        complete = tuple(lane for lane, copy in self.copies.items() if copy.complete)
        return TermPosition(self.applied if self._has_all() else self.committed, complete, self._stopping)

    def _has_all(self) -> bool:
        """Whether the step applied could be committed here."""
        replica = self._replica
        return replica is not None and replica.arrived and (replica.whole or self._following is not None)

    def roll_back(self, step: int) -> None:
        """Bring lanes, copies and the dense part to the state after `step`, before the next boundary.

        step: the least of what all that are there stand at: the committed one, or that of this trainer's position.
        """
        if step not in (self.committed, self.position().step):
            raise ValueError(f"step: must be {self.committed} or {self.position().step}, got {step}")
        if step > self.committed:
            self.commit()
        self._install()
        self._lanes.undo_boundaries(self.applied)
        self._undo.restore()
        self._lanes.undo_boundaries(step)
        self._lanes.commit(step)
        self.applied = step
        self._replica = self._following = self._report = None
