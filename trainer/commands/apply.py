"""`foreload apply`: brings an export, full or an increment, to where it is served: a folder, or a Redis server (docs/serving.md)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from foreload.base.errors import SettingError
from foreload.trainer.errors import after_step
from foreload.trainer.serving.folder import apply_to_folder
from foreload.trainer.serving.format import Export


@dataclass(frozen=True, slots=True)
class Applied:
    """What is served now: the model after a step, with so many rows in all tables; kept: the older versions that can be read, as folders or steps."""

    export: str
    to: str
    step: int
    rows: int
    kept: list[str] | list[int]

    def text(self) -> str:
        """As a line."""
        kept = f"; also kept: {', '.join(map(str, self.kept))}" if self.kept else ""
        return f"{self.to}: the model {after_step(self.step)}, {self.rows:,} rows{kept}"


def run(export: str, to: str, key: str | None, keep: int) -> Applied:
    """Apply it. Raises SettingError, ExportError and StoreError."""
    if keep < 0:
        raise SettingError(f"--keep: must be at least 0; got {keep}")
    opened = Export.open(export)
    if "://" not in to:
        if key is not None:
            raise SettingError(f"--key: is for a Redis server; {to} is a folder; leave it out")
        rows, folders = apply_to_folder(opened, Path(to), keep)
        return Applied(export, to, opened.step, rows, folders)
    if key is None:
        raise SettingError(
            "--key: is missing: what keys are to be called, such as 'emb:{table}:{id}', or 'emb:{table}' for a hash a table"
        )
    # It takes a while to load, and is not needed for a folder.
    from foreload.cache.client.url import parse_url
    from foreload.trainer.serving.redis_keys import Keys, apply_to_redis

    keys = Keys(key)
    rows, steps = apply_to_redis(opened, to, keys, keep)
    return Applied(export, parse_url(to).plain, opened.step, rows, steps)
