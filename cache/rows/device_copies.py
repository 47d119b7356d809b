"""Copies between NumPy arrays and tensors on a device.

Copies to and from a CUDA device go through page-locked memory. With other memory, each copy to the
device would first wait until the device has done all that it was given before. Large copies, as of
a whole partition, wait: torch keeps page-locked memory for later copies and never frees it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_MOST_LOCKED_BYTES = 1 << 26  # of one copy


def upload(array: np.ndarray, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a copy of an array on a device, without waiting for the device unless it is large.

    Args:
        array: may be read-only and at any address, and may change once this returns.
        dtype: what the values are converted to.
    """
    copy = _on_host(array.shape, dtype, device)
    copy.numpy()[...] = array
    return copy.to(device, non_blocking=True)


def download(tensors: list[Tensor]) -> list[np.ndarray]:
    """Return copies of tensors of one device, which has computed them by then."""
    device = tensors[0].device
    copies = [_on_host(tensor.shape, tensor.dtype, device) for tensor in tensors]
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor, non_blocking=True)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return [copy.numpy() for copy in copies]


def _on_host(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return room for a copy that comes from a device or goes there."""
    size = math.prod(shape) * dtype.itemsize
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=device.type == "cuda" and size <= _MOST_LOCKED_BYTES)


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
