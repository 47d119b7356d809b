"""Checkpoints in an object store, where nothing can be renamed: each is there whole or not at all, however late and badly it answers."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from command_line import Command, done, refused
from held import stop_after
from object_store import BUCKET, KEYS, Done, ObjectStore
from small_job import summary, synthetic_schedule

from foreload.cache.client.local import LocalStores
from foreload.trainer.checkpoints.contents import MANIFEST, Checkpoint
from foreload.trainer.cluster.messages.faults import TrainerFault
from foreload.trainer.errors import CheckpointError, CheckpointUnreachable
from foreload.trainer.run.directory import STORES
from foreload.trainer.run.event_log import read_events
from foreload.trainer.storage import ObjectPath, place

MODEL = ("--dim", "4", "--lr", "0.05", "--model-options", "bottom=512-512-4", "top=512-512-1")
"""Its dense part is large, so that steps take a while."""
SOON = "?connect_timeout=1&request_timeout=1&max_attempts=2"


@dataclass(frozen=True)
class Case:
    """A schedule of some 30 steps in two lanes, the digest of a run that nothing happened to, and an object store."""

    schedule: Path
    digest: str
    store: ObjectStore

    def train(self, run: Path, *further: object, faults: tuple[TrainerFault, ...] = (), status: int = 0) -> str:
        """Train in other processes; returns what was told on stderr."""
        ended, _, err = Command("train", self.schedule, "--run", run, "--digest", *further, faults=faults).end()
        assert ended == status, err
        assert "Traceback" not in err
        assert KEYS["AWS_SECRET_ACCESS_KEY"] not in err
        return err

    def stop_after(self, step: int, run: Path, folder: Path) -> None:
        """Train with one trainer, and stop after a step."""
        stop_after(step, ["train", self.schedule, "--run", run, *MODEL, "--store", "local:1"], folder)

    def check_goes_on(self, checkpoint: str, run: Path) -> None:
        """Assert that a run made of a checkpoint ends with the bits of the undisturbed one."""
        self.train(run, "--from", checkpoint, "--store", "local:3", "--parity", "2+1", "--trainers", 1)
        assert summary(run)["digest"] == self.digest

    def check_whole(self, folder: str) -> list[Checkpoint]:
        """The checkpoints under a URL, by step; asserts that each is as it was saved, and that nothing else is there."""
        there = [Checkpoint.open(one) for one in listed(folder)]
        names = {f"{one.place.name}/{name}" for one in there for name in (MANIFEST, *(file.name for file in one.files))}
        prefix = str(place(folder)).partition("?")[0].removeprefix(f"s3://{BUCKET}/")
        assert set(self.store.names(prefix)) == names
        for one in there:
            one.verify()
        return there


def listed(folder: str) -> list[str]:
    """The URLs that `checkpoint list` tells."""
    return [line.partition(": ")[0] for line in done("checkpoint", "list", folder).splitlines()]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    folder = tmp_path_factory.mktemp("bucket")
    schedule = synthetic_schedule(folder, 3800, lanes=2, slots=900)
    with ObjectStore() as store, pytest.MonkeyPatch.context() as patch:
        for name, value in store.environment.items():
            patch.setenv(name, value)
        undisturbed = Case(schedule, "", store)
        undisturbed.train(folder / "run", *MODEL, "--store", "local:1", "--trainers", 1)
        yield Case(schedule, str(summary(folder / "run")["digest"]), store)


@pytest.fixture(autouse=True)
def undisturbed(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test the store answers as it should."""
    yield
    if "case" in request.fixturenames:
        store = request.getfixturevalue("case").store
        store.disturb, store.late_seconds = lambda method, path: None, 0.0


def url(path: Path, options: str = "") -> str:
    """Of a folder of checkpoints in the bucket for a test."""
    return f"s3://{BUCKET}/{path.name}{options}"


@pytest.mark.parametrize(
    ("named", "why"),
    [
        ("ftp://bucket/saved", "must be a folder, or begin with s3://"),
        ("s3:///saved", "names no bucket"),
        ("s3://bucket/saved?region=a&secret_key=hush", "option 'secret_key' is not known"),
        ("s3://bucket/saved?max_attempts=none", "max_attempts must be a whole number"),
        ("s3://AKIA:hush@bucket/saved", "must have no keys in it"),
        ("s3://AKIA:hush/hush@bucket/saved?region=a", "must have no keys in it"),
        ("s3://AKIA:hush", "must have no keys in it"),
        ("file://host/saved", "must name an absolute path"),
    ],
)
def test_a_url_that_names_no_place_is_refused_and_nothing_secret_is_shown(tmp_path: Path, named: str, why: str) -> None:
    for command in (
        ("checkpoint", "list", named),
        ("digest", named),
        ("train", "clicks", "--run", tmp_path / "run", "--checkpoint", named),
        ("train", "clicks", "--run", tmp_path / "run", "--from", named),
    ):
        error = refused(*command)
        assert why in error
        assert "hush" not in error
    assert not (tmp_path / "run").exists()


def test_a_url_is_a_place_like_a_folder() -> None:
    folder = place("s3://bucket//saved/?endpoint_override=host:9000")
    assert str(folder) == "s3://bucket/saved?endpoint_override=host:9000"
    assert str(folder / "step-3") == "s3://bucket/saved/step-3?endpoint_override=host:9000"
    assert (folder / "step-3").name == "step-3"
    assert (folder / "step-3").parent == folder == place(str(folder))
    assert place("file:///tmp/a%20b") == place("/tmp/a b") == Path("/tmp/a b")
    assert place("gs://bucket/saved") == ObjectPath("gs", "bucket/saved")


@pytest.mark.full
def test_what_is_saved_while_it_trains_goes_on_from_there(case: Case, tmp_path: Path) -> None:
    run, folder = tmp_path / "run", url(tmp_path)
    err = case.train(
        run, *MODEL, "--store", "local:1", "--trainers", 2, "--checkpoint", folder, "--checkpoint-every", 10, "--keep", 1
    )
    told = summary(run)
    assert told["digest"] == case.digest
    assert told["checkpoints"]["failed"] == 0
    newest = case.check_whole(folder)[-1]
    assert told["checkpoints"]["last_step"] == newest.contents.step
    assert f"checkpoint {newest.place}: after step {newest.contents.step}, " in err
    case.check_goes_on(str(newest.place), tmp_path / "next")


@pytest.mark.full
def test_a_run_that_rests_is_saved_read_compacted_and_deleted(case: Case, tmp_path: Path) -> None:
    run, folder = tmp_path / "run", url(tmp_path)
    case.stop_after(12, run, tmp_path)
    # Some of what is asked is refused at first, and some is answered by half.
    count, done_to = itertools.count(1), dict[int, Done]({0: "503", 1: "cut"})
    case.store.disturb = lambda method, path: done_to.get(next(count) % 40)
    done("checkpoint", "save", run, "--to", folder)
    case.train(run, "--resume", "--trainers", 1)
    done("checkpoint", "save", run, "--to", folder, "--keep", 1)
    first, newest = case.check_whole(folder)
    assert newest.base is not None
    assert newest.base.place == first.place
    assert done("digest", newest.place).strip() == case.digest
    case.store.disturb = lambda method, path: None
    done("checkpoint", "compact", newest.place, "--to", tmp_path / "local")
    done("checkpoint", "compact", newest.place, "--to", f"{folder}/whole")
    local, there = (
        Checkpoint.open(str(place(str(where)) / newest.place.name)) for where in (tmp_path / "local", f"{folder}/whole")
    )
    sums = [[(Path(file.name).name, file.sha256) for file in one.files] for one in (local, there)]
    assert sums[0] == sums[1]
    assert done("digest", there.place).strip() == case.digest
    assert "builds on it" in refused("checkpoint", "delete", first.place)
    done("checkpoint", "delete", there.place)
    done("checkpoint", "delete", first.place, "--with-increments")
    assert case.store.names(tmp_path.name) == []


@pytest.mark.full
def test_a_flipped_byte_is_named(case: Case, tmp_path: Path) -> None:
    run, folder = tmp_path / "run", url(tmp_path)
    case.stop_after(3, run, tmp_path)
    done("checkpoint", "save", run, "--to", folder)
    (one,) = case.check_whole(folder)
    file = one.contents.rows[3].name
    there = place(folder) / one.place.name / file
    data = bytearray(there.read_bytes())
    data[100] ^= 1
    there.write_bytes(bytes(data))
    assert f"{file} is damaged: its checksum does not match the manifest" in refused("checkpoint", "verify", one.place)
    assert f"{file} is damaged" in refused("digest", one.place)
    assert f"{file} is damaged" in case.train(
        tmp_path / "next", "--from", one.place, "--store", "local:1", "--trainers", 1, status=2
    )
    assert not (tmp_path / "next").exists()


def test_a_store_that_does_not_answer_is_told_in_a_line(case: Case, tmp_path: Path) -> None:
    case.store.disturb = lambda method, path: "503"
    folder = url(tmp_path, SOON)
    for command in (("checkpoint", "list", folder), ("digest", f"s3://{BUCKET}/{tmp_path.name}/step-3{SOON}")):
        assert re.search(r"s3://\S+: cannot be \w+( \w+)?: .*; try again when the object store answers", refused(*command))
    with pytest.raises(CheckpointUnreachable):
        place(folder).iterdir().__next__()
    case.store.disturb = lambda method, path: None
    assert "no checkpoints" in done("checkpoint", "list", folder)
    assert "has no checkpoint.json" in refused("checkpoint", "verify", f"s3://{BUCKET}/{tmp_path.name}/step-3")
    with pytest.raises(CheckpointError, match="bucket does not exist"):
        (place("s3://another/saved") / "step-1").write_bytes(b"1")


def test_training_goes_on_where_it_does_not_answer_and_the_next_one_is_saved(case: Case, tmp_path: Path) -> None:
    run, folder = tmp_path / "run", url(tmp_path, SOON)
    refusals = 0

    def disturb(method: str, path: str) -> Done | None:
        nonlocal refusals
        if method == "GET" and "list-type" in path and refusals < 2:
            refusals += 1
            return "503"
        return None

    case.store.disturb = disturb
    err = case.train(run, *MODEL, "--store", "local:1", "--trainers", 1, "--checkpoint", folder, "--checkpoint-every", 5)
    told = summary(run)
    assert told["digest"] == case.digest
    assert told["checkpoints"]["failed"] == 1
    # After a failure none is begun for a while, which training need not last for.
    noted = [(event["kind"], datetime.fromisoformat(event["time"])) for event in read_events(run)]
    (failed,) = (time for kind, time in noted if kind == "checkpoint-not-saved")
    assert all(time - failed > timedelta(seconds=9) for kind, time in noted if kind == "checkpoint-saved")
    assert "foreload: warning: a checkpoint was not saved: s3://" in err
    done("checkpoint", "save", run)
    saved = case.check_whole(folder)[-1]
    assert done("digest", saved.place).strip() == case.digest


@pytest.mark.full
@pytest.mark.parametrize("held", ["/rows-", "/dense", MANIFEST])
def test_where_all_are_killed_the_newest_whole_one_counts(case: Case, tmp_path: Path, held: str) -> None:
    run, folder = tmp_path / "run", url(tmp_path)
    case.stop_after(8, run, tmp_path)
    done("checkpoint", "save", run, "--to", folder)
    (before,) = case.check_whole(folder)
    case.store.seen.clear()
    case.store.disturb = lambda method, path: "held" if method == "PUT" and held in path else None
    arguments = ("train", case.schedule, "--run", run, "--resume", "--checkpoint", folder, "--checkpoint-every", 5, "--digest")
    command = Command(*arguments)
    case.store.until("PUT", held)
    command.remains.kill()
    command.clear()
    left = LocalStores.find(run / STORES)
    assert left is not None
    left.stop(save=False)
    case.store.let_go()
    assert listed(folder) == [str(before.place)]
    before.verify()
    err = case.train(run, "--resume", "--checkpoint", folder, "--checkpoint-every", 5, "--trainers", 1)
    assert f"resumed after step {before.contents.step}: the run has crashed since" in err
    assert summary(run)["digest"] == case.digest
    assert len(case.check_whole(folder)) > 1


@pytest.mark.full
def test_ctrl_c_amid_an_upload_ends_soon(case: Case, tmp_path: Path) -> None:
    run, folder = tmp_path / "run", url(tmp_path)
    case.stop_after(8, run, tmp_path)
    case.store.seen.clear()
    case.store.disturb = lambda method, path: "held" if method == "PUT" and "/rows-" in path else None
    command = Command("checkpoint", "save", run, "--to", folder)
    command.interrupt(lambda: any("/rows-" in path for _, path in case.store.seen))
    status, _, err = command.end()
    assert (status, err) == (130, "foreload: stopped\n")
    case.store.let_go()
    done("checkpoint", "save", run, "--to", folder)
    assert len(case.check_whole(folder)) == 1


@pytest.mark.full
def test_late_answers_hold_up_no_step(case: Case, tmp_path: Path) -> None:
    run, folder = tmp_path / "run", url(tmp_path)
    case.store.late_seconds = 0.02
    case.train(run, *MODEL, "--store", "local:1", "--trainers", 2, "--checkpoint", folder, "--checkpoint-every", 10)
    assert summary(run)["digest"] == case.digest
    assert summary(run)["checkpoints"]["saved"] > 0
    case.store.late_seconds = 0
    case.check_whole(folder)
