"""What the forward of a wrapped module is called with: dense values where it takes these, and Ids where it takes ids."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from foreload.trainer.errors import ModelError
from foreload.trainer.models.ids import Ids, Path

DenseValues = str | Sequence[str] | Mapping[str, str | Sequence[str]]
"""The dense values that an argument of forward holds: one, [b]; several, [b, n], in order; or such by the keys of a dict."""
Columns = str | Sequence[str] | Mapping[str, str]
"""The columns of the data whose ids an argument of forward holds: one; several, in order; or by the keys of a dict."""


@dataclass(frozen=True, slots=True)
class Arguments:
    """What the forward of a module is called with. dense, columns: what its arguments hold, by their names; step: the argument that gets the
    training step, None if none does; what is in none of these holds ids.
    """

    signature: inspect.Signature
    dense: Mapping[str, DenseValues]
    columns: Mapping[str, Columns]
    step: str | None = None

    @classmethod
    def of(
        cls, module: nn.Module, dense: Mapping[str, DenseValues], columns: Mapping[str, Columns], step: str | None
    ) -> Arguments:
        """Those of a module. Raises ModelError where one is named that it does not have, or is said to hold two things."""
        signature = inspect.signature(module.forward)
        if step in (*dense, *columns):
            raise ModelError(f"wrap: argument {step}: must be the step, dense values or ids, and only one of these; name it once")
        for name in (*dense, *columns, *([] if step is None else [step])):
            if name not in signature.parameters:
                known = ", ".join(signature.parameters) or "none"
                raise ModelError(f"wrap: forward of {type(module).__name__} has no argument {name}; it has {known}")
            values, ids = dense.get(name), columns.get(name)
            both = values is not None and ids is not None
            if both and not (isinstance(values, Mapping) and isinstance(ids, Mapping) and not values.keys() & ids.keys()):
                raise ModelError(f"wrap: argument {name}: must be dense values or ids, not both, but for the keys of a dict")
        return cls(signature, dict(dense), dict(columns), step)

    @property
    def dense_names(self) -> tuple[str, ...]:
        """The dense values, in order."""
        return tuple(name for _, _, given in self._dense_parts() for name in _listed(given))

    def _dense_parts(self) -> Iterator[tuple[str, str | None, str | Sequence[str]]]:
        """Each argument that holds dense values, the key within it, None where it is none, and what is there."""
        for name, given in self.dense.items():
            if isinstance(given, Mapping):
                yield from ((name, key, of_key) for key, of_key in given.items())
            else:
                yield name, None, given

    def call(self, module: nn.Module, dense: Tensor, step: int) -> Any:
        """Call the module for the samples of `dense`, float32 [b, n], in a training step, or after so many."""
        values = self._dense(dense)
        bound = self.signature.bind_partial()
        # In the order of the signature, by which positional arguments are given.
        for name, parameter in self.signature.parameters.items():
            if name == self.step:
                bound.arguments[name] = step
            elif name in self.columns or (name not in self.dense and _is_needed(parameter)):
                ids = self._ids(parameter, dense.shape[0], dense.device)
                bound.arguments[name] = ids | values[name] if name in values else ids
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

    def _ids(self, parameter: inspect.Parameter, samples: int, device: torch.device) -> Any:
        name, given = parameter.name, self.columns.get(parameter.name)
        if isinstance(given, Mapping):
            return {key: Ids((name, key), samples, device) for key in given}
        if given is None or isinstance(given, str):
            return Ids((name,), samples, device)
        if parameter.kind is parameter.VAR_POSITIONAL:
            return tuple(Ids((name, place), samples, device) for place in range(len(given)))
        return Ids((name,), samples, device, tuple(given))

    def column(self, path: Path) -> str | None:
        """The column that ids are from, where that is known."""
        given, last = self.columns.get(str(path[0])), path[-1]
        if len(path) == 1:
            return given if isinstance(given, str) else str(last)
        if isinstance(last, str):
            return given.get(last, last) if isinstance(given, Mapping) else last
        return None if given is None or isinstance(given, str | Mapping) else given[last]


def _listed(given: str | Sequence[str]) -> Sequence[str]:
    return [given] if isinstance(given, str) else given


def _is_needed(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
