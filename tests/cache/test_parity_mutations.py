"""Bugs that are put in on purpose: the tests of parity must fail for each, or they would not notice it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
from test_lost_shard import PATIENCE, Contents, Disturber, restart, run
from test_recovery import Died, check_recovered, train_until_dead

import cache.batches
import cache.rebuild
from cache.batches import WriteBackBatch
from cache.decoding import ShardRows
from cache.erasure import Code
from cache.errors import RowError, StoreUnavailable
from cache.local import LocalStores
from cache.marker import Marker
from cache.store import Read, Store, Write
from cache.stripes import LaneStripes


def run_with_a_loss(folder: Path) -> Contents:
    """Two lanes, a shard that is lost and rebuilt."""
    with LocalStores(3, folder / "stores") as stores:
        found, _, lost = run(stores, folder / "logs", 2, 1, Disturber({("data leaves", 9): restart(stores, 1)}), grace=PATIENCE)
    assert lost == []
    return found


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Contents:
    """What is held without the bug."""
    return run_with_a_loss(tmp_path_factory.mktemp("right"))


def fails(folder: Path, expected: Contents) -> bool:
    """Whether a run with a loss stops, uses a wrong row, or ends with other rows."""
    try:
        return run_with_a_loss(folder) != expected
    except (RowError, AssertionError):
        return True


def test_without_a_bug_nothing_fails(tmp_path: Path, expected: Contents) -> None:
    assert not fails(tmp_path, expected)


def test_a_difference_applied_twice(tmp_path: Path, expected: Contents, monkeypatch: pytest.MonkeyPatch) -> None:
    update = WriteBackBatch.update

    def twice(batch: WriteBackBatch, code: Code) -> None:
        update(batch, code)
        if batch.number == 5:
            update(batch, code)

    monkeypatch.setattr(WriteBackBatch, "update", twice)
    assert fails(tmp_path, expected)


def test_a_range_skipped_in_the_rebuild(tmp_path: Path, expected: Contents, monkeypatch: pytest.MonkeyPatch) -> None:
    rows_on_shard = cache.rebuild.rows_on_shard

    def skipping(stripes: LaneStripes, table: int, first: int, shard: int, most: int) -> ShardRows:
        found = rows_on_shard(stripes, table, first, shard, most)
        return ShardRows(found.stripe[1:], found.place[1:], found.end)

    monkeypatch.setattr(cache.rebuild, "rows_on_shard", skipping)
    assert fails(tmp_path, expected)


def test_sums_of_floats_instead_of_bits(tmp_path: Path, expected: Contents, monkeypatch: pytest.MonkeyPatch) -> None:
    def minus(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):
            return (a.view(np.float32) - b.view(np.float32)).view(np.uint8)

    monkeypatch.setattr(cache.batches, "difference", minus)
    assert fails(tmp_path, expected)


class Hasty(Store):
    """Does not wait for the parity of a batch: that is still under way when the writer dies, the rows are there."""

    def __init__(self, urls: Sequence[object]) -> None:
        super().__init__(urls, timedelta(seconds=10))  # type: ignore[arg-type]
        self.number = 15

    def attempt(self, reads: Sequence[Read], writes: Sequence[Write]) -> dict[int, StoreUnavailable]:
        if writes and Marker.parse(writes[0].marker) == Marker(self.number, self.number - 1):
            return {}
        return super().attempt(reads, writes)


def die_after_data(number: int) -> Callable[[str], None]:
    """Ends the writer when the rows of a batch are there."""
    counts = {"data acknowledged": 0}

    def hook(action: str) -> None:
        if action in counts:
            counts[action] += 1
            if counts[action] == number:
                raise Died

    return hook


@pytest.mark.parametrize("store_class", [Store, Hasty])
def test_an_acknowledgement_of_parity_not_awaited(tmp_path: Path, store_class: type[Store]) -> None:
    with LocalStores(4, tmp_path / "stores") as stores:
        with store_class(stores.urls) as store:
            _, released = train_until_dead(store, tmp_path / "logs", 2, 1, die_after_data(15))
        if store_class is Store:
            check_recovered(stores.urls, tmp_path / "logs", 2, 1, released)
        else:
            with pytest.raises(AssertionError):
                check_recovered(stores.urls, tmp_path / "logs", 2, 1, released)
