"""What a training tells its user: metrics.jsonl, TensorBoard scalars, the progress bar, summary.json."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tqdm import tqdm

from pipelines.files import write_json
from trainer.run import METRICS, SUMMARY, TENSORBOARD

_TENSORBOARD_SECONDS = 0.5
_ROWS = ("rows_used", "rows_arrived", "rows_fetched", "rows_written_back")


@dataclass(slots=True)
class Totals:
    """What the metrics of all steps so far add up to; seconds are those of the steps, over all calls of a run.

    rows_written_back: as the schedule says; rows_flushed: beyond it, at clean stops.
    """

    steps: int = 0
    samples: int = 0
    rows_used: int = 0
    rows_arrived: int = 0
    rows_fetched: int = 0
    rows_written_back: int = 0
    rows_flushed: int = 0
    bytes_sent: int = 0
    seconds: float = 0.0
    seconds_compute: float = 0.0
    seconds_exchange: float = 0.0
    seconds_waiting: float = 0.0

    @property
    def cache_hit_rate(self) -> float:
        """1 - arrivals / rows used; nan before the first step."""
        return 1 - self.rows_arrived / self.rows_used if self.rows_used else math.nan

    @property
    def wait_fraction(self) -> float:
        """The part of step time spent waiting for rows; nan before the first step."""
        return self.seconds_waiting / self.seconds if self.seconds else math.nan

    def ms_a_step(self) -> dict[str, float]:
        """Where a step's time goes, milliseconds on average: ms_step in all, of it ms_compute, ms_exchange, ms_waiting (nan before the first)."""
        names = {"ms_step": "seconds", **{f"ms_{part}": f"seconds_{part}" for part in ("compute", "exchange", "waiting")}}
        return {name: 1000 * getattr(self, of) / self.steps if self.steps else math.nan for name, of in names.items()}

    @property
    def samples_per_second(self) -> float:
        """Over the time of the steps, without start and evaluation; nan before the first step."""
        return self.samples / self.seconds if self.seconds else math.nan


def merged(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One step's line of metrics.jsonl from the reports of all trainers about it (StepReport as dicts).

    Rows and bytes are added up; times are those of the trainer that took longest, waiting the longest any took.
    """
    first = reports[0]
    slowest = max(reports, key=lambda report: report["seconds"])
    waiting = max(report["seconds_waiting"] for report in reports)
    return {
        "kind": "step",
        **{name: first[name] for name in ("step", "epoch", "samples", "loss")},
        **{name: sum(report[name] for report in reports) for name in (*_ROWS, "bytes_sent")},
        "ms": 1000 * slowest["seconds"],
        "ms_compute": 1000 * slowest["seconds_compute"],
        "ms_exchange": 1000 * slowest["seconds_exchange"],
        "ms_waiting": 1000 * waiting,
    }


class RunReport:
    """Takes the trainers' reports and tells the user; one thread of the coordinator uses it.

    steps: of the whole schedule, None while it grows. show: a progress bar on stderr, if that is a terminal.
    """

    def __init__(self, run: Path, totals: Totals, first_step: int, steps: int | None, trainers: int, show: bool = True) -> None:
        # Slow to import, and only the coordinator needs it.
        from torch.utils.tensorboard import SummaryWriter

        self.totals = totals
        self.evaluations: list[dict[str, Any]] = []
        self._run = run
        self._trainers = trainers
        self._waiting: dict[int, list[Mapping[str, Any]]] = {}
        self._board = SummaryWriter(str(run / TENSORBOARD))
        self._board_at = 0.0
        self._metrics: IO[str] = open(run / METRICS, "a", encoding="utf-8")  # noqa: SIM115 - closed by close()
        self._bar = tqdm(
            total=steps, initial=totals.steps, unit="step", disable=None if show else True, file=sys.stderr, dynamic_ncols=True
        )
        self._first_step = first_step
        self.last_step = first_step - 1

    def step(self, report: Mapping[str, Any]) -> None:
        """One trainer's report of one step; the step counts when all trainers have told of it."""
        reports = self._waiting.setdefault(report["step"], [])
        reports.append(report)
        if len(reports) < self._trainers:
            return
        del self._waiting[report["step"]]
        line = merged(reports)
        self._write(line)
        totals = self.totals
        totals.steps += 1
        totals.samples += line["samples"]
        for name in (*_ROWS, "bytes_sent"):
            setattr(totals, name, getattr(totals, name) + line[name])
        totals.seconds += line["ms"] / 1000
        for name in ("compute", "exchange", "waiting"):
            setattr(totals, f"seconds_{name}", getattr(totals, f"seconds_{name}") + line[f"ms_{name}"] / 1000)
        self.last_step = line["step"]
        self._show(line)

    def evaluation(self, report: Mapping[str, Any]) -> None:
        """The metrics of an evaluation pass."""
        line = {"kind": "evaluation", **report}
        self.evaluations.append(line)
        self._write(line)
        for name in ("log_loss", "auc", "normalized_entropy"):
            self._board.add_scalar(f"evaluation/{name}", report[name], report["step"])
        self._bar.write(
            f"epoch {report['epoch'] + 1}: log loss {report['log_loss']:.5f}, AUC {report['auc']:.4f}, "
            f"normalised entropy {report['normalized_entropy']:.4f} on {report['samples']:,} samples",
            file=sys.stderr,
        )

    def summary(self, **further: Any) -> dict[str, Any]:
        """Write and return summary.json; further entries go in as they are. Metrics of a run without evaluation are null."""
        last = self.evaluations[-1] if self.evaluations else {}
        totals = self.totals
        found = {
            "steps": totals.steps,
            "samples": totals.samples,
            "samples_per_second": totals.samples_per_second,
            **{name: last.get(name) for name in ("log_loss", "auc", "normalized_entropy")},
            **{name: getattr(totals, name) for name in (*_ROWS, "rows_flushed", "bytes_sent")},
            "cache_hit_rate": totals.cache_hit_rate,
            "wait_fraction": totals.wait_fraction,
            **totals.ms_a_step(),
            "seconds": totals.seconds,
            "last_step": self.last_step,
            **further,
        }
        found = _finite(found)
        write_json(self._run / SUMMARY, found)
        return found

    def close(self) -> None:
        """Write what is buffered."""
        self._bar.close()
        self._metrics.close()
        self._board.close()

    def _write(self, line: Mapping[str, Any]) -> None:
        self._metrics.write(json.dumps(_finite(line)) + "\n")

    def _show(self, line: Mapping[str, Any]) -> None:
        totals, now = self.totals, time.monotonic()
        self._bar.update()
        if now - self._board_at < _TENSORBOARD_SECONDS:
            return
        self._board_at = now
        rate = line["samples"] / line["ms"] * 1000 if line["ms"] else 0.0
        hit_rate = 1 - line["rows_arrived"] / line["rows_used"] if line["rows_used"] else 1.0
        scalars = {
            "train/loss": line["loss"],
            "train/samples_per_second": rate,
            "cache/hit_rate": hit_rate,
            **{f"cache/{name}": line[name] for name in _ROWS},
            **{f"time/{name}": line[name] for name in ("ms", "ms_compute", "ms_exchange", "ms_waiting")},
            "time/bytes_sent": line["bytes_sent"],
        }
        for name, value in scalars.items():
            self._board.add_scalar(name, value, line["step"])
        self._metrics.flush()
        self._bar.set_postfix_str(
            f"{totals.samples_per_second:,.0f} samples/s, loss {line['loss']:.4f}, hits {totals.cache_hit_rate:.1%}, "
            f"stalls {totals.wait_fraction:.1%}",
            refresh=False,
        )


def _finite(line: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has neither NaN nor infinities."""
    return {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in line.items()}
