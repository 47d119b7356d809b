"""Whether a scheduler such as torchrun started this process, and where its trainers meet."""

from __future__ import annotations

import os
import socket

from foreload.pipelines.errors import SettingError


def scheduler_address() -> str:
    """Where a scheduler has its trainers meet: host and port."""
    return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


def under_scheduler() -> bool:
    """Whether this process was started by torchrun or the like."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def address_towards(host: str, port: int) -> str:
    """This machine's address on the way to a host, which may be this one. Raises SettingError where no way leads there."""
    reason = "no address"
    try:
        places = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        # IPv4 first, so that all hosts choose alike.
        for family, kind, protocol, _, place in sorted(places, key=lambda one: one[0] != socket.AF_INET):
            with socket.socket(family, kind, protocol) as probe:
                try:
                    # Connecting a datagram socket sends nothing: it only chooses a route.
                    probe.connect(place)
                except OSError as error:
                    reason = error.strerror or str(error)
                    continue
                return str(probe.getsockname()[0])
    except OSError as error:
        reason = error.strerror or str(error)
    raise SettingError(f"--address: must be given where no route leads to MASTER_ADDR; got {host} ({reason})")
