"""`foreload train`: claims the run and its place on the store, starts trainers, follows them, and leaves everything whole.

Also `python -m trainer.launch`. Where RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set, a scheduler has started one such process per
trainer: rank 0 then coordinates, and only its own trainer is a child of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from cache.errors import CacheError
from cache.local import LocalStores
from cache.namespace import claim, remove
from cache.placement import Placement
from cache.store import Store
from cache.url import parse_urls
from pipelines.files import write_json
from pipelines.schedule import Schedule
from trainer import numerics
from trainer.assembly import DensePart
from trainer.commands.digest import model_digest
from trainer.commands.resting import rest
from trainer.coordinator import Board, ControlSocket, Inbox, ask, contiguous_lanes, host_store
from trainer.errands import Errands
from trainer.errors import FingerprintError, JobError, RunError, ShardsLost, TrainerError
from trainer.faults import Witness
from trainer.fit import check_fit
from trainer.job import TrainJob, local_shards
from trainer.layout import model_spec
from trainer.models import build_model, load_model
from trainer.report import RunReport, Totals
from trainer.run import STORES, SUMMARY, Manifest, Run, Stage, Status, check_free, new_manifest, open_stores, resumed
from trainer.worker import JOIN_TIMEOUT, RENDEZVOUS, TERM, TRAINER, Call, work
from trainer.worker import STORES as STORES_VARIABLE

POLL = timedelta(milliseconds=30)
GRACE = timedelta(seconds=5)


@dataclass(frozen=True, slots=True)
class Ending:
    """How a call of `foreload train` ended: its summary, the last step, and the signal or request that stopped it early, if any."""

    summary: dict[str, Any]
    step: int
    stopped: bool
    signal_number: int | None


class Interrupts:
    """Ctrl-C and SIGTERM: before trainers run they end the call at once; then the first asks for a stop and the second kills."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self.gentle = False

    def __enter__(self) -> Interrupts:
        self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        self.received.append(number)
        if not self.gentle:
            raise KeyboardInterrupt


def under_scheduler() -> bool:
    """Whether this process was started by torchrun or the like."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def train(job: TrainJob, witness: Witness | None = None) -> Ending | None:
    """Train as the job says. Returns None in a process that is only one of a scheduler's trainers.

    witness: sees it, and may have put faults in.

    Raises PipelineError, CacheError and TrainerError; KeyboardInterrupt if a signal came before training began.
    """
    numerics.set_environment(job.cpu_capability)
    numerics.check_processor()
    if not under_scheduler():
        with Interrupts() as interrupts:
            return Launch(job, interrupts, None, witness or Witness()).run()
    store, rank, world = _scheduled_store()
    if world != job.trainers:
        job = replace(job, trainers=world)
    if rank:
        urls = None if local_shards(job.store) else job.store.split(",")
        status = work(store, rank, urls)
        if status:
            raise TrainerError(f"trainer {rank}: stopped; rank 0 says why")
        return None
    with Interrupts() as interrupts:
        return Launch(job, interrupts, store, witness or Witness()).run()


def _scheduled_store() -> tuple[Any, int, int]:
    import torch.distributed as dist

    store, rank, world = next(dist.rendezvous("env://", timeout=JOIN_TIMEOUT))
    return store, rank, world


class Launch:
    """One call of `foreload train`, from the coordinator's side. rendezvous: the store of a scheduler's job, else one is made here."""

    def __init__(self, job: TrainJob, interrupts: Interrupts, rendezvous: Any, witness: Witness) -> None:
        self._job = job
        self._witness = witness
        self._interrupts = interrupts
        self._rendezvous = rendezvous
        self._spawned = range(1) if rendezvous is not None else range(job.trainers)

    def run(self) -> Ending:
        """Train; see `train`."""
        schedule = Schedule(self._job.schedule, follow=self._job.follow)
        lanes = schedule.header.lanes
        if self._job.trainers > lanes:
            raise JobError(
                f"--trainers: must be at most the schedule's lanes, {lanes}; got {self._job.trainers}; prepare with more --lanes"
            )
        self._check_model(schedule)
        sys.stderr.write(f"{check_fit(self._job, schedule)}\n")
        path = Path(self._job.run)
        if ask(path, {"do": "status"}) is not None:
            raise RunError(f"--run: {path} is being trained right now; stop that with Ctrl-C first, or choose another folder")
        if self._job.resume:
            return self._resume(schedule)
        check_free(path, self._job.overwrite)
        count = local_shards(self._job.store)
        urls = () if count else parse_urls(self._job.store)
        placement = Placement.spread(count or len(urls), *self._job.code(count or len(urls)))
        manifest = new_manifest(self._job, schedule, tuple(url.plain for url in urls), count)
        if not count:
            # Known to be there before anything is deleted.
            Store(urls, self._job.store_silence).close()
        run = Run.create(path, manifest, placement, self._job.overwrite)
        start = Status("training", schedule.header.first_step - 1, {str(lane): 0 for lane in range(lanes)})
        return self._with_stores(run, manifest, start, schedule, LocalStores(count, path / STORES) if count else None)

    def _check_model(self, schedule: Schedule) -> None:
        """Raise what is wrong with the model before anything is started, and with its optimizer, too, before a run is deleted."""
        job = self._job
        if job.overwrite:
            DensePart.build(replace(job, device="cpu"), schedule)
        else:
            # Without the optimizer, for which torch imports its compiler: two seconds.
            build_model(load_model(job.model), model_spec(schedule.header.features, job.dim), job.model_options, job.seed)

    def _resume(self, schedule: Schedule) -> Ending:
        run = Run.open(self._job.run)
        manifest, step = resumed(run, self._job, schedule)
        self._job = replace(self._job, namespace=manifest.namespace)
        if (local_shards(self._job.store) or None) != manifest.local_stores:
            raise RunError(
                f"--store: must be what the run was started with, {manifest.training_job.store}; got {self._job.store.split('@')[-1]}"
            )
        start = replace(run.resting(), state="training", step=step)
        return self._with_stores(run, manifest, start, schedule, open_stores(run))

    def _with_stores(self, run: Run, manifest: Manifest, start: Status, schedule: Schedule, local: LocalStores | None) -> Ending:
        if local is not None:
            local.start()
        trained = False
        try:
            urls = list(local.urls) if local is not None else self._job.store.split(",")
            with self._claimed(run, manifest, urls):
                attempt = Attempt(self._job, self._interrupts, run, manifest, start, schedule, urls, local, self._witness)
                ending = attempt.train(self._rendezvous, self._spawned)
            trained = True
            try:
                if self._job.digest and attempt.failure is None:
                    spared = run.placement.r
                    patience = timedelta(seconds=1 if spared else 10)
                    with Store(attempt.urls, self._job.store_silence, patience, optional=spared > 0) as store:
                        ending.summary["digest"] = model_digest(rest(run, store, attempt.status))
                    write_json(run.path / SUMMARY, ending.summary)
            finally:
                # What was trained is whole, whatever became of its digest; nothing interrupts its saving.
                self._interrupts.gentle = True
                if local is not None:
                    local.stop(save=True)
                run.write_manifest(replace(attempt.manifest, stages=(*manifest.stages[:-1], Stage.of(schedule))))
                run.write_status(attempt.status)
        except ShardsLost:
            if local is not None:
                # What is left can still be looked at.
                local.stop(save=True)
                local = None
            raise
        finally:
            if local is not None and not trained:
                local.stop(save=False)
        if attempt.failure is not None:
            raise TrainerError(f"{attempt.failure} (training stopped after step {ending.step}, the last that was published)")
        return ending

    @contextlib.contextmanager
    def _claimed(self, run: Run, manifest: Manifest, urls: Sequence[str]) -> Iterator[None]:
        job = self._job
        # A run that goes on may do so without the shards whose rows parity has.
        spared = run.placement.r if job.resume else 0
        with Store(urls, job.store_silence, timedelta(seconds=1 if spared else 10), optional=spared > 0) as store:
            mode: Literal["new", "resume", "overwrite"] = "resume" if job.resume else "overwrite" if job.overwrite else "new"
            claim(store, manifest.namespace, manifest.identity, mode, spared)
        try:
            yield
        except BaseException:
            # A call that failed before it began leaves the name free, so that the next one needs no --overwrite.
            if run.status is None:
                with contextlib.suppress(Exception), Store(urls, job.store_silence, timedelta(seconds=1)) as store:
                    remove(store, manifest.namespace)
            raise


class Attempt:
    """The trainers of one call: told, started, followed to their end."""

    def __init__(
        self,
        job: TrainJob,
        interrupts: Interrupts,
        run: Run,
        manifest: Manifest,
        start: Status,
        schedule: Schedule,
        urls: Sequence[str],
        local: LocalStores | None,
        witness: Witness,
    ) -> None:
        self._job, self._interrupts, self._run, self._start = job, interrupts, run, start
        self._witness = witness
        self._schedule, self.urls, self._local = schedule, list(urls), local
        self._protected = run.placement.r > 0
        self._spares = [str(url) for url in parse_urls(job.spare)] if job.spare else []
        self._wanted_replacements: deque[tuple[int, str]] = deque()  # filled by the control socket's threads
        self._orders = 0
        self._lost: dict[int, set[int]] = {}
        self._shard_states: dict[int, dict[str, Any]] = {}
        self.manifest = manifest
        self.status = start
        self.failure: str | None = None
        self._lane_map = contiguous_lanes(schedule.header.lanes, job.trainers)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._ready: dict[int, dict[str, str]] = {}
        self._ended: dict[int, dict[str, Any]] = {}
        self._errors: list[dict[str, Any]] = []
        self._stop_wanted = False
        self._stop_told = False
        self._errands = Errands(job.trainers, self._protected, lambda: len(self._ready) == job.trainers)

    def train(self, rendezvous: Any, spawned: Sequence[int]) -> Ending:
        """Start trainers and follow them; returns when all have left in order, and no process is left in any case."""
        job = self._job
        store = rendezvous if rendezvous is not None else host_store(job.address, JOIN_TIMEOUT)
        board = Board(store)
        call = Call(
            job=asdict(job),
            trainers=job.trainers,
            start_step=self._start.step,
            batches=tuple(int(self._start.batches[str(lane)]) for lane in range(self._schedule.header.lanes)),
            stores=tuple(url.plain for url in parse_urls(list(self.urls), {})),
            fingerprint=self.manifest.fingerprint,
            resumes=job.resume,
            servers_return=self._restarts or bool(self._spares),
            faults=tuple(asdict(fault) for fault in self._witness.faults),
        )
        board.publish_lane_map(TERM, self._lane_map)
        # Other hosts' trainers bring their own credentials; those of this call never reach the rendezvous store.
        board.publish("call", asdict(replace(call, job=call.job | {"store": self.manifest.job["store"], "spare": None})))
        steps = self._schedule.header.end_step - self.manifest.stages[0].first_step
        report = RunReport(self._run.path, Totals(**self._start.totals), self._start.step + 1, steps, job.trainers)  # type: ignore[arg-type]
        control = ControlSocket(
            self._run.path,
            {
                "status": lambda _: self._told(report),
                "stop": lambda _: self._want_stop(),
                "replace": self._want_replacement,
                "scrub": self._errands.scrub,
                "scrubbed": self._errands.scrubbed,
                "census": self._errands.census,
            },
        )
        self._interrupts.gentle = True
        try:
            self._spawn(spawned, store)
            self._follow(board, report)
            return self._finish(report)
        finally:
            self._kill()
            control.close()
            report.close()
            self._interrupts.gentle = False

    def _spawn(self, spawned: Sequence[int], store: Any) -> None:
        root = str(Path(__file__).resolve().parent.parent)
        path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH", "")) if part)
        for trainer in spawned:
            environment = os.environ | {
                "PYTHONPATH": path,
                RENDEZVOUS: f"{store.host}:{store.port}" if hasattr(store, "host") else _scheduler_address(),
                TRAINER: str(trainer),
                STORES_VARIABLE: json.dumps(list(self.urls)),
            }
            # A session of its own: Ctrl-C in the terminal is for the launcher, which stops trainers after the same step.
            command = [sys.executable, "-P", "-m", "trainer.worker"]
            self._processes[trainer] = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True
            )

    def _follow(self, board: Board, report: RunReport) -> None:
        inbox = Inbox(board, self._job.trainers)
        gone = False
        while len(self._ended) < self._job.trainers:
            # Before the mail is read: what a process sent before it ended is then there.
            dead = [trainer for trainer, process in self._processes.items() if process.poll() is not None]
            for mail in inbox.poll():
                self._receive(mail, board, report)
            if self._errors or set(dead) - self._ended.keys():
                if gone:
                    raise self._reason()
                gone = True
                self._linger(inbox, board, report)
                continue
            self._see_to_stores(board)
            for order in self._errands.take():
                self._tell_all(board, order)
            if len(self._interrupts.received) > 1:
                raise KeyboardInterrupt
            if (self._interrupts.received or self._stop_wanted) and not self._stop_told:
                self._stop_told = True
                board.publish("stop/wanted", True)
            time.sleep(POLL.total_seconds())
        for process in self._processes.values():
            # All is done; one that takes longer to leave is ended with the rest.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE.total_seconds())

    def _linger(self, inbox: Inbox, board: Board, report: RunReport) -> None:
        """A trainer failed: give the others a moment to say why, since who speaks first is seldom the one to blame."""
        deadline = time.monotonic() + GRACE.total_seconds()
        while time.monotonic() < deadline and any(process.poll() is None for process in self._processes.values()):
            for mail in inbox.poll():
                self._receive(mail, board, report)
            if any(not error["peer_lost"] for error in self._errors):
                return
            time.sleep(POLL.total_seconds())
        for mail in inbox.poll():
            self._receive(mail, board, report)

    def _receive(self, mail: dict[str, Any], board: Board, report: RunReport) -> None:
        kind, trainer = mail["kind"], mail["trainer"]
        self._witness.see(mail)
        if kind == "step":
            report.step(mail["report"])
        elif kind == "evaluation":
            report.evaluation(mail["report"])
        elif kind == "ready":
            self._ready[trainer] = mail["fingerprint"]
            if len(self._ready) == self._job.trainers:
                self.manifest = replace(self.manifest, fingerprint=self._ready[0])
                self._run.write_manifest(self.manifest)
                # From the first step on rows change on the store, while the dense part at rest does not.
                self._run.write_status(self._start)
                board.publish("go", True)
        elif kind == "ended":
            self._ended[trainer] = mail
        elif kind == "shard":
            self._shard_changed(trainer, mail)
        elif kind == "errand":
            self._errands.receive(mail)
        elif kind == "error":
            self._errors.append(mail)

    def _reason(self) -> TrainerError:
        causes = [error for error in self._errors if not error["peer_lost"]]
        if causes:
            if causes[0].get("rows_lost"):
                return ShardsLost(causes[0]["message"])
            kind = FingerprintError if causes[0]["message"].startswith("numerics fingerprint") else TrainerError
            return kind(causes[0]["message"])
        spoken = {error["trainer"] for error in self._errors}
        for trainer, process in self._processes.items():
            status = process.poll()
            if status is not None and trainer not in spoken | self._ended.keys():
                hosted = ", ".join(str(lane) for lane, host in enumerate(self._lane_map) if host == trainer)
                how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
                return TrainerError(
                    f"trainer {trainer} (lanes {hosted}): {how}; the others were stopped; train again with --overwrite"
                )
        return TrainerError(self._errors[0]["message"])

    def _finish(self, report: RunReport) -> Ending:
        ended = self._ended.values()
        first = self._ended[0]
        batches = {lane: number for mail in ended for lane, number in mail["batches"].items()}
        self.failure = first["failure"]
        stopped = bool(first["stopped"])
        lost = sorted({shard for mail in ended for shard in mail["lost"]})
        if lost:
            sys.stderr.write(
                f"foreload: warning: store shard {', '.join(map(str, lost))} is lost, and its rows come from parity; "
                "the next --resume, with a server there, rebuilds it\n"
            )
        written = sum(mail["flushed"] for mail in ended)
        if stopped:
            report.totals.rows_flushed += written
        else:
            # The end of a schedule ends every residency.
            report.totals.rows_written_back += written
        self.status = Status("stopped" if stopped else "ended", first["step"], batches, asdict(report.totals), lost)
        traffic = {name: sum(mail["traffic"][name] for mail in ended) for name in first["traffic"]}
        summary = report.summary(state=self.status.state, trainers=self._job.trainers, store_traffic=traffic)
        return Ending(
            summary, first["step"], stopped, self._interrupts.received[0] if stopped and self._interrupts.received else None
        )

    def _kill(self) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes.values():
            process.wait()

    def _want_stop(self) -> dict[str, Any]:
        self._stop_wanted = True
        return {"stopping": True}

    def _want_replacement(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to `replace` on the control socket: {"old": URL or number of a shard, "new": URL}."""
        old, new = str(request.get("old")), str(request.get("new"))
        if not self._protected:
            return {"error": "the run has no parity, so a shard's rows are nowhere else; train with --parity"}
        plain = [url.plain for url in parse_urls(list(self.urls), {})]
        shard = int(old) if old.isdigit() and int(old) < len(plain) else plain.index(old) if old in plain else None
        if shard is None:
            return {"error": f"no store shard of the run is {old}; there are {', '.join(plain)}"}
        try:
            (url,) = parse_urls(new)
        except (CacheError, ValueError) as error:
            return {"error": f"cannot use {new}: {error}"}
        self._wanted_replacements.append((shard, str(url)))
        return {"replacing": shard, "by": url.plain}

    @property
    def _restarts(self) -> bool:
        return self._local is not None and self._protected and not self._job.no_restart

    def _see_to_stores(self, board: Board) -> None:
        """Start dead local servers again, and tell all trainers of servers that take the place of others."""
        if self._restarts and self._local is not None:
            for shard in range(self._local.count):
                if self._witness.may_start(shard) and self._local.restart(shard):
                    sys.stderr.write(f"store shard {shard}: its server died, and was started again, empty\n")
        while self._wanted_replacements:
            shard, url = self._wanted_replacements.popleft()
            plain = parse_urls([url], {})[0].plain
            self.urls[shard] = url
            self._tell_all(board, {"do": "replace", "shard": shard, "url": plain})
            if self.manifest.local_stores is None:
                plains = tuple(url.plain for url in parse_urls(list(self.urls), {}))
                job = self.manifest.job | {"store": ",".join(plains)}
                self.manifest = replace(self.manifest, store_urls=plains, job=job)
                self._run.write_manifest(self.manifest)
            sys.stderr.write(f"store shard {shard}: {plain} takes its place\n")

    def _tell_all(self, board: Board, order: Mapping[str, Any]) -> None:
        board.publish(f"orders/{self._orders}", dict(order))
        self._orders += 1

    def _shard_changed(self, trainer: int, mail: dict[str, Any]) -> None:
        shard, what = mail["shard"], mail["what"]
        self._shard_states[shard] = {"state": what} | ({"rebuilt": mail["done"]} if "done" in mail else {})
        lost_by = self._lost.setdefault(shard, set())
        first = what == "lost" and not lost_by
        if what == "lost":
            lost_by.add(trainer)
        elif what == "ok":
            lost_by.discard(trainer)
        if first:
            sys.stderr.write(f"store shard {shard}: is lost; training goes on, its rows come from parity\n")
            if self._spares and not self._restarts:
                self._wanted_replacements.append((shard, self._spares.pop(0)))
        elif what == "ok" and not lost_by:
            sys.stderr.write(f"store shard {shard}: is whole again\n")

    def _told(self, report: RunReport) -> dict[str, Any]:
        """The answer to `status` on the control socket."""
        return {
            "state": "training" if len(self._ready) == self._job.trainers else "starting",
            "step": report.last_step,
            "term": TERM,
            "lanes": self._lane_map,
            "trainers": {trainer: process.pid for trainer, process in self._processes.items()},
            "shards": {shard: dict(state) for shard, state in self._shard_states.items()},
        }


def _scheduler_address() -> str:
    return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


if __name__ == "__main__":
    from trainer.cli import main

    sys.exit(main(["train", *sys.argv[1:]]))
