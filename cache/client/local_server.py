"""One redis-server of a run's own: its files, and what it is asked."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from foreload.cache.client.url import StoreUrl, parse_url

READY_TIMEOUT = timedelta(minutes=10)  # loading many GB of rows takes minutes
ANSWER_TIMEOUT = timedelta(seconds=5)


@dataclass(frozen=True, slots=True)
class LocalServer:
    """One server's files. pid_file is written by the server itself, so that a later command finds it whoever was killed."""

    directory: Path
    shard: int
    socket: Path

    @property
    def log(self) -> Path:
        """Where it says what happens."""
        return self.directory / f"shard-{self.shard}.log"

    @property
    def saved(self) -> Path:
        """Where its rows are saved."""
        return self.directory / f"shard-{self.shard}.rdb"

    @property
    def set_aside(self) -> Path:
        """What was saved before the server was started again, empty: it counts until its rows of today are saved."""
        return self.directory / f"shard-{self.shard}.rdb.before"

    def has_saved(self) -> bool:
        """Whether there are saved rows to start with."""
        return self.saved.exists() or self.set_aside.exists()

    def put_back(self) -> None:
        """Have the server start with what was set aside, if nothing was saved since."""
        if self.set_aside.exists():
            if self.saved.exists():
                self.set_aside.unlink()
            else:
                self.set_aside.rename(self.saved)

    def clear(self) -> None:
        """Delete what it left, where its shard is none any more."""
        for path in (self.saved, self.set_aside, self.log):
            path.unlink(missing_ok=True)

    @property
    def pid_file(self) -> Path:
        """Where it says its process id."""
        return self.directory / f"shard-{self.shard}.pid"

    @property
    def url(self) -> StoreUrl:
        """Its address."""
        return parse_url(f"unix://{self.socket}", {})

    def command(self, executable: str, settings: Mapping[str, str]) -> list[str]:
        """The command line that starts it. settings: further options of redis.conf, by name."""
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
        """The process id of this server if it is alive, even if it does not answer."""
        try:
            pid = int(self.pid_file.read_text())
        except (OSError, ValueError):
            return None
        return pid if self.is_process(pid) else None

    def is_process(self, pid: int) -> bool:
        """Whether a process id is this server's and it is alive."""
        try:
            os.kill(pid, 0)
        except OSError:
            return False
        if not os.path.isdir("/proc/self"):
            return self.answers()
        # Another process may have the id by now. A server's working directory is its run's; a zombie's cannot be read.
        with contextlib.suppress(OSError):
            return os.path.samefile(f"/proc/{pid}/cwd", self.directory)
        return False

    def answers(self) -> bool:
        """Whether the server answers and has loaded its rows."""
        return self._ask("PING", ANSWER_TIMEOUT) == "+PONG"

    def shut_down(self, save: bool) -> str | None:
        """Ask the server to exit. Returns why it cannot save, if so; a server that does not answer is left to the caller."""
        refusal = self._ask(f"SHUTDOWN {'SAVE' if save else 'NOSAVE'}", READY_TIMEOUT if save else ANSWER_TIMEOUT)
        return refusal.removeprefix("-").removeprefix("ERR ") if refusal.startswith("-") else None

    def _ask(self, command: str, timeout: timedelta) -> str:
        """The first line of what it answers to a command; "" where there is no answer."""
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(timeout.total_seconds())
                connection.connect(str(self.socket))
                connection.sendall(f"{command}\r\n".encode())
                with connection.makefile("rb") as answer:
                    return answer.readline().decode(errors="replace").rstrip("\r\n")
        except OSError:
            return ""
