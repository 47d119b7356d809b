"""The trainers of one call of `foreload train`: told what to do, started, followed to their end."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

from foreload.cache.errors import RowsLost
from foreload.pipelines.base.interrupts import Interrupts
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.cluster.board import (
    Board,
    ControlSocket,
    EventReceiver,
    contiguous_lanes,
)
from foreload.trainer.cluster.ending import stage_of, status_of
from foreload.trainer.cluster.faults import RunObserver
from foreload.trainer.cluster.keeper import (
    GO,
    STOP_WANTED,
    Keeper,
)
from foreload.trainer.cluster.processes import WORKER, ProcessStart, StartedProcess, StartProcess, TrainerStart
from foreload.trainer.cluster.run_requests import RunRequests
from foreload.trainer.cluster.store_shards import StoreShards
from foreload.trainer.cluster.worker import RESTED, TERM, LaunchSpec
from foreload.trainer.errors import FingerprintError, ShardsLost, TrainerError
from foreload.trainer.run.directory import Run
from foreload.trainer.run.job import TrainJob
from foreload.trainer.run.kept import keep_schedule
from foreload.trainer.run.manifest import Manifest, Status
from foreload.trainer.run.report import RunReport, Totals

POLL = timedelta(milliseconds=30)
GRACE = timedelta(seconds=5)


@dataclass(frozen=True, slots=True)
class Ending:
    """How a call of `foreload train` ended: its summary, the last step, and the signal or request that stopped it early, if any."""

    summary: dict[str, Any]
    step: int
    stopped: bool
    signal_number: int | None


class TrainerGroup:
    """The trainers of one call, from the coordinator's side. status, failure: what stands when they have left."""

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
    ) -> None:
        self._job, self._interrupts, self._run, self._start = job, interrupts, run, start
        self._observer, self._start_process = observer, start_process
        self._schedule, self._shards = schedule, shards
        self._commands = 0
        self.manifest = manifest
        self.status = start
        self.failure: str | None = None
        self._lane_map = contiguous_lanes(schedule.header.lanes, job.trainers)
        self._processes: dict[int, StartedProcess] = {}
        self._ready: dict[int, dict[str, str]] = {}
        self._ended: dict[int, dict[str, Any]] = {}
        self._errors: list[dict[str, Any]] = []
        self._stop_wanted = False
        self._stop_told = False
        self._run_requests = RunRequests(job.trainers, shards.protected, lambda: len(self._ready) == job.trainers)

    def train(self, rendezvous: Any, spawned: Sequence[int]) -> Ending:
        """Start trainers and follow them; returns when all have left in order, and no process is left in any case."""
        job = self._job
        spec = LaunchSpec(
            job=job.to_dict(),
            trainers=job.trainers,
            start_step=self._start.step,
            last_batches=tuple(int(self._start.batches[str(lane)]) for lane in range(self._schedule.header.lanes)),
            stores=self._shards.plain_urls,
            fingerprint=None if job.accept_numerics else self.manifest.fingerprint,
            resumes=self._start.step >= self.manifest.stages[0].first_step,
            servers_return=self._shards.servers_return,
            faults=tuple(asdict(fault) for fault in self._observer.faults),
            totals=self._start.totals,
        )
        self._interrupts.defer_signals = True
        with contextlib.ExitStack() as stack:
            keeper: Keeper | None = None
            if rendezvous is None:
                keeper = Keeper(job.address, self._start_process)
                stack.callback(keeper.close)
            stack.callback(self._end)
            # Trainers start while the keeper does.
            self._spawn(
                spawned, _scheduler_address() if keeper is None else keeper.address, () if keeper is None else (keeper.held,)
            )
            return self._lead(Board(rendezvous if keeper is None else keeper.join()), spec)

    def _end(self) -> None:
        self._kill()
        self._interrupts.defer_signals = False

    def _lead(self, board: Board, spec: LaunchSpec) -> Ending:
        job = self._job
        board.publish_lane_map(TERM, self._lane_map)
        # Other hosts' trainers bring their own credentials; those of this call never reach the rendezvous store.
        board.publish("spec", asdict(replace(spec, job=spec.job | {"store": self.manifest.job["store"], "spare": None})))
        steps = self._schedule.header.end_step - self.manifest.stages[0].first_step
        totals = Totals(**self._start.totals)  # type: ignore[arg-type]
        report = RunReport(self._run.path, totals, self._start.step + 1, steps, job.trainers, self.manifest.job)
        control = ControlSocket(
            self._run.path,
            {
                "status": lambda _: self._told(report),
                "stop": lambda _: self._want_stop(),
                "replace": self._shards.want_replacement,
                "scrub": self._run_requests.scrub,
                "scrubbed": self._run_requests.scrubbed,
                "row_counts": self._run_requests.row_counts,
            },
        )
        try:
            self._follow(board, report)
            ending = self._finish(report)
            # The rows are where the status says, in servers that run: if these cannot be saved, the next command finds them so.
            stages = (*self.manifest.stages[:-1], stage_of(self._schedule, self._ended))
            self._run.come_to_rest(replace(self.manifest, stages=stages), self.status)
            keep_schedule(self._run, self._schedule, self.status.step)
            board.publish(RESTED, True)
            self._await_exit()
            return ending
        finally:
            self._kill()
            control.close()
            report.close()

    def _spawn(self, spawned: Sequence[int], address: str, held: Sequence[int]) -> None:
        # A trainer that outlives this process holds the run on.
        held = (*held, *(() if self._run.lock is None else (self._run.lock,)))
        for trainer in spawned:
            told = TrainerStart(trainer, address, tuple(self._shards.urls), os.getpid())
            self._processes[trainer] = self._start_process(ProcessStart(WORKER, (), told.environment(), tuple(held)))

    def _follow(self, board: Board, report: RunReport) -> None:
        receiver = EventReceiver(board, self._job.trainers)
        gone = False
        while len(self._ended) < self._job.trainers:
            # Before the event is read: what a process sent before it ended is then there.
            dead = [trainer for trainer, process in self._processes.items() if process.poll() is not None]
            for event in receiver.poll():
                self._receive(event, board, report)
            if self._errors or set(dead) - self._ended.keys():
                if gone:
                    raise self._reason()
                gone = True
                self._linger(receiver, board, report)
                continue
            self._see_to_stores(board)
            for command in self._run_requests.take():
                self._tell_all(board, command)
            report.tick()
            if len(self._interrupts.received) > 1 or (self._interrupts.received and len(self._ready) < self._job.trainers):
                raise KeyboardInterrupt  # before all are ready nothing of the run has changed
            if (self._interrupts.received or self._stop_wanted) and not self._stop_told:
                self._stop_told = True
                board.publish(STOP_WANTED, True)
            time.sleep(POLL.total_seconds())

    def _await_exit(self) -> None:
        for process in self._processes.values():
            # All is done; one that takes longer to leave is ended with the rest.
            process.wait(GRACE)

    def _linger(self, receiver: EventReceiver, board: Board, report: RunReport) -> None:
        """A trainer failed: give the others a moment to say why, since who speaks first is seldom the one to blame."""
        deadline = time.monotonic() + GRACE.total_seconds()
        while time.monotonic() < deadline and any(process.poll() is None for process in self._processes.values()):
            for event in receiver.poll():
                self._receive(event, board, report)
            if any(not error["peer_lost"] and not error.get("rows_lost") for error in self._errors):
                return
            time.sleep(POLL.total_seconds())
        for event in receiver.poll():
            self._receive(event, board, report)

    def _receive(self, event: dict[str, Any], board: Board, report: RunReport) -> None:
        kind, trainer = event["kind"], event["trainer"]
        self._observer.see(event)
        if kind == "step":
            report.step(event["report"])
        elif kind == "evaluation":
            report.evaluation(event["report"])
        elif kind == "ready":
            self._ready[trainer] = event["fingerprint"]
            if len(self._ready) == self._job.trainers:
                self.manifest = self.manifest.under(self._ready[0], self._start.step + 1)
                self._run.write_manifest(self.manifest)
                # From the first step on rows change on the store, while the dense part at rest does not.
                self._run.write_status(self._start)
                board.publish(GO, True)
        elif kind == "ended":
            self._ended[trainer] = board.read(f"ended/{trainer}")
        elif kind == "shard":
            self._shards.changed(trainer, event)
        elif kind == "request":
            self._run_requests.receive(event)
        elif kind == "error":
            self._errors.append(event)

    def _reason(self) -> TrainerError:
        causes = [error for error in self._errors if not error["peer_lost"]]
        if causes:
            lost = [error["rows_lost"] for error in causes if error.get("rows_lost")]
            if lost:
                return _all_lost(lost)
            kind = FingerprintError if causes[0]["message"].startswith("numerics fingerprint") else TrainerError
            return kind(causes[0]["message"])
        spoken = {error["trainer"] for error in self._errors}
        for trainer, process in self._processes.items():
            status = process.poll()
            if status is not None and trainer not in spoken | self._ended.keys():
                hosted = ", ".join(str(lane) for lane, host in enumerate(self._lane_map) if host == trainer)
                how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
                return TrainerError(
                    f"trainer {trainer} (lanes {hosted}): {how}; the others were stopped, and the dense part since the last clean stop is lost; "
                    "--resume goes on from that stop if its rows are still there, or says what is missing"
                )
        return TrainerError(self._errors[0]["message"])

    def _finish(self, report: RunReport) -> Ending:
        ended = self._ended.values()
        first = self._ended[0]
        self.failure = first["failure"]
        stopped = bool(first["stopped"])
        self.status = status_of(self._ended, report.totals)
        if self.status.lost:
            sys.stderr.write(
                f"foreload: warning: store shard {', '.join(map(str, self.status.lost))} is lost, and its rows come from parity; "
                "the next --resume, with a server there, rebuilds it\n"
            )
        traffic = {name: sum(event["traffic"][name] for event in ended) for name in first["traffic"]}
        summary = report.summary(
            state=self.status.state,
            trainers=self._job.trainers,
            store_traffic=traffic,
            mixed_numerics=list(self.manifest.mixed_numerics),
        )
        return Ending(
            summary, first["step"], stopped, self._interrupts.received[0] if stopped and self._interrupts.received else None
        )

    def _kill(self) -> None:
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()

    def _want_stop(self) -> dict[str, Any]:
        self._stop_wanted = True
        return {"stopping": True}

    def _see_to_stores(self, board: Board) -> None:
        """Start dead local servers again, and tell all trainers of servers that take the place of others."""
        self._shards.restart_dead()
        while (replacement := self._shards.take_replacement()) is not None:
            shard, url = replacement
            self._tell_all(board, {"do": "replace", "shard": shard, "url": url})
            if self.manifest.local_stores is None:
                plain = self._shards.plain_urls
                self.manifest = replace(self.manifest, store_urls=plain, job=self.manifest.job | {"store": ",".join(plain)})
                self._run.write_manifest(self.manifest)
            sys.stderr.write(f"store shard {shard}: {url} takes its place\n")

    def _tell_all(self, board: Board, command: Mapping[str, Any]) -> None:
        board.publish(f"commands/{self._commands}", dict(command))
        self._commands += 1

    def _told(self, report: RunReport) -> dict[str, Any]:
        """The answer to `status` on the control socket."""
        return {
            "state": "training" if len(self._ready) == self._job.trainers else "starting",
            "step": report.last_step,
            "term": TERM,
            "lanes": self._lane_map,
            "trainers": {trainer: process.pid for trainer, process in self._processes.items()},
            "shards": self._shards.states,
        }


def _all_lost(told: Sequence[Mapping[str, Any]]) -> ShardsLost:
    """What trainers told of the rows that are gone: {"shards", "covered", "rows": {table: count}} each."""
    rows: Counter[str] = Counter()
    for one in told:
        rows.update(one["rows"] or {})
    shards = sorted({shard for one in told for shard in one["shards"]})
    counted = any(one["rows"] is not None for one in told)
    return ShardsLost(str(RowsLost(shards, told[0]["covered"], rows if counted else None)), shards)


def _scheduler_address() -> str:
    return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
