"""Files that exist whole or not at all."""

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
    """Yield a temporary name beside path, and rename the file or folder to path at the end.

    The file or folder thus appears whole, or not at all. The temporary name belongs to this attempt
    alone, so several processes may write the same file at the same time.

    Args:
        durable: whether a file is on the disk on return. If the power fails earlier, the old or the
            new file exists, whole. For a folder, the list of its files is made durable. Syncing the
            files is up to the caller.
    """
    temporary = path.with_name(f".{path.name}.{os.urandom(8).hex()}.tmp")
    try:
        yield temporary
        put_in_place(temporary, path, durable)
    except BaseException:
        remove_path(temporary)
        raise


def put_in_place(temporary: Path, path: Path, durable: bool = False) -> None:
    """Rename a file or folder that is completely written, as `replacing` does at its end.

    Args:
        durable: as in `replacing`.
    """
    # The contents must be on the disk before the new name is.
    if durable and temporary.is_dir():
        _sync_folder(temporary)
    elif durable:
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
    os.replace(temporary, path)
    if durable:
        _sync_folder(path.parent)


def remove_unfinished(folder: Path, names: str = "*") -> None:
    """Remove what a killed process left of `replacing` in a folder.

    No process may be writing files or folders of these names.

    Args:
        names: a glob of the final names.
    """
    for left in folder.glob(f".{names}.tmp"):
        remove_path(left)


def remove_path(path: Path) -> None:
    """Remove a file or folder, if it exists and can be removed."""
    if os.path.isdir(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        # A caller that cleans up after an error is to report that error, not this one.
        with suppress(OSError):
            path.unlink()


def remove_empty(folder: Path) -> None:
    """Remove an empty folder, and the symbolic links by which its path leads to it.

    Raises:
        OSError: the folder cannot be removed.
    """
    links = []
    while folder.is_symlink():
        links.append(folder)
        folder = folder.parent / folder.readlink()
    folder.rmdir()
    for link in links:
        link.unlink()


def within(folder: Path, name: str) -> Path:
    """Return the path of a file in a folder that others may have written.

    Raises:
        FormError: the name, or a symbolic link, leads out of the folder.
    """
    plain_path(name, str(folder))
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise FormError(f"{name} is a link to {path.resolve()}, out of the folder")
    return path


def _sync_folder(folder: Path) -> None:
    """Force the list of a folder's files to disk.

    A file system that cannot do this is left alone.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def unwritable(path: Path) -> str:
    """Return why a file cannot be written at path, or "" if it can.

    This covers what can be known without trying.
    """
    folder = path.absolute().parent
    if not folder.is_dir():
        return f"there is no folder {folder}; create it first"
    if path.is_dir():
        return "is a folder; name a file in it"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"no permission to write in {folder}; name another file"
    return ""


def write_atomically(path: Path, data: bytes | pa.Buffer, durable: bool = False) -> None:
    """Write a file whole, or not at all.

    Args:
        durable: as in `replacing`.
    """
    with replacing(path, durable) as temporary:
        temporary.write_bytes(data)


def is_full(error: OSError) -> bool:
    """Return whether an error means that a disk or a quota is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


_HELPS = {
    errno.EMFILE: "raise the limit of open files (ulimit -n), then try again",
    errno.ENFILE: "the system has too many files open: raise its limit (fs.file-max), then try again",
    errno.EACCES: "let this user read it, then try again",
    errno.EPERM: "let this user read it, then try again",
    errno.ENOMEM: "free memory, then try again",
    errno.EIO: "its disk fails: see the system's log; try again once the file can be read",
    errno.ESTALE: "mount its file system again, then try again",
    errno.ETIMEDOUT: "make sure that its file system can be reached, then try again",
}


def unreadable(error: OSError, otherwise: str) -> str:
    """Return the message that a file cannot be read, with a remedy.

    Args:
        otherwise: the remedy if the file itself is the cause.
    """
    return f"cannot be read ({error.strerror or error}); {_HELPS.get(error.errno or 0, otherwise)}"


def persist(path: Path, write: Callable[[], object]) -> None:
    """Write data to path that exists nowhere else.

    If the disk is full, this reports it once and retries until there is room.

    Raises:
        OSError: writing fails for another reason.
    """
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
                        f"foreload: {path}: cannot be written, the disk is full; free space there: foreload retries until there is some\n"
                    )
            time.sleep(_FULL_PAUSE_SECONDS)


def canonical(value: object) -> bytes:
    """Return the JSON text of a value. Equal values have equal texts."""
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()


def write_json(path: Path, value: object, durable: bool = False) -> str:
    """Write the stored form of a value (`to_stored`) as canonical JSON, atomically.

    Args:
        durable: as in `replacing`.

    Returns:
        The SHA-256 of the file.
    """
    data = canonical(to_stored(value))
    write_atomically(path, data, durable)
    return hashlib.sha256(data).hexdigest()


def read_json(path: Path, kind: type[_Value]) -> _Value:
    """Read what `write_json` wrote.

    No other call of the program writes or reads the file.

    Raises:
        OSError: the file cannot be read.
    """
    return of_json(json.loads(path.read_bytes()), kind)


def write_sealed(path: Path, value: object, durable: bool = False) -> str:
    """Write the stored form of a value (`to_stored`), which must be an object, with a seal.

    Args:
        durable: as in `replacing`.

    Returns:
        The SHA-256 of the file.
    """
    data = sealed(to_stored(value))
    write_atomically(path, data, durable)
    return hashlib.sha256(data).hexdigest()


def sealed(value: dict[str, Any]) -> bytes:
    """Return the text of a JSON object with a seal: the SHA-256 of the object without it."""
    return canonical(value | {SEAL: hashlib.sha256(canonical(value)).hexdigest()})


def read_sealed(path: Path) -> tuple[dict[str, Any], str]:
    """Read a file that `write_sealed` wrote.

    Returns:
        The object, and the SHA-256 of the file.

    Raises:
        OSError: the file cannot be read.
        ValueError: a byte has changed.
    """
    return unsealed(path.read_bytes())


def unsealed(data: bytes) -> tuple[dict[str, Any], str]:
    """Read what `sealed` returned.

    Returns:
        The object without its seal, and the SHA-256 of the text.

    Raises:
        ValueError: a byte has changed.
    """
    value = parse_json(data)
    if not isinstance(value, dict) or canonical(value) != data:
        raise ValueError("it was changed after it was written")
    if value.pop(SEAL, None) != hashlib.sha256(canonical(value)).hexdigest():
        raise ValueError("its checksum does not match its contents")
    return value, hashlib.sha256(data).hexdigest()
