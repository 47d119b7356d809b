"""The TCP sockets that this process has, whoever made them."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from typing import NamedTuple


class TcpSocket(NamedTuple):
    """A TCP socket of this process; peer: the port at the other end, None where it listens."""

    descriptor: int
    port: int
    peer: int | None


def tcp_sockets() -> list[TcpSocket]:
    """This process's TCP sockets that listen or are connected."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        # One may be closed meanwhile, or be something else.
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as one:
                if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                    listens = one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                    peer = None if listens else one.getpeername()[1]
                    found.append(TcpSocket(descriptor, one.getsockname()[1], peer))
    return found
