"""The TCP sockets that this process has, whoever made them."""

from __future__ import annotations

import os
import socket
from collections.abc import Container, Iterator


def listening_ports() -> set[int]:
    """At which it listens."""
    ports = set()
    for one in _duplicates():
        with one:
            if _listens(one):
                ports.add(one.getsockname()[1])
    return ports


def connections_at(ports: Container[int]) -> list[socket.socket]:
    """Its connections of which one end is at such a port, under descriptors of their own: the caller closes them."""
    found = []
    for one in _duplicates():
        try:
            if not _listens(one) and (one.getsockname()[1] in ports or one.getpeername()[1] in ports):
                found.append(one)
                continue
        except OSError:  # no longer connected
            pass
        one.close()
    return found


def _listens(one: socket.socket) -> bool:
    return bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _duplicates() -> Iterator[socket.socket]:
    """Each of its TCP sockets, duplicated before it is looked at: other threads may close what was seen, and open something else under its number."""
    for name in os.listdir("/proc/self/fd"):
        try:
            descriptor = os.dup(int(name))
        except OSError:
            continue
        try:
            one = socket.socket(fileno=descriptor)
        except OSError:
            os.close(descriptor)
            continue
        if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
            yield one
        else:
            one.close()
