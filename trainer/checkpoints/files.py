"""The files of a checkpoint, as its manifest names them (docs/checkpoints.md, The format), and the policies that say which rows they hold.

Policies are pure; sizes are in any one unit, rows, bytes or parts of the model. Increments of a
*baseline*, a checkpoint with all rows, grow from one to the next, since each has all that changed
since the baseline; consecutive ones have what changed since the one before.
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

_FEW_RESTORES, _FEW_RESTORES_BITS, _MANY_RESTORES_BITS = 3, 4, 8  # as benchmarks/restores_accuracy.py found them to be enough

FAILURES_A_DAY = 1.0
"""How often a job fails, where nothing is said."""

_DAY_SECONDS = 86_400


def baseline_is_due(increments: Sequence[float]) -> bool:
    """Check-N-Run's predictor (policy intermittent): whether the next checkpoint is to have all rows.

    increments: S_1 .. S_i, the sizes of the i increments since the last baseline, as parts of the model. A new baseline, after which increments
    are taken to grow as they did, costs F = 1 + S_1 + .. + S_i for the next i + 1 checkpoints; going on costs I = (i + 1) * S_i at least.
    True where F <= I, that is for the checkpoint after increment i.
    """
    if not increments:
        return False
    return 1 + sum(increments) <= (len(increments) + 1) * increments[-1]


def baseline_is_planned(full: Sequence[float], increments: np.ndarray) -> bool:
    """Whether the second of these checkpoints is to have all rows, so that the fewest bytes are written from then on; the first is the last baseline.

    full: the size of each with all rows, [n]; increments: of each as an increment of another, [n, n], [b, c] being what changed between b and c.
    """
    count = len(full)
    least = np.zeros(count + 1)  # what checkpoints from here on cost, this one with all rows

    def with_increments(base: int, first: int) -> float:
        """What checkpoints `first` and on cost, if they are increments of a base up to the next baseline."""
        return float((np.cumsum([0, *increments[base, first:]]) + least[first:]).min())

    for begin in reversed(range(1, count)):
        least[begin] = full[begin] + with_increments(begin, begin + 1)
    # At least this one is an increment, or there is nothing to choose.
    return bool(least[1] < increments[0, 1] + with_increments(0, 2))


def deletable(checkpoints: Mapping[str, str | None], keep: int, further: Sequence[str] = ()) -> list[str]:
    """The checkpoints that neither are among the `keep` newest, or the further ones, nor needed by one of these. checkpoints: name -> base, oldest
    first.
    """
    stay: set[str] = set()
    for name in [*(list(checkpoints)[-keep:] if keep else []), *further]:
        needed: str | None = name
        while needed is not None and needed not in stay:
            stay.add(needed)
            needed = checkpoints.get(needed)
    return [name for name in checkpoints if name not in stay]


def dependents(checkpoints: Mapping[str, str | None], name: str) -> list[str]:
    """The checkpoints that need one, directly or through others, in order. checkpoints: name -> base, oldest first."""
    needing = {name}
    # A base is older than what is made of it.
    for one, base in checkpoints.items():
        if base in needing:
            needing.add(one)
    return [one for one in checkpoints if one in needing and one != name]


def expected_restores(seconds: float, failures_a_day: float) -> int:
    """How many restores to expect of a job that takes so long: at least 1, since a checkpoint is there for one."""
    return max(math.ceil(seconds / _DAY_SECONDS * failures_a_day), 1)


def bits_for(expected: int, happened: int = 0) -> int:
    """How many bits the weights need where a job is restored as often as expected, for a log loss within 0.01 % of that without restores: 4 for up
    to 3 restores, else 8; and 8 where more restores have happened than were expected.
    """
    return _FEW_RESTORES_BITS if happened <= expected <= _FEW_RESTORES else _MANY_RESTORES_BITS


def bits_for_job(
    steps: int, seconds: float, steps_in_all: int, failures_a_day: float, happened: int, least: int = LEAST_BITS
) -> int:
    """How many bits the restores to expect of a job allow, `least` at least.

    steps, seconds: trained so far, and the time that took; happened: as `bits_for` has it.
    """
    job_seconds = seconds / max(steps, 1) * steps_in_all
    return max(bits_for(expected_restores(job_seconds, failures_a_day), happened), least)


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file of a checkpoint, as its manifest has it: name, size, SHA-256."""

    name: RelativePath
    bytes: Count
    sha256: str


@dataclass(frozen=True, slots=True)
class RowFile(FileEntry):
    """A file of rows: `rows` of them, of a table in a lane, with ordinals from `first` to `last`, all of these where there are as many; bits: that a
    weight has.
    """

    lane: Count
    table: Count
    first: Count
    last: Count
    rows: Natural
    bits: Annotated[int, one_of(*BITS)]

    @property
    def gapless(self) -> bool:
        """Whether it has all ordinals from first to last, and so no column of them."""
        return self.last - self.first + 1 == self.rows


@dataclass(frozen=True, slots=True)
class PartFiles:
    """What a trainer wrote. dense: the dense part, by the trainer that leads; seconds: from the copy on."""

    rows: tuple[RowFile, ...]
    dense: FileEntry | None
    seconds: float
