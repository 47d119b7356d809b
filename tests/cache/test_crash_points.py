"""The writer is killed between any two actions of a write-back, or in the middle of a phase, and a shard is lost as well.

After the recovery from the log every row and parity row of every shard that is left is, byte for byte, what the batches up to the logged one
made of it, and every row of the lost shard is decoded to that.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pytest
from lane_program import LAYOUTS, SEED, STATE_WIDTH, WIDTH, LaneProgram, make_program, train_slots
from serving import serving
from test_parity import plan

from foreload.cache.client.local import LocalStores
from foreload.cache.client.store import Read, Store, Write
from foreload.cache.errors import CacheError, Fenced, StoreError
from foreload.cache.parity.placement import GROUPS, Placement
from foreload.cache.parity.stripes import LaneStripes
from foreload.cache.protocol.batch_log import FileLog, LoggedBatch
from foreload.cache.protocol.lanes import LanePlan
from foreload.cache.protocol.marker import Marker
from foreload.cache.protocol.namespace import claim, lane_key
from foreload.cache.protocol.ownership import Ownership
from foreload.cache.protocol.reading import Expected, StoredRows, read_rows
from foreload.cache.protocol.recovery import recover
from foreload.cache.repair.scrub import MUST, TableRows, scrub_table
from foreload.cache.rows.fields import PARITY_BIT
from foreload.cache.rows.partition import Partition
from foreload.cache.traffic import Traffic
from foreload.pipelines.base.hashing import key

SLOTS, EVALUATION_SLOTS = 12, 6
LANES = (0, 3)
IDENTITY = {"run": "x"}
OWNER = Ownership(1, IDENTITY)  # of who takes over
TIMEOUT = timedelta(seconds=30)
OLDER = b"older:%d"
COPIED_AT = 3  # a batch, whose contents an older snapshot has
CRASH_AT = 20

Field = tuple[int, bytes]  # lane and field


def die() -> None:
    """End this process as a power cut would."""
    os.kill(os.getpid(), signal.SIGKILL)


class Journal(FileLog):
    """A log beside which every batch is noted, for the test to compare with."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._journal = folder / "journal"

    def hold(self, lane: int, batch: LoggedBatch) -> None:
        with open(self._journal, "ab") as journal:
            pickle.dump((lane, batch), journal)
        super().hold(lane, batch)


class Torn(Store):
    """A Store whose process dies in its n-th exchange of a phase, when only some shards have got their command.

    Shards keep a copy of what they held in an early batch, which a later test restores.
    """

    def __init__(self, urls: Sequence[str], phase: str = "", count: int = 0, reached: Sequence[int] = ()) -> None:
        super().__init__(urls, TIMEOUT)
        self._phase, self._left, self._reached = phase, count, reached

    def attempt(self, reads: Sequence[Read], writes: Sequence[Write]) -> dict[int, StoreError]:
        marker = Marker.parse(writes[0].marker) if writes else None
        if marker is not None and ("data" if marker.parity == marker.data else "parity") == self._phase:
            self._left -= 1
            if not self._left:
                super().attempt([], [write for write in writes if write.shard in self._reached])
                die()
        failures = super().attempt(reads, writes)
        for write in writes:
            if Marker.parse(write.marker) == Marker(COPIED_AT, COPIED_AT):
                self.command(write.shard, "COPY", write.key, OLDER % _lane(write.key))
        return failures


def _lane(key: bytes) -> int:
    return next(lane for lane in LANES if lane_key("t", lane, 0) == key)


def train(store: Store, folder: Path, k: int, r: int, on_action: Callable[[str], None] | None) -> None:
    """What the writer does until it is killed, and ends with an error if it is not."""
    claim(store, "t", IDENTITY, "new")
    stored = StoredRows(store, Placement.spread(store.shards, k, r), LAYOUTS, "t")
    programs = {lane: make_program(lane + 50, 30, SLOTS, SLOTS, EVALUATION_SLOTS) for lane in LANES}
    plans = [LanePlan(lane, plan(program)) for lane, program in programs.items()]
    with serving(
        stored, plans, SEED, lead_events=3, log=Journal(folder), ownership=Ownership(0, IDENTITY), on_action=on_action
    ) as traffic:
        train_in_turn(traffic, programs)


def train_in_turn(traffic: Traffic, programs: dict[int, LaneProgram]) -> None:
    """Train the events of several lanes, one event of each at a time."""
    partitions = {lane: Partition(SLOTS, EVALUATION_SLOTS, WIDTH, STATE_WIDTH, with_base=True) for lane in programs}
    for index in range(max(len(program.events) for program in programs.values())):
        for lane, program in programs.items():
            if index >= len(program.events):
                continue
            event, partition = program.events[index], partitions[lane]
            if event.step is not None:
                traffic.write_back(lane, event.step, partition.end(event.ends))
            partition.admit(event.arrivals, traffic.take(lane, index))
            if event.step is not None:
                train_slots(partition, event.slots, event.step)
    traffic.flush()


def in_a_process_that_is_killed(run: Callable[[], None]) -> None:
    """Run something in a process of its own, which must end by SIGKILL."""
    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL


@dataclass(frozen=True)
class Truth:
    """What all batches up to the last ones made of the rows: (lane, field) -> bytes, and how they are placed."""

    placement: Placement
    rows: dict[Field, bytes]
    stripes: dict[int, LaneStripes]

    @classmethod
    def of(cls, folder: Path, placement: Placement, last_batches: dict[int, int]) -> Truth:
        """From the journal of what was ever logged."""
        rows: dict[Field, bytes] = {}
        last: dict[int, int] = {}
        stripes = {lane: placement.stripes(lane, np.zeros(len(LAYOUTS), np.int64)) for lane in LANES}
        with open(folder / "journal", "rb") as journal:
            while True:
                try:
                    lane, batch = pickle.load(journal)
                except EOFError:
                    break
                last[lane] = batch.number
                rows |= {
                    (lane, int(name).to_bytes(8, "big")): row.tobytes() for name, row in zip(batch.fields, batch.new, strict=True)
                }
                table = (batch.fields >> np.uint64(48)).astype(np.int16)
                ordinal = (batch.fields & np.uint64((1 << 48) - 1)).astype(np.int64)
                stripes[lane].written.reserve(table, ordinal)
                stripes[lane].written.note(table, ordinal)
        assert last == last_batches
        return cls(placement, rows, stripes)

    def of_shard(self, lane: int, shard: int) -> dict[bytes, bytes]:
        """Every row and parity row that a shard must hold of a lane."""
        code = self.placement.code
        assert code is not None
        found: dict[bytes, bytes] = {}
        named = [(int.from_bytes(name, "big"), row) for (of, name), row in self.rows.items() if of == lane]
        by_stripe: dict[tuple[int, int], dict[int, bytes]] = {}
        for name, row in named:
            table, ordinal = name >> 48, name & ((1 << 48) - 1)
            by_stripe.setdefault((table, ordinal // code.k), {})[ordinal % code.k] = row
        for (table, stripe), members in by_stripe.items():
            places = self.placement.members[key(lane, table, stripe) % GROUPS]
            zeros = bytes(LAYOUTS[table].row_bytes)
            parities = code.encode(np.array([np.frombuffer(members.get(j, zeros), np.uint8) for j in range(code.k)]))
            for place, at in enumerate(places):
                if at != shard:
                    continue
                if place < code.k and place in members:
                    found[(table << 48 | (stripe * code.k + place)).to_bytes(8, "big")] = members[place]
                elif place >= code.k:
                    found[(int(PARITY_BIT) | table << 48 | stripe).to_bytes(8, "big")] = parities[place - code.k].tobytes()
        return found


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStores]:
    """Three servers, of which this process has made use: what is compiled is there for those that it starts."""
    with LocalStores(3, tmp_path_factory.mktemp("three")) as stores:
        with Torn(stores.urls) as store:
            train(store, tmp_path_factory.mktemp("log"), 2, 1, None)
            for shard in range(store.shards):
                store.command(shard, "FLUSHALL")
        yield stores


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStores]:
    """Four servers."""
    with LocalStores(4, tmp_path_factory.mktemp("four")) as stores:
        yield stores


@pytest.fixture
def stores(request: pytest.FixtureRequest) -> Iterator[LocalStores]:
    """The servers that a test names, empty, and all up again after it."""
    named: LocalStores = request.getfixturevalue(request.param)
    yield named
    for shard in range(len(named.urls)):
        named.restart(shard)
    with Store(named.urls, TIMEOUT) as store:
        for shard in range(store.shards):
            store.command(shard, "FLUSHALL")


def lose(stores: LocalStores, shard: int, how: str) -> None:
    """Kill a shard's server, and start it again if it is to come back empty; or give it back what it held in an early batch."""
    if how == "older":
        with Store(stores.urls, TIMEOUT) as store:
            for lane in LANES:
                assert store.command(shard, "COPY", OLDER % lane, lane_key("t", lane, 0), "REPLACE") == 1
        return
    pid = stores.pids[shard]
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    stores._processes[shard].wait()
    if how == "empty":
        assert stores.restart(shard)


def check(stores: LocalStores, folder: Path, k: int, r: int, lost: set[int]) -> None:
    """Recover, and compare everything."""
    connect_timeout = timedelta(milliseconds=200) if None in stores.pids else TIMEOUT
    with Store(stores.urls, TIMEOUT, connect_timeout, optional=True) as store:
        stored = StoredRows(store, Placement.spread(store.shards, k, r), LAYOUTS, "t")
        last_batches = {lane: recover(stored, lane, FileLog(folder), OWNER) for lane in LANES}
        assert set(stored.shards.lost) == lost
        truth = Truth.of(folder, stored.placement, last_batches)
        stored.stripes = truth.stripes.__getitem__
        for lane in LANES:
            for shard in set(range(store.shards)) - lost:
                pairs = store.command(shard, "HGETALL", stored.key(lane, shard))
                assert isinstance(pairs, list)
                held = dict(zip(pairs[::2], pairs[1::2], strict=True))
                assert Marker.parse(held.pop(b"m")) == Marker(last_batches[lane], last_batches[lane])
                assert held == truth.of_shard(lane, shard)
            scrub(stored, lane, truth, last_batches[lane])
            compare_rows(stored, lane, truth, last_batches[lane])


def scrub(stored: StoredRows, lane: int, truth: Truth, last_batch: int) -> None:
    """No stripe is inconsistent, and every row is there, with its id and tag."""
    checked = 0
    for table in range(len(LAYOUTS)):
        rows = {
            int.from_bytes(name, "big") & ((1 << 48) - 1): row
            for (of, name), row in truth.rows.items()
            if of == lane and int.from_bytes(name[:2], "big") == table
        }
        count = max(rows, default=-1) + 1
        known = TableRows(table, *(np.zeros(count, kind) for kind in (np.uint8, np.int64, np.int32, bool)))
        for ordinal, row in rows.items():
            known.presence[ordinal], known.exact[ordinal] = MUST, True
            known.id[ordinal], known.tag[ordinal] = np.frombuffer(row[-12:-4], np.int64)[0], np.frombuffer(row[-4:], np.int32)[0]
        for found in scrub_table(stored, lane, known, last_batch, repair=False):
            assert not found.repaired
            assert not found.damaged
            checked += found.stripes
    assert checked


def compare_rows(stored: StoredRows, lane: int, truth: Truth, last_batch: int) -> None:
    """Read every row ever written, those of lost shards from their stripes."""
    for table, layout in enumerate(LAYOUTS):
        rows = sorted(
            (name, row) for (of, name), row in truth.rows.items() if of == lane and int.from_bytes(name[:2], "big") == table
        )
        if not rows:
            continue
        stored_bytes = np.array([np.frombuffer(row, np.uint8) for _, row in rows])
        ids = np.ascontiguousarray(stored_bytes[:, -12:-4]).view(np.int64)[:, 0]
        tags = np.ascontiguousarray(stored_bytes[:, -4:]).view(np.int32)[:, 0]
        ordinals = np.array([int.from_bytes(name, "big") & ((1 << 48) - 1) for name, _ in rows])
        found = read_rows(stored, Expected(np.full(len(rows), table, np.int16), ordinals, ids, tags, lane), last_batch)
        weights = np.ascontiguousarray(stored_bytes[:, : 4 * layout.width]).view(np.int32)
        state = np.ascontiguousarray(stored_bytes[:, 4 * layout.width : -12]).view(np.int32)
        assert np.array_equal(found.weights[:, : layout.width].view(np.int32), weights)
        assert np.array_equal(found.state[:, : layout.state_width].view(np.int32), state)


POINTS = [
    "parity rows asked for", "parity rows read", "batch logged", "parity leaves", "parity acknowledged", "data leaves", "data acknowledged",
]  # fmt: skip
LOSSES: list[tuple[int, str]] = [(shard, how) for shard in range(3) for how in ("gone", "empty", "older")]


def killed_at(action: str, count: int) -> Callable[[str], None]:
    """Kills this process at the n-th time of an action."""
    left = count

    def act(happened: str) -> None:
        nonlocal left
        left -= happened == action
        if not left:
            die()

    return act


def crash(stores: LocalStores, folder: Path, k: int, r: int, action: str) -> None:
    """Train until an action, and die there."""

    def run() -> None:
        with Torn(stores.urls) as store:
            train(store, folder, k, r, killed_at(action, CRASH_AT))

    in_a_process_that_is_killed(run)


def crash_torn(stores: LocalStores, folder: Path, k: int, r: int, phase: str, reached: Sequence[int]) -> None:
    """Train until a phase that reaches only some shards, and die there."""

    def run() -> None:
        with Torn(stores.urls, phase, CRASH_AT, reached) as store:
            train(store, folder, k, r, None)

    in_a_process_that_is_killed(run)


def some(cases: Sequence[tuple[object, ...]], every: int) -> list[object]:
    """All cases, of which a test run takes one in `every` and leaves the rest to the full grid."""
    return [case if i % every == 0 else pytest.param(*case, marks=pytest.mark.full) for i, case in enumerate(cases)]


@pytest.mark.parametrize("stores", ["three"], indirect=True)
@pytest.mark.parametrize(("action", "loss"), some(list(product(POINTS, [None, *LOSSES])), 3))
def test_the_writer_dies_at_an_action_and_a_shard_is_lost_as_well(
    stores: LocalStores, tmp_path: Path, action: str, loss: tuple[int, str] | None
) -> None:
    crash(stores, tmp_path, 2, 1, action)
    if loss is not None:
        lose(stores, *loss)
    check(stores, tmp_path, 2, 1, set() if loss is None else {loss[0]})


SUBSETS = [reached for count in range(4) for reached in combinations(range(3), count)]


@pytest.mark.parametrize("stores", ["three"], indirect=True)
@pytest.mark.parametrize(("phase", "reached", "lost"), some(list(product(["parity", "data"], SUBSETS, [None, 0, 1, 2])), 5))
def test_the_writer_dies_in_a_phase_that_reaches_some_shards_and_one_is_lost_as_well(
    stores: LocalStores, tmp_path: Path, phase: str, reached: tuple[int, ...], lost: int | None
) -> None:
    crash_torn(stores, tmp_path, 2, 1, phase, reached)
    if lost is not None:
        lose(stores, lost, "empty")
    check(stores, tmp_path, 2, 1, set() if lost is None else {lost})


@pytest.mark.parametrize("stores", ["four"], indirect=True)
@pytest.mark.parametrize(("phase", "lost"), some(list(product(["parity", "data"], combinations(range(4), 2))), 5))
def test_two_shards_are_lost_with_the_writer(stores: LocalStores, tmp_path: Path, phase: str, lost: tuple[int, int]) -> None:
    crash_torn(stores, tmp_path, 2, 2, phase, (0, 2))
    lose(stores, lost[0], "older")
    lose(stores, lost[1], "gone")
    check(stores, tmp_path, 2, 2, set(lost))


class Mortal(Store):
    """A Store whose process dies in its n-th exchange of writes, when only some shards have got theirs."""

    def __init__(self, urls: Sequence[str], count: int, reached: Sequence[int]) -> None:
        super().__init__(urls, TIMEOUT)
        self._left, self._reached = count, reached

    def exchange(self, reads: Sequence[Read], writes: Sequence[Write]) -> None:
        self._left -= bool(writes)
        if writes and not self._left:
            super().exchange([], [write for write in writes if write.shard in self._reached])
            die()
        super().exchange(reads, writes)


@pytest.mark.parametrize("stores", ["three"], indirect=True)
@pytest.mark.parametrize(("count", "reached", "lost"), some(list(product([1, 2], SUBSETS, [None, 1])), 3))
def test_the_recovery_dies_as_well(
    stores: LocalStores, tmp_path: Path, count: int, reached: tuple[int, ...], lost: int | None
) -> None:
    crash_torn(stores, tmp_path, 2, 1, "parity", (0,))
    if lost is not None:
        lose(stores, lost, "empty")

    def run() -> None:
        with Mortal(stores.urls, count, reached) as store:
            stored = StoredRows(store, Placement.spread(3, 2, 1), LAYOUTS, "t")
            for lane in LANES:
                recover(stored, lane, FileLog(tmp_path), OWNER)

    in_a_process_that_is_killed(run)
    check(stores, tmp_path, 2, 1, set() if lost is None else {lost})


@pytest.mark.parametrize("stores", ["three"], indirect=True)
@pytest.mark.parametrize("how", ["older", "empty"])
def test_the_writer_dies_while_it_writes_to_the_log(stores: LocalStores, tmp_path: Path, how: str) -> None:
    crash(stores, tmp_path, 2, 1, "parity rows read")
    for lane in LANES:
        before = FileLog(tmp_path).held(lane)
        assert before is not None
        # What it leaves in the place of the next record: one that is not whole, the fifth word says, and rows of both.
        with open(tmp_path / f"lane-{lane}-{(before.number + 1) % 2}.log", "r+b") as file:
            file.seek(4 * 8)
            file.write(bytes(300))
        after = FileLog(tmp_path).held(lane)
        assert after is not None
        assert after.number == before.number
    lose(stores, 2, how)
    check(stores, tmp_path, 2, 1, {2})


@pytest.mark.parametrize("stores", ["three"], indirect=True)
def test_what_the_dead_writer_still_sends_is_refused(stores: LocalStores, tmp_path: Path) -> None:
    crash(stores, tmp_path, 2, 1, "data leaves")
    check(stores, tmp_path, 2, 1, set())
    row = np.zeros((1, LAYOUTS[0].row_bytes), np.uint8)
    late = Write(1, lane_key("t", 0, 0), np.zeros(1, np.uint64), row, Marker(9, 9).stored())
    with Store(stores.urls, TIMEOUT) as store, pytest.raises(Fenced):
        store.exchange([], [late])


@pytest.mark.parametrize("stores", ["three"], indirect=True)
def test_a_log_older_than_the_store_is_refused(stores: LocalStores, tmp_path: Path) -> None:
    crash(stores, tmp_path, 2, 1, "data leaves")
    held = FileLog(tmp_path).held(0)
    assert held is not None
    (tmp_path / f"lane-0-{held.number % 2}.log").unlink()
    with Store(stores.urls, TIMEOUT) as store:
        stored = StoredRows(store, Placement.spread(3, 2, 1), LAYOUTS, "t")
        with pytest.raises(CacheError, match="later than the log's"):
            recover(stored, 0, FileLog(tmp_path), OWNER)
