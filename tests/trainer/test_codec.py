"""Messages as JSON, and back: the same, or refused."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from typing import Annotated, Any

import pytest
from small_job import step_report

from foreload.base.codec import FormError, JsonForm, LeftOut, of_json, to_json, to_stored
from foreload.cache.protocol.shards.shard_status import Lag, ServerUnreachable, ShardSnapshot, ShardStatus
from foreload.cache.repair.findings import Finding, Findings, Scrubbed
from foreload.trainer.cluster.messages.codec import decode, encode
from foreload.trainer.cluster.messages.facts import Go, SegmentVerdict, Term
from foreload.trainer.cluster.messages.faults import Fault
from foreload.trainer.cluster.messages.trainers import (
    CheckpointPlan,
    Ended,
    EvaluationEnded,
    Events,
    Failed,
    HeldRows,
    LaunchSpec,
    LostRows,
    PartPlan,
    Plan,
    Ready,
    RequestReport,
    ScrubPlan,
    ShardsReport,
    StepEnded,
    TermLeft,
    TrainerEnd,
)
from foreload.trainer.compute.reports import EvaluationReport, Totals
from foreload.trainer.errors import MessageError

# Messages with fields of every kind: numbers, None, tuples, mappings with keys of numbers, nested ones, unions.
JOB = {"schedule": "clicks", "model_options": {"top": [64, 1]}, "tables": {"item": {"lr": 0.5}}, "spare": None}
FINDINGS = Findings(3, 5, 2, 1, 0, repaired=[Finding(0, 1, 4, 5, (0, 2), "is missing")])
EVENTS = Events(
    (
        Ready(1, {"torch": "2.0"}),
        TermLeft(1, 8, (0, 3), False, "trainer 1 is gone"),
        StepEnded(step_report(3), 1.25),
        EvaluationEnded(EvaluationReport(3, 0, 100, 0.5, 0.75, 0.125)),
        ShardsReport(ShardSnapshot((ShardStatus("redis://a:1"), ShardStatus("redis://b:1", "rebuilding", "", 0.25))), 2.5),
        ServerUnreachable(1, "redis://a:1", "it refuses"),
        RequestReport(1, Scrubbed(9, FINDINGS, False)),
        RequestReport(2, held=HeldRows((1, 2), (3, 4), (5, 6), Lag(0, 1, 2))),
        Failed("rows-lost", "gone", LostRows((0, 1), 1, {"item": 7})),
        Failed("trainer", "what"),
        Ended(),
    )
)
MESSAGES = [
    EVENTS,
    Go(),
    Term(3, (4, 7), (4, 4, 7), ((7,), (7,), (4,)), ((), (7,), ()), 8),
    SegmentVerdict(False, None),
    Plan(
        3, 1, ("redis://a:1", ""), CheckpointPlan(1, None, (9,), part=PartPlan("folder", -1, ((1, 2),), 8)), ScrubPlan(2, "rows")
    ),
    LaunchSpec(JOB, 2, -1, (0, 0), None, False, True, (Fault(3, 1, 9),), Totals(steps=2, seconds=0.5)),
    TrainerEnd(9, True, None, 3, {1: 4}, {"rounds": 5, "waited": 0.5}, (), 1, "ab", Totals(steps=10)),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_what_is_decoded_is_what_was_encoded(message: Any) -> None:
    assert decode(encode(message), type(message)) == message


def test_numbers_stay_what_they_are() -> None:
    loss = math.nextafter(0.1, 1)
    events = Events((StepEnded(replace(step_report(0), loss=loss), 0.0), StepEnded(replace(step_report(1), loss=math.nan), 0.0)))
    first, second = (event.report.loss for event in decode(encode(events), Events).events if isinstance(event, StepEnded))
    assert first == loss
    assert math.isnan(second)
    end = decode(encode(MESSAGES[-1]), TrainerEnd)
    assert [type(value) for value in end.traffic.values()] == [int, float]


def test_what_is_none_by_default_is_left_out() -> None:
    assert json.loads(encode(Events((Failed("trainer", "what"),)))) == {
        "kind": "Events", "events": [{"kind": "Failed", "code": "trainer", "message": "what"}],
    }  # fmt: skip


@dataclass(frozen=True)
class Kept:
    """What a file could hold."""

    size: Annotated[int, JsonForm(str, hex, lambda text: int(text, 16))]
    parent: str | None = None
    sets: LeftOut[tuple[tuple[str, int], ...]] = ()


def test_files_say_null_where_messages_say_nothing_and_leave_out_what_is_marked() -> None:
    assert (to_stored(Kept(10)), to_json(Kept(10))) == ({"size": "0xa", "parent": None}, {"size": "0xa", "sets": []})
    whole = Kept(11, "a", (("b", 1),))
    assert to_stored({"one": whole}) == {"one": {"size": "0xb", "parent": "a", "sets": [["b", 1]]}}
    assert of_json(to_stored(whole), Kept) == whole
    with pytest.raises(FormError, match=r"Kept\.size: invalid literal"):
        of_json({"size": "ten"}, Kept)


@pytest.mark.parametrize(
    ("text", "kind", "why"),
    [
        ("{", Go, "message: must be JSON; got '{'"),
        ("[]", Go, r"message: must be dict; got \[\]"),
        ("{}", Go, "message: must be Go; got None"),
        ('{"kind": "Term"}', Go, "message: must be Go; got 'Term'"),
        ('{"kind": "Go", "now": 1}', Go, "Go: has a field that is not known, 'now'"),
        ('{"kind": "Term", "number": 1, "members": [1]}', Term, "Term: must have 'hosts'; got number, members"),
        ('{"kind": "Term", "number": 1, "members": [true], "hosts": []}', Term, "Term.members: must be int; got True"),
        ('{"kind": "Term", "number": 1, "members": 1, "hosts": []}', Term, "Term.members: must be list; got 1"),
        ('{"kind": "SegmentVerdict", "begin": 1, "failure": null}', SegmentVerdict, "SegmentVerdict.begin: must be bool; got 1"),
        ('{"kind": "Events", "events": [{"kind": "Started"}]}', Events, "Events.events: must be Ready or .* or Ended; got 'Started'"),
        (
            '{"kind": "Events", "events": [{"kind": "ShardsReport", "at": 1, "shards": {"shards": [{"url": "", "state": "well"}]}}]}',
            Events, "ShardsReport.shards.shards.state: must be 'ok' or .*; got 'well'",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_and_says_where(text: str, kind: type, why: str) -> None:
    with pytest.raises(MessageError, match=why):
        decode(text, kind)
