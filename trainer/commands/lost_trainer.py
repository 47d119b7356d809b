"""`foreload drill lost-trainer`: kill or stop a trainer during training."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from foreload.base.errors import SettingError
from foreload.pipelines.planning.sizing import slot_bytes
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.cluster.messages.faults import TrainerFault
from foreload.trainer.cluster.messages.trainers import CopiesReport, FaultInjected, Ready, TermLeft, TrainerEvent
from foreload.trainer.commands.drill import FaultDrill, Moments, after, milliseconds, percent
from foreload.trainer.job.job import TrainJob
from foreload.trainer.job.memory_check import columns_of, readable
from foreload.trainer.run.event_log import LanesTakenOver, TermBegan, read_events
from foreload.trainer.run.timeline import Timeline

if TYPE_CHECKING:
    from foreload.trainer.cluster.ending import Ending

POINT = "dense part applied"
"""The point of the fault: the step is applied, and not committed."""


class LostTrainer(FaultDrill):
    """A drill that kills a trainer in a step, or stops it for good.

    Args:
        at: as in FaultDrill, like `stop`.
        trainer: the number of the trainer. If None, it is drawn from the job's seed.
    """

    kind = "trainer"
    title = "Trainer {trainer} {done} in step {step}"
    words: ClassVar = {"noticed": "noticed", "taken_over": "taken over", "whole": "copies complete"}
    spans = (("injected", "taken_over"), ("taken_over", "whole"))
    shares: ClassVar = {"after": ("taken_over", "end")}
    over = "taken_over"
    # After the fault, one trainer fewer does the same work.
    normal_again = False

    def __init__(self, job: TrainJob, at: int | None = None, trainer: int | None = None, stop: bool = False) -> None:
        if job.replicas_held < 2:
            raise SettingError(
                f"--copies: a drill that loses a trainer needs at least 2, so that another trainer takes over its lanes; got {job.replicas_held} "
                f"with --trainers {job.trainers}; give --trainers 2, and no --copies 1"
            )
        super().__init__(job, at, trainer, job.trainers, stop)
        if trainer is not None and not 0 <= trainer < job.trainers:
            raise SettingError(f"--trainer: must be one of the {job.trainers} trainers, 0 to {job.trainers - 1}; got {trainer}")
        self._lost_in = -1
        """The term of the loss; -1 until the fault is injected."""
        self._left: dict[int, float] = {}
        """When the first trainer left each term."""
        self._ready: dict[int, float] = {}
        """When the last trainer so far was ready for each term."""
        self._copies: dict[int, CopiesReport] = {}
        """The last report of each trainer on the replicas that it holds."""
        self._had: set[tuple[int, int]] = set()
        """(trainer, lane) of the replicas that existed before the loss."""
        self._whole: float | None = None

    def fault(self) -> TrainerFault:
        """Return a signal that a trainer sends to itself."""
        return TrainerFault(self.number, POINT, self.step, self.signal_number)

    def on_event(self, trainer: int, event: TrainerEvent) -> None:
        """Record the terms after the fault, and the state of the replicas."""
        super().on_event(trainer, event)
        match event:
            case FaultInjected(at=at):
                self.injected = at
                self._lost_in = max(self._ready)
                self._had = {(holder, lane) for holder, report in self._copies.items() for lane in report.copies}
            case TermLeft(term):
                self._left.setdefault(term, time.monotonic())
            case Ready(term):
                self._ready[term] = time.monotonic()
            case CopiesReport():
                self._copies[trainer] = event
                self._see_whole()

    def _see_whole(self) -> None:
        reports = [report for trainer, report in self._copies.items() if trainer != self.number]
        # A report from the term of the loss itself is about replicas that are about to move.
        latest = max(self._ready, default=-1)
        in_time = self._lost_in in self._left and latest > self._lost_in and all(report.term == latest for report in reports)
        copies = [copy for report in reports for copy in report.copies.values()]
        if in_time and self._whole is None and copies and all(copy.complete for copy in copies):
            self._whole = time.monotonic()

    @property
    def followed(self) -> Moments:
        """The moments of the loss, of the takeover, and of the replicas' completion.

        The loss is noticed when the first of the other trainers leaves the term. The lanes are
        taken over when all trainers are ready for the next term. The replicas are whole when every
        lane has all its replicas again.
        """
        # The first term after the loss is the takeover. In a later one another trainer may join.
        following = min((term for term in self._ready if term > self._lost_in), default=None)
        return {
            "noticed": self._left.get(self._lost_in),
            "taken_over": None if following is None else self._ready[following],
            "whole": self._whole,
        }

    def measured(self, timeline: Timeline, struck_at_seconds: float, ending: Ending) -> dict[str, Any]:
        """Return the effect of the fault, the lanes taken over, and the bytes that it took."""
        schedule = Schedule(self.job.schedule)
        slot = slot_bytes(columns_of(self.job, schedule)[0], with_base=False)
        events = list(read_events(Path(self.job.run)))
        taken = [event for event in events if event["kind"] == LanesTakenOver.kind]
        since = taken[0]["term"] if taken else 0
        return {
            "struck_at_seconds": struck_at_seconds,
            "went_on_after_step": next(
                (event["step"] for event in events if event["kind"] == TermBegan.kind and event["term"] >= since), None
            ),
            "taken_over": [{name: event[name] for name in ("lanes", "from_trainer", "to_trainer")} for event in taken],
            "bytes_taken_over": sum(schedule.slots[lane] * slot for event in taken for lane in event["lanes"]),
            "bytes_seeded": self._slots_seeded() * slot,
            **self.account(timeline, self.moments),
        }

    def _slots_seeded(self) -> int:
        """Return the number of slots of the replicas that were made after the loss."""
        copies = {(trainer, lane): copy for trainer, report in self._copies.items() for lane, copy in report.copies.items()}
        return sum(copy.slots for place, copy in copies.items() if place[0] != self.number and place not in self._had)

    def lines(self, figures: Mapping[str, Any]) -> list[str]:
        """Return lines on the fault, the takeover and the effect on the training."""
        taken = "; ".join(
            f"lane {', '.join(map(str, one['lanes']))} by trainer {one['to_trainer']}" for one in figures["taken_over"]
        )
        return [
            f"trainer {figures['trainer']}: {figures['signal']} in step {figures['step']}, {figures['struck_at_seconds']:.2f} s into the training",
            f"noticed {after(figures, 'noticed')}, taken over {after(figures, 'taken_over')}: {taken or 'nothing'}, "
            f"{readable(figures['bytes_taken_over'])} from memory; training continued after step {figures['went_on_after_step']}",
            "no trainer is left to hold copies"
            if figures["seconds_until_whole"] is None
            else f"all copies complete again {after(figures, 'whole')}, {readable(figures['bytes_seeded'])} sent for that",
            f"longest gap between steps {milliseconds(figures['longest_gap_seconds'])}, counted from the signal; "
            f"median step {milliseconds(figures['median_step_seconds'])}",
            f"throughput, where normal is {figures['samples_per_second_normal'] or 0:,.0f} samples a second: {percent(figures['throughput_after'])} "
            "with one trainer fewer",
        ]
