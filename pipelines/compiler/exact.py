"""Compile with all of the future known: read everything, then plan it lane by lane. Arrivals are Belady's minimum for any number of slots.

`Reading` goes over all samples first and writes them, and of each lane the rows of every step. `plan_lane` then finds every access's next use, in a
pass in reverse (`next_uses`), and plans the lane, in one forwards (`oracle`). Lanes know nothing of each other: they are planned in threads, or by
workers of their own that see the same disk. What is held in memory follows rows, slots and steps, not accesses. `publish` puts together what they
have written.
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
    """A segment of the program. entry: whether it has an entry state."""

    samples: SampleFiles
    entry: bool


@dataclass(frozen=True, slots=True)
class Program:
    """What `Reading` leaves, besides files: all that a lane's worker must know, and that the manifest says.

    shuffled: epochs have an order each; segments: all of them, in order; ordinals: given before the first step, by lane and table; minimum_slots:
    rows of each lane's largest step; rows: the row table's manifest entry.
    """

    header: Header
    shuffled: bool
    segments: tuple[PlannedSegment, ...]
    ordinals: tuple[tuple[int, ...], ...]
    minimum_slots: tuple[int, ...]
    rows: RowTableEntry


@dataclass(frozen=True, slots=True)
class LanePlan:
    """What `plan_lane` leaves, besides files. parts: of each segment; occupied: slots that hold a row at the end."""

    parts: tuple[LanePart, ...]
    occupied: int


class Reading:
    """Goes over all that is to come: sample files and row table into `out`, the lanes' accesses into `folder`.

    reader: at its beginning, of one epoch where all have the same order; header: of the schedule, with no slots and no numbers of samples yet, which
    the source may know only when all has been read.
    """

    def __init__(self, reader: SerialReader, header: Header, out: Path, folder: Path) -> None:
        self._reader, self._serial, self._source = reader, reader.serial, reader.source
        self._header, self._out, self._folder = header, out, folder
        # Before each training step that is read, and at the end: rows used so far, and of each lane rows numbered.
        self._used, self._numbered = [0], [[0] * header.lanes]
        self._evaluated = [0]  # before each evaluation step: rows used so far

    def read(self, slots: SlotsWanted, progress: Callable[[], object]) -> Program:
        """Read it. progress: called after every training step that is read. Raises SlotsError."""
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
                if epoch == 0:  # each evaluation pass is the same
                    for step in self._reader.look_up():
                        for writer, of_lane in zip(writers, step.lanes, strict=True):
                            writer.add_evaluation(of_lane)
                        self._evaluated.append(self._evaluated[-1] + step.count)

    def _whole(self, slots: SlotsWanted) -> Header:
        """The header with its numbers of samples, and every lane's slots. Raises SlotsError where a step does not fit."""
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
            # A row that has come takes a slot, until there is none that was never taken.
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
                if header.evaluates_amid(samples.end - 1):
                    yield from evaluation(epoch, samples.end - header.first_step)
            yield from evaluation(epoch, (epoch + 1) * header.steps_per_epoch)


def plan_lane(
    program: Program, lane: int, out: Path, folder: Path, scratch: Path, progress: Callable[[int], object] = lambda steps: None
) -> LanePlan:
    """Plan a lane, and write its moves and entry states into `out`.

    folder: that of `Reading`; scratch: a folder for what is found of next uses; progress: called every now and then with steps that were planned
    since, and may end it by an error of its own.
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
    """Plan a segment's training steps."""
    header = program.header
    start, shift, never = samples.first - header.first_step, 0, int(NEVER)
    if not program.shuffled:
        # An epoch in the same order as the first one, whose next uses go into the one after (oracle.plan_steps).
        steps = header.steps_per_epoch
        shift, never = samples.epoch * steps, (2 * steps if samples.epoch < header.epochs - 1 else steps)
    for first, last, part, starts in accesses.accesses(start - shift, start - shift + len(samples.samples)):
        if last + shift == header.end_step - header.first_step:
            part.next_users[starts[-2] :] = 0  # epochs in the same order begin anew, the last one does not
        planner.plan(first + shift, part, starts, (shift, never))


def publish(program: Program, plans: Sequence[LanePlan], out: Path) -> ScheduleManifest:
    """Write the header and all manifests; plans: of each lane. Returns the schedule's manifest."""
    output = ScheduleOutput(out, program.header)
    for index, segment in enumerate(program.segments):
        output.publish(segment.samples, [plan.parts[index] for plan in plans])
    return output.finish([plan.occupied for plan in plans], program.minimum_slots, float("inf"), program.rows)
