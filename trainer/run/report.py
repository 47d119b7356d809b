"""Report a training to its user.

The reports are metrics.jsonl, which earlier calls may have begun, TensorBoard scalars, progress on
stderr, and summary.json.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

from foreload.base import json_log
from foreload.base.codec import parse_json, to_stored
from foreload.base.files import is_full, write_json
from foreload.base.progress import Display, ProgressLine
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.compute.reports import (
    SUMMED,
    EvaluationReport,
    StepReport,
    Totals,
    merged,
    metric_lines,
    moved_rows,
    without_calibration,
)
from foreload.trainer.run.directory import METRICS, SUMMARY, TENSORBOARD
from foreload.trainer.run.tracking import Tracking

_TAIL_BYTES = 1 << 16  # the end of the file that is searched for the last step
# The beginnings of a step's line and of an evaluation's line.
_NUMBER, _EVALUATION = re.compile(rb'\{"kind": "step", "step": (\d+),'), b'{"kind": "evaluation", "step": %d,'


def evaluations_reported(path: Path, step: int) -> set[str]:
    """Return the evaluation records of metrics.jsonl for `step` that no later rollback discarded.

    An incomplete last line, left by a killed writer, is cut off, so that the next record starts a
    new line.

    Args:
        path: metrics.jsonl.
        step: the training step before the evaluation.

    Returns:
        The lines, each with its newline.
    """
    lines: set[str] = set()
    last, whole = -1, 0
    if not path.exists():
        return lines
    with open(path, "rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                os.truncate(path, whole)
                break
            whole += len(line)
            number = _NUMBER.match(line)
            if number is not None:
                before, last = last, int(number[1])
                # A step number that does not rise means a rollback. If training then repeats
                # `step`, the evaluations found so far no longer count.
                if last <= min(before, step):
                    lines.clear()
            elif line.startswith(_EVALUATION % step):
                lines.add(line.decode())
    return lines


def reported_step(path: Path) -> int | None:
    """Return the last training step that metrics.jsonl reports, or None if there is none."""
    try:
        with open(path, "rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - _TAIL_BYTES, 0))
            lines = file.read().split(b"\n")
    except OSError:
        return None
    for line in reversed(lines):
        with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError):
            entry = parse_json(line)
            # A checkpoint's line stands long after its step, so only steps count.
            if entry["kind"] == "step":
                return int(entry["step"])
    return None


# The time between two lines if stderr is not a terminal, and the longest time that a line covers.
LINE_SECONDS = 60.0
TENSORBOARD_STEPS = 50  # steps over which a TensorBoard point is the mean
_FLUSH_SECONDS = 0.5
_METRICS = ("log_loss", "auc", "normalized_entropy")
# Metrics that only some evaluations have.
_FURTHER_METRICS = ("predicted_over_observed", "grouped_auc", "rmse", "mae", "loss", "labels")


@dataclass(slots=True)
class _Sums:
    """Sums over lines of metrics.jsonl.

    Attributes:
        loss: the sum of each step's loss times its samples.
        of: column -> the sum of the figure; the columns are those that `Totals` has.
    """

    steps: int = 0
    loss: float = 0.0
    of: dict[str, float] = field(default_factory=lambda: dict.fromkeys((figure.column for figure in SUMMED), 0))

    def add(self, line: Mapping[str, Any]) -> None:
        """Add a step."""
        self.steps += 1
        self.loss += line["loss"] * line["samples"]
        for column in self.of:
            self.of[column] += line[column]

    @property
    def mean_loss(self) -> float:
        """The mean loss over the samples, or nan if there are none."""
        return self.loss / self.of["samples"] if self.of["samples"] else math.nan

    @property
    def hit_rate(self) -> float:
        """The cache hit rate, 1 - arrivals / rows used, or 1 if no row was used."""
        return 1 - self.of["rows_arrived"] / self.of["rows_used"] if self.of["rows_used"] else 1.0

    def scalars(self) -> dict[str, float]:
        """Return the scalars for TensorBoard.

        The loss is a mean over the samples, the rate over the time, and the hit rate over the rows
        used. All others are means over the steps.
        """
        means = {column: value / self.steps for column, value in self.of.items() if column != "samples"}
        return {
            "train/loss": self.mean_loss,
            "train/samples_per_second": 1000 * self.of["samples"] / self.of["ms"] if self.of["ms"] else 0.0,
            "cache/hit_rate": self.hit_rate,
            **{f"{'cache' if column.startswith('rows_') else 'time'}/{column}": mean for column, mean in means.items()},
        }


@dataclass(frozen=True, slots=True)
class LastCheckpoint:
    """The checkpoint that was saved last.

    Attributes:
        at: when it was saved, in seconds since 1970.
        bytes: the size of its own files.
        stalled: for how many seconds training stood still for it.
    """

    step: int
    at: float
    bytes: int
    stalled: float


class RunReport:
    """Merges the trainers' reports and shows them to the user.

    One thread of the coordinator uses it.

    Args:
        run: the run's folder.
        totals: the sums over earlier calls; this object adds to them.
        first_step: the first step that this call trains.
        steps: the number of steps of the whole schedule, or None while the schedule grows.
        members: the numbers of the trainers, each of which reports every step.
        rows_of: as `rows_of_steps`, for steps that a lost trainer did not report.
        settings: the settings of the job that TensorBoard shows.
        clock: returns seconds.
        tracking: gets the figures of TensorBoard, too.
        is_within_epoch: returns whether an evaluation after a step is within an epoch rather than at its
            end.
        on_evaluation: gets the line of each evaluation set that no earlier call has reported.
    """

    def __init__(
        self,
        run: Path,
        totals: Totals,
        first_step: int,
        steps: int | None,
        members: Iterable[int],
        rows_of: Callable[[int, int], Mapping[int, Mapping[str, int]]],
        settings: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
        tracking: Tracking | None = None,
        is_within_epoch: Callable[[int], bool] = lambda step: False,
        on_evaluation: Callable[[Mapping[str, Any]], None] = lambda line: None,
    ) -> None:
        # TensorBoard is slow to import, and only the coordinator needs it.
        from torch.utils.tensorboard import SummaryWriter

        self.totals = totals
        self.evaluations: list[dict[str, Any]] = []
        self._run = run
        self._members = dict.fromkeys(members, first_step)  # trainer -> the first step that it reports
        self._waiting: dict[int, dict[int, StepReport]] = {}  # step -> trainer -> its report
        self._rows_of = rows_of
        # For steps that a lost trainer did not report: the entries to replace in their lines.
        self._instead: dict[int, dict[str, Any]] = {}
        self._excepthook, threading.excepthook = threading.excepthook, self._except_unwritten
        # This is TensorBoard's writer.
        self._board = SummaryWriter(str(run / TENSORBOARD))
        self._tracking = tracking
        self._on_evaluation = on_evaluation
        if settings:
            rows = [f"| {name} | `{value}` |" for name, value in settings.items()]
            self._board.add_text("settings", "\n".join(["| setting | value |", "| --- | --- |", *rows]), first_step)
        # The lines of evaluations that an earlier call reported after its last step.
        self._reported = evaluations_reported(run / METRICS, first_step - 1)
        self._metrics: IO[str] = open(run / METRICS, "a", encoding="utf-8")  # noqa: SIM115 - closed by close()
        self._flushed_at = 0.0
        self._interval = _Sums()  # for TensorBoard
        self._steps, self._clock, self._is_within_epoch = steps, clock, is_within_epoch
        self._recent, self._recent_since = _Sums(), clock()  # for the display
        self._display = Display(self._status, LINE_SECONDS, clock=clock)
        self._first_step = first_step
        self._unwritten = False
        self.last_step = first_step - 1
        self.last_loss: float | None = None
        self.last_checkpoint: LastCheckpoint | None = None
        self._keep_after: int | None = None
        # The totals after the step given to `keep_totals`, once all trainers have reported that
        # step.
        self.kept_totals: dict[str, float] | None = None

    def step(self, trainer: int, report: StepReport) -> None:
        """Take one trainer's report of one step.

        The step counts once all trainers have reported it.
        """
        self._waiting.setdefault(report.step, {})[trainer] = report
        self._count(report.step)

    def on_term(self, members: Iterable[int], step: int) -> None:
        """Change which trainers report the steps after `step`.

        A former member may not have reported all steps up to `step`. The schedule then gives the
        rows of such a step, and the step's line names the trainers whose times and bytes are
        missing. Trainers that have joined report only the steps after `step`.
        """
        former, uncounted = self._members.keys() - set(members), range(self.last_step + 1, step + 1)
        silent = {
            missed: [trainer for trainer in sorted(former) if self._members[trainer] <= missed and trainer not in reports]
            for missed in uncounted
            for reports in [self._waiting.get(missed, {})]
        }
        if any(silent.values()):
            rows = self._rows_of(uncounted.start, step)
            # The times and bytes of a lost trainer are not known, but the schedule gives its rows.
            self._instead |= {missed: {**rows[missed], "without": trainers} for missed, trainers in silent.items() if trainers}
        self._members = {trainer: self._members.get(trainer, step + 1) for trainer in members}
        for step in sorted(self._waiting):
            self._count(step)

    def _count(self, step: int) -> None:
        """Count a step, if all trainers have reported it."""
        reports = self._waiting[step]
        if not reports.keys() >= {trainer for trainer, since in self._members.items() if since <= step}:
            return
        del self._waiting[step]
        line = merged([reports[member] for member in sorted(reports)]) | self._instead.pop(step, {})
        self.totals.add_line(line)
        self.last_step, self.last_loss = line["step"], line["loss"]
        self._keep()
        self._recent.add(line)
        self._interval.add(line)
        with self._kept_if_possible():
            self._write(line)
            # Intervals follow step numbers, so they do not depend on where a run stopped.
            if (line["step"] + 1) % TENSORBOARD_STEPS == 0:
                self._write_interval()
        self.tick()

    def keep_totals(self, step: int | None) -> None:
        """Keep a copy of the totals as they are after a step.

        Args:
            step: the last step counted, or a later one. If None, no totals are kept.
        """
        if step != self._keep_after:
            self._keep_after, self.kept_totals = step, None
            self._keep()

    def _keep(self) -> None:
        if self.last_step == self._keep_after:
            self.kept_totals = asdict(self.totals)

    def checkpoint(self, fields: Mapping[str, Any]) -> None:
        """Record that a checkpoint was saved, or could not be saved."""
        if "failed" not in fields:
            self.last_checkpoint = LastCheckpoint(fields["step"], time.time(), fields["bytes"], fields["seconds_stalled"])
        with self._kept_if_possible():
            self._write({"kind": "checkpoint", **fields})

    def tick(self) -> None:
        """Show the progress when it is due. To be called often, also while no step ends."""
        self._display.tick()
        now = self._clock()
        if now - self._flushed_at >= _FLUSH_SECONDS:
            self._flushed_at = now
            with self._kept_if_possible():
                self._metrics.flush()

    def evaluation(self, report: EvaluationReport) -> None:
        """Take the metrics of one evaluation set in a pass.

        If a trainer was lost after the evaluation, it runs again and reports the same metrics; the
        second report is ignored. An evaluation at the end of an earlier call counts for this call
        too, but is not written again.
        """
        line = {"kind": "evaluation", **to_stored(report)}
        written = _written(line)
        if written in map(_written, self.evaluations):
            return
        self.evaluations.append(line)
        json_log.record(_finite(without_calibration(line)))
        with self._kept_if_possible():
            if written not in self._reported:
                self._metrics.write(written)
                place = "/".join(filter(None, ("evaluation", report.set)))
                self._show({f"{place}/{name}": value for name, value in metric_scalars(line)}, report.step)
        if written not in self._reported:
            self._on_evaluation(_finite(line))
        place = (f", step {report.step}" if self._is_within_epoch(report.step) else "") + (
            f", {report.set}" if report.set else ""
        )
        words = "; ".join(metric_lines(line, ", "))
        self._display.write(f"epoch {report.epoch + 1}{place}: {words} on {report.samples:,} samples")

    def summary(self, **further: Any) -> dict[str, Any]:
        """Write summary.json, and return its entries.

        The metrics of a run without evaluation are null.

        Args:
            further: further entries, written as they are.
        """
        last_pass = [without_calibration(line) for line in self.evaluations if line["step"] == self.evaluations[-1]["step"]]
        last, totals = (last_pass or [{}])[0], self.totals
        entries = {
            "steps": totals.steps,
            "samples": totals.samples,
            "samples_per_second": totals.samples_per_second,
            **{name: last.get(name) for name in _METRICS},
            **{name: last[name] for name in _FURTHER_METRICS if name in last},
            **({"sets": {line["set"]: metrics_of_set(line) for line in last_pass}} if "set" in last else {}),
            **totals.counts(),
            **totals.means(),
            "seconds": totals.seconds,
            "last_step": self.last_step,
            **further,
        }
        entries = _finite(entries)
        with self._kept_if_possible():
            write_json(self._run / SUMMARY, entries)
        return entries

    def close(self) -> None:
        """Write buffered lines, and close the files."""
        self._display.close()
        with self._kept_if_possible():
            self._metrics.close()
        with self._kept_if_possible():
            self._write_interval()
            self._board.close()
        threading.excepthook = self._excepthook

    def _except_unwritten(self, ended: threading.ExceptHookArgs) -> None:
        """Suppress the traceback when TensorBoard's thread cannot write to the disk.

        TensorBoard raises the error again at the next call, and it is reported there.
        """
        if not isinstance(ended.exc_value, OSError):
            self._excepthook(ended)

    @contextlib.contextmanager
    def _kept_if_possible(self) -> Iterator[None]:
        """Continue after an OSError, with one warning.

        A report is not worth stopping a training for, so training goes on when the disk is full or
        fails.
        """
        try:
            yield
        except OSError as error:
            if not self._unwritten:
                self._unwritten = True
                why = "the disk is full" if is_full(error) else f"it cannot be written to ({error.strerror or error})"
                self._display.write(f"foreload: warning: {self._run}: {why}, so metrics are missing")

    def _write(self, line: Mapping[str, Any]) -> None:
        self._metrics.write(_written(line))

    def _write_interval(self) -> None:
        if not self._interval.steps:
            return
        scalars, self._interval = self._interval.scalars(), _Sums()
        self._show(scalars, self.last_step)

    def _show(self, scalars: Mapping[str, float], step: int) -> None:
        """Give figures to the tracker and to TensorBoard."""
        if self._tracking is not None:
            self._tracking.metrics(scalars, step)
        for name, value in scalars.items():
            self._board.add_scalar(name, value, step)

    def _status(self) -> ProgressLine:
        """Return the progress of training.

        Rate, loss and cache hits are those of the last minute at most.
        """
        recent, now, done = self._recent, self._clock(), self.totals.steps
        took = now - self._recent_since
        if took >= LINE_SECONDS:
            self._recent, self._recent_since = _Sums(), now
        words = f"train: {done:,} steps" if self._steps is None else f"train: {done:,} of {self._steps:,} steps"
        figures: dict[str, Any] = {"step": self.last_step, "steps": done, "of_steps": self._steps}
        if not recent.steps or not took:
            return ProgressLine(f"{words}, none ended in the last {took:.0f} s", figures)
        rate, left = recent.of["samples"] / took, None
        words += f", {rate:,.0f} samples/s, loss {recent.mean_loss:.5f}, hits {recent.hit_rate:.1%}"
        if self._steps is not None:
            left = round((self._steps - done) * took / recent.steps)
            words += f", {timedelta(seconds=left)} left"
        figures |= {"samples_per_second": rate, "loss": recent.mean_loss, "hit_rate": recent.hit_rate, "seconds_left": left}
        return ProgressLine(words, _finite(figures))


def _written(line: Mapping[str, Any]) -> str:
    return json.dumps(_finite(line)) + "\n"


def metrics_of_set(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of an evaluation line that describe its set alone."""
    return {name: value for name, value in line.items() if name in ("samples", *_METRICS, *_FURTHER_METRICS)}


def metric_scalars(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the metrics of an evaluation line, by their names in TensorBoard and Prometheus.

    With several labels, each label's metrics follow under LABEL/.
    """
    for name, value in line.items():
        if name in (*_METRICS, *_FURTHER_METRICS) and isinstance(value, float):
            yield name, value
    for label, metrics in line.get("labels", {}).items():
        yield from ((f"{label}/{name}", value) for name, value in metric_scalars(metrics))


def _finite(line: Mapping[str, Any]) -> dict[str, Any]:
    """Replace NaN and infinities by None, because JSON has neither."""
    return {
        name: None
        if isinstance(value, float) and not math.isfinite(value)
        else _finite(value)
        if isinstance(value, dict)
        else value
        for name, value in line.items()
    }


def rows_of_steps(schedule: Schedule, first: int, last: int) -> dict[int, dict[str, int]]:
    """Return, by step, the sums of the row figures in all trainers' reports.

    Args:
        schedule: the schedule; its steps `first` to `last` must be published.
        first: the first training step.
        last: the last training step, included.

    Raises:
        ScheduleError: the schedule cannot be read.
    """
    figures = {}
    for segment in schedule.segments():
        if segment.kind != "train":
            continue
        steps = range(max(first, segment.first), min(last + 1, segment.first + len(segment.samples)))
        lanes = [schedule.moves(segment.index, lane) for lane in range(schedule.header.lanes if steps else 0)]
        for step in steps:
            names, place = ("slots", "arrival_tag", "ends"), step - segment.first
            figures[step] = moved_rows([[moves.column(name, place) for name in names] for moves in lanes])
        if segment.first + len(segment.samples) > last:
            break
    return figures
