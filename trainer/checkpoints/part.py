"""One trainer's part of a checkpoint saved during training: the rows of its lanes, into files.

A separate thread writes them.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from foreload.base.errors import ForeloadError
from foreload.cache.protocol.rounds import snapshot
from foreload.cache.protocol.rounds.snapshot import Snapshot, TakenRows
from foreload.cache.rows.layout import RowLayout
from foreload.trainer.checkpoints.files import EXACT_BITS, PartFiles
from foreload.trainer.checkpoints.quantisation import encode
from foreload.trainer.checkpoints.row_files import CheckpointRows, RowSink, write_file

BUFFER_BYTES = 1 << 26
"""How many bytes of rows may wait for a file; beyond that, the largest table's are written."""

NICENESS = 10  # of the thread

GRACE_SECONDS = 30.0
"""How long the end of a call waits for a part that is being written."""


def warm_up(layouts: Sequence[RowLayout], bits: int) -> None:
    """Compile or load the kernels that a part needs, so that no training step waits for that."""
    snapshot.warm_up()
    if bits < EXACT_BITS:
        for layout in layouts:
            encode(np.zeros((1, layout.width), np.float32), [width for _, width in layout.parts], bits)


class PartWriter(threading.Thread):
    """Writes the rows of a snapshot into the folder of a checkpoint that is not published yet.

    When the thread has ended, either `result` or `failure` is set.

    Args:
        taken: The snapshot.
        layouts: The tables' layouts, in order.
        sink: Writes the files of rows.
        since: Only rows that changed after this step are written, as `Snapshot.want` has it.
        changed: Called for the masks of these rows, as `Snapshot.want` takes them. None if all rows
            are written.
        dense: Called for name and contents of the dense part's file. None unless the trainer leads.
        began: When the copy in memory was made, by time.monotonic().

    Attributes:
        result: The files that were written.
        failure: Why there is no result.
    """

    def __init__(
        self,
        taken: Snapshot,
        layouts: Sequence[RowLayout],
        sink: RowSink,
        since: int,
        changed: Callable[[], Mapping[int, np.ndarray]] | None,
        dense: Callable[[], tuple[str, bytes]] | None,
        began: float,
    ) -> None:
        super().__init__(name="checkpoint", daemon=True)
        self.snapshot = taken
        self._layouts, self._sink, self._since, self._changed = layouts, sink, since, changed
        self._dense, self._began = dense, began
        self.result: PartFiles | None = None
        self.failure: str | None = None

    def run(self) -> None:
        """Write all files, and set `result` or `failure`."""
        if sys.platform == "linux":
            # Training comes first. Linux has a priority for each thread.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        try:
            dense = None if self._dense is None else write_file(self._sink.folder, *self._dense())
            self.snapshot.want(self._since, None if self._changed is None else self._changed())
            for rows in self.snapshot.rows():
                self._add(rows)
                while self._sink.held_bytes > BUFFER_BYTES:
                    self._sink.write_largest()
            self._sink.write_all()
            self.result = PartFiles(tuple(self._sink.files), dense, time.monotonic() - self._began)
        # The store can raise one, and so can the schedule, from which the changed rows are
        # computed.
        except ForeloadError as error:
            self.failure = str(error)
        except OSError as error:
            self.failure = f"cannot write to {self._sink.folder.parent}: {error.strerror or error}"
        except MemoryError:
            self.failure = "there is not enough memory for it"
        finally:
            # Nothing else reads the snapshot, so the traffic must stop taking rows for it.
            if self.failure is not None:
                self.snapshot.abandon(self.failure)

    def _add(self, rows: TakenRows) -> None:
        """Hand rows to the sink, table by table."""
        for table in np.unique(rows.table).tolist():
            places, layout = np.flatnonzero(rows.table == table), self._layouts[table]
            weights, state = rows.weights[places, : layout.width], rows.state[places, : layout.state_width]
            own = CheckpointRows(rows.id[places], rows.tag[places], weights, state)
            self._sink.add(rows.lane, table, rows.ordinal[places], own)
