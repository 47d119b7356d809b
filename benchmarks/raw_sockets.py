"""The fastest that a store client can be: an exchange's bytes, captured by a relay, replayed over raw sockets."""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from foreload.cache.client.store import Store

_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


@dataclass(frozen=True, slots=True)
class Traced:
    """An exchange as bytes, per shard: what was sent, and how many bytes came back."""

    sent: list[bytes]
    received_bytes: list[int]


class Relay:
    """Stands between a client and one server, and keeps what passes."""

    def __init__(self, path: Path, server: str) -> None:
        self.sent = bytearray()
        self.received_bytes = 0
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._server = socket.socket(socket.AF_UNIX)
        self._server.connect(server)
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        client, _ = self._listener.accept()
        with client, self._server, self._listener, selectors.DefaultSelector() as selector:
            selector.register(client, _READ)
            selector.register(self._server, _READ)
            while True:
                for key, _ in selector.select():
                    assert isinstance(key.fileobj, socket.socket)
                    data = key.fileobj.recv(1 << 20)
                    if not data:
                        return
                    if key.fileobj is client:
                        self.sent += data
                        self._server.sendall(data)
                    else:
                        self.received_bytes += len(data)
                        client.sendall(data)

    def take(self) -> tuple[bytes, int]:
        """What passed since the last call."""
        taken = bytes(self.sent), self.received_bytes
        self.sent, self.received_bytes = bytearray(), 0
        return taken

    def join(self) -> None:
        """Wait for the end, after the client has closed."""
        self._thread.join()


def trace(folder: Path, servers: Sequence[str], exchanges: Sequence[Callable[[Store], None]]) -> list[Traced]:
    """Do exchanges through relays; their bytes."""
    relays = [Relay(folder / f"relay-{shard}.sock", server) for shard, server in enumerate(servers)]
    traced = []
    with Store([f"unix://{folder / f'relay-{shard}.sock'}" for shard in range(len(servers))]) as store:
        for relay in relays:
            relay.take()
        for exchange in exchanges:
            exchange(store)
            taken = [relay.take() for relay in relays]
            traced.append(Traced([sent for sent, _ in taken], [received for _, received in taken]))
    for shard, relay in enumerate(relays):
        relay.join()
        (folder / f"relay-{shard}.sock").unlink()
    return traced


class RawSockets:
    """Replays bytes: sends as much as the sockets take at once, and receives into one buffer a shard, made before."""

    def __init__(self, servers: Sequence[str], most_bytes: int) -> None:
        self._sockets = [socket.socket(socket.AF_UNIX) for _ in servers]
        for one, server in zip(self._sockets, servers, strict=True):
            one.connect(server)
        self._buffers = [np.zeros(most_bytes, np.uint8).data for _ in servers]

    def replay(self, traced: Traced) -> None:
        """Send all; then, once nothing is left to send, block for what is still to come: one system call a shard, if it can be."""
        received = [0 for _ in self._sockets]
        left = [memoryview(data) for data in traced.sent]
        with selectors.DefaultSelector() as selector:
            for shard, one in enumerate(self._sockets):
                one.setblocking(False)
                left[shard] = left[shard][one.send(left[shard]) :]
                if left[shard]:
                    selector.register(one, _READ | _WRITE, shard)
            while selector.get_map():
                for key, events in selector.select():
                    shard, one = key.data, self._sockets[key.data]
                    if events & _READ:
                        received[shard] += one.recv_into(self._buffers[shard][received[shard] : traced.received_bytes[shard]])
                    if events & _WRITE:
                        left[shard] = left[shard][one.send(left[shard]) :]
                        if not left[shard]:
                            selector.unregister(one)
        for shard, one in enumerate(self._sockets):
            one.setblocking(True)
            while received[shard] < traced.received_bytes[shard]:
                into = self._buffers[shard][received[shard] : traced.received_bytes[shard]]
                received[shard] += one.recv_into(into, 0, socket.MSG_WAITALL)

    def close(self) -> None:
        """Close the connections."""
        for one in self._sockets:
            one.close()
