"""Other libraries' classes trained in their libraries' own way, and by foreload, from equal values, on the same batches, with plain SGD."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import peer_models
import peer_trials
import reference_tables
import torch
from peer_models import IDS, NUMBERS
from torch import Tensor, nn
from training import Trained, train

from foreload.cache.client.store import Store
from foreload.cache.parity.placement import Placement
from foreload.cache.protocol.shards.reading import StoredRows
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.assembly.assembly import DenseModel
from foreload.trainer.job.job import TrainJob
from foreload.trainer.models.wrapping import Wrapped
from foreload.trainer.saved.model_rows import model_rows
from foreload.trainer.saved.stopped_stores import find_stopped_rows

BATCH, HELD_OUT = 32, 64
BAR = 1e-4
"""The tolerance between logits, relative to 1 + the absolute value of the logit."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How a class is trained on both sides.

    Attributes:
        rate: the learning rate of all parameters.
        initial: how rows begin, as `--row-initial` has it: larger than in the libraries, so that products of rows matter at once.
    """

    rate: float = 0.4
    initial: str = "normal:0.5"


_SETTINGS = {
    # These learn little with 0.4.
    ("deepctr_torch", "ESMM"): Settings(1.0),
    ("deepctr_torch", "MLR"): Settings(1.0),
    ("deepctr_torch", "MMOE"): Settings(0.7),
    ("deepctr_torch", "PLE"): Settings(1.0),
    ("fuxictr", "EDCN"): Settings(1.0),
    # Its k-max pooling takes the largest of several values. Where two are within a rounding of each other, which it takes depends on the machine,
    # and training goes on differently. With these, no two are nearer than 2e-6 in 100 steps.
    ("fuxictr", "CCPM"): Settings(1.0, "normal:3.35"),
    # These make logits of hundreds of such rows, or larger ones from step to step.
    ("fuxictr", "AOANet"): Settings(0.1, "normal:0.1"),
    ("fuxictr", "MaskNet"): Settings(0.005),
}


@dataclass(frozen=True, slots=True)
class Clicks:
    """ids: int64 [n, 7], of IDS; dense: float32 [n, 3], of NUMBERS; labels: float32 [n, labels]."""

    ids: Tensor
    dense: Tensor
    labels: Tensor

    @classmethod
    def read(cls, path: Path, labels: int) -> Clicks:
        """Those that `write_clicks` wrote, with the first labels."""
        values = torch.from_numpy(np.loadtxt(path, delimiter=",", skiprows=1))
        of_labels, ids, dense = values.split([2, len(IDS), len(NUMBERS)], 1)
        return cls(ids.long(), dense.float(), of_labels[:, :labels].float())

    def part(self, samples: slice) -> Clicks:
        """Some of the samples."""
        return Clicks(self.ids[samples], self.dense[samples], self.labels[samples])


@dataclass(frozen=True, slots=True)
class Both:
    """What the library's module and foreload make of samples held out.

    Attributes:
        labels: float32 [n, labels].
        initial: the logits of the library's module before it is trained, float32 [n, labels].
        theirs: its logits when the library has trained it.
        ours: those of foreload.
        log_loss: that of the first label in foreload's own evaluation at the end.
    """

    labels: Tensor
    initial: Tensor
    theirs: Tensor
    ours: Tensor
    log_loss: float | None

    @property
    def difference(self) -> float:
        """The largest difference of the trained logits, relative to 1 + |logit|."""
        return peer_trials.largest_difference(self.ours, self.theirs)

    @property
    def learned(self) -> float:
        """By how much training changed a logit at most, on the side where that is less."""
        return min(float((trained - self.initial).abs().max()) for trained in (self.theirs, self.ours))


def _train_alone(module: Any, given: Tensor, labels: Tensor, lr: float) -> None:
    """`BaseModel.fit` of DeepCTR-Torch, without penalties: DCN has one that no argument of its constructor turns off.

    Its loss is the sum over a batch, not the mean, so the rate is divided by the batch's size.
    """
    net: Any = module.net if isinstance(module, peer_models.Logits) else module
    net.regularization_weight.clear()
    tasks = labels.shape[1]
    loss = "binary_crossentropy" if tasks == 1 else ["binary_crossentropy"] * tasks
    net.compile(torch.optim.SGD(net.parameters(), lr=lr / BATCH), loss)
    net.fit(list(given.T.numpy()), labels.numpy(), batch_size=BATCH, epochs=1, verbose=0, shuffle=False)


def _train_one_epoch(module: Any, given: Tensor, labels: Tensor, lr: float) -> None:
    """`BaseModel.train_one_epoch` of FuxiCTR, without its validation and its clipping of gradients.

    Its `fit_generator`, which sets these attributes, fails with NumPy 2.
    """
    net = module.net
    net.compile("SGD", "binary_crossentropy", lr)
    batches = list(zip(given.split(BATCH), labels.split(BATCH), strict=True))
    net._batches_per_epoch, net._max_gradient_norm, net._stop_training = len(batches), float("inf"), False
    net.on_batch_end = lambda batch: None
    net.train_one_epoch(batches, 0)


def _plain_loop(module: nn.Module, given: Tensor, labels: Tensor, lr: float) -> None:
    """The plain loop of PyTorch, as pytorch-fm's example has it: the wheel has none."""
    optimizer, loss_of = torch.optim.SGD(module.parameters(), lr=lr), nn.BCELoss()
    module.train()
    for x, y in zip(given.split(BATCH), labels.split(BATCH), strict=True):
        loss = loss_of(module(x), y.squeeze(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


LOOPS: dict[str, Callable[[Any, Tensor, Tensor, float], None]] = {
    "deepctr_torch": _train_alone,
    "fuxictr": _train_one_epoch,
    "torchfm": _plain_loop,
}
"""How each library trains a module: called with what it is given, [n, ..], labels [n, labels] and the learning rate of a mean loss."""


@dataclass(frozen=True, slots=True)
class Values:
    """A model of foreload.

    Attributes:
        model: the module, with the values of its dense part.
        rows: the rows of each table, float32 [rows, dimension].
    """

    model: Wrapped
    rows: dict[str, Tensor]

    @classmethod
    def initial(cls, job: TrainJob, schedule: Schedule) -> Values:
        """Those with which training begins: rows as docs/definitions.md has them, the dense part as each trainer builds it."""
        model = DenseModel.build(job, schedule).module
        assert isinstance(model, Wrapped)
        rows = {}
        for number, table in enumerate(schedule.header.features.tables):
            of_table = next(feature.table for feature in model.features if feature.table.name == table.name)
            ids, shape = np.arange(of_table.rows), (of_table.rows, of_table.dimension)
            rows[table.name] = torch.from_numpy(reference_tables.initial_weights(job.seed, number, ids, *shape, job.row_initial))
        return cls(model, rows)

    @classmethod
    def of_run(cls, job: TrainJob, schedule: Schedule, trained: Trained, urls: Sequence[str]) -> Values:
        """Those that training left in the store and in its leader."""
        values = cls.initial(job, schedule)
        values.model.load_state_dict(trained.dense.module.state_dict())
        tables = schedule.header.features.tables
        with Store(urls, timedelta(seconds=10)) as store:
            stored = StoredRows(store, Placement.spread(len(urls)), trained.dense.layouts, job.run_namespace)
            find_stopped_rows(stored, schedule, trained.start)
            for rows in model_rows(schedule, trained.start.step, stored, trained.start.last_batches):
                values.rows[tables[rows.table].name][torch.from_numpy(rows.ids)] = torch.from_numpy(rows.weights)
        return values

    def write_to(self, module: nn.Module) -> None:
        """Give the values to a module of the library itself."""
        own = dict(module.named_parameters())
        tables = {feature.name: feature.table.name for feature in self.model.features}
        with torch.no_grad():
            for path, parameter in self.model.module.named_parameters():
                own[path].copy_(parameter)
            for feature, place in peer_trials.places(self.model).items():
                rows = self.rows[tables[feature]]
                own[f"{place.path}.weight"][place.first : place.first + len(rows)] = rows

    def logits(self, clicks: Clicks) -> Tensor:
        """The logits of samples, float32 [n, labels], from the module that foreload trains."""
        tables = {feature.name: feature.table.name for feature in self.model.features}
        places = peer_trials.places(self.model).items()
        rows = {feature: self.rows[tables[feature]][clicks.ids[:, place.column]] for feature, place in places}
        dense = clicks.dense[:, : len(self.model.dense_names)]
        with torch.no_grad():
            outputs: Tensor = self.model.eval()(dense, rows)
        return outputs.reshape(len(dense), -1)


def compare(library: str, name: str, folder: Path, urls: Sequence[str], steps: int, factor: float = 1) -> Both:
    """Train a class on both sides.

    Args:
        folder: for what is written.
        steps: the number of batches.
        factor: multiplies the learning rate of foreload alone.
    """
    settings = _SETTINGS.get((library, name), Settings())
    rate = settings.rate
    clicks, samples = folder / "clicks.csv", steps * BATCH
    peer_trials.write_clicks(clicks, samples + HELD_OUT)
    every = Clicks.read(clicks, len(peer_models.labels_of(name)))
    training, held_out = every.part(slice(samples)), every.part(slice(samples, None))
    fraction = f"--eval-fraction={HELD_OUT / (samples + HELD_OUT)}"
    schedule = peer_trials.prepared(library, name, clicks, folder / "prepared", BATCH, "--slots=min", fraction)
    sgd = {"row_optimizer": "sgd", "lr": rate * factor, "dense_optimizer": "SGD", "dense_lr": rate * factor}
    job = peer_trials.job_of(library, name, row_initial=settings.initial, **sgd)

    module = peer_models.build(library, name)
    Values.initial(job, schedule).write_to(module)
    given = peer_models.given(library, name, held_out.ids, held_out.dense)
    initial = peer_trials.logits_itself(module, given)
    LOOPS[library](module, peer_models.given(library, name, training.ids, training.dense), training.labels, rate)
    theirs = peer_trials.logits_itself(module, given)

    trained = train(job, schedule, urls, trainers=2)
    assert len(trained.steps) == steps
    ours = Values.of_run(job, schedule, trained, urls).logits(held_out)
    return Both(held_out.labels, initial, theirs, ours, trained.evaluations[-1].log_loss)
