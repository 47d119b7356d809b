"""Of what a series of checkpoints is made by each policy, and what that takes: for a comparison of policies over checkpoints that are all known."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from foreload.trainer.checkpoints.files import baseline_is_due, deletable
from foreload.trainer.job.job_values import Policy

KEPT = 2
"""How many checkpoints are kept, those that they need besides."""


def bases(policy: Policy, full: Sequence[float], increments: np.ndarray) -> list[int | None]:
    """Of each of n checkpoints the one that it is an increment of; None of a baseline.

    full: the size of each with all rows, [n]; increments: of each as an increment of another, [n, n], [b, c] being what changed between b and c.
    """
    made: list[int | None] = []
    if policy == "planned":
        return planned(full, increments)
    for number in range(len(full)):
        baseline = next((one for one in reversed(range(number)) if made[one] is None), None)
        if policy == "full" or baseline is None:
            made.append(None)
        elif policy == "one-shot":
            made.append(baseline)
        elif policy == "consecutive":
            made.append(number - 1)
        else:
            since = [float(increments[baseline, one] / full[one]) for one in range(baseline + 1, number)]
            made.append(None if baseline_is_due(since) else baseline)
    return made


def planned(full: Sequence[float], increments: np.ndarray) -> list[int | None]:
    """The baselines with which the fewest bytes are written, and the increments of them: as `bases` has it, whose arguments these are.

    By the last baseline: what checkpoints b .. e - 1 cost, the first with all rows and the others as its increments, does not depend on others.
    """
    count = len(full)
    least, last = (
        np.zeros(count + 1),
        np.zeros(count + 1, np.int64),
    )  # of the first e checkpoints, and where their last baseline is
    # increments[b, :e] together, of b alone and those before it nothing.
    sums = np.cumsum(np.triu(increments, 1), axis=1)
    for end in range(1, count + 1):
        costs = least[:end] + full[:end] + sums[:end, end - 1]
        last[end] = int(np.argmin(costs))
        least[end] = costs[last[end]]
    made: list[int | None] = [None] * count
    end = count
    while end:
        baseline = int(last[end])
        made[baseline + 1 : end] = [baseline] * (end - baseline - 1)
        end = baseline
    return made


def planned_to_keep_least(full: Sequence[float], increments: np.ndarray, keep: int = KEPT) -> list[int | None]:
    """The baselines with which the fewest bytes are kept when most are, and, of these, the fewest written; arguments as for `bases`.

    By what decides over what is kept from then on: the bases of the last `keep` checkpoints.
    """

    def size(number: int, base: int | None) -> float:
        return full[number] if base is None else float(increments[base, number])

    # Bases of the newest checkpoints -> (most that was kept, written, bases of all): of each only the best can be part of the whole's best.
    states: dict[tuple[int | None, ...], tuple[float, float, tuple[int | None, ...]]] = {(): (0.0, 0.0, ())}
    for number in range(len(full)):
        reached: dict[tuple[int | None, ...], tuple[float, float, tuple[int | None, ...]]] = {}
        for newest, (most, written, made) in states.items():
            baseline = None
            if newest:
                baseline = number - 1 if newest[-1] is None else newest[-1]
            for base in {None, baseline}:
                bases_now = (*newest, base)[-keep:]
                kept = {number - place: of for place, of in enumerate(reversed(bases_now))}
                kept |= {of: None for of in kept.values() if of is not None}
                now = max(most, sum(size(*one) for one in kept.items()))
                reached_now = (now, written + size(number, base), (*made, base))
                if bases_now not in reached or reached_now[:2] < reached[bases_now][:2]:
                    reached[bases_now] = reached_now
        states = reached
    return list(min(states.values(), key=lambda state: state[:2])[2])


def written(full: Sequence[float], increments: np.ndarray, made: Sequence[int | None]) -> float:
    """What checkpoints take together that are made of these bases; arguments as for `bases`, which gives `made`."""
    return sum(full[number] if base is None else float(increments[base, number]) for number, base in enumerate(made))


def kept(full: Sequence[float], increments: np.ndarray, made: Sequence[int | None], keep: int = KEPT) -> float:
    """The most that is there at once, after any of the checkpoints, where `keep` of them are kept; arguments as for `written`."""
    most = 0.0
    for end in range(1, len(made) + 1):
        names = {str(number): None if base is None else str(base) for number, base in enumerate(made[:end])}
        gone = deletable(names, keep)
        most = max(most, written(full, increments, made[:end]) - sum(_size(full, increments, made, int(name)) for name in gone))
    return most


def _size(full: Sequence[float], increments: np.ndarray, made: Sequence[int | None], number: int) -> float:
    base = made[number]
    return full[number] if base is None else float(increments[base, number])
