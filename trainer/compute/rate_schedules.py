"""Learning rates that follow the step (docs/definitions.md).

The factor of a learning rate is a pure function of the number of the training step.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from foreload.base.errors import SettingError

_FORMS = (
    "warmup:STEPS, linear:END:FACTOR, cosine:END:FACTOR or step:EVERY:FACTOR, a warmup and another one with a comma between, "
    "or points STEP:FACTOR,STEP:FACTOR,.."
)
_DECAYS = ("linear", "cosine", "step")
_NUMBER = r"[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?"
# The number of terms of the cosine's series. Up to a quarter of a turn, the next term is below the
# last bit.
_COSINE_TERMS = 11


@dataclass(frozen=True, slots=True)
class RateSchedule:
    """The factor of a learning rate at each training step.

    Steps are counted as the schedule counts them: along --after from the first on, and not anew in
    each epoch. A factor of 1 is the learning rate itself.

    Attributes:
        written: the schedule as the user gave it, without spaces.
    """

    written: str
    _factor: Callable[[int], float] = field(repr=False, compare=False)

    @classmethod
    def parse(cls, flag: str, value: Any) -> RateSchedule:
        """Parse a schedule from text; see `_FORMS`. Raises SettingError."""
        if isinstance(value, RateSchedule):
            return value
        words = value.replace(" ", "").split(",") if isinstance(value, str) else [""]
        for read in (_points, _decay):
            if (factor := read(flag, words)) is not None:
                return cls(",".join(words), factor)
        raise SettingError(f"{flag}: must be {_FORMS}; got {value!r}")

    def factor(self, step: int) -> float:
        """Return the factor of a training step, float64, finite and not negative."""
        return self._factor(step)

    def __str__(self) -> str:
        return self.written

    def __reduce__(self) -> tuple[Any, ...]:
        return RateSchedule.parse, ("", self.written)


def _points(flag: str, words: list[str]) -> Callable[[int], float] | None:
    """Parse points. The factor follows straight lines between them.

    Before the first point and after the last one, it is the factor of that point. Returns None if
    the words are not points.
    """
    matches = [re.fullmatch(rf"([0-9]+):({_NUMBER})", word) for word in words]
    points = [(int(match[1]), float(match[2])) for match in matches if match]
    if len(points) < len(words):
        return None
    steps = [step for step, _ in points]
    if any(later <= earlier for earlier, later in pairwise(steps)):
        raise SettingError(f"{flag}: steps of points must ascend; got {','.join(words)}")

    def factor(step: int) -> float:
        place = bisect_right(steps, step)
        if place in (0, len(points)):
            return points[max(place - 1, 0)][1]
        (first, low), (last, high) = points[place - 1 : place + 1]
        return low + (high - low) * ((step - first) / (last - first))

    return factor


def _decay(flag: str, words: list[str]) -> Callable[[int], float] | None:
    """Parse a warm-up, a decay, or both. Returns None if the words are something else."""
    warmup = re.fullmatch(r"warmup:([0-9]+)", words[0])
    begin = int(warmup[1]) if warmup else 0
    rest = words[1:] if warmup else words
    then = re.fullmatch(rf"({'|'.join(_DECAYS)}):([0-9]+):({_NUMBER})", rest[0]) if len(rest) == 1 else None
    if (rest and then is None) or (warmup and not begin):
        return None
    after: Callable[[int], float] = _constant
    if then is not None:
        name, steps, least = then[1], int(then[2]), float(then[3])
        if steps <= (0 if name == "step" else begin):
            where = (
                "must have an interval of at least 1 step" if name == "step" else f"must end after step {begin}, where it begins"
            )
            raise SettingError(f"{flag}: {name} {where}; got {then[0]}")
        after = _AFTER[name](begin, steps, least)

    def factor(step: int) -> float:
        return (step + 1) / begin if step < begin else after(step)

    return factor


def _constant(step: int) -> float:
    return 1.0


def _linear(begin: int, end: int, least: float) -> Callable[[int], float]:
    return lambda step: 1.0 + (least - 1.0) * (min(step - begin, end - begin) / (end - begin))


def _cosine(begin: int, end: int, least: float) -> Callable[[int], float]:
    def factor(step: int) -> float:
        return least + (1.0 - least) * ((1.0 + _cosine_of_half_turns(min(step - begin, end - begin) / (end - begin))) / 2.0)

    return factor


def _step(begin: int, every: int, least: float) -> Callable[[int], float]:
    return lambda step: power(least, (step - begin) // every)


_AFTER = {"linear": _linear, "cosine": _cosine, "step": _step}


def _cosine_of_half_turns(x: float) -> float:
    """Return cos(pi x) for x from 0 to 1, by its series.

    The series has only sums and products, which are the same on every processor. A library's cosine
    is not.
    """
    if x > 0.5:
        return -_cosine_of_half_turns(1.0 - x)
    square, total = (math.pi * x) * (math.pi * x), 1.0
    for term in range(_COSINE_TERMS, 0, -1):
        total = 1.0 - square / ((2 * term - 1) * (2 * term)) * total
    return total


def power(base: float, exponent: int) -> float:
    """Return a power by squaring, from the lowest bit up. There are only products."""
    result, square = 1.0, base
    while exponent:
        if exponent & 1:
            result *= square
        square *= square
        exponent >>= 1
    return result
