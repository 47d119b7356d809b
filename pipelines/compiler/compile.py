"""Compile ordered samples into a schedule: the serial pass, the lanes' oracles behind it, and the segments as they are complete.

The serial pass runs ahead of the oracles by the lookahead; what is held in memory is that window, two segments being written, and arrays over
slots. The result is a function of the samples and the settings alone: neither threads nor timing change a byte of it.
"""

from __future__ import annotations

import contextlib
import errno
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from foreload.pipelines.base.files import write_json, write_sealed
from foreload.pipelines.compiler import oracle, window
from foreload.pipelines.compiler.kept_slices import KeptSlices
from foreload.pipelines.compiler.lane_oracle import MoveBuffer, Oracle, TooFewSlots
from foreload.pipelines.compiler.locality import assign_samples
from foreload.pipelines.compiler.row_table import ACCESS_BITS, DIRECT_ROWS, RowTable
from foreload.pipelines.compiler.segments import SampleWriter, SegmentWriter, write_row_table
from foreload.pipelines.compiler.serial_pass import SerialPass, Step
from foreload.pipelines.errors import (
    DiskError,
    ScheduleError,
    SlotsError,
)
from foreload.pipelines.samples.external_sort import OrderedSource
from foreload.pipelines.samples.features import FeatureSpec
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
    a step's samples in its slices (docs/definitions.md).
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


def _serial_pass(settings: CompileSettings, folder: Path) -> SerialPass:
    assign = assign_samples if settings.placement == "locality" else None
    return SerialPass(settings.features, settings.lanes, RowTable(settings.features, folder, settings.direct_rows), assign)


def _count_slots(source: OrderedSource, settings: CompileSettings, work: Path) -> tuple[np.ndarray, np.ndarray]:
    """What a first pass over the data finds per lane: rows of the largest step, and rows ever trained."""
    serial = _serial_pass(settings, work / "counting")
    if settings.parent is not None:
        serial.table.load(Schedule(settings.parent).rows(), serial.counts)
    for epoch in range(settings.epochs if source.shuffled else 1):
        for samples, _ in batches(source.training(epoch), settings.batch_size):
            serial.train(samples)
    return serial.most, serial.counts.sum(axis=1)


class Compiler:
    """Compiles one schedule into `out`, with scratch files in `work`."""

    def __init__(
        self, source: OrderedSource, settings: CompileSettings, out: Path, work: Path, progress: Callable[[int, int], None]
    ) -> None:
        self.source, self.settings, self.out, self.progress = source, settings, out, progress
        parent = None if settings.parent is None else Schedule(settings.parent)
        if isinstance(settings.slots, int):
            slots = [settings.slots] * settings.lanes
        else:
            most, trained = _count_slots(source, settings, work)
            slots = [max(int(n), 1) for n in (most if settings.slots == "min" else trained)]
        self.header = Header(
            version=FORMAT_VERSION,
            features=settings.features,
            batch_size=settings.batch_size,
            lanes=settings.lanes,
            slots=tuple(slots),
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
        if self.header.end_step >= 2**31 - 2:
            raise ScheduleError(f"steps: must be below 2^31, are {self.header.end_step}: use a larger --batch-size")
        self.serial = _serial_pass(settings, work / "rows")
        if parent is not None:
            self._check_parent(parent)
            self.serial.table.load(parent.rows(), self.serial.counts)
        self.oracle = Oracle(slots, self.serial.counts, self._ring(), mask_dtype(settings.lanes), self.header.first_step)
        self.end = self.header.end_step
        self._incoming = self._training_steps()
        self._closed: deque[dict[str, Any]] = deque()  # train segments that the serial pass has completed
        self._first_epoch: list[dict[str, Any]] = []  # what later epochs in the same order refer to
        self._evaluation: list[dict[str, Any]] = []
        self.writer = SegmentWriter(out, self.header)
        self.samples = SampleWriter(out, self.header, "samples", settings.segment_bytes)
        self.evaluation_samples = SampleWriter(out, self.header, "evaluation", settings.segment_bytes)
        again = settings.epochs > 1 and not source.shuffled
        self._slices = KeptSlices(work / "slices") if again and settings.lanes > 1 and settings.placement == "locality" else None

    def _window(self) -> int:
        """Accesses that the window may hold, by the settings and by the bits that the row table has for their numbers (one is for excess)."""
        return min(self.settings.window_accesses, 1 << (ACCESS_BITS - 1))

    def _ring(self) -> int:
        """Accesses that the window has room for from the start, so that it does not grow as a rule."""
        all_of_them = self.source.training_samples * self.settings.epochs * len(self.settings.features.features)
        return 1 << max(min(self._window(), all_of_them) - 1, 1 << 10).bit_length()

    def _check_parent(self, parent: Schedule) -> None:
        if parent.header.lanes != self.settings.lanes:
            raise ScheduleError(
                f"--lanes: must be the parent's {parent.header.lanes}, is {self.settings.lanes}: lanes cannot change along --after"
            )
        if parent.header.features != self.settings.features:
            raise ScheduleError(
                "features: must be the parent's: prepare with the same feature file, or start a new model without --after"
            )
        if parent.header.placement != self.settings.placement:
            raise ScheduleError(
                f"--placement: must be the parent's, {parent.header.placement}, is {self.settings.placement}: leave it out with --after"
            )

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
        """One step of the serial pass."""
        epoch, place, samples, numbers = next(self._incoming)
        step = self._train(epoch, place, samples)
        self.oracle.link(self.serial, step)
        last = place == self.header.steps_per_epoch - 1
        if epoch == 0 or self.source.shuffled:
            self.samples.add(samples, numbers + self.header.first_number, self.serial, step)
            if last or self.samples.bytes >= self.settings.segment_bytes:
                part = {"epoch": epoch, "first": self.oracle.front - self.samples.events, **self.samples.close()}
                self._closed.append(part)
                self._first_epoch.append(part)
        else:
            shift = epoch * self.header.steps_per_epoch
            for part in self._first_epoch:
                if part["first"] + shift + len(part["samples"]) == self.oracle.front:
                    self._closed.append({**part, "epoch": epoch, "first": part["first"] + shift})

    def _look_ahead(self, steps: int) -> int:
        """Let the serial pass run far enough ahead for the next `steps` steps; returns how many of them may be planned."""
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
                        steps = min(steps, self._closed[0]["first"] + len(self._closed[0]["samples"]) - self.oracle.step)
                    self._plan(pool, steps)
                    self.progress(self.oracle.step - self.header.first_step, self.end - self.header.first_step)
                self._evaluate(epoch)
        return self._finish()

    def _plan(self, pool: ThreadPoolExecutor, steps: int) -> None:
        rows = self.serial.table.rows
        if not self.oracle.lanes[0].buffer.events:
            self.writer.begin(self.oracle, rows)
        at_end = self.oracle.front == self.end
        tasks = [pool.submit(self.oracle.plan, rows, lane, steps, at_end) for lane in range(self.header.lanes)]
        try:
            for task in tasks:
                task.result()
        except TooFewSlots as error:
            for epoch, place, samples, _ in self._incoming:
                self._train(epoch, place, samples)
            most = int(self.serial.most.max())
            raise SlotsError(
                f"--slots: must hold every row of a step, is {self.settings.slots}: lane {error.lane} needs {error.rows} by step "
                f"{self.oracle.step + steps - 1}, and the largest step {most}: give --slots {most} or more, or a smaller --batch-size"
            ) from None
        self.oracle.advance(steps)
        if self._closed and self.oracle.step == self._closed[0]["first"] + len(self._closed[0]["samples"]):
            self.writer.train(self._closed.popleft(), [planner.buffer.take() for planner in self.oracle.lanes])

    def _evaluate(self, epoch: int) -> None:
        rows = self.serial.table.rows
        buffers = [MoveBuffer(mask_dtype(self.header.lanes)) for _ in range(self.header.lanes)]
        evaluation_slots = [0] * len(buffers)
        k = first = 0
        for samples, numbers in batches(self.source.evaluation(), self.settings.batch_size):
            if not buffers[0].events:
                self.writer.begin(self.oracle, rows)
            step = self.serial.look_up(samples)
            if epoch == 0:
                self.evaluation_samples.add(samples, numbers, self.serial, step)
            start = 0
            for lane, (buffer, owned) in enumerate(zip(buffers, self.serial.owned.tolist(), strict=True)):
                counts = buffer.room(1, owned)
                mine = self.serial.scratch.order[start : start + owned]
                slot = self.header.slots[lane]
                oracle.plan_evaluation(rows, mine, self.serial.scratch, slot, buffer.fill, buffer.moves, counts[0])
                evaluation_slots[lane] = max(evaluation_slots[lane], int(counts[0, window.ARRIVALS]))
                start += owned
            first += 1
            if epoch == 0 and self.evaluation_samples.bytes >= self.settings.segment_bytes:
                self._evaluation.append(self.evaluation_samples.close())
            if k < len(self._evaluation) and buffers[0].events == len(self._evaluation[k]["samples"]):
                self._end_evaluation(epoch, first, k, buffers, evaluation_slots)
                evaluation_slots, k = [0] * len(buffers), k + 1
        if buffers[0].events:
            self._evaluation.append(self.evaluation_samples.close())
            self._end_evaluation(epoch, first, k, buffers, evaluation_slots)

    def _end_evaluation(self, epoch: int, first: int, k: int, buffers: list[MoveBuffer], slots: list[int]) -> None:
        steps = -(-self.header.evaluation_samples // self.settings.batch_size)
        place = {"epoch": epoch, "first": epoch * steps + first - buffers[0].events}
        self.writer.evaluate({**self._evaluation[k], **place}, [buffer.take() for buffer in buffers], slots)

    def _finish(self) -> dict[str, Any]:
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

    work: a folder for scratch files. Raises SlotsError where a step does not fit the slots, DiskError where the disk is full; `failed.json`
    then says so, what was published stays valid, and there is no schedule.json.
    """
    try:
        return Compiler(source, settings, out, work, progress).run()
    except BaseException as error:
        message = str(error) or type(error).__name__
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            message = f"--out {out}: the disk is full: free space or choose another folder"
        with contextlib.suppress(OSError):  # the disk may be full for this too; without schedule.json nobody takes it for whole
            write_json(out / FAILED, {"error": message})
        if isinstance(error, OSError | pa.ArrowException):
            raise DiskError(message) from error
        raise
