"""The files that a checkpoint's manifest names, and the policies that choose which rows they hold.

For the files, see the format (docs/checkpoints.md, The format). The policies are pure functions.
They take sizes in any one unit: rows, bytes or fractions of the model. Increments of a *baseline*,
a checkpoint with all rows, grow from one to the next, since each has all that changed since the
baseline; consecutive increments have what changed since the one before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from foreload.base.codec import Count, Natural, RelativePath, one_of

EXACT_BITS = 32
WIDTHS = (8, 4, 3, 2)  # bits of a weight that is not exact
BITS = (EXACT_BITS, *WIDTHS)

LEAST_BITS = BITS[-1]

# The widths that benchmarks/restores_accuracy.py found to be enough.
_FEW_RESTORES, _FEW_RESTORES_BITS, _MANY_RESTORES_BITS = 3, 4, 8

FAILURES_A_DAY = 1.0
"""How often a job fails, unless the user specifies a rate."""

_DAY_SECONDS = 86_400


def baseline_is_due(increments: Sequence[float]) -> bool:
    """Return whether the next checkpoint should have all rows (Check-N-Run, policy intermittent).

    A new baseline, followed by increments that are assumed to grow as before, costs F = 1 + S_1 +
    .. + S_i for the next i + 1 checkpoints. Further increments of the old baseline cost I = (i + 1)
    * S_i at least. The predictor takes a new baseline if F <= I.

    Args:
        increments: S_1 .. S_i, the sizes of the i increments since the last baseline, as fractions
            of the model.

    Returns:
        Whether the checkpoint after increment i should be a baseline.
    """
    if not increments:
        return False
    return 1 + sum(increments) <= (len(increments) + 1) * increments[-1]


def baseline_is_planned(full: Sequence[float], increments: np.ndarray) -> bool:
    """Return whether the second of these checkpoints should have all rows.

    The answer is the one with which the fewest bytes are written from then on. The first checkpoint
    is the last baseline.

    Args:
        full: [n], the size of each checkpoint with all rows.
        increments: [n, n]; entry [b, c] is the size of checkpoint c as an increment of b, that is,
            what changed between b and c.
    """
    count = len(full)
    # least[k]: the least cost of checkpoints k, k + 1, .. if k has all rows; nothing after the
    # last.
    least = np.zeros(count + 1)

    def with_increments(base: int, first: int) -> float:
        """Return the least cost from `first` on, with increments of `base` up to a baseline."""
        return float((np.cumsum([0, *increments[base, first:]]) + least[first:]).min())

    for begin in reversed(range(1, count)):
        least[begin] = full[begin] + with_increments(begin, begin + 1)
    # Compare with the best plan in which checkpoint 1 is an increment of the last baseline.
    return bool(least[1] < increments[0, 1] + with_increments(0, 2))


def deletable(checkpoints: Mapping[str, str | None], keep: int, further: Sequence[str] = ()) -> list[str]:
    """Return the checkpoints that may be deleted, in order.

    The `keep` newest ones, the `further` ones, and all that these need are kept.

    Args:
        checkpoints: Name -> name of the base, oldest first.
        keep: How many of the newest to keep.
        further: Names of other checkpoints to keep.
    """
    stay: set[str] = set()
    for name in [*(list(checkpoints)[-keep:] if keep else []), *further]:
        needed: str | None = name
        while needed is not None and needed not in stay:
            stay.add(needed)
            needed = checkpoints.get(needed)
    return [name for name in checkpoints if name not in stay]


def dependents(checkpoints: Mapping[str, str | None], name: str) -> list[str]:
    """Return the checkpoints that need one, directly or through others, in order.

    Args:
        checkpoints: Name -> name of the base, oldest first.
        name: The checkpoint that is needed.
    """
    needing = {name}
    # A base is older than its increments, so one pass in order finds all of them.
    for one, base in checkpoints.items():
        if base in needing:
            needing.add(one)
    return [one for one in checkpoints if one in needing and one != name]


def expected_restores(seconds: float, failures_a_day: float) -> int:
    """Return how many restores to expect of a job that takes `seconds`.

    It is at least 1, since a checkpoint is saved to be restored.
    """
    return max(math.ceil(seconds / _DAY_SECONDS * failures_a_day), 1)


def bits_for(expected: int, happened: int = 0) -> int:
    """Return how many bits the weights need for a log loss within 0.01 % of that without restores.

    That is 4 for up to 3 expected restores, else 8. It is also 8 if more restores have happened
    than were expected.
    """
    return _FEW_RESTORES_BITS if happened <= expected <= _FEW_RESTORES else _MANY_RESTORES_BITS


def bits_for_job(
    steps: int, seconds: float, steps_in_all: int, failures_a_day: float, happened: int, least: int = LEAST_BITS
) -> int:
    """Return how many bits the expected restores of a job allow, `least` at least.

    Args:
        steps: Steps trained so far.
        seconds: The time that they took.
        steps_in_all: Steps of the whole job.
        happened: The restores so far, as for `bits_for`.
        least: The fewest bits to return.
    """
    job_seconds = seconds / max(steps, 1) * steps_in_all
    return max(bits_for(expected_restores(job_seconds, failures_a_day), happened), least)


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file of a checkpoint, as its manifest has it.

    Attributes:
        name: Relative to the checkpoint's folder.
        bytes: Its size.
        sha256: SHA-256 of its bytes.
    """

    name: RelativePath
    bytes: Count
    sha256: str


@dataclass(frozen=True, slots=True)
class RowFile(FileEntry):
    """A file of rows of one table in one lane.

    Attributes:
        table: The number of the table.
        first: The first ordinal in it.
        last: The last ordinal in it.
        rows: How many rows it has: all ordinals from `first` to `last`, or some of them.
        bits: Bits per weight.
    """

    lane: Count
    table: Count
    first: Count
    last: Count
    rows: Natural
    bits: Annotated[int, one_of(*BITS)]

    @property
    def gapless(self) -> bool:
        """Whether it has all ordinals from `first` to `last`, and so no column of ordinals."""
        return self.last - self.first + 1 == self.rows


@dataclass(frozen=True, slots=True)
class PartFiles:
    """The files that one trainer wrote for a checkpoint.

    Attributes:
        rows: The files of rows.
        dense: The file of the dense part, from the trainer that leads; None from others.
        seconds: The time since the trainer made its copy in memory.
    """

    rows: tuple[RowFile, ...]
    dense: FileEntry | None
    seconds: float
