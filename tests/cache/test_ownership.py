"""Who takes lanes over, with parity and without: what an earlier owner still writes is refused, and what it left is looked at."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
from lane_program import LAYOUTS, SEED
from lane_runs import ending, with_base
from serving import serving
from waiting import DEADLINE_SECONDS

from foreload.cache.client.local import LocalStores
from foreload.cache.client.resp import MARKER
from foreload.cache.client.store import Store
from foreload.cache.errors import Fenced, StoreError
from foreload.cache.parity.placement import Placement
from foreload.cache.parity.stripes import LaneStripes
from foreload.cache.protocol.ownership.batch_log import FileLog
from foreload.cache.protocol.ownership.ownership import UNFENCED, find_rows, take_over
from foreload.cache.protocol.rounds.failover import Failover
from foreload.cache.protocol.rounds.lanes import LanePlan
from foreload.cache.protocol.shards.marker import Marker
from foreload.cache.protocol.shards.namespace import claim, lane_key
from foreload.cache.protocol.shards.reading import Expected, StoredRows, read_rows
from foreload.cache.rows.staging import EndedRows
from foreload.cache.traffic import Traffic

CODES = pytest.mark.parametrize(("k", "r"), [(1, 0), (2, 1)], ids=["without parity", "2+1"])
COUNT = 60


def rows(tag: int, value: float, before: EndedRows | None = None) -> EndedRows:
    """Rows 0 .. COUNT - 1 of table 1 as they end, all weights `value`, with what the store has of them."""
    return with_base(ending(COUNT, tag, value=value, stored=0 if before is None else int(before.tag[0])), before)


def taken_over(store: Store, k: int, r: int, last_batch: int = 0) -> tuple[StoredRows, LanePlan]:
    """Lane 0, of which COUNT rows of table 1 are in the store if there was any batch, with a new owner."""
    stored = StoredRows(store, Placement.spread(3, k, r), LAYOUTS, "t")
    written = np.array([0, COUNT if last_batch else 0, 0, 0])
    stored.stripes = lambda lane: LaneStripes.of(stored.placement, lane, written)
    take_over(stored, UNFENCED, {0: last_batch})
    return stored, LanePlan(0, iter([]), last_batch, written=written)


def new_owner(store: Store, k: int, r: int, log: Path, last_batch: int = 0) -> tuple[StoredRows, Traffic]:
    """The same, served."""
    stored, plan = taken_over(store, k, r, last_batch)
    return stored, serving(stored, [plan], SEED, log=FileLog(log))


def weights_read(stored: StoredRows, store: Store, last_batch: int, tag: int) -> np.ndarray:
    """The first weight of every row, as one who reads the run finds it."""
    reader = StoredRows(store, stored.placement, LAYOUTS, "t", stripes=stored.stripes)
    find_rows(reader, [last_batch])
    ordinal = np.arange(COUNT)
    expected = Expected(np.ones(COUNT, np.int16), ordinal, ordinal + 1000, np.full(COUNT, tag, np.int32), 0)
    return read_rows(reader, expected, last_batch).weights[:, 0]


@CODES
def test_who_wakes_up_after_its_run_was_removed_is_refused_and_the_next_ones_rows_are_right(
    servers: LocalStores, store: Store, tmp_path: Path, k: int, r: int
) -> None:
    claim(store, "t", {"run": "first"}, "new")
    with Store(servers.urls, timedelta(seconds=10)) as sleeper:
        _, asleep = new_owner(sleeper, k, r, tmp_path / "first")
        first = rows(5, 1.0)
        asleep.write_back(0, 1, first)
        asleep.flush()
        claim(store, "t", {"run": "second"}, "overwrite")
        stored, awake = new_owner(store, k, r, tmp_path / "second")
        awake.write_back(0, 1, rows(6, 2.0))
        awake.flush()
        asleep.write_back(0, 2, rows(9, 3.0, first))
        with pytest.raises(Fenced, match="another process has taken over the lane"):
            asleep.flush()
        asleep.abort()
        awake.close()
        with Store(servers.urls, timedelta(seconds=10)) as reading:
            assert (weights_read(stored, reading, 1, 6) == 2.0).all()


@CODES
def test_what_an_earlier_owner_wrote_just_before_the_fence_is_not_taken_for_the_next_ones(
    servers: LocalStores, store: Store, tmp_path: Path, k: int, r: int
) -> None:
    claim(store, "t", {"run": "first"}, "new")
    with Store(servers.urls, timedelta(seconds=10)) as sleeper:
        before, _ = new_owner(sleeper, k, r, tmp_path / "first")
        claim(store, "t", {"run": "second"}, "overwrite")
        for shard in range(3):
            sleeper.command(shard, "HSET", before.key(0, shard), MARKER, Marker(0, 0).stored(), b"a field.", b"a row")
    stored, awake = new_owner(store, k, r, tmp_path / "second")
    awake.write_back(0, 1, rows(6, 2.0))
    awake.close()
    with Store(servers.urls, timedelta(seconds=10)) as reading:
        assert (weights_read(stored, reading, 1, 6) == 2.0).all()
    assert not stored.shards.lost


@CODES
def test_a_run_written_before_there_was_a_fence_goes_on(
    servers: LocalStores, store: Store, tmp_path: Path, k: int, r: int
) -> None:
    stored, first = StoredRows(store, Placement.spread(3, k, r), LAYOUTS, "t"), rows(5, 1.0)
    with serving(stored, [LanePlan(0, iter([]))], SEED, log=FileLog(tmp_path / "first")) as traffic:
        traffic.write_back(0, 1, first)
    assert [store.command(shard, "TYPE", lane_key("t", 0, 0)) for shard in range(3)] == ["hash"] * 3
    stored.stripes = lambda lane: LaneStripes.of(stored.placement, lane, np.array([0, COUNT, 0, 0]))
    with Store(servers.urls, timedelta(seconds=10)) as reading:
        assert (weights_read(stored, reading, 1, 5) == 1.0).all()
        taken, traffic = new_owner(reading, k, r, tmp_path / "second", last_batch=1)
        with traffic:
            traffic.write_back(0, 2, rows(6, 2.0, first))
        assert taken.shards.of(0).epochs == [1, 1, 1]
        assert (weights_read(taken, store, 2, 6) == 2.0).all()


def without_a_row(store: Store, k: int, r: int, log: Path) -> None:
    """Have an owner of lane 0 write COUNT rows as its first batch, and the second shard lose one of them."""
    _, traffic = new_owner(store, k, r, log)
    with traffic:
        traffic.write_back(0, 1, rows(5, 1.0))
    names = store.command(1, "HKEYS", lane_key("t", 0, 1))
    assert isinstance(names, list)
    store.command(1, "HDEL", lane_key("t", 0, 1), next(name for name in names if name != MARKER))


@CODES
def test_a_shard_that_lost_rows_of_a_saved_run_is_noticed_when_it_goes_on(
    servers: LocalStores, store: Store, tmp_path: Path, k: int, r: int
) -> None:
    without_a_row(store, k, r, tmp_path)
    with Store(servers.urls, timedelta(seconds=10)) as other:
        if r:
            assert list(taken_over(other, k, r, last_batch=1)[0].shards.lost) == [1]
        else:
            with pytest.raises(StoreError, match=r"shard-1.sock: lost rows of lane 0: has \d+ of \d+"):
                taken_over(other, k, r, last_batch=1)


def test_a_lost_shard_that_answers_before_its_lane_is_served_is_rebuilt_once_it_is(
    servers: LocalStores, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_a_row(store, 2, 1, tmp_path / "first")
    answered, take_back = threading.Event(), Failover.take_back

    def looked(self: Failover, last_batches: Mapping[int, int]) -> None:
        there = bool(self._probe._ready)
        try:
            take_back(self, last_batches)
        finally:
            if there and not last_batches:
                answered.set()

    monkeypatch.setattr(Failover, "take_back", looked)
    with Store(servers.urls, timedelta(seconds=10)) as other:
        stored, plan = taken_over(other, 2, 1, last_batch=1)
        with Traffic(stored, SEED, log=FileLog(tmp_path / "second")) as traffic:
            assert answered.wait(DEADLINE_SECONDS)
            traffic.add_lane(plan)
            while not traffic.shards.whole:
                traffic.repair_shards(timedelta(seconds=1))
        assert (weights_read(stored, store, 1, 5) == 1.0).all()
