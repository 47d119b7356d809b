"""Files of rows of a checkpoint: whatever the order and the pieces in which rows are written and read, each is there once, as it was."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from foreload.cache.rows.layout import RowLayout
from foreload.trainer.checkpoints import row_files
from foreload.trainer.checkpoints.row_files import CheckpointRows, OpenRows, RowSink, rows_of_a_file, write_rows


@pytest.mark.parametrize("most_bytes", [0, 3000, 1 << 20])
def test_rows_that_come_in_any_order_and_pieces_are_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_bytes: int
) -> None:
    monkeypatch.setattr(row_files, "FILE_BYTES", 1500)  # some 50 rows
    random, count = np.random.default_rng(3), 400
    layouts = [RowLayout(table, f"table {table}", 1000, (("weights", 3),), "adagrad") for table in range(2)]
    weights, state = random.normal(size=(2, 2, count, 3)).astype(np.float32)
    sink = RowSink(tmp_path, layouts)
    for place in random.permutation(2 * count).reshape(-1, 20):
        for table in range(2):
            some = place[place // count == table] % count
            rows = CheckpointRows(some + 7, some.astype(np.int32) + 1, weights[table, some], state[table, some])
            sink.add(5, table, some, rows)
        while sink.held_bytes > most_bytes:
            sink.write_largest()
    sink.write_all()
    assert sink.held_bytes == 0
    assert len({file.name for file in sink.files}) == len(sink.files)
    for table, layout in enumerate(layouts):
        files = [file for file in sink.files if (file.lane, file.table) == (5, table)]
        opened = [OpenRows(pa.py_buffer((tmp_path / file.name).read_bytes()), file, layout) for file in files]
        ordinals = np.concatenate([one.ordinals for one in opened])
        read = CheckpointRows.joined([one.part(0, file.rows) for one, file in zip(opened, files, strict=True)])
        assert np.array_equal(np.sort(ordinals), np.arange(count))
        assert np.array_equal(read.id, ordinals + 7)
        assert np.array_equal(read.tag, ordinals + 1)
        assert np.array_equal(read.weights, weights[table, ordinals])
        assert np.array_equal(read.state, state[table, ordinals])
        if most_bytes == 1 << 20:  # all were held to the end
            assert all(file.gapless and file.rows == rows_of_a_file(layout) for file in files[:-1])


@pytest.mark.parametrize("bits", [32, 8, 4, 3, 2])
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_rows_are_read_in_any_pieces_as_they_were_written(tmp_path: Path, bits: int, optimizer: str) -> None:
    random = np.random.default_rng(bits)
    layout = RowLayout(3, "table", 1000, (("weights", 5), ("bias", 1)), optimizer)
    count = 70_000  # more than are decoded at once
    ordinals = np.sort(random.choice(200_000, count, replace=False)).astype(np.int64)
    weights, state = random.normal(size=(2, count, 6)).astype(np.float32)
    weights[::1000, 2] = np.nan
    ids = random.integers(0, 1 << 40, count)
    rows = CheckpointRows(ids, random.integers(1, 99, count).astype(np.int32), weights, state[:, : layout.state_width])
    file = write_rows(tmp_path, 1, layout, ordinals, rows, bits, known=150_000)
    assert (file.first, file.last, file.rows, file.gapless) == (ordinals[0], ordinals[-1], count, False)
    opened = OpenRows(pa.py_buffer((tmp_path / file.name).read_bytes()), file, layout)
    assert np.array_equal(opened.ordinals, ordinals)
    cuts = [0, 1, 65_530, 65_540, 65_541, count]
    read = CheckpointRows.joined([opened.part(first, end) for first, end in pairwise(cuts)])
    assert np.array_equal(read.id, np.where(ordinals < 150_000, -1, ids))
    assert np.array_equal(read.tag, rows.tag)
    assert np.array_equal(read.state, rows.state)
    exact = slice(None) if bits == 32 else slice(None, None, 1000)
    assert np.array_equal(read.weights[exact], weights[exact], equal_nan=True)
    assert np.isfinite(np.delete(read.weights, np.arange(0, count, 1000), axis=0)).all()
