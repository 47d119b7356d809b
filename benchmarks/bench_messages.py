"""Messages between two trainers of different hosts, both ways at once, beside gloo's.

    python benchmarks/bench_messages.py [--quick] [--out DIR] [--pairs N]

Over loopback, each trainer at an address of its own; and, as root, between two network namespaces whose link is held to a rate.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from bench_links import FAR_ADDRESS, NEAR_ADDRESS, Link, Unavailable
from comparison import Cell, Claim, Results, Table, alternate, arguments, ratio, save, spread
from foreload.trainer.step.transport import LinkedTransport
from interleaved import InterleavedRuns, Ranks, ready
from workload import ROOT

OWN, GLOO = "links between trainers", "gloo"
SIZES = tuple(1 << power for power in (12, 16, 18, 20, 22, 23))
LARGE = 1 << 20  # from this size on the connection is the limit
PLACES = {"loopback": None, "1 Gbit/s": 1000, "10 Gbit/s": 10_000}  # and Mbit/s
UNJUDGED = "10 Gbit/s"
Turns = dict[str, list[Mapping[str, float]]]
PATIENCE = timedelta(minutes=10)  # while the other contender has its run
UNCOUNTED = 3  # of the exchanges of a size: the one before was of another


class Gloo:
    """Plain sends and receives of torch's gloo group."""

    def __init__(self, store: dist.Store, rank: int, address: str) -> None:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices, options._timeout = [gloo.create_device(hostname=address)], PATIENCE
        self._group, self._peer = gloo(dist.PrefixStore("gloo", store), rank, 2, options), 1 - rank

    def exchange(self, sent: torch.Tensor, received: torch.Tensor) -> None:
        """Send and receive."""
        works = [self._group.recv([received], self._peer, 1), self._group.send([sent], self._peer, 1)]
        for work in works:
            work.wait()


class Own:
    """This project's."""

    def __init__(self, store: dist.Store, rank: int, address: str) -> None:
        self._transport, self._peer = LinkedTransport(store, 0, rank, range(2), PATIENCE, address), 1 - rank

    def exchange(self, sent: torch.Tensor, received: torch.Tensor) -> None:
        """Send and receive."""
        self._transport.post({self._peer: sent}, {self._peer: received}, 1).wait()


def rank_of(kind: str, rank: int, addresses: list[str], port: int, rounds: int) -> None:
    """A contender's process: a step is an exchange; so many of each size follow each other."""
    torch.set_num_threads(1)
    store = dist.TCPStore(addresses[0], port, None, rank == 0, wait_for_workers=False, timeout=PATIENCE)
    contender = (Own if kind == OWN else Gloo)(store, rank, addresses[rank])
    sent = [torch.full((size,), rank, dtype=torch.uint8) for size in SIZES]
    received = [torch.empty_like(one) for one in sent]
    interleaved = InterleavedRuns()
    ready()
    interleaved.begin()
    while True:
        for out, into in zip(sent, received, strict=True):
            for _ in range(rounds):
                contender.exchange(out, into)
                interleaved.step(0.0)


def free_port() -> int:
    """A TCP port that nobody uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def milliseconds(ranks: Ranks, rounds: int) -> dict[str, float]:
    """The mean of each size over so many exchanges of it."""
    seconds = ranks.run(rounds * len(SIZES), 0)[0]["seconds"]
    blocks = (seconds[place * rounds + UNCOUNTED : (place + 1) * rounds] for place in range(len(SIZES)))
    return {str(size): 1000 * statistics.fmean(block) for size, block in zip(SIZES, blocks, strict=True)}


def contest(addresses: Sequence[str], ends: Sequence[list[str]], pairs: int, rounds: int, until: float) -> Turns:
    """Both contenders' turns. ends: of each rank, the command that starts it at its end of a link."""
    with ExitStack() as stack:
        contenders: dict[str, Callable[[], Mapping[str, float]]] = {}
        for kind in (GLOO, OWN):
            port = free_port()
            commands = [
                [*ends[rank], sys.executable, __file__, json.dumps([kind, rank, addresses, port, rounds])] for rank in (0, 1)
            ]
            ranks = Ranks(kind, commands, {"PYTHONPATH": f"{ROOT}:{ROOT / 'benchmarks'}"})
            stack.callback(ranks.close)
            contenders[kind] = partial(milliseconds, ranks, rounds)
        return alternate(contenders, pairs, until)


def through_link(megabits: int, pairs: int, rounds: int, until: float) -> Turns:
    """Both contenders' turns at the two ends of a link of a rate. Raises Unavailable."""
    link = Link()
    try:
        link.limit(megabits)
        ends = [["nsenter", f"--net=/proc/{os.getpid()}/fd/{end}"] for end in link.ends]
        return contest([NEAR_ADDRESS, FAR_ADDRESS], ends, pairs, rounds, until)
    finally:
        link.close()


def judged(place: str, turns: Turns, note: str) -> tuple[list[Claim], list[list[Cell]]]:
    """Of each size a claim, and a row of the table. turns: none where nothing was measured; note: why."""
    claims, rows = [], list[list[Cell]]()
    for size in SIZES:
        by_kind = {kind: [turn[str(size)] for turn in of_kind] for kind, of_kind in turns.items()}
        one = ratio(by_kind[OWN], by_kind[GLOO]) if turns else None
        most = None if place == UNJUDGED else 0.8 if size < LARGE else 1.05
        bar = "none" if most is None else f"at most {most}"
        claims.append(Claim(f"time of a message of {size >> 10} KiB, {place}", GLOO, bar, one, most=most, note=note))
        if one is not None:
            rows.append([f"{size >> 10} KiB", *(f"{spread(by_kind[kind]).median:.3f}" for kind in (GLOO, OWN)), str(one)])
    return claims, rows


def main() -> None:
    """Measure and save."""
    given = arguments(__doc__, pairs=(40, 3))
    rounds = 13 if given.quick else 33
    tables: list[Table] = []
    claims: list[Claim] = []
    notes: list[str] = []
    for number, (place, megabits) in enumerate(PLACES.items(), 1):
        until, turns, note = given.budget.until(number / len(PLACES)), Turns(), ""
        try:
            if megabits is None:
                turns = contest(["127.0.0.1", "127.0.0.2"], [[], []], given.pairs, rounds, until)
            else:
                turns = through_link(megabits, given.pairs, rounds, until)
        except Unavailable as error:
            note = str(error)
            notes.append(f"{place}: not measured: {note}.")
        of_place, rows = judged(place, turns, note)
        claims += of_place
        if rows:
            columns = ["bytes", "gloo, ms", "links, ms", "ratio of pairs"]
            tables.append(Table(place[0].upper() + place[1:], columns, rows, f"{len(turns[OWN])} pairs."))
    save(Results("messages", "Messages between hosts", claims, tables, notes=notes), given.out)


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("["):
        rank_of(*json.loads(sys.argv[1]))
    else:
        main()
