"""Lanes that come and go while another one is served, on real servers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
from lane_program import LAYOUTS, SEED, LaneProgram, Truth, make_program
from lane_runs import arriving, expected_rows, plan, row_counts, run_lane

from foreload.cache.client.local import LocalStores
from foreload.cache.client.store import Store
from foreload.cache.errors import CacheError
from foreload.cache.parity.placement import Placement
from foreload.cache.parity.stripes import LaneStripes
from foreload.cache.protocol.ownership.batch_log import FileLog
from foreload.cache.protocol.ownership.ownership import UNFENCED, take_over
from foreload.cache.protocol.rounds.lanes import LanePlan
from foreload.cache.protocol.shards.fence import read_epochs
from foreload.cache.protocol.shards.reading import StoredRows, read_rows
from foreload.cache.traffic import Traffic
from foreload.pipelines.schedule.format import Arrivals

STAYS, LANES = 0, 3
CODES = pytest.mark.parametrize(("k", "r"), [(1, 0), (2, 1)], ids=["without parity", "2+1"])


def in_two_parts(program: LaneProgram, proceed: threading.Event) -> Iterator[tuple[int, Arrivals] | None]:
    """A lane's plan, of which the second half is not known before it may proceed."""
    for index, arrivals in plan(program):
        while index >= len(program.events) // 2 and not proceed.is_set():
            yield None
        yield index, arrivals


def check_as_read(stored: StoredRows, store: Store, last_batch: int, lane: int, program: LaneProgram, truth: Truth) -> None:
    """One who does not own the lane reads every row as it was trained last."""
    reader = StoredRows(store, stored.placement, LAYOUTS, "t", stripes=stored.stripes)
    reader.shards.of(lane).epochs = [read_epochs(store, shard, "t", [lane])[0] or 0 for shard in range(store.shards)]
    rows, names = expected_rows(lane, program)
    found = read_rows(reader, rows, last_batch)
    assert np.array_equal(np.concatenate([found.weights, found.state], axis=1), truth.of(names))


@CODES
def test_lanes_come_and_go_while_another_is_served(servers: LocalStores, store: Store, tmp_path: Path, k: int, r: int) -> None:
    programs = {lane: make_program(lane, 20) for lane in range(LANES)}
    stored = StoredRows(store, Placement.spread(3, k, r), LAYOUTS, "t")
    counts = {lane: np.zeros(len(LAYOUTS), np.int64) for lane in range(LANES)}
    stored.stripes = lambda lane: LaneStripes.of(stored.placement, lane, counts[lane])
    proceed, truths = threading.Event(), dict[int, Truth]()
    last_batches = [0] * LANES
    take_over(stored, UNFENCED, {STAYS: 0})
    with Store(servers.urls, timedelta(seconds=10)) as other, Traffic(stored, SEED, log=FileLog(tmp_path)) as traffic:
        traffic.add_lane(LanePlan(STAYS, in_two_parts(programs[STAYS], proceed)))
        with pytest.raises(CacheError, match="lane 0: is served already"):
            traffic.add_lane(LanePlan(STAYS, iter([])))
        thread = threading.Thread(target=lambda: truths.update({STAYS: run_lane(traffic, STAYS, programs[STAYS])}))
        thread.start()
        for lane in (1, 2):
            program = programs[lane]
            traffic.between_rounds(lambda lane=lane: take_over(stored, UNFENCED, {lane: 0}))  # type: ignore[misc]
            traffic.add_lane(LanePlan(lane, plan(program)))
            truth = run_lane(traffic, lane, program)
            last_batches[lane] = traffic.release_lane(lane)
            counts[lane] = row_counts(program)
            with pytest.raises(CacheError, match=f"lane {lane}: is not served here"):
                traffic.take(lane, 0)
            check_as_read(stored, other, last_batches[lane], lane, program, truth)

            # It comes back, as it would at another trainer, with the rows that it left in the store.
            rows, names = expected_rows(lane, program)
            back = [
                (*row, int(rows.tag[place]), -1) for place, row in enumerate(zip(rows.table, rows.ordinal, rows.id, strict=True))
            ]
            traffic.between_rounds(lambda lane=lane: take_over(stored, UNFENCED, {lane: last_batches[lane]}))  # type: ignore[misc]
            traffic.add_lane(LanePlan(lane, iter([(0, arriving(*back))]), last_batches[lane], written=counts[lane]))
            staged = traffic.take(lane, 0)
            assert np.array_equal(np.concatenate([staged.weights, staged.state], axis=1), truth.of(names))
            assert traffic.release_lane(lane) == last_batches[lane]
            assert thread.is_alive()
        proceed.set()
        thread.join()
        last_batches[STAYS] = traffic.release_lane(STAYS)
        counts[STAYS] = row_counts(programs[STAYS])
        check_as_read(stored, other, last_batches[STAYS], STAYS, programs[STAYS], truths[STAYS])
