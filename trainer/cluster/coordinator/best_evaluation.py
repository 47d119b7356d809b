"""The best evaluation of a run, as the coordinator knows it: noted where its checkpoint is, and training that waits until that can be begun."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from foreload.trainer.checkpoints.best import Best, best_in
from foreload.trainer.checkpoints.part import GRACE_SECONDS
from foreload.trainer.cluster.coordinator.background_work import FolderWork
from foreload.trainer.cluster.coordinator.training_call import TrainingCall
from foreload.trainer.cluster.messages.facts import GoOnAfter, StopWanted
from foreload.trainer.cluster.messages.rendezvous import Rendezvous
from foreload.trainer.errors import CheckpointError
from foreload.trainer.storage import AnyFolder

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
