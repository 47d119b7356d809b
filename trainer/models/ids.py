"""Placeholders for the ids that a model's forward is called with.

A trainer has no ids. Forward may only pick from a placeholder and pass it to an embedding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch

Path = tuple[str | int, ...]
"""An argument of forward and the indices and keys picked from it: ("ids", 3), ("batch", "user")."""

_SAME = ("long", "int", "to", "contiguous", "clone", "detach", "cpu", "cuda", "squeeze")
_RESHAPED = ("view", "reshape")
_OPERATORS = (
    "eq ne lt le gt ge bool int float index array contains setitem invert neg abs add radd iadd sub rsub isub mul rmul imul mod rmod floordiv "
    "rfloordiv truediv rtruediv and rand or ror xor rxor matmul rmatmul"
)
REMEDY = "ids may only be picked from an argument and given to an embedding (docs/models.md)"


def text_of(path: Path) -> str:
    """Return a path as Python code: batch["user"], ids[3]."""
    picked = (f"[{key}]" if isinstance(key, int) else f'["{key}"]' for key in path[1:])
    return f"{path[0]}{''.join(picked)}"


class Ids:
    """A placeholder for the ids of b samples, in one column or several.

    x[k], x[:, k] and x["name"] pick one column. Shapes, conversions and reshapes to [b] work as for
    a tensor. Operations that need the values of the ids raise TypeError or AttributeError.

    Attributes:
        path: the argument of forward, and the indices and keys that lead to these ids.
        columns: the names of the columns, for ids [b, columns]. If None, the ids are one column,
            [b].
    """

    def __init__(self, path: Path, samples: int, device: torch.device, columns: Sequence[str] | None = None) -> None:
        self.path, self.columns, self.device, self.dtype = path, columns, device, torch.int64
        sizes = (samples,) if columns is None else (samples, len(columns))
        # While torch.export traces forward, the number of samples is a symbol, which torch.Size
        # would turn into a number.
        self.shape = torch.Size(sizes) if type(samples) is int else sizes

    def __getitem__(self, key: Any) -> Ids:
        if isinstance(key, tuple) and len(key) == 2 and key[0] in (slice(None), Ellipsis):
            key = key[1]
        if isinstance(key, str):
            return Ids((*self.path, key), self.shape[0], self.device)
        if not isinstance(key, int) or isinstance(key, bool):
            self._refuse(f"takes [{key!r}] of")
        if self.columns is not None and not -len(self.columns) <= key < len(self.columns):
            raise IndexError(f"{text_of(self.path)} has {len(self.columns)} columns, as given to wrap; forward takes [{key}]")
        if self.columns is None and key < 0:
            self._refuse(f"takes [{key}] of", f'; say how many they are: columns={{"{self.path[0]}": [...]}}')
        return Ids((*self.path, key % len(self.columns) if self.columns is not None else key), self.shape[0], self.device)

    def __iter__(self) -> Iterator[Ids]:
        if self.columns is None:
            self._refuse("goes through", f'; say what they are: columns={{"{self.path[0]}": [...]}}')
        return (self[place] for place in range(len(self.columns)))

    def __len__(self) -> int:
        return self.shape[0] if self.columns is None else len(self.columns)

    def unbind(self, dim: int = 0) -> tuple[Ids, ...]:
        """Return the columns. `dim` must be 1 or -1."""
        if dim not in (1, -1):
            self._refuse(f"takes unbind({dim}) of")
        return tuple(self)

    def size(self, dim: int | None = None) -> Any:
        """Return the shape, or its size in one dimension."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """Return the number of dimensions: 1 for one column, 2 for several."""
        return len(self.shape)

    def stride(self) -> int:
        """Return the number of samples, as a KeyedJaggedTensor of TorchRec does."""
        return self.shape[0]

    def __getattr__(self, name: str) -> Any:
        if name in _SAME:
            return lambda *rest, **options: self
        if name in _RESHAPED:
            return self._reshaped
        if name == "flatten":
            return lambda: self._reshaped(-1)
        if name.startswith("__"):  # a name that Python itself looks up
            raise AttributeError(name)
        raise AttributeError(f"forward takes .{name} of the ids {text_of(self.path)}; {REMEDY}")

    def _reshaped(self, *shape: Any) -> Ids:
        if self.columns is not None or shape not in ((-1,), ((-1,),), (self.shape[0],)):
            self._refuse(f"gives a shape {shape} to")
        return self

    def _refuse(self, what: str, more: str = "") -> NoReturn:
        raise TypeError(f"forward {what} the ids {text_of(self.path)}{more or '; ' + REMEDY}")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), options: Any = None) -> NoReturn:
        given = next((value for value in _within((arguments, options)) if isinstance(value, Ids)), None)
        named = text_of(given.path) if given is not None else "?"
        argument = given.path[0] if given is not None else "?"
        raise TypeError(
            f"forward gives the ids {named} to torch.{getattr(function, '__name__', function)}; {REMEDY}; if they are dense values, say "
            f'dense={{"{argument}": [...]}}'
        )

    # Without this, code that hashes ids would silently use their identity.
    __hash__ = None  # type: ignore[assignment]


def _within(value: Any) -> Iterator[Any]:
    """Yield the values in nested lists, tuples and mappings, one after the other."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from _within(item)
    else:
        yield value


def _refused(name: str) -> Any:
    def operator(self: Ids, *others: Any) -> NoReturn:
        self._refuse(f"takes {name} of")

    return operator


for _name in _OPERATORS.split():
    setattr(Ids, f"__{_name}__", _refused(_name))
