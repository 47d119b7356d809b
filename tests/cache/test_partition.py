"""The partition: rows move in and out of slots bit for bit, and its occupants are always known."""

from __future__ import annotations

from datetime import timedelta

import numpy as np
import pytest
import torch

from foreload.cache.errors import CacheError
from foreload.cache.rows.partition import FREE, Partition
from foreload.cache.rows.staging import Staged
from foreload.pipelines.schedule.format import Arrivals

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"))]
WIDTH, STATE_WIDTH = 5, 3


def arrivals(slots: list[int], first_id: int = 100, tag: int = 0) -> Arrivals:
    """Rows with ordinals 0, 1, ... and ids from first_id on, in tables 0, 1, 2, 0, ..."""
    count = len(slots)
    ids = np.arange(first_id, first_id + count, dtype=np.int64)
    after = np.full(count, -1, np.int32)
    table, tags = np.arange(count).astype(np.int16) % 3, np.full(count, tag, np.int32)
    return Arrivals(table, ids - first_id, ids, tags, np.array(slots, np.int32), after)


def staged(count: int, seed: int = 0) -> Staged:
    """Weights and state for so many arrivals."""
    # Any bits at all, NaNs with payloads included.
    bits = np.random.default_rng(seed).integers(0, 1 << 32, (count, WIDTH + STATE_WIDTH), np.uint32).view(np.float32)
    return Staged(np.ascontiguousarray(bits[:, :WIDTH]), np.ascontiguousarray(bits[:, WIDTH:]), timedelta())


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_leaves_its_slot_as_it_came(device: str) -> None:
    partition = Partition(8, 4, WIDTH, STATE_WIDTH, device)
    rows = staged(5)
    partition.admit(arrivals([6, 0, 3, 9, 11], tag=4), rows)
    assert partition.occupied().tolist() == [0, 3, 6]
    ended = partition.end(np.array([3, 6], np.int32))
    assert ended.weights.tobytes() == rows.weights[[2, 0]].tobytes()
    assert ended.state.tobytes() == rows.state[[2, 0]].tobytes()
    assert (ended.id.tolist(), ended.ordinal.tolist(), ended.table.tolist()) == ([102, 100], [2, 0], [2, 0])
    assert ended.tag.tolist() == ended.stored_tag.tolist() == [4, 4]
    assert partition.occupied().tolist() == [0]
    assert len(partition.end(np.empty(0, np.int32))) == 0


def test_training_changes_the_tag_and_not_the_stored_tag() -> None:
    partition = Partition(4, 0, WIDTH, 0)
    partition.admit(arrivals([0, 1, 2], tag=7), Staged(staged(3).weights, np.empty((3, 0), np.float32), timedelta()))
    partition.mark_trained(np.array([0, 2], np.int32), 30)
    ended = partition.end(partition.occupied())
    assert (ended.tag.tolist(), ended.stored_tag.tolist()) == ([31, 7, 31], [7, 7, 7])
    assert partition.occupants.table.tolist() == [FREE] * 4


def test_tensors_and_arrays_share_memory_on_the_cpu() -> None:
    partition = Partition(4, 0, WIDTH, STATE_WIDTH)
    partition.weights[2] = 3.0
    assert (partition.weights.numpy()[2] == 3).all()
    assert partition.bytes == 4 * (4 * (WIDTH + STATE_WIDTH) + 2 + 8 + 8 + 4 + 4)


def test_a_slot_holds_one_row_at_a_time() -> None:
    partition = Partition(4, 2, WIDTH, STATE_WIDTH)
    partition.admit(arrivals([1, 4]), staged(2))
    with pytest.raises(CacheError, match="slot 1: must be free"):
        partition.admit(arrivals([0, 1]), staged(2))
    with pytest.raises(CacheError, match="slot 0: must hold a row when a residency ends"):
        partition.end(np.array([1, 0], np.int32))
    # Evaluation slots are taken over by the next evaluation step.
    partition.admit(arrivals([4, 5], first_id=200), staged(2))
    assert partition.occupants.id[4:].tolist() == [200, 201]


def test_a_partition_without_slots_is_refused() -> None:
    with pytest.raises(CacheError, match="slots must be at least 1"):
        Partition(0, 0, WIDTH, STATE_WIDTH)
