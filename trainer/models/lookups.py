"""What stands for the embeddings of a wrapped module: layers that are given Ids, and give the rows of the features that these stand for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from foreload.trainer.errors import ModelError
from foreload.trainer.models.ids import REMEDY, Ids, Path, text_of
from foreload.trainer.models.layers import FeatureLayer, Needed, StepRows
from foreload.trainer.models.tables import TorchTable


class WrappedRows(StepRows):
    """The step's rows for a wrapped module. calls: None, or, while its forward is looked at, which layer was given which ids so far."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Lookup | Collection, Path]] | None = None


class _Replaced(FeatureLayer):
    def __init__(self, path: str, rows: WrappedRows) -> None:
        super().__init__()
        self.path = path
        self.rows = self.wrapped_rows = rows

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            raise AttributeError(
                f"forward takes .weight of the embedding {self.path}; a module has its rows of the step, not the table"
            )
        return super().__getattr__(name)

    def given(self, ids: object) -> Ids:
        """What the layer was given, where it is ids; raises TypeError where it is not."""
        if not isinstance(ids, Ids):
            raise TypeError(
                f'forward gives {type(ids).__name__} to the embedding {self.path}; {REMEDY}; for indices of its own, say keep=["{self.path}"]'
            )
        return ids


class Lookup(_Replaced):
    """Stands for an nn.Embedding or nn.EmbeddingBag. features: by the ids that it is given."""

    def __init__(self, path: str, rows: WrappedRows, table: TorchTable) -> None:
        super().__init__(path, rows)
        self.table, self.num_embeddings, self.embedding_dim = table, table.rows, table.dimension
        self.features: dict[Path, str] = {}

    def forward(self, input: Any, offsets: Any = None, per_sample_weights: Any = None) -> Tensor:
        """The rows that the ids stand for, float32 [b, dimension]; a bag's summed or averaged. offsets: nothing that is needed."""
        ids = self.given(input)
        if per_sample_weights is not None:
            raise TypeError(f"forward gives per_sample_weights to the embedding {self.path}; values of a feature have no weights")
        if ids.columns is not None:
            columns = text_of(ids.path)
            raise TypeError(
                f"forward gives all of {columns} to the embedding {self.path}; give it one column, as {columns}[:, 0]"
            )
        if self.wrapped_rows.calls is not None:
            self.wrapped_rows.calls.append((self, ids.path))
            return torch.randn(ids.shape[0], self.embedding_dim, device=ids.device)
        if ids.path not in self.features:
            raise ModelError(
                f"{self.path}: is given {text_of(ids.path)}, which it was not when `wrap` looked; forward must always do the same"
            )
        return self.wrapped_rows.of(self.features[ids.path])

    def needed(self) -> Iterator[Needed]:
        for feature in dict.fromkeys(self.features.values()):
            yield Needed(feature, self.table.dimension, tuple(dict.fromkeys(("single", self.table.pooling))))

    def extra_repr(self) -> str:
        """What print shows of it."""
        return ", ".join(dict.fromkeys(self.features.values()))


class KeyedRows:
    """What an EmbeddingBagCollection gives, as far as models use TorchRec's KeyedTensor: float32 [b, dimension] by key, in order."""

    def __init__(self, embeddings: Mapping[str, Tensor]) -> None:
        self._embeddings = dict(embeddings)

    def keys(self) -> list[str]:
        """The keys."""
        return list(self._embeddings)

    def values(self) -> Tensor:
        """All side by side, float32 [b, sum of the dimensions]."""
        return torch.cat(list(self._embeddings.values()), 1)

    def to_dict(self) -> dict[str, Tensor]:
        """All by key."""
        return dict(self._embeddings)

    def length_per_key(self) -> list[int]:
        """The dimensions."""
        return [value.shape[1] for value in self._embeddings.values()]

    def __getitem__(self, key: str) -> Tensor:
        return self._embeddings[key]


class Collection(_Replaced):
    """Stands for an EmbeddingBagCollection. keys: of what it gives, each with its feature and table, in order."""

    def __init__(self, path: str, rows: WrappedRows, keys: Sequence[tuple[str, str, TorchTable]]) -> None:
        super().__init__(path, rows)
        self.keys = tuple(keys)

    def forward(self, features: Any) -> KeyedRows:
        """The rows of all its features. features: what stands for a KeyedJaggedTensor, always the same."""
        ids = self.given(features)
        if self.wrapped_rows.calls is not None:
            self.wrapped_rows.calls.append((self, ids.path))
            return KeyedRows({key: torch.randn(ids.shape[0], table.dimension, device=ids.device) for key, _, table in self.keys})
        return KeyedRows({key: self.wrapped_rows.of(feature) for key, feature, _ in self.keys})

    def needed(self) -> Iterator[Needed]:
        for _, feature, table in self.keys:
            yield Needed(feature, table.dimension, ("single", table.pooling))


def keys_of(tables: Sequence[TorchTable]) -> list[tuple[str, str, TorchTable]]:
    """Key, feature and table of each feature of a collection.

    As in TorchRec, the key of a feature that is in several tables has the table's name behind it.
    """
    names = [name for table in tables for name in table.feature_names]
    keys = []
    for table in tables:
        for name in table.feature_names:
            several = names.count(name) > 1
            feature = feature_name(f"{name}_{table.name}" if several else name)
            keys.append((f"{name}@{table.name}" if several else name, feature, table))
    return keys


def replace_layers(module: nn.Module, replaced: Mapping[nn.Module, nn.Module]) -> None:
    """Put other layers in the place of those of a module, wherever it has them."""
    for parent in list(module.modules()):
        for name, child in parent._modules.items():
            if child is not None and child in replaced:
                parent._modules[name] = replaced[child]


def feature_name(name: str) -> str:
    """A name as a feature may have it."""
    return name.replace(".", "_")
