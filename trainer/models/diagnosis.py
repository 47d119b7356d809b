"""Diagnose a model on synthetic samples.

Finds faults and their place in the model, state that it keeps besides its parameters, and outputs
that depend on other samples.
"""

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
"""Operations, as autograd names them, that turn probabilities into probabilities."""

_JOINS = ("Stack", "Cat")
"""Operations that put columns side by side."""


# The folders of torch and foreload. A frame in one of them is not code of the user.
_PACKAGES = tuple(
    os.path.dirname(os.path.abspath(file)) + os.sep for file in (torch.__file__, os.path.dirname(os.path.dirname(__file__)))
)


def check_outputs(name: str, outputs: object, spec: ModelSpec, samples: int) -> None:
    """Check that the outputs of forward have the right shape and dtype, and are logits.

    Args:
        name: the name of the model, for errors.
        outputs: the result of forward.
        spec: the inputs and labels of the model.
        samples: the number of samples that forward was given.

    Raises:
        ModelError: forward returned something else, or probabilities.
    """
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
            f"{name}: forward must return logits{of_label}, and ends in a sigmoid; return the sigmoid's input, "
            "since the loss has a sigmoid of its own"
        )


def ends_in_sigmoid(outputs: Tensor, clicks: Sequence[bool]) -> int | None:
    """Return the first column of clicks whose outputs are the result of a sigmoid, else None.

    Such outputs are probabilities, where logits are expected.

    Args:
        outputs: [b] or [b, labels], with their autograd graph.
        clicks: whether each label is one of clicks.
    """
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
    """Return the name that autograd gives an operation."""
    return str(node.name().rstrip("0123456789").removesuffix("Backward"))


def first_not_finite(module: nn.Module, forward: Callable[[], object]) -> str:
    """Return a description of the first layer whose output is NaN or infinite.

    Args:
        module: the module to observe.
        forward: runs the module.
    """
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
    return places[0] if places else "its own forward, in some of its calls"


def not_finite_gradient(module: nn.Module, names: tuple[str, ...], of_block: Tensor | None) -> str | None:
    """Return a parameter or feature whose gradient is NaN or infinite after a backward, or None.

    Args:
        module: the module, which holds the gradients of its parameters.
        names: the names of the features.
        of_block: the gradient of the embedding block, [b, F, W].
    """
    for path, parameter in module.named_parameters():
        if parameter.grad is not None and not parameter.grad.to_dense().isfinite().all():
            return f"parameter {path}"
    if of_block is not None and not of_block.isfinite().all():
        return f"feature {names[int((~of_block.isfinite()).any(2).any(0).nonzero()[0])]}"
    return None


def raised_at(error: BaseException) -> str:
    """Return where the user's code raised an error, as " (model.py, line 7)".

    Empty if no frame of the user's code is known.
    """
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


# The most values that a search visits. It goes breadth first, so it leaves out those of deeper
# levels.
_MOST_VALUES = 50_000
_MOST_BYTES = 1 << 30  # the most bytes of tensors and arrays that a search reads
_MOST_TEXT = 60  # characters of a value in a message
_PLAIN = (type(None), bool, int, float, complex, str, bytes, range, slice, np.generic, torch.dtype, torch.device, itertools.count)
_NOT_THEIRS = ("torch", "numpy", "foreload", "builtins")
"""Packages whose objects are not searched for state.

The types that this module names itself, such as tensors and generators, are exceptions.
"""


def checksum(value: Tensor | np.ndarray) -> str:
    """Return 16 hexadecimal digits that identify the bits, shape and dtype of a tensor or array."""
    digest = hashlib.sha256(f"{value.dtype} {list(value.shape)}\n".encode())
    if isinstance(value, Tensor):
        dense = value.detach() if value.layout is torch.strided else value.detach().to_dense()
        digest.update(dense.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    else:
        digest.update(value.tobytes())
    return digest.hexdigest()[:16]


def hidden_state(root: object) -> dict[str, str]:
    """Return the state that a module or function keeps, as text by the path of each attribute.

    Texts are equal if the values are equal. Parameters and buffers of a module's layers are left
    out. The search follows attributes through layers, lists, dicts, sets, tensors, arrays, random
    number generators, closures and a user's own objects. For a user's layers it includes the
    attributes of their classes, and the global variables that their methods name. Objects without
    readable state (a file, a lock, an iterator) are left out.
    """
    return _Search(root).values


class _Search:
    def __init__(self, root: object) -> None:
        self.values: dict[str, str] = {}
        # The objects visited. They are kept alive, because another object could get the address of
        # one that was freed.
        self._seen: dict[int, object] = {}
        # The model's own layers. Parameters and buffers of other layers, which only an attribute
        # refers to, are state.
        self._layers = {id(layer) for layer in root.modules()} if isinstance(root, nn.Module) else set()
        self._bytes_left = _MOST_BYTES
        self._waiting: deque[tuple[str, Any]] = deque([("", root)])
        while self._waiting and len(self._seen) + len(self.values) < _MOST_VALUES:
            # A user's object may raise any exception when it is inspected. The search continues
            # without it.
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
        """Yield the parts of an object, each with its path."""
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
            # Parameters and buffers of the model are compared by name elsewhere. Hooks are followed
            # like any other attribute.
            if name != "_modules" and not (id(layer) in self._layers and name in ("_parameters", "_buffers")):
                yield _joined(path, name), item
        yield from ((_joined(path, name), child) for name, child in layer._modules.items() if child is not None)
        for kind in type(layer).__mro__:
            if _is_theirs(kind) and id(kind) not in self._seen:
                self._seen[id(kind)] = kind
                yield from ((f"{kind.__name__}.{name}", item) for name, item in _of_class(kind))


def _is_theirs(kind: type) -> bool:
    """Return whether a class is from outside Python, torch, NumPy and foreload."""
    return kind.__module__.partition(".")[0] not in _NOT_THEIRS


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _fields(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of an object, including those of __slots__."""
    yield from list(getattr(value, "__dict__", {}).items())
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name, getattr(value, name)


def _of_class(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a user's class, and the module variables that its methods name."""
    for name, item in list(vars(kind).items()):
        if isinstance(item, types.FunctionType):
            yield from _of_function(item)
        elif not name.startswith("__") and _is_data(item):
            yield name, item


def _of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the state that a function keeps between its calls.

    The state is the variables of its closure, its attributes, and the global variables that hold
    data.
    """
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        # Reading a variable that has no value yet raises ValueError.
        with contextlib.suppress(ValueError):
            yield name, cell.cell_contents
    yield from list(vars(function).items())
    for name in function.__code__.co_names:
        if _is_data(item := function.__globals__.get(name)):
            yield name, item


def _is_data(value: object) -> bool:
    """Return whether a value of a class or module is data.

    Functions, classes and objects of libraries are not.
    """
    if isinstance(value, _PLAIN):
        return value is not None
    kinds = (Tensor, np.ndarray, list, tuple, deque, Mapping, Set)
    return isinstance(value, kinds) or _generator_state(value) is not None


def _generator_state(value: object) -> bytes | None:
    """Return the state of a random number generator, or None for any other value."""
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, np.random.Generator):
        return pickle.dumps(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return pickle.dumps(value.get_state())
    return pickle.dumps(value.getstate()) if isinstance(value, random.Random) else None


def first_change(before: Mapping[str, str], after: Mapping[str, str]) -> str | None:
    """Return the first attribute that differs, as "n: 2, then 4", or None if all are equal."""
    for path in dict.fromkeys((*before, *after)):
        one, other = (state.get(path, "missing") for state in (before, after))
        if one != other:
            return f"{path}: {one:.{_MOST_TEXT}}, then {other:.{_MOST_TEXT}}"
    return None


Forward = Callable[[Tensor, Tensor], Tensor]
"""Maps dense values [b, n] and a block [b, F, W] to outputs, [b] or [b, labels].

The seed is the same in every call, whatever the values are.
"""

# The tolerance between the outputs of one sample at two places, relative to 1 + the absolute value
# of the output. The order of sums may depend on the place.
_NEAR = 1e-3


def mixes_samples(module: nn.Module) -> bool:
    """Return whether the class of a model, or of a part of it, declares `mixes_samples = True`."""
    return any(getattr(part, "mixes_samples", False) is True for part in module.modules())


def check_apart(name: str, module: nn.Module, forward: Forward, dense: Tensor, block: Tensor) -> None:
    """Refuse a module whose outputs depend on other samples, unless it declares that.

    The first check is exact. Two batches of one shape have the same sample at one place and
    different samples everywhere else. The output of the common sample must have the same bits, in
    training and in evaluation mode. The second check has a tolerance and runs in evaluation mode:
    the same sample at another place, and alone. The modes are restored afterwards.

    Args:
        name: the name of the model, for errors.
        module: the module that `forward` runs.
        forward: runs the module on samples of this shape, and on a single sample.
        dense: float32 [b, n].
        block: float32 [b, F, W]. b is at least 2.

    Raises:
        ModelError: an output depends on other samples.
    """
    if mixes_samples(module):
        return
    with modes_kept(module), torch.no_grad():
        for training in (True, False):
            module.train(training)
            outputs = forward(dense, block)
            if not torch.equal(forward(dense, block).nan_to_num(), outputs.nan_to_num()):
                # The module keeps state. That is another fault, which another check reports.
                continue
            _check_bits(name, training, forward, dense, block, outputs)
            if not training:
                _check_place(name, forward, dense, block, outputs)


def _check_bits(name: str, training: bool, forward: Forward, dense: Tensor, block: Tensor, outputs: Tensor) -> None:
    samples = len(block)
    # The values are of the same kind as the given ones. A module may rely on properties of the
    # dense values, so these only change places. Rows are learned and may have any values.
    generator = torch.Generator().manual_seed(samples)
    spread = block.std() + 0.1 if block.numel() > 1 else 0.1
    noise = torch.randn(block.shape, generator=generator).to(block.device) * spread
    other_dense, other_block = dense.roll(1, 0), block.roll(1, 0) + noise
    for place in sorted({0, samples // 2, samples - 1}):
        dense_there, block_there = other_dense.clone(), other_block.clone()
        dense_there[place], block_there[place] = dense[place], block[place]
        got = forward(dense_there, block_there)[place]
        if not torch.equal(got, outputs[place]) and not bool((got.isnan() & outputs[place].isnan()).all()):
            raise _refused(
                name,
                f"{'' if training else 'in evaluation mode '}an output changes with the other samples of its slice, by "
                f"{float((got - outputs[place]).abs().max()):.3g}",
            )


def _check_place(name: str, forward: Forward, dense: Tensor, block: Tensor, outputs: Tensor) -> None:
    rolled = forward(dense.roll(1, 0), block.roll(1, 0)).roll(-1, 0)
    alone = forward(dense[:1].clone(), block[:1].clone())
    for got, wanted, what in ((rolled, outputs, "its place in the slice"), (alone, outputs[:1], "the size of its slice")):
        differs = (got - wanted).abs()
        if bool((differs > _NEAR * (1 + wanted.abs())).any()):
            raise _refused(name, f"an output changes with {what}, by {float(differs.nan_to_num().max()):.3g}")


def _refused(name: str, what: str) -> ModelError:
    return ModelError(
        f"{name}: an output must depend on its own sample alone, since slices differ between training and prediction; "
        f"{what}; look for attention without "
        "batch_first=True, norms over the batch, and [b] with [b, 1], which broadcasts to [b, b]; if it is intended, declare mixes_samples = True in "
        "its class"
    )
