"""The interface between trainers: messages of known size between the ranks of one term.

There is an implementation within one process, and one over links. `cuda_transport` has those
between CUDA devices. A rank is only an address within a term. What a trainer does follows from the
lane map, never from its rank.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from foreload.base.errors import SettingError
from foreload.base.job_token import HANDSHAKE, TokenServer, connected, new_token
from foreload.trainer.errors import PeerLost
from foreload.trainer.step import host_link
from foreload.trainer.step.host_link import HostLink
from foreload.trainer.step.link import Link, LinkClosed, as_bytes
from foreload.trainer.step.tcp_link import TcpLink

BARRIER_KIND = (1 << 31) - 1
_PURPOSE = "trainer link"
_PEERS_PAUSE = timedelta(milliseconds=2)  # between two checks whether all peers have come
# The time for one attempt to connect to a peer. After each attempt the caller checks whether the
# connection is still wanted.
_ATTEMPT = timedelta(seconds=2)


class Work(ABC):
    """Messages under way. Their tensors belong to the transport until `wait` returns."""

    @abstractmethod
    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait until every message has been sent or received.

        On CUDA the current stream waits, not the caller.

        Args:
            timeout: how long to wait. If None, the transport's own timeout.

        Raises:
            PeerLost: a peer has left, or was silent for longer than the timeout. The term is then
                over.
        """


class Transport(ABC):
    """Point-to-point messages among the trainers of one term.

    A peer, below, is the rank of another trainer.

    Attributes:
        members: the numbers of all trainers, by rank. Errors name trainers by number.
        rank: this trainer's rank.
        world: the number of trainers.
        timeout: how long a peer may be silent before it counts as lost.
        bytes_sent: payload bytes sent, by kind of message.
        closed: the number of a trainer whose connection was found closed, although this trainer had
            not interrupted its own. None if there is none.
    """

    closed: int | None = None

    def __init__(self, trainer: int, members: Sequence[int], timeout: timedelta) -> None:
        """Determine this trainer's rank.

        Args:
            trainer: the number of this trainer.
            members: the numbers of all trainers, by rank.
            timeout: how long a peer may be silent before it counts as lost.

        Raises:
            ValueError: `trainer` is not in `members`.
        """
        if trainer not in members:
            raise ValueError(f"trainer: must be one of {list(members)}, got {trainer}")
        self.members = tuple(members)
        self.rank = self.members.index(trainer)
        self.world = len(members)
        self.timeout = timeout
        self.bytes_sent: Counter[int] = Counter()

    def post(self, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor], kind: int) -> Work:
        """Start sending and receiving one contiguous tensor per peer, and return at once.

        Messages of one kind between two ranks arrive in the order in which they were posted. All
        ranks post kinds in the same order. Both sides know the sizes. A tensor without elements is
        no message, on either side.

        Args:
            sends: by peer, the tensor to send.
            receives: by peer, the tensor that receives a message.
            kind: identifies the messages.

        Raises:
            PeerLost: a peer has left.
            ValueError: a tensor is not contiguous, or a peer is not another rank of the term.
        """
        outgoing = {peer: self._checked(peer, tensor) for peer, tensor in sorted(sends.items()) if tensor.numel()}
        incoming = {peer: self._checked(peer, tensor) for peer, tensor in sorted(receives.items()) if tensor.numel()}
        self.bytes_sent[kind] += sum(tensor.nbytes for tensor in outgoing.values())
        return self._start(outgoing, incoming, kind)

    def barrier(self) -> None:
        """Wait until every rank has called this. Raises PeerLost."""
        peers = [peer for peer in range(self.world) if peer != self.rank]
        token = torch.zeros(1, dtype=torch.uint8, device=self.device)
        received = torch.zeros(self.world, dtype=torch.uint8, device=self.device)
        self.post(dict.fromkeys(peers, token), {peer: received[peer : peer + 1] for peer in peers}, BARRIER_KIND).wait()
        if self.device.type == "cuda":
            # On CUDA `wait` holds only the stream.
            torch.cuda.synchronize(self.device)

    def lost(self, peer: int, why: str) -> PeerLost:
        """Return the error that reports the loss of the trainer with rank `peer`."""
        return PeerLost(f"trainer {self.members[self.rank]}: lost trainer {self.members[peer]}: {why}")

    @property
    def device(self) -> torch.device:
        """The device of the tensors in messages."""
        return torch.device("cpu")

    @abstractmethod
    def _start(self, outgoing: dict[int, torch.Tensor], incoming: dict[int, torch.Tensor], kind: int) -> Work:
        """Start the messages that `post` has checked. Peers are in ascending order."""

    @abstractmethod
    def interrupt(self) -> None:
        """End the term from another thread.

        Threads that wait for a message here, or for one from here, get PeerLost, and so do threads
        that wait later.
        """

    def check_peers(self) -> None:
        """Raise PeerLost if a peer has left.

        This is for a time when no peer may leave and this trainer waits for no message.
        """
        return

    @abstractmethod
    def close(self) -> None:
        """Leave the term. Peers that still wait for this rank get PeerLost."""

    def _checked(self, peer: int, tensor: torch.Tensor) -> torch.Tensor:
        if not 0 <= peer < self.world or peer == self.rank:
            raise ValueError(f"peer: must be another rank of 0 .. {self.world - 1}, got {peer} on rank {self.rank}")
        if not tensor.is_contiguous():
            raise ValueError(f"message for rank {peer}: must be contiguous, got strides {tensor.stride()}")
        return tensor


class LinkedTransport(Transport):
    """A transport for tensors on the CPU.

    It uses shared memory with trainers of the same host and address (`host_link`), and TCP with the
    others (`tcp_link`). The trainers find each other in the rendezvous store, under a prefix of the
    term.
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
        token: str | None = None,
    ) -> None:
        """Form the group of a term.

        Args:
            store: the run's rendezvous store.
            term: the number of the term.
            trainer: the number of this trainer.
            members: the numbers of all trainers, by rank.
            timeout: how long a peer may be silent before it counts as lost.
            address: the address of this trainer's own network interface.
            forming: how long peers may take to come. If None, this is `timeout`.
            check: called repeatedly while this trainer waits for peers. It raises an error if the
                group is no longer wanted.
            token: the job's token, which peers on other hosts show each other. If None, the term
                gets a token of its own, which is in the store.

        Raises:
            PeerLost: a peer did not come in time.
            SettingError: the address is not one of this machine.
        """
        super().__init__(trainer, members, timeout)
        self.links: dict[int, Link] = {}
        self._met: queue.SimpleQueue[tuple[int, TcpLink]] = queue.SimpleQueue()
        self._server: TokenServer | None = None
        self._interrupted = False
        deadline = time.monotonic() + (forming or timeout).total_seconds()
        group = dist.PrefixStore(f"term/{term}/links", store)
        name, accepting = host_link.listen()
        try:
            with accepting, peers_lost(f"trainer {trainer}: cannot form the group of term {term} with {self.world} trainers"):
                # The first trainer that comes here sets the term's token for all.
                token = token or group.compare_set("token", "", new_token()).decode()
                self._server = server = self._listening(address, token)
                group.set(str(self.rank), f"{address} {server.port} {name}")
                if not await_keys(group, [str(rank) for rank in range(self.world)], forming or timeout, check):
                    raise PeerLost(
                        f"trainer {trainer}: cannot form the group of term {term}: not all of its {self.world} trainers joined"
                    )
                # Each trainer connects to the lower ranks and accepts the higher ones, so each pair
                # has one link.
                for rank in range(self.rank):
                    theirs, port, their_name = group.get(str(rank)).decode().split(" ")
                    own_host = host_link.connect(their_name) if theirs == address else None
                    self.links[rank] = own_host or self._connected((theirs, int(port)), token, deadline, check)
                self._accept(accepting, deadline, check)
        # Do not leave links open that have been made already.
        except BaseException:
            self.close()
            raise

    def _listening(self, address: str, token: str) -> TokenServer:
        try:
            return TokenServer(address, 0, token, _PURPOSE, self._serve)
        except OSError as error:
            trainer = self.members[self.rank]
            raise SettingError(
                f"trainer {trainer}: --address: must be an address of the machine that it is on; got {address} ({error})"
            ) from error

    def _serve(self, connection: socket.socket, _: str) -> None:
        """Serve the connection of a peer on another host, until the link is closed.

        This runs in a thread of its own.
        """
        link = TcpLink(connection)
        try:
            link.introduce(self.rank)
            rank = link.meet(HANDSHAKE)
        except LinkClosed:
            link.close()
            return
        self._met.put((rank, link))
        link.carry()

    def _connected(self, place: tuple[str, int], token: str, deadline: float, check: Callable[[], None]) -> TcpLink:
        """Return a link to a peer of another host, which listens at this address and port.

        Raises PeerLost.
        """
        while True:
            try:
                connection = connected(*place, token, _PURPOSE, min(_left(deadline), _ATTEMPT).total_seconds())
                break
            except OSError as error:
                # A peer with many simultaneous connections closes some of them, so other errors are
                # retried.
                if isinstance(error, ConnectionRefusedError) or time.monotonic() > deadline:
                    raise PeerLost(f"trainer {self.members[self.rank]}: lost a peer at {place[0]}: {error}") from error
            check()
            time.sleep(_PEERS_PAUSE.total_seconds())
        link = TcpLink(connection)
        try:
            link.introduce(self.rank)
            link.meet(_left(deadline))
        except LinkClosed as error:
            link.close()
            raise PeerLost(f"trainer {self.members[self.rank]}: lost a peer at {place[0]}: {error}") from error
        # The thread sends and receives while the trainer computes.
        threading.Thread(target=link.carry, name=_PURPOSE, daemon=True).start()
        return link

    def _accept(self, accepting: socket.socket, deadline: float, check: Callable[[], None]) -> None:
        """Introduce this rank to peers of this host, and wait until all higher ranks have come.

        Raises PeerLost.
        """
        accepting.settimeout(_PEERS_PAUSE.total_seconds())
        try:
            of_host = [link for link in self.links.values() if isinstance(link, HostLink)]
            for link in of_host:
                link.introduce(self.rank)
            while len(self.links) < self.world - 1:
                check()
                if time.monotonic() > deadline:
                    raise PeerLost(f"trainer {self.members[self.rank]}: lost a peer: it has not connected")
                with contextlib.suppress(TimeoutError):
                    self._meet(host_link.accept(accepting), deadline)
                with contextlib.suppress(queue.Empty):
                    rank, met = self._met.get_nowait()
                    if self.rank < rank < self.world and rank not in self.links:
                        self.links[rank] = met
                    else:
                        # This rank is not expected, or has a link already.
                        met.close()
            for link in of_host:
                link.meet(_left(deadline))
        except (LinkClosed, OSError) as error:
            raise PeerLost(f"trainer {self.members[self.rank]}: lost a peer: {error}") from error

    def _meet(self, link: HostLink, deadline: float) -> None:
        """Add the link to a peer of this host that has connected. Raises LinkClosed."""
        try:
            link.introduce(self.rank)
            self.links[link.meet(_left(deadline))] = link
        except LinkClosed:
            link.close()
            raise

    def _start(self, outgoing: dict[int, torch.Tensor], incoming: dict[int, torch.Tensor], kind: int) -> Work:
        # Request the incoming messages first, so that a link can receive them while this thread
        # sends.
        expected = [(peer, self.links[peer].expect(kind, tensor)) for peer, tensor in incoming.items()]
        for peer, tensor in outgoing.items():
            try:
                self.links[peer].send(kind, tensor)
            except LinkClosed as error:
                raise self.left(peer, error) from error
        return _LinkedWork(self, kind, expected, list(outgoing))

    def check_peers(self) -> None:
        for peer, link in self.links.items():
            if link.has_left:
                raise self.left(peer, LinkClosed("it has left"))

    def left(self, peer: int, error: LinkClosed | TimeoutError) -> PeerLost:
        """Return the error that reports the loss of the trainer with rank `peer`, by that of its link."""
        if isinstance(error, LinkClosed) and not self._interrupted:
            self.closed = self.members[peer]
        return self.lost(peer, str(error))

    def interrupt(self) -> None:
        self._interrupted = True
        for link in list(self.links.values()):
            link.interrupt()

    def close(self) -> None:
        for link in self.links.values():
            link.close()
        if self._server is not None:
            self._server.close()
        with contextlib.suppress(queue.Empty):
            while True:
                # These links were made, but never taken in.
                self._met.get_nowait()[1].close()


class _LinkedWork(Work):
    def __init__(self, transport: LinkedTransport, kind: int, expected: list[tuple[int, int]], sent_to: list[int]) -> None:
        """Take the messages of one post.

        Args:
            expected: (peer, number) of each incoming message.
            sent_to: the peers that get a message.
        """
        self._transport, self._kind, self._expected, self._sent_to = transport, kind, expected, sent_to

    def wait(self, timeout: timedelta | None = None) -> None:
        transport = self._transport
        deadline = time.monotonic() + (timeout or transport.timeout).total_seconds()
        try:
            for peer, number in self._expected:
                transport.links[peer].receive(self._kind, number, deadline)
            for peer in self._sent_to:
                transport.links[peer].finish_sending(deadline)
        except (LinkClosed, TimeoutError) as error:
            raise transport.left(peer, error) from error
        self._expected, self._sent_to = [], []


class LocalHub:
    """The term of several trainers that are threads of one process.

    Attributes:
        members: the trainers' numbers, by rank.
        messages: by (source rank, destination rank, kind, number of earlier messages of that kind).
        closed: the ranks that have left.
    """

    def __init__(self, members: Sequence[int]) -> None:
        self.members = tuple(members)
        self.changed = threading.Condition()
        self.messages: dict[tuple[int, int, int, int], torch.Tensor] = {}
        self.closed: set[int] = set()

    def transports(self, timeout: timedelta = timedelta(seconds=60)) -> list[LocalTransport]:
        """Return one transport for each rank, in order."""
        return [LocalTransport(self, trainer, timeout) for trainer in self.members]


class LocalTransport(Transport):
    """The in-memory twin of LinkedTransport. LocalHub.transports makes it."""

    def __init__(self, hub: LocalHub, trainer: int, timeout: timedelta) -> None:
        super().__init__(trainer, hub.members, timeout)
        self.hub = hub
        # By (peer, kind), how many messages were posted so far. This number keeps them in order.
        self._sent: Counter[tuple[int, int]] = Counter()
        self._expected: Counter[tuple[int, int]] = Counter()

    def _start(self, outgoing: dict[int, torch.Tensor], incoming: dict[int, torch.Tensor], kind: int) -> Work:
        hub = self.hub
        with hub.changed:
            for peer, tensor in outgoing.items():
                number = self._sent[peer, kind]
                self._sent[peer, kind] += 1
                # Copy the tensor, since the sender's `wait` does not wait for the receiver.
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
                # A message that was sent counts even if its sender has left since.
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


def _left(deadline: float) -> timedelta:
    """Return the time until a deadline, by time.monotonic. It is always positive."""
    return timedelta(seconds=max(deadline - time.monotonic(), 0.001))


def await_keys(store: dist.Store, keys: list[str], patience: timedelta, check: Callable[[], None]) -> bool:
    """Wait until the store has all keys, and return whether it has.

    Args:
        patience: how long to wait at most.
        check: called repeatedly while this trainer waits. It raises an error if the wait is no
            longer wanted.
    """
    deadline = time.monotonic() + patience.total_seconds()
    while not (there := bool(store.check(keys))) and time.monotonic() < deadline:
        check()
        time.sleep(_PEERS_PAUSE.total_seconds())
    return there


@contextlib.contextmanager
def peers_lost(what: str) -> Iterator[None]:
    """Return a context in which errors of torch.distributed are raised as PeerLost.

    Errors of the device (no memory, a failed kernel) stay as they are.

    Args:
        what: the first part of the error's text.
    """
    try:
        yield
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except RuntimeError as error:
        raise PeerLost(f"{what}: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    """Return a library's message without its advice and the place in its source."""
    line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    line = line.split("] ", 1)[1] if line.startswith("[") and "] " in line else line
    return line.split(". This is typically", 1)[0]
