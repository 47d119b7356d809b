"""`foreload drill scale`: train while trainers and store shards come, move and go."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foreload.base.errors import ForeloadError, SettingError
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.cluster.messages.control import AskMove, AskScale, Refused, ask, training_status
from foreload.trainer.cluster.messages.trainers import StepEnded, TrainerEvent
from foreload.trainer.commands import scale
from foreload.trainer.commands.drill import Drill, Picture, finite, milliseconds
from foreload.trainer.errors import after_step
from foreload.trainer.job.job import TrainJob
from foreload.trainer.run.directory import Run
from foreload.trainer.run.timeline import Timeline

if TYPE_CHECKING:
    from foreload.trainer.cluster.ending import Ending

_PAUSE = timedelta(milliseconds=50)  # between two polls of a change's progress
_FORM = re.compile(r"\d{1,4}(?:,(?:\d{1,4}|\d{1,3}s|move-\d{1,3}|replace))+")
_REPLACE = "replace"
_LOCAL = "local"  # one more server of the run's own


@dataclass(slots=True)
class Change:
    """A change of the trainers, or of the store shards.

    Times are seconds of time.monotonic(), and None until the event happens.

    Attributes:
        word: the change, as --to has it.
        trainers: the number of trainers from then on.
        step: the step after which the drill asks for the change.
        asked: when the drill asked for the change.
        done: when the change was done.
        failed: why the change failed.
    """

    word: str
    trainers: int
    step: int
    asked: float | None = None
    done: float | None = None
    failed: str | None = None

    @property
    def text(self) -> str:
        """The change in words."""
        if self.word.startswith("move-"):
            return f"shard {self.word.removeprefix('move-')} moves"
        if self.word == _REPLACE:
            return "a trainer is replaced"
        count, of = (self.word[:-1], "store shard") if self.word.endswith("s") else (self.word, "trainer")
        return f"{count} {of}{'s' * (count != '1')}"


class ScaleDrill(Drill):
    """A drill that changes the numbers of trainers and of store shards, moves shards, and replaces trainers.

    It asks for each change when the change's step has ended and the change before is done. One
    thread asks for all changes.

    Args:
        changes: the number of trainers from the start of training on, and then what changes: that
            number, or, as 4s, the number of store shards, or, as move-0, the server of a shard, or,
            as replace, the trainer that has been there for the longest time.
    """

    synthetic_lanes = 4

    def __init__(self, job: TrainJob, changes: str) -> None:
        if not _FORM.fullmatch(changes):
            raise SettingError(
                f"--to: must be a number of trainers, and then more of them, numbers of store shards as 4s, shards that move as move-0, or replace, "
                f"separated by commas; got {changes}"
            )
        first, *self._words = changes.split(",")
        numbers = [int(word) for word in (first, *self._words) if word.isdigit()]
        if min(numbers) < 1 or "0s" in self._words:
            raise SettingError(f"--to: must be numbers of at least 1; got {changes}")
        self._first, self._most = numbers[0], max(numbers)
        if job.trainers not in (1, self._first):
            raise SettingError(f"--trainers: must be the first number of --to, {self._first}; got {job.trainers}; leave it out")
        super().__init__(job)
        self._changes: list[Change] = []
        self._last = -1
        self._stepped = threading.Condition()
        self._over = self._again = False
        self._thread = threading.Thread(target=self._ask_all, name="scaler", daemon=True)

    def begin(self, schedule: Schedule) -> None:
        """Spread the changes over the schedule, and start the thread that asks for them."""
        header = schedule.header
        if self._most > header.lanes:
            raise SettingError(
                f"--to: must be at most the schedule's lanes, {header.lanes}; got {self._most}; prepare with more --lanes"
            )
        self.job = replace(self.job, trainers=self._first)
        apart = (header.end_step - header.first_step) // (len(self._words) + 1)
        trainers = self._first
        for place, word in enumerate(self._words):
            trainers = int(word) if word.isdigit() else trainers
            self._changes.append(Change(word, trainers, header.first_step + apart * (place + 1) - 1))
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
            RunError: the trainers could not be changed.
            MessageError: the run's answer is malformed.
        """
        if change.word != _REPLACE and not change.word.isdigit():
            return self._change_shards(change.word)
        wanted = AskScale(change.trainers)
        if change.word == _REPLACE:
            status = training_status(Path(self.job.run))
            if status is None:
                return "training had ended"
            wanted = AskScale(None, min(status.members))
        scale.run(self.job.run, wanted, wait=True, log=lambda _line: None)
        return None

    def _change_shards(self, word: str) -> str | None:
        """Move a shard, or add or remove shards, one after the other, and wait; as `_failure`."""
        run = Path(self.job.run)
        while True:
            placement = Run.open(run).placement
            if word.startswith("move-"):
                request = AskMove("move", word.removeprefix("move-"), (_LOCAL,))
            elif (further := int(word[:-1]) - len(placement.live)) > 0:
                request = AskMove("add", "", (_LOCAL,) * further)
            elif further < 0:
                request = AskMove("remove", str(max(placement.live)), ())
            else:
                return None
            begun = ask(run, request)
            # The servers that the last change has left may not be left by every trainer yet.
            while isinstance(begun, Refused) and self._again and not self._over:
                time.sleep(_PAUSE.total_seconds())
                begun = ask(run, request)
            if begun is None or isinstance(begun, Refused):
                return "training had ended" if begun is None else begun.error
            self._again = True
            while (now := Run.open(run).placement).version < begun.version or now.migrating:
                if self._over:
                    return "training had ended"
                time.sleep(_PAUSE.total_seconds())
            if word.startswith("move-"):
                return None

    def not_done(self, ending: Ending) -> str | None:
        """Return the first change that was not done, with the reason, or None."""
        for change in self._changes:
            if change.done is None:
                why = change.failed or f"training stopped {after_step(ending.step)}, before this change"
                return f"{change.text}: {why}; a longer schedule leaves more time"
        return None

    def figures(self, ending: Ending) -> dict[str, Any]:
        """Return the effect of each change."""
        return account_changes(self.steps.timeline, self._first, self._changes)

    def picture(self, figures: Mapping[str, Any]) -> Picture:
        """Return when each change was asked for, and how long it took."""
        asked = [(change.text, change.asked) for change in self._changes if change.asked is not None]
        spans = [(one.asked, one.done) for one in self._changes if one.asked is not None and one.done is not None]
        gaps = [entry["longest_gap_seconds"] for entry in figures["changes"] if entry.get("longest_gap_seconds") is not None]
        changes = ", ".join(entry["change"] for entry in figures["changes"])
        return Picture(f"{changes}: longest gap {milliseconds(max(gaps, default=None))}", asked, spans)

    def lines(self, figures: Mapping[str, Any]) -> list[str]:
        """Return a line for the time before any change, and for each change."""
        lines = []
        for entry in figures["changes"]:
            rate = "-" if entry["samples_per_second"] is None else f"{entry['samples_per_second']:,.0f} samples a second"
            line = f"{entry['change']}: {rate}, median step {milliseconds(entry['median_step_seconds'])}"
            if "step" in entry:
                line += (
                    f"; asked for after step {entry['step']}, done after {entry['seconds_until_done']:.2f} s, longest gap between steps meanwhile "
                    f"{milliseconds(entry['longest_gap_seconds'])}"
                )
            lines.append(line)
        return lines


def account_changes(timeline: Timeline, first: int, changes: Sequence[Change]) -> dict[str, Any]:
    """Measure the effect of each change. A figure that cannot be measured is None.

    Args:
        first: the number of trainers before any change.

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
        begins = Change(str(first), first, 0)
        entry: dict[str, Any] = {"change": (change or begins).text, "trainers": (change or begins).trainers}
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
