"""What a schedule says of every row by lane, table and ordinal: its id, and the tags that it may have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

import numpy as np

from foreload.base.files import read_json, write_json
from foreload.cache.repair.scrub import MAY, MUST, TableRows
from foreload.pipelines.schedule.kept import ordinals_after
from foreload.pipelines.schedule.reader import Schedule

_EXPECTED = np.dtype([("id", np.int64), ("tag", np.int32)])
_ORDINALS = "ordinals.json"


def given_ordinals(schedule: Schedule, step: int | None) -> np.ndarray:
    """How many ordinals a schedule has given after a step, at its end where that is None: int64 [lanes, tables]."""
    return ordinals_after(schedule, schedule.header.end_step - 1 if step is None else step)


def table_rows(schedule: Schedule, step: int | None, ordinals: np.ndarray) -> Iterator[tuple[int, TableRows]]:
    """What is known of each lane's rows, table by table; some 14 bytes a row of one table are held.

    ordinals: as given_ordinals has them. step: after which all rows were written back; None: unknown, any row may or may not be there. A
    row's last change is known where it lies before that step.
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
    """Write the ids and last tags of all rows of a complete schedule, for MappedRows: 12 bytes a row."""
    ordinals = given_ordinals(schedule, None)
    starts = np.cumsum(ordinals, axis=1) - ordinals
    # A mapped file cannot be empty.
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
    """The ExpectedRows that `write_expected_rows` wrote, for some lanes; its files may be deleted while it is used. Raises OSError, ValueError."""

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
