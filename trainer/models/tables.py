"""The embedding tables of a PyTorch module: those that `wrap` accepts, and those that it refuses.

`Drawn` identifies the values that a table had before it was wrapped.
"""

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
    """A table of a module.

    Attributes:
        name: the name of the table in foreload.
        rows: the number of rows.
        dimension: the number of columns.
        pooling: "single", "sum" or "mean".
        feature_names: the names of the table's features, if the module specifies them.
        padding: the id whose row is zeros without gradient, if there is one.
    """

    name: str
    rows: int
    dimension: int
    pooling: str
    feature_names: tuple[str, ...] = ()
    padding: int | None = None


def is_collection(layer: nn.Module) -> bool:
    """Return whether a layer is an EmbeddingBagCollection of TorchRec, or acts as one."""
    return callable(getattr(layer, "embedding_bag_configs", None))


def torch_table(path: str, name: str, layer: nn.Embedding | nn.EmbeddingBag) -> TorchTable:
    """Return the table of an nn.Embedding or nn.EmbeddingBag.

    Args:
        path: the path of the layer in the module, for errors.
        name: the name of the table.

    Raises:
        ModelError: training the table here would differ from training it in torch by more than the
            last bits.
    """
    _check_weight(path, layer)
    options: list[tuple[str, Any, Any, str]] = [
        ("max_norm", layer.max_norm, None, "only their optimizer changes rows; clip the output of the layer"),
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
    return TorchTable(name, layer.num_embeddings, layer.embedding_dim, pooling, padding=layer.padding_idx)


def _check_weight(path: str, layer: nn.Embedding | nn.EmbeddingBag) -> None:
    """Raise ModelError unless the layer uses torch's own forward and has a plain, trained table."""
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
    """Return the tables of an EmbeddingBagCollection, as its embedding_bag_configs() describe them.

    Args:
        path: the path of the collection in the module, for errors.
        name_of: returns the name of a table, given its path in the module and its name in the
            collection.

    Raises:
        ModelError: the collection cannot be wrapped.
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
    """Hashes that identify the values of a table.

    Attributes:
        rows: the hash of each row, uint64 [rows]. The hash of a row of zeros is 0.
        columns: the hash of each column, uint64 [D]. The hash of a column of zeros is 0.
    """

    rows: np.ndarray
    columns: np.ndarray

    @staticmethod
    def of(weights: Tensor) -> Drawn:
        """Return the hashes of a table [rows, D].

        A hash is the sum of the values' bits, each multiplied by an odd number that belongs to its
        place, modulo 2^64.
        """
        count, width = weights.shape
        numbers = np.random.default_rng(0).integers(0, 2**64, max(width, _BLOCK_ROWS), np.uint64) | np.uint64(1)
        rows, columns = np.empty(count, np.uint64), np.zeros(width, np.uint64)
        for first in range(0, count, _BLOCK_ROWS):
            # Adding 0 turns -0.0 into 0.0, so that the sign of zero does not change the hash.
            block = weights[first : first + _BLOCK_ROWS].to("cpu", torch.float32) + 0.0
            bits = block.contiguous().numpy().view(np.uint32).astype(np.uint64)
            rows[first : first + len(bits)] = bits @ numbers[:width]
            columns = columns * numbers[0] + numbers[: len(bits)] @ bits
        return Drawn(rows, columns)

    def is_same(self, other: Drawn | None) -> bool:
        """Return whether another table has the same values."""
        return other is not None and np.array_equal(self.rows, other.rows) and np.array_equal(self.columns, other.columns)

    def same_in(self, other: Drawn | None) -> Drawn:
        """Return the hashes, with 0 for rows and columns that differ in another table."""
        if other is None or self.rows.shape != other.rows.shape or self.columns.shape != other.columns.shape:
            return Drawn(np.zeros_like(self.rows), np.zeros_like(self.columns))
        rows = np.where(self.rows == other.rows, self.rows, np.uint64(0))
        return Drawn(rows, np.where(self.columns == other.columns, self.columns, np.uint64(0)))

    @property
    def any(self) -> bool:
        """Whether any row or column has a hash other than 0."""
        return bool(self.rows.any() or self.columns.any())

    @property
    def where(self) -> str:
        """The part of the table that has hashes, as " in 40 of 50 rows".

        Empty if all rows or all columns have hashes.
        """
        rows, columns = np.count_nonzero(self.rows), np.count_nonzero(self.columns)
        if rows == len(self.rows) or columns == len(self.columns):
            return ""
        return f" in {rows:,} of {len(self.rows):,} rows" if rows else f" in {columns:,} of {len(self.columns):,} columns"
