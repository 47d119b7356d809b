"""Checkpoints of a simulated job: the real rules of coordinator and trainers, and neither rows nor files.

A draft, the folder that is not published yet, is an object. What trainers have in memory, and write, is which lanes they own and after which step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from math import inf
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest import mock

from foreload.trainer.checkpoints.best import Best
from foreload.trainer.cluster.coordinator.background_work import FolderWork, fulfil
from foreload.trainer.cluster.coordinator.checkpointing import Checkpointing, CheckpointUnderWay, Opened
from foreload.trainer.cluster.coordinator.training_call import PublishedPlan, TrainingCall
from foreload.trainer.cluster.member.trainer_checkpoints import _GO_ON, _TAKE, TrainerCheckpoints
from foreload.trainer.cluster.messages.rendezvous import Rendezvous
from foreload.trainer.cluster.messages.trainers import (
    CheckpointPlan,
    CheckpointReport,
    CopyTaken,
    EvaluationEnded,
    Plan,
    StepEnded,
)
from foreload.trainer.compute.reports import EvaluationReport
from foreload.trainer.errors import CheckpointError, FolderBusy


class Broken(AssertionError):
    """What must never be was."""


class LateWork(FolderWork):
    """What is done in the folder of checkpoints, one thing after the other, when the simulation says so."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        """See FolderWork."""
        future: Future[Any] = Future()
        self._waiting.append(partial(fulfil, future, work))
        return future

    def do_one(self) -> None:
        """Do what waits longest."""
        if self._waiting:
            self._waiting.popleft()()

    def close(self) -> None:
        """See FolderWork."""
        while self._waiting:
            self.do_one()


@dataclass(eq=False)
class Draft:
    """The folder of a checkpoint. state: open, published or discarded; parts: by trainer, its lanes, and after which step they are."""

    path: Path
    state: str = "open"
    parts: dict[int, tuple[frozenset[int], int]] = field(default_factory=dict)

    def discard(self) -> None:
        """As a draft's: what is published stays."""
        if self.state == "published":
            raise Broken(f"{self.path}: is discarded after it was published")
        self.state = "discarded"


class StepCounts:
    """Instead of a run's report: the last step that all members reported, and whether the totals of a step are kept."""

    def __init__(self, members: range, step: int) -> None:
        self.last_step, self.totals = step, SimpleNamespace(steps=0, seconds=0.0)
        self.kept_totals: int | None = None
        self._kept: int | None = None
        self._reported = dict.fromkeys(members, step)

    def step(self, trainer: int, report: Any) -> None:
        """See RunReport."""
        self._reported[trainer] = max(report.step, self._reported[trainer])
        self._count()

    def on_term(self, members: tuple[int, ...], step: int) -> None:
        """See RunReport: what trainers reported beyond a step was undone; who has left, or has joined, reports nothing up to it."""
        self._reported = {member: min(self._reported.get(member, step), step) for member in members}
        self.last_step = min(self.last_step, step)
        self._count()

    def _count(self) -> None:
        self.last_step = max(self.last_step, min(self._reported.values()))
        self._keep()

    def keep_totals(self, step: int | None) -> None:
        """See RunReport."""
        if step != self._kept:
            self._kept, self.kept_totals = step, None
            self._keep()

    def _keep(self) -> None:
        if self.last_step == self._kept:
            self.kept_totals = self._kept

    def evaluation(self, report: object) -> None:
        """See RunReport."""

    def checkpoint(self, fields: object) -> None:
        """See RunReport."""

    def tick(self) -> None:
        """See RunReport."""


class CoordinatedCheckpoints(Checkpointing):
    """The coordinator's side, whose folders are drafts in memory. published: the steps of those that are there; failures_left: how often disks and
    memory may still not suffice. (One checkpoint in two fails, so all of a dozen do now and then.)
    """

    def __init__(self, call: TrainingCall, rendezvous: Rendezvous, plan: PublishedPlan, report: Any, draw: Random) -> None:
        super().__init__(call, rendezvous, plan, report)
        self.work, self.drafts, self.published = LateWork(), list[Draft](), list[int]()
        self._folder_work, self._draw = self.work, draw
        self.failures_left = inf
        self.evaluated_steps, self.missing = dict[int, float](), set[int]()
        self._best.note = self._note_best  # type: ignore[method-assign]
        self._best.warn_missing = lambda best, why: self.missing.add(best.step)  # type: ignore[method-assign]

    def _note_best(self, best: Best) -> None:
        if best.step not in self.published:
            raise Broken(
                f"the evaluation after step {best.step} is noted as the best, and its checkpoint is not there: {self.published}"
            )
        self._best.noted = best

    def evaluated(self, event: EvaluationEnded) -> None:
        """See Checkpointing."""
        assert event.report.log_loss is not None
        self.evaluated_steps[event.report.step] = event.report.log_loss
        super().evaluated(event)

    def check_best(self) -> None:
        """Training is over: the best evaluation of all must have its checkpoint, or the user be told that it has none."""
        if not self.evaluated_steps:
            return
        value, step = min((value, step) for step, value in self.evaluated_steps.items())
        noted = self._best.noted
        if (noted is None or noted.value > value) and step not in self.missing:
            raise Broken(f"the evaluation after step {step} was the best, {noted} is noted, and nobody is told")

    def fails(self, chance: float) -> bool:
        """Draw whether a disk, or memory, does not suffice now."""
        failed = self._draw.random() < chance and self.failures_left > 0
        self.failures_left -= failed
        return failed

    def _open(self, saving: CheckpointUnderWay) -> None:

        def opened() -> Opened:
            if self.fails(0.1):
                raise FolderBusy("another process saves one there")
            if self.fails(0.05):
                raise CheckpointError("the disk is full")
            draft = Draft(Path("/drafts") / str(len(self.drafts)))
            self.drafts.append(draft)
            return Opened(draft, 32, None)  # type: ignore[arg-type]

        saving.opening = self.work.submit(opened)

    def _publish(self, saving: CheckpointUnderWay) -> None:
        assert saving.opened is not None
        draft, step, totals = saving.opened.draft, saving.step, self._report.kept_totals

        def published() -> Any:
            assert isinstance(draft, Draft)
            self._check_complete(draft, step, totals)
            draft.state = "published"
            self.published.append(step)
            return SimpleNamespace(contents=SimpleNamespace(step=step, rows=(), row_count=0), bits=32, place="", own_bytes=0)

        saving.publishing = self.work.submit(published)

    def _check_complete(self, draft: Draft, step: int, totals: object) -> None:
        """Every lane must be there once, all of one step, whose totals are kept."""
        lanes = sorted(lane for of_trainer, _ in draft.parts.values() for lane in of_trainer)
        steps = {of for _, of in draft.parts.values()}
        whole = list(range(self._schedule.header.lanes))
        if draft.state != "open" or lanes != whole or steps != {step} or totals != step:
            raise Broken(f"{draft.path}: is {draft.state}, of step {step} and totals {totals}, and has {draft.parts}")

    def _prune(self) -> None: ...

    def check_over(self) -> None:
        """Everything is over: no draft may be left."""
        if left := [str(draft.path) for draft in self.drafts if draft.state == "open"]:
            raise Broken(f"{left}: are neither published nor discarded")


class MemberCheckpoints(TrainerCheckpoints):
    """A trainer's side. The copy is which lanes it owns; the part is written when the simulation says so."""

    def __init__(self, world: Any, trainer: Any, plan: int) -> None:
        joined = SimpleNamespace(
            rendezvous=world.board, events=SimpleNamespace(send=trainer.say), reach_point=lambda point: None, job=world.call.job
        )
        super().__init__(joined)  # type: ignore[arg-type]
        self._keeps_best = world.call.job.keep_best is not None
        self._world, self._trainer = world, trainer
        self._plan: Plan = world.board.read(Plan, plan)

    def look(self) -> None:
        """Report what is written, and do what is planned, as `CoordinatorLink.tell` does."""
        self.report()
        while (plan := self._world.board.poll(Plan, self._plan.version + 1)) is not None:
            self._plan = plan
        self.follow(self._plan.checkpoint)

    @property
    def _leads(self) -> bool:
        return bool(self._trainer.term.leader == self._trainer.number)

    def steps_begin(self, step: int) -> None:
        """Before the first step of a term."""
        self.look()
        self.before_steps(step, self._leads)

    def step_ended(self, step: int) -> None:
        """Behind a training step."""
        self.after_step(SimpleNamespace(session=SimpleNamespace(leads=self._leads), number=self._trainer.number), step)  # type: ignore[arg-type]

    def _make_room(self, trainer: object) -> None: ...

    def _take(self, wanted: CheckpointPlan, trainer: object, step: int) -> None:
        owned = frozenset(self._trainer.owned)
        if self._world.checkpoints.fails(0.05):
            raise MemoryError
        if any(self._trainer.knows[lane] != step for lane in owned):
            raise Broken(
                f"trainer {self._trainer.number}: copies {sorted(owned)} after step {step}, and knows {self._trainer.knows}"
            )
        self._taken = mock.Mock(
            snapshot=SimpleNamespace(step=step, owned=owned, abandon=lambda why: None, hurry=lambda: None), room={}
        )
        self._report = CheckpointReport(wanted.number, CopyTaken(step, 0.0, 0, "", dict.fromkeys(owned, ()), {}))
        self._events.send(self._report)
        self._begin_writing()

    def _begin_writing(self) -> None:
        plan, taken = None if self._wanted is None else self._wanted.part, self._taken
        if plan is None or taken is None or self._part is not None:
            return
        snapshot = taken.snapshot
        self._part = SimulatedPart(plan.folder, snapshot.owned, snapshot.step)  # type: ignore[assignment, attr-defined]

    def enter_evaluation(self, term: int, step: int) -> EvaluationEnded:
        """The trainer that leads reports an evaluation, whose value depends on the step alone."""
        report = EvaluationReport(step, 0, 1, Random(step).random(), None, None)
        return EvaluationEnded(report, self.waits_in(term, step))

    def said_behind(self, step: int) -> int:
        """What the trainer that leads says to those that wait with it."""
        return self._next_of_wait(self._waits_in, step)

    def heed(self, said: int, step: int) -> bool:
        """Do what was said, as `after_evaluation` does; returns whether training goes on."""
        if said == _GO_ON:
            return True
        self.look()
        if said == _TAKE and self._wanted is not None and self._wanted.behind == step:
            self._take_if_room(self._wanted, None, step)  # type: ignore[arg-type]
        return said == _TAKE

    @property
    def is_at_work(self) -> bool:
        """Whether something is in memory that is not written yet."""
        return self._taken is not None

    def write(self) -> None:
        """The part that is being written is on the disk now, or cannot be."""
        part: Any = self._part
        if part is None or not part.alive:
            return
        part.alive = False
        if self._world.checkpoints.fails(0.1):
            part.failure = "the disk is full"
            return
        for draft in self._world.checkpoints.drafts:
            if str(draft.path) == part.folder:
                draft.parts[self._trainer.number] = part.lanes, part.step
        part.result = SimpleNamespace(rows=(), seconds=0.0, dense=None)


@dataclass
class SimulatedPart:
    """A trainer's part of a checkpoint, under way."""

    folder: str
    lanes: frozenset[int]
    step: int
    alive: bool = True
    result: Any = None
    failure: str | None = None

    def is_alive(self) -> bool:
        """As a thread's."""
        return self.alive


def step_ended(step: int) -> StepEnded:
    """A trainer's report of a step, with nothing else in it."""
    report: Any = SimpleNamespace(step=step)
    return StepEnded(report, 0.0)
