"""`foreload plan`: what is chosen and why, and what is asked of the history and told to the user."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clicks import Clicks, write_features, write_log
from command_line import SMALL, Command, main

from foreload.base.memory import total_bytes
from foreload.pipelines.compiler.other_slots import LaneUses
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.assembly.assembly import DenseModel
from foreload.trainer.assembly.job_shape import cores, machine, settings_of_job
from foreload.trainer.commands.plan import slot_counts
from foreload.trainer.job.job import TrainJob
from foreload.trainer.resources.choices import GIB, Choice, choose, front
from foreload.trainer.run import history

POOL = "cores=2,memory=64GiB,stores=3"


def choice(seconds: float, cores: float, slots: int = 100, prepared: bool = True) -> Choice:
    """A choice that costs cores * seconds / 3600 core hours, with no memory."""
    return Choice(1, 1, 1, "off", 1, slots, prepared, seconds, seconds / 1.1, seconds * 1.1, 1.0, cores, 0, 0)


def test_the_front_is_what_no_other_choice_beats_in_both() -> None:
    fast, cheap, middle = choice(100, 8), choice(400, 1), choice(200, 3)
    assert front([cheap, choice(150, 8), middle, fast, choice(400, 2)], 0) == [fast, middle, cheap]


def test_the_choice_keeps_the_deadline_or_the_budget() -> None:
    fast, cheap, middle = choice(100, 8), choice(400, 1), choice(200, 3)
    everything = [fast, cheap, middle]
    assert choose(everything, 0) == (fast, "the fastest")
    assert choose(everything, 0, deadline=450)[0] == cheap
    assert choose(everything, 0, deadline=410)[0] == middle, "the cheapest one may take longer than that"
    chosen, reason = choose(everything, 0, deadline=105)
    assert (chosen, "whole interval" in reason) == (fast, True)
    assert "none ends within" in choose(everything, 0, deadline=50)[1]
    assert choose(everything, 0, budget=0.2)[0] == middle
    assert "none costs" in choose(everything, 0, budget=0.01)[1]
    memory = replace(fast, trainer_bytes=100 * GIB)
    assert memory.gb_hours == pytest.approx(100 * 100 / 3600)
    assert memory.cost(0.5) == pytest.approx((800 + 5000) / 3600)


def test_what_need_not_be_prepared_again_goes_before_what_is_hardly_better() -> None:
    better, own = choice(100, 1, 200, prepared=False), choice(102, 1)
    assert choose([better, own], 0)[0] == own
    assert choose([better, replace(own, seconds=110.0)], 0)[0] == better


def test_slots_go_from_the_fewest_to_all_rows() -> None:
    accesses = LaneUses(np.empty(0, np.int32), np.array([0, 40, 90]), np.ones(12_000, bool), np.zeros(12_000, np.int16))
    counts = slot_counts([accesses], 700)
    assert (counts[0], counts[-1], 700 in counts, len(counts)) == (50, 12_000, True, 6)


def profiles(path: Path, schedule: Path) -> None:
    """Put profiles of this job and machine there: a step takes the longer the more trainers there are, and with parity."""
    job = TrainJob.of(
        {"schedule": str(schedule), "run": "none", "store": "local:1", "dim": 4, "model_options": {"bottom": "8-4", "top": "8-1"}}
    )
    opened = Schedule(schedule)
    shape = settings_of_job(job, opened, DenseModel.build(job, opened))
    for trainers, (shards, r) in product((1, 2), ((1, 0), (3, 1))):
        milliseconds = 3.0 * trainers + r
        lines = [[10.0, 60.0, 20.0, 10.0, 18.0, 500.0 * (trainers - 1), milliseconds, 1.0, 1.0, 0.1, 2.0 * trainers, 1.5]] * 40
        steps, stride = history.of_steps(lines)
        settings = shape | {
            "trainers": trainers,
            "trainers_here": trainers,
            "copies": trainers,
            "shards": shards,
            "k": 1 + r,
            "r": r,
            "terms": 1,
        }
        used = [{"kind": "trainer", "peak_bytes": 300 << 20, "processor_seconds": 2.0}]
        history.add(path, history.Profile(settings, machine(), used, steps, stride))


def plan(schedule: Path, *further: object) -> int:
    """Call it for the small model."""
    return main(["plan", str(schedule), *SMALL, "--pool", POOL, *map(str, further)])


def test_a_plan_tells_its_front_its_choice_and_the_commands(
    clicks: Clicks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known, told = tmp_path / "history.sqlite", tmp_path / "plan.json"
    profiles(known, clicks.schedule)
    assert plan(clicks.schedule, "--history", known, "--json", told, "--plot", tmp_path / "plan.png") == 0
    shown = capsys.readouterr()
    planned: dict[str, Any] = json.loads(told.read_text())
    assert (planned["profiles"], planned["probed"]) == (4, []), shown.err
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    choices, best, chosen = planned["choices"], planned["front"], planned["choice"]
    assert {one["trainers"] for one in choices} == {1, 2}
    assert {(one["shards"], one["parity"]) for one in choices} == {(1, "off"), (2, "off"), (3, "off"), (3, "2+1")}
    assert len({one["slots"] for one in choices}) >= 3
    assert all(one["seconds_low"] < one["seconds"] < one["seconds_high"] for one in choices)
    assert [one["seconds"] for one in best] == sorted(one["seconds"] for one in best)
    assert [one["cost"] for one in best] == sorted((one["cost"] for one in best), reverse=True)
    assert chosen["trainers"] == 1
    assert chosen["seconds"] <= 1.031 * min(one["seconds"] for one in choices)
    assert chosen["commands"][-1] in shown.out
    # The command lines are such that they can be called.
    own = next(one for one in choices if one["prepared"] and one["trainers"] == 1)
    (train,) = own["commands"]
    words = shlex.split(train)
    assert words[:3] == ["foreload", "train", str(clicks.schedule)]
    assert words[-4:] == ["--store", "local:1", "--trainers", "1"]
    other = next(one for one in choices if not one["prepared"])
    prepare = shlex.split(other["commands"][0])
    assert prepare[:3] == ["foreload", "prepare", str(clicks.log)]
    assert prepare[-4:] == ["--slots", str(other["slots"]), "--out", f"{clicks.schedule}-{other['slots']}"]
    assert shlex.split(other["commands"][1])[2] == f"{clicks.schedule}-{other['slots']}"


def test_its_command_prepares_from_another_folder_than_the_schedule_was_made_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made, here = tmp_path / "made", tmp_path / "made" / "deep" / "here"
    for folder in (made / "logs", here):
        folder.mkdir(parents=True)
    write_log(made / "logs" / "a=b.csv", 600)
    write_log(here / "held.csv", 100)
    write_features(made / "features.toml")
    monkeypatch.chdir(made)
    sources = ["logs/a=b.csv", "--eval-source", "held=deep/here/held.csv", "--eval-source", "same=logs/a=b.csv"]
    options = ["--format", "csv", "--features", "features.toml", "--batch-size", "10", "--lanes", "2", "--out", "clicks"]
    assert main(["prepare", *sources, *options]) == 0
    monkeypatch.chdir(here)
    known, told = tmp_path / "history.sqlite", tmp_path / "plan.json"
    schedule = Path("../../clicks")
    profiles(known, schedule)
    assert plan(schedule, "--history", known, "--json", told) == 0
    choices = json.loads(told.read_text())["choices"]
    other = min((one for one in choices if not one["prepared"]), key=lambda one: int(one["slots"]))
    words = shlex.split(other["commands"][0])
    assert words[2] == str(made / "logs" / "a=b.csv")
    assert words[words.index("--eval-source") + 1] == "held=held.csv"
    assert main(words[1:]) == 0
    prepared = Schedule(f"../../clicks-{other['slots']}")
    assert prepared.header.slots == (other["slots"],) * 2
    assert [name for name, _ in prepared.header.evaluation_sets] == ["held", "same"]
    # One of an earlier version does not say where its paths start.
    provenance = json.loads((schedule / "provenance.json").read_text())
    del provenance["folder"]
    (schedule / "provenance.json").write_text(json.dumps(provenance))
    assert plan(schedule, "--history", known, "--json", told) == 0
    choices = json.loads(told.read_text())["choices"]
    again = next(one["commands"][0] for one in choices if one["slots"] == other["slots"])
    assert again.startswith("foreload prepare ... --slots ")


def test_with_nothing_said_of_a_pool_it_is_this_machine_s(clicks: Clicks, tmp_path: Path) -> None:
    known, told = tmp_path / "history.sqlite", tmp_path / "plan.json"
    profiles(known, clicks.schedule)
    assert main(["plan", str(clicks.schedule), *SMALL, "--history", str(known), "--json", str(told)]) == 0
    pool = json.loads(told.read_text())["pool"]
    assert (pool["cores"], pool["memory_bytes"], pool["stores"]) == (cores(), total_bytes(), 5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--deadline", "1h", "--budget", "3"), "only one of them"),
        (("--deadline", "soon"), "--deadline: must be a time"),
        (("--budget", "-1"), "--budget: must be above 0; got -1"),
        (("--pool", "cpus=3"), "--pool: must be cores=N"),
        (("--pool", ","), "--pool: must be cores=N"),
        (("--pool", ""), "--pool: must be cores=N"),
        (("--pool", "cores=2,cores=3"), "--pool: must give cores once"),
        (("--pool", "memory=1MiB"), "--pool: memory must be at least"),
        (("--pool", "stores=2", "--parity", "2+1"), "--pool: stores must be at least 3"),
        (("--plot", "nowhere/plan.png"), "--plot: cannot write"),
    ],
)
def test_what_is_wrong_is_told_in_a_line(
    clicks: Clicks, tmp_path: Path, capsys: pytest.CaptureFixture[str], given: tuple[str, ...], message: str
) -> None:
    known = tmp_path / "history.sqlite"
    if "memory=1MiB" in given:
        profiles(known, clicks.schedule)
    assert plan(clicks.schedule, "--history", known, *given) == 2
    assert message in capsys.readouterr().err


@pytest.mark.full
def test_where_nothing_is_known_moments_are_run_and_remembered(
    clicks: Clicks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = tmp_path / "history.sqlite"
    assert main(["plan", str(clicks.schedule), *SMALL, "--pool", "cores=1,stores=3", "--history", str(known)]) == 0
    shown = capsys.readouterr()
    assert "running it briefly: 1 trainer, local:1" in shown.err
    assert "2 of them made now by short runs" in shown.out
    assert len(history.read(known)) == 2
    assert main(["plan", str(clicks.schedule), *SMALL, "--pool", "cores=1,stores=3", "--history", str(known)]) == 0
    assert "moment" not in capsys.readouterr().err


HELD_MODEL = """
import os, time
from foreload.trainer.models.dlrm import DLRM

class Model(DLRM):
    def forward(self, dense, embeddings, step):
        if step == 3 and os.path.exists("{held}"):
            open("{held}.entered", "w").close()
            while os.path.exists("{held}"):
                time.sleep(0.01)
        if step > 3 and os.path.exists("{held}.entered"):
            time.sleep(0.1)
        return super().forward(dense, embeddings)
"""


@pytest.mark.full
def test_where_it_is_killed_its_short_run_ends_and_the_next_one_removes_what_it_left(clicks: Clicks, tmp_path: Path) -> None:
    known, held = tmp_path / "history.sqlite", tmp_path / "held"
    # The short run is held in a step until plan is killed; its later steps are slow, so that it is asked to stop before its end.
    (tmp_path / "held_model.py").write_text(HELD_MODEL.format(held=held), encoding="utf-8")
    model = (*SMALL, "--model", f"{tmp_path / 'held_model.py'}:Model")
    arguments = ["plan", clicks.schedule, *model, "--pool", "cores=1,stores=3", "--history", known]
    held.touch()
    killed = Command(*arguments)
    try:
        temporary = killed.remains.temporary
        killed.until((tmp_path / "held.entered").exists)
        (left,) = temporary.glob("foreload-plan-*")
        killed.process.kill()
        killed.process.wait()
        held.unlink()
        killed.remains.wait_for_python()
        assert json.loads((left / "run" / "status.json").read_text())["state"] == "stopped"
        (tmp_path / "held.entered").unlink()
        status, _, err = Command(*arguments, TMPDIR=str(temporary)).end()
        assert status == 0, err
        assert not list(temporary.glob("foreload-plan-*"))
    finally:
        killed.clear()
