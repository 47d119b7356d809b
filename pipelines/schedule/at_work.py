"""Shows whether `foreload prepare` is at work in a folder, by a file that it locks and touches.

This also works after kill -9, and from another host.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

BEAT = timedelta(seconds=5)
SILENCE = timedelta(seconds=60)  # a process on another host that is silent for this long counts as gone
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# struct flock of 64-bit Linux: type, whence, start, length (0 for the whole file), process.
_FLOCK = "hhqqi"


def _lock(kind: int) -> bytes:
    return struct.pack(_FLOCK, kind, os.SEEK_SET, 0, 0, 0)


def _this_host() -> str:
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return os.uname().nodename


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


@contextmanager
def at_work(path: Path) -> Iterator[None]:
    """Hold the lock file for as long as the context lasts.

    Raises:
        BlockingIOError: If another process holds the file.
        OSError: If the file cannot be written.
    """
    # F_OFD_* locks belong to the open file, not to the process. So a query for the lock does not
    # take it, and closing another descriptor of the file does not release it.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    done = threading.Event()

    def beat() -> None:
        while not done.wait(BEAT.total_seconds()):
            os.utime(descriptor)

    thread = threading.Thread(target=beat, name="at work", daemon=True)
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _lock(fcntl.F_WRLCK))
        # The process that held the lock may have removed the file since it was opened here. Then
        # this lock would be on a file that no other process sees.
        if not _is_at(path, descriptor):
            raise BlockingIOError(errno.EAGAIN, "is being removed", str(path))
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, _this_host().encode(), 0)
        thread.start()
        yield
    finally:
        done.set()
        if thread.ident is not None:
            thread.join()
        os.close(descriptor)


class Watch:
    """Watches the lock file of a process, for a caller that waits for that process's output."""

    def __init__(self, path: Path) -> None:
        """Start to watch.

        Args:
            path: The lock file, which need not exist.
        """
        self._path = path
        self._touched_ns = 0
        self._seen = time.monotonic()

    def gone(self) -> bool:
        """Return whether no process is at work in the folder, as far as can be known.

        On the process's own host the answer is immediate. On another host, a process counts as gone
        after SILENCE without a sign of life.
        """
        try:
            with self._path.open("rb") as file:
                if file.read().decode(errors="replace") == _this_host():
                    answer = fcntl.fcntl(file.fileno(), fcntl.F_OFD_GETLK, _lock(fcntl.F_RDLCK))
                    return int(struct.unpack(_FLOCK, answer)[0]) == fcntl.F_UNLCK
                touched_ns = os.fstat(file.fileno()).st_mtime_ns
        except OSError:
            return True
        if touched_ns != self._touched_ns:
            self._touched_ns, self._seen = touched_ns, time.monotonic()
        return time.monotonic() - self._seen >= SILENCE.total_seconds()
