"""How much of the traffic's time a checkpoint may take, by what it costs training: steps are compared with those before it."""

from __future__ import annotations

from collections import deque
from statistics import median

from foreload.cache.protocol.rounds.background import SHARE

LEAST_SHARE = 0.1  # so that a checkpoint comes to its end
_STEPS = 16  # that are looked at together
_TOO_SLOW, _HARDLY_SLOWER = 1.06, 1.03  # of a step, against one without a checkpoint


class StepPace:
    """Of one trainer. Its steps are reported one after the other; medians of some are compared, so that single slow ones do not count."""

    def __init__(self) -> None:
        self._before: deque[float] = deque(maxlen=8 * _STEPS)
        self._meanwhile: list[float] = []
        self._last: float | None = None
        self.share = SHARE

    def step(self, now: float, beside: bool) -> None:
        """A step has ended. now: in seconds; beside: a checkpoint was being saved."""
        last, self._last = self._last, now
        if last is None:
            return
        if not beside:
            self._before.append(now - last)
            return
        self._meanwhile.append(now - last)
        if len(self._meanwhile) < _STEPS:
            return
        slower = median(self._meanwhile) / median(self._before) if len(self._before) >= _STEPS else 1.0
        self._meanwhile.clear()
        if slower > _TOO_SLOW:
            self.share = max(self.share / 1.5, LEAST_SHARE)
        elif slower < _HARDLY_SLOWER:
            self.share = min(self.share * 1.2, SHARE)
