"""The exponential moving average of dense parameters (docs/definitions.md, A step's arithmetic).

`--dense-ema` switches it on. It is kept under the key "ema" beside the optimizer's own state of a
parameter, so the code that saves, sends, undoes or digests that state handles the average too. A
parameter that has not been stepped yet has no average: the parameter itself counts as its average.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from foreload.trainer.compute import dense_optimizers

AVERAGE = "ema"
"""The key of a parameter's average in the optimizer's state."""

_Value = TypeVar("_Value")  # a tensor, or an array


def step(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], decay: float) -> None:
    """Step the optimizer, and then update the averages of the parameters.

    First `dense_optimizers.step` runs. Then average = decay * average + (1 - decay) * parameter,
    which starts from the initial parameters.

    Args:
        parameters: all parameters that the optimizer steps.
        decay: above 0, and below 1 as a float32.
    """
    # The optimizer creates a parameter's own state in its first step only if the parameter has no
    # state at all. So the averages are stored after that step.
    begun = {parameter: optimizer.state.get(parameter, {}).get(AVERAGE) for parameter in parameters}
    averages = [parameter.detach().clone() if (own := begun[parameter]) is None else own for parameter in parameters]
    dense_optimizers.step(optimizer)
    if not averages:
        return
    with torch.no_grad():
        # `add_(alpha=...)` is not used, since it is fused on some processors.
        torch._foreach_mul_(averages, float(np.float32(decay)))
        torch._foreach_add_(averages, torch._foreach_mul(list(parameters), float(np.float32(1.0 - decay))))
    for parameter, average in zip(parameters, averages, strict=True):
        optimizer.state[parameter][AVERAGE] = average


@contextlib.contextmanager
def averaged(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> Iterator[None]:
    """Return a context in which the parameters have the values of their averages, if they have any.

    Nothing is copied.
    """
    held = [(parameter, parameter.data, optimizer.state.get(parameter, {}).get(AVERAGE)) for parameter in parameters]
    try:
        for parameter, _, average in held:
            if average is not None:
                parameter.data = average
        yield
    finally:
        for parameter, own, _ in held:
            parameter.data = own


def to_serve(parameters: Mapping[str, _Value], state: Mapping[str, _Value]) -> dict[str, _Value]:
    """Return the parameters that a model is evaluated and served with.

    These are the averages where the model has any.

    Args:
        parameters: by name.
        state: by "<parameter>/<key>".
    """
    return {name: state.get(f"{name}/{AVERAGE}", parameter) for name, parameter in parameters.items()}


def beside_served(parameters: Mapping[str, _Value], state: Mapping[str, _Value]) -> dict[str, _Value]:
    """Return the part of a dense part that `to_serve` leaves out.

    This is the optimizer's state. Where averages are served, it also has the trained parameters, as
    "<parameter>/trained".
    """
    kept = {name: value for name, value in state.items() if not name.endswith(f"/{AVERAGE}")}
    trained = {f"{name}/trained": value for name, value in parameters.items() if f"{name}/{AVERAGE}" in state}
    return kept | trained
