"""Check that all trainers of a term have the same dense part.

The trainers compare checksums of its parameters, buffers and optimizer state. Every trainer updates
the dense part alike, so it is the same everywhere by definition. If it differs, the trainers'
gradients belong to different models, and nothing can reproduce the model that they result in.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foreload.trainer.errors import DenseDiverged, after_step
from foreload.trainer.models.diagnosis import checksum
from foreload.trainer.step.term_session import TermSession, TrainerParts


def dense_checksums(parts: TrainerParts) -> dict[str, str]:
    """Return the checksums of the dense part.

    The keys are the names of parameters and buffers and, for the optimizer's state,
    "<parameter>/<key>".
    """
    named, state = dict(parts.module.named_parameters()), parts.optimizer.state
    sums = {name: checksum(value) for name, value in (*named.items(), *parts.module.named_buffers())}
    for name, parameter in named.items():
        for key, value in state.get(parameter, {}).items():
            sums[f"{name}/{key}"] = _checksum_of(value)
    return sums


def _checksum_of(value: Any) -> str:
    """Return the checksum of a value of an optimizer's state, which may be a number."""
    return checksum(value) if isinstance(value, Tensor) else repr(value)


def check_agreement(parts: TrainerParts, session: TermSession, step: int) -> None:
    """Raise an error on every trainer if the dense part differs between the trainers of a term.

    Every trainer of the term calls this at the same points of the program.

    Args:
        step: the training step after which the dense parts are compared.

    Raises:
        DenseDiverged: the dense parts differ. Every trainer raises this.
        PeerLost: another trainer was lost.
    """
    transport, exchange = session.transport, session.exchange
    if transport.world == 1:
        return
    text = json.dumps(dense_checksums(parts)).encode()
    # Send the length and a checksum of each text first. If all are equal, nothing else is sent.
    short = torch.tensor([len(text), int(checksum(_as_tensor(text))[:15], 16)], dtype=torch.int64)
    of_all = exchange.gather(short)
    if any(not torch.equal(short, other) for other in of_all):
        # Messages must have the same size everywhere, so shorter texts are padded with spaces,
        # which JSON ignores.
        padded = text.ljust(max(int(other[0]) for other in of_all))
        texts = [json.loads(other.numpy().tobytes()) for other in exchange.gather(_as_tensor(padded))]
        check_alike(dict(zip(transport.members, texts, strict=True)), step)


def _as_tensor(text: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(text), np.uint8))


def check_alike(sums: Mapping[int, Mapping[str, str]], step: int) -> None:
    """Raise DenseDiverged if trainers have different checksums of the dense part.

    Args:
        sums: by trainer, the result of `dense_checksums`.
        step: the training step after which the checksums were made; negative before any step.
    """
    for name in dict.fromkeys(name for of_trainer in sums.values() for name in of_trainer):
        holders: dict[str | None, list[int]] = defaultdict(list)
        for trainer in sorted(sums):
            holders[sums[trainer].get(name)].append(trainer)
        if len(holders) > 1:
            held = ", and another one ".join(
                f"on trainer{'s' * (len(group) > 1)} {', '.join(map(str, group))}" for group in holders.values()
            )
            raise DenseDiverged(
                f"dense part: must be the same on all trainers; {after_step(step)}, {name} has one value {held}; the model's constructor must "
                "draw random numbers from torch, numpy.random or random, which --seed seeds, and use neither the time, the process nor the "
                "machine; "
                "forward must change neither parameters nor buffers"
            )
