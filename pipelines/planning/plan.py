"""The plan of one `prepare`, which every worker has.

It holds the settings, the sources with their splits, and the evaluation sets. This module does not
depend on Beam.
"""

from __future__ import annotations

import dataclasses
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from foreload.base.errors import ForeloadError, SettingError, error_of
from foreload.base.files import read_json, write_json
from foreload.pipelines.compiler.compile import CompileSettings
from foreload.pipelines.errors import ScheduleError, SourceError
from foreload.pipelines.planning.options import PrepareOptions, feature_spec
from foreload.pipelines.planning.sizing import (
    DEFAULT_DIMENSION,
    columns_of,
    default_columns,
    lane_bytes,
    slots_of_size,
    stored_bytes,
)
from foreload.pipelines.samples import encoding_state
from foreload.pipelines.samples.features import ENCODING_FOLDER, FeatureSpec
from foreload.pipelines.schedule.format import SET_NAME, WORK
from foreload.pipelines.schedule.kept import POSITION
from foreload.pipelines.schedule.reader import Schedule
from foreload.pipelines.sources import (
    PIECE_ROWS,
    Source,
    Split,
    plan_splits,
)
from foreload.pipelines.sources.files import match_files
from foreload.pipelines.sources.splits import Format

_FLAG = "--eval-source"


def evaluation_sets(sources: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the sources of each evaluation set by its name, in the order of first mention.

    The sources of a set without a name are under "". If a path may itself contain a "=", this looks
    for files.

    Raises:
        SettingError: If a source is ambiguous, or if some sources have a name and others have none.
    """
    of_sets: dict[str, tuple[str, ...]] = {}
    for source in sources:
        name, path = split_name(source)
        of_sets[name] = (*of_sets.get(name, ()), path)
    if "" in of_sets and len(of_sets) > 1:
        raise SettingError(
            f"{_FLAG}: must all have names, NAME=SOURCE, or none; {of_sets[''][0]} has none, but set {next(filter(None, of_sets))} has; "
            "name all of them, or none"
        )
    return of_sets


def split_name(source: str) -> tuple[str, str]:
    """Split an evaluation source into the set's name, "" for none, and the path or glob.

    Raises:
        SettingError: If files exist both for the whole text and for the text without the name.
    """
    match = re.fullmatch(rf"({SET_NAME})=(.+)", source, re.DOTALL)
    if match is None or not _is_there(source):
        return ("", source) if match is None else (match[1], match[2])
    if _is_there(match[2]):
        raise SettingError(
            f"{_FLAG}: must not be ambiguous; there is a file {source}, and also {match[2]} for set {match[1]}; give ./{source} for the "
            f"former, {match[1]}=./{match[2]} for the latter"
        )
    return "", source


def _is_there(pattern: str) -> bool:
    try:
        return bool(match_files([pattern]))
    except SourceError:
        return False


FAILURES, ORDER_FILES, PIECES, REJECTS, WRITTEN = "failures", "orders", "pieces", "rejects", "schedule"
PROGRESS, BEGUN = "progress", "begun"
"""The folder, within the work folder, in which each worker has a file that reports its progress.

The file holds, as text, the work that the worker has done, the schedule's steps, and all work.
"""

FOLDERS = (FAILURES, ORDER_FILES, PIECES, REJECTS, PROGRESS, WRITTEN)

RESERVE = "reserve"
"""A file in the work folder that keeps disk space for recording a failure."""

RESERVE_BYTES = 1 << 16


_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class _Failure:
    """An error that the user or the disk caused."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What every worker knows: the settings and the paths.

    The command creates the plan. It is pickled, and is the same in every process.

    Attributes:
        out: The schedule's folder.
        spec: The features as the sources are read. They lack the sizes of vocabularies, unless a
            parent schedule gave them.
        settings: The settings of the compiler. Their features are valid only if there is a parent.
        evaluation_only: Whether there are no training samples.
        evaluation_fraction: The part of the training sources that is held out.
        max_rejects: How many malformed records to leave out before giving up.
        piece_rows: About how many samples a piece has that a sort writes.
        counted: Whether vocabularies or scales have to be computed from the data.
        first_number: The number of the first training sample.
        first_epoch: As in Header.
        token: Identifies this call of the command.
    """

    out: Path
    spec: FeatureSpec
    settings: CompileSettings
    evaluation_only: bool
    evaluation_fraction: float
    max_rejects: int
    piece_rows: int
    counted: bool
    first_number: int
    first_epoch: int = 0
    token: str = field(default_factory=lambda: secrets.token_hex(16))

    @property
    def work(self) -> Path:
        """The folder in which workers read and write; only the command itself writes into `out`.

        No other call has a folder of this name. So no later call reads what a worker writes after
        it was given up.
        """
        return self.out / WORK / self.token

    @property
    def over(self) -> bool:
        """Whether the command has ended, or another call has removed its folder.

        If so, all remaining work is useless.
        """
        return not self.work.exists()

    @property
    def written(self) -> Path:
        """The folder for the schedule's files that workers write; the command moves them."""
        return self.work / WRITTEN

    @property
    def sets(self) -> tuple[str, ...]:
        """The sets that are ordered separately, as a ReadTask names them.

        The training samples come first, then the evaluation sets in their order.
        """
        names = self.settings.evaluation_sets
        return (TRAINING, *(evaluation_set(place) for place in range(len(names)))) if names else (TRAINING, EVALUATION)

    def flag_of(self, which: str) -> str:
        """Return the flag or argument by which the user gave a set's sources."""
        if which == TRAINING:
            return "SOURCE"
        names = self.settings.evaluation_sets
        return f"--eval-source {names[self.sets.index(which) - 1]}" if names else "--eval-source"

    @property
    def pieces(self) -> Path:
        """The folder of pieces."""
        return self.work / PIECES

    @property
    def lanes(self) -> Path:
        """The folder of the lanes' accesses and plans, which exists once everything was read."""
        return self.work / "lanes"

    @property
    def encoding(self) -> Path:
        """The folder of vocabularies and scales that workers read."""
        return self.written / ENCODING_FOLDER

    def compile_settings(self) -> CompileSettings:
        """Return the settings, completed with what was computed from the data.

        These are vocabularies and scales, if there are any.
        """
        features = self.settings.features
        if self.settings.parent is None:
            features = encoding_state.load(self.encoding, self.spec)[0]
        settings = {**self.settings.settings, "encoding": encoding_state.identity(self.encoding)}
        threads = min(self.settings.lanes, os.cpu_count() or 1)
        return replace(self.settings, features=features, settings=settings, threads=threads)

    def order_path(self, name: str) -> Path:
        """Return the JSON file in which a stage leaves an order or another result."""
        return self.work / ORDER_FILES / f"{name}.json"

    def save(self, name: str, value: object) -> None:
        """Write a stage's result under a name."""
        write_json(self.order_path(name), value)

    def saved(self, name: str) -> bool:
        """Return whether a stage has saved a result under a name."""
        return self.order_path(name).exists()

    def load(self, name: str, kind: type[_Value]) -> _Value:
        """Read the result that an earlier stage saved under a name."""
        return read_json(self.order_path(name), kind)

    def note_failure(self, name: str, error: ForeloadError) -> None:
        """Record, under a name, an error that the user or the disk caused.

        All remaining work is then useless.
        """
        path, failure = self.work / FAILURES / f"{name}.json", _Failure(error.code, str(error))
        try:
            write_json(path, failure)
        except OSError:
            # The disk may be full. Free the reserve, and try again.
            (self.work / RESERVE).unlink(missing_ok=True)
            write_json(path, failure)

    def failed(self) -> list[Path]:
        """Return the recorded failures, in an order that does not depend on time."""
        return sorted((self.work / FAILURES).iterdir())

    def raise_failure(self) -> None:
        """Raise the first recorded failure as the error that it was."""
        for path in self.failed():
            failure = read_json(path, _Failure)
            raise error_of(failure.code, failure.message)


TRAINING, EVALUATION = "training", "evaluation"
"""The names for training samples, and for evaluation samples, of one unnamed set or of all sets."""

TRAINING_ROWS = "training-rows"
"""The name of the saved number of training samples that were counted, if a tail is held out."""


def evaluation_set(place: int) -> str:
    """Return the internal name of a named evaluation set.

    It contains the set's place, so that the names of its pieces sort in order.
    """
    return piece_name(EVALUATION, place)


def piece_name(*parts: int | str) -> str:
    """Return a piece's file name. Names sort as their parts do."""
    return "-".join(part if isinstance(part, str) else f"{part:08d}" for part in parts)


def piece_of(task: str, place: int) -> str:
    """Return the name of the piece that is read at a place of a task.

    The piece does not exist if all of its records are malformed.
    """
    return f"{task}-{place:08d}"


def names_of(task: str) -> str:
    """Return the name under which a task's piece names are saved once all of its pieces exist."""
    return f"pieces-{task}"


@dataclass(frozen=True, slots=True)
class ReadTask:
    """A split to read, and the set that it belongs to.

    Attributes:
        which: The set, one of `Plan.sets`.
    """

    which: str
    split: Split

    @property
    def name(self) -> str:
        """The task's name. Names sort as the samples of a set are ordered."""
        return piece_name(self.which, self.split.file_index, self.split.split_index)

    @property
    def is_training(self) -> bool:
        """Whether the task reads training samples."""
        return self.which == TRAINING


def plan_reading(options: PrepareOptions, spec: FeatureSpec, sets: Mapping[str, tuple[str, ...]]) -> list[ReadTask]:
    """Return the splits of all sources.

    Args:
        sets: The evaluation sources by set.

    Raises:
        SourceError: If a set has no records.
    """
    kind: Format = "csv" if options.format == "tsv" else options.format
    rows = options.rows or 0
    tasks = []
    if not options.evaluation_only and not options.again:
        source = Source(kind, options.sources, rows, options.seed, options.values)
        tasks += [ReadTask(TRAINING, s) for s in _some("SOURCE", plan_splits(source, spec))]
    for place, (name, sources) in enumerate(sets.items()):
        which, flag = (evaluation_set(place), f"--eval-source {name}") if name else (EVALUATION, "--eval-source")
        tasks += [ReadTask(which, s) for s in _some(flag, plan_splits(Source(kind, sources), spec))]
    return tasks


def _some(flag: str, splits: list[Split]) -> list[Split]:
    if not splits:
        raise SourceError(f"{flag}: has no records; give files with records")
    return splits


def make_plan(options: PrepareOptions, parent: Schedule | None) -> tuple[Plan, list[ReadTask]]:
    """Return the plan and the splits to read.

    This looks at the feature file, the parent, and the names and headers of the sources.

    Raises:
        PipelineError: If the sources, the features or the parent do not fit.
        SettingError: If the options do not fit.
    """
    spec = feature_spec(options, None if parent is None else parent.header.features)
    if parent is not None:
        spec = _continued(parent, spec, options)
    row_bytes, size, sets = _row_bytes(options, spec), options.lane_size, evaluation_sets(options.eval_sources)
    names = parent.header.set_names if parent is not None and options.again else tuple(sets)
    settings = CompileSettings(
        features=spec if parent is None else parent.header.features,
        batch_size=options.batch_size,
        lanes=options.lanes,
        slots=size.slots or _slots_of_memory(size.memory_bytes, row_bytes),
        slots_at_most=size.slots is None,
        epochs=options.epochs,
        eval_every=options.eval_every,
        again=options.again,
        evaluation_sets=tuple(filter(None, names)),
        shuffle_seed=options.shuffle_seed,
        placement=options.placement or ("locality" if parent is None else parent.header.placement),
        segment_bytes=options.segment_bytes,
        window_accesses=options.window,
        parent=None if options.after is None else options.after.absolute(),
        settings={
            "slots": size.slots,
            "memory_bytes": size.memory_bytes if size.slots is None else None,
            "row_bytes": row_bytes,
            "segment_bytes": options.segment_bytes,
            "eval_fraction": options.eval_fraction,
            "eval_source": bool(options.eval_sources),
            **({} if options.window is None else {"window": options.window}),
        },
    )
    tasks = plan_reading(options, spec, sets)
    plan = Plan(
        out=options.out.absolute(),
        spec=spec,
        settings=settings,
        evaluation_only=options.evaluation_only,
        evaluation_fraction=options.eval_fraction,
        max_rejects=options.max_rejects,
        piece_rows=PIECE_ROWS,
        counted=parent is None and encoding_state.needs_state(spec),
        first_number=settings.first_number(parent),
        first_epoch=settings.first_epoch(parent),
    )
    return plan, tasks


def _check_again(parent: Schedule, options: PrepareOptions) -> None:
    """Raise an error if a parent's samples cannot have more epochs with these options.

    Raises:
        ScheduleError: For the reason given.
    """
    if options.batch_size != parent.header.batch_size:
        raise ScheduleError(
            f"--batch-size: must be the schedule's {parent.header.batch_size}; got {options.batch_size}; leave it out, or give SOURCE for a "
            "schedule with other steps"
        )
    if not parent.header.training_samples:
        raise ScheduleError(
            f"--after {options.after}: has evaluation steps only, so there are no samples to train on; give SOURCE"
        )
    if (parent.path / POSITION).exists():
        raise ScheduleError(
            f"--after {options.after}: has only the part of a schedule that a run keeps, without samples; give the whole schedule, or SOURCE"
        )
    if options.eval_every is not None and not parent.header.evaluation_samples:
        raise ScheduleError(f"--eval-every: needs evaluation samples, but {options.after} has none; leave it out")


def _row_bytes(options: PrepareOptions, spec: FeatureSpec) -> int:
    """Return the size of a stored row for the header.

    If the number of slots is given, nothing depends on this size. It is then the size of a row of
    weights with one number of optimizer state.
    """
    if options.row_bytes is not None:
        return options.row_bytes
    if options.lane_size.slots is None:
        return stored_bytes(default_columns(spec))
    return stored_bytes((max((table.dimension or 0 for table in spec.tables), default=0) or DEFAULT_DIMENSION) + 1)


def _slots_of_memory(memory_bytes: int, row_bytes: int) -> int:
    columns = columns_of(row_bytes)
    slots = slots_of_size(memory_bytes, columns, with_base=True)
    if not slots:
        raise SettingError(
            f"--memory: must be at least {lane_bytes(1, columns, with_base=True)} bytes, staging included, for rows of {row_bytes} bytes; "
            f"got {memory_bytes}; give more, or --slots N"
        )
    return slots


def _continued(parent: Schedule, spec: FeatureSpec, options: PrepareOptions) -> FeatureSpec:
    """Return the features as they are read now, with the parent's vocabularies.

    Raises:
        ScheduleError: If the parent has other features, lanes or placement.
    """
    if parent.header.lanes != options.lanes:
        raise ScheduleError(
            f"--lanes: must be {parent.header.lanes}, as in the schedule of --after; got {options.lanes}; leave it out"
        )
    if options.placement not in (None, parent.header.placement):
        raise ScheduleError(
            f"--placement: must be {parent.header.placement}, as in the schedule of --after; got {options.placement}; leave it out"
        )
    if options.again:
        _check_again(parent, options)
    theirs = parent.header.features
    # The sizes of vocabularies leave out ids 0 and 1, which stand for missing and unknown values.
    sizes = {k: rows - 2 for k, rows in enumerate(theirs.table_rows) if k in theirs.vocabulary_tables}
    # With the parent's encoding rule, values keep the ids that they had.
    spec = dataclasses.replace(spec, rule=theirs.rule)
    # The layout of files and the order in which they are read may change from one schedule to the
    # next.
    layout = {name: getattr(spec, name) for name in ("text", "order_by", "order_type")}
    if len(spec.tables) != len(theirs.tables) or dataclasses.replace(theirs, **layout) != spec.with_vocabulary(sizes):
        raise ScheduleError(
            f"--features: must be those of {options.after}; prepare with the same feature file, or start a new model without --after"
        )
    return spec.with_vocabulary(sizes)
