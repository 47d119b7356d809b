"""The command line of `foreload prepare`: its own flags, and those of Beam, which go with them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn

from foreload.base.errors import SettingError
from foreload.base.settings import add_arguments, given
from foreload.pipelines.planning.options import PrepareOptions
from foreload.pipelines.sources.files import quiet_import

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
    )
    add_arguments(result, PrepareOptions)
    result.add_argument("--job", metavar="FILE.toml", help="take options from the table [prepare] of this file; flags win")
    return result


def read(arguments: Sequence[str]) -> tuple[PrepareOptions, list[str]]:
    """Options and Beam's flags from a command line and the job file that it may name. Raises SettingError and ScheduleError."""
    own, beam = split_flags(arguments)
    namespace = parser().parse_args(own)
    return PrepareOptions.of(given(namespace, PrepareOptions), namespace.job), beam


def split_flags(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Own arguments, with the sources last, behind "--", and those of Beam.

    A flag that is not known here goes to Beam, with the next word, unless that is a flag too or Beam knows the flag as a switch.
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
