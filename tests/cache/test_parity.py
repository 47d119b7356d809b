"""Traffic with parity on real servers: every stripe agrees with its members, no more rows move than must, and the log is there first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
from lane_program import EVALUATION_SLOTS as EVALUATION_SLOTS
from lane_program import LAYOUTS, SEED, LaneProgram, make_program
from lane_program import SLOTS as SLOTS
from lane_runs import Recording as Recording
from lane_runs import contents, ending, expected_rows, row_counts, with_base
from lane_runs import plan as plan
from lane_runs import run_lane as run_lane
from serving import serving

from foreload.cache.client.local import LocalStores
from foreload.cache.client.store import Read, Store, Write
from foreload.cache.errors import CacheError
from foreload.cache.parity.erasure import Code
from foreload.cache.parity.placement import Placement
from foreload.cache.parity.stripes import shards_of
from foreload.cache.protocol.ownership.batch_log import FileLog, LoggedBatch
from foreload.cache.protocol.rounds.lanes import LanePlan
from foreload.cache.protocol.shards.marker import Marker
from foreload.cache.protocol.shards.reading import StoredRows, read_rows
from foreload.cache.rows.row_bytes import PARITY_BIT, fields

CODES = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (3, 2)]


@pytest.fixture
def client(five: LocalStores) -> Iterator[Store]:
    """A client of five empty servers."""
    with Store(five.urls, timedelta(seconds=10)) as store:
        for shard in range(store.shards):
            store.command(shard, "FLUSHALL")
        yield store


@dataclass(frozen=True)
class Counted:
    """How many rows must move by a program's events: those that arrive from the store, and those that end."""

    stored: int
    ended: int

    @classmethod
    def of(cls, program: LaneProgram) -> Counted:
        events = program.events
        stored = sum(int((event.arrivals.tag > 0).sum()) for event in events)
        return cls(stored, sum(len(event.ends) for event in events) + len(program.final_ends))


def check_stripes(store: Store, stored: StoredRows, lane: int, program: LaneProgram) -> int:
    """Compare every parity row with its members, as they lie in the store; returns how many parity rows there are."""
    placement, held = stored.placement, contents(store, stored, lane)
    code = Code.of(placement)
    assert code is not None
    parity_rows = 0
    for table, count in enumerate(row_counts(program).tolist()):
        row_bytes = LAYOUTS[table].row_bytes
        for stripe in range(-(-count // code.k)):
            ordinals = np.arange(stripe * code.k, (stripe + 1) * code.k)
            shards = shards_of(placement, lane, np.full(code.k, table, np.int16), ordinals)
            names = [int(name).to_bytes(8, "big") for name in fields(np.full(code.k, table, np.int16), ordinals)]
            members = np.zeros((code.k, row_bytes), np.uint8)
            for j, (shard, name) in enumerate(zip(shards, names, strict=True)):
                if ordinals[j] < count:
                    assert name in held[shard]
                    members[j] = np.frombuffer(held[shard][name], np.uint8)
            name = int(fields(np.array([table]), np.array([stripe]))[0] | PARITY_BIT).to_bytes(8, "big")
            where = [shard for shard in range(store.shards) if name in held[shard]]
            assert len(where) == code.r
            assert not set(where) & set(shards.tolist()), "no shard holds two rows of a stripe"
            assert {held[shard][name] for shard in where} == {parity.tobytes() for parity in code.encode(members)}
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
    programs = {lane: make_program(lane + 10 * k, 25) for lane in (0, 3)}
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
            rows, names = expected_rows(lane, program)
            found = read_rows(stored, rows, last_batch=traffic.last_batch(lane))
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
    # A stripe of one row has no other row in the store. Of stripes of two, some batches have both rows, and their parity rows are made anew, unread.
    assert (counters.parity_rows_read > 0) == (k > 1)
    updates = counters.parity_rows_written - parity_rows
    assert counters.parity_rows_read < updates or k > 2


def test_phases_of_a_batch_leave_in_order_under_its_markers(five: LocalStores, client: Store, tmp_path: Path) -> None:
    program = make_program(7, 15)
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


def test_a_batch_has_at_most_2048_rows_and_as_many_parity_rows_a_shard(five: LocalStores, client: Store, tmp_path: Path) -> None:
    with Recording(five.urls) as store:
        stored = StoredRows(store, Placement.spread(5, 1, 2), LAYOUTS, "t")
        with serving(stored, [LanePlan(0, iter([]))], SEED, log=FileLog(tmp_path)) as traffic:
            traffic.write_back(0, 1, with_base(ending(15_000, 1)))
            traffic.flush()
    sizes = [len(write.fields) for _, writes in store.exchanges for write in writes]
    assert max(sizes) == 2048
    assert sum(sizes) == 15_000 * (1 + 2), "every row, and two parity rows of a stripe of one"


def test_parity_needs_a_log(client: Store) -> None:
    with pytest.raises(CacheError, match="needs a batch log"):
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
