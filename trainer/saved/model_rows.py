"""Read a trained model's rows from the store, and check them against the schedule.

Each row must have its id, and a tag that it may have.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np

from foreload.base.files import read_json, write_json
from foreload.cache.protocol.shards.reading import Expected, StoredRows, read_rows
from foreload.cache.repair.scrub import MAY, MUST, TableRows
from foreload.cache.rows.staging import Rows, put_rows
from foreload.pipelines.schedule.format import RowColumns
from foreload.pipelines.schedule.kept import ordinals_after
from foreload.pipelines.schedule.reader import Schedule


@dataclass(frozen=True, slots=True)
class ModelRows:
    """Rows of one table.

    Attributes:
        table: The number of the table.
        ids: int64 [n], ascending.
        tags: int32 [n].
        weights: float32 [n, W].
        state: float32 [n, S].
    """

    table: int
    ids: np.ndarray
    tags: np.ndarray
    weights: np.ndarray
    state: np.ndarray

    def changed_after(self, step: int) -> ModelRows:
        """Return the rows that a training step after `step` changed."""
        changed = self.tags > step + 1
        if changed.all():
            return self
        return ModelRows(self.table, self.ids[changed], self.tags[changed], self.weights[changed], self.state[changed])


class RowsByTable:
    """Splits batches of rows that come by (table, id) by table; a table may have none."""

    def __init__(self, batches: Iterator[ModelRows]) -> None:
        self._batches = batches
        self._next = next(batches, None)

    def of(self, table: int) -> Iterator[ModelRows]:
        """Yield the batches of a table.

        The caller asks for tables in order, and takes all batches of one before the next.
        """
        while self._next is not None and self._next.table == table:
            yield self._next
            self._next = next(self._batches, None)


def model_rows(
    schedule: Schedule, step: int, stored: StoredRows, last_batches: Sequence[int] | None = None, since: int | None = None
) -> Iterator[ModelRows]:
    """Yield every row trained up to and including step `step`, by (table, id).

    The store must hold the rows as they are after a clean stop at that step.

    Args:
        schedule: The schedule, complete.
        step: The step after which the run stopped.
        stored: The rows on the store.
        last_batches: Per lane, the number of its last write-back batch, to be compared with the
            store shards. If None, it is not compared.
        since: Yield only rows that a step after this one changed; few others are read. If None, all
            are yielded.

    Raises:
        RowError: A row is missing, or is not the schedule's.
        StoreError: A store shard fails.
    """
    header = schedule.header
    # At its end a schedule has given all ordinals that its row table has.
    ordinals = None if step == header.end_step - 1 else ordinals_after(schedule, step)
    for batch in schedule.rows(1 << 16):
        if ordinals is not None:
            given = batch["ordinal"] < ordinals[batch["lane"], batch["table"]]
            batch = {name: values[given] for name, values in batch.items()}
        if since is not None:
            may_be = batch["tag"] > since + 1
            batch = {name: values[may_be] for name, values in batch.items()}
        # A batch may end one table and begin the next.
        for table in np.unique(batch["table"]):
            of_table = batch["table"] == table
            rows = _read(int(table), {name: values[of_table] for name, values in batch.items()}, step, stored, last_batches)
            yield rows if since is None else rows.changed_after(since)


def _read(
    table: int, rows: dict[str, np.ndarray], step: int, stored: StoredRows, last_batches: Sequence[int] | None
) -> ModelRows:
    layout = stored.layouts[table]
    count = len(rows["id"])
    weights, state = np.empty((count, layout.width), np.float32), np.empty((count, layout.state_width), np.float32)
    last_changes = np.empty(count, np.int32)
    tags = np.minimum(rows["tag"], step + 1)
    # The row table has a row's last change in the whole schedule. For a row that changes after
    # `step`, the last change up to `step` is therefore not known.
    tag_is_known = tags == rows["tag"]
    for lane in np.unique(rows["lane"]):
        places = np.flatnonzero(rows["lane"] == lane)
        expected = RowColumns(rows["table"][places], rows["ordinal"][places], rows["id"][places], tags[places])
        last_batch = None if last_batches is None else last_batches[lane]
        stored_rows = lane_rows(stored, int(lane), expected, tag_is_known[places], last_batch)
        weights[places] = stored_rows.weights[:, : layout.width]
        state[places] = stored_rows.state[:, : layout.state_width]
        last_changes[places] = stored_rows.tag
    return ModelRows(table, rows["id"], last_changes, weights, state)


def lane_rows(stored: StoredRows, lane: int, expected: RowColumns, exact: np.ndarray, last_batch: int | None = None) -> Rows:
    """Return rows of a lane as the store has them, in the order of `expected`.

    Args:
        stored: The rows on the store.
        expected: The rows to read. Their tags are the latest that they may have.
        exact: bool [n], whether a row must have exactly that tag.
        last_batch: As for `read_rows`.

    Raises:
        RowError: A row is missing, or is not the expected one.
        StoreError: A store shard fails.
    """
    rows = Rows.zeros(len(expected), stored.shapes)
    for known in (True, False):
        places = np.flatnonzero(exact == known)
        if places.size:
            read = read_rows(stored, Expected(*expected.columns(places), lane, tag_at_most=not known), last_batch)
            put_rows(read.weights, places, rows.weights)
            put_rows(read.state, places, rows.state)
            rows.tag[places] = read.tag
    return rows


_EXPECTED = np.dtype([("id", np.int64), ("tag", np.int32)])
_ORDINALS = "ordinals.json"


def given_ordinals(schedule: Schedule, step: int | None) -> np.ndarray:
    """Return how many ordinals a schedule has given after a step: int64 [lanes, tables].

    Args:
        step: The step. If None, the schedule's last one.
    """
    return ordinals_after(schedule, schedule.header.end_step - 1 if step is None else step)


def table_rows(schedule: Schedule, step: int | None, ordinals: np.ndarray) -> Iterator[tuple[int, TableRows]]:
    """Yield what is known of each lane's rows, table by table.

    About 14 bytes per row of one table are held. A row's tag is exact if its last change lies
    before or at `step`.

    Args:
        step: The step after which all rows were written back. If None, that is not known, and any
            row may or may not exist.
        ordinals: As `given_ordinals` returns them.

    Yields:
        The lane, and the rows of one of its tables, by ordinal.
    """

    def pieces() -> Iterator[tuple[int, dict[str, np.ndarray]]]:
        for batch in schedule.rows():
            for table in np.unique(batch["table"]).tolist():
                of_table = batch["table"] == table
                yield table, {name: values[of_table] for name, values in batch.items()}

    for table, of_table in groupby(pieces(), key=lambda piece: piece[0]):
        ids = [np.zeros(count, np.int64) for count in ordinals[:, table]]
        last = [np.zeros(count, np.int32) for count in ordinals[:, table]]
        for _, rows in of_table:
            for lane in np.unique(rows["lane"]).tolist():
                own = (rows["lane"] == lane) & (rows["ordinal"] < ordinals[lane, table])
                ids[lane][rows["ordinal"][own]] = rows["id"][own]
                last[lane][rows["ordinal"][own]] = rows["tag"][own]
        for lane in range(len(ordinals)):
            exact = np.zeros(len(last[lane]), bool) if step is None else last[lane] <= step + 1
            latest = last[lane] if step is None else np.minimum(last[lane], step + 1)
            presence = np.full(len(latest), MAY if step is None else MUST, np.uint8)
            yield lane, TableRows(table, presence, ids[lane], latest, exact)


def write_expected_rows(schedule: Schedule, directory: Path) -> None:
    """Write the ids and last tags of all rows of a complete schedule, for `MappedRows`.

    The files have 12 bytes per row.
    """
    ordinals = given_ordinals(schedule, None)
    starts = np.cumsum(ordinals, axis=1) - ordinals
    # An empty file cannot be mapped, so each has one row at least.
    files = [
        np.lib.format.open_memmap(directory / f"lane-{lane}.npy", "w+", _EXPECTED, (max(int(own.sum()), 1),))
        for lane, own in enumerate(ordinals)
    ]
    for lane, rows in table_rows(schedule, None, ordinals):
        start = starts[lane, rows.table]
        files[lane]["id"][start : start + len(rows.id)] = rows.id
        files[lane]["tag"][start : start + len(rows.id)] = rows.tag
    for file in files:
        file.flush()
    write_json(directory / _ORDINALS, ordinals.tolist())


class MappedRows:
    """The ExpectedRows that `write_expected_rows` wrote, for some lanes.

    The files may be deleted while they are used. Raises OSError and ValueError.
    """

    def __init__(self, directory: Path, lanes: Sequence[int]) -> None:
        self._ordinals = np.array(read_json(directory / _ORDINALS, list[list[int]]), np.int64)
        self._starts = np.cumsum(self._ordinals, axis=1) - self._ordinals
        self._files = {lane: np.load(directory / f"lane-{lane}.npy", mmap_mode="r") for lane in lanes}

    def of(self, lane: int, table: int, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """See ExpectedRows."""
        ids, tags = np.zeros(count, np.int64), np.zeros(count, np.int32)
        there = max(min(count, int(self._ordinals[lane, table]) - first), 0)
        start = int(self._starts[lane, table]) + first
        ids[:there] = self._files[lane]["id"][start : start + there]
        tags[:there] = self._files[lane]["tag"][start : start + there]
        return ids, tags
