"""`foreload history`: the profiles that runs left."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from foreload.trainer.compute.reports import COLUMNS
from foreload.trainer.resources.history import Profile, history_path, read

_SHOWN = 40  # profiles that are shown, the newest; --json has all


def run(given: str | None) -> dict[str, Any]:
    """The profiles of a history, of the default one where none is given, as JSON holds them. Raises HistoryError."""
    path = history_path(given)
    profiles = [] if path is None else read(path)
    return {"history": str(path), "profiles": [told(profile) for profile in profiles]}


def told(profile: Profile) -> dict[str, Any]:
    """A profile in means over its steps."""
    return {
        "ended": datetime.fromtimestamp(profile.ended, UTC).isoformat(timespec="seconds"),
        "settings": dict(profile.settings),
        "machine": dict(profile.machine),
        "processes": [dict(one) for one in profile.processes],
        "mean": {name: profile.mean(name) for name in COLUMNS},
    }


def text(listed: dict[str, Any]) -> str:
    """For a person."""
    profiles = listed["profiles"]
    if not profiles:
        return (
            f"{listed['history']}: no profile yet; every `foreload train` leaves one at its end, unless it is given --history off"
        )
    rows = [
        (
            "ended",
            "model",
            "dim",
            "batch",
            "lanes",
            "slots",
            "trainers",
            "store",
            "steps",
            "ms a step",
            "compute",
            "exchange",
            "waiting",
            "peak MiB",
        )
    ]
    for one in profiles[-_SHOWN:]:
        settings, mean = one["settings"], one["mean"]
        parity = f" {settings['k']}+{settings['r']}" if settings["r"] else ""
        peak = max((process["peak_bytes"] for process in one["processes"] if process["kind"] == "trainer"), default=0)
        rows.append((
            one["ended"].removesuffix("+00:00").replace("T", " "), settings["model"], str(settings["dim"]), f"{settings['batch_size']:,}",
            str(settings["lanes"]), f"{settings['slots']:,}", str(settings["trainers"]), f"{settings['shards']}{parity}", f"{settings['steps']:,}",
            *(f"{mean[name]:.2f}" for name in ("ms", "ms_compute", "ms_exchange", "ms_waiting")), f"{peak / 2**20:,.0f}",
        ))  # fmt: skip
    lines = aligned(rows)
    if len(profiles) > _SHOWN:
        lines.append(f"the newest {_SHOWN} of {len(profiles)}; --json FILE has all")
    return "\n".join(lines)


def aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows of words as lines, in columns: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
