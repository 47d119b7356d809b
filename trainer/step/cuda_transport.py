"""Transports between CUDA devices.

They use NCCL, or host memory where trainers share a device, which NCCL refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from foreload.trainer.errors import PeerLost
from foreload.trainer.step.link import as_bytes
from foreload.trainer.step.transport import LinkedTransport, Transport, Work, await_keys, peers_lost


class NcclTransport(Transport):
    """A transport between CUDA devices that uses NCCL.

    All messages of a post are one batch, and NCCL matches them by their order. A message's kind
    only decides under which key `bytes_sent` counts the message.
    """

    def __init__(
        self, store: dist.Store, term: int, trainer: int, members: Sequence[int], timeout: timedelta, device: torch.device
    ) -> None:
        """Form the group of a term.

        Args:
            store: the run's rendezvous store.
            term: the number of the term, under which the group meets in the store.
            trainer: the number of this trainer.
            members: the numbers of all trainers, by rank.
            timeout: how long a peer may be silent before it counts as lost.
            device: the CUDA device of this trainer's tensors.

        Raises:
            PeerLost: a peer did not come in time.
        """
        super().__init__(trainer, members, timeout)
        self._device = device
        # Builds of torch without CUDA lack this class.
        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = timeout
        with peers_lost(f"trainer {trainer}: cannot form the group of term {term} with {self.world} trainers"):
            self._group = nccl(dist.PrefixStore(f"term/{term}/nccl", store), self.rank, self.world, options)
            # NCCL makes the communicator in the first collective, in which every rank must take
            # part.
            self._group.allreduce([torch.zeros(1, device=device)]).wait()

    @property
    def device(self) -> torch.device:
        return self._device

    def _start(self, outgoing: dict[int, torch.Tensor], incoming: dict[int, torch.Tensor], kind: int) -> Work:
        if not outgoing and not incoming:
            return _NcclWork(self, None)
        with self.lost_if_nccl_fails():
            self._group._start_coalescing()
            # NCCL matches messages by their order, so both sides go through their peers in
            # ascending order. Within a pair, each direction has one message.
            for peer in sorted({*outgoing, *incoming}):
                if peer in outgoing:
                    self._group.send([as_bytes(outgoing[peer])], peer, 0)
                if peer in incoming:
                    self._group.recv([as_bytes(incoming[peer])], peer, 0)
            return _NcclWork(self, self._group._end_coalescing())

    def lost_if_nccl_fails(self) -> AbstractContextManager[None]:
        """Return a context in which errors of NCCL are raised as PeerLost.

        NCCL does not report which peer was lost.
        """
        return peers_lost(f"trainer {self.members[self.rank]}: lost a peer")

    def interrupt(self) -> None:
        # This releases the threads that wait here. The connections it closes release the peers that
        # wait for this rank.
        self._group.abort()

    def close(self) -> None:
        self._group.abort()
        del self._group


class _NcclWork(Work):
    def __init__(self, transport: NcclTransport, work: dist.Work | None) -> None:
        self._transport = transport
        self._work = work

    def wait(self, timeout: timedelta | None = None) -> None:
        if self._work is not None:
            with self._transport.lost_if_nccl_fails():
                self._work.wait()


class StagedTransport(LinkedTransport):
    """A transport that takes tensors on `device` through host memory.

    A post waits until the outgoing tensors are in host memory. Incoming tensors are on the device
    once their `Work` has been waited for.
    """

    def __init__(self, device: torch.device, *further: Any) -> None:
        """Form the group of a term.

        Args:
            device: the device of the tensors in messages.
            further: the arguments of LinkedTransport.
        """
        self._device = device
        super().__init__(*further)

    @property
    def device(self) -> torch.device:
        return self._device

    def _start(self, outgoing: dict[int, Tensor], incoming: dict[int, Tensor], kind: int) -> Work:
        sent = {peer: as_bytes(tensor).cpu() for peer, tensor in outgoing.items()}
        received = {
            peer: torch.empty(tensor.nbytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
            for peer, tensor in incoming.items()
        }
        return _StagedWork(super()._start(sent, received, kind), [(incoming[peer], received[peer]) for peer in incoming])


class _StagedWork(Work):
    def __init__(self, work: Work, received: list[tuple[Tensor, Tensor]]) -> None:
        """Wrap the work of the messages in host memory.

        Args:
            work: the messages under way in host memory.
            received: for each incoming message, the tensor on the device and its buffer in host
                memory.
        """
        self._work, self._received = work, received

    def wait(self, timeout: timedelta | None = None) -> None:
        self._work.wait(timeout)
        for target, message in self._received:
            as_bytes(target).copy_(message)
        self._received = []


def share_devices(
    store: dist.Store,
    term: int,
    trainer: int,
    members: Sequence[int],
    device: torch.device,
    patience: timedelta,
    check: Callable[[], None],
) -> bool:
    """Return whether two trainers of a term use the same CUDA device.

    Every trainer of the term calls this. Each publishes its device in the store and waits for those
    of the others.

    Args:
        store: the run's rendezvous store.
        device: the CUDA device of this trainer.
        patience: how long to wait for the others.
        check: called repeatedly while this trainer waits.

    Raises:
        PeerLost: a trainer did not publish its device in time.
    """
    group, keys = dist.PrefixStore(f"term/{term}/devices", store), [str(member) for member in members]
    with peers_lost(f"trainer {trainer}: cannot form the group of term {term}"):
        group.set(str(trainer), str(torch.cuda.get_device_properties(device).uuid))
        if not await_keys(group, keys, patience, check):
            raise PeerLost(f"trainer {trainer}: cannot form the group of term {term}: not all of its {len(keys)} trainers joined")
        return len({group.get(key) for key in keys}) < len(keys)
