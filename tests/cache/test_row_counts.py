"""What is counted by arithmetic is what the servers hold."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
from lane_program import LAYOUTS, SEED, make_program
from serving import serving
from test_parity import contents, plan, run_lane

from foreload.cache.client.local import LocalStores
from foreload.cache.client.resp import MARKER
from foreload.cache.client.store import Store
from foreload.cache.parity.placement import Placement
from foreload.cache.parity.row_counts import count_rows
from foreload.cache.parity.stripes import ALL_STRIPES
from foreload.cache.protocol.batch_log import FileLog
from foreload.cache.protocol.lanes import LanePlan
from foreload.cache.protocol.marker import Marker
from foreload.cache.protocol.reading import StoredRows

SLOTS, EVALUATION_SLOTS = 12, 6


@pytest.mark.parametrize(("k", "r"), [(1, 0), (2, 1), (1, 2)])
def test_rows_and_parity_rows_are_those_that_the_servers_hold(
    servers: LocalStores, store: Store, tmp_path: Path, k: int, r: int
) -> None:
    program = make_program(4, 30, SLOTS, SLOTS, EVALUATION_SLOTS)
    with Store(servers.urls, timedelta(seconds=10)) as client:
        stored = StoredRows(client, Placement.spread(3, k, r), LAYOUTS, "t")
        log = FileLog(tmp_path) if r else None
        with serving(stored, [LanePlan(0, plan(program))], SEED, log=log) as traffic:
            run_lane(traffic, 0, program)
    counts = np.zeros(len(LAYOUTS), np.int64)
    for table, _ in program.tags:
        counts[table] += 1
    stripes = stored.placement.stripes(0, counts)
    found = count_rows(stripes, len(LAYOUTS), 3)
    for shard, held in enumerate(contents(store, stored.key(0, 0))):
        assert Marker.parse(held.pop(MARKER)) == Marker(traffic.last_batch(0), traffic.last_batch(0))
        parity = [name for name in held if name[0] & 0x80]
        assert found.parity_rows[:, shard].sum() == len(parity)
        assert found.rows[:, shard].sum() == len(held) - len(parity)
        assert found.row_bytes(LAYOUTS)[shard] == sum(len(row) for row in held.values())
    cursors = np.array([ALL_STRIPES, 0, 1 << 48], np.uint64)
    below = count_rows(stripes, len(LAYOUTS), 3, cursors)
    assert np.array_equal(below.rows[:, 0], found.rows[:, 0])
    assert not below.rows[:, 1].any()
    assert below.rows[:, 2].tolist() == [found.rows[0, 2], 0, 0, 0]
