"""A store shard is lost in the middle of traffic: every row used is the true one, and what the store holds in the end is what it would have been."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from grids import covering
from lane_program import LAYOUTS, SEED, make_program
from lane_runs import Recording, arriving, ending, plan, run_lane, with_base
from lost_shards import LANES, PATIENCE, Disturber, check_lost, check_rebuilt, empty, kill, restart, run, undisturbed
from serving import serving

from foreload.cache.client.local import LocalStores
from foreload.cache.client.resp import MARKER
from foreload.cache.client.store import NO_ROWS, Read, Store, Write
from foreload.cache.errors import NamespaceInUse, RowError, RowsLost, StoreError, StoreUnavailable
from foreload.cache.parity.placement import Placement
from foreload.cache.parity.stripes import LaneStripes
from foreload.cache.protocol.ownership.batch_log import FileLog
from foreload.cache.protocol.ownership.ownership import Ownership
from foreload.cache.protocol.rounds.failover import Failover
from foreload.cache.protocol.rounds.lanes import LanePlan
from foreload.cache.protocol.rounds.monitor import Monitor
from foreload.cache.protocol.shards.marker import Marker
from foreload.cache.protocol.shards.namespace import claim, lane_key, remove
from foreload.cache.protocol.shards.reading import StoredRows
from foreload.cache.protocol.shards.shard_status import Patience

# An action of the thread, and the n-th time of it: in the midst of the training.
MOMENTS = [
    ("data leaves", 9),
    ("data acknowledged", 9),
    ("parity rows asked for", 7),
    ("parity rows read", 7),
    ("batch logged", 9),
    ("parity leaves", 9),
    ("parity acknowledged", 9),
    ("fetch leaves", 5),
]
ONE_SHARD_A_MOMENT = covering([(moment, (shard + place) % 3) for place, moment in enumerate(MOMENTS) for shard in range(3)], 3)


@pytest.mark.parametrize(("moment", "shard"), ONE_SHARD_A_MOMENT)
def test_without_a_server_for_the_lost_shard_the_others_end_as_they_would_have(
    stores: LocalStores, tmp_path: Path, shard: int, moment: tuple[str, int]
) -> None:
    check_lost(stores, tmp_path / "logs", {moment: partial(kill, stores, shard)}, shard)


@pytest.mark.parametrize(("moment", "shard"), ONE_SHARD_A_MOMENT)
def test_a_server_that_comes_back_empty_ends_with_every_row_and_parity_row(
    stores: LocalStores, tmp_path: Path, shard: int, moment: tuple[str, int]
) -> None:
    assert check_rebuilt(stores, tmp_path / "logs", {moment: partial(restart, stores, shard)}, shard).rows_rebuilt > 0


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_server_that_is_emptied_under_its_connections_is_lost_and_rebuilt(
    stores: LocalStores, tmp_path: Path, moment: tuple[str, int]
) -> None:
    assert check_rebuilt(stores, tmp_path / "logs", {moment: partial(empty, stores, 1)}).rows_rebuilt > 0


def test_a_server_that_lost_some_rows_is_lost_and_rebuilt(stores: LocalStores, tmp_path: Path) -> None:
    def forget() -> None:
        with Store(stores.urls, timedelta(seconds=5)) as other:
            for lane in LANES:
                names = other.command(1, "HKEYS", lane_key("t", lane, 0))
                assert isinstance(names, list)
                if len(names) > 1:
                    other.command(1, "HDEL", lane_key("t", lane, 0), *[name for name in names if name != MARKER][::2])

    check_rebuilt(stores, tmp_path / "logs", {("data acknowledged", 9): forget})


@pytest.mark.parametrize("again", [restart, empty])
def test_a_server_that_is_lost_again_while_it_is_rebuilt_is_rebuilt_anew(
    stores: LocalStores, tmp_path: Path, again: Callable[[LocalStores, int], None]
) -> None:
    disturber = Disturber({("batch logged", 9): partial(restart, stores, 1), ("rows rebuilt", 3): partial(again, stores, 1)})
    found, _, lost = run(stores, tmp_path / "logs", 2, 1, disturber, grace=PATIENCE)
    assert lost == []
    assert disturber.states.count((1, "lost")) == 2
    assert found == undisturbed(3, 2, 1)


def test_a_server_that_is_emptied_and_written_to_before_its_connection_breaks_does_not_look_whole(
    stores: LocalStores, tmp_path: Path
) -> None:
    """As if the write had come between: all that was under way has been done, and no one heard of it."""
    attempt, done = Store.attempt, list[bool]()

    def unheard(self: Store, reads: Sequence[Read], writes: Sequence[Write]) -> dict[int, StoreError]:
        if done or not any(Marker.parse(write.marker) == Marker(12, 12) for write in writes):
            return attempt(self, reads, writes)
        done.append(True)
        empty(stores, 1)
        failures = attempt(self, reads, writes)
        return failures | {1: StoreUnavailable("the connection broke")}

    disturber = Disturber({})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "attempt", unheard)
        # However slow the machine, so that it is not lost for being late; and the note of whose the server is, is there.
        patch.setattr("foreload.cache.protocol.rounds.reconnection.RECONNECT", PATIENCE)
        patch.setattr(Ownership, "has", lambda *_: True)
        # One lane, so that the marker is everywhere what it must be.
        found, _, lost = run(stores, tmp_path / "logs", 2, 1, disturber, grace=PATIENCE, lanes=LANES[:1])
    assert lost == []
    # By the count of its rows, before any that it lacks was asked for.
    assert disturber.reasons[0].endswith("came back without the run's last write-back batches, or without some of its rows")
    assert found == {LANES[0]: undisturbed(3, 2, 1)[LANES[0]]}


@pytest.mark.parametrize("covered", [True, False])
def test_a_row_that_is_missing_on_one_shard_too_many_is_decoded_alone_if_its_stripe_allows(tmp_path: Path, covered: bool) -> None:
    count = 60
    wanted = arriving(*((1, ordinal, 1000 + ordinal, 7, 9) for ordinal in range(count)))
    with LocalStores(5, tmp_path / "stores") as stores, Store(stores.urls, timedelta(seconds=10)) as store:
        placement = Placement.spread(5, 2, 1)
        stored = StoredRows(store, placement, LAYOUTS, "t")
        at = LaneStripes.of(placement, 0, np.zeros(len(LAYOUTS), np.int64)).shards(1, np.arange(count) // 2)
        with_first = (at == 0).any(axis=1)
        gone = int(np.flatnonzero((at[np.arange(count), np.arange(count) % 2] == 1) & (with_first != covered))[0])
        name = (1 << 48 | gone).to_bytes(8, "big")
        plan = LanePlan(0, iter([(0, arriving()), (1, wanted)]))
        traffic = serving(stored, [plan], SEED, log=FileLog(tmp_path / "logs"))
        traffic.take(0, 0)
        traffic.write_back(0, 4, with_base(ending(count, 7)))
        traffic.flush()
        kill(stores, 0)
        traffic.probe()
        with Store(stores.urls[1:2], timedelta(seconds=10)) as other:
            row = other.command(0, "HGET", stored.key(0, 1), name)
            assert other.command(0, "HDEL", stored.key(0, 1), name) == 1
            traffic.write_back(0, 9, ending(0, 1))
            if covered:
                assert (traffic.take(0, 1).weights[:, :3] == 1).all()
                assert list(traffic.shards.not_whole) == [0]
            else:
                with pytest.raises(RowError, match=rf"table narrow: the row with ordinal {gone} .* is missing"):
                    traffic.take(0, 1)
            assert other.command(0, "HGET", stored.key(0, 1), name) == (row if covered else None)
        traffic.abort()


def test_two_of_six_shards_are_lost_at_once(tmp_path: Path) -> None:
    with LocalStores(6, tmp_path / "stores") as stores:

        def both() -> None:
            for shard in (1, 4):
                restart(stores, shard)

        found, _, lost = run(stores, tmp_path / "logs", 4, 2, Disturber({("parity leaves", 9): both}), grace=PATIENCE)
    assert lost == []
    assert found == undisturbed(6, 4, 2)


def test_more_losses_than_parity_covers_stop_the_traffic(stores: LocalStores, tmp_path: Path) -> None:
    disturber = Disturber({("data leaves", 9): partial(empty, stores, 0), ("batch logged", 12): partial(empty, stores, 2)})
    with pytest.raises(
        RowsLost, match=r"store shards 0, 2 are lost, but parity covers only 1: \d+ rows of table wide, .* cannot be recovered"
    ):
        run(stores, tmp_path / "logs", 2, 1, disturber)


@pytest.mark.parametrize(("k", "r"), [(2, 1), (1, 0)], ids=["2+1", "without parity"])
@pytest.mark.parametrize("moment", [("data leaves", 9), ("fetch leaves", 5), ("data acknowledged", 9)])
def test_rows_that_another_run_deleted_are_not_told_as_lost(
    stores: LocalStores, tmp_path: Path, k: int, r: int, moment: tuple[str, int]
) -> None:
    def take() -> None:
        with Store(stores.urls, timedelta(seconds=5)) as other:
            remove(other, "t")
            claim(other, "t", {"run": "another"}, "new")

    with pytest.raises(NamespaceInUse, match="namespace t now belongs to another run, which deleted this run's rows"):
        run(stores, tmp_path / "logs", k, r, Disturber({moment: take}))


class ReadPhases(Recording):
    """A Store that adds up the bytes of the reads that it is asked for in read phases of rounds."""

    expected = False
    bytes = 0

    def attempt(self, reads: Sequence[Read], writes: Sequence[Write]) -> dict[int, StoreError]:
        if self.expected:
            self.expected = False
            self.bytes += sum(read.rows.nbytes for read in reads)
        return super().attempt(reads, writes)


def test_bytes_fetched_are_those_of_reads_that_were_sent(stores: LocalStores, tmp_path: Path) -> None:
    acknowledged: list[str] = []

    def act(action: str) -> None:
        store.expected = store.expected or action in ("data leaves", "fetch leaves", "parity rows asked for")
        if action == "data acknowledged":
            acknowledged.append(action)
            if len(acknowledged) == 4:
                kill(stores, 1)

    with ReadPhases(stores.urls) as store:
        stored = StoredRows(store, Placement.spread(3, 2, 1), LAYOUTS, "t")
        program = make_program(1, 25)
        with serving(stored, [LanePlan(0, plan(program))], SEED, log=FileLog(tmp_path / "logs"), on_action=act) as traffic:
            run_lane(traffic, 0, program)
        counters = traffic.counters()
    assert counters.rows_decoded > 0
    assert counters.bytes_fetched == store.bytes


def test_a_shard_that_dies_after_the_last_write_is_noticed_at_the_end(stores: LocalStores, tmp_path: Path) -> None:
    program = make_program(1, 10)
    with Store(stores.urls, timedelta(seconds=5)) as store:
        stored = StoredRows(store, Placement.spread(3, 2, 1), LAYOUTS, "t")
        with serving(stored, [LanePlan(0, plan(program))], SEED, log=FileLog(tmp_path / "logs")) as traffic:
            run_lane(traffic, 0, program)
            assert traffic.repair_shards(timedelta()) == []
            kill(stores, 1)
            assert traffic.repair_shards(timedelta()) == [1]
            assert stores.restart(1)
            assert traffic.repair_shards(PATIENCE) == []
            assert traffic.counters().rows_rebuilt > 0


@pytest.mark.parametrize(
    ("rebuilding", "found", "message"),
    [
        (False, Marker(1, 1), "is 1, must be 1, with the parity of 2"),
        (False, Marker(2, 1, True), "is 1, with the parity of 2, being rebuilt, must be 1, with the parity of 2"),
        (True, Marker(2, 2), "is 2, must be 1, with the parity of 2, being rebuilt"),
    ],
)
def test_a_stale_shard_is_lost_and_the_marker_that_it_must_have_is_named(
    stores: LocalStores, rebuilding: bool, found: Marker, message: str
) -> None:
    with Store(stores.urls, timedelta(seconds=5)) as store:
        stored = StoredRows(store, Placement.spread(3, 2, 1), LAYOUTS, "t")
        failover = Failover(stored, Ownership(), Monitor(), lambda change: None, Patience())
        try:
            if rebuilding:
                stored.shards.advance(0, 1, 0)
            store.exchange([], [Write(1, stored.key(0, 1), *NO_ROWS, found.stored())])
            read = Read(1, stored.key(0, 1), *NO_ROWS)
            failover.exchange([(0, read)], [], lambda lane: [Marker(2, 1), Marker(2, 2)])
            assert stored.shards.snapshot.lost == [1]
            assert stored.shards.snapshot.shards[1].why.endswith(f"is stale: its marker for lane 0 {message}")
        finally:
            failover.close()
