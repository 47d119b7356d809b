"""The command line: help pages, where settings come from, errors in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foreload.base.errors import SettingError
from foreload.base.settings import settings_of
from foreload.cache.parity.placement import Placement
from foreload.trainer.cli import main, parser
from foreload.trainer.command_line.training import job_values
from foreload.trainer.job.job import TrainJob
from foreload.trainer.job.job_values import TableSettings
from foreload.trainer.run.directory import Run
from foreload.trainer.run.manifest import Manifest, Stage


def parsed_job(*arguments: str) -> TrainJob:
    """The job that `foreload train` makes of its command line."""
    return TrainJob.of(job_values(parser().parse_args(["train", *arguments])))


@pytest.mark.parametrize(
    "command",
    [
        [],
        ["train"],
        ["status"],
        ["evaluate"],
        ["export"],
        ["digest"],
        ["apply"],
        ["stores"],
        ["stores", "status"],
        ["drill"],
        ["drill", "lost-shard"],
        ["drill", "lost-trainer"],
        ["drill", "scale"],
        ["stores", "replace"],
        ["stores", "list"],
        ["stores", "delete"],
        ["delete"],
        ["scrub"],
        ["prepare"],
    ],
    ids=" ".join,
)
def test_every_command_has_a_help_page(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command, "--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: foreload")
    assert len(out.splitlines()) > 5


def test_every_setting_but_those_of_tables_has_a_flag_with_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    out = capsys.readouterr().out
    for name, setting in settings_of(TrainJob).items():
        assert (setting.flag in out) == (setting.form != "file"), name


def test_flags_win_over_the_job_file_and_that_over_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(
        '[train]\nschedule = "s"\nrun = "r"\nstore = "local:2"\nlr = 0.5\ndim = 4\nfollow = true\n'
        '[train.model-options]\ntop = "8-1"\n[train.tables.C1]\nlr = 1.0\n'
    )
    job = parsed_job("--job", str(path), "--dim", "16", "other")
    assert (job.schedule, job.lr, job.dim, job.seed, job.follow) == ("other", 0.5, 16, 0, True)
    assert job.model_options == {"top": "8-1"}
    assert job.tables == {"C1": TableSettings(lr=1.0)}
    assert parsed_job("--job", str(path), "--model-options", "top=4-1", "bottom=8-4").model_options == {
        "top": "4-1",
        "bottom": "8-4",
    }


@pytest.mark.parametrize("table", ["train", "prepare"])
def test_a_job_file_takes_every_flag_in_either_spelling_and_tells_the_names_there_are(
    table: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.toml"
    command = ["train", "s", "--run", "r", "--store", "local:1"] if table == "train" else ["prepare"]

    def said(text: str) -> str:
        path.write_text(f"[{table}]\n{text}\n")
        assert main([*command, "--job", str(path)]) == 2
        return capsys.readouterr().err

    for name in ("frob-nicate", "frob_nicate"):
        line = said(f"{name} = 1")
        assert f"--job {path}: [{table}] has no setting '{name}'; it takes " in line
        names = line.strip().partition("it takes ")[2].split(", ")
        assert {"json", "overwrite"} < set(names)
        assert {"train": {"schedule", "run", "dense-lr"}, "prepare": {"sources", "batch-size", "memory"}}[table] < set(names)
        assert not any("_" in one for one in names)
    assert "--json: must be a path" in said("json = 3")
    # It is heeded, as the flag is.
    first = 'format = "synthetic"\nrows = 10\nbatch_size = 1\nout = "x"\n' if table == "prepare" else ""
    assert f"--json: cannot write {tmp_path}/none/x.json" in said(f'{first}json = "{tmp_path}/none/x.json"')


@pytest.mark.parametrize(
    "command",
    [
        ["train", "s", "--run", "r", "--store", "local:1"],
        ["drill", "lost-shard"],
        ["evaluate", "r"],
        ["export", "r", "--out", "x"],
        ["digest", "r"],
        ["scrub", "r"],
        ["stores", "status", "r"],
    ],
)
def test_a_file_for_the_result_is_looked_for_before_the_work(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder").mkdir()
    for place, why in [("none/x.json", f"there is no folder {tmp_path}/none; create it first"), ("folder", "is a folder")]:
        assert main([*command, "--json", str(tmp_path / place)]) == 2
        assert f"foreload: error: --json: cannot write {tmp_path / place}: {why}" in capsys.readouterr().err


def test_a_folder_for_an_export_is_looked_for_before_the_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    # There is no such run either.
    assert main(["export", "r", "--out", str(tmp_path / "file" / "x" / "y")]) == 2
    assert f"--out: cannot write {tmp_path}/file/x/y: {tmp_path}/file is no folder" in capsys.readouterr().err


def test_a_resumed_run_keeps_its_settings(tmp_path: Path) -> None:
    before: dict[str, Any] = {"schedule": "s", "run": str(tmp_path / "r"), "store": "local:2", "lr": 0.25, "model": "dcn"}
    job = TrainJob.of(before)
    stages = (Stage("s", "identity", None, 0, 7), Stage("further", "identity", None, 7, 9))
    Run.create(tmp_path / "r", Manifest("id", job.to_dict(), "r", 4, (), 2, stages), Placement.spread(2), overwrite=False)
    assert parsed_job("s", "--run", str(tmp_path / "r"), "--resume", "--trainers", "2") == TrainJob.of(
        before | {"resume": True, "trainers": 2}
    )
    assert parsed_job("--run", str(tmp_path / "r"), "--resume").schedule == "further", "what was trained last"
    with pytest.raises(SettingError, match="--run: is missing"):
        parsed_job("s", "--resume")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train"], "SCHEDULE: is missing"),
        (["train", "s", "--run", "r"], "--store: is missing"),
        (["train", "s", "--dim", "many"], "--dim: must be a whole number; got 'many'"),
        (["train", "s", "--run", "r", "--store", "local:1"], "schedule s: is not a folder"),
        (
            ["train", "s", "--run", "r", "--store", "local:1", "--model-options", "top"],
            "--model-options: must be given as key=value",
        ),
        (["train", "s", "--run", "r", "--resume"], "run r: has no manifest.json, so it is not a run"),
        (["train", "s", "--job", "absent.toml"], "--job: cannot read absent.toml"),
        (["evaluate", "r"], "run r: has no manifest.json"),
        (["digest", "r"], "run r: has no manifest.json"),
        (["export", "r", "--out", "x"], "run r: has no manifest.json"),
        (["stores", "status", "r"], "run r: has no manifest.json"),
        (["scrub", "r"], "run r: has no manifest.json"),
        (["prepare", "--format", "criteo", "--batch-size", "1"], "--out: is missing"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_told_in_one_line(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 1
    assert err[0].startswith("foreload: error: ")
    assert message in err[0]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments", [["fly"], ["train", "s", "--no-such-flag"], ["train", "--di", "4"]])
def test_a_flag_that_does_not_exist_is_refused_with_the_way_to_help(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith("foreload: error: ")
    assert "--help" in err


def test_the_status_of_a_saved_run_whose_stores_are_gone_is_told_and_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = TrainJob.of({"schedule": "s", "run": str(tmp_path / "r"), "store": "local:2"})
    Run.create(
        tmp_path / "r",
        Manifest("id", job.to_dict(), "r", 4, (), 2, (Stage("s", "identity", None, 0, 7),)),
        Placement.spread(2),
        overwrite=False,
    )
    assert main(["stores", "status", str(tmp_path / "r"), "--json", str(tmp_path / "told.json")]) == 2
    assert "shard 1  lost" in capsys.readouterr().out
    assert [shard["state"] for shard in json.loads((tmp_path / "told.json").read_text())["shards"]] == ["lost", "lost"]
