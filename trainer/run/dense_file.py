"""The dense part of a model at rest: parameters and optimizer state in one safetensors file, published whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor, nn

from foreload.pipelines.base.files import persist, replacing
from foreload.trainer.compute.dense_optimizers import load_optimizer_state, optimizer_state
from foreload.trainer.errors import RunError

_PARAMETER, _STATE, _STEP = "parameter/", "state/", "step"


def save_dense(
    path: Path,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: int,
    on_written: Callable[[], None] = lambda: None,
) -> None:
    """Write parameters and optimizer state after training step `step`, by temporary file and rename; waits for as long as the disk is full.

    on_written: called between the two. Raises RunError where it cannot be written for another reason.
    """
    write_dense(path, dense_bytes(module, optimizer, step), on_written)


def write_dense(path: Path, data: bytes, on_written: Callable[[], None] = lambda: None) -> None:
    """Write what `dense_bytes` gave; see `save_dense`."""

    def write() -> None:
        with replacing(path, durable=True) as temporary:
            temporary.write_bytes(data)
            on_written()

    try:
        persist(path, write)
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror}); make the folder writable") from error


def dense_bytes(module: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> bytes:
    """What `save_dense` writes."""
    return encode_dense(dense_tensors(module, optimizer), step)


def dense_tensors(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Parameters and optimizer state by their names in the file; some share memory with the module."""
    tensors = {_PARAMETER + name: parameter.detach().cpu().contiguous() for name, parameter in module.named_parameters()}
    return tensors | {_STATE + name: value.contiguous() for name, value in optimizer_state(module, optimizer).items()}


def encode_dense(tensors: dict[str, Tensor], step: int) -> bytes:
    """The contents of the file after training step `step`."""
    return save(tensors, metadata={_STEP: str(step)})


def load_dense_bytes(data: bytes, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put what `dense_bytes` gave into a module and its optimizer. Raises RunError if it is another model's."""
    tensors = load(data)
    parameters, state = (
        {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        for prefix in (_PARAMETER, _STATE)
    )
    load_parameters(module, parameters)
    load_optimizer_state(module, optimizer, state)


def read_dense(path: Path, step: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Parameters by name and optimizer state by "<parameter>/<key>", float32 on the CPU.

    Raises RunError if the file is missing, damaged, or of another step.
    """
    parameters: dict[str, Tensor] = {}
    state: dict[str, Tensor] = {}
    try:
        with safe_open(path, framework="pt") as file:
            saved_step = (file.metadata() or {}).get(_STEP)
            for name in file.keys():  # noqa: SIM118 - a safetensors file is no mapping
                target, prefix = (parameters, _PARAMETER) if name.startswith(_PARAMETER) else (state, _STATE)
                target[name.removeprefix(prefix)] = file.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise RunError(f"{path}: cannot be read ({error}); restore the run's folder or train anew with --overwrite") from error
    if saved_step != str(step):
        raise RunError(
            f"{path}: must be of step {step}, is of {saved_step}; restore the run's folder or train anew with --overwrite"
        )
    return parameters, state


def load_dense(path: Path, module: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Put what save_dense wrote into a module and its optimizer. Raises RunError, also if it is another model's."""
    parameters, state = read_dense(path, step)
    load_parameters(module, parameters)
    load_optimizer_state(module, optimizer, state)


def load_parameters(module: nn.Module, parameters: dict[str, Tensor]) -> None:
    """Copy parameters into a module's own memory. Raises RunError if they are another model's."""
    own = dict(module.named_parameters())
    if {name: value.shape for name, value in own.items()} != {name: value.shape for name, value in parameters.items()}:
        raise RunError(
            "dense part: the saved parameters are not those of this model; use the model that the run was trained with"
        )
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(parameters[name])
