"""Save a checkpoint of a stopped run.

Its rows are read from the store by lane, table and ordinal. Then come its dense part and, last, the
manifest.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from foreload.cache.repair.scrub import TableRows
from foreload.pipelines.schedule.format import RowColumns
from foreload.pipelines.schedule.kept import POSITION
from foreload.trainer.checkpoints.changed_rows import changed_rows
from foreload.trainer.checkpoints.contents import DENSE, Checkpoint, Contents
from foreload.trainer.checkpoints.draft import published
from foreload.trainer.checkpoints.files import EXACT_BITS
from foreload.trainer.checkpoints.lineage import Increment
from foreload.trainer.checkpoints.row_files import CheckpointRows, RowSink, rows_of_a_file, write_file
from foreload.trainer.errors import CheckpointError
from foreload.trainer.saved.model_rows import given_ordinals, lane_rows, table_rows
from foreload.trainer.saved.stopped_run import StoppedRun
from foreload.trainer.storage import AnyFolder


def save(
    saved: StoppedRun,
    folder: AnyFolder,
    on_rows: Callable[[int, int], object],
    bits: int = EXACT_BITS,
    increment: Increment | None = None,
) -> Checkpoint:
    """Write a checkpoint of a stopped run into a folder of checkpoints, as `published` does.

    Args:
        folder: The folder of checkpoints.
        on_rows: Called with the number of rows just looked at, and the number of all rows.
        bits: Bits per weight; see `write_rows`.
        increment: Which increment to write. If None, the checkpoint has all rows.

    Raises:
        CheckpointError: The checkpoint cannot be written, or its base was deleted. Reading the
            store raises its own errors.
    """
    base, sizes = (None, ()) if increment is None else (increment.base, increment.sizes)
    manifest, step = saved.manifest, saved.status.step

    def write(temporary: AnyFolder) -> Contents:
        if base is not None and not base.files_there:
            raise CheckpointError(
                f"checkpoint {base.place}: was deleted while an increment of it was being saved; save the increment again"
            )
        # Called because it raises if the dense part is damaged or belongs to another step.
        saved.dense()
        dense = write_file(temporary, DENSE, saved.run.dense(step).read_bytes())
        ordinals = given_ordinals(saved.schedule, step)
        on_rows(0, int(ordinals.sum()))
        sink = RowSink(temporary, saved.layouts, bits, () if base is None else base.contents.ordinals)
        _write_rows(saved, sink, ordinals, base, on_rows)
        encoded = saved.features, saved.encoding
        return Contents.made(
            manifest, *encoded, step, saved.status.totals, saved.layouts, ordinals, sink.files, dense, base, sizes
        )

    return published(folder, "--to", step, write, manifest.run_id)


def _write_rows(
    saved: StoppedRun, sink: RowSink, ordinals: np.ndarray, base: Checkpoint | None, on_rows: Callable[[int, int], object]
) -> None:
    """Read the rows changed since the base, or all rows, from the store, and write them.

    The files depend on the rows alone, not on the pieces in which they are read.
    """
    step, total = saved.status.step, int(ordinals.sum())
    since = None if base is None else base.contents.step
    known = None
    # The moves between the base and `step` say which rows changed. They are not available if the
    # base lies before this schedule, or if this is only what the run keeps of its schedule.
    asked = not (saved.schedule.path / POSITION).exists()
    if since is not None and asked and since >= saved.schedule.header.first_step - 1:
        known = changed_rows(saved.schedule, since, step)
    for lane, rows in table_rows(saved.schedule, step, ordinals):
        places = np.arange(len(rows.id))
        if since is not None:
            # The row table has a row's last change in the whole schedule. For a row that changes
            # after `step` as well (not `exact`), only the moves show whether it changed since the
            # base. Without them, such rows are read, and their stored tags decide.
            changed = ~rows.exact if known is None else known[lane][rows.table]
            places = np.flatnonzero(changed | (rows.exact & (rows.tag > since + 1)))
        on_rows(len(rows.id) - len(places), total)
        # Writing only full files here cuts the files at the same rows however many of the rows read
        # turn out not to have changed.
        most = rows_of_a_file(saved.layouts[rows.table])
        for first in range(0, len(places), most):
            some = places[first : first + most]
            read = _read(saved, lane, some, rows)
            new = slice(None) if since is None else read.tag > since + 1
            on_rows(len(some), total)
            sink.add(lane, rows.table, some[new], read.part(new))
            sink.write(lane, rows.table, only_full_files=True)
        sink.write(lane, rows.table)


def _read(saved: StoppedRun, lane: int, ordinals: np.ndarray, rows: TableRows) -> CheckpointRows:
    layout = saved.layouts[rows.table]
    table = np.full(len(ordinals), rows.table, np.int16)
    expected = RowColumns(table, ordinals, rows.id[ordinals], rows.tag[ordinals])
    stored = lane_rows(saved.stored, lane, expected, rows.exact[ordinals], saved.status.last_batches[lane])
    return CheckpointRows(expected.id, stored.tag, stored.weights[:, : layout.width], stored.state[:, : layout.state_width])
