"""How far the rows of an owner's lanes have moved, told while lanes are added: that all have moved is never told of one that has not."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from lane_owners import TIMEOUT, History, Owner
from lane_program import make_program

from foreload.cache.client.local import LocalStores
from foreload.cache.client.store import Store
from foreload.cache.parity.placement import Placement
from foreload.cache.protocol.ownership.ownership import Ownership
from foreload.cache.protocol.rounds.lanes import LanePlan


def test_a_lane_that_is_added_when_all_others_have_moved_counts_at_once(tmp_path: Path) -> None:
    added, looked = threading.Event(), threading.Event()

    def wait(action: str) -> None:
        if action == "rows moved" and added.is_set():
            looked.wait()

    placement = Placement.spread(3, 2, 1)
    with LocalStores(4, tmp_path / "stores") as stores, Store(stores.urls[:3], TIMEOUT) as store:
        owner = Owner(store, {0: History.of(make_program(1, 5))}, tmp_path, placement, Ownership(1), wait).begin()
        traffic = owner.traffic
        assert traffic is not None
        traffic.migration.begin(placement.with_added(1), stores.urls)
        assert traffic.repair_shards(TIMEOUT) == []
        assert traffic.shards.migrated == 1.0
        added.set()
        # The thread of the traffic has something else to do first: what it told before must not be taken for the new lane's, too.
        traffic._monitor.post(lambda: time.sleep(0.2))
        traffic.add_lane(LanePlan(3, iter(())))
        assert traffic.shards.migrated < 1.0
        looked.set()
        assert traffic.repair_shards(TIMEOUT) == []
        assert traffic.shards.migrated == 1.0
        owner.abandon()
