"""`foreload drill`: train with a fault or a change, and report and draw its effect on the training.

This module has what all drills share. Moments are in seconds of time.monotonic().
"""

from __future__ import annotations

import random
import signal
import sys
import tempfile
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from foreload.base.errors import SettingError
from foreload.base.files import write_json
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.cluster.messages.faults import Fault, RunObserver, TrainerFault
from foreload.trainer.cluster.messages.trainers import EvaluationEnded, StepEnded, TrainerEvent
from foreload.trainer.cluster.processes.starting import ChildProcess, StartProcess
from foreload.trainer.commands.train import train
from foreload.trainer.errors import TrainerError, after_step
from foreload.trainer.job.job import TrainJob
from foreload.trainer.job.job_values import Servers
from foreload.trainer.job.scheduler import under_scheduler
from foreload.trainer.run.directory import DRILL, SUMMARY, check_free
from foreload.trainer.run.timeline import StepTimes, Timeline

if TYPE_CHECKING:
    from foreload.trainer.cluster.ending import Ending

SYNTHETIC = "--format synthetic --rows 200000 --values 10000 --epochs 3 --batch-size 1024 --slots 20000"
"""Options of `foreload prepare` for the schedule of a drill that was given none."""
_LEGEND_COLUMNS = 4
_BINS = 120


Moments = Mapping[str, float | None]
"""When a fault was injected ("injected"), and when each event that may follow it happened.

Values are seconds of time.monotonic(), or None if the event did not happen.
"""


@dataclass(frozen=True, slots=True)
class Picture:
    """What a drill's picture shows besides the throughput.

    Times are seconds of time.monotonic().

    Attributes:
        moments: (label, time) of each vertical line.
        spans: (begin, end) of each shaded area.
    """

    title: str
    moments: Sequence[tuple[str, float]]
    spans: Sequence[tuple[float, float]]


class Drill(RunObserver):
    """A training during which something happens, and what the drill observes of it.

    Constructors raise SettingError for a job that cannot be drilled.

    Args:
        job: the training.
    """

    synthetic_lanes: ClassVar = 2
    """The number of lanes of a schedule that the drill makes."""

    def __init__(self, job: TrainJob) -> None:
        for flag, given in (("--resume", job.resume), ("--follow", job.follow), ("--from", job.from_checkpoint)):
            if given:
                raise SettingError(
                    f"{flag}: cannot be given to a drill, which trains a whole schedule from its beginning on local stores"
                )
        if under_scheduler():
            raise SettingError("drill: must be started by itself, not by torchrun or another scheduler")
        self.job = job
        self.steps = StepTimes()

    def on_event(self, trainer: int, event: TrainerEvent) -> None:
        """Record the end of a step or of an evaluation."""
        if isinstance(event, StepEnded):
            self.steps.note(event.report, event.at)
        elif isinstance(event, EvaluationEnded):
            self.steps.note_evaluation(event.report.step)

    @abstractmethod
    def begin(self, schedule: Schedule) -> None:
        """Choose what happens during the training, and when. Training begins right after.

        Raises:
            SettingError: the drill's settings do not fit the schedule.
        """

    def release(self) -> None:
        """Clean up after training, however it ended.

        No process stays stopped, and no thread keeps waiting.
        """

    @abstractmethod
    def figures(self, ending: Ending) -> dict[str, Any]:
        """Return the figures for "drill" in the summary.

        Raises:
            TrainerError: training ended before there was anything to measure.
        """

    @abstractmethod
    def picture(self, figures: Mapping[str, Any]) -> Picture:
        """Return what the picture shows."""

    @abstractmethod
    def lines(self, figures: Mapping[str, Any]) -> list[str]:
        """Return the figures as lines for the terminal."""

    def not_done(self, ending: Ending) -> str | None:
        """Return what should have happened and did not, with the reason.

        Returns None if everything happened.
        """
        return None


class FaultDrill(Drill):
    """A drill with one fault: a signal to one of `count` store shards or trainers.

    Args:
        at: the step of the fault. If None, it is drawn from the job's seed.
        number: the shard or the trainer that gets the signal. If None, it is drawn likewise.
        count: how many shards or trainers there are.
        stop: whether the signal is SIGSTOP; otherwise it is SIGKILL.
    """

    kind: ClassVar[str]
    """What `number` counts: "shard" or "trainer"."""
    title: ClassVar[str]
    """The picture's title, for str.format with the figures and `done`, "killed" or "stopped"."""
    words: ClassVar[Mapping[str, str]]
    """The picture's label for each moment that may follow the fault."""
    spans: ClassVar[Sequence[tuple[str, str]]]
    """The areas that the picture shades, each from one moment to another.

    If the second moment did not happen, the area reaches to the end of training.
    """
    shares: ClassVar[Mapping[str, tuple[str, str]]]
    """The span over which each throughput_NAME is measured, in the form of `spans`.

    The figure is the share of the normal throughput.
    """
    over: ClassVar[str]
    """The moment until which the longest gap between steps is searched, from the fault on."""
    normal_again: ClassVar[bool]
    """Whether steps after `over` count as normal, besides those before the fault.

    The first tenth of the time before the fault is left out.
    """

    step: int
    """The step after or in which the fault is injected. Set by `begin`, as `number` is."""
    number: int

    def __init__(self, job: TrainJob, at: int | None, number: int | None, count: int, stop: bool) -> None:
        super().__init__(job)
        self._at, self._number, self._count = at, number, count
        self.signal_number = signal.SIGSTOP if stop else signal.SIGKILL
        self.injected: float | None = None

    @abstractmethod
    def fault(self) -> Fault | TrainerFault:
        """Return the fault: `signal_number` at `step`, for `number`."""

    @property
    @abstractmethod
    def followed(self) -> Moments:
        """When each event of `words` happened."""

    @abstractmethod
    def measured(self, timeline: Timeline, struck_at_seconds: float, ending: Ending) -> dict[str, Any]:
        """Return the figures that come after the fault's own, with those of `account`.

        Args:
            struck_at_seconds: when the fault was injected, in seconds since training began.
        """

    def begin(self, schedule: Schedule) -> None:
        """Choose the fault from the drill's settings, or draw it from the job's seed.

        Raises:
            SettingError: the step is not one of the schedule.
        """
        chance = random.Random(self.job.seed)
        first, end = schedule.header.first_step, schedule.header.end_step
        # In the second quarter of the schedule, so that there are normal steps before the fault,
        # and steps after it that show its effect.
        step = first + chance.randrange((end - first) // 4, (end - first) // 2 + 1)
        if self._at is not None:
            step = self._at
        if not first <= step < end:
            raise SettingError(f"--at: must be a step of {schedule.path}, {first} to {end - 1}; got {step}")
        number = chance.randrange(self._count)
        self.step, self.number = step, number if self._number is None else self._number
        self.faults = (self.fault(),)

    @property
    def moments(self) -> Moments:
        """When the fault was injected, and when the events after it happened."""
        return {"injected": self.injected, **self.followed}

    def figures(self, ending: Ending) -> dict[str, Any]:
        """Return the fault and its effect on the training."""
        if self.injected is None:
            raise TrainerError(f"drill: training stopped {after_step(ending.step)}, before the fault was to be injected")
        timeline = self.steps.timeline
        return {
            "signal": self.signal_number.name,
            self.kind: self.number,
            "step": self.step,
            **self.measured(timeline, self.injected - timeline.begin, ending),
        }

    @classmethod
    def account(cls, timeline: Timeline, moments: Moments) -> dict[str, float | None]:
        """Measure the effect of a fault.

        A figure that cannot be measured is None.
        """
        injected = moments["injected"]
        assert injected is not None
        over = moments[cls.over] or timeline.end
        before = (timeline.begin + (injected - timeline.begin) / 10, injected)
        rate = timeline.throughput(before, *([(over, timeline.end)] if cls.normal_again else []))
        spans = {name: _span(moments, between, timeline.end) for name, between in cls.shares.items()}
        since = {name: moments[name] for name in cls.words}
        return finite(
            {
                "median_step_seconds": timeline.median_step(*before),
                "longest_gap_seconds": timeline.longest_gap(injected, over),
                "samples_per_second_normal": rate,
                **{
                    f"throughput_{name}": None if span is None else timeline.throughput(span) / rate
                    for name, span in spans.items()
                },
                **{f"seconds_until_{name}": None if at is None else at - injected for name, at in since.items()},
            }
        )

    def picture(self, figures: Mapping[str, Any]) -> Picture:
        """Return the fault and the events after it."""
        done = "killed" if self.signal_number == signal.SIGKILL else "stopped"
        gap, median = (milliseconds(figures[name]) for name in ("longest_gap_seconds", "median_step_seconds"))
        title = f"{self.title.format(done=done, **figures)}: longest gap {gap}, median step {median}"
        words = {"injected": done, **self.words}
        shown = [(words[name], at) for name, at in self.moments.items() if at is not None]
        spans = [_span(self.moments, between, self.steps.timeline.end) for between in self.spans]
        return Picture(title, shown, [span for span in spans if span is not None])


def _span(moments: Moments, between: tuple[str, str], end: float) -> tuple[float, float] | None:
    """Return the span from one moment to another, or None if the first did not happen.

    If the second moment did not happen, the span reaches to `end`.
    """
    since, until = (moments.get(name) for name in between)
    return None if since is None else (since, until or end)


def finite(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures with None in place of NaN and infinities."""
    return {name: None if isinstance(value, float) and not np.isfinite(value) else value for name, value in figures.items()}


def run(drill: Drill, check: bool, make: bool, start_process: StartProcess = ChildProcess) -> dict[str, Any]:
    """Train while the drill happens.

    Args:
        check: whether to train again without the fault, and compare the digests.
        make: whether to make a schedule of synthetic clicks if there is none.
        start_process: starts the processes of the training.

    Returns:
        The run's summary, with the drill's figures in "drill".

    Raises:
        SettingError: the job cannot be drilled.
        TrainerError: the model differs from that of an undisturbed run, or something did not
            happen.
        KeyboardInterrupt: a signal stopped the training.
        Other errors: those that training raises.
    """
    place = Path(drill.job.run)
    check_free(place, drill.job.overwrite)
    if make:
        _make_schedule(drill.job, drill.synthetic_lanes)
    drill.begin(Schedule(drill.job.schedule))
    job = drill.job
    try:
        ending = train(replace(job, digest=job.digest or check), drill, start_process)
    finally:
        drill.release()
    assert ending is not None
    figures = drill.figures(ending)
    summary = ending.summary | {"drill": figures}
    figures["picture"] = plot(place / DRILL, drill.steps.timeline, drill.picture(figures))
    if check and not ending.stopped:
        figures["digest_undisturbed"] = _undisturbed(job, start_process)
    write_json(place / SUMMARY, summary)
    if ending.signal_number is not None:
        raise KeyboardInterrupt
    if figures.get("digest_undisturbed", summary.get("digest")) != summary.get("digest"):
        raise TrainerError(
            f"drill: the model is not that of an undisturbed run: digest {summary['digest']}, undisturbed {figures['digest_undisturbed']}; "
            f"this is a bug: please report it with {place / SUMMARY}"
        )
    if (reason := drill.not_done(ending)) is not None:
        raise TrainerError(f"drill: {reason}")
    return summary


def text(drill: Drill, summary: Mapping[str, Any]) -> str:
    """Return the result of `run` for the terminal."""
    figures = summary["drill"]
    lines = drill.lines(figures)
    if "digest_undisturbed" in figures:
        lines.append(f"the model is that of an undisturbed run: digest {summary['digest']}")
    if figures["picture"] is not None:
        lines.append(f"drawn in {figures['picture']}")
    return "\n".join(lines)


def _make_schedule(job: TrainJob, lanes: int) -> None:
    if not (Path(job.schedule) / "schedule.json").exists():
        from foreload.pipelines import prepare

        prepare.run([*SYNTHETIC.split(), "--lanes", str(lanes), "--seed", str(job.seed), "--out", job.schedule])


def _undisturbed(job: TrainJob, start_process: StartProcess) -> str:
    """Train the same job without the fault, and return the digest."""
    sys.stderr.write("drill: training again, undisturbed\n")
    with tempfile.TemporaryDirectory(prefix="foreload-") as folder:
        plain = replace(job, run=str(Path(folder) / "run"), namespace=None, overwrite=False, digest=True)
        if job.store.local is None:
            # The second training must leave nothing on servers that belong to the user. The model
            # is the same with any store, so it trains on a local server.
            plain = replace(plain, store=Servers.parse("--store", "local:1"), parity=None, spare=None)
        ending = train(plain, None, start_process)
        assert ending is not None
        if ending.stopped:
            raise KeyboardInterrupt
        return str(ending.summary["digest"])


def milliseconds(seconds: float | None) -> str:
    """Format a time in seconds as milliseconds; "-" for None."""
    return "-" if seconds is None else f"{1000 * seconds:,.1f} ms"


def percent(share: float | None) -> str:
    """Format a share as a percentage; "-" for None."""
    return "-" if share is None else f"{share:.1%}"


def after(figures: Mapping[str, Any], name: str) -> str:
    """Format how long after the fault an event happened, or "never"."""
    seconds = figures[f"seconds_until_{name}"]
    return "never" if seconds is None else f"after {seconds:.3f} s"


def plot(path: Path, timeline: Timeline, picture: Picture) -> str | None:
    """Draw throughput over time, with a drill's moments and spans.

    Returns the path of the file, or None if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        sys.stderr.write(
            "drill: no picture is drawn, since matplotlib is not installed; `pip install matplotlib` and run the drill again\n"
        )
        return None
    begin, end = timeline.begin, timeline.end
    edges, rates = timeline.bins(max((end - begin) / _BINS, 1e-3))
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    axes = figure.add_subplot()
    axes.stairs(rates, edges - begin, baseline=0, fill=True, alpha=0.35, label="samples a second")
    for place, (word, at) in enumerate(picture.moments):
        axes.axvline(at - begin, color=f"C{place + 1}", label=f"{word}, {at - begin:.2f} s")
    for place, (since, until) in enumerate(picture.spans):
        axes.axvspan(since - begin, until - begin, color=("C3", "C2")[place % 2], alpha=0.08)
    axes.set_title(picture.title)
    axes.set_xlabel("seconds since training began")
    axes.set_ylabel("samples a second")
    axes.set_ylim(bottom=0)
    figure.legend(loc="outside lower center", ncols=min(len(picture.moments) + 1, _LEGEND_COLUMNS))
    figure.savefig(path, dpi=110)
    return str(path)
