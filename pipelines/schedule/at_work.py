"""Whether `foreload prepare` is at work in a folder, shown by a file that it locks and touches: also after kill -9, and on another host."""

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
SILENCE = timedelta(seconds=60)  # after which a process on another host is taken for gone
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# struct flock of 64-bit Linux: type, whence, start, length (0: all), process.
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
    """Hold the lock file for as long as the context lasts. Raises BlockingIOError if another process holds it, OSError if it cannot be written."""
    # F_OFD_*: a lock of the open file, not of the process, so that asking for it takes nothing, and closing another descriptor loses nothing.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    done = threading.Event()

    def beat() -> None:
        while not done.wait(BEAT.total_seconds()):
            os.utime(descriptor)

    thread = threading.Thread(target=beat, name="at work", daemon=True)
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _lock(fcntl.F_WRLCK))
        if not _is_at(path, descriptor):  # who held it has removed it since it was opened
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
    """Watches the lock file of a process for one who waits for what it makes. path: the lock file, which need not be there."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._touched_ns = 0
        self._seen = time.monotonic()

    def gone(self) -> bool:
        """Whether nobody is at work there, as far as can be known: at once on the process' own host, elsewhere after a minute without a sign."""
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
