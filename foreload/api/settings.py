"""The settings, by their names on the command line, for type checkers. `foreload prepare --help` and `train --help` explain them.

`make golden` generates this file from the declarations of the settings.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

Path = str | os.PathLike[str]


class PrepareSettings(TypedDict, total=False):
    """Settings of `foreload prepare`."""

    format: Literal["criteo", "csv", "tsv", "parquet", "synthetic"]
    features: Path | None
    rows: int | None
    seed: int
    values: int | None
    table_rows: int | None
    max_rejects: int
    eval_source: Path | Sequence[Path]
    eval_fraction: float
    eval_every: int | None
    batch_size: int
    lanes: int
    epochs: int
    shuffle_seed: int | None
    placement: Literal["order", "locality"] | None
    after: Path | None
    slots: int | str | None
    memory: int | str | None
    row_bytes: int | None
    window: int | None
    out: Path
    overwrite: bool
    segment_bytes: int | str
    json: Path | None
    job: Path


class TrainSettings(TypedDict, total=False):
    """Settings of `foreload train`."""

    run: Path
    model_folder: Path
    dim: int
    model_options: Mapping[str, Any]
    label_weights: Mapping[str, float]
    drop_weights: bool
    seed: int
    row_optimizer: str
    lr: float
    lr_schedule: str | None
    row_options: Mapping[str, float]
    row_initial: str
    row_l2: float
    row_l1: float
    tables: Mapping[str, Mapping[str, Any]]
    dense_optimizer: str
    dense_lr: float
    dense_lr_schedule: str | None
    dense_clip: float | None
    dense_ema: float | None
    dense_options: Mapping[str, Any]
    store: str
    parity: str | None
    spare: str | None
    no_restart: bool
    trainers: int
    threads: int
    cpu_capability: Literal["avx2", "avx512", "avx512-onednn"]
    device: Literal["cpu", "cuda"]
    memory: int | str | None
    namespace: str | None
    address: str | None
    store_timeout: float | None
    store_patience: float
    copies: int | None
    peer_timeout: float | None
    rebalance: bool
    auto: bool | Literal["dry-run"]
    auto_may: Literal["threads"] | None
    pool: str | None
    deadline: str | None
    budget: float | None
    coordinator: str | None
    local_trainers: int | None
    token_file: Path | None
    engine: Literal["local", "ray"]
    ray_address: str | None
    spare_servers: int
    abandon_after: str | None
    checkpoint: Path | None
    checkpoint_every: int | str | None
    checkpoint_policy: Literal["full", "one-shot", "consecutive", "intermittent", "planned"]
    checkpoint_bits: int | Literal["auto"]
    failures_a_day: float
    keep_best: str | None
    keep: int
    stop_early: str | None
    history: Path
    metrics: int | str | None
    track: str | None
    log_format: Literal["text", "json"]
    no_report: bool
    until_full: bool
    follow: bool
    resume: bool | Literal["auto"]
    from_checkpoint: Path | None
    accept_numerics: bool
    accept_model: bool
    folder_moved: bool
    overwrite: bool
    allow_nan: bool
    digest: bool
    job: Path
