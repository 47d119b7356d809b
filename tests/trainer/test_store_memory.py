"""The memory of store shards over a schedule: rows as they are stated, hashes as servers have them, and a training that stops before one is full."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import numpy as np
import pytest
from command_line import error_of, run_here
from small_job import arguments, synthetic_schedule, train_undisturbed
from small_job import summary as summary_of

from foreload.cache.client.local import LocalStores
from foreload.cache.client.local_server import available
from foreload.cache.client.store import Store, Write
from foreload.cache.parity.placement import Placement
from foreload.cache.protocol.shards.fence import fence_all
from foreload.cache.protocol.shards.namespace import lane_key
from foreload.cache.rows.layout import RowLayout
from foreload.cache.rows.row_bytes import fields
from foreload.pipelines.schedule.kept import ordinals_after
from foreload.pipelines.schedule.reader import Schedule
from foreload.pipelines.schedule.walk import state_after
from foreload.trainer.cluster.coordinator.store_watch import StoreWatch
from foreload.trainer.command_line.training import FULL
from foreload.trainer.job.job import TrainJob
from foreload.trainer.memory.hash_memory import HashMemory, spill_bytes
from foreload.trainer.memory.row_timeline import RowTimeline, counts_of
from foreload.trainer.memory.store_memory import counted_bytes, hash_bytes
from foreload.trainer.run.manifest import Status

ROWS = 12000


@pytest.fixture(scope="module")
def schedule(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic_schedule(tmp_path_factory.mktemp("schedule"), ROWS)


@pytest.mark.parametrize("code", [(1, 0), (2, 1)])
@pytest.mark.parametrize("start", [-1, 40])
def test_rows_of_every_shard_are_those_that_a_replay_gives(schedule: Path, code: tuple[int, int], start: int) -> None:
    whole = Schedule(schedule)
    layouts = [
        RowLayout(table, one.name, 10, (("weights", 4 + 4 * (table % 2)),))
        for table, one in enumerate(whole.header.features.tables)
    ]
    placement = Placement.spread(3, *code)
    timeline = RowTimeline(whole, placement, layouts, start, ordinals_after(whole, start))
    last = whole.header.end_step - 1
    assert timeline.advance() == len(timeline.steps) == last - start
    assert timeline.complete
    assert list(timeline.steps) == list(range(start + 1, last + 1))
    for step in (start + 1, 60, last):
        moment = step - start - 1
        assert (timeline.given[moment] == counts_of(placement, ordinals_after(whole, step), layouts)).all()
        # What sits in slots, and was never stored, is what is not there yet; rows alone can be counted without looking where they are.
        if start < 0 and not placement.r:
            unstored = [int((lane.occupants.stored_tag == 0).sum()) for lane in state_after(whole, step).lanes]
            assert list((timeline.given - timeline.stored)[moment].sum(axis=(1, 2))) == unstored
    assert (np.diff(timeline.stored, axis=0) >= 0).all()
    assert (timeline.stored <= timeline.given).all()


@pytest.mark.parametrize("server", sorted(available()))
def test_a_hash_takes_what_is_reckoned(server: str, tmp_path: Path) -> None:
    """Through doublings of its table, on every server that is there: within 1 %, and beside it are a connection's buffers alone."""
    at_once, size = 500, 140
    with LocalStores(1, tmp_path / "stores", available()[server]) as stores, Store(stores.urls) as store:
        before = int(store.info(0)["used_memory"])
        hashes = HashMemory.ask(store, 0, "reckoned", [size], store.info(0))
        assert hashes.measured
        assert store.command(0, "DBSIZE") == 0, "nothing of the rehearsal is left"
        # What comes with training's traffic alone, which there is none of here.
        spilled = spill_bytes(hashes.growth, store.info(0).get("mem_allocator", ""), size)
        for first in range(0, 40000, at_once):
            rows = np.zeros((at_once, size), np.uint8)
            store.exchange([], [Write(0, b"hash", fields(3, np.arange(first, first + at_once)), rows)])
            expected = float(hash_bytes(hashes, np.array([first + at_once])))
            at_rest = expected - spilled * (first + at_once)
            # The table before a doubling goes when its last bucket has moved: sooner or later, as the server's hash seed has it.
            before_doubling = 8 * 2 ** int(np.log2(first + at_once))
            used = store.command(0, "MEMORY", "USAGE", "hash", "SAMPLES", 0)
            assert any(at_rest + more == pytest.approx(used, rel=0.01) for more in (0, before_doubling, -before_doubling)), first
        assert abs(int(store.info(0)["used_memory"]) - before - expected) < 200_000


@pytest.mark.parametrize("server", sorted(available()))
def test_what_a_replication_backlog_is_yet_to_take_is_counted_from_the_beginning(server: str, tmp_path: Path) -> None:
    backlog, at_once, size = 4 << 20, 500, 140
    with (
        LocalStores(1, tmp_path / "stores", available()[server], {"repl-backlog-size": str(backlog)}) as stores,
        Store(stores.urls) as store,
        socket.socket(socket.AF_UNIX) as replica,
    ):
        # What a replica says first: from then on there is a backlog, also when it has gone again.
        replica.connect(str(tmp_path / "stores" / "shard-0.sock"))
        replica.sendall(b"SYNC\r\n")
        while store.info(0)["repl_backlog_active"] != "1":
            pass
        replica.close()
        hashes = HashMemory.ask(store, 0, "reckoned", [size], store.info(0))
        # Nothing is on its way: neither the replica's snapshot nor the rows of the rehearsal.
        while any(
            store.info(0)[name] != "0" for name in ("connected_slaves", "rdb_bgsave_in_progress", "lazyfree_pending_objects")
        ):
            pass
        before, used = counted_bytes(store.info(0)), int(store.info(0)["used_memory"])
        for first in range(0, 60_000, at_once):
            rows = np.zeros((at_once, size), np.uint8)
            store.exchange([], [Write(0, b"hash", fields(3, np.arange(first, first + at_once)), rows)])
        info, expected = store.info(0), float(hash_bytes(hashes, np.array([60_000])))
        assert int(info["mem_replication_backlog"]) >= 0.95 * backlog
        assert before >= used
        assert counted_bytes(info) - before == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("server", sorted(available()))
@pytest.mark.parametrize("behind", [0, 30])
def test_what_servers_are_seen_to_use_is_told_by_the_rows_that_are_there(
    server: str, behind: int, schedule: Path, tmp_path: Path
) -> None:
    """The store is behind training by what is on its way there: however much that is, a limit is still reached at the step that was foreseen."""
    whole, trained, shards = Schedule(schedule), 60, 3
    layouts = [RowLayout(table, one.name, 10, (("weights", 140),)) for table, one in enumerate(whole.header.features.tables)]
    size, nothing = layouts[0].row_bytes, np.zeros((whole.header.lanes, len(layouts)), np.int64)
    placement = Placement.spread(shards, 2, 1)
    timeline = RowTimeline(whole, placement, layouts, whole.header.first_step - 1, nothing)
    timeline.advance()
    with (
        LocalStores(shards, tmp_path / "stores", available()[server], {"maxmemory": "14mb"}) as stores,
        Store(stores.urls) as store,
    ):
        words = {"schedule": str(schedule), "run": str(tmp_path / "run"), "store": ",".join(stores.urls), "parity": "2+1"}
        job = TrainJob.of({**words, "until_full": True})
        watch = StoreWatch(job, store, whole, placement, layouts, Status("training", whole.header.first_step - 1))
        foreseen = {one.shard: one.step for one in watch.shortages}
        assert set(foreseen) == set(range(shards))
        there = timeline.stored[trained - behind].sum(axis=-1)
        for lane in range(whole.header.lanes):
            for shard in range(shards):
                epoch = fence_all(store, shard, job.run_namespace, [lane], 1)[lane].epoch
                rows = np.zeros((int(there[lane, shard]), size), np.uint8)
                key = lane_key(job.run_namespace, lane, epoch)
                for first in range(0, len(rows), 500):
                    some = rows[first : first + 500]
                    store.exchange([], [Write(shard, key, fields(0, first + np.arange(len(some))), some)])
        watch.step = int(timeline.steps[trained])
        watch.begin(stores.urls)
        watch.close()
        for _ in range(3):
            watch.look()
        for one in watch.shortages:
            assert one.step is not None
            assert one.step == pytest.approx(foreseen[one.shard], abs=3), one


def test_training_stops_before_a_server_is_full_and_goes_on_with_more(schedule: Path, tmp_path: Path) -> None:
    undisturbed = summary_of(train_undisturbed(schedule, tmp_path))["digest"]
    with LocalStores(3, tmp_path / "stores", settings={"maxmemory": "2800kb"}) as stores:
        job = arguments(schedule, tmp_path / "run", "--store", ",".join(stores.urls), "--digest")
        status, _, err = run_here(*job)
        assert (status, error_of(status, err).split(":")[0][:-1]) == (2, "store shard "), err
        told = re.search(r"would be reached at step (\d+);.*CONFIG SET maxmemory (\d+)mb.*stops cleanly after step (\d+)", err)
        assert told is not None, err
        status, _, err = run_here(*job, "--until-full")
        assert status == FULL, err
        stopped = re.search(r"stopped after step (\d+), for store shard", err)
        assert stopped is not None, err
        assert int(stopped[1]) <= int(told[1])
        with Store(stores.urls) as store:
            for shard in range(3):
                assert int(store.info(shard)["used_memory_peak"]) <= 2800 << 10
                store.command(shard, "CONFIG", "SET", "maxmemory", f"{told[2]}mb")
        status, _, err = run_here(*job, "--resume")
        assert status == 0, err
        assert summary_of(tmp_path / "run")["digest"] == undisturbed
