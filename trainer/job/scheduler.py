"""Detect a scheduler such as torchrun, and let the trainers that it started meet."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import sys
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from datetime import timedelta
from threading import Thread
from typing import Any

from foreload.base.errors import SettingError
from foreload.trainer.errors import PeerLost

_MEET_PAUSE = timedelta(seconds=1)  # between two checks whether all trainers have met
_MEET_SAID = timedelta(minutes=1)  # between two lines on stderr while waiting
_ANNOUNCING = timedelta(seconds=10)  # how long rank 0 waits for the others to read its announcement
_LOOK_PAUSE = timedelta(milliseconds=50)  # between two reads of the store


@dataclass(frozen=True, slots=True)
class Meeting:
    """The place at which a scheduler's trainers have met.

    Attributes:
        store: a store of these trainers alone, without entries of trainers that were started
            earlier.
        rank: the number of this trainer.
        world: the number of trainers.
    """

    store: Any
    rank: int
    world: int

    def announce(self, what: str) -> None:
        """Announce something to the other trainers, as rank 0.

        This returns when all of them know, or after a deadline.

        Args:
            what: the address of the job's rendezvous store, or NO_STEPS, or FAILED.
        """
        deadline = time.monotonic() + _ANNOUNCING.total_seconds()
        # The store raises RuntimeError once the other trainers have left.
        with contextlib.suppress(RuntimeError):
            self.store.set("announced", what)
            while not self.store.check([f"knows/{other}" for other in range(1, self.world)]) and time.monotonic() < deadline:
                time.sleep(_LOOK_PAUSE.total_seconds())

    def receive(self) -> str:
        """Wait for the announcement of rank 0, and return it.

        Raises:
            PeerLost: rank 0 died, and the store where the trainers met with it.
        """
        try:
            while not self.store.check(["announced"]):
                time.sleep(_LOOK_PAUSE.total_seconds())
            announced = str(self.store.get("announced").decode())
            self.store.set(f"knows/{self.rank}", "")
            return announced
        except RuntimeError as error:
            raise PeerLost(f"trainer {self.rank}: rank 0 has died") from error


NO_STEPS, FAILED = "no step to train", "failed"
"""The announcements of rank 0 if the other trainers are not to train."""


def scheduler_address() -> str:
    """Return host and port at which the scheduler has its trainers meet."""
    return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


def under_scheduler() -> bool:
    """Return whether torchrun or a similar scheduler started this process."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def address_towards(host: str, port: int) -> str:
    """Return this machine's address on the route to a host, which may be this machine.

    Raises:
        SettingError: no route leads to the host.
    """
    reason, cause = "no address", None
    try:
        places = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        # IPv4 addresses come first, so that all hosts choose alike.
        for family, kind, protocol, _, place in sorted(places, key=lambda one: one[0] != socket.AF_INET):
            with socket.socket(family, kind, protocol) as probe:
                try:
                    # Connecting a datagram socket sends nothing. It only chooses a route.
                    probe.connect(place)
                except OSError as error:
                    reason, cause = error.strerror or str(error), error
                    continue
                return str(probe.getsockname()[0])
    except OSError as error:
        reason, cause = error.strerror or str(error), error
    raise SettingError(f"--address: must be given where no route leads to MASTER_ADDR; got {host} ({reason})") from cause


def _name_of_meeting(store: Any, rank: int, world: int, timeout: timedelta) -> str:
    """Return a name that only the trainers that meet now have in common.

    torchrun starts trainers again and again and keeps the store, so the store may have entries of
    earlier trainers. Each trainer writes a random word. Rank 0 publishes the name of the meeting
    together with the words that it has found, until each trainer has found its own word there.

    Raises:
        RuntimeError: a trainer does not come.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    own, name, written = secrets.token_hex(8), secrets.token_hex(8), ""
    store.set(f"word/{rank}", own)
    while True:
        if not rank:
            words = [store.get(f"word/{other}").decode() if store.check([f"word/{other}"]) else "" for other in range(world)]
            if (meeting := json.dumps([name, words])) != written:
                store.set("meeting", written := meeting)
            missing = [other for other in range(1, world) if not store.check([f"{name}/{other}"])]
        else:
            missing = [0]
            if store.check(["meeting"]):
                name, words = json.loads(store.get("meeting"))
                if words[rank:] and words[rank] == own:
                    store.set(f"{name}/{rank}", "")
                    return str(name)
        if not missing:
            return name
        if time.monotonic() > deadline:
            raise RuntimeError(f"trainer {', '.join(map(str, missing))} has not come within {timeout.total_seconds():.0f} s")
        time.sleep(_LOOK_PAUSE.total_seconds())


def meet_at(store: Any, rank: int, world: int, timeout: timedelta) -> Meeting:
    """Meet the other trainers of this call at a store. Raises RuntimeError if one does not come."""
    import torch.distributed as dist

    return Meeting(
        dist.PrefixStore(_name_of_meeting(dist.PrefixStore("meetings", store), rank, world, timeout), store), rank, world
    )


def meet(timeout: timedelta) -> Meeting:
    """Meet the other trainers of a scheduler's job.

    While this waits, it says so on stderr.

    Raises:
        SettingError: the trainers do not come in time, or cannot meet at this address.
    """
    import torch.distributed as dist

    place = scheduler_address()
    met: Future[Meeting] = Future()

    def wait() -> None:
        try:
            store, rank, world = next(dist.rendezvous("env://", timeout=timeout))
            met.set_result(meet_at(store, rank, world, timeout))
        except Exception as error:
            met.set_exception(error)

    # torch ignores signals while it waits, so it waits in a thread that is never joined.
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
