"""The embedding tables of a PyTorch module: those that `wrap` takes over, with the values that they were given, and those that it refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from foreload.trainer.errors import ModelError


@dataclass(frozen=True, slots=True)
class TorchTable:
    """A table of a module. name: what it is to be called; pooling: "single", "sum" or "mean".

    feature_names: of its features, where the module says so.
    """

    name: str
    rows: int
    dimension: int
    pooling: str
    feature_names: tuple[str, ...] = ()


def is_collection(layer: nn.Module) -> bool:
    """Whether a layer is an EmbeddingBagCollection of TorchRec, or does as one."""
    return callable(getattr(layer, "embedding_bag_configs", None))


def torch_table(path: str, name: str, layer: nn.Embedding | nn.EmbeddingBag) -> TorchTable:
    """The table of an nn.Embedding or nn.EmbeddingBag. Raises ModelError where its training would not be what it is in torch, bit for bit aside.

    path: where it is in the module, for the error.
    """
    _check_weight(path, layer)
    options: list[tuple[str, Any, Any, str]] = [
        (
            "padding_idx",
            layer.padding_idx,
            None,
            "a row that is no row of a value is not in the data: a missing value is id 0, which is trained",
        ),
        ("max_norm", layer.max_norm, None, "rows change by their optimizer alone; clip what the layer gives"),
        ("scale_grad_by_freq", layer.scale_grad_by_freq, False, "a row's gradient would depend on how a batch is cut into lanes"),
    ]
    for option, value, default, why in options:
        if value != default:
            raise ModelError(f"wrap: {path}: {option} must be {default}; got {value}; {why}")
    if isinstance(layer, nn.EmbeddingBag):
        pooling = layer.mode
        if pooling not in ("sum", "mean"):
            raise ModelError(
                f'wrap: {path}: mode must be "sum" or "mean"; got {pooling!r}, whose gradient goes to some of the rows only'
            )
    else:
        pooling = "single"
    return TorchTable(name, layer.num_embeddings, layer.embedding_dim, pooling)


def _check_weight(path: str, layer: nn.Embedding | nn.EmbeddingBag) -> None:
    """Raise ModelError unless the layer is torch's own, with a plain table that is trained."""
    kind = nn.EmbeddingBag if isinstance(layer, nn.EmbeddingBag) else nn.Embedding
    if type(layer).forward is not kind.forward or layer._forward_hooks or layer._forward_pre_hooks:
        raise ModelError(
            f"wrap: {path}: {type(layer).__name__} has a forward of its own, which would not be called; use nn.{kind.__name__} as it is"
        )
    weight = layer._parameters.get("weight")
    if weight is None or weight.dtype != torch.float32:
        what = "a parametrization" if weight is None else str(weight.dtype)
        raise ModelError(f"wrap: {path}: weight must be a parameter of torch.float32; got {what}; rows are float32")
    if not weight.requires_grad:
        raise ModelError(f"wrap: {path}: weight is frozen; rows begin as docs/definitions.md says, and are all trained")


def collection_tables(path: str, collection: nn.Module, name_of: Callable[[str, str], str]) -> list[TorchTable]:
    """The tables of an EmbeddingBagCollection, by what its embedding_bag_configs() say. Raises ModelError.

    name_of: what a table is to be called, from where it is in the module and its name in the collection.
    """
    weighted = getattr(collection, "is_weighted", False)
    if weighted() if callable(weighted) else weighted:
        raise ModelError(f"wrap: {path}: is_weighted must be False; values of a feature have no weights")
    tables = []
    for config in collection.embedding_bag_configs():  # type: ignore[operator]
        pooling = str(getattr(config.pooling, "value", config.pooling)).lower()
        where = f"{path}.{config.name}"
        if pooling not in ("sum", "mean"):
            raise ModelError(f"wrap: {where}: pooling must be sum or mean; got {pooling}")
        kind = str(getattr(getattr(config, "data_type", None), "value", "FP32"))
        if kind != "FP32":
            raise ModelError(f"wrap: {where}: data_type must be FP32; got {kind}; rows are float32")
        features = tuple(map(str, config.feature_names))
        tables.append(TorchTable(name_of(where, config.name), config.num_embeddings, config.embedding_dim, pooling, features))
    return tables


_BLOCK_ROWS = 1 << 16


@dataclass(frozen=True, eq=False, slots=True)
class Drawn:
    """Hashes of a table's rows, uint64 [rows], and of its columns, uint64 [D]: 0 of one that has zeros alone."""

    rows: np.ndarray
    columns: np.ndarray

    @staticmethod
    def of(weights: Tensor) -> Drawn:
        """Those of a table, [rows, D]: sums of the values' bits, each times an odd number of its place, modulo 2^64."""
        count, width = weights.shape
        numbers = np.random.default_rng(0).integers(0, 2**64, max(width, _BLOCK_ROWS), np.uint64) | np.uint64(1)
        rows, columns = np.empty(count, np.uint64), np.zeros(width, np.uint64)
        for first in range(0, count, _BLOCK_ROWS):
            # Added to 0, so that the sign of zero is lost.
            block = weights[first : first + _BLOCK_ROWS].to("cpu", torch.float32) + 0.0
            bits = block.contiguous().numpy().view(np.uint32).astype(np.uint64)
            rows[first : first + len(bits)] = bits @ numbers[:width]
            columns = columns * numbers[0] + numbers[: len(bits)] @ bits
        return Drawn(rows, columns)

    def is_same(self, other: Drawn | None) -> bool:
        """Whether another table has the same values."""
        return other is not None and np.array_equal(self.rows, other.rows) and np.array_equal(self.columns, other.columns)

    def same_in(self, other: Drawn | None) -> Drawn:
        """The hashes of the rows and columns that are the same in another table, and 0 for all others."""
        if other is None or self.rows.shape != other.rows.shape or self.columns.shape != other.columns.shape:
            return Drawn(np.zeros_like(self.rows), np.zeros_like(self.columns))
        rows = np.where(self.rows == other.rows, self.rows, np.uint64(0))
        return Drawn(rows, np.where(self.columns == other.columns, self.columns, np.uint64(0)))

    @property
    def any(self) -> bool:
        """Whether a row or a column has a hash."""
        return bool(self.rows.any() or self.columns.any())

    @property
    def where(self) -> str:
        """Which part of the table has hashes, as " in 40 of 50 rows"; empty where it is all of it."""
        rows, columns = np.count_nonzero(self.rows), np.count_nonzero(self.columns)
        if rows == len(self.rows) or columns == len(self.columns):
            return ""
        return f" in {rows:,} of {len(self.rows):,} rows" if rows else f" in {columns:,} of {len(self.columns):,} columns"
