"""`foreload apply`: brings an export, full or an increment, to where it is served: a folder, or a Redis server (docs/serving.md)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from foreload.base.errors import SettingError
from foreload.trainer.serving.folder import apply_to_folder
from foreload.trainer.serving.format import Export


def run(export: str, to: str, key: str | None, keep: int) -> dict[str, Any]:
    """Apply it; returns {"export", "to", "step", "rows", "kept"}. Raises SettingError, ExportError and StoreError."""
    if keep < 0:
        raise SettingError(f"--keep: must be at least 0; got {keep}")
    opened = Export.open(export)
    if "://" not in to:
        if key is not None:
            raise SettingError(f"--key: is for a Redis server; {to} is a folder; leave it out")
        told = apply_to_folder(opened, Path(to), keep)
        return {"export": export, "to": to} | told
    if key is None:
        raise SettingError(
            "--key: is missing: what keys are to be called, such as 'emb:{table}:{id}', or 'emb:{table}' for a hash a table"
        )
    # It takes a while to load, and is not needed for a folder.
    from foreload.cache.client.url import parse_url
    from foreload.trainer.serving.redis_keys import Keys, apply_to_redis

    keys = Keys(key)
    return {"export": export, "to": parse_url(to).plain} | apply_to_redis(opened, to, keys, keep)
