"""Compile ordered samples into a schedule: with all of the future known (`exact`), or through a window as the data is read (`windowed`).

The result is a function of the samples and the settings alone: neither threads nor timing change a byte of it.
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

_ACCESSES, _NEXT_USES, _ROWS = "accesses", "next-uses", "rows"  # folders


@dataclass(frozen=True, slots=True)
class CompileSettings:
    """What a schedule is a function of, besides its samples.

    slots: per lane; a number, "min" (the rows of the largest step) or "all" (no row ever leaves). segment_bytes: bound on a segment's sample
    files. window_accesses: bound on the distinct rows per step, summed over the lookahead; None: all of the future is known. parent: the schedule to
    continue. placement: of a step's samples in its slices (docs/definitions.md). direct_rows: tables of up to so many rows are addressed directly
    (RowTable); None: by how many samples there are. threads: that plan lanes at once. settings: kept in the header as they are.
    slots_at_most: the number of slots is what there is room for; not more are given than there can be rows. eval_every: steps of an epoch between
    evaluation passes amid it; None: there are none. again: the samples are the parent's. evaluation_sets: the names of the sets that the evaluation
    samples are; empty: one without a name.
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
        """The number of the first training sample."""
        if parent is None:
            return 0
        return parent.header.first_number + (0 if self.again else parent.header.training_samples)

    def first_epoch(self, parent: Schedule | None) -> int:
        """The number of the first epoch of these samples."""
        return parent.header.first_epoch + parent.header.epochs if parent is not None and self.again else 0

    @property
    def slots_wanted(self) -> SlotsWanted:
        """What a lane's slots follow from."""
        return SlotsWanted(self.slots, self.slots_at_most)


def _serial_pass(settings: CompileSettings, parent: Schedule | None, folder: Path, samples: int) -> SerialPass:
    """A serial pass over so many samples at its beginning: over an empty row table, or one with the parent's rows."""
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
    """The header but for its slots and its numbers of samples, those of evaluation sets too."""
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


class Compilation:
    """Of ordered samples into a schedule in the folder `out`: `compile` does all of it in this process. Where all of the future is known, `read`,
    `plan_all` and `publish` do that in turn, and workers that see the same disk may do it.

    Raises SlotsError where a step does not fit the slots, ScheduleError where the parent cannot be continued, DiskError where the disk is full, or
    refuses to be written. `failed.json` then says so, and so it does of any other error, which is raised as it is; what was published stays valid,
    and there is no schedule.json.
    """

    def __init__(self, settings: CompileSettings, out: Path) -> None:
        self.settings, self._out = settings, out

    def compile(self, source: OrderedSource, work: Path, progress: Progress = lambda done, total: None) -> ScheduleManifest:
        """Compile `source`; returns the manifest (docs/schedule.md). work: a folder for scratch files."""
        threads = max(1, min(self.settings.threads, self.settings.lanes))
        if self.settings.window_accesses is not None:
            return self._through_window(source, work, threads, progress)
        settings = self.settings
        counted = Counted.of(settings, source, lambda done, steps, work: progress(done * steps // work, steps))
        program = self.read(source, work, counted.read)
        plans = self.plan_all(program, range(settings.lanes), work, work, threads, counted.planned)
        return self.publish(program, plans)

    def read(self, source: OrderedSource, folder: Path, progress: Callable[[], object] = lambda: None) -> Program:
        """Go over all samples: see `exact.Reading`. folder: for what the lanes' plans need."""
        slots, segment_bytes = self.settings.slots_wanted, self.settings.segment_bytes
        with self._failure_recorded():
            header, serial = self._begin(source, folder)
            epochs = header.epochs if source.shuffled else 1
            reader = SerialReader(source, header, serial, epochs, segment_bytes, self._out, folder)
            program = exact.Reading(reader, header, self._out, folder / _ACCESSES).read(slots, progress)
            del serial, reader
            shutil.rmtree(folder / _ROWS)  # where the row table did not fit in memory it may be large
            return program

    def plan_all(
        self, program: Program, lanes: Iterable[int], folder: Path, scratch: Path, threads: int, progress: Callable[[int], object]
    ) -> list[LanePlan]:
        """Plan lanes in threads: see `exact.plan_lane`. folder: that of `read`. Where one fails, or it is stopped, the others end within a
        segment.
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
        """Write the header and all manifests, the schedule's last; returns that."""
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
                raise ValueError(f"slots: must be a number where a window is given, is {settings.slots}")
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
        """Where it fails, `failed.json` says so, unless the failure is that of its source."""
        try:
            yield
        except Abandoned:
            raise
        except BaseException as error:
            failure = disk_error(error, self._out)
            message = str(failure or error) or type(error).__name__
            # The disk may be full for this too; without schedule.json nobody takes it for whole.
            with contextlib.suppress(OSError):
                write_json(self._out / FAILED, {"error": message})
            if failure is not None:
                raise failure from error
            raise


class Counted:
    """How far reading and planning are. epochs: of so many steps; on_progress: called with the work done, in steps of a lane that are read or
    planned, the steps of the schedule, and the work in all. Several threads plan.
    """

    def __init__(
        self, steps: int, epochs: int, lanes: int, shuffled: bool, on_progress: Callable[[int, int, int], object]
    ) -> None:
        self._steps, self._lanes, self._on_progress = steps * epochs, lanes, on_progress
        self._work = lanes * (self._steps + (self._steps if shuffled else steps))
        self._done = 0
        self._lock = Lock()

    @classmethod
    def of(cls, settings: CompileSettings, source: OrderedSource, on_progress: Callable[[int, int, int], object]) -> Counted:
        """As the schedule of a source will have it, about."""
        steps = -(-source.expected_samples // settings.batch_size)
        return cls(steps, settings.epochs, settings.lanes, source.shuffled, on_progress)

    def read(self) -> None:
        """A step was read."""
        self._add(self._lanes)

    def planned(self, steps: int) -> None:
        """So many steps of a lane were planned."""
        self._add(steps)

    def _add(self, done: int) -> None:
        with self._lock:
            self._done += done
            self._on_progress(self._done, self._steps, self._work)
