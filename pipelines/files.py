"""Files that are there whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path

import pyarrow as pa


def write_atomically(path: Path, data: bytes | pa.Buffer) -> None:
    """Write a file under a temporary name and rename it: it is there whole, or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: object) -> str:
    """Write canonical JSON atomically; returns its SHA-256."""
    data = (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()
    write_atomically(path, data)
    return hashlib.sha256(data).hexdigest()
