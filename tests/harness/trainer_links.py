"""What tests of links between trainers have in common."""

from __future__ import annotations

import time
from datetime import timedelta

import torch

from foreload.trainer.step.link import Link

PATIENCE = timedelta(seconds=20)
MIB = 1 << 20


def deadline() -> float:
    """Until when a message is waited for."""
    return time.monotonic() + PATIENCE.total_seconds()


def take(link: Link, kind: int, out: torch.Tensor) -> None:
    """Receive the next message of a kind."""
    link.receive(kind, link.expect(kind, out), deadline())
