"""Whether all trainers have the same dense part: by checksums of its parameters, buffers and optimizer state.

Every trainer updates the dense part alike, so it is the same everywhere by definition. If it is not, the trainers' gradients belong to different
models, and what comes of them is none that could be trained again.
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
    """Return the checksum of each parameter and buffer by its name, and of the optimizer's state by "<parameter>/<key>"."""
    named, state = dict(parts.module.named_parameters()), parts.optimizer.state
    sums = {name: checksum(value) for name, value in (*named.items(), *parts.module.named_buffers())}
    for name, parameter in named.items():
        for key, value in state.get(parameter, {}).items():
            sums[f"{name}/{key}"] = _checksum_of(value)
    return sums


def _checksum_of(value: Any) -> str:
    """Of a value of an optimizer's state, which may be a number."""
    return checksum(value) if isinstance(value, Tensor) else repr(value)


def check_agreement(parts: TrainerParts, session: TermSession, step: int) -> None:
    """Raise DenseDiverged, on every trainer alike, if the dense part after training step `step` differs between the trainers of a term.

    Every trainer of the term calls this at the same points of the program. Raises PeerLost.
    """
    transport, exchange = session.transport, session.exchange
    if transport.world == 1:
        return
    text = json.dumps(dense_checksums(parts)).encode()
    # First how long the texts are, and a checksum of each, which is all where they are equal.
    short = torch.tensor([len(text), int(checksum(_as_tensor(text))[:15], 16)], dtype=torch.int64)
    of_all = exchange.gather(short)
    if any(not torch.equal(short, other) for other in of_all):
        padded = text.ljust(max(int(other[0]) for other in of_all))
        texts = [json.loads(other.numpy().tobytes()) for other in exchange.gather(_as_tensor(padded))]
        check_alike(dict(zip(transport.members, texts, strict=True)), step)


def _as_tensor(text: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(text), np.uint8))


def check_alike(sums: Mapping[int, Mapping[str, str]], step: int) -> None:
    """Raise DenseDiverged if trainers have different checksums of the dense part.

    Args:
        sums: by trainer, what `dense_checksums` gave.
        step: the training step after which that was; below 0 before any.
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
                "draw random numbers from torch, numpy.random or random, which --seed seeds, and take nothing from the time, the process or the "
                "machine; "
                "forward must change neither parameters nor buffers"
            )
