"""The door for programs: what `import foreload` offers, and what it leaves alone."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import pytest
from clicks import write_features, write_log
from command_line import ROOT, done, reached
from held import held
from waiting import DEADLINE_SECONDS

import foreload
from foreload.api import client
from foreload.api.results import EvaluationMetrics, StepMetrics, TrainSummary
from foreload.api.settings import PrepareSettings, TrainSettings
from foreload.base.errors import SettingError
from foreload.base.settings import settings_of
from foreload.pipelines.errors import PipelineError
from foreload.pipelines.planning.options import PrepareOptions
from foreload.trainer.errors import ModelError, RunError
from foreload.trainer.job.job import TrainJob

ROWS, HELD_OUT = 3000, 300
STEPS_OF_EPOCH = -(-(ROWS - HELD_OUT) // 64)

OWN_MODEL = """
import torch
from beside import halved

class Net(torch.nn.Module):
    def __init__(self, spec):
        super().__init__()
        self.out = torch.nn.Linear(spec.dense_width + spec.width, 1)

    def forward(self, dense, embeddings):
        return halved(self.out(torch.cat([dense, *embeddings.values()], 1)).squeeze(1))

def net(spec):
    return Net(spec)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with clicks.csv and clicks.toml."""
    home = tmp_path_factory.mktemp("door")
    write_log(home / "clicks.csv", ROWS)
    write_features(home / "clicks.toml")
    return home


@pytest.fixture(scope="module")
def schedule(folder: Path) -> foreload.Schedule:
    return foreload.prepare(
        folder / "clicks.csv", features=folder / "clicks.toml", out=folder / "clicks", batch_size=64, lanes=2, epochs=2,
        eval_fraction=HELD_OUT / ROWS, segment_bytes=16000,
    )  # fmt: skip


@pytest.fixture(scope="module")
def run(folder: Path, schedule: foreload.Schedule) -> foreload.Run:
    return foreload.train(schedule, run=folder / "runs" / "one", store="local:3", dim=4, lr=0.05)


def processes() -> list[psutil.Process]:
    """The fork servers of this process and all that they have started."""
    forked = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # one that has just ended
            if "foreload.api.fork_server" in child.cmdline():
                forked.append(child)
    return forked


@contextlib.contextmanager
def interrupted_when(
    reached: Callable[[], object], before: Callable[[], None] = lambda: None, after: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Ctrl-C for this process once something is reached, and `before` was called, and `after` when the signal has come; asserts that the block ends
    with KeyboardInterrupt.
    """
    over, heeded = threading.Event(), threading.Event()

    def heed(number: int, frame: FrameType | None) -> None:
        heeded.set()
        signal.default_int_handler(number, frame)

    def interrupt() -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not reached() and time.monotonic() < deadline and not over.is_set():
            time.sleep(0.01)
        if not over.is_set():
            before()
            os.kill(os.getpid(), signal.SIGINT)
            heeded.wait()
            after()

    # Python leaves a signal alone that its caller ignores, as a shell does for what it starts with &.
    handler = signal.signal(signal.SIGINT, heed)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        over.set()
        thread.join()
        signal.signal(signal.SIGINT, handler)


def test_importing_it_changes_nothing() -> None:
    program = (
        "import os, sys; before = dict(os.environ); import foreload; dir(foreload); foreload.train; "
        "assert dict(os.environ) == before; print(*sys.modules)"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MKL", "OMP", "ATEN", "GLIBC"))}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True
    )
    assert not {"torch", "apache_beam", "numba", "numpy", "pyarrow", "redis"} & set(done.stdout.split())
    assert done.stderr == ""


def test_settings_have_the_command_lines_names() -> None:
    assert set(TrainSettings.__annotations__) == settings_of(TrainJob).keys() - {"schedule", "model", "loss"} | {"job"}
    assert set(PrepareSettings.__annotations__) == settings_of(PrepareOptions).keys() - {"sources"} | {"job"}


def test_prepare_gives_a_schedule_that_stands_for_its_path(schedule: foreload.Schedule, folder: Path) -> None:
    assert os.fspath(schedule) == str(folder / "clicks")
    assert schedule.summary is not None
    assert schedule.summary.evaluation_samples == HELD_OUT
    assert schedule.summary.lanes == 2


def test_training_prints_nothing_and_leaves_no_trace(
    run: foreload.Run, schedule: foreload.Schedule, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before, handlers = dict(os.environ), signal.getsignal(signal.SIGINT)
    other = foreload.train(schedule, run=folder / "runs" / "other", store="local:1", dim=4)
    assert capfd.readouterr() == ("", "")
    assert dict(os.environ) == before
    assert signal.getsignal(signal.SIGINT) is handlers
    # A fork server waits for the next call; of this one nothing is left.
    assert len(processes()) == 1
    other.delete()
    assert not other.path.exists()


def test_a_run_writes_its_page(run: foreload.Run, tmp_path: Path) -> None:
    assert run.report() == run.path / "report.html"
    page = run.report(tmp_path / "two.html", beside=run)
    assert page.read_text().startswith("<!doctype html>")


def test_progress_is_told_where_it_is_wanted(
    schedule: foreload.Schedule, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = foreload.train(schedule, run=folder / "runs" / "told", store="local:1", dim=4, progress=True)
    out, err = capsys.readouterr()
    assert not out
    assert "epoch 2: log loss" in err
    assert told.state == "ended"


def test_a_run_tells_what_its_files_do(run: foreload.Run) -> None:
    summary = json.loads((run.path / "summary.json").read_text())
    assert run.auc == summary["auc"]
    assert run.log_loss == summary["log_loss"]
    assert run.summary.steps == summary["steps"]
    assert run.summary.checkpoints["saved"] == 0
    told: list[tuple[Any, dict[str, Any]]] = [(TrainSummary, summary)]
    of_kind = {"step": StepMetrics, "evaluation": EvaluationMetrics}
    told += [(of_kind[line["kind"]], line) for line in map(json.loads, (run.path / "metrics.jsonl").read_text().splitlines())]
    for kind, values in told:
        assert values.keys() <= {item.name for item in fields(kind)}
    metrics = run.metrics()
    assert [line.kind for line in metrics].count("evaluation") == 2
    assert len(metrics) == summary["steps"] + 2
    evaluated = run.evaluate()
    assert (evaluated.auc, evaluated.samples) == (run.auc, HELD_OUT)
    assert len(run.digest()) == 64
    again = foreload.open_run(run)
    assert again.summary == run.summary


def test_a_run_that_trains_is_not_read(schedule: foreload.Schedule, tmp_path: Path) -> None:
    refusals: list[str] = []

    def ask() -> None:
        busy = foreload.open_run(tmp_path / "busy")
        for call in (lambda: busy.rows("ad", ids=[1]), lambda: busy.predict(tmp_path / "none.csv"), busy.evaluate):
            try:
                call()
            except RunError as error:
                refusals.append(str(error))

    with held(schedule.path, tmp_path / "held", 10) as copy, interrupted_when(reached(tmp_path / "busy", copy.step), before=ask):
        foreload.train(copy.path, run=tmp_path / "busy", store="local:1", dim=2, follow=True)
    assert len(refusals) == 3
    assert all("is being trained or read right now" in line for line in refusals)


@pytest.mark.full
def test_what_is_trained_is_what_the_command_line_trains(run: foreload.Run, schedule: foreload.Schedule, folder: Path) -> None:
    there = folder / "runs" / "command-line"
    done("train", schedule.path, "--run", there, "--store", "local:3", "--dim", 4, "--lr", 0.05, "--digest")
    assert foreload.open_run(there).summary.digest == run.digest()


def test_errors_are_those_of_the_project(schedule: foreload.Schedule, folder: Path) -> None:
    with pytest.raises(RunError, match="it is not a run"):
        foreload.open_run(folder)
    with pytest.raises(SettingError, match="--lr: must be at least 0"):
        foreload.train(schedule, run=folder / "no", store="local:1", lr=-1.0)
    with pytest.raises(SettingError, match="has no setting 'learning_rate'"):
        foreload.train(schedule, run=folder / "no", store="local:1", learning_rate=1.0)  # type: ignore[call-arg]
    with pytest.raises(SettingError, match="has no setting 'batch'"):
        foreload.prepare("clicks.csv", batch=3)  # type: ignore[call-arg]
    with pytest.raises(PipelineError, match="is not a folder"):
        foreload.train(folder / "nowhere", run=folder / "no", store="local:1")
    assert not (folder / "no").exists()


def test_a_class_of_ones_own_is_trained_by_its_file(
    schedule: foreload.Schedule, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "net_of_the_door.py").write_text(OWN_MODEL)
    (tmp_path / "beside.py").write_text("def halved(x):\n    return x / 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    from net_of_the_door import Net, net  # type: ignore[import-not-found]

    by_class = foreload.train(schedule, run=tmp_path / "by-class", store="local:1", dim=4, model=Net)
    by_name = foreload.train(
        schedule, run=tmp_path / "by-name", store="local:1", dim=4, model="net_of_the_door.py:Net", model_folder=tmp_path
    )
    by_function = foreload.train(schedule, run=tmp_path / "by-function", store="local:1", dim=4, model=net)
    assert by_class.digest() == by_name.digest() == by_function.digest()

    class Local(Net):
        pass

    with pytest.raises(ModelError, match=r"must be found in its module by its name.*write it into a file of its own"):
        foreload.train(schedule, run=tmp_path / "no", store="local:1", model=Local)
    with pytest.raises(
        ModelError, match="must be a class, or a function that builds one, since each trainer builds its own; got Object"
    ):
        foreload.train(schedule, run=tmp_path / "no", store="local:1", model=type("Object", (), {})())


def test_ctrl_c_stops_cleanly_and_the_run_can_be_read(schedule: foreload.Schedule, tmp_path: Path) -> None:
    with held(schedule.path, tmp_path / "held", 10) as copy:
        with interrupted_when(reached(tmp_path / "stopped", copy.step)):
            foreload.train(copy.path, run=tmp_path / "stopped", store="local:1", dim=2, follow=True)
        copy.release()
    stopped = foreload.open_run(tmp_path / "stopped")
    assert stopped.state == "stopped"
    assert stopped.summary.last_step == copy.step
    assert len(stopped.digest()) == 64


class Pruned(Exception):
    """What a caller of `train` raises who has seen enough."""


def test_a_caller_gets_each_evaluation_and_can_stop_the_training(
    schedule: foreload.Schedule, run: foreload.Run, tmp_path: Path
) -> None:
    heard: list[EvaluationMetrics] = []

    def hear(metrics: EvaluationMetrics) -> None:
        heard.append(metrics)
        if len(heard) == 1:
            raise Pruned(metrics.step)

    settings: dict[str, Any] = {"run": tmp_path / "stopped", "store": "local:1", "dim": 4, "lr": 0.05, "follow": True}
    with held(schedule.path, tmp_path / "held", STEPS_OF_EPOCH + 5) as copy:
        # The first evaluation is within what is published, and the second one is not.
        with pytest.raises(Pruned) as raised:
            foreload.train(copy.path, on_evaluation=hear, **settings)
        stopped = foreload.open_run(tmp_path / "stopped")
        assert stopped.state == "stopped"
        assert raised.value.args[0] == heard[0].step <= stopped.summary.last_step <= copy.step
        copy.release()
    resumed = foreload.train(run=stopped, resume=True, on_evaluation=hear)
    assert heard == [line for line in resumed.metrics() if isinstance(line, EvaluationMetrics)]
    assert len(heard) == 2
    assert resumed.evaluation == heard[-1]
    assert resumed.digest() == run.digest()
    with pytest.raises(SettingError, match="on_evaluation: must be "):
        foreload.train(schedule, run=tmp_path / "no", on_evaluation="auc")  # type: ignore[arg-type]


@pytest.mark.full
def test_ctrl_c_before_anything_has_begun_leaves_no_status(schedule: foreload.Schedule, tmp_path: Path) -> None:
    client.close_all()  # so that there is a fork server to be started, which imports first

    def suspend() -> None:
        for process in processes():
            process.suspend()

    def resume() -> None:
        for process in processes():
            process.resume()

    with interrupted_when(processes, suspend, resume):
        foreload.train(schedule, run=tmp_path / "never", store="local:1", dim=2)
    assert not (tmp_path / "never" / "status.json").exists()


@pytest.mark.full
def test_a_process_forked_from_the_caller_has_a_fork_server_of_its_own(run: foreload.Run) -> None:
    run.evaluate()
    before = processes()
    pid = os.fork()
    if not pid:
        samples = run.evaluate().samples
        client.close_all()
        os._exit(0 if samples == HELD_OUT else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert processes() == before


@pytest.fixture
def owner(schedule: foreload.Schedule, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that trains a run in tmp_path, held at a step."""
    with held(schedule.path, tmp_path / "held", 10) as copy:
        program = f"import foreload; foreload.train({str(copy.path)!r}, run='run', store='local:1', dim=2, follow=True)"
        process = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)})
        yield process
        process.kill()
        process.wait()


@pytest.mark.full
def test_a_caller_that_is_killed_leaves_a_run_that_stopped_and_no_process(owner: subprocess.Popen[bytes], tmp_path: Path) -> None:
    asked = reached(tmp_path / "run", 3)
    while not asked():
        assert owner.poll() is None
        time.sleep(0.01)
    left = psutil.Process(owner.pid).children(recursive=True)
    assert left
    owner.kill()
    _, alive = psutil.wait_procs(left, timeout=60)
    assert not alive
    assert foreload.Run(tmp_path / "run").state == "stopped"


@pytest.mark.full
def test_calls_within_a_models_file_are_refused(schedule: foreload.Schedule, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        OWN_MODEL.replace("from beside import halved", "halved = abs")
        + f"\nimport foreload\nforeload.train({str(schedule.path)!r}, run='script', store='local:1', dim=2, model=Net)\n"
    )
    done = subprocess.run(
        [sys.executable, script],
        check=False,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert 'put the calls under `if __name__ == "__main__":`' in done.stderr


@pytest.mark.full
def test_a_fork_server_that_was_killed_is_replaced(run: foreload.Run) -> None:
    for process in processes():
        process.kill()
        process.wait()
    assert run.evaluate().samples == HELD_OUT


def test_a_call_may_be_made_in_a_thread(run: foreload.Run) -> None:
    samples: list[int] = []
    thread = threading.Thread(target=lambda: samples.append(run.evaluate().samples))
    thread.start()
    thread.join()
    assert samples == [HELD_OUT]


def test_no_fork_server_is_left_at_the_end(run: foreload.Run) -> None:
    run.evaluate()
    left = processes()
    assert left
    client.close_all()
    assert not [process for process in left if process.is_running()]
