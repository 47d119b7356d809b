"""Compile with all of the future known: read everything, then plan it lane by lane.

Arrivals are Belady's minimum for any number of slots. `Reading` first goes over all samples, and
writes them and, for each lane, the rows of every step. `plan_lane` then finds every access's next
use in a reverse pass (`next_uses`), and plans the lane in a forward pass (`oracle`). Lanes do not
depend on each other, so they are planned in threads, or by workers that see the same disk. Memory
grows with rows, slots and steps, not with accesses. `publish` writes the header and the manifests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import numpy as np

from foreload.pipelines.compiler.lane_planner import LanePart, LanePlanner, too_few_slots
from foreload.pipelines.compiler.next_uses import LaneAccesses, access_writers
from foreload.pipelines.compiler.oracle import NEVER
from foreload.pipelines.compiler.segments import EntryShare, SampleFiles, ScheduleOutput, SlotsWanted, counted, write_row_table
from foreload.pipelines.compiler.serial_reader import SerialReader
from foreload.pipelines.schedule.format import Header, RowTableEntry, ScheduleManifest, mask_dtype


@dataclass(frozen=True, slots=True)
class PlannedSegment:
    """A segment of the program.

    Attributes:
        entry: Whether the segment has an entry state.
    """

    samples: SampleFiles
    entry: bool


@dataclass(frozen=True, slots=True)
class Program:
    """The result of `Reading`, besides files: all that a lane's worker and the manifest need.

    Attributes:
        shuffled: Whether each epoch has an order of its own.
        segments: All segments, in order.
        ordinals: The numbers of ordinals given before the first step, by lane and table.
        minimum_slots: The rows of each lane's largest step.
        rows: The row table's manifest entry.
    """

    header: Header
    shuffled: bool
    segments: tuple[PlannedSegment, ...]
    ordinals: tuple[tuple[int, ...], ...]
    minimum_slots: tuple[int, ...]
    rows: RowTableEntry


@dataclass(frozen=True, slots=True)
class LanePlan:
    """The result of `plan_lane`, besides files.

    Attributes:
        parts: The lane's part of each segment.
        occupied: The number of slots that hold a row at the end.
    """

    parts: tuple[LanePart, ...]
    occupied: int


class Reading:
    """Goes over all samples, and writes the sample files, the row table and the lanes' accesses."""

    def __init__(self, reader: SerialReader, header: Header, out: Path, folder: Path) -> None:
        """Prepare to read.

        Args:
            reader: At its beginning; over one epoch if all epochs have the same order.
            header: The schedule's header, still without slots and numbers of samples. The source
                may know its numbers of samples only after everything was read.
            out: The schedule's folder, for sample files and the row table.
            folder: For the lanes' accesses.
        """
        self._reader, self._serial, self._source = reader, reader.serial, reader.source
        self._header, self._out, self._folder = header, out, folder
        # Running totals before each training step that is read, and at the end: the rows used, and
        # the rows that each lane has numbered.
        self._used, self._numbered = [0], [[0] * header.lanes]
        # The same for evaluation steps: the rows used.
        self._evaluated = [0]

    def read(self, slots: SlotsWanted, progress: Callable[[], object]) -> Program:
        """Read everything.

        Args:
            slots: How many slots the lanes are to have.
            progress: Called after every training step that is read.

        Returns:
            The program, from which lanes are planned.

        Raises:
            SlotsError: If a step does not fit the slots.
        """
        ordinals = tuple(map(tuple, self._serial.counts.tolist()))
        with self._reader:
            self._read(progress)
        header = self._whole(slots)
        repeated = 0 if self._source.shuffled else (header.epochs - 1) * header.steps_per_epoch
        rows = write_row_table(self._out, self._serial.table, header.first_step, repeated)
        minimum_slots = tuple(self._serial.most.tolist())
        return Program(header, self._source.shuffled, tuple(self._segments(header)), ordinals, minimum_slots, rows)

    def _read(self, progress: Callable[[], object]) -> None:
        with access_writers(self._folder, self._header.lanes) as writers:
            for epoch in range(self._header.epochs if self._source.shuffled else 1):
                while (step := self._reader.advance()) is not None:
                    for writer, of_lane in zip(writers, step.lanes, strict=True):
                        writer.add(of_lane)
                    self._used.append(self._used[-1] + step.count)
                    self._numbered.append([writer.rows for writer in writers])
                    progress()
                self._reader.end_epoch()
                # All evaluation passes are the same. They are looked up once, after the first
                # epoch, when all rows that training uses have an owner.
                if epoch == 0:
                    for step in self._reader.look_up():
                        for writer, of_lane in zip(writers, step.lanes, strict=True):
                            writer.add_evaluation(of_lane)
                        self._evaluated.append(self._evaluated[-1] + step.count)

    def _whole(self, slots: SlotsWanted) -> Header:
        """Return the header with its numbers of samples and every lane's slots.

        Raises:
            SlotsError: If a step does not fit the slots.
        """
        header, most = counted(self._header, self._source), self._serial.most
        number = slots.number(header)
        if number is not None:
            header = replace(header, slots=(number,) * header.lanes)
            if most.max() > number:
                raise too_few_slots(header, most)
            return header
        counts = most if slots.wanted == "min" else self._serial.counts.sum(axis=1)
        return replace(header, slots=tuple(max(int(count), 1) for count in counts))

    def _segments(self, header: Header) -> Iterator[PlannedSegment]:
        share, read = EntryShare(mask_dtype(header.lanes).itemsize), len(self._used) - 1
        passes = count()

        def occupied(steps: int) -> int:
            # Every row that arrives for the first time takes a slot that was never taken, as long
            # as one exists. So this is known before the oracle has planned anything.
            return sum(map(min, self._numbered[min(steps, read)], header.slots))

        def evaluation(epoch: int, steps: int) -> Iterator[PlannedSegment]:
            for samples in self._reader.of_pass(next(passes), epoch):
                entry = share.begin(occupied(steps))
                place = samples.first % (len(self._evaluated) - 1)
                share.end(samples, self._evaluated[place + len(samples.samples)] - self._evaluated[place])
                yield PlannedSegment(samples, entry)

        for epoch in range(header.epochs):
            for samples in self._reader.of_epoch(epoch):
                first = samples.first - header.first_step
                entry = share.begin(occupied(first))
                place = first % read
                share.end(samples, self._used[place + len(samples.samples)] - self._used[place])
                yield PlannedSegment(samples, entry)
                if header.evaluates_within(samples.end - 1):
                    yield from evaluation(epoch, samples.end - header.first_step)
            yield from evaluation(epoch, (epoch + 1) * header.steps_per_epoch)


def plan_lane(
    program: Program, lane: int, out: Path, folder: Path, scratch: Path, progress: Callable[[int], object] = lambda steps: None
) -> LanePlan:
    """Plan a lane, and write its moves and entry states into `out`.

    Args:
        out: The schedule's folder.
        folder: The folder of `Reading`.
        scratch: A folder for the next uses.
        progress: Called every now and then with the number of steps planned since the last call. It
            may raise an error to stop the planning.
    """
    header, parts = program.header, []
    same = header.epochs > 1 and not program.shuffled
    with closing(LaneAccesses(folder, lane, mask_dtype(header.lanes), same, scratch)) as accesses:
        accesses.find_next_uses(progress)
        planner = LanePlanner(out, header, lane, np.array(program.ordinals[lane], np.int64), accesses.rows)
        for segment in program.segments:
            samples = segment.samples
            planner.begin(segment.entry)
            if samples.kind == "train":
                _train(program, planner, accesses, samples)
                progress(len(samples.samples))
            else:
                planner.plan_evaluation(samples.first, len(samples.samples), accesses)
            parts.append(planner.end())
    return LanePlan(tuple(parts), planner.occupied)


def _train(program: Program, planner: LanePlanner, accesses: LaneAccesses, samples: SampleFiles) -> None:
    """Plan the training steps of a segment."""
    header = program.header
    start, shift, never = samples.first - header.first_step, 0, int(NEVER)
    if not program.shuffled:
        # All epochs have the accesses of the first one. Their next uses are counted within it and
        # may lie in the epoch after; `span` shifts them to this epoch. In the last epoch, a use in
        # the epoch after counts as never (oracle.plan_steps).
        steps = header.steps_per_epoch
        shift, never = samples.epoch * steps, (2 * steps if samples.epoch < header.epochs - 1 else steps)
    for first, last, part, starts in accesses.accesses(start - shift, start - shift + len(samples.samples)):
        if last + shift == header.end_step - header.first_step:
            # The last step of an epoch names the users in the next epoch's first step, but nothing
            # follows the last epoch.
            part.next_users[starts[-2] :] = 0
        planner.plan(first + shift, part, starts, (shift, never))


def publish(program: Program, plans: Sequence[LanePlan], out: Path) -> ScheduleManifest:
    """Write the header and all manifests; return the schedule's manifest.

    Args:
        plans: The plan of each lane.
        out: The schedule's folder.
    """
    output = ScheduleOutput(out, program.header)
    for index, segment in enumerate(program.segments):
        output.publish(segment.samples, [plan.parts[index] for plan in plans])
    return output.finish([plan.occupied for plan in plans], program.minimum_slots, float("inf"), program.rows)
