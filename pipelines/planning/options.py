"""The options of `foreload prepare`, each declared once.

The module also has the command line, with Beam's flags, and the checks of options that exclude each
other.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NoReturn

from foreload.base.errors import SettingError
from foreload.base.files import unwritable
from foreload.base.settings import (
    add_arguments,
    choice,
    given,
    integer,
    named,
    number,
    parse_fields,
    path,
    read_job_file,
    setting,
    size_bytes,
    spelled,
    switch,
    texts,
    to_fields,
)
from foreload.pipelines.planning.sizing import MOST_SLOTS
from foreload.pipelines.samples.feature_file import load_features
from foreload.pipelines.samples.features import FeatureSpec
from foreload.pipelines.schedule.format import MOST_LANES, SampleAssignment
from foreload.pipelines.schedule.reader import Schedule
from foreload.pipelines.sources.files import quiet_import

DEFAULT_MEMORY_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class LaneSize:
    """The size of a lane's cache.

    Attributes:
        slots: A number of rows, "min" (as few as the largest step needs) or "all" (no row ever
            leaves). If None, there are as many slots as `memory_bytes` has room for.
        memory_bytes: Used only if `slots` is None.
    """

    slots: int | Literal["min", "all"] | None = None
    memory_bytes: int = DEFAULT_MEMORY_BYTES

    @classmethod
    def parse(cls, flag: str, value: Any) -> LaneSize:
        """Parse the value of --slots: a number of rows, min, all, or a size.

        Raises:
            SettingError: If the value is none of these.
        """
        if isinstance(value, LaneSize):
            return value
        if value in ("min", "all"):
            return cls(slots=value)
        if re.fullmatch(r"[0-9]+", str(value)) and not isinstance(value, bool):
            return cls(slots=integer(1, MOST_SLOTS)(flag, value))
        try:
            return cls(memory_bytes=size_bytes(flag, value))
        except SettingError:
            raise SettingError(f"{flag}: must be a number, min, all, or a size such as 2GiB; got {value!r}") from None


def _fraction(flag: str, value: Any) -> float:
    fraction = number(0)(flag, value)
    if not 0 <= fraction < 1:
        raise SettingError(f"{flag}: must be between 0 and 1; got {value!r}")
    return fraction


_DATA, _TRAINING, _CACHE, _OUTPUT = "the data", "how it will be trained", "the cache of each lane", "the output"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareOptions:
    """The user's options, parsed and checked as far as possible without looking at the data.

    Each field's help text describes it. `placement` is None for the parent schedule's placement, or
    for locality if there is no parent. The constructor raises SettingError.
    """

    sources: tuple[str, ...] = setting(
        (), texts, "files or quoted globs, read in the order given; may be .gz or .zst", _DATA,
        form="places", metavar="SOURCE", flag="SOURCE",
    )  # fmt: skip
    format: Literal["criteo", "csv", "tsv", "parquet", "synthetic"] = setting(
        "", choice("criteo", "csv", "tsv", "parquet", "synthetic"), "criteo, csv, tsv, parquet, or synthetic (generated, needs no SOURCE)",
        _DATA, metavar="NAME", required=True,
    )  # fmt: skip
    features: Path | None = setting(
        None,
        path,
        "feature file, which describes the columns (docs/features.md); criteo and synthetic need none",
        _DATA,
        metavar="FILE.toml",
    )
    rows: int | None = setting(None, integer(1), "synthetic: how many rows to generate", _DATA, metavar="N")
    seed: int = setting(0, integer(0), "synthetic: seed of the generated rows", _DATA, metavar="N")
    values: int | None = setting(
        None,
        integer(1),
        "synthetic: maximum number of distinct values of a column (default: its table's rows)",
        _DATA,
        metavar="N",
    )
    table_rows: int | None = setting(
        None, integer(2), "criteo and synthetic: rows of every table (default: those of Criteo's Kaggle data)", _DATA, metavar="N"
    )
    max_rejects: int = setting(
        0, integer(0), "how many malformed records to skip before failing (default 0: none)", _DATA, metavar="N"
    )
    eval_sources: tuple[str, ...] = setting(
        (),
        texts,
        "evaluate on these samples; may be repeated. NAME=SOURCE: an evaluation set with metrics of its own",
        _DATA,
        form="repeated",
        metavar="[NAME=]SOURCE",
        name="eval_source",
    )
    eval_fraction: float = setting(
        0.0,
        _fraction,
        "or evaluate on the last part of the data, in its order: 0.1 is a tenth (default none)",
        _DATA,
        metavar="X",
    )
    eval_every: int | None = setting(
        None,
        integer(1),
        "also evaluate each time after this many training steps of an epoch (default: only after each epoch)",
        _DATA,
        metavar="STEPS",
    )
    batch_size: int = setting(
        0, integer(1, 2**31 - 1), "samples of a training step, over all lanes", _TRAINING, metavar="B", required=True
    )
    lanes: int = setting(
        1,
        integer(1, MOST_LANES),
        "parts that each step is split into, 1 to 64; no more trainers than this can train",
        _TRAINING,
        metavar="V",
    )
    epochs: int = setting(1, integer(1), "passes over the data", _TRAINING, metavar="E")
    shuffle_seed: int | None = setting(
        None, integer(-(2**63)), "shuffle every epoch with this seed (default: keep the order)", _TRAINING, metavar="S"
    )
    placement: SampleAssignment | None = setting(
        None, choice("order", "locality"),
        "how a step's samples are assigned to lanes: locality, to the lane with most of their rows (default), or order, in their order",
        _TRAINING, metavar="NAME",
    )  # fmt: skip
    after: Path | None = setting(
        None, path,
        "continue the model of this schedule with new data; format, features, batch size and lanes are taken from it, unless given. Without SOURCE: "
        "--eval-source for `foreload evaluate RUN` alone, or --epochs for more epochs of its own samples", _TRAINING, metavar="SCHEDULE",
    )  # fmt: skip
    slots: LaneSize | None = setting(
        None, LaneSize.parse, "rows that it holds: a number, a size (2GiB), min (as few as a step needs) or all (default: what --memory allows)",
        _CACHE, metavar="N"
    )  # fmt: skip
    memory_bytes: int | None = setting(
        None, size_bytes, "memory that it may take, including staging and the copies that parity needs (default 1GiB)",
        _CACHE, metavar="SIZE", name="memory"
    )  # fmt: skip
    row_bytes: int | None = setting(
        None, integer(16),
        "for --memory: bytes of a stored row, 12 + 4 * columns of weights and optimizer state (default: those of the widest built-in model "
        "with Adagrad, 12 + 8 * (largest dimension or 32, + 1); Adam and FTRL need 12 * instead of 8 *)", _CACHE, metavar="N",
    )  # fmt: skip
    window: int | None = setting(
        None, integer(1),
        "compile while the data is read, looking ahead over this many rows used, summed over steps, for `train --follow`; more rows may arrive than "
        "necessary (default: read all data first)", _CACHE, metavar="N",
    )  # fmt: skip
    out: Path = setting(
        Path(),
        path,
        "folder to write; on a cluster, on a disk that all workers share",
        _OUTPUT,
        metavar="SCHEDULE",
        required=True,
    )
    overwrite: bool = setting(False, switch, "replace an existing schedule", _OUTPUT, form="switch")
    segment_bytes: int = setting(
        64 << 20, size_bytes, "approximate size of the schedule's files (default 64MiB)", _OUTPUT, metavar="SIZE"
    )
    json: Path | None = setting(None, path, "also write the summary to this file, as JSON", _OUTPUT, metavar="FILE")

    def __post_init__(self) -> None:
        parse_fields(self)

    @classmethod
    def of(cls, values: Mapping[str, Any], job_file: str | Path | None = None) -> PrepareOptions:
        """Create options from a mapping; this is the way in for programs.

        For example:

            PrepareOptions.of({"sources": "clicks.csv", "format": "csv", "features": "clicks.toml",
            "out": "clicks", "batch_size": 256, "slots": "2GiB"})

        Args:
            values: Options by the names of the command line, with dashes or underscores, as text or
                as Python values. Options that are missing are taken from the table [prepare] of the
                job file, if there is one, and else from the parent schedule (`after`).
            job_file: The job file, if any.

        Raises:
            SettingError: If an option is wrong, or options exclude each other.
            ScheduleError: If the parent is not a schedule.
        """
        in_file = {} if job_file is None else read_job_file(job_file, "prepare", cls)
        stated = in_file | {name: value for name, value in named(cls, values, "prepare:").items() if value is not None}
        given = set(stated)
        if "after" in stated:
            after = path("--after", stated["after"])
            if "out" in stated and after.resolve() == path("--out", stated["out"]).resolve():
                raise SettingError(
                    f"--out: must not be the schedule that --after continues, {stated['out']}; choose another folder"
                )
            stated = _inherited(Schedule(after), again=not stated.keys() & {"sources", "eval_source", "rows"}) | stated
        elif "features" in stated:
            # Without a feature file only Criteo's columns are known, and its files may have any
            # ending.
            stated = _by_ending(texts("SOURCE", stated.get("sources", ()))) | stated
        options = cls(**to_fields(cls, stated))
        _check_together(options, given)
        return options

    @property
    def lane_size(self) -> LaneSize:
        """The size that --slots or --memory gives, or the default."""
        return self.slots or LaneSize(memory_bytes=self.memory_bytes or DEFAULT_MEMORY_BYTES)

    @property
    def evaluation_only(self) -> bool:
        """Whether there is nothing to train on: the schedule is for `foreload evaluate`."""
        return self.after is not None and bool(self.eval_sources) and not self.sources and self.format != "synthetic"

    @property
    def again(self) -> bool:
        """Whether the schedule has more epochs of the parent's samples."""
        return self.after is not None and not self.eval_sources and not self.sources and self.rows is None

    def to_dict(self) -> dict[str, Any]:
        """Return every option as provenance.json holds it.

        `slots` is a number, "min", "all", or None if `memory_bytes` determines the number.
        """
        values = {name: getattr(self, name) for name in self.__slots__}
        values |= {"slots": self.lane_size.slots, "memory_bytes": self.lane_size.memory_bytes}
        return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}


def _by_ending(sources: Sequence[str]) -> dict[str, Any]:
    """Return the format that the names of all sources imply, if they imply one."""
    endings = {re.sub(r"\.(gz|zst)$", "", path.lower()).rpartition(".")[2] for path in sources}
    return {"format": endings.pop()} if len(endings) == 1 and endings <= {"csv", "parquet"} else {}


def _inherited(parent: Schedule, again: bool) -> dict[str, Any]:
    """Return the options that a schedule takes from the one that it continues, if not given.

    Its features and placement come from the parent as well (`feature_spec`, `plan.make_plan`).
    `again` says whether it has the parent's samples.
    """
    kind, header = parent.made_with("format"), parent.header
    known = {"format": kind} | ({"shuffle_seed": header.shuffle_seed, "eval_every": header.eval_every} if again else {})
    stated = {name: value for name, value in known.items() if value is not None}
    return {**stated, "batch_size": header.batch_size, "lanes": header.lanes}


def _check_together(options: PrepareOptions, given: set[str]) -> None:
    """Raise SettingError for options that exclude each other.

    Args:
        given: The names of the settings that the user set.
    """
    synthetic = options.format == "synthetic"
    if synthetic and options.sources:
        raise SettingError(
            f"SOURCE: --format synthetic reads no files; got {options.sources[0]}; leave it out, or give the file's format"
        )
    if options.again:
        _check_again(given)
    elif synthetic and options.rows is None:
        raise SettingError("--rows: --format synthetic needs a number of rows; add --rows N")
    if options.evaluation_only:
        for name in ("epochs", "shuffle_seed", "eval_fraction", "eval_every"):
            if name in given:
                raise SettingError(f"{'--' + spelled(name)}: is for training samples, and there is no SOURCE; leave it out")
    elif not synthetic and not options.sources and not options.again:
        raise SettingError(
            f"SOURCE: --format {options.format} needs at least one file or glob; name one, or --eval-source with --after alone"
        )
    if options.table_rows is not None and (options.features is not None or options.format not in ("criteo", "synthetic")):
        raise SettingError("--table-rows: is for the built-in features of criteo and synthetic; write rows into the feature file")
    for name in ("rows", "seed", "values"):
        if not synthetic and name in given and not options.again:
            raise SettingError(f"{'--' + spelled(name)}: is for --format synthetic, not {options.format}; leave it out")
    if synthetic and options.eval_sources:
        raise SettingError("--eval-source: --format synthetic reads no files; use --eval-fraction, or name the files' --format")
    if options.eval_sources and options.eval_fraction:
        raise SettingError("--eval-fraction: cannot be given with --eval-source; choose one of them")
    if options.eval_every is not None and not (options.eval_sources or options.eval_fraction or options.again):
        raise SettingError("--eval-every: needs something to evaluate on; give --eval-source or --eval-fraction, or leave it out")
    if options.format in ("csv", "tsv", "parquet") and options.features is None and options.after is None:
        raise SettingError(f"--features: --format {options.format} needs a feature file that says what its columns are")
    if options.slots is not None and "memory" in given:
        raise SettingError("--memory: cannot be given with --slots; choose one of them")
    if options.window is not None and options.slots is not None and options.slots.slots in ("min", "all"):
        raise SettingError(
            f"--window: cannot be given with --slots {options.slots.slots}, which is known only after all data is read; give a number, or leave one "
            "of them out"
        )
    if options.json is not None and (why := unwritable(options.json)):
        raise SettingError(f"--json: cannot write {options.json}: {why}")


_OF_NEW_SAMPLES = (
    "format",
    "features",
    "seed",
    "values",
    "table_rows",
    "max_rejects",
    "eval_fraction",
    "shuffle_seed",
    "placement",
)


def _check_again(given: set[str]) -> None:
    """Raise SettingError for options that do not fit more epochs of the parent's samples."""
    if "epochs" not in given:
        raise SettingError(
            "SOURCE: is missing; name a file or glob of new samples, --eval-source to evaluate alone, or --epochs K for K more epochs of the samples "
            "of --after"
        )
    for name in _OF_NEW_SAMPLES:
        if name in given:
            raise SettingError(
                f"{'--' + spelled(name)}: is for new samples, and more epochs of the samples of --after keep its value; leave it out"
            )


def feature_spec(options: PrepareOptions, parent: FeatureSpec | None) -> FeatureSpec:
    """Return the features that the options ask for.

    Vocabularies have no sizes yet. If the options name no features, the parent schedule's are
    returned.

    Raises:
        FeatureError: If the feature file is wrong.
    """
    builtin = {"criteo": FeatureSpec.criteo, "synthetic": FeatureSpec.synthetic}.get(options.format)
    if options.features is not None:
        spec = load_features(options.features)
    elif parent is not None and options.table_rows is None:
        spec = parent
    else:
        assert builtin is not None
        return builtin(options.table_rows)
    if options.format == "criteo" and not spec.text.columns:
        return replace(spec, text=FeatureSpec.criteo().text)
    if options.format == "tsv" and spec.text.delimiter is None:
        return replace(spec, text=replace(spec.text, delimiter="\t"))
    return spec


DESCRIPTION = """\
Read click logs and compile them into a schedule, the folder that `foreload train` trains from.

prepare reads every source, turns its columns into ids and numbers, puts the samples into order, cuts them into batches, and
decides ahead of time which embedding row is in the cache when. Nothing is trained yet."""

EPILOG = """\
examples:
  foreload prepare --format synthetic --rows 200000 --batch-size 1024 --lanes 4 --out demo/schedule
  foreload prepare train.tsv --format criteo --eval-source test.tsv --batch-size 256 --lanes 2 --out schedule
  foreload prepare 'clicks/*.parquet' --format parquet --features clicks.toml --eval-fraction 0.1 --out schedule

Sizes are bytes, or a number with a unit: 512MiB, 2GB. Any other flag goes to Apache Beam, which does the work: in this process
(--direct_num_workers=4 --direct_running_mode=multi_threading uses more cores), or on a cluster by --runner=... (docs/flink.md)."""


class _Parser(argparse.ArgumentParser):
    """A parser that reports errors in one line, like all other errors."""

    def error(self, message: str) -> NoReturn:
        raise SettingError(f"{message}; see `{self.prog} --help`")


def parser() -> argparse.ArgumentParser:
    """Return the command line of `foreload prepare`.

    Values stay text; `read` checks them together with those of the job file.
    """
    result = _Parser(
        prog="foreload prepare",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_arguments(result, PrepareOptions)
    result.add_argument(
        "--job", metavar="FILE.toml", help="take options from the table [prepare] of this file; flags take precedence"
    )
    return result


def read(arguments: Sequence[str]) -> tuple[PrepareOptions, list[str]]:
    """Return the options and Beam's flags from a command line and the job file that it may name.

    Raises:
        SettingError: If an option is wrong, or options exclude each other.
        ScheduleError: If the parent is not a schedule.
    """
    own, beam = split_flags(arguments)
    namespace = parser().parse_args(own)
    return PrepareOptions.of(given(namespace, PrepareOptions), namespace.job), beam


def split_flags(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line into the arguments of `prepare` and those of Beam.

    The sources come last among those of `prepare`, behind "--". A flag that `prepare` does not know
    goes to Beam, together with the next word, unless that word is a flag too or Beam knows the flag
    as a switch.
    """
    known = parser()._option_string_actions
    own: list[str] = []
    beam: list[str] = []
    sources: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if word == "--":
            sources += rest
            break
        if not word.startswith("-") or word == "-":
            sources.append(word)
            continue
        name, equals, _ = word.partition("=")
        target = own if name in known else beam
        target.append(word)
        takes_value = known[name].nargs != 0 if name in known else not is_switch(name)
        if takes_value and not equals and rest and (name in known or not rest[0].startswith("-")):
            target.append(rest.pop(0))
    return [*own, "--", *sources], beam


def is_switch(flag: str) -> bool:
    """Return whether a flag of Beam takes no value."""
    action = beam_flags().get(flag)
    return action is not None and action.nargs == 0


def beam_flags() -> dict[str, argparse.Action]:
    """Return the flags that Beam itself declares."""
    with quiet_import():
        from apache_beam.options.pipeline_options import PipelineOptions

    declared = argparse.ArgumentParser(allow_abbrev=False, conflict_handler="resolve", add_help=False)
    for options in PipelineOptions.__subclasses__():
        if options.__module__.startswith("apache_beam."):
            options._add_argparse_args(declared)
    return dict(declared._option_string_actions)
