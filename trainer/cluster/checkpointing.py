"""The coordinator's side of checkpoints that are saved while a run trains: when one is due, who has told what of it, and its publication."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from foreload.cache.rows.layout import RowLayout
from foreload.pipelines.base.files import remove_path
from foreload.pipelines.errors import ScheduleError
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.checkpoints.best import Best, best_in, is_better
from foreload.trainer.checkpoints.changed_rows import Plan
from foreload.trainer.checkpoints.draft import Draft, folder_of
from foreload.trainer.checkpoints.format import Checkpoint, Contents
from foreload.trainer.checkpoints.lineage import Increment, next_increment, of_run, prune
from foreload.trainer.checkpoints.policies import Policy
from foreload.trainer.cluster.board import Board
from foreload.trainer.cluster.control import AskCheckpoint, CheckpointBegun, CheckpointProgress, Refused
from foreload.trainer.cluster.facts import CheckpointReady
from foreload.trainer.cluster.messages import (
    CheckpointArmed,
    CheckpointFailed,
    CheckpointTaken,
    CheckpointWritten,
    DropCheckpoint,
    TakeCheckpoint,
    TrainerCommand,
    WriteCheckpoint,
)
from foreload.trainer.compute.reports import EvaluationReport
from foreload.trainer.errors import CheckpointError
from foreload.trainer.run.directory import CHECKPOINTS
from foreload.trainer.run.event_log import CheckpointNotSaved, CheckpointSaved, EventLog
from foreload.trainer.run.job import TrainJob
from foreload.trainer.run.manifest import Manifest
from foreload.trainer.run.report import RunReport


@dataclass(slots=True)
class _Saving:
    """The checkpoint under way. asked: by a user, not since one was due."""

    number: int
    folder: Path
    asked: bool
    every: int | None
    draft: Draft | None = None
    increment: Increment | None = None
    since: float = field(default_factory=time.monotonic)
    armed: set[int] = field(default_factory=set)
    ready: bool = False
    taken: dict[int, CheckpointTaken] = field(default_factory=dict)
    written: dict[int, CheckpointWritten] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """Of which it is, once that is known."""
        return next(iter(self.taken.values())).step


@dataclass(slots=True)
class _Asked:
    """What a user asked for: where it is to be, and what became of it."""

    folder: Path
    told: CheckpointProgress = field(default_factory=lambda: CheckpointProgress(False))


class Checkpointing:
    """The checkpoints of one call. Its main thread uses it, but for `ask` and `asked`, which threads of the control socket call.

    tell_all: publishes a command to all trainers; manifest: the run's, as it is now. at_point: told the points that RunObserver names.
    """

    def __init__(
        self,
        job: TrainJob,
        run: Path,
        schedule: Schedule,
        layouts: Sequence[RowLayout],
        manifest: Callable[[], Manifest],
        board: Board,
        report: RunReport,
        tell_all: Callable[[TrainerCommand], None],
        at_point: Callable[[str], None],
        events: EventLog,
    ) -> None:
        self._every, self._keep, self._metric = job.checkpoint_every, job.keep, job.keep_best
        header = schedule.header
        # An evaluation comes after each epoch.
        ends = range(header.first_step + header.steps_per_epoch - 1, header.end_step, header.steps_per_epoch)
        self._evaluated_steps = ends if self._metric is not None else range(0)
        self._policy, self._bits, self._schedule = cast(Policy, job.checkpoint_policy), job.checkpoint_bits, schedule
        self._folder = Path(job.checkpoint) if job.checkpoint is not None else run / CHECKPOINTS
        self._events = events
        self._layouts, self._manifest = layouts, manifest
        self._board, self._report, self._tell_all, self._at_point = board, report, tell_all, at_point
        noted = best_in(self._folder, manifest().run_id)
        self._best = noted if noted is not None and noted.metric == self._metric else None
        self._took_steps = 0  # how many steps were trained while a checkpoint was being saved, at most
        self._saving: _Saving | None = None
        self._discarded: list[Path] = []
        self._count = 0
        interval = None if self._every is None else self._every.seconds
        self._due_at = time.monotonic() + (interval or 0.0)  # the next one is not begun before
        self.saved = self.failed = 0
        self.last_step: int | None = None
        self._lock = threading.Lock()
        self._asked: list[_Asked] = []
        self._to_begin: list[_Asked] = []
        self._current: _Asked | None = None

    # Threads of the control socket.

    def ask(self, request: AskCheckpoint) -> CheckpointBegun | Refused:
        """Have one begun as soon as none is under way."""
        with self._lock:
            asked = _Asked(Path(request.to) if request.to is not None else self._folder)
            self._asked.append(asked)
            self._to_begin.append(asked)
            return CheckpointBegun(len(self._asked) - 1)

    def asked(self, number: int) -> CheckpointProgress | Refused:
        """What became of one that was asked for."""
        with self._lock:
            if not 0 <= number < len(self._asked):
                return Refused(f"no checkpoint {number} was asked for")
            return self._asked[number].told

    # The main thread.

    def see(self, members: Sequence[int], goes_on: bool) -> None:
        """Go on with the one under way, or begin the next. goes_on: training does, so that one can be begun."""
        saving = self._saving
        far_away = saving is not None and not saving.taken and not saving.asked
        if goes_on and saving is not None and far_away and (self._to_begin or self._time_has_come(saving)):
            # Its step may be far away, and another one is to be now.
            self._give_up("another one is wanted", again=True)
            saving = None
        if saving is None:
            # What is asked for as trainers start or change waits.
            if goes_on:
                self._begin_next()
            return
        if not saving.ready and saving.armed >= set(members):
            saving.ready = True
            self._board.publish(CheckpointReady(), saving.number)
        if saving.written.keys() >= set(members) and self._report.kept_totals is not None:
            try:
                self._publish(saving)
            except CheckpointError as error:
                self._give_up(str(error))

    def _begin_next(self) -> None:
        with self._lock:
            asked = self._to_begin.pop(0) if self._to_begin else None
        every = None if self._every is None or time.monotonic() < self._due_at else self._every.steps or 1
        last = self._report.last_step
        steps = tuple(step for step in self._evaluated_steps if step > last)
        if steps and every is not None and steps[0] - 2 * self._took_steps <= -(-(last + 2) // every) * every - 1 < steps[0]:
            every = None  # it might not be over when the evaluation comes
        if asked is not None:
            every, steps = 1, ()
        elif every is None and not steps:
            return
        self._current = asked
        self._count += 1
        self._saving = _Saving(self._count, self._folder if asked is None else asked.folder, asked is not None, every)
        self._report.keep_totals(None)
        self._tell_all(TakeCheckpoint(self._count, every, steps))

    def _time_has_come(self, saving: _Saving) -> bool:
        """Whether one is due by the clock, while the one under way is for an evaluation to come."""
        return saving.every is None and self._every is not None and time.monotonic() >= self._due_at

    def evaluated(self, report: EvaluationReport) -> None:
        """An evaluation: keep a checkpoint of the step before it, if it is the best so far. One that is told again is no better."""
        if self._metric is None:
            return
        value, saving = getattr(report, self._metric), self._saving
        under_way = saving is not None and saving.taken and saving.step == report.step
        better = is_better(self._metric, value, None if self._best is None else self._best.value)
        if better and (under_way or self.last_step == report.step):
            self._best = Best(self._manifest().run_id, self._metric, value, report.step)
            if self.last_step == report.step:
                self._note_best()
        elif better:
            self._tell(
                f"foreload: warning: the evaluation after step {report.step} is the best so far, but no checkpoint was saved there, as another one "
                "was under way; save them less often"
            )
        if saving is not None and under_way and saving.draft is None:
            if better:
                self._begin_writing(saving)
            else:
                self._give_up("it is not the best", again=True)

    def _note_best(self) -> None:
        assert self._best is not None
        try:
            self._best.write(self._folder)
        except OSError as error:
            self._tell(f"foreload: warning: {self._folder}: the best checkpoint cannot be noted: {error.strerror or error}")

    def _begin_writing(self, saving: _Saving) -> None:
        """Its step is known: make the draft of it, and have it written, unless it is there already, from before the run was broken off."""
        step = saving.step
        try:
            if any(one.contents.step == step for one in of_run(saving.folder, self._manifest())):
                self._give_up("it is there already", again=True)
                return
            draft = saving.draft = Draft(saving.folder, "--to" if saving.asked else "--checkpoint")
            increment = saving.increment = self._increment(draft, step)
        except (CheckpointError, ScheduleError) as error:
            self._give_up(str(error))
            return
        base = None if increment is None else increment.base.contents
        since, known = (-1, ()) if base is None else (base.step, base.ordinals)
        self._at_point("begun")
        self._tell_all(WriteCheckpoint(saving.number, str(draft.path.absolute()), since, known, self._bits))

    def _increment(self, draft: Draft, step: int) -> Increment | None:
        """What the one of a step is an increment of; None: it is to have all rows."""
        increment = next_increment(draft.folder, self._manifest(), step, self._policy, self._bits, self._plan(step))
        # Of what an earlier schedule changed, this one says nothing.
        return (
            increment if increment is not None and increment.base.contents.step >= self._schedule.header.first_step - 1 else None
        )

    def _plan(self, step: int) -> Plan | None:
        """For policy planned: the checkpoints that are to come, this one first."""
        if self._policy != "planned" or self._every is None or self._every.steps is None:
            return None
        every, end = self._every.steps, self._schedule.header.end_step
        return Plan(self._schedule, [step, *range(step + every, end, every)], [layout.row_bytes for layout in self._layouts])

    def receive(self, trainer: int, event: CheckpointArmed | CheckpointTaken | CheckpointWritten | CheckpointFailed) -> None:
        """What a trainer tells of one; of one before the last it does not count."""
        saving = self._saving
        if saving is None or saving.number != event.number:
            return
        match event:
            case CheckpointArmed():
                saving.armed.add(trainer)
            case CheckpointTaken():
                first = not saving.taken
                saving.taken[trainer] = event
                self._report.keep_totals(event.step)
                # One for an evaluation waits for what that says.
                if first and saving.every is not None and (event.step + 1) % saving.every == 0:
                    self._begin_writing(saving)
            case CheckpointWritten():
                saving.written[trainer] = event
            case CheckpointFailed():
                self._give_up(f"trainer {trainer}: {event.error}")

    def now_members(self) -> None:
        """The trainers, or their lanes, are others now: what was under way cannot be finished."""
        if self._saving is not None:
            self._give_up("the trainers, or their lanes, changed meanwhile", again=True)

    def close(self) -> None:
        """Trainers are gone: leave nothing half written."""
        saving, self._saving = self._saving, None
        if saving is not None:
            self._discard(saving)
            if saving.taken or saving.asked:
                self._failed(_OVER)
        for path in self._discarded:
            remove_path(path)  # again: a trainer may have been writing there
        self._refuse_asked(_OVER)

    def _give_up(self, why: str, again: bool = False) -> None:
        """again: begin another one at once, as nothing is wrong with where it is put."""
        saving, self._saving = self._saving, None
        if saving is not None:
            self._tell_all(DropCheckpoint(saving.number))
            self._discard(saving)
        if not again:
            self._failed(why)
            return
        asked, self._current = self._current, None
        if asked is not None:
            with self._lock:
                self._to_begin.insert(0, asked)

    def _discard(self, saving: _Saving) -> None:
        if saving.draft is not None:
            saving.draft.discard()
            self._discarded.append(saving.draft.path)

    def _failed(self, why: str) -> None:
        """Tell that there is no checkpoint, though one was due or asked for."""
        asked, self._current = self._current, None
        if self._best is not None:
            self._best = best_in(self._folder, self._best.run_id)  # of what there is
        self.failed += 1
        self._put_off()
        self._report.checkpoint({"failed": why})
        self._events.note(CheckpointNotSaved(cause=why))
        self._tell(f"foreload: warning: a checkpoint was not saved: {why}")
        if asked is not None:
            with self._lock:
                asked.told = CheckpointProgress(True, failed=why)

    def _refuse_asked(self, why: str) -> None:
        with self._lock:
            for asked in self._to_begin:
                asked.told = CheckpointProgress(True, failed=why)
            self._to_begin.clear()

    def _put_off(self) -> None:
        if self._every is not None:
            self._due_at = time.monotonic() + (self._every.seconds or _AFTER_FAILURE_SECONDS)

    def _publish(self, saving: _Saving) -> None:
        contents = self._contents(saving)
        assert saving.draft is not None
        checkpoint = saving.draft.publish(contents, lambda: self._at_point("manifest written"))
        self._saving = None
        self._at_point("published")
        self.saved += 1
        self.last_step = contents.step
        self._took_steps = max(self._took_steps, self._report.last_step - contents.step)
        if saving.folder == self._folder and self._best is not None and self._best.step == contents.step:
            self._note_best()
        told = self._told(saving, checkpoint)
        self._report.checkpoint(told)
        self._events.note(CheckpointSaved(checkpoint=str(checkpoint.path)))
        self._tell(
            f"checkpoint {checkpoint.path}: after step {contents.step}, {told['rows']:,} of {contents.row_count:,} rows, "
            f"{told['bytes'] / 2**20:,.1f} MiB in "
            f"{told['seconds']:.1f} s, during which training stood still for {1000 * told['seconds_stalled']:.0f} ms"
        )
        asked, self._current = self._current, None
        if asked is not None:
            with self._lock:
                asked.told = CheckpointProgress(True, str(checkpoint.path))
            return
        if self._every is not None and self._every.seconds is not None:
            self._due_at = saving.since + self._every.seconds
        try:
            best = best_in(self._folder)
            prune(self._folder, self._manifest(), self._keep, () if best is None else (folder_of(best.step),))
        except CheckpointError as error:
            self._tell(f"foreload: warning: {error}")
        self._at_point("old ones deleted")

    def _contents(self, saving: _Saving) -> Contents:
        taken = next(iter(saving.taken.values()))
        files = [file for written in saving.written.values() for file in written.files.rows]
        dense = next(written.files.dense for written in saving.written.values() if written.files.dense is not None)
        manifest, totals = self._manifest(), self._report.kept_totals
        assert totals is not None
        stage = replace(manifest.stages[-1], segments=taken.segments, prefix=taken.prefix)
        given = {lane: ordinals for one in saving.taken.values() for lane, ordinals in one.given.items()}
        ordinals = np.array([given[lane] for lane in range(manifest.lanes)], np.int64)
        run = replace(manifest, stages=(*manifest.stages[:-1], stage))
        increment = () if saving.increment is None else (saving.increment.base, saving.increment.sizes)
        header = self._schedule.header
        encoded = header.features.to_dict(), header.settings.get("encoding")
        return Contents.made(run, *encoded, taken.step, totals, self._layouts, ordinals, files, dense, *increment)

    @staticmethod
    def _told(saving: _Saving, checkpoint: Checkpoint) -> dict[str, Any]:
        """What metrics.jsonl has of it."""
        return {
            "step": checkpoint.contents.step,
            "checkpoint": str(checkpoint.path),
            "rows": sum(file.rows for file in checkpoint.contents.rows),
            "bytes": checkpoint.own_bytes,
            "seconds": max(written.files.seconds for written in saving.written.values()),
            "seconds_stalled": max(taken.seconds for taken in saving.taken.values()),
        }

    def summary(self) -> dict[str, Any]:
        """What summary.json has of all of them."""
        best = None if self._best is None else {"step": self._best.step, self._best.metric: self._best.value}
        return {"saved": self.saved, "failed": self.failed, "last_step": self.last_step, "best": best}

    @staticmethod
    def _tell(line: str) -> None:
        sys.stderr.write(f"{line}\n")


_OVER = "its training is over; save one now that it rests, with `foreload checkpoint save`"
_AFTER_FAILURE_SECONDS = 10.0  # before another one is begun
