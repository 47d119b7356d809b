"""RUN/events.jsonl: a line an event, whatever its writers were killed in, over all calls of a run."""

from __future__ import annotations

import dataclasses
import json
import re
from datetime import UTC, datetime
from pathlib import Path

import pytest
from command_line import main
from held import Hold
from small_job import arguments, synthetic_schedule

from foreload.base.errors import SettingError
from foreload.trainer.run import event_log
from foreload.trainer.run.directory import EVENTS
from foreload.trainer.run.event_log import (
    CallBegan,
    EventLog,
    LanesMoved,
    RunEvent,
    ShardLost,
    StopAsked,
    TrainerLeft,
    read_events,
)

DOCS = Path(__file__).parents[2] / "docs" / "run-files.md"


def test_a_line_tells_when_and_where_the_run_was(tmp_path: Path) -> None:
    log = EventLog(tmp_path, 4, 2, clock=lambda: datetime(2026, 1, 2, 3, 4, 5, 6000, tzinfo=UTC))
    log.note(ShardLost(shard=1, cause="it was closed"))
    log.step, log.term = 5, 3
    log.note(LanesMoved(lanes=(1, 2), from_trainer=0, to_trainer=1))
    assert list(read_events(tmp_path)) == [
        {"time": "2026-01-02T03:04:05.006+00:00", "kind": "shard-lost", "step": 4, "term": 2, "shard": 1, "cause": "it was closed"},
        {
            "time": "2026-01-02T03:04:05.006+00:00", "kind": "lanes-moved", "step": 5, "term": 3, "lanes": [1, 2], "from_trainer": 0,
            "to_trainer": 1, "cause": None,
        },
    ]  # fmt: skip


@pytest.mark.parametrize("cut", [1, 20, -1])
def test_a_torn_last_line_is_closed_off_by_the_next_writer(tmp_path: Path, cut: int) -> None:
    EventLog(tmp_path, 1, 1).note(StopAsked(cause="first"))
    EventLog(tmp_path, 2, 1).note(StopAsked(cause="torn"))
    path = tmp_path / EVENTS
    first, torn = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + torn[:cut])
    whole = 2 if cut == -1 else 1
    assert len(list(read_events(tmp_path))) == whole
    EventLog(tmp_path, 3, 1).note(StopAsked(cause="third"))
    assert [event["cause"] for event in read_events(tmp_path)] == ["first", "torn", "third"][:: 1 if whole == 2 else 2]
    assert path.read_bytes().startswith(first)


def test_a_line_that_is_no_event_is_left_out(tmp_path: Path) -> None:
    EventLog(tmp_path, 1, 1).note(StopAsked(cause="first"))
    with open(tmp_path / EVENTS, "ab") as file:
        file.write(b"[" * 100_000 + b"\n" + b'{"kind": NaN}\n' + b"7\n" + b"\xff\n")
    assert [event["cause"] for event in read_events(tmp_path)] == ["first"]


def test_a_full_disk_leaves_events_out_and_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / EVENTS).symlink_to("/dev/full")
    log = EventLog(tmp_path, 1, 1)
    for trainer in range(3):
        log.note(TrainerLeft(trainer=trainer))
    assert capsys.readouterr().err.count("cannot be written (No space left on device), so events are missing") == 1


@pytest.mark.parametrize(
    ("error", "code"),
    [(SettingError("--x: no"), "setting"), (KeyboardInterrupt(), "interrupted"), (ZeroDivisionError(), "unforeseen")],
)
def test_what_ends_a_call_is_noted(tmp_path: Path, error: BaseException, code: str) -> None:
    with pytest.raises(type(error)), EventLog(tmp_path, 1, 1).failures():
        raise error
    assert [(event["kind"], event["code"]) for event in read_events(tmp_path)] == [("call-failed", code)]


def test_every_kind_and_its_fields_are_documented() -> None:
    section = DOCS.read_text().partition("\n## events.jsonl")[2].partition("\n## ")[0]
    documented = dict(re.findall(r"^\| `([a-z-]+)` \| ([^|]*) \|", section, re.MULTILINE))
    kinds = [kind for kind in RunEvent.__subclasses__() if kind.__module__ == event_log.__name__]
    assert {kind.kind: [field.name for field in dataclasses.fields(kind) if field.name != "cause"] for kind in kinds} == {
        name: re.findall(r"`(\w+)`", fields)
        for name, fields in documented.items()
        if name not in ("time", "kind", "step", "term", "cause")
    }


@pytest.mark.full
def test_events_are_kept_over_resumes_and_refusals_are_among_them(tmp_path: Path, hold: Hold) -> None:
    schedule, run = synthetic_schedule(tmp_path, 12_000), tmp_path / "run"
    job = hold(arguments(schedule, run, "--store", "local:1"), 5)
    job.process.terminate()
    assert job.stopped()[0] == 143
    assert main(arguments(schedule, run, "--resume", "--seed", "9", "--store", "local:1")) == 2
    with (run / EVENTS).open("a") as torn:
        torn.write('{"time": "2026')
    assert main(arguments(schedule, run, "--resume", "--store", "local:1")) == 0
    events = list(read_events(run))
    call = ["call-began", "term-began"]
    assert [event["kind"] for event in events] == [*call, "stop-asked", "call-ended", "call-failed", *call, "call-ended"]
    stop, stopped, refused, resumed = events[2:6]
    assert (stop["cause"], stopped["state"], stopped["cause"]) == ("SIGTERM", "stopped", None)
    assert (refused["code"], refused["step"], refused["term"]) == ("run-refused", stopped["step"], 1)
    assert "--seed" in refused["cause"]
    assert (resumed["resumed"], resumed["term"], resumed["trainers"], resumed["copies"]) == (True, 2, 1, 1)
    assert json.loads((run / EVENTS).read_text().splitlines()[-1])["state"] == "ended"
    assert CallBegan.kind == events[0]["kind"]
