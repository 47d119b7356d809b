"""What a command finds around it: a locale that knows no names but ASCII's, and a working directory that is gone."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import Command

import foreload
from foreload.base.errors import SettingError

ASCII_ALONE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
FEATURES = """
label = "geklickt-ü"
[[dense]]
name = "größe"
[[feature]]
name = "straße"
encoding = "vocabulary"
[[feature]]
name = "日本"
rows = 100
"""


def test_names_and_values_in_any_language_where_the_locale_has_none(tmp_path: Path, launched: Callable[..., Command]) -> None:
    made = random.Random(1)
    rows = [f"{k % 3 == 0:d},{made.random():.3f},Münchner-{made.randrange(30)},東{made.randrange(50)}" for k in range(400)]
    log = tmp_path / "klicks-é.csv"
    log.write_text("\n".join(["geklickt-ü,größe,straße,日本", *rows]), encoding="utf-8")
    (tmp_path / "merkmale-é.toml").write_text(FEATURES, encoding="utf-8")
    schedule, run = tmp_path / "plan-é", tmp_path / "lauf-é"

    def said(*arguments: object) -> str:
        status, out, err = launched(*map(str, arguments), **ASCII_ALONE).end()
        assert status == 0, err
        assert "Traceback" not in err
        return out

    options = ["--format", "csv", "--batch-size", "20", "--lanes", "2", "--slots", "90", "--eval-fraction", "0.2"]
    assert "straße 30" in said("prepare", log, *options, "--features", tmp_path / "merkmale-é.toml", "--out", schedule)
    said("train", schedule, "--run", run, "--store", "local:1", "--dim", "4", "--trainers", "2")
    assert "400 scores" in said("predict", run, log, "--out", tmp_path / "werte-é.csv")
    assert "Münchner-3" in said("lookup", run, "straße", "Münchner-3")
    said("export", run, "--out", tmp_path / "ausfuhr-é")
    said("report", run)
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "lauf-é" in page
    assert any("stra" in path.name for path in (tmp_path / "ausfuhr-é").iterdir())


def test_a_working_directory_that_was_deleted_is_said_in_a_line(
    tmp_path: Path, launched: Callable[..., Command], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = "working directory: must exist; it was deleted; change to another one"
    for command in (["status", "nowhere"], ["prepare", "log.csv", "--out", "schedule"]):
        gone = tmp_path / "gone"
        gone.mkdir()
        within = ["sh", "-c", 'cd "$0" && rmdir "$0" && exec "$@"', str(gone)]
        status, out, err = launched(*command, within=within).end()
        assert (status, out, err) == (2, "", f"foreload: error: {wrong}\n")
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(SettingError, match=wrong):
        foreload.prepare(tmp_path / "log.csv", format="criteo", out=tmp_path / "schedule", batch_size=10)
