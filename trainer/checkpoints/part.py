"""One trainer's part of a checkpoint that is saved while it trains: the rows of its lanes, into files, in a thread of its own."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from foreload.cache.protocol import snapshot
from foreload.cache.protocol.snapshot import Snapshot, TakenRows
from foreload.cache.rows.layout import RowLayout
from foreload.pipelines.errors import ForeloadError
from foreload.trainer.checkpoints.quantisation import encode
from foreload.trainer.checkpoints.row_files import (
    EXACT_BITS,
    CheckpointRows,
    FileEntry,
    RowFile,
    rows_of_a_file,
    write_file,
    write_rows,
)
from foreload.trainer.run.storage import AnyFolder

BUFFER_BYTES = 1 << 26
"""Of rows that were taken and are in no file yet: beyond that the largest of them are written."""

NICENESS = 10  # of the thread

GRACE_SECONDS = 30.0
"""How long the end of a call waits for a part under way."""


@dataclass(frozen=True, slots=True)
class PartFiles:
    """What a trainer wrote. dense: the dense part, by the trainer that leads; seconds: from the copy on."""

    rows: tuple[RowFile, ...]
    dense: FileEntry | None
    seconds: float


@dataclass(frozen=True, slots=True)
class Increment:
    """Which rows are to be written: those that changed after step `since`; -1: all. known: by lane and table, how many ordinals the base has, none
    without one. changed: gives the rows, as `Snapshot.want` has it; None: all.
    """

    since: int
    known: Sequence[Sequence[int]]
    changed: Callable[[], Mapping[int, np.ndarray]] | None


def rehearse(layouts: Sequence[RowLayout], bits: int) -> None:
    """Compile what a part needs, or load it, so that no step waits for that."""
    snapshot.rehearse()
    if bits < EXACT_BITS:
        for layout in layouts:
            encode(np.zeros((1, layout.width), np.float32), [width for _, width in layout.parts], bits)


class PartWriter(threading.Thread):
    """Writes the rows of a snapshot into the folder of a checkpoint that is not published yet.

    bits: of a weight; dense: gives file name and contents of the dense part, where the trainer leads; on_point: told "checkpoint file written" behind
    each; began: when the copy was made, time.monotonic().
    """

    def __init__(
        self,
        taken: Snapshot,
        layouts: Sequence[RowLayout],
        folder: AnyFolder,
        bits: int,
        increment: Increment,
        dense: Callable[[], tuple[str, bytes]] | None,
        on_point: Callable[[str], None],
        began: float,
    ) -> None:
        super().__init__(name="checkpoint", daemon=True)
        self.snapshot = taken
        self._layouts, self._folder, self._bits, self._increment, self._dense = layouts, folder, bits, increment, dense
        self._on_point, self._began = on_point, began
        self._waiting: dict[tuple[int, int], list[tuple[np.ndarray, CheckpointRows]]] = {}
        self._bytes = 0
        self._written: list[RowFile] = []
        self.result: PartFiles | None = None
        self.failure: str | None = None  # why there is none

    def run(self) -> None:
        """Write all files; `result` or `failure` is there when this is over."""
        if sys.platform == "linux":
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)  # training comes first
        try:
            dense = None if self._dense is None else write_file(self._folder, *self._dense())
            changed = self._increment.changed
            self.snapshot.want(self._increment.since, None if changed is None else changed())
            for rows in self.snapshot.rows():
                self._keep(rows)
                while self._bytes > BUFFER_BYTES:
                    self._write(max(self._waiting, key=lambda place: _bytes(self._waiting[place])))
            for place in sorted(self._waiting):
                self._write(place)
            self.result = PartFiles(tuple(self._written), dense, time.monotonic() - self._began)
        except ForeloadError as error:  # of the store, or of the schedule, which tells what changed
            self.failure = str(error)
        except OSError as error:
            self.failure = f"cannot write to {self._folder.parent}: {error.strerror or error}"
        except MemoryError:
            self.failure = "there is not enough memory for it"
        finally:
            if self.failure is not None:
                self.snapshot.abandon(self.failure)

    def _keep(self, rows: TakenRows) -> None:
        """Keep rows until they are written, table by table."""
        for table in np.unique(rows.table).tolist():
            places, layout = np.flatnonzero(rows.table == table), self._layouts[table]
            weights, state = rows.weights[places, : layout.width], rows.state[places, : layout.state_width]
            own = CheckpointRows(rows.id[places], rows.tag[places], weights, state)
            self._waiting.setdefault((rows.lane, table), []).append((rows.ordinal[places], own))
            self._bytes += _bytes([(rows.ordinal, own)])

    def _write(self, place: tuple[int, int]) -> None:
        """Write what is kept of a lane's table, by ordinal."""
        kept = self._waiting.pop(place)
        self._bytes -= _bytes(kept)
        ordinals, rows = np.concatenate([ordinal for ordinal, _ in kept]), CheckpointRows.joined([own for _, own in kept])
        order, (lane, table) = np.argsort(ordinals), place
        layout, known = self._layouts[table], self._increment.known[lane][table] if self._increment.known else 0
        most = rows_of_a_file(layout)
        for first in range(0, len(order), most):
            part = order[first : first + most]
            self._written.append(write_rows(self._folder, lane, layout, ordinals[part], rows.part(part), self._bits, known))
            self._on_point("checkpoint file written")


def _bytes(kept: Sequence[tuple[np.ndarray, CheckpointRows]]) -> int:
    return sum(rows.weights.nbytes + rows.state.nbytes for _, rows in kept)
