"""What every way of compiling writes: sample files as the serial pass goes on, segments as they are planned, and the manifest at the end."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from foreload.pipelines.base.files import write_sealed
from foreload.pipelines.compiler.segments import LanePart, SampleFiles, SampleWriter, write_segment
from foreload.pipelines.compiler.serial_pass import SerialPass, Step
from foreload.pipelines.errors import ScheduleError
from foreload.pipelines.samples.piece_order import OrderedSource
from foreload.pipelines.samples.pieces import Samples
from foreload.pipelines.schedule.format import FORMAT_VERSION, HEADER, MANIFEST, Header


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


class SampleOutput:
    """The sample files of a schedule. Epochs in the same order refer to the first one's, and every evaluation pass to the files of the pass before,
    unless it is looked up anew.

    header: neither its slots nor its samples' numbers are looked at; thread: writes them.
    """

    def __init__(self, out: Path, header: Header, segment_bytes: int, shuffled: bool, thread: ThreadPoolExecutor) -> None:
        self._header, self._segment_bytes, self._shuffled = header, segment_bytes, shuffled
        self._training = SampleWriter(out, header.features, header.lanes, "train", segment_bytes, thread)
        self._held_out = SampleWriter(out, header.features, header.lanes, "evaluate", segment_bytes, thread)
        self._end = header.first_step  # of the training steps added so far
        self._begun = header.first_step  # the first training step of the epoch at hand
        self._epoch_steps = 0  # training steps of an epoch, once the first one has ended
        self._files: list[SampleFiles] = []
        self._ends: dict[int, SampleFiles] = {}  # by the step after them
        self._evaluation: list[SampleFiles] = []

    def train(self, epoch: int, samples: Samples, numbers: np.ndarray, serial: SerialPass, step: Step) -> SampleFiles | None:
        """Add the next training step, which the serial pass has just gone through; the files that end with it, if any do."""
        self._end += 1
        if epoch and not self._shuffled:
            first = self._ends.get(self._end - epoch * self._epoch_steps)
            return None if first is None else self._again(first, epoch)
        self._training.add(samples, numbers + self._header.first_number, serial, step)
        every = self._header.eval_every
        whole = self._training.bytes >= self._segment_bytes or (every is not None and (self._end - self._begun) % every == 0)
        return self._close(epoch) if whole else None

    def end_epoch(self, epoch: int) -> SampleFiles | None:
        """The training steps of an epoch have been added; the files that end with it, unless `train` has told of them."""
        self._epoch_steps = self._epoch_steps or self._end - self._header.first_step
        self._begun = self._end
        return self._close(epoch) if self._training.events else None

    def _close(self, epoch: int) -> SampleFiles:
        self._files.append(self._training.close(epoch, self._end))
        self._ends[self._end] = self._files[-1]
        return self._files[-1]

    def of_epoch(self, epoch: int) -> Iterator[SampleFiles]:
        """The files of an epoch that the serial pass has gone through, or gone through in the same order."""
        for files in self._files:
            if self._shuffled and files.epoch == epoch:
                yield files
            elif not self._shuffled:
                yield self._again(files, epoch)

    def _again(self, files: SampleFiles, epoch: int) -> SampleFiles:
        """The first epoch's files, as those of another one in the same order."""
        return replace(files, epoch=epoch, first=files.first + epoch * self._epoch_steps)

    def evaluate(self, samples: Samples, numbers: np.ndarray, serial: SerialPass, step: Step) -> None:
        """Add an evaluation step of a pass that is looked up, which the serial pass has just gone through."""
        self._held_out.add(samples, numbers, serial, step)
        if self._held_out.bytes >= self._segment_bytes:
            self._end_evaluation()

    def look_up_again(self) -> None:
        """The next evaluation steps are those of a pass that is looked up anew."""
        self._evaluation = []

    def evaluation(self, epoch: int, number: int) -> Iterator[SampleFiles]:
        """The files of evaluation pass `number`, from 0, which is in an epoch or at its end, once all of its steps have been added."""
        if self._held_out.events:
            self._end_evaluation()
        steps = sum(len(files.samples) for files in self._evaluation)
        for files in self._evaluation:
            yield replace(files, epoch=epoch, first=files.first + number * steps)

    def _end_evaluation(self) -> None:
        end = sum(len(files.samples) for files in self._evaluation) + self._held_out.events
        self._evaluation.append(self._held_out.close(0, end))


class ScheduleOutput:
    """The rest: header, segments, manifest."""

    def __init__(self, out: Path, header: Header) -> None:
        self._out, self._header = out, header
        self._checksums: list[str] = []
        self._evaluation_slots = np.zeros(header.lanes, np.int64)
        self._totals: Counter[str] = Counter()
        write_sealed(out / HEADER, header.to_dict())

    def publish(self, samples: SampleFiles, parts: Sequence[LanePart]) -> None:
        """Publish the next segment; parts: what each lane has of it, its files written."""
        self._checksums.append(write_segment(self._out, len(self._checksums), samples, parts))
        self._evaluation_slots = np.maximum(self._evaluation_slots, [part.evaluation_slots for part in parts])
        if samples.kind == "train":
            for part in parts:
                self._totals.update(part.counts)

    def finish(
        self, occupied: Sequence[int], minimum_slots: Sequence[int], lookahead_ratio: float, rows: dict[str, Any]
    ) -> dict[str, Any]:
        """Write the manifest, which makes the schedule whole.

        occupied: of each lane, slots that hold a row at the end; minimum_slots: rows of each lane's largest step; lookahead_ratio: the
        least lookahead that a decision to end a residency had, in units of slots / arrivals per step; infinite: all of the future; rows: the row
        table's entry.
        """
        totals = self._totals
        manifest = {
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
