"""Training in one process in which trainers die, for tests: threads over the in-memory transport, on real redis-servers, and a coordinator."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Protocol

from training import CopyCheck, Trained, digest, stored_fields

from foreload.cache.client.store import Store
from foreload.cache.parity.placement import Placement
from foreload.cache.protocol.batch_log import FileLog
from foreload.cache.protocol.ownership import Ownership
from foreload.pipelines.schedule.format import Event
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.cluster.facts import contiguous_lanes
from foreload.trainer.compute.commits import Standing
from foreload.trainer.compute.hosted_lanes import HostedLanes
from foreload.trainer.compute.program import Trainer
from foreload.trainer.compute.reports import EvaluationReport, StepReport
from foreload.trainer.compute.succession import next_copies, next_hosts
from foreload.trainer.compute.transport import LocalHub, LocalTransport
from foreload.trainer.errors import LossNotFinite, PeerLost
from foreload.trainer.run.assembly import DenseModel, Start, StoreAccess, begin_term, join_term
from foreload.trainer.run.job import TrainJob
from foreload.trainer.run.next_term import continue_term

LAST_WRITE_BACK, LAST_WRITTEN = "before the last write-back", "after the last write-back"


class Died(BaseException):
    """What a trainer dies of."""


@dataclass(frozen=True, slots=True)
class Death:
    """A trainer dies when it comes to a point the first time after that training step began.

    trainer: None: whoever comes there first. dies: false: it only loses its peers there, and they it, and goes on in the next term. term: the
    number of that in which it happens; None: any.
    """

    trainer: int | None
    point: str
    step: int
    dies: bool = True
    term: int | None = None


@dataclass(frozen=True, slots=True)
class StatedTerm:
    """A term: who hosts each lane, and who has copies; where it begins, and whether training was to end before it; which copies lack nothing."""

    number: int
    members: tuple[int, ...]
    hosts: tuple[int, ...]
    copies: tuple[tuple[int, ...], ...]
    step: int
    hub: LocalHub
    complete: tuple[frozenset[int], ...] = ()
    stopping: bool = False

    def rank(self, trainer: int) -> int:
        return self.members.index(trainer)


class Coordinator:
    """States a term when every trainer that lives has told where it stands."""

    def __init__(self, hosts: tuple[int, ...], copies: int, step: int) -> None:
        self._changed = threading.Condition()
        self._copies = copies
        # Not by number, so that no rank is a trainer's number.
        members = tuple(sorted(set(hosts), reverse=True))
        self.term = StatedTerm(1, members, hosts, next_copies(hosts, [()] * len(hosts), members, copies), step, LocalHub(members))
        self.terms = [self.term]
        self._there = set(members)
        self._standings: dict[int, Standing] = {}
        self.failed = False

    def gone(self, trainer: int, failed: bool = False) -> None:
        """A trainer is dead; or failed, which ends the test."""
        with self._changed:
            self._standings.pop(trainer, None)
            self.failed |= failed
            self._there.discard(trainer)
            self._leave(trainer)
            self._state()

    def next(self, trainer: int, standing: Standing) -> StatedTerm:
        """What comes after the present term; returns when all that live have called this."""
        with self._changed:
            self._standings[trainer] = standing
            before = self.term
            self._leave(trainer)
            self._state()
            assert self._changed.wait_for(lambda: self.term is not before or self.failed, 30), f"{self._there} {self._standings}"
            assert not self.failed
            return self.term

    def _leave(self, trainer: int) -> None:
        if trainer in self.term.members:
            self.term.hub.transports()[self.term.rank(trainer)].close()

    def _state(self) -> None:
        if not self.failed and self._there and set(self._standings) == self._there:
            before, standings = self.term, self._standings
            complete = [frozenset(t for t, at in standings.items() if lane in at.copies) for lane in range(len(before.hosts))]
            there = tuple(t for t in before.members if t in self._there)
            hosts = tuple(host for host in next_hosts(before.hosts, complete, there) if host is not None)
            if len(hosts) < len(before.hosts):
                self.failed = True
            else:
                step = min(at.step for at in standings.values())
                copies = next_copies(hosts, complete, there, self._copies)
                stopping = any(at.stopping for at in standings.values())
                self.term = StatedTerm(before.number + 1, there, hosts, copies, step, LocalHub(there), tuple(complete), stopping)
                self.terms.append(self.term)
                self._standings = {}
        self._changed.notify_all()


def train_with_deaths(
    job: TrainJob,
    schedule: Schedule,
    urls: Sequence[str],
    trainers: int,
    deaths: Sequence[Death],
    copies: int = 2,
    parity: tuple[int, int] = (1, 0),
    stop_after: Callable[[int], bool] = lambda step: False,
) -> tuple[Trained, list[StatedTerm]]:
    """Run a schedule to its end, or to a stop, while trainers are lost; returns what came of it, and the terms that there were."""
    training = _Training(job, schedule, urls, trainers, deaths, copies, Placement.spread(len(urls), *parity), stop_after)
    run_trainers(training, trainers)
    return training.outcome(), training.coordinator.terms


class Training(Protocol):
    """Trainers in one process. logs: the folder of their batch logs; failures: what ended trainers before their time."""

    logs: Path
    failures: list[BaseException]

    def run(self, number: int) -> None:
        """One trainer, from its beginning to its end."""


def run_trainers(training: Training, count: int) -> None:
    """Run each trainer to its end, in a thread of its own. Raises what ended the first that failed."""
    threads = [threading.Thread(target=training.run, args=(number,), name=f"trainer {number}") for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    shutil.rmtree(training.logs)
    if training.failures:
        raise training.failures[0]


class _Training:
    """What the trainers of one training share."""

    def __init__(
        self,
        job: TrainJob,
        schedule: Schedule,
        urls: Sequence[str],
        trainers: int,
        deaths: Sequence[Death],
        copies: int,
        placement: Placement,
        stop_after: Callable[[int], bool],
    ) -> None:
        self.job, self.schedule, self.urls, self.placement, self.stop_after = job, schedule, urls, placement, stop_after
        start = Start.anew(schedule)
        self.coordinator = Coordinator(tuple(contiguous_lanes(schedule.header.lanes, trainers)), copies, start.step)
        self.denses = {number: DenseModel.build(job, schedule) for number in range(trainers)}
        self.deaths, self.drawing = set(deaths), threading.Lock()
        self.failures: list[BaseException] = []
        self.logs = Path(tempfile.mkdtemp())
        self.checked = CopyCheck()
        self.steps: dict[int, StepReport] = {}
        self.evaluations: dict[tuple[int, str], EvaluationReport] = {}  # by step and set
        self.last_batches: dict[int, int] = {}
        self.stopped_at: int | None = None
        self.failure: str | None = None

    def outcome(self) -> Trained:
        """What came of it."""
        step = self.schedule.header.end_step - 1 if self.stopped_at is None else self.stopped_at
        start = Start(step, tuple(self.last_batches[lane] for lane in range(self.schedule.header.lanes)))
        dense = self.denses[self.coordinator.term.hosts[0]]
        store = (self.job, self.schedule, dense, self.urls, start, self.placement)
        steps = [self.steps[k] for k in sorted(self.steps)]
        evaluations = sorted(self.evaluations.values(), key=lambda told: told.step)  # of a step, sets as they came
        return Trained(
            digest(*store),
            steps,
            evaluations,
            self.stopped_at,
            start,
            self.failure,
            dense,
            self.checked.compared,
            stored_fields(*store),
        )

    def run(self, number: int) -> None:
        """A trainer, until it ends or dies."""
        one = _OneTrainer(self, number)
        try:
            with Store(self.urls, timedelta(seconds=10)) as store:
                try:
                    one.run(store)
                except Died:
                    # The others go on while what this one has under way may still arrive.
                    self.coordinator.gone(number)
                finally:
                    if one.hosted is not None:
                        one.hosted.traffic.abort()
        except BaseException as error:
            self.failures.append(error)
            self.coordinator.gone(number, failed=True)


class _OneTrainer:
    """One trainer, over its terms."""

    def __init__(self, training: _Training, number: int) -> None:
        self._all, self._number = training, number
        self.hosted: HostedLanes | None = None
        self._step = -1
        self._term = 1
        self._dying = False

    def run(self, store: Store) -> None:
        """From the first term to the end."""
        shared, term = self._all, self._all.coordinator.term
        parts = shared.denses[self._number].parts(shared.job, shared.schedule)
        access = StoreAccess(
            store,
            shared.placement,
            shared.job.run_namespace,
            FileLog(shared.logs),
            ownership=Ownership(term.number),
            on_action=self._acted,
        )
        session = join_term(parts, *self._place(term))
        trainer, events = begin_term(parts, access, session, Start.anew(shared.schedule))
        while True:
            self.hosted = trainer.lanes
            try:
                self._run_term(trainer, events, term.step)
                return
            except PeerLost:
                assert trainer.commits is not None
                self._come_to("term over")
                term = shared.coordinator.next(self._number, trainer.commits.standing())
                self._term = term.number
                trainer.commits.roll_back(term.step)
                self._come_to("rolled back")
            session = join_term(parts, *self._place(term))
            self._come_to("group formed")
            seeded = {
                (lane, term.rank(t)) for lane, holders in enumerate(term.copies) for t in holders if t in term.complete[lane]
            }
            copies, access = trainer.commits.copies, replace(access, ownership=Ownership(term.number))
            trainer, events = continue_term(
                parts, access, session, trainer.lanes, dict(copies), term.step, seeded, term.stopping, last_owner_dead=True
            )

    def _place(self, term: StatedTerm) -> tuple[LocalTransport, list[int], list[list[int]]]:
        """This trainer's in a term: transport, lane map, copy map."""
        copies = [[term.rank(trainer) for trainer in holders] for holders in term.copies]
        return term.hub.transports()[term.rank(self._number)], [term.rank(host) for host in term.hosts], copies

    def _run_term(self, trainer: Trainer, events: Iterator[Event], before: int) -> None:
        """The program from here to its end, or to a stop, and the end."""
        self._come_to("ready")
        shared, trained, stopped, failure = self._all, before, None, None
        shared.checked.watch(trainer)
        keep = trainer.on_point

        def on_point(point: str, step: int) -> None:
            keep(point, step)
            self._step = step
            self._come_to(point)

        trainer.on_point = on_point

        def on_step(report: StepReport) -> None:
            nonlocal trained
            trained = report.step
            if trainer.session.leads or report.step not in shared.steps:
                shared.steps[report.step] = report

        def stop_after(step: int) -> bool:
            if shared.stop_after(step):
                shared.stopped_at = step
            return shared.stopped_at == step

        def on_evaluation(report: EvaluationReport) -> None:
            shared.evaluations[report.step, report.set] = report

        if shared.stopped_at is not None and shared.stopped_at == before:
            stopped = before
            trainer.commit_last()
        else:
            try:
                stopped = trainer.run(events, stop_after, on_step, on_evaluation)
            except LossNotFinite as error:
                trainer.commit_last()
                stopped, failure = trained, str(error)
        last = shared.schedule.header.end_step - 1 if stopped is None else stopped
        self._come_to(LAST_WRITE_BACK)
        trainer.lanes.write_everything_back(last + 1, at_stop=stopped is not None)
        self._come_to(LAST_WRITTEN)
        trainer.session.barrier()
        assert trainer.lanes.traffic.repair_shards(timedelta(seconds=30)) == []
        shared.last_batches.update(trainer.lanes.last_batches())
        if failure is not None:
            shared.stopped_at, shared.failure = stopped, failure

    def _acted(self, action: str) -> None:
        """What the traffic's thread does."""
        if self._death_at(action) is not None:
            self._dying = True
            raise Died

    def _death_at(self, point: str) -> Death | None:
        """What befalls this trainer at a point."""
        with self._all.drawing:
            for death in self._all.deaths:
                here = death.trainer in (self._number, None) and death.term in (self._term, None)
                if here and death.point == point and death.step <= self._step:
                    if death.trainer is None or not death.dies:
                        self._all.deaths.remove(death)
                    return death
        return None

    def _come_to(self, point: str) -> None:
        death = self._death_at(point)
        if death is not None and not death.dies:
            raise PeerLost(f"trainer {self._number}: at {point} of step {self._step}")
        self._dying |= death is not None
        if self._dying:
            raise Died
