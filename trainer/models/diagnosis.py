"""What is wrong with a model on made-up samples, and where in it that comes from."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from foreload.trainer.errors import ModelError
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
