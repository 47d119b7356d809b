"""Going over a source by the serial pass, step by step, and writing its sample files: the first half of both ways of compiling."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np

from foreload.pipelines.compiler.segments import SampleFiles, SampleWriter
from foreload.pipelines.compiler.serial_pass import SerialPass, Step
from foreload.pipelines.samples.pieces import OrderedSource, Samples, batches
from foreload.pipelines.schedule.format import Header


class KeptSlices:
    """Which lane took each sample: a file of one byte a sample. What the disk has no room for raises OSError."""

    def __init__(self, path: Path, filled: bool = False) -> None:
        """filled: it is there, with all of an epoch; nothing is kept any more."""
        path.parent.mkdir(exist_ok=True)
        self.filled = filled
        self._file = path.open("rb" if filled else "w+b")

    def keep(self, step: Step) -> None:
        """Add the step after the last one kept."""
        if step.order is None:
            raise ValueError("step: must have an order of its samples to keep")
        # Which lane each place of the batch went to, from which places went to each lane: the inverse, in an eighth of the room.
        lane = np.empty(len(step.order), np.uint8)
        lane[step.order] = np.repeat(np.arange(len(step.firsts) - 1, dtype=np.uint8), np.diff(step.firsts))
        self.keep_lanes(lane)

    def keep_lanes(self, lane: np.ndarray) -> None:
        """Add a step, of whose places in the batch these lanes are: uint8 [samples]."""
        self._file.write(lane.data)

    def order(self, first: int, samples: int) -> np.ndarray:
        """Samples `first` .. `first` + `samples` - 1 of the epoch, a batch, slice by slice: int64 [samples], places in the batch."""
        self._file.seek(first)
        lane = np.frombuffer(self._file.read(samples), np.uint8)
        return np.argsort(lane, kind="stable")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class SerialReader:
    """Goes over the training steps of some epochs, and over evaluation passes, and writes their sample files in a thread of its own.

    Epochs in the same order refer to the first one's files, and every evaluation pass to the files of the pass that was looked up last. A context:
    all files are written once it is left.

    serial: the serial pass, at its beginning. closed: files of training steps that are complete, in order; whoever publishes them may take them out.
    """

    def __init__(
        self, source: OrderedSource, header: Header, serial: SerialPass, epochs: int, segment_bytes: int, out: Path, work: Path
    ) -> None:
        """Nothing is read or written yet.

        Args:
            source: The samples.
            header: Of the schedule; its slots and numbers of samples are not looked at.
            serial: The serial pass, at its beginning.
            epochs: How many epochs to go over.
            segment_bytes: What a segment's sample files are bounded by.
            out: The schedule's folder.
            work: A folder for scratch files.
        """
        self.source, self.serial = source, serial
        self.closed: deque[SampleFiles] = deque()
        self._header, self._epochs, self._segment_bytes = header, epochs, segment_bytes
        self._slices = _slices(source, header, epochs, work)
        self._thread = ThreadPoolExecutor(1)
        self._training = SampleWriter(out, header.features, header.lanes, "train", segment_bytes, self._thread)
        self._held_out = SampleWriter(out, header.features, header.lanes, "evaluate", segment_bytes, self._thread)
        self._epoch = 0
        self._incoming = self._steps()  # of the epoch
        self._begun = self._end = header.first_step  # the epoch's first training step; the step after those gone over so far
        self._epoch_steps = 0  # training steps of an epoch, once the first one has ended
        self._ends: dict[int, SampleFiles] = {}  # by the step after them
        self._evaluation: list[SampleFiles] = []

    def __enter__(self) -> SerialReader:
        return self

    def __exit__(self, *exception: object) -> None:
        self._thread.shutdown()
        if self._slices is not None:
            self._slices.close()

    def _steps(self) -> Iterator[tuple[Samples, np.ndarray, Step]]:
        """The epoch's steps: samples, their numbers, and what the serial pass finds. Later epochs in the same order have the first one's slices."""
        size, slices = self._header.batch_size, self._slices
        for place, (samples, numbers) in enumerate(batches(self.source.training(self._epoch), size)):
            if slices is None:
                step = self.serial.train(samples)
            elif self._epoch or slices.filled:
                step = self.serial.train(samples, slices.order(place * size, len(samples)))
            else:
                step = self.serial.train(samples)
                slices.keep(step)
            yield samples, numbers, step

    def advance(self) -> Step | None:
        """Go over the next training step of the epoch; None where it has no further one."""
        incoming = next(self._incoming, None)
        if incoming is None:
            return None
        samples, numbers, step = incoming
        self._end += 1
        if self._epoch and not self.source.shuffled:
            first = self._ends.get(self._end - self._epoch * self._epoch_steps)
            if first is not None:
                self.closed.append(self._again(first, self._epoch))
            return step
        self._training.add(samples, numbers + self._header.first_number, self.serial, step)
        every = self._header.eval_every
        if self._training.bytes >= self._segment_bytes or (every is not None and (self._end - self._begun) % every == 0):
            self._close()
        return step

    def end_epoch(self) -> None:
        """All training steps of the epoch have been gone over: complete its files, and go on with the next one."""
        self._epoch_steps = self._epoch_steps or self._end - self._header.first_step
        self._begun = self._end
        if self._training.events:
            self._close()
        self._next_epoch()

    def see_rest(self) -> None:
        """Have the serial pass go over all training steps that are left, of which nothing is written."""
        while self._epoch < self._epochs:
            for _ in self._incoming:
                pass
            self._next_epoch()

    def _next_epoch(self) -> None:
        self._epoch += 1
        self._incoming = self._steps()

    def _close(self) -> None:
        self.closed.append(self._training.close(self._epoch, self._end))
        self._ends[self._end] = self.closed[-1]

    def _again(self, files: SampleFiles, epoch: int) -> SampleFiles:
        """The first epoch's files, as those of another one in the same order."""
        return replace(files, epoch=epoch, first=files.first + epoch * self._epoch_steps)

    def of_epoch(self, epoch: int) -> list[SampleFiles]:
        """The files of an epoch that was gone over, or that has the order of one that was. None of them has been taken out."""
        if self.source.shuffled:
            return [files for files in self.closed if files.epoch == epoch]
        return [self._again(files, epoch) for files in self.closed]

    def look_up(self) -> Iterator[Step]:
        """Go over the steps of an evaluation pass: `of_pass` gives its files from then on."""
        self._evaluation = []
        chunks = self.source.evaluation()
        for samples, numbers in batches(chunks, self._header.batch_size, self.source.evaluation_sets):
            step = self.serial.look_up(samples)
            self._held_out.add(samples, numbers, self.serial, step)
            if self._held_out.bytes >= self._segment_bytes:
                self._close_evaluation()
            yield step
        if self._held_out.events:
            self._close_evaluation()

    def of_pass(self, number: int, epoch: int) -> Iterator[SampleFiles]:
        """The files of evaluation pass `number`, from 0, which is in an epoch or at its end."""
        steps = sum(len(files.samples) for files in self._evaluation)
        for files in self._evaluation:
            yield replace(files, epoch=epoch, first=files.first + number * steps)

    def _close_evaluation(self) -> None:
        end = sum(len(files.samples) for files in self._evaluation) + self._held_out.events
        self._evaluation.append(self._held_out.close(0, end))


def _slices(source: OrderedSource, header: Header, epochs: int, work: Path) -> KeptSlices | None:
    """Where an epoch's slices are, or are to be kept, for others in the same order; None where there are none such."""
    if source.slices is not None:
        return KeptSlices(source.slices, filled=True)
    again = epochs > 1 and not source.shuffled
    return KeptSlices(work / "slices") if again and header.lanes > 1 and header.placement == "locality" else None
