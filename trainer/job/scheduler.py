"""Whether a scheduler such as torchrun started this process, and where its trainers meet."""

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

_MEET_PAUSE = timedelta(seconds=1)  # between two looks whether a scheduler's trainers have all met
_MEET_SAID = timedelta(minutes=1)  # between two lines on stderr that they are waited for
_ANNOUNCING = timedelta(seconds=10)  # for the others to learn what rank 0 announces
_LOOK_PAUSE = timedelta(milliseconds=50)  # between two looks at what is there of the others


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where a scheduler's trainers have met. store: all that is there is of these, and of none that were started before; rank: this one's number;
    world: how many they are.
    """

    store: Any
    rank: int
    world: int

    def tell(self, what: str) -> None:
        """Tell the others, as rank 0: the address of the job's rendezvous store, or NO_STEPS, or FAILED. Returns when they know, or do not ask."""
        deadline = time.monotonic() + _ANNOUNCING.total_seconds()
        with contextlib.suppress(RuntimeError):  # where they met there is nobody any more
            self.store.set("told", what)
            while not self.store.check([f"knows/{other}" for other in range(1, self.world)]) and time.monotonic() < deadline:
                time.sleep(_LOOK_PAUSE.total_seconds())

    def receive(self) -> str:
        """What rank 0 announces, waited for. Raises PeerLost where it is gone, with the store where they met."""
        try:
            while not self.store.check(["told"]):
                time.sleep(_LOOK_PAUSE.total_seconds())
            announced = str(self.store.get("told").decode())
            self.store.set(f"knows/{self.rank}", "")
            return announced
        except RuntimeError as error:
            raise PeerLost(f"trainer {self.rank}: rank 0 is gone") from error


NO_STEPS, FAILED = "no step to train", "failed"
"""What rank 0 announces where the other trainers are not to train."""


def scheduler_address() -> str:
    """Where a scheduler has its trainers meet: host and port."""
    return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


def under_scheduler() -> bool:
    """Whether this process was started by torchrun or the like."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def address_towards(host: str, port: int) -> str:
    """This machine's address on the way to a host, which may be this one. Raises SettingError where no way leads there."""
    reason, cause = "no address", None
    try:
        places = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        # IPv4 first, so that all hosts choose alike.
        for family, kind, protocol, _, place in sorted(places, key=lambda one: one[0] != socket.AF_INET):
            with socket.socket(family, kind, protocol) as probe:
                try:
                    # Connecting a datagram socket sends nothing: it only chooses a route.
                    probe.connect(place)
                except OSError as error:
                    reason, cause = error.strerror or str(error), error
                    continue
                return str(probe.getsockname()[0])
    except OSError as error:
        reason, cause = error.strerror or str(error), error
    raise SettingError(f"--address: must be given where no route leads to MASTER_ADDR; got {host} ({reason})") from cause


def _name_of_meeting(store: Any, rank: int, world: int, timeout: timedelta) -> str:
    """A name that those who meet now have in common, and none who met at the same store before: torchrun starts trainers again and again, and keeps
    the store. Each leaves a word there; the first names the meeting, and the words that it has found, until each has found its own.

    Raises RuntimeError where one does not come.
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
    """Meet the other trainers of this call at a store. Raises RuntimeError where one does not come."""
    import torch.distributed as dist

    return Meeting(
        dist.PrefixStore(_name_of_meeting(dist.PrefixStore("meetings", store), rank, world, timeout), store), rank, world
    )


def meet(timeout: timedelta) -> Meeting:
    """Meet the other trainers of a scheduler's job. While they are waited for, that is said. Raises SettingError where they do not come."""
    import torch.distributed as dist

    place = scheduler_address()
    met: Future[Meeting] = Future()

    def wait() -> None:
        try:
            store, rank, world = next(dist.rendezvous("env://", timeout=timeout))
            met.set_result(meet_at(store, rank, world, timeout))
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
