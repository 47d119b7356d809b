"""`foreload drill scale`: train with more and fewer trainers in turn."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foreload.base.errors import ForeloadError, SettingError
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.cluster.messages.control import AskScale, AskScaled, Refused, ask
from foreload.trainer.cluster.messages.trainers import StepEnded, TrainerEvent
from foreload.trainer.commands.drill import Drill, Picture, finite, milliseconds
from foreload.trainer.errors import after_step
from foreload.trainer.job.job import TrainJob
from foreload.trainer.run.timeline import Timeline

if TYPE_CHECKING:
    from foreload.trainer.cluster.ending import Ending

_PAUSE = timedelta(milliseconds=50)  # between two polls of a change's progress


@dataclass(slots=True)
class Change:
    """A change of the number of trainers.

    Times are seconds of time.monotonic(), and None until the event happens.

    Attributes:
        before: the number of trainers before the change.
        after: the number of trainers after the change.
        step: the step after which the drill asks for the change.
        asked: when the drill asked for the change.
        done: when the change was done.
        failed: why the change failed.
    """

    before: int
    after: int
    step: int
    asked: float | None = None
    done: float | None = None
    failed: str | None = None


class ScaleDrill(Drill):
    """A drill that changes the number of trainers.

    It asks for each change when the change's step has ended and the change before is done. One
    thread asks for all changes.

    Args:
        numbers: the numbers of trainers in turn, from the start of training on, such as "1,2,1".
    """

    synthetic_lanes = 4

    def __init__(self, job: TrainJob, numbers: str) -> None:
        if not re.fullmatch(r"\d{1,4}(,\d{1,4})*", numbers):
            raise SettingError(f"--to: must be numbers of trainers, separated by commas, such as 1,2,1; got {numbers}")
        self._numbers = [int(number) for number in numbers.split(",")]
        if len(self._numbers) < 2 or min(self._numbers) < 1:
            raise SettingError(f"--to: must be at least two numbers of trainers, such as 1,2,1; got {numbers}")
        if job.trainers not in (1, self._numbers[0]):
            raise SettingError(
                f"--trainers: must be the first number of --to, {self._numbers[0]}; got {job.trainers}; leave it out"
            )
        super().__init__(job)
        self._changes: list[Change] = []
        self._last = -1
        self._stepped = threading.Condition()
        self._over = False
        self._thread = threading.Thread(target=self._ask_all, name="scaler", daemon=True)

    def begin(self, schedule: Schedule) -> None:
        """Spread the changes over the schedule, and start the thread that asks for them."""
        header, numbers = schedule.header, self._numbers
        if max(numbers) > header.lanes:
            raise SettingError(
                f"--to: must be at most the schedule's lanes, {header.lanes}; got {max(numbers)}; prepare with more --lanes"
            )
        self.job = replace(self.job, trainers=numbers[0])
        apart = (header.end_step - header.first_step) // len(numbers)
        pairs = pairwise(numbers)
        self._changes = [Change(*pair, header.first_step + apart * (place + 1) - 1) for place, pair in enumerate(pairs)]
        self._thread.start()

    def on_event(self, trainer: int, event: TrainerEvent) -> None:
        """Record a step, after which a change may be due."""
        super().on_event(trainer, event)
        if isinstance(event, StepEnded):
            with self._stepped:
                self._last = max(self._last, event.report.step)
                self._stepped.notify_all()

    def release(self) -> None:
        """Ask for no further change, and wait for the thread."""
        with self._stepped:
            self._over = True
            self._stepped.notify_all()
        self._thread.join()

    def _ask_all(self) -> None:
        for change in self._changes:
            with self._stepped:
                self._stepped.wait_for(lambda change=change: self._over or self._last >= change.step)  # type: ignore[misc]
            if self._over:
                return
            change.asked = time.monotonic()
            try:
                change.failed = self._failure(change)
            except ForeloadError as error:
                # The launcher does not answer. Nobody sees what this thread raises: the drill
                # reports the reason.
                change.failed = str(error)
            if change.failed is not None:
                return
            change.done = time.monotonic()

    def _failure(self, change: Change) -> str | None:
        """Ask for a change and wait for it.

        Returns:
            The reason if it failed, None if it is done.

        Raises:
            RunError: the launcher does not answer in time.
            MessageError: its answer is malformed.
        """
        run = Path(self.job.run)
        begun = ask(run, AskScale(change.after))
        if begun is None or isinstance(begun, Refused):
            return "training had ended" if begun is None else begun.error
        while True:
            progress = ask(run, AskScaled(begun.number))
            if progress is None or isinstance(progress, Refused):
                return "training had ended" if progress is None else progress.error
            if progress.failed is not None or progress.done:
                return progress.failed
            time.sleep(_PAUSE.total_seconds())

    def not_done(self, ending: Ending) -> str | None:
        """Return the first change that was not done, with the reason, or None."""
        for change in self._changes:
            if change.done is None:
                why = change.failed or f"training stopped {after_step(ending.step)}, before this change"
                return f"{change.before} -> {change.after} trainers: {why}; a longer schedule leaves more time"
        return None

    def figures(self, ending: Ending) -> dict[str, Any]:
        """Return the effect of each change."""
        return account_changes(self.steps.timeline, self._changes)

    def picture(self, figures: Mapping[str, Any]) -> Picture:
        """Return when each change was asked for, and how long it took."""
        asked = [
            (f"{change.before} -> {change.after} trainers", change.asked) for change in self._changes if change.asked is not None
        ]
        spans = [(one.asked, one.done) for one in self._changes if one.asked is not None and one.done is not None]
        gaps = [entry["longest_gap_seconds"] for entry in figures["changes"] if entry.get("longest_gap_seconds") is not None]
        numbers = ", ".join(str(entry["trainers"]) for entry in figures["changes"])
        return Picture(f"Trainers {numbers}: longest gap {milliseconds(max(gaps, default=None))}", asked, spans)

    def lines(self, figures: Mapping[str, Any]) -> list[str]:
        """Return a line for each number of trainers."""
        lines = []
        for entry in figures["changes"]:
            rate = "-" if entry["samples_per_second"] is None else f"{entry['samples_per_second']:,.0f} samples a second"
            trainers = f"{entry['trainers']} trainer{'s' if entry['trainers'] > 1 else ''}"
            line = f"{trainers}: {rate}, median step {milliseconds(entry['median_step_seconds'])}"
            if "step" in entry:
                line += (
                    f"; asked for after step {entry['step']}, done after {entry['seconds_until_done']:.2f} s, longest gap between steps meanwhile "
                    f"{milliseconds(entry['longest_gap_seconds'])}"
                )
            lines.append(line)
        return lines


def account_changes(timeline: Timeline, changes: Sequence[Change]) -> dict[str, Any]:
    """Measure the effect of each change. A figure that cannot be measured is None.

    The first entry is for the time before any change. Each other entry is for a change that was
    done. `longest_gap_seconds` is the longest gap between two steps from the request until the
    change is done; that includes the start of processes, during which training goes on.
    `samples_per_second` and `median_step_seconds` are for the time after the change, until the next
    request.
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
        entries.append(finite(entry))
    return {"changes": entries}
