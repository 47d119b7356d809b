"""Where checkpoints lie: a local folder, or a URL in an object store. Callers use both alike.

In an object store nothing can be renamed or locked, but an object exists as a whole, or not at all
(docs/checkpoints.md, Object stores).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

from foreload.base import process
from foreload.base.files import write_atomically
from foreload.cache.client.url import hidden
from foreload.trainer.errors import CheckpointError, CheckpointUnreachable

CONNECT_SECONDS, REQUEST_SECONDS, ATTEMPTS = 5.0, 15.0, 4
"""Defaults for an object store, which the URL can change.

They are the time to make a connection, the time that a request may go without a sign of progress,
and the number of attempts.
"""

_CHUNK_BYTES = 1 << 24  # read from an object store at once
_NUMBERS = ("connect_timeout", "request_timeout", "max_attempts")
_OPTIONS = {
    "s3": ("region", "endpoint_override", "scheme", "tls_ca_file_path", *_NUMBERS),
    "gs": ("endpoint_override", "scheme", "retry_limit_seconds"),
}
_FORMS = "s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or file:///FOLDER"

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class ObjectPath:
    """A place in an object store, with the methods of pathlib.Path that checkpoints need.

    str() is its URL. Every method that asks the store raises CheckpointUnreachable if the store
    does not do what it is asked, after several attempts.

    Attributes:
        scheme: "s3" or "gs".
        key: BUCKET/NAME.
        query: The query of the URL from its "?" on, or "".
    """

    scheme: str
    key: str
    query: str = ""

    def __str__(self) -> str:
        return f"{self.scheme}://{self.key}{self.query}"

    def __truediv__(self, name: str) -> ObjectPath:
        return replace(self, key=f"{self.key}/{name}")

    @property
    def name(self) -> str:
        """The last part of the key."""
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> ObjectPath:
        """The place that it lies in."""
        return replace(self, key=self.key.rpartition("/")[0])

    def absolute(self) -> ObjectPath:
        """Return the place itself."""
        return self

    def resolve(self) -> ObjectPath:
        """Return the place itself: an object store has no links."""
        return self

    def is_relative_to(self, _: Path) -> bool:
        """Return False: it is in no local folder."""
        return False

    def is_file(self) -> bool:
        """Return whether an object of this name exists."""
        return bool(self._ask("looked for", lambda files: files.get_file_info([self.key])[0].is_file))

    def iterdir(self) -> Iterator[ObjectPath]:
        """Yield the places that lie directly in it."""
        yield from (self / name for name in sorted({name.partition("/")[0] for name in self._listed(recursive=False)}))

    def objects(self) -> dict[str, tuple[int, datetime]]:
        """Return size and time of every object in it, by its name relative to this place.

        The time is that at which the object was put. The name of an object at this place itself is
        "".
        """
        return {name: (info.size, info.mtime) for name, info in self._listed(recursive=True).items() if info.is_file}

    def _listed(self, recursive: bool) -> dict[str, Any]:
        import pyarrow.fs as fs

        try:
            infos = self._ask("listed", lambda files: files.get_file_info(fs.FileSelector(self.key, recursive=recursive)))
        except FileNotFoundError:
            return {}
        return {info.path.removeprefix(f"{self.key}/"): info for info in infos}

    def chunks(self) -> Iterator[bytes]:
        """Yield the bytes of the object, piece by piece.

        Raises FileNotFoundError if there is no object, even if objects exist below this name.
        """
        source = self._ask("read", lambda files: files.open_input_file(self.key))
        while chunk := self._ask("read", lambda _: source.read(_CHUNK_BYTES)):
            yield chunk

    def read_bytes(self) -> bytes:
        """Return the bytes of the object. Raises FileNotFoundError."""
        return b"".join(self.chunks())

    def read_text(self, encoding: str) -> str:
        """Return the text of the object. Raises FileNotFoundError."""
        return self.read_bytes().decode(encoding)

    def write_bytes(self, data: Any) -> None:
        """Put an object there: the whole object, or nothing."""

        def write(files: Any) -> None:
            with files.open_output_stream(self.key) as target:
                target.write(data)

        self._ask("written", write)

    def unlink(self) -> None:
        """Delete the object, if it exists."""
        self._delete(lambda files: files.delete_file(self.key))

    def remove(self) -> None:
        """Delete everything in it."""
        self._delete(lambda files: files.delete_dir(self.key))

    def _delete(self, how: Callable[[Any], Any]) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._ask("deleted", how)

    def _ask(self, doing: str, how: Callable[[Any], Answer]) -> Answer:
        """Return what the store answers. Raises FileNotFoundError and CheckpointUnreachable.

        Args:
            doing: What is done to the object, for the message.
            how: Called with pyarrow's file system.
        """
        import pyarrow as pa

        try:
            return _waited_for(lambda: how(_files(os.getpid(), self.scheme, self.key.partition("/")[0], self.query)))
        except FileNotFoundError:
            raise
        except (OSError, pa.ArrowException) as error:
            said = re.sub(r"\s+", " ", str(error)).rstrip(".")
            raise CheckpointUnreachable(
                f"{self}: cannot be {doing}: {said}; try again when the object store answers, and check that its address, region and keys are right"
            ) from error


AnyFolder = Path | ObjectPath


def place(named: str | AnyFolder) -> AnyFolder:
    """Return the place that a path or a URL names.

    Raises CheckpointError, whose message has nothing secret in it.
    """
    if not isinstance(named, str):
        return named
    if "://" not in named:
        return Path(named)
    scheme, _, rest = named.partition("://")
    if scheme not in ("file", *_OPTIONS):
        raise _refused(named, f"must be a folder, or begin with s3://, gs:// or file://; use {_FORMS}")
    parts = urlsplit(named)
    if scheme == "file":
        if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
            raise _refused(named, "must name an absolute path, as in file:///tmp/saved")
        return Path(unquote(parts.path))
    location, _, query = rest.partition("?")
    if "@" in named or ":" in location.partition("/")[0]:
        raise _refused(
            named,
            "must have no keys in it; give them as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or as the store's own tools read them",
        )
    key = "/".join(part for part in location.split("/") if part)
    if (
        location.startswith("/")
        or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]+(/[^?#]*)?", key)
        or parts.fragment
        or "\n" in named
    ):
        raise _refused(named, f"names no bucket, or has a # in it; use {_FORMS}")
    _options(named, scheme, query)
    return ObjectPath(scheme, key, f"?{query}" if query else "")


def _refused(named: str, why: str) -> CheckpointError:
    return CheckpointError(f"checkpoints in {hidden(named.partition('?')[0])}: {why}")


def _options(named: str, scheme: str, query: str) -> dict[str, str]:
    """Return the options of a URL's query. Raises CheckpointError."""
    options = dict(parse_qsl(query, keep_blank_values=True))
    for name, value in options.items():
        if name not in _OPTIONS[scheme]:
            raise _refused(named, f"option {name!r} is not known; {scheme}:// takes {', '.join(_OPTIONS[scheme])}")
        if name in _NUMBERS and not re.fullmatch(r"0*[1-9]\d{0,4}", value):
            raise _refused(named, f"{name} must be a whole number, 1 to 99999; got {value!r}")
    return options


@lru_cache
def _files(process: int, scheme: str, bucket: str, query: str) -> Any:
    """Return pyarrow's file system for a bucket. Raises OSError.

    Args:
        process: The id of this process. It is part of the cache's key, since a forked process
            cannot use the file system that it inherits.
        scheme: "s3" or "gs".
        bucket: The bucket.
        query: As for `ObjectPath`.
    """
    import pyarrow.fs as fs

    given = _options("", scheme, query.removeprefix("?"))
    if scheme == "gs":
        limit = timedelta(seconds=float(given.get("retry_limit_seconds", ATTEMPTS * REQUEST_SECONDS)))
        places = {name: given[name] for name in ("endpoint_override", "scheme") if name in given}
        return fs.GcsFileSystem(retry_time_limit=limit, **places)
    environment = os.environ.get
    endpoint = given.get("endpoint_override") or environment("AWS_ENDPOINT_URL_S3") or environment("AWS_ENDPOINT_URL")
    region = given.get("region") or environment("AWS_REGION") or environment("AWS_DEFAULT_REGION")
    if not region:
        region = "us-east-1" if endpoint else fs.resolve_s3_region(bucket)
    settings: dict[str, Any] = {name: given[name] for name in ("scheme", "tls_ca_file_path") if name in given}
    settings |= {
        "region": region,
        "endpoint_override": endpoint,
        "connect_timeout": float(given.get("connect_timeout", CONNECT_SECONDS)),
        "request_timeout": float(given.get("request_timeout", REQUEST_SECONDS)),
        "retry_strategy": fs.AwsStandardS3RetryStrategy(max_attempts=int(given.get("max_attempts", ATTEMPTS))),
    }
    try:
        # With a delayed open, a small object takes one request instead of three.
        made = fs.S3FileSystem(allow_delayed_open=True, **settings)
    # An older pyarrow does not know that option.
    except TypeError:
        made = fs.S3FileSystem(**settings)
    if process not in _asking:
        _asking.clear()
        _asking.append(process)
        # This runs before pyarrow's own exit handler, which waits for requests under way.
        atexit.register(_leave)
    return made


# The id of this process, once it has asked an object store for something.
_asking: list[int] = []
# A token for each request under way.
_under_way: set[object] = set()


def is_asking() -> bool:
    """Return whether this process has asked an object store for something.

    From then on, the library of the object store has threads in it.
    """
    return os.getpid() in _asking


def _leave() -> None:
    """End the process at once if a request is under way, since nobody waits for it now."""
    if _under_way and is_asking():
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        os._exit(process.noted_exit_status())


def _waited_for(ask: Callable[[], Answer]) -> Answer:
    """Return what `ask` returns, or raise what it raises.

    In the main thread, a signal ends the wait.
    """
    answers: list[Answer] = []
    errors: list[BaseException] = []
    token = object()

    def run() -> None:
        try:
            answers.append(ask())
        except BaseException as error:
            errors.append(error)
        finally:
            _under_way.discard(token)

    _under_way.add(token)
    # Python handles signals in the main thread only, and not before a call into the library
    # returns. So another thread makes the call, and the main thread waits for that thread.
    if threading.current_thread() is threading.main_thread():
        done = threading.Thread(target=run, name="object store", daemon=True)
        done.start()
        done.join()
    else:
        run()
    if errors:
        raise errors[0]
    return answers[0]


def chunks(path: AnyFolder) -> Iterator[bytes]:
    """Yield the bytes of a file, piece by piece. Raises OSError and CheckpointUnreachable."""
    if isinstance(path, ObjectPath):
        yield from path.chunks()
        return
    with open(path, "rb") as source:
        while chunk := source.read(_CHUNK_BYTES >> 2):
            yield chunk


def holds(folder: AnyFolder, sizes: Mapping[str, int]) -> bool:
    """Return whether files of these names and sizes are in a folder, without reading them.

    Raises CheckpointUnreachable.
    """
    if isinstance(folder, ObjectPath):
        there = folder.objects()
        return all(name in there and there[name][0] == size for name, size in sizes.items())
    try:
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except OSError:
        return False


def write_whole(path: AnyFolder, data: bytes) -> None:
    """Write a file completely or not at all; on return it is durable.

    Raises OSError and CheckpointUnreachable.
    """
    if isinstance(path, ObjectPath):
        path.write_bytes(data)
    else:
        write_atomically(path, data, durable=True)


def write_new(path: AnyFolder, data: Any) -> None:
    """Write a file that nobody reads yet; on return it is durable.

    Raises OSError and CheckpointUnreachable.
    """
    if isinstance(path, ObjectPath):
        path.write_bytes(data)
        return
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
