"""A run keeps what its model is read by: the schedule may be moved, deleted or prepared over."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from clicks import Clicks
from command_line import SMALL, done, refused

from foreload.pipelines.errors import ScheduleError
from foreload.pipelines.schedule.kept import (
    keep,
    last_occupants,
    note_position,
    ordinals_after,
)
from foreload.pipelines.schedule.reader import Schedule
from foreload.pipelines.schedule.walk import state_after


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> Clicks:
    """A schedule of 2 epochs of 22 steps in several segments, evaluation after each."""
    return Clicks.prepare(tmp_path_factory.mktemp("clicks"), batch_size=50, slots=60)


def models(run: Path, out: Path) -> list[object]:
    """What every command that reads a run's model tells of it; out: a folder for the export."""
    told: list[object] = [done(command, run) for command in ("digest", "evaluate")]
    done("export", run, "--out", out)
    told += [(path.name, pq.read_table(path)) for path in sorted(out.glob("*.parquet"))]
    return [*told, done("stores", "status", run)]


def test_a_model_is_read_though_its_schedule_is_gone_or_another_one(clicks: Clicks, tmp_path: Path) -> None:
    schedule, run = clicks.copy(tmp_path / "schedule"), tmp_path / "run"
    done("train", schedule, "--run", run, "--store", "local:3", *SMALL)
    before = models(run, tmp_path / "before")
    elsewhere = schedule.rename(tmp_path / "elsewhere")
    assert models(run, tmp_path / "gone") == before
    assert done("evaluate", run, elsewhere) == before[1]
    done("scrub", run)
    line = refused("train", "--run", run, "--resume")
    assert line.startswith(f"run {run}: to go on, it needs its whole schedule")
    assert line.endswith(f"or name the folder that has it now: foreload train SCHEDULE --run {run} --resume")
    assert "is at the end of" in refused("train", elsewhere, "--run", run, "--resume")
    # Prepared over twice: what stands there is another schedule, and then yet another.
    for seed in (1, 2):
        done("prepare", clicks.log, *clicks.options(schedule, batch_size=50, slots=60, shuffle_seed=seed), "--overwrite")
        assert models(run, tmp_path / f"over-{seed}") == before
    assert "is not the one that the run was trained on: it was prepared in its place" in refused(
        "train", "--run", run, "--resume"
    )
    shutil.rmtree(run / "kept")
    assert refused("digest", run).endswith(
        f"needs the schedule that it was trained on: {schedule} is now a different schedule; put that one back"
    )


def link_across_file_systems(source: Path, target: Path) -> None:
    """What os.link does where the run's folder is on another file system than the schedule."""
    raise OSError(errno.EXDEV, "another file system")


@pytest.mark.parametrize("link", [os.link, link_across_file_systems])
def test_what_is_kept_tells_of_every_step_what_the_schedule_tells(
    clicks: Clicks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, link: Callable[[Path, Path], None]
) -> None:
    monkeypatch.setattr(os, "link", link)
    whole, folder = Schedule(clicks.schedule), tmp_path / "run" / "kept"
    folder.parent.mkdir()
    keep(whole, folder)
    for step in range(-1, whole.header.end_step):
        note_position(whole, folder, step)
        kept = Schedule(folder)
        assert kept.checksum == whole.checksum
        expected = np.array([lane.ordinals for lane in state_after(whole, step).lanes])
        np.testing.assert_array_equal(ordinals_after(whole, step), expected)
        np.testing.assert_array_equal(ordinals_after(kept, step), expected)
    for lane, (tables, ids) in zip(state_after(whole, step).lanes, last_occupants(kept), strict=True):
        np.testing.assert_array_equal(lane.occupants.table, tables)
        np.testing.assert_array_equal(lane.occupants.id, ids)
    assert [path.name for path in folder.iterdir() if path.name.startswith("samples")] == [], "training samples are not kept"


def test_what_cannot_be_kept_whole_is_not_kept(clicks: Clicks, tmp_path: Path) -> None:
    copy = clicks.copy(tmp_path / "copy")
    (copy / "rows.arrow").unlink()
    with pytest.raises(OSError, match="No such file"):
        keep(Schedule(copy), tmp_path / "kept")
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


def test_a_damaged_note_of_what_is_kept_is_named(clicks: Clicks, tmp_path: Path) -> None:
    whole = Schedule(clicks.schedule)
    keep(whole, tmp_path / "kept")
    note_position(whole, tmp_path / "kept", 3)
    (tmp_path / "kept" / "position.json").write_text("{}")
    with pytest.raises(ScheduleError, match=r"position\.json: cannot be read"):
        ordinals_after(Schedule(tmp_path / "kept"), 3)
