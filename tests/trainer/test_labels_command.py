"""Several labels, weights and groups from the command line: what a run, its evaluations, its predictions and its page tell, and what is refused."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from command_line import done, refused
from test_report import checked, number

from foreload.pipelines import prepare

FEATURES = """
weight = "worth"
group = "user"
[[label]]
name = "clicked"
[[label]]
name = "seconds"
kind = "number"
[[feature]]
name = "user"
rows = 20
[[feature]]
name = "site"
rows = 60
[[dense]]
name = "x"
"""
OWN_LOSSES = """
from torch.nn import functional


def both(outputs, labels):
    clicks = functional.binary_cross_entropy_with_logits(outputs[:, 0], labels[:, 0], reduction="none")
    return clicks + 0.1 * functional.huber_loss(outputs[:, 1], labels[:, 1], reduction="none")


def mean(outputs, labels):
    return functional.mse_loss(outputs, labels)
"""
HELD_OUT = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log of 300 visits, its schedule, and the losses."""
    folder, random = tmp_path_factory.mktemp("visits"), np.random.default_rng(5)
    lines = ["clicked,seconds,worth,user,site,x"]
    for _ in range(300):
        clicked = int(random.random() < 0.4)
        numbers = f"{clicked},{random.exponential(2) + clicked:.3f},{random.integers(1, 5) / 2}"
        lines.append(f"{numbers},{random.integers(6)},{random.integers(40)},{random.normal():.4f}")
    (folder / "visits.csv").write_text("\n".join(lines) + "\n")
    (folder / "held-out.csv").write_text("\n".join([lines[0], *lines[-HELD_OUT:]]) + "\n")
    (folder / "features.toml").write_text(FEATURES)
    (folder / "losses.py").write_text(OWN_LOSSES)
    options = f"--format csv --features {folder}/features.toml --eval-fraction 0.2 --batch-size 50 --lanes 2 --epochs 2 --out {folder}/visits"
    prepare.run([f"{folder}/visits.csv", *options.split()])
    return folder


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    """A run on it, at its end."""
    run = folder / "run"
    weights = ("--label-weights", "seconds=0.1", "--keep-best", "seconds.rmse")
    done(
        "train",
        folder / "visits",
        "--run",
        run,
        "--store",
        "local:1",
        "--model",
        "mmoe",
        "--dim",
        "4",
        "--trainers",
        "2",
        *weights,
    )
    return run


def test_evaluations_tell_each_label_and_the_best_goes_by_one_of_them(run: Path) -> None:
    told = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    evaluations = [line for line in told if line["kind"] == "evaluation"]
    for line in evaluations:
        assert set(line["labels"]["clicked"]) >= {
            "log_loss",
            "auc",
            "normalized_entropy",
            "grouped_auc",
            "predicted_over_observed",
        }
        assert set(line["labels"]["seconds"]) == {"rmse", "mae", "predicted_over_observed"}
        assert {name: line[name] for name in line["labels"]["clicked"]} == line["labels"]["clicked"]
        assert line["loss"] > line["log_loss"] / 2
    summary = json.loads((run / "summary.json").read_text())
    assert summary["loss"] == evaluations[-1]["loss"]
    assert summary["labels"]["seconds"] == evaluations[-1]["labels"]["seconds"]
    assert "calibration" not in summary["labels"]["clicked"]
    best = json.loads((run / "checkpoints" / "best.json").read_text())
    assert best["metric"] == "seconds.rmse"
    assert best["value"] in [line["labels"]["seconds"]["rmse"] for line in evaluations]


def test_evaluate_tells_what_the_run_told(run: Path, tmp_path: Path) -> None:
    text = done("evaluate", run, "--json", tmp_path / "evaluated.json")
    evaluated, summary = json.loads((tmp_path / "evaluated.json").read_text()), json.loads((run / "summary.json").read_text())
    for name in ("log_loss", "auc", "normalized_entropy", "grouped_auc", "predicted_over_observed", "loss", "labels"):
        assert evaluated[name] == summary[name]
    lines = text.splitlines()
    assert [line.split(" ")[0] for line in lines] == ["clicked:", "seconds:", "loss"]
    assert "grouped AUC" in lines[0]


def test_predictions_have_a_column_a_label(run: Path, folder: Path, tmp_path: Path) -> None:
    held_out = (folder / "held-out.csv", "--steps-of", folder / "visits")
    done("predict", run, *held_out, "--out", tmp_path / "scores.csv")
    done("predict", run, *held_out, "--logits", "--out", tmp_path / "logits.parquet")
    with open(tmp_path / "scores.csv", encoding="utf-8", newline="") as file:
        scores = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
    logits = pq.read_table(tmp_path / "logits.parquet").to_pydict()
    assert list(scores[0]) == list(logits) == ["clicked", "seconds"]
    assert [row["seconds"] for row in scores] == pytest.approx(logits["seconds"])
    assert [row["clicked"] for row in scores] == pytest.approx(1 / (1 + np.exp(-np.array(logits["clicked"]))), rel=1e-6)
    with open(folder / "held-out.csv", encoding="utf-8", newline="") as file:
        seconds = np.array([float(row["seconds"]) for row in csv.DictReader(file)])
    rmse = float(np.sqrt(np.mean((np.array(logits["seconds"]) - seconds) ** 2)))
    assert rmse == pytest.approx(json.loads((run / "summary.json").read_text())["labels"]["seconds"]["rmse"], rel=1e-5)


def test_the_page_has_what_each_label_has(run: Path) -> None:
    page, summary = checked((run / "report.html").read_text()), json.loads((run / "summary.json").read_text())
    assert number(page.tiles["AUC of clicked"][0]) == pytest.approx(summary["auc"], abs=1e-4)
    assert number(page.tiles["RMSE of seconds"][0]) == pytest.approx(summary["labels"]["seconds"]["rmse"], abs=1e-5)
    assert number(page.tiles["loss"][0]) == pytest.approx(summary["loss"], abs=1e-5)
    assert "log loss" not in page.tiles
    title = next(name for name, rows in page.tables.items() if "label" in rows[0])
    assert page.column(title, "RMSE", "seconds")[-1] == pytest.approx(summary["labels"]["seconds"]["rmse"], abs=1e-5)
    assert page.column(title, "AUC", "clicked")[-1] == pytest.approx(summary["auc"], abs=1e-4)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (["--label-weights", "seconds=9"], "--label-weights: must be what the run was started with, {'seconds': 0.1}; got {'seconds': 9.0}"),
        (["--loss", "losses.py:both"], "--label-weights: cannot be given with --loss"),
        ([], "is at the end of"),
    ],
)  # fmt: skip
def test_a_loss_cannot_be_changed_within_a_run(
    run: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, changed: list[str], message: str
) -> None:
    monkeypatch.chdir(folder)
    assert message in refused("train", "--run", run, "--resume", *changed)


def test_a_run_of_an_earlier_version_says_nothing_of_its_loss_and_goes_on(run: Path, folder: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    done("train", folder / "visits", "--run", plain, "--store", "local:1", "--model", "mmoe", "--dim", "4")
    manifest = json.loads((plain / "manifest.json").read_text())
    del manifest["job"]["loss"], manifest["job"]["label_weights"]
    (plain / "manifest.json").write_text(json.dumps(manifest))
    assert "is at the end of" in refused("train", "--run", plain, "--resume")
    assert done("evaluate", plain).startswith("clicked: ")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            "--keep-best seconds.auc",
            "--keep-best: must be a metric of label seconds, which is a number, rmse, mae, or loss; got auc",
        ),
        ("--keep-best rmse", "which is a click, log_loss, auc, normalized_entropy, grouped_auc, or loss; got rmse"),
        ("--keep-best site.auc", "--keep-best: site.auc: must be of a label of the schedule; there are clicked, seconds"),
        ("--label-weights site=2", "--label-weights: must name labels of the schedule, clicked, seconds; got site"),
        ("--loss losses.py:mean", 'got torch.float32 []; give one each, such as with reduction="none"'),
        ("--loss losses.py:median", "--loss: cannot import losses.py:median: AttributeError"),
        ("--model dlrm", "dlrm: predicts one label; got 2: clicked, seconds; use shared_bottom or mmoe"),
    ],
)
def test_what_the_labels_do_not_have_is_refused_before_anything_is_made(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, message: str
) -> None:
    monkeypatch.chdir(folder)
    model = [] if "--model" in given else ["--model", "mmoe"]
    error = refused("train", "visits", "--run", tmp_path / "run", "--store", "local:1", "--dim", "4", *model, *given.split())
    assert message in error
    assert not (tmp_path / "run").exists()


def test_a_loss_of_ones_own_is_found_from_anywhere(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    monkeypatch.chdir(folder)
    settings = ("--model", "shared_bottom", "--loss", "losses.py:both", "--dim", "4")
    done("train", "visits", "--run", run, "--store", "local:1", *settings)
    monkeypatch.chdir(tmp_path)
    assert done("evaluate", run).splitlines()[-1].startswith(f"loss {json.loads((run / 'summary.json').read_text())['loss']:.5f}")
