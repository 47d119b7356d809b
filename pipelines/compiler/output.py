"""What every way of compiling writes besides the lanes' files: header, segments as they are planned, and the manifest at the end."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from foreload.base.files import write_sealed
from foreload.pipelines.compiler.lane_planner import LanePart
from foreload.pipelines.compiler.segments import SampleFiles, write_segment
from foreload.pipelines.errors import ScheduleError
from foreload.pipelines.samples.piece_order import OrderedSource
from foreload.pipelines.schedule.format import FORMAT_VERSION, HEADER, MANIFEST, Header, RowTableEntry, ScheduleManifest


@dataclass(frozen=True, slots=True)
class SlotsWanted:
    """How many slots a lane is to have.

    wanted: a number, "min" (the rows of the largest step) or "all" (no row ever leaves); at_most: the number is what there is room for, and more than
    there can be rows are not given.
    """

    wanted: int | Literal["min", "all"]
    at_most: bool = False

    def number(self, header: Header) -> int | None:
        """What was given as a number, for a schedule of so many samples; None for "min" and "all", which follow from what is read."""
        if not isinstance(self.wanted, int) or not self.at_most:
            return self.wanted if isinstance(self.wanted, int) else None
        return max(min(self.wanted, header.features.most_rows(header.training_samples) or self.wanted), 1)


def counted(header: Header, source: OrderedSource) -> Header:
    """The header with its numbers of samples, for which the source may have to read on. Raises ScheduleError where there are too many steps."""
    header = replace(header, training_samples=source.training_samples, evaluation_samples=source.evaluation_samples)
    if header.evaluation_sets:
        of_sets = zip(header.set_names, source.evaluation_sets, strict=True)
        header = replace(header, evaluation_sets=tuple(of_sets))
    if header.end_step >= 2**31 - 2:
        raise ScheduleError(f"steps: must be below 2^31, are {header.end_step}: use a larger --batch-size")
    return header


class ScheduleOutput:
    """A schedule's header, segments and manifest."""

    def __init__(self, out: Path, header: Header) -> None:
        self._out, self._header = out, header
        self._checksums: list[str] = []
        self._evaluation_slots = np.zeros(header.lanes, np.int64)
        self._totals: Counter[str] = Counter()
        write_sealed(out / HEADER, header)

    def publish(self, samples: SampleFiles, parts: Sequence[LanePart]) -> None:
        """Publish the next segment; parts: what each lane has of it, its files written."""
        self._checksums.append(write_segment(self._out, len(self._checksums), samples, parts))
        self._evaluation_slots = np.maximum(self._evaluation_slots, [part.evaluation_slots for part in parts])
        if samples.kind == "train":
            for part in parts:
                self._totals.update(part.counts)

    def finish(
        self, occupied: Sequence[int], minimum_slots: Sequence[int], lookahead_ratio: float, rows: RowTableEntry
    ) -> ScheduleManifest:
        """Write the manifest, which makes the schedule whole.

        occupied: of each lane, slots that hold a row at the end; minimum_slots: rows of each lane's largest step; lookahead_ratio: the
        least lookahead that a decision to end a residency had, in units of slots / arrivals per step; infinite: all of the future; rows: the row
        table's entry.
        """
        totals = self._totals
        manifest: ScheduleManifest = {
            "version": FORMAT_VERSION,
            "header": hashlib.sha256((self._out / HEADER).read_bytes()).hexdigest(),
            "segments": self._checksums,
            "evaluation_slots": [int(n) for n in self._evaluation_slots],
            "occupied": list(occupied),
            "minimum_slots": list(minimum_slots),
            "end_step": self._header.end_step,
            "counts": {
                "training_samples": self._header.training_samples * self._header.epochs,
                "training_steps": self._header.end_step - self._header.first_step,
                "evaluation_samples": self._header.evaluation_samples,
                "rows_used": totals["rows_used"],
                "arrivals": totals["arrivals"],
                "initial": totals["initial"],
                "stored": totals["arrivals"] - totals["initial"],
                "write_backs": totals["write_backs"] + sum(occupied),
            },
            "lookahead": {
                "cover": None if lookahead_ratio == float("inf") else lookahead_ratio,
                "bound": 3,
                "exact": lookahead_ratio >= 3,
            },
            "rows": rows,
        }
        write_sealed(self._out / MANIFEST, manifest)
        return manifest


Progress = Callable[[int, int], None]
"""Called with how many training steps have been compiled, of how many."""
