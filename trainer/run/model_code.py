"""The code of the user's model: what a run records of it, how a later call compares it, and code that ends the process."""

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
    """Return the user's files behind a job's model and loss; none of a built-in model's."""
    names = [MODELS.get(job.model, job.model), *([] if job.loss is None else [job.loss])]
    return tuple(CodeFile.of(name, path) for name, path in own_files(names, job.model_folder).items())


def check_code(what: str, manifest: Manifest, job: TrainJob, copy: str) -> None:
    """Raise ModelError where the code of a job's model is not the code that a run records.

    A run of an earlier version records none, and passes.

    Args:
        what: the run or checkpoint, for the message.
        manifest: the run's.
        job: which model and loss, and where they are looked for.
        copy: where the recorded files are.
    """
    if manifest.code and (change := changed(code_sums(manifest.code), code_of(job))) is not None:
        raise ModelError(
            f"{what}: the code of its model is not what it was trained with: {change}; put that back, of which {copy} has a copy, or go on with "
            "the code as it is with --accept-model"
        )


def check_same_code(trainer: str, recorded: Mapping[str, str], job: TrainJob) -> None:
    """Raise ModelError where the code that a trainer finds is not the coordinator's, byte by byte.

    Args:
        trainer: for the message.
        recorded: checksums of the coordinator's files, by name.
        job: as for `check_code`.
    """
    if (change := changed(recorded, code_of(job))) is not None:
        raise ModelError(
            f"{trainer} on {socket.gethostname()}: the code of its model is not what the job began with: {change}; put the same files there: on the "
            "coordinator's host RUN/model has a copy"
        )


def changed(recorded: Mapping[str, str], code: tuple[CodeFile, ...]) -> str | None:
    """Say in which files code differs from recorded checksums; None where it does not."""
    now = {file.name: file for file in code}
    differences = [
        f"{file.path} has other contents" for name, file in now.items() if recorded.get(name, file.sha256) != file.sha256
    ]
    differences += [f"{file.path} was not imported then" for name, file in now.items() if name not in recorded]
    differences += [f"{name} is gone, or not imported any longer" for name in recorded if name not in now]
    return ", ".join(differences) or None


def note_code(events: EventLog | None, what: str, manifest: Manifest, code: tuple[CodeFile, ...]) -> None:
    """Warn that other code of the model is used than `manifest` records, which was accepted; do nothing where it is the same.

    Args:
        events: those of the run, in which that is noted, too.
        what: the run or checkpoint, for the message.
        code: the files that are used.
    """
    if manifest.code and (change := changed(code_sums(manifest.code), code)) is not None:
        sys.stderr.write(f"foreload: warning: {what}: the code of its model is not what it was trained with: {change}\n")
        if events is not None:
            events.note(CodeAccepted(cause=change))


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
