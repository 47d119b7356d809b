"""A link between two trainers, which carries messages of several kinds.

Messages of one kind arrive in the order in which they were sent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor


class LinkClosed(Exception):
    """The peer has left, or the link was interrupted."""


class Link(ABC):
    """One trainer's end of a link.

    One thread uses it, except for `interrupt`. Both ends know the sizes of all messages. Tensors
    are contiguous and on the CPU.
    """

    @abstractmethod
    def send(self, kind: int, tensor: Tensor) -> None:
        """Send the bytes of a tensor, without waiting for the other end.

        The tensor must not change until `finish_sending` returns. Raises LinkClosed.
        """

    @abstractmethod
    def finish_sending(self, deadline: float) -> None:
        """Wait until no message that was sent needs its tensor.

        Args:
            deadline: the latest time to return, by time.monotonic.

        Raises:
            LinkClosed: the peer has left, or the link was interrupted.
            TimeoutError: the deadline has passed.
        """

    @abstractmethod
    def expect(self, kind: int, out: Tensor) -> int:
        """Request the next message of a kind and return its number, for `receive`.

        Args:
            out: the tensor that receives the message.
        """

    @abstractmethod
    def receive(self, kind: int, number: int, deadline: float) -> None:
        """Wait until a message that `expect` requested is in its tensor.

        Args:
            number: the number that `expect` returned.
            deadline: the latest time to return, by time.monotonic.

        Raises:
            LinkClosed: the peer has left, or the link was interrupted. Some links also raise this
                for a message of another size than expected.
            TimeoutError: the deadline has passed.
            ValueError: the message has another size than expected.
        """

    @property
    @abstractmethod
    def has_left(self) -> bool:
        """Whether the other end has left, regardless of the messages it sent before."""

    @abstractmethod
    def interrupt(self) -> None:
        """Interrupt the link from another thread.

        Threads that wait at either end, now or later, get LinkClosed.
        """

    @abstractmethod
    def close(self) -> None:
        """Leave. The other end gets LinkClosed once it has received all earlier messages."""


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor, uint8 [nbytes], as a view.

    Back ends then do not need to support the dtype.
    """
    return tensor.detach().reshape(-1).view(torch.uint8)
