"""`--track`: what an experiment tracker is told of a run, from a thread that no step waits for."""

from __future__ import annotations

import json
import re
import signal
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import free_port, main, refused, run_here
from held import Hold
from mlflow import MlflowClient
from mlflow.entities import Run as MlflowRun
from small_job import arguments, summary, synthetic_schedule

from foreload.trainer.run.directory import Run
from foreload.trainer.run.tracking import Tracking

OWN = """
import json

class Lines:
    def _write(self, *told):
        with open("told.jsonl", "a") as file:
            file.write(json.dumps(told) + "\\n")

    def settings(self, run_id, name, settings):
        self._write("settings", run_id, name, dict(settings))

    def metrics(self, values, step):
        self._write("metrics", dict(values), step)

    def files(self, paths, state):
        self._write("files", [str(path) for path in paths], state)

class Broken(Lines):
    def __init__(self):
        raise RuntimeError("no server")

class Half:
    def metrics(self, values, step): ...
"""


@pytest.fixture(autouse=True)
def mlflow_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow reports to a folder, which its versions from 3.7 on must be told, and to nobody else; servers that are down are asked once."""
    for name, value in {"ALLOW_FILE_STORE": "true", "DISABLE_TELEMETRY": "true", "HTTP_REQUEST_MAX_RETRIES": "0"}.items():
        monkeypatch.setenv(f"MLFLOW_{name}", value)
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)


def metric_lines(run: Path) -> dict[str, list[dict[str, Any]]]:
    """The lines of metrics.jsonl by their kind."""
    lines: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
        lines[line["kind"]].append(line)
    return lines


def told() -> list[list[Any]]:
    """What the class Lines was told."""
    return [json.loads(line) for line in Path("told.jsonl").read_text(encoding="utf-8").splitlines()]


def check_losses(points: Mapping[int, float], lines: Sequence[Mapping[str, Any]]) -> None:
    """Each must be the mean over the samples of the steps since the point before it."""
    assert sorted(points)[-1] == lines[-1]["step"]
    before = -1
    for step, loss in sorted(points.items()):
        of = [line for line in lines if before < line["step"] <= step]
        assert loss == pytest.approx(np.average([line["loss"] for line in of], weights=[line["samples"] for line in of]))
        before = step


def of_mlflow(uri: str) -> tuple[MlflowClient, MlflowRun]:
    """What MLflow's own client has of the only run."""
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("foreload")
    assert experiment is not None
    [run] = client.search_runs([experiment.experiment_id])
    return client, run


def test_mlflow_has_one_run_of_all_calls(tmp_path: Path, hold: Hold) -> None:
    uri = f"file:{tmp_path / 'mlflow'}"
    schedule, run = synthetic_schedule(tmp_path, 16_000, further="--eval-fraction 0.1"), tmp_path / "run"
    job = hold(arguments(schedule, run, "--store", "local:1", "--track", f"mlflow:{uri}"), 60)
    job.process.terminate()
    assert job.end()[0] == 128 + signal.SIGTERM
    _, stopped = of_mlflow(uri)
    assert stopped.info.status == "KILLED"
    job.schedule.release()
    status, _, err = run_here("train", schedule, "--run", run, "--resume", "--trainers", "2", "--track", f"mlflow:{uri}")
    assert (status, "warning" in err) == (0, False), err
    client, ended = of_mlflow(uri)
    assert (ended.info.run_id, ended.info.run_name, ended.info.status) == (stopped.info.run_id, "run", "FINISHED")
    assert ended.data.params["seed"] == str(Run.open(run).manifest.job["seed"])
    assert ended.data.params["trainers"] == "1"
    assert {file.path for file in client.list_artifacts(ended.info.run_id)} == {"report.html", "summary.json"}
    lines = metric_lines(run)
    history = client.get_metric_history(ended.info.run_id, "train/loss")
    assert len(history) == len({point.step for point in history}) > 2
    check_losses({point.step: point.value for point in history}, lines["step"])
    [evaluation] = lines["evaluation"]
    for name in ("auc", "log_loss"):
        [point] = client.get_metric_history(ended.info.run_id, f"evaluation/{name}")
        assert (point.step, point.value) == (evaluation["step"], evaluation[name])


def test_a_class_of_the_user_is_told_in_order(tmp_path: Path) -> None:
    schedule, run = synthetic_schedule(tmp_path, 4000, further="--eval-fraction 0.1"), tmp_path / "run"
    assert main(arguments(schedule, run, "--store", "local:1", "--track", "own.py:Lines")) == 0
    begun, *figures, over = told()
    manifest = Run.open(run).manifest
    assert begun == ["settings", manifest.run_id, "run", manifest.job]
    assert over == ["files", [str(run / "summary.json"), str(run / "report.html")], "ended"]
    lines = metric_lines(run)
    check_losses({step: values["train/loss"] for _, values, step in figures if "train/loss" in values}, lines["step"])
    [evaluated] = [values for _, values, _ in figures if "evaluation/auc" in values]
    assert evaluated["evaluation/auc"] == lines["evaluation"][0]["auc"] == summary(run)["auc"]


def test_a_call_that_fails_is_told_as_failed(tmp_path: Path, hold: Hold) -> None:
    schedule, run = synthetic_schedule(tmp_path, 4000), tmp_path / "run"
    job = hold(arguments(schedule, run, "--store", "local:1", "--track", "own.py:Lines"), 10)
    for worker in job.workers:
        worker.kill()
    status, _, err = job.end()
    assert status == 2, err
    assert told()[0][0] == "settings"
    assert told()[-1] == ["files", [], "failed"]


def test_a_tracker_that_is_down_is_one_warning_without_the_password(tmp_path: Path) -> None:
    schedule, run, secret = synthetic_schedule(tmp_path, 2000), tmp_path / "run", "hunter2"
    uri = f"mlflow:http://me:{secret}@127.0.0.1:{free_port()}"
    status, _, err = run_here(*arguments(schedule, run, "--store", "local:1", "--track", uri))
    assert status == 0, err
    warnings = [line for line in err.splitlines() if line.startswith("foreload: warning")]
    assert len(warnings) == 1, err
    assert "--track mlflow:http://***@127.0.0.1" in warnings[0]
    assert secret not in err
    assert not [file for file in run.rglob("*") if file.is_file() and secret.encode() in file.read_bytes()]


@pytest.mark.parametrize(
    ("tracker", "error"),
    [
        ("wandb", "--track: must be mlflow, mlflow:URI .* got 'wandb'"),
        ("http://me:secret@host", r"--track: must be mlflow, .* got 'http://\*\*\*@host'"),
        ("own.py:Missing", "--track: cannot import own.py:Missing: AttributeError"),
        ("own.py:Broken", "--track: own.py:Broken cannot be made: RuntimeError: no server"),
        ("own.py:Half", "--track: own.py:Half must have the methods settings, metrics and files; it lacks settings, files"),
        (
            "mlflow:gopher://me:secret@host",
            r"--track: MLflow cannot use gopher://\*\*\*@host \(a database needs pip install mlflow\): ",
        ),
    ],
)
def test_what_is_no_tracker_is_refused_before_anything_is_made(tmp_path: Path, tracker: str, error: str) -> None:
    schedule, run = synthetic_schedule(tmp_path, 2000), tmp_path / "run"
    said = refused(*arguments(schedule, run, "--store", "local:1", "--track", tracker))
    assert re.match(error, said), said
    assert "secret" not in said
    assert not run.exists()


class Slow:
    """Takes the settings once it is let go; its metrics fail."""

    def __init__(self) -> None:
        self.let_go, self.steps, self.ended = threading.Event(), list[int](), list[str]()

    def settings(self, run_id: str, name: str, settings: Mapping[str, Any]) -> None:
        self.let_go.wait()

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        self.steps.append(step)
        if step < 3:
            raise ConnectionError("no answer from http://me:secret@host")

    def files(self, paths: Sequence[Path], state: str) -> None:
        self.ended.append(state)


def test_nobody_waits_for_a_tracker_and_its_first_failure_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow = Slow()
    tracking = Tracking(slow, "own.py:Slow", patience=60)
    tracking.settings("id", "run", {})
    for step in range(5):
        tracking.metrics({"loss": 1.0}, step)
    assert slow.steps == []
    slow.let_go.set()
    tracking.close(tmp_path, "stopped")
    assert (slow.steps, slow.ended) == ([0, 1, 2, 3, 4], ["stopped"])
    [line] = capsys.readouterr().err.splitlines()
    assert (
        line
        == "foreload: warning: --track own.py:Slow: ConnectionError: no answer from http://***@host; figures are missing there"
    )


def test_a_call_ends_although_its_tracker_does_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow = Slow()
    tracking = Tracking(slow, "own.py:Slow", patience=0.01)
    tracking.settings("id", "run", {})
    for step in range(20_000):
        tracking.metrics({"loss": 1.0}, step)
    tracking.close(tmp_path, "ended")
    full, late = capsys.readouterr().err.splitlines()
    assert full.endswith("it takes figures too slowly, so some are left out")
    assert "it has not taken all figures within" in late
    slow.let_go.set()


def test_what_never_began_is_not_reported(tmp_path: Path) -> None:
    slow = Slow()
    Tracking(slow, "own.py:Slow").close(tmp_path, "failed")
    assert slow.ended == []
