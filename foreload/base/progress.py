"""Progress of long work, shown on stderr.

The progress of `prepare` is read from the work folder: on any runner, workers only write files
there.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from tqdm import tqdm

from foreload.base import json_log

# Interval between two reads of the work folder, and between two updates of a terminal's line.
POLL_SECONDS = 0.5
LINE_SECONDS = 10.0  # between two lines if stderr is not a terminal


def duration(seconds: float) -> str:
    """Format seconds as seconds, minutes or hours."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


@dataclass(frozen=True, slots=True)
class ProgressLine:
    """How far long work has come.

    Attributes:
        text: a line for a person.
        figures: its figures by name, for a log in JSON.
    """

    text: str
    figures: Mapping[str, Any] = field(default_factory=dict)


class Display:
    """The status of a long run, shown on stderr. One thread uses it.

    On a terminal it is one line that is overwritten. Elsewhere it is a new line every `seconds`, or
    an object of kind "progress" if messages are written as JSON.

    Args:
        status: returns the current status.
    """

    def __init__(
        self,
        status: Callable[[], ProgressLine],
        seconds: float,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._status, self._seconds, self._clock = status, seconds, clock
        self._stream = sys.stderr if stream is None else stream
        self._terminal = self._stream.isatty()
        self._said = clock()
        self._shown = ""

    def tick(self) -> None:
        """Show the status if it is time to. To be called often."""
        now = self._clock()
        if now - self._said < (POLL_SECONDS if self._terminal else self._seconds):
            return
        self._said = now
        status = self._status()
        line = status.text
        if line == self._shown:
            return
        if self._terminal:
            self._stream.write(f"\r\x1b[K{line[: shutil.get_terminal_size().columns - 1]}")
        elif not json_log.record({"kind": "progress", **status.figures, "text": line}):
            self._stream.write(f"{line}\n")
        self._stream.flush()
        self._shown = line

    def write(self, message: str) -> None:
        """Write a line that stays."""
        self.close()
        self._stream.write(f"{message}\n")
        self._stream.flush()

    def close(self) -> None:
        """Clear the terminal's line."""
        if self._terminal and self._shown:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
        self._shown = ""


class Progress:
    """A context in which a thread regularly shows the progress of `prepare` on stderr.

    Args:
        begun: a file that the first worker leaves.
        pieces: the folder of pieces.
        compiled: the folder of files that hold work done, steps of the schedule, and all work.
        rows: about how many rows there are to read.
        piece_rows: the most rows of a piece.
    """

    def __init__(
        self, begun: Path, pieces: Path, compiled: Path, rows: int, piece_rows: int, stream: TextIO | None = None
    ) -> None:
        self._begun = begun
        self._pieces, self._compiled, self._rows, self._piece_rows = pieces, compiled, rows, piece_rows
        self._stream = sys.stderr if stream is None else stream
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="progress", daemon=True)

    def __enter__(self) -> Progress:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        started = time.monotonic()
        display = Display(lambda: ProgressLine(f"{self.line()}  {time.monotonic() - started:.0f} s"), LINE_SECONDS, self._stream)
        while not self._stop.wait(POLL_SECONDS):
            display.tick()
        display.close()

    def line(self) -> str:
        """Return the current status."""
        if not self._begun.exists():
            return "prepare: waiting for workers"
        compiled = ""
        if counts := [[int(word) for word in path.read_text(encoding="ascii").split()] for path in self._files()]:
            _, steps, work = counts[0]
            compiled = f"compiled {sum(done for done, _, _ in counts) * steps // work:,} of {steps:,} steps"
        try:
            names = [name for name in os.listdir(self._pieces) if not name.endswith(".tmp")]
        except FileNotFoundError:
            names = []
        read = sum(name.startswith(("training-", "evaluation-")) for name in names)
        ordered = sum(name.startswith(("sorted-", "run-", "epoch-")) for name in names)
        rows = min(self._rows, read * self._piece_rows)
        if compiled and rows == self._rows:
            return f"prepare: {compiled}"
        parts = [f"read about {rows:,} of {self._rows:,} rows", f"ordered {ordered:,} pieces" if ordered else "", compiled]
        return f"prepare: {', '.join(filter(None, parts))}"

    def _files(self) -> list[Path]:
        return [path for path in self._compiled.glob("*") if not path.name.endswith(".tmp")]


def progress_bar(total: int, unit: str) -> tqdm[Any]:
    """Return a bar of `total` units, to be entered as a context. Its `update` counts units."""
    return tqdm(total=total, unit=unit, unit_scale=True, disable=None, file=sys.stderr, dynamic_ncols=True)
