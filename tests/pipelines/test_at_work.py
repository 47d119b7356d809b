"""Whether a `foreload prepare` that wrote to a folder is still at work there, of which only its lock file tells another host."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from foreload.pipelines.schedule.at_work import SILENCE, Watch


def test_a_prepare_on_another_host_is_gone_when_it_gives_no_sign_for_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    lock = tmp_path / "lock"
    lock.write_text("another host")
    watch = Watch(lock)
    for sign in (1, 2, 3):
        os.utime(lock, (sign, sign))
        assert not watch.gone()
        now += SILENCE.total_seconds() - 1
        assert not watch.gone()
    now += 1
    assert watch.gone()
    os.utime(lock, (4, 4))
    assert not watch.gone()
    lock.unlink()
    assert watch.gone()
