"""Optimizers of the dense part.

They are those of torch.optim whose update is a fixed function of parameters, gradients and state.
They are made and stepped in a way that does not import torch's compiler, which takes two seconds.
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
# Users cannot choose these settings. They select one of several implementations of the update,
# which differ in their bits.
_OWN = {"foreach": False, "fused": False, "capturable": False, "differentiable": False}

_LEAST_SQUARE = 1e-37
# The neighbours of this epsilon are further from it than the root of _LEAST_SQUARE is from zero.
_LEAST_EPSILON = 1e-11


def check_dense_optimizer(
    name: str, lr: float, options: Mapping[str, object]
) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return the class that an optimizer's name stands for, and its arguments.

    Args:
        name: as in torch.optim, in upper or lower case.
        options: the optimizer's other arguments, as strings or values ("betas" as "0.9,0.99").

    Raises:
        SettingError: a setting is not valid.
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
    """Return a module's optimizer, which loops over single tensors.

    The arguments are those of `check_dense_optimizer`. Raises SettingError.
    """
    kind, arguments = check_dense_optimizer(name, lr, options)
    _leave_the_compiler_out()
    try:
        return kind([p for p in module.parameters() if p.requires_grad], **arguments)
    except (TypeError, ValueError) as error:
        raise SettingError(f"dense-options: {kind.__name__}: {error}") from error


def step(optimizer: torch.optim.Optimizer) -> None:
    """Run `optimizer.step()` without torch's profiling and compiler guard around it.

    The gradients are in `.grad` of the parameters.
    """
    update: Callable[[torch.optim.Optimizer], None] = inspect.unwrap(type(optimizer).step)
    if type(optimizer) is torch.optim.Adagrad and all(_is_plain(group) for group in optimizer.param_groups):
        update = _adagrad
    with torch.no_grad():
        update(optimizer)


def _is_plain(group: Mapping[str, Any]) -> bool:
    """Return whether `_adagrad` supports Adagrad's settings for a group of parameters."""
    return group["eps"] >= _LEAST_EPSILON and not (group["lr_decay"] or group["weight_decay"] or group["maximize"])


def _adagrad(optimizer: torch.optim.Optimizer) -> None:
    """Step Adagrad without decay, to the bits of torch's implementation.

    A unit that no sample ever activated leaves zeros in the sums. Where half of the sums are zeros,
    MKL takes eleven times as long for the square roots that torch computes of all sums. Here the
    sums are raised to _LEAST_SQUARE first. The root of a smaller sum does not change the epsilon
    that it is added to.
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
    # A method that torch marks as not to be compiled imports the compiler at its first call, to set
    # that mark. It does not if the method bears the mark already.
    for method in vars(torch.optim.Optimizer).values():
        if hasattr(method, "__wrapped__"):
            method.__wrapped__.__dynamo_disable = method.__wrapped__


def optimizer_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimizer's state as "<parameter>/<key>" -> float32 tensor on the CPU.

    Numbers become tensors without dimensions.
    """
    state = {}
    for name, parameter in module.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if value is not None:
                state[f"{name}/{key}"] = torch.as_tensor(value).detach().to("cpu", torch.float32).clone()
    return state


def load_optimizer_state(module: nn.Module, optimizer: torch.optim.Optimizer, saved: Mapping[str, Tensor]) -> None:
    """Load what `optimizer_state` returned. Raises RunError if it belongs to other parameters."""
    parameters = dict(module.named_parameters())
    for parameter in parameters.values():
        optimizer.state.pop(parameter, None)
    for path, value in saved.items():
        name, _, key = path.rpartition("/")
        if name not in parameters or (value.dim() and value.shape != parameters[name].shape):
            raise RunError(f"saved optimizer state: {path} {list(value.shape)} belongs to no parameter of this model")
        parameter = parameters[name]
        # torch keeps counts and rates on the CPU. The tensor is copied, since a tensor read from a
        # file may lie at any address.
        device = torch.device("cpu") if key in ("step", "eta", "mu", "mu_product") else parameter.device
        optimizer.state[parameter][key] = value.to(device, torch.float32, copy=True)
