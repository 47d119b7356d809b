"""What a trainer does to a traffic, and what is then on the servers: for tests over the programs of `lane_program`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta

import numpy as np
from lane_program import EVALUATION_SLOTS, LAYOUTS, SLOTS, STATE_WIDTH, WIDTH, LaneProgram, Truth, train_slots, values

from foreload.cache.client.store import Read, Store, Write
from foreload.cache.errors import StoreError
from foreload.cache.protocol.shards.reading import Expected, StoredRows
from foreload.cache.rows.partition import Partition
from foreload.cache.rows.staging import EndedRows
from foreload.cache.traffic import Traffic
from foreload.pipelines.schedule.format import Arrivals


class Recording(Store):
    """A Store that notes each exchange, and may leave rows out of what it writes.

    drop: (rows written before, field, how often that was written before) -> whether it is left out of an exchange without parity.
    """

    def __init__(self, urls: Sequence[object]) -> None:
        super().__init__(urls, timedelta(seconds=10))  # type: ignore[arg-type]
        self.exchanges: list[tuple[list[Read], list[Write]]] = []
        self.drop: Callable[[int, int, int], bool] | None = None
        self._written: list[int] = []

    def attempt(self, reads: Sequence[Read], writes: Sequence[Write]) -> dict[int, StoreError]:
        self.exchanges.append((list(reads), list(writes)))
        return super().attempt(reads, writes if self.drop is None else [self._kept(write) for write in writes])

    def _kept(self, write: Write) -> Write:
        """A write without what `drop` says."""
        stay = np.ones(len(write.fields), bool)
        for place, field in enumerate(write.fields.tolist() if self.drop is not None else []):
            assert self.drop is not None
            stay[place] = not self.drop(len(self._written), field, self._written.count(field))
            self._written.append(field)
        return Write(write.shard, write.key, write.fields[stay], write.rows[stay], write.marker)


def plan(program: LaneProgram) -> Iterator[tuple[int, Arrivals]]:
    """A lane's plan, as LanePlan takes it: every event's number and arrivals."""
    return ((index, event.arrivals) for index, event in enumerate(program.events))


def run_lane(traffic: Traffic, lane: int, program: LaneProgram) -> Truth:
    """Train through a program as a trainer does where there is parity, comparing every row used with the truth; flushed at the end."""
    partition, truth, last = Partition(SLOTS, EVALUATION_SLOTS, WIDTH, STATE_WIDTH, with_base=True), Truth(), -1
    for index, event in enumerate(program.events):
        if event.step is not None:
            traffic.write_back(lane, event.step, partition.end(event.ends))
            last = event.step
        partition.admit(event.arrivals, traffic.take(lane, index))
        assert np.array_equal(values(partition, event.slots), truth.of(event.rows))
        if event.step is not None:
            train_slots(partition, event.slots, event.step)
            truth.train(event.rows, event.step)
    traffic.write_back(lane, last + 1, partition.end(program.final_ends))
    traffic.flush()
    return truth


def expected_rows(lane: int, program: LaneProgram) -> tuple[Expected, list[tuple[int, int]]]:
    """Every row that a program trains, as it must be in the store once the program is through; and its (table, id)."""
    names = sorted(program.tags)
    table, ids = np.array([table for table, _ in names], np.int16), np.array([id for _, id in names], np.int64)
    ordinals = np.array([program.ordinals[name] for name in names], np.int64)
    return Expected(table, ordinals, ids, np.array([program.tags[name] for name in names], np.int32), lane), names


def row_counts(program: LaneProgram) -> np.ndarray:
    """How many rows each table has that a program trains: int64 [tables]."""
    return np.bincount([table for table, _ in program.tags], minlength=len(LAYOUTS))


def arriving(*rows: tuple[int, int, int, int, int]) -> Arrivals:
    """Arrivals from (table, ordinal, id, tag, after), in slots 0, 1, ..."""
    table, ordinal, ids, tag, after = (list(column) for column in zip(*rows, strict=True)) if rows else ([], [], [], [], [])
    return Arrivals(
        np.array(table, np.int16), np.array(ordinal, np.int64), np.array(ids, np.int64), np.array(tag, np.int32),
        np.arange(len(rows), dtype=np.int32), np.array(after, np.int32),
    )  # fmt: skip


def ending(count: int, tag: int, table: int = 1, value: float = 1.0, stored: int = 0) -> EndedRows:
    """Rows 0 .. count-1 of a table, id 1000 + ordinal, all weights `value`; `stored`: their tag in the store. Without base."""
    ordinal = np.arange(count, dtype=np.int64)
    return EndedRows(
        np.full(count, table, np.int16), ordinal, ordinal + 1000, np.full(count, tag, np.int32), np.full(count, stored, np.int32),
        np.full((count, WIDTH), value, np.float32), np.zeros((count, STATE_WIDTH), np.float32),
    )  # fmt: skip


def with_base(ended: EndedRows, before: EndedRows | None = None) -> EndedRows:
    """The same rows beside what the store has of them, as parity needs it: what they were at their last write-back, or nothing."""
    if before is None:
        return replace(ended, base_weights=np.zeros_like(ended.weights), base_state=np.zeros_like(ended.state))
    return replace(ended, base_weights=before.weights, base_state=before.state)


def contents(store: Store, stored: StoredRows, lane: int) -> list[dict[bytes, bytes]]:
    """Every field of a lane's hash on each shard, the marker's among them; none of a shard that is down."""
    shards: list[dict[bytes, bytes]] = []
    for shard in range(store.shards):
        pairs = [] if shard in store.down else store.command(shard, "HGETALL", stored.key(lane, shard))
        assert isinstance(pairs, list)
        shards.append(dict(zip(pairs[::2], pairs[1::2], strict=True)))
    return shards


def is_parity(field: bytes) -> bool:
    """Whether a field is a parity row's: the top bit says so."""
    return bool(field[0] & 0x80)
