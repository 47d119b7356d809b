"""A process that kills another one when the process that started both has ended."""

from __future__ import annotations

import subprocess
import sys

# It reads the end of its input once no process holds the other side of the pipe.
_WATCH = """
import contextlib, os, signal, sys
sys.stdin.buffer.read()
with contextlib.suppress(ProcessLookupError):
    os.killpg(int(sys.argv[1]), signal.SIGKILL)
"""


class Guard:
    """Kills a process group when this process ends, however that comes about.

    Args:
        group: the process group.
    """

    def __init__(self, group: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _WATCH, str(group)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def release(self) -> None:
        """End the guard. The group has ended, or may go on."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
