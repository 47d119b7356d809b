"""The log of write-back batches, over terms and versions: which record counts; and the numbers that an owner of a later term gives."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
from lane_program import LAYOUTS, SEED, make_program
from lane_runs import contents, plan, run_lane
from serving import serving

from foreload.cache.client.local import LocalStores
from foreload.cache.client.store import Store
from foreload.cache.parity.placement import Placement
from foreload.cache.parity.stripes import LaneStripes
from foreload.cache.protocol.ownership.batch_log import FileLog, LoggedBatch
from foreload.cache.protocol.ownership.ownership import Ownership, find_rows, take_over
from foreload.cache.protocol.ownership.recovery import recover
from foreload.cache.protocol.rounds.lanes import LanePlan
from foreload.cache.protocol.shards.marker import Marker, first_number, term_of
from foreload.cache.protocol.shards.reading import StoredRows

_RANDOM = np.random.default_rng(2)


def batch(number: int, count: int, previous: int | None = None) -> LoggedBatch:
    """Rows of 44 bytes."""
    rows = _RANDOM.integers(0, 256, (2, count, 44), np.uint8)
    return LoggedBatch(number, np.arange(count, dtype=np.uint64), rows[0], rows[1], np.full((3, 3), number, np.int64), previous)


def held(folder: Path, lane: int = 0) -> LoggedBatch:
    """What another process finds."""
    found = FileLog(folder).held(lane)
    assert found is not None
    return found


def test_the_record_of_the_highest_term_counts_and_says_what_came_before(tmp_path: Path) -> None:
    old, new = FileLog(tmp_path), FileLog(tmp_path)
    for number in (1, 2, 3):
        old.hold(0, batch(number, 5))
    assert (held(tmp_path).number, held(tmp_path).before) == (3, 2)
    number = first_number(7)
    assert (term_of(number), term_of(number + 5), term_of(3)) == (7, 7, 0)
    new.hold(0, LoggedBatch.empty(number, 3, np.array([4, 5, 6])))
    assert (held(tmp_path).number, held(tmp_path).before, len(held(tmp_path).fields)) == (number, 3, 0)
    found = held(tmp_path).held
    assert found is not None
    assert found.tolist() == [[4] * 3, [5] * 3, [6] * 3]
    # One that goes on without knowing changes nothing of that, nor does a lane whose number begins with this one's.
    old.hold(0, batch(4, 3))
    old.hold(1, batch(first_number(8), 3))
    assert held(tmp_path).number == number
    new.hold(0, batch(number + 1, 3))
    assert (held(tmp_path).number, held(tmp_path).before) == (number + 1, number)
    assert {path.name for path in tmp_path.glob("lane-0-*")} == {"lane-0-term-7-0.log", "lane-0-term-7-1.log"}, (
        "no more than is needed stays"
    )


def test_a_record_that_is_not_what_was_written_does_not_count(tmp_path: Path) -> None:
    log = FileLog(tmp_path)
    for number in (1, 2):
        log.hold(0, batch(number, 9))
    path = tmp_path / "lane-0-term-0-1.log"
    whole = path.read_bytes()
    # A bit of the number, of the batch before, of the fields, of the rows, of how many a shard holds.
    for at in (8, 48, 64 + 3, 64 + 72 + 100, 64 + 9 * 96 + 5):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        assert held(tmp_path).number == 1
    path.write_bytes(whole)
    assert held(tmp_path).number == 2


def test_what_an_owner_adopted_counts_whatever_those_before_it_log(tmp_path: Path) -> None:
    old, new = FileLog(tmp_path), FileLog(tmp_path)
    assert new.adopt(0, 2) is None
    for number in (1, 2):
        old.hold(0, batch(number, 5))
    found = new.adopt(0, 2)
    assert found is not None
    assert (found.number, found.before) == (2, 1)
    old.hold(0, batch(3, 6))
    for again in (held(tmp_path), FileLog(tmp_path).adopt(0, 2)):
        assert again is not None
        assert (again.number, again.before) == (2, 1)
        assert np.array_equal(again.new, found.new)
    # An even number follows an even one, and does not take its place.
    new.hold(0, LoggedBatch.empty(first_number(2), 2, None))
    (path,) = (
        path for path in tmp_path.glob("lane-0-term-2-*.log") if path.read_bytes()[8:16] == first_number(2).to_bytes(8, "little")
    )
    path.write_bytes(bytes(100))
    assert held(tmp_path).number == 2


def test_a_record_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    one = batch(6, 4)
    assert one.held is not None
    header = np.array([0x31474F4C4C46, 6, 4, 44, 1, 3, 0, 0], np.int64)
    parts = (header, one.fields, one.old, one.new, one.held)
    (tmp_path / "lane-2-0.log").write_bytes(b"".join(part.tobytes() for part in parts))
    found = held(tmp_path, 2)
    assert (found.number, found.before) == (6, 5)
    assert found.held is not None
    for mine, theirs in ((found.fields, one.fields), (found.old, one.old), (found.new, one.new), (found.held, one.held)):
        assert np.array_equal(mine, theirs)
    FileLog(tmp_path).hold(2, batch(7, 4))
    assert (held(tmp_path, 2).number, held(tmp_path, 2).before) == (7, 6)


@pytest.mark.parametrize(("k", "r"), [(2, 1), (1, 0)])
def test_an_owner_of_a_later_term_numbers_anew_once_it_writes(three: LocalStores, tmp_path: Path, k: int, r: int) -> None:
    last = 0
    with Store(three.urls, timedelta(seconds=10)) as store:
        for shard in range(3):
            store.command(shard, "FLUSHALL")
        for term in (0, 3, 5):
            owner = Ownership(term)
            stored = StoredRows(store, Placement.spread(3, k, r), LAYOUTS, f"run{term}")
            nothing = LaneStripes.of(stored.placement, 0, np.zeros(len(LAYOUTS), np.int64))
            stored.stripes = lambda lane, nothing=nothing: nothing
            take_over(stored, owner, {0: 0})
            with serving(stored, [LanePlan(0, iter([]))], SEED, log=FileLog(tmp_path), ownership=owner) as idle:
                idle.flush()
                assert idle.last_batch(0) == 0
            assert [fields for fields in contents(store, stored, 0) if fields] == [], "one that writes nothing leaves no mark"
            program = make_program(term, 12)
            with serving(stored, [LanePlan(0, plan(program))], SEED, log=FileLog(tmp_path), ownership=owner) as traffic:
                run_lane(traffic, 0, program)
                last = traffic.last_batch(0)
                assert traffic.inspection.lag().batches == 0
            assert term_of(last) == term
            assert first_number(term) < last < first_number(term) + 100
            for fields in contents(store, stored, 0):
                assert Marker.parse(fields[b"m"]) == Marker(last, last)
            reader = StoredRows(store, stored.placement, LAYOUTS, f"run{term}")
            find_rows(reader, [last])
            assert not reader.shards.lost


@pytest.mark.parametrize("reached", [(), (0,), (1, 2), (0, 1, 2)])
def test_an_empty_batch_that_reached_some_shards_is_finished(
    three: LocalStores, tmp_path: Path, reached: tuple[int, ...]
) -> None:
    program, log = make_program(9, 12), FileLog(tmp_path)
    with Store(three.urls, timedelta(seconds=10)) as store:
        for shard in range(3):
            store.command(shard, "FLUSHALL")
        stored = StoredRows(store, Placement.spread(3, 2, 1), LAYOUTS, "t")
        with serving(stored, [LanePlan(0, plan(program))], SEED, log=log) as traffic:
            run_lane(traffic, 0, program)
            last = traffic.last_batch(0)
        record = log.held(0)
        assert record is not None
        assert record.held is not None
        number = first_number(2)
        log.hold(0, LoggedBatch.empty(number, last, record.held[:, 2]))
        for shard in reached:
            store.command(shard, "HSET", stored.key(0, shard), b"m", Marker(number, number).stored())
        after = StoredRows(store, stored.placement, LAYOUTS, "t")
        assert recover(after, 0, FileLog(tmp_path), Ownership(2)) == number
        assert not after.shards.lost
        for fields in contents(store, after, 0):
            assert Marker.parse(fields[b"m"]) == Marker(number, number)
