"""The writer dies between any two actions of a write-back, or with a phase done on some shards only; the log makes every stripe whole again.

Within this process, by an exception, no shard is lost, and the recovery is done twice. `test_crash_points` has writers that are killed, and losses.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
from grids import covering
from lane_program import LAYOUTS, SEED, make_program
from lane_runs import contents, is_parity, plan, run_lane
from serving import serving

from foreload.cache.client.local import LocalStores
from foreload.cache.client.resp import MARKER
from foreload.cache.client.store import Read, Store, Write
from foreload.cache.errors import StoreError
from foreload.cache.parity.erasure import Code
from foreload.cache.parity.placement import Placement
from foreload.cache.protocol.ownership.batch_log import FileLog
from foreload.cache.protocol.ownership.ownership import Ownership
from foreload.cache.protocol.ownership.recovery import recover
from foreload.cache.protocol.rounds.lanes import LanePlan
from foreload.cache.protocol.shards.marker import Marker
from foreload.cache.protocol.shards.reading import StoredRows
from foreload.cache.rows.row_bytes import PARITY_BIT

OWNER = Ownership()


class Died(Exception):
    """The writer is no more."""


class Torn(Store):
    """A Store whose n-th exchange of writes, the `last`, reaches only some shards, whereupon its owner dies."""

    def __init__(self, urls: Sequence[object], last: int, reached: Sequence[int]) -> None:
        super().__init__(urls, timedelta(seconds=10))  # type: ignore[arg-type]
        self._left, self._reached = last, reached

    def attempt(self, reads: Sequence[Read], writes: Sequence[Write]) -> dict[int, StoreError]:
        self._left -= bool(writes)
        if writes and not self._left:
            super().attempt(reads, [write for write in writes if write.shard in self._reached])
            raise Died
        return super().attempt(reads, writes)


def die_after(action: str, count: int) -> Callable[[str], None]:
    """A hook that raises at the n-th time of an action."""
    times = itertools.count(1)

    def hook(done: str) -> None:
        if done == action and next(times) == count:
            raise Died

    return hook


def train_until_dead(store: Store, logs: Path, k: int, r: int, on_action: Callable[[str], None] | None = None) -> int:
    """Train a lane until its writer dies; returns the number of the last batch that it saw released."""
    program = make_program(5, 30)
    stored = StoredRows(store, Placement.spread(store.shards, k, r), LAYOUTS, "t")
    traffic = serving(stored, [LanePlan(0, plan(program))], SEED, lead_events=3, log=FileLog(logs), on_action=on_action)
    with pytest.raises(Died):
        run_lane(traffic, 0, program)
    traffic.abort()
    return traffic.last_batch(0)


def rows_of(store: Store, stored: StoredRows) -> dict[int, bytes]:
    """Every row, by its field."""
    shards = contents(store, stored, 0)
    return {
        int.from_bytes(name, "big"): row
        for shard in shards
        for name, row in shard.items()
        if name != MARKER and not is_parity(name)
    }


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
            check_stripes(store, stored, rows)
            for fields in contents(store, stored, 0):
                assert Marker.parse(fields[MARKER]) == Marker(number, number)
            assert recover(stored, 0, log, OWNER) == number


def check_stripes(store: Store, stored: StoredRows, rows: dict[int, bytes]) -> None:
    """Every parity row is there, and is that of its members in `rows`."""
    code, held = Code.of(stored.placement), contents(store, stored, 0)
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
    parity = sum(name != MARKER and is_parity(name) for fields in held for name in fields)
    assert parity == code.r * len(stripes)


@pytest.fixture
def urls(four: LocalStores) -> Sequence[str]:
    """Four empty servers."""
    with Store(four.urls, timedelta(seconds=10)) as store:
        for shard in range(4):
            store.command(shard, "FLUSHALL")
    return four.urls


# Of the actions that Traffic names, those of a write-back.
ACTIONS = ["parity rows read", "batch logged", "parity leaves", "parity acknowledged", "data leaves", "data acknowledged"]


@pytest.mark.parametrize(("k", "r"), [(2, 1), (2, 2)])
@pytest.mark.parametrize("action", ACTIONS)
def test_a_writer_that_dies_after_an_action(urls: Sequence[str], tmp_path: Path, action: str, k: int, r: int) -> None:
    with Store(urls, timedelta(seconds=10)) as store:
        released = train_until_dead(store, tmp_path, k, r, die_after(action, 15))
    check_recovered(urls, tmp_path, k, r, released)


SUBSETS = [reached for count in range(5) for reached in itertools.combinations(range(4), count)]
CODES = [(2, 1), (2, 2)]
# A batch is two exchanges: the 30th carries the data of batch 15, the 31st the parity of batch 16.
LAST = {"data": 30, "parity": 31}


@pytest.mark.parametrize(("reached", "phase", "code"), covering(list(itertools.product(SUBSETS, LAST, CODES)), 3), ids=str)
def test_a_phase_reaches_some_shards_only(
    urls: Sequence[str], tmp_path: Path, reached: tuple[int, ...], phase: str, code: tuple[int, int]
) -> None:
    last, (k, r) = LAST[phase], code
    with Torn(urls, last, reached) as store:
        released = train_until_dead(store, tmp_path, k, r)
    check_recovered(urls, tmp_path, k, r, released)
