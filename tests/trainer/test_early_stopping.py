"""Training that ends when evaluations get no better: when, that all trainers decide alike, and what --resume and --from make of it."""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import small_terms
from command_line import Command, done, refused
from small_job import arguments, summary, synthetic_schedule, train_undisturbed
from test_eval_every import EVALUATED, EVERY
from training import Trained, train

from foreload.base.errors import SettingError
from foreload.cache.client.local import LocalStores
from foreload.pipelines import prepare
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.cluster.member.trainer_end import EarlyStopping
from foreload.trainer.cluster.messages.faults import TrainerFault
from foreload.trainer.job.job import TrainJob
from foreload.trainer.job.metric_choice import MetricValue, StopEarly, Watched, after_evaluation
from foreload.trainer.step.program import Trainer

HIGHER = {"auc"}


def stops_at(rule: StopEarly, values: Sequence[float]) -> int | None:
    """Which evaluation is the last by a rule, told by hand; None: none is."""
    best, worse = None, 0
    for place, value in enumerate(values):
        gain = 0.0 if best is None else (value - best if rule.metric in HIGHER else best - value)
        if not math.isnan(value) and (best is None or gain > rule.min_change):
            best, worse = value, 0
        else:
            worse += 1
        if worse >= rule.patience:
            return place
    return None


@pytest.mark.parametrize("rule", ["auc:1", "auc:2", "log_loss:2", "log_loss:2:0.05", "normalized_entropy:9"])
@pytest.mark.parametrize(
    "values",
    [(0.5, 0.6, 0.6, 0.55, 0.7), (0.7, 0.6, 0.58, 0.59, 0.3), (math.nan, math.nan, 0.5, 0.4, 0.3), (0.5, 0.52, 0.54, 0.5, 0.5)],
)
def test_it_ends_when_none_was_better_for_so_long(rule: str, values: Sequence[float]) -> None:
    parsed = StopEarly.parse("--stop-early", rule)
    assert parsed is not None
    assert str(parsed) == rule
    watched: Watched | None = None
    stopped = None
    for place, value in enumerate(values):
        for _ in range(2):  # told again, as where a trainer was lost behind it
            watched = after_evaluation(watched, parsed, 10 * place, MetricValue(value, parsed.metric in HIGHER))
        if watched is not None and watched.ends(parsed) and stopped is None:
            stopped = place
    assert stopped == stops_at(parsed, values)


@pytest.mark.parametrize("given", ["auc", "auc:0", "auc:x", "accuracy:3", "auc:3:-1", "auc:3:1:2", "", ":3", "auc:1000001"])
def test_what_is_no_rule_is_refused(given: str) -> None:
    with pytest.raises(SettingError, match="--stop-early"):
        StopEarly.parse("--stop-early", given)


def test_off_is_none_and_the_setting_is_remembered() -> None:
    job = {"schedule": "s", "run": "r", "store": "local:1"}
    assert TrainJob.of({**job, "stop_early": "off"}).stop_early is None
    given = TrainJob.of({**job, "stop_early": "log_loss:5:0.001"})
    assert given.to_dict()["stop_early"] == "log_loss:5:0.001"
    assert TrainJob.of(given.to_dict()).stop_early == given.stop_early


@pytest.mark.parametrize("trainers", [1, 2])
@pytest.mark.usefixtures("one_thread")
def test_all_trainers_end_alike_with_the_model_of_plain_training_up_to_there(
    tmp_path: Path, servers: LocalStores, trainers: int
) -> None:
    schedule, job = small_terms.schedule(tmp_path, f"--eval-every={EVERY}"), small_terms.job()
    # Nothing is better by so much: the first evaluation is the best.
    stopped, watches = _train(job, schedule, servers, trainers, StopEarly("auc", 1, 1.0), None)
    assert stopped.stopped_at == EVALUATED[1]
    assert len(watches) == trainers
    assert len({watch.so_far for watch in watches}) == 1
    assert stopped.digest == small_terms.plainly(tmp_path, eval_every=EVERY, stop_after=EVALUATED[1]).digest
    # With more patience it goes on; the last evaluation is told again, and counts once.
    then, _ = _train(job, schedule, servers, 1, StopEarly("auc", 3, 1.0), watches[0].so_far, resume=stopped)
    assert [one.step for one in then.evaluations] == EVALUATED[1:4]
    assert then.stopped_at == EVALUATED[3]
    assert then.digest == small_terms.plainly(tmp_path, eval_every=EVERY, stop_after=EVALUATED[3]).digest


def _train(
    job: TrainJob, schedule: Schedule, servers: LocalStores, trainers: int, rule: StopEarly, so_far: Watched | None, **rest: Any
) -> tuple[Trained, list[EarlyStopping]]:
    watches: list[EarlyStopping] = []

    def watch(number: int, trainer: Trainer) -> None:
        early = EarlyStopping(rule, so_far)
        watches.append(early)
        trainer.ends_after = lambda step, report: early.ends_after(trainer.session, step, report)

    return train(job, schedule, servers.urls[:2], trainers, break_it=watch, copies=min(trainers, 2), **rest), watches


def told(run: Path) -> dict[int, float]:
    """The log loss of each evaluation, by its step."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["log_loss"] for line in lines if line["kind"] == "evaluation"}


def test_a_run_is_stopped_early_whoever_dies_and_goes_on_only_if_told_so(tmp_path: Path) -> None:
    schedule = synthetic_schedule(tmp_path, 2300, further="--eval-fraction 0.1 --eval-every 3 --epochs 3 --values 300")
    whole = train_undisturbed(schedule, tmp_path)
    losses = told(whole)
    place = stops_at(StopEarly("log_loss", 2), list(losses.values()))
    assert place is not None
    step, run = list(losses)[place], tmp_path / "early"
    assert step < max(losses)
    further = ["--store", "local:1", "--trainers", "2", "--peer-timeout", "60", "--no-restart", "--stop-early", "log_loss:2"]
    faults = [TrainerFault(0, "evaluating", step, signal.SIGKILL)]
    status, _, err = Command(*arguments(schedule, run, *further), faults=faults).end()
    assert status == 0, err
    assert f"stopped early after step {step}: log_loss has not been better than" in err
    assert "trainer 0: lost" in err
    early = summary(run)["stopped_early"]
    best = min(list(losses.values())[: place + 1])
    assert (early["metric"], early["best"], early["worse"]) == ("log_loss", best, 2)
    assert summary(run)["last_step"] == step
    assert told(run) == {one: loss for one, loss in losses.items() if one <= step}
    told_so = refused(*arguments(schedule, run, "--resume"))
    assert f"stopped early after step {step}" in told_so
    assert "--stop-early off" in told_so
    prepare.run(["--after", str(schedule), "--epochs", "1", "--out", str(tmp_path / "more")])
    onwards = refused(*arguments(tmp_path / "more", run, "--resume"))
    assert onwards.endswith("go on with that one first, with --resume --stop-early off, since it was stopped early")
    done("checkpoint", "save", run)
    (saved,) = (run / "checkpoints").glob("step-*")
    again = refused("train", "--run", tmp_path / "again", "--from", saved, "--store", "local:1")
    assert f"stopped early after step {step}" in again
    done(*arguments(schedule, run, "--resume", "--stop-early", "off", "--digest"))
    assert summary(run)["digest"] == summary(whole)["digest"]
    assert summary(run)["stopped_early"] is None
