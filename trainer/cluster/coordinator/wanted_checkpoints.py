"""Which checkpoint is wanted next while a run trains: what users ask for, what is due, and what an evaluation to come may make the best."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from foreload.pipelines.schedule.format import Header
from foreload.trainer.cluster.messages.control import AskCheckpoint, AskCheckpointed, CheckpointBegun, CheckpointProgress, Refused
from foreload.trainer.job.job import TrainJob
from foreload.trainer.storage import AnyFolder, place

_AFTER_FAILURE_SECONDS = 10.0  # before another one is begun
_BUSY_PAUSE_SECONDS = 1.0  # before it is tried again in a folder where another process is saving one
_BUSY_SECONDS = 60.0  # after which that is a failure
_NOTICE_STEPS = 32  # before the step of an evaluation, and at most a quarter of the steps between two, nothing but the checkpoint of that is begun
_EVALUATIONS_AHEAD = 100


def why_over(at_rest: bool) -> str:
    """Why a checkpoint was not saved while its run trained. at_rest: the run has come to rest since, or else was broken off."""
    return "its training is over" + ("; save one now that it rests, with `foreload checkpoint save`" if at_rest else "")


@dataclass(slots=True)
class Asked:
    """What a user asked for: where it is to be, and what became of it. gave_way: to the checkpoint of an evaluation, once."""

    folder: AnyFolder
    progress: CheckpointProgress = field(default_factory=lambda: CheckpointProgress(False))
    gave_way: bool = False


@dataclass(frozen=True, slots=True)
class Wanted:
    """A checkpoint that is to be. asked: by whom, None: it is due; every, steps: as in CheckpointPlan."""

    folder: AnyFolder
    asked: Asked | None
    every: int | None
    steps: tuple[int, ...]


class WantedCheckpoints:
    """Which one of a call is next."""

    def __init__(self, job: TrainJob, folder: AnyFolder, header: Header, clock: Callable[[], float]) -> None:
        """folder: where they are to be, unless who asks for one says otherwise; clock: seconds."""
        self._clock = clock
        self._every, self._folder = job.checkpoint_every, folder
        self._next_evaluated = header.next_evaluated if job.keep_best is not None else lambda step: None
        self._notice = min(_NOTICE_STEPS, min(header.eval_every or header.steps_per_epoch, header.steps_per_epoch) // 4)
        self._took_steps = 0  # how many steps were trained while a checkpoint was being saved, at most
        interval = None if self._every is None else self._every.seconds
        self._due_at = self._clock() + (interval or 0.0)  # the next one is not begun before
        self._busy_since: float | None = None  # for how long others have saved where one was to be
        self._busy_until = 0.0
        self._asked: list[Asked] = []
        self._to_begin: list[Asked] = []

    def ask(self, request: AskCheckpoint) -> CheckpointBegun:
        """Have one begun as soon as none is under way."""
        asked = Asked(place(request.to) if request.to is not None else self._folder)
        self._asked.append(asked)
        self._to_begin.append(asked)
        return CheckpointBegun(len(self._asked) - 1)

    def progress(self, request: AskCheckpointed) -> CheckpointProgress | Refused:
        """What became of one that was asked for."""
        if not 0 <= request.number < len(self._asked):
            return Refused(f"no checkpoint {request.number} was asked for")
        return self._asked[request.number].progress

    def next(self, last: int) -> Wanted | None:
        """The one that is to be begun now, if any. last: the last step trained."""
        steps = self._evaluations_after(last)
        if self._is_near(steps, last):
            return Wanted(self._folder, None, None, steps)
        if self._to_begin and self.may_begin():
            asked = self._to_begin.pop(0)
            return Wanted(asked.folder, asked, 1, ())
        every = self._due(steps, last)
        return None if every is None and not steps else Wanted(self._folder, None, every, steps)

    def _due(self, steps: tuple[int, ...], last: int) -> int | None:
        """Of how many steps a multiple is due; None: no one is, or it might not be over when the next evaluation comes."""
        if self._every is None or self._clock() < self._due_at or not self.may_begin():
            return None
        every = self._every.steps or 1
        step = -(-(last + 2) // every) * every - 1
        return None if steps and steps[0] - 2 * self._took_steps <= step < steps[0] else every

    def may_begin(self) -> bool:
        """Whether no other process was saving one in its folder a moment ago."""
        return self._busy_since is None or self._clock() >= self._busy_until

    def waits(self) -> bool:
        """Another process saves one in its folder: whether that is waited for. If not, it has failed."""
        now = self._clock()
        if self._busy_since is None:
            self._busy_since = now
        if now - self._busy_since > _BUSY_SECONDS:
            self._busy_since = None
            return False
        self._busy_until = now + _BUSY_PAUSE_SECONDS
        return True

    def _evaluations_after(self, step: int) -> tuple[int, ...]:
        """The steps of the next evaluations: so many that training does not pass all of them before a checkpoint is of one."""
        steps: list[int] = []
        while len(steps) < _EVALUATIONS_AHEAD and (following := self._next_evaluated(step)) is not None:
            steps.append(following)
            step = following
        return tuple(steps)

    def _is_near(self, steps: tuple[int, ...], last: int) -> bool:
        return bool(steps) and steps[0] - last <= self._notice

    def is_sooner(self, wanted: Wanted, last: int) -> bool:
        """Whether another one is to be now, while the step of this one, which is not taken yet, may be far away."""
        steps = self._evaluations_after(last)
        if wanted.asked is not None or self._is_near(steps, last):
            return False
        # It is for an evaluation to come, while one is due by the clock.
        return (bool(self._to_begin) and self.may_begin()) or (wanted.every is None and self._due(steps, last) is not None)

    def gives_way(self, wanted: Wanted, step: int, last: int) -> bool:
        """Whether one of a step, which is being written, is to make room for that of an evaluation which is near. last: the last step trained."""
        if self._next_evaluated(step - 1) == step or (wanted.asked is not None and wanted.asked.gave_way):
            return False
        if not self._is_near(self._evaluations_after(last), last):
            return False
        if wanted.asked is not None:
            wanted.asked.gave_way = True
        return True

    def again(self, wanted: Wanted) -> None:
        """Nothing came of it, and nothing is wrong with where it is put: what was asked for is next."""
        if wanted.asked is not None:
            self._to_begin.insert(0, wanted.asked)

    def now_saved(self, wanted: Wanted, path: str, began: float, steps: int) -> None:
        """It is there. began: when it began; steps: how many were trained meanwhile."""
        self._took_steps, self._busy_since = max(self._took_steps, steps), None
        if wanted.asked is not None:
            wanted.asked.progress = CheckpointProgress(True, path)
        elif self._every is not None and self._every.seconds is not None:
            self._due_at = began + self._every.seconds

    def failed(self, wanted: Wanted, why: str) -> None:
        """There is none, though one was due or asked for."""
        if self._every is not None:
            self._due_at = self._clock() + (self._every.seconds or _AFTER_FAILURE_SECONDS)
        if wanted.asked is not None:
            wanted.asked.progress = CheckpointProgress(True, failed=why)

    def refuse(self, why: str) -> None:
        """None that was asked for will be begun any more."""
        for asked in self._to_begin:
            asked.progress = CheckpointProgress(True, failed=why)
        self._to_begin.clear()
