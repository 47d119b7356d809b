"""`foreload apply`: bring an export to where it is served, a folder or a Redis server.

The export is full or an increment (docs/serving.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from foreload.base.errors import SettingError
from foreload.trainer.errors import after_step
from foreload.trainer.serving.folder import apply_to_folder
from foreload.trainer.serving.format import Export


@dataclass(frozen=True, slots=True)
class Applied:
    """The model that is served after an export was applied.

    Attributes:
        step: the training step of the model.
        rows: the rows of the model in all tables.
        kept: the older versions that can still be read. For a folder, their folders; for Redis,
            their steps.
    """

    export: str
    to: str
    step: int
    rows: int
    kept: list[str] | list[int]

    def text(self) -> str:
        """Return the result as one line."""
        kept = f"; also kept: {', '.join(map(str, self.kept))}" if self.kept else ""
        return f"{self.to}: the model {after_step(self.step)}, {self.rows:,} rows{kept}"


def run(export: str, to: str, key: str | None, keep: int) -> Applied:
    """Apply an export to a folder or a Redis server.

    Args:
        export: the folder of the export.
        to: the folder, or the URL of the server.
        key: the template of the keys, for a server only.
        keep: how many older versions stay readable.

    Raises:
        SettingError: a setting is missing, out of range, or does not fit `to`.
        ExportError: the export cannot be used, or does not follow what is served.
        StoreError: the server failed.
    """
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
            "--key: is missing: give the pattern of the keys, such as 'emb:{table}:{id}', or 'emb:{table}' for a hash a table"
        )
    # The imports take a while, and a folder does not need them.
    from foreload.cache.client.url import parse_url
    from foreload.trainer.serving.redis_keys import Keys, apply_to_redis

    keys = Keys(key)
    rows, steps = apply_to_redis(opened, to, keys, keep)
    return Applied(export, parse_url(to).plain, opened.step, rows, steps)
