"""Compile as the data is read: the serial pass runs ahead of the lanes' oracles by a window.

Segments are published as soon as they are complete, so a trainer can follow them (`train
--follow`). Next uses beyond the window are unknown, so more rows may arrive than necessary.

The window holds a lane's accesses between the serial pass and the oracle. The next use of an access
becomes known when the row's next access enters the window. The window is a ring buffer that grows
as far as the settings allow: access n is at index n modulo the ring's size.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import count, islice, repeat
from pathlib import Path
from typing import NamedTuple

import numpy as np

from foreload.base.compiled import nb
from foreload.base.intrinsics import prefetch
from foreload.pipelines.compiler import oracle
from foreload.pipelines.compiler.lane_planner import LanePlanner, TooFewSlots, too_few_slots
from foreload.pipelines.compiler.next_uses import LaneAccesses, access_writers
from foreload.pipelines.compiler.numbering import LANE_ROW
from foreload.pipelines.compiler.oracle import FURTHEST, NEVER, SLOT, Accesses, Lane, leave_queue, push
from foreload.pipelines.compiler.row_table import AHEAD
from foreload.pipelines.compiler.segments import EntryShare, Progress, SampleFiles, ScheduleOutput, write_row_table
from foreload.pipelines.compiler.serial_pass import LaneStep
from foreload.pipelines.compiler.serial_reader import SerialReader
from foreload.pipelines.schedule.format import Header, ScheduleManifest, mask_dtype


class Window(NamedTuple):
    """A lane's accesses that the oracle has not planned yet: TAIL .. FRONT - 1.

    Attributes:
        bounds: int64 [2], the number of the oldest access kept (TAIL) and of the next one to come
            (FRONT).
        accesses: The accesses, in a ring.
        lasts: int64 [rows], by number, the row's last access, -1 for none.
    """

    bounds: np.ndarray
    accesses: Accesses
    lasts: np.ndarray


TAIL, FRONT = range(2)  # places in Window.bounds


def empty_window(ring: int, mask: np.dtype) -> Window:
    """Return an empty window.

    Args:
        ring: How many accesses it has room for, a power of two.
        mask: An unsigned dtype with a bit for every lane.
    """
    accesses = Accesses(np.full(ring, -1, np.int32), np.full(ring, NEVER, np.int32), np.full(ring, 0, mask), np.uint64(ring - 1))
    return Window(np.zeros(2, np.int64), accesses, np.zeros(0, np.int64))


def with_room(window: Window, more: int) -> Window:
    """Return the window, grown if necessary, with room for `more` more accesses."""
    need = int(window.bounds[FRONT] - window.bounds[TAIL]) + more
    if need <= len(window.accesses.numbers):
        return window
    wider = empty_window(1 << (need - 1).bit_length(), window.accesses.next_users.dtype)
    kept = np.arange(window.bounds[TAIL], window.bounds[FRONT])
    old, new = kept & int(window.accesses.ring), kept & int(wider.accesses.ring)
    for source, grown in zip(window.accesses[:3], wider.accesses[:3], strict=True):
        grown[new] = source[old]
    return window._replace(accesses=wider.accesses)


def with_rows(window: Window, more: int) -> Window:
    """Return the window, extended by `more` rows that have no access yet."""
    return window._replace(lasts=np.concatenate([window.lasts, np.full(more, -1, np.int64)]))


@nb.njit(nogil=True, cache=True)
def link(lane: Lane, window: Window, step: int, previous: int, numbers: np.ndarray, users: np.ndarray) -> None:
    """Append the accesses of a training step, and link each row's last access to this one.

    The window has room for the accesses. After: if a row's last access is still in the window, it
    says when the row is used next. If the row sat in a slot with no known use, the slot has moved
    from the queue to this step's stack. So the slots of all of this step's rows reach its stack,
    either now or when the access before is planned.

    Args:
        step: The step, counted from the schedule's first.
        previous: The number of the first access of the step before.
        numbers: int32 [rows], the lane's rows used.
        users: unsigned [rows], the lanes that use each row.
    """
    tail, front = window.bounds[TAIL], window.bounds[FRONT]
    accesses, lasts, ring = window.accesses, window.lasts, window.accesses.ring
    end = np.uint64(numbers.size)
    for k in range(end):
        i = np.uint64(k)
        near = np.int64(numbers[min(i + np.uint64(AHEAD), end - np.uint64(1))])
        prefetch(lasts, near)
        prefetch(lane.rows, near * 2)
        number = np.uint64(numbers[i])
        last = lasts[number]
        # If the row's last access is still in the window, record this step as its next use.
        # Otherwise that access was planned with no known next use. Then the row's slot waits in the
        # queue, unless the row has left it.
        if last >= tail:
            accesses.nexts[np.uint64(last) & ring] = step
            if last >= previous:
                accesses.next_users[np.uint64(last) & ring] = users[i]
        elif lane.rows[number, SLOT] >= 0:
            slot = np.uint64(lane.rows[number, SLOT])
            leave_queue(lane, slot)
            push(lane, slot, np.uint64(step))
            lane.scalars[FURTHEST] = step
        at = np.uint64(front + np.int64(i)) & ring
        accesses.numbers[at], accesses.nexts[at], accesses.next_users[at] = numbers[i], NEVER, 0
        lasts[number] = front + np.int64(i)
    window.bounds[FRONT] = front + numbers.size


CHUNK_STEPS = 16  # steps that the oracles plan before the serial pass runs ahead again
RATE_STEPS = 32  # steps over which a lane's arrivals are averaged
# The lookahead wanted, in slots / arrivals per step. From 3 on, arrivals equal Belady's MIN.
TARGET_RATIO = 4
_FIRST_RING = 1 << 12  # accesses that a lane's window has room for at first


class WindowedLane:
    """A lane's oracle behind its window.

    It holds the accesses of the steps that are not planned yet, and recent numbers of arrivals.

    Attributes:
        lookahead_ratio: The least lookahead of any decision to end a residency, in units of slots /
            arrivals per step. Infinite if every such decision knew all of the future.
    """

    def __init__(self, out: Path, header: Header, lane: int, ordinals: np.ndarray) -> None:
        self.planner = LanePlanner(out, header, lane, ordinals, np.empty(0, LANE_ROW))
        self.window = empty_window(_FIRST_RING, mask_dtype(header.lanes))
        self.lookahead_ratio = float("inf")
        self._known = 0  # rows that are known; the arrays have room for more
        # The first access of each step that is not planned, and of the step before and the step
        # after these.
        self._starts = deque([0, 0])
        self._recent: deque[int] = deque(maxlen=RATE_STEPS)  # arrivals of each of the last steps planned
        self._sum = 0  # of the recent steps' arrivals

    @property
    def pending(self) -> int:
        """The number of accesses between the serial pass and the oracle."""
        return int(self.window.bounds[FRONT] - self.window.bounds[TAIL])

    def add_rows(self, newcomers: np.ndarray) -> None:
        """Add rows that have just got their numbers.

        Args:
            newcomers: LANE_ROW, in the order of their numbers.
        """
        planner, need = self.planner, self._known + len(newcomers)
        if need > len(planner.rows):
            more = np.zeros(max(need, 2 * len(planner.rows), 1 << 10) - len(planner.rows), LANE_ROW)
            planner.rows = np.concatenate([planner.rows, more])
            planner.state = oracle.with_rows(planner.state, more["tag"])
            self.window = with_rows(self.window, len(more))
        planner.rows[self._known : need] = newcomers
        planner.state.rows[self._known : need, oracle.LAST] = newcomers["tag"]
        self._known = need

    def link(self, step: int, of_lane: LaneStep) -> None:
        """Append a training step.

        Args:
            step: The step, counted from the schedule's first.
            of_lane: The lane's rows in it.
        """
        self.add_rows(of_lane.newcomers)
        self.window = with_room(self.window, len(of_lane.numbers))
        link(self.planner.state, self.window, step, self._starts[-2], of_lane.numbers, of_lane.users)
        self._starts.append(int(self.window.bounds[FRONT]))

    def plan(self, first: int, count: int, front: int, at_end: bool) -> None:
        """Plan consecutive training steps.

        Args:
            count: How many steps.
            front: The step that the serial pass has reached.
            at_end: Whether that is the schedule's end.

        Raises:
            TooFewSlots: If a step needs more slots than the lane has.
        """
        starts = np.array(list(islice(self._starts, 1, count + 2)), np.int64)
        counts = self.planner.plan(first, self.window.accesses, starts, (0, int(oracle.NEVER)))
        for _ in range(count):
            self._starts.popleft()
        self.window.bounds[TAIL] = starts[-1]
        for step, (_, ends, arrivals, _) in enumerate(counts.tolist(), first):
            if len(self._recent) == RATE_STEPS:
                self._sum -= self._recent[0]
            self._recent.append(arrivals)
            self._sum += arrivals
            # A row had to leave while part of the future was unknown.
            if ends and not at_end:
                self.lookahead_ratio = min(
                    self.lookahead_ratio, (front - step) * self._sum / len(self._recent) / self.planner.slots
                )

    def lookahead(self, pending_steps: int) -> int:
        """Return the lookahead, in steps, with which the next decisions are Belady's.

        The result is at least two, because a step's plan says which lanes use a row in the step
        after.

        Args:
            pending_steps: The steps between the serial pass and the oracle, which hold `pending`
                accesses.
        """
        slots = self.planner.slots
        # Even if every pending access is an arrival, no row has to leave.
        if slots - self.planner.occupied >= self.pending:
            return 2
        if not self._recent:
            # No arrivals are known yet. As a rule, at least a quarter of the rows of the first
            # steps arrive.
            return 2 + 4 * TARGET_RATIO * slots * pending_steps // max(self.pending, 1)
        return 2 + (TARGET_RATIO * slots * len(self._recent) // self._sum if self._sum else 1 << 30)


class WindowedCompiler:
    """Compiles one schedule through a window.

    The constructor reads and writes nothing; `run` does.

    Attributes:
        steps: The number of training steps of the schedule.
        planned: How many of them are planned.
        front: How many of them the serial pass has processed.
    """

    def __init__(self, reader: SerialReader, header: Header, accesses: int, out: Path, work: Path) -> None:
        """Prepare to compile.

        Args:
            reader: At its beginning, over all epochs.
            accesses: How many accesses the windows of all lanes may hold together.
            out: The schedule's folder.
            work: A folder for scratch files.
        """
        self.header, self._reader, self._serial, self._accesses = header, reader, reader.serial, accesses
        self._out, self._work = out, work
        self.lanes = [WindowedLane(out, header, lane, self._serial.counts[lane]) for lane in range(header.lanes)]
        self._planners = [lane.planner for lane in self.lanes]
        self.steps = header.end_step - header.first_step
        self.planned = self.front = 0
        # For each lane, the accesses of the evaluation pass that was looked up last.
        self._looked_up: list[LaneAccesses] = []
        self._entries = EntryShare(mask_dtype(header.lanes).itemsize)

    def run(self, threads: int, progress: Progress) -> ScheduleManifest:
        """Write the whole schedule.

        Args:
            threads: How many lanes are planned at once.
            progress: Called with the number of training steps planned so far, and their total
                number.

        Returns:
            The schedule's manifest.

        Raises:
            SlotsError: If a step does not fit the slots.
        """
        with self._reader, ThreadPoolExecutor(threads) as pool, ExitStack() as files:
            output = ScheduleOutput(self._out, self.header)
            files.callback(self._forget_pass)
            passes = count()
            for epoch in range(self.header.epochs):
                epoch_end = (epoch + 1) * self.header.steps_per_epoch
                while self.planned < epoch_end:
                    steps = self._look_ahead(min(CHUNK_STEPS, epoch_end - self.planned))
                    # A plan must not go beyond the end of a segment.
                    if self._reader.closed:
                        steps = min(steps, self._reader.closed[0].end - self.header.first_step - self.planned)
                    self._plan(pool, output, steps)
                    progress(self.planned, self.steps)
                    if self.header.evaluates_within(self.header.first_step + self.planned - 1):
                        self._evaluate(pool, output, epoch, next(passes))
                self._evaluate(pool, output, epoch, next(passes))
            occupied, ratio = [planner.occupied for planner in self._planners], min(lane.lookahead_ratio for lane in self.lanes)
            rows = write_row_table(self._out, self._serial.table)
            return output.finish(occupied, self._serial.most.tolist(), ratio, rows)

    def _begin(self, pool: ThreadPoolExecutor) -> None:
        """Start a segment before its first event, with an entry state if the share allows one."""
        entry = self._entries.begin(sum(planner.occupied for planner in self._planners))
        list(pool.map(LanePlanner.begin, self._planners, repeat(entry)))

    def _publish(self, pool: ThreadPoolExecutor, output: ScheduleOutput, samples: SampleFiles) -> None:
        """Publish a segment, all of whose events are planned."""
        parts = list(pool.map(LanePlanner.end, self._planners))
        self._entries.end(samples, sum(part.counts["rows_used"] for part in parts))
        output.publish(samples, parts)

    def _advance(self) -> None:
        """Run the serial pass over one step, and link the step into the lanes' windows."""
        step = self._reader.advance()
        assert step is not None
        for lane, of_lane in zip(self.lanes, step.lanes, strict=True):
            lane.link(self.front, of_lane)
        self.front += 1
        if self.front % self.header.steps_per_epoch == 0:
            self._reader.end_epoch()

    def _look_ahead(self, steps: int) -> int:
        """Run the serial pass far enough ahead for the next `steps` steps.

        If the window is full, the lookahead is shorter than wanted, which the manifest reports. Two
        steps of lookahead are always granted, because nothing could be planned without them.

        Returns:
            How many of the steps may be planned. The last step that the serial pass has reached may
                not, unless it is the schedule's last: only the step after it shows which lanes use
                its rows next.
        """
        while self.front < self.steps:
            ahead = self.front - self.planned
            if ahead >= 2 and sum(lane.pending for lane in self.lanes) + self._serial.most.sum() > self._accesses:
                break
            if ahead >= steps + max(lane.lookahead(ahead) for lane in self.lanes):
                break
            self._advance()
        ahead = self.front - self.planned
        return min(steps, ahead if self.front == self.steps else ahead - 1)

    def _plan(self, pool: ThreadPoolExecutor, output: ScheduleOutput, steps: int) -> None:
        """Plan the next `steps` steps of all lanes, and publish the segment if it is complete.

        The steps do not go beyond the end of a segment's samples.
        """
        if not self._planners[0].buffer.events:
            self._begin(pool)
        at_end = self.front == self.steps
        tasks = [pool.submit(lane.plan, self.planned, steps, self.front, at_end) for lane in self.lanes]
        try:
            for task in tasks:
                task.result()
        except TooFewSlots:
            # The error names the slots that the largest step needs, so all remaining steps are read
            # first.
            self._reader.see_rest()
            raise too_few_slots(self.header, self._serial.most) from None
        self.planned += steps
        if self._reader.closed and self.header.first_step + self.planned == self._reader.closed[0].end:
            self._publish(pool, output, self._reader.closed.popleft())

    def _look_up(self) -> None:
        """Write the samples of an evaluation pass, and record what each lane looks up."""
        self._forget_pass()
        with access_writers(self._work, self.header.lanes) as writers:
            for step in self._reader.look_up():
                for lane, writer, of_lane in zip(self.lanes, writers, step.lanes, strict=True):
                    # Rows of a parent schedule may get their numbers in an evaluation step.
                    lane.add_rows(of_lane.newcomers)
                    writer.add_evaluation(of_lane)
        mask = mask_dtype(self.header.lanes)
        self._looked_up = [LaneAccesses(self._work, lane, mask, False, self._work) for lane in range(self.header.lanes)]

    def _forget_pass(self) -> None:
        for accesses in self._looked_up:
            accesses.close()
        self._looked_up = []

    def _evaluate(self, pool: ThreadPoolExecutor, output: ScheduleOutput, epoch: int, number: int) -> None:
        """Plan the steps of an evaluation pass.

        In the first epoch each pass is looked up separately, because a row that no step has used
        yet has no owner yet.

        Args:
            pool: For the lanes' work.
            output: The schedule's files.
            epoch: The epoch that the pass is in, or at the end of.
            number: The number of the pass.
        """
        if epoch == 0:
            self._look_up()
        for samples in self._reader.of_pass(number, epoch):
            self._begin(pool)
            for planner, accesses in zip(self._planners, self._looked_up, strict=True):
                planner.plan_evaluation(samples.first, len(samples.samples), accesses)
            self._publish(pool, output, samples)
