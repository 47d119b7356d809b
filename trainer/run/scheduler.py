"""Whether a scheduler such as torchrun started this process, and where its trainers meet."""

from __future__ import annotations

import os
import socket
import sys
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import timedelta
from threading import Thread
from typing import Any

from foreload.pipelines.errors import SettingError

_MEET_PAUSE = timedelta(seconds=1)  # between two looks whether a scheduler's trainers have all met
_MEET_SAID = timedelta(minutes=1)  # between two lines on stderr that they are waited for


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


def meet(timeout: timedelta) -> tuple[Any, int, int]:
    """The store at which a scheduler's trainers meet, this one's number, and how many they are. While others are waited for, that is said.

    Raises SettingError where they do not meet.
    """
    import torch.distributed as dist

    place = scheduler_address()
    met: Future[tuple[Any, int, int]] = Future()

    def wait() -> None:
        try:
            met.set_result(next(dist.rendezvous("env://", timeout=timeout)))
        except Exception as error:
            met.set_exception(error)

    # In a thread that nobody waits for, since torch heeds no signal meanwhile.
    Thread(target=wait, name="rendezvous", daemon=True).start()
    waited = 0.0
    while True:
        try:
            return met.result(_MEET_PAUSE.total_seconds())
        except FutureTimeout:
            waited += _MEET_PAUSE.total_seconds()
            if waited % _MEET_SAID.total_seconds() == _MEET_PAUSE.total_seconds():
                sys.stderr.write(
                    f"foreload: trainer {os.environ['RANK']} of {os.environ['WORLD_SIZE']} waits at {place} until all have come, "
                    f"{timeout.total_seconds() - waited:.0f} s more at most\n"
                )
        except (RuntimeError, ValueError) as error:
            raise SettingError(
                f"RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT: must let {os.environ['WORLD_SIZE']} trainers meet at a free port of rank 0's "
                f"machine; got {place}: {str(error).strip().splitlines()[0]}; start all of them, with another port if that is taken"
            ) from error
