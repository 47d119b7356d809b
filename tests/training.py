"""Training in one process, for tests: several trainers as threads over the in-memory transport, on real redis-servers."""

from __future__ import annotations

import itertools
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import numpy as np

from foreload.cache.client.resp import MARKER
from foreload.cache.client.store import Store
from foreload.cache.parity.placement import Placement
from foreload.cache.protocol.batch_log import FileLog
from foreload.cache.rows.partition import Partition
from foreload.pipelines.schedule.format import Event
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.cluster.facts import contiguous_lanes
from foreload.trainer.compute.dense_optimizers import load_optimizer_state, optimizer_state
from foreload.trainer.compute.hosted_lanes import HostedLanes
from foreload.trainer.compute.parts import TrainerParts
from foreload.trainer.compute.program import Trainer
from foreload.trainer.compute.reports import EvaluationReport, StepReport
from foreload.trainer.compute.term_session import spread_copies
from foreload.trainer.compute.transport import LocalHub
from foreload.trainer.errors import LossNotFinite
from foreload.trainer.run.assembly import DenseModel, Start, StoreAccess, begin_term, join_term, stored_rows_at
from foreload.trainer.run.digest import Digest
from foreload.trainer.run.job import TrainJob
from foreload.trainer.run.model_rows import model_rows


@dataclass(slots=True)
class Trained:
    """What a training left: the digest, the reports of the trainer that leads, where it stopped (None: at the end), and what a resume starts from.

    failure: the loss that was not finite, if that is why it stopped; dense: the dense part of the trainer that led at the end, None before; compared:
    how often a copy was compared with what it is a copy of; stored: as `stored_fields` has it.
    """

    digest: str
    steps: list[StepReport]
    evaluations: list[EvaluationReport]
    stopped_at: int | None
    start: Start
    failure: str | None = None
    dense: DenseModel | None = None
    compared: int = 0
    stored: list[dict[bytes, bytes]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Term:
    """A term of a training: of each lane the number of the trainer that hosts it, and the step after which the term ends (None: it does not)."""

    hosts: tuple[int, ...]
    last_step: int | None = None

    @property
    def members(self) -> list[int]:
        """The trainers, in the order of their ranks: the last number has rank 0, so that no rank is a trainer's number."""
        return sorted(set(self.hosts), reverse=True)


_namespaces = itertools.count()


def job_in_memory(**settings: object) -> TrainJob:
    """A job for `train`, which is given the schedule and the store, and has no folder. Its namespace is no other job's of this process."""
    nowhere = {"schedule": "-", "run": "-", "store": "-"}
    return TrainJob.of(nowhere | {"namespace": f"test-{next(_namespaces)}"} | settings)


def train(
    job: TrainJob,
    schedule: Schedule,
    urls: Sequence[str],
    trainers: int = 1,
    stop_after: Callable[[int], bool] = lambda step: False,
    resume: Trained | None = None,
    check_tags: bool = True,
    parity: tuple[int, int] = (1, 0),
    break_it: Callable[[int, Trainer], None] = lambda number, trainer: None,
    on_step: Callable[[StepReport], None] = lambda report: None,
    timeout: timedelta = timedelta(seconds=10),
    terms: Sequence[Term] = (),
    copies: int = 1,
) -> Trained:
    """Run a schedule to its end, or to a stop, with `trainers` trainers in threads, in one term or, if told, in several.

    parity: k and r; (1, 0): none. break_it: may put faults into a trainer, by its number. on_step: called by the trainer that leads after each step.
    With parity, shards that are lost meanwhile are waited for at the end. Between terms a lane that moves is closed by the trainer that hosted it,
    and opened by the one that will; a trainer lives on with its other lanes, its connections and its dense part, which one that was not in the
    term before gets from its leader. copies: how many trainers have each lane, its owner among them.
    """
    shared = _Shared(
        job, schedule, urls, tuple(terms) or (Term(tuple(contiguous_lanes(schedule.header.lanes, trainers))),), resume
    )
    shared.check_tags, shared.placement, shared.timeout = check_tags, Placement.spread(len(urls), *parity), timeout
    shared.stop_after, shared.break_it, shared.on_step, shared.copies = stop_after, break_it, on_step, copies
    threads = [threading.Thread(target=shared.run, args=(number,)) for number in shared.denses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    shutil.rmtree(shared.logs)
    if shared.failures:
        raise shared.failures[0]
    outcome = shared.outcome
    outcome.start = Start(shared.step, tuple(shared.last_batches))
    outcome.dense = shared.denses[shared.terms[-1].hosts[0]]
    outcome.compared = shared.checked.compared
    store = (job, schedule, outcome.dense, urls, outcome.start, shared.placement)
    outcome.digest, outcome.stored = digest(*store), stored_fields(*store)
    return outcome


class CopyCheck:
    """Compares every copy of a lane with what its owner had after the same step, at every commit."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], tuple[np.ndarray, ...]] = {}  # by lane and step
        self.compared = 0

    def watch(self, trainer: Trainer) -> None:
        """Have a trainer's partitions kept after each step, and its copies compared when it is committed."""
        if (commits := trainer.commits) is None:
            return

        def keep(point: str, step: int) -> None:
            if point == "dense part applied":
                for lane, partition in trainer.lanes.partitions.items():
                    self._kept[lane, step] = self._of(partition)
                    self._kept.pop((lane, step - 4), None)

        def compare() -> None:
            for lane, copy in commits.copies.items():
                if copy.complete:
                    for own, other in zip(self._of(copy.partition), self._kept[lane, commits.installed], strict=True):
                        assert own.tobytes() == other.tobytes()
                    self.compared += 1

        trainer.on_point, commits.on_install = keep, compare

    @staticmethod
    def _of(partition: Partition) -> tuple[np.ndarray, ...]:
        """Who sits in the training slots, and what with."""
        slots, here = partition.occupied(), partition.occupants
        rows = (partition.weights.numpy()[slots], partition.state.numpy()[slots])
        return slots, *here.columns(slots), here.stored_tag[slots], *rows


class _Shared:
    """What the trainers of one training share: the terms, and what each leaves for the next.

    denses: the dense part of each trainer, by its number; last_batches: of each lane the number of its last write-back batch; logs: the folder of
    the lanes' batch logs; failures: what threads ended with, the first one first.
    """

    check_tags: bool
    placement: Placement
    timeout: timedelta
    stop_after: Callable[[int], bool]
    break_it: Callable[[int, Trainer], None]
    on_step: Callable[[StepReport], None]
    copies: int

    def __init__(
        self, job: TrainJob, schedule: Schedule, urls: Sequence[str], terms: tuple[Term, ...], resume: Trained | None
    ) -> None:
        self.job, self.schedule, self.urls, self.terms = job, schedule, urls, terms
        start = resume.start if resume is not None else Start.anew(schedule)
        self.step, self.last_batches = start.step, list(start.last_batches)
        self.outcome = Trained("", [], [], None, start)
        self.failures: list[BaseException] = []
        self.logs = Path(tempfile.mkdtemp())
        numbers = sorted({host for term in terms for host in term.hosts})
        self.denses = {number: DenseModel.build(job, schedule) for number in numbers}
        if resume is not None:
            assert resume.dense is not None
            for dense in self.denses.values():
                _copy_dense(resume.dense, dense)
        self._groups = [dict(zip(term.members, LocalHub(term.members).transports(), strict=True)) for term in terms]
        self._between = threading.Barrier(len(numbers))
        self.checked = CopyCheck()

    def run(self, number: int) -> None:
        """A trainer, from its first term to its last."""
        parts = self.denses[number].parts(self.job, self.schedule)
        hosted: HostedLanes | None = None
        try:
            with Store(self.urls, self.timeout) as store:
                access = StoreAccess(store, self.placement, self.job.run_namespace, FileLog(self.logs), self.check_tags)
                try:
                    for place, term in enumerate(self.terms):
                        # All have come here, so every lane that moves rests, and nobody has begun to train.
                        self._between.wait()
                        start = Start(self.step, tuple(self.last_batches))
                        if place and number in term.members and number not in self.terms[place - 1].members:
                            _copy_dense(self.denses[self.terms[place - 1].hosts[0]], self.denses[number])
                        self._between.wait()
                        if number in term.members:
                            hosted = self._run_term(number, place, parts, access, start, hosted)
                finally:
                    if hosted is not None:
                        hosted.traffic.abort()
        except BaseException as error:
            # Noted before the others see that this one is gone.
            self.failures.append(error)
            self._between.abort()
            for group in self._groups:
                if number in group:
                    group[number].close()

    def _run_term(
        self, number: int, place: int, parts: TrainerParts, access: StoreAccess, start: Start, hosted: HostedLanes | None
    ) -> HostedLanes:
        """One term; returns the lanes that the trainer still hosts, those that the next term gives to others closed."""
        term, transport = self.terms[place], self._groups[place][number]
        lane_map = [term.members.index(host) for host in term.hosts]
        session = join_term(parts, transport, lane_map, spread_copies(lane_map, self.copies))
        trainer, events = begin_term(parts, access, session, start, hosted)
        self.checked.watch(trainer)
        try:
            self.break_it(number, trainer)
            if term.last_step is None:
                self._run_to_the_end(trainer, events, start.step)
            else:
                assert trainer.run(events, lambda step: step == term.last_step, *self._told(trainer)) == term.last_step
                for lane in trainer.lanes.numbers:
                    if self.terms[place + 1].hosts[lane] != number:
                        self.last_batches[lane] = trainer.lanes.close_lane(lane, term.last_step)
                self.step = term.last_step
        except BaseException:
            trainer.lanes.traffic.abort()
            raise
        session.close()
        return trainer.lanes

    def _run_to_the_end(self, trainer: Trainer, events: Iterator[Event], before: int) -> None:
        """The last term: to the end of the schedule, or to a stop."""
        lanes, failure, last_trained = trainer.lanes, None, before
        on_step, on_evaluation = self._told(trainer)

        def note(report: StepReport) -> None:
            nonlocal last_trained
            last_trained = report.step
            on_step(report)

        try:
            stopped = trainer.run(events, self.stop_after, note, on_evaluation)
        except LossNotFinite as error:
            trainer.commit_last()
            stopped, failure = last_trained, str(error)
        last = self.schedule.header.end_step - 1 if stopped is None else stopped
        lanes.write_everything_back(last + 1, at_stop=stopped is not None)
        # What the leader does after the last step has happened before anyone looks for shards that are lost.
        trainer.session.barrier()
        assert lanes.traffic.repair_shards(timedelta(seconds=30)) == []
        for lane, batch in lanes.last_batches().items():
            self.last_batches[lane] = batch
        self.step = last
        if trainer.session.leads:
            self.outcome.stopped_at, self.outcome.failure = stopped, failure

    def _told(self, trainer: Trainer) -> tuple[Callable[[StepReport], None], Callable[[EvaluationReport], None]]:
        def on_step(report: StepReport) -> None:
            if trainer.session.leads:
                self.outcome.steps.append(report)
                self.on_step(report)

        return on_step, self.outcome.evaluations.append


def _copy_dense(source: DenseModel, target: DenseModel) -> None:
    """What a trainer gets that joins: parameters and the optimizer's state."""
    target.module.load_state_dict(source.module.state_dict())
    load_optimizer_state(target.module, target.optimizer, optimizer_state(source.module, source.optimizer))


def stored_fields(
    job: TrainJob, schedule: Schedule, dense: DenseModel, urls: Sequence[str], at: Start, placement: Placement
) -> list[dict[bytes, bytes]]:
    """Every row and parity row that the store has of the run, by lane and shard: field to value."""
    fields = []
    with Store(urls, timedelta(seconds=10)) as store:
        stored = stored_rows_at(store, placement, dense.layouts, job.run_namespace, schedule, at)
        for lane in range(schedule.header.lanes):
            for shard, key in enumerate(stored.keys(lane)):
                pairs = store.command(shard, "HGETALL", key)
                assert isinstance(pairs, list)
                fields.append({field: value for field, value in zip(pairs[::2], pairs[1::2], strict=True) if field != MARKER})
    return fields


def digest(job: TrainJob, schedule: Schedule, dense: DenseModel, urls: Sequence[str], at: Start, placement: Placement) -> str:
    """The digest of the model as the store and a trainer hold it."""
    whole = Digest()
    whole.dense(dict(dense.module.named_parameters()), optimizer_state(dense.module, dense.optimizer))
    with Store(urls, timedelta(seconds=10)) as store:
        stored = stored_rows_at(store, placement, dense.layouts, job.run_namespace, schedule, at)
        rows = model_rows(schedule, at.step, stored, at.last_batches)
        pending = next(rows, None)
        for number, table in enumerate(schedule.header.features.tables):
            whole.table(table.name)
            while pending is not None and pending.table == number:
                whole.rows(pending.ids, pending.weights, pending.state)
                pending = next(rows, None)
    return whole.hexdigest()
