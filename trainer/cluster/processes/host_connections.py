"""The coordinator's own socket: there `foreload join` on other hosts offers trainers, by the job's token, and is told to start and end them."""

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
    hear_host,
    tell_host,
)
from foreload.trainer.errors import MessageError

END_PATIENCE = timedelta(seconds=0.5)  # for another host to say that a trainer has ended; a host that is cut off never does
_SAID = timedelta(minutes=1)  # between two lines about peers that were refused


class HostedTrainer:
    """A trainer that another host offers or runs, a StartedProcess from the launcher's side. host: where it is."""

    def __init__(self, connection: socket.socket, host: str, pid: int) -> None:
        self._connection, self.host, self._pid = connection, host, pid
        self._sending = threading.Lock()
        self._ended = threading.Event()
        self._status: int | None = None

    @property
    def pid(self) -> int:
        """Of the process on that host that runs it."""
        return self._pid

    def tell(self, message: HostMessage) -> None:
        """Send a message; who is gone does not get it."""
        with self._sending, contextlib.suppress(OSError):
            tell_host(self._connection, message)

    def poll(self) -> int | None:
        """The status that its host reported, HOST_GONE where that is gone, or None while it is at work."""
        return self._status

    def wait(self, timeout: timedelta | None = None) -> None:
        """Return when it has ended, or its host is gone; without a timeout, a moment after it was told to end."""
        self._ended.wait((timeout or END_PATIENCE).total_seconds())

    def kill(self) -> None:
        """Tell its host to end it."""
        if self._status is None:
            self.tell(EndTrainer())

    def follow(self) -> None:
        """Take in what its host reports, until it is gone. Raises OSError, MessageError."""
        try:
            while (message := hear_host(self._connection)) is not None:
                if isinstance(message, TrainerExited) and self._status is None:
                    self._status = message.status
                    self._ended.set()
        finally:
            if self._status is None:
                self._status = HOST_GONE
            self._ended.set()


class HostConnections:
    """Listens from the beginning until `close`. Those that offer a trainer are kept until `take` gives them.

    silence: after which a host that says nothing is gone. Raises SettingError where it cannot listen.
    """

    def __init__(self, host: str, port: int, token: str, version: str, silence: timedelta) -> None:
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
        """A trainer that was offered, if any is."""
        with self._changed:
            while self._offered:
                offered = self._offered.popleft()
                if offered.poll() is None:
                    return offered
            return None

    def offer_again(self, trainers: Sequence[HostedTrainer]) -> None:
        """Put trainers that were taken back, before those that are offered."""
        with self._changed:
            self._offered.extendleft(reversed(trainers))

    def await_offers(self, wanted: int, said: Callable[[int], None], every: timedelta) -> list[HostedTrainer]:
        """Wait until so many are offered, and give them. said: called at once and then every so often with how many there are."""
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
            for one in there:
                one.tell(Waits(len(there), wanted))

    def close(self) -> None:
        """Take no more, and let go of those that there are."""
        self._closed.set()
        self._server.close()

    def _serve(self, connection: socket.socket, address: str) -> None:
        connection.settimeout(self._silence.total_seconds())
        try:
            asked = hear_host(connection)
            if not isinstance(asked, AskJoin):
                return
            offered = HostedTrainer(connection, address, asked.pid)
            if asked.version != self._version:
                offered.tell(
                    NotWanted(f"this host has foreload {asked.version}, the coordinator {self._version}; install that one")
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
            return  # it is no host of this program

    def _beat(self) -> None:
        while not self._closed.wait(BEAT.total_seconds()):
            with self._changed:
                there = list(self._there)
            for one in there:
                one.tell(Beat())

    def _refused(self, address: str, why: str) -> None:
        now = time.monotonic()
        if now - self._said_at >= _SAID.total_seconds():
            self._said_at = now
            sys.stderr.write(f"foreload: {address}: refused at --coordinator: {why}\n")
