"""What metrics.jsonl says where a run goes on behind an evaluation, goes back, or was killed in a line."""

from __future__ import annotations

import json
import math
from pathlib import Path

from small_job import no_rows, step_report

from foreload.trainer.compute.reports import EvaluationReport, Totals
from foreload.trainer.run.directory import METRICS
from foreload.trainer.run.report import RunReport


def test_an_evaluation_that_an_earlier_call_told_is_not_written_again(tmp_path: Path) -> None:
    def call(first_step: int, steps: int, auc: float = 0.7, ended: str = "") -> None:
        report = RunReport(tmp_path, Totals(), first_step, 9, members=(0,), rows_of=no_rows)
        if first_step:
            report.evaluation(evaluated(first_step - 1, auc))
        for step in range(first_step, first_step + steps):
            report.step(0, step_report(step))
            report.evaluation(evaluated(step))
        assert report.summary()["auc"] == (0.7 if steps else auc)
        report.close()
        with open(tmp_path / METRICS, "a", encoding="utf-8") as file:
            file.write(ended)

    def evaluated(step: int, auc: float = 0.7) -> EvaluationReport:
        return EvaluationReport(step=step, epoch=0, samples=7, log_loss=math.nan, auc=auc, normalized_entropy=0.9)

    torn = '{"kind": "step", "step": 2, "ep'
    call(0, 2, ended=torn)
    call(2, 0)
    call(2, 1)  # it goes on behind step 1, then back there, and then to before it
    call(2, 1)
    call(1, 2)
    call(3, 0, auc=0.6)  # with other figures, as with another kind of processor, it is told
    lines = [json.loads(line) for line in (tmp_path / METRICS).read_text().splitlines()]
    told = [(line["kind"], line["step"]) for line in lines]
    passes = {step: [("step", step), ("evaluation", step)] for step in range(3)}
    assert told == [*passes[0], *passes[1], *passes[2], *passes[2], *passes[1], *passes[2], ("evaluation", 2)]
    assert [line["auc"] for line in lines if line["kind"] == "evaluation"][-2:] == [0.7, 0.6]
