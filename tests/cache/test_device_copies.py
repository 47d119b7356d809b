"""Copies to and from a device are copies, and writing rows leaves torch's settings as they were. On a CUDA device, where there is one, too."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from foreload.cache.rows.device_copies import download, put_distinct, upload

DEVICES = [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_what_is_brought_to_a_device_and_back_is_a_copy(device: torch.device) -> None:
    column = np.arange(12, dtype=np.int32).reshape(4, 3)[:, 1]
    wanted = column.copy()
    column.flags.writeable = False
    there = upload(column, device, torch.int64)
    column.flags.writeable = True
    column[:] = -1
    (back,) = download([there])
    there.zero_()
    assert back.dtype == np.int64
    assert back.tolist() == wanted.tolist()


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("mode", [0, 2])
def test_rows_at_distinct_places_are_written_and_torch_stays_as_deterministic_as_it_was(device: torch.device, mode: int) -> None:
    rows, places = torch.zeros((4, 2), device=device), torch.tensor([3, 1], device=device)
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode(mode)
    try:
        put_distinct(rows, places, torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=device))
        with pytest.raises((RuntimeError, IndexError)):
            put_distinct(rows, places, torch.zeros((3, 2), device=device))
        assert torch.get_deterministic_debug_mode() == mode
    finally:
        torch.set_deterministic_debug_mode(before)
    assert rows.tolist() == [[0, 0], [3, 4], [0, 0], [1, 2]]
