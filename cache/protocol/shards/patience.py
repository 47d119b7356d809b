"""How long store shards are waited for."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta


@dataclass(frozen=True, slots=True)
class Patience:
    """How long shards are waited for that do not answer, where parity does not cover them. volatile: none is that cannot be reached, for then it has
    died, and its rows with it.
    """

    time: timedelta = timedelta(seconds=10)
    volatile: bool = False


PATIENCE = Patience()
