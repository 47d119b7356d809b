"""The choice of the kernels' implementation for a device."""

from __future__ import annotations

import os

from foreload.base.errors import SettingError
from foreload.trainer.compute.compiled_kernels import CompiledKernels
from foreload.trainer.compute.kernels import Kernels
from foreload.trainer.compute.torch_kernels import TorchKernels


def kernels_for(device: str) -> Kernels:
    """Return the kernels for rows on a device: compiled ones on "cpu", torch elsewhere.

    On the CPU, the environment variable FORELOAD_KERNELS chooses between "compiled" and "torch".
    Raises SettingError.
    """
    variant = os.environ.get("FORELOAD_KERNELS") or ("compiled" if device == "cpu" else "torch")
    if variant == "torch":
        return TorchKernels(device)
    if variant == "compiled" and device == "cpu":
        return CompiledKernels()
    raise SettingError(f"FORELOAD_KERNELS: must be torch, or compiled on the CPU; got {variant!r} on {device}; unset it")
