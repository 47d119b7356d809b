"""Compile ordered samples into a schedule: the serial pass, the lanes' oracles behind it, and the segments as they are complete.

The serial pass runs ahead of the oracles by the lookahead; what is held in memory is that window, two segments being written, and arrays over
slots. The result is a function of the samples and the settings alone: neither threads nor timing change a byte of it.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from foreload.pipelines.base.files import disk_error, write_json, write_sealed
from foreload.pipelines.compiler import oracle, window
from foreload.pipelines.compiler.kept_slices import KeptSlices
from foreload.pipelines.compiler.lane_oracle import MoveBuffer, Oracle, TooFewSlots
from foreload.pipelines.compiler.locality import assign_samples
from foreload.pipelines.compiler.row_table import ACCESS_BITS, DIRECT_ROWS, RowTable
from foreload.pipelines.compiler.segments import SampleFiles, SampleWriter, SegmentWriter, write_row_table
from foreload.pipelines.compiler.serial_pass import SerialPass, Step
from foreload.pipelines.errors import (
    ScheduleError,
    SlotsError,
)
from foreload.pipelines.samples.features import FeatureSpec
from foreload.pipelines.samples.piece_order import OrderedSource
from foreload.pipelines.samples.pieces import Samples
from foreload.pipelines.schedule.format import (
    FAILED,
    FORMAT_VERSION,
    HEADER,
    MANIFEST,
    Header,
    SampleAssignment,
    mask_dtype,
)
from foreload.pipelines.schedule.reader import Schedule

CHUNK_STEPS = 16  # steps that the oracles plan between two looks at the front


@dataclass(frozen=True, slots=True)
class CompileSettings:
    """What a schedule is a function of, besides its samples.

    slots: per lane; a number, "min" (the rows of the largest step) or "all" (no row ever leaves). segment_bytes: bound on a segment's sample
    files. window_accesses: bound on the distinct rows per step, summed over the lookahead. parent: the schedule to continue. placement: of
    a step's samples in its slices (docs/definitions.md). direct_rows: tables of up to so many rows are addressed directly (RowTable). threads: that
    plan lanes at once. settings: kept in the header as they are.
    """

    features: FeatureSpec
    batch_size: int
    lanes: int
    slots: int | Literal["min", "all"]
    epochs: int = 1
    shuffle_seed: int | None = None
    segment_bytes: int = 64 << 20
    window_accesses: int = 4 << 20
    parent: Path | None = None
    placement: SampleAssignment = "locality"
    direct_rows: int = DIRECT_ROWS
    threads: int = 1
    settings: dict[str, Any] = field(default_factory=dict)


def batches(chunks: Iterator[tuple[Samples, np.ndarray]], size: int) -> Iterator[tuple[Samples, np.ndarray]]:
    """Cut chunks of any size into batches of `size` samples, the last one shorter."""
    held: list[tuple[Samples, np.ndarray]] = []
    count = 0
    for samples, numbers in chunks:
        start = 0
        while count + len(samples) - start >= size:
            stop = start + size - count
            held.append((samples.slice(start, stop), numbers[start:stop]))
            yield _join(held)
            held, count, start = [], 0, stop
        if start < len(samples):
            held.append((samples.slice(start, len(samples)), numbers[start:]))
            count += len(samples) - start
    if held:
        yield _join(held)


def _join(parts: list[tuple[Samples, np.ndarray]]) -> tuple[Samples, np.ndarray]:
    if len(parts) == 1:
        return parts[0]
    return Samples.concat([samples for samples, _ in parts]), np.concatenate([numbers for _, numbers in parts])


def resolve_slots(source: OrderedSource, settings: CompileSettings, parent: Schedule | None, work: Path) -> tuple[int, ...]:
    """The slots of each lane: the number given, or what "min" and "all" come to, for which all data is read once, with scratch files in `work`.

    parent: the schedule that is continued, whose rows all count as trained.
    """
    if isinstance(settings.slots, int):
        return (settings.slots,) * settings.lanes
    serial = _serial_pass(settings, parent, work)
    for epoch in range(settings.epochs if source.shuffled else 1):
        for samples, _ in batches(source.training(epoch), settings.batch_size):
            serial.train(samples)
    slots = serial.most if settings.slots == "min" else serial.counts.sum(axis=1)
    return tuple(max(int(count), 1) for count in slots)


def _serial_pass(settings: CompileSettings, parent: Schedule | None, folder: Path) -> SerialPass:
    """A serial pass at its beginning: over an empty row table, or one with the parent's rows."""
    assign = assign_samples if settings.placement == "locality" else None
    serial = SerialPass(settings.features, settings.lanes, RowTable(settings.features, folder, settings.direct_rows), assign)
    if parent is not None:
        serial.table.load(parent.rows(), serial.counts)
    return serial


def _header(source: OrderedSource, settings: CompileSettings, slots: tuple[int, ...], parent: Schedule | None) -> Header:
    header = Header(
        version=FORMAT_VERSION,
        features=settings.features,
        batch_size=settings.batch_size,
        lanes=settings.lanes,
        slots=slots,
        epochs=settings.epochs,
        shuffle_seed=settings.shuffle_seed,
        training_samples=source.training_samples,
        evaluation_samples=source.evaluation_samples,
        first_step=0 if parent is None else parent.header.end_step,
        first_number=0 if parent is None else parent.header.first_number + parent.header.training_samples,
        parent=None if parent is None else parent.checksum,
        settings=settings.settings,
        placement=settings.placement,
    )
    if header.end_step >= 2**31 - 2:
        raise ScheduleError(f"steps: must be below 2^31, are {header.end_step}: use a larger --batch-size")
    return header


def _check_parent(settings: CompileSettings, parent: Schedule) -> None:
    """Raise ScheduleError unless the parent can be continued with these settings."""
    if parent.header.lanes != settings.lanes:
        raise ScheduleError(
            f"--lanes: must be the parent's {parent.header.lanes}, is {settings.lanes}: lanes cannot change along --after"
        )
    if parent.header.features != settings.features:
        raise ScheduleError(
            "features: must be the parent's: prepare with the same feature file, or start a new model without --after"
        )
    if parent.header.placement != settings.placement:
        raise ScheduleError(
            f"--placement: must be the parent's, {parent.header.placement}, is {settings.placement}: leave it out with --after"
        )


class Compiler:
    """Compiles one schedule into `out`.

    header: of the schedule; serial: a serial pass at its beginning; slices: where the first epoch's are kept, if later ones have the same.
    Making one reads and writes nothing; `run` does.
    """

    def __init__(
        self,
        source: OrderedSource,
        settings: CompileSettings,
        header: Header,
        serial: SerialPass,
        slices: KeptSlices | None,
        out: Path,
        progress: Callable[[int, int], None],
    ) -> None:
        self.source, self.settings, self.header, self.out, self.progress = source, settings, header, out, progress
        self.serial, self._slices = serial, slices
        self.oracle = Oracle(list(header.slots), serial.counts, self._ring(), mask_dtype(header.lanes), header.first_step)
        self.end = header.end_step
        self.writer = SegmentWriter(out, header)
        self.samples = SampleWriter(out, header, "samples", settings.segment_bytes)
        self.evaluation_samples = SampleWriter(out, header, "evaluation", settings.segment_bytes)
        self._incoming = self._training_steps()
        self._closed: deque[SampleFiles] = deque()  # segments whose samples are written, but not yet all of their moves
        self._first_epoch: list[SampleFiles] = []  # what later epochs in the same order refer to
        self._evaluation: list[SampleFiles] = []  # likewise, of the evaluation steps

    def _window(self) -> int:
        """Accesses that the window may hold, by the settings and by the bits that the row table has for their numbers (one is for excess)."""
        return min(self.settings.window_accesses, 1 << (ACCESS_BITS - 1))

    def _ring(self) -> int:
        """Accesses that the window has room for from the start, so that it does not grow as a rule."""
        all_of_them = self.source.training_samples * self.settings.epochs * len(self.settings.features.features)
        return 1 << max(min(self._window(), all_of_them) - 1, 1 << 10).bit_length()

    def _training_steps(self) -> Iterator[tuple[int, int, Samples, np.ndarray]]:
        for epoch in range(self.settings.epochs):
            for place, (samples, numbers) in enumerate(batches(self.source.training(epoch), self.settings.batch_size)):
                yield epoch, place, samples, numbers

    def _train(self, epoch: int, place: int, samples: Samples) -> Step:
        """A training step in the serial pass; in later epochs in the same order, with the first one's slices."""
        if self._slices is None:
            return self.serial.train(samples)
        if epoch > 0:
            return self.serial.train(samples, self._slices.order(place * self.settings.batch_size, len(samples)))
        step = self.serial.train(samples)
        self._slices.keep(step)
        return step

    def _advance(self) -> None:
        """One step of the serial pass: it is numbered, linked into the oracle's window, and its slices are written, in a shuffle's every epoch."""
        epoch, place, samples, numbers = next(self._incoming)
        step = self._train(epoch, place, samples)
        self.oracle.link(self.serial, step)
        last = place == self.header.steps_per_epoch - 1
        end = self.oracle.front  # of the steps that the serial pass has gone through
        if epoch == 0 or self.source.shuffled:
            self.samples.add(samples, numbers + self.header.first_number, self.serial, step)
            if last or self.samples.bytes >= self.settings.segment_bytes:
                files = self.samples.close(epoch, end)
                self._closed.append(files)
                self._first_epoch.append(files)
        else:
            shift = epoch * self.header.steps_per_epoch
            for files in self._first_epoch:
                if files.end + shift == end:
                    self._closed.append(replace(files, epoch=epoch, first=files.first + shift))

    def _look_ahead(self, steps: int) -> int:
        """Let the serial pass run far enough ahead for the next `steps` steps; returns how many of them may be planned.

        The last step that it has come to is not: who uses its rows next is told by the step after. Where the window is full the lookahead is shorter
        than wished, which the manifest tells, but for two steps, without which nothing could be planned.
        """
        planner = self.oracle
        while planner.front < self.end:
            ahead = planner.front - planner.step
            if ahead >= 2 and planner.pending() + self.serial.most.sum() > self._window():
                break
            if ahead >= steps + planner.lookahead():
                break
            self._advance()
        ahead = planner.front - planner.step
        return min(steps, ahead if planner.front == self.end else ahead - 1)

    def run(self) -> dict[str, Any]:
        """Write the whole schedule; returns its manifest."""
        write_sealed(self.out / HEADER, self.header.to_dict())
        workers = max(1, min(self.settings.threads, self.settings.lanes))
        with ThreadPoolExecutor(workers) as pool, self._slices or contextlib.nullcontext():
            for epoch in range(self.settings.epochs):
                epoch_end = self.header.first_step + (epoch + 1) * self.header.steps_per_epoch
                while self.oracle.step < epoch_end:
                    steps = self._look_ahead(min(CHUNK_STEPS, epoch_end - self.oracle.step))
                    if self._closed:
                        steps = min(steps, self._closed[0].end - self.oracle.step)
                    self._plan(pool, steps)
                    self.progress(self.oracle.step - self.header.first_step, self.end - self.header.first_step)
                self._evaluate(epoch)
        return self._finish()

    def _plan(self, pool: ThreadPoolExecutor, steps: int) -> None:
        """Plan so many steps of all lanes, none of which goes beyond the end of a segment's samples; publish the segment at its end."""
        rows = self.serial.table.rows
        if not self.oracle.lanes[0].buffer.events:
            self.writer.begin(self.oracle, rows)
        at_end = self.oracle.front == self.end
        tasks = [pool.submit(self.oracle.plan, rows, lane, steps, at_end) for lane in range(self.header.lanes)]
        try:
            for task in tasks:
                task.result()
        except TooFewSlots as error:
            for epoch, place, samples, _ in self._incoming:  # what the largest step needs is known once all were seen
                self._train(epoch, place, samples)
            most = int(self.serial.most.max())
            raise SlotsError(
                f"--slots: must hold every row of a step, is {self.settings.slots}: lane {error.lane} needs {error.rows} by step "
                f"{self.oracle.step + steps - 1}, and the largest step {most}: give --slots {most} or more, or a smaller --batch-size"
            ) from None
        self.oracle.advance(steps)
        if self._closed and self.oracle.step == self._closed[0].end:
            self.writer.train(self._closed.popleft(), [planner.buffer.take() for planner in self.oracle.lanes])

    def _evaluate(self, epoch: int) -> None:
        """Plan the evaluation steps after an epoch. The first time their samples are written, in segments that later epochs refer to."""
        rows = self.serial.table.rows
        buffers = [MoveBuffer(mask_dtype(self.header.lanes)) for _ in range(self.header.lanes)]
        evaluation_slots = [0] * len(buffers)
        segment = 0  # of this epoch
        end = epoch * -(-self.header.evaluation_samples // self.settings.batch_size)  # of the evaluation steps planned
        for samples, numbers in batches(self.source.evaluation(), self.settings.batch_size):
            if not buffers[0].events:
                self.writer.begin(self.oracle, rows)
            step = self.serial.look_up(samples)
            if epoch == 0:
                self.evaluation_samples.add(samples, numbers, self.serial, step)
            self._plan_evaluation(buffers, evaluation_slots)
            end += 1
            if epoch == 0 and self.evaluation_samples.bytes >= self.settings.segment_bytes:
                self._evaluation.append(self.evaluation_samples.close(epoch, end))
            if segment < len(self._evaluation) and buffers[0].events == len(self._evaluation[segment].samples):
                self._end_evaluation(epoch, end, segment, buffers, evaluation_slots)
                evaluation_slots, segment = [0] * len(buffers), segment + 1
        if buffers[0].events:
            self._evaluation.append(self.evaluation_samples.close(epoch, end))
            self._end_evaluation(epoch, end, segment, buffers, evaluation_slots)

    def _plan_evaluation(self, buffers: list[MoveBuffer], evaluation_slots: list[int]) -> None:
        """Plan the evaluation step that the serial pass has just looked up, lane by lane, each into its buffer."""
        serial, start = self.serial, 0
        for lane, (buffer, owned) in enumerate(zip(buffers, serial.owned.tolist(), strict=True)):
            counts = buffer.room(1, owned)
            own_rows = serial.scratch.order[start : start + owned]
            first_slot = self.header.slots[lane]
            oracle.plan_evaluation(serial.table.rows, own_rows, serial.scratch, first_slot, buffer.fill, buffer.moves, counts[0])
            evaluation_slots[lane] = max(evaluation_slots[lane], int(counts[0, window.ARRIVALS]))
            start += owned

    def _end_evaluation(self, epoch: int, end: int, segment: int, buffers: list[MoveBuffer], slots: list[int]) -> None:
        files = replace(self._evaluation[segment], epoch=epoch, first=end - buffers[0].events)
        self.writer.evaluate(files, [buffer.take() for buffer in buffers], slots)

    def _finish(self) -> dict[str, Any]:
        """Write the row table and the manifest, which makes the schedule whole."""
        window.end_residencies(self.serial.table.rows, self.oracle.parts)
        lanes = self.oracle.lanes
        totals = {name: sum(planner.totals[name] for planner in lanes) for name in lanes[0].totals}
        occupied = [self.oracle.occupied(lane) for lane in range(len(lanes))]
        lookahead_ratio = min(planner.lookahead_ratio for planner in lanes)
        manifest = {
            "version": FORMAT_VERSION,
            "header": self.writer.header_checksum(),
            "segments": self.writer.checksums,
            "evaluation_slots": [int(n) for n in self.writer.evaluation_slots],
            "occupied": occupied,
            "minimum_slots": [int(n) for n in self.serial.most],
            "end_step": self.end,
            "counts": {
                "training_samples": self.header.training_samples * self.settings.epochs,
                "training_steps": self.end - self.header.first_step,
                "evaluation_samples": self.header.evaluation_samples,
                "rows_used": totals["used"],
                "arrivals": totals["arrivals"],
                "initial": totals["initial"],
                "stored": totals["arrivals"] - totals["initial"],
                "write_backs": totals["ends"] + sum(occupied),
            },
            # The least lookahead that a decision to end a residency had, in units of slots / arrivals per step; None: all of the future.
            "lookahead": {
                "cover": None if lookahead_ratio == float("inf") else lookahead_ratio,
                "bound": 3,
                "exact": lookahead_ratio >= 3,
            },
            "rows": write_row_table(self.out, self.serial.table),
        }
        write_sealed(self.out / MANIFEST, manifest)
        return manifest


def compile_schedule(
    source: OrderedSource,
    settings: CompileSettings,
    out: Path,
    work: Path,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Compile `source` into the folder `out`; returns the manifest (docs/schedule.md).

    work: a folder for scratch files. Raises SlotsError where a step does not fit the slots, ScheduleError where the parent cannot be continued,
    DiskError where the disk is full, or refuses to be written. `failed.json` then says so, and so it does of any other error, which is raised as it
    is; what was published stays valid, and there is no schedule.json.
    """
    try:
        parent = None if settings.parent is None else Schedule(settings.parent)
        if parent is not None:
            _check_parent(settings, parent)
        header = _header(source, settings, resolve_slots(source, settings, parent, work / "counting"), parent)
        serial = _serial_pass(settings, parent, work / "rows")
        again = settings.epochs > 1 and not source.shuffled
        slices = KeptSlices(work / "slices") if again and settings.lanes > 1 and settings.placement == "locality" else None
        return Compiler(source, settings, header, serial, slices, out, progress).run()
    except BaseException as error:
        told = disk_error(error, out)
        message = str(told or error) or type(error).__name__
        with contextlib.suppress(OSError):  # the disk may be full for this too; without schedule.json nobody takes it for whole
            write_json(out / FAILED, {"error": message})
        if told is not None:
            raise told from error
        raise
