"""`foreload completion`: print a script by which a shell completes foreload's command line."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

from foreload.trainer.command_line.shared import add_plain

SHELLS = ("bash", "zsh")
_PATHS = {
    "FILE",
    "FILE.toml",
    "PATH",
    "DIR",
    "RUN",
    "RUN2",
    "SCHEDULE",
    "CHECKPOINT",
    "EXPORT",
    "SOURCE",
    "NEW",
    "SCORES",
    "TEMPLATE",
}


def add_to(commands: Any, top: argparse.ArgumentParser) -> None:
    """Declare the command.

    Args:
        commands: the subparsers of `top`.
        top: the parser of the whole command line. When the command runs, it has all other commands.
    """
    completion = add_plain(
        commands, "completion", partial(_completion, top), "print a script that completes foreload's command line in a shell",
        "Prints a script by which bash or zsh completes commands, flags, values and paths. In bash: source <(foreload completion bash), "
        "once or in ~/.bashrc. In zsh: save the output of foreload completion zsh as the file _foreload in a folder of $fpath.",
    )  # fmt: skip
    completion.add_argument("shell", choices=SHELLS, help="the shell")


def _completion(top: argparse.ArgumentParser, parsed: argparse.Namespace) -> int:
    import shtab

    from foreload.pipelines.planning.options import parser

    # `prepare` parses its own flags, so its parser here is empty. The real one takes its place.
    for action in _actions(top):
        if isinstance(action, argparse._SubParsersAction) and "prepare" in action.choices:
            action.choices["prepare"] = parser()
    for action in _actions(top):
        _describe(action, shtab.FILE)
    print(shtab.complete(top, parsed.shell))
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the arguments of a command and of its subcommands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _actions(below)


def _describe(action: argparse.Action, paths: object) -> None:
    """Set which values the shell offers for an argument, from its placeholder on the help page.

    Args:
        paths: the value that makes the shell offer paths.
    """
    metavar = action.metavar if isinstance(action.metavar, str) else ""
    if _PATHS & set(metavar.split("|")):
        action.complete = paths  # type: ignore[attr-defined]
    elif action.choices is None and (listed := re.fullmatch(r"\{([\w,-]+)\}", metavar)):
        action.choices = listed[1].split(",")
