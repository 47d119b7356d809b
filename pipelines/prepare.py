"""`foreload prepare`: compile raw logs into a schedule.

Checks everything that can be checked first, then runs the pipeline on Beam.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foreload.base.errors import ForeloadError, SettingError
from foreload.base.files import write_json
from foreload.base.interrupts import Interrupts, came_of_interrupt, heeded_afterwards
from foreload.base.progress import Progress
from foreload.pipelines.compiler.other_slots import fewest_arrivals
from foreload.pipelines.errors import ScheduleError, disk_error
from foreload.pipelines.planning import work_folder
from foreload.pipelines.planning.data_summary import data_lines, data_summary
from foreload.pipelines.planning.options import PrepareOptions, parser, read
from foreload.pipelines.planning.plan import (
    BEGUN,
    EVALUATION,
    PROGRESS,
    TRAINING,
    Plan,
    make_plan,
)
from foreload.pipelines.planning.sizing import Shape, schedule_bytes
from foreload.pipelines.planning.work_folder import check_disk, estimate_rows, is_counted
from foreload.pipelines.samples import encoding_state
from foreload.pipelines.samples.column_counts import ColumnCounts
from foreload.pipelines.samples.convert import Rejected
from foreload.pipelines.samples.features import ENCODING_FOLDER, FeatureSpec
from foreload.pipelines.samples.pieces import held_out
from foreload.pipelines.schedule.at_work import at_work
from foreload.pipelines.schedule.format import (
    FAILED,
    HEADER,
    LOCK,
    MANIFEST,
    PROVENANCE,
    WORK,
)
from foreload.pipelines.schedule.reader import Schedule
from foreload.pipelines.sources.files import quiet_import

__all__ = ["main", "parser", "prepare", "run"]

if TYPE_CHECKING:
    from foreload.pipelines.beam.stages import Wrap


def run(arguments: Sequence[str] | None = None, wrap: Wrap = lambda stage: stage) -> dict[str, Any]:
    """Prepare a schedule from a command line.

    Args:
        arguments: the command line without the program's name. If None, that of this process.
        wrap: applied to every DoFn of the pipeline. Tests use it to disturb them.

    Returns:
        The summary that is also printed.

    Raises:
        PipelineError: the input or the schedule is wrong.
        SettingError: an option is wrong.
    """
    return prepare(*read(sys.argv[1:] if arguments is None else arguments), wrap)


def prepare(options: PrepareOptions, flags: list[str], wrap: Wrap = lambda stage: stage) -> dict[str, Any]:
    """Prepare a schedule from options and Beam's flags, as `run` does."""
    started = time.monotonic()
    with heeded_afterwards(), quiet_import():
        from foreload.pipelines.beam import pipeline as beam_run
        from foreload.pipelines.beam.again import compile_again
    beam_run.check_flags(flags)
    if options.again and not beam_run.runs_locally(flags):
        raise SettingError(
            "--runner: does not apply to more epochs of a schedule's own samples, which this process compiles; leave it out"
        )
    parent = None if options.after is None else Schedule(options.after)
    plan, tasks = make_plan(options, parent)
    with _output(options) as held:
        try:
            splits = {which: [task.split for task in tasks if task.which == which] for which in plan.sets}
            rows = {which: estimate_rows(of_set) for which, of_set in splits.items()}
            if options.again and parent is not None:
                rows = {TRAINING: parent.header.training_samples, EVALUATION: parent.header.evaluation_samples}
            shape = _shape(options, plan, rows)
            needed_bytes = schedule_bytes(shape, plan.spec)
            check_disk(options.out, needed_bytes)
            work_folder.make(plan)
            if parent is not None:
                expected = parent.header.settings.get("encoding")
                encoding_state.copy(parent.path / ENCODING_FOLDER, plan.encoding, expected)
            counted = not plan.max_rejects and all(map(is_counted, chain(*splits.values())))
            begun = plan.work / BEGUN
            if beam_run.runs_locally(flags):
                begun.touch()
            with Progress(begun, plan.pieces, plan.work / PROGRESS, sum(rows.values()), plan.piece_rows):
                if options.again and parent is not None:
                    compile_again(plan, parent)
                else:
                    beam_run.run_pipeline(plan, tasks, rows, counted, flags, wrap)
            plan.raise_failure()
            rejected, columns = plan.load("rejected", Rejected), plan.load("columns", dict[str, ColumnCounts])
        except BaseException as error:
            error = disk_error(error, options.out) or error
            _leave_work(plan, held, error)
            raise error
        _leave_work(plan, held)
    summary = _summary(options.out, plan.spec, rejected, columns, time.monotonic() - started)
    summary["estimated_bytes"] = needed_bytes
    write_json(options.out / PROVENANCE, _provenance(options, flags, summary))
    if options.json is not None:
        try:
            write_json(options.json, summary)
        except OSError as error:
            raise SettingError(f"--json: cannot write {options.json}: {error.strerror}") from error
    print("\n".join((_text(summary), *data_lines(summary, plan.spec))))
    for line in summary["warnings"]:
        sys.stderr.write(f"foreload: warning: {line}\n")
    return summary


def main() -> int:
    """Run `python -m foreload.pipelines.prepare`.

    Returns:
        The exit status: 0, or 2 after one line that says what is wrong, or 128 + the number of the
        signal that stopped it.
    """
    try:
        with Interrupts() as interrupts:
            run()
    except ForeloadError as error:
        print(f"foreload: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("foreload: stopped", file=sys.stderr)
        return 128 + interrupts.received[0]
    return 0


def _shape(options: PrepareOptions, plan: Plan, rows: Mapping[str, int]) -> Shape:
    """Return the facts on which the schedule's size depends.

    Args:
        rows: the estimated number of rows of each of the plan's sets.
    """
    training = rows[TRAINING] - held_out(rows[TRAINING], options.eval_fraction)
    steps = -(-training // options.batch_size)
    passes = 0 if options.eval_every is None else options.epochs * (max(steps - 1, 0) // options.eval_every)
    evaluated_within = passes * (sum(rows.values()) - training)
    return Shape(
        sum(rows.values()), options.epochs, options.shuffle_seed is not None, plan.spec.order_by is not None, evaluated_within
    )


@contextmanager
def _output(options: PrepareOptions) -> Iterator[ExitStack]:
    """Create or clear the output folder, with an empty work folder in it.

    Its lock is held until the end or `close`, so that one `prepare` at a time writes there.
    """
    out = options.out
    if out.exists() and not out.is_dir():
        raise ScheduleError(f"--out {out}: is a file; name a folder")
    if out.is_dir() and any(out.iterdir()):
        ours = any((out / name).exists() for name in (HEADER, MANIFEST, FAILED, WORK))
        if not ours:
            raise ScheduleError(f"--out {out}: is a folder with other files in it; give one that is empty or does not exist yet")
        if (out / MANIFEST).exists() and not options.overwrite:
            raise ScheduleError(f"--out {out}: already holds a schedule; add --overwrite to replace it, or choose another folder")
    with ExitStack() as held:
        try:
            (out / WORK).mkdir(parents=True, exist_ok=True)
            held.enter_context(at_work(out / WORK / LOCK))
        except BlockingIOError:
            raise ScheduleError(f"--out {out}: another `foreload prepare` is writing there; wait for it, or stop it") from None
        except OSError as error:
            raise ScheduleError(f"--out {out}: cannot be written ({error.strerror}); choose another folder") from error
        # The manifest goes first, so that a half-cleared folder is never taken for a schedule.
        (out / MANIFEST).unlink(missing_ok=True)
        work_folder.clear(out)
        for path in [path for path in sorted(out.iterdir()) if path.name != WORK]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        yield held


def _leave_work(plan: Plan, held: ExitStack, error: BaseException | None = None) -> None:
    """End the work in the output folder, and let other calls have it.

    If failed.json cannot be written, the work folder stays, empty. It shows the next call that the
    output folder holds what `prepare` has written, and is not in use for something else.

    Args:
        held: the folder's lock, as `_output` yields it.
        error: why the schedule is not complete. None if it is.
    """
    out = plan.out
    if error is not None:
        (out / MANIFEST).unlink(missing_ok=True)
    work_folder.give_rejects(plan)
    # On a full disk this makes room for failed.json.
    work_folder.clear(out)
    is_marked = error is None or _note_failure(out, error)
    (out / WORK / LOCK).unlink(missing_ok=True)
    held.close()
    # Another call may work in that folder already.
    with suppress(OSError):
        if is_marked:
            (out / WORK).rmdir()


def _note_failure(out: Path, error: BaseException) -> bool:
    """Write failed.json for a trainer that follows, unless the compilation has done so.

    A stop overrides the reason that the compilation wrote.

    Returns:
        Whether the file is there. The disk may be too full for it.
    """
    stopped = came_of_interrupt(error)
    if stopped or not (out / FAILED).exists():
        message = "it was stopped before it was complete" if stopped else str(error) or type(error).__name__
        with suppress(OSError):
            write_json(out / FAILED, {"error": message})
    return (out / FAILED).exists()


def _summary(
    out: Path, spec: FeatureSpec, rejected: Rejected, columns: dict[str, ColumnCounts], seconds: float
) -> dict[str, Any]:
    """Return what --json writes."""
    schedule = Schedule(out)
    counts, manifest = schedule.manifest["counts"], schedule.manifest
    used, arrivals = counts["rows_used"], counts["arrivals"]
    return {
        "schedule": str(out),
        "checksum": schedule.checksum,
        "training_samples": schedule.header.training_samples,
        "evaluation_samples": schedule.header.evaluation_samples,
        **({"evaluation_sets": dict(schedule.header.evaluation_sets)} if schedule.header.evaluation_sets else {}),
        "rejected": rejected.count,
        "epochs": schedule.header.epochs,
        "training_steps": counts["training_steps"],
        "lanes": schedule.header.lanes,
        "slots": list(schedule.slots),
        "minimum_slots": manifest["minimum_slots"],
        "rows_used": used,
        "arrivals": arrivals,
        "initial": counts["initial"],
        "fetched": counts["stored"],
        "cache_hit_rate": 1 - arrivals / used if used else 0.0,
        "lookahead": manifest["lookahead"],
        "fewest_arrivals": arrivals if manifest["lookahead"]["exact"] else fewest_arrivals(schedule),
        "bytes": sum(path.stat().st_size for path in out.rglob("*") if path.is_file()),
        "seconds": seconds,
        **data_summary(schedule, spec, rejected.causes, columns),
    }


def _provenance(options: PrepareOptions, flags: list[str], summary: dict[str, Any]) -> dict[str, Any]:
    """Describe how the schedule was made. `folder` is the directory that relative paths start from."""
    entry = {"options": options.to_dict(), "flags": flags, "folder": os.getcwd(), "beam": metadata.version("apache-beam")}
    return entry | {"seconds": summary["seconds"], "finished": time.time()}


def _lookahead_lines(summary: dict[str, Any]) -> list[str]:
    """Describe how far from exact a schedule is that looked ahead over a window."""
    arrivals, fewest, cover = summary["arrivals"], summary["fewest_arrivals"], summary["lookahead"]["cover"]
    if summary["lookahead"]["exact"]:
        return []
    more = "" if fewest is None else f"{arrivals / fewest:.3f} x the fewest possible arrivals, {fewest:,}; "
    return [
        f"lookahead     {more}the window covered {cover:.2f} x slots / arrivals per step, 3 or more is exact: widen --window, or leave it out"
    ]


def _text(summary: dict[str, Any]) -> str:
    rejected = f" ({summary['rejected']:,} malformed left out)" if summary["rejected"] else ""
    evaluation = f", {summary['evaluation_samples']:,} for evaluation" if summary["evaluation_samples"] else ""
    if sets := summary.get("evaluation_sets"):
        evaluation += f": {', '.join(f'{name} {samples:,}' for name, samples in sets.items())}"
    return "\n".join(
        (
            f"schedule      {summary['schedule']}  {summary['bytes'] / 1e6:,.1f} MB, in {summary['seconds']:.1f} s",
            f"samples       {summary['training_samples']:,}{evaluation}{rejected}",
            f"steps         {summary['training_steps']:,} in {summary['epochs']} epoch(s)",
            *(_row_lines(summary) if summary["rows_used"] else ()),
        )
    )


def _row_lines(summary: dict[str, Any]) -> list[str]:
    return [
        f"slots         {max(summary['slots']):,} a lane, {summary['lanes']} lane(s); at least {max(summary['minimum_slots']):,} are needed",
        f"rows used     {summary['rows_used']:,}, of which {summary['arrivals']:,} arrive: {summary['initial']:,} new, "
        f"{summary['fetched']:,} fetched; {summary['cache_hit_rate']:.1%} cache hits",
        *_lookahead_lines(summary),
    ]


if __name__ == "__main__":
    sys.exit(main())
