"""The moving average of the dense part: to the bits of the plain trainer, whoever trains and wherever it is cut; and what evaluates and serves it."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import small_terms
import torch
from command_line import SMALL, main
from safetensors.torch import load_file
from small_job import summary
from training import Trained, train

from foreload.base.errors import SettingError
from foreload.cache.client.local import LocalStores
from foreload.pipelines import prepare
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.assembly.dense_file import tensors
from foreload.trainer.assembly.saved_dense import read_dense
from foreload.trainer.commands.evaluate import evaluated
from foreload.trainer.compute import dense_average
from foreload.trainer.compute.dense_optimizers import build_dense_optimizer
from foreload.trainer.job.job import TrainJob
from foreload.trainer.run.directory import Run
from foreload.trainer.saved.stopped_run import open_stopped
from foreload.trainer.saved.trained_model import dense_module

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has a log and its schedule."""
    made = tmp_path_factory.mktemp("average")
    small_terms.schedule(made)
    return made


@pytest.fixture(scope="module")
def schedule(folder: Path) -> Schedule:
    return Schedule(folder / "schedule")


DENSE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Adam": ({}, {}),
    "SGD, which has no state": (
        {"dense_optimizer": "SGD", "dense_ema": 0.5},
        {"dense_optimizer": "SGD", "dense_ema": 0.5},
    ),
    "SGD, decay, clipped": (
        {"dense_optimizer": "SGD", "dense_options": {"weight_decay": 0.1, "momentum": 0.9}, "dense_clip": 0.05, "dense_ema": None},
        {"dense_optimizer": "SGD", "dense_options": {"lr": 0.01, "weight_decay": 0.1, "momentum": 0.9}, "dense_clip": 0.05, "dense_ema": None},
    ),
    "Adam, decay, clipped": (
        {"dense_options": {"weight_decay": 0.1}, "dense_clip": 0.05},
        {"dense_options": {"lr": 0.01, "weight_decay": 0.1}, "dense_clip": 0.05},
    ),
    "AdamW, decay, clipped": (
        {"dense_optimizer": "AdamW", "dense_options": {"weight_decay": 0.1}, "dense_clip": 0.05, "dense_ema": 0.99},
        {"dense_optimizer": "AdamW", "dense_options": {"lr": 0.01, "weight_decay": 0.1}, "dense_clip": 0.05, "dense_ema": 0.99},
    ),
}  # fmt: skip


def _check(outcome: Trained, folder: Path, changed: dict[str, Any]) -> None:
    expected = small_terms.plainly(folder, **changed)
    assert outcome.digest == expected.digest
    assert [step.loss for step in outcome.steps] == expected.log_losses[-len(outcome.steps) :]
    evaluations = expected.evaluations[-len(outcome.evaluations) :]
    assert [(e.auc, e.log_loss) for e in outcome.evaluations] == [pytest.approx((e.auc, e.log_loss)) for e in evaluations]


@pytest.mark.parametrize("name", DENSE)
def test_averages_decay_and_clipping_are_those_of_the_plain_trainer(
    schedule: Schedule, folder: Path, servers: LocalStores, name: str
) -> None:
    given, theirs = DENSE[name]
    _check(train(small_terms.job(**given), schedule, servers.urls[:2], 3), folder, theirs)


@pytest.mark.parametrize("stop", [0, 13])
def test_a_training_goes_on_with_its_average(schedule: Schedule, folder: Path, servers: LocalStores, stop: int) -> None:
    job = small_terms.job()
    stopped = train(job, schedule, servers.urls[:3], 2, stop_after=lambda step: step == stop, parity=(2, 1))
    _check(train(job, schedule, servers.urls[:3], 4, resume=stopped, parity=(2, 1), copies=2), folder, {})


def test_an_evaluation_is_the_averages_and_training_the_parameters(folder: Path) -> None:
    with_average, without = (small_terms.plainly(folder, dense_ema=decay) for decay in (0.9, None))
    assert with_average.log_losses == without.log_losses
    assert with_average.evaluations != without.evaluations


@pytest.mark.parametrize("value", [0, 1, -0.5, 1.5, 0.99999999999, "x", True])
def test_what_is_no_decay_is_refused(value: object) -> None:
    with pytest.raises(SettingError, match=r"^--dense-ema: must be "):
        TrainJob.of({"schedule": "s", "run": "r", "store": "local:1", "dense-ema": value})


def test_parameters_are_their_own_averages_before_the_first_step_and_come_back_after_an_error() -> None:
    module = torch.nn.Linear(3, 2)
    optimizer = build_dense_optimizer("Adam", 0.1, {}, module)
    parameters, initial = list(module.parameters()), [value.detach().clone() for value in module.parameters()]
    with dense_average.averaged(optimizer, parameters):
        assert all(map(torch.equal, parameters, initial))
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    dense_average.step(optimizer, parameters, 0.75)
    trained = [value.detach().clone() for value in parameters]
    with contextlib.suppress(ZeroDivisionError), dense_average.averaged(optimizer, parameters):
        for parameter, own, before in zip(parameters, trained, initial, strict=True):
            torch.testing.assert_close(parameter.detach(), 0.75 * before + 0.25 * own)
        raise ZeroDivisionError
    assert all(map(torch.equal, parameters, trained))


def test_a_run_evaluates_predicts_and_exports_its_average(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stopped, gone on with, and made anew from a checkpoint in between."""
    monkeypatch.chdir(tmp_path)
    given = "--format synthetic --rows 1200 --eval-fraction 0.2 --batch-size 64 --lanes 2 --epochs 2 --out clicks"
    prepare.run(given.split())
    common = ["train", "clicks", *SMALL, "--store", "local:1", "--dense-optimizer", "Adam", "--dense-ema", "0.9"]
    assert main([*common, "--run", "run", "--digest"]) == 0
    last = [json.loads(line) for line in Path("run/metrics.jsonl").read_text(encoding="utf-8").splitlines()][-1]
    told = summary(Path("run"))
    parameters, state = map(tensors, read_dense(Run.open("run").dense(29), 29))
    averages = dense_average.to_serve(parameters, state)
    assert set(averages) == set(parameters)
    assert not any(torch.equal(averages[name], value) for name, value in parameters.items())
    capsys.readouterr()
    assert main(["evaluate", "run", "--json", "evaluated.json"]) == 0
    assert json.loads(Path("evaluated.json").read_text(encoding="utf-8"))["log_loss"] == pytest.approx(last["log_loss"])
    with open_stopped("run", None) as model:
        assert sum(len(one.outputs.numpy()) for one in evaluated(model, model.schedule)) == 240
    assert main(["export", "run", "--out", "export"]) == 0
    exported, beside = load_file("export/model.safetensors"), load_file("export/optimizer.safetensors")
    assert all(torch.equal(exported[name], value) for name, value in averages.items())
    assert all(torch.equal(beside[f"{name}/trained"], value) for name, value in parameters.items())
    assert not any(name.endswith("/ema") for name in beside)
    assert {name for name in state if not name.endswith("/ema")} < set(beside)
    with open_stopped("run", None) as model:
        served = dict(dense_module(model).named_parameters())
    assert all(torch.equal(served[name], value) for name, value in averages.items())
    capsys.readouterr()
    assert main([*common[:-1], "0.8", "--run", "run", "--resume"]) == 2
    assert "--dense-ema: must be what the run was started with, 0.9; got 0.8; leave it out" in capsys.readouterr().err
    assert main(["checkpoint", "save", "run", "--to", "saved"]) == 0
    assert main(["checkpoint", "restore", "saved/step-29", "--run", "again", "--store", "local:1"]) == 0
    capsys.readouterr()
    assert main(["digest", "again"]) == 0
    assert told["digest"] in capsys.readouterr().out
