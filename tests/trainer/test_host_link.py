"""Links between trainers of one host, beyond what every transport must do (`test_transport`)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from trainer_links import MIB, PATIENCE, deadline, take

from foreload.trainer.step import host_link
from foreload.trainer.step.host_link import HostLink
from foreload.trainer.step.link import LinkClosed


@pytest.fixture
def ends() -> Iterator[tuple[HostLink, HostLink]]:
    """Both ends of a link, of ranks 0 and 1."""
    name, listening = host_link.listen()
    with listening:
        first = host_link.connect(name)
        assert first is not None
        second = host_link.accept(listening)
    first.introduce(0)
    second.introduce(1)
    assert (first.meet(PATIENCE), second.meet(PATIENCE)) == (1, 0)
    yield first, second
    first.close()
    second.close()


def memory_of(link: HostLink) -> int:
    """Bytes of memory that messages from here have taken."""
    return 512 * os.fstat(link._own.descriptor).st_blocks


def test_memory_is_that_of_the_messages_on_their_way_at_once(ends: tuple[HostLink, HostLink]) -> None:
    first, second = ends
    sent, received = torch.arange(MIB // 4, dtype=torch.int32), torch.zeros(MIB // 4, dtype=torch.int32)
    for number in range(200):
        for kind in (1, 2, 3):
            first.send(kind, sent + number)
        for kind in (3, 1, 2):
            take(second, kind, received)
            assert torch.equal(received, sent + number)
    assert 3 * MIB <= memory_of(first) < 4 * MIB
    assert memory_of(second) == 0


def test_a_large_message_fits_beside_small_ones_that_nobody_has_received(ends: tuple[HostLink, HostLink]) -> None:
    first, second = ends
    sizes = (100, 5 * MIB, 1, 7, 3 * MIB, 64)
    sent = [torch.full((size,), number, dtype=torch.uint8) for number, size in enumerate(sizes)]
    for tensor in sent:
        first.send(0, tensor)
    received = [torch.zeros_like(one) for one in sent]
    numbers = [second.expect(0, out) for out in received]
    for place in (1, 0, 2):
        second.receive(0, numbers[place], deadline())
        assert torch.equal(received[place], sent[place])
    first.send(1, sent[1])
    for place in (3, 4, 5):
        second.receive(0, numbers[place], deadline())
        assert torch.equal(received[place], sent[place])


def test_a_received_message_is_given_back_by_one_store_of_one_byte(
    ends: tuple[HostLink, HostLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the receiver wrote after it, or beside it, could fall into the message that its sender has put there meanwhile."""
    first, second = ends

    class Watched:
        """The sender's memory as the receiver sees it: notes what is stored, and lets the sender use the place at once."""

        def __init__(self) -> None:
            self.stores: list[tuple[int, int]] = []

        def __setitem__(self, place: int, value: int) -> None:
            self.stores.append((place, value))
            memory[place] = value
            first.send(2, following)

    assert second._theirs is not None
    memory, watched = second._theirs.memory, Watched()
    following = torch.full((1024,), 0xFF, dtype=torch.uint8)
    first.send(0, torch.zeros(64, dtype=torch.uint8))
    first.send(1, torch.zeros(1024, dtype=torch.uint8))
    first.send(3, torch.zeros(64, dtype=torch.uint8))
    monkeypatch.setattr(second._theirs, "memory", watched)
    take(second, 1, torch.empty(1024, dtype=torch.uint8))
    monkeypatch.undo()
    assert [value for _, value in watched.stores] == [0]
    received = torch.zeros_like(following)
    take(second, 2, received)
    assert torch.equal(received, following)


def test_both_ends_may_send_more_than_the_socket_holds_before_they_receive(ends: tuple[HostLink, HostLink]) -> None:
    count = 3000

    def send_then_receive(link: HostLink) -> list[int]:
        for number in range(count):
            link.send(5, torch.tensor([number]))
        received, got = torch.zeros(1, dtype=torch.int64), []
        for _ in range(count):
            take(link, 5, received)
            got.append(int(received))
        return got

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(send_then_receive, ends)) == [list(range(count))] * 2


def test_what_was_sent_before_the_other_end_left_is_received(ends: tuple[HostLink, HostLink]) -> None:
    first, second = ends
    first.send(0, torch.tensor([1.5]))
    first.close()
    received = torch.zeros(1)
    take(second, 0, received)
    assert received.item() == 1.5
    with pytest.raises(LinkClosed, match="it has left"):
        take(second, 0, received)


def test_a_message_of_another_size_is_refused(ends: tuple[HostLink, HostLink]) -> None:
    first, second = ends
    first.send(0, torch.zeros(3))
    with pytest.raises(ValueError, match="message of kind 0: must have 8 bytes, got 12"):
        take(second, 0, torch.zeros(2))


def test_where_nobody_listens_there_is_no_link() -> None:
    name, listening = host_link.listen()
    listening.close()
    assert host_link.connect(name) is None


def test_where_memory_cannot_be_had_there_is_no_link(monkeypatch: pytest.MonkeyPatch) -> None:
    name, listening = host_link.listen()
    monkeypatch.setattr(host_link, "_REGION_BYTES", 1 << 62)
    with listening:
        assert host_link.connect(name) is None
