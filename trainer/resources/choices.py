"""What may be chosen for a job, what each choice takes and costs, which of them no other beats in both, and which one is meant.

Pure: predictions come in, a choice with its reason goes out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

GIB = 2**30
_ALIKE = 1.03  # two predicted times, or costs, this close are one


@dataclass(frozen=True, slots=True)
class Choice:
    """A configuration, and what it is predicted to take over the whole schedule.

    parity: off or K+R; slots: of a lane; prepared: whether the schedule at hand has them; seconds, seconds_low, seconds_high: of its steps, with the
    interval's bounds; ms_step: on average; cores: that it keeps busy; trainer_bytes, store_bytes: memory of one trainer, and of all servers.
    """

    trainers: int
    shards: int
    parity: str
    copies: int
    slots: int
    prepared: bool
    seconds: float
    seconds_low: float
    seconds_high: float
    ms_step: float
    cores: float
    trainer_bytes: int
    store_bytes: int

    @property
    def memory_bytes(self) -> int:
        """Of everything."""
        return self.trainers * self.trainer_bytes + self.store_bytes

    @property
    def core_hours(self) -> float:
        """Cores kept busy, times hours."""
        return self.cores * self.seconds / 3600

    @property
    def gb_hours(self) -> float:
        """Memory in GiB, times hours."""
        return self.memory_bytes / GIB * self.seconds / 3600

    def cost(self, gb_price: float) -> float:
        """In core hours. gb_price: of a GB hour, in core hours."""
        return self.core_hours + gb_price * self.gb_hours


def front(choices: Sequence[Choice], gb_price: float) -> list[Choice]:
    """Those of which none other is both as fast and as cheap, the fastest first."""
    best: list[Choice] = []
    for one in sorted(choices, key=lambda choice: (choice.seconds, choice.cost(gb_price))):
        if not best or one.cost(gb_price) < best[-1].cost(gb_price):
            best.append(one)
    return best


def choose(
    choices: Sequence[Choice], gb_price: float, deadline: float | None = None, budget: float | None = None
) -> tuple[Choice, str]:
    """The one that is meant, and why. deadline: seconds; budget: core hours; at most one of the two is given. There must be a choice.

    One for which the schedule is prepared goes before another that is hardly faster or cheaper.
    """
    chosen, reason = _best(choices, gb_price, deadline, budget)
    near = [
        one
        for one in choices
        if one.prepared and one.seconds <= _ALIKE * chosen.seconds and one.cost(gb_price) <= _ALIKE * chosen.cost(gb_price)
    ]
    if near and not chosen.prepared:
        return _cheapest(near, gb_price), f"{reason}, but for one that is hardly better and would have to be prepared"
    return chosen, reason


def _best(choices: Sequence[Choice], gb_price: float, deadline: float | None, budget: float | None) -> tuple[Choice, str]:
    fastest = min(choices, key=lambda one: (one.seconds, one.cost(gb_price)))
    if deadline is not None:
        surely = [one for one in choices if one.seconds_high <= deadline]
        perhaps = [one for one in choices if one.seconds <= deadline]
        if surely:
            return _cheapest(surely, gb_price), f"the cheapest that ends within {duration(deadline)}, its interval included"
        if perhaps:
            return (
                min(perhaps, key=lambda one: (one.seconds_high, one.cost(gb_price))),
                f"it ends within {duration(deadline)} as predicted; no choice does so with its whole interval, and of this one least lies beyond",
            )
        return fastest, f"none ends within {duration(deadline)}: this is the fastest"
    if budget is not None:
        within = [one for one in choices if one.cost(gb_price) <= budget]
        if within:
            return min(
                within, key=lambda one: (one.seconds, one.cost(gb_price))
            ), f"the fastest that costs at most {budget:g} core hours"
        return _cheapest(choices, gb_price), f"none costs at most {budget:g} core hours: this is the cheapest"
    alike = [one for one in choices if one.seconds <= _ALIKE * fastest.seconds]
    chosen = _cheapest(alike, gb_price)
    if chosen is fastest:
        return chosen, "the fastest"
    return chosen, f"the cheapest of {len(alike)} that are, within {_ALIKE - 1:.0%}, as fast as the fastest"


def _cheapest(choices: Sequence[Choice], gb_price: float) -> Choice:
    return min(choices, key=lambda one: (one.cost(gb_price), one.seconds))


def duration(seconds: float) -> str:
    """A time for a person."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
