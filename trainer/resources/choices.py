"""The configurations to choose from for a job, and the choice.

Finds the configurations that no other beats in both time and cost, and chooses one, with a reason.
Pure functions on predictions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foreload.base.progress import duration

GIB = 2**30
_ALIKE = 1.03  # two predicted times or costs within this factor count as equal


@dataclass(frozen=True, slots=True)
class Choice:
    """A configuration, and its predicted time and resources over the whole schedule.

    Attributes:
        trainers: the number of trainers.
        threads: the number of threads of each trainer.
        shards: the number of store shards.
        parity: "off" or K+R.
        copies: the number of trainers that hold each lane.
        slots: the number of slots of a lane.
        prepared: whether the given schedule has this number of slots.
        seconds: the predicted time of the training steps.
        seconds_low: the lower bound of its interval.
        seconds_high: the upper bound of its interval.
        ms_step: the average time of a step, in milliseconds.
        cores: the number of cores that the job keeps busy.
        trainer_bytes: the memory of one trainer.
        store_bytes: the memory of all servers.
    """

    trainers: int
    threads: int
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
        """The memory of all trainers and servers."""
        return self.trainers * self.trainer_bytes + self.store_bytes

    @property
    def core_hours(self) -> float:
        """The busy cores times the hours."""
        return self.cores * self.seconds / 3600

    @property
    def gb_hours(self) -> float:
        """The memory in GiB times the hours."""
        return self.memory_bytes / GIB * self.seconds / 3600

    def cost(self, gb_price: float) -> float:
        """Return the cost in core hours.

        Args:
            gb_price: the price of a GB hour, in core hours.
        """
        return self.core_hours + gb_price * self.gb_hours


def front(choices: Sequence[Choice], gb_price: float) -> list[Choice]:
    """Return the choices that no other choice beats in both time and cost, the fastest first.

    Args:
        gb_price: the price of a GB hour, in core hours.
    """
    best: list[Choice] = []
    for one in sorted(choices, key=lambda choice: (choice.seconds, choice.cost(gb_price))):
        if not best or one.cost(gb_price) < best[-1].cost(gb_price):
            best.append(one)
    return best


def choose(
    choices: Sequence[Choice], gb_price: float, deadline: float | None = None, budget: float | None = None
) -> tuple[Choice, str]:
    """Return the best choice, and the reason.

    With a deadline the best choice is the cheapest one that meets it. With a budget it is the
    fastest one that stays within it. Otherwise it is the fastest one, or the cheapest of those that
    are about as fast. A choice for which the schedule is prepared is preferred to one that is
    hardly faster or cheaper.

    Args:
        choices: at least one choice.
        gb_price: the price of a GB hour, in core hours.
        deadline: the deadline in seconds. At most one of deadline and budget is given.
        budget: the budget in core hours.
    """
    chosen, reason = _best(choices, gb_price, deadline, budget)
    near = [
        one
        for one in choices
        if one.prepared and one.seconds <= _ALIKE * chosen.seconds and one.cost(gb_price) <= _ALIKE * chosen.cost(gb_price)
    ]
    if near and not chosen.prepared:
        return _cheapest(near, gb_price), f"{reason}, apart from one that is hardly better and would have to be prepared"
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
                f"it ends within {duration(deadline)} as predicted; no choice does so with its whole interval, and this one exceeds it least",
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
