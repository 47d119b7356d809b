"""Files wherever Beam's filesystems reach. The one place of the sources that touches Beam, and only when a file is asked for."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO

import pyarrow as pa

from pipelines.errors import SourceError

_SUFFIXES = {".gz": "gzip", ".zst": "zstd"}


@dataclass(frozen=True, slots=True)
class File:
    """A file that a pattern names."""

    path: str
    size_bytes: int


def match_files(patterns: Sequence[str]) -> list[File]:
    """The files of paths or globs: patterns in the order given, each one's files by path. SourceError where one names none."""
    from apache_beam.io.filesystems import FileSystems

    files = []
    for pattern in patterns:
        try:
            found = FileSystems.match([pattern])[0].metadata_list
        except Exception as error:  # Beam's filesystems share no base class of errors
            raise SourceError(
                f"{pattern}: cannot be looked up ({_reason(error)}); check the path and your access to it"
            ) from error
        if not found:
            raise SourceError(f"{pattern}: no file matches; check the path, and quote globs")
        files += [File(entry.path, entry.size_in_bytes) for entry in sorted(found, key=lambda entry: entry.path)]
    return files


def open_file(path: str) -> BinaryIO:
    """The file as it is, never decompressed: a readable, seekable binary object. Raises SourceError."""
    from apache_beam.io.filesystem import CompressionTypes
    from apache_beam.io.filesystems import FileSystems

    try:
        return FileSystems.open(path, compression_type=CompressionTypes.UNCOMPRESSED)
    except Exception as error:
        raise SourceError(f"{path}: cannot be opened ({_reason(error)}); check that it is a file and may be read") from error


def open_arrow(path: str) -> pa.NativeFile:
    """The file as Arrow reads it; a local one without Python in between, whose lock workers in threads share. Raises SourceError."""
    from apache_beam.io.filesystems import FileSystems

    if FileSystems.get_scheme(path) is not None:
        return pa.PythonFile(open_file(path), "r")
    try:
        return pa.OSFile(path)
    except OSError as error:
        raise SourceError(f"{path}: cannot be opened ({_reason(error)}); check that it is a file and may be read") from error


def compression(path: str) -> str | None:
    """gzip, zstd or None, by the file's name."""
    return next((name for suffix, name in _SUFFIXES.items() if path.endswith(suffix)), None)


@contextmanager
def open_stream(path: str) -> Iterator[BinaryIO]:
    """The file's contents from its start, decompressed. SourceError where it cannot be opened or read to its end."""
    with reading(path), open_file(path) as file:
        codec = compression(path)
        if codec is None:
            yield file
        else:
            with io.BufferedReader(pa.CompressedInputStream(pa.PythonFile(file, "r"), codec)) as stream:
                yield stream


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Turns a failed read of path into a SourceError."""
    try:
        yield
    except (OSError, EOFError) as error:
        raise SourceError(
            f"{path}: cannot be read to its end ({_reason(error)}); the file may be damaged or truncated"
        ) from error


def _reason(error: Exception) -> str:
    # Of the number, not the message: Arrow's tells the path again.
    text = (os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)) or type(error).__name__
    return text.splitlines()[0]
