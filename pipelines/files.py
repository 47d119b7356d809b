"""Files that are there whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import pyarrow as pa

SEAL = "sha256"


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


def _canonical(value: object) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()


def write_json(path: Path, value: object) -> str:
    """Write canonical JSON atomically; returns its SHA-256."""
    data = _canonical(value)
    write_atomically(path, data)
    return hashlib.sha256(data).hexdigest()


def write_sealed(path: Path, value: dict[str, Any]) -> str:
    """Write a JSON object with a seal: the SHA-256 of the object without it. Returns the file's SHA-256."""
    return write_json(path, value | {SEAL: hashlib.sha256(_canonical(value)).hexdigest()})


def read_sealed(path: Path) -> tuple[dict[str, Any], str]:
    """The object of a file that write_sealed wrote, and the file's SHA-256. Raises OSError, and ValueError if a byte is another one."""
    data = path.read_bytes()
    value = json.loads(data)
    if not isinstance(value, dict) or _canonical(value) != data:
        raise ValueError("not as it was written")
    if value.pop(SEAL, None) != hashlib.sha256(_canonical(value)).hexdigest():
        raise ValueError("the seal is not that of the contents")
    return value, hashlib.sha256(data).hexdigest()
