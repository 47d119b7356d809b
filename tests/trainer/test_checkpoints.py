"""Checkpoints: what is saved is all of the run, a run made of it trains on to the same bits, and nothing half written or damaged is taken for one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pyarrow as pa
import pytest
from clicks import Clicks, write_log
from command_line import ROOT, SMALL, Command, Remains, done, fill, flip, refused, run_here
from held import stop_after
from small_job import summary

from foreload.base.files import write_sealed
from foreload.cache.client.local import LocalStores
from foreload.cache.client.store import Store
from foreload.cache.parity.placement import Placement
from foreload.cache.protocol.ownership.batch_log import FileLog
from foreload.cache.protocol.ownership.ownership import Ownership
from foreload.cache.protocol.shards.reading import StoredRows
from foreload.cache.rows.layout import RowLayout
from foreload.pipelines.schedule.at_work import at_work
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.assembly.start import Start
from foreload.trainer.checkpoints import row_files
from foreload.trainer.checkpoints.contents import DENSE, MANIFEST, Checkpoint
from foreload.trainer.checkpoints.draft import LOCK
from foreload.trainer.checkpoints.files import RowFile
from foreload.trainer.checkpoints.restoring import restore_rows
from foreload.trainer.checkpoints.row_files import OpenRows
from foreload.trainer.checkpoints.saved_checkpoint import dense_of
from foreload.trainer.cluster.messages.faults import TrainerFault
from foreload.trainer.run.directory import CHECKPOINTS, STORES, Run
from foreload.trainer.run.manifest import Status
from foreload.trainer.saved.model_rows import model_rows
from foreload.trainer.saved.saved_model import Digest
from foreload.trainer.saved.stopped_stores import find_stopped_rows

STOPPED_AT = 40


@dataclass(frozen=True)
class Case:
    """A run that was stopped, on servers that are there, its checkpoint, what its digest was, and that of the whole training, undisturbed."""

    clicks: Clicks
    run: Path
    servers: LocalStores
    checkpoint: Path
    digest: str
    whole: str

    def train(self, out: Path, *further: object, faults: Sequence[TrainerFault] = ()) -> str:
        """Train in other processes to the end; returns the digest."""
        status, _, err = Command("train", "--run", out, "--digest", *further, faults=faults).end()
        assert status == 0, err
        return str(summary(out)["digest"])


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    """54 steps of 20 samples in each of two epochs, in two lanes, few of whose rows fit into the slots; 2+1 on three servers."""
    folder = tmp_path_factory.mktemp("checkpoints")
    clicks = Clicks.prepare(folder, batch_size=20, slots=70)
    run, whole = folder / "run", folder / "whole"
    small = (clicks.schedule, *SMALL, "--row-optimizer", "adagrad", "--trainers", 1)
    with LocalStores(3, folder / "servers") as servers:
        stop_after(STOPPED_AT, ["train", *small, "--run", run, "--store", ",".join(servers.urls)], folder)
        done("checkpoint", "save", run)
        (checkpoint,) = (path for path in (run / CHECKPOINTS).iterdir() if path.is_dir())
        made = Case(clicks, run, servers, checkpoint, done("digest", run), "")
        digest = made.train(whole, *small, "--store", "local:1")
        yield Case(clicks, run, servers, checkpoint, made.digest, digest)


def folders(folder: Path) -> list[str]:
    """What is in a folder of checkpoints, the file aside that is held while one is saved."""
    return sorted(path.name for path in folder.iterdir() if path.name != LOCK)


def test_a_checkpoint_has_all_of_the_run_and_is_listed_verified_and_deleted(case: Case, tmp_path: Path) -> None:
    told = json.loads((case.checkpoint / MANIFEST).read_text())
    step = Run.open(case.run).saved_status().step
    assert (told["step"], told["state"], case.checkpoint.name) == (step, "stopped", f"step-{step}")
    assert {path.name for path in case.checkpoint.iterdir()} == {MANIFEST, DENSE, *(file["name"] for file in told["rows"])}
    assert done("digest", case.checkpoint) == case.digest
    # Elsewhere, too, and byte for byte: nothing in it tells of the time or the place.
    done("checkpoint", "save", case.run, "--to", tmp_path / "new" / "place", "--json", tmp_path / "saved.json")
    again = tmp_path / "new" / "place" / case.checkpoint.name
    for path in case.checkpoint.iterdir():
        assert (again / path.name).read_bytes() == path.read_bytes()
    assert json.loads((tmp_path / "saved.json").read_text())["rows"] == sum(file["rows"] for file in told["rows"])
    assert "exists already" in refused("checkpoint", "save", case.run, "--to", again.parent)
    with at_work(tmp_path / LOCK):
        assert "another checkpoint is being saved" in refused("checkpoint", "save", case.run, "--to", tmp_path)
    for folder in (case.run, case.checkpoint.parent, again.parent):
        trained_on = Run.open(case.run).manifest.stages[-1].path
        assert f"{case.checkpoint.name}: after step {step} of {trained_on}, stopped; " in done("checkpoint", "list", folder)
    assert done("checkpoint", "verify", again).strip().endswith("every file is as it was saved")
    assert done("checkpoint", "delete", again).strip() == f"deleted  {again}"
    assert folders(again.parent) == []
    assert done("checkpoint", "list", again.parent).strip().endswith("no checkpoints")
    assert f"has no {MANIFEST}" in refused("checkpoint", "delete", again.parent)


def test_a_run_can_be_made_of_a_checkpoint_without_being_trained(case: Case, tmp_path: Path) -> None:
    run, further = tmp_path / "new", ("--store", "local:3", "--parity", "2+1")
    said = done("checkpoint", "restore", case.checkpoint, "--run", run, *further)
    assert said.startswith(f"run {run}: stopped after step {Run.open(case.run).saved_status().step}, ")
    assert done("digest", run) == case.digest
    assert "holds a run already" in refused("checkpoint", "restore", case.checkpoint, "--run", run, *further)
    assert case.train(run, case.clicks.schedule, "--resume", "--trainers", 2) == case.whole
    # One that is at its end, without data to go on with.
    done("checkpoint", "save", run, "--to", tmp_path)
    (ended,) = (path for path in tmp_path.glob("step-*"))
    done("checkpoint", "restore", ended, "--run", tmp_path / "ended", "--store", "local:1")
    assert done("digest", tmp_path / "ended").strip() == case.whole
    # It saves in its own folder, and nothing inside the one that it was made of.
    before = set(ended.iterdir())
    done("checkpoint", "save", tmp_path / "ended")
    assert set(ended.iterdir()) == before
    assert [path.name for path in (tmp_path / "ended" / "checkpoints").glob("step-*")] == [ended.name]
    assert "is at the end" in refused("train", "--from", ended, "--run", tmp_path / "further", "--store", "local:1")


@pytest.mark.parametrize(
    ("store", "trainers"),
    [
        (("local:5", "--parity", "4+1"), 2),
        pytest.param(("local:1",), 1, marks=pytest.mark.full),
        pytest.param(("local:1",), 2, marks=pytest.mark.full),
        pytest.param(("local:3", "--parity", "off"), 2, marks=pytest.mark.full),
        pytest.param(("local:3", "--parity", "2+1"), 1, marks=pytest.mark.full),
        pytest.param(("local:5", "--parity", "2+2", "--copies", 1), 2, marks=pytest.mark.full),
        pytest.param(("local:5", "--parity", "off"), 1, marks=pytest.mark.full),
    ],
)
def test_what_is_made_of_a_checkpoint_trains_on_to_the_same_bits(
    case: Case, tmp_path: Path, store: tuple[object, ...], trainers: int
) -> None:
    run = tmp_path / "new"
    assert case.train(run, "--from", case.checkpoint, "--store", *store, "--trainers", trainers) == case.whole
    assert done("digest", run).strip() == case.whole
    made, before = Run.open(run), Run.open(case.run)
    assert made.manifest.run_id != before.manifest.run_id
    assert made.manifest.namespace == "new"
    assert made.saved_status().totals["steps"] == 108
    # Of its end there is a checkpoint, too, and no way on from there without more data.
    done("checkpoint", "save", run)
    at_end = run / CHECKPOINTS / "step-107"
    assert done("digest", at_end).strip() == case.whole
    line = refused("train", "--from", at_end, "--run", tmp_path / "more", "--store", "local:1")
    assert "is at the end of" in line
    assert not (tmp_path / "more").exists()


@pytest.mark.full
def test_a_run_goes_on_with_more_data_from_a_checkpoint_of_its_end(case: Case, tmp_path: Path) -> None:
    run, more = tmp_path / "run", tmp_path / "more"
    done("prepare", write_log(tmp_path / "more.csv", 200), "--after", case.clicks.schedule, "--out", more)
    case.train(run, "--from", case.checkpoint, "--store", "local:1", "--trainers", 1)
    done("checkpoint", "save", run, "--to", tmp_path / "saved")
    from_checkpoint = ("--from", tmp_path / "saved" / "step-107", "--store", "local:3", "--trainers", 2)
    assert case.train(run, more, "--resume", "--trainers", 1) == case.train(tmp_path / "other", more, *from_checkpoint)
    assert len(Run.open(tmp_path / "other").manifest.stages) == 2


def test_a_flipped_bit_in_any_file_is_named_and_nothing_is_made_of_it(case: Case, tmp_path: Path) -> None:
    damaged, new = tmp_path / "damaged", tmp_path / "new"
    names = sorted(path.name for path in case.checkpoint.iterdir())
    assert len(names) > 5
    for number, name in enumerate(names):
        shutil.copytree(case.checkpoint, damaged)
        size = (damaged / name).stat().st_size
        flip(damaged / name, (size * number) // len(names))
        assert f"{name} is damaged" in refused("checkpoint", "verify", damaged)
        line = refused("train", case.clicks.schedule, "--from", damaged, "--run", new, "--store", "local:1")
        assert f"{name} is damaged" in line
        assert f"{name} is damaged" in refused("digest", damaged)
        assert not new.exists()
        assert run_here("checkpoint", "list", tmp_path)[0] == (2 if name == MANIFEST else 0)
        shutil.rmtree(damaged)
    shutil.copytree(case.checkpoint, damaged)
    (damaged / names[-1]).unlink()
    assert f"{names[-1]} is damaged: No such file" in refused("checkpoint", "verify", damaged)
    (damaged / names[-1]).write_bytes(b"")
    assert f"{names[-1]} is damaged: has 0 bytes instead of " in refused("checkpoint", "verify", damaged)


def test_what_cannot_be_is_refused_before_anything_is_made(case: Case, tmp_path: Path) -> None:
    new, schedule = tmp_path / "new", case.clicks.schedule
    base = ("--from", case.checkpoint, "--run", new, "--store", "local:1")
    assert f"has no {MANIFEST}" in refused("train", schedule, "--from", tmp_path, "--run", new, "--store", "local:1")
    assert "--store: is missing" in refused("train", schedule, "--from", case.checkpoint, "--run", new)
    assert "--seed: must be what the run was started with, " in refused("train", schedule, *base, "--seed", 9)
    assert "only one of them can be given" in refused("train", schedule, *base, "--resume")
    assert "needs at least 3 store shards" in refused("train", schedule, *base, "--parity", "2+1")
    other = tmp_path / "other"
    done("prepare", case.clicks.log, *case.clicks.options(other, batch_size=30))
    trained_on = Run.open(case.run).manifest.stages[-1].path
    assert f"does not continue {trained_on}" in refused("train", other, *base)
    assert "must be what the run was started with, 1; got 2" in refused("train", schedule, *base, "--threads", 2)
    assert not new.exists()
    # Nor is a run, or the checkpoint itself, deleted for it.
    before = done("digest", case.run)
    to_itself = ("train", schedule, "--from", case.checkpoint, "--run", case.run, "--store", "local:1")
    assert "holds a run already" in refused(*to_itself)
    assert "lies in the folder of --run" in refused(*to_itself, "--overwrite")
    shutil.copytree(case.checkpoint.parent, new / CHECKPOINTS)
    assert "holds checkpoints" in refused("train", schedule, *base)
    assert done("digest", case.run) == before
    taken = ("train", schedule, "--from", case.checkpoint, "--run", tmp_path / "run", "--store", ",".join(case.servers.urls))
    assert "namespace run already belongs to a run" in refused(*taken)
    assert done("digest", case.run) == before
    later = tmp_path / "later"
    shutil.copytree(case.checkpoint, later)
    told = json.loads((later / MANIFEST).read_text())
    del told["sha256"]
    write_sealed(later / MANIFEST, told | {"format": 2})
    assert "its format must be 1; got 2" in refused("checkpoint", "verify", later)
    told["run"]["fingerprint"]["mkl_cbwr"] = "COMPATIBLE"
    write_sealed(later / MANIFEST, told)
    line = refused("train", schedule, "--from", later, "--run", tmp_path / "elsewhere", "--store", "local:1")
    assert "accept these numerics with --from --accept-numerics" in line
    assert not (tmp_path / "elsewhere").exists()


def test_a_lost_shard_is_decoded(case: Case, tmp_path: Path) -> None:
    with Store([case.servers.urls[1]]) as store:
        namespace = Run.open(case.run).manifest.namespace
        keys = store.command(0, "KEYS", f"*{namespace}*")
        assert isinstance(keys, list)
        values = [(key, store.command(0, "DUMP", key)) for key in keys]
        store.command(0, "UNLINK", *keys)
        done("checkpoint", "save", case.run, "--to", tmp_path)
        for key, value in values:
            assert isinstance(value, bytes)
            store.command(0, "RESTORE", key, 0, value)
    for path in case.checkpoint.iterdir():
        assert (tmp_path / case.checkpoint.name / path.name).read_bytes() == path.read_bytes()


def test_a_shard_may_be_lost_while_rows_are_brought_to_the_store(case: Case, tmp_path: Path) -> None:
    checkpoint, schedule = Checkpoint.open(case.checkpoint), Schedule(case.clicks.schedule)
    contents = checkpoint.contents
    placement = Placement.spread(3, 2, 1)
    with LocalStores(3, tmp_path / "servers") as servers:
        passed: list[int] = []

        def kill_one(rows: int) -> None:
            passed.append(rows)
            if len(passed) == 3:
                os.kill(servers.pids[2] or 0, signal.SIGKILL)

        with Store.connect(servers.urls, timedelta(seconds=5), 1) as store:
            log = FileLog(tmp_path / "log")
            rows = restore_rows(checkpoint, store, placement, "new", log, Ownership(1), kill_one)
        assert sum(passed) == checkpoint.row_count
        assert rows.lost == [2]
        with Store.connect(servers.urls, timedelta(seconds=5), 1) as store:
            at = Start(contents.step, tuple(rows.batches[str(lane)] for lane in range(contents.run.lanes)))
            stored = StoredRows(store, placement, contents.tables, "new")
            find_stopped_rows(stored, schedule, at)
            model = model_rows(schedule, contents.step, stored, at.last_batches)
            names = [layout.name for layout in contents.tables]
            assert Digest().model(dense_of(checkpoint), names, model) == case.digest.strip()


# -- Those that are killed, and full disks -----------------------------------------------------------------------------------------

_KILLED = """
import os, signal, sys
from foreload.trainer.checkpoints import row_files
from foreload.trainer.cli import main
of, name = {"save": (row_files, "write_file"), "restore": (row_files, "OpenRows")}[sys.argv[1]]
work, left = getattr(of, name), [int(sys.argv[2])]
def killed(*arguments):
    left[0] -= 1
    if left[0] < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return work(*arguments)
setattr(of, name, killed)
main(sys.argv[3:])
"""


def killed_at(what: str, file: int, *arguments: object) -> Remains:
    """Run a command that kills itself as it comes to a file. Returns what is left of it."""
    remains = Remains()
    words = [sys.executable, "-c", _KILLED, what, str(file), *map(str, arguments)]
    ended = subprocess.run(
        words, env=os.environ | {"PYTHONPATH": str(ROOT)} | remains.environment, capture_output=True, check=False
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    return remains


def test_a_save_that_is_killed_or_interrupted_leaves_no_checkpoint_and_the_next_one_is_whole(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed_at("save", 4, "checkpoint", "save", case.run, "--to", tmp_path).remove()
    (left,) = folders(tmp_path)
    assert left.startswith(".step-draft.")
    assert len(list((tmp_path / left).iterdir())) == 4
    assert done("checkpoint", "list", tmp_path).strip().endswith("no checkpoints")
    write = row_files.write_file
    with monkeypatch.context() as patched:

        def interrupted(folder: Path, name: str, data: bytes) -> object:
            os.kill(os.getpid(), signal.SIGINT)
            return write(folder, name, data)

        patched.setattr(row_files, "write_file", interrupted)
        assert run_here("checkpoint", "save", case.run, "--to", tmp_path)[0] == 130
    assert folders(tmp_path) == []
    done("checkpoint", "save", case.run, "--to", tmp_path)
    assert done("digest", tmp_path / case.checkpoint.name) == case.digest


@pytest.mark.parametrize(
    "store", ["local:3", pytest.param("urls", marks=pytest.mark.full), pytest.param("local:1", marks=pytest.mark.full)]
)
def test_a_restore_that_is_killed_can_be_called_again(case: Case, tmp_path: Path, store: str) -> None:
    run = tmp_path / "new"
    with LocalStores(3, tmp_path / "servers") as servers:
        where = ",".join(servers.urls) if store == "urls" else store
        call = (case.clicks.schedule, "--from", case.checkpoint, "--run", run, "--store", where, "--trainers", 1)
        remains = killed_at("restore", 4, "train", *call)
        try:
            assert Run.open(run).status is None
            assert "never began to train" in refused("digest", run)
            assert case.train(run, *call[:3], "--store", where, "--trainers", 1) == case.whole
            assert not remains.processes()
        finally:
            remains.remove()


@pytest.mark.full
def test_a_restore_that_is_interrupted_leaves_nothing(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "new"
    call = ("train", case.clicks.schedule, "--from", case.checkpoint, "--run", run, "--store")

    def interrupted(data: pa.Buffer, file: RowFile, layout: RowLayout) -> OpenRows:
        os.kill(os.getpid(), signal.SIGINT)
        return OpenRows(data, file, layout)

    monkeypatch.setattr("foreload.trainer.checkpoints.row_files.OpenRows", interrupted)
    with LocalStores(3, tmp_path / "servers") as servers:
        assert run_here(*call, ",".join(servers.urls))[0] == 130
        assert Run.open(run).status is None
        assert "no run has rows here" in done("stores", "list", ",".join(servers.urls))
    assert run_here(*call, "local:2")[0] == 130
    assert LocalStores.find(run / STORES) is None


def test_a_full_disk_is_told_and_nothing_is_left_there(case: Case, small_disk: Path) -> None:
    fill(small_disk, 24_000)
    line = refused("checkpoint", "save", case.run, "--to", small_disk / "saved")
    assert line.startswith(f"--to: cannot write to {small_disk / 'saved'}: the disk is full")
    assert folders(small_disk / "saved") == []
    (small_disk / "ballast").unlink()
    done("checkpoint", "save", case.run, "--to", small_disk / "saved")
    assert done("digest", small_disk / "saved" / case.checkpoint.name) == case.digest


def test_a_run_without_a_model_has_no_checkpoint(case: Case, tmp_path: Path) -> None:
    new = shutil.copytree(case.run, tmp_path / "new", ignore=shutil.ignore_patterns(CHECKPOINTS, "lock"))
    (new / "status.json").unlink()
    assert "never began to train" in refused("checkpoint", "save", new)
    run = Run.open(new)
    run.write_status(Status("training", -1, {"0": 0, "1": 0}, term=1))
    assert "never stopped cleanly" in refused("checkpoint", "save", new)
    assert "has no manifest.json" in refused("checkpoint", "save", tmp_path)
    assert "cannot be read: No such file" in refused("checkpoint", "list", tmp_path / "nowhere")
    assert done("checkpoint", "list", new).strip().endswith("no checkpoints")
