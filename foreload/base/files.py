"""Files that are there whole or not at all."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from foreload.base.codec import FormError, of_json, parse_json, plain_path, to_stored

if TYPE_CHECKING:
    import pyarrow as pa

SEAL = "sha256"
_FULL_PAUSE_SECONDS = 0.5

_Value = TypeVar("_Value")


@contextmanager
def replacing(path: Path, durable: bool = False) -> Iterator[Path]:
    """A temporary name beside path, for a file or folder that is renamed to it at the end: it is there whole, or not at all.

    The name is of this attempt alone, so that others may write the same file at the same time. durable: on return a file is on the disk; if the
    power is lost before that, the old one or the new one is there, whole. (Of a folder, so is which files are in it; each of these is the caller's.)
    """
    temporary = path.with_name(f".{path.name}.{os.urandom(8).hex()}.tmp")
    try:
        yield temporary
        put_in_place(temporary, path, durable)
    except BaseException:
        remove_path(temporary)
        raise


def put_in_place(temporary: Path, path: Path, durable: bool = False) -> None:
    """Rename a file or folder that is written as a whole; as `replacing` does at its end."""
    if durable and temporary.is_dir():
        _sync_folder(temporary)
    elif durable:
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
    os.replace(temporary, path)
    if durable:
        _sync_folder(path.parent)


def remove_unfinished(folder: Path, names: str = "*") -> None:
    """Remove what `replacing` left in a folder where its process was killed, of files and folders to be named so. Nobody may be writing these."""
    for left in folder.glob(f".{names}.tmp"):
        remove_path(left)


def remove_path(path: Path) -> None:
    """Remove a file or folder, if it is there and can be removed."""
    if os.path.isdir(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        # Whoever cleans up after an error is to report that one.
        with suppress(OSError):
            path.unlink()


def remove_empty(folder: Path) -> None:
    """Remove a folder that is empty, and the links by which its path leads to it. Raises OSError."""
    links = []
    while folder.is_symlink():
        links.append(folder)
        folder = folder.parent / folder.readlink()
    folder.rmdir()
    for link in links:
        link.unlink()


def within(folder: Path, name: str) -> Path:
    """The path of a file of a folder that others may have written. Raises FormError if it is, or a link leads it, out of the folder."""
    plain_path(name, str(folder))
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise FormError(f"{name} is a link to {path.resolve()}, out of the folder")
    return path


def _sync_folder(folder: Path) -> None:
    """Force to disk which files are in a folder; a file system that cannot is left alone."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def unwritable(path: Path) -> str:
    """Why a file cannot be written at path, as far as that is known before it is tried; "" if it can."""
    folder = path.absolute().parent
    if not folder.is_dir():
        return f"there is no folder {folder}; create it first"
    if path.is_dir():
        return "is a folder; name a file in it"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"no permission to write in {folder}; name another file"
    return ""


def write_atomically(path: Path, data: bytes | pa.Buffer, durable: bool = False) -> None:
    """Write a file whole, or not at all. durable: as `replacing` has it."""
    with replacing(path, durable) as temporary:
        temporary.write_bytes(data)


def is_full(error: OSError) -> bool:
    """Whether an error says that a disk, or a quota, is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


_HELPS = {
    errno.EMFILE: "raise the limit of open files (ulimit -n), and go on",
    errno.ENFILE: "the system has too many files open: raise its limit (fs.file-max), and go on",
    errno.EACCES: "let this user read it, and go on",
    errno.EPERM: "let this user read it, and go on",
    errno.ENOMEM: "free memory, and go on",
    errno.EIO: "its disk fails: see the system's log; once it can be read, go on",
    errno.ESTALE: "mount its file system again, and go on",
    errno.ETIMEDOUT: "see that its file system can be reached, and go on",
}


def unreadable(error: OSError, otherwise: str) -> str:
    """That a file cannot be read, and what helps. otherwise: what helps where the file itself is to blame."""
    return f"cannot be read ({error.strerror or error}); {_HELPS.get(error.errno or 0, otherwise)}"


def persist(path: Path, write: Callable[[], object]) -> None:
    """Write to a path what is nowhere else: while the disk is full, that is said once, and tried again until there is room."""
    said = False
    while True:
        try:
            write()
            return
        except OSError as error:
            if not is_full(error):
                raise
            if not said:
                said = True
                with suppress(OSError):
                    sys.stderr.write(
                        f"foreload: {path}: cannot be written, the disk is full; free space there: it is tried again until there is some\n"
                    )
            time.sleep(_FULL_PAUSE_SECONDS)


def canonical(value: object) -> bytes:
    """JSON, the same for the same value."""
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()


def write_json(path: Path, value: object, durable: bool = False) -> str:
    """Write what `to_stored` gives as canonical JSON, atomically; returns its SHA-256. durable: as `replacing` has it."""
    data = canonical(to_stored(value))
    write_atomically(path, data, durable)
    return hashlib.sha256(data).hexdigest()


def read_json(path: Path, kind: type[_Value]) -> _Value:
    """What `write_json` wrote, of a file that only this call of the program writes and reads. Raises OSError."""
    return of_json(json.loads(path.read_bytes()), kind)


def write_sealed(path: Path, value: object, durable: bool = False) -> str:
    """Write what `to_stored` gives, an object, with a seal. Returns the file's SHA-256. durable: as `replacing` has it."""
    data = sealed(to_stored(value))
    write_atomically(path, data, durable)
    return hashlib.sha256(data).hexdigest()


def sealed(value: dict[str, Any]) -> bytes:
    """A JSON object with a seal: the SHA-256 of the object without it."""
    return canonical(value | {SEAL: hashlib.sha256(canonical(value)).hexdigest()})


def read_sealed(path: Path) -> tuple[dict[str, Any], str]:
    """The object of a file that write_sealed wrote, and the file's SHA-256. Raises OSError, and ValueError if a byte is another one."""
    return unsealed(path.read_bytes())


def unsealed(data: bytes) -> tuple[dict[str, Any], str]:
    """The object of what `sealed` gave, and the SHA-256 of that. Raises ValueError if a byte is another one."""
    value = parse_json(data)
    if not isinstance(value, dict) or canonical(value) != data:
        raise ValueError("not as it was written")
    if value.pop(SEAL, None) != hashlib.sha256(canonical(value)).hexdigest():
        raise ValueError("the seal is not that of the contents")
    return value, hashlib.sha256(data).hexdigest()
