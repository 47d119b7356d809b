"""A link between two trainers: messages of a kind, in the order in which they were sent."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor


class LinkClosed(Exception):
    """The peer has left, or the link was interrupted."""


class Link(ABC):
    """One trainer's end, used by one thread, but for `interrupt`. Both ends know the sizes of messages; tensors are contiguous and on the CPU."""

    @abstractmethod
    def send(self, kind: int, tensor: Tensor) -> None:
        """Send the bytes of a tensor, which must stay as it is until `finish_sending`. Does not wait for the other end. Raises LinkClosed."""

    @abstractmethod
    def finish_sending(self, deadline: float) -> None:
        """Return when nothing that was sent needs its tensor any more. deadline: by time.monotonic. Raises LinkClosed, TimeoutError."""

    @abstractmethod
    def expect(self, kind: int, out: Tensor) -> int:
        """Ask for the next message of a kind, to be put into `out`: its number, for `receive`."""

    @abstractmethod
    def receive(self, kind: int, number: int, deadline: float) -> None:
        """Return when a message that was asked for is where it goes. deadline: by time.monotonic.

        Raises LinkClosed, TimeoutError; ValueError, or LinkClosed, for a message of another size.
        """

    @property
    @abstractmethod
    def has_left(self) -> bool:
        """Whether the other end has, whatever it sent before."""

    @abstractmethod
    def interrupt(self) -> None:
        """From another thread: whoever waits at either end sees LinkClosed, and whoever does so later."""

    @abstractmethod
    def close(self) -> None:
        """Leave; the other end sees LinkClosed when it has what was sent before."""


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, uint8 [nbytes]: no back end then needs to know the dtype."""
    return tensor.detach().reshape(-1).view(torch.uint8)
