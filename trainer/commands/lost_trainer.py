"""`foreload drill lost-trainer`: trains, kills a trainer on the way, and tells and draws what that did to the training."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from foreload.pipelines.errors import SettingError
from foreload.pipelines.planning.sizing import slot_bytes
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.cluster.faults import RunObserver, TrainerFault
from foreload.trainer.cluster.messages import (
    CopiesTold,
    EvaluationEnded,
    Ready,
    StepEnded,
    TermLeft,
    TrainerEvent,
    TrainerFaultInjected,
)
from foreload.trainer.cluster.processes import ChildProcess, StartProcess
from foreload.trainer.commands.drill import check_whole, choose_step, conclude, make_schedule, milliseconds, plot
from foreload.trainer.commands.train import train
from foreload.trainer.errors import TrainerError
from foreload.trainer.run.directory import DRILL, check_free
from foreload.trainer.run.event_log import LanesTakenOver, TermBegan, read_events
from foreload.trainer.run.job import TrainJob
from foreload.trainer.run.memory_check import columns_of, readable
from foreload.trainer.run.timeline import StepTimes, Timeline

POINT = "dense part applied"
"""Where a step is applied everywhere, and committed nowhere."""


@dataclass(frozen=True, slots=True)
class TrainerDrill:
    """What is done to a trainer: at: the step in which, None: drawn from the job's seed, as trainer is.

    stop: it is stopped (SIGSTOP), not killed. check: train again, undisturbed, and compare the digests. make: the job's schedule is made up if it
    is not there.
    """

    at: int | None = None
    trainer: int | None = None
    stop: bool = False
    check: bool = False
    make: bool = False


@dataclass(frozen=True, slots=True)
class LossMoments:
    """When a trainer was lost: injected, the signal; noticed, by the first of the others; taken_over, when all could go on without it; whole, when
    every lane had all its copies again. Seconds on one clock; None: that did not happen.
    """

    injected: float
    noticed: float | None = None
    taken_over: float | None = None
    whole: float | None = None


class LostTrainer(RunObserver):
    """The fault, and all that is seen of it."""

    def __init__(self, fault: TrainerFault) -> None:
        self.faults = (fault,)
        self._trainer = fault.trainer
        self._steps = StepTimes()
        self._injected: float | None = None
        self._noticed: float | None = None
        self._lost_in = 0  # the term of the loss
        self._ready: dict[int, float] = {}  # term -> when the last one that told so was ready for it
        self._copies: dict[int, CopiesTold] = {}  # by each trainer, the last
        self._had: set[tuple[int, int]] = set()  # (trainer, lane) of the copies before the loss
        self._whole: float | None = None

    def see(self, trainer: int, event: TrainerEvent) -> None:
        """Note steps, the terms that follow, and how copies are."""
        match event:
            case StepEnded(report, at):
                self._steps.note(report, at)
            case EvaluationEnded(report):
                self._steps.note_evaluation(report.step)
            case TrainerFaultInjected(at=at):
                self._injected = at
                self._lost_in = max(self._ready)
                self._had = {(holder, lane) for holder, told in self._copies.items() for lane in told.copies}
            case TermLeft() if self._injected is not None and self._noticed is None:
                self._noticed = time.monotonic()
            case Ready(term):
                self._ready[term] = time.monotonic()
            case CopiesTold():
                self._copies[trainer] = event
                self._see_whole()

    def _see_whole(self) -> None:
        there = [told for trainer, told in self._copies.items() if trainer != self._trainer]
        after = self._noticed is not None and all(told.term == max(self._ready) for told in there)
        copies = [copy for told in there for copy in told.copies.values()]
        if after and self._whole is None and copies and all(copy.complete for copy in copies):
            self._whole = time.monotonic()

    @property
    def timeline(self) -> Timeline:
        """All steps, one at least."""
        return self._steps.timeline

    @property
    def moments(self) -> LossMoments | None:
        """None where training ended before the fault."""
        if self._injected is None:
            return None
        # A later term may be one in which another trainer joins.
        following = min((term for term in self._ready if term > self._lost_in), default=None)
        return LossMoments(self._injected, self._noticed, None if following is None else self._ready[following], self._whole)

    @property
    def slots_seeded(self) -> int:
        """Slots of the copies that are there since the loss."""
        told = [(trainer, lane, copy) for trainer, told in self._copies.items() for lane, copy in told.copies.items()]
        return sum(copy.slots for trainer, lane, copy in told if trainer != self._trainer and (trainer, lane) not in self._had)


def run(job: TrainJob, drill: TrainerDrill, start_process: StartProcess = ChildProcess) -> dict[str, Any]:
    """Train with the fault; returns the run's summary with the drill's figures in "drill".

    Raises SettingError for what cannot be drilled, TrainerError where the model is not the undisturbed one, and what training raises.
    """
    _check(job, drill)
    check_free(Path(job.run), job.overwrite)
    if drill.make:
        make_schedule(job)
    schedule = Schedule(job.schedule)
    fault = choose_fault(job, drill, schedule)
    observer = LostTrainer(fault)
    ending = train(replace(job, digest=job.digest or drill.check), observer, start_process)
    assert ending is not None
    moments = observer.moments
    if moments is None:
        raise TrainerError(f"drill: training stopped after step {ending.step}, before the fault was to be injected")
    timeline = observer.timeline
    slot = slot_bytes(columns_of(job, schedule)[0], with_base=False)
    events = list(read_events(Path(job.run)))
    taken = [event for event in events if event["kind"] == LanesTakenOver.kind]
    taken_at = [event["term"] for event in taken] or [0]
    following = next(
        (event["step"] for event in events if event["kind"] == TermBegan.kind and event["term"] >= taken_at[0]), None
    )
    figures: dict[str, Any] = {
        "signal": signal.Signals(fault.signal_number).name,
        "trainer": fault.trainer,
        "step": fault.step,
        "struck_at_seconds": moments.injected - timeline.begin,
        "went_on_after_step": following,
        "taken_over": [{name: event[name] for name in ("lanes", "from_trainer", "to_trainer")} for event in taken],
        "bytes_taken_over": sum(schedule.slots[lane] * slot for event in taken for lane in event["lanes"]),
        "bytes_seeded": observer.slots_seeded * slot,
        **account_loss(timeline, moments),
    }
    summary = ending.summary | {"drill": figures}
    figures["picture"] = _draw(Path(job.run) / DRILL, timeline, moments, figures)
    conclude(job, drill.check, ending, summary, start_process)
    return summary


def _check(job: TrainJob, drill: TrainerDrill) -> None:
    if job.copies_held < 2:
        raise SettingError(
            f"--copies: a drill that loses a trainer needs 2 at least, so that another goes on with its lanes; got {job.copies_held} "
            f"with --trainers {job.trainers}; give --trainers 2, and no --copies 1"
        )
    check_whole(job)
    if drill.trainer is not None and not 0 <= drill.trainer < job.trainers:
        raise SettingError(f"--trainer: must be one of {job.trainers}, 0 to {job.trainers - 1}; got {drill.trainer}")


def choose_fault(job: TrainJob, drill: TrainerDrill, schedule: Schedule) -> TrainerFault:
    """What is done, and when: as the drill says, else drawn from the job's seed. Raises SettingError."""
    chance = random.Random(job.seed)
    step, trainer = choose_step(job, drill.at, schedule, chance), chance.randrange(job.trainers)
    if drill.trainer is not None:
        trainer = drill.trainer
    return TrainerFault(trainer, POINT, step, signal.SIGSTOP if drill.stop else signal.SIGKILL)


def account_loss(timeline: Timeline, moments: LossMoments) -> dict[str, float | None]:
    """What losing the trainer meant, in figures; None for what there is no measure of.

    longest_gap_seconds is counted from the fault until the others went on. Normal are the steps before it, without the first tenth of them; after
    it there is one trainer less for the same work.
    """
    begin, end = timeline.begin, timeline.end
    injected, over = moments.injected, moments.taken_over
    normal = (begin + (injected - begin) / 10, injected)
    rate = timeline.throughput(normal)
    figures = {
        "median_step_seconds": timeline.median_step(*normal),
        "longest_gap_seconds": timeline.longest_gap(injected, end if over is None else over),
        "samples_per_second_normal": rate,
        "throughput_after": float("nan") if over is None else timeline.throughput((over, end)) / rate,
    }
    for name, moment in (("noticed", moments.noticed), ("taken_over", over), ("whole", moments.whole)):
        figures[f"seconds_until_{name}"] = float("nan") if moment is None else moment - injected
    return {name: value if np.isfinite(value) else None for name, value in figures.items()}


def text(summary: Mapping[str, Any]) -> str:
    """What `run` found, for a person."""
    figures = summary["drill"]

    def after(name: str) -> str:
        seconds = figures[f"seconds_until_{name}"]
        return "never" if seconds is None else f"after {seconds:.3f} s"

    taken = "; ".join(f"lane {', '.join(map(str, one['lanes']))} by trainer {one['to_trainer']}" for one in figures["taken_over"])
    share = "-" if figures["throughput_after"] is None else f"{figures['throughput_after']:.1%}"
    lines = [
        f"trainer {figures['trainer']}: {figures['signal']} in step {figures['step']}, {figures['struck_at_seconds']:.2f} s into the training",
        f"noticed {after('noticed')}, taken over {after('taken_over')}: {taken or 'nothing'}, {readable(figures['bytes_taken_over'])} from memory; "
        f"went on after step {figures['went_on_after_step']}",
        "no trainer is left for copies"
        if figures["seconds_until_whole"] is None
        else f"all copies whole again {after('whole')}, {readable(figures['bytes_seeded'])} sent for that",
        f"longest gap between steps {milliseconds(figures['longest_gap_seconds'])}, counted from the signal; "
        f"median step {milliseconds(figures['median_step_seconds'])}",
        f"throughput, of {figures['samples_per_second_normal'] or 0:,.0f} samples a second: {share} with one trainer less",
    ]
    if "digest_undisturbed" in figures:
        lines.append(f"the model is that of an undisturbed run: digest {summary['digest']}")
    if figures["picture"] is not None:
        lines.append(f"drawn in {figures['picture']}")
    return "\n".join(lines)


def _draw(path: Path, timeline: Timeline, moments: LossMoments, figures: Mapping[str, Any]) -> str | None:
    fault = "killed" if figures["signal"] == "SIGKILL" else "stopped"
    after = [("noticed", moments.noticed), ("taken over", moments.taken_over), ("copies whole", moments.whole)]
    shown = [(fault, moments.injected), *((word, at) for word, at in after if at is not None)]
    end = float(timeline.ended[-1])
    spans = [(moments.injected, moments.taken_over or end)]
    if moments.taken_over is not None:
        spans.append((moments.taken_over, moments.whole or end))
    gap, median = (milliseconds(figures[name]) for name in ("longest_gap_seconds", "median_step_seconds"))
    title = f"Trainer {figures['trainer']} {fault} in step {figures['step']}: longest gap {gap}, median step {median}"
    return plot(path, timeline, shown, spans, title)
