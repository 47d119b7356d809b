"""Decide which checkpoint is wanted next: one that a user asked for, one that is due, or one of the best evaluation so far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from foreload.pipelines.schedule.format import Header
from foreload.trainer.checkpoints.lineage import Best, best_in
from foreload.trainer.checkpoints.part import GRACE_SECONDS
from foreload.trainer.cluster.coordinator.background_work import FolderWork
from foreload.trainer.cluster.coordinator.training_call import TrainingCall
from foreload.trainer.cluster.messages.control import AskCheckpoint, AskCheckpointed, CheckpointBegun, CheckpointProgress, Refused
from foreload.trainer.cluster.messages.facts import GoOnAfter, StopWanted
from foreload.trainer.cluster.messages.rendezvous import Rendezvous
from foreload.trainer.errors import CheckpointError
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


OVERDUE = f"it could not be begun within {GRACE_SECONDS:.0f} s, and training was to end, or trainers to change"


@dataclass(slots=True)
class HeldTraining:
    """Training waits behind an evaluation, the best so far, until a copy is made for its checkpoint. term: in which; since: when it began to, by
    the call's clock; number: of that checkpoint, once it is begun; until: when training goes on in any case, once it is to end.
    """

    term: int
    best: Best
    since: float
    number: int | None = None
    until: float | None = None


class BestEvaluation:
    """Of one call. noted: the best one whose checkpoint is there; held: training waits behind one that is better; seconds_waited: how long
    it did so in all.
    """

    def __init__(self, call: TrainingCall, folder: AnyFolder, rendezvous: Rendezvous, folder_work: FolderWork) -> None:
        """folder: of checkpoints."""
        noted = best_in(folder, call.manifest.run_id)
        self.noted = noted if noted is not None and noted.metric == call.job.keep_best else None
        self._say, self._clock = call.say, call.clock
        self.held: HeldTraining | None = None
        self.seconds_waited = 0.0
        self._folder, self._rendezvous, self._folder_work = folder, rendezvous, folder_work

    def note(self, best: Best) -> None:
        """The checkpoint of its step is there."""
        self.noted = best

        def note() -> None:
            try:
                best.write(self._folder)
            except (OSError, CheckpointError) as error:
                self._say(f"foreload: warning: {self._folder}: the best checkpoint cannot be noted: {error}")

        self._folder_work.submit(note)

    def so_far(self, under_way: Best | None) -> Best | None:
        """The best evaluation of all. under_way: that whose checkpoint is being written, if it is of one."""
        return self.held.best if self.held is not None else under_way or self.noted

    def is_overdue(self, goes_on: bool) -> bool:
        """Whether training has waited for long enough, as it is to end, or to change trainers. goes_on: it is not."""
        held = self.held
        assert held is not None
        if held.until is None and (not goes_on or self._rendezvous.poll(StopWanted) is not None):
            held.until = self._clock() + GRACE_SECONDS
        return held.until is not None and self._clock() > held.until

    def has_replica(self) -> float:
        """All that wait have made their copy, and go on; returns how long they waited, in seconds."""
        assert self.held is not None
        waited = self._clock() - self.held.since
        self.held = None
        self.seconds_waited += waited
        return waited

    def go_on(self, missing: str) -> None:
        """Have training wait no more, though there is to be no checkpoint of its step. missing: why."""
        held = self.held
        assert held is not None
        self.has_replica()
        self._rendezvous.publish(GoOnAfter(), held.term, held.best.step)
        self.tell_missing(held.best, missing)

    def tell_missing(self, best: Best, why: str) -> None:
        """Report that an evaluation was better than those whose checkpoints are there, and that there is no checkpoint of its step."""
        self._say(
            f"foreload: warning: the evaluation after step {best.step} was better than all whose checkpoints are there, but that of its "
            f"own step is missing: {why}"
        )

    def summary(self) -> dict[str, Any]:
        """What summary.json has of it."""
        noted = self.noted
        best = None if noted is None else {"step": noted.step, noted.metric: noted.value}
        return {"seconds_waited": self.seconds_waited, "best": best}
