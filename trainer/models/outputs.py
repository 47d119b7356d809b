"""The outputs of a wrapped module: which part of what forward returns, and without a final sigmoid."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from foreload.trainer.errors import ModelError
from foreload.trainer.models.ids import mapped, operation_name

_IN_PLACE = frozenset((torch.sigmoid_, Tensor.sigmoid_))
_SIGMOIDS = frozenset((torch.sigmoid, Tensor.sigmoid, torch.special.expit)) | _IN_PLACE
_NAMES = (
    "squeeze unsqueeze view reshape flatten ravel view_as reshape_as transpose t T permute select narrow getitem unbind split chunk contiguous clone "
    "float to cpu cat concat concatenate stack hstack column_stack expand"
)
_MOVING = frozenset(_NAMES.split())
"""Operations that move elements, or leave them as they are."""
_LIMITING = frozenset(("clamp", "clip"))
"""Operations that keep probabilities away from 0 and 1. Their logits stay as they are."""


class Probabilities(Tensor):
    """The result of a sigmoid, which remembers what the sigmoid was given.

    After an operation that moves elements the result remembers, too. The result of any other
    operation is a plain tensor.

    Attributes:
        values: the probabilities.
        logits: the input of the sigmoid, of the same shape. A part that is joined with
            probabilities, and is no result of a sigmoid, is in both.
    """

    values: Tensor  # type: ignore[assignment]
    logits: Tensor

    @staticmethod
    def __new__(cls: type[Probabilities], values: Tensor, logits: Tensor) -> Probabilities:
        one: Probabilities = Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype, device=values.device)
        one.values, one.logits = values, logits
        return one

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = operation_name(function)
        values = function(*mapped(args, _values), **mapped(kwargs, _values))
        if name in _MOVING:
            logits = function(*mapped(args, _logits), **mapped(kwargs, _logits))
            if isinstance(values, Tensor):
                return Probabilities(values, logits)
            return tuple(Probabilities(*part) for part in zip(values, logits, strict=True))
        if name in _LIMITING and isinstance(args[0], Probabilities):
            return Probabilities(values, args[0].logits)
        return values

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return function(*mapped(args, _values), **mapped(kwargs or {}, _values))


def _values(value: Any) -> Any:
    return value.values if isinstance(value, Probabilities) else value


def _logits(value: Any) -> Any:
    return value.logits if isinstance(value, Probabilities) else value


class _Sigmoids(TorchFunctionMode):
    """Makes every sigmoid return Probabilities."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function not in _SIGMOIDS or not args:
            return function(*args, **(kwargs or {}))
        given = mapped(args[0], _values)
        if function in _IN_PLACE:
            given = given.clone()
        result = function(*args, **(kwargs or {}))
        return Probabilities(mapped(result, _values), given) if isinstance(result, Tensor) else result


@dataclass(frozen=True, slots=True)
class Chosen:
    """Which part of what forward returns is the outputs.

    Attributes:
        keys: the keys of a dict, in the order of the labels. If empty, the dict has one key.
        layers: the paths of layers whose results are the logits, in the order of the labels. If
            empty, forward returns the outputs.
    """

    keys: tuple[str, ...]
    layers: tuple[str, ...]

    @staticmethod
    def of(module: nn.Module, output: str | Sequence[str] | None, logits: str | Sequence[str] | None) -> Chosen:
        """Return the choice that the arguments of `wrap` describe.

        Raises:
            ModelError: both are given, or the module has no such layer.
        """
        chosen = Chosen(_listed(output), _listed(logits))
        if chosen.keys and chosen.layers:
            raise ModelError(
                "wrap: output and logits: only one of them may be given; logits names layers, and output keys of a dict"
            )
        paths = [path for path, _ in module.named_modules() if path]
        for path in chosen.layers:
            if path not in paths:
                raise ModelError(f"wrap: logits: {type(module).__name__} has no layer {path}; it has {', '.join(paths)}")
        return chosen

    def call(self, module: nn.Module, forward: Callable[[], Any], own_loss: bool, removes_sigmoid: bool) -> Any:
        """Call forward, and return its outputs, or (outputs, own losses).

        An output [b, 1] is returned as [b]. Several outputs, each [b] or [b, 1], are returned as
        one tensor [b, labels].

        Args:
            module: the module that has the layers.
            own_loss: whether forward returns (outputs, losses).
            removes_sigmoid: whether results of a sigmoid are returned as Probabilities.
        """
        results: dict[str, Tensor] = {}
        with _results_of(module, self.layers, results), _Sigmoids() if removes_sigmoid else contextlib.nullcontext():
            outputs = forward()
            losses: tuple[Any, ...] = ()
            if own_loss and isinstance(outputs, tuple) and len(outputs) == 2:
                outputs, losses = outputs[0], (_as_column(outputs[1]),)
            if self.layers:
                outputs = [results[path] for path in self.layers] if len(self.layers) > 1 else results[self.layers[0]]
            outputs = _as_labels(self._of_keys(module, outputs))
        return (outputs, *losses) if losses else outputs

    def _of_keys(self, module: nn.Module, outputs: Any) -> Any:
        if not isinstance(outputs, Mapping):
            if self.keys:
                raise ModelError(
                    f"wrap: output: forward of {type(module).__name__} must return a dict with {', '.join(self.keys)}; got {_kind(outputs)}; "
                    "leave output out"
                )
            return outputs
        keys = self.keys or tuple(outputs)
        missing = [key for key in keys if key not in outputs]
        if missing or (len(keys) != 1 and not self.keys):
            keys_of_dict = ", ".join(map(str, outputs)) or "no keys"
            raise ModelError(
                f"wrap: output: forward of {type(module).__name__} returns a dict with {keys_of_dict}; name the key that "
                f'has the outputs, or those of several labels in order: output="..."' + (f"; got {missing[0]}" if missing else "")
            )
        return [outputs[key] for key in keys] if len(keys) > 1 else outputs[keys[0]]


@contextlib.contextmanager
def _results_of(module: nn.Module, paths: Sequence[str], results: dict[str, Tensor]) -> Iterator[None]:
    """Put the results of layers into `results`, by path, while the context lasts.

    Raises:
        ModelError: a layer is not called once.
    """

    def note(path: str) -> Callable[[nn.Module, Any, Any], None]:
        def after(layer: nn.Module, given: Any, result: Any) -> None:
            if path in results:
                raise ModelError(f"wrap: logits: {path} must be called once in forward; it is called again; name another layer")
            # A copy, since forward may change the result in place.
            results[path] = result.clone() if isinstance(result, Tensor) else result

        return after

    handles = [module.get_submodule(path).register_forward_hook(note(path)) for path in paths]
    try:
        yield
        for path in paths:
            if path not in results:
                raise ModelError(f"wrap: logits: {path} must be called once in forward; it is not called; name another layer")
    finally:
        for handle in handles:
            handle.remove()


def _kind(value: object) -> str:
    return "a tensor" if isinstance(value, Tensor) else type(value).__name__


def _listed(given: str | Sequence[str] | None) -> tuple[str, ...]:
    return () if given is None else (given,) if isinstance(given, str) else tuple(given)


def _as_labels(outputs: Any) -> Any:
    """Return one output as [b], and several as [b, labels]."""
    if isinstance(outputs, list | tuple) and len(outputs) > 1 and all(isinstance(one, Tensor) for one in outputs):
        columns = [_as_column(one) for one in outputs]
        return torch.stack(columns, 1) if all(one.dim() == 1 for one in columns) else outputs
    return _as_column(outputs)


def _as_column(output: Any) -> Any:
    """Return an output [b, 1] as [b], and any other output unchanged."""
    return output.squeeze(1) if isinstance(output, Tensor) and output.dim() == 2 and output.shape[1] == 1 else output


def sigmoid_columns(outputs: Any) -> tuple[bool, ...]:
    """Return for each label whether its outputs are the result of a sigmoid.

    Args:
        outputs: [b] or [b, labels], of samples that differ.
    """
    if not isinstance(outputs, Probabilities):
        return ()
    values, logits = (part.reshape(len(part), -1) for part in (outputs.values, outputs.logits))
    # A part that is joined with probabilities is its own logits.
    return tuple((values != logits).any(0).tolist())


def without_sigmoid(outputs: Any, label_kinds: Sequence[str]) -> Any:
    """Return outputs with the input of a final sigmoid in place of its result.

    Args:
        outputs: [b] or [b, labels].
        label_kinds: the kind of each label. Outputs for numbers keep their sigmoid.
    """
    if not isinstance(outputs, Probabilities):
        return outputs
    kinds = [kind == "click" for kind in label_kinds]
    if all(kinds) or outputs.dim() < 2 or len(kinds) != outputs.shape[1]:
        return outputs.logits if all(kinds) else outputs.values
    return torch.stack([(outputs.logits if click else outputs.values)[:, k] for k, click in enumerate(kinds)], 1)
