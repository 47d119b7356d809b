"""What trainers and coordinator tell each other: facts, the agreement to stop, mail, the control socket."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from foreload.trainer.cluster.board import (
    Board,
    ControlSocket,
    EventReceiver,
    EventSender,
    StopAgreement,
    ask,
    contiguous_lanes,
    host_store,
    join_store,
)
from foreload.trainer.compute.transport import LocalHub, Transport
from foreload.trainer.errors import PeerLost, RunError

TIMEOUT = timedelta(seconds=20)


def boards(count: int) -> list[Board]:
    server = host_store("127.0.0.1", TIMEOUT)
    return [Board(server), *(Board(join_store("127.0.0.1", server.port, TIMEOUT)) for _ in range(count - 1))]


@pytest.mark.parametrize("lanes", [1, 2, 3, 4, 7, 64])
def test_lanes_are_spread_evenly_over_any_number_of_trainers(lanes: int) -> None:
    for trainers in range(1, lanes + 1):
        hosts = contiguous_lanes(lanes, trainers)
        counts = [hosts.count(trainer) for trainer in range(trainers)]
        assert hosts == sorted(hosts)
        assert max(counts) - min(counts) <= 1


def test_the_lane_map_of_a_term_reaches_every_trainer() -> None:
    coordinator, first, second = boards(3)
    coordinator.publish_lane_map(0, [0, 0, 1])
    coordinator.publish_lane_map(1, [0, 0, 0])
    assert first.lane_map(0) == [0, 0, 1]
    assert second.lane_map(1) == [0, 0, 0]


@pytest.mark.parametrize("asked_before", [0, 1, 7])
def test_all_trainers_stop_after_the_same_step(asked_before: int) -> None:
    """Trainers run as far apart as a step's messages allow; the stop is asked for at any moment."""
    world = 3
    coordinator, *rest = boards(world + 1)
    asked = threading.Event()

    def train(transport: Transport, board: Board) -> int:
        agreement = StopAgreement(board, leads=transport.rank == 0)
        peers = [peer for peer in range(world) if peer != transport.rank]
        for step in range(10_000):
            if transport.rank == 2 and step == asked_before:
                coordinator.publish("stop/wanted", True)
                asked.set()
            received = {peer: torch.zeros(1) for peer in peers}
            transport.post({peer: torch.ones(1) for peer in peers}, received, 0).wait()
            if agreement.stop_after(step):
                return step
        return -1

    with ThreadPoolExecutor(world) as pool:
        ends = list(pool.map(train, LocalHub(world).transports(TIMEOUT), rest))
    assert asked.is_set()
    assert len(set(ends)) == 1
    assert ends[0] >= asked_before


def test_mail_arrives_once_and_in_order() -> None:
    coordinator, first, second = boards(3)
    events, receiver = [EventSender(first, 0), EventSender(second, 1)], EventReceiver(coordinator, 2)
    for step in range(50):
        for mail in events:
            mail.send("step", step=step)
    for mail in events:
        mail.send("ended")
    got = list(receiver.poll())
    for trainer in (0, 1):
        mine = [item for item in got if item["trainer"] == trainer]
        assert [item["step"] for item in mine[:-1]] == list(range(50))
        assert mine[-1]["kind"] == "ended"
    assert list(receiver.poll()) == []


def test_a_trainer_notices_that_the_coordinator_is_gone() -> None:
    server = host_store("127.0.0.1", TIMEOUT)
    port = server.port
    board = Board(join_store("127.0.0.1", port, TIMEOUT))
    del server
    with pytest.raises(PeerLost, match="launcher"):
        board.publish("a", 1)
    with pytest.raises(PeerLost, match=f"coordinator at 127.0.0.1:{port}"):
        join_store("127.0.0.1", port, timedelta(milliseconds=200))


@pytest.mark.parametrize("depth", [1, 12], ids=["short path", "path longer than a socket's may be"])
def test_the_control_socket_answers(tmp_path: Path, depth: int) -> None:
    run = tmp_path.joinpath(*["a folder"] * depth)
    run.mkdir(parents=True)
    stopped = threading.Event()

    def stop(_: Mapping[str, object]) -> Mapping[str, object]:
        stopped.set()
        return {"stopping": True}

    control = ControlSocket(run, {"status": lambda _: {"step": 7}, "stop": stop})
    try:
        assert ask(run, {"do": "status"}) == {"step": 7}
        assert ask(run, {"do": "fly"}) == {"error": "cannot do 'fly'; there are status, stop"}
        assert ask(run, {"do": "stop"}) == {"stopping": True}
        assert stopped.is_set()
    finally:
        control.close()
    assert ask(run, {"do": "status"}) is None
    assert not list(run.iterdir())


def test_the_control_socket_survives_rubbish(tmp_path: Path) -> None:
    control = ControlSocket(tmp_path, {"status": lambda _: {"step": 7}})
    try:
        with socket.socket(socket.AF_UNIX) as rude, rude.makefile("rwb") as stream:
            rude.connect(str(tmp_path / "control.sock"))
            stream.write(b"\xff\n[]\n")
            stream.flush()
            assert "error" in json.loads(stream.readline())
            assert "error" in json.loads(stream.readline())
        assert ask(tmp_path, {"do": "status"}) == {"step": 7}
    finally:
        control.close()


def test_a_launcher_that_ends_while_it_is_asked_trains_no_more(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "control.sock"))
        listening.listen()
        with ThreadPoolExecutor(1) as pool:
            told = pool.submit(ask, tmp_path, {"do": "status"})
            asked, _ = listening.accept()
            assert asked.recv(100)
            asked.close()
            assert told.result() is None


def test_a_launcher_that_was_stopped_is_told_of(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "control.sock"))
        listening.listen()
        with pytest.raises(RunError, match="its launcher does not answer"):
            ask(tmp_path, {"do": "status"}, timedelta(seconds=0.2))
