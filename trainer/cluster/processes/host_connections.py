"""The coordinator's socket for trainers on other hosts.

`foreload join` on another host connects to it with the job's token, and offers a trainer. Over the
same connection the coordinator asks it to start and end that trainer.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta

from foreload.base.errors import SettingError
from foreload.base.job_token import TokenServer
from foreload.trainer.cluster.messages.host_messages import (
    BEAT,
    HOST_GONE,
    PURPOSE,
    AskJoin,
    Beat,
    EndTrainer,
    HostMessage,
    NotWanted,
    TrainerExited,
    Waits,
    receive_host_message,
    send_host_message,
)
from foreload.trainer.errors import MessageError

# How long another host may take to report that its trainer has ended. A host that is cut off never
# reports it.
END_PATIENCE = timedelta(seconds=0.5)
_SAID = timedelta(minutes=1)  # at least, between two log lines about refused peers


class HostedTrainer:
    """A trainer that another host offers or runs: a StartedProcess from the launcher's side.

    Attributes:
        host: Address of that host.
    """

    is_here = False

    def __init__(self, connection: socket.socket, host: str, pid: int) -> None:
        self._connection, self.host, self._pid = connection, host, pid
        self._sending = threading.Lock()
        self._ended = threading.Event()
        self._status: int | None = None

    @property
    def pid(self) -> int:
        """Id of the process on that host that offers and runs the trainer."""
        return self._pid

    def send(self, message: HostMessage) -> None:
        """Send a message to the host. Errors are ignored: a host that is gone does not get it."""
        with self._sending, contextlib.suppress(OSError):
            send_host_message(self._connection, message)

    def poll(self) -> int | None:
        """Return the exit status that the host reported, HOST_GONE if it is gone, or None."""
        return self._status

    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait until the trainer has ended, its host is gone, or the timeout is over.

        Args:
            timeout: If None, END_PATIENCE.
        """
        self._ended.wait((timeout or END_PATIENCE).total_seconds())

    def kill(self) -> None:
        """Ask the host to end the trainer."""
        if self._status is None:
            self.send(EndTrainer())

    def follow(self) -> None:
        """Receive the host's messages until the connection ends. Raises OSError, MessageError."""
        try:
            while (message := receive_host_message(self._connection)) is not None:
                if isinstance(message, TrainerExited) and self._status is None:
                    self._status = message.status
                    self._ended.set()
        finally:
            # A connection that ends without TrainerExited says nothing about the trainer itself.
            if self._status is None:
                self._status = HOST_GONE
            self._ended.set()


class HostConnections:
    """The connections of other hosts to the coordinator.

    The object listens from the beginning until `close`. It keeps offered trainers until `take`
    returns them.
    """

    def __init__(self, host: str, port: int, token: str, version: str, silence: timedelta) -> None:
        """Start listening.

        Args:
            host, port: Address at which to listen.
            token: Token of the job.
            version: Version of foreload that other hosts must have.
            silence: Time after which a host that sends nothing counts as gone.

        Raises:
            SettingError: It cannot listen at this address.
        """
        self._version, self._silence = version, silence
        self._changed = threading.Condition()
        self._offered: deque[HostedTrainer] = deque()
        self._there: list[HostedTrainer] = []
        self._closed = threading.Event()
        self._said_at = -_SAID.total_seconds()
        try:
            self._server = TokenServer(host, port, token, PURPOSE, self._serve, self._refused)
        except OSError as error:
            raise SettingError(
                f"--coordinator: must be a free port at an address of this machine; got {host}:{port} ({error.strerror or error})"
            ) from error
        threading.Thread(target=self._beat, name="beats", daemon=True).start()

    def take(self) -> HostedTrainer | None:
        """Return a trainer that is offered, or None."""
        with self._changed:
            while self._offered:
                offered = self._offered.popleft()
                if offered.poll() is None:
                    return offered
            return None

    def offer_again(self, trainers: Sequence[HostedTrainer]) -> None:
        """Put trainers that were taken back in front of those that are offered."""
        with self._changed:
            self._offered.extendleft(reversed(trainers))

    def await_offers(self, wanted: int, said: Callable[[int], None], every: timedelta) -> list[HostedTrainer]:
        """Wait until enough trainers are offered, and return them.

        Args:
            wanted: Number of trainers to wait for.
            said: Called at once, and then repeatedly, with the number of trainers offered so far.
            every: Time between two calls of `said`.
        """
        said_at: float | None = None
        while True:
            with self._changed:
                there = [one for one in self._offered if one.poll() is None]
                self._offered = deque(there)
                if len(there) >= wanted:
                    return [self._offered.popleft() for _ in range(wanted)]
                if said_at is None or time.monotonic() - said_at >= every.total_seconds():
                    said_at = time.monotonic()
                    said(len(there))
                self._changed.wait(BEAT.total_seconds())
            # Sending may take long, so it happens without the lock.
            for one in there:
                one.send(Waits(len(there), wanted))

    def close(self) -> None:
        """Stop listening, and close all connections."""
        self._closed.set()
        self._server.close()

    def _serve(self, connection: socket.socket, address: str) -> None:
        connection.settimeout(self._silence.total_seconds())
        try:
            asked = receive_host_message(connection)
            if not isinstance(asked, AskJoin):
                return
            offered = HostedTrainer(connection, address, asked.pid)
            # Messages carry no version number, so all hosts must run the same version.
            if asked.version != self._version:
                offered.send(
                    NotWanted(
                        f"this host has foreload {asked.version}, the coordinator {self._version}; install the coordinator's version"
                    )
                )
                return
            with self._changed:
                self._offered.append(offered)
                self._there.append(offered)
                self._changed.notify_all()
            try:
                offered.follow()
            finally:
                with self._changed:
                    self._there.remove(offered)
        except MessageError:
            return  # the peer is not `foreload join`

    def _beat(self) -> None:
        while not self._closed.wait(BEAT.total_seconds()):
            with self._changed:
                there = list(self._there)
            for one in there:
                one.send(Beat())

    def _refused(self, address: str, why: str) -> None:
        now = time.monotonic()
        if now - self._said_at >= _SAID.total_seconds():
            self._said_at = now
            sys.stderr.write(f"foreload: {address}: refused at --coordinator: {why}\n")
