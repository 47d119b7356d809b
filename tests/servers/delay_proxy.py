"""Proxies on loopback before a Unix socket's server: one whose answers come later, and one that takes little at a time."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

_PIECE_BYTES = 1 << 16


def _pass_on(source: socket.socket, target: socket.socket, delay_seconds: float, piece_bytes: int = _PIECE_BYTES) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(piece_bytes):
            # The delay is what it is for, and nothing is synchronised by it.
            time.sleep(delay_seconds)
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def _proxy(url: str, answer_seconds: float, request_seconds: float, piece_bytes: int) -> Iterator[str]:
    """The URL of a proxy before the server at `url`. Each piece of an answer, or of a request, waits for so long; of a request it takes pieces of so
    many bytes at most.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        if piece_bytes < _PIECE_BYTES:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, piece_bytes)
        sockets: list[socket.socket] = []
        threads: list[threading.Thread] = []

        def serve(client: socket.socket) -> None:
            with client, socket.socket(socket.AF_UNIX) as server:
                sockets.extend((client, server))
                server.connect(urlsplit(url).path)
                back = threading.Thread(target=_pass_on, args=(server, client, answer_seconds))
                back.start()
                _pass_on(client, server, request_seconds, piece_bytes)
                back.join()

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    threads.append(threading.Thread(target=serve, args=(listener.accept()[0],)))
                    threads[-1].start()

        accepting = threading.Thread(target=accept)
        accepting.start()
        try:
            yield f"redis://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            accepting.join()
            for one in sockets:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join()


def delayed(url: str, delay_seconds: float) -> contextlib.AbstractContextManager[str]:
    """The URL of a proxy before the server at `url`; every piece of an answer waits for so long."""
    return _proxy(url, delay_seconds, 0.0, _PIECE_BYTES)


def narrow(url: str, piece_bytes: int, seconds: float) -> contextlib.AbstractContextManager[str]:
    """The URL of a proxy before the server at `url`, as behind a slow link: each time that so long has passed, it takes a piece of what is sent."""
    return _proxy(url, 0.0, seconds, piece_bytes)
