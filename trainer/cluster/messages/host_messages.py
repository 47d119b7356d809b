"""Messages between the coordinator of a job over several hosts and `foreload join` on another host.

They go over a connection on which both sides have shown the job's token.
"""

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
"""Exit status of a trainer whose host cannot be reached, so that its real status is unknown."""
_MOST_BYTES = 1 << 20  # size limit of a message


@dataclass(frozen=True, slots=True)
class AskJoin:
    """A host offers a trainer.

    Attributes:
        host: Name of the host.
        pid: Id of the process that sends this.
        version: Version of foreload on that host.
    """

    host: str
    pid: int
    version: str


@dataclass(frozen=True, slots=True)
class StartTrainer:
    """The coordinator asks the host to start a trainer.

    Attributes:
        trainer: Number of the trainer.
        rendezvous: Address of the rendezvous store, "HOST:PORT".
        stores: URLs of the store shards, without passwords.
        plan: As in `TrainerStart`.
        schedule: Folder of the schedule on the coordinator's host.
        threads, cpu_capability: Settings on which the numerics depend before torch is imported.
        silence: Seconds after which a side that sends nothing counts as gone.
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
    """The coordinator does not want the trainer, whether it was started or not.

    Attributes:
        why: The reason, in one line.
    """

    why: str


@dataclass(frozen=True, slots=True)
class StartAgain:
    """Training could not begin because of another host's trainer.

    The host ends its own trainer, and waits for the next StartTrainer.
    """


@dataclass(frozen=True, slots=True)
class Waits:
    """Training has not begun, because more trainers are needed.

    Attributes:
        there: Number of trainers that are offered.
        wanted: Number of trainers that are needed.
    """

    there: int
    wanted: int


@dataclass(frozen=True, slots=True)
class Beat:
    """A sign of life of the side that sends it."""


@dataclass(frozen=True, slots=True)
class EndTrainer:
    """The host must end the trainer at once, because it counts as lost or is not needed."""


@dataclass(frozen=True, slots=True)
class TrainerExited:
    """The trainer's process has ended.

    Attributes:
        status: Exit status as in `StartedProcess.poll`.
    """

    status: int


HostMessage = AskJoin | StartTrainer | StartAgain | NotWanted | Waits | Beat | EndTrainer | TrainerExited


def program_version() -> str:
    """Return the version of foreload, which must be the same on both sides."""
    try:
        return version("foreload")
    except PackageNotFoundError:
        return "unknown"


def send_host_message(to: socket.socket, message: HostMessage) -> None:
    """Send a message. Raises OSError."""
    send(to, with_kind(message))


def receive_host_message(source: socket.socket) -> HostMessage | None:
    """Receive the next message, or None at the end of the connection.

    Raises:
        OSError: The connection is broken, or timed out.
        MessageError: What was received is not a message.
    """
    try:
        message = receive(source, _MOST_BYTES)
    except ValueError as error:  # not JSON, or not even UTF-8
        raise MessageError(f"message: must be JSON ({error})") from error
    heard: HostMessage | None = None if message is None else one_of(message.values, *get_args(HostMessage))
    return heard
