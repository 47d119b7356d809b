"""Training in one process whose trainers join, leave and die, for tests: threads over the in-memory transport, on real redis-servers.

Each term is stated by the rules of the coordinator (`foreload.trainer.cluster.terms`).
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from dying import Death, Died, run_trainers
from training import CopyCheck, Trained, digest, stored_fields

from foreload.cache.client.store import Store
from foreload.cache.parity.placement import Placement
from foreload.cache.protocol.batch_log import FileLog
from foreload.cache.protocol.ownership import Ownership
from foreload.pipelines.schedule.format import Event
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.cluster.facts import Term
from foreload.trainer.cluster.messages import TermLeft
from foreload.trainer.cluster.terms import Change, changed_term, first_term, next_term, wants_change
from foreload.trainer.compute.commits import Standing
from foreload.trainer.compute.hosted_lanes import HostedLanes
from foreload.trainer.compute.program import Trainer
from foreload.trainer.compute.reports import EvaluationReport, StepReport
from foreload.trainer.compute.transport import LocalHub, LocalTransport
from foreload.trainer.errors import PeerLost
from foreload.trainer.run.assembly import DenseModel, Start, StoreAccess, begin_term, join_term, open_no_lanes
from foreload.trainer.run.job import TrainJob
from foreload.trainer.run.next_term import continue_term
from foreload.trainer.run.report import Totals
from foreload.trainer.run.state_transfer import receive_state, send_state

PATIENCE = 60.0


class Coordinator:
    """States a term when every member that lives has left the one before. changes: after which step how many trainers there are to be."""

    def __init__(self, trainers: int, lanes: int, copies: int, changes: Mapping[int, int]) -> None:
        self.changed = threading.Condition()
        self._copies, self._changes = copies, dict(changes)
        self.term = first_term(1, range(trainers), lanes, copies, -1)
        self.terms, self.hubs = [self.term], {1: LocalHub(self.term.members)}
        self.ends_after: dict[int, int] = {}  # by term, the step that its leader has named
        self.handed: set[tuple[int, int]] = set()  # term and trainer
        self._left: dict[int, TermLeft] = {}
        self._dead: set[int] = set()
        self._complete: dict[int, tuple[int, ...]] = {}
        self._joining: tuple[int, ...] = ()
        self._leaving: tuple[int, ...] = ()
        self._next = trainers
        self.over = False

    def wait(self, what: str, satisfied: object) -> None:
        """Wait for something that another thread brings about; with `changed` held."""
        assert callable(satisfied)
        assert self.changed.wait_for(lambda: satisfied() or self.over, PATIENCE), what
        if self.over and not satisfied():
            raise Died

    def told(self, trainer: int, copies: Sequence[int]) -> None:
        """A trainer holds complete copies of these lanes."""
        with self.changed:
            self._complete[trainer] = tuple(copies)

    def ends(self, trainer: int, term: Term, step: int) -> bool:
        """Whether a term ends after a step: who leads has named that one after the step before."""
        with self.changed:
            ended = term.number in self.ends_after and step >= self.ends_after[term.number]
            for at in [at for at in self._changes if at <= step]:
                self._scale(self._changes.pop(at))
            complete = [{t for t, lanes in self._complete.items() if lane in lanes} for lane in range(len(term.hosts))]
            change = Change(self._joining, self._leaving)
            if trainer == term.leader and term.number not in self.ends_after and wants_change(term, complete, change):
                self.ends_after[term.number] = step + 1
            return ended

    def _scale(self, trainers: int) -> None:
        members = self.term.members
        more = trainers - len(members)
        self._joining = tuple(range(self._next, self._next + max(more, 0)))
        self._next += max(more, 0)
        self._leaving = tuple(sorted(members)[trainers:]) if more < 0 else ()
        self.changed.notify_all()

    def gone(self, trainer: int) -> None:
        """A trainer is dead."""
        with self.changed:
            self._dead.add(trainer)
            self._close(trainer)
            self._state()

    def next(self, trainer: int, left: TermLeft) -> Term:
        """What comes after the present term; returns when all members that live have called this."""
        with self.changed:
            before = self.term
            assert left.term == before.number
            self._left[trainer] = left
            self._close(trainer)
            self._state()
            self.wait("a further term", lambda: self.term is not before)
            return self.term

    def _close(self, trainer: int) -> None:
        if trainer in self.term.members:
            self.hubs[self.term.number].transports()[self.term.members.index(trainer)].close()

    def _state(self) -> None:
        before, alive = self.term, [trainer for trainer in self.term.members if trainer not in self._dead]
        if alive and not self.over and all(trainer in self._left for trainer in alive):
            standings = {trainer: self._left[trainer] for trainer in alive}
            if len(alive) == len(before.members) and all(left.why is None for left in standings.values()):
                self.term = changed_term(before, standings, self._copies, Change(self._joining, self._leaving))
            else:
                self.term = next_term(before, standings, self._copies)
            self._joining = tuple(trainer for trainer in self._joining if trainer not in self.term.members)
            self._leaving = tuple(trainer for trainer in self._leaving if trainer in self.term.members)
            self.terms.append(self.term)
            self.hubs[self.term.number] = LocalHub(self.term.members)
            self._left, self._complete = {}, {}
        self.changed.notify_all()

    def hand_over(self, trainer: int) -> None:
        """The trainer hosts the lanes no more that the term gives to others."""
        with self.changed:
            self.handed.add((self.term.number, trainer))
            self.changed.notify_all()

    def await_handed_over(self, term: Term, lanes: Sequence[int]) -> None:
        """Wait until those that hosted these lanes have handed them over, or are dead."""
        former = {host for lane in lanes if term.former and (host := term.former[lane]) is not None}
        with self.changed:
            self.wait("lanes", lambda: all((term.number, one) in self.handed or one in self._dead for one in former))


def train_scaled(
    job: TrainJob,
    schedule: Schedule,
    urls: Sequence[str],
    trainers: int,
    changes: Mapping[int, int],
    copies: int = 1,
    parity: tuple[int, int] = (1, 0),
    deaths: Sequence[Death] = (),
) -> tuple[Trained, list[Term]]:
    """Run a schedule to its end with `trainers` trainers and, after each step that `changes` names, so many; returns what came of it, and the terms.

    deaths: a trainer dies when it comes to a point of a step.
    """
    count = trainers + sum(changes.values())
    training = _Training(job, schedule, urls, trainers, changes, copies, parity, deaths, count)
    run_trainers(training, count)
    return training.outcome(), training.coordinator.terms


class _Training:
    """What the trainers of one training share."""

    def __init__(
        self,
        job: TrainJob,
        schedule: Schedule,
        urls: Sequence[str],
        trainers: int,
        changes: Mapping[int, int],
        copies: int,
        parity: tuple[int, int],
        deaths: Sequence[Death],
        most: int,
    ) -> None:
        """most: how many trainers there may be in all."""
        self.job, self.schedule, self.urls, self.placement = job, schedule, urls, Placement.spread(len(urls), *parity)
        self.coordinator = Coordinator(trainers, schedule.header.lanes, copies, changes)
        self.deaths = tuple(deaths)
        # One after the other, since what torch draws it draws for the process.
        self.denses = {number: DenseModel.build(job, schedule) for number in range(most)}
        self.failures: list[BaseException] = []
        self.logs = Path(tempfile.mkdtemp())
        self.checked = CopyCheck()
        self.steps: dict[int, StepReport] = {}
        self.told: dict[int, list[int]] = {}  # by trainer, the steps that it told of
        self.evaluations: dict[int, EvaluationReport] = {}
        self.last_batches: dict[int, int] = {}

    def outcome(self) -> Trained:
        """What came of it."""
        batches = tuple(self.last_batches[lane] for lane in range(self.schedule.header.lanes))
        start = Start(self.schedule.header.end_step - 1, batches)
        dense = self.denses[self.coordinator.term.leader]
        store = (self.job, self.schedule, dense, self.urls, start, self.placement)
        steps, evaluations = [self.steps[k] for k in sorted(self.steps)], [self.evaluations[k] for k in sorted(self.evaluations)]
        compared, stored = self.checked.compared, stored_fields(*store)
        return Trained(digest(*store), steps, evaluations, None, start, None, dense, compared, stored)

    def run(self, number: int) -> None:
        """A trainer, from when it is a member until it leaves, ends or dies."""
        coordinator = self.coordinator
        one = _OneTrainer(self, number)
        try:
            with coordinator.changed:
                coordinator.changed.wait_for(lambda: number in coordinator.term.members or coordinator.over)
                if number not in coordinator.term.members:
                    return
            with Store(self.urls, timedelta(seconds=10)) as store:
                try:
                    one.run(store)
                except Died:
                    coordinator.gone(number)
                finally:
                    if one.hosted is not None:
                        one.hosted.traffic.abort()
        except BaseException as error:
            self.failures.append(error)
            with coordinator.changed:
                coordinator.over = True
            coordinator.gone(number)


class _OneTrainer:
    """One trainer, over its terms."""

    def __init__(self, training: _Training, number: int) -> None:
        self._all, self._number = training, number
        self.hosted: HostedLanes | None = None
        self._step = -1
        self._term: Term

    def run(self, store: Store) -> None:
        """From its first term to its end."""
        shared, coordinator = self._all, self._all.coordinator
        term = self._term = coordinator.term
        parts = shared.denses[self._number].parts(shared.job, shared.schedule)
        access = StoreAccess(
            store, shared.placement, shared.job.run_namespace, FileLog(shared.logs), ownership=Ownership(term.number)
        )
        trainer: Trainer | None = None
        if term.number > 1:
            self.hosted = open_no_lanes(parts, access)
        while True:
            why = None
            try:
                session = join_term(parts, self._transport(), term.lane_map, term.copy_map)
                if self.hosted is None:
                    trainer, events = begin_term(parts, access, session, Start.anew(shared.schedule))
                    self.hosted = trainer.lanes
                else:
                    if trainer is None:
                        self._step = term.committed
                        receive_state(session.transport, term.members.index(term.leader), parts)
                    elif term.joined and session.leads:
                        ranks = [term.members.index(one) for one in term.joined]
                        send_state(session.transport, ranks, parts, term.committed, Totals())
                    coordinator.await_handed_over(term, [v for v in session.hosted if v not in self.hosted.partitions])
                    access = replace(access, ownership=Ownership(term.number))
                    copies = dict(trainer.commits.copies) if trainer is not None and trainer.commits is not None else {}
                    trainer, events = continue_term(
                        parts, access, session, self.hosted, copies, term.committed, term.seeded, term.stopping
                    )
                if not self._run_term(trainer, events):
                    return
            except PeerLost as error:
                assert any(term.copies)
                why = str(error)
            term = self._next(trainer, why)
            if self._number not in term.members:
                assert self._number in term.left
                return

    def _next(self, trainer: Trainer | None, why: str | None) -> Term:
        """Leave the term, and come to the next."""
        coordinator, number = self._all.coordinator, self._term.number
        if trainer is None:
            self._term = coordinator.next(self._number, TermLeft(number, -1, (), False, why, joins=True))
            return self._term
        commits = trainer.commits
        standing = commits.standing() if commits is not None else Standing(self._step, (), False)
        left = TermLeft(number, standing.step, standing.copies, standing.stopping, why)
        term = self._term = coordinator.next(self._number, left)
        if commits is not None:
            commits.roll_back(term.committed)
            commits.give_away([lane for lane in trainer.lanes.numbers if term.hosts[lane] != self._number])
        coordinator.hand_over(self._number)
        return term

    def _transport(self) -> LocalTransport:
        term = self._term
        return self._all.coordinator.hubs[term.number].transports()[term.members.index(self._number)]

    def _run_term(self, trainer: Trainer, events: Iterator[Event]) -> bool:
        """The program from here to its end, or to that of the term; returns which."""
        shared, coordinator, term = self._all, self._all.coordinator, self._term
        shared.checked.watch(trainer)
        keep = trainer.on_point

        def on_point(point: str, step: int) -> None:
            keep(point, step)
            for death in shared.deaths:
                here = (death.trainer, death.point) == (self._number, point) and death.term in (term.number, None)
                if here and death.step in (step, -1):
                    raise Died

        trainer.on_point = on_point

        def on_step(report: StepReport) -> None:
            self._step = report.step
            shared.told.setdefault(self._number, []).append(report.step)
            if trainer.session.leads or report.step not in shared.steps:
                shared.steps[report.step] = report
            # A step is quicker than the store here, and a copy is complete only when what its owner owed is stored.
            trainer.lanes.traffic.flush()
            copies = [] if trainer.commits is None else [lane for lane, c in trainer.commits.copies.items() if c.complete]
            coordinator.told(self._number, copies)

        def on_evaluation(report: EvaluationReport) -> None:
            shared.evaluations[report.epoch] = report

        def ends(step: int) -> bool:
            return coordinator.ends(self._number, term, step)

        trainer.session.barrier()
        if trainer.run(events, ends, on_step, on_evaluation, lambda: True) is not None:
            trainer.session.barrier()
            return True
        trainer.lanes.write_everything_back(shared.schedule.header.end_step, at_stop=False)
        trainer.session.barrier()
        assert trainer.lanes.traffic.repair_shards(timedelta(seconds=30)) == []
        shared.last_batches.update(trainer.lanes.last_batches())
        with coordinator.changed:
            coordinator.over = True
            coordinator.changed.notify_all()
        return False
