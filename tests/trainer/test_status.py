"""`foreload status`: who has which lanes and copies of a run that trains, whether a loss is survived, and how far one is that does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import main
from small_call import small_call

from foreload.cache.protocol.shards.shard_status import ShardSnapshot, ShardStatus
from foreload.trainer.cluster.coordinator.control_socket import ControlSocket
from foreload.trainer.cluster.coordinator.membership import LaneReplicas
from foreload.trainer.cluster.messages.control import CopyStatus, RunStatus
from foreload.trainer.cluster.messages.facts import Term
from foreload.trainer.cluster.messages.trainers import CopiesReport, SeededCopy
from foreload.trainer.commands import status
from foreload.trainer.run.directory import MANIFEST
from foreload.trainer.run.event_log import read_events

SHARDS = ShardSnapshot(
    (ShardStatus("redis://a:1", "rebuilding", "", 0.25), ShardStatus("redis://b:1"), ShardStatus("redis://c:1"))
)
TERM = Term(3, (0, 2), (0, 2, 2), ((2,), (0,), (0,)), ((2,), (), ()), 40)
WHOLE = SeededCopy(500, 500, True)


def test_a_run_that_trains_tells_its_trainers_lanes_and_copies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / MANIFEST).write_text("{}")
    copies = (CopyStatus(0, 2, 500, 500, True), CopyStatus(1, 0, 200, 500, False), CopyStatus(2, 0, 0, 0, False))
    training = RunStatus("training", 41, 3, TERM.hosts, {0: 100, 2: 101}, SHARDS, TERM.members, copies)
    control = ControlSocket(tmp_path, lambda request: training)
    try:
        assert main(["status", str(tmp_path), "--json", str(tmp_path / "told.json")]) == 0
    finally:
        control.close()
    assert capsys.readouterr().out.splitlines() == [
        f"run {tmp_path}: training after step 41, term 3",
        "trainer 0  process 100  lane 0",
        "trainer 2  process 101  lane 1, 2",
        "lane 0  trainer 0  copies: trainer 2",
        "lane 1  trainer 2  copies: trainer 0 (200 of 500 slots seeded)",
        "lane 2  trainer 2  copies: trainer 0 (not seeded yet)",
        "store shards: 2 ok, 1 rebuilding",
        "the run would not survive the loss of a trainer now: no other trainer has a complete copy of lane 1, 2",
    ]
    told = json.loads((tmp_path / "told.json").read_text())
    assert (told["survives"], told["shards"]) == (False, {"ok": 2, "rebuilding": 1})
    assert told["lanes"][1] == {
        "lane": 1, "trainer": 2, "copies": [{"trainer": 0, "slots": 200, "of": 500, "complete": False}]
    }  # fmt: skip


def test_copies_that_are_not_complete_are_told_until_they_are(tmp_path: Path) -> None:
    said: list[str] = []
    call = small_call(tmp_path, step=40, term=3)
    call.say = said.append
    copies = LaneReplicas(call, TERM)
    assert copies.lacking == [0, 1, 2]
    copies.on_copies(0, CopiesReport(2, {1: WHOLE, 2: WHOLE}))  # of an earlier term
    copies.on_copies(2, CopiesReport(3, {0: WHOLE}))
    assert (said, copies.lacking) == ([], [1, 2])
    copies.on_copies(0, CopiesReport(3, {1: SeededCopy(200, 500, False), 2: SeededCopy(0, 500, False)}))
    copies.on_copies(0, CopiesReport(3, {1: WHOLE, 2: SeededCopy(499, 500, False)}))
    assert copies.status[2] == CopyStatus(2, 0, 499, 500, False)
    assert said == ["lane 1, 2: has no complete copy yet; until it has one, the run does not survive the loss of its trainer"]
    copies.on_copies(0, CopiesReport(3, {1: WHOLE, 2: WHOLE}))
    assert said[1:] == ["every lane has a complete copy again; the run survives a further loss"]
    assert [(event["kind"], event.get("lanes")) for event in read_events(tmp_path)] == [
        ("copies-incomplete", [1, 2]),
        ("copies-complete", None),
    ]


def test_copies_that_are_complete_when_they_are_told_of_are_no_news(tmp_path: Path) -> None:
    said: list[str] = []
    call = small_call(tmp_path, step=40, term=3)
    call.say = said.append
    copies = LaneReplicas(call, TERM)
    copies.on_copies(0, CopiesReport(3, {1: WHOLE, 2: WHOLE}))
    copies.on_copies(2, CopiesReport(3, {0: WHOLE}))
    assert (said, copies.lacking) == ([], [])
    copies.on_term(Term(4, (0,), (0, 0, 0), ((), (), ()), ((), (), ()), 50))
    copies.on_copies(0, CopiesReport(4, {}))
    assert (said, copies.status, list(read_events(tmp_path))) == ([], (), [])


def test_a_run_that_does_not_train_tells_how_far_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(tmp_path)]) == 2
    assert "has no manifest.json" in capsys.readouterr().err
    (tmp_path / MANIFEST).write_text("{}")
    assert main(["status", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"run {tmp_path}: never trained, term 0\n"
    assert status.run(str(tmp_path)).survives is None
