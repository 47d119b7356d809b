"""What plain training in memory is told: as a `Config`, or as a command line in the words of `foreload prepare` and `foreload train`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from reference_data import Log, criteo, read_features

from foreload.trainer.models.building import load_model
from foreload.trainer.models.spec import ModelBuilder


@dataclass(frozen=True, slots=True)
class Config:
    """One training run. A table's row optimizer is its entry in by_table, (name, lr) or (name, lr, options), or else that of all tables."""

    log: Log
    sources: tuple[Path, ...]
    model: ModelBuilder
    dim: int
    batch_size: int
    lanes: int = 1
    placement: str = "locality"
    epochs: int = 1
    seed: int = 0
    shuffle_seed: int | None = None
    evaluation_sources: tuple[Path, ...] = ()
    evaluation_fraction: float = 0.0
    evaluation_sets: Mapping[str, tuple[Path, ...]] = field(
        default_factory=dict
    )  # in the place of both: the sources of each, by name
    eval_every: int | None = None  # steps of an epoch between evaluations amid it
    stop_after: int | None = None  # the last step; no evaluation comes behind it
    model_options: Mapping[str, object] = field(default_factory=dict)
    row_optimizer: str = "sgd"
    lr: float = 0.01
    row_options: Mapping[str, float] = field(default_factory=dict)
    by_table: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    row_initial: str = "uniform"
    initial_by_table: Mapping[str, str] = field(default_factory=dict)
    penalties: tuple[float, float] = (0.0, 0.0)  # l1 and l2
    penalties_by_table: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    dense_optimizer: str = "SGD"
    dense_options: Mapping[str, object] = field(default_factory=lambda: {"lr": 0.01})
    lr_schedule: str | None = None
    dense_lr_schedule: str | None = None
    dense_clip: float | None = None
    dense_ema: float | None = None
    label_weights: Mapping[str, float] = field(default_factory=dict)
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None  # in the place of that of the labels' kinds
    later: tuple[int, Config] | None = None  # the step from which on another one holds, in what concerns learning rates


def config_of(arguments: Sequence[str] | None) -> tuple[Config, int]:
    """The run that a command line describes, in the words of `foreload prepare` and `foreload train`; and its threads."""
    parser = argparse.ArgumentParser(description="Train in memory and print the digest and the metrics of every epoch.")
    parser.add_argument("sources", nargs="+", type=Path)
    parser.add_argument("--format", choices=("criteo", "csv", "tsv"), required=True)
    parser.add_argument("--features", type=Path, help="feature file; without one, Criteo's columns")
    parser.add_argument("--eval-source", type=Path, action="append", default=[])
    parser.add_argument("--eval-fraction", type=float, default=0.0)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--lanes", type=int, default=1)
    parser.add_argument("--placement", choices=("order", "locality"), default="locality")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--shuffle-seed", type=int)
    parser.add_argument("--model", default="dlrm")
    parser.add_argument("--model-options", nargs="*", default=[], metavar="K=V")
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--row-optimizer", default="adagrad")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--dense-optimizer", default="Adagrad")
    parser.add_argument("--dense-lr", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args(arguments)
    log = read_features(given.features, "\t" if given.format == "tsv" else ",") if given.features else criteo()
    if given.format == "criteo" and not log.columns:
        plain = criteo()
        log = replace(log, columns=plain.columns, delimiter=plain.delimiter, quoting=plain.quoting)
    config = Config(
        log=log,
        sources=tuple(given.sources),
        model=load_model(given.model),
        dim=given.dim,
        batch_size=given.batch_size,
        lanes=given.lanes,
        placement=given.placement,
        epochs=given.epochs,
        seed=given.seed,
        shuffle_seed=given.shuffle_seed,
        evaluation_sources=tuple(given.eval_source),
        evaluation_fraction=given.eval_fraction,
        model_options={name: _value(text) for name, _, text in (item.partition("=") for item in given.model_options)},
        row_optimizer=given.row_optimizer,
        lr=given.lr,
        dense_optimizer=given.dense_optimizer,
        dense_options={"lr": given.dense_lr},
    )
    return config, given.threads


def _value(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
