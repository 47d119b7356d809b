"""Traffic with parity on real servers: every stripe agrees with its members, no more rows move than must, and the log is there first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
from lane_program import LAYOUTS, SEED, STATE_WIDTH, WIDTH, LaneProgram, Truth, make_program, train_slots, values
from serving import serving

from foreload.cache.client.local import LocalStores
from foreload.cache.client.store import Read, Store, Write
from foreload.cache.errors import CacheError, StoreError
from foreload.cache.parity.placement import Placement
from foreload.cache.protocol.batch_log import FileLog, LoggedBatch
from foreload.cache.protocol.lanes import LanePlan
from foreload.cache.protocol.marker import Marker
from foreload.cache.protocol.reading import Expected, StoredRows, read_rows
from foreload.cache.rows.fields import PARITY_BIT, fields
from foreload.cache.rows.partition import Partition
from foreload.cache.traffic import Traffic
from foreload.pipelines.schedule.format import Arrivals

SLOTS, EVALUATION_SLOTS = 12, 6
CODES = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (3, 2)]


@pytest.fixture(scope="module")
def five(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStores]:
    """Five servers."""
    with LocalStores(5, Path(tmp_path_factory.mktemp("five"))) as stores:
        yield stores


@pytest.fixture
def client(five: LocalStores) -> Iterator[Store]:
    """A client of five empty servers."""
    with Store(five.urls, timedelta(seconds=10)) as store:
        for shard in range(store.shards):
            store.command(shard, "FLUSHALL")
        yield store


class Recording(Store):
    """A Store that notes its exchanges."""

    def __init__(self, urls: Sequence[object]) -> None:
        super().__init__(urls, timedelta(seconds=10))  # type: ignore[arg-type]
        self.exchanges: list[tuple[list[Read], list[Write]]] = []

    def attempt(self, reads: Sequence[Read], writes: Sequence[Write]) -> dict[int, StoreError]:
        self.exchanges.append((list(reads), list(writes)))
        return super().attempt(reads, writes)


def run_lane(traffic: Traffic, lane: int, program: LaneProgram) -> Truth:
    """Train through a program as a trainer does, comparing every row used with the truth."""
    partition, truth, last = Partition(SLOTS, EVALUATION_SLOTS, WIDTH, STATE_WIDTH, with_base=True), Truth(), -1
    for index, event in enumerate(program.events):
        if event.step is not None:
            traffic.write_back(lane, event.step, partition.end(event.ends))
            last = event.step
        partition.admit(event.arrivals, traffic.take(lane, index))
        assert np.array_equal(values(partition, event.slots), truth.of(event.rows))
        if event.step is not None:
            train_slots(partition, event.slots, event.step)
            truth.train(event.rows, event.step)
    traffic.write_back(lane, last + 1, partition.end(program.final_ends))
    traffic.flush()
    return truth


def plan(program: LaneProgram) -> Iterator[tuple[int, Arrivals]]:
    return ((index, event.arrivals) for index, event in enumerate(program.events))


def contents(store: Store, key: bytes) -> list[dict[bytes, bytes]]:
    """Every field of a lane's hash on each shard."""
    found = []
    for shard in range(store.shards):
        pairs = store.command(shard, "HGETALL", key)
        assert isinstance(pairs, list)
        found.append(dict(zip(pairs[::2], pairs[1::2], strict=True)))
    return found


@dataclass(frozen=True)
class Counted:
    """What a program's events say must move."""

    stored: int
    ended: int

    @classmethod
    def of(cls, program: LaneProgram) -> Counted:
        events = program.events
        stored = sum(int((event.arrivals.tag > 0).sum()) for event in events)
        return cls(stored, sum(len(event.ends) for event in events) + len(program.final_ends))


def check_stripes(store: Store, stored: StoredRows, lane: int, program: LaneProgram) -> int:
    """Compare every parity row with its members, as they lie in the store; returns how many parity rows there are."""
    placement, key = stored.placement, stored.key(lane, 0)
    code, held = placement.code, contents(store, key)
    assert code is not None
    counts = [0] * len(LAYOUTS)
    for table, _ in program.tags:
        counts[table] += 1
    parity_rows = 0
    for table, count in enumerate(counts):
        row_bytes = LAYOUTS[table].row_bytes
        for stripe in range(-(-count // code.k)):
            ordinals = np.arange(stripe * code.k, (stripe + 1) * code.k)
            shards = placement.shards(lane, np.full(code.k, table, np.int16), ordinals)
            names = [int(name).to_bytes(8, "big") for name in fields(np.full(code.k, table, np.int16), ordinals)]
            members = np.zeros((code.k, row_bytes), np.uint8)
            for j, (shard, name) in enumerate(zip(shards, names, strict=True)):
                if ordinals[j] < count:
                    assert name in held[shard]
                    members[j] = np.frombuffer(held[shard][name], np.uint8)
            name = int(fields(np.array([table]), np.array([stripe]))[0] | PARITY_BIT).to_bytes(8, "big")
            where = [shard for shard in range(store.shards) if name in held[shard]]
            assert len(where) == code.r
            assert not set(where) & set(shards.tolist())
            found = {held[shard][name] for shard in where}
            assert found == {parity.tobytes() for parity in code.encode(members)}
            parity_rows += len(where)
    return parity_rows


def parity_rows_to_read(exchanges: Sequence[tuple[list[Read], list[Write]]], stored: StoredRows, lane: int) -> int:
    """How many parity rows a lane's batches must read: those of stripes of which a row is in the store and not in the batch."""
    k, keys = stored.placement.k, set(stored.keys(lane))
    rows_of: dict[int, set[int]] = {}
    parity_of: dict[int, list[int]] = {}
    for write in (write for _, writes in exchanges for write in writes if write.key in keys):
        marker = Marker.parse(write.marker)
        if marker.parity > marker.data:
            parity_of.setdefault(marker.parity, []).extend(int(name ^ PARITY_BIT) for name in write.fields)
        else:
            rows_of.setdefault(marker.data, set()).update(write.fields.tolist())
    in_store: set[int] = set()
    count = 0
    for number, batch in sorted(rows_of.items()):
        for name in parity_of.get(number, []):
            table, stripe = name >> 48, name & (1 << 48) - 1
            count += any((table << 48 | stripe * k + member) in in_store - batch for member in range(k))
        in_store |= batch
    return count


@pytest.mark.parametrize(("k", "r"), CODES)
@pytest.mark.parametrize("lead_events", [1, 8])
def test_every_stripe_agrees_with_its_members_and_only_what_must_move_moves(
    five: LocalStores, client: Store, tmp_path: Path, k: int, r: int, lead_events: int
) -> None:
    programs = {lane: make_program(lane + 10 * k, 25, SLOTS, SLOTS, EVALUATION_SLOTS) for lane in (0, 3)}
    with Recording(five.urls) as store:
        stored = StoredRows(store, Placement.spread(5, k, r), LAYOUTS, "t")
        plans = [LanePlan(lane, plan(program)) for lane, program in programs.items()]
        log = FileLog(tmp_path)
        with serving(stored, plans, SEED, lead_events=lead_events, log=log) as traffic:
            truths = {lane: run_lane(traffic, lane, program) for lane, program in programs.items()}
        counters = traffic.counters()
        reads = sum(len(read.fields) for some, _ in store.exchanges for read in some)
        writes = sum(len(write.fields) for _, some in store.exchanges for write in some)
        parity_rows = sum(check_stripes(client, stored, lane, program) for lane, program in programs.items())
        for lane, program in programs.items():
            names = sorted(program.tags)
            arrays = np.array([table for table, _ in names], np.int16), np.array([program.ordinals[name] for name in names])
            expected = Expected(
                *arrays, np.array([id for _, id in names]), np.array([program.tags[n] for n in names], np.int32), lane
            )
            found = read_rows(stored, expected, last_batch=traffic.last_batch(lane))
            assert np.array_equal(np.concatenate([found.weights, found.state], axis=1), truths[lane].of(names))
            held = log.held(lane)
            assert held is not None
            assert held.number == traffic.last_batch(lane)
    counted = [Counted.of(program) for program in programs.values()]
    assert counters.rows_fetched == sum(count.stored for count in counted)
    assert counters.rows_written == sum(count.ended for count in counted)
    assert reads == counters.rows_fetched + counters.parity_rows_read
    assert writes == counters.rows_written + counters.parity_rows_written
    assert parity_rows > 0
    assert counters.parity_rows_read == sum(parity_rows_to_read(store.exchanges, stored, lane) for lane in programs)
    # With one row a stripe there is never another; with more there are some of each kind.
    assert (counters.parity_rows_read > 0) == (k > 1)
    assert counters.parity_rows_read < counters.parity_rows_written - parity_rows or k > 2


def test_phases_of_a_batch_leave_in_order_under_its_markers(five: LocalStores, client: Store, tmp_path: Path) -> None:
    program = make_program(7, 15, SLOTS, SLOTS, EVALUATION_SLOTS)
    actions: list[str] = []
    with Recording(five.urls) as store:
        stored = StoredRows(store, Placement.spread(5, 2, 1), LAYOUTS, "t")
        with serving(stored, [LanePlan(0, plan(program))], SEED, log=FileLog(tmp_path), on_action=actions.append) as traffic:
            run_lane(traffic, 0, program)
        batches = traffic.last_batch(0)
    markers = []
    for _, writes in store.exchanges:
        if writes:
            assert [write.shard for write in writes] == list(range(5)), "every shard gets every marker"
            found = {write.marker for write in writes}
            assert len(found) == 1
            markers.append(Marker.parse(found.pop()))
    expected = [marker for n in range(1, batches + 1) for marker in (Marker(n, n - 1), Marker(n, n))]
    assert markers == expected
    writing = [action for action in actions if not action.startswith(("fetch", "rows", "parity rows"))]
    phases = ["batch logged", "parity leaves", "parity acknowledged", "data leaves", "data acknowledged"]
    assert writing == phases * batches


def test_a_batch_has_at_most_2048_rows_and_parity_rows_a_shard(five: LocalStores, client: Store, tmp_path: Path) -> None:
    from test_traffic import ending

    ended = ending(15_000, 1)
    protected = replace(ended, base_weights=np.zeros_like(ended.weights), base_state=np.zeros_like(ended.state))
    with Recording(five.urls) as store:
        stored = StoredRows(store, Placement.spread(5, 1, 2), LAYOUTS, "t")
        with serving(stored, [LanePlan(0, iter([]))], SEED, log=FileLog(tmp_path)) as traffic:
            traffic.write_back(0, 1, protected)
            traffic.flush()
    sizes = [len(write.fields) for _, writes in store.exchanges for write in writes]
    assert max(sizes) == 2048
    assert sum(sizes) == 15_000 * 3


def test_parity_needs_a_log(client: Store) -> None:
    with pytest.raises(CacheError, match="needs a log"):
        serving(StoredRows(client, Placement.spread(5, 2, 1), LAYOUTS, "t"), [], SEED)


def test_the_log_gives_back_the_last_batch_that_was_held_whole(tmp_path: Path) -> None:
    log, random = FileLog(tmp_path), np.random.default_rng(1)
    assert log.held(4) is None
    for number, count in ((1, 3), (2, 5000), (3, 0), (4, 7)):
        rows = random.integers(0, 256, (2, count, 40), np.uint8)
        log.hold(4, LoggedBatch(number, np.arange(count, dtype=np.uint64), rows[0], rows[1]))
        held = FileLog(tmp_path).held(4)
        assert held is not None
        assert (held.number, held.fields.tolist()) == (number, list(range(count)))
        assert np.array_equal(held.old, rows[0])
        assert np.array_equal(held.new, rows[1])
    log.close()
    (tmp_path / "lane-4-0.log").write_bytes(b"x" * 100)
    with pytest.raises(CacheError, match="is not the log"):
        log.held(4)


@pytest.mark.parametrize("marker", [Marker(0, 0), Marker(5, 4), Marker(7, 7), Marker(9, 9, True), Marker(10, 9, True)])
def test_a_marker_is_read_as_it_was_stored(marker: Marker) -> None:
    assert Marker.parse(marker.stored()) == marker
    assert Marker.parse(None) == Marker(0, 0)
    assert Marker(3, 3).stored() == (3).to_bytes(8, "little")
