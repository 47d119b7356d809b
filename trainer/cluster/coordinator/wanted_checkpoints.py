"""Decide which checkpoint is saved next.

It is one that a user requested, one that is due, or one of an evaluation that may be the best.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from foreload.pipelines.schedule.format import Header
from foreload.trainer.checkpoints.best import Best, best_in
from foreload.trainer.checkpoints.part import GRACE_SECONDS
from foreload.trainer.cluster.coordinator.background_work import FolderWork
from foreload.trainer.cluster.coordinator.training_call import TrainingCall
from foreload.trainer.cluster.messages.control import AskCheckpoint, AskCheckpointed, CheckpointBegun, CheckpointProgress, Refused
from foreload.trainer.cluster.messages.facts import GoOnAfter, StopWanted
from foreload.trainer.cluster.messages.rendezvous import Rendezvous
from foreload.trainer.errors import CheckpointError
from foreload.trainer.job.job import TrainJob
from foreload.trainer.storage import AnyFolder, place

_AFTER_FAILURE_SECONDS = 10.0  # pause after a failed checkpoint before the next one that is due
# While another process saves a checkpoint in the folder: the pause between two tries, and how long
# they go on before the checkpoint has failed.
_BUSY_PAUSE_SECONDS = 1.0
_BUSY_SECONDS = 60.0
# In the last steps before an evaluation only the checkpoint of that evaluation is begun. They are
# so many, but at most a quarter of the steps between two evaluations.
_NOTICE_STEPS = 32
_EVALUATIONS_AHEAD = 100  # the most evaluations of which a plan names the steps


def why_over(stopped: bool) -> str:
    """Return why a checkpoint was not saved while its run trained.

    Args:
        stopped: Whether the run has stopped since, with everything saved. If False, it crashed.
    """
    return "its training is over" + ("; save one now that it is stopped, with `foreload checkpoint save`" if stopped else "")


@dataclass(slots=True)
class Asked:
    """A checkpoint that a user requested.

    Attributes:
        folder: The folder of checkpoints that gets it.
        progress: What the user learns about it.
        gave_way: Whether it was given up once for the checkpoint of an evaluation.
    """

    folder: AnyFolder
    progress: CheckpointProgress = field(default_factory=lambda: CheckpointProgress(False))
    gave_way: bool = False


@dataclass(frozen=True, slots=True)
class Wanted:
    """A checkpoint to save.

    Attributes:
        folder: The folder of checkpoints that gets it.
        asked: The user's request. If None, the checkpoint is due or for an evaluation.
        every, steps: As in `CheckpointPlan`.
    """

    folder: AnyFolder
    asked: Asked | None
    every: int | None
    steps: tuple[int, ...]


class WantedCheckpoints:
    """Decides which checkpoint of a call is next."""

    def __init__(self, job: TrainJob, folder: AnyFolder, header: Header, clock: Callable[[], float]) -> None:
        """Set up the decision for one call.

        Args:
            folder: The folder of checkpoints, unless a request names another one.
            clock: Returns the time in seconds.
        """
        self._clock = clock
        self._every, self._folder = job.checkpoint_every, folder
        self._next_evaluated = header.next_evaluated if job.keep_best is not None else lambda step: None
        self._notice = min(_NOTICE_STEPS, min(header.eval_every or header.steps_per_epoch, header.steps_per_epoch) // 4)
        self._took_steps = 0  # the most steps that were trained while a checkpoint was being saved
        interval = None if self._every is None else self._every.seconds
        self._due_at = self._clock() + (interval or 0.0)  # no checkpoint is due earlier
        # Since when, and at least until when, other processes save in the folder of the next one.
        self._busy_since: float | None = None
        self._busy_until = 0.0
        self._asked: list[Asked] = []
        self._to_begin: list[Asked] = []

    def ask(self, request: AskCheckpoint) -> CheckpointBegun:
        """Begin a requested checkpoint as soon as none is under way."""
        asked = Asked(place(request.to) if request.to is not None else self._folder)
        self._asked.append(asked)
        self._to_begin.append(asked)
        return CheckpointBegun(len(self._asked) - 1)

    def progress(self, request: AskCheckpointed) -> CheckpointProgress | Refused:
        """Return the progress of a requested checkpoint."""
        if not 0 <= request.number < len(self._asked):
            return Refused(f"no checkpoint {request.number} was requested")
        return self._asked[request.number].progress

    def next(self, last: int) -> Wanted | None:
        """Return the checkpoint to begin now, or None.

        Args:
            last: The last step trained.
        """
        steps = self._evaluations_after(last)
        # An evaluation that is near comes first. Then come requests, then what is due or may be of
        # the best evaluation.
        if self._is_near(steps, last):
            return Wanted(self._folder, None, None, steps)
        if self._to_begin and self.may_begin():
            asked = self._to_begin.pop(0)
            return Wanted(asked.folder, asked, 1, ())
        every = self._due(steps, last)
        return None if every is None and not steps else Wanted(self._folder, None, every, steps)

    def _due(self, steps: tuple[int, ...], last: int) -> int | None:
        """Return the number of steps of which a multiple is due for a checkpoint.

        Returns None if no checkpoint is due, or if it might not be over at the next evaluation.
        """
        if self._every is None or self._clock() < self._due_at or not self.may_begin():
            return None
        every = self._every.steps or 1
        # The first step that trainers can still agree on is `last + 1`. Steps are numbered from 0,
        # so after step s there are s + 1.
        step = -(-(last + 2) // every) * every - 1
        return None if steps and steps[0] - 2 * self._took_steps <= step < steps[0] else every

    def may_begin(self) -> bool:
        """Whether no other process was saving a checkpoint in the folder a moment ago."""
        return self._busy_since is None or self._clock() >= self._busy_until

    def waits(self) -> bool:
        """Note that another process saves a checkpoint in the folder.

        Returns:
            Whether to wait and try again. If False, the checkpoint has failed.
        """
        now = self._clock()
        if self._busy_since is None:
            self._busy_since = now
        if now - self._busy_since > _BUSY_SECONDS:
            self._busy_since = None
            return False
        self._busy_until = now + _BUSY_PAUSE_SECONDS
        return True

    def _evaluations_after(self, step: int) -> tuple[int, ...]:
        """Return the steps of the next evaluations.

        They are so many that training does not pass all of them before one gets a checkpoint.
        """
        steps: list[int] = []
        while len(steps) < _EVALUATIONS_AHEAD and (following := self._next_evaluated(step)) is not None:
            steps.append(following)
            step = following
        return tuple(steps)

    def _is_near(self, steps: tuple[int, ...], last: int) -> bool:
        return bool(steps) and steps[0] - last <= self._notice

    def is_sooner(self, wanted: Wanted, last: int) -> bool:
        """Return whether another checkpoint comes before one whose step may still be far away.

        Args:
            wanted: The checkpoint under way. No trainer has taken it yet.
            last: The last step trained.
        """
        steps = self._evaluations_after(last)
        if wanted.asked is not None or self._is_near(steps, last):
            return False
        # The checkpoint under way gives way to a request. If it is only for an evaluation to come,
        # it also gives way to a checkpoint that is due.
        return (bool(self._to_begin) and self.may_begin()) or (wanted.every is None and self._due(steps, last) is not None)

    def gives_way(self, wanted: Wanted, step: int, last: int) -> bool:
        """Return whether a checkpoint that is being written gives way to that of a near evaluation.

        A requested checkpoint gives way once; this is noted here.

        Args:
            wanted: The checkpoint that is being written.
            step: Its step.
            last: The last step trained.
        """
        if self._next_evaluated(step - 1) == step or (wanted.asked is not None and wanted.asked.gave_way):
            return False
        if not self._is_near(self._evaluations_after(last), last):
            return False
        if wanted.asked is not None:
            wanted.asked.gave_way = True
        return True

    def again(self, wanted: Wanted) -> None:
        """Put a requested checkpoint first in line again. It was given up, but did not fail."""
        if wanted.asked is not None:
            self._to_begin.insert(0, wanted.asked)

    def now_saved(self, wanted: Wanted, path: str, began: float, steps: int) -> None:
        """Note that a checkpoint was published.

        Args:
            began: When it began, by the clock.
            steps: The number of steps trained since its own.
        """
        self._took_steps, self._busy_since = max(self._took_steps, steps), None
        if wanted.asked is not None:
            wanted.asked.progress = CheckpointProgress(True, path)
        elif self._every is not None and self._every.seconds is not None:
            self._due_at = began + self._every.seconds

    def failed(self, wanted: Wanted, why: str) -> None:
        """Note that a checkpoint which was due or requested has failed."""
        if self._every is not None:
            self._due_at = self._clock() + (self._every.seconds or _AFTER_FAILURE_SECONDS)
        if wanted.asked is not None:
            wanted.asked.progress = CheckpointProgress(True, failed=why)

    def refuse(self, why: str) -> None:
        """Fail all requests whose checkpoint has not begun. No checkpoint is begun from now on."""
        for asked in self._to_begin:
            asked.progress = CheckpointProgress(True, failed=why)
        self._to_begin.clear()


OVERDUE = f"it could not begin within {GRACE_SECONDS:.0f} s, and training was about to end, or the trainers to change"


@dataclass(slots=True)
class HeldTraining:
    """Training that waits after the best evaluation so far, until trainers take its checkpoint.

    Attributes:
        term: The term in which training waits.
        best: The evaluation after which it waits.
        since: When the wait began, by the call's clock.
        number: The number of the checkpoint, once it is begun.
        until: When training goes on in any case. None until training, or the term, is to end.
    """

    term: int
    best: Best
    since: float
    number: int | None = None
    until: float | None = None


class BestEvaluation:
    """The best evaluation of one call.

    Attributes:
        noted: The best evaluation whose checkpoint exists.
        held: Training that waits after a better evaluation, or None if training goes on.
        seconds_waited: How long training has waited in all.
    """

    def __init__(self, call: TrainingCall, folder: AnyFolder, rendezvous: Rendezvous, folder_work: FolderWork) -> None:
        """Read the best evaluation that this run noted in the folder of checkpoints."""
        noted = best_in(folder, call.manifest.run_id)
        self.noted = noted if noted is not None and noted.metric == call.job.keep_best else None
        self._say, self._clock = call.say, call.clock
        self.held: HeldTraining | None = None
        self.seconds_waited = 0.0
        self._folder, self._rendezvous, self._folder_work = folder, rendezvous, folder_work

    def note(self, best: Best) -> None:
        """Note a best evaluation, the checkpoint of whose step exists."""
        self.noted = best

        def note() -> None:
            try:
                best.write(self._folder)
            except (OSError, CheckpointError) as error:
                self._say(f"foreload: warning: {self._folder}: the best checkpoint cannot be recorded: {error}")

        self._folder_work.submit(note)

    def so_far(self, under_way: Best | None) -> Best | None:
        """Return the best evaluation so far.

        Args:
            under_way: The best evaluation whose checkpoint is being written, if one is.
        """
        return self.held.best if self.held is not None else under_way or self.noted

    def is_overdue(self, goes_on: bool) -> bool:
        """Return whether training has waited too long, now that it or its term is to end.

        Args:
            goes_on: Whether training goes on, with the same trainers.
        """
        held = self.held
        assert held is not None
        if held.until is None and (not goes_on or self._rendezvous.poll(StopWanted) is not None):
            held.until = self._clock() + GRACE_SECONDS
        return held.until is not None and self._clock() > held.until

    def end_wait(self) -> float:
        """Record that the wait is over, with the checkpoint taken or not. Returns its seconds."""
        assert self.held is not None
        waited = self._clock() - self.held.since
        self.held = None
        self.seconds_waited += waited
        return waited

    def go_on(self, missing: str) -> None:
        """Let training go on without a checkpoint of its step.

        Args:
            missing: Why there is no checkpoint, for the user.
        """
        held = self.held
        assert held is not None
        self.end_wait()
        self._rendezvous.publish(GoOnAfter(), held.term, held.best.step)
        self.warn_missing(held.best, missing)

    def warn_missing(self, best: Best, why: str) -> None:
        """Warn that the best evaluation so far has no checkpoint of its step."""
        self._say(
            f"foreload: warning: the evaluation after step {best.step} was better than all that have a checkpoint, but the "
            f"checkpoint of its own step is missing: {why}"
        )

    def summary(self) -> dict[str, Any]:
        """Return the figures of the best evaluation for summary.json."""
        noted = self.noted
        best = None if noted is None else {"step": noted.step, noted.metric: noted.value}
        return {"seconds_waited": self.seconds_waited, "best": best}
