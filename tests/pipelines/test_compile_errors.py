"""What compiling raises when reading or writing fails: the disk is blamed for what it does, and for nothing else."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from memory_source import MemorySource

from foreload.pipelines.compiler.compile import Compilation, CompileSettings
from foreload.pipelines.errors import DiskError
from foreload.pipelines.samples.features import Feature, FeatureSpec, Label, Table
from foreload.pipelines.samples.pieces import Samples
from foreload.pipelines.schedule.format import FAILED, MANIFEST

FEATURES = FeatureSpec(labels=(Label("y", "y"),), dense=(), features=(Feature("f", 0, "f", "id"),), tables=(Table("f", 10),))


@dataclass(frozen=True)
class BreakingSource(MemorySource):
    """A source that raises after its first chunk."""

    error: BaseException

    def training(self, epoch: int) -> Iterator[tuple[Samples, np.ndarray]]:
        for chunk in super().training(epoch):
            yield chunk
            raise self.error


def compile_and_break(tmp_path: Path, error: BaseException) -> None:
    ids = np.arange(8) % 5
    samples = Samples(np.zeros((8, 1), np.float32), np.zeros((8, 0), np.float32), ids)
    source = BreakingSource(samples, samples.slice(0, 0), 4, None, error)
    try:
        Compilation(CompileSettings(FEATURES, batch_size=2, lanes=1, slots=6), tmp_path).compile(source, tmp_path)
    finally:
        assert not (tmp_path / MANIFEST).exists()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_told_as_that(tmp_path: Path, number: int) -> None:
    with pytest.raises(DiskError, match=f"--out {tmp_path}: the disk is full; free space or choose another folder"):
        compile_and_break(tmp_path, OSError(number, os.strerror(number)))
    assert "the disk is full" in json.loads((tmp_path / FAILED).read_text())["error"]


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS])
def test_a_disk_that_fails_is_told_with_what_it_said(tmp_path: Path, number: int) -> None:
    with pytest.raises(DiskError, match=f"--out {tmp_path}: the disk must let itself be written; got .*{os.strerror(number)}"):
        compile_and_break(tmp_path, OSError(number, os.strerror(number)))


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(errno.ENOENT, "No such file or directory", "piece"),
        ConnectionResetError(errno.ECONNRESET, "reset"),
        OSError(errno.EMFILE, "Too many open files"),
        pa.ArrowInvalid("another schema"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_the_disk_is_not_to_blame_for_is_raised_as_it_is(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)) as raised:
        compile_and_break(tmp_path, error)
    assert raised.value is error
    assert json.loads((tmp_path / FAILED).read_text()) == {"error": str(error)}


@pytest.mark.parametrize("planned", [1, 3])
def test_where_planning_is_broken_off_every_lane_ends(tmp_path: Path, planned: int) -> None:
    """planned: of how many segments of any lane, before that."""
    ids = np.arange(64) % 10
    samples = Samples(np.zeros((64, 1), np.float32), np.zeros((64, 0), np.float32), ids)
    source = MemorySource(samples, samples.slice(0, 0), 4, None)
    settings = CompileSettings(FEATURES, batch_size=2, lanes=4, slots=6, segment_bytes=1, threads=4)
    after: list[int] = []

    def progress(done: int, total: int) -> None:
        # Steps are told of as they are read, which is half of the work, and planned.
        after.extend([done] if done > total // 2 else [])
        if len(after) >= planned:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Compilation(settings, tmp_path).compile(source, tmp_path, progress)
    assert not (tmp_path / MANIFEST).exists()
    # Those that were on their way to telling as the first one met it.
    assert planned <= len(after) < planned + settings.lanes
