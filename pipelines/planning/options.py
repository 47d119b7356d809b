"""The options of `foreload prepare`: the command line, the job file, and the checks that need no data."""

from __future__ import annotations

import argparse
import logging
import math
import re
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, NoReturn

from foreload.pipelines.base.files import unwritable
from foreload.pipelines.errors import SettingError
from foreload.pipelines.planning.sizing import MOST_SLOTS
from foreload.pipelines.samples.features import FeatureSpec
from foreload.pipelines.schedule.format import SampleAssignment
from foreload.pipelines.schedule.reader import Schedule

MOST_LANES = 64  # the users of a row are a mask of 64 bits
_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{p}iB": 1 << 10 * (i + 1) for i, p in enumerate("KMGT")} | {f"{p}B": 1000 ** (i + 1) for i, p in enumerate("KMGT")}

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


@dataclass(frozen=True, slots=True)
class Options:
    """What the user asked for, checked as far as that goes without looking at the data.

    slots: per lane, or None for as many as memory_bytes, also per lane, has room for. placement: None for the parent schedule's, or locality
    where there is none.
    """

    sources: tuple[str, ...] = ()
    format: Literal["criteo", "csv", "tsv", "parquet", "synthetic"] = "criteo"
    features: Path | None = None
    out: Path = Path()
    batch_size: int = 0
    lanes: int = 1
    slots: int | Literal["min", "all"] | None = None
    memory_bytes: int = 1 << 30
    row_bytes: int | None = None
    rows: int | None = None
    seed: int = 0
    table_rows: int | None = None
    values: int | None = None
    epochs: int = 1
    shuffle_seed: int | None = None
    placement: SampleAssignment | None = None
    eval_sources: tuple[str, ...] = ()
    eval_fraction: float = 0.0
    after: Path | None = None
    max_rejects: int = 0
    segment_bytes: int = 64 << 20
    overwrite: bool = False
    json: Path | None = None

    @property
    def evaluation_only(self) -> bool:
        """Whether there is nothing to train on: a schedule for `foreload evaluate`."""
        return self.after is not None and bool(self.eval_sources) and not self.sources and self.format != "synthetic"


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, like all others."""

    def error(self, message: str) -> NoReturn:
        raise SettingError(f"{message}; see `{self.prog} --help`")


def parser() -> argparse.ArgumentParser:
    """The command line of `foreload prepare`. Values are left as text; `read` checks them, those of the job file too."""
    result = _Parser(
        prog="foreload prepare",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        argument_default=None,
    )
    data = result.add_argument_group("the data")
    data.add_argument(
        "sources", nargs="*", metavar="SOURCE", help="files or quoted globs, read in the order given; .gz and .zst too"
    )
    data.add_argument("--format", metavar="NAME", help="criteo, csv, tsv, parquet, or synthetic (made up, needs no SOURCE)")
    data.add_argument(
        "--features", metavar="FILE.toml", help="what the columns are (docs/features.md); criteo and synthetic know"
    )
    data.add_argument("--rows", metavar="N", help="synthetic: how many rows to make up")
    data.add_argument("--seed", metavar="N", help="synthetic: which rows to make up (default 0)")
    data.add_argument("--values", metavar="N", help="synthetic: distinct values of a column, at most (default: its table's rows)")
    data.add_argument(
        "--table-rows", metavar="N", help="criteo and synthetic: rows of every table (default: those of Criteo's Kaggle data)"
    )
    data.add_argument("--max-rejects", metavar="N", help="malformed records to leave out before giving up (default 0: none)")
    data.add_argument(
        "--eval-source", dest="eval_sources", metavar="SOURCE", action="append", help="evaluate on this; may be repeated"
    )
    data.add_argument("--eval-fraction", metavar="X", help="or hold out the last part of the data's order: 0.1 is a tenth")
    training = result.add_argument_group("how it will be trained")
    training.add_argument("--batch-size", metavar="B", help="samples of a training step, over all lanes")
    training.add_argument(
        "--lanes", metavar="V", help="parts that a step is cut into, 1 to 64: at most as many trainers (default 1)"
    )
    training.add_argument("--epochs", metavar="E", help="passes over the data (default 1)")
    training.add_argument("--shuffle-seed", metavar="S", help="shuffle every epoch by this seed (default: as ordered)")
    training.add_argument(
        "--placement",
        metavar="NAME",
        help="which lane a step's sample goes to: locality, where most of its rows are (default), or order, as they come",
    )
    training.add_argument(
        "--after",
        metavar="SCHEDULE",
        help="continue the model of this schedule with new data; format, features, batch size and lanes are its, unless given. "
        "With --eval-source and no SOURCE: for `foreload evaluate RUN` alone",
    )
    cache = result.add_argument_group("the cache of each lane")
    cache.add_argument(
        "--slots",
        metavar="N",
        help="rows it holds: a number, a size (2GiB), min (as few as a step needs) or all (default: --memory)",
    )
    cache.add_argument(
        "--memory",
        dest="memory_bytes",
        metavar="SIZE",
        help="what it may take, staging and the copies that parity needs included (default 1GiB)",
    )
    cache.add_argument(
        "--row-bytes",
        metavar="N",
        help="for --memory: a row at rest, 12 + 4 * columns of weights and optimizer state (default: as wide as any built-in model "
        "with Adagrad, 12 + 8 * (largest dimension or 32, + 1))",
    )
    output = result.add_argument_group("the output")
    output.add_argument("--out", metavar="SCHEDULE", help="folder to write; on a cluster, on a disk that all workers share")
    output.add_argument("--overwrite", action="store_const", const=True, help="replace a schedule that is there")
    output.add_argument("--segment-bytes", metavar="SIZE", help="size of its files, about (default 64MiB)")
    output.add_argument("--json", metavar="FILE", help="write the summary there too, for programs")
    output.add_argument("--job", metavar="FILE.toml", help="take options from the table [prepare] of this file; flags win")
    return result


def split_flags(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Own arguments, sources last, and those of Beam. A flag that is not known here takes the next word unless that is a flag."""
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
    """Whether a flag of Beam's takes no value."""
    action = beam_flags().get(flag)
    return action is not None and action.nargs == 0


def beam_flags() -> dict[str, argparse.Action]:
    """The flags that Beam itself declares."""
    with quiet_import():
        from apache_beam.options.pipeline_options import PipelineOptions

    declared = argparse.ArgumentParser(allow_abbrev=False, conflict_handler="resolve", add_help=False)
    for options in PipelineOptions.__subclasses__():
        if options.__module__.startswith("apache_beam."):
            options._add_argparse_args(declared)
    return dict(declared._option_string_actions)


@contextmanager
def quiet_import() -> Iterator[None]:
    """Import Beam without its warning about Google's client libraries, which nothing here uses."""

    def keep(record: logging.LogRecord) -> bool:
        return "apitools" not in record.getMessage()

    root = logging.getLogger()
    root.addFilter(keep)
    try:
        yield
    finally:
        root.removeFilter(keep)


def read(arguments: Sequence[str]) -> tuple[Options, list[str]]:
    """Options and Beam's flags from a command line and the job file that it may name. Raises SettingError."""
    own, beam = split_flags(arguments)
    given = {name: value for name, value in vars(parser().parse_args(own)).items() if value not in (None, [])}
    job = given.pop("job", None)
    values = {**({} if job is None else _job_values(Path(job))), **given}
    checked = {name: _CHECKS[name](_flag(name), value) for name, value in values.items()}
    if isinstance(checked.get("slots"), tuple):
        if "memory_bytes" in checked:
            raise SettingError("--memory: cannot be given with --slots; choose one of them")
        checked["memory_bytes"] = checked.pop("slots")[1]
    given_names = set(checked)
    if "after" in checked:
        if "out" in checked and checked["after"].resolve() == checked["out"].resolve():
            raise SettingError(f"--out: must not be the schedule that --after continues, {checked['out']}; choose another folder")
        checked = _inherited(Schedule(checked["after"])) | checked
    for name in ("format", "out", "batch_size"):
        if name not in checked:
            raise SettingError(f"{_flag(name)}: is required and missing; see `foreload prepare --help`")
    options = Options(**checked)
    _check_together(options, given_names)
    return options, beam


def _inherited(parent: Schedule) -> dict[str, Any]:
    """What a schedule that continues another one takes from it where nothing else is said; its features and placement it takes, too."""
    kind = parent.made_with("format")
    known = {} if kind is None else {"format": kind}
    return {**known, "batch_size": parent.header.batch_size, "lanes": parent.header.lanes}


def _job_values(path: Path) -> dict[str, Any]:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingError(f"--job {path}: cannot be read ({error.strerror}); check the path") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingError(f"--job {path}: is not valid TOML ({error})") from error
    table = document.get("prepare", {})
    if not isinstance(table, dict):
        raise SettingError(f"--job {path}: prepare must be a table [prepare], not {table!r}")
    names = {field.name: field.name for field in fields(Options) if field.name not in ("eval_sources", "memory_bytes")}
    names |= {"eval_source": "eval_sources", "memory": "memory_bytes"}
    values = {}
    for key, value in table.items():
        name = names.get(key.replace("-", "_"))
        if name is None:
            raise SettingError(
                f"--job {path}: [prepare] knows no {key!r}; it takes {', '.join(sorted(name.replace('_', '-') for name in names))}"
            )
        values[name] = value
    return values


def _flag(name: str) -> str:
    short = {"sources": "SOURCE", "eval_sources": "--eval-source", "memory_bytes": "--memory"}
    return short.get(name) or "--" + name.replace("_", "-")


def _check_together(options: Options, given: set[str]) -> None:
    """Rules between options. given: the names of those that the user set."""
    synthetic = options.format == "synthetic"
    if synthetic and options.sources:
        raise SettingError(
            f"SOURCE: --format synthetic reads none, got {options.sources[0]}; leave it out, or name the file's format"
        )
    if synthetic and options.rows is None:
        raise SettingError("--rows: --format synthetic needs a number of rows; add --rows N")
    if options.evaluation_only:
        for name in ("epochs", "shuffle_seed", "eval_fraction"):
            if name in given:
                raise SettingError(f"{_flag(name)}: is for training samples, and there is no SOURCE; leave it out")
    elif not synthetic and not options.sources:
        raise SettingError(
            f"SOURCE: --format {options.format} needs at least one file or glob; name one, or --eval-source with --after alone"
        )
    if options.table_rows is not None and (options.features is not None or options.format not in ("criteo", "synthetic")):
        raise SettingError("--table-rows: is for the built-in features of criteo and synthetic; write rows into the feature file")
    for name in ("rows", "seed", "values"):
        if not synthetic and name in given:
            raise SettingError(f"{_flag(name)}: is for --format synthetic, not {options.format}; leave it out")
    if synthetic and options.eval_sources:
        raise SettingError("--eval-source: --format synthetic reads no files; use --eval-fraction, or name the files' --format")
    if options.eval_sources and options.eval_fraction:
        raise SettingError("--eval-fraction: cannot be given with --eval-source; choose one of them")
    if options.format in ("csv", "tsv", "parquet") and options.features is None and options.after is None:
        raise SettingError(f"--features: --format {options.format} needs a feature file that says what its columns are")
    if options.slots is not None and "memory_bytes" in given:
        raise SettingError("--memory: cannot be given with --slots; choose one of them")
    if options.json is not None and (why := unwritable(options.json)):
        raise SettingError(f"--json: cannot write {options.json}: {why}")


# -- Values --------------------------------------------------------------------------------------------------------------------


def size_bytes(flag: str, value: Any) -> int:
    """Bytes: a number, with or without a unit."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", str(value))
    unit = None if match is None else next((u for u in _UNITS if u.lower() == match[2].lower()), None)
    if match is None or unit is None or isinstance(value, bool):
        raise SettingError(f"{flag}: must be a size such as 1GiB or 500MB, not {value!r}")
    result = int(float(match[1]) * _UNITS[unit])
    if result < 1:
        raise SettingError(f"{flag}: must be at least 1 byte, not {value!r}")
    return result


def _integer(least: int, most: int = 2**63 - 1) -> Any:
    def check(flag: str, value: Any) -> int:
        if isinstance(value, bool) or not re.fullmatch(r"[+-]?[0-9]+", str(value)):
            raise SettingError(f"{flag}: must be a whole number, not {value!r}")
        if not least <= int(value) <= most:
            bound = f"at least {least}" if most == 2**63 - 1 else f"in {least} .. {most}"
            raise SettingError(f"{flag}: must be {bound}, not {value}")
        return int(value)

    return check


def _fraction(flag: str, value: Any) -> float:
    try:
        result = float(value)
    except (TypeError, ValueError):
        result = math.nan
    if isinstance(value, bool) or not 0 < result < 1:
        raise SettingError(f"{flag}: must be between 0 and 1, not {value!r}")
    return result


def _slots(flag: str, value: Any) -> int | str | tuple[str, int]:
    if value in ("min", "all"):
        return str(value)
    if re.fullmatch(r"[0-9]+", str(value)) and not isinstance(value, bool):
        return int(_integer(1, MOST_SLOTS)(flag, value))
    try:
        return "bytes", size_bytes(flag, value)
    except SettingError:
        raise SettingError(f"{flag}: must be a number, min, all, or a size such as 2GiB, not {value!r}") from None


def _format(flag: str, value: Any) -> str:
    known = ("criteo", "csv", "tsv", "parquet", "synthetic")
    if value not in known:
        raise SettingError(f"{flag}: must be one of {', '.join(known)}, not {value!r}")
    return str(value)


def _placement(flag: str, value: Any) -> str:
    if value not in ("order", "locality"):
        raise SettingError(f"{flag}: must be order or locality, not {value!r}")
    return str(value)


def _path(flag: str, value: Any) -> Path:
    if not isinstance(value, str) or not value:
        raise SettingError(f"{flag}: must be a path, not {value!r}")
    return Path(value)


def _texts(flag: str, value: Any) -> tuple[str, ...]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not values or not all(isinstance(v, str) and v for v in values):
        raise SettingError(f"{flag}: must be a path or a list of paths, not {value!r}")
    return tuple(values)


def _switch(flag: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise SettingError(f"{flag}: must be true or false, not {value!r}")
    return value


_CHECKS: dict[str, Any] = {
    "sources": _texts,
    "format": _format,
    "features": _path,
    "out": _path,
    "batch_size": _integer(1, 2**31 - 1),
    "lanes": _integer(1, MOST_LANES),
    "slots": _slots,
    "memory_bytes": size_bytes,
    "row_bytes": _integer(16),
    "rows": _integer(1),
    "seed": _integer(0),
    "table_rows": _integer(2),
    "values": _integer(1),
    "epochs": _integer(1),
    "shuffle_seed": _integer(-(2**63)),
    "placement": _placement,
    "eval_sources": _texts,
    "eval_fraction": _fraction,
    "after": _path,
    "max_rejects": _integer(0),
    "segment_bytes": size_bytes,
    "overwrite": _switch,
    "json": _path,
}


# -- What follows from them ------------------------------------------------------------------------------------------------------


def feature_spec(options: Options, parent: FeatureSpec | None) -> FeatureSpec:
    """The features asked for, vocabularies without their sizes; those of the parent schedule where none are. Raises FeatureError."""
    builtin = {"criteo": FeatureSpec.criteo, "synthetic": FeatureSpec.synthetic}.get(options.format)
    if options.features is not None:
        spec = FeatureSpec.load(options.features)
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
