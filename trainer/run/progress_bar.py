"""How far a command is that reads or writes all of a run: a bar on stderr, where that is a terminal."""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm


def progress_bar(total: int, unit: str) -> tqdm[Any]:
    """A bar of so many units, to be entered; `update` counts them."""
    return tqdm(total=total, unit=unit, unit_scale=True, disable=None, file=sys.stderr, dynamic_ncols=True)
