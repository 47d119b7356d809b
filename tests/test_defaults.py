"""What is prepared with nothing said of the cache can be trained with nothing said of it; what does not fit is told with what does."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from clicks import Clicks
from command_line import done, refused

from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.job.job import TrainJob
from foreload.trainer.job.memory_check import check_fit


def prepare(clicks: Clicks, out: Path, *further: object) -> Path:
    """Prepare the clicks again, in fewer steps and without --slots, but for what further says."""
    done("prepare", clicks.log, *clicks.options(out, batch_size=100, epochs=1, slots=None), *further)
    return out


@pytest.mark.full
def test_slots_by_default_are_the_rows_that_there_are(clicks: Clicks, tmp_path: Path) -> None:
    summary = tmp_path / "summary.json"
    out, few = prepare(clicks, tmp_path / "out", "--json", summary), prepare(clicks, tmp_path / "few", "--slots", "150")
    schedule = Schedule(out)
    assert json.loads(summary.read_text())["slots"] == list(schedule.slots)
    assert sum(schedule.slots) == sum(len(batch["id"]) for batch in schedule.rows())
    tables = sum(table.rows or 0 for table in schedule.header.features.tables)
    assert max(schedule.header.slots) <= tables, "known before anything is planned: no more than the tables have rows"
    # Slots do not show in the model, nor where those of evaluation begin.
    printed = [
        done("train", schedule, "--run", tmp_path / f"run-of-{schedule.name}", "--store", "local:3", "--dim", 48, "--digest")
        for schedule in (out, few)
    ]
    models = [re.findall(r"digest \w+|log loss .*", text) for text in printed]
    assert models[0] == models[1]
    evaluated = done("evaluate", tmp_path / "run-of-out").split("   (")[0]
    assert evaluated == models[0][0]


def test_memory_is_what_a_lane_takes_when_it_is_trained(clicks: Clicks, tmp_path: Path) -> None:
    every, out = prepare(clicks, tmp_path / "all"), prepare(clicks, tmp_path / "out", "--memory", "1250KB")
    assert max(Schedule(out).header.slots) < max(Schedule(every).slots), "the rows do not all fit"
    run = ("--run", tmp_path / "run", "--store", "local:3")
    line = refused("train", out, *run, "--dim", 64)
    assert "the schedule's --memory: " in line
    memory = re.search(r"give --memory (\d+) ", line)
    assert memory is not None
    wide = TrainJob.of({"schedule": out, "run": "run", "store": "local:3", "dim": 64, "memory": memory[1]})
    assert "lanes x" in check_fit(wide, Schedule(out))
    done("train", out, *run)
    fewer = re.search(r"prepare with --slots (\d+)", refused("train", every, *run, "--overwrite", "--memory", "1240KB"))
    assert fewer is not None
    again = prepare(clicks, tmp_path / "again", "--slots", fewer[1])
    small = TrainJob.of({"schedule": again, "run": "run", "store": "local:3", "memory": "1240KB"})
    assert "lanes x" in check_fit(small, Schedule(again))


def test_memory_that_holds_no_slot_is_refused_with_what_would(clicks: Clicks, tmp_path: Path) -> None:
    line = refused("prepare", clicks.log, *clicks.options(tmp_path / "out", slots=None, memory="500KB"))
    least = re.fullmatch(r"--memory: must be at least (\d+) bytes, .*; got 500000; give more, or --slots N", line)
    assert least is not None
    assert not (tmp_path / "out").exists()
    line = refused("prepare", clicks.log, *clicks.options(tmp_path / "out", slots=None, memory=least[1]))
    assert line.startswith("--slots: must hold every row of a step")
