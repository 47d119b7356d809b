"""The command line: every command, what it takes, what stands for it on the help page, its default, and which values are refused. Not the words."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from golden import pinned

from foreload.base.errors import ForeloadError
from foreload.pipelines.planning import options
from foreload.pipelines.planning.options import PrepareOptions
from foreload.trainer import cli
from foreload.trainer.job.job import TrainJob

WORDS = (
    "", "0", "1", "-1", "1.5", "8", "65", "nan", "x", "a,b", "a=1", "10s", "2h", "2GiB", "auto", "off", "min", "all", "2+1", "local:3", "s3://b/k",
    "redis://:p@h:1", "h:1", "auc", "auc:3", "warmup:3,cosine:9:0.1", "csv", "adam", "locality", "avx2", "planned",
)  # fmt: skip
"""What every value is tried with."""
VALUES: tuple[Any, ...] = (True, False, 1, 0, -1, 1.5, [], ["a=1"], {"a": 1.0}, None)
"""And every setting besides, as Python and the job file give them."""


def commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Every command that can be called, in the order of the help pages."""
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not below:
        yield parser
    for action in below:
        for name, one in action.choices.items():
            yield from commands(options.parser() if (parser.prog, name) == ("foreload", "prepare") else one)


def arguments_of(command: argparse.ArgumentParser) -> dict[str, Any]:
    """By the flags, or what stands for a place: how often it is given, what it takes, its default, and what becomes of WORDS."""
    told: dict[str, Any] = {}
    for action in command._actions:
        name = ", ".join(action.option_strings) or action.metavar or action.dest
        known: dict[str, Any] = {"action": type(action).__name__.strip("_")}
        known |= {"nargs": action.nargs, "metavar": action.metavar, "required": action.required, "default": action.default}
        known |= {"choices": None if action.choices is None else list(action.choices)}
        known |= {} if action.type is None else {"takes": tried(action.type, WORDS)}  # type: ignore[arg-type]
        told[str(name)] = {key: value for key, value in known.items() if value not in (None, False, argparse.SUPPRESS)}
    return told


def tried(parse: Callable[[Any], Any], values: Sequence[Any]) -> dict[str, list[Any]]:
    """What becomes of each value: taken as it is, taken as something else, which is told as JSON has it, or refused with the code of an error."""
    told: dict[str, list[Any]] = {}
    for value in values:
        try:
            outcome = parse(value)
        except ForeloadError as error:
            told.setdefault(f"refused: {error.code}", []).append(value)
        except ValueError:
            told.setdefault("refused", []).append(value)
        else:
            outcome = outcome if isinstance(outcome, int | float | str | list | tuple | dict | None) else str(outcome)
            same = json.dumps(value) == json.dumps(outcome)
            told.setdefault("as given" if same else "as", []).append(value if same else [value, outcome])
    return told


def test_flags_of_every_command() -> None:
    top = cli.parser()
    told = {command.prog: arguments_of(command) for command in commands(top)}
    assert len(told) > 25
    pinned("help.json", {"foreload": arguments_of(top) | {"commands": list(told)}} | told)


def test_settings_of_train() -> None:
    least = {"schedule": "s", "run": "r", "store": "local:3"}
    written = TrainJob.of(least).to_dict()

    def given(name: str) -> Callable[[Any], Any]:
        return lambda value: TrainJob.of(least | {name: value}).to_dict()[name]

    pinned(
        "settings-train.json", {"by default": written, "tried": {name: tried(given(name), (*WORDS, *VALUES)) for name in written}}
    )


def test_settings_of_prepare() -> None:
    least = {"sources": "a.csv", "format": "csv", "features": "f.toml", "batch_size": 10, "out": "s", "eval_fraction": 0.1}
    written = PrepareOptions.of(least).to_dict()
    names = {"eval_sources": "eval_source", "memory_bytes": "memory"}  # as they are given

    def given(name: str) -> Callable[[Any], Any]:
        return lambda value: PrepareOptions.of(least | {names.get(name, name): value}).to_dict()[name]

    pinned(
        "settings-prepare.json",
        {"by default": written, "tried": {name: tried(given(name), (*WORDS, *VALUES)) for name in written}},
    )
