"""Exports: a full one and the increments after it are the full one of a later step, byte for byte, and nothing else can be applied."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from clicks import Clicks, click_columns
from command_line import ROOT, SMALL, Remains, done, fill, flip, refused, run_here
from held import stop_after
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, load_file

from foreload import ServedRows
from foreload.base.errors import SettingError
from foreload.base.files import write_sealed
from foreload.cache.client.local import LocalStores
from foreload.cache.client.store import Store
from foreload.pipelines.schedule.at_work import at_work
from foreload.trainer.checkpoints.contents import Checkpoint
from foreload.trainer.errors import ExportError
from foreload.trainer.run.directory import CHECKPOINTS
from foreload.trainer.serving import folder, redis_keys, standalone
from foreload.trainer.serving import format as export_format
from foreload.trainer.serving.format import ABOUT, MODEL, ExportRows
from foreload.trainer.serving.redis_keys import Keys
from foreload.trainer.serving.redis_keys import ServedRows as Served

STOPS = (25, 60)
"""Shortly after which steps there are models, besides that of the training's end, after step 107."""
KEY = "emb:{table}:{id}"


@dataclass(frozen=True)
class Case:
    """A training that was stopped twice and went on from checkpoints, on other store shards each time. run: the last one; models: the checkpoints;
    full: an export of each; increments: from each to the next one.
    """

    clicks: Clicks
    run: Path
    models: tuple[Path, ...]
    full: tuple[Path, ...]
    increments: tuple[Path, ...]

    @property
    def steps(self) -> tuple[int, ...]:
        return tuple(int(path.name.removeprefix("step-")) for path in self.models)


@pytest.fixture(scope="module", autouse=True)
def small_groups() -> Iterator[None]:
    """Row groups, and transactions, so small that these tables have several."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(export_format, "GROUP_ROWS", 64)
        patched.setattr(redis_keys, "_ROWS", 50)
        yield


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory, small_groups: None) -> Case:
    home = tmp_path_factory.mktemp("serving")
    clicks = Clicks.prepare(home, batch_size=20, slots=70)
    models: list[Path] = []
    shards: tuple[tuple[object, ...], ...] = (("local:1",), ("local:5", "--parity", "4+1"), ("local:3", "--parity", "off"))
    for number, (stop, store) in enumerate(zip((*STOPS, None), shards, strict=True)):
        run = home / f"run-{number}"
        source = ("--from", models[-1]) if models else SMALL
        words = ["train", clicks.schedule, *source, "--run", run, "--store", *store, "--trainers", 1]
        if stop is None:
            done(*words)
        else:
            stop_after(stop, words, home)
        done("checkpoint", "save", run, "--to", home / "saved")
        (model,) = set((home / "saved").glob("step-*")) - set(models)
        models.append(model)
    full = tuple(home / f"full-{number}" for number in range(3))
    for model, out in zip(models, full, strict=True):
        done("export", model, "--out", out)
    increments = (home / "increment-1", home / "increment-2")
    done("export", models[1], "--since", models[0], "--out", increments[0])
    # The second one goes on from the first, and is of the run.
    done("export", home / "run-2", "--since", increments[0], "--out", increments[1])
    return Case(clicks, home / "run-2", tuple(models), full, increments)


def files(path: Path) -> dict[str, bytes]:
    """What is in a folder."""
    return {file.name: file.read_bytes() for file in path.iterdir()}


def names(path: Path) -> list[str]:
    """What is beside an export that is served, its lock aside."""
    return sorted(one.name for one in path.iterdir() if not one.name.endswith(".applying"))


# -- Exports of runs and of checkpoints --------------------------------------------------------------------------------------------


def test_a_checkpoint_answers_as_the_run_does_without_a_store(case: Case, tmp_path: Path) -> None:
    run, checkpoint = case.run, case.models[-1]
    done("export", run, "--out", tmp_path / "run")
    assert files(tmp_path / "run") == files(case.full[-1])
    for command in ("evaluate", "digest"):
        assert done(command, checkpoint) == done(command, run)
    lookup = ("user", "u3", "never seen", "")
    assert done("lookup", checkpoint, *lookup) == done("lookup", run, *lookup)
    for source, out in ((run, "run.csv"), (checkpoint, "checkpoint.csv")):
        done("predict", source, case.clicks.log, "--out", tmp_path / out, "--logits")
    assert (tmp_path / "run.csv").read_bytes() == (tmp_path / "checkpoint.csv").read_bytes()
    assert "--store: is for runs" in refused("digest", checkpoint, "--store", "redis://here")
    assert "--schedule: is for checkpoints" in refused("lookup", run, *lookup, "--schedule", case.clicks.schedule)


def test_a_checkpoint_needs_its_schedule_for_evaluation_alone(case: Case, tmp_path: Path) -> None:
    trained_on = Path(Checkpoint.open(case.models[0]).contents.run.stages[-1].path)
    elsewhere = trained_on.rename(tmp_path / "elsewhere")
    try:
        done("export", case.models[0], "--out", tmp_path / "out")
        assert files(tmp_path / "out") == files(case.full[0])
        line = refused("evaluate", case.models[0])
        assert "this needs the schedule that it was trained on: " in line
        assert "say where it is now: --schedule, or SCHEDULE of evaluate" in line
        assert "after step" in done("evaluate", case.models[0], elsewhere)
        # What is raw is encoded without it, too, where there is no vocabulary.
        done("lookup", case.models[0], "user", "u3")
        assert "--schedule" in refused("predict", case.models[0], case.clicks.log, "--out", tmp_path / "scores.csv")
        done("predict", case.models[0], case.clicks.log, "--out", tmp_path / "scores.csv", "--schedule", elsewhere)
    finally:
        elsewhere.rename(trained_on)
    in_run = shutil.copytree(case.models[2], case.run / CHECKPOINTS / "step-107")
    other = case.clicks.schedule.rename(tmp_path / "elsewhere")
    try:
        # In the folder of its run there is what that keeps of it.
        assert done("evaluate", in_run) == done("evaluate", case.run)
    finally:
        other.rename(case.clicks.schedule)
        shutil.rmtree(in_run.parent)


def test_an_increment_has_the_rows_that_changed_since(case: Case) -> None:
    for before, after, increment in zip(case.full[:-1], case.full[1:], case.increments, strict=True):
        told = json.loads((increment / ABOUT).read_text())
        assert told["since"]["state"] == json.loads((before / ABOUT).read_text())["state"]
        assert 0 < sum(table["rows"] for table in told["tables"]) < sum(table["whole_rows"] for table in told["tables"])
        for table in told["tables"]:
            old, new, changes = (
                {row["id"]: row for row in pq.read_table(path / table["file"]).to_pylist()} for path in (before, after, increment)
            )
            changed = {row_id for row_id, row in new.items() if old.get(row_id) != row}
            # A row may have been trained and have the same value: a gradient may be 0.
            assert changed <= changes.keys()
            assert all(new[row_id] == row for row_id, row in changes.items())


def test_since_names_a_step_a_checkpoint_or_an_export(case: Case, tmp_path: Path) -> None:
    first, _, last = case.steps
    for number, since in enumerate((first, case.models[0], case.full[0])):
        done("export", case.models[1], "--since", since, "--out", tmp_path / str(number))
    by_checkpoint, by_export = files(tmp_path / "1"), files(tmp_path / "2")
    assert by_checkpoint == by_export == files(case.increments[0])
    assert json.loads((tmp_path / "0" / ABOUT).read_text())["since"] == {"step": first, "state": None}
    for since, why in (
        ("nowhere", "must be the number of a step, a checkpoint or an export; got 'nowhere'"),
        (last + 1, f"must be from a step in 0 .. {last - 1}, before that of run "),
        (case.models[2], f"got {last}; nothing was trained since"),
    ):
        assert why in refused("export", case.run, "--since", since, "--out", tmp_path / "none")
    other = resealed(case.full[0], tmp_path / "other", seed=3)
    line = refused("export", case.run, "--since", other, "--out", tmp_path / "none")
    assert f"is of another model than {other}: seed must be 3, as there; got 0" in line
    assert not (tmp_path / "none").exists()


def test_an_export_says_that_weights_were_rounded_and_follows_only_what_is_rounded_as_it_is(case: Case, tmp_path: Path) -> None:
    done("checkpoint", "save", case.run, "--to", tmp_path, "--bits", 8)
    rounded = tmp_path / f"step-{case.steps[2]}"
    out = tmp_path / "out"
    assert f"inexact since step {case.steps[2]}: 8 bits a weight" in done("export", rounded, "--out", out)
    assert json.loads((out / ABOUT).read_text())["inexact"] == {"since": case.steps[2], "bits": 8, "restores": 0}
    assert "after step" in done("evaluate", rounded)
    assert "trained" in done("lookup", rounded, "user", "u3")
    line = refused("export", rounded, "--since", case.full[0], "--out", tmp_path / "increment")
    assert "inexact must be None, as there; got {" in line
    line = refused("export", rounded, "--since", case.steps[0], "--out", tmp_path / "increment")
    assert "must be a checkpoint or an export, since weights were rounded" in line


# -- To a folder ---------------------------------------------------------------------------------------------------------------------


def test_a_full_export_and_the_increments_after_it_are_that_of_the_end(case: Case, tmp_path: Path) -> None:
    served = tmp_path / "served"
    assert done("apply", case.full[0], "--to", served).startswith(f"{served}: the model after step {case.steps[0]}, ")
    assert files(served) == files(case.full[0])
    for increment, full in zip(case.increments, case.full[1:], strict=True):
        done("apply", increment, "--to", served)
        assert files(served) == files(full)
    assert names(tmp_path) == ["served"]


def test_what_is_not_the_next_one_is_refused_in_one_line_and_nothing_changes(case: Case, tmp_path: Path) -> None:
    served = tmp_path / "served"
    first, second, third = case.steps
    one, two = case.increments
    assert f"there is nothing at {served} yet; apply a full export of step {first} first" in refused("apply", one, "--to", served)
    assert not list(tmp_path.iterdir())
    done("apply", case.full[0], "--to", served)
    # The one before is missing.
    line = f"{two} goes from step {second} to step {third}, and {served} is at step {first}; apply the increment that goes from step {first}"
    assert refused("apply", two, "--to", served) == line
    done("apply", one, "--to", served)
    line = f"is at step {second} already; apply the increment that goes from step {second}"
    assert line in refused("apply", one, "--to", served), "twice"
    done("apply", two, "--to", served)
    assert f"is at step {third} already" in refused("apply", one, "--to", served), "out of order"
    assert f"has one of step {third} already; apply a full export only where there is none yet" in refused(
        "apply", case.full[0], "--to", served
    )
    assert files(served) == files(case.full[2])
    assert "so it is an increment, and cannot be served" in refused("apply", two, "--to", one)


def resealed(source: Path, out: Path, **changes: object) -> Path:
    """A copy of an export whose manifest says something else, as that of another training would."""
    shutil.copytree(source, out)
    told = json.loads((out / ABOUT).read_text())
    del told["sha256"]
    write_sealed(out / ABOUT, told | changes)
    return out


def test_an_increment_of_another_training_is_refused(case: Case, tmp_path: Path) -> None:
    served = tmp_path / "served"
    done("apply", case.full[0], "--to", served)
    since = {"step": case.steps[0], "state": "another"}
    other = resealed(case.increments[0], tmp_path / "state", since=since)
    assert f"of another training than {served}: at step {case.steps[0]} their dense parts differ" in refused(
        "apply", other, "--to", served
    )
    told = json.loads((case.increments[0] / ABOUT).read_text())
    fewer = [{**table, "whole_rows": table["whole_rows"] - 1} for table in told["tables"]]
    other = resealed(case.increments[0], tmp_path / "rows", tables=fewer)
    assert "table ad must have " in refused("apply", other, "--to", served)
    other = resealed(case.increments[0], tmp_path / "seed", seed=8)
    assert "seed must be 0, as there; got 8" in refused("apply", other, "--to", served)
    other = resealed(case.increments[0], tmp_path / "settings", settings=told["settings"] | {"lr": 0.1, "of a later version": 3})
    assert "lr must be 0.05, as there; got 0.1" in refused("apply", other, "--to", served)
    *tables, last = told["tables"]
    files_of = {name: entry for name, entry in told["files"].items() if name != last["file"]}
    other = resealed(case.increments[0], tmp_path / "table", tables=tables, files=files_of)
    assert "its tables must be those there" in refused("apply", other, "--to", served)
    assert files(served) == files(case.full[0])


def test_old_versions_are_kept_as_asked(case: Case, tmp_path: Path) -> None:
    served, kept = tmp_path / "served", tmp_path / "served.kept"
    first, second, _ = case.steps
    done("apply", case.full[0], "--to", served, "--keep", 2)
    for increment in case.increments:
        done("apply", increment, "--to", served, "--keep", 2)
    assert files(kept / f"step-{first}") == files(case.full[0])
    assert files(kept / f"step-{second}") == files(case.full[1])
    # As many as the last call asks for.
    again = tmp_path / "again"
    done("apply", case.full[0], "--to", again)
    done("apply", case.increments[0], "--to", again, "--keep", 1)
    assert (
        done("apply", case.increments[1], "--to", again, "--keep", 1)
        .strip()
        .endswith(f"also kept: {tmp_path}/again.kept/step-{second}")
    )
    assert [path.name for path in (tmp_path / "again.kept").iterdir()] == [f"step-{second}"]
    assert files(tmp_path / "again.kept" / f"step-{second}") == files(case.full[1])


def test_a_flipped_bit_in_any_file_is_named(case: Case, tmp_path: Path) -> None:
    served = tmp_path / "served"
    done("apply", case.full[0], "--to", served)
    for name in files(case.increments[0]):
        damaged = shutil.copytree(case.increments[0], tmp_path / "damaged")
        flip(damaged / name, (damaged / name).stat().st_size // 2)
        assert f"{damaged}: {name} is damaged" in refused("apply", damaged, "--to", served)
        shutil.rmtree(damaged)
    (served / MODEL).write_bytes(b"")
    assert f"{served}: {MODEL} is damaged: has 0 bytes instead of " in refused("apply", case.increments[0], "--to", served)
    (served / MODEL).unlink()
    assert f"{MODEL} is damaged: No such file" in refused("apply", case.increments[0], "--to", served)
    (served / ABOUT).unlink()
    assert f"{served}: has no {ABOUT}, so it is not an export" in refused("apply", case.increments[0], "--to", served)
    assert f"has no {ABOUT}" in refused("apply", tmp_path / "nowhere", "--to", served)
    later = resealed(case.increments[0], tmp_path / "later", format=9)
    assert "its format must be 1; got 9" in refused("apply", later, "--to", served)


_KILLED = """
import os, signal, sys
from foreload.trainer.cli import main
from foreload.trainer.serving import folder, format
format.GROUP_ROWS = 64
name, when, left = sys.argv[1], sys.argv[2], [int(sys.argv[3])]
work = getattr(folder, name)
def killed(*arguments):
    left[0] -= 1
    if left[0] or when == "after":
        work(*arguments)
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
setattr(folder, name, killed)
main(sys.argv[4:])
"""


@pytest.mark.parametrize(
    ("point", "when", "time", "applied"),
    [
        pytest.param("write_about", "before", 1, False, marks=pytest.mark.full),
        pytest.param("_keep", "before", 1, False, marks=pytest.mark.full),
        pytest.param("_keep", "after", 1, False, marks=pytest.mark.full),
        # The first time it is tried whether folders can change places at all.
        pytest.param("_exchange", "after", 1, False, marks=pytest.mark.full),
        ("_exchange", "before", 2, False),
        ("_exchange", "after", 2, True),
        pytest.param("_prune", "before", 1, True, marks=pytest.mark.full),
    ],
)
def test_whoever_is_killed_leaves_the_old_one_or_the_new_one(
    case: Case, tmp_path: Path, point: str, when: str, time: int, applied: bool
) -> None:
    served = tmp_path / "served"
    done("apply", case.full[0], "--to", served)
    remains = Remains()
    call = ["apply", case.increments[0], "--to", served, "--keep", "1"]
    words = [sys.executable, "-c", _KILLED, point, when, str(time), *map(str, call)]
    ended = subprocess.run(
        words, env=os.environ | {"PYTHONPATH": str(ROOT)} | remains.environment, capture_output=True, check=False
    )
    remains.remove()
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert files(served) == files(case.full[1 if applied else 0])
    if applied:
        assert "already" in refused(*call)
    else:
        done(*call)
    assert files(served) == files(case.full[1])
    assert names(tmp_path) == ["served", "served.kept"]
    assert files(tmp_path / "served.kept" / f"step-{case.steps[0]}") == files(case.full[0])


def test_whoever_is_interrupted_at_the_exchange_leaves_the_old_one(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served, exchange = tmp_path / "served", folder._exchange

    def interrupted(one: Path, other: Path) -> None:
        if other == served:
            os.kill(os.getpid(), signal.SIGINT)
        exchange(one, other)

    done("apply", case.full[0], "--to", served)
    with monkeypatch.context() as patched:
        patched.setattr(folder, "_exchange", interrupted)
        assert run_here("apply", case.increments[0], "--to", served)[0] == 130
    assert names(tmp_path) == ["served"]
    assert files(served) == files(case.full[0])
    with at_work(tmp_path / ".served.applying"):
        assert "something else is being applied" in refused("apply", case.increments[0], "--to", served)
    monkeypatch.setattr(folder, "_RENAME_EXCHANGE", 1 << 20)  # as a file system answers that cannot
    assert "cannot swap two folders at once (Invalid argument)" in refused("apply", case.increments[0], "--to", served)
    assert names(tmp_path) == ["served"]


def test_a_full_disk_and_missing_rights_are_told_and_nothing_is_left(case: Case, small_disk: Path, tmp_path: Path) -> None:
    served = small_disk / "served"
    done("apply", case.full[0], "--to", served)
    fill(small_disk, 16_000)
    assert f"--to: cannot write {served}: the disk is full; free space" in refused("apply", case.increments[0], "--to", served)
    line = refused("export", case.models[1], "--out", small_disk / "out")
    assert f"--out: cannot write {small_disk / 'out'}: the disk is full" in line
    assert names(small_disk) == ["ballast", "served"]
    assert files(served) == files(case.full[0])
    (small_disk / "ballast").unlink()
    done("apply", case.increments[0], "--to", served)
    assert files(served) == files(case.full[1])
    (tmp_path / "file").touch()
    assert "--to: cannot write" in refused("apply", case.full[0], "--to", tmp_path / "file" / "served")


def rows_of(ids: list[int], mark: float) -> ExportRows:
    values = np.full((len(ids), 1), mark, np.float32)
    return ExportRows(np.array(ids, np.int64), values, values[:, :0], pa.array([str(row) for row in ids], pa.string()))


@given(st.sets(st.integers(0, 40)), st.sets(st.integers(0, 40)), st.integers(1, 9), st.integers(1, 9))
def test_rows_are_merged_by_id_and_changes_win(before: set[int], changes: set[int], cut: int, other_cut: int) -> None:
    def pieces(ids: set[int], mark: float, size: int) -> Iterator[ExportRows]:
        listed = sorted(ids)
        # The last one, and with it the only one of no rows, is empty.
        return (rows_of(listed[first : first + size], mark) for first in [*range(0, len(listed), size), len(listed)])

    pieces_of_all = list(folder.merged(pieces(before, 1, cut), pieces(changes, 2, other_cut)))
    ids = [row for rows in pieces_of_all for row in rows.ids.tolist()]
    assert ids == sorted(before | changes)
    assert [value for rows in pieces_of_all if rows.values is not None for value in rows.values.to_pylist()] == list(
        map(str, ids)
    )
    marks = [mark for rows in pieces_of_all for mark in rows.weights[:, 0].tolist()]
    assert marks == [2 if row in changes else 1 for row in ids]


# -- To Redis ------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def url(three: LocalStores, urls: object) -> str:
    """A server without keys."""
    return str(three.urls[0])


def check_served(url: str, key: str, full: Path, step: int) -> None:
    """Assert that the rows and the dense part of a version are those of a full export."""
    told = json.loads((full / ABOUT).read_text())
    with Served(url, key, step) as served:
        assert served.dense() == (full / MODEL).read_bytes()
        for table in told["tables"]:
            rows = pq.read_table(full / table["file"])
            weights = np.array(rows["weight"].to_pylist(), np.float32)
            ids = rows["id"].to_pylist()
            read, there = served.read(table["name"], range(table["table_rows"]))
            assert np.flatnonzero(there).tolist() == ids
            assert read[ids].tobytes() == weights.tobytes()


@pytest.mark.parametrize("key", [KEY, "emb:{table}"])
def test_redis_has_each_version_that_is_kept(case: Case, url: str, key: str) -> None:
    first, second, third = case.steps
    call = ("--to", url, "--key", key, "--keep", 1)
    assert f"apply a full export of step {first} first" in refused("apply", case.increments[0], *call)
    with pytest.raises(ExportError, match="nothing is served under these keys"):
        ServedRows(url, key)
    done("apply", case.full[0], *call)
    check_served(url, key, case.full[0], first)
    assert "goes from step" in refused("apply", case.increments[1], *call)
    with ServedRows(url, key) as reader:
        for ids in ([1.5], ["1"], "1", [None], [True], np.array([1.0])):
            with pytest.raises(SettingError, match=r"^ids: must be a list \(each element a whole number\); got "):
                reader.read("ad", ids)  # type: ignore[arg-type]
        assert reader.step == first
        done("apply", case.increments[0], *call)
        for full, step in zip(case.full[:2], (first, second), strict=True):
            check_served(url, key, full, step)
        assert f"is at step {second} already" in refused("apply", case.increments[0], *call)
        assert f"has one of step {second} already" in refused("apply", case.full[2], *call)
        told = done("apply", case.increments[1], *call)
        assert told.strip().endswith(f"also kept: {second}")
        with pytest.raises(ExportError, match=f"the one after {first} was requested, which is not kept"):
            reader.read("user", [1])
    for full, step in zip(case.full[1:], (second, third), strict=True):
        check_served(url, key, full, step)
    with pytest.raises(ExportError, match="TABLE: must be one of ad, user, site"), ServedRows(url, key) as reader:
        reader.read("item", [1])
    # As a reader in another language does it, of the newest version.
    with Store([url]) as store:
        text = store.command(0, "GET", "emb:~version")
        assert isinstance(text, bytes)
        version = json.loads(text)
        assert (version["step"], version["kept"]) == (third, [second])
        beside = store.command(0, "KEYS", "emb:~*")
        assert isinstance(beside, list)
        assert sorted(beside) == sorted([b"emb:~version", *(f"emb:~dense:{step}".encode() for step in (second, third))])


@pytest.mark.parametrize("keep", [0, 2])
def test_readers_of_the_old_version_go_on_while_a_new_one_is_written_and_where_that_is_broken_off(
    case: Case, url: str, monkeypatch: pytest.MonkeyPatch, keep: int
) -> None:
    first, second, third = case.steps
    call = ("--to", url, "--key", KEY, "--keep", keep)
    done("apply", case.full[0], *call)
    write, left = redis_keys._Application._write, [4]

    def interrupted(self: redis_keys._Application, *arguments: object) -> None:
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGINT)
        write(self, *arguments)  # type: ignore[arg-type]
        check_served(url, KEY, case.full[0], first)

    with monkeypatch.context() as patched:
        patched.setattr(redis_keys._Application, "_write", interrupted)
        assert run_here("apply", case.increments[0], *call)[0] == 130
    check_served(url, KEY, case.full[0], first)
    since = {"step": first, "state": None}
    other = resealed(case.increments[1], Path(case.run.parent / f"other-{keep}"), since=since)
    line = refused("apply", other, *call)
    assert f"applying that of step {second} was interrupted; apply that one again first" in line
    done("apply", case.increments[0], *call)
    done("apply", case.increments[1], *call)
    for full, step in zip(case.full, case.steps, strict=True):
        if step in case.steps[2 - keep :]:
            check_served(url, KEY, full, step)
    with Store([url]) as store:
        assert store.command(0, "EXISTS", "emb:~applying") == 0
    assert third in case.steps


def test_a_second_call_takes_over_and_the_first_one_stops(case: Case, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = ("apply", case.full[0], "--to", url, "--key", KEY)
    write, begun = redis_keys._Application._write, [False]

    def overtaken(self: redis_keys._Application, *arguments: object) -> None:
        if not begun[0]:
            begun[0] = True
            done(*call)
        write(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(redis_keys._Application, "_write", overtaken)
    assert "another call is applying an export" in refused(*call)
    check_served(url, KEY, case.full[0], case.steps[0])


def test_what_cannot_be_served_is_told_in_one_line(case: Case, url: str, three: LocalStores) -> None:
    call = ("apply", case.full[0], "--to", url)
    assert "--key: is missing" in refused(*call)
    for key in ("emb:{id}", "emb", "{table}{id}", "{table}7{id}", "emb:{table}:{row}", "{table}:{id}:{id}", "{table}}:{id}"):
        assert refused(*call, "--key", key).startswith("--key: ")
    assert "--key: is for a Redis server" in refused("apply", case.full[0], "--to", "folder", "--key", KEY)
    assert "--keep: must be at least 0" in refused(*call, "--key", KEY, "--keep", -1)
    assert "store URL http://" in refused("apply", case.full[0], "--to", "http://here", "--key", KEY)
    with Store([url]) as store:
        store.command(0, "SET", "emb:ad", "mine")
        assert "leads to a key of" in refused(*call, "--key", "emb:{table}")
        store.command(0, "FLUSHALL")
        told = json.loads((case.full[0] / ABOUT).read_text())
        file = next(table["file"] for table in told["tables"] if table["name"] == "ad")
        row = pq.read_table(case.full[0] / file)["id"][0].as_py()
        store.command(0, "SET", f"emb:ad:{row}", "mine")
        assert f"the value of row {row} of table ad" in refused(*call, "--key", KEY)
        store.command(0, "SET", "emb:~version", "mine")
        assert "emb:~version holds something that no export wrote" in refused(*call, "--key", KEY)
        store.command(0, "FLUSHALL")
        done(*call, "--key", KEY)
        # More rows than there were: of another training.
        increment = json.loads((case.increments[0] / ABOUT).read_text())
        more = [{**table, "whole_rows": table["whole_rows"] + 1} for table in increment["tables"]]
        other = resealed(case.increments[0], case.run.parent / "more", tables=more)
        assert "table ad must have " in refused("apply", other, "--to", url, "--key", KEY)
        assert store.command(0, "EXISTS", "emb:~applying") == 0
        store.command(0, "CONFIG", "SET", "maxmemory", 1)
        try:
            assert "is full (OOM" in refused("apply", case.increments[0], "--to", url, "--key", KEY)
        finally:
            store.command(0, "CONFIG", "SET", "maxmemory", 0)
    check_served(url, KEY, case.full[0], case.steps[0])


def test_the_rights_that_the_page_names_are_enough(case: Case, url: str) -> None:
    text = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    users = [line.split() for line in text.splitlines() if line.startswith("ACL SETUSER ")]
    assert [words[2] for words in users] == ["applier", "reader"]
    with Store([url]) as store:
        for words in users:
            store.command(0, *words)
        applier, reader = (url.replace("//", f"//{words[2]}:PASSWORD@") for words in users)
        done("apply", case.full[0], "--to", applier, "--key", KEY)
        done("apply", case.increments[0], "--to", applier, "--key", KEY)
        check_served(reader, KEY, case.full[1], case.steps[1])
        line = refused("apply", case.increments[1], "--to", reader, "--key", KEY)
        assert "the user lacks a right (NOPERM" in line
        assert "://reader:***@" in line
        store.command(0, "ACL", "DELUSER", "applier", "reader")


def test_keys_of_different_rows_differ() -> None:
    keys = Keys("a{id}b{table}")
    assert keys.reading("t", [1, 12]) == [["MGET", "a1bt", "a12bt"]]
    assert Keys("{table}").reading("t", [3]) == [["HMGET", "t", "3"]]
    assert Keys("{table}").version == b"~version"


@pytest.mark.parametrize("key", [KEY, "emb:{table}"])
def test_a_model_for_torch_takes_its_rows_from_redis_as_long_as_they_are_there(
    case: Case, url: str, tmp_path: Path, key: str
) -> None:
    with_rows, without, in_parquet = (tmp_path / name for name in ("rows", "none", "parquet"))
    torch = ("export", case.models[0], "--format", "torch")
    done(*torch, "--out", with_rows)
    done(*torch, "--most-rows", 0, "--out", in_parquet)
    secret = url.replace("redis://", "redis://:secret@")
    done(*torch, "--most-rows", 100, "--rows-at", secret, "--key", key, "--out", without)
    assert not list(without.glob("rows-ad*"))
    assert list(without.glob("rows-site.safetensors"))
    assert "secret" not in (without / "features.json").read_text() + (without / "README.md").read_text()
    columns = click_columns(200) | {"ad": list(range(200))}
    wanted = standalone.load(with_rows).predict(columns, logits=True)
    assert standalone.load(in_parquet).predict(columns, logits=True).tobytes() == wanted.tobytes()
    with pytest.raises(
        RuntimeError, match=f"must have the rows of this model after step {case.steps[0]}; it has those of nothing"
    ):
        standalone.load(without)
    done("apply", case.full[0], "--to", url, "--key", key, "--keep", 1)
    served = standalone.load(without)
    assert served.predict(columns, logits=True).tobytes() == wanted.tobytes()
    done("apply", case.increments[0], "--to", url, "--key", key, "--keep", 1)
    assert served.predict(columns, logits=True).tobytes() == wanted.tobytes(), "of a version that is kept"
    done("apply", case.increments[1], "--to", url, "--key", key, "--keep", 1)
    with pytest.raises(
        RuntimeError, match=f"after step {case.steps[0]}; it has those of {case.steps[2]}, {case.steps[1]}, or another"
    ):
        served.predict(columns)
    # Another model of the same step.
    about = json.loads((without / "features.json").read_text())
    (without / "features.json").write_text(json.dumps(about | {"step": case.steps[2]}))
    with pytest.raises(RuntimeError, match="or another model's"):
        standalone.load(without)
    assert "--since: is for --format parquet" in refused(*torch, "--since", 1, "--out", tmp_path / "no")
    assert "--format: must be torch with --onnx" in refused("export", case.models[0], "--onnx", "--out", tmp_path / "no")
    assert "exists already" in refused(*torch, "--out", with_rows)
    assert "is no folder that may be written to" in refused(*torch, "--out", case.clicks.log / "no")


BUFFERED = """
import torch
from torch import nn


class Buffered(nn.Module):
    def __init__(self, spec):
        super().__init__()
        self.names, self.weight = spec.names, nn.Parameter(torch.ones(spec.width))
        self.register_buffer("order", torch.randperm(spec.width))
        self.register_buffer("waves", torch.randn(spec.dense_width))

    def forward(self, dense, embeddings):
        return torch.cat([embeddings[name] for name in self.names], 1)[:, self.order] @ self.weight + (dense * self.waves).sin().sum(1)
"""


def test_buffers_are_exported_applied_and_served(clicks: Clicks, url: str, tmp_path: Path) -> None:
    code = tmp_path / "mine.py"
    code.write_text(BUFFERED)
    run = tmp_path / "run"
    model = ("--model", "mine.py:Buffered", "--model-folder", tmp_path, "--dim", 4)
    done("train", clicks.schedule, "--run", run, "--store", "local:1", "--checkpoint-every", 100, *model)
    saved = sorted((run / CHECKPOINTS).glob("step-*"))[-1]
    for number, source in enumerate((run, saved)):
        done("export", source, "--out", tmp_path / f"out-{number}")
        done("apply", tmp_path / f"out-{number}", "--to", tmp_path / f"served-{number}")
    buffers = load_file(tmp_path / "out-0" / "buffers.safetensors")
    assert {name: (value.dtype, tuple(value.shape)) for name, value in buffers.items()} == {
        "order": (torch.int64, (12,)), "waves": (torch.float32, (1,)),
    }  # fmt: skip
    torch.manual_seed(0)  # what `train` has for --seed
    assert torch.equal(buffers["order"], torch.randperm(12))
    for other in ("out-1", "served-0", "served-1"):
        assert (tmp_path / other / "buffers.safetensors").read_bytes() == (
            tmp_path / "out-0" / "buffers.safetensors"
        ).read_bytes()
    done("apply", tmp_path / "out-0", "--to", url, "--key", KEY)
    with Served(url, KEY) as rows:
        assert set(load(rows.dense())) == {"weight", "order", "waves"}
    # A checkpoint is exported without its model's code, and then has none, which is said.
    code.unlink()
    status, _, err = run_here("export", saved, "--out", tmp_path / "without")
    assert status == 0
    assert "foreload: warning: buffers of mine.py:Buffered, if it has any, are left out: " in err
    assert not (tmp_path / "without" / "buffers.safetensors").exists()
