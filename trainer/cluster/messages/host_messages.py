"""What the coordinator of a job over several hosts and `foreload join` on another one tell each other, over a connection that a token opened."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from typing import get_args

from foreload.base.socket_messages import receive, send
from foreload.trainer.cluster.messages.codec import one_of, with_kind
from foreload.trainer.errors import MessageError

PURPOSE = "coordinator"
BEAT = timedelta(seconds=1)  # between two signs of life, on both sides
HOST_GONE = 1000
"""The status of a trainer whose host is not reached any more: nobody knows whether it has ended."""
_MOST_BYTES = 1 << 20  # of a message


@dataclass(frozen=True, slots=True)
class AskJoin:
    """A host offers a trainer. host: its name; pid: of the process there that speaks; version: of the program."""

    host: str
    pid: int
    version: str


@dataclass(frozen=True, slots=True)
class StartTrainer:
    """The host is to start this trainer. rendezvous: where trainers meet, "HOST:PORT"; stores: URLs without passwords; plan: as in TrainerStart.

    schedule: the folder on the coordinator's host. threads, cpu_capability: what the numerics depend on before torch is imported. silence: seconds
    after which a side that says nothing is gone.
    """

    trainer: int
    rendezvous: str
    stores: tuple[str, ...]
    plan: int | None
    schedule: str
    threads: int
    cpu_capability: str
    silence: float


@dataclass(frozen=True, slots=True)
class NotWanted:
    """The trainer, started or not, is not needed, or cannot be one of this job. why: a line."""

    why: str


@dataclass(frozen=True, slots=True)
class StartAgain:
    """Training could not begin because of another host's trainer. The host ends its own, and waits for the next StartTrainer."""


@dataclass(frozen=True, slots=True)
class Waits:
    """Training has not begun: so many trainers are there, of so many."""

    there: int
    wanted: int


@dataclass(frozen=True, slots=True)
class Beat:
    """The side that sends this is there."""


@dataclass(frozen=True, slots=True)
class EndTrainer:
    """The trainer is to be ended at once: it was taken for lost, or is not needed."""


@dataclass(frozen=True, slots=True)
class TrainerExited:
    """The trainer's process has ended. status: as `StartedProcess.poll` gives it."""

    status: int


HostMessage = AskJoin | StartTrainer | StartAgain | NotWanted | Waits | Beat | EndTrainer | TrainerExited


def program_version() -> str:
    """What both sides must have."""
    try:
        return version("foreload")
    except PackageNotFoundError:
        return "unknown"


def tell_host(to: socket.socket, message: HostMessage) -> None:
    """Send a message. Raises OSError."""
    send(to, with_kind(message))


def hear_host(source: socket.socket) -> HostMessage | None:
    """The next message; None at the end. Raises OSError, and MessageError for what is none."""
    try:
        message = receive(source, _MOST_BYTES)
    except ValueError as error:  # no JSON, or not even UTF-8
        raise MessageError(f"message: must be JSON ({error})") from error
    heard: HostMessage | None = None if message is None else one_of(message.values, *get_args(HostMessage))
    return heard
