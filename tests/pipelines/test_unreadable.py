"""Files of a schedule that are there and cannot be read: the remedy is for what is wrong, and the schedule is not to be prepared again for it."""

from __future__ import annotations

import errno
import os
import pathlib
from pathlib import Path
from typing import Any

import pytest

from foreload.pipelines import prepare
from foreload.pipelines.errors import ScheduleError
from foreload.pipelines.schedule.reader import Schedule


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("schedule") / "clicks"
    prepare.run(f"--format synthetic --rows 300 --batch-size 50 --lanes 1 --out {out}".split())
    return out


def _read(path: Path) -> None:
    schedule = Schedule(path)
    for event in schedule.events():
        schedule.lane(event, 0)


@pytest.mark.parametrize(
    ("number", "helps"),
    [
        (errno.EMFILE, "raise the limit of open files (ulimit -n), then try again"),
        (errno.EACCES, "let this user read it, then try again"),
        (errno.EIO, "its disk fails: see the system's log; try again once the file can be read"),
        (errno.ENOMEM, "free memory, then try again"),
    ],
)
@pytest.mark.parametrize("name", ["schedule.json", "header.json", "segment-*.json", "moves-*.arrow", "samples-*.arrow"])
def test_what_helps_is_said(clicks: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int, helps: str) -> None:
    _read(clicks)
    opened, read = pathlib.Path.open, pathlib.Path.read_bytes

    def refused(path: Path) -> None:
        if path.match(name):
            raise OSError(number, os.strerror(number), str(path))

    def opens(path: Path, *arguments: Any, **named: Any) -> Any:
        refused(path)
        return opened(path, *arguments, **named)

    def reads(path: Path) -> bytes:
        refused(path)
        return read(path)

    monkeypatch.setattr(pathlib.Path, "open", opens)
    monkeypatch.setattr(pathlib.Path, "read_bytes", reads)
    with pytest.raises(ScheduleError) as caught:
        _read(clicks)
    assert str(caught.value).endswith(f": cannot be read ({os.strerror(number)}); {helps}")
    assert "prepare" not in str(caught.value)
