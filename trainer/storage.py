"""Where checkpoints lie: in a local folder, or under a URL in an object store (docs/checkpoints.md, Object stores); both are asked alike.

In an object store nothing can be renamed and nothing locked, but an object is there whole, or not at all.
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
"""How long a connection may take to be made, and a request may be without a sign, and how often it is made, unless the URL says otherwise."""

_CHUNK_BYTES = 1 << 24  # that are asked for at once
_NUMBERS = ("connect_timeout", "request_timeout", "max_attempts")
_OPTIONS = {
    "s3": ("region", "endpoint_override", "scheme", "tls_ca_file_path", *_NUMBERS),
    "gs": ("endpoint_override", "scheme", "retry_limit_seconds"),
}
_FORMS = "s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or file:///FOLDER"

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class ObjectPath:
    """A place in an object store, with the methods of pathlib.Path that checkpoints need. key: BUCKET/NAME; query: the URL's, "" or from its ? on.

    str() is the URL. Whatever is asked of the store raises CheckpointUnreachable where it does not do that, after some attempts.
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
        """The last part."""
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> ObjectPath:
        """What it lies in."""
        return replace(self, key=self.key.rpartition("/")[0])

    def absolute(self) -> ObjectPath:
        """Itself."""
        return self

    def resolve(self) -> ObjectPath:
        """Itself: there are no links."""
        return self

    def is_relative_to(self, _: Path) -> bool:
        """It is in no local folder."""
        return False

    def is_file(self) -> bool:
        """Whether there is an object of this name."""
        return bool(self._ask("looked for", lambda files: files.get_file_info([self.key])[0].is_file))

    def iterdir(self) -> Iterator[ObjectPath]:
        """What lies directly in it."""
        yield from (self / name for name in sorted({name.partition("/")[0] for name in self._listed(recursive=False)}))

    def objects(self) -> dict[str, tuple[int, datetime]]:
        """Size, and when it was put there, of every object in it, by name from here on; "" of it."""
        return {name: (info.size, info.mtime) for name, info in self._listed(recursive=True).items() if info.is_file}

    def _listed(self, recursive: bool) -> dict[str, Any]:
        import pyarrow.fs as fs

        try:
            infos = self._ask("listed", lambda files: files.get_file_info(fs.FileSelector(self.key, recursive=recursive)))
        except FileNotFoundError:
            return {}
        return {info.path.removeprefix(f"{self.key}/"): info for info in infos}

    def chunks(self) -> Iterator[bytes]:
        """What it holds. Raises FileNotFoundError, also where there is something below it."""
        source = self._ask("read", lambda files: files.open_input_file(self.key))
        while chunk := self._ask("read", lambda _: source.read(_CHUNK_BYTES)):
            yield chunk

    def read_bytes(self) -> bytes:
        """What it holds. Raises FileNotFoundError."""
        return b"".join(self.chunks())

    def read_text(self, encoding: str) -> str:
        """What it holds. Raises FileNotFoundError."""
        return self.read_bytes().decode(encoding)

    def write_bytes(self, data: Any) -> None:
        """Put an object there, whole, or not at all."""

        def write(files: Any) -> None:
            with files.open_output_stream(self.key) as target:
                target.write(data)

        self._ask("written", write)

    def unlink(self) -> None:
        """Delete an object, if there is one."""
        self._delete(lambda files: files.delete_file(self.key))

    def remove(self) -> None:
        """Delete everything in it, if there is something."""
        self._delete(lambda files: files.delete_dir(self.key))

    def _delete(self, how: Callable[[Any], Any]) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._ask("deleted", how)

    def _ask(self, doing: str, how: Callable[[Any], Answer]) -> Answer:
        """What the store answers. Raises FileNotFoundError and CheckpointUnreachable."""
        import pyarrow as pa

        try:
            return _waited_for(lambda: how(_files(os.getpid(), self.scheme, self.key.partition("/")[0], self.query)))
        except FileNotFoundError:
            raise
        except (OSError, pa.ArrowException) as error:
            said = re.sub(r"\s+", " ", str(error)).rstrip(".")
            raise CheckpointUnreachable(
                f"{self}: cannot be {doing}: {said}; try again when the object store answers, and see that its address, region and keys are right"
            ) from error


AnyFolder = Path | ObjectPath


def place(named: str | AnyFolder) -> AnyFolder:
    """The place that a path, or a URL, names. Raises CheckpointError, nothing secret in it."""
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
    """The options of a URL's query. Raises CheckpointError."""
    options = dict(parse_qsl(query, keep_blank_values=True))
    for name, value in options.items():
        if name not in _OPTIONS[scheme]:
            raise _refused(named, f"option {name!r} is not known; {scheme}:// takes {', '.join(_OPTIONS[scheme])}")
        if name in _NUMBERS and not re.fullmatch(r"0*[1-9]\d{0,4}", value):
            raise _refused(named, f"{name} must be a whole number, 1 to 99999; got {value!r}")
    return options


@lru_cache
def _files(process: int, scheme: str, bucket: str, query: str) -> Any:
    """pyarrow's file system of a bucket. process: this one, since what a fork inherits of one cannot be used. Raises OSError."""
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
        # A small object is one request then, instead of three.
        made = fs.S3FileSystem(allow_delayed_open=True, **settings)
    except TypeError:  # of an older pyarrow
        made = fs.S3FileSystem(**settings)
    if process not in _asking:
        _asking.clear()
        _asking.append(process)
        # Called before pyarrow's own, which waits for requests under way.
        atexit.register(_leave)
    return made


_asking: list[int] = []  # the process that asks object stores, if it does
_under_way: set[object] = set()  # requests


def is_asking() -> bool:
    """Whether this process has asked an object store for something: its library has threads since then."""
    return os.getpid() in _asking


def _leave() -> None:
    """End at once where a request is under way, for which nobody waits any more."""
    if _under_way and is_asking():
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        os._exit(process.noted_exit_status())


def _waited_for(ask: Callable[[], Answer]) -> Answer:
    """What is answered; a signal ends waiting for it, in the main thread."""
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
    """What a file holds, piece by piece. Raises OSError and CheckpointUnreachable."""
    if isinstance(path, ObjectPath):
        yield from path.chunks()
        return
    with open(path, "rb") as source:
        while chunk := source.read(_CHUNK_BYTES >> 2):
            yield chunk


def holds(folder: AnyFolder, sizes: Mapping[str, int]) -> bool:
    """Whether files of these names are in a folder, with these sizes; they are not read. Raises CheckpointUnreachable."""
    if isinstance(folder, ObjectPath):
        there = folder.objects()
        return all(name in there and there[name][0] == size for name, size in sizes.items())
    try:
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except OSError:
        return False


def write_whole(path: AnyFolder, data: bytes) -> None:
    """Write a file, on the disk on return, whole, or not at all. Raises OSError and CheckpointUnreachable."""
    if isinstance(path, ObjectPath):
        path.write_bytes(data)
    else:
        write_atomically(path, data, durable=True)


def write_new(path: AnyFolder, data: Any) -> None:
    """Write a file that nobody reads yet, on the disk on return. Raises OSError and CheckpointUnreachable."""
    if isinstance(path, ObjectPath):
        path.write_bytes(data)
        return
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
