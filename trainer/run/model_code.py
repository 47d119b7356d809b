"""Record the code of the user's model, compare it in later calls, and report code that exits."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import socket
import sys
import threading
from collections.abc import Iterator, Mapping

from foreload.trainer.errors import ModelError
from foreload.trainer.job.job import TrainJob
from foreload.trainer.models.built_in import MODELS
from foreload.trainer.models.own_code import own_files
from foreload.trainer.run.event_log import CodeAccepted, EventLog
from foreload.trainer.run.manifest import CodeFile, Manifest, code_sums


def code_of(job: TrainJob) -> tuple[CodeFile, ...]:
    """Return the user's files behind a job's model and loss. A built-in model has none."""
    names = [MODELS.get(job.model, job.model), *([] if job.loss is None else [job.loss])]
    return tuple(CodeFile.of(name, path) for name, path in own_files(names, job.model_folder).items())


def check_code(what: str, manifest: Manifest, job: TrainJob, copy: str) -> None:
    """Raise ModelError if the code of a job's model differs from the code that a run records.

    A run of an earlier version records no code and passes.

    Args:
        what: the run or checkpoint, for the message.
        manifest: the run's manifest.
        job: names the model and loss, and the folder to find them in.
        copy: the location of the recorded files, for the message.
    """
    if manifest.code and (change := changed(code_sums(manifest.code), code_of(job))) is not None:
        raise ModelError(
            f"{what}: the code of its model is not what it was trained with: {change}; put the former code back, "
            f"of which {copy} has a copy, or go on with "
            "the code as it is with --accept-model"
        )


def check_same_code(trainer: str, recorded: Mapping[str, str], job: TrainJob) -> None:
    """Raise ModelError if a trainer's code differs from the coordinator's in any byte.

    Args:
        trainer: the trainer's name, for the message.
        recorded: checksums of the coordinator's files, by name.
        job: as in `check_code`.
    """
    if (change := changed(recorded, code_of(job))) is not None:
        raise ModelError(
            f"{trainer} on {socket.gethostname()}: the code of its model is not what the job began with: {change}; put the same files there: on the "
            "coordinator's host RUN/model has a copy"
        )


def changed(recorded: Mapping[str, str], code: tuple[CodeFile, ...]) -> str | None:
    """Describe in which files code differs from recorded checksums. Returns None if it does not."""
    now = {file.name: file for file in code}
    differences = [
        f"{file.path} has other contents" for name, file in now.items() if recorded.get(name, file.sha256) != file.sha256
    ]
    differences += [f"{file.path} was not imported before" for name, file in now.items() if name not in recorded]
    differences += [f"{name} was removed, or is no longer imported" for name in recorded if name not in now]
    return ", ".join(differences) or None


def note_code(events: EventLog | None, what: str, manifest: Manifest, code: tuple[CodeFile, ...]) -> None:
    """Warn that accepted code differs from the code that `manifest` records.

    This does nothing if the code is the same.

    Args:
        events: the run's event log, if the warning is to be recorded there too.
        what: the run or checkpoint, for the message.
        code: the files in use.
    """
    if manifest.code and (change := changed(code_sums(manifest.code), code)) is not None:
        sys.stderr.write(f"foreload: warning: {what}: the code of its model is not what it was trained with: {change}\n")
        if events is not None:
            events.note(CodeAccepted(cause=change))


class _Exit(SystemExit):
    """Stands for a call of os._exit."""


@contextlib.contextmanager
def exits_reported(who: str) -> Iterator[None]:
    """Raise ModelError if code in this context calls sys.exit or os._exit.

    foreload's own code calls neither in this context, so the call is the model's or a library's. If
    native code crashes, which ends the process by a signal, the Python traceback is left on stderr.

    Args:
        who: the process, for the message.
    """
    really, process = os._exit, os.getpid()

    def report_exit(status: int) -> None:
        # Another thread has no caller to raise the error to, and a fork really is to exit.
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
    """Return the error for a call that would end the process."""
    # This import needs torch, which many commands do without.
    from foreload.trainer.models.diagnosis import raised_at

    call = "os._exit" if isinstance(error, _Exit) else "sys.exit"
    given = "" if error.code is None else repr(error.code)
    return ModelError(
        f"{who}: the model's code, or a library, called {call}({given}){raised_at(error)}, which would end the process without a message; raise an "
        "exception there that says what is wrong"
    )
