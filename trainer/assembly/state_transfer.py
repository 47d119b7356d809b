"""What a trainer that joins gets from one that trains, beside copies of lanes: the dense part, and what was counted so far."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from foreload.base.codec import of_json, to_stored
from foreload.trainer.assembly.dense_file import dense_bytes, load_dense_bytes
from foreload.trainer.compute.reports import Totals
from foreload.trainer.job.early_stopping import Watched
from foreload.trainer.step.exchange import STATE
from foreload.trainer.step.parts import TrainerParts
from foreload.trainer.step.transport import Transport


@dataclass(frozen=True, slots=True)
class _Counted:
    """What was counted so far."""

    totals: Totals
    watched: Watched | None


def send_state(
    transport: Transport, ranks: Sequence[int], parts: TrainerParts, step: int, totals: Totals, watched: Watched | None = None
) -> None:
    """Send trainers of the term the dense part as it is after `step`, totals, and what evaluations have been. Raises PeerLost."""
    head, data = json.dumps(to_stored(_Counted(totals, watched))).encode(), dense_bytes(parts.module, parts.optimizer, step)
    sizes = torch.tensor([len(head), len(data)], dtype=torch.int64, device=transport.device)
    message = torch.frombuffer(bytearray(head + data), dtype=torch.uint8).to(transport.device)
    transport.post(dict.fromkeys(ranks, sizes), {}, STATE).wait()
    transport.post(dict.fromkeys(ranks, message), {}, STATE).wait()


def receive_state(transport: Transport, rank: int, parts: TrainerParts) -> tuple[Totals, Watched | None]:
    """The other side of `send_state`; puts the dense part in its place. Raises PeerLost, after which nothing has changed."""
    sizes = torch.zeros(2, dtype=torch.int64, device=transport.device)
    transport.post({}, {rank: sizes}, STATE).wait()
    head, data = sizes.tolist()
    message = torch.empty(head + data, dtype=torch.uint8, device=transport.device)
    transport.post({}, {rank: message}, STATE).wait()
    received = message.cpu().numpy().tobytes()
    load_dense_bytes(received[head:], parts.module, parts.optimizer)
    counted = of_json(json.loads(received[:head]), _Counted)
    return counted.totals, counted.watched
