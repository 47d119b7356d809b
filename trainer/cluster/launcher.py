"""`foreload train`: claim the run and the store, and train.

The launcher starts the trainers, follows them to their end, and adds the call's profile to the
history.

If RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set, a scheduler has started one such process
per trainer. Rank 0 then coordinates, and only its own trainer is a child of it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from foreload.base.errors import ForeloadError, SettingError
from foreload.base.files import write_json
from foreload.base.interrupts import Interrupts
from foreload.base.progress import progress_bar
from foreload.cache.client.local import LocalStores
from foreload.cache.client.store import Store
from foreload.cache.client.url import parse_urls
from foreload.cache.parity.placement import Placement
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.assembly.assembly import DenseModel
from foreload.trainer.checkpoints.contents import Checkpoint
from foreload.trainer.checkpoints.restoring import check_restorable, restored_manifest
from foreload.trainer.cluster.call_profile import CallProfile
from foreload.trainer.cluster.coordinator.adjustments import most_shards
from foreload.trainer.cluster.coordinator.failures import GuestsRefused
from foreload.trainer.cluster.coordinator.store_shards import StoreShards, check_spares
from foreload.trainer.cluster.coordinator.store_watch import StoreWatch, warn_of_machine
from foreload.trainer.cluster.coordinator.trainer_group import TrainerGroup
from foreload.trainer.cluster.coordinator.training_call import TrainingCall
from foreload.trainer.cluster.ending import Ending, ending_before
from foreload.trainer.cluster.engines.engine import Engine
from foreload.trainer.cluster.engines.local_engine import LocalEngine
from foreload.trainer.cluster.engines.opened import engine_of
from foreload.trainer.cluster.member.joined_trainer import JOIN_TIMEOUT
from foreload.trainer.cluster.member.worker import work
from foreload.trainer.cluster.messages.faults import RunObserver
from foreload.trainer.cluster.processes.starting import ChildProcess, StartProcess, TrainerStart
from foreload.trainer.cluster.restored_run import claimed, restore, stop_at_end, stopped_again
from foreload.trainer.compute import numerics
from foreload.trainer.compute.layouts import model_spec
from foreload.trainer.errors import CheckpointError, ShardsLost, TrainerError
from foreload.trainer.job.job import TrainJob
from foreload.trainer.job.job_values import AUTO, Servers
from foreload.trainer.job.memory_check import check_fit, store_bytes, trainer_bytes
from foreload.trainer.job.metric_choice import check_metric
from foreload.trainer.job.scheduler import FAILED, NO_STEPS, Meeting, meet, under_scheduler
from foreload.trainer.models.checking import check_apart_later, doubts, ignored_inputs
from foreload.trainer.models.diagnosis import mixes_samples
from foreload.trainer.run.directory import STORES, SUMMARY, Run, check_free, locked
from foreload.trainer.run.event_log import CallBegan, EventLog
from foreload.trainer.run.manifest import Manifest, Status, new_manifest, rates_text
from foreload.trainer.run.metrics_server import MetricsServer
from foreload.trainer.run.model_code import check_code, code_of, note_code
from foreload.trainer.run.reach import reach
from foreload.trainer.run.resume import check_trainable, resumed, why_ended
from foreload.trainer.run.servers import asked, noted, open_stores, plain, servers_of, with_named
from foreload.trainer.run.tracking import Tracking, load_tracker
from foreload.trainer.saved.kept import keep_schedule, open_schedule
from foreload.trainer.saved.rebuild import rebuild_at_end
from foreload.trainer.saved.run_rows import delete_replaced
from foreload.trainer.saved.stopped_run import stopped_run_at


def train(
    job: TrainJob,
    observer: RunObserver | None = None,
    start_process: StartProcess = ChildProcess,
    report: Callable[[Path], None] = lambda run: None,
) -> Ending | None:
    """Train as the job says, in the environment that `foreload train` sets.

    Args:
        observer: Sees every event of a trainer, and names the faults that trainers inject.
        start_process: Starts the processes of the call.
        report: Called with the run's folder once the run has stopped.

    Returns:
        How the call ended. If there was no step to train, it is how the last call ended, or None if
        that is not known. In a scheduler's processes other than rank 0 it is None.

    Raises:
        ForeloadError: Training failed or cannot begin.
        KeyboardInterrupt: A signal came before training began.
    """
    numerics.check_machine(job.device)
    if under_scheduler() and job.coordinator is not None:
        raise SettingError(
            "--coordinator: is for hosts that join by themselves; leave it out under torchrun, which starts the trainers"
        )
    if under_scheduler() and job.rebalance:
        raise SettingError(
            "--rebalance: is for trainers that foreload starts itself; leave it out under torchrun, where lanes do not move"
        )
    if not under_scheduler():
        with Interrupts() as interrupts:
            return Launcher(job, interrupts, None, observer or RunObserver(), start_process, report).run()
    with Interrupts(relayed=True) as interrupts:
        meeting = meet(JOIN_TIMEOUT)
        if meeting.world != job.trainers:
            job = replace(job, trainers=meeting.world)
        if not meeting.rank:
            try:
                return Launcher(job, interrupts, meeting, observer or RunObserver(), start_process, report).run()
            except BaseException:
                # Trainers that wait at the meeting must not wait for ever. Those that have begun to
                # train notice the failure by themselves.
                meeting.announce(FAILED)
                raise
        message = meeting.receive()
        if message == NO_STEPS:
            return None
        urls = None if job.store.local else tuple(job.store.urls)
        start = TrainerStart(meeting.rank, message, job.own_address(), urls, os.getppid())
        if message == FAILED or work(start, interrupts):
            raise TrainerError(f"trainer {meeting.rank}: stopped; rank 0 says why")
        return None


def restored(job: TrainJob) -> Status:
    """Make a stopped run from the checkpoint that a job names, without training it.

    It needs the environment that `foreload train` sets.

    Returns:
        The status of the new run.

    Raises:
        ForeloadError: The run cannot be made.
        KeyboardInterrupt: A signal came.
    """
    numerics.check_machine()
    with Interrupts() as interrupts:
        return Launcher(job, interrupts, None, RunObserver(), ChildProcess).restore()


@dataclass(frozen=True, slots=True)
class _NewRun:
    """A run that was just made.

    Attributes:
        start: The status with which it begins.
        local: Its local stores, if it has them.
        lock: The descriptor of its lock, which is held.
        resumes: Whether it was made from a checkpoint, and is to be resumed.
    """

    run: Run
    start: Status
    local: LocalStores | None
    lock: int | None
    resumes: bool


class Launcher:
    """One call of `foreload train`, from the coordinator's side.

    Args:
        interrupts: The signals that ask for an end.
        meeting: Where a scheduler's trainers met. If None, there is no scheduler.
        observer, start_process, report: As for `train`.
    """

    def __init__(
        self,
        job: TrainJob,
        interrupts: Interrupts,
        meeting: Meeting | None,
        observer: RunObserver,
        start_process: StartProcess,
        report: Callable[[Path], None] = lambda run: None,
    ) -> None:
        self._job = job
        self._report = report
        self._start_process = start_process
        self._observer = observer
        self._interrupts = interrupts
        self._meeting = meeting
        self._auto = job.resume == AUTO
        self._group: TrainerGroup | None = None  # set when the trainers are about to start
        self._engine: Engine  # set while it is open
        self._events: EventLog  # set once this call has the run
        self._metrics: MetricsServer | None = None
        self._tracking: Tracking | None = None
        # A scheduler starts the other trainers itself, each as a call of `train`.
        self._spawned = range(1) if meeting is not None else range(job.trainers)

    def run(self) -> Ending | None:
        """Train; see `train`. Returns None if there was no step to train."""
        with contextlib.ExitStack() as stack:
            if (at := self._job.metrics) is not None:
                self._metrics = MetricsServer(*at)
                stack.callback(self._metrics.close)
                sys.stderr.write(f"metrics for Prometheus: {self._metrics.url}\n")
                if not at.is_loopback:
                    sys.stderr.write(f"foreload: warning: --metrics: whoever reaches {at.host} can read the run's figures\n")
            if (tracker := self._job.track) is not None:
                self._tracking = Tracking(load_tracker(tracker, self._job.model_folder), tracker)
                stack.push(self._end_tracking)
            self._engine = stack.enter_context(engine_of(self._job, self._start_process))
            return self._run()

    def _end_tracking(self, kind: type[BaseException] | None, *_: object) -> None:
        """End the report to the tracker. kind: the type of the error with which the call ends; an exit stack passes it."""
        assert self._tracking is not None
        state = "failed" if kind is not None or self._group is None else self._group.status.state
        self._tracking.close(Path(self._job.run), state)

    def _run(self) -> Ending | None:
        schedule, model = self._look_at_job()
        self._layouts = model.layouts
        self._profile = CallProfile(self._job, schedule, model)
        sys.stderr.write(f"{check_fit(self._job, schedule)}\n")
        path = Path(self._job.run)
        if self._job.resume:
            self._engine.take()
            with locked(Run.open(path).path) as lock:
                run = Run.open(path, lock)
                before = run.status
                if self._find_servers(run, schedule) > run.placement.r and before is not None:
                    # The rows are gone for good, so it is as if the run had crashed since.
                    before = replace(before, state="training")
                self._events = EventLog(path, *((-1, 0) if before is None else (before.step, before.term)))
                with self._events.failures():
                    # A crashed run is first brought to a clean stop. Then it may turn out that no
                    # step is left.
                    if crashed := before is not None and before.state == "training":
                        self._job = stopped_again(self._job, run, before, schedule, model, self._events)
                    elif before is not None and not self._auto and rebuild_at_end(run, self._job, schedule, self._events):
                        self._dismiss_trainers()
                        return None
                    if (self._auto or crashed) and (why := why_ended(run, self._job, schedule)) is not None:
                        self._dismiss_trainers()
                        return ending_before(run, why)
                    return self._resume(schedule, model, lock)
        with self._new_run(schedule, model) as made:
            if made.resumes:
                return self._resume(schedule, model, made.lock)
            return self._with_stores(made.run, made.run.manifest, made.start, schedule, made.local)

    def _dismiss_trainers(self) -> None:
        """Send the trainers that a scheduler started away, since there is nothing to train."""
        if self._meeting is not None:
            self._meeting.announce(NO_STEPS)

    def restore(self) -> Status:
        """Make a stopped run from a checkpoint; see `restored`."""
        schedule, model = self._look_at_job()
        with contextlib.ExitStack() as stack:
            self._engine = stack.enter_context(engine_of(self._job, self._start_process))
            made = stack.enter_context(self._new_run(schedule, model, goes_on=False))
            status = made.run.saved_status()
            keep_schedule(made.run, schedule, status.step)
            return status

    def _look_at_job(self) -> tuple[Schedule, DenseModel]:
        """Open the job's schedule, build its model, and check them before anything is changed.

        Raises:
            ForeloadError: The job, the schedule or the model is wrong.
        """
        schedule, job = open_schedule(self._job), self._job
        check_trainable(schedule, job)
        lanes = schedule.header.lanes
        if job.trainers > lanes:
            raise SettingError(
                f"--trainers: must be at most the schedule's lanes, {lanes}; got {job.trainers}; prepare with more --lanes"
            )
        metrics = {"--keep-best": job.keep_best, "--stop-early": None if job.stop_early is None else job.stop_early.metric}
        for flag, metric in metrics.items():
            if metric is not None and not schedule.header.evaluation_samples:
                # A run that continues a checkpoint has the --stop-early of that training unless it is given.
                without = "give --stop-early off" if flag == "--stop-early" else "leave it out"
                raise SettingError(
                    f"{flag}: needs evaluations, and schedule {schedule.path} has none; prepare it with --eval-fraction, or {without}"
                )
            if metric is not None:
                check_metric(flag, metric, schedule.header)
        return schedule, self._check_model(schedule)

    @contextlib.contextmanager
    def _new_run(self, schedule: Schedule, model: DenseModel, goes_on: bool = True) -> Iterator[_NewRun]:
        """Make the job's run, and hold its lock while entered.

        If the job names a checkpoint, the run is made from it, and `self._job` becomes a job that
        resumes the run. Errors are noted in the run's events.

        Args:
            goes_on: Whether the run is to be trained.
        """
        path, count, lanes = Path(self._job.run), self._job.store.local, schedule.header.lanes
        checkpoint = None if self._job.from_checkpoint is None else Checkpoint.open(self._job.from_checkpoint)
        check_free(path, self._job.overwrite)
        urls = () if count or self._job.store.engine else parse_urls(str(self._job.store))
        placement = Placement.spread(self._job.store.count, *self._job.code(self._job.store.count))
        made = new_manifest(self._job, schedule, tuple(url.plain for url in urls), count, code_of(self._job))
        manifest = replace(made, mixes_samples=mixes_samples(model.module))
        if checkpoint is not None:
            if checkpoint.place.resolve().is_relative_to(path.resolve()):
                raise CheckpointError(
                    f"--from: {checkpoint.place} lies in the folder of --run, which is created anew; "
                    "give --run another folder, or move the checkpoint; "
                    "a crashed run continues from it with --resume"
                )
            if goes_on and not self._job.accept_model:
                check_code(f"checkpoint {checkpoint.place}", checkpoint.contents.run, self._job, checkpoint.code_copy)
            manifest = restored_manifest(checkpoint, self._job, schedule, manifest, goes_on)
            with progress_bar(checkpoint.total_bytes, "B") as bar:
                check_restorable(checkpoint, self._job, model, bar.update)
        self._engine.check_room(self._server_bytes(schedule), trainer_bytes(self._job, schedule))
        if not count:
            # The servers must answer before anything is deleted.
            reach(urls, self._job.store_silence, self._job.patience.time)
            check_spares(self._job, manifest, urls, placement)
        self._engine.take()
        with locked(path) as lock:
            # The old run's rows are deleted while its folder still says where they are.
            delete_replaced(Run(path), urls, self._job.folder_moved)
            run = Run.create(path, manifest, placement, self._job.overwrite, lock)
            if self._job.store.engine:
                self._job = replace(self._job, store=Servers(None, self._engine.start_servers(self._job.store.engine)))
                manifest = with_named(manifest, placement, str(self._job.store))
                run.write_manifest(manifest)
            start = Status("training", schedule.header.first_step - 1, {str(lane): 0 for lane in range(lanes)}, term=1)
            self._events = EventLog(run.path, start.step, start.term)
            local = LocalStores(count, path / STORES) if count else None
            with self._events.failures():
                if checkpoint is not None:
                    note_code(self._events, f"checkpoint {checkpoint.place}", checkpoint.contents.run, manifest.code)
                    self._job = restore(self._job, run, checkpoint, start, local)
                yield _NewRun(run, start, local, lock, checkpoint is not None)

    def _server_bytes(self, schedule: Schedule) -> int:
        """Return about how much memory a store server takes for its rows; 0 if that is not known."""
        count = self._job.store.count
        return store_bytes(self._job, schedule, *self._job.code(count)) // count

    def _find_servers(self, run: Run, schedule: Schedule) -> int:
        """Have a resumed run use the servers that its engine has started for it, unless the call names others.

        Returns:
            How many of them have ended, and were replaced by empty ones.
        """
        manifest, placement = run.manifest, run.placement
        own = noted(manifest, placement)
        if manifest.local_stores is None and (self._job.store.engine or plain(self._job.store.urls) == tuple(filter(None, own))):
            found, ended = self._engine.find_servers(own, self._server_bytes(schedule))
            self._job = replace(self._job, store=Servers(None, tuple(filter(None, found))))
            return ended
        return 0

    def _check_model(self, schedule: Schedule) -> DenseModel:
        """Build and check the model and its optimizer before anything is started or deleted.

        Doubts about the model, and inputs that it ignores, are reported as warnings.

        Raises:
            ForeloadError: The model or its optimizer is wrong.
        """
        job = self._job
        # The model is only inspected, so it is built on the CPU and takes no trainer's device.
        model = DenseModel.build(replace(job, device="cpu"), schedule, twice=True)
        spec = model_spec(schedule.header.features, job.dim)
        ignored = ignored_inputs(model.module, spec)
        check_apart_later(model.module, spec)
        for said in doubts(job.model, model.module, spec):
            sys.stderr.write(f"foreload: warning: model {job.model}: {said}\n")
        if ignored:
            sys.stderr.write(
                f"foreload: warning: model {job.model}: ignores {', '.join(ignored)}: its logits do not depend on them\n"
            )
        return model

    def _resume(self, schedule: Schedule, model: DenseModel, lock: int | None) -> Ending:
        """Resume the job's run from its last clean stop. Raises as `train` does.

        Args:
            lock: The descriptor of the run's lock, which is held.
        """
        run = Run.open(self._job.run, lock)
        manifest, step = resumed(run, self._job, schedule)
        # The model's code may have changed since the run began.
        manifest = replace(manifest, mixes_samples=mixes_samples(model.module))
        if manifest.rates != run.manifest.rates:
            sys.stderr.write(f"{rates_text(manifest.rates)}\n")
        note_code(self._events, f"run {run.path}", run.manifest, manifest.code)
        self._job = replace(self._job, namespace=manifest.namespace)
        before = run.saved_status()
        start = replace(before, state="training", step=step, term=before.term + 1)
        if not manifest.local_stores:
            urls = parse_urls(str(self._job.store))
            # With parity, a server that was lost need not answer.
            if not run.placement.r:
                reach(urls, self._job.store_silence, self._job.patience.time)
            manifest = with_named(manifest, run.placement, str(self._job.store))
            check_spares(self._job, manifest, servers_of(run, str(self._job.store)), run.placement)
        return self._with_stores(run, manifest, start, schedule, open_stores(run, start))

    def _with_stores(self, run: Run, manifest: Manifest, start: Status, schedule: Schedule, local: LocalStores | None) -> Ending:
        """Start the local stores, if there are any, and train. `_end_stores` then ends them."""
        if local is not None:
            local.start()
        if isinstance(self._engine, LocalEngine):
            self._engine.stores = local
        with contextlib.ExitStack() as stack:
            stack.push(partial(self._end_stores, local, start))
            while (trained := self._attempt(run, manifest, start, schedule, local)) is None:
                # The next attempt has a higher term, which fences whatever the trainers of this
                # one may still write to the store.
                start = replace(start, term=start.term + 1)
            group, shards, ending = trained
            if group.kept:
                stop_at_end(self._job, group, shards, schedule, self._events)
            # From here on signals interrupt again, since the digest can be computed later. Until
            # here they were deferred: the status refers to rows that local servers have not saved.
            self._interrupts.defer_signals = False
            if self._job.digest and group.failure is None:
                try:
                    with Store.connect(asked(shards.urls), self._job.store_silence, run.placement.r) as store:
                        ending.summary["digest"] = stopped_run_at(run, store, group.status).digest()
                except ForeloadError as error:
                    ending = replace(ending, no_digest=error)
                else:
                    write_json(run.path / SUMMARY, ending.summary)
        self._report(run.path)
        if group.failure is not None:
            raise TrainerError(group.failure)
        return ending

    def _attempt(
        self, run: Run, manifest: Manifest, start: Status, schedule: Schedule, local: LocalStores | None
    ) -> tuple[TrainerGroup, StoreShards, Ending] | None:
        """Train. Returns None if training did not begin because of trainers of other hosts.

        These trainers are then refused, and the caller can try again.
        """
        try:
            return self._train(run, manifest, start, schedule, local)
        except GuestsRefused as refused:
            self._engine.refuse(refused.why, refused.said)
        # Between two attempts a signal may interrupt, also one that came during the last attempt.
        self._interrupts.heed()
        return None

    def _train(
        self, run: Run, manifest: Manifest, start: Status, schedule: Schedule, local: LocalStores | None
    ) -> tuple[TrainerGroup, StoreShards, Ending]:
        """Claim the store, wait until there is room for the trainers, and train.

        Raises:
            GuestsRefused: Training did not begin, and only trainers of other hosts are to blame.
            ForeloadError, KeyboardInterrupt: As `train` does.
        """
        urls = list(local.urls if local is not None else servers_of(run, str(self._job.store)))
        with claimed(self._job, run, manifest, start, urls), contextlib.ExitStack() as stack:
            if run.status is not None:
                # Write the term before any trainer owns lanes in it. If this call dies, the next
                # one then begins with a higher term.
                run.raise_term(start.term)
            events = self._events
            events.step, events.term = start.step, start.term
            # A group exists already if this is a further attempt of the same call.
            if self._group is None:
                events.note(
                    CallBegan(trainers=self._job.trainers, copies=self._job.replicas_held, resumed=bool(self._job.resume))
                )
            keep_schedule(run, schedule)
            self._profile.begin(run, start, urls)
            call = TrainingCall(
                replace(self._job, namespace=manifest.namespace),
                run,
                manifest,
                start,
                schedule,
                self._layouts,
                events,
                self._observer,
                self._interrupts,
                self._engine.machines,
                self._engine.guests,
                self._metrics,
                self._tracking,
            )
            shards = StoreShards(call, urls, local, self._engine)
            shards.memory = stack.enter_context(self._watched_memory(run, schedule, start, shards))
            self._engine.reserve_trainers(trainer_bytes(self._job, schedule))
            self._group = group = TrainerGroup(call, shards, self._engine)
            ending = group.train(self._meeting, self._spawned)
            if shards.memory is not None and ending.stopped and ending.signal_number is None and not ending.early:
                ending = replace(ending, full=shards.memory.why_stopped(ending.step))
            self._profile.leave(ending, group.status, shards.urls)
            return group, shards, ending

    @contextlib.contextmanager
    def _watched_memory(self, run: Run, schedule: Schedule, start: Status, shards: StoreShards) -> Iterator[StoreWatch]:
        """Watch the servers' memory while entered.

        Raises:
            StoreTooSmall: The memory will not suffice. It is raised before training begins.
        """
        job = replace(self._job, namespace=run.manifest.namespace)
        if run.manifest.local_stores is not None:
            warn_of_machine(job, schedule, run.placement)
        most = most_shards(job, shards, len(run.placement.live))
        with Store.connect(asked(shards.urls), job.store_silence, run.placement.r) as store:
            watch = StoreWatch(job, store, schedule, run.placement, self._layouts, start, most)
        watch.begin(shards.urls)
        try:
            yield watch
        finally:
            watch.close()

    def _end_stores(
        self, local: LocalStores | None, start: Status, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        """End the local stores, if there are any, at any end of a call. Signals are deferred.

        - The run has stopped: its status refers to the rows in the servers, so they are saved,
          whatever came after. Servers of lost shards that do not answer are killed. Servers that
          cannot save keep running, and an error is raised: the next command uses them as they are.
        - The run's folder keeps rows that the servers lack: the servers keep running.
        - More shards were lost than parity covers, and no earlier call saved rows: the rows that
          the other servers hold are saved, so that they can be inspected.
        - Any other end: the rows are discarded, so that --resume goes on from what was saved
          before. Servers that an earlier call left running keep running.

        Args:
            start: The status with which the call began.
            kind: The type of `error`; an exit stack passes it.
            error: The error with which the call ends, if it does.
        """
        self._interrupts.defer_signals = True
        run, stopped = Run(self._job.run), self._group is None or self._group.stopped or Run(self._job.run).keeps_lanes
        newest = None if stopped else run.newest_checkpoint(self._job.checkpoint, after=start.step)
        if newest is not None:
            sys.stderr.write(f"foreload: --resume goes on from checkpoint {newest}\n")
        if local is None:
            return
        if run.keeps_lanes:
            sys.stderr.write(
                f"foreload: the servers in {local.directory} keep running: the rows kept in the run's folder belong with theirs\n"
            )
        elif self._group is not None and self._group.stopped:
            local.stop(save=True, lost=self._group.status.lost)
        elif isinstance(error, ShardsLost) and not any(start.batches.values()):
            local.stop(save=True, lost=error.shards)
        else:
            local.discard()
