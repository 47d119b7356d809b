"""What the coordinator knows of a checkpoint that is being saved while a run trains: what each trainer reported, so what its manifest is to say."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from foreload.cache.rows.layout import RowLayout
from foreload.pipelines.schedule.format import Header
from foreload.trainer.checkpoints.best import Best
from foreload.trainer.checkpoints.contents import Contents
from foreload.trainer.checkpoints.draft import AnyDraft
from foreload.trainer.checkpoints.files import PartFiles
from foreload.trainer.checkpoints.format import Checkpoint
from foreload.trainer.checkpoints.lineage import Increment
from foreload.trainer.cluster.coordinator.wanted_checkpoints import Wanted
from foreload.trainer.cluster.messages.trainers import CheckpointReport, CopyTaken
from foreload.trainer.run.manifest import Manifest
from foreload.trainer.step.dense_agreement import check_alike


@dataclass(frozen=True, slots=True)
class Opened:
    """Where the files of a checkpoint are put, of how many bits its weights are, and what it is an increment of; None: it has all rows."""

    draft: AnyDraft
    bits: int
    increment: Increment | None


@dataclass(slots=True)
class CheckpointUnderWay:
    """The checkpoint under way. opening: gives None where there is one of its step already; since: when it began, by the call's clock; best: what the
    evaluation was behind its step, where that was the best so far; seconds_waited: how long training waited until it could be begun.
    """

    number: int
    wanted: Wanted
    since: float
    best: Best | None = None
    seconds_waited: float = 0.0
    reports: dict[int, CheckpointReport] = field(default_factory=dict)
    opening: Future[Opened | None] | None = None
    opened: Opened | None = None
    publishing: Future[Checkpoint] | None = None

    @property
    def step(self) -> int:
        """Of which it is, once that is known."""
        return next(iter(self.taken.values())).step

    @property
    def taken(self) -> dict[int, CopyTaken]:
        """Who has it in memory."""
        return {trainer: report.taken for trainer, report in self.reports.items() if report.taken is not None}

    @property
    def written(self) -> dict[int, PartFiles]:
        """Whose files are there."""
        return {trainer: report.files for trainer, report in self.reports.items() if report.files is not None}

    def note(self, trainer: int, report: CheckpointReport) -> bool:
        """A trainer reports; returns whether it has it in memory, and had not. Raises DenseDiverged where its dense part is not that of the others:
        training must end then.
        """
        before = self.reports.get(trainer)
        self.reports[trainer] = report
        if report.taken is None or (before is not None and before.taken is not None):
            return False
        check_alike({holder: taken.dense for holder, taken in self.taken.items()}, report.taken.step)
        return True

    def contents(self, manifest: Manifest, totals: dict[str, float], header: Header, layouts: Sequence[RowLayout]) -> Contents:
        """What its manifest says, once all have written. manifest: the run's; totals: as after its step."""
        assert self.opened is not None
        taken, increment = next(iter(self.taken.values())), self.opened.increment
        files = [file for written in self.written.values() for file in written.rows]
        dense = next(written.dense for written in self.written.values() if written.dense is not None)
        stage = replace(manifest.stages[-1], segments=taken.segments, prefix=taken.prefix)
        given = {lane: ordinals for one in self.taken.values() for lane, ordinals in one.given.items()}
        ordinals = np.array([given[lane] for lane in range(manifest.lanes)], np.int64)
        run = replace(manifest, stages=(*manifest.stages[:-1], stage), watched=taken.watched)
        base = () if increment is None else (increment.base, increment.sizes)
        encoded = header.features, header.settings.get("encoding")
        return Contents.made(run, *encoded, taken.step, totals, layouts, ordinals, files, dense, *base)

    def metrics_line(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """What metrics.jsonl has of it, once it is there."""
        assert self.opened is not None
        return {
            "step": checkpoint.contents.step,
            "checkpoint": str(checkpoint.place),
            "rows": sum(file.rows for file in checkpoint.contents.rows),
            "bits": self.opened.bits,
            "bytes": checkpoint.own_bytes,
            "seconds": max(written.seconds for written in self.written.values()),
            "seconds_stalled": max(taken.seconds for taken in self.taken.values()),
            **({"seconds_waited": self.seconds_waited} if self.seconds_waited else {}),
        }
