"""`foreload drill scale`: trains with more and fewer trainers one after the other, and tells and draws what each change cost."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from foreload.pipelines.errors import SettingError
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.cluster.control import AskScale, AskScaled, Refused, ask
from foreload.trainer.cluster.faults import RunObserver
from foreload.trainer.cluster.messages import EvaluationEnded, StepEnded, TrainerEvent
from foreload.trainer.cluster.processes import ChildProcess, StartProcess
from foreload.trainer.commands.drill import check_whole, conclude, make_schedule, milliseconds, plot
from foreload.trainer.commands.train import train
from foreload.trainer.errors import TrainerError
from foreload.trainer.run.directory import DRILL, check_free
from foreload.trainer.run.job import TrainJob
from foreload.trainer.run.timeline import StepTimes, Timeline

NUMBERS = (1, 2, 4, 2, 1)
LANES = 4  # of a schedule that is made up
_PAUSE = timedelta(milliseconds=50)  # between two looks how far a change is


@dataclass(frozen=True, slots=True)
class ScaleDrill:
    """numbers: of trainers, one after the other, the first from the beginning. check: train again, undisturbed, and compare the digests. make: the
    job's schedule is made up if it is not there.
    """

    numbers: tuple[int, ...] = NUMBERS
    check: bool = False
    make: bool = False


@dataclass(slots=True)
class Change:
    """One change of the number of trainers. step: after which it is asked for; asked, done: when, None: not yet; failed: why not."""

    before: int
    after: int
    step: int
    asked: float | None = None
    done: float | None = None
    failed: str | None = None


@dataclass
class Scaler(RunObserver):
    """Asks for each change when its step has ended and the one before is done, and sees all steps. run: the run's folder."""

    run: Path
    changes: list[Change]
    steps: StepTimes = field(default_factory=StepTimes)

    def __post_init__(self) -> None:
        self._last = -1
        self._stepped = threading.Condition()
        self._over = False
        self._thread = threading.Thread(target=self._ask_all, name="scaler", daemon=True)
        self._thread.start()

    def see(self, trainer: int, event: TrainerEvent) -> None:
        """Note a step, or an evaluation."""
        if isinstance(event, EvaluationEnded):
            self.steps.note_evaluation(event.report.step)
        if isinstance(event, StepEnded):
            self.steps.note(event.report, event.at)
            with self._stepped:
                self._last = max(self._last, event.report.step)
                self._stepped.notify_all()

    def end(self) -> None:
        """Training is over, and no further change is asked for."""
        with self._stepped:
            self._over = True
            self._stepped.notify_all()
        self._thread.join()

    def _ask_all(self) -> None:
        for change in self.changes:
            with self._stepped:
                self._stepped.wait_for(lambda change=change: self._over or self._last >= change.step)  # type: ignore[misc]
            if self._over:
                return
            change.asked = time.monotonic()
            change.failed = self._failure(change)
            if change.failed is not None:
                return
            change.done = time.monotonic()

    def _failure(self, change: Change) -> str | None:
        """Ask for a change and wait for it; why it did not come to that, None if it did."""
        begun = ask(self.run, AskScale(change.after))
        if begun is None or isinstance(begun, Refused):
            return "training was over" if begun is None else begun.error
        while True:
            progress = ask(self.run, AskScaled(begun.number))
            if progress is None or isinstance(progress, Refused):
                return "training was over" if progress is None else progress.error
            if progress.failed is not None or progress.done:
                return progress.failed
            time.sleep(_PAUSE.total_seconds())


def run(job: TrainJob, drill: ScaleDrill, start_process: StartProcess = ChildProcess) -> dict[str, Any]:
    """Train with these changes; returns the run's summary with the drill's figures in "drill".

    Raises SettingError for what cannot be drilled, TrainerError where the model is not the undisturbed one or a change did not come about, and what
    training raises.
    """
    if len(drill.numbers) < 2 or min(drill.numbers) < 1:
        raise SettingError(
            f"--to: must be two numbers of trainers at least, such as 1,2,1; got {','.join(map(str, drill.numbers))}"
        )
    if job.trainers not in (1, drill.numbers[0]):
        raise SettingError(f"--trainers: is the first number of --to, {drill.numbers[0]}; got {job.trainers}; leave it out")
    check_whole(job)
    check_free(Path(job.run), job.overwrite)
    if drill.make:
        make_schedule(job, LANES)
    header = Schedule(job.schedule).header
    if max(drill.numbers) > header.lanes:
        raise SettingError(
            f"--to: must be at most the schedule's lanes, {header.lanes}; got {max(drill.numbers)}; prepare with more --lanes"
        )
    apart = (header.end_step - header.first_step) // len(drill.numbers)
    pairs = zip(drill.numbers, drill.numbers[1:], strict=False)
    changes = [Change(*pair, header.first_step + apart * (place + 1) - 1) for place, pair in enumerate(pairs)]
    observer = Scaler(Path(job.run), changes)
    try:
        ending = train(replace(job, trainers=drill.numbers[0], digest=job.digest or drill.check), observer, start_process)
    finally:
        observer.end()
    assert ending is not None
    timeline = observer.steps.timeline
    figures = account_changes(timeline, changes)
    summary = ending.summary | {"drill": figures}
    figures["picture"] = _draw(Path(job.run) / DRILL, timeline, changes, figures)
    conclude(replace(job, trainers=drill.numbers[0]), drill.check, ending, summary, start_process)
    for change in changes:
        if change.done is None:
            why = change.failed or f"training stopped after step {ending.step}, before it was to begin"
            raise TrainerError(f"drill: {change.before} -> {change.after} trainers: {why}; a longer schedule leaves more time")
    return summary


def account_changes(timeline: Timeline, changes: Sequence[Change]) -> dict[str, Any]:
    """What each change meant, in figures; None for what there is no measure of.

    longest_gap_seconds is that between two steps from the asking until all was done, starting of processes included, while which training goes on;
    samples_per_second: of the time after it, until the next was asked for; the first entry is of the time before any.
    """
    begin, end = timeline.begin, timeline.end
    done = [change for change in changes if change.asked is not None and change.done is not None]
    entries: list[dict[str, Any]] = []
    since = begin
    for change, following in zip([None, *done], [*done, None], strict=True):
        until = end if following is None or following.asked is None else following.asked
        entry: dict[str, Any] = {"trainers": changes[0].before if change is None else change.after}
        if change is not None:
            assert change.asked is not None
            assert change.done is not None
            since = change.done
            entry |= {
                "step": change.step,
                "asked_at_seconds": change.asked - begin,
                "seconds_until_done": change.done - change.asked,
                "longest_gap_seconds": timeline.longest_gap(change.asked, change.done),
            }
        entry |= {
            "median_step_seconds": timeline.median_step(since, until),
            "samples_per_second": timeline.throughput((since, until)),
        }
        entries.append(
            {name: None if isinstance(value, float) and not np.isfinite(value) else value for name, value in entry.items()}
        )
    return {"changes": entries}


def text(summary: Mapping[str, Any]) -> str:
    """What `run` found, for a person."""
    figures = summary["drill"]
    lines = []
    for entry in figures["changes"]:
        rate = "-" if entry["samples_per_second"] is None else f"{entry['samples_per_second']:,.0f} samples a second"
        line = f"{entry['trainers']} trainer{'s' if entry['trainers'] > 1 else ''}: {rate}, median step {milliseconds(entry['median_step_seconds'])}"
        if "step" in entry:
            line += (
                f"; asked for after step {entry['step']}, done after {entry['seconds_until_done']:.2f} s, longest gap between steps meanwhile "
                f"{milliseconds(entry['longest_gap_seconds'])}"
            )
        lines.append(line)
    if "digest_undisturbed" in figures:
        lines.append(f"the model is that of an undisturbed run: digest {summary['digest']}")
    if figures["picture"] is not None:
        lines.append(f"drawn in {figures['picture']}")
    return "\n".join(lines)


def _draw(path: Path, timeline: Timeline, changes: Sequence[Change], figures: Mapping[str, Any]) -> str | None:
    shown = [(f"{change.before} -> {change.after} trainers", change.asked) for change in changes if change.asked is not None]
    spans = [(change.asked, change.done) for change in changes if change.asked is not None and change.done is not None]
    gaps = [entry["longest_gap_seconds"] for entry in figures["changes"] if entry.get("longest_gap_seconds") is not None]
    numbers = ", ".join(str(entry["trainers"]) for entry in figures["changes"])
    return plot(path, timeline, shown, spans, f"Trainers {numbers}: longest gap {milliseconds(max(gaps, default=None))}")
