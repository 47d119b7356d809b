"""The best model is kept however soon the next evaluation comes: training waits behind it until its checkpoint can be begun."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest
from command_line import Command, done, refused, run_here
from live_runs import saved
from small_job import arguments, summary, synthetic_schedule
from test_early_stopping import stops_at, told

import foreload
from foreload.api.results import EvaluationMetrics
from foreload.trainer.cluster.messages.faults import TrainerFault
from foreload.trainer.job.metric_choice import StopEarly
from foreload.trainer.run.directory import CHECKPOINTS

EVERY, PATIENCE = 3, 2  # steps between evaluations, fewer than a checkpoint takes to be asked for


@pytest.fixture(scope="module")
def schedule(tmp_path_factory: pytest.TempPathFactory) -> Path:
    further = f"--eval-fraction 0.1 --eval-every {EVERY} --epochs 3 --values 300"
    return synthetic_schedule(tmp_path_factory.mktemp("best"), 2300, further=further)


@pytest.fixture(scope="module")
def plain(schedule: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[int, float], int, str]:
    """What a run that keeps nothing tells in evaluations up to an early stop; the best of their steps, and the digest of a run to that step alone."""
    folder = tmp_path_factory.mktemp("plain")
    done(*arguments(schedule, folder / "run", "--store", "local:1", "--stop-early", f"log_loss:{PATIENCE}"))
    losses = told(folder / "run")
    best = min(losses, key=losses.__getitem__)
    # The first evaluation is the best by so much, so that training ends behind the one that is asked for.
    rule = f"log_loss:{list(losses).index(best)}:1000"
    done(*arguments(schedule, folder / "short", "--store", "local:1", "--stop-early", rule))
    assert summary(folder / "short")["last_step"] == best
    return losses, best, done("digest", folder / "short")


@pytest.mark.parametrize(
    ("trainers", "died"),
    [(1, None), (2, 0), pytest.param(2, 1, marks=pytest.mark.full), pytest.param(2, None, marks=pytest.mark.full)],
)
def test_every_best_evaluation_has_its_checkpoint_whoever_dies_while_training_waits(
    schedule: Path, plain: tuple[dict[int, float], int, str], tmp_path: Path, trainers: int, died: int | None
) -> None:
    losses, best, digest = plain
    run = tmp_path / "run"
    steps = [step for step, loss in losses.items() if loss <= min(value for at, value in losses.items() if at <= step)]
    assert len(steps) > 3
    assert steps[-1] == best
    assert stops_at(StopEarly("log_loss", PATIENCE), list(losses.values())) == len(losses) - 1
    keep = ("--keep-best", "log_loss", "--checkpoint-every", "1000", "--keep", "99", "--stop-early", f"log_loss:{PATIENCE}")
    place = ("--store", "local:1", "--trainers", str(trainers), "--peer-timeout", "60", "--no-restart")
    faults = [] if died is None else [TrainerFault(died, "best waited for", steps[1], signal.SIGKILL)]
    status, _, err = Command(*arguments(schedule, run, *place, *keep), faults=faults).end()
    assert status == 0, err
    assert ("lost" in err) == (died is not None)
    assert "warning: the evaluation" not in err
    assert told(run) == losses
    # What was under way as the trainer died is lost, and no longer the best.
    there = {one.contents.step for one in saved(run / CHECKPOINTS)}
    assert there | ({steps[0]} if died is not None else set()) == set(steps)
    checkpoints = summary(run)["checkpoints"]
    assert checkpoints["best"] == {"step": best, "log_loss": losses[best]}
    assert checkpoints["failed"] == 0
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    waited = sum(line.get("seconds_waited", 0.0) for line in lines if line["kind"] == "checkpoint")
    assert 0 < waited <= checkpoints["seconds_waited"] + 1e-6
    assert done("digest", run / CHECKPOINTS / f"step-{best}") == digest
    check_what_commands_use(run, best, tmp_path)


def check_what_commands_use(run: Path, best: int, folder: Path) -> None:
    """A run with --stop-early and --keep-best stands for its best checkpoint, and for the model of its end where that is asked for."""
    last = summary(run)["last_step"]
    assert last > best

    def step_of(*words: object) -> tuple[int, str]:
        status, _, err = run_here(*words, "--json", folder / "answer.json")
        assert status == 0, err
        return json.loads((folder / "answer.json").read_text())["step"], err

    for words in (["evaluate", run], ["lookup", run, "C1", "1"], ["export", run, "--out", folder / "export"]):
        step, err = step_of(*words)
        assert step == best
        assert f"note: run {run}: has --stop-early and --keep-best, so its best evaluation is used, log_loss " in err
        shutil.rmtree(folder / "export", ignore_errors=True)
        for choice, wanted in (("--best", best), ("--last", last)):
            step, err = step_of(*words, choice)
            assert step == wanted
            assert "note" not in err
            shutil.rmtree(folder / "export", ignore_errors=True)
    assert "--best and --last: only one of them can be given" in refused("evaluate", run, "--best", "--last")
    opened = foreload.open_run(run)
    assert opened.best.step == opened.evaluate().step == best
    lines = {line.step: line for line in opened.metrics() if isinstance(line, EvaluationMetrics)}
    assert opened.evaluation == lines[best]
    assert (opened.auc, opened.log_loss) == (lines[best].auc, lines[best].log_loss)
    at_end = foreload.open_run(run, last=True)
    assert at_end.evaluate().step == last
    assert at_end.evaluation == lines[last]
    assert at_end.log_loss == opened.summary.log_loss != opened.log_loss
    page = (run / "report.html").read_text()
    assert page.count(f"best evaluation, after step {best:,}") == 2  # log loss and AUC
    assert f'<b class="figure">{lines[best].log_loss:.5f}</b>' in page
    assert "last evaluation" not in page
