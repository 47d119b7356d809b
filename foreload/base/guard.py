"""A process that kills another one when the process that started both has ended."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

# It reads a byte if the guard is released, and the end of its input once no process holds the other side of the pipe. It is
# nobody's child: Ray kills the children of a worker that ends.
_WATCH = """
import contextlib, os, shutil, signal, sys
if os.fork():
    os._exit(0)
if not sys.stdin.buffer.read(1):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(int(sys.argv[1]), signal.SIGKILL)
    for folder in sys.argv[2:]:
        shutil.rmtree(folder, ignore_errors=True)
"""


class Guard:
    """Kills a process group when this process ends, however that comes about.

    Args:
        group: the process group.
        folders: removed after that.
    """

    def __init__(self, group: int, *folders: Path) -> None:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _WATCH, str(group), *map(str, folders)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert process.stdin is not None
        self._input = process.stdin
        process.wait()

    def release(self) -> None:
        """End the guard. The group has ended, or may go on."""
        with contextlib.suppress(BrokenPipeError), self._input:
            self._input.write(b"0")
