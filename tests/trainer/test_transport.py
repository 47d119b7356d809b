"""One conformance suite for every transport between trainers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from foreload.base.errors import SettingError
from foreload.trainer.errors import PeerLost
from foreload.trainer.step.cuda_transport import NcclTransport, StagedTransport, share_devices
from foreload.trainer.step.transport import LinkedTransport, LocalHub, Transport, peers_lost

TIMEOUT = timedelta(seconds=20)
SHORT = timedelta(seconds=0.3)
"""What is waited for somebody who never answers."""


def local(world: int) -> list[Transport]:
    return list(LocalHub(range(world)).transports(TIMEOUT))


def over_tcp(world: int) -> list[Transport]:
    """Over TCP: each at an address of its own, as on as many hosts."""
    return formed([f"127.0.0.{rank + 1}" for rank in range(world)])


def linked(world: int) -> list[Transport]:
    """Through shared memory, as trainers of one host."""
    return formed(["127.0.0.1"] * world)


def mixed(world: int) -> list[Transport]:
    """The first at an address of its own, the others at one."""
    return formed([f"127.0.0.{1 + min(rank, 1)}" for rank in range(world)])


def staged(world: int) -> list[Transport]:
    """As trainers that share a device, which the CPU stands for."""
    return formed(["127.0.0.1"] * world, partial(StagedTransport, torch.device("cpu")))


def formed(addresses: Sequence[str], kind: Callable[..., Transport] = LinkedTransport) -> list[Transport]:
    """A group of ranks at these addresses, each with a connection of its own to the rendezvous store, as in processes of their own."""
    world = len(addresses)
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False, timeout=TIMEOUT)

    def connect(rank: int) -> Transport:
        store = dist.TCPStore("127.0.0.1", server.port, None, False, timeout=TIMEOUT)
        return kind(store, 0, rank, range(world), TIMEOUT, addresses[rank])

    with ThreadPoolExecutor(world) as pool:
        return of_all([pool.submit(connect, rank) for rank in range(world)])


def of_all(futures: Sequence[Future[Any]]) -> list[Any]:
    """What each rank comes to; where some fail, all their errors at once: what one rank sees may be another's fault."""
    errors = [error for future in futures if isinstance(error := future.exception(), Exception)]
    if errors:
        raise ExceptionGroup("ranks failed", errors)
    return [future.result() for future in futures]


@pytest.fixture(params=[local, over_tcp, linked, mixed, staged], ids=["local", "over tcp", "linked", "mixed", "staged"])
def connect(request: pytest.FixtureRequest) -> Iterator[Callable[[int], list[Transport]]]:
    """Connects so many trainers by a kind of transport; all are closed in the end."""
    opened: list[Transport] = []

    def make(world: int) -> list[Transport]:
        opened.extend(request.param(world))
        return opened

    yield make
    for transport in opened:
        transport.close()


def on_every_rank(transports: list[Transport], act: Callable[[Transport], Any]) -> list[Any]:
    """Do something on all transports at once; what each gives, by rank."""
    with ThreadPoolExecutor(len(transports)) as pool:
        return of_all([pool.submit(act, transport) for transport in transports])


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.uint8, torch.float64])
def test_every_rank_receives_what_every_other_sent(connect: Callable[[int], list[Transport]], dtype: torch.dtype) -> None:
    def exchange(transport: Transport) -> dict[int, torch.Tensor]:
        peers = [peer for peer in range(transport.world) if peer != transport.rank]
        sends = {peer: torch.full((3, peer + 1), 10 * transport.rank + peer, dtype=dtype) for peer in peers}
        receives = {peer: torch.zeros((3, transport.rank + 1), dtype=dtype) for peer in peers}
        transport.post(sends, receives, 1).wait()
        return receives

    for rank, received in enumerate(on_every_rank(connect(3), exchange)):
        assert sorted(received) == [peer for peer in range(3) if peer != rank]
        for peer, tensor in received.items():
            assert torch.equal(tensor, torch.full((3, rank + 1), 10 * peer + rank, dtype=dtype))


def test_messages_of_one_kind_keep_their_order_and_kinds_do_not_mix(connect: Callable[[int], list[Transport]]) -> None:
    def exchange(transport: Transport) -> list[int]:
        peer = 1 - transport.rank
        got, works = [], []
        for number in range(20):
            for kind in (1, 2):
                received = torch.zeros(1, dtype=torch.int64)
                sent = torch.tensor([100 * kind + number])
                works.append((received, sent, transport.post({peer: sent}, {peer: received}, kind)))
        for received, _, work in reversed(works):
            work.wait()
            got.append(int(received))
        return got

    expected = [100 * kind + number for number in range(20) for kind in (1, 2)][::-1]
    assert on_every_rank(connect(2), exchange) == [expected, expected]


def test_an_empty_tensor_is_no_message_and_costs_nothing(connect: Callable[[int], list[Transport]]) -> None:
    def exchange(transport: Transport) -> int:
        peer = 1 - transport.rank
        nothing, one = torch.zeros((0, 4)), torch.ones(1)
        transport.post({peer: nothing}, {peer: nothing.clone()}, 1).wait()
        transport.post({}, {}, 1).wait()
        received = torch.zeros(1)
        transport.post({peer: one}, {peer: received}, 1).wait()
        assert received.item() == 1
        return transport.bytes_sent[1]

    assert on_every_rank(connect(2), exchange) == [4, 4]


def test_one_direction_alone_is_enough(connect: Callable[[int], list[Transport]]) -> None:
    def exchange(transport: Transport) -> float:
        received = torch.zeros(2)
        if transport.rank == 0:
            transport.post({1: torch.tensor([1.5, 2.5])}, {}, 3).wait()
        else:
            transport.post({}, {0: received}, 3).wait()
        return float(received.sum())

    assert on_every_rank(connect(2), exchange) == [0.0, 4.0]


def test_posting_does_not_wait_for_the_peer(connect: Callable[[int], list[Transport]]) -> None:
    first, second = connect(2)
    sent, received = torch.arange(1000.0), torch.zeros(1000)
    sending = first.post({1: sent}, {}, 1)
    second.post({}, {0: received}, 1).wait()
    sending.wait()
    assert torch.equal(received, sent)


def test_nobody_leaves_a_barrier_before_the_last_has_come(connect: Callable[[int], list[Transport]]) -> None:
    came: list[int] = []

    def arrive(transport: Transport) -> int:
        came.append(transport.rank)
        transport.barrier()
        return len(came)

    assert on_every_rank(connect(3), arrive) == [3, 3, 3]


def test_waiting_for_a_silent_peer_ends_with_the_timeout(connect: Callable[[int], list[Transport]]) -> None:
    transports = connect(2)
    with pytest.raises(PeerLost, match="trainer 0: lost trainer 1"):
        transports[0].post({}, {1: torch.zeros(1)}, 1).wait(SHORT)


def test_waiting_for_a_peer_that_has_left_ends_at_once(connect: Callable[[int], list[Transport]]) -> None:
    transports = connect(2)
    work = transports[0].post({}, {1: torch.zeros(1)}, 1)
    transports.pop().close()
    with pytest.raises(PeerLost, match="trainer 0: lost trainer 1"):
        work.wait(TIMEOUT)


def test_a_term_that_is_interrupted_frees_who_waits_there_and_who_waits_for_it(connect: Callable[[int], list[Transport]]) -> None:
    """Rank 2 is alive and silent: rank 0 waits for it, rank 1 for rank 0."""
    first, second, _ = connect(3)
    waits = [first.post({}, {2: torch.zeros(1)}, 1), second.post({}, {0: torch.zeros(1)}, 1)]
    with ThreadPoolExecutor(2) as pool:
        ended = [pool.submit(work.wait, TIMEOUT) for work in waits]
        first.interrupt()
        for end in ended:
            with pytest.raises(PeerLost):
                end.result()
    with pytest.raises(PeerLost):
        first.post({}, {1: torch.zeros(1)}, 2).wait(TIMEOUT)


@pytest.mark.parametrize("addresses", [["127.0.0.1"] * 3, ["127.0.0.1", "127.0.0.2", "127.0.0.3"]], ids=["linked", "over tcp"])
def test_who_closed_a_connection_is_known_unless_this_trainer_interrupted_it(addresses: list[str]) -> None:
    first, second, third = formed(addresses)

    def closed() -> list[int | None]:
        return [first.closed, third.closed]

    with pytest.raises(PeerLost):
        first.post({}, {1: torch.zeros(1)}, 1).wait(SHORT)
    assert closed() == [None, None]  # it was only silent
    third.interrupt()
    with pytest.raises(PeerLost):
        third.post({}, {1: torch.zeros(1)}, 1).wait(TIMEOUT)
    assert closed() == [None, None]
    second.close()
    with pytest.raises(PeerLost, match="trainer 0: lost trainer 1: it has left"):
        first.post({}, {1: torch.zeros(1)}, 1).wait(TIMEOUT)
    assert closed() == [1, None]
    first.close()
    third.close()


def test_a_lost_peer_is_named_by_its_number_and_not_by_its_rank() -> None:
    first, second = LocalHub([7, 3]).transports(TIMEOUT)
    assert [first.rank, second.rank] == [0, 1]
    first.close()
    with pytest.raises(PeerLost, match="trainer 3: lost trainer 7"):
        second.post({}, {0: torch.zeros(1)}, 1).wait()


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(
        SettingError, match=r"trainer 4: --address: must be an address of the machine that it is on; got 203.0.113.1 "
    ):
        LinkedTransport(dist.HashStore(), 0, 4, [4], TIMEOUT, "203.0.113.1")


def test_errors_of_nccl_are_a_lost_peer_and_those_of_the_device_are_not() -> None:
    for error in (
        dist.DistBackendError("NCCL error: remote process exited\nadvice"),
        dist.DistStoreError("wait timeout"),
        RuntimeError("aborted"),
    ):
        with (
            pytest.raises(PeerLost, match=f"^trainer 3: lost a peer: {str(error).splitlines()[0]}$"),
            peers_lost("trainer 3: lost a peer"),
        ):
            raise error
    for error in (torch.OutOfMemoryError("CUDA out of memory"), torch.AcceleratorError("illegal access")):
        with pytest.raises(type(error)), peers_lost("trainer 3: lost a peer"):
            raise error


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_peer_that_does_not_come_to_an_nccl_group_is_lost() -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False, timeout=SHORT)
    with pytest.raises(PeerLost, match="trainer 1: cannot form the group of term 0 with 2 trainers"):
        NcclTransport(store, 0, 1, [0, 1], SHORT, torch.device("cuda:0"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("world", [1, 2])
def test_trainers_find_out_that_they_share_a_device(world: int) -> None:
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False, timeout=TIMEOUT)

    def share(trainer: int) -> bool:
        store = dist.TCPStore("127.0.0.1", server.port, None, False, timeout=TIMEOUT)
        return share_devices(store, 0, trainer, range(world), torch.device("cuda:0"), TIMEOUT, lambda: None)

    with ThreadPoolExecutor(world) as pool:
        assert of_all([pool.submit(share, trainer) for trainer in range(world)]) == [world > 1] * world


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_trainer_that_does_not_say_its_device_is_lost() -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False, timeout=SHORT)
    with pytest.raises(PeerLost, match="trainer 1: cannot form the group of term 0: not all of its 2 trainers joined"):
        share_devices(store, 0, 1, [0, 1], torch.device("cuda:0"), SHORT, lambda: None)


def test_a_message_to_oneself_or_in_pieces_is_refused(connect: Callable[[int], list[Transport]]) -> None:
    first = connect(2)[0]
    with pytest.raises(ValueError, match="peer"):
        first.post({0: torch.ones(1)}, {}, 1)
    with pytest.raises(ValueError, match="contiguous"):
        first.post({1: torch.ones((2, 2)).t()[:1]}, {}, 1)
