"""Compile ordered samples into a schedule.

Either all of the future is known (`exact`), or the compiler sees it through a window as the data is
read (`windowed`). The result is a function of the samples and the settings alone: neither threads
nor timing change a byte of it.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event, Lock
from typing import Any, Literal

from foreload.base.files import write_json
from foreload.pipelines.compiler import exact
from foreload.pipelines.compiler.exact import LanePlan, Program
from foreload.pipelines.compiler.locality import assign_samples
from foreload.pipelines.compiler.row_table import RowTable, direct_rows
from foreload.pipelines.compiler.segments import Progress, SlotsWanted, counted
from foreload.pipelines.compiler.serial_pass import SerialPass
from foreload.pipelines.compiler.serial_reader import SerialReader
from foreload.pipelines.compiler.windowed import WindowedCompiler
from foreload.pipelines.errors import ScheduleError, disk_error
from foreload.pipelines.samples.features import FeatureSpec
from foreload.pipelines.samples.pieces import Abandoned, OrderedSource
from foreload.pipelines.schedule.format import FAILED, Header, SampleAssignment, ScheduleManifest
from foreload.pipelines.schedule.reader import Schedule

_ACCESSES, _NEXT_USES, _ROWS = "accesses", "next-uses", "rows"  # folders within the work folder


@dataclass(frozen=True, slots=True)
class CompileSettings:
    """All that a schedule is a function of, besides its samples.

    Attributes:
        batch_size: Samples in a step, over all lanes.
        slots: Slots for each lane: a number, "min" (the rows of the largest step) or "all" (no row
            ever leaves).
        shuffle_seed: If None, epochs are not shuffled.
        segment_bytes: The bound on a segment's sample files.
        window_accesses: The bound on the distinct rows of each step, summed over the lookahead. If
            None, all of the future is known.
        parent: The schedule to continue, if any.
        placement: How a step's samples are placed in its slices (docs/definitions.md).
        direct_rows: Tables of at most this many rows are addressed directly (RowTable). If None,
            the number of samples decides.
        threads: How many lanes are planned at once.
        settings: Kept in the header as they are.
        slots_at_most: Whether the number of slots is an upper limit. If so, a lane gets no more
            slots than there can be rows.
        eval_every: Steps of an epoch between evaluation passes during the epoch. If None, no pass
            lies within an epoch.
        again: Whether the samples are the parent's.
        evaluation_sets: The names of the sets of evaluation samples. Empty for one set without a
            name.
    """

    features: FeatureSpec
    batch_size: int
    lanes: int
    slots: int | Literal["min", "all"]
    epochs: int = 1
    shuffle_seed: int | None = None
    segment_bytes: int = 64 << 20
    window_accesses: int | None = None
    parent: Path | None = None
    placement: SampleAssignment = "locality"
    direct_rows: int | None = None
    threads: int = 1
    settings: dict[str, Any] = field(default_factory=dict)
    slots_at_most: bool = False
    eval_every: int | None = None
    again: bool = False
    evaluation_sets: tuple[str, ...] = ()

    def first_number(self, parent: Schedule | None) -> int:
        """Return the number of the first training sample."""
        if parent is None:
            return 0
        return parent.header.first_number + (0 if self.again else parent.header.training_samples)

    def first_epoch(self, parent: Schedule | None) -> int:
        """Return the number of the first epoch of these samples."""
        return parent.header.first_epoch + parent.header.epochs if parent is not None and self.again else 0

    @property
    def slots_wanted(self) -> SlotsWanted:
        """The settings that a lane's number of slots follows from."""
        return SlotsWanted(self.slots, self.slots_at_most)


def _serial_pass(settings: CompileSettings, parent: Schedule | None, folder: Path, samples: int) -> SerialPass:
    """Create a serial pass over about `samples` samples, at its beginning.

    Its row table holds the rows of the parent, if there is one.
    """
    assign = assign_samples if settings.placement == "locality" else None
    first_step = 0 if parent is None else parent.header.end_step
    direct = settings.direct_rows
    if direct is None:
        direct = direct_rows(samples + (0 if parent is None else parent.manifest["rows"]["rows"]))
    serial = SerialPass(settings.features, settings.lanes, RowTable(settings.features, folder, direct), assign, first_step)
    if parent is not None:
        serial.table.load(parent.rows(), serial.counts)
    return serial


def _header(settings: CompileSettings, parent: Schedule | None) -> Header:
    """Return the header without slots and numbers of samples, also of evaluation sets."""
    return Header(
        version=settings.features.rule,
        features=settings.features,
        batch_size=settings.batch_size,
        lanes=settings.lanes,
        slots=(0,) * settings.lanes,
        epochs=settings.epochs,
        shuffle_seed=settings.shuffle_seed,
        training_samples=0,
        evaluation_samples=0,
        first_step=0 if parent is None else parent.header.end_step,
        first_number=settings.first_number(parent),
        parent=None if parent is None else parent.checksum,
        settings=settings.settings,
        placement=settings.placement,
        eval_every=settings.eval_every,
        first_epoch=settings.first_epoch(parent),
        evaluation_sets=tuple((name, 0) for name in settings.evaluation_sets),
    )


def _check_parent(settings: CompileSettings, parent: Schedule) -> None:
    """Raise ScheduleError unless the parent can be continued with these settings."""
    if parent.header.lanes != settings.lanes:
        raise ScheduleError(
            f"--lanes: must be {parent.header.lanes}, as in the schedule of --after; got {settings.lanes}; leave it out"
        )
    if parent.header.features != settings.features:
        raise ScheduleError(
            "features: must be those of the schedule of --after; prepare with the same feature file, or start a new model without --after"
        )
    if parent.header.placement != settings.placement:
        raise ScheduleError(
            f"--placement: must be {parent.header.placement}, as in the schedule of --after; got {settings.placement}; leave it out"
        )


class Compilation:
    """Compiles ordered samples into a schedule in the folder `out`.

    `compile` does all of it in this process. If all of the future is known, `read`, `plan_all` and
    `publish` do the same in turn, and workers that see the same disk may run them.

    All of them raise SlotsError if a step does not fit the slots, ScheduleError if the parent
    cannot be continued, and DiskError if the disk is full or refuses a write. Then `failed.json`
    records the failure. It also records any other error, which is raised unchanged. Segments
    already published stay valid, and schedule.json does not exist.
    """

    def __init__(self, settings: CompileSettings, out: Path) -> None:
        self.settings, self._out = settings, out

    def compile(self, source: OrderedSource, work: Path, progress: Progress = lambda done, total: None) -> ScheduleManifest:
        """Compile `source` in this process.

        Args:
            source: The samples.
            work: A folder for scratch files.
            progress: Called with the number of training steps compiled so far, and their total
                number.

        Returns:
            The schedule's manifest (docs/schedule.md).
        """
        threads = max(1, min(self.settings.threads, self.settings.lanes))
        if self.settings.window_accesses is not None:
            return self._through_window(source, work, threads, progress)
        settings = self.settings
        counted = Counted.of(settings, source, lambda done, steps, work: progress(done * steps // work, steps))
        program = self.read(source, work, counted.read)
        plans = self.plan_all(program, range(settings.lanes), work, work, threads, counted.planned)
        return self.publish(program, plans)

    def read(self, source: OrderedSource, folder: Path, progress: Callable[[], object] = lambda: None) -> Program:
        """Go over all samples; see `exact.Reading`.

        Args:
            source: The samples.
            folder: For the files that the planning of lanes needs.
            progress: Called after every training step.
        """
        slots, segment_bytes = self.settings.slots_wanted, self.settings.segment_bytes
        with self._failure_recorded():
            header, serial = self._begin(source, folder)
            epochs = header.epochs if source.shuffled else 1
            reader = SerialReader(source, header, serial, epochs, segment_bytes, self._out, folder)
            program = exact.Reading(reader, header, self._out, folder / _ACCESSES).read(slots, progress)
            # Drop the row table before its folder is deleted. If it did not fit in memory, its
            # files may be large.
            del serial, reader
            shutil.rmtree(folder / _ROWS)
            return program

    def plan_all(
        self, program: Program, lanes: Iterable[int], folder: Path, scratch: Path, threads: int, progress: Callable[[int], object]
    ) -> list[LanePlan]:
        """Plan lanes in threads; see `exact.plan_lane`.

        If one lane fails or the call is interrupted, the other lanes stop within a segment.

        Args:
            program: The result of `read`.
            lanes: The lanes to plan.
            folder: The folder of `read`.
            scratch: A folder for scratch files.
            threads: How many lanes are planned at once.
            progress: Called with the number of steps planned since the last call, from several
                threads.
        """
        ended = Event()

        def plan(lane: int) -> LanePlan:
            def note(steps: int) -> None:
                if ended.is_set():
                    raise CancelledError
                progress(steps)

            return exact.plan_lane(program, lane, self._out, folder / _ACCESSES, scratch / _NEXT_USES, note)

        with self._failure_recorded(), ThreadPoolExecutor(threads) as pool:
            tasks = [pool.submit(plan, lane) for lane in lanes]
            try:
                for task in as_completed(tasks):
                    task.result()
            except BaseException:
                ended.set()
                raise
            return [task.result() for task in tasks]

    def publish(self, program: Program, plans: Sequence[LanePlan]) -> ScheduleManifest:
        """Write the header and all manifests, and return the schedule's, which is written last."""
        with self._failure_recorded():
            return exact.publish(program, plans, self._out)

    def _through_window(self, source: OrderedSource, work: Path, threads: int, progress: Progress) -> ScheduleManifest:
        settings = self.settings
        assert settings.window_accesses is not None
        with self._failure_recorded():
            header, serial = self._begin(source, work)
            header = counted(header, source)
            slots = settings.slots_wanted.number(header)
            if slots is None:
                raise ValueError(f"slots: must be a number if a window is given; got {settings.slots}")
            header = replace(header, slots=(slots,) * settings.lanes)
            reader = SerialReader(source, header, serial, settings.epochs, settings.segment_bytes, self._out, work)
            windowed = WindowedCompiler(reader, header, settings.window_accesses, self._out, work / _ACCESSES)
            return windowed.run(threads, progress)

    def _begin(self, source: OrderedSource, folder: Path) -> tuple[Header, SerialPass]:
        parent = None if self.settings.parent is None else Schedule(self.settings.parent)
        if parent is not None:
            _check_parent(self.settings, parent)
        serial = _serial_pass(self.settings, parent, folder / _ROWS, source.expected_samples)
        return _header(self.settings, parent), serial

    @contextlib.contextmanager
    def _failure_recorded(self) -> Iterator[None]:
        """Write `failed.json` if the body fails, unless its source failed (Abandoned)."""
        try:
            yield
        except Abandoned:
            raise
        except BaseException as error:
            failure = disk_error(error, self._out)
            message = str(failure or error) or type(error).__name__
            # A full disk may refuse this write, too. That is safe: without schedule.json the
            # schedule counts as unfinished.
            with contextlib.suppress(OSError):
                write_json(self._out / FAILED, {"error": message})
            if failure is not None:
                raise failure from error
            raise


class Counted:
    """Counts the progress of reading and planning. Thread-safe, because several threads plan."""

    def __init__(
        self, steps: int, epochs: int, lanes: int, shuffled: bool, on_progress: Callable[[int, int, int], object]
    ) -> None:
        """Start at 0.

        Args:
            steps: The steps of an epoch.
            shuffled: Whether each epoch has an order of its own, so that all epochs are read.
            on_progress: Called with the work done, the steps of the schedule, and the total work.
                Work is counted in steps of a lane that are read or planned.
        """
        self._steps, self._lanes, self._on_progress = steps * epochs, lanes, on_progress
        self._work = lanes * (self._steps + (self._steps if shuffled else steps))
        self._done = 0
        self._lock = Lock()

    @classmethod
    def of(cls, settings: CompileSettings, source: OrderedSource, on_progress: Callable[[int, int, int], object]) -> Counted:
        """Return a counter for the schedule of a source, by its expected number of samples."""
        steps = -(-source.expected_samples // settings.batch_size)
        return cls(steps, settings.epochs, settings.lanes, source.shuffled, on_progress)

    def read(self) -> None:
        """Count a step that was read."""
        self._add(self._lanes)

    def planned(self, steps: int) -> None:
        """Count steps of a lane that were planned."""
        self._add(steps)

    def _add(self, done: int) -> None:
        with self._lock:
            self._done += done
            self._on_progress(self._done, self._steps, self._work)
