"""Scrubbing on real servers: what was put wrong on purpose is repaired where it can be told, and named where it cannot."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
from lane_program import LAYOUTS, SEED, LaneProgram, make_program
from test_parity import contents, plan, run_lane

from cache.batch_log import FileLog
from cache.lanes import LanePlan
from cache.local import LocalStores
from cache.placement import Placement, fields
from cache.reading import StoredRows
from cache.scrub import Findings, TableRows, scrub_table
from cache.store import Store, Write
from cache.stripes import PARITY_BIT
from cache.traffic import Traffic

SLOTS, EVALUATION_SLOTS = 12, 6
TABLE, STRIPE = 0, 2


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStores]:
    """Four servers."""
    with LocalStores(4, Path(tmp_path_factory.mktemp("four"))) as stores:
        yield stores


@pytest.fixture(params=[(2, 1), (2, 2)], ids=["2+1", "2+2"])
def trained(request: pytest.FixtureRequest, four: LocalStores, tmp_path: Path) -> Iterator[tuple[StoredRows, LaneProgram]]:
    """A lane's rows at rest."""
    program = make_program(5, 30, SLOTS, SLOTS, EVALUATION_SLOTS)
    with Store(four.urls, timedelta(seconds=10)) as store:
        for shard in range(4):
            store.command(shard, "FLUSHALL")
        stored = StoredRows(store, Placement.spread(4, *request.param), LAYOUTS, "t")
        with Traffic(stored, [LanePlan(0, plan(program))], SEED, log=FileLog(tmp_path)) as traffic:
            run_lane(traffic, 0, program)
        yield stored, program


def scrub(stored: StoredRows, program: LaneProgram, repair: bool = True) -> Findings:
    """Scrub all tables."""
    total = Findings()
    for table in range(len(LAYOUTS)):
        names = sorted((name for name in program.tags if name[0] == table), key=lambda name: program.ordinals[name])
        ids, tags = np.array([id for _, id in names]), np.array([program.tags[name] for name in names], np.int32)
        found = scrub_table(stored, 0, TableRows(table, ids, tags, exact=True), repair)
        total.stripes += found.stripes
        total.repaired += found.repaired
        total.damaged += found.damaged
    return total


def member(stored: StoredRows, place: int) -> tuple[int, bytes]:
    """Shard and field of a place of the stripe that is put wrong."""
    k = stored.placement.k
    shard = int(stored.placement.stripes(0, np.zeros(4, np.int64)).shards(TABLE, np.array([STRIPE]))[0, place])
    if place < k:
        name = int(fields(np.array([TABLE]), np.array([STRIPE * k + place]))[0])
    else:
        name = int(fields(np.array([TABLE]), np.array([STRIPE]))[0] | PARITY_BIT)
    return shard, name.to_bytes(8, "big")


def put(stored: StoredRows, place: int, change: int | None) -> None:
    """Flip a byte of a row of the stripe (counted from its end where negative), or remove the row."""
    shard, name = member(stored, place)
    key = stored.key(0, shard)
    if change is None:
        stored.store.command(shard, "HDEL", key, name)
        return
    row = bytearray(stored.store.command(shard, "HGET", key, name))  # type: ignore[arg-type]
    row[change] ^= 0x5A
    value = np.frombuffer(bytes(row), np.uint8).reshape(1, -1)
    stored.store.exchange([], [Write(shard, key, np.array([int.from_bytes(name, "big")], np.uint64), value)])


def test_what_rests_is_clean(trained: tuple[StoredRows, LaneProgram]) -> None:
    found = scrub(*trained)
    assert (found.repaired, found.damaged) == ([], [])
    assert found.stripes >= len(trained[1].tags) / trained[0].placement.k


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("change", [None, -12, -1], ids=["missing", "wrong id", "wrong tag"])
def test_what_is_missing_or_has_another_id_or_tag_is_repaired(
    trained: tuple[StoredRows, LaneProgram], place: int, change: int | None
) -> None:
    stored, program = trained
    if place >= stored.placement.k and change is not None and stored.placement.r == 1:
        pytest.skip("of a parity row nothing is known but the parity")
    key = stored.key(0, 0)
    before = contents(stored.store, key)
    put(stored, place, change)
    assert contents(stored.store, key) != before
    found = scrub(stored, program, repair=False)
    assert [one[:3] for one in found.repaired] == [(0, TABLE, STRIPE)]
    assert contents(stored.store, key) != before
    found = scrub(stored, program)
    assert [one[:3] for one in found.repaired] == [(0, TABLE, STRIPE)]
    assert contents(stored.store, key) == before


@pytest.mark.parametrize("place", [0, 1, 2])
def test_flipped_bits_are_repaired_where_the_parities_single_them_out_and_named_where_not(
    trained: tuple[StoredRows, LaneProgram], place: int
) -> None:
    stored, program = trained
    key = stored.key(0, 0)
    before = contents(stored.store, key)
    put(stored, place, 3)
    changed = contents(stored.store, key)
    found = scrub(stored, program)
    if stored.placement.r == 1:
        assert [one[:3] for one in found.damaged] == [(0, TABLE, STRIPE)]
        assert found.repaired == []
        assert contents(stored.store, key) == changed
    else:
        assert found.damaged == []
        assert contents(stored.store, key) == before


def test_more_wrong_rows_than_parity_covers_are_left_alone(trained: tuple[StoredRows, LaneProgram]) -> None:
    stored, program = trained
    for place in range(stored.placement.r + 1):
        put(stored, place, None)
    changed = contents(stored.store, stored.key(0, 0))
    assert [one[:3] for one in scrub(stored, program).damaged] == [(0, TABLE, STRIPE)]
    assert contents(stored.store, stored.key(0, 0)) == changed
