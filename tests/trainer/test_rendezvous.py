"""What stands in the rendezvous store, by which launcher and trainers talk: facts of a term, the agreement to stop, events."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from small_job import step_report

from foreload.trainer.cluster.coordinator.terms import first_term
from foreload.trainer.cluster.messages.facts import DenseAtEnd, RunSaved, StopAfter, StopWanted, Term, contiguous_lanes
from foreload.trainer.cluster.messages.rendezvous import (
    PART_BYTES,
    EventReceiver,
    EventSender,
    Rendezvous,
    StopAgreement,
    host_store,
    join_store,
)
from foreload.trainer.cluster.messages.trainers import Ended, RequestReport, StepEnded
from foreload.trainer.errors import MessageError, PeerLost
from foreload.trainer.step.transport import LocalHub, Transport

TIMEOUT = timedelta(seconds=20)


def connected(count: int) -> list[Rendezvous]:
    """So many processes' sides of one rendezvous store; the first is that of the process that hosts it."""
    server = host_store("127.0.0.1", TIMEOUT)
    return [Rendezvous(server), *(Rendezvous(join_store(f"127.0.0.1:{server.port}", TIMEOUT)) for _ in range(count - 1))]


@pytest.mark.parametrize("lanes", [1, 2, 3, 4, 7, 64])
def test_lanes_are_spread_evenly_over_any_number_of_trainers(lanes: int) -> None:
    for trainers in range(1, lanes + 1):
        hosts = contiguous_lanes(lanes, trainers)
        counts = [hosts.count(trainer) for trainer in range(trainers)]
        assert hosts == sorted(hosts)
        assert max(counts) - min(counts) <= 1


def test_the_members_and_lanes_of_a_term_reach_every_trainer() -> None:
    launcher, first, second = connected(3)
    launcher.publish(first_term(0, (4, 7), 3, 2, -1), 0)
    launcher.publish(first_term(1, (4,), 3, 2, 8), 1)
    term = first.read(Term, 0)
    assert (term.members, term.hosts, term.lane_map, term.leader) == ((4, 7), (4, 4, 7), [0, 0, 1], 4)
    assert [term.lanes_of(trainer) for trainer in (4, 7)] == [[0, 1], [2]]
    assert (term.copies, term.copy_map) == (((7,), (7,), (4,)), [[1], [1], [0]])
    assert second.read(Term, 1) == Term(1, (4,), (4, 4, 4), ((), (), ()), ((), (), ()), 8, targets=(4, 4, 4))


@pytest.mark.parametrize("asked_before", [0, 1, 7])
def test_all_trainers_stop_after_the_same_step(asked_before: int) -> None:
    """Trainers run as far apart as a step's messages allow; the stop is asked for at any moment."""
    trainers = 3
    launcher, *rest = connected(trainers + 1)
    asked = threading.Event()

    def train(transport: Transport, rendezvous: Rendezvous) -> int:
        agreement = StopAgreement(rendezvous, transport.rank == 0, 1)
        peers = [peer for peer in range(trainers) if peer != transport.rank]
        # Far more than it takes.
        for step in range(10_000):
            if transport.rank == 2 and step == asked_before:
                launcher.publish(StopWanted())
                asked.set()
            received = {peer: torch.zeros(1) for peer in peers}
            transport.post({peer: torch.ones(1) for peer in peers}, received, 0).wait()
            if agreement.stop_after(step):
                return step
        return -1

    with ThreadPoolExecutor(trainers) as pool:
        ends = list(pool.map(train, LocalHub(range(trainers)).transports(TIMEOUT), rest))
    assert asked.is_set()
    assert len(set(ends)) == 1
    assert ends[0] >= asked_before


def test_events_arrive_once_and_in_order() -> None:
    launcher, first, second = connected(3)
    senders, receiver = {0: EventSender(first, 0), 5: EventSender(second, 5)}, EventReceiver(launcher, (0, 5))
    for number in range(50):
        for sender in senders.values():
            sender.send(RequestReport(number, failed="it cannot"))
    for sender in senders.values():
        sender.send(Ended())
    got = list(receiver.poll())
    for trainer in senders:
        assert [event for told_by, event in got if told_by == trainer] == [
            *(RequestReport(number, failed="it cannot") for number in range(50)), Ended(),
        ]  # fmt: skip
    assert list(receiver.poll()) == []


def test_steps_are_held_back_for_a_moment_and_go_with_what_is_told_next() -> None:
    launcher, first = connected(2)
    sender, receiver = EventSender(first, 0), EventReceiver(launcher, (0,))
    steps = [StepEnded(step_report(step), at=float(step)) for step in range(10)]
    for step in steps:
        sender.send(step)
    sender.send(Ended())
    assert [event for _, event in receiver.poll()] == [*steps, Ended()]


def test_a_fact_is_refused_where_another_stands() -> None:
    (rendezvous,) = connected(1)
    rendezvous._store.set("StopAfter", '{"kind": "StopAfter", "step": "soon"}')
    with pytest.raises(MessageError, match=r"StopAfter\.step: must be int; got 'soon'"):
        rendezvous.poll(StopAfter)


def test_a_trainer_notices_that_the_launcher_is_gone() -> None:
    server = host_store("127.0.0.1", TIMEOUT)
    port = server.port
    rendezvous = Rendezvous(join_store(f"127.0.0.1:{port}", TIMEOUT))
    del server
    with pytest.raises(PeerLost, match="launcher"):
        rendezvous.publish(StopWanted())
    with pytest.raises(PeerLost, match=f"coordinator at 127.0.0.1:{port}"):
        join_store(f"127.0.0.1:{port}", timedelta(milliseconds=200))


@pytest.mark.parametrize("size", [0, 1, PART_BYTES, 3 * PART_BYTES + 5, pytest.param(100_000_000, marks=pytest.mark.full)])
def test_bytes_of_any_number_stand_beside_a_fact(size: int) -> None:
    writer, reader = connected(2)
    data = np.random.default_rng(size).bytes(size)
    writer.publish_bytes(DenseAtEnd.of(data, 7), data, 3)
    fact, read = reader.read_bytes(DenseAtEnd, 3)
    assert (fact.step, fact.size, read) == (7, size, data)


def test_other_bytes_than_the_fact_says_are_refused() -> None:
    writer, reader = connected(2)
    writer.publish_bytes(DenseAtEnd.of(b"one", 7), b"two", 3)
    with pytest.raises(MessageError, match="DenseAtEnd/3: must be 3 bytes with checksum"):
        reader.read_bytes(DenseAtEnd, 3)


class LeftAtOnce(dist.Store):
    """A trainer's connection to a coordinator that leaves as soon as it has what it waits for, before it has confirmed that it is there."""

    def __init__(self, server: Any) -> None:
        super().__init__()
        self._server: Any = server
        self._client: Any = join_store(f"127.0.0.1:{server.port}", TIMEOUT)

    def set(self, key: str, value: Any) -> None:
        self._client.set(key, value)
        self._server.get(key)
        self._server = None

    def get(self, key: str) -> bytes:
        told: bytes = self._client.get(key)
        return told

    def check(self, keys: list[str]) -> bool:
        there: bool = self._client.check(keys)
        return there


def test_a_trainer_has_ended_though_the_coordinator_is_gone_before_it_says_that_it_has_seen_it() -> None:
    server = host_store("127.0.0.1", TIMEOUT)
    connection = LeftAtOnce(server)
    del server
    EventSender(Rendezvous(connection), 1).send_last(Ended())
    with pytest.raises(PeerLost):
        Rendezvous(connection).poll(RunSaved)
