"""What is counted by arithmetic is what the servers hold."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
from lane_program import LAYOUTS, SEED, make_program
from lane_runs import contents, is_parity, plan, row_counts, run_lane
from serving import serving

from foreload.cache.client.local import LocalStores
from foreload.cache.client.resp import MARKER
from foreload.cache.client.store import Store
from foreload.cache.parity.placement import Placement
from foreload.cache.parity.shard_contents import count_rows
from foreload.cache.parity.stripes import ALL_STRIPES, LaneStripes
from foreload.cache.protocol.ownership.batch_log import FileLog
from foreload.cache.protocol.rounds.lanes import LanePlan
from foreload.cache.protocol.shards.marker import Marker
from foreload.cache.protocol.shards.reading import StoredRows
from foreload.cache.rows.row_bytes import pack


@pytest.mark.parametrize(("k", "r"), [(1, 0), (2, 1), (1, 2)])
def test_rows_and_parity_rows_are_those_that_the_servers_hold(
    servers: LocalStores, store: Store, tmp_path: Path, k: int, r: int
) -> None:
    program = make_program(4, 30)
    with Store(servers.urls, timedelta(seconds=10)) as client:
        stored = StoredRows(client, Placement.spread(3, k, r), LAYOUTS, "t")
        log = FileLog(tmp_path) if r else None
        with serving(stored, [LanePlan(0, plan(program))], SEED, log=log) as traffic:
            run_lane(traffic, 0, program)
    stripes = LaneStripes.of(stored.placement, 0, row_counts(program))
    counted = count_rows(stripes, len(LAYOUTS), 3)
    for shard, held in enumerate(contents(store, stored, 0)):
        assert Marker.parse(held.pop(MARKER)) == Marker(traffic.last_batch(0), traffic.last_batch(0))
        parity = [name for name in held if is_parity(name)]
        assert counted.parity_rows[:, shard].sum() == len(parity)
        assert counted.rows[:, shard].sum() == len(held) - len(parity)
        assert counted.row_bytes(LAYOUTS)[shard] == sum(len(row) for row in held.values())
    # Shards 1 and 2 are rebuilt: of shard 1 nothing is there yet, of shard 2 the stripes of table 0.
    cursors = np.array([ALL_STRIPES, 0, pack(1, 0)], np.uint64)
    below = count_rows(stripes, len(LAYOUTS), 3, cursors)
    assert np.array_equal(below.rows[:, 0], counted.rows[:, 0])
    assert not below.rows[:, 1].any()
    assert below.rows[:, 2].tolist() == [counted.rows[0, 2], 0, 0, 0]
