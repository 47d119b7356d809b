"""Show the progress of long work on stderr.

Prepare's is read from the work folder: whatever the runner, workers only write files there.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from tqdm import tqdm

POLL_SECONDS = 0.5  # between two looks at the work folder, and two changes of a terminal's line
LINE_SECONDS = 10.0  # between two lines where stderr is not a terminal


class Display:
    """Where a long run stands: on a terminal one line that is written over, elsewhere a line every `seconds`. One thread uses it.

    line: makes what there is to say now.
    """

    def __init__(
        self, line: Callable[[], str], seconds: float, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._line, self._seconds, self._clock = line, seconds, clock
        self._stream = sys.stderr if stream is None else stream
        self._terminal = self._stream.isatty()
        self._said = clock()
        self._shown = ""

    def tick(self) -> None:
        """Say it, if it is time; to be called often."""
        now = self._clock()
        if now - self._said < (POLL_SECONDS if self._terminal else self._seconds):
            return
        self._said = now
        line = self._line()
        if line == self._shown:
            return
        if self._terminal:
            self._stream.write(f"\r\x1b[K{line[: shutil.get_terminal_size().columns - 1]}")
        else:
            self._stream.write(f"{line}\n")
        self._stream.flush()
        self._shown = line

    def write(self, message: str) -> None:
        """A line that stays."""
        self.close()
        self._stream.write(f"{message}\n")
        self._stream.flush()

    def close(self) -> None:
        """Leave the terminal's line empty."""
        if self._terminal and self._shown:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
        self._shown = ""


class Progress:
    """While it is entered, a thread says on stderr every now and then how far `prepare` is.

    pieces: the folder of pieces; compiled: that of files with work done, steps of the schedule, and work in all; rows: about how many rows there are
    to read; piece_rows: rows of a piece, at most.
    """

    def __init__(self, pieces: Path, compiled: Path, rows: int, piece_rows: int, stream: TextIO | None = None) -> None:
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
        display = Display(lambda: f"{self.line()}  {time.monotonic() - started:.0f} s", LINE_SECONDS, self._stream)
        while not self._stop.wait(POLL_SECONDS):
            display.tick()
        display.close()

    def line(self) -> str:
        """What there is to say now."""
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
    """A bar of so many units, to be entered; `update` counts them."""
    return tqdm(total=total, unit=unit, unit_scale=True, disable=None, file=sys.stderr, dynamic_ncols=True)
