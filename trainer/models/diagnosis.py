"""Diagnose a model on synthetic samples: what is wrong with it and where, what it keeps beside its parameters, and whether samples mix."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import os
import pickle
import random
import traceback
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from foreload.trainer.errors import ModelError
from foreload.trainer.models.inference import modes_kept
from foreload.trainer.models.spec import ModelSpec

_SHAPES = (
    "Squeeze",
    "Unsqueeze",
    "View",
    "UnsafeView",
    "ReshapeAlias",
    "Select",
    "Clone",
    "Alias",
    "Slice",
    "T",
    "Permute",
    "Transpose",
    "Clamp",
)
"""Operations, as autograd names them, that leave probabilities probabilities."""

_JOINS = ("Stack", "Cat")
"""Those that put columns beside each other."""


_PACKAGES = tuple(
    os.path.dirname(os.path.abspath(file)) + os.sep for file in (torch.__file__, os.path.dirname(os.path.dirname(__file__)))
)


def check_outputs(name: str, outputs: object, spec: ModelSpec, samples: int) -> None:
    """Raise ModelError where forward returned for so many samples what is none, or probabilities. name: of the model."""
    shape, clicks = spec.output_shape(samples), [kind == "click" for kind in spec.label_kinds]
    what = ("logits" if clicks[0] else "the predicted number") if len(clicks) == 1 else "an output for each label"
    if not isinstance(outputs, Tensor) or outputs.shape != shape or outputs.dtype != torch.float32:
        got = f"{outputs.dtype} {list(outputs.shape)}" if isinstance(outputs, Tensor) else type(outputs).__name__
        columns = f" ({', '.join(spec.labels)})" if len(clicks) > 1 else ""
        raise ModelError(
            f"{name}: forward must return {what}, torch.float32 {list(shape)}{columns}, for {samples} samples; got {got}"
        )
    if (column := ends_in_sigmoid(outputs, clicks)) is not None:
        of_label = f" for {spec.labels[column]}" if len(clicks) > 1 else ""
        raise ModelError(
            f"{name}: forward must return logits{of_label}, and ends in a sigmoid; return what goes into it, for the loss has one of its own"
        )


def ends_in_sigmoid(outputs: Tensor, clicks: Sequence[bool]) -> int | None:
    """The first column of outputs [b] or [b, labels] that a sigmoid made, so that it has probabilities, though it is that of clicks; else None."""
    return _sigmoid_column(outputs.grad_fn, clicks)


def _sigmoid_column(node: Any, clicks: Sequence[bool]) -> int | None:
    while node is not None and _operation(node) in _SHAPES:
        node = node.next_functions[0][0]
    if node is None:
        return None
    if _operation(node) in _JOINS and len(node.next_functions) == len(clicks):
        parts = enumerate(node.next_functions)
        return next((place for place, (part, _) in parts if _sigmoid_column(part, clicks[place : place + 1]) is not None), None)
    return next((place for place, click in enumerate(clicks) if click), None) if _operation(node) == "Sigmoid" else None


def _operation(node: Any) -> str:
    """An operation, as autograd names it."""
    return str(node.name().rstrip("0123456789").removesuffix("Backward"))


def first_not_finite(module: nn.Module, forward: Callable[[], object]) -> str:
    """The layer of a module that first gives what is NaN or infinite when `forward` calls it, in words."""
    places: list[str] = []

    def note(path: str) -> Callable[[nn.Module, Any, Any], None]:
        def after(layer: nn.Module, given: Any, output: Any) -> None:
            if any(not value.isfinite().all() for value in _tensors(output)):
                places.append(f"{path} ({type(layer).__name__})" if path else "its own forward, not in a layer")

        return after

    handles = [layer.register_forward_hook(note(path)) for path, layer in module.named_modules()]
    try:
        forward()
    finally:
        for handle in handles:
            handle.remove()
    return places[0] if places else "its own forward, now and then"


def not_finite_gradient(module: nn.Module, names: tuple[str, ...], of_block: Tensor | None) -> str | None:
    """A parameter, or the feature, whose gradient is NaN or infinite after a backward. of_block: the gradient of the embedding block, [b, F, W]."""
    for path, parameter in module.named_parameters():
        if parameter.grad is not None and not parameter.grad.to_dense().isfinite().all():
            return f"parameter {path}"
    if of_block is not None and not of_block.isfinite().all():
        return f"feature {names[int((~of_block.isfinite()).any(2).any(0).nonzero()[0])]}"
    return None


def raised_at(error: BaseException) -> str:
    """Where a user's code raised an error, as " (model.py, line 7)"; empty where it is not known."""
    own = [
        frame for frame in traceback.extract_tb(error.__traceback__) if not os.path.abspath(frame.filename).startswith(_PACKAGES)
    ]
    own = [frame for frame in own if os.path.isfile(frame.filename)]
    return f" ({os.path.basename(own[-1].filename)}, line {own[-1].lineno})" if own else ""


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor) and output.is_floating_point():
        yield output
    elif isinstance(output, dict):
        yield from _tensors(list(output.values()))
    elif isinstance(output, list | tuple):
        for item in output:
            yield from _tensors(item)


_MOST_VALUES = 50_000  # values that are looked at; the search goes breadth first, so those of deeper levels are left out
_MOST_BYTES = 1 << 30  # of tensors and arrays that are read
_MOST_TEXT = 60  # characters of a value that are shown
_PLAIN = (type(None), bool, int, float, complex, str, bytes, range, slice, np.generic, torch.dtype, torch.device, itertools.count)
_NOT_THEIRS = ("torch", "numpy", "foreload", "builtins")
"""Packages whose objects have no state of a user's model, but for those that are named here."""


def checksum(value: Tensor | np.ndarray) -> str:
    """Return 16 hexadecimal digits that stand for the bits of a tensor or an array, its shape and its dtype."""
    digest = hashlib.sha256(f"{value.dtype} {list(value.shape)}\n".encode())
    if isinstance(value, Tensor):
        dense = value.detach() if value.layout is torch.strided else value.detach().to_dense()
        digest.update(dense.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    else:
        digest.update(value.tobytes())
    return digest.hexdigest()[:16]


def hidden_state(root: object) -> dict[str, str]:
    """Return what a module or a function keeps, by the path of each attribute, as text that is equal where the values are.

    Parameters and buffers of a module's layers are left out. Attributes are followed through layers, lists, dicts, sets, tensors, arrays,
    generators of random numbers, closures and a user's own objects; of a user's layers the attributes of their classes, and the global
    variables that their methods name, are among them. What has no readable state (a file, a lock, an iterator) is left out.
    """
    return _Search(root).values


class _Search:
    def __init__(self, root: object) -> None:
        self.values: dict[str, str] = {}
        # Objects that were visited, which stay alive: the address of one that is gone may be another one's.
        self._seen: dict[int, object] = {}
        # The layers whose parameters and buffers are the model's own, and not only an attribute's.
        self._layers = {id(layer) for layer in root.modules()} if isinstance(root, nn.Module) else set()
        self._bytes_left = _MOST_BYTES
        self._waiting: deque[tuple[str, Any]] = deque([("", root)])
        while self._waiting and len(self._seen) + len(self.values) < _MOST_VALUES:
            # A user's object may raise whatever it likes when it is looked at; the search goes on without it.
            with contextlib.suppress(Exception):
                self._visit(*self._waiting.popleft())

    def _visit(self, path: str, value: Any) -> None:
        if isinstance(value, _PLAIN):
            self.values[path] = f"{value!r}"
        elif id(value) not in self._seen:
            self._seen[id(value)] = value
            if isinstance(value, Tensor | np.ndarray):
                self._note_array(path, value)
            elif (kept := _generator_state(value)) is not None:
                self.values[path] = f"{type(value).__name__} in state {hashlib.sha256(kept).hexdigest()[:16]}"
            else:
                self._waiting.extend(self._parts(path, value))

    def _note_array(self, path: str, value: Tensor | np.ndarray) -> None:
        if isinstance(value, np.ndarray) and value.dtype.hasobject:
            self._waiting.append((path, value.tolist()))
        elif value.nbytes <= self._bytes_left:
            self._bytes_left -= value.nbytes
            size = value.numel() if isinstance(value, Tensor) else value.size
            shown = value.tolist() if size == 1 else f"with checksum {checksum(value)}"
            self.values[path] = f"{value.dtype} {list(value.shape)} {shown}"

    def _parts(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        """What an object consists of, each part with its path."""
        if isinstance(value, nn.Module):
            yield from self._of_layer(path, value)
        elif isinstance(value, Mapping):
            self.values[f"len({path})"] = str(len(value))
            for place, (key, item) in enumerate(list(islice(value.items(), _MOST_VALUES))):
                name = repr(key) if isinstance(key, str | int) else f"key {place}"
                yield f"{path}[{name}]", item
        elif isinstance(value, list | tuple | deque):
            self.values[f"len({path})"] = str(len(value))
            yield from ((f"{path}[{place}]", item) for place, item in enumerate(islice(value, _MOST_VALUES)))
        elif isinstance(value, Set):
            self.values[path] = f"{len(value)}: {sorted(repr(item) for item in value if isinstance(item, _PLAIN))}"
        elif isinstance(value, functools.partial):
            yield from ((path, part) for part in (value.func, value.args, value.keywords))
        elif isinstance(value, types.MethodType):
            yield from ((path, part) for part in (value.__self__, value.__func__))
        elif isinstance(value, types.FunctionType):
            yield from ((f"{path}{value.__name__}.{name}", item) for name, item in _of_function(value))
        elif not isinstance(value, type | types.ModuleType) and _is_theirs(type(value)):
            yield from ((_joined(path, name), item) for name, item in _fields(value))

    def _of_layer(self, path: str, layer: nn.Module) -> Iterator[tuple[str, Any]]:
        for name, item in list(vars(layer).items()):
            # Parameters and buffers are compared by name elsewhere; hooks are followed like any other attribute.
            if name != "_modules" and not (id(layer) in self._layers and name in ("_parameters", "_buffers")):
                yield _joined(path, name), item
        yield from ((_joined(path, name), child) for name, child in layer._modules.items() if child is not None)
        for kind in type(layer).__mro__:
            if _is_theirs(kind) and id(kind) not in self._seen:
                self._seen[id(kind)] = kind
                yield from ((f"{kind.__name__}.{name}", item) for name, item in _of_class(kind))


def _is_theirs(kind: type) -> bool:
    """Whether a class is not of Python, torch, NumPy or foreload."""
    return kind.__module__.partition(".")[0] not in _NOT_THEIRS


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _fields(value: Any) -> Iterator[tuple[str, Any]]:
    """The attributes of an object, those of __slots__ included."""
    yield from list(getattr(value, "__dict__", {}).items())
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name, getattr(value, name)


def _of_class(kind: type) -> Iterator[tuple[str, Any]]:
    """The attributes of a user's class, and the variables of its module that its methods name."""
    for name, item in list(vars(kind).items()):
        if isinstance(item, types.FunctionType):
            yield from _of_function(item)
        elif not name.startswith("__") and _is_data(item):
            yield name, item


def _of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function keeps between its calls: variables around it, attributes, and global variables that hold data."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        # A variable that has no value yet raises.
        with contextlib.suppress(ValueError):
            yield name, cell.cell_contents
    yield from list(vars(function).items())
    for name in function.__code__.co_names:
        if _is_data(item := function.__globals__.get(name)):
            yield name, item


def _is_data(value: object) -> bool:
    """Whether a value of a class or of a module holds data, rather than being a function, a class or a library's object."""
    if isinstance(value, _PLAIN):
        return value is not None
    kinds = (Tensor, np.ndarray, list, tuple, deque, Mapping, Set)
    return isinstance(value, kinds) or _generator_state(value) is not None


def _generator_state(value: object) -> bytes | None:
    """The state of a generator of random numbers; None for anything else."""
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, np.random.Generator):
        return pickle.dumps(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return pickle.dumps(value.get_state())
    return pickle.dumps(value.getstate()) if isinstance(value, random.Random) else None


def first_change(before: Mapping[str, str], after: Mapping[str, str]) -> str | None:
    """Describe the first attribute whose value differs, as "n: 2, then 4"; None where all are equal."""
    for path in dict.fromkeys((*before, *after)):
        one, other = (state.get(path, "missing") for state in (before, after))
        if one != other:
            return f"{path}: {one:.{_MOST_TEXT}}, then {other:.{_MOST_TEXT}}"
    return None


Forward = Callable[[Tensor, Tensor], Tensor]
"""Outputs [b], or [b, labels], of dense values [b, n] and a block [b, F, W], under one seed whatever their values are."""

_NEAR = 1e-3  # an output to that of the same sample elsewhere, relative to 1 + its size; sums may run in another order there


def mixes_samples(module: nn.Module) -> bool:
    """Whether the class of a model, or of a part of it, declares `mixes_samples = True`."""
    return any(getattr(part, "mixes_samples", False) is True for part in module.modules())


def check_apart(name: str, module: nn.Module, forward: Forward, dense: Tensor, block: Tensor) -> None:
    """Refuse a module whose outputs depend on other samples than their own, unless it declares that. Raises ModelError.

    Exact: of two batches of one shape, with the same sample at one place and others everywhere else, its output has the same bits, in training and
    in evaluation mode. Nearly, in evaluation mode: the same sample at another place, and alone. Modes are as before afterwards.

    Args:
        name: of the model, for errors.
        module: that `forward` runs.
        forward: runs it on samples of this shape, and on one.
        dense: float32 [b, n].
        block: float32 [b, F, W]; b is at least 2.
    """
    if mixes_samples(module):
        return
    with modes_kept(module), torch.no_grad():
        for training in (True, False):
            module.train(training)
            outputs = forward(dense, block)
            if not torch.equal(forward(dense, block).nan_to_num(), outputs.nan_to_num()):
                continue  # it keeps a state, which is another fault, and shows elsewhere
            _check_bits(name, training, forward, dense, block, outputs)
            if not training:
                _check_place(name, forward, dense, block, outputs)


def _check_bits(name: str, training: bool, forward: Forward, dense: Tensor, block: Tensor, outputs: Tensor) -> None:
    samples = len(block)
    # Values of the same kind as those given: dense ones may be anything that a module counts on; rows of tables are learned, and may be any numbers.
    generator = torch.Generator().manual_seed(samples)
    noise = torch.randn(block.shape, generator=generator).to(block.device) * (block.std() + 0.1)
    other_dense, other_block = dense.roll(1, 0), block.roll(1, 0) + noise
    for place in sorted({0, samples // 2, samples - 1}):
        dense_there, block_there = other_dense.clone(), other_block.clone()
        dense_there[place], block_there[place] = dense[place], block[place]
        got = forward(dense_there, block_there)[place]
        if not torch.equal(got, outputs[place]) and not bool((got.isnan() & outputs[place].isnan()).all()):
            raise _refused(
                name, f"{'' if training else 'in evaluation mode '}an output changes with the other samples of its slice, by "
                f"{float((got - outputs[place]).abs().max()):.3g}"
            )  # fmt: skip


def _check_place(name: str, forward: Forward, dense: Tensor, block: Tensor, outputs: Tensor) -> None:
    rolled = forward(dense.roll(1, 0), block.roll(1, 0)).roll(-1, 0)
    alone = forward(dense[:1].clone(), block[:1].clone())
    for got, wanted, what in ((rolled, outputs, "its place in the slice"), (alone, outputs[:1], "the size of its slice")):
        differs = (got - wanted).abs()
        if bool((differs > _NEAR * (1 + wanted.abs())).any()):
            raise _refused(name, f"an output changes with {what}, by {float(differs.nan_to_num().max()):.3g}")


def _refused(name: str, what: str) -> ModelError:
    return ModelError(
        f"{name}: an output must depend on its own sample alone, for slices differ from training to predictions; {what}; look for attention without "
        "batch_first=True, norms over the batch, and [b] with [b, 1], which broadcasts to [b, b]; where it is meant, declare mixes_samples = True in "
        "its class"
    )
