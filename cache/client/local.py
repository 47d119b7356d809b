"""Local redis-servers of one run, for `--store local:N`.

They live in a private directory, are reached by Unix sockets only, and are saved on a clean stop.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Annotated, NotRequired, TypedDict

from foreload.base.codec import FormError, fault, filled, of_json, parse_json
from foreload.base.files import replacing
from foreload.base.interrupts import heeded_afterwards
from foreload.cache.client.backoff import pauses
from foreload.cache.client.local_server import READY_TIMEOUT, SERVER_VARIABLE, LocalServer, find_executable, saved_by, version_of
from foreload.cache.errors import StoreError, StoreFull, StoreUnavailable

_SOCKET_PATH_BYTES = 100  # sun_path holds 108 on Linux, 104 elsewhere, with the closing zero
# A file in the directory with the socket of each server, by which a later command finds them.
_SERVERS = "servers.json"
# Added to the servers' niceness: their work is needed later than that of the trainers beside them.
NICENESS = 5
_HUGE_PAGES = {
    "MALLOC_CONF": "thp:always,metadata_thp:always",
    "JE_MALLOC_CONF": "thp:always,metadata_thp:always",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
"""Settings for huge pages: for jemalloc, by either of its names, and for glibc from 2.35 on.

The servers of the wheels use that glibc. Rows are looked up at random in some GB. With pages of 4
KiB, a third of a server's time goes to finding pages. Redis switches huge pages off because of the
fork that saves while it serves; these servers save only when they stop.
"""
_KILL_AFTER = timedelta(seconds=10)


def _socket(value: str, where: str) -> None:
    """Raise FormError unless the text is the path of a shard's socket."""
    if not (value.startswith("/") and value.endswith(".sock") and value.isprintable()):
        raise FormError(f"{where}: must be the path of a socket; got {value!r:.100}")


class _Noted(TypedDict):
    """The content of servers.json.

    Attributes:
        sockets: the sockets' paths by shard number; None for removed shards.
        inode: the inode of the directory.
    """

    sockets: Annotated[list[Annotated[str, _socket] | None], filled]
    inode: NotRequired[int]


class LocalStores:
    """N redis-servers in one private directory.

    The servers outlive the process that starts them. `stop` ends them, in this process or, through
    `LocalStores.find`, in a later command. `start` loads the rows that an earlier `stop(save=True)`
    saved.

    Args:
        executable: the server program. If None, one is found.
        settings: further options of redis.conf, by name.
        adopt: if True, servers that already run in the directory are used as they are, and only the
            others are started. Such servers could not be saved, or the process that started them
            was killed.
        removed: numbers below `count` that have no server.

    Attributes:
        left: the shards whose servers an earlier command left running.
    """

    def __init__(
        self,
        count: int,
        directory: Path,
        executable: str | None = None,
        settings: Mapping[str, str] | None = None,
        adopt: bool = False,
        removed: Collection[int] = (),
    ) -> None:
        if count <= len(removed):
            raise StoreError(f"store local: needs at least one store shard; got local:{count}")
        self.directory = Path(directory).absolute()
        self.count = count
        self._removed = set(removed)
        # Held while a server is started again or removed, which two threads may do.
        self._changing = threading.Lock()
        self._executable = executable
        self._settings = dict(settings or {})
        self._adopt = adopt
        self.left: frozenset[int] = frozenset()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._servers: list[LocalServer] = []

    @classmethod
    def find(cls, directory: Path) -> LocalStores | None:
        """Return the servers that were started in a directory, running or not.

        Returns None if there were none, or if the directory is a copy. Raises StoreError if the
        record of the servers is damaged.
        """
        try:
            noted = of_json(parse_json((Path(directory) / _SERVERS).read_bytes()), _Noted)
            # The sockets named in a copy belong to the original's servers.
            if noted.get("inode", inode := Path(directory).stat().st_ino) != inode:
                return None
            sockets = dict(enumerate(noted["sockets"]))
            removed = [shard for shard, socket in sockets.items() if socket is None]
            stores = cls(len(sockets), directory, removed=removed)
            stores._servers = [
                LocalServer(stores.directory, shard, Path(socket)) for shard, socket in sockets.items() if socket is not None
            ]
        except FileNotFoundError:
            return None
        except (FormError, OSError) as error:
            raise StoreError(
                fault(
                    f"store local: {Path(directory) / _SERVERS}",
                    error,
                    "stop its servers, if any are running, and delete that file",
                )
            ) from error
        return stores

    @property
    def urls(self) -> tuple[str, ...]:
        """The URLs of the servers by shard number; "" for a removed shard."""
        urls = {server.shard: str(server.url) for server in self._servers}
        return tuple(urls.get(shard, "") for shard in range(self.count if urls else 0))

    @property
    def pids(self) -> tuple[int | None, ...]:
        """The process ids of the servers by shard number; None for servers that are not alive."""
        servers = {server.shard: server for server in self._servers}
        return tuple(servers[shard].pid() if shard in servers else None for shard in range(self.count if self._servers else 0))

    def without_rows(self) -> list[int]:
        """Return the shards whose rows are neither saved in the directory nor in a running server.

        Call this before the servers are started.
        """
        before = LocalStores.find(self.directory)
        running = before._running() if before is not None else {}
        servers = [LocalServer(self.directory, shard, self.directory) for shard in self._shards]
        return [server.shard for server in servers if server.shard not in running and not server.has_saved()]

    def start(self) -> LocalStores:
        """Start the servers, and wait until they answer and have loaded their rows.

        Raises:
            StoreError: servers already run there (and `adopt` is not set), the directory cannot be
                written to, or a server does not start. Servers that this call started are then
                killed.
        """
        before = LocalStores.find(self.directory)
        running = before._running() if before is not None else {}
        if running and not self._adopt:
            named = ", ".join(map(str, running.values()))
            raise StoreError(
                f"store local: servers already run in {self.directory} (process {named}); stop the run that uses them first"
            )
        self.left = frozenset(running.keys() & self._shards)
        if before is not None and running:
            # A server may remain from an addition or a removal whose process was killed.
            for server in before._servers:
                if server.shard not in self._shards:
                    before._end(server)
        self._lay_out(before if running else None)
        for server in self._servers:
            if server.shard not in self.left:
                server.put_back()
        executable = self._executable or find_executable([server.saved for server in self._servers])
        try:
            for server in self._servers:
                if server.shard not in self.left:
                    self._launch(server, executable)
            for server in self._servers:
                self._await_ready(server, self._processes.get(server.shard), executable)
        except BaseException:
            for process in self._processes.values():
                process.kill()
                process.wait()
            raise
        return self

    @property
    def _shards(self) -> list[int]:
        """The numbers of the shards that have a server."""
        return [shard for shard in range(self.count) if shard not in self._removed]

    def _running(self) -> dict[int, int]:
        """Return the process ids of the servers that are alive, by shard number."""
        return {shard: pid for shard, pid in enumerate(self.pids) if pid}

    def _lay_out(self, before: LocalStores | None) -> None:
        """Choose the servers' files, and record them; those of `before` keep their places."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self.directory.chmod(0o700)
            had = {} if before is None else {server.shard: server.socket for server in before._servers}
            sockets = next((socket.parent for socket in had.values()), self.directory)
            if not had and len(os.fsencode(self.directory / f"shard-{self.count}.sock")) > _SOCKET_PATH_BYTES:
                sockets = Path(tempfile.mkdtemp(prefix="foreload-"))
            places = {shard: had.get(shard, sockets / f"shard-{shard}.sock") for shard in self._shards}
            self._servers = [LocalServer(self.directory, shard, socket) for shard, socket in places.items()]
            self._note()
        except OSError as error:
            raise StoreError(
                f"store local: cannot write to {self.directory} ({error.strerror}); free disk space there, or make the folder writable"
            ) from error

    def _note(self) -> None:
        """Record the servers where `find` looks for them."""
        sockets = {server.shard: str(server.socket) for server in self._servers}
        with replacing(self.directory / _SERVERS) as temporary:
            noted = {"sockets": [sockets.get(shard) for shard in range(self.count)], "inode": self.directory.stat().st_ino}
            temporary.write_text(json.dumps(noted), encoding="utf-8")

    def add(self) -> int:
        """Start one further server, empty, while the others run.

        Returns the number of its shard. Raises StoreError if the server does not start.
        """
        shard = self.count
        server = LocalServer(self.directory, shard, self._servers[0].socket.parent / f"shard-{shard}.sock")
        for saved in (server.saved, server.set_aside):
            # A server of a failed call may have had this number, and left these files.
            saved.unlink(missing_ok=True)
        executable = self._executable or find_executable()
        try:
            self._launch(server, executable)
            self._await_ready(server, self._processes[shard], executable)
            self._servers = [*self._servers, server]
            self.count = shard + 1
            self._note()
        except BaseException:
            if (process := self._processes.pop(shard, None)) is not None:
                process.kill()
                process.wait()
            raise
        return shard

    def remove(self, shard: int) -> None:
        """End, unsaved, the server of a shard that no longer has rows.

        Its number is not used again.

        The rows that it saved earlier stay until the other servers are saved without it. Until
        then, a call would start from these rows.
        """
        server = self._server(shard)
        with self._changing:
            self._removed.add(shard)
            self._servers = [other for other in self._servers if other is not server]
            self.left -= {shard}
            self._note()
            self._end(server)
            server.put_back()

    def take_back(self, shard: int) -> None:
        """End the server that was added last, and undo its addition."""
        server = self._server(shard)
        self._servers = self._servers[:-1]
        self.count = shard
        self._note()
        self._end(server)
        server.clear()

    def _server(self, shard: int) -> LocalServer:
        return next(server for server in self._servers if server.shard == shard)

    def _end(self, server: LocalServer) -> None:
        """End one server, unsaved."""
        pid = server.pid()
        if pid is not None:
            server.shut_down(save=False)
            self._kill(self._await_exit({server: pid}, _KILL_AFTER))
        process = self._processes.pop(server.shard, None)
        if process is not None:
            process.wait()
        server.socket.unlink(missing_ok=True)
        server.pid_file.unlink(missing_ok=True)

    def restart(self, shard: int) -> bool:
        """Start the server of a shard again, empty, if its process has died.

        The server answers a moment later. The rows that it had saved are set aside until the
        servers are stopped. If nothing is saved then, they are the rows to start with next.

        Returns:
            Whether the server was started.

        Raises:
            StoreError: the server cannot be started.
        """
        with self._changing:
            if shard in self._removed:
                return False
            server, process = self._server(shard), self._processes.get(shard)
            if (process is not None and process.poll() is None) or server.pid() is not None:
                return False
            if server.saved.exists():
                server.saved.replace(server.set_aside)
            self._launch(server, self._executable or find_executable())
            return True

    def await_end(self, shard: int) -> str:
        """Wait until the server of a shard, which was started here, has ended. Returns how it did."""
        status = self._processes[shard].wait()
        return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"

    def stop(self, save: bool = True, lost: Collection[int] = ()) -> None:
        """End the servers, after saving their rows in the directory if `save` is set.

        Servers that have already ended are skipped.

        Args:
            lost: shards that the run goes on without. If `save` is set and the server of such a
                shard does not answer, it is killed, unsaved.

        Raises:
            StoreFull: a server cannot save.
            StoreUnavailable: a server does not exit. With `save`, such servers are left running,
                because their rows exist nowhere else.
        """
        alive = {server: pid for server in self._servers if (pid := server.pid()) is not None}
        if save:
            silent = {server: pid for server, pid in alive.items() if server.shard in lost and not server.answers()}
            self._kill(silent)
            alive = {server: pid for server, pid in alive.items() if server not in silent}
        # All servers save at the same time, so this takes as long as the largest shard, not the
        # sum.
        with ThreadPoolExecutor(max(len(alive), 1)) as pool:
            outcomes = zip(alive, pool.map(lambda server: server.shut_down(save), alive), strict=True)
            failures = {server: why for server, why in outcomes if why is not None}
        # If some servers could not save and run on, the others are exiting. They are reaped before
        # the error is raised.
        for shard, process in list(self._processes.items()):
            if failures and self._server(shard) not in failures:
                process.wait()
        if failures:
            server, why = next(iter(failures.items()))
            named = ", ".join(f"{other.shard} (process {alive[other]})" for other in failures)
            raise StoreFull(
                f"store local: shard {named} could not save its rows to {self.directory}; it still runs and holds all of them ({why}; see "
                f"{server.log}): free disk space there; the next command that reads or resumes the run then uses that server and saves its rows"
            )
        for server, pid in self._await_exit(alive, READY_TIMEOUT if save else _KILL_AFTER).items():
            if save:
                raise StoreUnavailable(
                    f"store local: shard {server.shard} (process {pid}) does not exit, and only it has its rows; see {server.log}"
                )
            self._kill({server: pid})
        for process in self._processes.values():
            process.wait()
        self._processes.clear()
        for server in self._servers:
            if save:
                server.set_aside.unlink(missing_ok=True)
            else:
                server.put_back()
            server.socket.unlink(missing_ok=True)
            server.pid_file.unlink(missing_ok=True)
            if server.socket.parent != self.directory:
                with contextlib.suppress(OSError):
                    server.socket.parent.rmdir()
        if save:
            clear_removed(self.directory, self._removed)
        (self.directory / _SERVERS).unlink(missing_ok=True)

    def leave(self, changed: bool) -> None:
        """End the servers, and save rows that exist nowhere else.

        Servers that were found running have such rows.

        Args:
            changed: whether the servers that were started here have such rows too.

        Raises:
            StoreFull: as in `stop`; servers are then left running.
            StoreUnavailable: as in `stop`; servers are then left running.
        """
        self.stop(save=changed or bool(self.left))

    def discard(self) -> None:
        """End the servers that were started here, unsaved.

        Those that were found running are left so.
        """
        if not self.left:
            self.stop(save=False)
            return
        for process in self._processes.values():
            process.kill()
            process.wait()
        self._processes.clear()

    def __enter__(self) -> LocalStores:
        return self.start() if not self._servers else self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop(save=False)

    def _launch(self, server: LocalServer, executable: str) -> None:
        """Start a server's process, and record it even if a signal arrives meanwhile."""
        server.socket.unlink(missing_ok=True)
        server.pid_file.unlink(missing_ok=True)
        environment = {**os.environ, **_HUGE_PAGES}
        with open(server.log, "ab") as log, heeded_afterwards():
            try:
                # The server gets a session of its own: Ctrl-C in the terminal is for the trainers,
                # which then still need the store.
                process = self._processes[server.shard] = subprocess.Popen(
                    server.command(executable, self._settings),
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            except OSError as error:
                raise StoreError(
                    f"store local: cannot run {executable} ({error.strerror}); set {SERVER_VARIABLE} to use another server"
                ) from error
            with contextlib.suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, process.pid, min(os.getpriority(os.PRIO_PROCESS, 0) + NICENESS, 19))

    def _await_ready(self, server: LocalServer, process: subprocess.Popen[bytes] | None, executable: str) -> None:
        attempts = pauses(READY_TIMEOUT)
        while process.poll() is None if process is not None else server.pid() is not None:
            if server.socket.exists() and server.answers():
                return
            if next(attempts, self) is self:
                raise StoreUnavailable(f"store local: shard {server.shard} does not answer; its log is {server.log}")
        lines = server.log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["its log is empty"]
        why = lines[-1].strip()
        if (saved := saved_by(server.saved)) and saved != (version := version_of(executable)):
            why += f"; its rows were saved by {saved}, but this server is {version}: set {SERVER_VARIABLE} to a server that can load them"
        raise StoreUnavailable(f"store local: shard {server.shard} did not start ({why}); its log is {server.log}")

    def _await_exit(self, alive: dict[LocalServer, int], limit: timedelta) -> dict[LocalServer, int]:
        """Return the servers that are still alive after `limit`, with their process ids."""
        attempts = pauses(limit)
        while True:
            alive = {server: pid for server, pid in alive.items() if server.is_process(pid)}
            if not alive or next(attempts, self) is self:
                return alive

    def _kill(self, alive: dict[LocalServer, int]) -> None:
        for pid in alive.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._await_exit(alive, _KILL_AFTER)


def clear_removed(directory: Path, shards: Iterable[int]) -> None:
    """Delete the files that removed shards left in a directory.

    Call this once the other shards are saved without them.
    """
    for shard in shards:
        LocalServer(directory, shard, directory).clear()
