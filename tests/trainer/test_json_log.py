"""`--log-format json`: every line on stderr is an object, and all events of the run are among them."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from command_line import Command
from small_job import arguments, synthetic_schedule

from foreload.base import json_log
from foreload.base.json_log import JsonLines
from foreload.base.progress import Display, ProgressLine

NET = """
import sys
from foreload.trainer.models.dlrm import DLRM

class Net(DLRM):
    def forward(self, *args, **kwargs):
        print("out of the model")
        sys.stderr.write("from the model\\n")
        return super().forward(*args, **kwargs)
"""


def objects(text: str) -> list[dict[str, Any]]:
    """The objects of a log; asserts that there is nothing else, and that each says when it was written, and what it is."""
    lines = [json.loads(line) for line in text.splitlines()]
    for line in lines:
        assert datetime.fromisoformat(line["time"]).utcoffset() is not None
        assert line["kind"]
    return lines


def of_kind(kind: str, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines if line["kind"] == kind]


def test_a_training_writes_nothing_but_objects(tmp_path: Path) -> None:
    schedule, run = synthetic_schedule(tmp_path, 4000, further="--eval-fraction 0.1"), tmp_path / "run"
    (tmp_path / "mine.py").write_text(NET)
    words = arguments(schedule, run, "--store", "local:1", "--trainers", "2", "--model", "mine.py:Net", "--log-format", "json")
    status, _, err = Command(*words, anew=True, folder=tmp_path).end()
    assert status == 0, err
    lines = objects(err)
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert len(events) == 3
    assert [line for line in lines if line in events] == events
    [evaluation] = of_kind("evaluation", lines)
    assert evaluation["auc"] == json.loads((run / "summary.json").read_text())["auc"]
    said = [line for line in of_kind("message", lines) if line["text"] in ("from the model", "out of the model")]
    # Trainers write into the same stream, and say so. The launcher calls the model, too, to check it.
    assert {(line.get("trainer"), line["text"]) for line in said} >= {
        (trainer, text) for trainer in (0, 1) for text in ("from the model", "out of the model")
    }


@pytest.mark.parametrize(
    ("further", "error"),
    [
        (("--trainers", "3"), "--trainers: must be at most the schedule's lanes, 2; got 3"),
        (("--lr", "-1"), "--lr: must be at least 0; got -1"),
    ],
)
def test_an_error_is_an_object_too(further: tuple[str, str], error: str, tmp_path: Path) -> None:
    schedule, run = synthetic_schedule(tmp_path, 2000), tmp_path / "run"
    words = arguments(schedule, run, "--store", "local:1", *further, "--log-format", "json")
    status, _, err = Command(*words, anew=True).end()
    assert status == 2
    [line] = of_kind("message", objects(err))
    assert line["level"] == "error"
    assert line["text"].startswith(error)


@contextlib.contextmanager
def logged() -> Iterator[io.StringIO]:
    """Have messages written as JSON; what is written."""
    written = io.StringIO()
    with contextlib.redirect_stderr(JsonLines(written, None, {"trainer": 3})):
        yield written


def test_lines_are_objects_whatever_they_are_written_by() -> None:
    with logged() as log:
        for text in (
            "foreload: warn",
            "ing: the disk is\nfull",
            '\n\nforeload: note: so\nplain "words" ö\nforeload: error: gone\n',
            "begun",
        ):
            sys.stderr.write(text)
            sys.stderr.flush()
        assert not sys.stderr.isatty()
    assert [(line["level"], line["text"], line["trainer"]) for line in objects(log.getvalue())] == [
        ("warning", "the disk is", 3), ("info", "full", 3), ("note", "so", 3), ("info", 'plain "words" ö', 3), ("error", "gone", 3),
    ]  # fmt: skip


def test_progress_has_its_figures() -> None:
    times = iter([0.0, 2.0])
    with logged() as log:
        Display(lambda: ProgressLine("half done", {"steps": 5, "of_steps": 10}), 1, clock=lambda: next(times)).tick()
    [line] = objects(log.getvalue())
    assert {name: line[name] for name in ("kind", "text", "steps", "of_steps")} == {
        "kind": "progress", "text": "half done", "steps": 5, "of_steps": 10,
    }  # fmt: skip


def test_lines_of_several_processes_stay_whole() -> None:
    reader, writer = os.pipe()
    with os.fdopen(reader) as read, os.fdopen(writer, "w") as write:
        children = []
        for child in range(4):
            pid = os.fork()
            if not pid:
                lines = JsonLines(write, None, {"trainer": child})
                for number in range(20):
                    lines.write(f"{number} {'x' * 500}\n")
                os._exit(0)
            children.append(pid)
        write.close()
        got = objects(read.read())
    for pid in children:
        assert os.waitpid(pid, 0)[1] == 0
    assert sorted((line["trainer"], int(line["text"].split()[0])) for line in got) == [
        (child, number) for child in range(4) for number in range(20)
    ]


def test_text_stays_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert not json_log.record({"kind": "progress"})
    assert capsys.readouterr().err == ""
