"""What `foreload prepare` says of its progress, by the files that its workers leave."""

from __future__ import annotations

from pathlib import Path

from foreload.base.progress import Progress


def test_progress_tells_rows_read_then_steps_compiled(tmp_path: Path) -> None:
    begun, pieces, compiled = tmp_path / "begun", tmp_path / "pieces", tmp_path / "compiled"
    progress = Progress(begun, pieces, compiled, rows=250, piece_rows=100)
    assert progress.line() == "prepare: waiting for workers"
    begun.touch()
    assert progress.line() == "prepare: read about 0 of 250 rows"
    pieces.mkdir()
    for name in ("training-0", "training-1", "evaluation-0", "sorted-0", "training-2.tmp"):
        (pieces / name).touch()
    assert progress.line() == "prepare: read about 250 of 250 rows, ordered 1 pieces"
    compiled.mkdir()
    for name, told in (("read", "4 9 36"), ("lane-0", "8 9 36"), ("lane-1.tmp", "8 9 36")):
        (compiled / name).write_text(told)
    assert progress.line() == "prepare: compiled 3 of 9 steps"
