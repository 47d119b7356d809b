"""`foreload history`: list the profiles that runs left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from foreload.trainer.compute.reports import COLUMNS
from foreload.trainer.run.history import MOST_RUNS, Profile, history_path, read

_HEAD = (
    *("ended", "model", "dim", "batch", "lanes", "slots", "trainers", "store", "steps", "ms a step"),
    *("compute", "exchange", "waiting", "peak MiB"),
)
# The text shows this many profiles, the newest; --json has all.
_SHOWN = 40
# As many are read for it: one more shows that there are others.
FOR_TEXT = _SHOWN + 1


@dataclass(frozen=True, slots=True)
class ProfileEntry:
    """A profile of a run, as means over its steps.

    Attributes:
        ended: when the run ended, in UTC and ISO 8601.
        settings: as in `trainer.run.history`, like `machine` and `processes`.
        mean: the mean of each column of the step reports, by name.
    """

    ended: str
    settings: dict[str, Any]
    machine: dict[str, Any]
    processes: list[dict[str, Any]]
    mean: dict[str, float]

    @classmethod
    def of(cls, profile: Profile) -> ProfileEntry:
        """Return the entry of a profile."""
        ended = datetime.fromtimestamp(profile.ended, UTC).isoformat(timespec="seconds")
        mean = {name: profile.mean(name) for name in COLUMNS}
        return cls(ended, dict(profile.settings), dict(profile.machine), [dict(one) for one in profile.processes], mean)


@dataclass(frozen=True, slots=True)
class Listed:
    """The profiles of a history, the oldest first.

    Attributes:
        history: the path of the history.
    """

    history: str
    profiles: list[ProfileEntry]

    def text(self) -> str:
        """Return a table of the newest profiles."""
        if not self.profiles:
            return f"{self.history}: no profile yet; every `foreload train` records one at its end, unless --history off is given"
        lines = aligned([_HEAD, *map(_row, self.profiles[-_SHOWN:])])
        if len(self.profiles) > _SHOWN:
            lines.append(f"these are the newest {_SHOWN}; --json FILE has all")
        return "\n".join(lines)


def _row(one: ProfileEntry) -> tuple[str, ...]:
    """Return a profile's cells, in the order of _HEAD."""
    settings = one.settings
    parity = f" {settings['k']}+{settings['r']}" if settings["r"] else ""
    peak = max((process["peak_bytes"] for process in one.processes if process["kind"] == "trainer"), default=0)
    return (
        one.ended.removesuffix("+00:00").replace("T", " "), settings["model"], str(settings["dim"]), f"{settings['batch_size']:,}",
        str(settings["lanes"]), f"{settings['slots']:,}", str(settings["trainers"]), f"{settings['shards']}{parity}", f"{settings['steps']:,}",
        *(f"{one.mean[name]:.2f}" for name in ("ms", "ms_compute", "ms_exchange", "ms_waiting")), f"{peak / 2**20:,.0f}",
    )  # fmt: skip


def run(given: str | None, newest: int = MOST_RUNS) -> Listed:
    """Read the profiles of a history.

    Args:
        given: the path of the history. If None, the default one.
        newest: read only so many, which is faster.

    Raises:
        HistoryError: the history cannot be read.
    """
    path = history_path(given)
    return Listed(str(path), [] if path is None else [ProfileEntry.of(profile) for profile in read(path, newest)])


def aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Format rows of words as lines in columns.

    The first column is aligned to the left, the others to the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
