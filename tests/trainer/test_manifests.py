"""Manifests that others may have written: whatever they say, a command works, or ends with one line; nothing is written elsewhere."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import resource
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from clicks import Clicks
from command_line import SMALL, Command, done, refused, run_here
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from injection import CallFault

from foreload.base.errors import ForeloadError
from foreload.base.files import write_json, write_sealed
from foreload.cache.client.local import LocalStores
from foreload.pipelines.schedule.format import HEADER, segment_name
from foreload.pipelines.schedule.format import MANIFEST as SCHEDULE
from foreload.trainer.checkpoints.best import BEST
from foreload.trainer.checkpoints.contents import MANIFEST as CHECKPOINT
from foreload.trainer.cli import main
from foreload.trainer.commands.predict import Records
from foreload.trainer.commands.train import call_values
from foreload.trainer.job.job import TrainJob
from foreload.trainer.run.directory import MANIFEST, PLACEMENT, STATUS, STORES, SUMMARY
from foreload.trainer.serving.format import ABOUT

EXAMPLES = settings(max_examples=30, phases=[Phase.generate])
_MOST_GROWTH_KIB = 700 << 10
_DEEP: Any = json.loads("[" * 400 + "]" * 400)
WRONG: tuple[Any, ...] = (
    None, True, "", "text", "../evil", "/evil", "a\nb", "\ud800", -1, 0, 1, 1 << 40, 1 << 63, 10**400, 1.5, float("nan"), float("inf"),
    [], {}, [[]], [None], {"name": 1}, _DEEP,
)  # fmt: skip
"""What a value is replaced by."""


@dataclass(frozen=True)
class Case:
    """A schedule, a run of it, its checkpoints (the second an increment of the first), and exports: one in full, and an increment."""

    home: Path
    schedule: Path
    run: Path
    checkpoints: tuple[Path, Path]
    full: Path
    increment: Path


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    home = tmp_path_factory.mktemp("manifests")
    clicks, run, saved = Clicks.prepare(home), home / "run", home / "saved"
    done("train", clicks.schedule, "--run", run, "--store", "local:1", *SMALL)
    done("checkpoint", "save", run, "--to", saved)
    done("prepare", "--after", clicks.schedule, "--epochs", 1, "--out", home / "more")
    done("train", home / "more", "--run", run, "--resume")
    done("checkpoint", "save", run, "--to", saved, "--policy", "consecutive")
    first, second = sorted(saved.glob("step-*"), key=lambda path: (len(path.name), path.name))
    done("export", first, "--out", home / "full")
    done("export", second, "--since", first, "--out", home / "increment")
    return Case(home, clicks.schedule, run, (first, second), home / "full", home / "increment")


def places(value: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value in JSON."""
    if before:
        yield before
    if isinstance(value, dict):
        for name in value:
            yield from places(value[name], (*before, name))
    elif isinstance(value, list):
        # Those of a long list are alike.
        for place in {*range(min(3, len(value))), *range(max(len(value) - 1, 0), len(value))}:
            yield from places(value[place], (*before, place))


def changed(value: dict[str, Any], draw: st.DataObject) -> dict[str, Any]:
    """The value with one change: another value somewhere, one that is missing, or one more."""
    result = copy.deepcopy(value)
    ways = list(places(result))
    *way, last = ways[draw.draw(st.integers(0, len(ways) - 1), label="place")]
    inside: Any = result
    for step in way:
        inside = inside[step]
    how = draw.draw(st.sampled_from(["other", "other", "other", "missing", "more"]), label=f"at {(*way, last)}")
    if how == "other":
        inside[last] = copy.deepcopy(draw.draw(st.sampled_from(WRONG)))
    elif how == "missing":
        del inside[last]
    elif isinstance(inside, dict):
        inside["further"] = 1
    else:
        inside.append(copy.deepcopy(inside[last]))
    return result


def check(*arguments: object) -> tuple[int, str]:
    """Run a command, which must succeed or end with one line; returns its status and what it printed."""
    out, err, before = io.StringIO(), io.StringIO(), dict(os.environ)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main([str(argument) for argument in arguments])
    finally:
        os.environ.clear()
        os.environ.update(before)
    errors = [line for line in err.getvalue().splitlines() if line.startswith("foreload: error: ")]
    assert "Traceback" not in err.getvalue(), err.getvalue()
    # `checkpoint list` says of each checkpoint why it cannot be used.
    assert len(errors) == (status == 2) or " cannot be used: " in out.getvalue(), err.getvalue()
    return status, out.getvalue()


@contextlib.contextmanager
def working(*folders: Path) -> Iterator[tuple[Path, list[Path]]]:
    """A folder with copies of others; nothing may be written beside it, and what is held must not grow."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with tempfile.TemporaryDirectory(prefix="fl") as home:
        inside = Path(home) / "a" / "b"
        inside.mkdir(parents=True)
        copies = [
            Path(shutil.copytree(folder, inside / folder.name, ignore=shutil.ignore_patterns("stores"))) for folder in folders
        ]
        yield inside, copies
        assert [path.name for path in Path(home).iterdir()] == ["a"]
        assert [path.name for path in (Path(home) / "a").iterdir()] == ["b"]
    assert not Path("/evil").exists()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < _MOST_GROWTH_KIB


def sealed_in(path: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(path.read_bytes())
    del told["sha256"]
    return told


@EXAMPLES
@given(draw=st.data())
@pytest.mark.parametrize("name", [HEADER, segment_name(0), segment_name(3), SCHEDULE])
def test_a_schedule(case: Case, name: str, draw: st.DataObject) -> None:
    with working(case.schedule) as (home, (schedule,)):
        checksum = write_sealed(schedule / name, changed(sealed_in(schedule / name), draw))
        whole = sealed_in(schedule / SCHEDULE) if name != SCHEDULE else None
        if whole is not None and name == HEADER:
            whole["header"] = checksum
        elif whole is not None:
            whole["segments"][int(name[8:14])] = checksum
        if whole is not None:
            write_sealed(schedule / SCHEDULE, whole)
        check("report", schedule, "--out", home / "report.html")


@EXAMPLES
@given(draw=st.data())
@pytest.mark.parametrize("name", [MANIFEST, STATUS, PLACEMENT])
def test_a_run(case: Case, name: str, draw: st.DataObject) -> None:
    with working(case.run) as (home, (run,)):
        write_json(run / name, changed(json.loads((run / name).read_bytes()), draw))
        check("report", run, "--out", home / "report.html")
        check("checkpoint", "list", run)
        check("digest", run)


@settings(EXAMPLES, max_examples=12)
@given(draw=st.data())
def test_the_note_of_the_best_checkpoint(case: Case, draw: st.DataObject) -> None:
    with working(case.home / "saved") as (home, (saved,)):
        write_json(
            saved / BEST, changed({"run": "r", "metric": "auc", "value": 0.7, "step": int(case.checkpoints[0].name[5:])}, draw)
        )
        status, _ = check("export", saved, "--best", "--out", home / "best")
        assert (home / "best").exists() == (status == 0)
        check("checkpoint", "list", saved)


@EXAMPLES
@given(draw=st.data())
def test_the_note_of_local_servers(case: Case, draw: st.DataObject) -> None:
    with working(case.run) as (_, (run,)):
        (run / STORES).mkdir()
        noted = {"sockets": [str(run / STORES / "shard-0.sock"), None], "inode": (run / STORES).stat().st_ino}
        write_json(run / STORES / "servers.json", changed(noted, draw))
        assert check("digest", run)[0] == 2  # neither saved rows nor a server
        check("delete", run)


@EXAMPLES
@given(draw=st.data())
@pytest.mark.parametrize("which", [0, 1])
def test_a_checkpoint(case: Case, which: int, draw: st.DataObject) -> None:
    with working(case.home / "saved") as (home, (saved,)):
        path = saved / case.checkpoints[which].name
        write_sealed(path / CHECKPOINT, changed(sealed_in(path / CHECKPOINT), draw))
        for command in (("checkpoint", "verify", path), ("digest", path), ("export", path, "--out", home / "out")):
            check(*command)
        check("checkpoint", "list", saved)


@EXAMPLES
@given(draw=st.data())
def test_an_export(case: Case, draw: st.DataObject) -> None:
    with working(case.full) as (home, (full,)):
        write_sealed(full / ABOUT, changed(sealed_in(full / ABOUT), draw))
        status, _ = check("apply", full, "--to", home / "served")
        assert (home / "served").exists() == (status == 0)
        check("apply", case.increment, "--to", home / "served")


@EXAMPLES
@given(draw=st.data())
def test_an_increment(case: Case, draw: st.DataObject) -> None:
    with working(case.increment) as (home, (increment,)):
        done("apply", case.full, "--to", home / "served")
        before = {path.name: path.read_bytes() for path in (home / "served").iterdir()}
        write_sealed(increment / ABOUT, changed(sealed_in(increment / ABOUT), draw))
        status, _ = check("apply", increment, "--to", home / "served")
        after = {path.name: path.read_bytes() for path in (home / "served").iterdir()}
        assert (after == before) == (status != 0)


def test_what_a_later_version_wrote_is_not_called_damaged(case: Case) -> None:
    with working(case.run, case.schedule, case.checkpoints[0], case.full) as (home, (run, schedule, checkpoint, export)):
        for file, command in (
            (run / MANIFEST, ("digest", run)),
            (run / STATUS, ("digest", run)),
            (schedule / SCHEDULE, ("train", schedule, "--run", home / "new", "--store", "local:1")),
            (checkpoint / CHECKPOINT, ("checkpoint", "verify", checkpoint)),
            (export / ABOUT, ("apply", export, "--to", home / "served")),
        ):
            before = file.read_bytes()
            if file.parent == run:
                write_json(file, json.loads(before) | {"later": 1})
            else:
                write_sealed(file, sealed_in(file) | {"later": 1})
            why = refused(*command)
            assert f"{file.name} was written by a later version of foreload (" in why
            assert why.endswith(": has a field that is not known, 'later'); use that version")
            file.write_bytes(before)


_NESTED = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    "text", [f'{{"metric": "auc", "run": "r", "step": 1, "value": 1{"0" * 400}}}', '{"run": "r", "step": 1e999}', _NESTED]
)
def test_a_damaged_note_of_the_best_checkpoint_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / BEST).write_text(text)
    why = refused("export", tmp_path, "--best", "--out", tmp_path / "out")
    assert why.startswith(f"--best: {tmp_path / BEST} is damaged: ")


@pytest.mark.parametrize("text", [_NESTED, "[]", '"text"'])
def test_a_report_leaves_out_a_damaged_summary(case: Case, text: str) -> None:
    with working(case.run) as (home, (run,)):
        (run / SUMMARY).write_text(text)
        done("report", run, "--out", home / "report.html")


@pytest.mark.parametrize("text", ['{"sockets": "text"}', '{"sockets": []}', '{"sockets": ["a\\u0000b"]}', _NESTED])
def test_a_damaged_note_of_local_servers_is_refused(case: Case, text: str) -> None:
    with working(case.run) as (_, (run,)):
        (run / STORES).mkdir()
        (run / STORES / "servers.json").write_text(text)
        assert f"{run / STORES / 'servers.json'} is damaged: " in refused("digest", run)


JOB: dict[str, Any] = {
    "schedule": "clicks", "run": "run", "store": "local:3", "lr": 0.1, "dim": 8, "parity": "2+1", "row-options": {"eps": 1e-6},
    "model-options": {"top": [8, 1]}, "lr-schedule": "warmup:10", "checkpoint": "saved", "checkpoint-every": "10m", "keep": 3, "resume": False,
    "row-optimizer": "adagrad", "label-weights": {"clicked": 2.0}, "tables": {"ad": {"lr": 0.5}}, "stop-early": "auc:3", "memory": "1GiB",
}  # fmt: skip


def toml(value: Any) -> str:
    """A value as TOML has it, inline."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(name)} = {toml(one)}" for name, one in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(toml, value))}]"
    if (isinstance(value, float) and value != value) or value in (float("inf"),):
        return repr(value)
    return json.dumps(value)


@settings(max_examples=300)
@given(draw=st.data())
def test_a_job_file(draw: st.DataObject) -> None:
    with tempfile.TemporaryDirectory(prefix="fl") as home:
        told = changed({"train": JOB}, draw)
        path = Path(home) / "job.toml"
        path.write_text(
            "\n".join(f"{name} = {toml(value)}" for name, value in told.items()), encoding="utf-8", errors="surrogatepass"
        )
        # A refusal is a ForeloadError, of one line on the command line.
        with contextlib.suppress(ForeloadError):
            job = TrainJob.of(call_values({}, path)[0])
            assert TrainJob.of(json.loads(json.dumps(job.to_dict()))) == job


# -- Names -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../evil.parquet", "/evil.parquet", "a/evil.parquet", "..", "", "ad.parquet\n"])
def test_an_export_names_files_of_its_folder_alone(case: Case, tmp_path: Path, name: str) -> None:
    export = Path(shutil.copytree(case.full, tmp_path / "in" / "export"))
    told = sealed_in(export / ABOUT)
    table, *others = told["tables"]
    if name.endswith("evil.parquet"):
        target = export / name if not name.startswith("/") else tmp_path / "evil.parquet"
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(export / table["file"], target)
    files = {name if file == table["file"] else file: entry for file, entry in told["files"].items()}
    write_sealed(export / ABOUT, told | {"tables": [table | {"file": name}, *others], "files": files})
    why = refused("apply", export, "--to", tmp_path / "out" / "served")
    assert why.startswith(f"{export}: export.json is damaged: ")
    assert "must be the name of a file in the same folder; got " in why
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["../../secret", "/secret", "..", ""])
def test_a_checkpoint_names_files_of_its_folder_alone(case: Case, tmp_path: Path, name: str) -> None:
    checkpoint = Path(shutil.copytree(case.checkpoints[0], tmp_path / "in" / case.checkpoints[0].name))
    told = sealed_in(checkpoint / CHECKPOINT)
    shutil.copyfile(checkpoint / told["dense"]["name"], tmp_path / "secret")
    write_sealed(checkpoint / CHECKPOINT, told | {"dense": told["dense"] | {"name": name}})
    assert "must be the name of a file in the same folder; got " in refused("digest", checkpoint)
    write_sealed(checkpoint / CHECKPOINT, told | {"base": {"name": name, "sha256": "0"}})
    assert "must be the name of a file in the same folder; got " in refused("checkpoint", "verify", checkpoint)


def test_a_link_out_of_a_folder_is_refused_and_one_to_the_folder_is_not(case: Case, tmp_path: Path) -> None:
    for folder, manifest, command in (
        (case.full, ABOUT, lambda path: ("apply", path, "--to", tmp_path / "served")),
        (case.checkpoints[0], CHECKPOINT, lambda path: ("checkpoint", "verify", path)),
    ):
        inside = Path(shutil.copytree(folder, tmp_path / "in" / folder.name))
        (linked := tmp_path / f"link-{folder.name}").symlink_to(inside)
        file = next(path for path in inside.iterdir() if path.suffix == ".safetensors" and path.name != "optimizer.safetensors")
        shutil.move(file, tmp_path / file.name)
        file.symlink_to(tmp_path / file.name)
        why = refused(*command(linked))
        assert f"{manifest} is damaged: {file.name} is a link to {tmp_path / file.name}, out of the folder" in why
        file.unlink()
        shutil.move(tmp_path / file.name, file)
        done(*command(linked))


@pytest.mark.parametrize(
    ("columns", "why"), [(1 << 40, "in 1 .. 1048576"), (5, "its rows are not those that export.json describes")]
)
def test_columns_that_no_file_has_are_refused_before_anything_is_allocated(
    case: Case, tmp_path: Path, columns: int, why: str
) -> None:
    export = Path(shutil.copytree(case.full, tmp_path / "export"))
    told = sealed_in(export / ABOUT)
    tables = [table | {"parts": [[name, columns] for name, _ in table["parts"]]} for table in told["tables"]]
    write_sealed(export / ABOUT, told | {"tables": tables})
    assert why in refused("apply", export, "--to", tmp_path / "served")


# -- Paths -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        (["train", "clicks", "--run", "URL", "--store", "local:1"], "--run"),
        (["train", "URL", "--run", "r", "--store", "local:1"], "SCHEDULE"),
        (["train", "clicks", "--run", "r", "--store", "local:1", "--history", "URL"], "--history"),
        (["train", "clicks", "--run", "r", "--store", "local:1", "--token-file", "URL"], "--token-file"),
        (["checkpoint", "restore", "file:///saved", "--run", "URL", "--store", "local:1"], "--run"),
        (["prepare", "--format", "synthetic", "--rows", "9", "--out", "URL"], "--out"),
        (["prepare", "URL", "--format", "csv", "--features", "f.toml", "--out", "x"], "SOURCE"),
        (
            ["prepare", "a.csv", "--eval-source", "day=URL", "--format", "csv", "--features", "f.toml", "--out", "x"],
            "--eval-source",
        ),
        (["export", "r", "--out", "URL"], "--out"),
        (["export", "r", "--format", "torch", "--out", "URL"], "--out"),
        (["predict", "r", "a.csv", "--out", "URL.csv"], "--out"),
        (["report", "RUN", "--out", "URL"], "--out"),
        (["plan", "clicks", "--plot", "URL.png"], "--plot"),
        (["predict", "RUN", "a.csv", "URL", "--out", "x.csv"], "FILE"),
        (["predict", "RUN", "a.csv", "--out", "x.csv", "--steps-of", "URL"], "--steps-of"),
        (["evaluate", "RUN", "URL"], "SCHEDULE"),
        (["lookup", "RUN", "ad", "1", "--schedule", "URL"], "--schedule"),
        (["apply", "URL", "--to", "x"], "EXPORT"),
        (["check-model", "deepfm", "--features", "URL"], "--features"),
        (["digest", "RUN", "--json", "URL"], "--json"),
        (["plan", "URL"], "SCHEDULE"),
        (["report", "URL"], "RUN|SCHEDULE"),
        (["report", "RUN", "URL"], "RUN2"),
        (["history", "--history", "URL"], "--history"),
        (["train", "--job", "URL"], "--job"),
        (["join", "here:1", "--token-file", "URL"], "--token-file"),
        (["join", "here:1", "--schedule", "URL"], "--schedule"),
        (["scrub", "URL"], "RUN"),
        (["status", "URL"], "RUN"),
        (["scale", "URL", "2"], "RUN"),
        (["delete", "URL"], "RUN"),
        (["stores", "status", "URL"], "RUN"),
        (["stores", "replace", "URL", "0", "redis://here"], "RUN"),
        (["checkpoint", "save", "URL", "--to", "x"], "RUN"),
    ],
)
@pytest.mark.parametrize("url", ["s3://user:secret@bucket/x", "gs://bucket/x", "file:///x"])
def test_a_url_is_refused_where_a_local_path_is_needed(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], flag: str, url: str
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [word.replace("URL", url) if word != "RUN" else str(case.run) for word in arguments]
    if "restore" in words:
        words[2] = str(case.checkpoints[0])
    why = refused(*words)
    assert why.startswith(f"{flag}: must be a path on this machine; got {url.replace('user:secret', '***')}")
    assert "secret" not in why
    assert not list(tmp_path.iterdir())


def test_a_url_is_refused_from_a_job_file_and_from_python_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text('[train]\nrun = "s3://bucket/run"\nstore = "local:1"\n')
    assert refused("train", "clicks", "--job", "job.toml").startswith(
        "--run: must be a path on this machine; got s3://bucket/run"
    )
    with pytest.raises(ForeloadError, match="--run: must be a path on this machine; got s3://bucket/run"):
        TrainJob.of({"schedule": "clicks", "run": "s3://bucket/run", "store": "local:1"})
    with pytest.raises(ForeloadError, match=r"FILE: must be a path on this machine; got s3://bucket/log\.csv"):
        Records(("a.csv", "s3://bucket/log.csv"))
    with pytest.raises(ForeloadError, match="--steps-of: must be a path on this machine; got s3://bucket/clicks"):
        Records(("a.csv",), steps_of="s3://bucket/clicks")


# -- Of a folder of checkpoints --------------------------------------------------------------------------------------------------------


def test_from_takes_the_newest_complete_checkpoint_of_a_folder(case: Case, tmp_path: Path) -> None:
    saved = Path(shutil.copytree(case.home / "saved", tmp_path / "saved"))
    (saved / "empty").mkdir()
    first, second = (checkpoint.name for checkpoint in case.checkpoints)
    status, _, err = run_here("train", "--from", saved, "--run", tmp_path / "none", "--store", "local:1")
    assert f"the newest complete checkpoint in {saved} is {second}" in err
    assert f"checkpoint {saved / second}: is at the end of" in err
    told = done("checkpoint", "restore", saved, "--run", tmp_path / "one", "--store", "local:1")
    assert f"after {second.replace('-', ' ')}, " in told
    next((saved / second).glob("rows-*")).unlink()
    status, out, err = run_here("checkpoint", "restore", saved, "--run", tmp_path / "two", "--store", "local:1")
    assert (
        status,
        f"after {first.replace('-', ' ')}, " in out,
        f"the newest complete checkpoint in {saved} is {first}" in err,
    ) == (0, True, True), err
    assert f"checkpoint {saved / second}: lacks files" in err
    assert "has no checkpoint.json, so it is not a checkpoint" in refused(
        "train", "--from", tmp_path, "--run", tmp_path / "x", "--store", "local:1"
    )


def test_a_digest_that_fails_leaves_results_and_report(case: Case, tmp_path: Path, launched: Callable[..., Command]) -> None:
    run = tmp_path / "run"
    before = CallFault("foreload.trainer.cluster.launcher:stopped_run_at")
    job = launched("train", case.schedule, "--run", run, "--store", "local:1", *SMALL, "--digest", faults=[before])
    job.stand()
    local = LocalStores.find(run / STORES)
    assert local is not None
    assert local.pids[0] is not None
    os.kill(local.pids[0], signal.SIGKILL)
    psutil.Process(job.process.pid).resume()
    status, out, err = job.end()
    assert status == 2
    assert f"foreload: error: store {local.urls[0]}: " in err
    assert "steps, " in out
    assert (run / "report.html").exists()
    assert json.loads((run / "summary.json").read_text())["steps"] > 0


@pytest.mark.parametrize("more", [False, True])
def test_deleting_a_run_by_a_link_deletes_the_link_too_and_nothing_else(case: Case, tmp_path: Path, more: bool) -> None:
    run = Path(shutil.copytree(case.run, tmp_path / "disk" / "run", ignore=shutil.ignore_patterns("stores", "control.sock")))
    (tmp_path / "link").symlink_to(run)
    (tmp_path / "second").symlink_to("link")
    (tmp_path / "disk" / "other").touch()
    if more:
        (run / "mine").touch()
    done("delete", tmp_path / "second")
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    assert left == (["disk", "disk/other", "disk/run", "disk/run/mine", "link", "second"] if more else ["disk", "disk/other"])
