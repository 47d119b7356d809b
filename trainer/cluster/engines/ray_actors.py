"""The actors of a run on a Ray cluster: its keeper, its trainers and its store servers.

They are detached, so they outlive the driver, which is the process of `foreload train`. Ray runs
each in a process of its own, and each runs its part as a child process, which ends with it.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from foreload.base.guard import Guard
from foreload.base.job_token import given_token
from foreload.cache.client.local import LocalStores
from foreload.cache.client.url import PASSWORD_VARIABLE
from foreload.cache.errors import StoreError
from foreload.trainer.checkpoints.contents import Checkpoint
from foreload.trainer.cluster.processes.rendezvous_host import ChildRendezvous
from foreload.trainer.cluster.processes.starting import WORKER, ChildProcess, OnHost, ProcessStart, TrainerStart
from foreload.trainer.errors import CheckpointError, RunError
from foreload.trainer.run.directory import GIVEN_UP, PASSWORD, TOKEN, Run
from foreload.trainer.run.engine_record import EngineRecord, read_password

Taken = Literal["taken", "used", "stopping", "elsewhere"]
"""Whether a call has a run's lease now; or another one has it; or the driver of another one has died, and its trainers are still stopping; or the
lease is free, but kept on another node.
"""
_LOOK = timedelta(seconds=0.5)  # between two looks at what is waited for
_GIVING_UP = "giving up"  # the call that has the lease while the run is saved
TRAINER, SERVER, KEEPER = "trainer", "server", "keeper"  # how the actors' names begin
SERVERS_PLACE, TRAINERS_PLACE = "servers", "trainers"  # how the placement groups' names end


@dataclass(frozen=True, slots=True)
class Placed:
    """Where Ray has placed an actor.

    Attributes:
        node: Ray's id of the node.
        address: Address of the node.
        pid: Id of the actor's process.
    """

    node: str
    address: str
    pid: int


def _placed() -> Placed:
    import ray

    return Placed(ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), os.getpid())


class TrainerActor:
    """Runs a trainer."""

    def __init__(self) -> None:
        self._process: ChildProcess | None = None
        self._over = False

    def place(self) -> Placed:
        """Return where this actor is."""
        return _placed()

    def run(self, folder: str, run: str, trainer: int, rendezvous: str, plan: int | None, variables: Mapping[str, str]) -> int:
        """Run the trainer to its end, and return its exit status.

        Args:
            folder: The driver's working directory, to which the job's paths are relative.
            run: The run's folder.
            trainer, rendezvous, plan: As in `TrainerStart`.
            variables: Variables of the process's environment.
        """
        os.chdir(folder)
        token = given_token(str(Path(run) / TOKEN))
        assert token is not None
        secret = {PASSWORD_VARIABLE: read_password(Path(run))} if (Path(run) / PASSWORD).exists() else {}
        start = TrainerStart(trainer, rendezvous, _placed().address, None, os.getpid(), plan, OnHost(token, has_run=True))
        self._process = ChildProcess(ProcessStart(WORKER, (), {**variables, **secret, **start.environment()}))
        guard = Guard(self._process.pid)
        if self._over:
            self._process.kill()
        self._process.wait()
        self._over = True
        guard.release()
        return self._process.poll() or 0

    def pid(self) -> int | None:
        """Return the id of the trainer's process. None if it has not been started."""
        return None if self._process is None else self._process.pid

    def is_over(self) -> bool:
        """Return whether the trainer has ended."""
        return self._over

    def stop(self) -> None:
        """Kill the trainer."""
        self._over = True
        if self._process is not None:
            self._process.kill()


class ServerActor:
    """Runs a store server, which listens on the node's address and wants a password."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="foreload-server-"))
        self._stores = LocalStores(1, self._folder)

    def place(self) -> Placed:
        """Return where this actor is."""
        return _placed()

    def start(self, run: str) -> str:
        """Start the server, and return its URL, without password.

        Args:
            run: The run's folder, which has the password.

        Raises:
            StoreError: The server does not start.
        """
        import redis

        # The server begins with a Unix socket alone. It listens for others once it wants a password.
        self._stores.start()
        (pid,) = self._stores.pids
        assert pid is not None
        self._guard = Guard(pid, self._folder)
        password, address = read_password(Path(run)), _placed().address
        socket = self._stores.urls[0].removeprefix("unix://")
        with redis.Redis(unix_socket_path=socket) as server:
            server.config_set("requirepass", password)
        with redis.Redis(unix_socket_path=socket, password=password) as server:
            server.config_set("bind", address)
            for _ in range(100):
                port = random.SystemRandom().randrange(20_000, 32_000)
                with contextlib.suppress(redis.ResponseError):
                    server.config_set("port", port)
                    return f"redis://{address}:{port}"
        raise StoreError(f"store server on {address}: found no free port from 20,000 to 32,000")

    def wait(self) -> str:
        """Wait until the server has ended, and return how it did."""
        return self._stores.await_end(0)

    def pid(self) -> int | None:
        """Return the id of the server's process."""
        return self._stores.pids[0]


class Keeper:
    """Keeps the lease of a run's driver, and its rendezvous host. It is on the driver's node.

    When the driver of a call that trains has died, the trainers stop, with everything saved. Then
    another call can have the lease. The servers stay until `foreload delete`, or, where the driver
    wants it, until the run has been saved to a checkpoint.

    Args:
        run: The run's folder.
        namespace: Of the run's actors.
    """

    def __init__(self, run: str, namespace: str) -> None:
        self._run, self._namespace = run, namespace
        self._lock = threading.Lock()
        self._call = ""  # the call that has the lease, or had it when its driver died
        self._taken = 0  # how many calls have had it
        self._driver_died = False
        self._rendezvous: ChildRendezvous | None = None

    def take(self, call: str, node: str, pid: int, abandon_seconds: float | None) -> Taken:
        """Give a call the lease, if it is free.

        Args:
            call: Name of the call.
            node, pid: Node and id of the driver's process.
            abandon_seconds: How long after the driver has died the run is given up. None for never.
        """
        with self._lock:
            if self._call:
                return "stopping" if self._driver_died else "used"
            if node != _placed().node:
                return "elsewhere"
            driver = os.pidfd_open(pid)
            self._call = call
            self._taken += 1
        threading.Thread(target=self._follow, args=(call, driver, abandon_seconds), name="lease", daemon=True).start()
        return "taken"

    def release(self, call: str) -> None:
        """Take the lease back from a call that is over."""
        with self._lock:
            if call == self._call:
                self._close()
                self._call, self._driver_died = "", False

    def await_end(self, call: str) -> None:
        """Wait until a call no longer has the lease."""
        while self._call == call:
            time.sleep(_LOOK.total_seconds())

    def open_rendezvous(self) -> str:
        """Start a rendezvous host, and return its address once it listens."""
        with self._lock:
            self._close()
            self._rendezvous = ChildRendezvous(_placed().address, ChildProcess)
            self._rendezvous.await_ready()
            return self._rendezvous.address

    def close_rendezvous(self) -> None:
        """End the rendezvous host."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._rendezvous is not None:
            self._rendezvous.close()
            self._rendezvous = None

    def _follow(self, call: str, driver: int, abandon_seconds: float | None) -> None:
        """Wait for the end of a call, or of its driver's process.

        Args:
            driver: Descriptor of that process.
        """
        ended = select.poll()
        ended.register(driver, select.POLLIN)
        while self._call == call and not ended.poll(1000 * _LOOK.total_seconds()):
            pass
        os.close(driver)
        with self._lock:
            if self._call != call:
                return
            self._driver_died = True
            if self._rendezvous is not None:
                self._rendezvous.launcher_is_gone()
        died = time.monotonic()
        self._await_trainers()
        self.release(call)
        if abandon_seconds is not None:
            self._give_up(died, abandon_seconds)

    def _await_trainers(self) -> None:
        """Wait until all trainers of the call have ended, and end their actors."""
        import ray

        while trainers := [name for name in self._named() if name.startswith(TRAINER)]:
            for name in trainers:
                with contextlib.suppress(ValueError, ray.exceptions.RayError):
                    actor: Any = ray.get_actor(name, namespace=self._namespace)
                    # A trainer that was never started has nothing to end.
                    if ray.get(actor.is_over.remote()) or ray.get(actor.pid.remote()) is None:
                        ray.kill(actor)
            time.sleep(_LOOK.total_seconds())

    def _named(self) -> list[str]:
        import ray

        return [one["name"] for one in ray.util.list_named_actors(all_namespaces=True) if one["namespace"] == self._namespace]

    def _give_up(self, died: float, seconds: float) -> None:
        """Save the run to a checkpoint, verify it, and end the servers, unless a call takes the lease before.

        What fails is tried again after the same time: the disk may have room then.

        Args:
            died: When the driver died, time.monotonic().
            seconds: How long after that the run is given up.
        """
        taken, at = self._taken, died + seconds
        while True:
            while time.monotonic() < at:
                time.sleep(_LOOK.total_seconds())
            with self._lock:
                if self._taken != taken:
                    return
                # No call can have the lease meanwhile.
                self._call = _GIVING_UP
            try:
                if self._save_and_end():
                    return
            finally:
                self.release(_GIVING_UP)
            at = time.monotonic() + seconds

    def _save_and_end(self) -> bool:
        run, servers_end = Run(self._run), False
        if self._is_saved(run) or self._foreload("save", self._run):
            checkpoint = run.newest_checkpoint()
            servers_end = checkpoint is not None and self._foreload("verify", str(checkpoint))
        if servers_end:
            record = EngineRecord.read(run.path)
            end_servers(record)
            if record is not None:
                replace(record, servers={}, spares=(), ended=(*record.ended, *record.servers)).write(run.path)
            said = f"the servers of run {run.path} have ended; its command, repeated with --resume, goes on from the checkpoint"
        else:
            said = (
                f"the servers of run {run.path} stay, and this is tried again; to go on with the run, repeat its command with --resume; "
                f"to end the servers with the rows that they hold: foreload delete {run.path}"
            )
        with open(run.path / GIVEN_UP, "a", encoding="utf-8") as log:
            log.write(f"{said}\n")
        return servers_end

    @staticmethod
    def _is_saved(run: Run) -> bool:
        """Return whether a checkpoint has the run as it stopped."""
        newest = run.newest_checkpoint()
        if newest is not None:
            with contextlib.suppress(CheckpointError, RunError):
                status = run.saved_status()
                return status.state != "training" and Checkpoint.open(newest).contents.step == status.step
        return False

    def _foreload(self, *words: str) -> bool:
        """Run `foreload checkpoint`, with its output in the run's folder. Returns whether it succeeded."""
        with open(Path(self._run) / GIVEN_UP, "ab") as log:
            command = [sys.executable, "-P", "-m", "foreload", "checkpoint", *words]
            return not subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=False).returncode


def end_servers(record: EngineRecord | None) -> None:
    """End the servers of a run, and all that they hold. Ray must be connected."""
    if record is None:
        return
    end_actors(record.namespace, [*record.servers.values(), *record.spares])
    for name in (SERVERS_PLACE, TRAINERS_PLACE):
        free_place(record, name)


def end_actors(namespace: str, names: Sequence[str]) -> None:
    """End actors, unless they have ended. Ray must be connected."""
    import ray

    for name in names:
        with contextlib.suppress(ValueError, ray.exceptions.RayError):
            ray.kill(ray.get_actor(name, namespace=namespace))


def free_place(record: EngineRecord, name: str) -> None:
    """Give back what a placement group of a run has reserved, if it exists. Ray must be connected."""
    import ray

    with contextlib.suppress(ValueError, ray.exceptions.RayError):
        ray.util.remove_placement_group(ray.util.get_placement_group(f"{record.namespace}-{name}"))
