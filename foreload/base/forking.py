"""Processes forked from one that has imported what they need: each begins as a fresh one would, without the seconds of importing."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

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
