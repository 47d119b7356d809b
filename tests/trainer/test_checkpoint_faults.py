"""What dies, joins, leaves or is taken away amid a checkpoint that is saved while a run trains: it is as if nothing had been, or not there at all."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from command_line import Command, done, refused
from held import Hold, standing
from injection import CAN_JOIN, AnyFault, LauncherFault
from live_runs import EPOCH, EVERY, Case, arguments, live_case, saved
from small_job import summary

from foreload.cache.client.local import LocalStores
from foreload.pipelines.schedule.at_work import at_work
from foreload.trainer.checkpoints.contents import MANIFEST, Checkpoint
from foreload.trainer.checkpoints.draft import LOCK
from foreload.trainer.cluster.messages.faults import Fault, TrainerFault
from foreload.trainer.run.directory import CHECKPOINTS

pytestmark = pytest.mark.full

LAUNCHER_POINTS = {"begun": 1, "manifest written": 1, "published": 2, "old ones deleted": 1}
"""How many checkpoints there are when a launcher dies there for the second time, where one is to stay."""


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return live_case(tmp_path_factory.mktemp("faults"))


@pytest.mark.parametrize(
    ("point", "left"),
    LAUNCHER_POINTS.items(),
)
def test_a_launcher_that_is_killed_amid_a_checkpoint_leaves_the_one_before(
    case: Case, tmp_path: Path, servers: LocalStores, hold: Hold, point: str, left: int
) -> None:
    run = tmp_path / "run"
    place = ("--store", ",".join(servers.urls), "--trainers", "2", "--namespace", f"killed-{point.replace(' ', '-')}")
    save = ("--checkpoint-every", str(EVERY), "--keep", "1", "--checkpoint-policy", "full")
    begun = hold(arguments(case.schedule, run, *place, *save, "--digest"), EVERY, faults=[LauncherFault(point, 2)])
    begun.knows_checkpoint(2)
    begun.schedule.publish_through(begun.step + EVERY)
    status, _, err = begun.stopped()
    assert status == -signal.SIGKILL, err
    # The others have stopped by themselves.
    done("digest", run)
    assert "its launcher was killed; stopped after step" in begun.said
    there = sorted((Checkpoint.open(path) for path in (run / CHECKPOINTS).glob("step-*")), key=lambda one: one.contents.step)
    assert len(there) == left
    newest = there[-1]
    newest.verify()
    case.check_goes_on(newest.path, tmp_path / "next", "--store", "local:1", "--trainers", 1)
    case.train(run, "--resume", *place, *save)
    assert summary(run)["digest"] == case.digest
    (last,) = saved(run / CHECKPOINTS)
    assert last.contents.step > newest.contents.step


LOST: dict[str, tuple[list[AnyFault], tuple[str, ...]]] = {
    "before it": ([Fault(20, 1, signal.SIGKILL)], ("--no-restart",)),
    "amid it": ([LauncherFault("begun", 1, 1)], ("--no-restart",)),
    "amid it, and rebuilt": ([LauncherFault("begun", 1, 2)], ()),
    "and being rebuilt": ([Fault(EPOCH - 6, 0, signal.SIGKILL)], ()),
}


@pytest.mark.parametrize("lost", LOST)
def test_of_a_store_shard_that_is_lost_it_is_the_same_byte_for_byte(case: Case, tmp_path: Path, lost: str) -> None:
    faults, further = LOST[lost]
    save = ("--checkpoint-every", EPOCH, "--checkpoint-policy", "full")
    err = case.train(tmp_path / "run", "--store", "local:3", "--parity", "2+1", "--trainers", 2, *save, *further, faults=faults)
    told = summary(tmp_path / "run")
    assert told["digest"] == case.digest
    assert told["checkpoints"]["failed"] == 0
    assert f"store shard {faults[0].shard}: " in err  # type: ignore[union-attr]
    there = saved(tmp_path / "run" / CHECKPOINTS)
    assert {path.name for path in there[0].path.iterdir()} == {path.name for path in case.checkpoint.iterdir()}
    for path in case.checkpoint.iterdir():
        if path.name != MANIFEST:
            assert (there[0].path / path.name).read_bytes() == path.read_bytes()


AMID = TrainerFault(1, "checkpoint file written", EVERY - 1, signal.SIGSTOP)
SAVE = ("--checkpoint-every", EVERY, "--keep", 9, "--peer-timeout", 600)


def finish(case: Case, begun: Command, run: Path) -> str:
    """Wait for the end; assert that nothing happened to the model, and that every checkpoint is whole. Returns stderr."""
    status, _, err = begun.end()
    assert status == 0, err
    assert "Traceback" not in err
    told = summary(run)
    assert told["digest"] == case.digest
    assert told["checkpoints"]["failed"] == 0
    there = saved(run / CHECKPOINTS)
    assert len(there) == told["checkpoints"]["saved"] >= 1
    return err


@pytest.mark.parametrize(("begin", "scale"), [(2, 4), (3, 1)])
def test_trainers_join_or_leave_amid_one(case: Case, tmp_path: Path, hold: Hold, begin: int, scale: int) -> None:
    run = tmp_path / "run"
    place = ("--store", "local:3", "--trainers", begin, *SAVE, "--digest")
    begun = hold(arguments(case.schedule, run, *map(str, place)), EVERY, wait=False, faults=[AMID])
    process = standing(begun, run, 1)
    done("scale", run, scale, "--no-wait")
    begun.until(lambda: all(CAN_JOIN.format(trainer) in begun.said for trainer in range(begin, scale)))
    process.resume()
    begun.members(*range(scale))
    finish(case, begun, run)
    assert summary(run)["trainers"] == scale
    case.check_goes_on(saved(run / CHECKPOINTS)[-1].path, tmp_path / "next", "--store", "local:1", "--trainers", 1)


def test_a_server_is_replaced_amid_one(case: Case, tmp_path: Path, servers: LocalStores) -> None:
    run = tmp_path / "run"
    with LocalStores(1, tmp_path / "spare") as spare:
        begun = case.begin(
            run, "--store", ",".join(servers.urls), "--trainers", 2, *SAVE, "--namespace", "replaced", faults=[AMID]
        )
        process = standing(begun, run, 1)
        done("stores", "replace", run, 1, spare.urls[0])
        process.resume()
        err = finish(case, begun, run)
        assert "store shard 1: is whole again" in err
        case.check_goes_on(saved(run / CHECKPOINTS)[-1].path, tmp_path / "next", "--store", "local:1", "--trainers", 1)


def test_none_is_deleted_amid_an_increment_and_one_whose_base_has_gone_is_told(case: Case, tmp_path: Path, hold: Hold) -> None:
    run = tmp_path / "run"
    place = ("--store", "local:1", "--trainers", 2, *SAVE, "--checkpoint-policy", "consecutive", "--digest")
    # Amid the second one.
    amid = TrainerFault(1, "checkpoint file written", EVERY + 5, signal.SIGSTOP)
    begun = hold(arguments(case.schedule, run, *map(str, place)), EVERY, faults=[amid])
    begun.knows_checkpoint(2)
    begun.schedule.publish_through(begun.step + EVERY)
    process = standing(begun, run, 1)
    there = sorted((run / CHECKPOINTS).glob("step-*"), key=lambda path: int(path.name[5:]))
    for path in there:
        assert "another checkpoint is being saved in" in refused("checkpoint", "delete", path, "--with-increments")
    # By whoever asks nobody.
    shutil.rmtree(there[-1])
    process.resume()
    status, _, err = begun.end()
    assert status == 0, err
    told = summary(run)
    assert told["digest"] == case.digest
    assert (told["checkpoints"]["failed"], err.count("a checkpoint was not saved: ")) == (1, 1)
    assert f"checkpoint {there[-1]}: was removed while an increment of it was being saved" in err
    saved(run / CHECKPOINTS)
    done("checkpoint", "save", run)
    assert done("digest", run / CHECKPOINTS / f"step-{2 * EPOCH - 1}").strip() == case.digest


@pytest.mark.parametrize("command", ["train", "export", "digest", "compact"])
def test_one_that_goes_while_it_is_read_is_told_in_a_line(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    checkpoint, read = tmp_path / "saved" / case.checkpoint.name, Checkpoint._why_damaged
    call = {
        "train": ("train", case.schedule, "--from", checkpoint, "--run", tmp_path / "new", "--store", "local:1"),
        "export": ("export", checkpoint, "--out", tmp_path / "out"),
        "digest": ("digest", checkpoint),
        "compact": ("checkpoint", "compact", checkpoint, "--to", tmp_path / "compacted"),
    }[command]
    files = len(Checkpoint.open(case.checkpoint).files)
    left = [0]

    def last(*arguments: Any) -> str:
        left[0] -= 1
        why = read(*arguments)
        if not left[0]:
            shutil.rmtree(checkpoint)
        return why

    monkeypatch.setattr(Checkpoint, "_why_damaged", last)
    # While it is compared with its manifest, and as soon as that is done.
    for left[0] in (files - 3, files):
        shutil.copytree(case.checkpoint, checkpoint)
        assert "No such file" in refused(*call)
    assert not (tmp_path / "out").exists()


def test_where_another_saves_one_it_is_waited_for(case: Case, tmp_path: Path, hold: Hold) -> None:
    run, folder = tmp_path / "run", tmp_path / "saved"
    folder.mkdir()
    place = ("--store", "local:1", "--trainers", 2, "--checkpoint-every", EVERY, "--checkpoint", folder, "--digest")
    with at_work(folder / LOCK):
        begun = hold(arguments(case.schedule, run, *map(str, place)), EVERY)
        # Once the first one has been given up.
        begun.knows_checkpoint(2)
        assert saved(folder) == []
    begun.train_until(lambda _: bool(list(folder.glob("step-*"))))
    status, _, err = begun.end()
    assert status == 0, err
    told = summary(run)
    assert told["digest"] == case.digest
    assert told["checkpoints"]["failed"] == 0
    assert saved(folder)[-1].contents.step == told["checkpoints"]["last_step"]
    # What another run has there of the same step is left alone, and nothing is written for it.
    case.train(
        tmp_path / "other",
        "--store",
        "local:1",
        "--trainers",
        1,
        *("--checkpoint-every", EPOCH, "--checkpoint", case.checkpoint.parent),
    )
    assert summary(tmp_path / "other")["checkpoints"]["failed"] >= 1
    Checkpoint.open(case.checkpoint).verify()
