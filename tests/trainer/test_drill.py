"""`foreload drill lost-shard` on real servers: a store shard is killed or stopped after a step; the same model, and figures and a picture of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from command_line import SMALL, main
from small_job import BATCH, summary, synthetic_schedule, train_undisturbed
from test_timeline import STEP, steady
from training import job_in_memory

from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.cluster.messages.faults import Fault, TrainerFault
from foreload.trainer.cluster.messages.trainers import CopiesReport, FaultInjected, Ready, SeededCopy, TermLeft
from foreload.trainer.commands import drill
from foreload.trainer.commands.drill import Picture
from foreload.trainer.commands.lost_shard import LostShard
from foreload.trainer.commands.lost_trainer import LostTrainer
from foreload.trainer.commands.scale_drill import Change, account_changes
from foreload.trainer.job.job import TrainJob
from foreload.trainer.run.directory import DRILL, SUMMARY, Run
from foreload.trainer.run.event_log import read_events

STEPS = 80
LAST = STEPS - 1


MODEL = (*SMALL, "--dense-ema", "0.9")  # as `train_undisturbed` has it


@pytest.fixture(scope="module")
def schedule(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An epoch of STEPS in two lanes."""
    return synthetic_schedule(tmp_path_factory.mktemp("schedule"), STEPS * BATCH)


@pytest.fixture(scope="module")
def undisturbed(schedule: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of a run without parity that nothing happened to."""
    run = train_undisturbed(schedule, tmp_path_factory.mktemp("run"))
    return str(summary(run)["digest"])


def drilled(schedule: Path, run: Path, *further: str) -> dict[str, Any]:
    """The run's summary after a drill that must succeed; its figures of the drill stand under "drill"."""
    assert main(["drill", "lost-shard", str(schedule), "--run", str(run), *MODEL, *further]) == 0
    return summary(run)


def check_picture(path: Path) -> None:
    """It can be read, and is not of one colour."""
    pixels = matplotlib.image.imread(path)
    assert min(pixels.shape[:2]) > 100
    assert len(np.unique(pixels)) > 10


@pytest.mark.parametrize(
    ("at", "further"),
    [
        (20, ["--check"]),
        # With several trainers a rebuild is test_lost_shards.py's, too.
        pytest.param(20, ["--digest", "--trainers", "2"], marks=pytest.mark.full),
        pytest.param(LAST, ["--digest"], marks=pytest.mark.full),
    ],
)
@pytest.mark.full
def test_a_killed_shard_is_rebuilt_and_the_model_is_that_of_an_undisturbed_run(
    schedule: Path, undisturbed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], at: int, further: list[str]
) -> None:
    run = tmp_path / "run"
    told = drilled(schedule, run, "--at", str(at), "--shard", "1", "--down", "0", *further)
    figures = told["drill"]
    assert (figures["signal"], figures["step"], figures["shard"]) == ("SIGKILL", at, 1)
    assert 0 <= figures["seconds_until_lost"] <= figures["seconds_until_back"] <= figures["seconds_until_whole"]
    assert figures["rows_rebuilt"] > 0
    assert (figures["longest_gap_seconds"] is None) == (at == LAST), "no step ends after the last one"
    assert figures["median_step_seconds"] > 0
    assert told["digest"] == figures.get("digest_undisturbed", undisturbed) == undisturbed
    assert (told["state"], told["steps"]) == ("ended", STEPS)
    assert Run.open(run).saved_status().lost == []
    check_picture(run / DRILL)
    out = capsys.readouterr().out
    assert f"store shard 1: SIGKILL after step {at}" in out
    assert (f"the model is that of an undisturbed run: digest {undisturbed}" in out) == ("--check" in further)


@pytest.mark.full
def test_a_stopped_shard_is_lost_after_its_timeout_and_rebuilt_when_it_goes_on(
    schedule: Path, undisturbed: str, tmp_path: Path
) -> None:
    further = ("--at", "20", "--shard", "0", "--stop", "--store-timeout", "1", "--down", "1.5", "--digest")
    told = drilled(schedule, tmp_path / "run", *further)
    figures = told["drill"]
    assert figures["signal"] == "SIGSTOP"
    # Less than the timeout: the answer that stays away may be one to what was asked a little before the stop.
    assert figures["seconds_until_lost"] > 0.5
    assert figures["seconds_until_back"] >= 1.5
    assert figures["seconds_until_whole"] >= figures["seconds_until_back"]
    assert told["digest"] == undisturbed


@pytest.mark.full  # as test_lost_shards.py has it, with the drill's figures
def test_without_a_server_to_come_back_the_run_ends_degraded(schedule: Path, tmp_path: Path) -> None:
    figures = drilled(schedule, tmp_path / "run", "--at", "20", "--shard", "2", "--no-restart")["drill"]
    assert figures["seconds_until_lost"] is not None
    assert figures["seconds_until_back"] is figures["seconds_until_whole"] is None
    assert Run.open(tmp_path / "run").saved_status().lost == [2]


def test_without_a_schedule_clicks_are_made_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(drill, "SYNTHETIC", "--format synthetic --rows 5120 --batch-size 128 --lanes 2 --slots 900")
    assert main(["drill", "lost-shard", *SMALL]) == 0
    assert Schedule("drill-schedule").header.end_step == 40
    figures = json.loads(Path("drill", SUMMARY).read_text(encoding="utf-8"))["drill"]
    assert 40 // 4 <= figures["step"] <= 40 // 2, "by default in the second quarter of the training"
    check_picture(Path("drill", DRILL))
    # As for any run, the folder is not free now.
    assert main(["drill", "lost-shard", *SMALL]) == 2
    assert "--run: drill holds a run already" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize(
    ("trainer", "at", "further"),
    [
        (1, 20, ["--trainers", "2", "--check"]),
        (0, 20, ["--trainers", "2", "--stop", "--peer-timeout", "1"]),
        (0, LAST, ["--trainers", "2", "--store", "local:1"]),
    ],
)
def test_a_killed_trainer_s_lanes_are_taken_over_and_the_model_is_that_of_an_undisturbed_run(
    schedule: Path,
    undisturbed: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    trainer: int,
    at: int,
    further: list[str],
) -> None:
    run = tmp_path / "run"
    words = ["drill", "lost-trainer", str(schedule), "--run", str(run), *MODEL, "--digest", "--no-restart"]
    assert main([*words, "--at", str(at), "--trainer", str(trainer), *further]) == 0
    told = summary(run)
    figures = told["drill"]
    assert (figures["step"], figures["trainer"], figures["went_on_after_step"]) == (at, trainer, at - 1)
    assert figures["signal"] == ("SIGSTOP" if "--stop" in further else "SIGKILL")
    assert figures["taken_over"] == [{"lanes": [trainer], "from_trainer": trainer, "to_trainer": 1 - trainer}]
    assert 0 <= figures["seconds_until_noticed"] <= figures["seconds_until_taken_over"]
    assert figures["seconds_until_whole"] is None, "no trainer is left to hold copies"
    assert figures["bytes_taken_over"] > 0
    assert figures["longest_gap_seconds"] > figures["median_step_seconds"] > 0
    assert told["digest"] == figures.get("digest_undisturbed", undisturbed) == undisturbed
    assert (told["state"], told["steps"]) == ("ended", STEPS)
    check_picture(run / DRILL)
    assert f"trainer {trainer}: {figures['signal']} in step {at}" in capsys.readouterr().out


@pytest.mark.full
def test_copies_are_whole_again_after_a_trainer_of_three_was_killed(tmp_path: Path, undisturbed: str) -> None:
    clicks = synthetic_schedule(tmp_path, STEPS * BATCH, lanes=3)
    run = tmp_path / "run"
    words = [
        "drill",
        "lost-trainer",
        str(clicks),
        "--run",
        str(run),
        *MODEL,
        "--trainers",
        "3",
        "--at",
        "20",
        "--check",
        "--no-restart",
    ]
    assert main(words) == 0
    figures = summary(run)["drill"]
    assert 0 < figures["seconds_until_taken_over"] < figures["seconds_until_whole"]
    assert figures["bytes_seeded"] > 0


def test_copies_of_the_term_of_the_loss_are_not_whole_again(schedule: Path) -> None:
    """With two trainers there is nobody left to hold copies, whenever the one that stays reports on those of before."""
    observed = LostTrainer(job_in_memory(trainers=2), at=3, trainer=1)
    observed.begin(Schedule(schedule))
    copies = {0: SeededCopy(4, 4, True)}
    for trainer in range(2):
        observed.on_event(trainer, Ready(1, {}))
    observed.on_event(1, FaultInjected(TrainerFault(1, "forward done", 3, 9), 0.0))
    observed.on_event(0, TermLeft(1, 2, (0,), False, None))
    observed.on_event(0, CopiesReport(1, copies))
    assert observed.followed["whole"] is None
    observed.on_event(0, Ready(2, {}))
    observed.on_event(0, CopiesReport(2, {}))
    assert observed.followed["whole"] is None
    observed.on_event(0, CopiesReport(2, copies))
    assert observed.followed["whole"] is not None


@pytest.mark.parametrize(
    ("further", "message"),
    [
        (
            ["--trainers", "1"],
            "--copies: a drill that loses a trainer needs at least 2, so that another trainer takes over its lanes; got 1",
        ),
        (["--copies", "1"], "--copies: a drill that loses a trainer needs at least 2"),
        (["--trainer", "2"], "--trainer: must be one of the 2 trainers, 0 to 1; got 2"),
        (["--at", "80"], "--at: must be a step of"),
        (["--follow"], "--follow: cannot be given to a drill"),
    ],
)
def test_what_trainers_cannot_be_drilled_is_refused_in_one_line_before_anything_is_made(
    schedule: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], further: list[str], message: str
) -> None:
    assert main(["drill", "lost-trainer", str(schedule), "--run", str(tmp_path / "run"), *further]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"foreload: error: {message}")
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "run").exists()


WORDS = "numbers of store shards as 4s, shards that move as move-0, or replace"
FORM = f"--to: must be a number of trainers, and then more of them, {WORDS}, separated by"


@pytest.mark.parametrize(
    ("further", "message"),
    [
        (["--to", "1"], f"{FORM} commas; got 1"),
        (["--to", "1,0"], "--to: must be numbers of at least 1; got 1,0"),
        (["--to", "1,0s"], "--to: must be numbers of at least 1; got 1,0s"),
        (["--to", "1,x"], f"{FORM} commas; got 1,x"),
        (["--to", "3s,1"], f"{FORM} commas; got 3s,1"),
        (["--to", "1,move"], f"{FORM} commas; got 1,move"),
        (["--to", "1,3"], "--to: must be at most the schedule's lanes, 2; got 3; prepare with more --lanes"),
        (["--to", "1,2", "--trainers", "2"], "--trainers: must be the first number of --to, 1; got 2; leave it out"),
        (["--to", "1,2", "--follow"], "--follow: cannot be given to a drill"),
    ],
)
def test_what_numbers_of_trainers_cannot_be_drilled_is_refused_in_one_line(
    schedule: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], further: list[str], message: str
) -> None:
    assert main(["drill", "scale", str(schedule), "--run", str(tmp_path / "run"), *further]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"foreload: error: {message}")
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_changes_of_the_number_of_trainers_are_accounted_for() -> None:
    timeline = steady(40)
    begin = float(timeline.ended[0] - timeline.took[0])
    took = float(timeline.took[0])
    changes = [Change("2", 2, 9, begin + 10 * took, begin + 15.5 * took), Change("1", 1, 29)]
    before, after = account_changes(timeline, 1, changes)["changes"]
    assert (before["change"], after["change"]) == ("1 trainer", "2 trainers")
    assert (before["trainers"], after["trainers"], after["step"]) == (1, 2, 9)
    assert after["asked_at_seconds"] == pytest.approx(10 * took)
    assert after["seconds_until_done"] == pytest.approx(5.5 * took)
    assert after["longest_gap_seconds"] == pytest.approx(took)
    assert before["samples_per_second"] == pytest.approx(after["samples_per_second"])


def test_what_did_not_happen_has_no_figure() -> None:
    def account(injected: float, *followed: float) -> dict[str, float | None]:
        moments = dict(zip(LostShard.words, (*followed, None, None, None), strict=False))
        return LostShard.account(steady(100), {"injected": injected, **moments})

    whole = account(10.0, 11.0, 20.0, 30.0)
    assert all(value is not None for value in whole.values())
    assert whole["throughput_degraded"] == pytest.approx(1)
    assert whole["throughput_rebuilding"] == pytest.approx(1)
    assert (whole["seconds_until_lost"], whole["seconds_until_back"], whole["seconds_until_whole"]) == (1, 10, 20)
    degraded = account(10.0, 11.0)
    assert degraded["throughput_degraded"] == pytest.approx(1)
    assert degraded["throughput_rebuilding"] is degraded["seconds_until_back"] is degraded["seconds_until_whole"] is None
    last = account(50.0, 51.0, 52.0, 53.0)
    assert last["longest_gap_seconds"] is None
    assert last["median_step_seconds"] == STEP


@pytest.mark.full
def test_trainers_join_and_leave_in_a_drill_and_the_model_is_that_of_an_undisturbed_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clicks = synthetic_schedule(tmp_path, 6000 * 16, further="--batch-size 16")
    run = tmp_path / "run"
    assert main(["drill", "scale", str(clicks), "--run", str(run), *SMALL, "--to", "1,2,1", "--check"]) == 0
    figures = summary(run)["drill"]["changes"]
    assert [entry["trainers"] for entry in figures] == [1, 2, 1]
    assert all(entry["longest_gap_seconds"] <= entry["seconds_until_done"] for entry in figures[1:])
    check_picture(run / DRILL)
    assert "the model is that of an undisturbed run" in capsys.readouterr().out


@pytest.mark.full
def test_store_shards_come_move_and_go_in_a_drill(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clicks = synthetic_schedule(tmp_path, 12_000 * 16, further="--batch-size 16")
    run = tmp_path / "run"
    assert main(["drill", "scale", str(clicks), "--run", str(run), *SMALL, "--to", "1,2,4s,replace,move-0,3s", "--check"]) == 0
    figures = summary(run)["drill"]["changes"]
    changes = ["1 trainer", "2 trainers", "4 store shards", "a trainer is replaced", "shard 0 moves", "3 store shards"]
    assert [entry["change"] for entry in figures] == changes
    assert [event["kind"] for event in read_events(run)].count("rows-moved") == 3
    out = capsys.readouterr().out
    assert all(f"{change}: " in out for change in changes)
    assert "the model is that of an undisturbed run" in out
    assert main(["drill", "scale", str(clicks), "--run", str(run), *SMALL, "--overwrite", "--to", "1,2s", "--digest"]) == 2
    assert "2 store shards: " in capsys.readouterr().err


def test_step_and_shard_follow_from_the_seed(schedule: Path, tmp_path: Path) -> None:
    opened = Schedule(schedule)

    def chosen(seed: int, at: int | None = None, shard: int | None = None) -> tuple[int, int]:
        job = TrainJob.of({"schedule": schedule, "run": tmp_path / "run", "store": "local:3", "seed": seed})
        chosen = LostShard(job, at, shard)
        chosen.begin(opened)
        (fault,) = chosen.faults
        assert isinstance(fault, Fault)
        return fault.step, fault.shard

    assert [chosen(seed) for seed in range(30)] == [chosen(seed) for seed in range(30)]
    steps, shards = zip(*(chosen(seed) for seed in range(30)), strict=True)
    assert len(set(steps)) > 10
    assert all(STEPS // 4 <= step <= STEPS // 2 for step in steps)
    assert set(shards) == {0, 1, 2}
    assert chosen(5, at=LAST, shard=2) == (LAST, 2)


@pytest.mark.parametrize(
    ("further", "message"),
    [
        (["--at", "80"], "--at: must be a step of"),
        (["--at", "-1"], "--at: must be a step of"),
        (["--shard", "3"], "--shard: must be a store shard of local:3, 0 to 2; got 3"),
        (["--down", "-1"], "--down: must be 0 to 20 seconds; got -1"),
        (["--down", "21"], "--down: must be 0 to 20 seconds; got 21"),
        (["--store", "local:2"], "--store: a drill needs parity, which local:2 does not have"),
        (["--parity", "off"], "--store: a drill needs parity, which local:3 does not have"),
        (["--store", "redis://127.0.0.1:1"], "--store: a drill only kills servers that it started"),
        (["--follow"], "--follow: cannot be given to a drill"),
        (["--spare", "redis://127.0.0.1:1"], "--spare: is for servers that --store names by URL"),
    ],
)
def test_what_cannot_be_drilled_is_refused_in_one_line_before_anything_is_made(
    schedule: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], further: list[str], message: str
) -> None:
    assert main(["drill", "lost-shard", str(schedule), "--run", str(tmp_path / "run"), *further]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"foreload: error: {message}")
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_without_matplotlib_a_line_says_so_and_nothing_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    picture = Picture("a loss", [("killed", 2.0)], [(3.0, 4.0)])
    assert drill.plot(tmp_path / DRILL, steady(20), picture) is None
    assert "matplotlib is not installed; `pip install matplotlib`" in capsys.readouterr().err
    monkeypatch.undo()
    assert drill.plot(tmp_path / DRILL, steady(20), picture) == str(tmp_path / DRILL)
    check_picture(tmp_path / DRILL)
