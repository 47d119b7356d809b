"""A proxy on loopback between a client and a Unix socket's server, that can hold answers back and remembers what passed, in order."""

from __future__ import annotations

import contextlib
import socket
import threading
from urllib.parse import urlsplit


class HoldingProxy:
    """Serves one connection. While held, answers of the server wait; requests pass always.

    passed: what has passed, in order: "to server" or "to client", and the bytes received at once.
    """

    def __init__(self, url: str) -> None:
        self._server = socket.socket(socket.AF_UNIX)
        self._server.connect(urlsplit(url).path)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._client: socket.socket | None = None
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}"
        self._changed = threading.Condition()
        self._held = False
        self.passed: list[tuple[str, bytes]] = []
        self._threads = [threading.Thread(target=self._requests), threading.Thread(target=self._answers)]
        self._accepted = threading.Event()
        for thread in self._threads:
            thread.start()

    def hold(self) -> None:
        """Hold answers back from now on."""
        with self._changed:
            self._held = True

    def release(self) -> None:
        """Let answers pass again."""
        with self._changed:
            self._held = False
            self._changed.notify_all()

    def wait_for_request(self, text: bytes) -> None:
        """Wait until a request containing `text` has passed."""
        with self._changed:
            assert self._changed.wait_for(lambda: any(way == "to server" and text in data for way, data in self.passed), 20)

    def first(self, way: str, text: bytes, after: int = -1) -> int:
        """The place of the first piece with `text` that passed that way behind place `after`."""
        return next(i for i, (way_i, data) in enumerate(self.passed) if i > after and way_i == way and text in data)

    def _requests(self) -> None:
        with contextlib.suppress(OSError):
            self._client, _ = self._listener.accept()
            self._accepted.set()
            while data := self._client.recv(1 << 16):
                with self._changed:
                    self.passed.append(("to server", data))
                    self._changed.notify_all()
                self._server.sendall(data)
            self._server.shutdown(socket.SHUT_RDWR)
        self._accepted.set()

    def _answers(self) -> None:
        self._accepted.wait()
        with contextlib.suppress(OSError):
            while data := self._server.recv(1 << 16):
                assert self._client is not None
                with self._changed:
                    self._changed.wait_for(lambda: not self._held)
                    self.passed.append(("to client", data))
                self._client.sendall(data)

    def __enter__(self) -> HoldingProxy:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()
        for end in (self._listener, self._client, self._server):
            if end is not None:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for end in (self._listener, self._client, self._server):
            if end is not None:
                end.close()
