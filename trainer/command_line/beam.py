"""`foreload beam-worker`, which runners of Beam start on a cluster's machines."""

from __future__ import annotations

import argparse
from typing import Any

from foreload.base.interrupts import heeded_afterwards
from foreload.trainer.command_line.shared import add_plain


def add_to(commands: Any) -> None:
    """Declare the command.

    Args:
        commands: the subparsers of the whole command line.
    """
    worker = add_plain(
        commands, "beam-worker", _worker, "be a worker of `prepare` on a cluster; Flink starts it",
        "Is a worker process of `foreload prepare` on a cluster's machine that has this package. Flink starts it, with "
        "--environment_type=PROCESS --environment_config='{\"command\": \"foreload-beam-worker\"}' of `prepare`. foreload-beam-worker is this "
        "command under a name without a space, which Flink needs.",
    )  # fmt: skip
    worker.add_argument("--id", required=True, help="the worker's id")
    for service, meaning in (
        ("provision", "has the pipeline's options"),
        ("control", "says what to do"),
        ("logging", "takes log messages"),
        ("artifact", "has the pipeline's files, which are not used: this package is installed already"),
    ):
        worker.add_argument(
            f"--{service}_endpoint",
            metavar="HOST:PORT",
            required=service == "provision",
            default="",
            help=f"the service that {meaning}",
        )


def _worker(parsed: argparse.Namespace) -> int:
    with heeded_afterwards():
        from foreload.pipelines.beam.worker import WorkerFlags, become_worker

    become_worker(WorkerFlags(parsed.id, parsed.provision_endpoint, parsed.logging_endpoint, parsed.control_endpoint))
