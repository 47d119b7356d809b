"""The history: a SQLite file with a profile of every run, to predict the cost of further runs.

It contains numbers and settings only: no paths, ids or URLs. Several runs may write at once: each
adds its profile in one short transaction.
"""

from __future__ import annotations

import io
import json
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from foreload.trainer.compute.reports import COLUMNS, values_of
from foreload.trainer.errors import HistoryError

OFF = "off"
MOST_RUNS = 500  # a history keeps the newest
MOST_POINTS = 2048  # of a run; for longer runs a point is the mean over several steps
_VERSION = 1  # the file's format, stored as its user_version
_BUSY_SECONDS = 5.0  # how long a writer waits for other writers
_TABLE = """CREATE TABLE IF NOT EXISTS profiles (
    number INTEGER PRIMARY KEY, ended REAL NOT NULL, settings TEXT NOT NULL, machine TEXT NOT NULL, processes TEXT NOT NULL, steps BLOB NOT NULL)"""


@dataclass(frozen=True, slots=True)
class Profile:
    """The resources that one call of a run took.

    Attributes:
        settings: numbers or words about model, schedule, trainers and store.
        machine: "cpu", "cores" and "memory_bytes".
        processes: for each process, {"kind": "trainer", "launcher" or "store", "peak_bytes",
            "processor_seconds"}.
        steps: COLUMNS -> float64 [points], means over `stride` consecutive steps.
        ended: when the call ended, in seconds since 1970.
    """

    settings: Mapping[str, Any]
    machine: Mapping[str, Any]
    processes: Sequence[Mapping[str, Any]]
    steps: Mapping[str, np.ndarray]
    stride: int = 1
    ended: float = field(default_factory=time.time)

    @property
    def points(self) -> int:
        """The number of entries in each column."""
        return len(self.steps["ms"])

    def mean(self, column: str) -> float:
        """Return the mean of a column over all steps, or nan if there are no steps."""
        return float(self.steps[column].mean()) if self.points else float("nan")

    def processor_seconds(self, kind: str) -> float:
        """Return the processor time of all processes of a kind, from start to end."""
        return float(sum(one["processor_seconds"] for one in self.processes if one["kind"] == kind))

    def peak_bytes(self, kind: str) -> int:
        """Return the largest peak memory of the processes of a kind, or 0 if there are none."""
        return int(max((one["peak_bytes"] for one in self.processes if one["kind"] == kind), default=0))


def default_path() -> Path:
    """Return the default path of the history: in the user's data folder."""
    base = os.environ.get("XDG_DATA_HOME") or ""
    # The XDG specification says that relative paths are ignored.
    folder = Path(base) if os.path.isabs(base) else Path.home() / ".local" / "share"
    return folder / "foreload" / "history.sqlite"


def history_path(given: str | None) -> Path | None:
    """Return the file that --history names.

    Returns:
        The path, or None if the history is switched off, or if `given` is None and the user has no
            home folder.
    """
    if given == OFF:
        return None
    try:
        return Path(given) if given else default_path()
    # Path.home raises RuntimeError if the user has no home folder.
    except RuntimeError:
        return None


def of_steps(lines: Sequence[Sequence[float]]) -> tuple[dict[str, np.ndarray], int]:
    """Return the steps and the stride of a profile.

    Args:
        lines: for each step, the values of COLUMNS.

    Returns:
        (COLUMNS -> float64 [points], means over stride steps each; stride).
    """
    values = np.array(lines, np.float64).reshape(len(lines), len(COLUMNS))
    stride = max(-(-len(values) // MOST_POINTS), 1)
    # The last point may have fewer steps than the others. It is left out unless it is the only one.
    whole = len(values) - len(values) % stride if len(values) >= stride else len(values)
    means = values[:whole].reshape(-1, stride, len(COLUMNS)).mean(axis=1)
    return {name: means[:, place] for place, name in enumerate(COLUMNS)}, stride


def add(path: Path, profile: Profile) -> None:
    """Append a profile, and delete the oldest profiles beyond MOST_RUNS. Raises HistoryError."""
    packed = io.BytesIO()
    np.savez_compressed(
        packed, allow_pickle=False, stride=np.int64(profile.stride), **{k: v.astype(np.float32) for k, v in profile.steps.items()}
    )
    texts = [
        json.dumps(value) for value in (dict(profile.settings), dict(profile.machine), [dict(one) for one in profile.processes])
    ]
    with _opened(path, write=True) as database, database:
        # This takes the write lock at once, so that two writers cannot both read first and then
        # conflict.
        database.execute("BEGIN IMMEDIATE")
        database.execute(_TABLE)
        database.execute(f"PRAGMA user_version = {_VERSION}")
        database.execute(
            "INSERT INTO profiles (ended, settings, machine, processes, steps) VALUES (?, ?, ?, ?, ?)",
            (profile.ended, *texts, packed.getvalue()),
        )
        database.execute(
            "DELETE FROM profiles WHERE number NOT IN (SELECT number FROM profiles ORDER BY number DESC LIMIT ?)", (MOST_RUNS,)
        )


def read(path: Path, newest: int = MOST_RUNS) -> list[Profile]:
    """Return so many profiles, the oldest first; none if the file does not exist.

    Raises HistoryError.
    """
    if not path.exists():
        return []
    with _opened(path, write=False) as database:
        if not database.execute("SELECT 1 FROM sqlite_master WHERE name = 'profiles'").fetchone():
            return []
        rows = database.execute(
            "SELECT ended, settings, machine, processes, steps FROM profiles ORDER BY number DESC LIMIT ?", (newest,)
        ).fetchall()
    try:
        return [_profile(*row) for row in reversed(rows)]
    except (ValueError, KeyError, TypeError, RecursionError, OSError) as error:
        raise _unusable(path, error) from error


def _profile(ended: float, settings: str, machine: str, processes: str, packed: bytes) -> Profile:
    with np.load(io.BytesIO(packed), allow_pickle=False) as arrays:
        points = len(arrays["ms"])
        steps = {name: np.full(points, values, np.float64) for name, values in zip(COLUMNS, values_of(arrays), strict=True)}
        return Profile(json.loads(settings), json.loads(machine), json.loads(processes), steps, int(arrays["stride"]), ended)


@contextmanager
def _opened(path: Path, write: bool) -> Iterator[sqlite3.Connection]:
    """Open the file, and yield the connection.

    If `write` is set, the file and its folder are created if needed. Raises HistoryError for every
    failure while the file is open.
    """
    try:
        if write:
            path.parent.mkdir(parents=True, exist_ok=True)
        target = path.absolute().as_uri() + ("" if write else "?mode=ro")
        with closing(sqlite3.connect(target, timeout=_BUSY_SECONDS, uri=True, isolation_level=None)) as database:
            version = database.execute("PRAGMA user_version").fetchone()[0]
            if version > _VERSION:
                raise HistoryError(
                    f"history {path}: its version must be at most {_VERSION}; got {version}; use the program that wrote it, or another --history"
                )
            yield database
    except (sqlite3.Error, OSError) as error:
        raise _unusable(path, error) from error


def _unusable(path: Path, error: Exception) -> HistoryError:
    return HistoryError(
        f"history {path}: must be a file that can be read and written; got: {error}; move it away, or give another --history, or off"
    )
