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
from grids import covering
from lane_program import (
    EVALUATION_SLOTS,
    LAYOUTS,
    SEED,
    SLOTS,
    STATE_WIDTH,
    WIDTH,
    LaneProgram,
    make_program,
    train_slots,
)
from lane_runs import contents, plan
from lost_shards import kill
from serving import serving
from waiting import DEADLINE_SECONDS

from foreload.base.hashing import key
from foreload.cache.client.local import LocalStores
from foreload.cache.client.resp import MARKER
from foreload.cache.client.store import Read, Store, Write
from foreload.cache.errors import CacheError, Fenced, StoreError
from foreload.cache.parity.erasure import Code
from foreload.cache.parity.placement import GROUPS, Placement
from foreload.cache.parity.stripes import LaneStripes
from foreload.cache.protocol.ownership.batch_log import FileLog, LoggedBatch
from foreload.cache.protocol.ownership.ownership import Ownership
from foreload.cache.protocol.ownership.recovery import recover
from foreload.cache.protocol.rounds.lanes import LanePlan
from foreload.cache.protocol.shards.marker import Marker
from foreload.cache.protocol.shards.namespace import claim, lane_key
from foreload.cache.protocol.shards.reading import Expected, StoredRows, read_rows
from foreload.cache.repair.scrub import MUST, TableRows, scrub_table
from foreload.cache.rows.partition import Partition
from foreload.cache.rows.row_bytes import NUMBER_BITS, PARITY_BIT, unpack
from foreload.cache.traffic import Traffic

LANES = (0, 3)
IDENTITY = {"run": "x"}
OWNER = Ownership(1, IDENTITY)  # of who takes over
TIMEOUT = timedelta(seconds=30)
OLDER = b"older:%d"  # the key of a copy of a lane's hash, as it was at an early batch
COPIED_AT = 3  # that batch
CRASH_AT = 20  # the n-th action, or exchange of a phase, at which the writer dies
LOW = (1 << NUMBER_BITS) - 1  # of a field: the ordinal
ID, TAG = slice(-12, -4), slice(-4, None)  # bytes of a stored row

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
    """A Store whose process dies in its n-th exchange of a phase ("parity" or "data"), when only some shards have got their command.

    Without a phase it does not. Shards keep a copy of what they held at an early batch, which `lose` may give back to them.
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


def _lane(hash_key: bytes) -> int:
    return next(lane for lane in LANES if lane_key("t", lane, 0) == hash_key)


def train(store: Store, folder: Path, k: int, r: int, on_action: Callable[[str], None] | None) -> None:
    """What the writer does until it is killed, and ends with an error if it is not."""
    claim(store, "t", IDENTITY, "new")
    stored = StoredRows(store, Placement.spread(store.shards, k, r), LAYOUTS, "t")
    programs = {lane: make_program(lane + 50, 30) for lane in LANES}
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
    process.join(DEADLINE_SECONDS)
    assert process.exitcode == -signal.SIGKILL


@dataclass(frozen=True)
class Journalled:
    """What all batches up to the last ones made of the rows: (lane, field) -> bytes, and how they are placed."""

    placement: Placement
    rows: dict[Field, bytes]
    stripes: dict[int, LaneStripes]

    @classmethod
    def of(cls, folder: Path, placement: Placement, last_batches: dict[int, int]) -> Journalled:
        """From the journal of what was ever logged."""
        rows: dict[Field, bytes] = {}
        last: dict[int, int] = {}
        stripes = {lane: LaneStripes.of(placement, lane, np.zeros(len(LAYOUTS), np.int64)) for lane in LANES}
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
                table, ordinal = unpack(batch.fields)
                stripes[lane].written.reserve(table, ordinal)
                stripes[lane].written.note(table, ordinal)
        assert last == last_batches
        return cls(placement, rows, stripes)

    def of_shard(self, lane: int, shard: int) -> dict[bytes, bytes]:
        """Every row and parity row that a shard must hold of a lane."""
        code = Code.of(self.placement)
        assert code is not None
        found: dict[bytes, bytes] = {}
        named = [(int.from_bytes(name, "big"), row) for (of, name), row in self.rows.items() if of == lane]
        by_stripe: dict[tuple[int, int], dict[int, bytes]] = {}
        for name, row in named:
            table, ordinal = name >> NUMBER_BITS, name & LOW
            by_stripe.setdefault((table, ordinal // code.k), {})[ordinal % code.k] = row
        for (table, stripe), members in by_stripe.items():
            places = self.placement.members[key(lane, table, stripe) % GROUPS]
            zeros = bytes(LAYOUTS[table].row_bytes)
            parities = code.encode(np.array([np.frombuffer(members.get(j, zeros), np.uint8) for j in range(code.k)]))
            for place, at in enumerate(places):
                if at != shard:
                    continue
                if place < code.k and place in members:
                    found[(table << NUMBER_BITS | (stripe * code.k + place)).to_bytes(8, "big")] = members[place]
                elif place >= code.k:
                    found[(int(PARITY_BIT) | table << NUMBER_BITS | stripe).to_bytes(8, "big")] = parities[
                        place - code.k
                    ].tobytes()
        return found


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStores]:
    """Three servers. This process trains on them once, so that all kernels are compiled in the processes that it forks."""
    with LocalStores(3, tmp_path_factory.mktemp("three")) as stores:
        with Torn(stores.urls) as store:
            train(store, tmp_path_factory.mktemp("log"), 2, 1, None)
            for shard in range(store.shards):
                store.command(shard, "FLUSHALL")
        yield stores


@pytest.fixture
def stores(request: pytest.FixtureRequest) -> Iterator[LocalStores]:
    """The servers that a test names by their fixture: empty, and all up again after it."""
    named: LocalStores = request.getfixturevalue(request.param)
    yield named
    for shard in range(len(named.urls)):
        named.restart(shard)
    with Store(named.urls, TIMEOUT) as store:
        for shard in range(store.shards):
            store.command(shard, "FLUSHALL")


def lose(stores: LocalStores, shard: int, how: str) -> None:
    """how: "gone": kill a shard's server; "empty": and start it again; "older": give it back what it held at an early batch."""
    if how == "older":
        with Store(stores.urls, TIMEOUT) as store:
            for lane in LANES:
                assert store.command(shard, "COPY", OLDER % lane, lane_key("t", lane, 0), "REPLACE") == 1
        return
    kill(stores, shard)
    if how == "empty":
        assert stores.restart(shard)


def check(stores: LocalStores, folder: Path, k: int, r: int, lost: set[int]) -> None:
    """Recover, and compare everything."""
    connect_timeout = timedelta(milliseconds=200) if None in stores.pids else TIMEOUT
    with Store(stores.urls, TIMEOUT, connect_timeout, optional=True) as store:
        stored = StoredRows(store, Placement.spread(store.shards, k, r), LAYOUTS, "t")
        last_batches = {lane: recover(stored, lane, FileLog(folder), OWNER) for lane in LANES}
        assert set(stored.shards.lost) == lost
        truth = Journalled.of(folder, stored.placement, last_batches)
        stored.stripes = truth.stripes.__getitem__
        for lane in LANES:
            shards = contents(store, stored, lane)
            for shard in set(range(store.shards)) - lost:
                held = shards[shard]
                assert Marker.parse(held.pop(MARKER)) == Marker(last_batches[lane], last_batches[lane])
                assert held == truth.of_shard(lane, shard)
            scrub(stored, lane, truth, last_batches[lane])
            compare_rows(stored, lane, truth, last_batches[lane])


def scrub(stored: StoredRows, lane: int, truth: Journalled, last_batch: int) -> None:
    """No stripe is inconsistent, and every row is there, with its id and tag."""
    checked = 0
    for table in range(len(LAYOUTS)):
        rows = {
            int.from_bytes(name, "big") & LOW: row
            for (of, name), row in truth.rows.items()
            if of == lane and int.from_bytes(name[:2], "big") == table
        }
        count = max(rows, default=-1) + 1
        known = TableRows(table, *(np.zeros(count, kind) for kind in (np.uint8, np.int64, np.int32, bool)))
        for ordinal, row in rows.items():
            known.presence[ordinal], known.exact[ordinal] = MUST, True
            known.id[ordinal], known.tag[ordinal] = np.frombuffer(row[ID], np.int64)[0], np.frombuffer(row[TAG], np.int32)[0]
        for found in scrub_table(stored, lane, known, last_batch, repair=False):
            assert not found.repaired
            assert not found.damaged
            checked += found.stripes
    assert checked


def compare_rows(stored: StoredRows, lane: int, truth: Journalled, last_batch: int) -> None:
    """Read every row ever written, those of lost shards from their stripes."""
    for table, layout in enumerate(LAYOUTS):
        rows = sorted(
            (name, row) for (of, name), row in truth.rows.items() if of == lane and int.from_bytes(name[:2], "big") == table
        )
        if not rows:
            continue
        stored_bytes = np.array([np.frombuffer(row, np.uint8) for _, row in rows])
        ids = np.ascontiguousarray(stored_bytes[:, ID]).view(np.int64)[:, 0]
        tags = np.ascontiguousarray(stored_bytes[:, TAG]).view(np.int32)[:, 0]
        ordinals = np.array([int.from_bytes(name, "big") & LOW for name, _ in rows])
        found = read_rows(stored, Expected(np.full(len(rows), table, np.int16), ordinals, ids, tags, lane), last_batch)
        weights = np.ascontiguousarray(stored_bytes[:, : 4 * layout.width]).view(np.int32)
        state = np.ascontiguousarray(stored_bytes[:, 4 * layout.width : ID.start]).view(np.int32)
        assert np.array_equal(found.weights[:, : layout.width].view(np.int32), weights)
        assert np.array_equal(found.state[:, : layout.state_width].view(np.int32), state)


# Of the actions that Traffic names, those of a write-back.
ACTIONS = [
    "parity rows asked for", "parity rows read", "batch logged", "parity leaves", "parity acknowledged", "data leaves", "data acknowledged",
]  # fmt: skip
SHARD_LOSSES: list[tuple[int, str]] = [(shard, how) for shard in range(3) for how in ("gone", "empty", "older")]


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


@pytest.mark.parametrize("stores", ["three"], indirect=True)
@pytest.mark.parametrize(("action", "loss"), covering(list(product(ACTIONS, [None, *SHARD_LOSSES])), 3))
def test_the_writer_dies_at_an_action_and_a_shard_is_lost_as_well(
    stores: LocalStores, tmp_path: Path, action: str, loss: tuple[int, str] | None
) -> None:
    crash(stores, tmp_path, 2, 1, action)
    if loss is not None:
        lose(stores, *loss)
    check(stores, tmp_path, 2, 1, set() if loss is None else {loss[0]})


# The shards that a phase reaches: none, one, two or all three of them.
SUBSETS = [reached for count in range(4) for reached in combinations(range(3), count)]


@pytest.mark.parametrize("stores", ["three"], indirect=True)
@pytest.mark.parametrize(("phase", "reached", "lost"), covering(list(product(["parity", "data"], SUBSETS, [None, 0, 1, 2])), 5))
def test_the_writer_dies_in_a_phase_that_reaches_some_shards_and_one_is_lost_as_well(
    stores: LocalStores, tmp_path: Path, phase: str, reached: tuple[int, ...], lost: int | None
) -> None:
    crash_torn(stores, tmp_path, 2, 1, phase, reached)
    if lost is not None:
        lose(stores, lost, "empty")
    check(stores, tmp_path, 2, 1, set() if lost is None else {lost})


@pytest.mark.parametrize("stores", ["four"], indirect=True)
@pytest.mark.parametrize(("phase", "lost"), covering(list(product(["parity", "data"], combinations(range(4), 2))), 5))
def test_two_shards_are_lost_with_the_writer(stores: LocalStores, tmp_path: Path, phase: str, lost: tuple[int, int]) -> None:
    crash_torn(stores, tmp_path, 2, 2, phase, (0, 2))
    lose(stores, lost[0], "older")
    lose(stores, lost[1], "gone")
    check(stores, tmp_path, 2, 2, set(lost))


class Mortal(Store):
    """For a recovery: a Store whose process dies in its n-th exchange of writes, when only some shards have got theirs."""

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
@pytest.mark.parametrize(("count", "reached", "lost"), covering(list(product([1, 2], SUBSETS, [None, 1])), 3))
def test_the_recovery_dies_as_well_and_another_recovers(
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
        # What it leaves in the place of the next record: one that says that it is not whole, in the fifth word, with bytes of two records behind.
        with open(tmp_path / f"lane-{lane}-term-0-{before.number % 2}.log", "r+b") as file:
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
    # To the hash of the fence epoch before.
    late = Write(1, lane_key("t", 0, 0), np.zeros(1, np.uint64), row, Marker(9, 9).stored())
    with Store(stores.urls, TIMEOUT) as store, pytest.raises(Fenced):
        store.exchange([], [late])


@pytest.mark.parametrize("stores", ["three"], indirect=True)
def test_a_log_older_than_the_store_is_refused(stores: LocalStores, tmp_path: Path) -> None:
    crash(stores, tmp_path, 2, 1, "data leaves")
    held = FileLog(tmp_path).held(0)
    assert held is not None
    (tmp_path / f"lane-0-term-0-{(held.number - 1) % 2}.log").unlink()
    with Store(stores.urls, TIMEOUT) as store:
        stored = StoredRows(store, Placement.spread(3, 2, 1), LAYOUTS, "t")
        with pytest.raises(CacheError, match="later than the log's"):
            recover(stored, 0, FileLog(tmp_path), OWNER)
