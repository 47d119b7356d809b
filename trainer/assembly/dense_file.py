"""Write and load the dense part of a model: parameters and optimizer state in one file.

It is a safetensors file that is published whole (`saved_dense`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from foreload.base.files import persist, replacing
from foreload.trainer.assembly.saved_dense import PARAMETER, STATE, STEP, read_dense
from foreload.trainer.compute.dense_optimizers import load_optimizer_state, optimizer_state
from foreload.trainer.errors import RunError


def save_dense(
    path: Path,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: int,
    on_written: Callable[[], None] = lambda: None,
) -> None:
    """Write parameters and optimizer state after training step `step`.

    The file is written under a temporary name and then renamed. While the disk is full, writing is
    retried.

    Args:
        on_written: called when the temporary file is complete, before the rename.

    Raises:
        RunError: the file cannot be written for another reason.
    """
    write_dense(path, dense_bytes(module, optimizer, step), on_written)


def write_dense(path: Path, data: bytes, on_written: Callable[[], None] = lambda: None) -> None:
    """Write what `dense_bytes` returned, as `save_dense` does."""

    def write() -> None:
        with replacing(path, durable=True) as temporary:
            temporary.write_bytes(data)
            on_written()

    try:
        persist(path, write)
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror}); make the folder writable") from error


def dense_bytes(module: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> bytes:
    """Return the contents of the file that `save_dense` writes."""
    return encode_dense(dense_tensors(module, optimizer), step)


def dense_tensors(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return parameters and optimizer state by their names in the file.

    Some of the tensors share memory with the module.
    """
    tensors = {PARAMETER + name: parameter.detach().cpu().contiguous() for name, parameter in module.named_parameters()}
    return tensors | {STATE + name: value.contiguous() for name, value in optimizer_state(module, optimizer).items()}


def encode_dense(tensors: dict[str, Tensor], step: int) -> bytes:
    """Return the contents of the file after training step `step`, made from `dense_tensors`."""
    return save(tensors, metadata={STEP: str(step)})


def load_dense_bytes(data: bytes, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load what `dense_bytes` returned into a module and its optimizer.

    Raises RunError if it belongs to another model.
    """
    tensors = load(data)
    parameters, state = (
        {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        for prefix in (PARAMETER, STATE)
    )
    load_parameters(module, parameters)
    load_optimizer_state(module, optimizer, state)


def load_dense(path: Path, module: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Load what `save_dense` wrote into a module and its optimizer.

    Raises:
        RunError: the file is missing, damaged, of another step or of another model.
    """
    parameters, state = map(tensors, read_dense(path, step))
    load_parameters(module, parameters)
    load_optimizer_state(module, optimizer, state)


def tensors(arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """Return arrays by name as tensors that share their memory."""
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def load_parameters(module: nn.Module, parameters: dict[str, Tensor]) -> None:
    """Copy parameters into a module's own memory. Raises RunError if they are of another model."""
    own = dict(module.named_parameters())
    if {name: value.shape for name, value in own.items()} != {name: value.shape for name, value in parameters.items()}:
        raise RunError(
            "dense part: the saved parameters are not those of this model; use the model that the run was trained with"
        )
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(parameters[name])
