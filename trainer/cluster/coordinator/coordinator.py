"""The coordinator of one `foreload train` call.

It follows the trainers from their start to their end, and meanwhile answers users' requests.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Mapping
from concurrent.futures import Future, wait
from dataclasses import replace
from datetime import timedelta
from typing import Any, Literal, assert_never

from foreload.base.errors import ForeloadError
from foreload.cache.protocol.shards.shard_status import OK, ServerUnreachable
from foreload.trainer.cluster.coordinator.adjustments import Adjustments
from foreload.trainer.cluster.coordinator.checkpointing import Checkpointing
from foreload.trainer.cluster.coordinator.control_socket import RequestQueue, RunRequests
from foreload.trainer.cluster.coordinator.failures import Failures, GuestsRefused
from foreload.trainer.cluster.coordinator.membership import LaneReplicas, Membership
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
    CopiesReport,
    Ended,
    EvaluationEnded,
    Failed,
    FaultInjected,
    LeaveWanted,
    LoadsReport,
    Ready,
    RequestReport,
    ShardsReport,
    StepEnded,
    TermLeft,
    TrainerEnd,
    TrainerEvent,
)
from foreload.trainer.job.scheduler import under_scheduler
from foreload.trainer.run.event_log import StopAsked, TrainerLost
from foreload.trainer.run.metrics_server import RunFigures, ShardFigures
from foreload.trainer.run.report import RunReport, metric_scalars

POLL = timedelta(milliseconds=30)  # between two polls for events and requests
CHANGE_POLL = timedelta(milliseconds=2)  # the same while trainers wait for their next term
# How long trainers have to report why one of them failed, and to exit once everything is saved.
GRACE = timedelta(seconds=5)


class Coordinator:
    """The coordinator of one call. One thread uses it.

    Args:
        trainers: The trainers' processes.
        requests: The queue of users' requests.

    Attributes:
        members: The membership of the current term.
        scaling: Changes of the number of trainers.
        moves: The migration of rows between store shards.
        checkpointing: The checkpoints that are saved during training.
        ended: The end of each member of the current term that has ended, by trainer number.
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
        self._adjustments = Adjustments(call, self.scaling, self.moves, shards, trainers.engine)
        self._failures = Failures(call.guests)
        self.ended: dict[int, TrainerEnd] = {}
        self._training = False  # True once all trainers of the first term are ready
        self._stop_wanted = self._stop_published = False
        self._dead: dict[int, str] = {}  # trainer -> how its process ended
        self._lost = 0  # trainers in this call
        # Whether a trainer failed, and the others have had their time to report why.
        self._lingered = False

    def begin(self) -> None:
        """Publish the first term and the plan. Call it before the launch spec is published."""
        self._rendezvous.publish(self.members.term, self.members.term.number)
        self._plan.begin()

    def follow(self) -> None:
        """Handle events and requests until every trainer has ended.

        Raises:
            ForeloadError: A trainer ended before its time; the error is the reason.
            GuestsRefused: Training did not begin, and only trainers of other hosts are to blame.
            KeyboardInterrupt: A signal came before training began, or a second signal came.
        """
        while not self.all_ended:
            if (at_most := self.look()) is not None:
                self._trainers.pause(at_most, self._dead)

    @property
    def all_ended(self) -> bool:
        """Whether every member of the current term has ended."""
        return self.ended.keys() == set(self.members.term.members)

    def look(self) -> timedelta | None:
        """Handle everything that came since the last call, and decide what follows.

        Returns:
            How long the caller may pause before the next call. If None, a trainer has just failed
            and the others had time to report why, so the caller should not pause.

        Raises:
            ForeloadError, GuestsRefused, KeyboardInterrupt: As `follow` does.
        """
        members, term = self.members, self.members.term
        # Look for dead processes before reading events. The last events of a process that is found
        # dead are then already in the rendezvous store, and are read below.
        self._dead = dead = self._failures.with_reports(self._trainers.ended())
        self._take_events()
        self._requests.answer(self._respond)
        missing = dead.keys() & set(term.members) - self.ended.keys()
        # A trainer on another host has no process here whose death would show, so before training
        # begins its silence counts. Once training runs, the membership watches all leases itself.
        silent: dict[int, str] = {}
        if not self._training and (guests := self._failures.guests(term)):
            silent = {trainer: why for trainer, why in members.silent().items() if trainer in guests}
        # While losses are survived, the membership handles them. Otherwise a trainer that failed or
        # died ends the call, once the others have had time to report why.
        if self._training and not self._failures and (members.survives or not missing):
            self._see_to_members(dead)
        elif self._failures or missing or silent:
            if self._lingered or silent:
                raise self._reason(term, silent)
            self._lingered = True
            self._linger()
            return None
        self._shards.restart_dead()
        if self._phase == "training":
            self._heed_draining()
        if (memory := self._shards.memory) is not None:
            memory.step = self._call.events.step
            self._plan.change(stop_by=memory.stop_by)
        self.moves.poll(members.term.members)
        self._run_requests.poll()
        self._adjustments.poll(members, self._phase == "training" and not members.changing and not self._copies.exposed)
        self.checkpointing.poll(members.term.members, self._phase == "training" and not members.changing)
        self.report.tick()
        self._call.events.step = self.report.last_step
        self._call.events.see_messages()
        if (metrics := self._call.metrics) is not None:
            metrics.poll(self.figures)
        self._heed_signals()
        return CHANGE_POLL if self._training and members.changing else POLL

    def _heed_draining(self) -> None:
        """Have others take over what is on machines that are about to be taken away."""
        draining = self._trainers.engine.draining()
        for trainer in draining.trainers & {*self.members.term.members}:
            self.scaling.replace(trainer)
        self.moves.drain(draining.servers)

    def _heed_signals(self) -> None:
        """Ask the trainers for a clean stop after a signal or a user's request.

        Raises:
            KeyboardInterrupt: A signal came before training began, or a second signal came.
        """
        received = self._call.interrupts.received
        # Until all trainers are ready, nothing of the run has changed, so no clean stop is needed.
        # A second signal means that the user does not want to wait for one.
        if len(received) > 1 or (received and not self._training):
            raise KeyboardInterrupt
        if (received or self._stop_wanted) and not self._stop_published:
            self._stop_published = True
            self._rendezvous.publish(StopWanted())
            signals = [signal.Signals(number).name for number in received]
            self._call.events.note(StopAsked(cause=signals[0] if signals else "by the control socket"))

    def wait(self, future: Future[Any], at_most: float = math.inf) -> None:
        """Answer requests until a future is done, or for `at_most` seconds."""
        until = time.monotonic() + at_most
        while not future.done() and time.monotonic() < until:
            self._requests.answer(self._respond)
            wait([future], POLL.total_seconds())

    def see_last(self) -> None:
        """End the trainers that have not joined yet, and wait for the members to exit.

        Call it once everything is saved. It waits up to `GRACE` for each process; the caller kills
        those that take longer.
        """
        self.scaling.end_starting()
        self._trainers.await_end(GRACE)
        # A trainer that had stalled and was declared lost may have noticed only now. Its report is
        # read here, so that the user sees it.
        self._take_events()

    @property
    def _phase(self) -> Literal["starting", "training", "ending"]:
        if self._stop_published or self.ended:
            return "ending"
        return "training" if self._training else "starting"

    def _see_to_members(self, dead: Mapping[int, str]) -> None:
        """End the term and begin the next one if members were lost, join or leave."""
        goes_on = self._phase == "training"
        if self.members.poll(dead, self.ended, goes_on):
            # Members that had already ended go on in the new term, since they may have to take over
            # lanes of the members that were lost. They end, and report it, once more.
            self.ended.clear()
            self._copies.on_term(self.members.term)
            self.report.on_term(self.members.term.members, self.members.term.committed)
            self._run_requests.on_term(self.members.term.members)
            self.checkpointing.on_term()
            self._shards.on_term(self.members.term.members)
            for trainer in self.members.lost:
                self.scaling.lost(trainer)
            self._lost += len(self.members.lost)
        # Under a scheduler the number of trainers is fixed, since the scheduler starts them.
        if not under_scheduler():
            for trainer in self._trainers.take_offers(lambda: self.scaling.offer() if goes_on else None, self._plan.now.version):
                self._receiver.add(trainer)
            self.scaling.poll(self.members, dead, goes_on)
            for trainer in dead.keys() - set(self.members.term.members):
                self._trainers.forget(trainer)
        self._begin_steps()

    def _begin_steps(self) -> None:
        """Begin the steps of the current term if all members are ready."""
        if not self.members.may_begin:
            return
        # A checkpoint that is due comes first, so that all trainers know of it at their first step.
        if self._phase == "training":
            self.checkpointing.begin_before_steps()
        self.members.begin()
        self._shards.term_begins()

    def _start_joining(self, trainer: int) -> None:
        self._receiver.add(trainer)
        self._trainers.start(trainer, self._plan.now.version)

    def _linger(self) -> None:
        """Give the other trainers up to `GRACE` to report why one failed.

        The first trainer to report is seldom the one to blame: it mostly lost its peer.
        """
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
        # A trainer that is starting is no member yet. Of its events only these two matter.
        if self.scaling.is_starting(trainer):
            self._call.observer.on_event(trainer, event)
            match event:
                case CanJoin():
                    self.scaling.can_join(trainer)
                case Failed():
                    self.scaling.cannot_join(trainer, event.message)
            return
        if trainer not in self.members.term.members:
            # The trainer was declared lost and the others went on without it, or it has left.
            if isinstance(event, Failed):
                self._call.say(f"trainer {trainer}: was lost, and has stopped now: {event.message}")
            return
        self._call.observer.on_event(trainer, event)
        match event:
            case TermLeft():
                self.members.receive(trainer, event)
            case LeaveWanted():
                # If no trainer would stay, training stops instead.
                self._stop_wanted |= not self.scaling.leave(trainer, self.members)
            case StepEnded():
                self.scaling.has_trained(trainer, event.report)
                self._adjustments.add(trainer, event.report)
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
            case ShardsReport():
                self._shards.on_shards(trainer, event.shards)
            case CopiesReport():
                self.members.receive(trainer, event)
                self._copies.on_copies(trainer, event)
            case ServerUnreachable():
                self._shards.unreachable(event)
            case LoadsReport():
                self._adjustments.loads[trainer] = event.loads
            case RequestReport():
                self._run_requests.receive(trainer, event)
            case CheckpointReport():
                self.checkpointing.receive(trainer, event)
            case Failed():
                self._failures.receive(trainer, event, self._training and self.members.survives)
            case FaultInjected() | CanJoin():
                # The former is only for the observer; the sender of the latter is a member by now.
                pass
            case _:
                assert_never(event)

    def _begin(self) -> None:
        """Begin training if all members are ready."""
        call, members = self._call, self.members
        if not members.all_ready:
            return
        self._training = True
        # Write the status "training" before the first step: from then on rows change on the store,
        # while the saved dense part does not.
        call.write_manifest(call.manifest.under(members.ready[members.term.members[0]].fingerprint, call.start.step + 1))
        call.run.write_status(call.start)
        self._rendezvous.publish(Go())
        self._begin_steps()

    def _end_process(self, trainer: int) -> bool:
        """End the process of a trainer that is, or seems, lost. Returns whether it is dead."""
        return self._call.observer.may_kill(trainer) and self._trainers.end(trainer)

    def _reason(self, term: Term, silent: dict[int, str]) -> ForeloadError | GuestsRefused:
        """Return the error that says why trainers ended before their time.

        Args:
            silent: The silent trainers of other hosts, and what is wrong with each. They count as
                ended, although they may be alive.
        """
        heard, unheard = self._failures.heard() | self.ended.keys(), silent | self._trainers.ended()
        unheard = {trainer: how for trainer, how in unheard.items() if trainer in term.members and trainer not in heard}
        why = self._failures.reason(term, unheard, self._training)
        if isinstance(why, GuestsRefused):
            self._trainers.let_go_of_guests()
            return why
        for trainer, how in unheard.items():
            self._call.events.note(TrainerLost(trainer=trainer, cause=how))
        return why

    # Users' requests.

    def _respond(self, request: ControlRequest) -> Answer | Future[Answer]:
        """Return the answer to a request, or a future of it.

        Raises:
            ForeloadError: The request is refused; the error is the reason.
        """
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
                return self.scaling.ask(request, self.members)
            case AskScaled():
                return self.scaling.progress(request)
            case AskCheckpoint():
                return self.checkpointing.wanted.ask(request)
            case AskCheckpointed():
                return self.checkpointing.wanted.progress(request)

    def _why_not(self, request: ControlRequest) -> str | None:
        """Return why a request is refused while training begins or ends, or None if it is not."""
        if isinstance(request, AskScale) and under_scheduler():
            return "a scheduler starts its trainers: stop the run, and go on with --resume and another number of trainers"
        if isinstance(request, AskMove | AskScale | AskScrub) and self._phase == "starting":
            return "its trainers are still starting; try again in a moment"
        if self._phase == "ending" or self._stop_wanted:
            match request:
                case AskMove():
                    return "it is about to end; ask again when it is stopped"
                case AskScale():
                    return "it is about to end; go on with --resume and another --trainers"
                case AskCheckpoint():
                    return "it is about to end; save a checkpoint once it is stopped"
        return None

    def figures(self) -> RunFigures:
        """Return the run's figures as they are now."""
        call, report, shards, status = self._call, self.report, self._shards, self._status()
        replicas, memory = status.copies, shards.memory
        used = {} if memory is None else memory.used
        # Trainers report a shard once it is not ok.
        states = {shard: (one.state, one.rebuilt) for shard, one in enumerate(status.shards.shards)}
        slots = sum(copy.of for copy in replicas)
        evaluated = report.evaluations[-1]["step"] if report.evaluations else None
        return RunFigures(
            run=os.fsencode(call.run.path).decode(errors="replace"),
            namespace=call.manifest.namespace,
            state=self._phase,
            step=status.step,
            end_step=call.schedule.header.end_step,
            term=status.term,
            trainers=len(status.members),
            lost=self._lost,
            totals=replace(report.totals),
            loss=report.last_loss,
            evaluated=evaluated,
            metrics={
                (line.get("set", ""), name): value
                for line in report.evaluations
                if line["step"] == evaluated
                for name, value in metric_scalars(line)
            },
            shards=tuple(
                ShardFigures(shard, *states.get(shard, (OK, 1.0)), *used.get(shard, (None, None)))
                for shard, url in enumerate(shards.urls)
                if url
            ),
            exposed=len(status.exposed) if replicas else None,
            # Until every holder has reported, the share is not known.
            seeded=sum(copy.slots for copy in replicas) / slots if replicas and all(copy.of for copy in replicas) else None,
            migrated=status.shards.migrated,
            checkpoints_saved=self.checkpointing.saved,
            checkpoints_failed=self.checkpointing.failed,
            checkpoint=report.last_checkpoint,
            stop_by=None if memory is None else memory.stop_by,
            adjusted=self._adjustments.counts,
        )

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
