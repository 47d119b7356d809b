"""Files on any of Beam's filesystems.

This is the only module of the sources that imports Beam, and only when a file is requested.
"""

from __future__ import annotations

import codecs
import gc
import io
import logging
import os
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

import pyarrow as pa

from foreload.pipelines.errors import SourceError

_SUFFIXES = {".gz": "gzip", ".zst": "zstd"}
_MAGIC = {
    b"PAR1": "Parquet",
    b"PARE": "encrypted Parquet",
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"\x04\x22\x4d\x18": "lz4",
    b"\xff\x06\x00\x00sNaPpY": "snappy",
    b"PK\x03\x04": "zip",
    b"7z\xbc\xaf\x27\x1c": "7z",
    b"ORC": "ORC",
    b"Obj\x01": "Avro",
    b"ARROW1": "Arrow IPC",
    b"SQLite format 3\x00": "SQLite",
    b"\x89HDF": "HDF5",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
_REMEDIES = {
    "Parquet": "give --format parquet",
    "gzip": "give it a name that ends in .gz",
    "zstd": "give it a name that ends in .zst",
    "text": "give --format csv, tsv or criteo",
    "UTF-16": "convert it to UTF-8",
}
_HEAD_BYTES = 512
_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class File:
    """A file that matches a pattern."""

    path: str
    size_bytes: int


@contextmanager
def quiet_import() -> Iterator[None]:
    """Import Beam without garbage collection, and without one warning.

    The warning is about Google's client libraries, which nothing here uses.
    """

    def keep(record: logging.LogRecord) -> bool:
        return "apitools" not in record.getMessage()

    root = logging.getLogger()
    root.addFilter(keep)
    # Imports create hundreds of thousands of objects that stay alive. Garbage collection is off
    # meanwhile, and the objects are then frozen, so no later collection looks at them either.
    collected, modules = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        root.removeFilter(keep)
        if len(sys.modules) > modules:
            gc.freeze()
        if collected:
            gc.enable()


def match_files(patterns: Sequence[str]) -> list[File]:
    """Return the files that paths or globs match.

    Patterns keep their order, and the files of each are ordered by path. Paths become absolute:
    workers may run in other folders, and Beam finds nothing for a pattern without a folder.

    Raises:
        SourceError: a pattern matches no file, or cannot be looked up.
    """
    with quiet_import():
        from apache_beam.io.filesystems import FileSystems

    files = []
    for pattern in patterns:
        try:
            place = pattern if FileSystems.get_scheme(pattern) is not None else os.path.abspath(pattern)
            matches = FileSystems.match([place])[0].metadata_list
        # The errors of Beam's filesystems have no base class in common.
        except Exception as error:
            raise SourceError(
                f"{pattern}: cannot be looked up ({reason_of(error)}); check the path and your access to it"
            ) from error
        if not matches:
            raise SourceError(f"{pattern}: no file matches; check the path, and quote globs")
        files += [File(entry.path, entry.size_in_bytes) for entry in sorted(matches, key=lambda entry: entry.path)]
    return files


def open_file(path: str) -> BinaryIO:
    """Open a file for binary reading and seeking, without decompressing it.

    Raises:
        SourceError: the file cannot be opened.
    """
    with quiet_import():
        from apache_beam.io.filesystem import CompressionTypes
        from apache_beam.io.filesystems import FileSystems

    try:
        return FileSystems.open(path, compression_type=CompressionTypes.UNCOMPRESSED)
    except Exception as error:
        raise SourceError(f"{path}: cannot be opened ({reason_of(error)}); check that it is a file and may be read") from error


def open_arrow(path: str) -> pa.NativeFile:
    """Open a file for reading by Arrow.

    Arrow reads a local file itself. Reads through Python would contend for Python's lock, which
    worker threads share.

    Raises:
        SourceError: the file cannot be opened.
    """
    with quiet_import():
        from apache_beam.io.filesystems import FileSystems

    if FileSystems.get_scheme(path) is not None:
        return pa.PythonFile(open_file(path), "r")
    try:
        return pa.OSFile(path)
    except OSError as error:
        raise SourceError(f"{path}: cannot be opened ({reason_of(error)}); check that it is a file and may be read") from error


def compression(path: str) -> str | None:
    """Return the compression that the file's name implies: "gzip", "zstd" or None."""
    return next((name for suffix, name in _SUFFIXES.items() if path.endswith(suffix)), None)


def kind_of(file: BinaryIO | pa.NativeFile) -> str | None:
    """Return the format of a file by its first bytes: "text", another one, or None if unknown.

    Args:
        file: at its start, where it also is on return.
    """
    head = file.read(_HEAD_BYTES)
    file.seek(0)
    # Text comes first, since column names may begin with any of the other formats' first bytes.
    if head and _is_text(head):
        return "text"
    return next((name for magic, name in _MAGIC.items() if head.startswith(magic)), None)


def _is_text(head: bytes) -> bool:
    try:
        # The last character may be cut short.
        text = codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return not any(character < " " and character not in "\t\n\r\f" for character in text)


def other_kind(path: str, wanted: str, kind: str) -> SourceError:
    """Return the error for a file of another format than expected."""
    remedy = _REMEDIES.get(kind, "convert it to text or Parquet")
    return SourceError(f"{path}: is {kind}, not {wanted}; check --format and the file's name, or {remedy}")


@contextmanager
def open_stream(path: str) -> Iterator[BinaryIO]:
    """Open the decompressed contents of a text file.

    Raises:
        SourceError: the file is not text, or cannot be opened or read to its end.
    """
    with reading(path), open_file(path) as file:
        codec = compression(path)
        kind = kind_of(file)
        if kind not in (None, codec or "text"):
            raise other_kind(path, codec or "text", kind)
        if codec is None:
            yield file
        elif codec == "gzip":
            with io.BufferedReader(_Chunks(_gunzip(file)), _READ_BYTES) as stream:
                yield stream
        else:
            with io.BufferedReader(pa.CompressedInputStream(pa.PythonFile(file, "r"), codec)) as stream:
                yield stream


class _Chunks(io.RawIOBase):
    """A file-like object over chunks of bytes, none of them empty."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        super().__init__()
        self._chunks, self._left = chunks, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Copy the rest of the current chunk, or part of the next one. Returns 0 at the end."""
        if not self._left:
            self._left = memoryview(next(self._chunks, b""))
        size = min(len(buffer), len(self._left))
        buffer[:size] = self._left[:size]
        self._left = self._left[size:]
        return size


def _gunzip(file: BinaryIO) -> Iterator[bytes]:
    """Yield the contents of all members of a gzip file.

    Zero bytes may follow each member and are skipped. Arrow's reader would refuse them.

    Raises:
        EOFError: the file ends within a member.
        OSError: the file is damaged.
    """
    data = file.read(_READ_BYTES)
    while data:
        member = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
        while not member.eof:
            if not data:
                raise EOFError("it ends within a compressed part")
            try:
                chunk = member.decompress(data, _READ_BYTES)
            except zlib.error as error:
                raise OSError(str(error)) from error
            if chunk:
                yield chunk
            data = member.unused_data if member.eof else member.unconsumed_tail or file.read(_READ_BYTES)
        while not (data := data.lstrip(b"\0")) and (data := file.read(_READ_BYTES)):
            pass


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Turn a failed read of path into a SourceError."""
    try:
        yield
    except (OSError, EOFError) as error:
        raise SourceError(
            f"{path}: cannot be read to its end ({reason_of(error)}); the file may be damaged or truncated"
        ) from error


def reason_of(error: Exception) -> str:
    """Return the message of an error, on one line."""
    # Prefer the text of the error number. Arrow's message repeats the path.
    text = (os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)) or type(error).__name__
    return printable(text.splitlines()[0])


def printable(text: str) -> str:
    """Return the text with control characters escaped, so that a terminal does not act on them."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
