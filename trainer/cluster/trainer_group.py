"""The trainers of one call of `foreload train`: told what to do, started, followed to their end."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, assert_never

from foreload.cache.protocol.server_probe import ServerUnreachable
from foreload.pipelines.base.interrupts import Interrupts
from foreload.pipelines.errors import ForeloadError
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.cluster.board import Board
from foreload.trainer.cluster.control import (
    Answer,
    AskReplace,
    AskRowCounts,
    AskScrub,
    AskScrubbed,
    AskStatus,
    AskStop,
    ControlRequest,
    ControlSocket,
    RunStatus,
    Stopping,
)
from foreload.trainer.cluster.ending import ended_how, first_of, reason, stage_of, status_of
from foreload.trainer.cluster.events import EventReceiver
from foreload.trainer.cluster.facts import Go, RunSaved, StopWanted
from foreload.trainer.cluster.faults import RunObserver
from foreload.trainer.cluster.keeper import Keeper
from foreload.trainer.cluster.lane_copies import LaneCopies
from foreload.trainer.cluster.membership import Membership
from foreload.trainer.cluster.messages import (
    Commanded,
    CopiesTold,
    Ended,
    EvaluationEnded,
    Failed,
    FaultInjected,
    LaunchSpec,
    Ready,
    ReplaceServer,
    RowsCounted,
    ScrubFailed,
    ScrubTold,
    ShardsTold,
    StepEnded,
    TermLeft,
    TrainerCommand,
    TrainerEnd,
    TrainerEvent,
    TrainerFaultInjected,
)
from foreload.trainer.cluster.processes import WORKER, ProcessStart, StartedProcess, StartProcess, TrainerStart, pause
from foreload.trainer.cluster.run_requests import RunRequests
from foreload.trainer.cluster.store_shards import StoreShards
from foreload.trainer.cluster.terms import first_term
from foreload.trainer.errors import PeerLost
from foreload.trainer.run.directory import Run
from foreload.trainer.run.event_log import CallEnded, EventLog, StopAsked, TrainerLost
from foreload.trainer.run.job import TrainJob
from foreload.trainer.run.kept import keep_schedule
from foreload.trainer.run.manifest import Manifest, Status
from foreload.trainer.run.report import RunReport, Totals

POLL = timedelta(milliseconds=30)  # between two looks at events and requests
CHANGE_POLL = timedelta(milliseconds=2)  # while trainers wait for their next term
GRACE = timedelta(seconds=5)  # for trainers to say why one failed, and to leave when all is saved


@dataclass(frozen=True, slots=True)
class Ending:
    """How a call of `foreload train` ended: its summary, the last step, and the signal or request that stopped it early, if any."""

    summary: dict[str, Any]
    step: int
    stopped: bool
    signal_number: int | None


class TrainerGroup:
    """The trainers of one call, from the coordinator's side.

    at_rest: whether the run came to rest. Then status and failure are how far it is, and what stopped it before its end though all is saved; None:
    nothing did.
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
    ) -> None:
        self._events = events
        self._job, self._interrupts, self._run, self._start = job, interrupts, run, start
        self._observer, self._start_process = observer, start_process
        self._schedule, self._shards = schedule, shards
        self._commands = 0  # how many were published
        self.manifest = manifest
        self.status = start
        self.failure: str | None = None
        self.at_rest = False
        self._first = first_term(start.term, range(job.trainers), schedule.header.lanes, job.copies_held, start.step)
        self._membership: Membership | None = None
        self._copies = LaneCopies(self._first, partial(print, file=sys.stderr), events)
        self._training = False  # whether all trainers were ready once
        self._processes: dict[int, StartedProcess] = {}
        self._ended: dict[int, TrainerEnd] = {}
        self._failures: list[tuple[int, Failed]] = []
        self._stop_wanted = False
        self._stop_told = False
        self._run_requests = RunRequests(self._first.members, shards.protected, lambda: self._training)

    def train(self, rendezvous: Any, spawned: Sequence[int]) -> Ending:
        """Start trainers and follow them; returns when all have left in order, and no process is left in any case."""
        job = self._job
        spec = LaunchSpec(
            # Other hosts' trainers bring their own credentials, and their own address; those of this call never reach the rendezvous store.
            job=job.to_dict() | {"store": self.manifest.job["store"], "spare": None, "address": None},
            first_term=self._first.number,
            start_step=self._start.step,
            last_batches=tuple(int(self._start.batches[str(lane)]) for lane in range(self._schedule.header.lanes)),
            stores=self._shards.plain_urls,
            fingerprint=None if job.accept_numerics else self.manifest.fingerprint,
            resumes=self._start.step >= self.manifest.stages[0].first_step,
            servers_return=self._shards.servers_return,
            faults=tuple(self._observer.faults),
            totals=Totals(**self._start.totals),  # type: ignore[arg-type]
        )
        self._interrupts.defer_signals = True
        address = job.own_address()
        with contextlib.ExitStack() as stack:
            keeper: Keeper | None = None
            if rendezvous is None:
                keeper = Keeper(address, self._start_process)
                stack.callback(keeper.close)
            stack.callback(self._kill)
            # Trainers start while the keeper does.
            place = _scheduler_address() if keeper is None else keeper.address
            self._spawn(spawned, place, address, () if keeper is None else (keeper.held,))
            return self._lead(Board(rendezvous if keeper is None else keeper.join()), spec)

    def _lead(self, board: Board, spec: LaunchSpec) -> Ending:
        """Tell trainers who hosts what, follow them to their end, and publish how far the run is then."""
        members = self._membership = Membership(
            board,
            self._first,
            self._job.copies_held,
            self._job.peer_silence if self._job.copies_held > 1 else None,
            self._raise_term,
            self._end_process,
            partial(print, file=sys.stderr),
            self._events,
        )
        board.publish(spec)
        steps = self._schedule.header.end_step - self.manifest.stages[0].first_step
        report = RunReport(
            self._run.path, replace(spec.totals), self._start.step + 1, steps, self._first.members, self.manifest.job
        )
        control = ControlSocket(self._run.path, partial(self._respond, report))
        try:
            self._follow(board, report, members)
            ending = self._finish(report)
            # The rows are where the status says, in servers that run: if these cannot be saved, the next command finds them so.
            stages = (*self.manifest.stages[:-1], stage_of(self._schedule, self._ended))
            self._run.come_to_rest(replace(self.manifest, stages=stages), self.status)
            self.at_rest = True
            self._events.note(CallEnded(state=self.status.state, cause=self.failure))
            keep_schedule(self._run, self._schedule, self.status.step)
            board.publish(RunSaved())
            self._await_exit()
            return ending
        finally:
            self._kill()
            control.close()
            report.close()

    def _spawn(self, spawned: Sequence[int], rendezvous: str, address: str, held: Sequence[int]) -> None:
        # A trainer that outlives this process goes on holding the lock on the run.
        held = (*held, *(() if self._run.lock is None else (self._run.lock,)))
        for trainer in spawned:
            told = TrainerStart(trainer, rendezvous, address, tuple(self._shards.urls), os.getpid())
            self._processes[trainer] = self._start_process(ProcessStart(WORKER, (), told.environment(), tuple(held)))

    def _follow(self, board: Board, report: RunReport, members: Membership) -> None:
        """Take in events, and pass on what is asked, until every trainer has ended. Raises why one ended before its time, or KeyboardInterrupt."""
        receiver = EventReceiver(board, members.term.members)
        gone = False  # whether a trainer failed, and the others were given time to say why
        while self._ended.keys() != set(members.term.members):
            # Before the event is read: what a process sent before it ended is then there.
            dead = {t: ended_how(status) for t, process in self._processes.items() if (status := process.poll()) is not None}
            for trainer, event in receiver.poll():
                self._receive(trainer, event, board, report)
            if self._training and members.survives and not self._failures:
                if members.see(dead, self._ended):
                    # Who had ended sees to the lanes of those that had not.
                    self._ended.clear()
                    self._copies.now_term(members.term)
                    report.now_members(members.term.members)
                    self._run_requests.now_members(members.term.members)
                    self._shards.now_trainers(members.term.members)
                members.begin()
            elif self._failures or dead.keys() - self._ended.keys():
                if gone:
                    raise self._reason()
                gone = True
                self._linger(receiver, board, report)
                continue
            self._see_to_stores(board)
            for command in self._run_requests.take():
                self._tell_all(board, command)
            report.tick()
            self._events.step = report.last_step
            if len(self._interrupts.received) > 1 or (self._interrupts.received and not self._training):
                raise KeyboardInterrupt  # before all are ready nothing of the run has changed
            if (self._interrupts.received or self._stop_wanted) and not self._stop_told:
                self._stop_told = True
                board.publish(StopWanted())
                signals = [signal.Signals(number).name for number in self._interrupts.received]
                self._events.note(StopAsked(cause=signals[0] if signals else "by the control socket"))
            waited_for = self._training and members.survives and members.changing
            alive = [process for trainer, process in self._processes.items() if trainer not in dead]
            pause(alive, CHANGE_POLL if waited_for else POLL)

    def _await_exit(self) -> None:
        for process in self._processes.values():
            # All is done; one that takes longer to leave is ended with the rest.
            process.wait(GRACE)

    def _linger(self, receiver: EventReceiver, board: Board, report: RunReport) -> None:
        """A trainer failed: give the others a moment to say why, since who speaks first is seldom the one to blame."""
        deadline = time.monotonic() + GRACE.total_seconds()
        while time.monotonic() < deadline and any(process.poll() is None for process in self._processes.values()):
            for trainer, event in receiver.poll():
                self._receive(trainer, event, board, report)
            if any(failed.code != PeerLost.code and failed.lost is None for _, failed in self._failures):
                return
            time.sleep(POLL.total_seconds())
        for trainer, event in receiver.poll():
            self._receive(trainer, event, board, report)

    def _receive(self, trainer: int, event: TrainerEvent, board: Board, report: RunReport) -> None:
        assert self._membership is not None
        if trainer not in self._membership.term.members:
            # It was taken for lost, and the others went on without it.
            if isinstance(event, Failed):
                sys.stderr.write(f"trainer {trainer}: was lost, and has stopped now: {event.message}\n")
            return
        self._observer.see(trainer, event)
        match event:
            case TermLeft():
                self._membership.receive(trainer, event)
            case StepEnded():
                report.step(trainer, event.report)
            case EvaluationEnded():
                report.evaluation(event.report)
            case Ready():
                self._membership.receive(trainer, event)
                if not self._training:
                    self._begin(board, self._membership)
            case Ended():
                self._ended[trainer] = board.read(TrainerEnd, self._membership.term.number, trainer)
            case ShardsTold():
                self._shards.told(trainer, event.shards)
            case CopiesTold():
                self._copies.told(trainer, event)
            case ServerUnreachable():
                self._shards.unreachable(event)
            case ScrubTold() | ScrubFailed() | RowsCounted():
                self._run_requests.receive(trainer, event)
            case Failed():
                self._failures.append((trainer, event))
            case FaultInjected() | TrainerFaultInjected():
                pass  # the observer's
            case _:
                assert_never(event)

    def _begin(self, board: Board, members: Membership) -> None:
        """Training begins, if all are ready. From the first step on rows change on the store, while the dense part at rest does not."""
        if not members.all_ready:
            return
        self._training = True
        self.manifest = self.manifest.under(members.ready[members.term.members[0]].fingerprint, self._start.step + 1)
        self._run.write_manifest(self.manifest)
        self._run.write_status(self._start)
        board.publish(Go())
        members.begin()

    def _raise_term(self, term: int) -> None:
        self._start = replace(self._start, term=term)
        self._run.raise_term(term)

    def _end_process(self, trainer: int) -> bool:
        """End a trainer that is lost, or only seems to be; returns whether it is dead."""
        if not self._observer.may_kill(trainer):
            return False
        process = self._processes.pop(trainer, None)
        if process is None:
            return False
        process.kill()
        process.wait()
        return True

    def _reason(self) -> ForeloadError:
        """Why trainers ended before their time."""
        assert self._membership is not None
        dead = {trainer: status for trainer, process in self._processes.items() if (status := process.poll()) is not None}
        heard = {trainer for trainer, _ in self._failures} | self._ended.keys()
        silent = {trainer: ended_how(status) for trainer, status in dead.items() if trainer not in heard}
        for trainer, how in silent.items():
            self._events.note(TrainerLost(trainer=trainer, cause=how))
        return reason([failed for _, failed in self._failures], silent, self._membership.term)

    def _finish(self, report: RunReport) -> Ending:
        """What all trainers' ends come to: sets status and failure, and writes the summary."""
        ended = self._ended.values()
        first = first_of(self._ended)
        self.failure = first.failure
        self.status = status_of(self._ended, report.totals, self._start.term)
        if self.status.lost:
            sys.stderr.write(
                f"foreload: warning: store shard {', '.join(map(str, self.status.lost))} is lost, and its rows come from parity; "
                "the next --resume, with a server there, rebuilds it\n"
            )
        summary = report.summary(
            state=self.status.state,
            trainers=len(self._first.members),
            store_traffic={name: sum(one.traffic[name] for one in ended) for name in first.traffic},
            mixed_numerics=list(self.manifest.mixed_numerics),
        )
        stopped_by = self._interrupts.received[0] if first.stopped and self._interrupts.received else None
        return Ending(summary, first.step, first.stopped, stopped_by)

    def _kill(self) -> None:
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()

    def _see_to_stores(self, board: Board) -> None:
        """Start dead local servers again, and tell all trainers of servers that take the place of others."""
        self._shards.restart_dead()
        while (replacement := self._shards.take_replacement()) is not None:
            shard, url = replacement
            self._tell_all(board, ReplaceServer(shard, url))
            if self.manifest.local_stores is None:
                plain = self._shards.plain_urls
                self.manifest = replace(self.manifest, store_urls=plain, job=self.manifest.job | {"store": ",".join(plain)})
                self._run.write_manifest(self.manifest)
            sys.stderr.write(f"store shard {shard}: {url} takes its place\n")

    def _tell_all(self, board: Board, command: TrainerCommand) -> None:
        board.publish(Commanded(command), self._commands)
        self._commands += 1

    def _respond(self, report: RunReport, request: ControlRequest) -> Answer:
        """The answer to a request on the control socket, in one of its threads."""
        match request:
            case AskStatus():
                term = self._first if self._membership is None else self._membership.term
                return RunStatus(
                    state="training" if self._training else "starting",
                    step=report.last_step,
                    term=term.number,
                    lanes=term.hosts,
                    trainers={trainer: process.pid for trainer, process in list(self._processes.items())},
                    shards=self._shards.together,
                    members=term.members,
                    copies=self._copies.status,
                )
            case AskStop():
                self._stop_wanted = True
                return Stopping()
            case AskReplace():
                return self._shards.want_replacement(request)
            case AskScrub():
                return self._run_requests.scrub(request)
            case AskScrubbed():
                return self._run_requests.scrubbed()
            case AskRowCounts():
                return self._run_requests.row_counts()


def _scheduler_address() -> str:
    return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
