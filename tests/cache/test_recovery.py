"""The writer dies between any two actions of a write-back, or with a phase done on some shards only; the log makes every stripe whole again."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
from lane_program import LAYOUTS, SEED, make_program
from serving import serving
from test_parity import contents, plan, run_lane

from foreload.cache.client.local import LocalStores
from foreload.cache.client.store import Read, Store, Write
from foreload.cache.errors import StoreError
from foreload.cache.parity.placement import Placement
from foreload.cache.protocol.batch_log import FileLog
from foreload.cache.protocol.lanes import LanePlan
from foreload.cache.protocol.marker import Marker
from foreload.cache.protocol.ownership import Ownership
from foreload.cache.protocol.reading import StoredRows
from foreload.cache.protocol.recovery import recover
from foreload.cache.rows.fields import PARITY_BIT

SLOTS, EVALUATION_SLOTS = 12, 6
OWNER = Ownership()


class Died(Exception):
    """The writer is no more."""


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStores]:
    """Four servers."""
    with LocalStores(4, Path(tmp_path_factory.mktemp("four"))) as stores:
        yield stores


class Mortal(Store):
    """A Store whose n-th exchange of writes reaches only some shards, and then its owner dies."""

    def __init__(self, urls: Sequence[object], last: int, reached: Sequence[int]) -> None:
        super().__init__(urls, timedelta(seconds=10))  # type: ignore[arg-type]
        self._left, self._reached = last, reached

    def attempt(self, reads: Sequence[Read], writes: Sequence[Write]) -> dict[int, StoreError]:
        self._left -= bool(writes)
        if writes and not self._left:
            super().attempt(reads, [write for write in writes if write.shard in self._reached])
            raise Died
        return super().attempt(reads, writes)


def die_after(action: str, count: int) -> object:
    """A hook that raises at the n-th time of an action."""
    left = itertools.count(count, -1)

    def hook(done: str) -> None:
        if done == action and next(left) == 1:
            raise Died

    return hook


def train_until_dead(store: Store, logs: Path, k: int, r: int, on_action: object = None) -> tuple[StoredRows, int]:
    """Train a lane until its writer dies; returns where its rows are, and the number of the last batch that it saw released."""
    program = make_program(5, 30, SLOTS, SLOTS, EVALUATION_SLOTS)
    stored = StoredRows(store, Placement.spread(store.shards, k, r), LAYOUTS, "t")
    traffic = serving(stored, [LanePlan(0, plan(program))], SEED, lead_events=3, log=FileLog(logs), on_action=on_action)
    with pytest.raises(Died):
        run_lane(traffic, 0, program)
    traffic.abort()
    return stored, traffic.last_batch(0)


def rows_of(store: Store, stored: StoredRows) -> dict[int, bytes]:
    """Every row, by its field."""
    found = {}
    for shard in range(store.shards):
        pairs = store.command(shard, "HGETALL", stored.key(0, shard))
        assert isinstance(pairs, list)
        for name, value in zip(pairs[::2], pairs[1::2], strict=True):
            if len(name) == 8 and not int.from_bytes(name, "big") & int(PARITY_BIT):
                found[int.from_bytes(name, "big")] = value
    return found


def check_recovered(urls: Sequence[str], logs: Path, k: int, r: int, released: int) -> None:
    """Recover twice; every stripe agrees, the batch is there as a whole, and no other row has changed."""
    log = FileLog(logs)
    with Store(urls, timedelta(seconds=10)) as store:
        before = StoredRows(store, Placement.spread(len(urls), k, r), LAYOUTS, "t")
        rows = rows_of(store, before)
        stored = StoredRows(store, before.placement, LAYOUTS, "t")
        number = recover(stored, 0, log, OWNER)
        batch = log.held(0)
        assert batch is not None
        assert number == batch.number
        assert released <= number <= released + 1
        rows |= {int(name): value.tobytes() for name, value in zip(batch.fields, batch.new, strict=True)}
        for _ in range(2):
            assert rows_of(store, stored) == rows
            check_rows(store, stored, rows)
            for fields in contents(store, stored.key(0, 0)):
                assert Marker.parse(fields[b"m"]) == Marker(number, number)
            assert recover(stored, 0, log, OWNER) == number


def check_rows(store: Store, stored: StoredRows, rows: dict[int, bytes]) -> None:
    """Every parity row is that of its members, as they are stored."""
    code, held = stored.placement.code, contents(store, stored.key(0, 0))
    assert code is not None
    stripes = {(name >> 48, (name & ((1 << 48) - 1)) // code.k) for name in rows}
    for table, stripe in stripes:
        members = np.zeros((code.k, LAYOUTS[table].row_bytes), np.uint8)
        for j in range(code.k):
            value = rows.get(table << 48 | (stripe * code.k + j))
            if value is not None:
                members[j] = np.frombuffer(value, np.uint8)
        name = (table << 48 | stripe | int(PARITY_BIT)).to_bytes(8, "big")
        assert sorted(fields[name] for fields in held if name in fields) == sorted(p.tobytes() for p in code.encode(members))
    parity = sum(len(name) == 8 and bool(name[0] & 0x80) for fields in held for name in fields)
    assert parity == code.r * len(stripes)


@pytest.fixture
def urls(four: LocalStores) -> Sequence[str]:
    """Four empty servers."""
    with Store(four.urls, timedelta(seconds=10)) as store:
        for shard in range(4):
            store.command(shard, "FLUSHALL")
    return four.urls


ACTIONS = ["parity rows read", "batch logged", "parity leaves", "parity acknowledged", "data leaves", "data acknowledged"]


@pytest.mark.parametrize(("k", "r"), [(2, 1), (2, 2)])
@pytest.mark.parametrize("action", ACTIONS)
def test_a_writer_that_dies_after_an_action(urls: Sequence[str], tmp_path: Path, action: str, k: int, r: int) -> None:
    with Store(urls, timedelta(seconds=10)) as store:
        _, released = train_until_dead(store, tmp_path, k, r, die_after(action, 15))
    check_recovered(urls, tmp_path, k, r, released)


@pytest.mark.parametrize(("k", "r"), [(2, 1), (2, 2)])
@pytest.mark.parametrize("last", [30, 31], ids=["one phase", "the other"])
@pytest.mark.parametrize("reached", [which for n in range(5) for which in itertools.combinations(range(4), n)], ids=str)
def test_a_phase_reaches_some_shards_only(
    urls: Sequence[str], tmp_path: Path, reached: tuple[int, ...], last: int, k: int, r: int
) -> None:
    with Mortal(urls, last, reached) as store:
        _, released = train_until_dead(store, tmp_path, k, r)
    check_recovered(urls, tmp_path, k, r, released)
