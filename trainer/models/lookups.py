"""The layers that replace a module's embeddings under `wrap`, and the arguments of its forward."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from foreload.trainer.errors import ModelError
from foreload.trainer.models.ids import REMEDY, Ids, Origins, Path, Places, UnsupportedUse, text_of
from foreload.trainer.models.layers import FeatureLayer, Needed, StepRows
from foreload.trainer.models.tables import TorchTable


class WrappedRows(StepRows):
    """The rows of the step for a wrapped module.

    Attributes:
        calls: the lookups of forward so far, while `wrap` traces forward. Otherwise None.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[ColumnUse] | None = None


class ColumnUse(NamedTuple):
    """One column that forward looks up in a layer.

    Attributes:
        path: the argument of forward, and what is picked from it.
        offset: the constant that forward adds to the ids.
    """

    layer: Lookup | Collection
    path: Path
    offset: int = 0


class _Replaced(FeatureLayer):
    def __init__(self, path: str, rows: WrappedRows) -> None:
        super().__init__()
        self.path = path
        self.rows = self.wrapped_rows = rows

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            raise AttributeError(
                f"forward takes .weight of the embedding {self.path}; a module gets the rows of its step, not the whole table"
            )
        return super().__getattr__(name)

    def given(self, ids: object) -> Ids:
        """Return the ids that the layer was given.

        Raises:
            UnsupportedUse: the layer was given something else.
        """
        if not isinstance(ids, Ids):
            raise UnsupportedUse(
                f"forward gives {type(ids).__name__} to the embedding {self.path}",
                f'{REMEDY}; for indices of its own, say keep=["{self.path}"]',
            )
        return ids


class Lookup(_Replaced):
    """Replaces an nn.Embedding or nn.EmbeddingBag.

    Attributes:
        features: the name of the feature for each column that the layer is given.
        is_bag: whether it replaces an nn.EmbeddingBag.
    """

    def __init__(self, path: str, rows: WrappedRows, table: TorchTable, is_bag: bool) -> None:
        super().__init__(path, rows)
        self.is_bag = is_bag
        self.table, self.num_embeddings, self.embedding_dim = table, table.rows, table.dimension
        self.features: dict[Path, str] = {}

    def forward(self, input: Any, offsets: Any = None, per_sample_weights: Any = None) -> Tensor:
        """Return the rows of the ids: float32 [b, dimension] for ids [b], [b, n, dimension] for [b, n].

        The rows of a bag are summed or averaged, so its result is [b, dimension].

        Args:
            input: the placeholder of the ids.
            offsets: ignored.
            per_sample_weights: must be None.

        Raises:
            UnsupportedUse: an argument is not supported.
            ModelError: the layer was not given these ids when `wrap` traced forward.
        """
        ids = self.given(input)
        if per_sample_weights is not None:
            raise UnsupportedUse(
                f"forward gives per_sample_weights to the embedding {self.path}", "values of a feature have no weights"
            )
        lookups = ids.lookups()
        if self.wrapped_rows.calls is not None:
            self.wrapped_rows.calls += [ColumnUse(self, path, offset) for path, offset in lookups]
            rows = [torch.randn(ids.origins.samples, self.embedding_dim, device=ids.device) for _ in lookups]
        else:
            rows = [self.wrapped_rows.of(self._feature(path)) for path, _ in lookups]
        dims = ids.numbers.dim()
        if self.is_bag and dims == 1 and len(lookups) > 1:
            raise UnsupportedUse(
                f"forward gives {len(lookups)} columns end to end to the embedding {self.path}", "give them side by side, [b, n]"
            )
        if self.is_bag and dims > 1:
            block = torch.stack(rows, 1)
            return block.sum(1) if self.table.pooling == "sum" else block.mean(1)
        block = rows[0] if len(rows) == 1 else torch.stack(rows, 1)
        return block if dims == 1 and len(rows) == 1 else block.reshape(*ids.shape, self.embedding_dim)

    def _feature(self, path: Path) -> str:
        if path not in self.features:
            raise ModelError(
                f"{self.path}: is given {text_of(path)}, which it was not when `wrap` examined forward; forward must always do the same"
            )
        return self.features[path]

    def needed(self) -> Iterator[Needed]:
        for feature in dict.fromkeys(self.features.values()):
            yield Needed(feature, self.table.dimension, tuple(dict.fromkeys(("single", self.table.pooling))))

    def extra_repr(self) -> str:
        """Return the text that print shows in the parentheses after the class name."""
        return ", ".join(dict.fromkeys(self.features.values()))


class KeyedRows:
    """The result of a Collection: float32 [b, dimension] by key, in order.

    It has the parts of TorchRec's KeyedTensor that models use.
    """

    def __init__(self, embeddings: Mapping[str, Tensor]) -> None:
        self._embeddings = dict(embeddings)

    def keys(self) -> list[str]:
        """Return the keys."""
        return list(self._embeddings)

    def values(self) -> Tensor:
        """Return all values side by side, float32 [b, sum of the dimensions]."""
        return torch.cat(list(self._embeddings.values()), 1)

    def to_dict(self) -> dict[str, Tensor]:
        """Return the values by key."""
        return dict(self._embeddings)

    def length_per_key(self) -> list[int]:
        """Return the dimension of each value."""
        return [value.shape[1] for value in self._embeddings.values()]

    def __getitem__(self, key: str) -> Tensor:
        return self._embeddings[key]


class Collection(_Replaced):
    """Replaces an EmbeddingBagCollection.

    Attributes:
        keys: the keys of its result in order, each with its feature and table.
    """

    def __init__(self, path: str, rows: WrappedRows, keys: Sequence[tuple[str, str, TorchTable]]) -> None:
        super().__init__(path, rows)
        self.keys = tuple(keys)

    def forward(self, features: Any) -> KeyedRows:
        """Return the rows of all its features.

        Args:
            features: the placeholder for a KeyedJaggedTensor, the same in every call.
        """
        ids = self.given(features)
        if self.wrapped_rows.calls is not None:
            self.wrapped_rows.calls.append(ColumnUse(self, ids.lookups()[0][0]))
            return KeyedRows(
                {key: torch.randn(ids.origins.samples, table.dimension, device=ids.device) for key, _, table in self.keys}
            )
        return KeyedRows({key: self.wrapped_rows.of(feature) for key, feature, _ in self.keys})

    def needed(self) -> Iterator[Needed]:
        for _, feature, table in self.keys:
            yield Needed(feature, table.dimension, ("single", table.pooling))


def keys_of(tables: Sequence[TorchTable]) -> list[tuple[str, str, TorchTable]]:
    """Return the key, feature and table of each feature of a collection.

    As in TorchRec, the key of a feature that several tables have ends in the name of the table.
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
    """Replace layers of a module, everywhere in the module."""
    for parent in list(module.modules()):
        for name, child in parent._modules.items():
            if child is not None and child in replaced:
                parent._modules[name] = replaced[child]


def feature_name(name: str) -> str:
    """Return a name that is valid for a feature: dots become underscores."""
    return name.replace(".", "_")


DenseValues = str | Sequence[str] | Mapping[str, str | Sequence[str]]
"""The dense values of an argument of forward.

One name stands for [b], a sequence of names for [b, n] in order, and a dict for a dict of these.
"""
Columns = str | Sequence[str] | Mapping[str, str]
"""The columns of the data whose ids an argument of forward holds.

One name, several names in order, or a dict with the name for each key. Those of several names that
are also given as dense values are dense: the argument then holds both, float32 [b, n].
"""


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments with which the forward of a module is called.

    Required arguments that are not named here hold ids.

    Attributes:
        signature: the signature of forward.
        dense: the dense values of arguments, by the argument's name.
        columns: the columns of arguments that hold ids, by the argument's name.
        step: the argument that gets the training step. If None, no argument gets it.
        places: the columns of the arguments.
    """

    signature: inspect.Signature
    dense: Mapping[str, DenseValues]
    columns: Mapping[str, Columns]
    step: str | None
    places: Places

    @classmethod
    def of(
        cls, module: nn.Module, dense: Mapping[str, DenseValues], columns: Mapping[str, Columns], step: str | None
    ) -> Arguments:
        """Return the arguments of a module's forward.

        Raises:
            ModelError: forward does not have one of the named arguments, or one is named for two
                purposes.
        """
        signature = inspect.signature(module.forward)
        if step in (*dense, *columns):
            raise ModelError(f"wrap: argument {step}: must be the step, dense values or ids, and only one of these; name it once")
        for name in (*dense, *columns, *([] if step is None else [step])):
            if name not in signature.parameters:
                known = ", ".join(signature.parameters) or "none"
                raise ModelError(f"wrap: forward of {type(module).__name__} has no argument {name}; it has {known}")
            if name in dense and name in columns:
                _check_both(name, dense[name], columns[name])
        return cls(signature, dict(dense), dict(columns), step, Places())

    @property
    def dense_names(self) -> tuple[str, ...]:
        """The names of the dense values, in order."""
        return tuple(name for _, _, given in self._dense_parts() for name in _listed(given))

    def _dense_parts(self) -> Iterator[tuple[str, str | None, str | Sequence[str]]]:
        """Yield each argument that holds dense values, a key within it, and the names there.

        The key is None if the argument is not a dict.
        """
        for name, given in self.dense.items():
            if isinstance(given, Mapping):
                yield from ((name, key, of_key) for key, of_key in given.items())
            else:
                yield name, None, given

    def call(self, module: nn.Module, dense: Tensor, step: int, reads_offsets: bool) -> Any:
        """Call the module for a slice of samples.

        Args:
            dense: float32 [b, n].
            step: the number of training steps done before.
            reads_offsets: whether constants added to ids are recorded.
        """
        values = self._dense(dense)
        origins = Origins(self.places, dense.shape[0], dense.device, reads_offsets)
        bound = self.signature.bind_partial()
        # The loop follows the signature, in whose order positional arguments are passed.
        for name, parameter in self.signature.parameters.items():
            if name == self.step:
                bound.arguments[name] = step
            elif name in self.columns or (name not in self.dense and _is_needed(parameter)):
                bound.arguments[name] = self._ids(parameter, origins, values.get(name))
            elif name in values:
                bound.arguments[name] = values[name]
        return module(*bound.args, **bound.kwargs)

    def _dense(self, dense: Tensor) -> dict[str, Any]:
        values: dict[str, Any] = {}
        start = 0
        for name, key, given in self._dense_parts():
            end = start + len(_listed(given))
            part = dense if end - start == dense.shape[1] else dense[:, start:end].contiguous()
            part, start = part.squeeze(1) if isinstance(given, str) else part, end
            if key is None:
                values[name] = part
            else:
                values.setdefault(name, {})[key] = part
        return values

    def _ids(self, parameter: inspect.Parameter, origins: Origins, dense: Any) -> Any:
        """Return the placeholder for an argument, with the dense values that it holds, too."""
        name, given = parameter.name, self.columns.get(parameter.name)
        if isinstance(given, Mapping):
            return {key: origins.one((name, key)) for key in given} | (dense or {})
        if given is None or isinstance(given, str):
            return origins.one((name,))
        if parameter.kind is parameter.VAR_POSITIONAL:
            return tuple(origins.one((name, place)) for place in range(len(given)))
        named = _listed(self.dense[name]) if name in self.dense else ()  # type: ignore[arg-type]
        places = {given.index(column): dense.reshape(-1, len(named))[:, k : k + 1] for k, column in enumerate(named)}
        return origins.several((name,), len(given), places)

    def text(self) -> str:
        """Return what forward is called with, for an error: each argument that holds ids or dense values."""
        parts = []
        for name, parameter in self.signature.parameters.items():
            given = [of[name] for of in (self.columns, self.dense) if name in of]
            if keys := [key for one in given if isinstance(one, Mapping) for key in one]:
                parts.append(f"{name}, a dict of {', '.join(keys)}")
            elif given:
                parts.append(f"{name}, one tensor of {', '.join(_listed(given[0]))}")  # type: ignore[arg-type]
            elif name != self.step and _is_needed(parameter):
                parts.append(f"{name}, one tensor of ids")
        return "; ".join(parts)

    def column(self, path: Path) -> str | None:
        """Return the column of the data that ids come from, or None if it is not known."""
        given, last = self.columns.get(str(path[0])), path[-1]
        if len(path) == 1:
            return given if isinstance(given, str) else str(last)
        if isinstance(last, str):
            return given.get(last, last) if isinstance(given, Mapping) else last
        return None if given is None or isinstance(given, str | Mapping) else given[last]


def _listed(given: str | Sequence[str]) -> Sequence[str]:
    return [given] if isinstance(given, str) else given


def _check_both(name: str, values: DenseValues, ids: Columns) -> None:
    """Raise ModelError unless an argument may hold both these dense values and these ids.

    They are different keys of a dict, or columns of one tensor, of which `columns` has all.
    """
    if isinstance(values, Mapping) and isinstance(ids, Mapping) and not values.keys() & ids.keys():
        return
    if isinstance(values, Mapping) or isinstance(ids, str | Mapping):
        raise ModelError(
            f"wrap: argument {name}: must be dense values or ids, not both, except for the keys of a dict and the columns of one tensor; for a "
            "tensor give all its columns, in order, and those of them that are dense"
        )
    if len(set(ids)) < len(ids):
        raise ModelError(f"wrap: argument {name}: columns must differ; got {', '.join(ids)}")
    for value in _listed(values):
        if value not in ids:
            raise ModelError(f"wrap: argument {name}: dense value {value} must be one of its columns; got {', '.join(ids)}")


def _is_needed(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
