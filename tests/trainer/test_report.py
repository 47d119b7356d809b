"""The pages of runs and schedules: well-formed, with nothing from elsewhere, and with the figures that the run's files have."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clicks import Clicks
from command_line import done, main, refused
from small_job import arguments, summary

from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.pages.report import leave_report
from foreload.trainer.pages.run_figures import read_run
from foreload.trainer.pages.run_page import run_page
from foreload.trainer.pages.run_story import story_of
from foreload.trainer.pages.step_figures import MOST_POINTS, read_steps
from foreload.trainer.run.directory import METRICS, REPORT, STATUS, SUMMARY, Run
from foreload.trainer.run.report import reported_step

_EMPTY = {"meta"}  # elements without an end


class Page(HTMLParser):
    """A page that was parsed: elements are closed in their order. tiles: by name; figures: tables by the title of their plot, or of their section."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text, self.tags, self.attributes = text, list[str](), list[tuple[str, str]]()
        self.tiles: dict[str, list[str]] = {}
        self.tables: dict[str, list[list[str]]] = {}
        self.headings: list[str] = []
        self.title = ""
        self._open: list[tuple[str, str]] = []
        self._caption = self._name = ""
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in _EMPTY:
            self._open.append((tag, dict(attrs).get("class") or ""))
        if tag == "figcaption":
            self._caption = ""
        elif tag == "table":
            self.tables[self._caption] = []
        elif tag == "tr":
            self.tables[self._caption].append([])
        elif tag in ("td", "th"):
            self.tables[self._caption][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        tag, kind = self._open[-1] if self._open else ("", "")
        if tag == "title" and len(self._open) == 3:
            self.title += data
        elif tag == "h2":
            self.headings.append(data)
            self._caption = data
        elif "figcaption" in [one for one, _ in self._open]:
            self._caption += data
        elif (tag, kind) == ("span", "name"):
            self._name = data
        elif (tag, kind) == ("b", "figure"):
            self.tiles.setdefault(self._name, []).append(data)
        elif tag in ("td", "th"):
            self.tables[self._caption][-1][-1] += data

    def column(self, title: str, name: str, where: str = "") -> list[float]:
        """Figures of a table's column, of the rows that have a cell `where`."""
        head, *rows = self.tables[title]
        return [number(row[head.index(name)]) for row in rows if not where or where in row]


def number(text: str) -> float:
    """A figure as the page writes it."""
    value = float(re.sub(r"[^0-9.eE+-]", "", text.split(" ")[0]))
    return value / 100 if "%" in text else value


def checked(text: str) -> Page:
    """A page that asks for nothing from elsewhere and runs nothing."""
    page = Page(text)
    assert not {"script", "link", "img", "iframe", "object", "embed", "base", "form", "a"} & set(page.tags)
    assert not {"src", "href", "xlink:href", "srcset", "action"} & {name for name, _ in page.attributes}
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert not re.search(r"url\(|@import|://", text.replace("redis://", ""))
    assert len(text) < 1_000_000
    return page


@pytest.fixture(scope="module")
def run(clicks: Clicks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two evaluations, with the page that it left."""
    folder = tmp_path_factory.mktemp("reported") / "first"
    assert main(arguments(clicks.schedule, folder, "--store", "local:3", "--seed", "3")) == 0
    return folder


@pytest.fixture
def copied(run: Path, tmp_path: Path) -> Path:
    """A copy of the run's folder, to be changed."""
    return Path(shutil.copytree(run, tmp_path / "copied"))


def lines(run: Path, kind: str) -> list[dict[str, Any]]:
    told = [json.loads(line) for line in (run / METRICS).read_text().splitlines()]
    return [line for line in told if line["kind"] == kind]


def test_a_run_leaves_a_page_whose_headline_is_its_summary(run: Path) -> None:
    page, told = checked((run / REPORT).read_text()), summary(run)
    assert page.title.startswith("first")
    assert page.headings == [
        "Losses and metrics", "Throughput", "Where step time goes", "Cache", "Store shards and trainers over time", "Slots and memory",
        "Calibration", "Settings",
    ]  # fmt: skip
    tiles = {name: number(values[0]) for name, values in page.tiles.items()}
    assert tiles["log loss"] == pytest.approx(told["log_loss"], abs=1e-5)
    assert tiles["AUC"] == pytest.approx(told["auc"], abs=1e-4)
    assert tiles["normalised entropy"] == pytest.approx(told["normalized_entropy"], abs=1e-4)
    assert tiles["steps"] == told["steps"]
    assert tiles["samples a second"] == pytest.approx(told["samples_per_second"], abs=1)
    assert tiles["a step"] == pytest.approx(told["ms_step"], rel=1e-3)
    assert tiles["waiting for rows"] == pytest.approx(told["wait_fraction"], abs=1e-3)
    assert tiles["cache hits"] == pytest.approx(told["cache_hit_rate"], abs=1e-3)
    assert page.tiles["losses survived"] == ["0 + 0"]


def test_the_figures_of_plots_are_those_of_the_metrics(run: Path, clicks: Clicks) -> None:
    page, steps = checked((run / REPORT).read_text()), lines(run, "step")
    stride = -(-len(steps) // MOST_POINTS)
    groups = [steps[k : k + stride] for k in range(0, len(steps), stride)]
    losses = [np.average([step["loss"] for step in group], weights=[step["samples"] for step in group]) for group in groups]
    unit = "log loss, nats a sample"
    assert page.column(f"Loss ({unit})", unit, "training loss") == pytest.approx(losses, rel=1e-5)
    lowest = [min(step["loss"] for step in group) for group in groups]
    assert page.column(f"Loss ({unit})", "lowest", "training loss") == pytest.approx(lowest, rel=1e-5)
    evaluations = lines(run, "evaluation")
    assert page.column(f"Loss ({unit})", unit, "log loss in evaluation") == pytest.approx(
        [one["log_loss"] for one in evaluations], rel=1e-5
    )
    rates = [1000 * sum(step["samples"] for step in group) / sum(step["ms"] for step in group) for group in groups]
    assert page.column("Throughput (samples a second)", "samples a second") == pytest.approx(rates, rel=1e-5)
    waits = [np.mean([step["ms_waiting"] for step in group]) for group in groups]
    assert page.column(
        "A step during training (milliseconds a step)", "milliseconds a step", "waiting for rows"
    ) == pytest.approx(waits, rel=1e-5, abs=1e-6)
    fetched = [np.mean([step["rows_fetched"] for step in group]) for group in groups]
    assert page.column("Arrivals (rows a step)", "rows a step", "fetched from the store") == pytest.approx(fetched, rel=1e-5)
    calibration = evaluations[-1]["calibration"]
    observed = page.column("Predicted against observed (share clicked)", "share clicked", "observed")
    assert observed == pytest.approx([share for _, _, share in calibration], rel=1e-5)
    counts = Schedule(clicks.schedule).manifest["counts"]
    assert f"{counts['arrivals']:,} · " in page.text
    lru = read_run(run).cache
    assert lru is not None
    assert lru.lru is not None
    assert lru.fewest == lru.planned == sum(step["rows_arrived"] for step in steps) < lru.lru
    assert f"{lru.lru:,} · " in page.text


def test_two_runs_stand_beside_each_other(run: Path, copied: Path, tmp_path: Path) -> None:
    manifest = json.loads((copied / "manifest.json").read_text())
    manifest["job"]["lr"] = 0.125
    (copied / "manifest.json").write_text(json.dumps(manifest))
    assert done("report", run, copied, "--out", tmp_path / "two.html") == f"{tmp_path / 'two.html'}\n"
    page = checked((tmp_path / "two.html").read_text())
    assert all(len(values) == 2 for values in page.tiles.values())
    assert page.tables["Settings"][:2] == [["setting", "first", "copied"], ["--lr", "0.05", "0.125"]]
    head, *rows = page.tables["Throughput (samples a second)"]
    assert {row[head.index("line")] for row in rows} == {"first: samples a second", "copied: samples a second"}


def test_two_runs_of_one_name_are_told_apart(run: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(run, tmp_path / "elsewhere" / run.name))
    done("report", run, other, "--out", tmp_path / "two.html")
    assert checked((tmp_path / "two.html").read_text()).tables["Settings"][0] == ["setting", str(run), str(other)]


def test_names_are_text(run: Path, tmp_path: Path) -> None:
    named = Path(shutil.copytree(run, tmp_path / '<script>alert("&")'))
    done("report", named)
    page = checked((named / REPORT).read_text())
    assert page.title.startswith('<script>alert("&")')


def test_of_a_run_that_was_killed_what_is_whole_is_shown(copied: Path) -> None:
    whole = (copied / METRICS).read_text().splitlines(keepends=True)
    steps = [line for line in whole if json.loads(line)["kind"] == "step"]
    # It went back to step 40 once, and was killed in a line.
    (copied / METRICS).write_text("".join([*steps[:60], *steps[40:100], steps[100][:50]]))
    (copied / SUMMARY).unlink()
    status = json.loads((copied / STATUS).read_text())
    (copied / STATUS).write_text(json.dumps(status | {"state": "training"}))
    assert done("report", copied) == f"{copied / REPORT}\n"
    page = checked((copied / REPORT).read_text())
    assert "copied: broken off after step 99" in page.text
    assert page.tiles["steps"] == ["100"]
    told = [json.loads(line) for line in steps[:100]]
    unit = "log loss, nats a sample"
    assert page.column(f"Loss ({unit})", unit) == pytest.approx([step["loss"] for step in told], rel=1e-5)
    assert page.tiles["log loss"] == ["-"]
    assert "it has no evaluation" in page.text


@pytest.mark.parametrize(
    "line", ["[" * 10_000, '{"kind": "step", "step": 1e999}', '{"kind": "step", "step": null, "loss": 1}', "\0"]
)
def test_lines_that_tell_of_no_step_are_left_out(copied: Path, line: str) -> None:
    whole = (copied / METRICS).read_text()
    (copied / METRICS).write_text(whole + line + "\n")
    assert read_steps(copied / METRICS) is not None
    assert reported_step(copied / METRICS) == Run.open(copied).saved_status().step
    assert "broken off" not in checked(run_page([read_run(copied)])).text


def test_of_a_run_of_an_earlier_version_it_is_said_what_is_missing(copied: Path, clicks: Clicks) -> None:
    told = [json.loads(line) for line in (copied / METRICS).read_text().splitlines()]
    for line in told:
        line.pop("calibration", None)
    (copied / METRICS).write_text("".join(f"{json.dumps(line)}\n" for line in told))
    (copied / "events.jsonl").unlink()
    (copied / SUMMARY).write_text(json.dumps({name: value for name, value in summary(copied).items() if name != "memory"}))
    shutil.rmtree(copied / "kept")
    manifest = (copied / "manifest.json").read_text()
    (copied / "manifest.json").write_text(manifest.replace(str(clicks.schedule), "/nowhere/schedule"))
    page = checked(run_page([read_run(copied)]))
    for why in (
        "its evaluations do not have it",
        "it has no events.jsonl",
        "memory is recorded at the end",
        "its schedule no longer exists",
        "LRU are not shown",
    ):
        assert page.text.count(why) == 1, why


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_run_that_has_hardly_begun_has_a_page(steps: int, copied: Path) -> None:
    first = [json.loads(line) for line in (copied / METRICS).read_text().splitlines()[:steps]]
    # A loss that is not finite is null.
    (copied / METRICS).write_text("".join(f"{json.dumps(line | {'loss': None})}\n" for line in first))
    page = checked(run_page([read_run(copied), read_run(copied)]))
    assert page.tiles["steps"] == [str(steps)] * 2
    assert page.text.count("No step has been trained yet.") == (0 if steps else 4)


def test_a_long_run_is_read_in_few_points(run: Path, copied: Path) -> None:
    steps, evaluation = lines(run, "step"), lines(run, "evaluation")[0]
    with open(copied / METRICS, "w", encoding="utf-8") as file:
        for number in range(30_001):
            file.write(f"{json.dumps(steps[number % len(steps)] | {'step': number})}\n")
            if number % 30 == 0:
                # Told twice, as after a resume.
                file.write(f"{json.dumps(evaluation | {'step': number})}\n" * 2)
    figures = read_steps(copied / METRICS)
    assert len(figures.steps) <= MOST_POINTS
    assert (figures.steps.sum(), figures.last[-1]) == (30_001, 30_000)
    assert figures.total("rows_used") == sum(steps[number % len(steps)]["rows_used"] for number in range(30_001))
    assert figures.loss_low.min() == min(step["loss"] for step in steps)
    page = checked(run_page([read_run(copied)]))
    unit = "log loss, nats a sample"
    assert len(page.column(f"Loss ({unit})", unit, "log loss in evaluation")) == MOST_POINTS
    assert len(figures.evaluations) == 1001


def test_a_page_that_cannot_be_written_is_a_line(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copied / REPORT).unlink()
    (copied / REPORT / "in-the-way").mkdir(parents=True)
    leave_report(copied)
    err = capsys.readouterr().err
    assert err.startswith(f"foreload: warning: {copied / REPORT}: is not written (")
    assert err.count("\n") == 1


def test_a_run_may_be_told_to_leave_none(clicks: Clicks, tmp_path: Path) -> None:
    assert main(arguments(clicks.schedule, tmp_path / "run", "--store", "local:1", "--no-report")) == 0
    assert not (tmp_path / "run" / REPORT).exists()


def test_a_schedule_has_a_page(clicks: Clicks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert done("report", clicks.schedule) == "schedule-report.html\n"
    page, schedule = checked(Path("schedule-report.html").read_text(encoding="utf-8")), Schedule(clicks.schedule)
    counts = schedule.manifest["counts"]
    assert page.headings == ["Rows by frequency", "Working set over time", "Arrivals against slots", "Tables' shares", "Settings"]
    assert number(page.tiles["rows used"][0]) == counts["rows_used"]
    assert number(page.tiles["arrivals"][0]) == counts["arrivals"]
    head, *rows = page.tables["Arrivals against slots (rows, over all steps)"]
    assert head == ["slots per lane", "the minimum", "an LRU cache", "LRU / minimum"]
    fewest = {int(number(row[0])): int(number(row[1])) for row in rows}
    assert fewest[max(schedule.manifest["occupied"])] == counts["arrivals"]
    assert fewest[max(fewest)] == schedule.manifest["rows"]["rows"] == sum(schedule.rows_per_table())
    for name, rows_of in zip([table.name for table in schedule.header.features.tables], schedule.rows_per_table(), strict=True):
        assert re.search(rf"<span>{name}</span>.*?<span class=\"n\">{rows_of:,} · ", page.text)
    used = [
        len(schedule.lane(event, 0).slots) + len(schedule.lane(event, 1).slots)
        for event in schedule.events()
        if event.kind == "train"
    ]
    stride = -(-len(used) // MOST_POINTS)
    means = [np.mean(used[k : k + stride]) for k in range(0, len(used), stride)]
    assert page.column("Working set (rows)", "rows", "rows a step uses") == pytest.approx(means, rel=1e-5)


def bad() -> Iterator[tuple[list[str], str]]:
    yield ["{there}/none"], "run .*none: there is no such folder|run .*none: "
    yield ["{schedule}", "{run}"], "report: takes one run, two runs, or one schedule; got schedule .*; give it alone"
    yield ["{run}", "{schedule}"], "report: takes one run"
    yield ["{run}", "--out", "{there}/none/x.html"], "--out: cannot write .*: there is no folder"
    yield ["{run}", "--out", "{there}"], "--out: cannot write .*: is a folder"
    yield ["{there}"], "run .*: "
    yield ["{unfinished}"], "schedule .*: is unfinished"


@pytest.mark.parametrize(("given", "why"), list(bad()))
def test_what_cannot_be_shown_is_refused(given: list[str], why: str, run: Path, clicks: Clicks, tmp_path: Path) -> None:
    unfinished = clicks.copy(tmp_path / "unfinished")
    (unfinished / "schedule.json").unlink()
    places = {"there": tmp_path, "run": run, "schedule": clicks.schedule, "unfinished": unfinished}
    before = sorted(tmp_path.iterdir())
    assert re.match(why, refused("report", *(word.format(**places) for word in given)))
    assert sorted(tmp_path.iterdir()) == before


def event(second: int, kind: str, step: int, **further: Any) -> dict[str, Any]:
    return {"time": f"2026-11-23T10:00:{second:02}.000+00:00", "kind": kind, "step": step, "term": 1, "cause": None, **further}


def test_losses_are_told_once_and_spans_are_of_training_time() -> None:
    began = {"trainers": 2, "copies": 2, "resumed": False}
    told = story_of(
        [
            event(0, "call-began", -1, **began), event(2, "term-began", -1, members=[0, 1], lanes=[0, 1]),
            event(4, "shard-lost", 10, shard=1), event(4, "shard-lost", 10, shard=1), event(5, "shard-replaced", 12, shard=1, url=None),
            event(8, "shard-rebuilt", 20, shard=1), event(9, "trainer-lost", 22, trainer=1), event(10, "call-ended", 30, state="stopped"),
            {"no": "event"},
            event(40, "call-began", 30, **began), event(42, "shard-replaced", 33, shard=0, url=None), event(43, "shard-lost", 33, shard=0),
        ],
        range(2),
        None,
    )  # fmt: skip
    assert (told.seconds, told.calls, told.happened("shard-lost"), told.happened("trainer-lost")) == (13, 2, 2, 1)
    assert [(begin, end, colour) for begin, end, colour, _ in told.shards[1]] == [
        (0, 4, "c4"), (4, 5, "bad"), (5, 8, "mid"), (8, 13, "c4")
    ]  # fmt: skip
    assert [(begin, end, colour) for begin, end, colour, _ in told.shards[0]] == [(0, 12, "c4"), (12, 13, "mid")]
    assert [span[:2] for span in told.trainers[1]] == [(2, 9)]
    assert [mark.x for mark in told.marks] == [10, 20, 22, 33]
