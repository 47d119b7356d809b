"""RUN/engine.json and RUN/store-password: the servers that an engine has started for a run."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from foreload.base.codec import FormError, fault, of_json, parse_json
from foreload.base.files import write_json
from foreload.cache.client.url import parse_url
from foreload.trainer.errors import RunError
from foreload.trainer.run.directory import ENGINE, PASSWORD


@dataclass(frozen=True, slots=True)
class EngineRecord:
    """What an engine needs to find a run's processes again.

    Attributes:
        engine: The engine's name, as in --engine.
        address: Address of the engine, such as that of a Ray cluster.
        namespace: What the engine keeps the run's processes apart by.
        servers: The engine's name of each store server, by its URL without password.
        spares: Names of servers that are there in case one of these is lost.
        ended: URLs of servers that have ended: others took their place, or the run was given up.
    """

    engine: str
    address: str
    namespace: str
    servers: dict[str, str] = field(default_factory=dict)
    spares: tuple[str, ...] = ()
    ended: tuple[str, ...] = ()

    @classmethod
    def read(cls, run: Path) -> EngineRecord | None:
        """Read the record of a run. None if no engine has started a server for it.

        Raises:
            RunError: The record is damaged.
        """
        try:
            return of_json(parse_json((run / ENGINE).read_bytes()), cls)
        except FileNotFoundError:
            return None
        except (FormError, OSError) as error:
            raise RunError(fault(f"run {run}: {ENGINE}", error, "restore the folder from a copy")) from error

    def write(self, run: Path) -> None:
        """Write the record of a run."""
        write_json(run / ENGINE, asdict(self))


def new_password() -> str:
    """Return a random password for a run's servers."""
    return secrets.token_urlsafe(32)


def keep_password(run: Path, password: str) -> None:
    """Write the password of a run's servers to a file that only this user can read."""
    path = run / PASSWORD
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(password)


def read_password(run: Path) -> str:
    """Return the password of a run's servers. Raises RunError if it cannot be read."""
    try:
        return (run / PASSWORD).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"run {run}: {PASSWORD} cannot be read ({error}); restore the folder from a copy") from error


def with_passwords(run: Path, urls: Sequence[str]) -> tuple[str, ...]:
    """Return a run's URLs with the password of those servers that an engine has started for it."""
    record = EngineRecord.read(run)
    if record is None or not record.servers:
        return tuple(urls)
    password = read_password(run)
    return tuple(parse_url(url, {}).with_password(password) if url in record.servers else url for url in urls)
