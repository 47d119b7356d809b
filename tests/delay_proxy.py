"""Proxies on loopback before a Unix socket's server: one whose answers come later, and one that takes little at a time."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from urllib.parse import urlsplit


def _pass_on(source: socket.socket, target: socket.socket, delay_seconds: float) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            # The delay is what it is for, and nothing is synchronised by it.
            time.sleep(delay_seconds)
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def delayed(url: str, delay_seconds: float) -> Iterator[str]:
    """The URL of a proxy before the server at `url`; every piece of an answer waits for so long. It serves one connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(socket.AF_UNIX) as server:
        server.connect(urlsplit(url).path)
        clients: list[socket.socket] = []

        def serve() -> None:
            client, _ = listener.accept()
            clients.append(client)
            back = threading.Thread(target=_pass_on, args=(server, client, delay_seconds))
            back.start()
            _pass_on(client, server, 0.0)
            back.join()
            client.close()

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"redis://127.0.0.1:{listener.getsockname()[1]}"
        for client in clients:
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)
        thread.join()


@contextlib.contextmanager
def narrow(url: str, piece_bytes: int, seconds: float) -> Iterator[str]:
    """The URL of a proxy before the server at `url`, as behind a slow link: each time that so long has passed, it takes a piece of what is sent. It
    serves one connection.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(socket.AF_UNIX) as server:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, piece_bytes)
        server.connect(urlsplit(url).path)

        def serve() -> None:
            client, _ = listener.accept()
            back = threading.Thread(target=_pass_on, args=(server, client, 0.0))
            back.start()
            with contextlib.suppress(OSError):
                while data := client.recv(piece_bytes):
                    # As slow as that it is meant to be.
                    time.sleep(seconds)
                    server.sendall(data)
            with contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)
            back.join()
            client.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"redis://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            thread.join()
