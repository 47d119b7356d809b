"""`foreload join` with something wrong, named by WRONG: run as a module in its place, and, by it, in place of its trainer's process."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any
from unittest import mock

from foreload.trainer import cli
from foreload.trainer.cluster.member import hosted_log, trainer_process, worker
from foreload.trainer.cluster.member.trainer_terms import TrainerTerms
from foreload.trainer.cluster.messages.facts import TrainerPlace
from foreload.trainer.cluster.processes import joining_host
from foreload.trainer.compute import numerics


def _raises(*_: object, **__: object) -> None:
    raise ZeroDivisionError("division by zero")


def _signals(number: int) -> object:
    return lambda *_, **__: os.kill(os.getpid(), number)


def _elsewhere(host: str, _: int, has_run: bool) -> TrainerPlace:
    return TrainerPlace(host, 1, has_run)  # nobody listens at port 1


WRONGS: dict[str, Any] = {
    "version": mock.patch.object(joining_host, "program_version", return_value="0.0.1"),
    "numerics": mock.patch.object(numerics, "fingerprint", return_value={"torch": "0.0.1"}),
    "killed at once": mock.patch.object(worker, "work", _signals(signal.SIGKILL)),
    "killed when it is ready": mock.patch.object(TrainerTerms, "await_begin", _signals(signal.SIGKILL)),
    "killed when it can join": mock.patch.object(TrainerTerms, "join", _signals(signal.SIGKILL)),
    "stopped when it is ready": mock.patch.object(TrainerTerms, "await_begin", _signals(signal.SIGSTOP)),
    "raises": mock.patch.object(trainer_process, "Schedule", _raises),
    "fails as a member": mock.patch.object(trainer_process, "receive_state", _raises),
    "elsewhere": mock.patch.object(hosted_log, "TrainerPlace", _elsewhere),
}


def main() -> int:
    """The command, or the process of its trainer."""
    with WRONGS[os.environ["WRONG"]], mock.patch.object(joining_host, "WORKER", "wrong_guest"):
        return worker.main() if "FORELOAD_TRAINER" in os.environ else cli.main()


if __name__ == "__main__":
    sys.exit(main())
