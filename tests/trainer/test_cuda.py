"""Training on a CUDA device, where there is one: the same bits for any number of trainers, shards and slots, and whatever died.

The trainers share one device. How several devices are used needs several.
"""

from __future__ import annotations

import json
import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import done, refused
from held import Hold
from small_job import arguments, summary, synthetic_schedule

from foreload.trainer.commands import status

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(scope="module")
def schedule(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two epochs of 60 steps in four lanes, with evaluation after each."""
    return synthetic_schedule(
        tmp_path_factory.mktemp("schedule"), 8500, lanes=4, slots=500, further="--eval-fraction 0.1 --epochs 2"
    )


def train(schedule: Path, run: Path, *further: str) -> dict[str, Any]:
    """Train to the end; what summary.json says."""
    done(*arguments(schedule, run, "--digest", *further))
    return summary(run)


@pytest.fixture(scope="module")
def alone(schedule: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a run says with one trainer on the device and one shard, to which nothing happened."""
    return train(schedule, tmp_path_factory.mktemp("alone") / "run", "--store", "local:1", "--device", "cuda")


@cuda
def test_it_learns_what_is_learned_on_the_cpu_but_for_rounding(schedule: Path, alone: dict[str, Any], tmp_path: Path) -> None:
    on_cpu = train(schedule, tmp_path / "run", "--store", "local:1")
    assert math.isclose(alone["log_loss"], on_cpu["log_loss"], rel_tol=1e-3), on_cpu
    assert math.isclose(alone["auc"], on_cpu["auc"], rel_tol=1e-2), on_cpu


@cuda
@pytest.mark.parametrize(
    "further",
    [
        pytest.param(["--store", "local:1"], id="again"),
        pytest.param(["--store", "local:3", "--trainers", "2"], id="two trainers, parity"),
        pytest.param(["--store", "local:3", "--parity", "off", "--trainers", "4"], id="four trainers"),
        pytest.param(["--store", "local:3", "--trainers", "2", "--copies", "2"], id="two trainers, with copies of lanes"),
    ],
)
def test_the_bits_are_the_same_for_any_trainers_and_shards(
    schedule: Path, alone: dict[str, Any], tmp_path: Path, further: list[str]
) -> None:
    assert train(schedule, tmp_path / "run", "--device", "cuda", *further)["digest"] == alone["digest"]


@cuda
def test_the_bits_are_the_same_with_every_row_in_its_slot(alone: dict[str, Any], tmp_path: Path) -> None:
    all_slots = synthetic_schedule(tmp_path, 8500, lanes=4, slots=20000, further="--eval-fraction 0.1 --epochs 2")
    assert train(all_slots, tmp_path / "run", "--store", "local:1", "--device", "cuda")["digest"] == alone["digest"]


@cuda
def test_a_run_that_was_stopped_or_saved_goes_on_to_the_same_bits(
    schedule: Path, alone: dict[str, Any], tmp_path: Path, hold: Hold
) -> None:
    run, saved = tmp_path / "run", tmp_path / "saved"
    job = hold(arguments(schedule, run, "--store", "local:3", "--device", "cuda", "--digest"), 30)
    job.process.terminate()
    assert job.end()[0] == 128 + signal.SIGTERM
    done("checkpoint", "save", run, "--to", saved)
    done("train", schedule, "--run", run, "--resume", "--trainers", "2", "--digest")
    assert summary(run)["digest"] == alone["digest"]
    again = tmp_path / "again"
    done(*arguments(schedule, again, "--store", "local:2", "--device", "cuda", "--digest", "--from", str(saved)))
    assert summary(again)["digest"] == alone["digest"]


@cuda
@pytest.mark.parametrize("trainer", [0, 1])
def test_a_trainer_that_dies_leaves_the_same_bits(
    schedule: Path, alone: dict[str, Any], tmp_path: Path, hold: Hold, trainer: int
) -> None:
    run = tmp_path / "run"
    further = ["--store", "local:1", "--trainers", "3", "--copies", "2", "--digest", "--no-restart", "--device", "cuda"]
    job = hold(arguments(schedule, run, *further))
    job.train_until(lambda reported: status.run(str(run)).survives is True)
    job.workers[trainer].kill()
    job.until(lambda: f"trainer {trainer}: lost" in job.said)
    ended, _, err = job.end()
    assert ended == 0, err
    assert summary(run)["digest"] == alone["digest"]


@cuda
def test_what_others_serve_is_what_was_trained(schedule: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    trained = train(schedule, run, "--store", "local:1", "--device", "cuda")
    done("evaluate", run, "--json", tmp_path / "measured.json")
    measured = json.loads((tmp_path / "measured.json").read_text())
    assert math.isclose(measured["log_loss"], trained["log_loss"], rel_tol=1e-5), measured


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_is_refused_before_anything_is_made(schedule: Path, tmp_path: Path) -> None:
    error = refused(*arguments(schedule, tmp_path / "run", "--store", "local:1", "--device", "cuda"))
    assert error == (
        f"--device: cuda needs a CUDA device, and torch {torch.__version__} finds none on this machine; "
        "give cpu, or install a driver and a build of torch for it"
    )
    assert not (tmp_path / "run").exists()
