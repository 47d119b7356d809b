"""The coordinator of a call of `foreload train`: it follows the trainers from their start to their end, and answers what users ask meanwhile."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Mapping
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any, Literal, assert_never

from foreload.base.errors import ForeloadError
from foreload.cache.protocol.shards.shard_status import ServerUnreachable
from foreload.trainer.cluster.coordinator.checkpointing import Checkpointing
from foreload.trainer.cluster.coordinator.control_socket import RequestQueue, RunRequests
from foreload.trainer.cluster.coordinator.failures import Failures, GuestsRefused
from foreload.trainer.cluster.coordinator.membership import SILENT, LaneReplicas, Membership
from foreload.trainer.cluster.coordinator.row_migration import RowMigration
from foreload.trainer.cluster.coordinator.scaling import Scaling
from foreload.trainer.cluster.coordinator.spawned_trainers import SpawnedTrainers
from foreload.trainer.cluster.coordinator.store_shards import StoreShards
from foreload.trainer.cluster.coordinator.terms import first_term
from foreload.trainer.cluster.coordinator.training_call import PublishedPlan, TrainingCall
from foreload.trainer.cluster.messages.control import (
    Answer,
    AskCheckpoint,
    AskCheckpointed,
    AskMove,
    AskReplace,
    AskRowCounts,
    AskScale,
    AskScaled,
    AskScrub,
    AskScrubbed,
    AskStatus,
    AskStop,
    ControlRequest,
    Refused,
    RowCountsAnswer,
    RunStatus,
    Stopping,
)
from foreload.trainer.cluster.messages.facts import Go, StopWanted, Term
from foreload.trainer.cluster.messages.rendezvous import EventReceiver, Rendezvous
from foreload.trainer.cluster.messages.trainers import (
    CanJoin,
    CheckpointReport,
    CopiesTold,
    Ended,
    EvaluationEnded,
    Failed,
    FaultInjected,
    LeaveWanted,
    Ready,
    RequestReport,
    ShardsTold,
    StepEnded,
    TermLeft,
    TrainerEnd,
    TrainerEvent,
)
from foreload.trainer.job.scheduler import under_scheduler
from foreload.trainer.run.event_log import StopAsked, TrainerLost
from foreload.trainer.run.report import RunReport

POLL = timedelta(milliseconds=30)  # between two looks at events and requests
CHANGE_POLL = timedelta(milliseconds=2)  # while trainers wait for their next term
GRACE = timedelta(seconds=5)  # for trainers to say why one failed, and to leave when all is saved


class Coordinator:
    """Of one call; one thread uses it. trainers: their processes; requests: what users ask; report: of the trainers' steps.

    members, scaling, moves, checkpointing: its parts; ended: how members of the term have, so far.
    """

    def __init__(
        self,
        call: TrainingCall,
        rendezvous: Rendezvous,
        trainers: SpawnedTrainers,
        shards: StoreShards,
        requests: RequestQueue,
        report: RunReport,
    ) -> None:
        self._call, self._rendezvous, self._trainers, self._shards = call, rendezvous, trainers, shards
        self._requests, self.report = requests, report
        job, start, lanes = call.job, call.start, call.schedule.header.lanes
        term = first_term(start.term, range(job.trainers), lanes, job.replicas_held, start.step, call.machines)
        self.members = Membership(call, rendezvous, term, self._end_process)
        memory = shards.memory
        self._plan = PublishedPlan(rendezvous, call.run.placement, shards.plain_urls, None if memory is None else memory.stop_by)
        self._receiver = EventReceiver(rendezvous, term.members)
        self.checkpointing = Checkpointing(call, rendezvous, self._plan, report)
        self.moves = RowMigration(call, shards, self._plan)
        self.scaling = Scaling(call, self._start_joining, self._end_process)
        self._copies = LaneReplicas(call, term)
        self._run_requests = RunRequests(call, term.members, self._plan)
        self._failures = Failures(call.machines)
        self.ended: dict[int, TrainerEnd] = {}
        self._training = False  # whether all trainers were ready once
        self._stop_wanted = self._stop_published = False
        self._dead: dict[int, str] = {}  # how processes have ended
        self._lingered = False  # whether a trainer failed, and the others were given time to say why

    def begin(self) -> None:
        """State the first term, and the plan, before trainers are told what they are started for."""
        self._rendezvous.publish(self.members.term, self.members.term.number)
        self._plan.begin()

    def follow(self) -> None:
        """Take in events, and pass on what is asked, until every trainer has ended. Raises why one ended before its time, or KeyboardInterrupt."""
        while not self.all_ended:
            if (at_most := self.look()) is not None:
                self._trainers.pause(at_most, self._dead)

    @property
    def all_ended(self) -> bool:
        """Whether every member has."""
        return self.ended.keys() == set(self.members.term.members)

    def look(self) -> timedelta | None:
        """Take in what came since the last look, and decide what follows. Returns for how long nothing may be done; None where a trainer failed, and
        was given time to say why. Raises as `follow` does.
        """
        members, term = self.members, self.members.term
        # Before the event is read: what a process sent before it ended is then there.
        self._dead = dead = self._failures.with_reports(self._trainers.ended())
        self._take_events()
        self._requests.answer(self._respond)
        missing = dead.keys() & set(term.members) - self.ended.keys()
        silent: dict[int, str] = {}
        if not self._training and (guests := self._failures.guests(term)):
            silent = dict.fromkeys(guests & set(members.silent()), SILENT)
        if self._training and not self._failures and (members.survives or not missing):
            self._see_to_members(dead)
        elif self._failures or missing or silent:
            if self._lingered or silent:
                raise self._reason(term, silent)
            self._lingered = True
            self._linger()
            return None
        self._shards.restart_dead()
        if (memory := self._shards.memory) is not None:
            memory.step = self._call.events.step
            self._plan.change(stop_by=memory.stop_by)
        self.moves.poll(members.term.members)
        self._run_requests.poll()
        self.checkpointing.poll(members.term.members, self._phase == "training" and not members.changing)
        self.report.tick()
        self._call.events.step = self.report.last_step
        self._call.events.see_messages()
        self._heed_signals()
        return CHANGE_POLL if self._training and members.changing else POLL

    def _heed_signals(self) -> None:
        """Have training end where that is asked for. Raises KeyboardInterrupt."""
        received = self._call.interrupts.received
        if len(received) > 1 or (received and not self._training):
            raise KeyboardInterrupt  # before all are ready nothing of the run has changed
        if (received or self._stop_wanted) and not self._stop_published:
            self._stop_published = True
            self._rendezvous.publish(StopWanted())
            signals = [signal.Signals(number).name for number in received]
            self._call.events.note(StopAsked(cause=signals[0] if signals else "by the control socket"))

    def wait(self, future: Future[Any], at_most: float = math.inf) -> None:
        """Return when a future is done, or after so many seconds; what is asked meanwhile is answered."""
        until = time.monotonic() + at_most
        while not future.done() and time.monotonic() < until:
            self._requests.answer(self._respond)
            wait([future], POLL.total_seconds())

    def see_last(self) -> None:
        """All is saved: end those that are not members yet, and wait for the others to leave. Those that take longer are ended with the rest."""
        self.scaling.end_starting()
        self._trainers.await_end(GRACE)
        # Who had stood still, and was taken for lost, may only now have found out.
        self._take_events()

    @property
    def _phase(self) -> Literal["starting", "training", "ending"]:
        if self._stop_published or self.ended:
            return "ending"
        return "training" if self._training else "starting"

    def _see_to_members(self, dead: Mapping[int, str]) -> None:
        """Whoever is lost, joins or leaves: one term ends then, and the next begins."""
        goes_on = self._phase == "training"
        if self.members.poll(dead, self.ended, goes_on):
            # Who had ended sees to the lanes of those that had not.
            self.ended.clear()
            self._copies.on_term(self.members.term)
            self.report.on_term(self.members.term.members, self.members.term.committed)
            self._run_requests.on_term(self.members.term.members)
            self.checkpointing.on_term()
            self._shards.on_term(self.members.term.members)
            for trainer in self.members.lost:
                self.scaling.lost(trainer)
        if not under_scheduler():
            for trainer in self._trainers.take_offers(lambda: self.scaling.offer() if goes_on else None, self._plan.now.version):
                self._receiver.add(trainer)
            self.scaling.poll(self.members, dead, goes_on)
            for trainer in dead.keys() - set(self.members.term.members):
                self._trainers.forget(trainer)
        if self.members.begin():
            self._shards.term_begins()

    def _start_joining(self, trainer: int) -> None:
        self._receiver.add(trainer)
        self._trainers.start(trainer, self._plan.now.version)

    def _linger(self) -> None:
        """A trainer failed: give the others a moment to say why, since who speaks first is seldom the one to blame."""
        deadline = time.monotonic() + GRACE.total_seconds()
        while time.monotonic() < deadline and self._trainers.ended().keys() != self._trainers.pids.keys():
            self._take_events()
            if self._failures.explained:
                return
            self._requests.answer(self._respond)
            time.sleep(POLL.total_seconds())
        self._take_events()

    def _take_events(self) -> None:
        for trainer, event in self._receiver.poll():
            self._receive(trainer, event)

    def _receive(self, trainer: int, event: TrainerEvent) -> None:
        if self.scaling.is_starting(trainer):
            self._call.observer.on_event(trainer, event)
            match event:
                case CanJoin():
                    self.scaling.can_join(trainer)
                case Failed():
                    self.scaling.cannot_join(trainer, event.message)
            return
        if trainer not in self.members.term.members:
            # It was taken for lost, and the others went on without it, or it has left.
            if isinstance(event, Failed):
                self._call.say(f"trainer {trainer}: was lost, and has stopped now: {event.message}")
            return
        self._call.observer.on_event(trainer, event)
        match event:
            case TermLeft():
                self.members.receive(trainer, event)
            case LeaveWanted():
                # Where all were asked to leave, it is training that ends.
                self._stop_wanted |= not self.scaling.leave(trainer, self.members)
            case StepEnded():
                self.scaling.has_trained(trainer, event.report)
                self.report.step(trainer, event.report)
            case EvaluationEnded():
                self.report.evaluation(event.report)
                self.checkpointing.evaluated(event)
            case Ready():
                self.members.receive(trainer, event)
                if not self._training:
                    self._begin()
            case Ended():
                self.ended[trainer] = self._rendezvous.read(TrainerEnd, self.members.term.number, trainer)
            case ShardsTold():
                self._shards.on_shards(trainer, event.shards)
            case CopiesTold():
                self.members.receive(trainer, event)
                self._copies.on_copies(trainer, event)
            case ServerUnreachable():
                self._shards.unreachable(event)
            case RequestReport():
                self._run_requests.receive(trainer, event)
            case CheckpointReport():
                self.checkpointing.receive(trainer, event)
            case Failed():
                self._failures.receive(trainer, event, self._training and self.members.survives)
            case FaultInjected() | CanJoin():
                pass  # the observer's; and it has joined
            case _:
                assert_never(event)

    def _begin(self) -> None:
        """Training begins, if all are ready. From the first step on rows change on the store, while the dense part at rest does not."""
        call, members = self._call, self.members
        if not members.all_ready:
            return
        self._training = True
        call.write_manifest(call.manifest.under(members.ready[members.term.members[0]].fingerprint, call.start.step + 1))
        call.run.write_status(call.start)
        self._rendezvous.publish(Go())
        members.begin()
        self._shards.term_begins()

    def _end_process(self, trainer: int) -> bool:
        """End a trainer that is lost, or only seems to be; returns whether it is dead."""
        return self._call.observer.may_kill(trainer) and self._trainers.end(trainer)

    def _reason(self, term: Term, silent: dict[int, str]) -> ForeloadError | GuestsRefused:
        """Why trainers ended before their time. silent: those that are alive, but silent, and so to be given here."""
        heard, unheard = self._failures.heard() | self.ended.keys(), silent | self._trainers.ended()
        unheard = {trainer: how for trainer, how in unheard.items() if trainer in term.members and trainer not in heard}
        why = self._failures.reason(term, unheard, self._training)
        if isinstance(why, GuestsRefused):
            self._trainers.let_go_of_guests()
            return why
        for trainer, how in unheard.items():
            self._call.events.note(TrainerLost(trainer=trainer, cause=how))
        return why

    # What users ask.

    def _respond(self, request: ControlRequest) -> Answer | Future[Answer]:
        """The answer to a request, or what will be the answer. Raises the package's errors, which say why it is refused."""
        if (why := self._why_not(request)) is not None:
            return Refused(why)
        match request:
            case AskStatus():
                return self._status()
            case AskStop():
                self._stop_wanted = True
                return Stopping()
            case AskReplace():
                return self._shards.want_replacement(request)
            case AskMove():
                return self.moves.want(request)
            case AskScrub():
                return self._run_requests.scrub(request)
            case AskScrubbed():
                return self._run_requests.scrubbed()
            case AskRowCounts():
                return self._run_requests.row_counts() if self._training else RowCountsAnswer(())
            case AskScale():
                return self.scaling.ask(request)
            case AskScaled():
                return self.scaling.progress(request)
            case AskCheckpoint():
                return self.checkpointing.wanted.ask(request)
            case AskCheckpointed():
                return self.checkpointing.wanted.progress(request)

    def _why_not(self, request: ControlRequest) -> str | None:
        """Why a request cannot be met, as training begins or ends; None: it can."""
        if isinstance(request, AskScale) and under_scheduler():
            return "a scheduler starts its trainers: stop it, and go on with --resume and another number of them"
        if isinstance(request, AskMove | AskScale | AskScrub) and self._phase == "starting":
            return "its trainers are still starting; try again in a moment"
        if self._phase == "ending" or self._stop_wanted:
            match request:
                case AskMove():
                    return "it is about to end; ask again when it rests"
                case AskScale():
                    return "it is about to end; go on with --resume and another --trainers"
                case AskCheckpoint():
                    return "it is about to end; save a checkpoint of it then"
        return None

    def _status(self) -> RunStatus:
        term = self.members.term
        return RunStatus(
            state="starting" if self._phase == "starting" else "training",
            step=self.report.last_step,
            term=term.number,
            lanes=term.hosts,
            trainers=self._trainers.pids,
            shards=self._shards.together,
            members=term.members,
            copies=self._copies.status,
        )
