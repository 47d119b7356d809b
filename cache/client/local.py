"""Redis servers of a run's own, for `--store local:N`: in a private directory, reached by Unix sockets only, saved on a clean stop."""

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

from foreload.base.codec import FormError, filled, of_json, parse_json
from foreload.base.files import replacing
from foreload.base.interrupts import heeded_afterwards
from foreload.cache.client.backoff import pauses
from foreload.cache.client.local_server import READY_TIMEOUT, SERVER_VARIABLE, LocalServer, find_executable, saved_by, version_of
from foreload.cache.errors import StoreError, StoreFull, StoreUnavailable

_SOCKET_PATH_BYTES = 100  # sun_path holds 108 on Linux, 104 elsewhere, with the closing zero
_SERVERS = "servers.json"  # in the directory: the socket of each server, by which a later command finds them
NICENESS = 5  # added to the servers': what they do is needed later than what the trainers beside them do
_HUGE_PAGES = {
    "MALLOC_CONF": "thp:always,metadata_thp:always",
    "JE_MALLOC_CONF": "thp:always,metadata_thp:always",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
"""For jemalloc, by either of its names, and glibc from 2.35 on, which the wheels' servers use. Rows are looked up at random in some GB: with pages
of 4 KiB a third of a server's time goes to finding pages. (Redis switches huge pages off for the sake of a fork that saves while it serves; these
servers save only as they stop.)"""
_KILL_AFTER = timedelta(seconds=10)


def _socket(value: str, where: str) -> None:
    """The text must be the path of a shard's socket."""
    if not (value.startswith("/") and value.endswith(".sock") and value.isprintable()):
        raise FormError(f"{where}: must be the path of a socket; got {value!r:.100}")


class _Noted(TypedDict):
    """The content of servers.json. sockets: by the numbers of the shards, None for those removed; inode: of the directory."""

    sockets: Annotated[list[Annotated[str, _socket] | None], filled]
    inode: NotRequired[int]


class LocalStores:
    """N redis-servers in one private directory.

    They outlive the process that starts them: `stop` ends them, here or, by way of `LocalStores.find`, in a later command. `start` loads
    what an earlier `stop(save=True)` saved. settings: further options of redis.conf, by name. adopt: servers that run in the directory already are
    used as they are (they could not be saved, or whoever started them was killed), and only the others are started. left: the shards of such
    servers, that were left running by an earlier command. removed: numbers below `count` of which there is no server any more.
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
        self._changing = threading.Lock()  # held while a server is started again, or removed: two threads may do these
        self._executable = executable
        self._settings = dict(settings or {})
        self._adopt = adopt
        self.left: frozenset[int] = frozenset()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._servers: list[LocalServer] = []

    @classmethod
    def find(cls, directory: Path) -> LocalStores | None:
        """The servers that were started in a directory, whether or not they still run; None if there were none, or the directory is a copy."""
        try:
            noted = of_json(parse_json((Path(directory) / _SERVERS).read_bytes()), _Noted)
            # The sockets named in a copy are those of the original's servers.
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
                f"store local: {Path(directory) / _SERVERS} is damaged ({error}); end its servers, if any run, and delete that file"
            ) from error
        return stores

    @property
    def urls(self) -> tuple[str, ...]:
        """The URLs of the servers by the numbers of their shards; "" where there is none any more."""
        urls = {server.shard: str(server.url) for server in self._servers}
        return tuple(urls.get(shard, "") for shard in range(self.count if urls else 0))

    @property
    def pids(self) -> tuple[int | None, ...]:
        """The process ids of the servers that are alive by the numbers of their shards, None for the others."""
        servers = {server.shard: server for server in self._servers}
        return tuple(servers[shard].pid() if shard in servers else None for shard in range(self.count if self._servers else 0))

    def without_rows(self) -> list[int]:
        """The shards, before the servers are started, whose rows are neither saved in the directory nor in a server that runs."""
        before = LocalStores.find(self.directory)
        running = before._running() if before is not None else {}
        servers = [LocalServer(self.directory, shard, self.directory) for shard in self._shards]
        return [server.shard for server in servers if server.shard not in running and not server.has_saved()]

    def start(self) -> LocalStores:
        """Start the servers and wait until they answer and have loaded their rows.

        Raises StoreError if servers run there already (but see adopt), nothing can be written there, or a server does not start; then
        none is running that was not before.
        """
        before = LocalStores.find(self.directory)
        running = before._running() if before is not None else {}
        if running and not self._adopt:
            named = ", ".join(map(str, running.values()))
            raise StoreError(f"store local: servers run in {self.directory} already (process {named}); stop their run first")
        self.left = frozenset(running.keys() & self._shards)
        if before is not None and running:
            # One that was just being added, or removed, when who did that was killed.
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
        """The numbers of which there is a server."""
        return [shard for shard in range(self.count) if shard not in self._removed]

    def _running(self) -> dict[int, int]:
        """The process ids of the servers that are alive, by the numbers of their shards."""
        return {shard: pid for shard, pid in enumerate(self.pids) if pid}

    def _lay_out(self, before: LocalStores | None) -> None:
        """Choose the servers' files, and note them; those of `before` stay where they are."""
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
                f"store local: cannot write to {self.directory} ({error.strerror}); free the disk there, or make it writable"
            ) from error

    def _note(self) -> None:
        """Note the servers where `find` looks for them."""
        sockets = {server.shard: str(server.socket) for server in self._servers}
        with replacing(self.directory / _SERVERS) as temporary:
            noted = {"sockets": [sockets.get(shard) for shard in range(self.count)], "inode": self.directory.stat().st_ino}
            temporary.write_text(json.dumps(noted), encoding="utf-8")

    def add(self) -> int:
        """Start one further server, empty, while the others run; returns the number of its shard. Raises StoreError where it does not start."""
        shard = self.count
        server = LocalServer(self.directory, shard, self._servers[0].socket.parent / f"shard-{shard}.sock")
        for saved in (server.saved, server.set_aside):
            # Of one that had the number in a call that came to nothing.
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
        """End the server of a shard that has no rows any more, unsaved; its number is not used again.

        What it had saved before stays until the others are saved without it: until then it is what a call begins with.
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
        """End the server that was added last, as if it never was."""
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
        """Start the server of a shard again if its process is gone, empty; it answers a moment later. Whether that was so.

        What it had saved before is set aside, until the servers are stopped: where nothing is saved then, it is what they start with next.
        Raises StoreError if it cannot be started.
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

    def stop(self, save: bool = True, lost: Collection[int] = ()) -> None:
        """End the servers, after writing their rows to the directory if `save`. Servers already gone are skipped.

        lost: shards that the run goes on without; with `save`, their servers are killed, unsaved, where they do not answer.
        Raises StoreFull if a server cannot save and StoreUnavailable if it does not exit; such a server is left running if `save`, for
        its rows are nowhere else.
        """
        alive = {server: pid for server in self._servers if (pid := server.pid()) is not None}
        if save:
            silent = {server: pid for server, pid in alive.items() if server.shard in lost and not server.answers()}
            self._kill(silent)
            alive = {server: pid for server, pid in alive.items() if server not in silent}
        # All at once: saving takes as long as the largest shard does, not their sum.
        with ThreadPoolExecutor(max(len(alive), 1)) as pool:
            outcomes = zip(alive, pool.map(lambda server: server.shut_down(save), alive), strict=True)
            failures = {server: why for server, why in outcomes if why is not None}
        # Where some could not save and run on, the others are exiting: they are reaped before the error is raised.
        for shard, process in list(self._processes.items()):
            if failures and self._server(shard) not in failures:
                process.wait()
        if failures:
            server, why = next(iter(failures.items()))
            named = ", ".join(f"{other.shard} (process {alive[other]})" for other in failures)
            raise StoreFull(
                f"store local: shard {named} could not save its rows to {self.directory} and still runs, with all of them ({why}; see "
                f"{server.log}): free disk space there; then the next command that reads or resumes the run uses them as they are, and saves them"
            )
        for server, pid in self._await_exit(alive, READY_TIMEOUT if save else _KILL_AFTER).items():
            if save:
                raise StoreUnavailable(
                    f"store local: shard {server.shard} (process {pid}) does not exit, and its rows are nowhere else; see {server.log}"
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
        """End the servers, of which those that were found running have rows that are nowhere else.

        changed: whether the others, which were started here, have such rows, too. Raises StoreFull and StoreUnavailable
        as `stop` does, for servers that are then left running.
        """
        self.stop(save=changed or bool(self.left))

    def discard(self) -> None:
        """End the servers that were started here, unsaved; those that were found running are left so."""
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
        """Start a server's process, and note it, whatever signal comes meanwhile."""
        server.socket.unlink(missing_ok=True)
        server.pid_file.unlink(missing_ok=True)
        environment = {**os.environ, **_HUGE_PAGES}
        with open(server.log, "ab") as log, heeded_afterwards():
            try:
                # A session of its own: Ctrl-C in the terminal is for the trainers, which then still need the store.
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
                    f"store local: cannot run {executable} ({error.strerror}); {SERVER_VARIABLE} may name another server"
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
        lines = server.log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["no word"]
        why = lines[-1].strip()
        if (saved := saved_by(server.saved)) and saved != (version := version_of(executable)):
            why += f"; its rows were saved by {saved}, and this is {version}: {SERVER_VARIABLE} may name a server that loads them"
        raise StoreUnavailable(f"store local: shard {server.shard} did not start ({why}); its log is {server.log}")

    def _await_exit(self, alive: dict[LocalServer, int], limit: timedelta) -> dict[LocalServer, int]:
        """Those of the servers that are still alive after `limit`, with their process ids."""
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
    """Delete what is left in a directory of shards that there are no more, once the others are saved without them."""
    for shard in shards:
        LocalServer(directory, shard, directory).clear()
