"""Prepare this process: UTF-8, memory that is kept when it is freed, forks, and the exit status that it is about to have."""

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
"""The environment of every process that is started: Python's UTF-8 mode, so that names of files are UTF-8 whatever the locale is."""


def use_utf8() -> None:
    """Have names of files be UTF-8, and output never fail because a terminal cannot show it.

    Where the locale has another encoding, this starts the program again, in the same process, in Python's UTF-8 mode: the encoding of names is fixed
    when Python starts, and libraries written in C take UTF-8 alone.
    """
    if sys.getfilesystemencoding() != "utf-8" and UTF8.items() - os.environ.items():
        os.environ.update(UTF8)
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def working_directory() -> str:
    """The path of the working directory. Raises SettingError where it was deleted."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise SettingError("working directory: must exist; it was deleted; change to another one") from None


_about_to_end_with = 0


def note_exit_status(status: int) -> int:
    """Note it, and return it."""
    global _about_to_end_with
    _about_to_end_with = status
    return status


def noted_exit_status() -> int:
    """What was noted; 0 where nothing was."""
    return _about_to_end_with


KEEPS_FREED = {"mmap_threshold": 32 << 20, "trim_threshold": 1 << 30, "top_pad": 64 << 20}
"""What has glibc keep memory that is freed, up to a gigabyte, instead of giving it back and faulting it in again. The first is its greatest value."""
_MALLOPT = {"mmap_threshold": -3, "trim_threshold": -1, "top_pad": -2}  # glibc's numbers


def keep_freed() -> None:
    """Have this process keep memory that it frees (KEEPS_FREED), for arrays of the sizes that pieces have. Other C libraries are left as they are."""
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        for name, value in KEEPS_FREED.items():
            library.mallopt(_MALLOPT[name], value)


THREADLESS = {"JE_ARROW_MALLOC_CONF": "background_thread:false", "OPENBLAS_NUM_THREADS": "1"}
"""Variables of a process that is to fork, without which Arrow's allocator and NumPy's BLAS start threads as they are imported."""


def fork(main: Callable[[], int]) -> int:
    """Start a process that runs `main` and ends with the status that this returns; gives its number.

    It is the leader of a session of its own, with nothing on stdin; descriptors are the caller's to close in it. Raises RuntimeError where this
    process has threads: what they hold would be held for ever in the new one.
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
        # Nothing runs that the process which was forked has registered for its own end.
        os._exit(status)


def replace_environment(environment: dict[str, str]) -> None:
    """Have exactly these variables, for this process and those that it starts."""
    for name in set(os.environ) - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
