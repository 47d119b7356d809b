"""What a model keeps beside its parameters and buffers: attributes, at any depth, as values that can be compared."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import pickle
import random
import types
from collections import deque
from collections.abc import Iterator, Mapping, Set
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

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
