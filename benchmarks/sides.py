"""The sides that bench_step.py compares: each a process of its own that trains turns of steps when told to.

    python benchmarks/sides.py '{"side": ..., ...}'

A line "STEPS DISCARDED" on stdin makes it train STEPS steps and answer with a line of JSON: the seconds of each step after the first
DISCARDED ones, and the loss of the last. Between turns it waits, so the first steps of a turn are left out: for Foreload they train on rows that its
traffic had fetched during another side's turn.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from trainer import numerics

# Before torch is imported, as in every trainer.
numerics.set_environment()

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from cache.initial import initial_weights  # noqa: E402
from cache.placement import Placement  # noqa: E402
from cache.store import Store  # noqa: E402
from pipelines.schedule import Schedule  # noqa: E402
from pipelines.schedule_format import LaneEvent  # noqa: E402
from trainer.assembly import DensePart, Start, assemble  # noqa: E402
from trainer.job import TrainJob  # noqa: E402
from trainer.step import StepReport, Trainer  # noqa: E402
from trainer.transport import LocalHub  # noqa: E402
from workload import BATCH, DIM, LR, ROOT, SEED, SHARDS, events_of, job  # noqa: E402

EPSILON = 1e-8


@dataclass(frozen=True, slots=True)
class Order:
    """What a side is told when it starts. urls: of its store, where it has one; ids: of Workload.ids; slots: of an LRU cache."""

    side: str
    schedule: str
    model: str
    ids: str = ""
    first: str = ""
    urls: tuple[str, ...] = ()
    slots: int = 0


class Turns:
    """The side's end of the conversation: `begin` waits for the next turn, `step` counts."""

    def __init__(self) -> None:
        self._left = self._discarded = 0
        self._seconds: list[float] = []
        self._further: dict[str, list[float]] = {}
        self._last = 0.0

    def begin(self) -> None:
        """Wait for a turn if none is under way; the process ends with its stdin."""
        if self._left:
            return
        line = sys.stdin.readline()
        if not line:
            sys.stdout.flush()
            os._exit(0)
        self._left, self._discarded = (int(word) for word in line.split())
        self._seconds, self._further = [], {}
        self._last = time.perf_counter()

    def step(self, loss: float, further: Mapping[str, float] | None = None) -> None:
        """A step is done; at the end of a turn the answer goes out."""
        now = time.perf_counter()
        if self._discarded:
            self._discarded -= 1
        else:
            self._seconds.append(now - self._last)
            for name, value in (further or {}).items():
                self._further.setdefault(name, []).append(value)
        self._left -= 1
        if not self._left:
            print(json.dumps({"seconds": self._seconds, "loss": loss, "further": self._further}), flush=True)
            self.begin()
        self._last = time.perf_counter()


class Side:
    """The controller's end: a side's process."""

    def __init__(self, order: Order) -> None:
        self.order = order
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), json.dumps(asdict(order))],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()

    def turn(self, steps: int, discarded: int) -> dict[str, Any]:
        """Train `discarded` steps, then `steps` more: the answer about these."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{discarded + steps} {discarded}\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"side {self.order.side}: ended with status {self._process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        """End the process and wait until its memory is free."""
        self._process.kill()
        self._process.wait()


def _dense_step(dense: DensePart, moves: LaneEvent, block: Tensor) -> tuple[float, Tensor]:
    """Forward and backward of a slice on its embeddings [b, F, D], and the dense optimizer's step: loss and the block's gradient."""
    names = [feature for feature, _, _ in dense.module.spec.features]  # type: ignore[union-attr]
    from trainer.models.spec import Embeddings

    embeddings = Embeddings.split(block, names, [(("weights", DIM),)] * len(names))
    values, labels = (torch.from_numpy(view.copy()) for view in (moves.dense, moves.labels))
    logits = dense.module(values, embeddings)
    loss = nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum") / BATCH
    parameters = list(dense.module.parameters())
    found = torch.autograd.grad(loss, [block, *parameters])
    for parameter, gradient in zip(parameters, found[1:], strict=True):
        parameter.grad = gradient
    dense.optimizer.step()
    return float(loss.detach()), found[0]


def run_foreload(order: Order, schedule: Schedule, dense: DensePart, turns: Turns) -> None:
    """This project's trainer, assembled as the worker does it."""
    (transport,) = LocalHub(1).transports()
    with Store(order.urls, timedelta(seconds=60)) as store:
        start = Start.anew(schedule)
        training = TrainJob.of(job(Path(order.schedule), order.model))
        part, events = assemble(training, schedule, dense, start, [0], transport, store, Placement.spread(SHARDS))

        def on_step(report: StepReport) -> None:
            names = ("seconds_compute", "seconds_exchange", "seconds_waiting", "rows_arrived", "rows_fetched", "rows_used")
            turns.step(report.loss, {name: getattr(report, name) for name in names})

        turns.begin()
        Trainer(part).run(events, lambda step: False, on_step, lambda report: None)


def run_floor(order: Order, schedule: Schedule, dense: DensePart, turns: Turns) -> None:
    """The dense part alone, on embeddings that are always there."""
    block = torch.empty(BATCH, len(schedule.header.features.features), DIM).uniform_(-0.01, 0.01).requires_grad_()
    turns.begin()
    for event in events_of(schedule):
        loss, _ = _dense_step(dense, schedule.lane(event, 0), block)
        turns.step(loss)


def _whole_table(schedule: Schedule) -> list[Tensor]:
    """The initial weights of every table, in one block of memory: views [rows, D]."""
    sizes = [table.rows or 0 for table in schedule.header.features.tables]
    tables = list(torch.empty(sum(sizes), DIM).split(sizes))
    for number, table in enumerate(tables):
        ids = np.arange(len(table))
        initial_weights(SEED, number, ids, np.float32(1 / np.sqrt(len(table))), table.numpy(), DIM)
    return tables


def run_one_table(order: Order, schedule: Schedule, dense: DensePart, turns: Turns) -> None:
    """All rows in memory in one nn.Embedding(sparse=True), its gradient coalesced, row-wise Adagrad by hand."""
    tables = _whole_table(schedule)
    whole = torch.as_strided(tables[0], (sum(len(table) for table in tables), DIM), (DIM, 1))
    embedding = nn.Embedding.from_pretrained(whole, freeze=False, sparse=True)
    state = torch.zeros(len(whole))
    ids = np.load(order.ids, mmap_mode="r")
    features = len(schedule.header.features.features)
    turns.begin()
    for event, of_step in zip(events_of(schedule), ids, strict=False):
        lookups = torch.from_numpy(of_step.copy())
        with torch.no_grad():
            block = embedding(lookups).view(BATCH, features, DIM)
        block.requires_grad_()
        loss, gradient = _dense_step(dense, schedule.lane(event, 0), block)
        order_of, perm = torch.sort(lookups)
        rows, counts = torch.unique_consecutive(order_of, return_counts=True)
        offsets = torch.cumsum(counts, 0) - counts
        total = nn.functional.embedding_bag(perm, gradient.view(-1, DIM), offsets, mode="sum")
        now = state[rows] + total.square().mean(1)
        state[rows] = now
        whole.index_add_(0, rows, total * (-LR / (now.sqrt() + EPSILON)).unsqueeze(1))
        turns.step(loss)


SIDES: dict[str, Callable[[Order, Schedule, DensePart, Turns], None]] = {
    "foreload": run_foreload,
    "floor": run_floor,
    "one table": run_one_table,
}


def main() -> None:
    """Run the side that the command line describes."""
    given = json.loads(sys.argv[1])
    order = Order(**{**given, "urls": tuple(given["urls"])})
    numerics.set_up(1)
    schedule = Schedule(order.schedule)
    dense = DensePart.build(TrainJob.of(job(Path(order.schedule), order.model)), schedule)
    print("{}", flush=True)
    SIDES[order.side](order, schedule, dense, Turns())


if __name__ == "__main__":
    main()
