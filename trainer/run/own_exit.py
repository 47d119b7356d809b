"""A user's code that ends the process which runs it: said in one line, instead of an exit status that says something else."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
from collections.abc import Iterator

from foreload.trainer.errors import ModelError


class _Exit(SystemExit):
    """os._exit was called."""


@contextlib.contextmanager
def exits_reported(who: str) -> Iterator[None]:
    """Raise ModelError where code calls sys.exit or os._exit while this is entered: foreload's own does not, so it is the model's, or a library's.

    A crash of native code, which ends the process by a signal, leaves the line of Python that it was in on stderr.

    Args:
        who: the process, for the message.
    """
    really, process = os._exit, os.getpid()

    def report_exit(status: int) -> None:
        # Not in another thread, which has nobody to report to, and not in a fork.
        if os.getpid() != process or threading.current_thread() is not threading.main_thread():
            really(status)
        raise _Exit(status)

    if not faulthandler.is_enabled() and sys.__stderr__ is not None:
        faulthandler.enable(sys.__stderr__)
    os._exit = report_exit  # type: ignore[assignment]
    try:
        yield
    except SystemExit as error:
        raise exit_error(who, error) from error
    finally:
        os._exit = really


def exit_error(who: str, error: SystemExit) -> ModelError:
    """The error for a call that would end the process."""
    from foreload.trainer.models.diagnosis import raised_at  # which needs torch

    call = "os._exit" if isinstance(error, _Exit) else "sys.exit"
    given = "" if error.code is None else repr(error.code)
    return ModelError(
        f"{who}: the model's code, or a library, called {call}({given}){raised_at(error)}, which would end the process without a word; raise an "
        "exception there that says what is wrong"
    )
