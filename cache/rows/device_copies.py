"""Copies between NumPy arrays and tensors on a device.

Copies to and from a CUDA device go through page-locked memory. With other memory, each copy to the
device would first wait until the device has done all that it was given before.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def upload(array: np.ndarray, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a copy of an array on a device, without waiting for the device.

    Args:
        array: may be read-only and at any address, and may change once this returns.
        dtype: what the values are converted to.
    """
    copy = torch.empty(array.shape, dtype=dtype, pin_memory=device.type == "cuda")
    copy.numpy()[...] = array
    return copy.to(device, non_blocking=True)


def download(tensors: list[Tensor]) -> list[np.ndarray]:
    """Return copies of tensors of one device, which has computed them by then."""
    if tensors[0].device.type != "cuda":
        return [tensor.numpy(force=True).copy() for tensor in tensors]
    copies = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensors[0].device).synchronize()
    return [copy.numpy() for copy in copies]


def put_distinct(rows: Tensor, places: Tensor, values: Tensor) -> None:
    """Set `rows[places[i]] = values[i]`.

    Args:
        places: int64, without repetition. So the result does not depend on the order of the writes,
            and torch need not sort them, as it does where algorithms must be deterministic.
    """
    mode = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("default")
    try:
        rows.index_copy_(0, places, values)
    finally:
        torch.set_deterministic_debug_mode(mode)
