"""Goes over a source with the serial pass, step by step, and writes its sample files.

This is the first half of both ways of compiling.
"""

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
    """A file that records which lane took each sample, one byte a sample.

    Writing raises OSError if the disk is full.
    """

    def __init__(self, path: Path, filled: bool = False) -> None:
        """Open the file.

        Args:
            filled: Whether the file exists and covers a whole epoch. If so, it is only read.
        """
        path.parent.mkdir(exist_ok=True)
        self.filled = filled
        self._file = path.open("rb" if filled else "w+b")

    def keep(self, step: Step) -> None:
        """Append the step after the last one kept.

        Raises:
            ValueError: If the step has no order of its samples.
        """
        if step.order is None:
            raise ValueError("step: must have an order of its samples to keep")
        # `order` lists the places that went to each lane, 8 bytes each. Its inverse, the lane of
        # each place, takes one byte each.
        lane = np.empty(len(step.order), np.uint8)
        lane[step.order] = np.repeat(np.arange(len(step.firsts) - 1, dtype=np.uint8), np.diff(step.firsts))
        self.keep_lanes(lane)

    def keep_lanes(self, lane: np.ndarray) -> None:
        """Append a step.

        Args:
            lane: uint8 [samples], the lane of each place in the batch.
        """
        self._file.write(lane.data)

    def order(self, first: int, samples: int) -> np.ndarray:
        """Return the samples of a batch, slice by slice: int64 [samples], places in the batch.

        Args:
            first: The batch's first sample, counted from the epoch's first.
            samples: The number of samples in the batch.
        """
        self._file.seek(first)
        lane = np.frombuffer(self._file.read(samples), np.uint8)
        # The sort is stable, so each slice stays in the order of the batch.
        return np.argsort(lane, kind="stable")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class SerialReader:
    """Goes over training steps and evaluation passes, and writes their sample files.

    A thread of its own writes the files. Epochs in the same order refer to the first one's files.
    Every evaluation pass refers to the files of the pass that was looked up last. This is a context
    manager: all files are written when the context is left.

    Attributes:
        source: The samples.
        closed: The complete files of training steps, in order. A caller that publishes them may
            remove them.
    """

    def __init__(
        self, source: OrderedSource, header: Header, serial: SerialPass, epochs: int, segment_bytes: int, out: Path, work: Path
    ) -> None:
        """Prepare to read; nothing is read or written yet.

        Args:
            source: The samples.
            header: The schedule's header. Its slots and numbers of samples are not used.
            serial: The serial pass, at its beginning.
            epochs: How many epochs to go over.
            segment_bytes: The bound on a segment's sample files.
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
        self._incoming = self._steps()
        # The epoch's first training step, and the step after those that were read.
        self._begun = self._end = header.first_step
        self._epoch_steps = 0  # training steps in an epoch, once the first epoch has ended
        self._ends: dict[int, SampleFiles] = {}  # the files, by the step after their last one
        self._evaluation: list[SampleFiles] = []

    def __enter__(self) -> SerialReader:
        return self

    def __exit__(self, *exception: object) -> None:
        self._thread.shutdown()
        if self._slices is not None:
            self._slices.close()

    def _steps(self) -> Iterator[tuple[Samples, np.ndarray, Step]]:
        """Yield the epoch's steps: the samples, their numbers, and what the serial pass finds.

        Later epochs in the same order keep the slices of the first one.
        """
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
        """Go over the epoch's next training step; return None if the epoch has no more steps."""
        incoming = next(self._incoming, None)
        if incoming is None:
            return None
        samples, numbers, step = incoming
        self._end += 1
        # A later epoch in the same order has the same samples and slices. It refers to each
        # of the first epoch's files, once all of that file's steps are processed.
        if self._epoch and not self.source.shuffled:
            first = self._ends.get(self._end - self._epoch * self._epoch_steps)
            if first is not None:
                self.closed.append(self._again(first, self._epoch))
            return step
        self._training.add(samples, numbers + self._header.first_number, self.serial, step)
        # A segment also ends where an evaluation pass follows.
        every = self._header.eval_every
        if self._training.bytes >= self._segment_bytes or (every is not None and (self._end - self._begun) % every == 0):
            self._close()
        return step

    def end_epoch(self) -> None:
        """Complete the epoch's files and go on with the next epoch.

        The caller has processed all training steps of the epoch.
        """
        self._epoch_steps = self._epoch_steps or self._end - self._header.first_step
        self._begun = self._end
        if self._training.events:
            self._close()
        self._next_epoch()

    def see_rest(self) -> None:
        """Run the serial pass over all remaining training steps, without writing anything."""
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
        """Return the first epoch's files, as those of another epoch in the same order."""
        return replace(files, epoch=epoch, first=files.first + epoch * self._epoch_steps)

    def of_epoch(self, epoch: int) -> list[SampleFiles]:
        """Return the files of an epoch that was read, or that has the order of one that was read.

        None of the files may have been removed from `closed`.
        """
        if self.source.shuffled:
            return [files for files in self.closed if files.epoch == epoch]
        return [self._again(files, epoch) for files in self.closed]

    def look_up(self) -> Iterator[Step]:
        """Go over the steps of an evaluation pass; afterwards `of_pass` returns its files."""
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
        """Yield the files of an evaluation pass.

        Args:
            number: The number of the pass, from 0.
            epoch: The epoch that the pass is in, or at the end of.
        """
        steps = sum(len(files.samples) for files in self._evaluation)
        for files in self._evaluation:
            yield replace(files, epoch=epoch, first=files.first + number * steps)

    def _close_evaluation(self) -> None:
        end = sum(len(files.samples) for files in self._evaluation) + self._held_out.events
        self._evaluation.append(self._held_out.close(0, end))


def _slices(source: OrderedSource, header: Header, epochs: int, work: Path) -> KeptSlices | None:
    """Return the file of slices for epochs in the same order, or None if slices need not be kept.

    The file is the source's if it has one, and else a new one in `work`.
    """
    if source.slices is not None:
        return KeptSlices(source.slices, filled=True)
    again = epochs > 1 and not source.shuffled
    return KeptSlices(work / "slices") if again and header.lanes > 1 and header.placement == "locality" else None
