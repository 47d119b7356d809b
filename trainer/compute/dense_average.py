"""The exponential moving average of the dense parameters (`--dense-ema`; docs/definitions.md, A step's arithmetic).

It stands beside the optimizer's own state of a parameter, as "ema", so whatever saves, sends, undoes or digests that has it too. A parameter that
was not stepped yet has none: it is its own average.
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
    """`dense_optimizers.step`, and then average = decay * average + (1 - decay) * parameter, from the initial parameters on.

    parameters: all that the optimizer steps; decay: above 0, and below 1 as a float32.
    """
    # The optimizer makes its own state in its first step, of a parameter that has none; so the averages begin behind it.
    begun = {parameter: optimizer.state.get(parameter, {}).get(AVERAGE) for parameter in parameters}
    averages = [parameter.detach().clone() if (own := begun[parameter]) is None else own for parameter in parameters]
    dense_optimizers.step(optimizer)
    if not averages:
        return
    with torch.no_grad():
        # Not `add_(alpha=...)`, which is fused on some processors.
        torch._foreach_mul_(averages, float(np.float32(decay)))
        torch._foreach_add_(averages, torch._foreach_mul(list(parameters), float(np.float32(1.0 - decay))))
    for parameter, average in zip(parameters, averages, strict=True):
        optimizer.state[parameter][AVERAGE] = average


@contextlib.contextmanager
def averaged(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> Iterator[None]:
    """Within the context parameters are their averages, where they have any; nothing is copied."""
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
    """The parameters that a model is evaluated and served with: their averages where it has any.

    parameters: by name; state: by "<parameter>/<key>".
    """
    return {name: state.get(f"{name}/{AVERAGE}", parameter) for name, parameter in parameters.items()}


def beside_served(parameters: Mapping[str, _Value], state: Mapping[str, _Value]) -> dict[str, _Value]:
    """What of a dense part `to_serve` leaves out: the optimizer's state, and, where they are not served, the trained parameters as
    "<parameter>/trained".
    """
    kept = {name: value for name, value in state.items() if not name.endswith(f"/{AVERAGE}")}
    trained = {f"{name}/trained": value for name, value in parameters.items() if f"{name}/{AVERAGE}" in state}
    return kept | trained
