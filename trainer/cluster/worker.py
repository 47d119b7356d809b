"""A trainer process: it joins a job, trains its lanes, and leaves rows and dense part where the next one finds them.

Started by the launcher as `python -m foreload.trainer.cluster.worker`, or forked and told to run `main`; a scheduler's process calls `work` itself.
What it is told comes over the rendezvous store, passwords in its environment.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from foreload.cache.client.store import Store
from foreload.cache.errors import RowsLost
from foreload.cache.parity.placement import Placement
from foreload.cache.protocol.batch_log import FileLog
from foreload.cache.protocol.ownership import Ownership
from foreload.cache.protocol.server_probe import ServerUnreachable, ShardNews
from foreload.cache.protocol.shard_table import LOST, ShardSnapshot
from foreload.cache.traffic import Traffic
from foreload.pipelines.base.files import is_full
from foreload.pipelines.base.interrupts import Interrupts
from foreload.pipelines.errors import ForeloadError
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.cluster.board import Board, StopAgreement, join_store
from foreload.trainer.cluster.ending import end_alone
from foreload.trainer.cluster.events import EventSender
from foreload.trainer.cluster.facts import Fingerprint, Go, Orphaned, RunSaved, ShardsLooked, StopWanted, Term
from foreload.trainer.cluster.faults import Fault
from foreload.trainer.cluster.messages import (
    Commanded,
    CountRows,
    Ended,
    EvaluationEnded,
    Failed,
    FaultInjected,
    LaunchSpec,
    LostRows,
    Ready,
    ReplaceServer,
    Scrub,
    ShardsTold,
    StepEnded,
    TrainerEnd,
)
from foreload.trainer.cluster.processes import TrainerStart
from foreload.trainer.cluster.run_requests import TrainerRequests
from foreload.trainer.cluster.segment_gate import SegmentGate, StoppedAtSegment
from foreload.trainer.compute import numerics
from foreload.trainer.compute.program import Trainer
from foreload.trainer.compute.reports import EvaluationReport, StepReport
from foreload.trainer.compute.transport import GlooTransport, NcclTransport, Transport
from foreload.trainer.errors import LossNotFinite, PeerLost, TrainerError
from foreload.trainer.run.assembly import DenseModel, Start, StoreAccess, begin_term, join_term
from foreload.trainer.run.dense_file import load_dense, save_dense
from foreload.trainer.run.directory import DENSE, LOG, PLACEMENT, Run
from foreload.trainer.run.directory import STORES as STORES_FOLDER
from foreload.trainer.run.job import TrainJob
from foreload.trainer.run.report import Totals
from foreload.trainer.run.resume import check_same

JOIN_TIMEOUT = timedelta(minutes=5)
RETURN_TIMEOUT = timedelta(seconds=30)  # for a server that is to take the place of one that is gone, once training is over
SHARDS_PAUSE = timedelta(milliseconds=250)  # between two looks at commands and at what is rebuilt
LAUNCHER_PAUSE = timedelta(milliseconds=200)  # between two looks whether the launcher lives, before training begins
BOARD_PAUSE = timedelta(milliseconds=10)  # between two looks for a fact that is waited for

_ready = threading.Event()  # set when this process no longer leaves with the launcher
_IN_SUMMARY = {"rows_written_at_stop": "rows_written_beyond"}  # names that summary.json has had from the beginning


def main() -> int:
    """The process that the launcher starts; returns its exit status."""
    start = TrainerStart.of_environment(os.environ)
    host, _, port = start.rendezvous.rpartition(":")
    threading.Thread(target=_leave_with, args=(start.launcher,), name="launcher", daemon=True).start()
    try:
        return work(join_store(host, int(port), JOIN_TIMEOUT), start.trainer, start.address, start.store_urls)
    except PeerLost as error:
        sys.stderr.write(f"foreload: error: {error}\n")
        return 2


def _leave_with(launcher: int) -> None:
    """End this process if the launcher dies before the trainer is ready: until then nothing is lost, whatever it waits for."""
    while not _ready.wait(LAUNCHER_PAUSE.total_seconds()):
        if os.getppid() != launcher:
            os._exit(2)


def work(
    rendezvous: Any, trainer: int, address: str, store_urls: Sequence[str] | None, interrupts: Interrupts | None = None
) -> int:
    """Train as trainer number `trainer`; returns the exit status: 0, 2 where the coordinator was told why it failed, 1 for an error that was not
    foreseen, with its traceback. rendezvous: the store that the board is on; address: of this machine, at which other trainers reach this one.

    store_urls: with passwords, where they are not the coordinator's. interrupts: of a process that a scheduler started; once training
    begins, a signal asks for a clean stop of all trainers.
    """
    board = Board(rendezvous)
    sender = EventSender(board, trainer)
    try:
        spec = board.read(LaunchSpec)
        TrainerProcess(rendezvous, board, sender, trainer, address, spec, store_urls or spec.stores, interrupts).run()
    except ForeloadError as error:
        with contextlib.suppress(PeerLost):
            sender.send(Failed(error.code, str(error), _lost_rows(error) if isinstance(error, RowsLost) else None))
        return 2
    except Exception as error:
        if isinstance(error, OSError) and is_full(error):
            with contextlib.suppress(PeerLost):
                sender.send(Failed(TrainerError.code, f"trainer {trainer}: the disk is full: free space there"))
            return 2
        traceback.print_exc()
        with contextlib.suppress(PeerLost):
            sender.send(Failed(TrainerError.code, f"trainer {trainer}: {type(error).__name__}: {error} (see above)"))
        return 1
    return 0


def _lost_rows(error: RowsLost) -> LostRows:
    return LostRows(tuple(error.shards), error.covered, None if error.rows is None else dict(error.rows))


class TrainerProcess:
    """One trainer's part of a spec, from joining to leaving."""

    def __init__(
        self,
        rendezvous: Any,
        board: Board,
        sender: EventSender,
        trainer: int,
        address: str,
        spec: LaunchSpec,
        store_urls: Sequence[str],
        interrupts: Interrupts | None,
    ) -> None:
        self._interrupts, self._stop_asked = interrupts, False
        self._rendezvous, self._board, self._events = rendezvous, board, sender
        self._trainer, self._address, self._spec, self._store_urls = trainer, address, spec, store_urls
        self._job = TrainJob.of(spec.job)
        self._term = board.read(Term, spec.first_term)
        self._run = Path(self._job.run)
        self._last_step = spec.start_step
        self._totals = Totals()  # of this call's steps
        self._shard_news: deque[tuple[ShardNews, float]] = deque()  # filled by the traffic's threads
        self._shards_told: ShardSnapshot | None = None  # what the coordinator was told last
        self._faults: list[Fault] = []  # of the trainer that hosts lane 0
        self._commands = 0  # how many were taken from the board
        self._shards_lost = 0  # how many times a shard was lost, or had its server replaced, for this trainer
        self._asked_at = 0.0  # when the board was last looked at for commands, time.monotonic()

    def run(self) -> None:
        """Train to the end of the schedule, or to an agreed stop. Raises the package's errors."""
        spec, job = self._spec, self._job
        numerics.set_up(job.threads, job.device, job.cpu_capability)
        self._check_fingerprint()
        schedule = Schedule(job.schedule, follow=job.follow)
        if spec.resumes:
            check_same(Run.open(self._run).manifest.stages[-1], schedule)
        dense = DenseModel.build(job, schedule)
        if spec.resumes:
            load_dense(self._run / DENSE, dense.module, dense.optimizer, spec.start_step)
        lane_map = self._term.lane_map
        if self._term.leader == self._trainer:
            self._faults = list(spec.faults)
        placement = Placement.load(self._run / PLACEMENT)
        parts = dense.parts(job, schedule)
        with self._transport() as transport, Store.connect(self._store_urls, job.store_silence, placement.r) as store:
            start = Start(spec.start_step, tuple(spec.last_batches))
            session = join_term(parts, transport, lane_map)
            access = StoreAccess(
                store, placement, job.run_namespace, FileLog(self._run / LOG),
                ownership=Ownership(self._term.number, Run.open(self._run).manifest.identity),
                on_shards=lambda news: self._shard_news.append((news, time.monotonic())),
            )  # fmt: skip
            trainer, events = begin_term(parts, access, session, start)
            lanes = trainer.lanes
            gate = SegmentGate(self._board, schedule, events, self._trainer, self._term.members, self._term.leader)
            self._run_requests = TrainerRequests(self._events, self._run, lanes.traffic, lanes.numbers, dense.layouts)
            with lanes.traffic, self._rows_lost_first(lanes.traffic):
                self._events.send(Ready(numerics.fingerprint(self._device())))
                # From here on it is the keeper that tells whether the launcher is there.
                _ready.set()
                if self._interrupts is not None:
                    self._interrupts.defer_signals = True
                self._board.read(Go)
                stopped, failure = self._train(trainer, gate)
                trainer.commit_last()
                flushed = lanes.write_everything_back(self._last_step + 1, at_stop=stopped)
                lost = self._repair_shards(lanes.traffic)
                self._run_requests.finish()
                last_batches = lanes.last_batches()
                counters = {
                    _IN_SUMMARY.get(name, name): value.total_seconds() if isinstance(value, timedelta) else int(value)
                    for name, value in asdict(lanes.traffic.counters()).items()
                }
            # From here on no lane of any trainer is written any more: the dense part of this step may replace that of the last clean stop.
            session.barrier()
            if session.leads:
                save_dense(self._run / DENSE, dense.module, dense.optimizer, self._last_step)
            end = TrainerEnd(
                step=self._last_step, stopped=stopped, failure=failure, flushed=flushed, last_batches=last_batches,
                traffic=counters, lost=tuple(lost), segments=gate.begun, prefix=schedule.prefix(gate.begun), totals=self._totals,
            )  # fmt: skip
            self._board.publish(end, self._trainer)
            self._events.send(Ended())
        if session.leads:
            self._see_run_saved(schedule)

    def _see_run_saved(self, schedule: Schedule) -> None:
        """Wait until the launcher has published how far the run is; if it was killed, do that in its place, when all have ended."""
        while self._board.poll(RunSaved) is None:
            if self._board.poll(Orphaned) is not None:
                ended = {trainer: self._board.read(TrainerEnd, trainer) for trainer in self._term.members}
                end_alone(Run(self._run), schedule, ended, self._spec.totals)
                return
            time.sleep(BOARD_PAUSE.total_seconds())

    def _train(self, trainer: Trainer, gate: SegmentGate) -> tuple[bool, str | None]:
        """Run the program; returns whether training stopped early, and what went wrong if that is why."""
        agreement = StopAgreement(self._board, leads=trainer.session.leads)

        def on_step(report: StepReport) -> None:
            self._last_step = report.step
            self._totals.add(report)
            self._events.send(StepEnded(report, time.monotonic()))
            self._inject()
            self._see_to_shards(trainer.lanes.traffic)

        def on_evaluation(report: EvaluationReport) -> None:
            self._events.send(EvaluationEnded(report))

        def while_waiting() -> None:
            self._events.flush()
            self._see_to_shards(trainer.lanes.traffic)

        events = gate.events(while_waiting)
        try:
            return trainer.run(events, agreement.stop_after, on_step, on_evaluation) is not None, None
        except StoppedAtSegment as stop:
            # Every trainer is here, after the same step.
            if stop.failure is None:
                return True, None
            return True, f"{stop.failure} (training stopped after step {self._last_step}, with everything saved)"
        except LossNotFinite as error:
            return True, (
                f"{error}; training stopped as after step {self._last_step}, with everything saved; train anew with a lower --lr or "
                "--dense-lr, or go on with --resume --allow-nan"
            )

    @contextlib.contextmanager
    def _rows_lost_first(self, traffic: Traffic) -> Iterator[None]:
        """Where a peer is lost, look at the shards: it may be gone because rows are, and then RowsLost, of this trainer's rows, is raised instead."""
        try:
            yield
        except PeerLost:
            traffic.probe()
            raise

    def _inject(self) -> None:
        """Put in the faults that are due after the last step."""
        for fault in self._faults:
            if fault.step == self._last_step:
                at = time.monotonic()
                fault.inject(self._run / STORES_FOLDER)
                self._events.send(FaultInjected(fault.shard, at))

    def _see_to_shards(self, traffic: Traffic) -> None:
        """Tell the coordinator what became of store shards, and how far run requests are; do what it commands.

        Changes are told at every call, the rest every SHARDS_PAUSE.
        """
        while self._shard_news:
            news, at = self._shard_news.popleft()
            if isinstance(news, ServerUnreachable):
                self._events.send(news)
            else:
                self._tell_shards(news, at)
        if time.monotonic() - self._asked_at < SHARDS_PAUSE.total_seconds():
            return
        self._asked_at = time.monotonic()
        if self._interrupts is not None and self._interrupts.received and not self._stop_asked:
            self._stop_asked = True
            self._board.publish(StopWanted())
        shards = traffic.shards
        # A change of state comes by the queue, in its order; here it is how much is rebuilt.
        if self._shards_told is not None and shards != self._shards_told and not shards.changes_since(self._shards_told):
            self._tell_shards(shards, time.monotonic())
        self._run_requests.tell()
        while (commanded := self._board.poll(Commanded, self._commands)) is not None:
            self._commands += 1
            match commanded.command:
                case ReplaceServer(shard, url):
                    traffic.replace(shard, url)
                    self._shards_lost += 1  # of the server that had the shard
                case Scrub() | CountRows() as request:
                    self._run_requests.begin(request)

    def _tell_shards(self, shards: ShardSnapshot, at: float) -> None:
        """Tell the coordinator how the store shards are for this trainer. at: since when, time.monotonic()."""
        self._shards_lost += sum(status.state == LOST for status in shards.changes_since(self._shards_told).values())
        self._shards_told = shards
        self._events.send(ShardsTold(shards, at))

    def _repair_shards(self, traffic: Traffic) -> list[int]:
        """Wait until all shards are whole again, for every trainer, as long as there is hope; returns those that are not.

        A shard that one trainer finds lost may have been whole when another looked, so all look, turn by turn, until none finds a further one. There
        is hope where servers come back by themselves, for RETURN_TIMEOUT at most, and not again once a shard was given up.
        """
        lost: list[int] = []
        turn, known = 0, self._shards_lost
        while True:
            hopeful = self._spec.servers_return and not lost
            deadline = time.monotonic() + (RETURN_TIMEOUT.total_seconds() if hopeful else 0.0)
            while True:
                lost = traffic.repair_shards(SHARDS_PAUSE)
                self._see_to_shards(traffic)
                if traffic.shards.not_whole.keys() <= set(lost) and (not lost or time.monotonic() >= deadline):
                    break
            further, known = self._shards_lost > known, self._shards_lost
            self._board.publish(ShardsLooked(further), turn, self._trainer)
            if not any(self._found_lost(traffic, turn, trainer) for trainer in self._term.members):
                return lost
            turn += 1

    def _found_lost(self, traffic: Traffic, turn: int, trainer: int) -> bool:
        """Whether a trainer found a shard lost in a turn of `_repair_shards`, waited for as long as its rebuilding takes."""
        while (looked := self._board.poll(ShardsLooked, turn, trainer)) is None:
            self._see_to_shards(traffic)
            time.sleep(BOARD_PAUSE.total_seconds())
        return looked.found_lost

    def _check_fingerprint(self) -> None:
        """Raise FingerprintError unless the numerics here are the run's, or, where it has none or others are accepted, the first trainer's."""
        mine = numerics.fingerprint(self._device())
        if self._spec.fingerprint is not None:
            numerics.check(mine, self._spec.fingerprint, resumed=True)
        elif self._trainer != self._term.members[0]:
            numerics.check(mine, self._board.read(Fingerprint).fields)
        else:
            self._board.publish(Fingerprint(mine))

    def _device(self) -> str:
        if self._job.device != "cuda":
            return "cpu"
        return f"cuda:{self._trainer % max(torch.cuda.device_count(), 1)}"

    @contextlib.contextmanager
    def _transport(self) -> Iterator[Transport]:
        job, term, members = self._job, self._term.number, self._term.members
        transport: Transport
        if job.device == "cuda":
            if not torch.cuda.is_available():
                raise TrainerError(f"--device cuda: trainer {self._trainer} finds no CUDA device; use --device cpu")
            torch.cuda.set_device(self._device())
            device = torch.device(self._device())
            transport = NcclTransport(self._rendezvous, term, self._trainer, members, job.peer_silence, device)
        else:
            transport = GlooTransport(self._rendezvous, term, self._trainer, members, job.peer_silence, self._address)
        try:
            yield transport
        finally:
            transport.close()


if __name__ == "__main__":
    sys.exit(main())
