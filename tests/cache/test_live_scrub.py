"""Scrubbing while lanes are trained: no stripe is taken for damaged because a batch is on its way, and what is damaged is repaired in between."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
from lane_program import LAYOUTS, SEED, LaneProgram, make_program
from lane_runs import contents, plan, run_lane
from lost_shards import kill
from serving import serving

from foreload.cache.client.local import LocalStores
from foreload.cache.client.resp import MARKER
from foreload.cache.client.store import Store
from foreload.cache.errors import RowError, RowsLost
from foreload.cache.parity.placement import Placement
from foreload.cache.parity.stripes import LaneStripes
from foreload.cache.protocol.ownership.batch_log import FileLog
from foreload.cache.protocol.ownership.ownership import Ownership
from foreload.cache.protocol.rounds.lanes import LanePlan
from foreload.cache.protocol.rounds.rounds import Rounds
from foreload.cache.protocol.shards.namespace import claim
from foreload.cache.protocol.shards.reading import StoredRows
from foreload.cache.repair.findings import Findings
from foreload.cache.rows.row_bytes import PARITY_BIT, fields
from foreload.cache.traffic import Traffic

LANES = (0, 3)
TABLE, STRIPE = 0, 1  # where a test puts something wrong, in the first lane
CODES = [(3, 2, 1), (4, 2, 2)]  # store shards, k and r


class Programs:
    """The lanes' programs, and their rows as the schedule would tell of them."""

    def __init__(self) -> None:
        self.lanes = {lane: make_program(lane + 50, 30) for lane in LANES}

    def of(self, lane: int, table: int, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """See ExpectedRows."""
        program: LaneProgram = self.lanes[lane]
        ids, tags = np.zeros(count, np.int64), np.zeros(count, np.int32)
        for name, ordinal in program.ordinals.items():
            if name[0] == table and 0 <= ordinal - first < count:
                ids[ordinal - first], tags[ordinal - first] = name[1], program.tags[name]
        return ids, tags


class Scrubbing:
    """Does something with the traffic at the n-th time of an action of its thread, or the first one after it at which it can be done, and scrubs from
    then on, once or again and again.

    found: of every scrub that came to its end. do, can: may be set until the training begins.
    """

    def __init__(
        self, action: str, count: int, again: bool = False, do: Callable[[Traffic], None] = lambda traffic: None
    ) -> None:
        self._action, self._left, self._again, self.do = action, count, again, do
        self.can: Callable[[], bool] = lambda: True
        self.traffic: Traffic | None = None
        self.found: list[Findings] = []
        self.programs = Programs()

    def __call__(self, action: str) -> None:
        self._left -= action == self._action
        if self._left > 0 or action != self._action:
            return
        assert self.traffic is not None
        if self._left == 0 and not self.can():
            self._left = 1
            return
        if self._left == 0:
            self.do(self.traffic)
        elif not self._again:
            return
        last = self.traffic.inspection.scrubbed()
        if last is not None and last.done:
            self.found.append(last.findings)
        if last is None or last.done:
            self.traffic.inspection.begin_scrub(self.programs)

    def train(self, stores: LocalStores, shards: int, k: int, r: int, logs: Path) -> dict[int, list[dict[bytes, bytes]]]:
        """Train the lanes on the first servers; returns what these hold of each lane in the end, but for the markers."""
        with Store(stores.urls[:shards], timedelta(seconds=10)) as store:
            for shard in range(shards):
                store.command(shard, "FLUSHALL")
            claim(store, "t", {"run": "x"}, "new")
            stored = StoredRows(store, Placement.spread(shards, k, r), LAYOUTS, "t")
            self.stored = stored
            plans = [LanePlan(lane, plan(program)) for lane, program in self.programs.lanes.items()]
            owner = Ownership(0, {"run": "x"})
            with serving(stored, plans, SEED, lead_events=3, log=FileLog(logs), ownership=owner, on_action=self) as traffic:
                self.traffic = traffic
                for lane, program in self.programs.lanes.items():
                    run_lane(traffic, lane, program)
                traffic.flush()
                last = traffic.inspection.scrubbed(finish=True)
                assert last is not None
                self.found.append(last.findings)
            held = {lane: contents(store, stored, lane) for lane in LANES}
            for fields in (fields for of_lane in held.values() for fields in of_lane):
                fields.pop(MARKER, None)
            return held


@pytest.fixture(params=CODES, ids=lambda code: "{1}+{2} on {0}".format(*code))
def code(request: pytest.FixtureRequest) -> tuple[int, int, int]:
    """Store shards, k and r."""
    found: tuple[int, int, int] = request.param
    return found


@pytest.fixture(scope="module")
def undisturbed(four: LocalStores, tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[int, int, int]], object]:
    """What the servers hold when all was only scrubbed at the end."""
    known: dict[tuple[int, int, int], object] = {}

    def of(code: tuple[int, int, int]) -> object:
        if code not in known:
            known[code] = Scrubbing("rows staged", 1).train(four, *code, tmp_path_factory.mktemp("logs"))
        return known[code]

    return of


@pytest.fixture
def unthrottled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scrubbing takes all of the thread's time, so that how many chunks come before the end does not depend on the clock."""
    monkeypatch.setattr("foreload.cache.protocol.rounds.background.SHARE", 1.0)


@pytest.mark.usefixtures("unthrottled")
@pytest.mark.parametrize("action", ["parity acknowledged", "rows staged", "data acknowledged"])
def test_batches_on_their_way_are_never_taken_for_damage(
    four: LocalStores, tmp_path: Path, code: tuple[int, int, int], undisturbed: Callable[..., object], action: str
) -> None:
    scrubbing = Scrubbing(action, 3, again=True)
    assert scrubbing.train(four, *code, tmp_path) == undisturbed(code)
    assert len(scrubbing.found) > 1
    assert sum(found.rows for found in scrubbing.found) > 0
    for found in scrubbing.found:
        assert (found.repaired, found.damaged) == ([], [])


@pytest.mark.usefixtures("unthrottled")
def test_a_scrub_that_does_not_wait_for_these_batches_is_caught(
    four: LocalStores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Rounds, "flush_pending", lambda self: False)
    scrubbing = Scrubbing("parity acknowledged", 3, again=True)
    try:
        scrubbing.train(four, 3, 2, 1, tmp_path)
    except (RowError, RowsLost):
        # The repair brought rows before their time: they are not new to the store when they are written, which is noticed then.
        return
    assert any(found.stripes_damaged or found.stripes_repaired for found in scrubbing.found)


@dataclass(frozen=True)
class Damage:
    """Flips a bit of rows of a stripe of the lane and table that are scrubbed first; byte None: removes them."""

    four: LocalStores
    scrubbing: Scrubbing
    places: tuple[int, ...]
    byte: int | None

    @contextlib.contextmanager
    def _rows(self) -> Iterator[list[tuple[Store, int, bytes, bytes]]]:
        """Of each row a connection, the shard, the key, and the field."""
        stored, lane = self.scrubbing.stored, LANES[0]
        k, shards = stored.placement.k, stored.placement.shard_count
        homes = LaneStripes.of(stored.placement, lane, np.zeros(4, np.int64)).shards(TABLE, np.array([STRIPE]))[0]
        with Store(self.four.urls[:shards], timedelta(seconds=10)) as other:
            rows = []
            for place in self.places:
                number, parity = (STRIPE * k + place, 0) if place < k else (STRIPE, int(PARITY_BIT))
                name = (int(fields(np.array([TABLE]), np.array([number]))[0]) | parity).to_bytes(8, "big")
                rows.append((other, int(homes[place]), stored.key(lane, int(homes[place])), name))
            yield rows

    def can(self) -> bool:
        """Whether the rows are there: how many batches that takes depends on how many rows each has."""
        with self._rows() as rows:
            return all(other.command(shard, "HEXISTS", key, name) == 1 for other, shard, key, name in rows)

    def do(self, _: Traffic) -> None:
        """Do it."""
        with self._rows() as rows:
            for other, shard, key, name in rows:
                if self.byte is None:
                    assert other.command(shard, "HDEL", key, name) == 1
                    continue
                held = other.command(shard, "HGET", key, name)
                assert isinstance(held, bytes)
                row = bytearray(held)
                row[self.byte] ^= 0x10
                other.command(shard, "HSET", key, name, bytes(row))


def damaging(four: LocalStores, places: tuple[int, ...], byte: int | None) -> Scrubbing:
    """Does damage once the rows are there. The round that follows begins with the scrub, before it reads anything else."""
    scrubbing = Scrubbing("parity acknowledged", 14)
    damage = Damage(four, scrubbing, places, byte)
    scrubbing.do, scrubbing.can = damage.do, damage.can
    return scrubbing


@pytest.mark.parametrize(("place", "byte"), [(0, None), (1, None), (2, None), (0, -12), (1, -1)])
def test_a_row_that_is_missing_or_has_a_wrong_id_or_tag_is_repaired_while_training_goes_on(
    four: LocalStores,
    tmp_path: Path,
    code: tuple[int, int, int],
    undisturbed: Callable[..., object],
    place: int,
    byte: int | None,
) -> None:
    scrubbing = damaging(four, (place,), byte)
    assert scrubbing.train(four, *code, tmp_path) == undisturbed(code)
    (found,) = scrubbing.found
    assert (found.stripes_repaired, found.stripes_damaged) == (1, 0)
    assert (found.repaired[0].lane, found.repaired[0].table, found.repaired[0].first) == (LANES[0], TABLE, STRIPE * code[1])


def test_what_two_parity_rows_single_out_is_repaired_while_training_goes_on(
    four: LocalStores, tmp_path: Path, undisturbed: Callable[..., object]
) -> None:
    for place in range(4):
        scrubbing = damaging(four, (place,), 3)
        assert scrubbing.train(four, 4, 2, 2, tmp_path) == undisturbed((4, 2, 2))
        assert scrubbing.found[0].stripes_repaired == 1


def test_a_shard_that_is_lost_meanwhile_is_left_out(tmp_path: Path) -> None:
    with LocalStores(3, tmp_path / "stores") as stores:
        scrubbing = Scrubbing("parity acknowledged", 14, do=lambda _: kill(stores, 1))
        scrubbing.train(stores, 3, 2, 1, tmp_path / "logs")
    (found,) = scrubbing.found
    assert found.rows > 0
    assert (found.stripes_repaired, found.stripes_damaged) == (0, 0)


def test_a_further_scrub_takes_the_place_of_the_one_before(
    four: LocalStores, tmp_path: Path, undisturbed: Callable[..., object]
) -> None:
    begun: list[int] = []

    def again(traffic: Traffic) -> None:
        for _ in range(2):
            traffic.inspection.begin_scrub(Programs())
            told = traffic.inspection.scrubbed()
            assert told is not None
            assert (told.findings.stripes, told.done) == (0, False)
            begun.append(told.stripes)

    scrubbing = Scrubbing("parity acknowledged", 14, do=again)
    assert scrubbing.train(four, 3, 2, 1, tmp_path) == undisturbed((3, 2, 1))
    (found,) = scrubbing.found
    assert found.stripes >= begun[1] == begun[0] > 0
    assert (found.stripes_repaired, found.stripes_damaged) == (0, 0)


def test_what_is_on_its_way_and_what_is_there_are_told(four: LocalStores, tmp_path: Path) -> None:
    told: list[tuple[int, int, int]] = []

    def look(traffic: Traffic) -> None:
        lag = traffic.inspection.lag()
        told.append((lag.batches, lag.boundaries, lag.rows))
        traffic.inspection.begin_row_counts()

    scrubbing = Scrubbing("parity acknowledged", 3, do=look)
    held = scrubbing.train(four, 3, 2, 1, tmp_path)
    assert scrubbing.traffic is not None
    (batches, boundaries, rows) = told[0]
    assert batches >= 1
    assert boundaries >= 1
    assert rows >= 1
    counted = scrubbing.traffic.inspection.row_counts()
    assert counted is not None
    assert 0 < counted.rows.sum() < sum(len(shard) for lane in held.values() for shard in lane)
