"""Checkpoints saved while a run trains: each is what a clean stop behind its step would have left, whoever dies meanwhile, and training goes on."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from unittest import mock

import psutil
import pytest
from command_line import SMALL, Command, done, fill, flip, refused
from held import Hold, stop_after
from injection import CallFault, LauncherFault
from live_runs import EVERY, Case, arguments, live_case, saved
from small_job import summary, synthetic_schedule

from foreload.cache.client.local import LocalStores
from foreload.cache.client.store import Store
from foreload.cache.protocol.shards.namespace import claim
from foreload.trainer.checkpoints.contents import MANIFEST
from foreload.trainer.checkpoints.draft import Draft
from foreload.trainer.cluster.member import trainer_checkpoints
from foreload.trainer.cluster.messages.control import (
    AskCheckpoint,
    CheckpointBegun,
    ask,
)
from foreload.trainer.cluster.messages.facts import CheckpointAt
from foreload.trainer.cluster.messages.faults import CHECKPOINT_POINTS, TrainerFault
from foreload.trainer.cluster.messages.trainers import CheckpointPlan, CheckpointReport, PartPlan
from foreload.trainer.errors import CheckpointError
from foreload.trainer.run.directory import CHECKPOINTS, Run
from foreload.trainer.run.event_log import read_events


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return live_case(tmp_path_factory.mktemp("live"))


DEATHS = ((0, "checkpoint taken"), (1, "checkpoint file written"))
PLACES = [
    (1, "local:1", "off"),
    (2, "local:3", "2+1"),
    (4, "local:5", "4+1"),
    (4, "local:1", "off"),
    (1, "local:3", "2+1"),
    (2, "local:5", "off"),
]
"""Trainers, store shards and parity."""


@pytest.mark.full
@pytest.mark.parametrize(
    ("source", "target"),
    [(PLACES[a], PLACES[b]) for a, b in ((1, 0), (2, 1), (0, 2), (0, 5), (1, 3), (2, 0), (3, 4), (3, 2), (4, 5), (5, 1), (5, 3))],
    ids=lambda place: "{}-{}-{}".format(*place),
)
def test_what_is_saved_while_it_trains_goes_on_anywhere(
    case: Case, tmp_path: Path, source: tuple[int, str, str], target: tuple[int, str, str]
) -> None:
    trainers, store, parity = source
    place = ("--store", store, "--parity", parity, "--trainers", trainers)
    case.train(tmp_path / "run", *place, "--checkpoint-every", EVERY, "--keep", 9, "--checkpoint", tmp_path / "saved")
    told = summary(tmp_path / "run")
    assert told["digest"] == case.digest
    there = saved(tmp_path / "saved")
    assert [one.contents.step % EVERY for one in there] == [EVERY - 1] * len(there)
    last = {"last_step": there[-1].contents.step, "last_bits": 32}
    assert told["checkpoints"] == {"saved": len(there), "failed": 0, **last, "seconds_waited": 0.0, "best": None}
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "checkpoint"] == [one.contents.step for one in there]
    assert there
    trainers, store, parity = target
    # An increment, if more than one was saved.
    case.check_goes_on(there[-1].path, tmp_path / "next", "--store", store, "--parity", parity, "--trainers", trainers)


def test_it_is_what_a_clean_stop_there_leaves(case: Case, tmp_path: Path) -> None:
    place = ("--store", "local:3", "--trainers", 1)
    # Not an epoch's end.
    stop_after(44, arguments(case.schedule, tmp_path / "stopped", *map(str, place)), tmp_path)
    status = Run.open(tmp_path / "stopped").saved_status()
    # The first multiple is that very step.
    case.train(tmp_path / "run", *place, "--checkpoint-every", status.step + 1)
    (one,) = saved(tmp_path / "run" / CHECKPOINTS)
    assert one.contents.step == status.step
    assert done("digest", one.path) == done("digest", tmp_path / "stopped")
    assert {name: one.contents.totals[name] for name in ("steps", "samples", "rows_used", "rows_fetched")} == {
        name: status.totals[name] for name in ("steps", "samples", "rows_used", "rows_fetched")
    }
    stages = [manifest.stages for manifest in (one.contents.run, Run.open(tmp_path / "stopped").manifest)]
    # A schedule that is being prepared has no checksum yet.
    assert len({tuple(replace(stage, path="", checksum=None) for stage in of_run) for of_run in stages}) == 1


@pytest.mark.parametrize("trainers", [1, 2])
def test_the_first_that_is_due_is_saved_however_short_steps_are(tmp_path: Path, trainers: int) -> None:
    """If it is of the first step, or of the last, and where a run goes on."""
    schedule = synthetic_schedule(tmp_path, 40 * 128)
    place = ("--store", "local:1", "--trainers", trainers, "--keep", 99)
    run = tmp_path / "run"
    for every, steps in ((1, {0}), (40, {39}), (7, {6})):
        done("train", schedule, "--run", run, *SMALL, *place, "--checkpoint-every", every, "--overwrite")
        assert {one.contents.step for one in saved(run / CHECKPOINTS)} >= steps
    # One that goes on after a step whose next one is due for a checkpoint.
    again = ("--from", run / CHECKPOINTS / "step-6", "--run", tmp_path / "next", "--checkpoint-every", 8)
    done("train", schedule, *again, *place)
    assert saved(tmp_path / "next" / CHECKPOINTS)[0].contents.step == 7


@pytest.mark.parametrize(
    ("trainer", "point"),
    [
        pytest.param(trainer, point, marks=() if (trainer, point) in DEATHS else pytest.mark.full)
        for trainer in (0, 1)
        for point in CHECKPOINT_POINTS
    ],
)
def test_a_trainer_that_dies_amid_a_checkpoint_costs_that_one_alone(
    case: Case, tmp_path: Path, hold: Hold, point: str, trainer: int
) -> None:
    run, checkpoints = tmp_path / "run", tmp_path / "run" / CHECKPOINTS
    held_first = 14  # the last step of the segment with the first checkpoint
    died = TrainerFault(trainer, point, held_first + 1, signal.SIGKILL)
    save = ("--trainers", "2", "--checkpoint-every", str(EVERY), "--keep", "9")
    job = hold(arguments(case.schedule, run, "--store", "local:3", *save, "--no-restart", "--digest"), EVERY, faults=(died,))
    assert job.step == held_first

    def noted(kind: str) -> int:
        return sum(event["kind"] == kind for event in read_events(run))

    job.until(lambda: noted("checkpoint-saved") == 1)
    job.knows_checkpoint(2)
    # It dies amid the second one, or when it is asked for the third. The one amid which it dies may not be saved.
    job.advance(EVERY)
    job.until(lambda: noted("trainer-lost") == 1)
    # The next one is known before a step of the new term.
    job.advance(EVERY)
    job.until(lambda: noted("checkpoint-saved") >= 2)
    status, _, err = job.end()
    assert status == 0, err
    assert "Traceback" not in err
    assert f"trainer {trainer}: lost (was killed by SIGKILL)" in err
    assert summary(run)["digest"] == case.digest
    case.check_goes_on(saved(checkpoints)[-1].path, tmp_path / "next", "--store", "local:1", "--trainers", 1)


def test_a_run_all_of_whose_trainers_died_goes_on_from_its_newest_checkpoint(case: Case, tmp_path: Path, hold: Hold) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    faults = [TrainerFault(trainer, "rows applied", 55, signal.SIGKILL) for trainer in (0, 1)]
    save = ("--checkpoint-every", EVERY, "--checkpoint", elsewhere)
    train = arguments(case.schedule, run, "--store", "local:3", "--trainers", "2", *map(str, save), "--no-restart")
    job = hold(train, 3 * EVERY, faults=faults)
    job.until(lambda: any(elsewhere.glob(f"step-*/{MANIFEST}")))
    job.schedule.release()
    status, _, err = job.end()
    assert status, err  # 3, or 2 where the second one still saw that the first was lost
    newest = saved(elsewhere)[-1]
    goes_on = f"--resume goes on from checkpoint {newest.path}"
    assert goes_on in err
    assert goes_on in refused("digest", run)
    assert "--store: must be what the run was started with, local:3; got local:5" in case.train(
        run, "--resume", "--store", "local:5", "--trainers", 2, status=2
    )
    # Whoever can put the newest one right does not lose the steps since the one before.
    flip(newest.path / MANIFEST, 100)
    assert f"with `foreload checkpoint delete {newest.path}`" in case.train(run, "--resume", "--trainers", 2, status=2)
    flip(newest.path / MANIFEST, 100)
    # The run knows where they are.
    err = case.train(run, "--resume", "--trainers", 2, "--checkpoint-every", EVERY)
    assert f"run {run}: crashed, and continues from its newest checkpoint; steps {newest.contents.step + 1} to " in err
    assert f"resumed from checkpoint {newest.path}, after step {newest.contents.step}, " in err
    assert summary(run)["digest"] == case.digest
    assert saved(elsewhere)[-1].contents.step > newest.contents.step
    assert not (run / CHECKPOINTS).exists()
    assert f"{elsewhere}/step-" in done("checkpoint", "list", run)


@pytest.mark.full
def test_where_servers_have_no_rows_of_the_last_clean_stop_the_newest_checkpoint_counts_though_it_is_older(
    case: Case, tmp_path: Path, servers: LocalStores
) -> None:
    run, place = tmp_path / "run", ("--store", ",".join(map(str, servers.urls)), "--parity", "off", "--trainers", 1)
    further = ("--namespace", "twice", "--checkpoint-every", EVERY)
    stop_after(45, arguments(case.schedule, run, *map(str, (*place, *further))), tmp_path)
    newest, stop = saved(run / CHECKPOINTS)[-1], Run.open(run).saved_status()
    assert newest.contents.step < stop.step
    died = TrainerFault(0, "rows applied", stop.step + 15, signal.SIGKILL)
    train = arguments(case.schedule, run, "--resume", *map(str, place))
    Command(*train, faults=[died]).end()
    manifest = Run.open(run).manifest
    with Store(servers.urls, timedelta(seconds=10)) as store:
        # Another run has the name: its rows are not touched.
        claim(store, "twice", manifest.identity | {"run": "another"}, "overwrite")
        assert "namespace twice belongs to another run" in case.train(run, *place, "--resume", status=2)
        claim(store, "twice", manifest.identity, "overwrite")
    err = case.train(run, *place, "--resume")
    assert f"resumed from checkpoint {newest.path}, " in err
    assert summary(run)["digest"] == case.digest


def test_a_checkpoint_that_cannot_be_written_is_told_and_training_goes_on(case: Case, tmp_path: Path, small_disk: Path) -> None:
    place = ("--store", "local:1", "--trainers", 2, "--checkpoint-every", EVERY, "--checkpoint", small_disk / "saved")
    fill(small_disk, 1 << 14)
    err = case.train(tmp_path / "run", *place)
    assert "foreload: warning: a checkpoint was not saved: " in err
    assert "disk is full" in err or "No space left on device" in err
    told = summary(tmp_path / "run")
    assert told["digest"] == case.digest
    assert told["checkpoints"]["failed"] > 0
    assert told["checkpoints"]["saved"] == 0
    assert not list((small_disk / "saved").glob("*step*"))


@pytest.mark.parametrize("name", ["file", "file/below", "long" * 80])
def test_a_folder_in_which_none_can_be_written_is_told_in_a_line(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="--to: cannot write to "):
        Draft(tmp_path / name, "--to")


def test_one_can_be_asked_for_while_it_trains(case: Case, tmp_path: Path, hold: Hold) -> None:
    run = tmp_path / "run"
    begun = hold(arguments(case.schedule, run, "--store", "local:3", "--trainers", "2", "--digest"))
    assert "--bits: is for a stopped run" in refused("checkpoint", "save", run, "--bits", 8)
    asked = ask(run, AskCheckpoint(str(tmp_path / "asked")))
    assert isinstance(asked, CheckpointBegun)
    begun.knows_checkpoint(1)
    status, _, err = begun.end()
    assert status == 0, err
    assert summary(run)["digest"] == case.digest
    (one,) = saved(tmp_path / "asked")
    assert f"checkpoint {one.path}: after step {one.contents.step}, " in err
    case.check_goes_on(one.path, tmp_path / "next", "--store", "local:1", "--trainers", 1)


@pytest.mark.parametrize("sent", [pytest.param(signal.SIGSTOP, marks=pytest.mark.full), signal.SIGKILL])
def test_who_asks_for_one_is_told_of_it_though_the_launcher_does_not_say_that_it_is_there(
    case: Case, tmp_path: Path, sent: int, hold: Hold, launched: Callable[..., Command]
) -> None:
    run, to = tmp_path / "run", tmp_path / "asked"
    train = arguments(case.schedule, run, "--store", "local:3", "--trainers", "2")
    begun = hold(train, faults=[LauncherFault("published", 1, None, sent)])
    # It stands when the launcher has answered that the checkpoint is begun.
    asked = launched(
        "checkpoint", "save", run, "--to", to, faults=[CallFault("foreload.trainer.commands.save_checkpoint:AskCheckpointed")]
    )
    asked.stand()
    begun.knows_checkpoint(1)
    begun.schedule.release()
    if sent == signal.SIGSTOP:
        begun.stand()
    psutil.Process(asked.process.pid).resume()
    status, out, err = asked.end()
    (one,) = saved(to)
    if sent == signal.SIGSTOP:
        assert status == 2
        assert (
            "its launcher has not answered for 5 s; is that process stopped? If it goes on, it still saves the checkpoint: "
            in err
        )
        assert f"`foreload checkpoint list {to}` shows it then" in err
        psutil.Process(begun.process.pid).resume()
        assert begun.end()[0] == 0
    else:
        assert status == 0, err
        assert str(one.path) in out
        begun.communicate()


def test_a_part_that_is_taken_after_it_was_told_to_be_written_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    writer, rendezvous, sent = mock.Mock(), mock.Mock(), list[object]()
    monkeypatch.setattr(trainer_checkpoints, "PartWriter", writer)
    rendezvous.poll.return_value = CheckpointAt(5)
    checkpoints = trainer_checkpoints.TrainerCheckpoints(mock.Mock(rendezvous=rendezvous, events=mock.Mock(send=sent.append)))
    trainer = mock.Mock(lanes=mock.Mock(partitions={}), session=mock.Mock(leads=False, transport=mock.Mock(world=1)))
    trainer.parts.schedule.prefix.return_value = ""
    wanted = CheckpointPlan(1, 1)
    checkpoints.follow(wanted)
    checkpoints.after_step(trainer, 4)
    # Another trainer had taken its part, so the coordinator told all.
    checkpoints.follow(replace(wanted, ready=True, part=PartPlan("folder", -1, (), 32)))
    assert not writer.called
    checkpoints.after_step(trainer, 5)
    assert [isinstance(event, CheckpointReport) and event.taken is not None for event in sent] == [False, True]
    assert writer.return_value.start.call_count == 1


@pytest.mark.full
def test_the_newest_stay_and_what_they_need(case: Case, tmp_path: Path, hold: Hold) -> None:
    place = ("--store", "local:1", "--trainers", "2", "--checkpoint-every", str(EVERY), "--keep", "1")
    # So many failures that auto, too, takes the most bits.
    bits = ("--checkpoint-bits", "auto", "--failures-a-day", "1e9")
    job = hold(arguments(case.schedule, tmp_path / "run", *place, "--checkpoint-policy", "one-shot", *bits), EVERY)
    job.knows_checkpoint(2)
    status, _, err = job.end()
    assert status == 0, err
    first, newest = saved(tmp_path / "run" / CHECKPOINTS)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {line["bits"] for line in lines if line["kind"] == "checkpoint" and "step" in line} == {8}
    assert summary(tmp_path / "run")["checkpoints"]["last_bits"] == first.bits == newest.bits == 8
    assert newest.base is not None
    assert newest.base.path == first.path
    # Rounded, so a run that goes on from it says so.
    assert newest.contents.inexact is not None
    file = newest.contents.rows[0].name
    flip(newest.path / file, 100)
    assert file in refused("checkpoint", "verify", newest.path)


@pytest.mark.full
def test_the_checkpoint_of_the_best_evaluation_stays_and_is_exported(case: Case, tmp_path: Path) -> None:
    run = tmp_path / "run"
    case.train(run, "--store", "local:1", "--trainers", 2, "--keep-best", "log_loss")
    evaluations = [
        line for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if line["kind"] == "evaluation"
    ]
    best = min(evaluations, key=lambda line: line["log_loss"])
    assert summary(run)["checkpoints"]["best"] == {"step": best["step"], "log_loss": best["log_loss"]}
    # It got worse after the first epoch, whose model is no longer in the run.
    assert best["step"] == evaluations[0]["step"] < evaluations[1]["step"]
    (one,) = saved(run / CHECKPOINTS)
    assert one.contents.step == best["step"]
    done("evaluate", one.path, "--json", tmp_path / "metrics.json")
    told = json.loads((tmp_path / "metrics.json").read_text())
    assert (told["step"], told["log_loss"]) == (best["step"], best["log_loss"])
    done("export", run, "--best", "--out", tmp_path / "best")
    assert json.loads((tmp_path / "best" / "export.json").read_text())["step"] == best["step"]
    assert "no best checkpoint is recorded" in refused("export", tmp_path, "--best", "--out", tmp_path / "none")


@pytest.mark.full
def test_the_best_outlives_newer_ones(case: Case, tmp_path: Path) -> None:
    run = tmp_path / "run"
    case.train(run, "--store", "local:1", "--trainers", 2, "--keep-best", "auc", "--checkpoint-every", 60, "--keep", 1)
    best = summary(run)["checkpoints"]["best"]["step"]
    assert summary(run)["digest"] == case.digest
    there = [one.contents.step for one in saved(run / CHECKPOINTS)]
    assert best in there
    assert there[-1] == summary(run)["checkpoints"]["last_step"]
