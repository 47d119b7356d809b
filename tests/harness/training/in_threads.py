"""`train`, and what the trainers of one training share."""

from __future__ import annotations

import itertools
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path

from foreload.cache.client.store import Store
from foreload.cache.parity.placement import Placement
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.assembly.assembly import DenseModel
from foreload.trainer.assembly.start import Start
from foreload.trainer.cluster.coordinator.terms import Change, first_term
from foreload.trainer.compute.dense_optimizers import load_optimizer_state, optimizer_state
from foreload.trainer.compute.reports import EvaluationReport, StepReport
from foreload.trainer.job.job import TrainJob
from foreload.trainer.step.program import Trainer
from training.coordinator import Coordinator, Died
from training.one_trainer import CopyCheck, Death, OneTrainer
from training.outcome import Trained, digest, stored_fields

_namespaces = itertools.count()


def job_in_memory(**settings: object) -> TrainJob:
    """Return a job for `train`, with a namespace that no other job of this process has. It names no schedule, store or folder."""
    nowhere = {"schedule": "-", "run": "-", "store": "-"}
    return TrainJob.of(nowhere | {"namespace": f"test-{next(_namespaces)}"} | settings)


def train(
    job: TrainJob,
    schedule: Schedule,
    urls: Sequence[str],
    trainers: int = 1,
    *,
    copies: int = 1,
    parity: tuple[int, int] = (1, 0),
    resume: Trained | None = None,
    changes: Mapping[int, Change] | None = None,
    deaths: Sequence[Death] = (),
    stop_after: Callable[[int], bool] = lambda step: False,
    break_it: Callable[[int, Trainer], None] = lambda number, trainer: None,
    on_step: Callable[[StepReport], None] = lambda report: None,
    timeout: timedelta = timedelta(seconds=10),
) -> Trained:
    """Train a schedule to its end or to a stop, and return what the training left behind.

    Args:
        trainers: how many trainers begin, numbered from 0.
        copies: how many trainers hold each lane, its owner included.
        parity: k and r, as `--parity` has them; (1, 0) for none.
        resume: if given, continue after this training.
        changes: by training step, trainers that join or leave, and lanes that move, when the step is done. Joining trainers
            have new numbers. A lane moves once its target has a complete copy.
        deaths: what happens to which trainer at which point.
        stop_after: returns whether training stops after a step; must always answer alike.
        break_it: called with each trainer's number and its `Trainer` of each term, before the term's first step.
        on_step: called by the leader after each step.
        timeout: as in `Store`.

    Raises:
        BaseException: the failure of the trainer that failed first.
    """
    joining = [trainer for change in (changes or {}).values() for trainer in change.joining]
    with tempfile.TemporaryDirectory() as logs:
        training = Training(
            job, schedule, urls, copies, Placement.spread(len(urls), *parity), Path(logs), timeout,
            stop_after, break_it, on_step, deaths=list(deaths),
        )  # fmt: skip
        training.begin(trainers, joining, resume, changes or {})
        threads = [threading.Thread(target=training.run, args=(number,), name=f"trainer {number}") for number in training.denses]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if training.failures:
        raise training.failures[0]
    return training.outcome()


@dataclass(slots=True)
class Training:
    """What the trainers of one training share.

    Attributes:
        logs: the folder of the batch logs.
        denses: the dense part of each trainer, by its number.
        last_batches: of each lane, the number of its last write-back batch.
        failures: what ended trainers that were not to end, the first one first.
    """

    job: TrainJob
    schedule: Schedule
    urls: Sequence[str]
    copies: int
    placement: Placement
    logs: Path
    timeout: timedelta
    stop_after: Callable[[int], bool]
    break_it: Callable[[int, Trainer], None]
    on_step: Callable[[StepReport], None]
    deaths: list[Death]
    start: Start = field(init=False)
    coordinator: Coordinator = field(init=False)
    denses: dict[int, DenseModel] = field(init=False)
    copy_check: CopyCheck = field(default_factory=CopyCheck)
    steps: dict[int, StepReport] = field(default_factory=dict)
    evaluations: dict[tuple[int, str], EvaluationReport] = field(default_factory=dict)  # by step and set
    last_batches: dict[int, int] = field(default_factory=dict)
    stopped_at: int | None = None
    failure: str | None = None
    failures: list[BaseException] = field(default_factory=list)
    _drawing: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, trainers: int, joining: Sequence[int], resume: Trained | None, changes: Mapping[int, Change]) -> None:
        """State the first term, and build the dense parts, one after the other: torch draws initial values for the process."""
        self.start = (
            Start(self.schedule.header.first_step - 1, (0,) * self.schedule.header.lanes) if resume is None else resume.start
        )
        number = 1 if resume is None else resume.terms[-1].number + 1
        first = first_term(number, range(trainers), self.schedule.header.lanes, self.copies, self.start.step)
        # In reverse, so that a rank taken for a trainer's number shows.
        first = replace(first, members=first.members[::-1])
        self.coordinator = Coordinator(first, self.copies, changes)
        self.denses = {number: DenseModel.build(self.job, self.schedule) for number in (*range(trainers), *joining)}
        if resume is not None:
            state = optimizer_state(resume.dense.module, resume.dense.optimizer)
            for dense in self.denses.values():
                dense.module.load_state_dict(resume.dense.module.state_dict())
                load_optimizer_state(dense.module, dense.optimizer, state)

    def run(self, number: int) -> None:
        """Run a trainer from when it is a member until it leaves, ends or dies."""
        try:
            if not self.coordinator.await_membership(number):
                return
            with Store(self.urls, self.timeout) as store:
                trainer = OneTrainer(self, number)
                try:
                    trainer.run(store)
                except Died:
                    # The others go on while what this one has under way may still arrive.
                    self.coordinator.crash(number)
                finally:
                    if trainer.hosted is not None:
                        trainer.hosted.traffic.abort()
        except BaseException as error:
            # Noted before the others lose this one.
            self.failures.append(error)
            self.coordinator.finish()
            self.coordinator.crash(number)

    def draw_death(self, trainer: int, point: str, step: int, term: int) -> Death | None:
        """Return what happens to a trainer at a point, which then happens to no other."""
        with self._drawing:
            for death in self.deaths:
                here = death.trainer in (trainer, None) and death.term in (term, None)
                if here and death.point == point and death.step <= step:
                    self.deaths.remove(death)
                    return death
        return None

    def outcome(self) -> Trained:
        """Return what the training left behind."""
        step = self.schedule.header.end_step - 1 if self.stopped_at is None else self.stopped_at
        start = Start(step, tuple(self.last_batches[lane] for lane in range(self.schedule.header.lanes)))
        dense = self.denses[self.coordinator.term.leader]
        at = (self.job, self.schedule, dense, self.urls, start, self.placement)
        return Trained(
            digest=digest(*at),
            steps=[self.steps[step] for step in sorted(self.steps)],
            evaluations=sorted(self.evaluations.values(), key=lambda report: report.step),
            stopped_at=self.stopped_at,
            failure=self.failure,
            start=start,
            dense=dense,
            terms=self.coordinator.terms,
            compared=self.copy_check.compared,
            stored=stored_fields(*at),
        )
