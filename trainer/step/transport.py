"""The seam between trainers: messages of known size between ranks of one term, in process, or over gloo (`nccl`: between CUDA devices).

A rank is only an address within a term; what a trainer does follows from the lane map, never from its rank.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from foreload.base.errors import SettingError
from foreload.trainer.errors import PeerLost
from foreload.trainer.step import host_link
from foreload.trainer.step.host_link import HostLink, LinkClosed
from foreload.trainer.step.sockets import connections_at, listening_ports

BARRIER_KIND = (1 << 31) - 1
_LINK_KIND = BARRIER_KIND - 1
_PEERS_PAUSE = timedelta(milliseconds=2)  # between two looks whether all peers have come

# torch's stubs leave out part of what these classes have.
_Gloo: Any = dist.ProcessGroupGloo


class Work(ABC):
    """Messages under way; their tensors belong to the transport until `wait` returns."""

    @abstractmethod
    def wait(self, timeout: timedelta | None = None) -> None:
        """Return once every message has been sent or received. On CUDA the current stream waits, not the caller.

        timeout: the transport's own if None. Raises PeerLost if a peer is gone or silent for longer; the term is over then.
        """


class Transport(ABC):
    """Point-to-point messages among the trainers of one term. A peer, below, is the rank of another trainer.

    trainer: the number of this one; members: all trainers' numbers, by rank (errors name trainers by number); timeout: after which a silent peer
    counts as lost. Attributes: rank, its own; world, how many there are; bytes_sent, Counter of payload bytes by kind.
    """

    def __init__(self, trainer: int, members: Sequence[int], timeout: timedelta) -> None:
        if trainer not in members:
            raise ValueError(f"trainer: must be one of {list(members)}, got {trainer}")
        self.members = tuple(members)
        self.rank = self.members.index(trainer)
        self.world = len(members)
        self.timeout = timeout
        self.bytes_sent: Counter[int] = Counter()

    def post(self, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor], kind: int) -> Work:
        """Start sending and receiving, one contiguous tensor a peer, and return at once. sends, receives: peer -> tensor; kind: names the messages.

        Messages of one kind between two ranks arrive in the order posted; all ranks post kinds in the same order. Both sides know
        the sizes: a tensor without elements is no message, on either side. Raises PeerLost, and ValueError for a tensor or a peer that cannot be.
        """
        outgoing = {peer: self._checked(peer, tensor) for peer, tensor in sorted(sends.items()) if tensor.numel()}
        incoming = {peer: self._checked(peer, tensor) for peer, tensor in sorted(receives.items()) if tensor.numel()}
        self.bytes_sent[kind] += sum(tensor.nbytes for tensor in outgoing.values())
        return self._start(outgoing, incoming, kind)

    def barrier(self) -> None:
        """Return after every rank has called this; raises PeerLost."""
        peers = [peer for peer in range(self.world) if peer != self.rank]
        token = torch.zeros(1, dtype=torch.uint8, device=self.device)
        received = torch.zeros(self.world, dtype=torch.uint8, device=self.device)
        self.post(dict.fromkeys(peers, token), {peer: received[peer : peer + 1] for peer in peers}, BARRIER_KIND).wait()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def lost(self, peer: int, why: str) -> PeerLost:
        """The error that says that the trainer of a rank is gone."""
        return PeerLost(f"trainer {self.members[self.rank]}: lost trainer {self.members[peer]}: {why}")

    @property
    def device(self) -> torch.device:
        """The device that the tensors of messages are on."""
        return torch.device("cpu")

    @abstractmethod
    def _start(self, outgoing: dict[int, torch.Tensor], incoming: dict[int, torch.Tensor], kind: int) -> Work:
        """Start what `post` has checked; peers ascend."""

    @abstractmethod
    def interrupt(self) -> None:
        """End the term from another thread: whoever waits for a message here, or for one from here, sees PeerLost; so does whoever waits later."""

    def check_peers(self) -> None:
        """Raise PeerLost if a peer is known to be gone while none may leave, and nothing is awaited of it here."""
        return

    @abstractmethod
    def close(self) -> None:
        """Leave the term; peers that still wait for this rank see PeerLost."""

    def _checked(self, peer: int, tensor: torch.Tensor) -> torch.Tensor:
        if not 0 <= peer < self.world or peer == self.rank:
            raise ValueError(f"peer: must be another rank of 0 .. {self.world - 1}, got {peer} on rank {self.rank}")
        if not tensor.is_contiguous():
            raise ValueError(f"message for rank {peer}: must be contiguous, got strides {tensor.stride()}")
        return tensor


class GlooTransport(Transport):
    """For tensors on the CPU: through shared memory with trainers of the same host and address (`host_link`), over TCP by gloo with the others.

    The group is formed from the rendezvous store, under the term's own prefix.
    """

    def __init__(
        self,
        store: dist.Store,
        term: int,
        trainer: int,
        members: Sequence[int],
        timeout: timedelta,
        address: str = "127.0.0.1",
        forming: timedelta | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """store: the run's rendezvous store; address: of this trainer's own network interface; forming: how long peers may take to come, `timeout`
        by default; check: called while they are waited for, raises where they are not to be waited for any more.

        Raises PeerLost if a peer does not come, SettingError if the address is none of this machine.
        """
        super().__init__(trainer, members, timeout)
        options = _Gloo._Options()
        before = listening_ports()
        try:
            options._devices = [_Gloo.create_device(hostname=address)]
        except RuntimeError as error:
            raise SettingError(
                f"trainer {trainer}: --address: must be an address of the machine that it is on; got {address} ({first_line(error)})"
            ) from error
        # The device listens at a port that is reported nowhere, but that was not there before.
        listening = sorted(listening_ports() - before)
        options._timeout = forming or timeout
        group = dist.PrefixStore(f"term/{term}/gloo", store)
        self.links: dict[int, HostLink] = {}
        name, accepting = host_link.listen()
        with accepting:
            try:
                group.set(f"links/{self.rank}", f"{address} {name}")
                group.set(f"ports/{self.rank}", ",".join(map(str, listening)))
                # gloo's own wait cannot be interrupted: begun only when all are there.
                await_keys(group, [f"ports/{rank}" for rank in range(self.world)], forming or timeout, check)
                self._group = _Gloo(group, self.rank, self.world, options)
                ports, links = (
                    [group.get(f"{what}/{rank}").decode() for rank in range(self.world)] for what in ("ports", "links")
                )
            except RuntimeError as error:
                raise PeerLost(
                    f"trainer {trainer}: cannot form the group of term {term} with {self.world} trainers: {first_line(error)}"
                ) from error
            self._connections = connections_at({int(port) for of_rank in ports for port in of_rank.split(",") if port})
            self._closed = select.poll()
            for connection in self._connections:
                self._closed.register(connection, select.POLLRDHUP)
            try:
                here = [link.split(" ") for link in links]
                self._link(accepting, [name if own == address else None for own, name in here], forming or timeout)
            except PeerLost:
                self.close()
                raise

    def _link(self, accepting: socket.socket, names: Sequence[str | None], patience: timedelta) -> None:
        """Make links to the ranks of this host. names: at which each rank's socket listens, where it may be of this host. Raises PeerLost."""
        for rank in range(self.rank):
            if (name := names[rank]) is not None and (link := host_link.connect(name)) is not None:
                self.links[rank] = link
        # Who has been connected to can accept at once.
        linked = {rank: torch.tensor([rank in self.links], dtype=torch.uint8) for rank in range(self.rank)}
        links = {rank: torch.zeros(1, dtype=torch.uint8) for rank in range(self.rank + 1, self.world)}
        _GlooWork(self, self._post_gloo(linked, links, _LINK_KIND), _LINK_KIND).wait(patience)
        try:
            for link in self.links.values():
                link.introduce(self.rank)
            for _ in range(sum(int(there) for there in links.values())):
                link = host_link.accept(accepting)
                try:
                    link.introduce(self.rank)
                    self.links[link.meet(patience)] = link
                except LinkClosed:
                    link.close()
                    raise
            for rank in range(self.rank):
                if rank in self.links:
                    self.links[rank].meet(patience)
        except (LinkClosed, OSError) as error:
            raise PeerLost(f"trainer {self.members[self.rank]}: lost a peer: {error}") from error

    def _start(self, outgoing: dict[int, torch.Tensor], incoming: dict[int, torch.Tensor], kind: int) -> Work:
        links = self.links
        expected = [_Expected(peer, links[peer].expect(kind), tensor) for peer, tensor in incoming.items() if peer in links]
        works = []
        if len(links) < self.world - 1:
            remote_incoming = {peer: tensor for peer, tensor in incoming.items() if peer not in links}
            works = self._post_gloo(
                {peer: tensor for peer, tensor in outgoing.items() if peer not in links}, remote_incoming, kind
            )
        for peer, tensor in outgoing.items():
            if peer in links:
                try:
                    links[peer].send(kind, tensor)
                except LinkClosed as error:
                    raise self.lost(peer, str(error)) from error
        return _GlooWork(self, works, kind, expected)

    def _post_gloo(
        self, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor], kind: int
    ) -> list[tuple[int, dist.Work]]:
        """Start messages over TCP."""
        try:
            # Receives first: data that arrives goes straight into its tensor.
            works = [(peer, self._group.recv([as_bytes(tensor)], peer, kind)) for peer, tensor in incoming.items()]
            self._check_open()
            works += [(peer, self._group.send([as_bytes(tensor)], peer, kind)) for peer, tensor in outgoing.items()]
        except RuntimeError as error:
            raise PeerLost(f"trainer {self.members[self.rank]}: lost a peer: {first_line(error)}") from error
        # Who has everyone's token of a barrier may leave.
        if kind != BARRIER_KIND:
            self._check_open()
        return works

    def _check_open(self) -> None:
        """Raise PeerLost if a connection is closed: gloo may not note that for a message that was posted at the same moment, and wait for ever."""
        if self._closed.poll(0):
            raise PeerLost(f"trainer {self.members[self.rank]}: lost a peer: its connection is closed")

    def check_peers(self) -> None:
        self._check_open()
        for peer, link in self.links.items():
            if link.has_left:
                raise self.lost(peer, "it has left")

    def interrupt(self) -> None:
        # gloo's own `abort` frees neither who waits here nor who waits for this rank, so the connections are cut below it.
        for link in self.links.values():
            link.interrupt()
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.interrupt()
        self._group.abort()
        del self._group
        for link in self.links.values():
            link.close()
        for connection in self._connections:
            connection.close()


class _Expected(NamedTuple):
    """A message that a link is to bring; out: where it goes."""

    peer: int
    number: int
    out: torch.Tensor


class _GlooWork(Work):
    def __init__(
        self, transport: GlooTransport, works: list[tuple[int, dist.Work]], kind: int, expected: Sequence[_Expected] = ()
    ) -> None:
        """works: over TCP, by peer; expected: of `kind`, by links."""
        self._transport, self._works, self._kind, self._expected = transport, works, kind, expected

    def wait(self, timeout: timedelta | None = None) -> None:
        transport = self._transport
        deadline = time.monotonic() + (timeout or transport.timeout).total_seconds()
        for peer, number, out in self._expected:
            try:
                transport.links[peer].receive(self._kind, number, out, deadline)
            except (LinkClosed, TimeoutError) as error:
                raise transport.lost(peer, str(error)) from error
        self._expected = ()
        for peer, work in self._works:
            # Zero would mean gloo's default of no limit.
            left = max(deadline - time.monotonic(), 0.001)
            try:
                work.wait(timedelta(seconds=left))
            except RuntimeError as error:
                raise transport.lost(peer, first_line(error)) from error
        self._works = []


class LocalHub:
    """The term of several trainers that are threads of one process. members: their numbers, by rank.

    messages: by (source rank, destination rank, kind, how many of that kind came before); closed: ranks that have left.
    """

    def __init__(self, members: Sequence[int]) -> None:
        self.members = tuple(members)
        self.changed = threading.Condition()
        self.messages: dict[tuple[int, int, int, int], torch.Tensor] = {}
        self.closed: set[int] = set()

    def transports(self, timeout: timedelta = timedelta(seconds=60)) -> list[LocalTransport]:
        """One transport a rank, in order."""
        return [LocalTransport(self, trainer, timeout) for trainer in self.members]


class LocalTransport(Transport):
    """The in-memory twin of GlooTransport; made by LocalHub.transports."""

    def __init__(self, hub: LocalHub, trainer: int, timeout: timedelta) -> None:
        super().__init__(trainer, hub.members, timeout)
        self.hub = hub
        # (peer, kind) -> how many messages were posted so far: the number that keeps them in order.
        self._sent: Counter[tuple[int, int]] = Counter()
        self._expected: Counter[tuple[int, int]] = Counter()

    def _start(self, outgoing: dict[int, torch.Tensor], incoming: dict[int, torch.Tensor], kind: int) -> Work:
        hub = self.hub
        with hub.changed:
            for peer, tensor in outgoing.items():
                number = self._sent[peer, kind]
                self._sent[peer, kind] += 1
                hub.messages[self.rank, peer, kind, number] = tensor.detach().clone()
            hub.changed.notify_all()
        expected = []
        for peer, tensor in incoming.items():
            expected.append(((peer, self.rank, kind, self._expected[peer, kind]), tensor))
            self._expected[peer, kind] += 1
        return _LocalWork(self, expected)

    def interrupt(self) -> None:
        self.close()

    def close(self) -> None:
        with self.hub.changed:
            self.hub.closed.add(self.rank)
            self.hub.changed.notify_all()


class _LocalWork(Work):
    def __init__(self, transport: LocalTransport, expected: list[tuple[tuple[int, int, int, int], torch.Tensor]]) -> None:
        self._transport = transport
        self._expected = expected

    def wait(self, timeout: timedelta | None = None) -> None:
        deadline = time.monotonic() + (timeout or self._transport.timeout).total_seconds()
        hub = self._transport.hub
        for key, tensor in self._expected:
            peer, rank = key[0], key[1]
            with hub.changed:
                over = {peer, rank}
                hub.changed.wait_for(lambda: key in hub.messages or over & hub.closed, deadline - time.monotonic())  # noqa: B023
                message = None if rank in hub.closed else hub.messages.pop(key, None)
            if message is None:
                reason = (
                    "it has left" if peer in hub.closed else "the term is over" if rank in hub.closed else "no message in time"
                )
                raise self._transport.lost(peer, reason)
            if message.nbytes != tensor.nbytes:
                raise ValueError(f"message from rank {peer} to {rank}: must have {tensor.nbytes} bytes, got {message.nbytes}")
            as_bytes(tensor).copy_(as_bytes(message))
        self._expected = []


def await_keys(store: dist.Store, keys: list[str], patience: timedelta, check: Callable[[], None]) -> bool:
    """Wait until the store has all keys, at most for `patience`: whether it has. check: called meanwhile, raises where nobody is to wait any more."""
    deadline = time.monotonic() + patience.total_seconds()
    while not (there := bool(store.check(keys))) and time.monotonic() < deadline:
        check()
        time.sleep(_PEERS_PAUSE.total_seconds())
    return there


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, uint8 [nbytes]: no back end then needs to know the dtype."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def first_line(error: BaseException) -> str:
    """What a library says, without its advice and the place in its source."""
    line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    line = line.split("] ", 1)[1] if line.startswith("[") and "] " in line else line
    return line.split(". This is typically", 1)[0]
