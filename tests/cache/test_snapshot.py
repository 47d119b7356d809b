"""A snapshot of lanes that are trained: every row as it was after its step, whatever is written meanwhile, byte for byte."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
from lane_program import EVALUATION_SLOTS, LAYOUTS, SEED, SLOTS, STATE_WIDTH, WIDTH, LaneProgram, Truth, make_program, train_slots
from lane_runs import ending, plan
from lost_shards import kill
from serving import serving
from waiting import DEADLINE_SECONDS

from foreload.cache.client.local import LocalStores
from foreload.cache.client.store import Store
from foreload.cache.errors import SnapshotAbandoned
from foreload.cache.parity.placement import Placement
from foreload.cache.protocol.ownership.batch_log import FileLog
from foreload.cache.protocol.ownership.ownership import Ownership
from foreload.cache.protocol.rounds import snapshot as snapshots
from foreload.cache.protocol.rounds.lanes import LanePlan, PlannedFetch
from foreload.cache.protocol.rounds.snapshot import Snapshot, TakenRows
from foreload.cache.protocol.shards.namespace import claim
from foreload.cache.protocol.shards.reading import StoredRows
from foreload.cache.rows.partition import Partition
from foreload.cache.rows.slot_copy import SlotCopy, SlotRows
from foreload.cache.traffic import Traffic

LANES = (0, 3)
STEPS = 24
Row = tuple[int, int]  # table and id


@dataclass
class Training:
    """Lanes that are trained side by side. after_step: called behind each step, with its number, when all lanes have trained it."""

    traffic: Traffic
    with_base: bool
    programs: dict[int, LaneProgram]
    after_step: Callable[[int], None] = lambda step: None
    partitions: dict[int, Partition] = field(default_factory=dict)
    given: dict[int, np.ndarray] = field(default_factory=dict)
    truths: dict[int, Truth] = field(default_factory=dict)

    def run(self) -> None:
        """Train all steps of all lanes, and write everything back."""
        lanes = self.programs
        self.partitions = {
            lane: Partition(SLOTS, EVALUATION_SLOTS, WIDTH, STATE_WIDTH, with_base=self.with_base) for lane in lanes
        }
        self.given = {lane: np.zeros(len(LAYOUTS), np.int64) for lane in lanes}
        self.truths = {lane: Truth() for lane in lanes}
        turns = [self._steps(lane) for lane in lanes]
        for step in range(STEPS):
            for turn in turns:
                next(turn)
            self.after_step(step)
        for lane, turn in zip(lanes, turns, strict=True):
            assert next(turn, None) is None
            self.traffic.write_back(lane, STEPS, self.partitions[lane].end(lanes[lane].final_ends))
        self.traffic.flush()

    def _steps(self, lane: int) -> Iterator[None]:
        partition = self.partitions[lane]
        for index, event in enumerate(self.programs[lane].events):
            if event.step is not None:
                self.traffic.write_back(lane, event.step, partition.end(event.ends))
                first = event.arrivals.tag == 0
                self.given[lane] += np.bincount(event.arrivals.table[first], minlength=len(LAYOUTS))
            partition.admit(event.arrivals, self.traffic.take(lane, index))
            if event.step is not None:
                train_slots(partition, event.slots, event.step)
                self.truths[lane].train(event.rows, event.step)
                yield

    def begin(self, step: int) -> Snapshot:
        """Begin a snapshot as a trainer does, behind a step."""
        held = {lane: (SlotCopy(one).of(one), self.given[lane].copy()) for lane, one in self.partitions.items()}
        return self.traffic.snapshots.begin(step, held)

    def values(self) -> dict[int, dict[Row, np.ndarray]]:
        """Every row ever trained, by lane, table and id, as it is now."""
        return {lane: {row: value.copy() for row, value in truth.values.items()} for lane, truth in self.truths.items()}


def tags_after(program: LaneProgram, step: int) -> dict[Row, int]:
    """1 + the last step, up to `step`, that trained each row."""
    return {
        row: event.step + 1 for event in program.events if event.step is not None and event.step <= step for row in event.rows
    }


class Reader(threading.Thread):
    """Reads a snapshot to its end."""

    def __init__(self, snapshot: Snapshot, since: int = -1) -> None:
        super().__init__()
        self.snapshot, self._since, self.blocks = snapshot, since, list[TakenRows]()
        self._told = threading.Event()
        self.failure: BaseException | None = None
        self.start()

    def wants(self, wanted: dict[int, np.ndarray] | None) -> None:
        """From now on the store may be asked."""
        self.snapshot.want(self._since, wanted)
        self._told.set()

    def run(self) -> None:
        try:
            while not self._told.wait(0.05) and not self.snapshot.over:
                pass
            for rows in self.snapshot.rows():
                self.blocks.append(rows)
        except SnapshotAbandoned as error:
            self.failure = error

    def rows(self) -> dict[int, dict[Row, tuple[int, int, np.ndarray]]]:
        """What came, once it is through: by lane, table and id, the ordinal, the tag and the value; each row came once."""
        self.join(DEADLINE_SECONDS)
        assert not self.is_alive()
        assert self.failure is None
        found: dict[int, dict[Row, tuple[int, int, np.ndarray]]] = {lane: {} for lane in LANES}
        for block in self.blocks:
            values = np.concatenate([block.weights, block.state], axis=1)
            for i in range(len(block)):
                row = int(block.table[i]), int(block.id[i])
                assert row not in found[block.lane]
                found[block.lane][row] = int(block.ordinal[i]), int(block.tag[i]), values[i]
        return found


def check(
    reader: Reader,
    programs: Mapping[int, LaneProgram],
    values: Mapping[int, Mapping[Row, np.ndarray]],
    step: int,
    since: int = -1,
) -> None:
    """Every row that changed in (since, step] came as it was after the step, and no other."""
    found = reader.rows()
    for lane, program in programs.items():
        tags = {row: tag for row, tag in tags_after(program, step).items() if tag > since + 1}
        assert found[lane].keys() == tags.keys()
        for row, tag in tags.items():
            ordinal, found_tag, value = found[lane][row]
            assert (ordinal, found_tag) == (program.ordinals[row], tag)
            layout = LAYOUTS[row[0]]
            own = [*range(layout.width), *range(WIDTH, WIDTH + layout.state_width)]
            assert value[own].tobytes() == values[lane][row][own].tobytes()


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStores]:
    """Three servers."""
    with LocalStores(3, tmp_path_factory.mktemp("three")) as stores:
        yield stores


def train(
    servers: LocalStores,
    log: Path,
    r: int,
    programs: dict[int, LaneProgram],
    behind: Callable[[Training, int], None],
    **options: object,
) -> Training:
    """Train the programs on emptied servers; behind: called behind every step."""
    with Store(servers.urls, timedelta(seconds=10)) as store:
        for shard in range(3):
            store.command(shard, "FLUSHALL")
        claim(store, "t", {"run": "x"}, "new")
        placement = Placement.spread(3, 2, 1) if r else Placement.spread(3)
        stored = StoredRows(store, placement, LAYOUTS, "t")
        plans = [LanePlan(lane, plan(program)) for lane, program in programs.items()]
        owner = Ownership(0, {"run": "x"})
        with serving(stored, plans, SEED, lead_events=3, log=FileLog(log), ownership=owner, **options) as traffic:
            training = Training(traffic, r > 0, programs)
            training.after_step = lambda step: behind(training, step)
            training.run()
            behind(training, STEPS)
        return training


@pytest.fixture
def programs(request: pytest.FixtureRequest) -> dict[int, LaneProgram]:
    """The lanes' programs, of which many rows leave and return."""
    return {lane: make_program(lane + 90, STEPS) for lane in LANES}


class Gate:
    """Lets the store be asked for one chunk of a row or some at a time, when told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
        self.chunks = 0
        monkeypatch.setattr(snapshots, "CHUNK_ROWS", rows)
        fetches = Snapshot.fetches

        def gated(snapshot: Snapshot) -> list[object]:
            if self.chunks <= 0:
                return []
            asked = fetches(snapshot)
            self.chunks -= bool(asked)
            return asked  # type: ignore[return-value]

        monkeypatch.setattr(Snapshot, "fetches", gated)
        delay = Snapshot.delay
        monkeypatch.setattr(Snapshot, "delay", lambda snapshot: delay(snapshot) if self.chunks > 0 else None)

    def open(self, traffic: Traffic, chunks: int) -> None:
        """Let through so many more."""
        self.chunks += chunks
        traffic._monitor.wake()

    def finish(self, traffic: Traffic, reader: Reader) -> None:
        """Let all through, at once, and wait until it is read."""
        reader.snapshot.throttled = False
        self.open(traffic, 1 << 30)
        reader.join(DEADLINE_SECONDS)


@pytest.mark.parametrize("r", [0, 1], ids=["off", "2+1"])
@pytest.mark.parametrize("at", [0, 5, 11, 17])
@pytest.mark.parametrize("pace", [0, 1, 3, 40])
def test_what_is_written_before_it_is_read_is_taken_as_it_was(
    servers: LocalStores,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    programs: dict[int, LaneProgram],
    r: int,
    at: int,
    pace: int,
) -> None:
    gate = Gate(monkeypatch, 2)
    readers: list[Reader] = []
    values: list[dict[int, dict[Row, np.ndarray]]] = []

    def behind(training: Training, step: int) -> None:
        if step == at:
            values.append(training.values())
            readers.append(Reader(training.begin(step)))
            readers[0].wants(None)
        elif readers and step < STEPS:
            gate.open(training.traffic, pace)
        elif step == STEPS:
            gate.finish(training.traffic, readers[0])

    train(servers, tmp_path / "log", r, programs, behind)
    check(readers[0], programs, values[0], at)


@pytest.mark.parametrize("at", [5, 11])
def test_what_a_round_has_brought_as_a_snapshot_begins_is_staged_or_passes_through_it(
    servers: LocalStores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, programs: dict[int, LaneProgram], at: int
) -> None:
    gate = Gate(monkeypatch, 2)
    readers: list[Reader] = []
    values: list[dict[int, dict[Row, np.ndarray]]] = []
    wanted, brought, begun = threading.Event(), threading.Event(), threading.Event()
    receive = snapshots.Snapshots.receive

    def received(self: snapshots.Snapshots, fetched: list[PlannedFetch]) -> Sequence[PlannedFetch]:
        own = receive(self, fetched)
        if wanted.is_set() and not brought.is_set() and len(own):
            brought.set()
            begun.wait(0.5)  # it cannot begin right now
        return own

    monkeypatch.setattr(snapshots.Snapshots, "receive", received)

    def behind(training: Training, step: int) -> None:
        if step == at - 1:
            wanted.set()
        if step == at:
            assert brought.wait(DEADLINE_SECONDS)
            values.append(training.values())
            readers.append(Reader(training.begin(step)))
            begun.set()
            readers[0].wants(None)
        elif step == STEPS:
            gate.finish(training.traffic, readers[0])

    train(servers, tmp_path / "log", 0, programs, behind)
    check(readers[0], programs, values[0], at)


@pytest.mark.parametrize("r", [0, 1], ids=["off", "2+1"])
@pytest.mark.parametrize(("since", "at"), [(3, 9), (0, 20), (15, 16)])
def test_of_rows_that_did_not_change_since_a_step_none_is_taken(
    servers: LocalStores, tmp_path: Path, programs: dict[int, LaneProgram], r: int, since: int, at: int
) -> None:
    readers: list[Reader] = []
    values: list[dict[int, dict[Row, np.ndarray]]] = []

    def changed(snapshot: Snapshot, lane: int) -> np.ndarray:
        starts, program = snapshot.starts(lane), programs[lane]
        mask = np.zeros(starts[-1], bool)
        for row, tag in tags_after(program, at).items():
            mask[starts[row[0]] + program.ordinals[row]] = tag > since + 1
        return mask

    def behind(training: Training, step: int) -> None:
        if step == at:
            values.append(training.values())
            readers.append(Reader(training.begin(step), since))
        elif step == min(at + 3, STEPS):
            readers[0].wants({lane: changed(readers[0].snapshot, lane) for lane in LANES})
        if step == STEPS:
            readers[0].snapshot.throttled = False
            training.traffic._monitor.wake()
            readers[0].join(DEADLINE_SECONDS)

    train(servers, tmp_path / "log", r, programs, behind)
    check(readers[0], programs, values[0], at, since)


def test_what_is_on_its_way_to_the_store_is_read_when_it_is_there(servers: LocalStores) -> None:
    blocked = threading.Event()
    with Store(servers.urls, timedelta(seconds=10)) as store:
        for shard in range(3):
            store.command(shard, "FLUSHALL")
        stored = StoredRows(store, Placement.spread(3), LAYOUTS, "t")
        with serving(stored, [LanePlan(0, iter(()))], SEED) as traffic:
            traffic.write_back(0, 1, ending(5, 4, value=4.0))
            traffic.flush()
            traffic._monitor.post(lambda: assert_set(blocked))
            traffic.write_back(0, 2, ending(5, 8, value=8.0, stored=4))
            given = np.zeros(len(LAYOUTS), np.int64)
            given[1] = 5
            nothing = ending(0, 1)
            held = SlotRows(*nothing.columns(), nothing.weights, nothing.state)
            snapshot = traffic.snapshots.begin(7, {0: (held, given)})
            snapshot.want()
            blocked.set()
            (rows,) = (rows for rows in snapshot.rows() if len(rows))
    assert rows.tag.tolist() == [8] * 5
    assert (rows.weights[:, : LAYOUTS[1].width] == 8.0).all()


def assert_set(event: threading.Event) -> None:
    """Wait for an event."""
    assert event.wait(DEADLINE_SECONDS)


@pytest.mark.parametrize("at", [4, 12])
def test_rows_of_a_lost_shard_are_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, programs: dict[int, LaneProgram], at: int
) -> None:
    gate = Gate(monkeypatch, 3)
    readers: list[Reader] = []
    values: list[dict[int, dict[Row, np.ndarray]]] = []
    with LocalStores(3, tmp_path / "stores") as stores:

        def behind(training: Training, step: int) -> None:
            if step == at:
                values.append(training.values())
                readers.append(Reader(training.begin(step)))
                readers[0].wants(None)
            elif step == at + 1:
                kill(stores, 1)
            elif readers and step < STEPS:
                gate.open(training.traffic, 1)
            elif step == STEPS:
                gate.finish(training.traffic, readers[0])

        train(stores, tmp_path / "log", 1, programs, behind)
    check(readers[0], programs, values[0], at)


def test_a_lane_that_goes_a_further_snapshot_or_the_end_abandons_it(
    servers: LocalStores, tmp_path: Path, programs: dict[int, LaneProgram]
) -> None:
    readers: list[Reader] = []

    def behind(training: Training, step: int) -> None:
        if step in (3, 5, 7):
            readers.append(Reader(training.begin(step)))  # never told that it may ask the store
        if step == 7:
            training.traffic.replan(
                LANES[0], ((i, e.arrivals) for i, e in enumerate(programs[LANES[0]].events) if i > index_of(programs, 7))
            )
        if step == 9:
            readers.append(Reader(training.begin(step)))

    train(servers, tmp_path / "log", 0, programs, behind)
    for reader in readers:
        reader.join(DEADLINE_SECONDS)
    why = [str(reader.failure) for reader in readers]
    assert why == ["another snapshot began", "another snapshot began", "the trainer's lanes change", "training is over"]


def index_of(programs: Mapping[int, LaneProgram], step: int) -> int:
    """The number of the event of a step in the first lane."""
    return next(i for i, event in enumerate(programs[LANES[0]].events) if event.step == step)
