"""The trainers of one call of `foreload train`: told what to do, started, followed to their end."""

from __future__ import annotations

import contextlib
import math
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, assert_never

from foreload.base.errors import ForeloadError
from foreload.base.interrupts import Interrupts
from foreload.cache.protocol.shards.shard_status import ServerUnreachable
from foreload.cache.rows.layout import RowLayout, slot_columns
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.cluster.coordinator.checkpointing import Checkpointing
from foreload.trainer.cluster.coordinator.control_answers import ControlAnswers, Phase
from foreload.trainer.cluster.coordinator.control_socket import ControlSocket
from foreload.trainer.cluster.coordinator.failures import Failures, GuestsRefused
from foreload.trainer.cluster.coordinator.hosts import Hosts
from foreload.trainer.cluster.coordinator.lane_replicas import LaneReplicas
from foreload.trainer.cluster.coordinator.launch_spec import launch_spec
from foreload.trainer.cluster.coordinator.membership import SILENT, Membership
from foreload.trainer.cluster.coordinator.published_plan import PublishedPlan
from foreload.trainer.cluster.coordinator.rebalancing import Rebalancing
from foreload.trainer.cluster.coordinator.request_queue import RequestQueue
from foreload.trainer.cluster.coordinator.row_migration import RowMigration
from foreload.trainer.cluster.coordinator.run_requests import RunRequests
from foreload.trainer.cluster.coordinator.scaling import Scaling
from foreload.trainer.cluster.coordinator.spawned_trainers import SpawnedTrainers
from foreload.trainer.cluster.coordinator.store_shards import StoreShards
from foreload.trainer.cluster.coordinator.terms import first_term
from foreload.trainer.cluster.ending import Ending, call_figures, early_stop, first_of, keep_run, manifest_of, status_of
from foreload.trainer.cluster.folder_over_hosts import publish_dense, save_over_hosts
from foreload.trainer.cluster.messages.events import EventReceiver
from foreload.trainer.cluster.messages.facts import Go, RunSaved, StopWanted, Term
from foreload.trainer.cluster.messages.faults import RunObserver
from foreload.trainer.cluster.messages.rendezvous import Rendezvous
from foreload.trainer.cluster.messages.trainers import (
    CanJoin,
    CheckpointArmed,
    CheckpointFailed,
    CheckpointTaken,
    CheckpointWritten,
    CopiesTold,
    Departed,
    Ended,
    EvaluationEnded,
    Failed,
    FaultInjected,
    LaunchSpec,
    LeaveWanted,
    Ready,
    RowsCounted,
    ScrubFailed,
    ScrubTold,
    ShardsTold,
    StepEnded,
    TermLeft,
    TrainerEnd,
    TrainerEvent,
    TrainerFaultInjected,
)
from foreload.trainer.cluster.processes.rendezvous_host import RendezvousHost
from foreload.trainer.cluster.processes.starting import StartProcess
from foreload.trainer.job.job import TrainJob
from foreload.trainer.job.scheduler import Meeting, under_scheduler
from foreload.trainer.job.succession import ONE_MACHINE
from foreload.trainer.memory.seen_servers import check_room
from foreload.trainer.run.directory import Run
from foreload.trainer.run.event_log import CallEnded, EventLog, StopAsked, TrainerLost
from foreload.trainer.run.manifest import Manifest, Status
from foreload.trainer.run.report import RunReport
from foreload.trainer.run.step_lines import rows_of_steps
from foreload.trainer.saved.kept import keep_schedule

POLL = timedelta(milliseconds=30)  # between two looks at events and requests
CHANGE_POLL = timedelta(milliseconds=2)  # while trainers wait for their next term
GRACE = timedelta(seconds=5)  # for trainers to say why one failed, and to leave when all is saved


class TrainerGroup:
    """The trainers of one call, from the coordinator's side.

    at_rest: whether the run came to rest. Then status and failure are how far it is, and what stopped it before its end though all is saved; None:
    nothing did. kept: it did not, but all that the store lacks is kept in its folder.
    """

    def __init__(
        self,
        job: TrainJob,
        interrupts: Interrupts,
        run: Run,
        manifest: Manifest,
        start: Status,
        schedule: Schedule,
        shards: StoreShards,
        observer: RunObserver,
        start_process: StartProcess,
        events: EventLog,
        layouts: Sequence[RowLayout],
        hosts: Hosts | None = None,
    ) -> None:
        self._layouts = layouts
        self._events, self._hosts = events, hosts
        self._job, self._interrupts, self._run, self._start = job, interrupts, run, start
        self._observer, self._start_process, self._schedule, self._shards = observer, start_process, schedule, shards
        self._requests = RequestQueue()
        self._plan = PublishedPlan(run.placement, shards.plain_urls, None if shards.memory is None else shards.memory.stop_by)
        self._trainers = SpawnedTrainers(start_process, lambda: shards.urls, run.lock, hosts, self._requests.fileno())
        self.manifest, self.status = manifest, start
        self.failure: str | None = None
        self.at_rest = self.kept = self._stop_published = False
        machines = self._machines = ONE_MACHINE if hosts is None else hosts.machines
        self._first = first_term(start.term, range(job.trainers), schedule.header.lanes, job.replicas_held, start.step, machines)
        self._membership: Membership | None = None
        self._copies = LaneReplicas(self._first, _tell, events)
        self._training = False  # whether all trainers were ready once
        self._ended: dict[int, TrainerEnd] = {}
        self._failures = Failures(machines)
        room = partial(check_room, manifest, schedule, layouts)
        self._moves = RowMigration(run, job, shards, self._plan, events, lambda: self.manifest, self._write_manifest, room)
        self._run_requests = RunRequests(
            self._first.members, self._plan, shards.protected, lambda: self._training, hosts is not None
        )
        self._scaling = Scaling(
            job.trainers, schedule.header.lanes, not job.no_restart, self._start_joining, self._end_process, _tell,
            Rebalancing(_tell, events) if job.rebalance else None,
        )  # fmt: skip

    def train(self, meeting: Meeting | None, spawned: Sequence[int]) -> Ending:
        """Start trainers and follow them; returns when all have left in order, and no process is left in any case."""
        over_hosts, faults = self._hosts is not None, self._observer.faults
        spec = launch_spec(self._job, self._run, self.manifest, self._start, self._first.number, self._shards, faults, over_hosts)
        self._interrupts.defer_signals = True
        address = self._job.own_address()
        with contextlib.ExitStack() as stack:
            rendezvous_host = RendezvousHost(address, self._start_process)
            stack.callback(self._requests.close)
            stack.callback(rendezvous_host.close)
            stack.callback(self._trainers.kill)
            # Trainers start while the rendezvous host does.
            self._trainers.meet_at(rendezvous_host.address, address, (rendezvous_host.held,))
            self._trainers.start_first(spawned)
            store = rendezvous_host.join()
            if meeting is not None:
                meeting.tell(rendezvous_host.address)
            return self._lead(Rendezvous(store), spec)

    def _lead(self, rendezvous: Rendezvous, spec: LaunchSpec) -> Ending:
        """Tell trainers who hosts what, follow them to their end, and publish how far the run is then."""
        members = self._membership = Membership(
            rendezvous, self._first, self._job.replicas_wanted, self._job.peer_silence, self._raise_term, self._end_process, _tell, self._events,
            machines=self._machines,
        )  # fmt: skip
        publish_dense(rendezvous, self._run, spec)
        self._plan.begin(rendezvous)
        rendezvous.publish(spec)
        header, first = self._schedule.header, self._start.step + 1
        rows_of = partial(rows_of_steps, self._schedule)
        given = self._first.members, rows_of, self.manifest.job
        steps = header.end_step - self.manifest.stages[0].first_step
        report = RunReport(self._run.path, replace(spec.totals), first, steps, *given, is_amid=header.is_amid)
        self._checkpointing = Checkpointing(
            self._job, self._run.path, self._schedule, self._layouts, lambda: self.manifest, rendezvous, report,
            self._plan, self._observer.at_checkpoint, self._events,
        )  # fmt: skip
        self._answers = ControlAnswers(
            lambda: self._phase, members, self._trainers, self._shards, self._copies, self._run_requests, self._scaling, report,
            self._checkpointing.wanted, self._moves,
        )  # fmt: skip
        control = ControlSocket(self._run.path, self._requests.ask)
        try:
            self._follow(rendezvous, report, members)
            self._checkpointing.finish(members.term.members, self._wait)
            left = [departed for trainer in members.term.left if (departed := rendezvous.poll(Departed, trainer)) is not None]
            ending = self._finish(report, left)
            save_over_hosts(rendezvous, self._run, spec, members.term.number, self._ended)
            self.kept = keep_run(self._run, self.manifest, self.status, self._ended)
            if not self.kept:
                # The rows are where the status says, in servers that run: if these cannot be saved, the next command finds them so.
                self._run.come_to_rest(self.manifest, self.status)
                self.at_rest = True
                self._events.note(CallEnded(state=self.status.state, cause=self.failure or ending.early))
                keep_schedule(self._run, self._schedule, self.status.step)
            rendezvous.publish(RunSaved())
            self._scaling.end_starting()
            # All is done; one that takes longer to leave is ended with the rest.
            self._trainers.await_end(GRACE)
            # Who had stood still, and was taken for lost, may only now have found out.
            for trainer, event in self._receiver.poll():
                self._receive(trainer, event, rendezvous, report)
            return ending
        finally:
            self._requests.close()
            self._trainers.kill()
            self._checkpointing.close(self.at_rest)
            control.close()
            report.close()

    def _follow(self, rendezvous: Rendezvous, report: RunReport, members: Membership) -> None:
        """Take in events, and pass on what is asked, until every trainer has ended. Raises why one ended before its time, or KeyboardInterrupt."""
        receiver = self._receiver = EventReceiver(rendezvous, members.term.members)
        gone = False  # whether a trainer failed, and the others were given time to say why
        while self._ended.keys() != set(members.term.members):
            # Before the event is read: what a process sent before it ended is then there.
            dead = self._failures.with_reports(self._trainers.ended())
            for trainer, event in receiver.poll():
                self._receive(trainer, event, rendezvous, report)
            self._requests.answer(self._answers.respond)
            missing = dead.keys() & set(members.term.members) - self._ended.keys()
            silent: dict[int, str] = {}
            if not self._training and (guests := self._failures.guests(members.term)):
                silent = dict.fromkeys(guests & set(members.silent()), SILENT)
            if self._training and not self._failures and (members.survives or not missing):
                self._see_to_members(members, dead, report)
            elif self._failures or missing or silent:
                if gone or silent:
                    raise self._reason(members.term, silent)
                gone = True
                self._linger(receiver, rendezvous, report)
                continue
            self._shards.restart_dead()
            if (memory := self._shards.memory) is not None:
                memory.step = self._events.step
                self._plan.change(stop_by=memory.stop_by)
            self._moves.poll(members.term.members)
            self._run_requests.poll()
            self._checkpointing.poll(members.term.members, self._phase == "training" and not members.changing)
            report.tick()
            self._events.step = report.last_step
            self._events.see_messages()
            if len(self._interrupts.received) > 1 or (self._interrupts.received and not self._training):
                raise KeyboardInterrupt  # before all are ready nothing of the run has changed
            if (self._interrupts.received or self._answers.stop_wanted) and not self._stop_published:
                self._stop_published = True
                rendezvous.publish(StopWanted())
                signals = [signal.Signals(number).name for number in self._interrupts.received]
                self._events.note(StopAsked(cause=signals[0] if signals else "by the control socket"))
            self._trainers.pause(CHANGE_POLL if self._training and members.changing else POLL, dead)

    def _wait(self, future: Future[Any], at_most: float = math.inf) -> None:
        """Return when a future is done, or after so many seconds; what is asked meanwhile is answered."""
        until = time.monotonic() + at_most
        while not future.done() and time.monotonic() < until:
            self._requests.answer(self._answers.respond)
            wait([future], POLL.total_seconds())

    @property
    def _phase(self) -> Phase:
        if self._stop_published or self._ended:
            return "ending"
        return "training" if self._training else "starting"

    def _see_to_members(self, members: Membership, dead: Mapping[int, str], report: RunReport) -> None:
        """Whoever is lost, joins or leaves: one term ends then, and the next begins."""
        goes_on = self._phase == "training"
        if members.poll(dead, self._ended, goes_on):
            # Who had ended sees to the lanes of those that had not.
            self._ended.clear()
            self._copies.on_term(members.term)
            report.on_term(members.term.members, members.term.committed)
            self._run_requests.on_term(members.term.members)
            self._checkpointing.on_term()
            self._shards.on_term(members.term.members)
            for trainer in members.lost:
                self._scaling.lost(trainer, elsewhere=bool(self._machines.get(trainer)))
        if not under_scheduler():
            for trainer in self._trainers.take_offers(lambda: self._scaling.offer() if goes_on else None, self._plan.now.version):
                self._receiver.add(trainer)
            self._scaling.poll(members, dead, goes_on)
            for trainer in dead.keys() - set(members.term.members):
                self._trainers.forget(trainer)
        if members.begin():
            self._shards.term_begins()

    def _start_joining(self, trainer: int) -> None:
        self._receiver.add(trainer)
        self._trainers.start(trainer, self._plan.now.version)

    def _linger(self, receiver: EventReceiver, rendezvous: Rendezvous, report: RunReport) -> None:
        """A trainer failed: give the others a moment to say why, since who speaks first is seldom the one to blame."""
        deadline = time.monotonic() + GRACE.total_seconds()
        while time.monotonic() < deadline and self._trainers.ended().keys() != self._trainers.pids.keys():
            for trainer, event in receiver.poll():
                self._receive(trainer, event, rendezvous, report)
            if self._failures.explained:
                return
            self._requests.answer(self._answers.respond)
            time.sleep(POLL.total_seconds())
        for trainer, event in receiver.poll():
            self._receive(trainer, event, rendezvous, report)

    def _receive(self, trainer: int, event: TrainerEvent, rendezvous: Rendezvous, report: RunReport) -> None:
        assert self._membership is not None
        if self._scaling.is_starting(trainer):
            self._observer.on_event(trainer, event)
            match event:
                case CanJoin():
                    self._scaling.can_join(trainer)
                case Failed():
                    self._scaling.cannot_join(trainer, event.message)
            return
        if trainer not in self._membership.term.members:
            # It was taken for lost, and the others went on without it, or it has left.
            if isinstance(event, Failed):
                _tell(f"trainer {trainer}: was lost, and has stopped now: {event.message}")
            return
        self._observer.on_event(trainer, event)
        match event:
            case TermLeft():
                self._membership.receive(trainer, event)
            case LeaveWanted():
                # Where all were asked to leave, it is training that ends.
                self._answers.stop_wanted |= not self._scaling.leave(trainer, self._membership)
            case StepEnded():
                self._scaling.has_trained(trainer, event.report)
                report.step(trainer, event.report)
            case EvaluationEnded():
                report.evaluation(event.report)
                self._checkpointing.evaluated(event)
            case Ready():
                self._membership.receive(trainer, event)
                if not self._training:
                    self._begin(rendezvous, self._membership)
            case Ended():
                self._ended[trainer] = rendezvous.read(TrainerEnd, self._membership.term.number, trainer)
            case ShardsTold():
                self._shards.on_shards(trainer, event.shards)
            case CopiesTold():
                self._membership.receive(trainer, event)
                self._copies.on_copies(trainer, event)
            case ServerUnreachable():
                self._shards.unreachable(event)
            case ScrubTold() | ScrubFailed() | RowsCounted():
                self._run_requests.receive(trainer, event)
            case CheckpointArmed() | CheckpointTaken() | CheckpointWritten() | CheckpointFailed():
                self._checkpointing.receive(trainer, event)
            case Failed():
                self._failures.receive(trainer, event, self._training and self._membership.survives)
            case FaultInjected() | TrainerFaultInjected() | CanJoin():
                pass  # the observer's; and it has joined
            case _:
                assert_never(event)

    def _begin(self, rendezvous: Rendezvous, members: Membership) -> None:
        """Training begins, if all are ready. From the first step on rows change on the store, while the dense part at rest does not."""
        if not members.all_ready:
            return
        self._training = True
        self._write_manifest(self.manifest.under(members.ready[members.term.members[0]].fingerprint, self._start.step + 1))
        self._run.write_status(self._start)
        rendezvous.publish(Go())
        members.begin()
        self._shards.term_begins()

    def _raise_term(self, term: int) -> None:
        self._start = replace(self._start, term=term)
        self._run.raise_term(term)

    def _end_process(self, trainer: int) -> bool:
        """End a trainer that is lost, or only seems to be; returns whether it is dead."""
        return self._observer.may_kill(trainer) and self._trainers.end(trainer)

    def _reason(self, term: Term, silent: dict[int, str]) -> ForeloadError | GuestsRefused:
        """Why trainers ended before their time. silent: those that are alive, but silent, and so to be given here."""
        heard, unheard = self._failures.heard() | self._ended.keys(), silent | self._trainers.ended()
        unheard = {trainer: how for trainer, how in unheard.items() if trainer in term.members and trainer not in heard}
        why = self._failures.reason(term, unheard, self._training)
        if isinstance(why, GuestsRefused):
            self._trainers.let_go_of_guests()
            return why
        for trainer, how in unheard.items():
            self._events.note(TrainerLost(trainer=trainer, cause=how))
        return why

    def _finish(self, report: RunReport, left: Sequence[Departed]) -> Ending:
        """What all trainers' ends come to: sets status and failure, and writes the summary. left: of those that left before."""
        ends: tuple[TrainerEnd | Departed, ...] = (*self._ended.values(), *left)
        first = first_of(self._ended)
        self.failure = first.failure
        self._moves.finish(self._ended, self._wait)
        self.manifest = manifest_of(self.manifest, self._schedule, self._ended)
        self.status = status_of(self._ended, report.totals, self._start.term, self._moves.removed)
        if self.status.lost:
            sys.stderr.write(
                f"foreload: warning: store shard {', '.join(map(str, self.status.lost))} is lost, and its rows come from parity; "
                "the next --resume, with a server there, rebuilds it\n"
            )
        protected, columns = self._run.placement.r > 0, slot_columns(self._layouts)
        summary = report.summary(
            state=self.status.state,
            trainers=len(self._ended),
            rebalanced=self._scaling.rebalanced,
            checkpoints=self._checkpointing.summary(),
            **call_figures(ends, first.totals.steps, max(self._schedule.slots), columns, protected),
            **self.manifest.caveats,
            stopped_early=early_stop(self.manifest, first.stopped),
        )
        stopped_by = self._interrupts.received[0] if first.stopped and self._interrupts.received else None
        return Ending(summary, first.step, first.stopped, stopped_by, ends)

    def _write_manifest(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self._run.write_manifest(manifest)


def _tell(line: str) -> None:
    sys.stderr.write(f"{line}\n")
