"""Several evaluation sets, by name: every pass tells the metrics of each, and training is what it is without them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import small_terms
from command_line import done, refused
from training import Death, Trained, train

from foreload.base.codec import to_stored
from foreload.base.errors import SettingError
from foreload.cache.client.local import LocalStores
from foreload.pipelines import prepare
from foreload.pipelines.planning.plan import evaluation_sets
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.compute.reports import EvaluationReport
from foreload.trainer.job.metric_choice import check_metric, metric_of

SETS = {"late": 50, "new-users": 33, "b": 7}
"""Samples of each; a step has 32."""
METRICS = ("auc", "log_loss", "normalized_entropy")
pytestmark = pytest.mark.usefixtures("one_thread")


def write_log(folder: Path, order_by: bool = False) -> dict[str, tuple[Path, ...]]:
    """A log of 5 steps and what to evaluate on; "late" has two files."""
    rows = small_terms.log_lines(5 * 32 - 3 + sum(SETS.values()))
    (folder / "features.toml").write_text(("order_by = 'when'\n" if order_by else "") + small_terms.FEATURES)
    files: dict[str, tuple[Path, ...]] = {}
    rows = [f"{row},{place * 37 % 101}" for place, row in enumerate(rows)]
    for name, samples in {"log": len(rows) - sum(SETS.values()), **SETS}.items():
        taken, rows = rows[:samples], rows[samples:]
        parts = [taken[:20], taken[20:]] if name == "late" else [taken]
        files[name] = tuple(folder / f"{name}-{number}.csv" for number in range(len(parts)))
        for path, part in zip(files[name], parts, strict=True):
            path.write_text("\n".join(["label,who,what,when", *part]) + "\n")
    return files


def given(folder: Path, files: dict[str, tuple[Path, ...]], *further: str) -> list[str]:
    """A command line that mentions the sets in turn: what counts is the first mention of each."""
    late, *others = [[f"--eval-source={name}={path}" for path in files[name]] for name in SETS]
    sets = [late[0], *(one for other in others for one in other), late[1]]
    of_data = [str(files["log"][0]), "--format=csv", f"--features={folder}/features.toml", f"--out={folder}/schedule"]
    return [*of_data, "--batch-size=32", f"--lanes={small_terms.LANES}", "--epochs=2", "--segment-bytes=4000", *sets, *further]


def prepared(folder: Path, *further: str) -> Schedule:
    files = write_log(folder)
    prepare.run(given(folder, files, "--eval-every=2", *further))
    return Schedule(folder / "schedule")


def told(evaluations: Sequence[EvaluationReport]) -> list[tuple[Any, ...]]:
    return [(one.set, *(pytest.approx(getattr(one, name), nan_ok=True) for name in METRICS)) for one in evaluations]


@pytest.fixture(scope="module")
def schedule(tmp_path_factory: pytest.TempPathFactory) -> Schedule:
    return prepared(tmp_path_factory.mktemp("sets"), "--slots=min")


@pytest.fixture(scope="module")
def undisturbed(schedule: Schedule, servers: LocalStores, one_thread: None) -> Trained:
    return train(small_terms.job(), schedule, servers.urls)


@pytest.mark.parametrize(
    ("trainers", "order_by", "shuffle_seed", "further"),
    [
        (1, True, None, ("--eval-every=2", "--slots=min")),
        (2, False, 7, ("--eval-every=2", "--window=200", "--slots=100")),
        (2, False, None, ("--window=200", "--slots=100", "--eval-every=3")),
        pytest.param(4, True, 7, ("--slots=all",), marks=pytest.mark.full),
    ],
)
def test_metrics_of_each_set_and_the_model_are_those_of_plain_training(
    tmp_path: Path, servers: LocalStores, trainers: int, order_by: bool, shuffle_seed: int | None, further: Sequence[str]
) -> None:
    files = write_log(tmp_path, order_by)
    shuffle = [] if shuffle_seed is None else [f"--shuffle-seed={shuffle_seed}"]
    prepare.run(given(tmp_path, files, *further, *shuffle))
    every = next((int(one.partition("=")[2]) for one in further if one.startswith("--eval-every")), None)
    expected = small_terms.plainly(
        tmp_path, sources=files["log"], evaluation_fraction=0.0, evaluation_sets={name: files[name] for name in SETS},
        eval_every=every, shuffle_seed=shuffle_seed,
    )  # fmt: skip
    outcome = train(small_terms.job(), Schedule(tmp_path / "schedule"), servers.urls[:2], trainers, copies=min(trainers, 2))
    assert outcome.digest == expected.digest
    assert [one.step for one in outcome.evaluations] == expected.evaluated
    assert [one.samples for one in outcome.evaluations[:3]] == list(SETS.values())
    assert told(outcome.evaluations) == [(one.set, one.auc, one.log_loss, one.normalized_entropy) for one in expected.evaluations]


def test_no_evaluation_step_has_samples_of_two_sets(schedule: Schedule) -> None:
    header = schedule.header
    assert to_stored(header)["evaluation_sets"] == [*map(list, SETS.items())]
    assert header.set_steps == (2, 2, 1)
    first = [event for event in schedule.events() if event.kind == "evaluate"][:5]
    assert [(header.set_of(one.step), one.samples) for one in first] == [
        ("late", 32), ("late", 18), ("new-users", 32), ("new-users", 1), ("b", 7),
    ]  # fmt: skip


def test_more_epochs_have_the_same_sets(tmp_path: Path, schedule: Schedule, servers: LocalStores, undisturbed: Trained) -> None:
    one = prepared(tmp_path, "--epochs=1", "--slots=min")
    out = tmp_path / "more"
    prepare.run([f"--after={one.path}", "--epochs=1", "--slots=min", f"--out={out}"])
    more = Schedule(out)
    assert more.header.evaluation_sets == schedule.header.evaluation_sets
    job = small_terms.job()
    first = train(job, one, servers.urls)
    then = train(job, more, servers.urls, resume=first)
    assert then.digest == undisturbed.digest
    assert told([*first.evaluations, *then.evaluations]) == [
        (e.set, e.auc, e.log_loss, e.normalized_entropy) for e in undisturbed.evaluations
    ]


def test_a_trainer_dies_in_an_evaluation(schedule: Schedule, servers: LocalStores, undisturbed: Trained) -> None:
    outcome = train(small_terms.job(), schedule, servers.urls, 2, copies=2, deaths=[Death(0, "evaluating", 3)])
    assert len(outcome.terms) == 2
    small_terms.assert_same(outcome, undisturbed)


def test_what_is_named_and_what_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.csv", "day=1.csv", "x=a.csv"):
        Path(name).write_text("", encoding="utf-8")
    assert evaluation_sets(["a.csv", "b.csv"]) == {"": ("a.csv", "b.csv")}
    assert evaluation_sets(["y=a.csv", "z=b=c", "y=*.csv"]) == {"y": ("a.csv", "*.csv"), "z": ("b=c",)}
    assert evaluation_sets(["day=1.csv", "./x=a.csv", "s3://b/k=v"]) == {"": ("day=1.csv", "./x=a.csv", "s3://b/k=v")}
    assert evaluation_sets(["x=./a.csv"]) == {"x": ("./a.csv",)}
    with pytest.raises(SettingError, match=r"must not be ambiguous.*\./x=a\.csv"):
        evaluation_sets(["x=a.csv"])
    with pytest.raises(SettingError, match=r"a\.csv has none, but set y has"):
        evaluation_sets(["y=b.csv", "a.csv"])


def test_a_set_without_records_is_named(tmp_path: Path) -> None:
    files = write_log(tmp_path)
    (tmp_path / "none.csv").write_text("label,who,what,when\n")
    assert "--eval-source empty: has no" in refused(
        "prepare", *given(tmp_path, files, f"--eval-source=empty={tmp_path}/none.csv")
    )
    assert "nothing-*: no file matches" in refused("prepare", *given(tmp_path, files, f"--eval-source=y={tmp_path}/nothing-*"))


def test_a_metric_is_of_the_first_set_or_of_the_one_named(schedule: Schedule) -> None:
    reports = [EvaluationReport(1, 0, 9, 0.1 * place, 0.5, 1.0, set=name) for place, name in enumerate(SETS)]
    assert metric_of(reports, "log_loss").value == 0.0
    assert metric_of(reports, "b/log_loss").value == 0.2
    check_metric("--keep-best", "new-users/auc", schedule.header)
    with pytest.raises(SettingError, match="old must be an evaluation set of the schedule; there are late, new-users, b"):
        check_metric("--keep-best", "old/auc", schedule.header)
    with pytest.raises(SettingError, match=r"b/other\.auc: must be of a label"):
        check_metric("--keep-best", "b/other.auc", schedule.header)


def test_a_run_tells_of_each_set(tmp_path: Path, schedule: Schedule) -> None:
    run, result = tmp_path / "run", tmp_path / "result.json"
    settings = ["--model", "dlrm", "--dim", "8", "--model-options", "bottom=8", "top=8-1", "--store", "local:1"]
    on = ["train", str(schedule.path), "--run", str(run), *settings]
    assert "--stop-early: old/auc: old must be an evaluation set" in refused(*on, "--stop-early", "old/auc:3")
    assert not run.exists()
    text = done(*on, "--keep-best", "b/log_loss", "--stop-early", "new-users/log_loss:1:9")
    summary = json.loads((run / "summary.json").read_text())
    assert summary["sets"].keys() == SETS.keys()
    assert summary["log_loss"] == summary["sets"]["late"]["log_loss"]
    assert summary["stopped_early"]["metric"] == "new-users/log_loss"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    evaluated = [line for line in lines if line["kind"] == "evaluation"]
    assert [(line["step"], line["set"]) for line in evaluated] == [(step, name) for step in (1, 3) for name in SETS]
    best = json.loads((run / "checkpoints" / "best.json").read_text())
    of_best = {line["step"]: line["log_loss"] for line in evaluated if line["set"] == "b"}
    assert (best["metric"], best["value"]) == ("b/log_loss", of_best[best["step"]])
    assert "new-users: log loss" in text
    done("evaluate", str(run), "--last", "--json", str(result))
    measured = json.loads(result.read_text())
    assert {name: of_set["log_loss"] for name, of_set in measured["sets"].items()} == {
        line["set"]: pytest.approx(line["log_loss"], rel=1e-12) for line in evaluated[-3:]
    }
    page = (run / "report.html").read_text()
    assert "<th>set</th>" in page or ">set<" in page
    assert "AUC, new-users" in page
