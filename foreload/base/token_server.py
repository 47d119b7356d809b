"""A TCP socket that serves only those who have the job's token. Whoever has not gets nothing but a random number, and soon loses the connection."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable

from foreload.base.job_token import WrongToken, admit, introduce

MOST_STRANGERS, MOST_OF_ONE = 64, 8
"""How many connections may be about to show the token at the same time, and how many of these from one address; further ones are closed at once."""
MOST_PEERS = 1024  # that have shown it
_BACKLOG = 128
_PAUSE_SECONDS = 0.1  # after a connection could not be taken


def connected(host: str, port: int, token: str, purpose: str, timeout: float) -> socket.socket:
    """A connection to a TokenServer of this purpose, the token shown. Raises WrongToken, and OSError within `timeout` seconds."""
    to = socket.create_connection((host, port), timeout)
    try:
        to.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        introduce(to, token, purpose)
    except BaseException:
        to.close()
        raise
    return to


class TokenServer:
    """Listens from the beginning until `close`; a thread serves each connection. address, port: where.

    serve: called with a connection whose peer has shown the token, and its address, in a thread of its own; the connection is closed when it returns
    or raises OSError. on_refused: called with the address of a peer that has another token, and why. Raises OSError where it cannot listen.
    """

    def __init__(
        self,
        host: str,
        port: int,
        token: str,
        purpose: str,
        serve: Callable[[socket.socket, str], None],
        on_refused: Callable[[str, str], None] = lambda address, why: None,
    ) -> None:
        self._token, self._purpose, self._serve, self._on_refused = token, purpose, serve, on_refused
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        self._listening = socket.create_server(place[:2], family=family, backlog=_BACKLOG)
        self.address, self.port = self._listening.getsockname()[:2]
        self._changed = threading.Lock()
        self._strangers: Counter[str] = Counter()
        self._open: set[socket.socket] = set()
        self._closed = False
        threading.Thread(target=self._accept, name=purpose, daemon=True).start()

    def close(self) -> None:
        """Take no more connections, and close those that there are."""
        with self._changed:
            self._closed = True
            left = [self._listening, *self._open]
        for one in left:
            # A thread that waits at it sees its end.
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                peer, place = self._listening.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(_PAUSE_SECONDS)  # there are no more descriptors
                continue
            address = str(place[0])
            with self._changed:
                crowded = self._strangers.total() >= MOST_STRANGERS or self._strangers[address] >= MOST_OF_ONE
                if self._closed or crowded or len(self._open) >= MOST_PEERS:
                    peer.close()
                    continue
                self._strangers[address] += 1
                self._open.add(peer)
            threading.Thread(target=self._run, args=(peer, address), name=self._purpose, daemon=True).start()

    def _run(self, peer: socket.socket, address: str) -> None:
        try:
            try:
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                admit(peer, self._token, self._purpose)
            except WrongToken as error:
                self._on_refused(address, str(error))
                return
            except OSError:
                return
            finally:
                with self._changed:
                    self._strangers[address] -= 1
                    if not self._strangers[address]:
                        del self._strangers[address]
            with contextlib.suppress(OSError):
                self._serve(peer, address)
        finally:
            with self._changed:
                self._open.discard(peer)
            peer.close()
