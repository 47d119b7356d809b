"""Compile as the data is read: the serial pass runs ahead of the lanes' oracles by a window, and segments are published as they are complete.

What a trainer follows (`train --follow`) is compiled so. Next uses beyond the window are not known, so that more rows may arrive than must.
"""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, nullcontext
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np

from foreload.pipelines.compiler import oracle, window
from foreload.pipelines.compiler.kept_slices import KeptSlices
from foreload.pipelines.compiler.lane_oracle import Columns, LaneOracle, TooFewSlots, too_few_slots
from foreload.pipelines.compiler.next_uses import AccessWriter, LaneAccesses
from foreload.pipelines.compiler.numbering import LANE_ROW
from foreload.pipelines.compiler.output import Progress, SampleOutput, ScheduleOutput
from foreload.pipelines.compiler.segments import EntryShare, LaneWriter, SampleFiles, write_row_table
from foreload.pipelines.compiler.serial_pass import LaneStep, SerialPass, Step
from foreload.pipelines.samples.piece_order import OrderedSource
from foreload.pipelines.samples.pieces import Samples, batches
from foreload.pipelines.schedule.format import Header, mask_dtype

CHUNK_STEPS = 16  # steps that the oracles plan between two looks at the front
RATE_STEPS = 32  # steps over which a lane's arrivals are averaged
TARGET_RATIO = 4  # lookahead in units of slots / arrivals per step; from 3 on arrivals equal Belady's MIN
_FIRST_RING = 1 << 12  # accesses that a lane's window has room for at first


class WindowedLane:
    """A lane's oracle behind its window: what it has of the steps that are not planned yet, and what it knows of its arrivals.

    lookahead_ratio: the least lookahead that a decision to end a residency had, in units of slots / arrivals per step; infinite: none had less than
    all of the future.
    """

    def __init__(self, header: Header, lane: int, ordinals: np.ndarray) -> None:
        self.oracle = LaneOracle(header, lane, ordinals, np.empty(0, LANE_ROW))
        self.window = window.empty_window(_FIRST_RING, mask_dtype(header.lanes))
        self.lookahead_ratio = float("inf")
        self._known = 0  # rows; the arrays have room for more
        self._starts = deque([0, 0])  # of each step that is not planned, and of the one before and after them: its first access
        self._recent: deque[int] = deque(maxlen=RATE_STEPS)  # arrivals of each of the last steps planned
        self._sum = 0  # of the recent steps' arrivals

    @property
    def pending(self) -> int:
        """Accesses between the serial pass and the oracle."""
        return int(self.window.bounds[window.FRONT] - self.window.bounds[window.TAIL])

    def add_rows(self, newcomers: np.ndarray) -> None:
        """Take in rows that get their numbers; newcomers LANE_ROW."""
        need = self._known + len(newcomers)
        if need > len(self.oracle.rows):
            more = np.zeros(max(need, 2 * len(self.oracle.rows), 1 << 10) - len(self.oracle.rows), LANE_ROW)
            self.oracle.rows = np.concatenate([self.oracle.rows, more])
            self.oracle.state = oracle.with_rows(self.oracle.state, more["tag"])
            self.window = window.with_rows(self.window, len(more))
        self.oracle.rows[self._known : need] = newcomers
        self.oracle.state.rows[self._known : need, oracle.LAST] = newcomers["tag"]
        self._known = need

    def link(self, step: int, of_lane: LaneStep) -> None:
        """Append a training step, counted from the schedule's first."""
        self.add_rows(of_lane.newcomers)
        self.window = window.with_room(self.window, len(of_lane.numbers))
        window.link(self.oracle.state, self.window, step, self._starts[-2], of_lane.numbers, of_lane.users)
        self._starts.append(int(self.window.bounds[window.FRONT]))

    def plan(self, first: int, count: int, front: int, at_end: bool) -> None:
        """Plan `count` steps from `first` on, while the serial pass stands at step `front`; at_end: which is the end. Raises TooFewSlots."""
        starts = np.array(list(islice(self._starts, 1, count + 2)), np.int64)
        counts = self.oracle.plan(first, self.window.accesses, starts, (0, int(oracle.NEVER)))
        for _ in range(count):
            self._starts.popleft()
        self.window.bounds[window.TAIL] = starts[-1]
        for step, (_, ends, arrivals, _) in enumerate(counts.tolist(), first):
            if len(self._recent) == RATE_STEPS:
                self._sum -= self._recent[0]
            self._recent.append(arrivals)
            self._sum += arrivals
            if ends and not at_end:  # a row had to leave, and what is to come was not all known
                self.lookahead_ratio = min(
                    self.lookahead_ratio, (front - step) * self._sum / len(self._recent) / self.oracle.slots
                )

    def lookahead(self, pending_steps: int) -> int:
        """Steps that the serial pass must be ahead for the next decisions to be Belady's.

        Two at least, since a step's plan says who uses a row in the step after. pending_steps: steps between the serial pass and the oracle, in which
        `pending` accesses are.
        """
        slots = self.oracle.slots
        if slots - self.oracle.occupied >= self.pending:  # even if all of them arrive, nobody has to leave
            return 2
        if not self._recent:
            # Nothing is known of arrivals yet; as a rule at least a quarter of the rows of the first steps arrive.
            return 2 + 4 * TARGET_RATIO * slots * pending_steps // max(self.pending, 1)
        return 2 + (TARGET_RATIO * slots * len(self._recent) // self._sum if self._sum else 1 << 30)


class WindowedCompiler:
    """Compiles one schedule into `out`.

    header: of the schedule; serial: a serial pass at its beginning; slices: where the first epoch's are kept, if later ones have the same; accesses:
    that the window may hold, over all lanes; work: a folder for scratch files. Making one reads and writes nothing; `run` does.
    """

    def __init__(
        self,
        source: OrderedSource,
        header: Header,
        serial: SerialPass,
        slices: KeptSlices | None,
        accesses: int,
        segment_bytes: int,
        out: Path,
        work: Path,
    ) -> None:
        self.source, self.header, self.serial, self._slices, self._accesses = source, header, serial, slices, accesses
        self._out, self._work = out, work
        self.lanes = [WindowedLane(header, lane, serial.counts[lane]) for lane in range(header.lanes)]
        self.steps = header.end_step - header.first_step
        self.planned = self.front = 0  # steps that are planned; that the serial pass has gone through
        self._thread = ThreadPoolExecutor(1)
        self._samples = SampleOutput(out, header, segment_bytes, source.shuffled, self._thread)
        self._incoming = self._training_steps()
        self._closed: deque[SampleFiles] = deque()  # segments whose samples are written, but not yet all of their moves
        self._entries = EntryShare(mask_dtype(header.lanes).itemsize)
        self._writers = [LaneWriter(out, lane) for lane in range(header.lanes)]

    def run(self, threads: int, progress: Progress) -> dict[str, Any]:
        """Write the whole schedule; returns its manifest. threads: that plan lanes at once. Raises SlotsError."""
        with self._thread, ThreadPoolExecutor(threads) as pool, self._slices or nullcontext(), ExitStack() as files:
            output = ScheduleOutput(self._out, self.header)
            looked_up: list[LaneAccesses] = []
            passes = count()
            for epoch in range(self.header.epochs):
                epoch_end = (epoch + 1) * self.header.steps_per_epoch
                while self.planned < epoch_end:
                    steps = self._look_ahead(min(CHUNK_STEPS, epoch_end - self.planned))
                    if self._closed:
                        steps = min(steps, self._closed[0].end - self.header.first_step - self.planned)
                    self._plan(pool, output, steps)
                    progress(self.planned, self.steps)
                    if self.header.evaluates_amid(self.header.first_step + self.planned - 1):
                        if epoch == 0:
                            self._evaluate_first_rows(pool, output, next(passes))
                        else:
                            self._evaluate(pool, output, epoch, next(passes), looked_up)
                if epoch == 0:
                    looked_up = [files.enter_context(closing(accesses)) for accesses in self._read_evaluation(self._work)]
                self._evaluate(pool, output, epoch, next(passes), looked_up)
            occupied, ratio = [lane.oracle.occupied for lane in self.lanes], min(lane.lookahead_ratio for lane in self.lanes)
            rows = write_row_table(self._out, self.serial.table)
            return output.finish(occupied, self.serial.most.tolist(), ratio, rows)

    def _begin(self, pool: ThreadPoolExecutor) -> None:
        """Before the first event of a segment: keep the entry state where the share allows."""
        lanes = [lane.oracle for lane in self.lanes]
        if self._entries.begin(sum(lane.occupied for lane in lanes)):
            list(pool.map(LaneWriter.begin, self._writers, lanes))

    def _publish(
        self, pool: ThreadPoolExecutor, output: ScheduleOutput, samples: SampleFiles, taken: list[tuple[Columns, int]]
    ) -> None:
        """Publish a segment; taken: of each lane its moves, and the slots that they need besides the lane's."""
        columns, evaluation_slots = zip(*taken, strict=True)
        parts = list(pool.map(LaneWriter.write, self._writers, columns, evaluation_slots))
        self._entries.end(samples, sum(part.counts["rows_used"] for part in parts))
        output.publish(samples, parts)

    def _training_steps(self) -> Iterator[tuple[int, int, Samples, np.ndarray]]:
        for epoch in range(self.header.epochs):
            for place, (samples, numbers) in enumerate(batches(self.source.training(epoch), self.header.batch_size)):
                yield epoch, place, samples, numbers

    def _train(self, epoch: int, place: int, samples: Samples) -> Step:
        """A training step in the serial pass; in later epochs in the same order, with the first one's slices."""
        if self._slices is None:
            return self.serial.train(samples)
        if epoch > 0 or self._slices.filled:
            return self.serial.train(samples, self._slices.order(place * self.header.batch_size, len(samples)))
        step = self.serial.train(samples)
        self._slices.keep(step)
        return step

    def _advance(self) -> None:
        """One step of the serial pass: it is numbered, linked into the lanes' windows, and its slices are written, in a shuffle's every epoch."""
        epoch, place, samples, numbers = next(self._incoming)
        step = self._train(epoch, place, samples)
        for lane, of_lane in zip(self.lanes, step.lanes, strict=True):
            lane.link(self.front, of_lane)
        self.front += 1
        files = self._samples.train(epoch, samples, numbers, self.serial, step)
        self._closed.extend([] if files is None else [files])
        if place == self.header.steps_per_epoch - 1:
            last = self._samples.end_epoch(epoch)
            self._closed.extend([] if last is None else [last])

    def _look_ahead(self, steps: int) -> int:
        """Let the serial pass run far enough ahead for the next `steps` steps; returns how many of them may be planned.

        The last step that it has come to is not: who uses its rows next is told by the step after. Where the window is full the lookahead is shorter
        than wished, which the manifest tells, but for two steps, without which nothing could be planned.
        """
        while self.front < self.steps:
            ahead = self.front - self.planned
            if ahead >= 2 and sum(lane.pending for lane in self.lanes) + self.serial.most.sum() > self._accesses:
                break
            if ahead >= steps + max(lane.lookahead(ahead) for lane in self.lanes):
                break
            self._advance()
        ahead = self.front - self.planned
        return min(steps, ahead if self.front == self.steps else ahead - 1)

    def _plan(self, pool: ThreadPoolExecutor, output: ScheduleOutput, steps: int) -> None:
        """Plan so many steps of all lanes, none of which goes beyond the end of a segment's samples; publish the segment at its end."""
        lanes = [lane.oracle for lane in self.lanes]
        if not lanes[0].buffer.events:
            self._begin(pool)
        at_end = self.front == self.steps
        tasks = [pool.submit(lane.plan, self.planned, steps, self.front, at_end) for lane in self.lanes]
        try:
            for task in tasks:
                task.result()
        except TooFewSlots:
            for epoch, place, samples, _ in self._incoming:  # what the largest step needs is known once all were seen
                self._train(epoch, place, samples)
            raise too_few_slots(self.header, self.serial.most) from None
        self.planned += steps
        if self._closed and self.header.first_step + self.planned == self._closed[0].end:
            self._publish(pool, output, self._closed.popleft(), [(lane.buffer.take(), 0) for lane in lanes])

    def _read_evaluation(self, work: Path) -> Iterator[LaneAccesses]:
        """Write the samples of an evaluation pass; what each lane looks up in its steps, for which files are in `work`."""
        mask = mask_dtype(self.header.lanes)
        writers = [AccessWriter(work, lane, mask) for lane in range(self.header.lanes)]
        self._samples.look_up_again()
        with ExitStack() as files:
            for writer in writers:
                files.callback(writer.close)
            for samples, numbers in batches(self.source.evaluation(), self.header.batch_size, self.source.evaluation_sets):
                step = self.serial.look_up(samples)
                self._samples.evaluate(samples, numbers, self.serial, step)
                for lane, writer, of_lane in zip(self.lanes, writers, step.lanes, strict=True):
                    lane.add_rows(of_lane.newcomers)  # of a parent's, which get their numbers by it
                    writer.add_evaluation(of_lane)
        for number in range(self.header.lanes):
            yield LaneAccesses(work, number, mask, False, work)

    def _evaluate_first_rows(self, pool: ThreadPoolExecutor, output: ScheduleOutput, number: int) -> None:
        """Plan an evaluation pass amid the first epoch. Of rows that no step has used so far it is not known yet whose they will be: so the pass is
        looked up for itself.
        """
        work = self._work / "amid"
        work.mkdir(parents=True)
        with ExitStack() as files:
            looked_up = [files.enter_context(closing(accesses)) for accesses in self._read_evaluation(work)]
            self._evaluate(pool, output, 0, number, looked_up)
        shutil.rmtree(work)

    def _evaluate(
        self, pool: ThreadPoolExecutor, output: ScheduleOutput, epoch: int, number: int, looked_up: Sequence[LaneAccesses]
    ) -> None:
        """Plan the steps of evaluation pass `number`, in an epoch or at its end; looked_up: by each lane."""
        steps = [accesses.evaluated() for accesses in looked_up]
        for files in self._samples.evaluation(epoch, number):
            self._begin(pool)
            for lane, of_lane, accesses in zip(self.lanes, steps, looked_up, strict=True):
                lane.oracle.plan_evaluation(islice(of_lane, len(files.samples)), accesses.unknown)
            self._publish(pool, output, files, [lane.oracle.take_evaluation() for lane in self.lanes])
