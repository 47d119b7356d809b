"""`foreload join` on another host.

It offers the coordinator a trainer, runs the trainer as a child process, and stays until the
trainer has ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from foreload.base.interrupts import Interrupts
from foreload.base.job_token import WrongToken, connected
from foreload.trainer.cluster.messages.host_messages import (
    BEAT,
    PURPOSE,
    AskJoin,
    Beat,
    EndTrainer,
    NotWanted,
    StartAgain,
    StartTrainer,
    TrainerExited,
    Waits,
    program_version,
    receive_host_message,
    send_host_message,
)
from foreload.trainer.cluster.processes.starting import (
    WORKER,
    OnHost,
    ProcessStart,
    StartedProcess,
    StartProcess,
    TrainerStart,
)
from foreload.trainer.compute import numerics
from foreload.trainer.errors import MessageError, PeerLost, RunError, TrainerError

CONNECT_TIMEOUT = timedelta(seconds=10)
_PAUSE = timedelta(seconds=1)  # between two attempts to reach the coordinator
_POLL = timedelta(milliseconds=50)
# How long the coordinator may send nothing before its StartTrainer names the limit.
_SILENCE = timedelta(seconds=30)


@dataclass(frozen=True, slots=True)
class HostJob:
    """The settings of a host that joins a job.

    Attributes:
        host, port: Address of the coordinator.
        token: Token of the job.
        schedule: Folder of the schedule on this host. If None, the same path as on the
            coordinator's host.
        address: Address of this machine for other trainers. If None, that of its connection to the
            coordinator.
        stores: URLs of the store shards, with passwords. If None, the coordinator's URLs, which
            have no passwords.
        patience: How long to try to reach the coordinator.
    """

    host: str
    port: int
    token: str
    schedule: str | None
    address: str | None
    stores: tuple[str, ...] | None
    patience: timedelta


class _Coordinator:
    """The connection to the coordinator, and the messages received on it.

    One thread receives messages, another one sends signs of life.

    Attributes:
        start: The trainer to start. None while there is none.
        refused: Why the coordinator does not want the trainer, or None.
        waits: The last message that the coordinator waits for more trainers, if any.
        ends: Whether the coordinator wants the trainer to be ended.
        gone: Whether the connection is closed.
        heard_at: When the last message was received, time.monotonic().
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._sending = connection, threading.Lock()
        self._changed = threading.Condition()
        self.start: StartTrainer | None = None
        self.refused: str | None = None
        self.waits: Waits | None = None
        self.ends = False
        self.gone = False
        self.heard_at = time.monotonic()
        # AskJoin goes out before any sign of life, because the coordinator expects it as the first
        # message.
        self.send(AskJoin(socket.gethostname(), os.getpid(), program_version()))
        for work in (self._hear, self._beat):
            threading.Thread(target=work, name="coordinator", daemon=True).start()

    def send(self, message: AskJoin | Beat | TrainerExited) -> None:
        with self._sending, contextlib.suppress(OSError):
            send_host_message(self._connection, message)

    def await_change(self) -> None:
        with self._changed:
            self._changed.wait(_POLL.total_seconds())

    def _hear(self) -> None:
        with contextlib.suppress(OSError, MessageError):
            while (message := receive_host_message(self._connection)) is not None:
                with self._changed:
                    self.heard_at = time.monotonic()
                    match message:
                        case StartTrainer():
                            self.start = message
                        case StartAgain():
                            self.start = None
                        case NotWanted(why):
                            self.refused = why
                        case Waits():
                            self.waits = message
                        case EndTrainer():
                            self.ends = True
                        case _:
                            pass
                    self._changed.notify_all()
        with self._changed:
            self.gone = True
            self._changed.notify_all()

    def _beat(self) -> None:
        while not self.gone:
            self.send(Beat())
            time.sleep(BEAT.total_seconds())


def run_host(job: HostJob, interrupts: Interrupts, log: Callable[[str], None], start_process: StartProcess) -> None:
    """Offer a trainer to the coordinator, and run it to its end.

    Args:
        job: Settings of this host.
        interrupts: Signals of this process.
        log: Called with each line for the user.
        start_process: Starts the trainer's process.

    Raises:
        TrainerError: The trainer failed, or the coordinator or a signal ended it.
        RunError: The coordinator refuses this host.
        PeerLost: The coordinator cannot be reached, or is gone.
        KeyboardInterrupt: A signal came before the trainer was started.
    """
    with contextlib.closing(_reached(job, log)) as connection:
        coordinator = _Coordinator(connection)
        log(f"coordinator at {job.host}:{job.port}: reached; waiting until there is something to train")
        while _run_trainer(job, connection.getsockname()[0], coordinator, interrupts, log, start_process):
            log("training could not begin because of another host's trainer; waiting until it begins again")


def _run_trainer(
    job: HostJob,
    own_address: str,
    coordinator: _Coordinator,
    interrupts: Interrupts,
    log: Callable[[str], None],
    start_process: StartProcess,
) -> bool:
    """Wait until the coordinator starts a trainer, and run it to its end.

    Args:
        own_address: Address of this machine on its connection to the coordinator.

    Returns:
        Whether the coordinator will start another trainer in its place.

    Raises:
        As `run_host`.
    """
    start = _started(job, coordinator, log)
    # From here on a signal asks the trainer to leave in order (`_follow`).
    interrupts.defer_signals = True
    trainer_start = TrainerStart(
        start.trainer,
        start.rendezvous,
        job.address or own_address,
        job.stores or start.stores,
        os.getpid(),
        start.plan,
        OnHost(job.token, has_run=False, schedule=job.schedule or start.schedule),
    )
    variables = numerics.environment(start.cpu_capability, start.threads) | trainer_start.environment()
    process = start_process(ProcessStart(WORKER, (), variables))
    log(f"trainer {start.trainer}: started here, pid {process.pid}, address {trainer_start.address}")
    again = False
    try:
        again = _follow(start, process, coordinator, interrupts, log)
    finally:
        process.kill()
        process.wait()
        if not again:
            coordinator.send(TrainerExited(process.poll() or 0))
    if again:
        interrupts.heed()
    return again


def _reached(job: HostJob, log: Callable[[str], None]) -> socket.socket:
    """Connect to the coordinator, and retry until `job.patience` is over."""
    deadline = time.monotonic() + job.patience.total_seconds()
    said = False
    while True:
        try:
            return connected(job.host, job.port, job.token, PURPOSE, CONNECT_TIMEOUT.total_seconds())
        except WrongToken as error:
            raise RunError(
                f"coordinator at {job.host}:{job.port}: refuses this host: {error}; give what RUN/token has there, with --token-file"
            ) from error
        except OSError as error:
            if time.monotonic() >= deadline:
                raise PeerLost(
                    f"coordinator at {job.host}:{job.port}: cannot be reached ({error}); is `foreload train --coordinator` running?"
                ) from error
            if not said:
                said = True
                log(f"coordinator at {job.host}:{job.port}: cannot be reached yet ({error}); trying again")
            time.sleep(_PAUSE.total_seconds())


def _started(job: HostJob, coordinator: _Coordinator, log: Callable[[str], None]) -> StartTrainer:
    """Wait for the coordinator's StartTrainer, and return it."""
    place = f"coordinator at {job.host}:{job.port}"
    said: Waits | None = None
    while (start := coordinator.start) is None:
        if coordinator.refused is not None:
            raise RunError(f"{place}: {coordinator.refused}")
        if coordinator.gone or time.monotonic() - coordinator.heard_at > _SILENCE.total_seconds():
            raise PeerLost(f"{place}: left before training began")
        if coordinator.waits is not None and coordinator.waits != said:
            said = coordinator.waits
            log(f"{place}: {said.there} of {said.wanted} further trainers have joined")
        coordinator.await_change()
    return start


def _follow(
    start: StartTrainer, process: StartedProcess, coordinator: _Coordinator, interrupts: Interrupts, log: Callable[[str], None]
) -> bool:
    """Wait until the trainer has ended, or until the coordinator wants to start it again.

    Returns:
        Whether the coordinator wants to start it again.

    Raises:
        TrainerError: The trainer failed, or the coordinator or a second signal ended it.
        PeerLost: The coordinator was silent for too long.
    """
    # heeded: number of signals handled so far. alone: the launcher's death was reported.
    name, heeded, alone = f"trainer {start.trainer}", 0, False
    while (status := process.poll()) is None:
        # StartAgain has removed or replaced the message that started this trainer.
        if coordinator.start is not start:
            return True
        if coordinator.refused is not None:
            raise TrainerError(f"{name}: refused by the coordinator: {coordinator.refused}")
        if coordinator.ends:
            raise TrainerError(f"{name}: the coordinator has ended it: it was taken for lost, or is no longer needed")
        if len(interrupts.received) > heeded:
            heeded = len(interrupts.received)
            if heeded > 1:
                raise TrainerError(f"{name}: ended at once by a second signal; the others go on if they have copies of its lanes")
            # The trainer handles SIGTERM by handing over its lanes (`worker`).
            log(f"{name}: leaves, as soon as others have its lanes; a second signal ends it at once")
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGTERM)
        if coordinator.gone and not alone:
            alone = True
            log(f"{name}: the launcher has died; it stops cleanly if it can")
        if not coordinator.gone and time.monotonic() - coordinator.heard_at > start.silence:
            raise PeerLost(
                f"{name}: the coordinator has sent nothing for {start.silence:.0f} s, so this host counts as lost; it stops"
            )
        coordinator.await_change()
    if status:
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else "stopped too early"
        raise TrainerError(f"{name}: {how}; see above, or the coordinator's messages")
    log(f"{name}: ended normally")
    return False


def report(line: str) -> None:
    """Write a line for the user to stderr."""
    sys.stderr.write(f"foreload: {line}\n")
