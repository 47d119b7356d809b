"""An object store for tests: a server that speaks S3, and a proxy before it by which it answers late, with errors, or not at all.

As a module this is the server, which ends with its stdin.
"""

from __future__ import annotations

import contextlib
import http.client
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Literal

from waiting import DEADLINE_SECONDS

BUCKET = "bucket"
KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "secret-of-the-test", "AWS_EC2_METADATA_DISABLED": "true"}

Done = Literal["503", "cut", "held"]
"""What becomes of a request: refused; answered by half; or kept until it is let go, and then cut."""

_ERROR = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
_OF_A_CONNECTION = ("connection", "keep-alive", "transfer-encoding", "content-length")


@dataclass
class ObjectStore:
    """While entered, an S3 server with one bucket. disturb: what becomes of a request, by method and path; None: what it is to be.

    late_seconds: how much later every answer comes. seen: method and path of every request so far.
    """

    disturb: Callable[[str, str], Done | None] = lambda method, path: None
    late_seconds: float = 0.0
    seen: list[tuple[str, str]] = field(default_factory=list)

    def __enter__(self) -> ObjectStore:
        self.stopped = threading.Event()
        self._let_go, self._changed = threading.Event(), threading.Condition()
        self._server = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | KEYS | {"PYTHONPATH": str(Path(__file__).parents[1] / "harness")},
        )  # fmt: skip
        assert self._server.stdout is not None
        self.port = int(self._server.stdout.readline())
        store = self

        class Handler(_Handler):
            of = store

        self._proxy = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._proxy.daemon_threads = True  # clients keep connections open
        self._thread = threading.Thread(target=self._proxy.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()
        self.environment = KEYS | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._proxy.server_port}"}
        self.request("PUT", "")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stopped.set()
        self._let_go.set()
        self._proxy.shutdown()
        self._proxy.server_close()
        self._thread.join()
        self._server.communicate()

    def request(self, method: str, path: str, body: bytes | None = None) -> bytes:
        """Ask the server itself for something in the bucket. path: of the object, or a query."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_SECONDS)
        with contextlib.closing(connection):
            connection.request(method, f"/{BUCKET}{path}", body)
            answer = connection.getresponse()
            data = answer.read()
        assert answer.status < 300, (method, path, answer.status, data)
        return data

    def names(self, prefix: str) -> list[str]:
        """The objects below a prefix, from there on, but for those that stand for a folder."""
        listed = self.request("GET", f"?list-type=2&prefix={prefix}/").decode()
        keys = [part.partition("</Key>")[0] for part in listed.split("<Key>")[1:]]
        return sorted(key.removeprefix(f"{prefix}/") for key in keys if not key.endswith("/"))

    def until(self, method: str, part: str) -> None:
        """Wait for a request whose path has a part."""
        with self._changed:
            came = self._changed.wait_for(
                lambda: any(one == method and part in path for one, path in self.seen), DEADLINE_SECONDS
            )
            assert came, self.seen[-5:]

    def note(self, method: str, path: str) -> None:
        """A request came."""
        with self._changed:
            self.seen.append((method, path))
            self._changed.notify_all()

    def let_go(self) -> None:
        """End what is held, and hold nothing more."""
        self.disturb = lambda method, path: None
        self._let_go.set()

    def wait_until_let_go(self) -> None:
        """Until requests that are held may end."""
        self._let_go.wait()


class _Handler(BaseHTTPRequestHandler):
    """Of a connection to the proxy."""

    protocol_version = "HTTP/1.1"
    of: ObjectStore

    def _pass_on(self) -> None:
        body = b"".join(self._body())
        store, method = self.of, self.command
        store.note(method, self.path)
        store.stopped.wait(store.late_seconds)
        done = store.disturb(method, self.path)
        if done == "held":
            store.wait_until_let_go()
            self.close_connection = True
            return
        if done == "503":
            self._answer(503, {}, _ERROR)
            return
        connection = http.client.HTTPConnection("127.0.0.1", store.port, timeout=DEADLINE_SECONDS)
        with contextlib.closing(connection):
            headers = {name: value for name, value in self.headers.items() if name.lower() not in _OF_A_CONNECTION}
            connection.request(method, self.path, body, headers)
            answer = connection.getresponse()
            data = answer.read()
        told = {name: value for name, value in answer.getheaders() if name.lower() not in (*_OF_A_CONNECTION, "server", "date")}
        length = answer.getheader("Content-Length") if method == "HEAD" else None
        self._answer(answer.status, told, data, length, cut=done == "cut")

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass_on  # noqa: RUF100

    def _body(self) -> Iterator[bytes]:
        if self.headers.get("Expect", "").lower() == "100-continue":
            pass  # BaseHTTPRequestHandler has answered it
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            yield self.rfile.read(int(self.headers.get("Content-Length", 0)))
            return
        while size := int(self.rfile.readline().split(b";")[0], 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass

    def _answer(self, status: int, headers: dict[str, str], data: bytes, length: str | None = None, cut: bool = False) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", length or str(len(data)))
        self.end_headers()
        if cut:
            self.close_connection = True
        self.wfile.write(data[: len(data) // 2] if cut else data)

    def handle(self) -> None:
        """As the base class does; a client may be killed."""
        with contextlib.suppress(OSError):
            super().handle()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def _serve() -> None:
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").disabled = True
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    print(server.get_host_and_port()[1], flush=True)
    sys.stdin.read()
    server.stop()


if __name__ == "__main__":
    _serve()
