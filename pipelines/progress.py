"""Progress of a long run on stderr, read from the work folder: whatever the runner, workers only write files there."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import TextIO

POLL_SECONDS = 0.5
LINE_SECONDS = 10.0  # between two lines where stderr is not a terminal


class Progress:
    """While it is entered, says every now and then how far the work is.

    pieces: the folder of pieces; steps: the file with steps done and steps in all; rows: about how many rows there are to read;
    piece_rows: rows of a piece, at most.
    """

    def __init__(self, pieces: Path, steps: Path, rows: int, piece_rows: int, stream: TextIO | None = None) -> None:
        self._pieces, self._steps, self._rows, self._piece_rows = pieces, steps, rows, piece_rows
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
        terminal = self._stream.isatty()
        started = said = time.monotonic()
        shown = ""
        while not self._stop.wait(POLL_SECONDS):
            line = self.line()
            if line == shown:
                continue
            now = time.monotonic()
            if terminal:
                self._stream.write(f"\r\x1b[K{line}  {now - started:.0f} s")
            elif now - said >= LINE_SECONDS:
                self._stream.write(f"{line}  {now - started:.0f} s\n")
            else:
                continue
            self._stream.flush()
            said, shown = now, line
        if terminal and shown:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def line(self) -> str:
        """What there is to say now."""
        try:
            done, total = self._steps.read_text(encoding="ascii").split()
            return f"prepare: compiled {int(done):,} of {int(total):,} steps"
        except FileNotFoundError:
            pass
        try:
            names = [name for name in os.listdir(self._pieces) if not name.endswith(".tmp")]
        except FileNotFoundError:
            names = []
        read = sum(name.startswith(("training-", "evaluation-")) for name in names)
        moved = sum(name.startswith(("sorted-", "run-", "epoch-")) for name in names)
        rows = min(self._rows, read * self._piece_rows)
        return f"prepare: read about {rows:,} of {self._rows:,} rows" + (f", ordered {moved:,} pieces" if moved else "")
