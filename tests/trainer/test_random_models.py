"""Models that draw their weights from NumPy and Python, and take the step: one model, whoever trains it, stops it, resumes it or is lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import reference
import small_terms
from clicks import Clicks
from command_line import done
from small_terms import assert_same
from training import Death, train

from foreload.cache.client.local import LocalStores
from foreload.pipelines import prepare
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.cluster.coordinator.terms import Change
from foreload.trainer.job.job import TrainJob
from foreload.trainer.models.building import load_model

HERE = Path(__file__).parent
pytestmark = pytest.mark.usefixtures("one_thread", "cases_on_path")


def annealed() -> TrainJob:
    return small_terms.job(model="random_models:Annealed", model_options={})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has a log and its schedule."""
    made = tmp_path_factory.mktemp("random")
    small_terms.schedule(made)
    return made


@pytest.fixture(scope="module")
def schedule(folder: Path) -> Schedule:
    return Schedule(folder / "schedule")


@pytest.fixture(scope="module")
def expected(schedule: Schedule, folder: Path, cases_on_path: None) -> reference.ReferenceResult:
    """What plain training in memory makes of the model."""
    return small_terms.plainly(folder, model=load_model("random_models:Annealed"), model_options={})


@pytest.mark.parametrize("trainers", [1, 2, 4])
def test_it_is_that_of_the_plain_trainer_for_any_number_of_trainers(
    schedule: Schedule, servers: LocalStores, expected: reference.ReferenceResult, trainers: int
) -> None:
    outcome = train(annealed(), schedule, servers.urls, trainers)
    assert outcome.digest == expected.digest
    assert [step.loss for step in outcome.steps] == expected.log_losses
    assert [e.log_loss for e in outcome.evaluations] == pytest.approx([e.log_loss for e in expected.evaluations])


def test_it_is_so_after_a_resume_and_a_join(
    schedule: Schedule, servers: LocalStores, expected: reference.ReferenceResult
) -> None:
    job = annealed()
    stopped = train(job, schedule, servers.urls, 2, stop_after=lambda step: step == 9)
    outcome = train(job, schedule, servers.urls, 2, copies=2, resume=stopped, changes={14: Change((2, 3), ())})
    assert outcome.terms[-1].members == (1, 0, 2, 3)
    assert outcome.digest == expected.digest


def test_it_is_so_where_a_trainer_is_lost(schedule: Schedule, servers: LocalStores, expected: reference.ReferenceResult) -> None:
    undisturbed = train(annealed(), schedule, servers.urls)
    outcome = train(annealed(), schedule, servers.urls, 3, copies=2, deaths=[Death(1, "dense part applied", 7)])
    assert len(outcome.terms) == 2
    assert_same(outcome, undisturbed)
    assert outcome.digest == expected.digest


def test_steps_are_counted_along_the_chain_of_schedules(tmp_path: Path, servers: LocalStores) -> None:
    first = small_terms.schedule(tmp_path)
    prepare.run([f"--after={first.path}", f"--out={tmp_path / 'second'}", "--slots=120", "--epochs=1"])
    job = annealed()
    before = train(job, first, servers.urls, 2)
    outcome = train(job, Schedule(tmp_path / "second"), servers.urls, 1, resume=before)
    plain = small_terms.plainly(tmp_path, model=load_model("random_models:Annealed"), model_options={}, epochs=3)
    assert outcome.digest == plain.digest
    assert outcome.evaluations[-1].log_loss == pytest.approx(plain.evaluations[-1].log_loss)


# -- Through the command line ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def four_lanes(tmp_path_factory: pytest.TempPathFactory) -> Clicks:
    return Clicks.prepare(tmp_path_factory.mktemp("four"), lanes=4)


def given(clicks: Clicks, run: Path, model: str, trainers: int) -> list[object]:
    settings = ["--dim", 4, "--model", f"random_models.py:{model}", "--model-folder", HERE, "--store", "local:1", "--seed", 11]
    return ["train", clicks.schedule, "--run", run, *settings, "--trainers", trainers]


def test_digests_and_log_losses_are_those_of_every_other_command(four_lanes: Clicks, tmp_path: Path) -> None:
    told = []
    for trainers in (1, 2, 4):
        run = tmp_path / str(trainers)
        done(*given(four_lanes, run, "Annealed", trainers), "--model-options", "dropout=0.2", "--digest")
        summary = json.loads((run / "summary.json").read_text())
        assert done("digest", run).strip() == summary["digest"]
        done("evaluate", run, "--json", tmp_path / "evaluated.json")
        evaluated = json.loads((tmp_path / "evaluated.json").read_text())
        assert evaluated["log_loss"] == summary["log_loss"]
        told.append((summary["digest"], summary["log_loss"]))
    assert len(set(told)) == 1
