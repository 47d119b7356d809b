"""Scrubbing on real servers: what was put wrong on purpose is repaired, byte for byte, where it can be told, and named and left alone where not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
from lane_program import LAYOUTS, SEED, make_program
from lane_runs import contents, ending, plan, run_lane, with_base
from serving import serving

from foreload.cache.client.local import LocalStores
from foreload.cache.client.resp import MARKER
from foreload.cache.client.store import Store, Write
from foreload.cache.errors import StoreError
from foreload.cache.parity.placement import Placement
from foreload.cache.parity.stripes import LaneStripes
from foreload.cache.protocol.ownership.batch_log import FileLog
from foreload.cache.protocol.rounds.lanes import LanePlan
from foreload.cache.protocol.shards.reading import StoredRows
from foreload.cache.repair.findings import Findings
from foreload.cache.repair.scrub import MAY, MUST, TableRows, scrub_table
from foreload.cache.rows.row_bytes import PARITY_BIT, fields

LANE, TABLE, STRIPE = 3, 0, 2  # where a test puts something wrong
# Store shards, k and r.
CODES = [(3, 2, 1), pytest.param((5, 4, 1), marks=pytest.mark.full), (4, 2, 2)]


@dataclass
class StoredLane:
    """A lane's rows in the store while nobody trains, and what the schedule says of them. before: what the servers held at first."""

    stored: StoredRows
    known: list[TableRows]
    last_batch: int

    def __post_init__(self) -> None:
        self.k, self.r = self.stored.placement.k, self.stored.placement.r
        self.before = self.held()

    def held(self) -> list[dict[bytes, bytes]]:
        """Every field of every shard."""
        return contents(self.stored.store, self.stored, LANE)

    def scrub(self, repair: bool = True) -> Findings:
        """Scrub all tables."""
        total = Findings()
        for rows in self.known:
            for found in scrub_table(self.stored, LANE, rows, self.last_batch, repair):
                total.add(found)
        return total

    def at(self, place: int, stripe: int = STRIPE) -> tuple[int, bytes]:
        """Shard and field of a place of a stripe of the table that is put wrong."""
        shard = int(
            LaneStripes.of(self.stored.placement, LANE, np.zeros(4, np.int64)).shards(TABLE, np.array([stripe]))[0, place]
        )
        number, parity = (stripe * self.k + place, 0) if place < self.k else (stripe, int(PARITY_BIT))
        return shard, (int(fields(np.array([TABLE]), np.array([number]))[0]) | parity).to_bytes(8, "big")

    def row(self, place: int, stripe: int = STRIPE) -> bytes:
        """What is stored there."""
        shard, name = self.at(place, stripe)
        found = self.stored.store.command(shard, "HGET", self.stored.key(LANE, shard), name)
        assert isinstance(found, bytes)
        return found

    def put(self, place: int, row: bytes | None, stripe: int = STRIPE) -> None:
        """Store something there, or nothing."""
        shard, name = self.at(place, stripe)
        key = self.stored.key(LANE, shard)
        if row is None:
            self.stored.store.command(shard, "HDEL", key, name)
        else:
            self.stored.store.command(shard, "HSET", key, name, row)

    def flip(self, place: int, byte: int, stripe: int = STRIPE) -> None:
        """Change one bit there; byte: counted from the end where negative."""
        row = bytearray(self.row(place, stripe))
        row[byte] ^= 0x10
        self.put(place, bytes(row), stripe)


@pytest.fixture(params=CODES, ids=lambda code: "{1}+{2} on {0}".format(*code))
def lane(request: pytest.FixtureRequest, five: LocalStores, tmp_path: Path) -> Iterator[StoredLane]:
    """A lane that was trained, with each of the codes."""
    shards, k, r = request.param
    program = make_program(5, 30)
    with Store(five.urls[:shards], timedelta(seconds=10)) as store:
        for shard in range(shards):
            store.command(shard, "FLUSHALL")
        stored = StoredRows(store, Placement.spread(shards, k, r), LAYOUTS, "t")
        with serving(stored, [LanePlan(LANE, plan(program))], SEED, log=FileLog(tmp_path)) as traffic:
            run_lane(traffic, LANE, program)
        known = []
        for table in range(len(LAYOUTS)):
            names = sorted((name for name in program.tags if name[0] == table), key=lambda name: program.ordinals[name])
            ids, tags = np.array([id for _, id in names]), np.array([program.tags[name] for name in names], np.int32)
            known.append(TableRows(table, np.full(len(names), MUST, np.uint8), ids, tags, np.ones(len(names), bool)))
        yield StoredLane(stored, known, traffic.last_batch(LANE))


def check_repaired(lane: StoredLane, stripes: int, *words: str) -> None:
    """The damage is found, first without, then with repair; afterwards everything is as it was."""
    damaged = lane.held()
    assert damaged != lane.before
    for repair in (False, True):
        found = lane.scrub(repair)
        assert (found.stripes_repaired, found.stripes_damaged, len(found.repaired)) == (stripes, 0, stripes)
        for one in found.repaired:
            assert all(word in one.what for word in words), one
        if not repair:
            assert lane.held() == damaged
    assert lane.held() == lane.before
    again = lane.scrub()
    assert (again.stripes_repaired, again.stripes_damaged) == (0, 0)


def check_named(lane: StoredLane, *words: str) -> None:
    """The stripe is named, and nothing has changed."""
    damaged = lane.held()
    found = lane.scrub()
    assert (found.stripes_repaired, found.stripes_damaged) == (0, 1)
    (one,) = found.damaged
    assert (one.lane, one.table, one.first, one.last) == (LANE, TABLE, STRIPE * lane.k, STRIPE * lane.k + lane.k - 1)
    assert one.shards == tuple(lane.at(place)[0] for place in range(lane.k + lane.r))
    assert all(word in one.what for word in words), one
    assert lane.held() == damaged


def test_an_undamaged_lane_is_clean_and_counted(lane: StoredLane) -> None:
    found = lane.scrub()
    counts = [len(rows.id) for rows in lane.known]
    assert found.rows == sum(counts)
    assert found.stripes == sum(-(-count // lane.k) for count in counts)
    assert found.parity_rows == lane.r * found.stripes
    assert (found.stripes_repaired, found.stripes_damaged) == (0, 0)
    assert lane.held() == lane.before


def test_a_missing_row_is_repaired(lane: StoredLane) -> None:
    for place in range(lane.k):
        lane.put(place, None)
        check_repaired(lane, 1, f"row {STRIPE * lane.k + place} (shard {lane.at(place)[0]}) is missing")


def test_a_row_of_another_length_is_repaired(lane: StoredLane) -> None:
    lane.put(0, lane.row(0)[:-4])
    check_repaired(lane, 1, "is missing")


def test_an_older_version_of_a_row_is_repaired(lane: StoredLane) -> None:
    for place in range(lane.k):
        row = bytearray(lane.row(place))
        row[:4] = np.float32(0.125).tobytes()
        row[-4:] = (int.from_bytes(row[-4:], "little") - 1).to_bytes(4, "little")  # the tag: the last number of a row
        lane.put(place, bytes(row))
        check_repaired(lane, 1, f"row {STRIPE * lane.k + place} ", "has another id or tag")


def test_rows_of_two_stripes_that_changed_places_are_repaired(lane: StoredLane) -> None:
    one, other = lane.row(0), lane.row(1, stripe=0)
    lane.put(0, other)
    lane.put(1, one, stripe=0)
    check_repaired(lane, 2, "has another id or tag")


def test_rows_of_one_stripe_that_changed_places_are_repaired_by_two_parity_rows(lane: StoredLane) -> None:
    one, other = lane.row(0), lane.row(1)
    lane.put(0, other)
    lane.put(1, one)
    if lane.r == 1:
        check_named(lane, f"row {STRIPE * lane.k} ", f"row {STRIPE * lane.k + 1} ", "has another id or tag")
    else:
        check_repaired(lane, 1, "has another id or tag")


def test_a_wrong_id_is_repaired(lane: StoredLane) -> None:
    lane.flip(1, -12)
    check_repaired(lane, 1, "has another id or tag")


def test_a_missing_parity_row_is_repaired(lane: StoredLane) -> None:
    for place in range(lane.k, lane.k + lane.r):
        lane.put(place, None)
        check_repaired(lane, 1, f"parity row {place - lane.k} (shard {lane.at(place)[0]}) is missing")


def test_a_flipped_bit_is_named_with_one_parity_row_and_repaired_with_two(lane: StoredLane) -> None:
    for place in range(lane.k + lane.r):
        lane.flip(place, 5)
        if lane.r == 1:
            check_named(lane, "do not match, and nothing shows which of them is wrong")
            lane.flip(place, 5)
        else:
            check_repaired(lane, 1, f"(shard {lane.at(place)[0]}) does not match the other rows of its stripe")


def test_more_missing_rows_than_parity_covers_are_named_and_left_alone(lane: StoredLane) -> None:
    for place in range(lane.r + 1):
        lane.put(place, None)
    check_named(lane, "is missing", "are not enough to restore it")


def test_a_missing_row_beside_flipped_bits_is_named_and_left_alone(lane: StoredLane) -> None:
    lane.put(0, None)
    # In a byte of the parity row from which the missing row's id would be decoded: elsewhere, with one parity row, nothing could tell.
    lane.flip(lane.k, -12)
    if lane.r > 1:
        lane.flip(1, 3)
    check_named(lane, "is missing", "are not enough to restore it")


def test_two_wrong_rows_of_a_stripe_are_named_and_left_alone(lane: StoredLane) -> None:
    lane.flip(0, 5)
    lane.flip(1, 6)
    check_named(lane, "do not match")


def test_everything_that_a_shard_lost_is_repaired(lane: StoredLane) -> None:
    held = lane.held()[1]
    names = [name for name in held if name != MARKER]
    lane.stored.store.command(1, "HDEL", lane.stored.key(LANE, 1), *names)
    check_repaired(lane, len(names), "(shard 1) is missing")


def test_a_shard_that_is_lost_is_left_out_and_the_others_are_checked_with_what_is_left(lane: StoredLane) -> None:
    shard = lane.at(0)[0]
    lane.stored.shards.lose(shard, "taken away")
    found = lane.scrub()
    assert (found.stripes_repaired, found.stripes_damaged) == (0, 0)
    assert found.rows + found.parity_rows == sum(len(held) - 1 for i, held in enumerate(lane.before) if i != shard)
    lane.put(1, None)
    if lane.r == 1:
        check_named(lane, "is missing", "1 more on lost shards")
    else:
        check_repaired(lane, 1, "is missing")


def test_a_stale_shard_is_refused(lane: StoredLane) -> None:
    lane.last_batch += 1
    with pytest.raises(StoreError, match="stale shard"):
        lane.scrub()


def test_where_it_is_unknown_whether_a_row_was_written_its_stripe_tells(lane: StoredLane) -> None:
    lane.known = [
        TableRows(
            rows.table,
            np.full(len(rows.id) + 50, MAY, np.uint8),
            np.concatenate([rows.id, np.arange(50)]),
            np.concatenate([rows.tag + 3, np.full(50, 9, np.int32)]),
            np.zeros(len(rows.id) + 50, bool),
        )
        for rows in lane.known
    ]
    found = lane.scrub()
    assert (found.stripes_repaired, found.stripes_damaged) == (0, 0)
    for place in range(lane.k + lane.r):
        lane.put(place, None)
        check_repaired(lane, 1)
    lane.flip(0, -12)
    check_repaired(lane, 1, "has another id or tag")


def test_a_whole_shard_is_read_and_repaired_in_commands_of_2048_and_a_thousand_repairs_are_named(
    five: LocalStores, tmp_path: Path
) -> None:
    count = 40_001
    ended = with_base(ending(count, 7))
    with Store(five.urls[:3], timedelta(seconds=10)) as store:
        for shard in range(3):
            store.command(shard, "FLUSHALL")
        stored = StoredRows(store, Placement.spread(3, 2, 1), LAYOUTS, "t")
        with serving(stored, [LanePlan(LANE, iter([]))], SEED, log=FileLog(tmp_path)) as traffic:
            traffic.write_back(LANE, 1, ended)
            traffic.flush()
        known = TableRows(1, np.full(count, MUST, np.uint8), ended.id, ended.tag, np.ones(count, bool))
        lane = StoredLane(stored, [known], traffic.last_batch(LANE))
        # One row or parity row of nearly every stripe; a thousand in a command, so that a server takes it.
        lost = [name for name in lane.before[0] if name != MARKER]
        for start in range(0, len(lost), 1000):
            store.command(0, "HDEL", stored.key(LANE, 0), *lost[start : start + 1000])
        found = lane.scrub()
        assert (found.stripes, found.stripes_repaired, found.stripes_damaged) == (20_001, len(lost), 0)
        assert len(found.repaired) == 1000
        assert lane.held() == lane.before


def test_a_repair_carries_no_marker(lane: StoredLane, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Write] = []
    exchange = lane.stored.store.exchange

    def recording(reads: list[object], writes: list[Write]) -> None:
        written.extend(writes)
        exchange(reads, writes)  # type: ignore[arg-type]

    monkeypatch.setattr(lane.stored.store, "exchange", recording)
    lane.put(0, None)
    lane.scrub()
    assert [(write.shard, write.marker, len(write.fields)) for write in written] == [(lane.at(0)[0], None, 1)]
