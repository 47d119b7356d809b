"""Setup of this process: UTF-8, memory that is kept when freed, forks, and its exit status."""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from foreload.base.errors import SettingError

UTF8 = {"PYTHONUTF8": "1"}
"""The environment of every process that is started.

It selects Python's UTF-8 mode, so that file names are UTF-8 in any locale.
"""


def use_utf8() -> None:
    """Make file names UTF-8, and keep output from failing because a terminal cannot show it.

    If the locale has another encoding, this restarts the program in the same process, in Python's
    UTF-8 mode. Python fixes the encoding of names when it starts, and libraries written in C accept
    UTF-8 only.
    """
    if sys.getfilesystemencoding() != "utf-8" and UTF8.items() - os.environ.items():
        os.environ.update(UTF8)
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def working_directory() -> str:
    """Return the path of the working directory.

    Raises:
        SettingError: the directory was deleted.
    """
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise SettingError("working directory: must exist; it was deleted; change to another one") from None


_about_to_end_with = 0


def note_exit_status(status: int) -> int:
    """Record the exit status that the process is about to have, and return it."""
    global _about_to_end_with
    _about_to_end_with = status
    return status


def noted_exit_status() -> int:
    """Return the recorded exit status, or 0 if none was recorded."""
    return _about_to_end_with


KEEPS_FREED = {"mmap_threshold": 32 << 20, "trim_threshold": 1 << 30, "top_pad": 64 << 20}
"""Settings that make glibc keep up to a gigabyte of freed memory.

Otherwise glibc would return the memory and fault it in again. The value of mmap_threshold is the
largest that glibc accepts.
"""
_MALLOPT = {"mmap_threshold": -3, "trim_threshold": -1, "top_pad": -2}  # glibc's numbers


def keep_freed() -> None:
    """Make this process keep memory that it frees, for arrays of the sizes that pieces have.

    See KEEPS_FREED. Other C libraries than glibc are left as they are.
    """
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        for name, value in KEEPS_FREED.items():
            library.mallopt(_MALLOPT[name], value)


THREADLESS = {"JE_ARROW_MALLOC_CONF": "background_thread:false", "OPENBLAS_NUM_THREADS": "1"}
"""Environment variables for a process that is to fork.

Without them, Arrow's allocator and NumPy's BLAS start threads when they are imported.
"""


def fork(main: Callable[[], int]) -> int:
    """Start a process that runs `main` and exits with the status that it returns.

    The process leads a session of its own and has nothing on stdin. In it, `main` must close the
    caller's other descriptors if it does not need them.

    Returns:
        The process id.

    Raises:
        RuntimeError: this process has several threads. Locks that they hold would stay locked
            forever in the new process.
    """
    threads = os.listdir("/proc/self/task")
    if len(threads) > 1:
        raise RuntimeError(f"fork: this process must have one thread; it has {len(threads)}")
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    pid = os.fork()
    return pid or _run(main)


def _run(main: Callable[[], int]) -> NoReturn:
    status = 1
    try:
        os.setsid()
        nowhere = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nowhere, 0)
        os.close(nowhere)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        status = main()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        # Exit without the exit handlers that the forking process registered for its own end.
        os._exit(status)


def replace_environment(environment: dict[str, str]) -> None:
    """Set exactly these environment variables, for this process and those that it starts."""
    for name in set(os.environ) - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
