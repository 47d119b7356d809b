"""`foreload prepare`: from raw logs to a schedule. Checks everything that can be checked first, then runs the pipeline on Beam."""

from __future__ import annotations

import dataclasses
import fcntl
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions, StandardOptions
from apache_beam.runners.portability.fn_api_runner import FnApiRunner

from pipelines import encoding_state
from pipelines import options as prepare_options
from pipelines.beam_pipeline import PROGRESS, add_schedule
from pipelines.beam_read import ReadTask, plan_reading
from pipelines.beam_stages import FOLDERS, WORK, Plan, Wrap
from pipelines.compile import CompileSettings
from pipelines.disk import Shape, check_disk, estimate_bytes, estimate_rows
from pipelines.errors import PipelineError, ScheduleError, SourceError
from pipelines.features import FeatureSpec
from pipelines.options import Options, parser
from pipelines.progress import Progress
from pipelines.schedule import FAILED, HEADER, MANIFEST, Schedule, write_json

__all__ = ["main", "parser", "run"]

PROVENANCE = "provenance.json"
"""How the schedule came to be: the one file of it that is not a function of the data and the settings."""

_LOCK = "lock"
_LOCAL_RUNNERS = ("", "direct", "directrunner", "fnapirunner")


@dataclass(frozen=True, slots=True)
class _Job:
    options: Options
    flags: list[str]  # Beam's
    plan: Plan
    tasks: list[ReadTask]


def run(arguments: Sequence[str] | None = None, wrap: Wrap = lambda stage: stage) -> dict[str, Any]:
    """Prepare a schedule; returns the summary that is also printed. Raises PipelineError.

    arguments: the command line, without the program's name. wrap: applied to every DoFn of the pipeline (tests disturb them).
    """
    started = time.monotonic()
    options, flags = prepare_options.read(sys.argv[1:] if arguments is None else arguments)
    parent = None if options.after is None else Schedule(options.after)
    job = _plan(options, flags, parent)
    with _output(options) as lock:
        try:
            rows = estimate_rows([task.split for task in job.tasks])
            shape = Shape(rows, options.epochs, options.shuffle_seed is not None, job.plan.spec.order_by is not None)
            needed_bytes = estimate_bytes(shape, job.plan.spec)
            check_disk(options.out, needed_bytes)
            for folder in FOLDERS:
                (job.plan.work / folder).mkdir()
            if parent is not None:
                expected = parent.header.settings.get("encoding")
                encoding_state.copy(parent.path / encoding_state.FOLDER, job.plan.encoding, expected)
            with Progress(job.plan.pieces, job.plan.work / PROGRESS, rows, job.plan.piece_rows):
                _run_pipeline(job, wrap)
            job.plan.raise_failure()
            if not (options.out / MANIFEST).exists():
                raise ScheduleError(
                    f"--out {options.out}: the workers wrote no schedule there; it must be on a disk that they share"
                )
            rejected = job.plan.load("rejected")
        except BaseException as error:
            _note_failure(options.out, error)
            raise
        finally:
            lock.close()
            shutil.rmtree(job.plan.work, ignore_errors=True)
    summary = _summary(options.out, rejected, time.monotonic() - started)
    summary["estimated_bytes"] = needed_bytes
    write_json(options.out / PROVENANCE, _provenance(options, flags, summary))
    if options.json is not None:
        write_json(options.json, summary)
    print(_text(summary))
    return summary


def main() -> int:
    """`python -m pipelines.prepare`: 0, or 2 after one line that says what is wrong."""
    try:
        run()
    except PipelineError as error:
        print(f"foreload: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("foreload: stopped", file=sys.stderr)
        return 130
    return 0


def _plan(options: Options, flags: list[str], parent: Schedule | None) -> _Job:
    """Look at the feature file, the parent and the sources' names. Raises PipelineError."""
    _check_flags(flags)
    spec = prepare_options.feature_spec(options)
    if parent is not None:
        spec = _continued(parent, spec, options)
    row_bytes = prepare_options.row_bytes(options, spec)
    slots = options.slots
    if slots is None:
        slots = prepare_options.slots_of_size(options.memory_bytes, row_bytes)
        if all(table.rows is not None for table in spec.tables):
            slots = min(slots, sum(spec.table_rows))
    settings = CompileSettings(
        features=spec if parent is None else parent.header.features,
        batch_size=options.batch_size,
        lanes=options.lanes,
        slots=slots,
        epochs=options.epochs,
        shuffle_seed=options.shuffle_seed,
        segment_bytes=options.segment_bytes,
        parent=options.after,
        settings={
            "slots": options.slots,
            "memory_bytes": options.memory_bytes if options.slots is None else None,
            "row_bytes": row_bytes,
            "segment_bytes": options.segment_bytes,
            "eval_fraction": options.eval_fraction,
            "eval_source": bool(options.eval_sources),
        },
    )
    tasks, piece_rows = plan_reading(options, spec)
    for which, flag, wanted in (("training", "SOURCE", True), ("evaluation", "--eval-source", bool(options.eval_sources))):
        if wanted and not any(task.which == which for task in tasks):
            raise SourceError(f"{flag}: has no records; give files that hold some")
    plan = Plan(
        out=options.out.absolute(),
        spec=spec,
        settings=settings,
        evaluation_fraction=options.eval_fraction,
        max_rejects=options.max_rejects,
        piece_rows=piece_rows,
        counted=parent is None and encoding_state.needs_state(spec),
        first_number=0 if parent is None else parent.header.first_number + parent.header.training_samples,
    )
    return _Job(options, flags, plan, tasks)


def _continued(parent: Schedule, spec: FeatureSpec, options: Options) -> FeatureSpec:
    """The features as read now, with the parent's vocabularies. Raises ScheduleError where the parent has other ones."""
    if parent.header.lanes != options.lanes:
        raise ScheduleError(
            f"--lanes: must be the parent's {parent.header.lanes}, is {options.lanes}; lanes cannot change along --after"
        )
    theirs = parent.header.features
    sizes = {k: rows - 2 for k, rows in enumerate(theirs.table_rows) if k in theirs.vocabulary_tables}
    # How files are laid out, and in what order they are read, may change from one schedule to the next.
    layout = {name: getattr(spec, name) for name in ("text", "order_by", "order_type")}
    if len(spec.tables) != len(theirs.tables) or dataclasses.replace(theirs, **layout) != spec.with_vocabulary(sizes):
        raise ScheduleError(f"--features: must be those of {options.after}; prepare with the same, or start anew without --after")
    return spec.with_vocabulary(sizes)


def _check_flags(flags: list[str]) -> None:
    """Refuse what neither this program nor Beam knows, where Beam would drop it without a word."""
    if not _runs_locally(flags):
        return  # a job service has flags of its own
    known = prepare_options.beam_flags()
    for flag in flags:
        if flag.startswith("-") and flag.partition("=")[0] not in known:
            raise PipelineError(f"{flag}: is not an option; see `foreload prepare --help` for those there are")


def _runs_locally(flags: list[str]) -> bool:
    return (PipelineOptions(flags).view_as(StandardOptions).runner or "").lower().rpartition(".")[2] in _LOCAL_RUNNERS


def _run_pipeline(job: _Job, wrap: Wrap) -> None:
    # Beam's own default first tries to download another runner, so name the one in this process.
    runner = FnApiRunner() if _runs_locally(job.flags) else None
    pipeline = beam.Pipeline(runner, PipelineOptions(job.flags))
    add_schedule(pipeline, job.plan, job.tasks, wrap)
    pipeline.run().wait_until_finish()


@contextmanager
def _output(options: Options) -> Iterator[IO[str]]:
    """Make or clear the folder, with an empty work folder in it, and hold its lock: one prepare at a time."""
    out = options.out
    if out.exists() and not out.is_dir():
        raise ScheduleError(f"--out {out}: is a file; name a folder")
    if out.is_dir() and any(out.iterdir()):
        ours = any((out / name).exists() for name in (HEADER, MANIFEST, FAILED, WORK))
        if not ours:
            raise ScheduleError(f"--out {out}: is a folder with other things in it; name one that is empty or not there yet")
        if (out / MANIFEST).exists() and not options.overwrite:
            raise ScheduleError(f"--out {out}: holds a schedule already; add --overwrite to replace it, or choose another folder")
    try:
        (out / WORK).mkdir(parents=True, exist_ok=True)
        lock = (out / WORK / _LOCK).open("w", encoding="utf-8")
    except OSError as error:
        raise ScheduleError(f"--out {out}: cannot be written ({error.strerror}); choose another folder") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ScheduleError(f"--out {out}: another `foreload prepare` is writing there; wait for it, or stop it") from None
        (out / MANIFEST).unlink(missing_ok=True)  # first, so that what is left is never taken for whole
        for path in sorted(out.iterdir()):
            if path.name == WORK:
                for entry in [p for p in path.iterdir() if p.name != _LOCK]:
                    shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
            else:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        yield lock


def _note_failure(out: Path, error: BaseException) -> None:
    """Leave word for a trainer that follows, unless the compilation has done so."""
    (out / MANIFEST).unlink(missing_ok=True)
    if not (out / FAILED).exists():
        with suppress(OSError):  # the disk may be full for this too; without schedule.json nobody takes the folder for whole
            write_json(out / FAILED, {"error": str(error) or type(error).__name__})


def _summary(out: Path, rejected: int, seconds: float) -> dict[str, Any]:
    schedule = Schedule(out)
    counts, manifest = schedule.manifest["counts"], schedule.manifest
    used, arrivals = counts["rows_used"], counts["arrivals"]
    return {
        "schedule": str(out),
        "checksum": schedule.checksum,
        "training_samples": schedule.header.training_samples,
        "evaluation_samples": schedule.header.evaluation_samples,
        "rejected": rejected,
        "epochs": schedule.header.epochs,
        "training_steps": counts["training_steps"],
        "lanes": schedule.header.lanes,
        "slots": list(schedule.header.slots),
        "minimum_slots": manifest["minimum_slots"],
        "rows_used": used,
        "arrivals": arrivals,
        "initial": counts["initial"],
        "fetched": counts["stored"],
        "cache_hit_rate": 1 - arrivals / used if used else 0.0,
        "lookahead": manifest["lookahead"],
        "bytes": sum(path.stat().st_size for path in out.rglob("*") if path.is_file()),
        "seconds": seconds,
    }


def _provenance(options: Options, flags: list[str], summary: dict[str, Any]) -> dict[str, Any]:
    values = {name: getattr(options, name) for name in Options.__slots__}
    named = {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}
    runner = PipelineOptions(flags).view_as(StandardOptions).runner or "in process"
    return {"options": named, "runner": runner, "beam": beam.__version__, "seconds": summary["seconds"], "finished": time.time()}


def _text(summary: dict[str, Any]) -> str:
    rejected = f" ({summary['rejected']:,} malformed left out)" if summary["rejected"] else ""
    evaluation = f", {summary['evaluation_samples']:,} for evaluation" if summary["evaluation_samples"] else ""
    return "\n".join(
        (
            f"schedule      {summary['schedule']}  {summary['bytes'] / 1e6:,.1f} MB, in {summary['seconds']:.1f} s",
            f"samples       {summary['training_samples']:,}{evaluation}{rejected}",
            f"steps         {summary['training_steps']:,} in {summary['epochs']} epoch(s)",
            f"slots         {max(summary['slots']):,} a lane, {summary['lanes']} lane(s); at least {max(summary['minimum_slots']):,} are needed",
            f"rows used     {summary['rows_used']:,}, of which {summary['arrivals']:,} arrive: {summary['initial']:,} new, "
            f"{summary['fetched']:,} fetched; {summary['cache_hit_rate']:.1%} cache hits",
        )
    )


if __name__ == "__main__":
    sys.exit(main())
