"""`wrap`: turn a PyTorch module with its own embedding tables into a foreload model.

The tables of the module become features of the data.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from foreload.base.arguments import checked
from foreload.trainer.errors import ModelError
from foreload.trainer.models.diagnosis import raised_at
from foreload.trainer.models.feature_text import FeatureFile, WrappedFeature
from foreload.trainer.models.ids import Ids, Path, UnsupportedUse, text_of
from foreload.trainer.models.inference import modes_kept
from foreload.trainer.models.layers import FeatureLayer
from foreload.trainer.models.lookups import (
    Arguments,
    Collection,
    Columns,
    ColumnUse,
    DenseValues,
    Lookup,
    WrappedRows,
    feature_name,
    keys_of,
    replace_layers,
)
from foreload.trainer.models.outputs import Chosen, sigmoid_columns, without_sigmoid
from foreload.trainer.models.tables import Drawn, TorchTable, collection_tables, is_collection, torch_table

# The most further seeds under which a module is built, to distinguish weights that its constructor
# draws from weights that it was given.
_OTHER_SEEDS = 3
_SAMPLES = (97, 101, 103, 107, 109, 113)
"""Candidates for the number of synthetic samples with which forward is traced.

The first number that is not the size of any parameter is used, so that this size identifies the
dimension of the samples.
"""


_POOLED = (
    "an embedding gives the rows of its feature pooled, [b, dimension], and sequences that are not pooled are not supported yet; pool them, or "
    "leave them out"
)


class _Paired(Exception):
    """A tensor has two dimensions of samples. The argument is its shape as text."""


class _RefusesPairs(TorchDispatchMode):
    """Raises _Paired when an operation pairs samples with samples.

    A result has a dimension of samples if its size is `samples`.
    """

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
    """A model made of a module that has its own tables.

    Its forward(dense, embeddings) calls the forward of the module, with placeholders for the ids.

    Attributes:
        module: the wrapped module, which `wrap` changed.
        dense_names: the names of the dense values, in order.
        features: the features, in the order in which forward looks them up.
        unused: the paths of the tables that forward does not use. They have no feature.
        weights: the hashes of the values that tables had before they were wrapped, by path.
    """

    def __init__(
        self,
        module: nn.Module,
        arguments: Arguments,
        rows: WrappedRows,
        weights: Mapping[str, Drawn],
        chosen: Chosen,
        own_loss: bool,
    ) -> None:
        super().__init__()
        self._own_loss, self._chosen = own_loss, chosen
        # Whether the outputs for each label are the result of a sigmoid. Empty if none are.
        self._sigmoids: tuple[bool, ...] = ()
        self._label_kinds: tuple[str, ...] = ("click",)
        self.module = module
        self.dense_names = arguments.dense_names
        self.features: tuple[WrappedFeature, ...] = ()
        self.unused: tuple[str, ...] = ()
        self.weights = dict(weights)
        self._arguments, self._rows = arguments, rows

    @property
    def penalty(self) -> Any:
        """The method `penalty` of the module. AttributeError if it has none."""
        return self.module.penalty

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor], step: int = 0) -> Any:
        """Return the outputs of the module, or (outputs, own losses).

        An output [b, 1] is returned as [b]. Several outputs, each [b] or [b, 1], are returned as
        one tensor [b, labels]. A final sigmoid is left out.

        Args:
            dense: float32 [b, n].
            embeddings: float32 [b, dimension] by feature.
            step: the number of training steps done before. The module gets it if `wrap` was given
                the name of an argument for it.
        """
        result = self._call(dense, embeddings, step, any(self._sigmoids), reads_offsets=False)
        if not any(self._sigmoids):
            return result
        outputs, *losses = result if isinstance(result, tuple) and self._own_loss else (result,)
        outputs = without_sigmoid(outputs, self._label_kinds)
        return (outputs, *losses) if losses else outputs

    def _call(
        self, dense: Tensor, embeddings: Mapping[str, Tensor], step: int, removes_sigmoid: bool, *, reads_offsets: bool
    ) -> Any:
        self._rows.embeddings = embeddings
        try:
            return self._chosen.call(
                self.module,
                lambda: self._arguments.call(self.module, dense, step, reads_offsets),
                self._own_loss,
                removes_sigmoid,
            )
        finally:
            self._rows.embeddings = None

    def predict(self, label_kinds: Sequence[str]) -> None:
        """Use the outputs for labels of these kinds, "click" or "number". Those for numbers keep a sigmoid.

        Raises:
            ModelError: outputs for some clicks end in a sigmoid, and those for others do not.
        """
        self._label_kinds = tuple(label_kinds)
        if len(self._sigmoids) == len(label_kinds) and any(self._sigmoids):
            clicks = [ends for ends, kind in zip(self._sigmoids, label_kinds, strict=True) if kind == "click"]
            if any(clicks) and not all(clicks):
                raise ModelError(
                    f"wrap: {type(self.module).__name__}: all outputs for clicks must be logits; some end in a sigmoid and others do not, such as "
                    'products of probabilities; name the layers whose results are logits: logits=["..."]'
                )

    def trace(self, samples: int) -> None:
        """Run forward on synthetic samples, and note whether it ends in a sigmoid."""
        result = self._call(torch.randn(samples, len(self.dense_names)), {}, 0, True, reads_offsets=True)
        self._sigmoids = sigmoid_columns(result[0] if isinstance(result, tuple) and self._own_loss else result)

    def write_features(self, path: str | os.PathLike[str], *, label: str | Sequence[str], encoding: str = "id") -> None:
        """Write the feature file of the module (docs/features.md), for `foreload prepare`.

        Args:
            path: the file to write.
            label: the column of labels, or the columns of several labels.
            encoding: the encoding of all features. Use "id" if the values are the ids that the
                module was written for.

        Raises:
            ModelError: the file already exists or cannot be written, or an argument is not valid.
        """
        described = FeatureFile(type(self.module).__name__, self.features, self.dense_names, self.unused)
        described.write(pathlib.Path(path), (label,) if isinstance(label, str) else tuple(label), encoding)


@checked()
def wrap(
    module: nn.Module,
    *,
    dense: Mapping[str, DenseValues] | None = None,
    columns: Mapping[str, Columns] | None = None,
    names: Mapping[str, str] | None = None,
    keep: Sequence[str] = (),
    step: str | None = None,
    own_loss: bool = False,
    output: str | Sequence[str] | None = None,
    logits: str | Sequence[str] | None = None,
) -> Wrapped:
    """Turn a PyTorch module into a model with forward(dense, embeddings).

    Its nn.Embedding, nn.EmbeddingBag and EmbeddingBagCollection layers become features. The rules
    are in docs/models.md, "A module as it is".

    Args:
        module: the module, which is changed and kept as `.module`. The values of its tables are not
            used, so the tables may be on the device "meta".
        dense: the arguments of forward that hold dense values, each with the names of these values:
            a list for [b, n], one name for [b], or a dict of such.
        columns: the column names in the data for the arguments that hold ids: one name, a list (for
            ids[k] and ids[:, k]), or a dict. By default, the names of the arguments and keys. A
            list may contain names that `dense` has for the same argument.
        names: the name of the table at a path in the module. By default, the path with _ for each
            dot.
        keep: the paths of embeddings that stay dense parameters, for indices that forward computes
            itself, such as positions.
        step: the argument of forward that gets the number of the training step, an int. If None, no
            argument gets it.
        own_loss: whether forward returns (outputs, losses), the losses [b] being terms of its own
            that each sample adds to the loss.
        output: the key of the dict that forward returns which has the outputs, or the keys of
            several labels, in order. If None, the dict must have one key.
        logits: the path of the layer whose result is the logits, or the layers of several labels,
            in order. If None, forward returns the outputs, and a sigmoid at the end of those for
            clicks is left out.

    Raises:
        ModelError: the module cannot be wrapped, or an argument does not fit it.
    """
    arguments = Arguments.of(module, dense or {}, columns or {}, step)
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) or is_collection(module):
        raise ModelError(f"wrap: {type(module).__name__}: is an embedding itself; wrap the module that has it")
    rows = WrappedRows()
    weights = _weights(module, keep)
    layers = _replace(module, rows, dict(names or {}), keep)
    if not layers and not arguments.dense_names:
        raise ModelError(
            f"wrap: {type(module).__name__} has no nn.Embedding, nn.EmbeddingBag or EmbeddingBagCollection; give it its tables, or, for a model of "
            'dense values alone, their names: dense={"x": ["price", "age"]}'
        )
    wrapped = Wrapped(module, arguments, rows, weights, Chosen.of(module, output, logits), own_loss)
    calls = _calls(wrapped, rows)
    wrapped.features = _features(calls, arguments)
    used = {call.layer for call in calls}
    wrapped.unused = tuple(layer.path for layer in layers if layer not in used)
    if layers and not wrapped.features:
        raise ModelError(f"wrap: forward of {type(module).__name__} uses none of its tables: {', '.join(wrapped.unused)}")
    for layer in module.modules():
        if isinstance(layer, FeatureLayer) and layer.rows is None:
            layer.rows = rows
    return wrapped


def _weights(module: nn.Module, keep: Sequence[str]) -> dict[str, Drawn]:
    """Return the hashes of the values of each embedding, by path.

    Embeddings in `keep`, and embeddings on the device "meta", which have no values, are left out.
    """
    return {
        path: Drawn.of(layer.weight.detach())
        for path, layer in module.named_modules()
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and path not in keep and layer.weight.device.type != "meta"
    }


def check_weights(module: nn.Module, again: nn.Module, otherwise: Callable[[int], nn.Module]) -> None:
    """Refuse a module whose tables were given weights before it was wrapped.

    These weights would be lost, because the initial values of rows are those of
    docs/definitions.md. Values that a constructor draws from the generators that --seed seeds are
    the same under one seed and differ between seeds. All other values were given: values that
    differ under one seed, and rows or columns that are the same under all seeds and are not zeros.

    Args:
        module: the module to check.
        again: the same module, built a second time under the same seed.
        otherwise: builds the module under another seed, given the number of that seed: 1, 2, ...

    Raises:
        ModelError: a table was given weights.
    """
    for part, other in zip(_wrapped(module), _wrapped(again), strict=True):
        for path, drawn in part.weights.items():
            if not drawn.is_same(other.weights.get(path)):
                raise _given(part, path, "", "not the same when built twice under one seed")
    # Each further seed removes the rows and columns that it changes. Rows and columns that remain
    # after all seeds were given.
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
        f"wrap: {type(part.module).__name__}: {path} was given weights{where}, {how}, and would lose them, since rows begin "
        "with random values of --seed; leave them out, or give --drop-weights to train without them"
    )


def _wrapped(module: nn.Module) -> list[Wrapped]:
    return [part for part in module.modules() if isinstance(part, Wrapped)]


def has_weights(module: nn.Module) -> bool:
    """Return whether any wrapped table had values."""
    return any(part.weights for part in _wrapped(module))


def _tables(layer: Lookup | Collection) -> list[TorchTable]:
    return [layer.table] if isinstance(layer, Lookup) else [table for _, _, table in layer.keys]


def _place(layer: Lookup | Collection, table: TorchTable) -> str:
    """Return the path of a table in the module, as `names` specifies it."""
    return layer.path if isinstance(layer, Lookup) else f"{layer.path}.{table.name}"


def _replace(module: nn.Module, rows: WrappedRows, names: dict[str, str], keep: Sequence[str]) -> list[Lookup | Collection]:
    """Replace layers with tables by layers that return the step's rows. Returns the new layers."""
    given, kept = set(names), set(keep)

    def name_of(path: str, name: str) -> str:
        given.discard(path)
        return names.get(path, name)

    weights: dict[int, str] = {}
    replaced: dict[nn.Module, nn.Module] = {}
    layers: list[Lookup | Collection] = []
    for path, layer in module.named_modules():
        if path in kept or any(path.startswith(f"{other.path}.") for other in layers):
            # The layer stays as it is, or lies within a collection that is replaced as a whole.
            kept.discard(path)
            continue
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
            table = torch_table(path, name_of(path, feature_name(path)), layer)
            weights[id(layer.weight)] = path
            layers.append(Lookup(path, rows, table, isinstance(layer, nn.EmbeddingBag)))
            replaced[layer] = layers[-1]
        elif is_collection(layer):
            layers.append(Collection(path, rows, keys_of(collection_tables(path, layer, name_of))))
            replaced[layer] = layers[-1]
    for setting, left in (("names", given), ("keep", kept)):
        if left:
            places = ", ".join(layer.path for layer in layers) or "none"
            raise ModelError(f"wrap: {setting}: {type(module).__name__} has no table at {min(left)}; it has {places}")
    _refuse_twice("table", [(table.name, _place(layer, table)) for layer in layers for table in dict.fromkeys(_tables(layer))])
    replace_layers(module, replaced)
    _make_buffers(module)
    # A weight that is still a parameter of the module is shared with a layer that keeps it.
    for path, parameter in module.named_parameters():
        if id(parameter) in weights:
            raise ModelError(
                f"wrap: {weights[id(parameter)]}: its weight is also {path}, which the module would keep; a table cannot share its weight"
            )
    return layers


def _make_buffers(module: nn.Module) -> None:
    """Turn parameters of whole numbers, such as places of columns, into buffers. No optimizer changes them."""
    for layer in module.modules():
        for name, parameter in list(layer._parameters.items()):
            if parameter is not None and not (parameter.is_floating_point() or parameter.requires_grad):
                del layer._parameters[name]
                layer.register_buffer(name, parameter.detach())


def _refuse_twice(kind: str, named: Sequence[tuple[str, str]]) -> None:
    """Raise ModelError if two tables or two features have the same name.

    Args:
        kind: "table" or "feature", for the error.
        named: each name with the path of its table in the module.
    """
    often = Counter(name for name, _ in named)
    for name, count in often.items():
        if count > 1:
            places = [place for other, place in named if other == name]
            raise ModelError(
                f'wrap: {kind} {name}: {" and ".join(places)} would both have this name; give one another name: names={{"{places[0]}": "..."}}'
            )


def _calls(wrapped: Wrapped, rows: WrappedRows) -> list[ColumnUse]:
    """Return the lookups of forward, each once.

    Runs forward once in evaluation mode, on synthetic samples. The module and the random number
    generators are unchanged afterwards.

    Raises:
        ModelError: forward failed or is not supported.
    """
    sizes = {size for parameter in wrapped.parameters() for size in parameter.shape}
    samples = next((count for count in _SAMPLES if count not in sizes), _SAMPLES[-1])
    # If a parameter has the same size as the batch, a tensor with two such dimensions need not pair
    # samples.
    mixes = getattr(wrapped.module, "mixes_samples", False) or samples in sizes
    rows.calls = []
    try:
        with modes_kept(wrapped), torch.random.fork_rng(devices=[]), torch.no_grad():
            wrapped.eval()
            with contextlib.nullcontext() if mixes else _RefusesPairs(samples):
                wrapped.trace(samples)
        return list(dict.fromkeys(rows.calls))
    except ModelError:
        raise
    except UnsupportedUse as error:
        raise ModelError(f"wrap: {type(wrapped.module).__name__}: {error.what}{raised_at(error)}; {error.remedy}") from error
    except _Paired as error:
        raise ModelError(
            f"wrap: {type(wrapped.module).__name__}: forward pairs every sample with every other, in a tensor {error}{raised_at(error)}: {_POOLED}; "
            "if the module is meant to mix samples, declare mixes_samples = True in its class"
        ) from error
    except Exception as error:  # a user's module may raise anything
        # torch raises these types if forward takes [b, dimension] for the rows of a sequence,
        # [b, length, dimension].
        shapes = isinstance(error, RuntimeError | IndexError | ValueError | AssertionError)
        # Python raises these if an argument is a dict and not a tensor, or the other way round.
        kinds = isinstance(error, TypeError | KeyError) or isinstance(getattr(error, "obj", None), Ids | dict)
        took_rows = any(isinstance(call.layer, Lookup) and not call.layer.is_bag for call in rows.calls)
        raise ModelError(
            f"wrap: {type(wrapped.module).__name__}: forward failed: {type(error).__name__}: {error}{raised_at(error)}"
            + (f"; if it uses a sequence: {_POOLED}" if shapes and took_rows else "")
            + (f"; it was called with {wrapped._arguments.text()}; give columns and dense as forward takes them" if kinds else "")
        ) from error
    finally:
        rows.calls = None


def _features(calls: Sequence[ColumnUse], arguments: Arguments) -> tuple[WrappedFeature, ...]:
    """Return the features that follow from the lookups of forward, in order.

    Records in each layer the feature of each of its columns.

    Raises:
        ModelError: two features have the same name, a collection is given two arguments, or a layer
            looks up one column with two constants added.
    """
    features: list[WrappedFeature] = []
    places: list[tuple[str, str]] = []
    for call in calls:
        layer, path = call.layer, call.path
        own = [other for other in calls if other.layer is layer]
        if isinstance(layer, Collection):
            if len(own) > 1:
                raise ModelError(
                    f"wrap: {layer.path}: is given two arguments; a collection has features of its own, so it needs to be given one"
                )
            features += [WrappedFeature(name, table, key.partition("@")[0]) for key, name, table in layer.keys]
            places += [(name, _place(layer, table)) for _, name, table in layer.keys]
            continue
        if (offsets := [other.offset for other in own if other.path == path]) != [call.offset]:
            raise ModelError(
                f"wrap: {layer.path}: looks up {text_of(path)} with {offsets[0]} and with {offsets[1]} added; one column has one row of a table; use "
                "two tables"
            )
        column, name = arguments.column(path), _name_in(layer, own, path, arguments)
        layer.features[path] = name
        features.append(WrappedFeature(name, _part(layer, own, call, arguments), column or name))
        places.append((name, layer.path))
    _refuse_twice("feature", places)
    return tuple(features)


def _name_in(layer: Lookup, own: Sequence[ColumnUse], path: Path, arguments: Arguments) -> str:
    """Return the name of the feature of a layer's column: with several, the column's name follows.

    Args:
        own: the lookups of the layer.
    """
    if len(own) == 1:
        return layer.table.name
    return feature_name(f"{layer.table.name}_{arguments.column(path) or '_'.join(map(str, path))}")


def _part(layer: Lookup, own: Sequence[ColumnUse], call: ColumnUse, arguments: Arguments) -> TorchTable:
    """Return the table of one of a layer's columns.

    Columns to which forward adds different constants use different parts of the layer's table. Each
    part is a table, named as the first feature that uses it, in which ids begin at 0. It ends where
    the next begins.

    Args:
        own: the lookups of the layer.
    """
    offsets = sorted({other.offset for other in own})
    if offsets == [0]:
        return layer.table
    end = next((offset for offset in offsets if offset > call.offset), layer.table.rows)
    if end <= call.offset:
        raise ModelError(
            f"wrap: {layer.path}: has {layer.table.rows:,} rows, and forward adds {call.offset:,} to the ids {text_of(call.path)}; the constant must "
            "be below the number of rows"
        )
    first = next(other for other in own if other.offset == call.offset)
    padding = layer.table.padding
    return replace(
        layer.table,
        name=_name_in(layer, own, first.path, arguments),
        rows=end - call.offset,
        padding=padding - call.offset if padding is not None and call.offset <= padding < end else None,
    )
