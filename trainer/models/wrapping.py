"""`wrap`: a PyTorch module with embedding tables of its own as a model of foreload, in which its tables are features of the data."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from foreload.base.arguments import checked
from foreload.trainer.errors import ModelError
from foreload.trainer.models.diagnosis import raised_at
from foreload.trainer.models.feature_text import FeatureFile, WrappedFeature
from foreload.trainer.models.ids import Path
from foreload.trainer.models.inference import modes_kept
from foreload.trainer.models.layers import FeatureLayer
from foreload.trainer.models.lookups import (
    Arguments,
    Collection,
    Columns,
    DenseValues,
    Lookup,
    WrappedRows,
    feature_name,
    keys_of,
    replace_layers,
)
from foreload.trainer.models.tables import Drawn, TorchTable, collection_tables, is_collection, torch_table

_OTHER_SEEDS = 3  # under which a module is built at most, to know what it draws from what it was given
_SAMPLES = (97, 101, 103, 107, 109, 113)
"""How many made-up samples forward is looked at with: the first number that is no size of a parameter, so that it marks the samples' dimension."""


_POOLED = (
    "an embedding gives the rows of its feature pooled, [b, dimension], for sequences that are not pooled are not supported yet; use them pooled, or "
    "leave them out"
)


class _Paired(Exception):
    """A tensor has two dimensions of samples. The argument is its shape, in words."""


class _RefusesPairs(TorchDispatchMode):
    """Raises _Paired where an operation pairs samples with samples. samples: how many there are."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self._samples = samples

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and list(made.shape).count(self._samples) > 1:
            sizes = ", ".join("b" if size == self._samples else str(size) for size in made.shape)
            raise _Paired(f"[{sizes}]")
        return made


class Wrapped(nn.Module):
    """A module with tables of its own as a model: forward(dense, embeddings) calls that of the module, its ids being stood for.

    module: the one that was wrapped, changed; features: in the order in which forward looks them up; dense_names: the dense values, in order;
    unused: the module's tables that forward does not use, which are features of nothing; weights: of tables that had values, what
    these were known by, by path.
    """

    def __init__(self, module: nn.Module, arguments: Arguments, rows: WrappedRows, weights: Mapping[str, Drawn]) -> None:
        super().__init__()
        self.module = module
        self.dense_names = arguments.dense_names
        self.features: tuple[WrappedFeature, ...] = ()
        self.unused: tuple[str, ...] = ()
        self.weights = dict(weights)
        self._arguments, self._rows = arguments, rows

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor], step: int = 0) -> Any:
        """What the module returns; where that is [b, 1], as [b]; where it is several of such, as [b, labels].

        step: the number of training steps done before, which the module gets if `wrap` was given its name.
        """
        self._rows.embeddings = embeddings
        try:
            outputs = self._arguments.call(self.module, dense, step)
        finally:
            self._rows.embeddings = None
        if isinstance(outputs, list | tuple) and len(outputs) > 1 and all(isinstance(one, Tensor) for one in outputs):
            columns = [_as_column(one) for one in outputs]
            return torch.stack(columns, 1) if all(one.dim() == 1 for one in columns) else outputs
        return _as_column(outputs)

    def write_features(self, path: str | os.PathLike[str], *, label: str | Sequence[str], encoding: str = "id") -> None:
        """Write the feature file that goes with the module (docs/features.md), for `foreload prepare`. Raises ModelError where there is a file.

        label: the column of labels, or the columns of several; encoding: of all features; "id" where the values are the ids that the module was
        written for.
        """
        described = FeatureFile(type(self.module).__name__, self.features, self.dense_names, self.unused)
        described.write(pathlib.Path(path), (label,) if isinstance(label, str) else tuple(label), encoding)


def _as_column(output: Any) -> Any:
    """An output [b, 1] as [b]; others as they are."""
    return output.squeeze(1) if isinstance(output, Tensor) and output.dim() == 2 and output.shape[1] == 1 else output


@checked()
def wrap(
    module: nn.Module,
    *,
    dense: Mapping[str, DenseValues] | None = None,
    columns: Mapping[str, Columns] | None = None,
    names: Mapping[str, str] | None = None,
    keep: Sequence[str] = (),
    step: str | None = None,
) -> Wrapped:
    """A PyTorch module as a model, of forward(dense, embeddings): its nn.Embedding, nn.EmbeddingBag and EmbeddingBagCollection become features.

    module: is changed, and kept as `.module`; the values of its tables are not read, so they may be on the device "meta". dense: the arguments of
    its forward that hold dense values, each with the names of these (a list: [b, n]; one name: [b]; a dict of such). columns: of those that hold ids,
    what they are called in the data: one name, a list (for ids[k] and ids[:, k]), or a dict; by default as arguments and keys are called. names: what
    the table at a path in the module is to be called; by default as the path, with _ for each dot. keep: paths of embeddings that stay as they are,
    dense parameters, for indices that forward makes itself, such as positions. step: the argument of its forward that gets the number of the
    training step, an int; by default none does. Raises ModelError (docs/models.md, A module as it is).
    """
    arguments = Arguments.of(module, dense or {}, columns or {}, step)
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) or is_collection(module):
        raise ModelError(f"wrap: {type(module).__name__}: is an embedding itself; wrap the module that has it")
    rows = WrappedRows()
    weights = _weights(module, keep)
    layers = _replace(module, rows, dict(names or {}), keep)
    wrapped = Wrapped(module, arguments, rows, weights)
    wrapped.features = _features(wrapped, _calls(wrapped, arguments, rows), arguments)
    used = {feature.table.name for feature in wrapped.features}
    wrapped.unused = tuple(layer.path for layer in layers if not {table.name for table in _tables(layer)} & used)
    if not wrapped.features:
        raise ModelError(f"wrap: forward of {type(module).__name__} uses none of its tables: {', '.join(wrapped.unused)}")
    for layer in module.modules():
        if isinstance(layer, FeatureLayer) and layer.rows is None:
            layer.rows = rows
    return wrapped


def _weights(module: nn.Module, keep: Sequence[str]) -> dict[str, Drawn]:
    """By path, what the values of each embedding are known by, but of those to keep and those that have none."""
    return {
        path: Drawn.of(layer.weight.detach())
        for path, layer in module.named_modules()
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and path not in keep and layer.weight.device.type != "meta"
    }


def check_weights(module: nn.Module, again: nn.Module, otherwise: Callable[[int], nn.Module]) -> None:
    """Refuse a module whose tables were given weights before it was wrapped, for rows begin as definitions.md says. Raises ModelError.

    What a constructor draws from the generators that --seed seeds is the same under one seed, and differs under others. Anything else was given:
    what differs under one seed, and a row or a column, other than of zeros, that is the same under all seeds.

    Args:
        module: to be checked.
        again: the same, built a second time under the same seed.
        otherwise: builds it under another seed, the first, second, ... by number.
    """
    for part, other in zip(_wrapped(module), _wrapped(again), strict=True):
        for path, drawn in part.weights.items():
            if not drawn.is_same(other.weights.get(path)):
                raise _given(part, path, "", "not the same when built twice under one seed")
    suspected = [dict(part.weights) for part in _wrapped(module)]
    for number in range(1, _OTHER_SEEDS + 1):
        others = _wrapped(otherwise(number))
        for tables, other in zip(suspected, others, strict=True):
            for path, drawn in list(tables.items()):
                tables[path] = drawn.same_in(other.weights.get(path))
                if not tables[path].any:
                    del tables[path]
        if not any(suspected):
            return
    for part, tables in zip(_wrapped(module), suspected, strict=True):
        for path, drawn in tables.items():
            raise _given(part, path, drawn.where, "the same under any seed")


def _given(part: Wrapped, path: str, where: str, how: str) -> ModelError:
    return ModelError(
        f"wrap: {type(part.module).__name__}: {path} was given weights{where}, {how}, and would lose them, for rows begin "
        "with random values of --seed; leave them out, or give --drop-weights to train without them"
    )


def _wrapped(module: nn.Module) -> list[Wrapped]:
    return [part for part in module.modules() if isinstance(part, Wrapped)]


def has_weights(module: nn.Module) -> bool:
    """Whether tables that were wrapped had values."""
    return any(part.weights for part in _wrapped(module))


def _tables(layer: Lookup | Collection) -> list[TorchTable]:
    return [layer.table] if isinstance(layer, Lookup) else [table for _, _, table in layer.keys]


def _place(layer: Lookup | Collection, table: TorchTable) -> str:
    """Where a table is in the module, as `names` has it."""
    return layer.path if isinstance(layer, Lookup) else f"{layer.path}.{table.name}"


def _replace(module: nn.Module, rows: WrappedRows, names: dict[str, str], keep: Sequence[str]) -> list[Lookup | Collection]:
    """Put layers that give a step's rows in the place of those with tables; returns them."""
    given, kept = set(names), set(keep)

    def name_of(path: str, name: str) -> str:
        given.discard(path)
        return names.get(path, name)

    weights: dict[int, str] = {}
    replaced: dict[nn.Module, nn.Module] = {}
    layers: list[Lookup | Collection] = []
    for path, layer in module.named_modules():
        if path in kept or any(path.startswith(f"{other.path}.") for other in layers):
            kept.discard(path)
            continue  # or what a collection has within
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
            table = torch_table(path, name_of(path, feature_name(path)), layer)
            weights[id(layer.weight)] = path
            layers.append(Lookup(path, rows, table))
            replaced[layer] = layers[-1]
        elif is_collection(layer):
            layers.append(Collection(path, rows, keys_of(collection_tables(path, layer, name_of))))
            replaced[layer] = layers[-1]
    if not layers:
        raise ModelError(
            f"wrap: {type(module).__name__} has no nn.Embedding, nn.EmbeddingBag or EmbeddingBagCollection; give it its tables, or leave out wrap"
        )
    for setting, left in (("names", given), ("keep", kept)):
        if left:
            places = ", ".join(layer.path for layer in layers)
            raise ModelError(f"wrap: {setting}: {type(module).__name__} has no table at {min(left)}; it has {places}")
    _refuse_twice("table", [(table.name, _place(layer, table)) for layer in layers for table in dict.fromkeys(_tables(layer))])
    replace_layers(module, replaced)
    for path, parameter in module.named_parameters():
        if id(parameter) in weights:
            raise ModelError(
                f"wrap: {weights[id(parameter)]}: its weight is also {path}, which the module would keep; tables stand for themselves"
            )
    return layers


def _refuse_twice(kind: str, named: Sequence[tuple[str, str]]) -> None:
    """Raise ModelError where two are called alike. named: each name, with where it comes from."""
    often = Counter(name for name, _ in named)
    for name, count in often.items():
        if count > 1:
            places = [place for other, place in named if other == name]
            raise ModelError(
                f'wrap: {kind} {name}: {" and ".join(places)} would both be called so; give one a name: names={{"{places[0]}": "..."}}'
            )


def _calls(wrapped: Wrapped, arguments: Arguments, rows: WrappedRows) -> list[tuple[Lookup | Collection, Path]]:
    """Which layers forward gives which ids, from a forward with made-up samples, in evaluation mode, that leaves everything as it was."""
    sizes = {size for parameter in wrapped.parameters() for size in parameter.shape}
    samples = next((count for count in _SAMPLES if count not in sizes), _SAMPLES[-1])
    mixes = getattr(wrapped.module, "mixes_samples", False) or samples in sizes
    rows.calls = []
    try:
        with modes_kept(wrapped), torch.random.fork_rng(devices=[]), torch.no_grad():
            wrapped.eval()
            with contextlib.nullcontext() if mixes else _RefusesPairs(samples):
                wrapped(torch.randn(samples, len(arguments.dense_names)), {})
        return list(dict.fromkeys(rows.calls))
    except ModelError:
        raise
    except _Paired as error:
        raise ModelError(
            f"wrap: {type(wrapped.module).__name__}: forward pairs every sample with every other, in a tensor {error}{raised_at(error)}: {_POOLED}; "
            "a module that is to mix samples says so, by mixes_samples = True in its class"
        ) from error
    except Exception as error:  # a user's module may raise anything
        # What torch says where forward takes [b, dimension] for the rows of a sequence, [b, length, dimension].
        shapes = isinstance(error, RuntimeError | IndexError | ValueError | AssertionError)
        took_rows = any(isinstance(layer, Lookup) and layer.table.pooling == "single" for layer, _ in rows.calls)
        raise ModelError(
            f"wrap: {type(wrapped.module).__name__}: forward failed: {type(error).__name__}: {error}{raised_at(error)}"
            + (f"; if it uses a sequence: {_POOLED}" if shapes and took_rows else "")
        ) from error
    finally:
        rows.calls = None


def _features(
    wrapped: Wrapped, calls: Sequence[tuple[Lookup | Collection, Path]], arguments: Arguments
) -> tuple[WrappedFeature, ...]:
    """The features that follow from what forward looks up, in order; notes with the layers which they take."""
    features: list[WrappedFeature] = []
    places: list[tuple[str, str]] = []
    for layer, path in calls:
        if isinstance(layer, Collection):
            if any(other is layer and first != path for other, first in calls):
                raise ModelError(
                    f"wrap: {layer.path}: is given two arguments; a collection has features of its own, so it needs to be given one"
                )
            features += [WrappedFeature(name, table, key.partition("@")[0]) for key, name, table in layer.keys]
            places += [(name, _place(layer, table)) for _, name, table in layer.keys]
            continue
        column, name = arguments.column(path), layer.table.name
        if sum(other is layer for other, _ in calls) > 1:
            # Several columns with one table.
            name = feature_name(f"{name}_{column or '_'.join(map(str, path))}")
        layer.features[path] = name
        features.append(WrappedFeature(name, layer.table, column or name))
        places.append((name, layer.path))
    _refuse_twice("feature", places)
    return tuple(features)
