"""Check that `foreload train` can train a run as asked, as a new run or a resumed one."""

from __future__ import annotations

from dataclasses import replace

from foreload.base.settings import names_by_resume, settings_of
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.errors import RunRefused, after_step
from foreload.trainer.job.job import TrainJob
from foreload.trainer.job.job_values import masked
from foreload.trainer.run.directory import MANIFEST, Run
from foreload.trainer.run.manifest import Manifest, Stage, State, remembered_folder
from foreload.trainer.run.model_code import check_code, code_of
from foreload.trainer.run.servers import store_setting


def check_trainable(schedule: Schedule, job: TrainJob) -> None:
    """Check that a schedule can be trained.

    Raises:
        RunRefused: the schedule has evaluation steps only, or it continues a run and the call does
            not resume that run.
    """
    header = schedule.header
    if not header.training_samples:
        raise RunRefused(
            f"schedule {schedule.path}: has evaluation steps only; evaluate a run on it: foreload evaluate RUN {schedule.path}"
        )
    # When the checkpoint is restored, it is checked whether the schedule continues it.
    if job.resume or job.from_checkpoint or header.parent is None:
        return
    run = Run(job.run)
    last = run.manifest.stages[-1] if (run.path / MANIFEST).exists() else None
    if last is not None and last.checksum == header.parent:
        raise RunRefused(
            f"schedule {schedule.path}: continues run {job.run}, which was trained on {last.path}; give --resume to go on with it"
        )
    parent = schedule.made_with("after") or "the schedule that it was prepared after"
    raise RunRefused(
        f"schedule {schedule.path}: continues the run that was trained on {parent}, not a new one; give that run's folder with --run, "
        "and --resume"
    )


def resumed(run: Run, job: TrainJob, schedule: Schedule) -> tuple[Manifest, int]:
    """Return the manifest of a resumed run, and the last step already trained.

    The schedule must be the one on which the run stopped, or one prepared --after it.

    Raises:
        RunRefused: the run cannot be resumed in this way.
        RunError: as in `Run.saved_status`.
        ModelError: the code of its model differs, and the job does not accept that.
    """
    check_place(run, job)
    status = run.saved_status()
    check_code_of_run(run, job)
    manifest, step = continued(f"run {run.path}", run.manifest, status.state, status.step, job, schedule)
    manifest = manifest.with_code(code_of(job), step + 1)
    remembered = {"checkpoint": remembered_folder(job), "stop_early": job.to_dict()["stop_early"]}
    return replace(manifest, job=manifest.job | remembered), step


def check_place(run: Run, job: TrainJob) -> None:
    """Raise RunRefused if the job names other store shards or another parity than the run has."""
    manifest, placement = run.manifest, run.placement
    there = len(placement.live)
    if (job.store.local is None) != (manifest.local_stores is None) or job.store.count != there:
        was = (
            "the servers that the run has, in the order of their numbers"
            if placement.version
            else "what the run was started with"
        )
        raise RunRefused(f"--store: must be {was}, {store_setting(manifest, placement)}; got {masked(str(job.store))}")
    if job.parity is not None and job.code(there) != (placement.k, placement.r):
        was = f"{placement.k}+{placement.r}" if placement.r else "off"
        raise RunRefused(f"--parity: must be what the run was started with, {was}; got {job.parity}; leave it out")


def check_code_of_run(run: Run, job: TrainJob) -> None:
    """Raise ModelError if the code of a run's model differs from the recorded code.

    The job may accept other code.
    """
    if not job.accept_model:
        check_code(f"run {run.path}", run.manifest, job, str(run.code_copy(run.manifest)))


def continued(
    what: str, manifest: Manifest, state: State, step: int, job: TrainJob, schedule: Schedule, goes_on: bool = True
) -> tuple[Manifest, int]:
    """Return the manifest of a continued run, and the last step already trained, as `resumed` does.

    Args:
        what: names the run or checkpoint in messages.
        manifest: what the run is.
        state: the state that the run stopped in.
        step: the last step that it trained.
        goes_on: whether the run must have steps left to train.

    Raises:
        RunRefused: the run cannot be continued in this way.
    """
    # Settings that the model depends on must be those that the run was started with.
    before = manifest.training_job
    for name, setting in settings_of(TrainJob).items():
        of_numerics = setting.resume == "numerics"
        if setting.resume in ("free", "rates") or not setting.stated or (of_numerics and job.accept_numerics):
            continue
        if getattr(before, name) != getattr(job, name):
            was, now = before.to_dict()[name], job.to_dict()[name]
            remedy = "leave it out" + (", or add --accept-numerics" if of_numerics else "")
            raise RunRefused(f"{setting.flag}: must be what the run was started with, {was!r}; got {now!r}; {remedy}")
    if job.accept_numerics:
        manifest = replace(
            manifest, job=manifest.job | {name: getattr(job, name) for name in names_by_resume(TrainJob, "numerics")}
        )
    if schedule.header.lanes != manifest.lanes:
        raise RunRefused(
            f"schedule {schedule.path}: has {schedule.header.lanes} lanes, the run {manifest.lanes}; prepare it with --after"
        )
    last, stage = manifest.stages[-1], Stage.of(schedule)
    # Either the schedule is the one that the run stopped on, or it continues that one.
    if stage.identity == last.identity:
        if goes_on and (why := why_at_end(manifest, state, step, job, schedule)) is not None:
            raise RunRefused(f"{what}: {why}")
        # While the schedule is being prepared, the trainers check this, because they wait for its
        # segments.
        if schedule.complete:
            check_same(last, schedule)
        stage = replace(stage, segments=last.segments, prefix=last.prefix)
        watched = manifest.watched
        if watched is not None and (job.stop_early is None or job.stop_early.metric != watched.metric):
            watched = None
        return replace(manifest.with_rates(job, step + 1), stages=(*manifest.stages[:-1], stage), watched=watched), step
    if stage.path == last.path:
        raise RunRefused(
            f"schedule {schedule.path}: is not the one that the run was trained on: it was prepared in its place later; prepare the old one "
            "again, with the same data and options, or give one that was prepared --after it"
        )
    if schedule.header.parent is None or schedule.header.parent != last.checksum:
        raise RunRefused(
            f"schedule {schedule.path}: does not continue {last.path}, which the run was trained on; prepare it with --after that"
        )
    if state != "ended":
        early = manifest.watched is not None and manifest.watched.ends(before.stop_early)
        how = ", with --resume --stop-early off, since it was stopped early" if early else ""
        raise RunRefused(f"{what}: stopped {after_step(step)}, before the end of {last.path}; go on with that one first{how}")
    # The evaluation data of the next schedule may differ, so results so far do not count.
    going_on = replace(manifest.with_rates(job, stage.first_step), stages=(*manifest.stages, stage), watched=None)
    return going_on, stage.first_step - 1


def why_ended(run: Run, job: TrainJob, schedule: Schedule) -> str | None:
    """Return `why_at_end` of a stopped run.

    Raises:
        RunRefused: the job asks for a training that the run cannot be continued with.
    """
    status = run.saved_status()
    continued(f"run {run.path}", run.manifest, status.state, status.step, job, schedule, goes_on=False)
    return why_at_end(run.manifest, status.state, status.step, job, schedule)


def why_at_end(manifest: Manifest, state: State, step: int, job: TrainJob, schedule: Schedule) -> str | None:
    """Explain why a run has no steps of a job's schedule left to train, and what to do.

    Returns:
        The explanation, or None if steps are left or the schedule is not the run's last one.
    """
    if schedule.identity != manifest.stages[-1].identity:
        return None
    if state == "ended":
        return f"is at the end of {schedule.path} already; prepare further data with `foreload prepare --after`, and give that schedule"
    if manifest.watched is not None and state == "stopped" and manifest.watched.ends(job.stop_early):
        return f"was stopped early {after_step(step)}: {manifest.watched.why()}; to go on, give --stop-early with more patience, or --stop-early off"
    return None


def check_same(stage: Stage, schedule: Schedule) -> None:
    """Raise RunRefused if the segments of a schedule differ from those that a run was trained on.

    Segments that are not published yet are waited for.
    """
    if stage.identity == schedule.identity and stage.segments and schedule.prefix(stage.segments) != stage.prefix:
        raise RunRefused(
            f"schedule {schedule.path}: was prepared anew, and its first {stage.segments} segments are not those that the run was trained on; "
            "prepare it from the same data, with the same options"
        )
