"""Terms of the loss that a module computes itself (docs/models.md, A module's own loss).

A forward may return (outputs, losses), where losses are float32 [b], one of each sample. A module
may also have a method `penalty()`, which returns a float32 scalar of its parameters alone.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from foreload.trainer.errors import ModelError


def outputs_of(result: Any) -> Any:
    """Return the outputs in what forward returned, without losses of its own."""
    return result[0] if isinstance(result, tuple) and len(result) == 2 else result


def own_losses_of(name: str, result: Any, samples: int) -> Tensor | None:
    """Return the module's own losses in what forward returned, float32 [b]. None if it has none.

    Args:
        name: of the model, for errors.
        result: of forward.
        samples: b, the number of samples that forward was given.

    Raises:
        ModelError: they are something else.
    """
    if not isinstance(result, tuple) or len(result) != 2:
        return None
    losses = result[1]
    if not isinstance(losses, Tensor) or losses.shape != (samples,) or losses.dtype != torch.float32:
        got = f"{losses.dtype} {list(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
        raise ModelError(
            f"{name}: forward must return the outputs alone, or with a loss of its own for each sample, torch.float32 [{samples}], for {samples} "
            f"samples; got {got} as the second; return what each sample adds, and put a term of the parameters alone into a method penalty()"
        )
    return losses


def outputs_and_losses(name: str, result: Any, samples: int) -> Tensor:
    """Return all that forward returned for each sample as one tensor, float32 [b] or [b, columns]."""
    outputs: Tensor = outputs_of(result)
    losses = own_losses_of(name, result, samples)
    return outputs if losses is None else torch.cat([outputs.reshape(samples, -1), losses[:, None]], 1)


def check_penalty_arguments(name: str, module: nn.Module) -> None:
    """Raise ModelError if the module has a method `penalty` that needs arguments.

    Args:
        name: of the model, for errors.
    """
    method = getattr(module, "penalty", None)
    if inspect.isroutine(method) and any(
        parameter.default is parameter.empty and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        for parameter in inspect.signature(method).parameters.values()
    ):
        raise ModelError(
            f"{name}: penalty() must take no arguments, since it is a term of the loss that depends on the parameters alone; rename a method that is "
            "something else"
        )


def penalty_of(name: str, module: nn.Module) -> Tensor | None:
    """Return the module's penalty, a float32 scalar with its graph. None if it has none.

    Args:
        name: of the model, for errors.

    Raises:
        ModelError: the method returns something else.
    """
    method = getattr(module, "penalty", None)
    if not inspect.isroutine(method):
        return None
    value = method()
    if not isinstance(value, Tensor) or value.shape != () or value.dtype != torch.float32:
        got = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ModelError(f"{name}: penalty() must return a scalar, torch.float32 []; got {got}; add it up, such as with .sum()")
    return value
