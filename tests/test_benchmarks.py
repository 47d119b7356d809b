"""Pages of the benchmarks: machines beside each other, what a run leaves alone, and the bound that claims are held against."""

from __future__ import annotations

import json
import math
import random
import re
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from held import held
from small_job import BATCH, synthetic_schedule

from comparison import MINUTES, Claim, Ratio, Results, Series, Table, lower_bound, machine_name, save, spread
from foreload.trainer.job.job import TrainJob
from foreload.trainer.run.event_log import read_events
from peers_accuracy import interval
from render import keep, render
from shard_loss import ShardInjector, run_training
from trainer_loss import TrainerInjector
from workload import job

ROOT = Path(__file__).resolve().parents[1]
Machine = Mapping[str, str | int | float]
XEON: Machine = {
    "cpu": "Intel(R) Xeon(R) Processor @ 2.50GHz",
    "cores": 2,
    "memory_gib": 23.5,
    "cpu_capability": "avx512",
    "kernel": "Linux 6",
}
EPYC: Machine = {
    "cpu": "AMD EPYC 9654",
    "cores": 16,
    "memory_gib": 128,
    "cpu_capability": "avx512",
    "kernel": "Linux 6",
    "gpu": "NVIDIA H200",
}
NAMES = ("amd-epyc-9654-16-cores-nvidia-h200", "intel-xeon-2.50ghz-2-cores")


def result(
    folder: Path, script: str, figure: Ratio | float | None, machine: Machine, date: str = "2026-01-01", **more: Any
) -> Path:
    """A folder with one result, as a script on that machine would have saved it. more: fields of its claim."""
    folder.mkdir()
    fields = {"least": 1.0, "bar": ">= 1.0", **more}
    claim = Claim("samples/s", "another", value=figure, **fields)
    plots = [Series("Time", "x", "y", "lines", {"one": [(1, 2.0)]})]
    tables = [Table("Times", ["side", "ms"], [["one", 2.0]])]
    path = save(Results(script, f"About {script}", [claim], tables, plots), folder)
    told = json.loads(path.read_text()) | {"machine": machine, "date": f"{date}T10:00:00+00:00"}
    path.write_text(json.dumps(told))
    return folder


def row(page: Path, start: str) -> list[str]:
    """The cells of a page's only table row that starts so."""
    (line,) = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith(f"| {start} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_names_of_machines_are_of_processor_cores_and_device() -> None:
    assert (machine_name(EPYC), machine_name(XEON)) == NAMES


def test_every_machine_has_a_page_and_a_column(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    keep(result(tmp_path / "a", "step", 1.25, XEON, "2026-01-01"), docs, None)
    keep(result(tmp_path / "b", "step", 0.75, EPYC, "2026-02-02"), docs, None)
    page = render(docs)
    amd, intel = (f"benchmarks/{name}/README.md" for name in NAMES)
    assert row(page, "samples/s")[3:] == [f"[0.750]({amd}#step) **missed**, 2026-02-02", f"[1.250]({intel}#step) met, 2026-01-01"]
    for name, figure, word in zip(NAMES, ("0.750", "1.250"), ("**missed**", "met"), strict=True):
        own = docs / "benchmarks" / name
        assert row(own / "README.md", "samples/s")[3:6] == [figure, "-", word]
        assert f"![Time]({next(own.glob('*.png')).name})" in (own / "README.md").read_text()
    assert "NVIDIA H200" in page.read_text()


def test_a_run_of_some_scripts_keeps_the_others_figures(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    for number, (script, figure) in enumerate([("step", 1.25), ("links", 1.5), ("step", 2.0)]):
        keep(result(tmp_path / str(number), script, figure, XEON, f"2026-01-0{number + 1}"), docs, "desk")
    text = render(docs).read_text()
    assert "[2.000](benchmarks/desk/README.md#step) met, 2026-01-03" in text
    assert "[1.500](benchmarks/desk/README.md#links) met, 2026-01-02" in text
    assert "1.250" not in text


def test_a_failure_is_told_beside_the_figures_before(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    keep(result(tmp_path / "a", "step", 1.25, XEON), docs, None)
    (tmp_path / "b").mkdir()
    for script in ("step", "links"):
        failed = {"script": script, "failed": "status 1: no room", "date": "2026-03-03T10:00:00+00:00", "machine": XEON}
        (tmp_path / "b" / f"{script}.json").write_text(json.dumps(failed))
    keep(tmp_path / "b", docs, None)
    assert "[1.250]" in row(render(docs), "samples/s")[3]
    own = docs / "benchmarks" / NAMES[1] / "README.md"
    assert own.read_text().count("**Failed** on 2026-03-03: status 1: no room") == 2
    assert row(own, "all of bench_links.py")[5] == "**failed**"
    keep(result(tmp_path / "c", "step", 1.5, XEON), docs, None)
    render(docs)
    assert own.read_text().count("**Failed**") == 1


def test_a_quick_run_replaces_no_other(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    keep(result(tmp_path / "a", "step", 1.25, XEON), docs, None)
    quick = result(tmp_path / "b", "step", 9.0, XEON)
    told = json.loads((quick / "step.json").read_text())
    (quick / "step.json").write_text(json.dumps(told | {"quick": True}))
    keep(quick, docs, None)
    assert "[1.250]" in row(render(docs), "samples/s")[3]


def test_figures_are_held_against_the_newest_bar_and_only_by_the_same_measure(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    keep(result(tmp_path / "a", "step", 1.25, XEON, "2026-01-01"), docs, "old")
    keep(result(tmp_path / "b", "step", 1.75, XEON, "2026-02-02", least=1.5, bar=">= 1.5"), docs, "new")
    keep(result(tmp_path / "c", "step", None, XEON, "2026-03-03"), docs, "without")
    assert row(render(docs), "samples/s")[2:] == [
        ">= 1.5",
        "[1.750](benchmarks/new/README.md#step) met, 2026-02-02",
        "[1.250](benchmarks/old/README.md#step) **missed**, 2026-01-01",
        "not measured",
    ]
    keep(result(tmp_path / "d", "step", spread([1.5] * 9), XEON, "2026-04-04", least=1.5, by_bound=True), docs, "new")
    assert (
        row(render(docs), "samples/s")[4]
        == "[1.250](benchmarks/old/README.md#step) median, not held against this bar, 2026-01-01"
    )


def test_a_claim_is_held_against_the_bound_where_it_says_so() -> None:
    pairs = spread([1.0, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8])
    assert Claim("", "", "", pairs, 1.1).figure == pytest.approx(1.45)
    assert Claim("", "", "", pairs, 1.1, by_bound=True).figure == 1.2  # P(Bin(8, 1/2) < 2) = 9 / 256
    assert Claim("", "", "", spread([1.0, 2.0, 3.0, 4.0]), 1.1, by_bound=True).figure is None


@pytest.mark.parametrize("count", [5, 8, 42, 200])
def test_the_bound_is_above_the_median_as_seldom_as_it_says(count: int) -> None:
    # Of a distribution with long tails; its median is 0.
    draw = random.Random(count)
    over = [lower_bound([math.tan(math.pi * (draw.random() - 0.5)) for _ in range(count)]) > 0 for _ in range(2000)]
    assert statistics.fmean(over) <= 0.065
    assert sum(over) > 0
    assert lower_bound(range(count), 0.999) <= lower_bound(range(count)) < count / 2


def test_an_interval_is_student_s() -> None:
    # 2.776 is the two-sided 95 % quantile for 4 degrees of freedom; the deviation is sqrt(2.5).
    assert interval([1.0, 2.0, 3.0, 4.0, 5.0], 3) == f"3.000 +- {2.776 * math.sqrt(2.5 / 5):.3f}"


def test_what_is_in_the_docs_is_what_the_results_give(tmp_path: Path) -> None:
    for folder in (ROOT / "docs" / "benchmarks").glob("*/results"):
        keep(folder, tmp_path, folder.parent.name)
    assert render(tmp_path).read_text() == (ROOT / "docs" / "benchmarks.md").read_text()
    for page in tmp_path.glob("benchmarks/*/README.md"):
        assert page.read_text() == (ROOT / "docs" / page.relative_to(tmp_path)).read_text()


def test_the_page_says_what_every_script_measures() -> None:
    named = re.findall(r"^\| \[?`(\w+)`", (ROOT / "docs" / "benchmarks.md").read_text(), re.MULTILINE)
    assert named == list(MINUTES)
    assert all((ROOT / "benchmarks" / f"bench_{name}.py").exists() for name in named)


@pytest.mark.parametrize("kind", ["trainers", "shards"])
def test_injectors_stop_the_run_that_they_observe(kind: str, tmp_path: Path) -> None:
    """The run waits for the schedule's next segment, so only a stop can end it."""
    run = tmp_path / "run"
    injector = TrainerInjector(run, [], (0, 5), 0) if kind == "trainers" else ShardInjector(run, [], 0, math.inf)
    with held(synthetic_schedule(tmp_path, 100 * BATCH), tmp_path / "held", 20) as part:
        run_training(TrainJob.of(job(part.path, "small", run=str(run), store="local:3", follow=True)), injector)
    assert "stop-asked" in [event["kind"] for event in read_events(run)]
    assert 0 < injector.timeline.ended.size < 100
