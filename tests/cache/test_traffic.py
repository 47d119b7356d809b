"""Traffic with real servers: every row arrives as it was written, in rounds, or not at all."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
from hold_proxy import HoldingProxy
from lane_program import (
    EVALUATION_SLOTS,
    LAYOUTS,
    SEED,
    SLOTS,
    STATE_WIDTH,
    WIDTH,
    LaneProgram,
    Truth,
    initial,
    make_program,
    train_slots,
    values,
)
from lane_runs import Recording, arriving, expected_rows, plan
from lane_runs import ending as ending
from serving import serving, take_wrong_rows
from waiting import wait_until

from foreload.cache.client.local import LocalStores
from foreload.cache.client.resp import MARKER
from foreload.cache.client.store import Store
from foreload.cache.errors import (
    CacheError,
    RowError,
    StoreError,
    StoreUnavailable,
)
from foreload.cache.parity.placement import Placement
from foreload.cache.protocol.rounds.lanes import LanePlan
from foreload.cache.protocol.shards.reading import Expected, StoredRows, read_rows
from foreload.cache.rows.partition import Partition
from foreload.cache.rows.row_bytes import fields
from foreload.cache.rows.staging import EndedRows
from foreload.cache.traffic import Traffic
from foreload.pipelines.schedule.format import Arrivals

COLUMNS = ("table", "ordinal", "id", "tag", "stored_tag", "weights", "state")  # of EndedRows, without base


@pytest.fixture
def recording(servers: LocalStores, store: Store) -> Iterator[Recording]:
    with Recording(servers.urls) as recording:
        yield recording


def stored_rows(store: Store, namespace: str = "t") -> StoredRows:
    return StoredRows(store, Placement.spread(store.shards), LAYOUTS, namespace)


def partition_for(slots: int = SLOTS) -> Partition:
    return Partition(slots, EVALUATION_SLOTS, WIDTH, STATE_WIDTH)


def run_lane(traffic: Traffic, lane: int, program: LaneProgram, check: bool = True, slots: int = SLOTS) -> Truth:
    """Train through a program as a trainer does where there is no parity, comparing every row used with the truth.

    Rows that are not changed by the step before are also looked at before the boundary, as a trainer sends them early.
    """
    partition, truth, last = partition_for(slots), Truth(), -1
    for index, event in enumerate(program.events):
        if event.step is not None:
            early = event.arrivals.after < event.step
            rows = traffic.rows_ready(lane, index, early)
            names = list(zip(event.arrivals.table.tolist(), event.arrivals.id.tolist(), strict=True))
            before = [name for name, is_early in zip(names, early, strict=True) if is_early]
            if before and check:
                assert np.array_equal(np.concatenate([rows.weights, rows.state], axis=1)[early], truth.of(before))
            traffic.write_back(lane, event.step, partition.end(event.ends))
            last = event.step
        partition.admit(event.arrivals, traffic.take(lane, index))
        if check:
            assert np.array_equal(values(partition, event.slots), truth.of(event.rows))
        if event.step is not None:
            train_slots(partition, event.slots, event.step)
            truth.train(event.rows, event.step)
    assert partition.occupied().tolist() == program.final_ends.tolist()
    traffic.write_back(lane, last + 1, partition.end(program.final_ends))
    return truth


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize(("lead_events", "staging_rows"), [(1, 1), (3, 10), (20, 1000)])
@pytest.mark.parametrize("slots", [SLOTS, 60])
def test_every_row_used_and_stored_is_the_true_one(
    servers: LocalStores, store: Store, shards: int, lead_events: int, staging_rows: int, slots: int
) -> None:
    programs = {lane: make_program(lane + 10 * slots, 25, slots) for lane in (0, 3)}
    with Store(servers.urls[:shards], timedelta(seconds=10)) as client:
        stored = stored_rows(client)
        plans = [LanePlan(lane, plan(program)) for lane, program in programs.items()]
        with serving(stored, plans, SEED, lead_events=lead_events, staging_rows=staging_rows) as traffic:
            truths = {lane: run_lane(traffic, lane, program, slots=slots) for lane, program in programs.items()}
        counters = traffic.counters()
        for lane, program in programs.items():
            rows, names = expected_rows(lane, program)
            found = read_rows(stored, rows, last_batch=traffic.last_batch(lane))
            assert np.array_equal(np.concatenate([found.weights, found.state], axis=1), truths[lane].of(names))
    arrivals = [event.arrivals for program in programs.values() for event in program.events]
    assert counters.rows_initial == sum(int((a.tag == 0).sum()) for a in arrivals)
    assert counters.rows_fetched == sum(int((a.tag > 0).sum()) for a in arrivals)
    ends = [event.ends for program in programs.values() for event in program.events]
    assert counters.rows_written == sum(map(len, ends)) + sum(len(program.final_ends) for program in programs.values())
    assert counters.rows_written_at_stop == 0
    assert counters.bytes_written > counters.rows_written * 12


def test_lanes_in_threads_of_their_own_do_not_disturb_each_other(store: Store) -> None:
    programs = {lane: make_program(lane, 20) for lane in range(3)}
    failures: list[BaseException] = []

    def work(lane: int) -> None:
        try:
            run_lane(traffic, lane, programs[lane])
        except BaseException as failure:
            failures.append(failure)

    with serving(stored_rows(store), [LanePlan(lane, plan(program)) for lane, program in programs.items()], SEED) as traffic:
        threads = [threading.Thread(target=work, args=(lane,)) for lane in programs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures


def test_batches_are_numbered_and_marked_on_every_shard_and_hold_2048_rows_a_shard_of_one_width(
    recording: Recording,
) -> None:
    stored = stored_rows(recording)
    # 13,000 rows are 4,333 a shard or so: three batches. Those of another width make a fourth.
    narrow, wide = ending(13_000, 1), ending(500, 1, table=0)
    both = EndedRows(*(np.concatenate([getattr(narrow, name), getattr(wide, name)]) for name in COLUMNS))
    with serving(stored, [LanePlan(5, iter([]), last_batch=6)], SEED) as traffic:
        traffic.write_back(5, 1, both)
        traffic.flush()
        traffic.write_back(5, 2, ending(0, 1))
        traffic.flush()
        assert traffic.last_batch(5) == 6 + len(recording.exchanges)
    for number, (_, writes) in enumerate(recording.exchanges, start=7):
        assert [write.shard for write in writes] == [0, 1, 2]
        assert [write.marker for write in writes] == [number.to_bytes(8, "little")] * 3
        assert len({write.rows.shape[1] for write in writes}) == 1
        assert max(len(write.fields) for write in writes) <= 2048
    assert len(recording.exchanges) == 4
    assert sum(len(write.fields) for _, writes in recording.exchanges for write in writes) == 13_500
    counters = traffic.counters()
    assert (counters.rows_written, counters.batches) == (13_500, 4)


def test_no_exchange_reads_a_row_that_it_writes_or_that_was_not_written_before(recording: Recording) -> None:
    program = make_program(77, 40)
    with serving(stored_rows(recording), [LanePlan(0, plan(program))], SEED) as traffic:
        run_lane(traffic, 0, program)
    versions: dict[int, int] = {}
    reads = [{int(name) for read in reads for name in read.fields} for reads, _ in recording.exchanges]
    for wanted, (_, writes) in zip(reads, recording.exchanges, strict=True):
        assert wanted <= set(versions)
        written = {int(name) for write in writes for name in write.fields}
        assert not wanted & written
        for name in written:
            versions[name] = versions.get(name, 0) + 1
    assert sum(map(len, reads)) == traffic.counters().rows_fetched > 0


def test_no_fetch_leaves_before_the_acknowledgement_of_its_rows_write_back(servers: LocalStores, store: Store) -> None:
    late = arriving((1, 0, 1000, 5, 4), (1, 1, 1001, 5, 4))
    with HoldingProxy(str(servers.urls[0])) as proxy, Store([proxy.url], timedelta(seconds=20)) as client:
        with serving(stored_rows(client), [LanePlan(0, iter([(0, arriving()), (1, late)]))], SEED) as traffic:
            traffic.take(0, 0)
            proxy.hold()
            traffic.write_back(0, 4, ending(2, 5, value=2.5))
            proxy.wait_for_request(b"HSET")
            taken: list[np.ndarray] = []
            trainer = threading.Thread(target=lambda: taken.append(traffic.take(0, 1).weights))
            trainer.start()
            while traffic.counters().stalled_rows == 0:
                assert trainer.is_alive()
                trainer.join(0.01)
            proxy.release()
            trainer.join()
        counters = traffic.counters()
    assert taken[0][:, :3].tolist() == [[2.5] * 3] * 2
    assert (counters.stalled_rows, counters.rows_fetched) == (2, 2)
    assert counters.waited > timedelta()
    for name in fields(late.table, late.ordinal).tolist():
        field = name.to_bytes(8, "big")
        hset = proxy.first("to server", field)
        acknowledged = proxy.first("to client", b":", after=hset)
        hmget = proxy.first("to server", field, after=hset + 1)
        assert hset < acknowledged < hmget


def test_fetches_of_later_events_pass_a_stalled_one(store: Store) -> None:
    with serving(stored_rows(store), [LanePlan(0, iter([]))], SEED) as traffic:
        traffic.write_back(0, 1, ending(3, 1))
        traffic.flush()
    later = [(0, arriving()), (1, arriving((1, 0, 1000, 1, 9), (1, 1, 1001, 1, 1))), (2, arriving((1, 2, 1002, 1, 1)))]
    with serving(stored_rows(store), [LanePlan(0, iter(later), traffic.last_batch(0), released_boundary=1)], SEED) as traffic:
        assert traffic.rows_ready(0, 2, np.array([True])).weights[0, 0] == 1
        assert traffic.rows_ready(0, 1, np.array([1])).weights[1, 0] == 1
        traffic.take(0, 0)
        with pytest.raises(CacheError, match="event 1 must be taken before event 2"):
            traffic.take(0, 2)
        traffic.write_back(0, 9, ending(0, 1))
        assert (traffic.take(0, 1).weights[:, 0] == 1).all()
        assert len(traffic.take(0, 2).weights) == 1


def test_staging_is_bounded_in_events_and_rows(store: Store) -> None:
    asked: list[int] = []
    changed = threading.Condition()

    def numbers() -> Iterator[tuple[int, Arrivals]]:
        for index in range(40):
            with changed:
                asked.append(index)
                changed.notify_all()
            yield index, arriving(*((1, -1, id, 0, -1) for id in range(5)))

    def await_asked(index: int) -> None:
        with changed:
            assert changed.wait_for(lambda: asked[-1:] == [index], 20), asked

    # One more is asked of the plan than is staged; its size must be known.
    with serving(stored_rows(store), [LanePlan(0, numbers())], SEED, lead_events=4) as traffic:
        await_asked(4)
        traffic.take(0, 0)
        traffic.take(0, 1)
        await_asked(6)
        # An event waited for is staged whatever stands before it.
        traffic.rows_ready(0, 12, np.arange(5))
        await_asked(13)
        traffic.flush()
        assert traffic.counters().rows_initial == 5 * 13
    asked.clear()
    with serving(stored_rows(store), [LanePlan(0, numbers())], SEED, staging_rows=11) as traffic:
        await_asked(2)
        for index in range(40):
            assert np.array_equal(traffic.take(0, index).weights[3], initial((1, 3))[:WIDTH])
        with pytest.raises(CacheError, match="event 40 is not in the plan"):
            traffic.take(0, 40)


def test_a_write_back_waits_for_room(servers: LocalStores, store: Store) -> None:
    with (
        HoldingProxy(str(servers.urls[0])) as proxy,
        Store([proxy.url], timedelta(seconds=20)) as client,
        serving(stored_rows(client), [LanePlan(0, iter([]))], SEED, staging_rows=10) as traffic,
    ):
        proxy.hold()
        traffic.write_back(0, 1, ending(30, 1))  # alone, it may be larger
        held_up: list[float] = []
        trainer = threading.Thread(target=lambda: held_up.append(traffic.write_back(0, 2, ending(1, 2, stored=1))))
        trainer.start()
        proxy.wait_for_request(b"HSET")
        assert traffic.last_batch(0) == 0
        wait_until(lambda: bool(traffic._monitor._waiters))  # type: ignore[attr-defined]
        began = time.monotonic()
        time.sleep(0.02)  # so that it is told from no time
        least = time.monotonic() - began
        proxy.release()
        trainer.join()
        traffic.flush()
        assert traffic.counters().rows_written == 31
        assert held_up[0] >= least


def test_rows_as_the_store_has_them_are_not_written_and_those_beyond_the_schedule_are_counted_apart(store: Store) -> None:
    unchanged = ending(4, 3)
    unchanged.stored_tag[:] = [3, 2, 3, 0]
    with serving(stored_rows(store), [LanePlan(0, iter([]))], SEED) as traffic:
        traffic.write_back(0, 3, ending(2, 2))
        traffic.write_back(0, 4, unchanged, at_stop=True)
        with pytest.raises(CacheError, match="boundary 4 must follow 4"):
            traffic.write_back(0, 4, ending(1, 1))
    counters = traffic.counters()
    assert (counters.rows_written, counters.rows_written_at_stop) == (2, 2)


def test_a_resumed_lane_reads_what_the_first_run_wrote(store: Store) -> None:
    program = make_program(5, 30)
    half = next(index for index, event in enumerate(program.events) if event.step == 15)
    first = LaneProgram(program.events[:half])
    stored, partition, truth = stored_rows(store), partition_for(), Truth()
    with serving(stored, [LanePlan(0, plan(first))], SEED) as traffic:
        for index, event in enumerate(first.events):
            if event.step is not None:
                traffic.write_back(0, event.step, partition.end(event.ends))
            partition.admit(event.arrivals, traffic.take(0, index))
            if event.step is not None:
                train_slots(partition, event.slots, event.step)
                truth.train(event.rows, event.step)
        # A clean stop: what sits in slots is written beyond the schedule, at the boundary that comes next.
        slots = partition.occupied()
        ended = partition.end(slots)
        traffic.write_back(0, 15, ended, at_stop=True)
    resumed = partition_for()
    rows = read_rows(stored, Expected(*ended.columns(), 0), traffic.last_batch(0))
    assert rows.weights.tobytes() == ended.weights.tobytes()
    rest = [(index, event.arrivals) for index, event in enumerate(program.events) if index >= half]
    occupants = Arrivals(*ended.columns(), slots, np.full(len(slots), -1, np.int32))
    resumed.admit(occupants, rows)
    plans = [LanePlan(0, iter(rest), traffic.last_batch(0), released_boundary=15)]
    with serving(stored, plans, SEED) as traffic:
        for index, event in enumerate(program.events[half:], start=half):
            if event.step is not None:
                ended = resumed.end(event.ends)
                # The rows that end at the boundary of the stop are in the store already.
                if event.step > 15:
                    traffic.write_back(0, event.step, ended)
            resumed.admit(event.arrivals, traffic.take(0, index))
            assert np.array_equal(values(resumed, event.slots), truth.of(event.rows))
            if event.step is not None:
                train_slots(resumed, event.slots, event.step)
                truth.train(event.rows, event.step)


def train_and_compare(recording: Recording, program: LaneProgram, check: bool) -> bool:
    """Whether, after training through a program, every stored row is the true one. check: the rows that are used, too."""
    stored = stored_rows(recording)
    with serving(stored, [LanePlan(0, plan(program))], SEED) as traffic:
        truth = run_lane(traffic, 0, program, check=check)
    rows, names = expected_rows(0, program)
    found = read_rows(stored, rows)
    return np.array_equal(np.concatenate([found.weights, found.state], axis=1), truth.of(names))


@pytest.mark.parametrize("dropped", [0, 9, 20, 57, 101])
def test_a_dropped_write_back_stops_the_run_by_its_tag(recording: Recording, dropped: int) -> None:
    recording.drop = lambda number, name, times: number == dropped
    message = r"table .*, row id \d+ \(lane 0, ordinal \d+\) .*tag must be \d+; got .*--overwrite"
    with pytest.raises(RowError, match=message):
        train_and_compare(recording, make_program(3, 40), check=True)


def test_with_the_tag_check_off_a_dropped_write_back_changes_the_result(
    recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_wrong_rows(monkeypatch)
    # A row that was written before: else it would be missing, which is never let pass.
    program = make_program(3, 40)
    assert train_and_compare(recording, program, check=False)
    names = [int(name) for _, writes in recording.exchanges for write in writes for name in write.fields]
    twice = next(name for name in names if names.count(name) > 1)
    for shard in range(recording.shards):
        recording.command(shard, "FLUSHALL")
    recording.drop = lambda number, name, times: name == twice and times == names.count(twice) - 1
    assert not train_and_compare(recording, program, check=False)


def write_one(store: Store, tag: int, id: int = 1000, number: int = 1) -> None:
    """The row of table 1 with ordinal 0, as write-back batch `number`."""
    row = ending(1, tag)
    row.id[0] = id
    with serving(stored_rows(store), [LanePlan(0, iter([]), last_batch=number - 1)], SEED) as traffic:
        traffic.write_back(0, 1, row)


@pytest.mark.parametrize(
    ("tag", "id", "message"),
    [
        (4, 1000, "table narrow, row id 1000 (lane 0, ordinal 0) has another version on store unix://"),
        (5, 1001, "table narrow, row id 1000 (lane 0, ordinal 0) has been replaced by id 1001 on store unix://"),
    ],
)
def test_a_row_with_another_tag_or_id_is_refused_and_taken_only_without_the_check(
    store: Store, monkeypatch: pytest.MonkeyPatch, tag: int, id: int, message: str
) -> None:
    write_one(store, tag, id)
    wanted = arriving((1, 0, 1000, 5, -1))
    with pytest.raises(RowError) as caught, serving(stored_rows(store), [LanePlan(0, iter([(0, wanted)]), 1)], SEED) as traffic:
        traffic.take(0, 0)
    assert str(caught.value).startswith(message)
    assert f"tag must be 5; got {tag}" in str(caught.value)
    take_wrong_rows(monkeypatch)
    with serving(stored_rows(store), [LanePlan(0, iter([(0, wanted)]), 1)], SEED) as traffic:
        assert traffic.take(0, 0).weights[0, 0] == 1


@pytest.mark.parametrize("checked", [True, False])
def test_a_missing_row_is_refused_and_never_zeros(store: Store, monkeypatch: pytest.MonkeyPatch, checked: bool) -> None:
    if not checked:
        take_wrong_rows(monkeypatch)
    write_one(store, 5)
    wanted = arriving((1, 0, 1000, 5, -1), (1, 1, 1001, 5, -1))
    plans = [LanePlan(0, iter([(0, wanted)]), 1)]
    message = r"row id 1001 \(lane 0, ordinal 1\) is missing on store .*tag must be 5; got none"
    with pytest.raises(RowError, match=message), serving(stored_rows(store), plans, SEED) as traffic:
        traffic.take(0, 0)


def test_a_stale_or_foreign_shard_is_noticed_by_its_marker(store: Store) -> None:
    write_one(store, 5, number=3)
    wanted = arriving((1, 0, 1000, 5, -1))
    for last_batch in (2, 4, 0):
        message = f"stale shard: its last write-back batch of lane 0 is 3, must be {last_batch}"
        plans = [LanePlan(0, iter([(0, wanted)]), last_batch)]
        with pytest.raises(StoreError, match=message), serving(stored_rows(store), plans, SEED) as traffic:
            traffic.take(0, 0)
    rows = Expected(*wanted.columns(), 0)
    with pytest.raises(StoreError, match="stale shard"):
        read_rows(stored_rows(store), rows, last_batch=2)
    assert read_rows(stored_rows(store), rows, last_batch=3).tag.tolist() == [5]


@pytest.mark.parametrize("read", [True, False], ids=["beside reads", "alone"])
def test_a_shard_that_was_emptied_is_noticed_by_the_next_write(store: Store, read: bool) -> None:
    """Without parity; also where no marker is read with it."""
    coming = [(0, arriving()), (1, arriving((1, 0, 1000, 5, 1)) if read else arriving())]
    traffic = serving(stored_rows(store), [LanePlan(0, iter(coming))], SEED)
    traffic.take(0, 0)
    traffic.write_back(0, 0, ending(60, 5))
    traffic.flush()
    store.command(1, "FLUSHALL")
    traffic.write_back(0, 1, ending(20, 6, stored=5))
    with pytest.raises(
        StoreError, match=r"stale shard|lost rows of lane 0: of .* fields written, .* were new to the server, must be 0"
    ):
        traffic.close()
    traffic.abort()


def test_a_shard_that_was_emptied_after_the_last_write_is_noticed_at_the_end(store: Store) -> None:
    traffic = serving(stored_rows(store), [LanePlan(0, iter([]))], SEED)
    traffic.write_back(0, 0, ending(60, 5))
    traffic.flush()
    assert traffic.repair_shards(timedelta()) == []
    store.command(1, "FLUSHALL")
    with pytest.raises(StoreError, match="stale shard: its last write-back batch of lane 0 is 0, must be 1"):
        traffic.repair_shards(timedelta())
    traffic.abort()


def test_the_batch_that_leaves_with_a_read_is_not_the_one_that_its_shard_must_have(servers: LocalStores, store: Store) -> None:
    stored, handed = stored_rows(store), threading.Event()

    def forget(action: str) -> None:
        if action == "data acknowledged":
            handed.wait()
            with Store(servers.urls, timedelta(seconds=10)) as other:
                for shard in range(other.shards):
                    other.command(shard, "HDEL", stored.key(0, shard), MARKER)

    plans = [LanePlan(0, iter([(0, arriving((1, 0, 1000, 5, 1)))]), last_batch=3)]
    message = "stale shard: its last write-back batch of lane 0 is 0, must be 4"
    traffic = serving(stored, plans, SEED, on_action=forget)
    traffic.write_back(0, 1, ending(1, 5))
    traffic.write_back(0, 2, ending(1, 6, stored=5))
    handed.set()
    with pytest.raises(StoreError, match=message):
        traffic.take(0, 0)
    traffic.abort()


def test_reading_up_to_a_tag_takes_any_version_until_then(store: Store) -> None:
    write_one(store, 5)
    table, zero, ids = np.array([1], np.int16), np.zeros(1, np.int64), np.array([1000])
    for limit in (5, 9):
        found = read_rows(stored_rows(store), Expected(table, zero, ids, np.array([limit]), 0, tag_at_most=True))
        assert found.tag.tolist() == [5]
    with pytest.raises(RowError, match="tag must be at most 4; got 5"):
        read_rows(stored_rows(store), Expected(table, zero, ids, np.array([4]), 0, tag_at_most=True))


def test_a_failure_of_the_thread_reaches_every_call(store: Store) -> None:
    traffic = serving(stored_rows(store), [LanePlan(0, iter([(0, arriving((1, 0, 1000, 5, -1)))]))], SEED)
    calls = [
        lambda: traffic.take(0, 0),
        lambda: traffic.rows_ready(0, 0, np.array([0])),
        lambda: traffic.write_back(0, 1, ending(1, 1)),
        traffic.flush,
        traffic.close,
    ]
    for call in calls:
        with pytest.raises(RowError, match="is missing"):
            call()
    traffic.abort()
    traffic.abort()


def test_a_store_that_dies_stops_every_call(tmp_path: Path) -> None:
    coming = iter([(0, arriving()), (1, arriving((1, 0, 1000, 1, 1)))])
    with LocalStores(1, tmp_path) as servers, Store(servers.urls, timedelta(seconds=10)) as client:
        traffic = serving(stored_rows(client), [LanePlan(0, coming)], SEED)
        traffic.take(0, 0)
        os.kill(servers.pids[0] or 0, signal.SIGKILL)
        traffic.write_back(0, 1, ending(1, 1))
        for call in (lambda: traffic.take(0, 1), traffic.flush, lambda: traffic.write_back(0, 2, ending(0, 1)), traffic.close):
            with pytest.raises(StoreUnavailable, match="store unix://"):
                call()


def test_aborting_frees_who_waits(store: Store) -> None:
    traffic = serving(stored_rows(store), [LanePlan(0, iter([(0, arriving((1, 0, 1000, 1, 9)))]))], SEED)
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            traffic.take(0, 0)
        except CacheError as error:
            caught.append(error)

    trainer = threading.Thread(target=wait)
    trainer.start()
    while traffic.counters().stalled_rows == 0:
        trainer.join(0.01)
    traffic.abort()
    trainer.join()
    assert str(caught[0]) == "traffic: is closed"


def test_an_error_of_the_plan_is_raised_where_its_event_is_taken(store: Store) -> None:
    def failing() -> Iterator[tuple[int, Arrivals] | None]:
        yield 0, arriving((1, -1, 7, 0, -1))
        yield None
        yield 1, arriving()
        raise ValueError("segment 2 is damaged")

    with serving(stored_rows(store), [LanePlan(0, failing())], SEED) as traffic:
        traffic.take(0, 0)
        traffic.take(0, 1)
        traffic.write_back(0, 1, ending(3, 1))
        traffic.flush()
        with pytest.raises(ValueError, match="segment 2"):
            traffic.take(0, 2)


def test_actions_are_named_in_the_order_of_a_round(store: Store) -> None:
    actions: list[str] = []
    coming = iter([(0, arriving()), (1, arriving((1, 0, 1000, 5, 4)))])
    with serving(stored_rows(store), [LanePlan(0, coming)], SEED, on_action=actions.append) as traffic:
        traffic.take(0, 0)
        traffic.write_back(0, 4, ending(1, 5))
        traffic.take(0, 1)
    assert actions == ["data leaves", "data acknowledged", "fetch leaves", "rows staged"]


def test_closing_twice_and_calls_after_closing(store: Store) -> None:
    traffic = serving(stored_rows(store), [LanePlan(0, iter([(0, arriving())]))], SEED)
    traffic.close()
    traffic.close()
    with pytest.raises(CacheError, match="is closed"):
        traffic.take(0, 3)
