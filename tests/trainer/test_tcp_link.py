"""Links between trainers of different hosts, beyond what every transport must do (`test_transport`)."""

from __future__ import annotations

import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from trainer_links import MIB, PATIENCE, deadline, take

from foreload.base.job_token import connected, new_token
from foreload.trainer.step.link import LinkClosed
from foreload.trainer.step.tcp_link import TcpLink
from foreload.trainer.step.transport import LinkedTransport


def carried(connection: socket.socket) -> TcpLink:
    """A link over a connection, of rank 0, carried by a thread."""
    link = TcpLink(connection)
    link.introduce(0)
    link.meet(PATIENCE)
    threading.Thread(target=link.carry, daemon=True).start()
    return link


@pytest.fixture
def ends() -> Iterator[tuple[TcpLink, TcpLink]]:
    """Both ends of a link."""
    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(1) as pool:
        first = pool.submit(lambda: carried(socket.create_connection(listening.getsockname())))
        second = carried(listening.accept()[0])
        links = first.result(), second
    yield links
    for link in links:
        link.close()


@pytest.fixture
def stranger() -> Iterator[tuple[TcpLink, socket.socket]]:
    """A link, and the bare connection at its other end, whose program sends what it likes."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        other = socket.create_connection(listening.getsockname())
        other.sendall(struct.pack("=i", 1))
        link = carried(listening.accept()[0])
    yield link, other
    other.close()
    link.close()


def test_both_ends_may_send_more_than_the_connection_holds_before_they_receive(ends: tuple[TcpLink, TcpLink]) -> None:
    def send_then_receive(link: TcpLink) -> list[int]:
        sent = [torch.full((8 * MIB,), number, dtype=torch.uint8) for number in range(4)]
        for one in sent:
            link.send(3, one)
        received = [torch.empty_like(one) for one in sent]
        for out in received:
            take(link, 3, out)
        link.finish_sending(deadline())
        return [int(out.sum()) for out in received]

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(send_then_receive, ends)) == [[8 * MIB * number for number in range(4)]] * 2


def test_what_was_sent_before_its_sender_left_is_received_when_it_is_asked_for(ends: tuple[TcpLink, TcpLink]) -> None:
    first, second = ends
    first.send(0, torch.tensor([1.5]))
    first.send(1, torch.tensor([2.5]))
    first.close()
    received = torch.zeros(2)
    take(second, 0, received[:1])
    take(second, 1, received[1:])
    assert received.tolist() == [1.5, 2.5]
    with pytest.raises(LinkClosed, match="it has left"):
        take(second, 0, received[:1])
    assert second.has_left


def test_a_message_that_nobody_asked_for_stays_in_the_connection(ends: tuple[TcpLink, TcpLink]) -> None:
    first, second = ends
    large = torch.ones(64 * MIB, dtype=torch.uint8)
    first.send(7, large)
    with pytest.raises(TimeoutError):
        first.finish_sending(time.monotonic() + 0.2)
    received = torch.zeros_like(large)
    take(second, 7, received)
    first.finish_sending(deadline())
    assert torch.equal(received, large)


def test_a_message_of_another_size_ends_the_link(ends: tuple[TcpLink, TcpLink]) -> None:
    first, second = ends
    first.send(0, torch.zeros(3))
    with pytest.raises(LinkClosed, match="message of kind 0: must have 8 bytes, got 12"):
        take(second, 0, torch.zeros(2))


def test_sending_over_a_closed_link_is_refused(ends: tuple[TcpLink, TcpLink]) -> None:
    first, second = ends
    second.interrupt()
    with pytest.raises(LinkClosed):
        take(first, 0, torch.zeros(1))
    with pytest.raises(LinkClosed):
        first.send(0, torch.zeros(1))
    with pytest.raises(LinkClosed):
        take(second, 0, torch.zeros(1))


@pytest.mark.parametrize("size", [-1, 0, 7, 9, 1 << 62])
def test_a_length_that_is_not_the_messages_takes_no_memory(stranger: tuple[TcpLink, socket.socket], size: int) -> None:
    link, other = stranger
    other.sendall(struct.pack("=iq", 2, size) + b"\0" * 7)
    with pytest.raises(LinkClosed, match=f"message of kind 2: must have 8 bytes, got {size}"):
        take(link, 2, torch.zeros(1, dtype=torch.int64))


@pytest.mark.parametrize("seed", range(30))
def test_whatever_comes_ends_in_messages_a_closed_link_or_silence(stranger: tuple[TcpLink, socket.socket], seed: int) -> None:
    link, other = stranger
    draw = random.Random(seed)
    message = struct.pack("=iq", 1, 8) + bytes(range(8))
    data = bytearray(message * draw.randint(0, 3))
    for _ in range(draw.randint(0, 3)):
        place = draw.randint(0, len(data))
        data[place:place] = draw.randbytes(draw.randint(1, 20))
    for place in range(0, len(data), 5):
        other.sendall(data[place : place + 5])
    other.shutdown(socket.SHUT_WR)

    def take_all() -> None:
        while True:
            received = torch.zeros(1, dtype=torch.int64)
            link.receive(1, link.expect(1, received), time.monotonic() + 0.2)

    # Silence, where what has come is of a kind that nobody asks for.
    with pytest.raises((LinkClosed, TimeoutError)):
        take_all()


def test_a_group_forms_whoever_else_connects() -> None:
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False, timeout=PATIENCE)
    strangers: list[socket.socket] = []

    def form(rank: int) -> LinkedTransport:
        store = dist.TCPStore("127.0.0.1", server.port, None, False, timeout=PATIENCE)
        return LinkedTransport(store, 0, rank, range(3), PATIENCE, f"127.0.0.{rank + 1}", check=lambda: disturb(rank))

    def disturb(rank: int) -> None:
        """Connect to the first trainer, and say nothing, something else, or show another token."""
        if rank or len(strangers) > 3 or not server.check(["term/0/links/0"]):
            return
        address, port, _ = server.get("term/0/links/0").decode().split(" ")
        for said in (b"", b"GET / HTTP/1.1\r\n\r\n"):
            strangers.append(socket.create_connection((address, int(port))))
            strangers[-1].sendall(said)
        with pytest.raises(OSError):
            connected(address, int(port), new_token(), "trainer link", 5)

    with ThreadPoolExecutor(3) as pool:
        transports = list(pool.map(form, range(3)))
        list(pool.map(LinkedTransport.barrier, transports))
    for one in strangers:
        one.close()
    for transport in transports:
        transport.close()
