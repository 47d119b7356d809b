"""Optimizers of the dense part: those of torch.optim whose update is a fixed function of parameters, gradients and state.

They are made and stepped so that torch does not import its compiler, which takes two seconds.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from foreload.base.errors import SettingError
from foreload.trainer.errors import ModelError, RunError
from foreload.trainer.models.building import parse_value

_ALLOWED = ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD")
DENSE_OPTIMIZERS = {name.lower(): name for name in _ALLOWED}
_REFUSED = {"lbfgs": "evaluates the model several times a step", "sparseadam": "takes sparse gradients only"}
# Settings that are not the user's: which of several implementations computes the update, with other bits.
_OWN = {"foreach": False, "fused": False, "capturable": False, "differentiable": False}

_LEAST_SQUARE = 1e-37
_LEAST_EPSILON = 1e-11  # whose neighbours are further from it than the root of _LEAST_SQUARE is from zero


def check_dense_optimizer(
    name: str, lr: float, options: Mapping[str, object]
) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """The class that an optimizer's name stands for, and its arguments. Raises SettingError.

    name: as in torch.optim, in upper or lower case; options: its other arguments, as strings or values ("betas" as "0.9,0.99").
    """
    class_name = DENSE_OPTIMIZERS.get(name.lower())
    if class_name is None:
        why = f"; {name} {_REFUSED[name.lower()]}" if name.lower() in _REFUSED else ""
        raise SettingError(f"dense-optimizer: must be one of {', '.join(_ALLOWED)}; got {name!r}{why}")
    if not (math.isfinite(lr) and lr >= 0):
        raise SettingError(f"dense-lr: must be a finite number, not negative; got {lr!r}")
    kind: type[torch.optim.Optimizer] = getattr(torch.optim, class_name)
    parameters = inspect.signature(kind).parameters
    known = {key: p.default for key, p in parameters.items() if key not in ("params", "lr", *_OWN)}
    arguments: dict[str, Any] = {"lr": lr}
    for key, value in options.items():
        if key not in known:
            raise SettingError(f"dense-options: {class_name} has no option {key}; it has {', '.join(known)}")
        try:
            # An option whose default is an integer, such as weight_decay=0, takes any number.
            like = 0.0 if isinstance(known[key], int) and not isinstance(known[key], bool) else known[key]
            arguments[key] = parse_value(f"dense-options: {key}", value, like)
        except ModelError as error:
            raise SettingError(str(error)) from error
    arguments |= {key: value for key, value in _OWN.items() if key in parameters}
    return kind, arguments


def build_dense_optimizer(name: str, lr: float, options: Mapping[str, object], module: nn.Module) -> torch.optim.Optimizer:
    """A module's optimizer, its loop over single tensors chosen; arguments as `check_dense_optimizer` has them. Raises SettingError."""
    kind, arguments = check_dense_optimizer(name, lr, options)
    _leave_the_compiler_out()
    try:
        return kind([p for p in module.parameters() if p.requires_grad], **arguments)
    except (TypeError, ValueError) as error:
        raise SettingError(f"dense-options: {kind.__name__}: {error}") from error


def step(optimizer: torch.optim.Optimizer) -> None:
    """`optimizer.step()` without the profiling and the compiler's guard that torch wraps around it. Gradients are in `.grad` of the parameters."""
    update: Callable[[torch.optim.Optimizer], None] = inspect.unwrap(type(optimizer).step)
    if type(optimizer) is torch.optim.Adagrad and all(_is_plain(group) for group in optimizer.param_groups):
        update = _adagrad
    with torch.no_grad():
        update(optimizer)


def _is_plain(group: Mapping[str, Any]) -> bool:
    """Whether Adagrad's settings for some parameters are those of `_adagrad`."""
    return group["eps"] >= _LEAST_EPSILON and not (group["lr_decay"] or group["weight_decay"] or group["maximize"])


def _adagrad(optimizer: torch.optim.Optimizer) -> None:
    """Adagrad without decay, to the bits of torch's, which asks for the square root of every zero.

    A unit of which no sample was ever active leaves zeros in the sums; where half of them are, MKL's roots take eleven times as long. Of what is
    below _LEAST_SQUARE the root does not change the epsilon that it is added to.
    """
    for group in optimizer.param_groups:
        rate, epsilon = -group["lr"], group["eps"]
        for parameter in group["params"]:
            gradient, state = parameter.grad, optimizer.state[parameter]
            assert gradient is not None
            state["step"] += 1
            total = state["sum"].addcmul_(gradient, gradient, value=1)
            parameter.addcdiv_(gradient, total.clamp_min(_LEAST_SQUARE).sqrt_().add_(epsilon), value=rate)


def _leave_the_compiler_out() -> None:
    # A method that torch marks as not to be compiled imports the compiler when it is first called, to say so; unless it bears the mark already.
    for method in vars(torch.optim.Optimizer).values():
        if hasattr(method, "__wrapped__"):
            method.__wrapped__.__dynamo_disable = method.__wrapped__


def optimizer_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state as "<parameter>/<key>" -> float32 tensor on the CPU, numbers as tensors without dimensions."""
    state = {}
    for name, parameter in module.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if value is not None:
                state[f"{name}/{key}"] = torch.as_tensor(value).detach().to("cpu", torch.float32).clone()
    return state


def load_optimizer_state(module: nn.Module, optimizer: torch.optim.Optimizer, saved: Mapping[str, Tensor]) -> None:
    """Put back what optimizer_state returned. Raises RunError if it belongs to other parameters."""
    parameters = dict(module.named_parameters())
    for parameter in parameters.values():
        optimizer.state.pop(parameter, None)
    for path, value in saved.items():
        name, _, key = path.rpartition("/")
        if name not in parameters or (value.dim() and value.shape != parameters[name].shape):
            raise RunError(f"saved optimizer state: {path} {list(value.shape)} belongs to no parameter of this model")
        parameter = parameters[name]
        # torch keeps counts and rates on the CPU. A copy, since a tensor read from a file may stand at any address.
        device = torch.device("cpu") if key in ("step", "eta", "mu", "mu_product") else parameter.device
        optimizer.state[parameter][key] = value.to(device, torch.float32, copy=True)
