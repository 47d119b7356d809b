"""The settings by the names of the command line, for those who check types; what they mean, `foreload prepare --help` and `train --help` say."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

Path = str | os.PathLike[str]


class PrepareSettings(TypedDict, total=False):
    """Those of `foreload prepare`."""

    format: Literal["criteo", "csv", "tsv", "parquet", "synthetic"]
    features: Path
    out: Path
    rows: int
    seed: int
    values: int
    table_rows: int
    max_rejects: int
    eval_source: Path | Sequence[Path]
    eval_fraction: float
    eval_every: int
    batch_size: int
    lanes: int
    epochs: int
    shuffle_seed: int
    placement: Literal["locality", "order"]
    after: Path
    slots: int | str
    memory: int | str
    row_bytes: int
    window: int
    overwrite: bool
    segment_bytes: int | str
    json: Path
    job: Path


class TrainSettings(TypedDict, total=False):
    """Those of `foreload train`."""

    run: Path
    store: str
    trainers: int
    model_folder: Path
    dim: int
    row_optimizer: str
    row_options: Mapping[str, float]
    lr: float
    dense_optimizer: str
    lr_schedule: str
    dense_lr: float
    dense_lr_schedule: str
    dense_clip: float
    dense_ema: float
    seed: int
    model_options: Mapping[str, Any]
    label_weights: Mapping[str, float]
    drop_weights: bool
    dense_options: Mapping[str, Any]
    tables: Mapping[str, Mapping[str, Any]]
    threads: int
    cpu_capability: Literal["avx2", "avx512", "avx512-onednn"]
    device: Literal["cpu", "cuda"]
    memory: int | str
    namespace: str
    parity: str
    spare: str
    no_restart: bool
    store_timeout: float
    store_patience: float
    copies: int | None
    peer_timeout: float | None
    rebalance: bool
    coordinator: str
    local_trainers: int
    token_file: Path
    address: str | None
    checkpoint: Path
    checkpoint_every: int | str
    checkpoint_policy: Literal["full", "one-shot", "consecutive", "intermittent", "planned"]
    checkpoint_bits: int | Literal["auto"]
    failures_a_day: float
    keep_best: str
    keep: int
    stop_early: str
    history: Path | Literal["off"]
    no_report: bool
    until_full: bool
    follow: bool
    resume: bool | Literal["auto"]
    from_checkpoint: Path
    accept_numerics: bool
    accept_model: bool
    folder_moved: bool
    overwrite: bool
    allow_nan: bool
    digest: bool
    job: Path
