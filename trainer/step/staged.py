"""The transport between trainers that share a CUDA device, which NCCL refuses: links, with every message by way of host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from foreload.trainer.errors import PeerLost
from foreload.trainer.step.link import as_bytes
from foreload.trainer.step.transport import LinkedTransport, Work, await_keys, peers_lost


class StagedTransport(LinkedTransport):
    """For tensors on `device`. A post waits until what is sent is in host memory; what is received is on the device once it was waited for."""

    def __init__(self, device: torch.device, *further: Any) -> None:
        """further: as LinkedTransport takes it."""
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
        """received: for each message, where it goes, and where it comes."""
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
    """Whether two trainers of a term have the same CUDA device, which every trainer says here. check: called while they are waited for.

    Raises PeerLost if one does not say it in time.
    """
    group, keys = dist.PrefixStore(f"term/{term}/devices", store), [str(member) for member in members]
    with peers_lost(f"trainer {trainer}: cannot form the group of term {term}"):
        group.set(str(trainer), str(torch.cuda.get_device_properties(device).uuid))
        if not await_keys(group, keys, patience, check):
            raise PeerLost(f"trainer {trainer}: cannot form the group of term {term}: not all of its {len(keys)} trainers came")
        return len({group.get(key) for key in keys}) < len(keys)
