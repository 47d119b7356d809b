"""The adviser of one call: it keeps what was measured and tried, and judges each change before the next.

It knows no clock and no process. The coordinator asks it at the end of each window of steps, and a
simulation can do so as well.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from foreload.trainer.adjusting.decision import (
    Action,
    MoveShard,
    ReplaceTrainer,
    Resize,
    Situation,
    Trial,
    Verdict,
    decide,
    gone_further,
    judged,
    remembered,
    undone,
)
from foreload.trainer.adjusting.prediction import Measured
from foreload.trainer.adjusting.size import Size

AGREED = 2
"""So many windows in a row must want a change that saves time before it is made."""
PLAIN_GAIN = 0.5
"""A change that saves this share of the time to come is made after one window: the sooner, the fewer rows are to be moved."""


@dataclass(frozen=True, slots=True)
class Judged:
    """A change whose effect is known.

    Attributes:
        trial: the change.
        measured: what was measured since.
    """

    trial: Trial
    verdict: Verdict
    measured: Measured


@dataclass(frozen=True, slots=True)
class Advice:
    """What follows from a window.

    Attributes:
        judged: the last change, if it is judged now.
        missed: the size to which the last action should have led, if it did not lead there.
        action: the next action, if any.
    """

    judged: Judged | None = None
    missed: Size | None = None
    action: Action | None = None


@dataclass(slots=True)
class Adviser:
    """What was measured and tried in one call.

    Attributes:
        known: what was last measured with each size.
        rejected: the sizes that did not pay, or could not be had.
        trial: the change that is under way.
        spent_seconds: what changes that did not pay have cost.
    """

    known: dict[Size, Measured] = field(default_factory=dict)
    rejected: frozenset[Size] = frozenset()
    trial: Trial | None = None
    spent_seconds: float = 0.0
    _size: Size | None = None  # at the last window
    # The action under way, and the time trained when it was advised.
    _action: Resize | None = None
    _acted_at: float = 0.0
    # What the last windows wanted, without its reason, None for another size, and how many in a row
    # wanted that. The sizes may differ a little.
    _wanted: tuple[MoveShard | ReplaceTrainer | None, int] = (None, 0)

    def look(self, measured: Measured, seen: Situation) -> Advice:
        """Judge the last change, and decide about the next one.

        Args:
            measured: the last window.
            seen: the situation. What this adviser keeps itself is filled in here.
        """
        now, missed, over = seen.now, None, None
        if self._action is not None and self._action.to != now:
            missed = self._action.to
            self.reject(self._action)
        elif self._action is None and self._size not in (None, now):
            # Someone else has changed the size.
            self.trial = None
        self._action, self._size = None, now
        self.known, self.rejected = remembered(self.known, self.rejected, now, measured, seen.machine)
        action: Action | None = None
        # A slow shard holds up every step: it is moved first, and the change is judged afterwards.
        if self.trial is not None and self.trial.target == now and seen.slow_shard is None:
            trial, self.trial = self.trial, None
            if not trial.undoes:
                over = Judged(trial, judged(trial, measured, seen.machine), measured)
                action = self._undone(over, replace(seen, known=self.known))
        if action is None:
            action = decide(
                replace(seen, known=self.known, rejected=self.rejected, trial=self.trial, spent_seconds=self.spent_seconds)
            )
        if action is None:
            # A change that is half way, and cannot go on, is never judged.
            self.trial, self._wanted = None, (None, 0)
        elif not self._is_agreed(action, measured.seconds * seen.ahead.count):
            action = None
        else:
            self._wanted = (None, 0)
        return Advice(over, missed, action)

    def _undone(self, over: Judged, situation: Situation) -> Resize | None:
        """Return what undoes a change that did not pay, or goes on from it, if anything does."""
        trial, verdict = over.trial, over.verdict
        if verdict.paid:
            return None
        if (further := gone_further(replace(situation, rejected=self.rejected), trial)) is not None:
            return further
        self.rejected |= {trial.target}
        # The change and its undoing, and the time that steps took longer meanwhile.
        longer = max(-verdict.gain, 0.0) * (situation.trained_seconds - self._acted_at)
        self.spent_seconds += 2 * situation.costs.of(trial.origin, trial.target) + longer
        return undone(situation, trial, verdict)

    def _is_agreed(self, action: Action, left: float) -> bool:
        """Whether enough windows in a row wanted this. What goes on, cannot wait, or plainly pays, is agreed at once.

        Args:
            left: the seconds to come, if nothing changes.
        """
        if isinstance(action, Resize):
            gain, trial = action.gain_seconds, action.trial
            if gain is None or trial is None or trial.goes_on or gain >= PLAIN_GAIN * left:
                return True
        what = None if isinstance(action, Resize) else replace(action, reason="")
        last, times = self._wanted
        self._wanted = (what, times + 1 if what == last else 1)
        return self._wanted[1] >= AGREED

    def acts(self, action: Action, trained_seconds: float) -> None:
        """Note that an action was begun, at this time of training."""
        self._acted_at = trained_seconds
        if isinstance(action, Resize):
            self._action, self.trial = action, action.trial

    def withdraw(self) -> None:
        """Forget the action under way: it is given up for now, through no fault of its own."""
        self._action = self.trial = None

    def reject(self, action: Action) -> None:
        """Note that an action could not be done, or did not lead where it should."""
        if isinstance(action, Resize):
            self.rejected |= {action.to if action.trial is None else action.trial.target}
        self.withdraw()
