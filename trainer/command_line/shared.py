"""What the commands share: the parser, common arguments, and the output of a result."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from foreload.base.codec import to_stored
from foreload.base.errors import SettingError
from foreload.base.files import unwritable
from foreload.base.settings import local
from foreload.trainer.job.job_values import masked

Command = Callable[[argparse.Namespace], int]
"""Runs a command with its parsed arguments, and returns the exit status."""


class Parser(argparse.ArgumentParser):
    """A parser that reports an error as one line, as all other errors are reported.

    The line shows no password of a store URL.
    """

    def error(self, message: str) -> NoReturn:
        raise SettingError(f"{masked(message)}; see `{self.prog} --help`")


def add_command(
    commands: Any, name: str, command: tuple[Command, str], help: str, description: str, or_checkpoint: bool = False
) -> argparse.ArgumentParser:
    """Add a command about a run, with RUN, --store and --json. The caller adds its other arguments.

    Args:
        command: as in `add_plain`.
        or_checkpoint: whether the command also takes a checkpoint.
    """
    added = add_plain(commands, name, command, help, description)
    of_run = "the folder that `foreload train --run` wrote"
    if or_checkpoint:
        added.add_argument("run", metavar="RUN|CHECKPOINT", help=f"{of_run}, or one that `foreload checkpoint save` wrote")
    else:
        added.add_argument("run", metavar="RUN", type=a_path("RUN"), help=of_run)
    added.add_argument(
        "--store",
        metavar="URL,...",
        help="URLs of the run's store shards, if they need a password that FORELOAD_STORE_PASSWORD does not give",
    )
    add_json(added, "result")
    return added


def a_path(name: str) -> Callable[[str], str]:
    """Return the type of an argument that must be a path on this machine.

    Args:
        name: the argument, as error messages name it.
    """
    return partial(local, name)


def add_moved(command: argparse.ArgumentParser) -> None:
    """Add --moved to a command that changes or deletes a run's rows on its servers."""
    command.add_argument(
        "--moved",
        action="store_true",
        help="confirm that RUN was moved here from another disk or host, and that no other copy of it is still used",
    )


def add_schedule(command: argparse.ArgumentParser) -> None:
    """Add --schedule to a command that may need the schedule of a checkpoint."""
    command.add_argument(
        "--schedule",
        metavar="SCHEDULE",
        type=a_path("--schedule"),
        help="where the schedule of a CHECKPOINT is now, if it is needed and was moved",
    )


def add_accept_model(command: argparse.ArgumentParser) -> None:
    """Add --accept-model to a command that runs or exports a saved model."""
    command.add_argument(
        "--accept-model",
        action="store_true",
        help="continue although the code of the model is not the code that it was trained with; the run records that",
    )


def add_plain(
    commands: Any, name: str, command: tuple[Command, str] | Command, help: str, description: str
) -> argparse.ArgumentParser:
    """Add a command. The caller adds all of its arguments.

    Args:
        command: the function that runs the command, and the module of `commands` that it uses,
            which is imported first. The function alone, if its imports take no time.
    """
    added: argparse.ArgumentParser = commands.add_parser(name, help=help, description=description, allow_abbrev=False)
    does, module = command if isinstance(command, tuple) else (command, None)
    added.set_defaults(command=does, module=module)
    return added


def add_group(commands: Any, name: str, help: str) -> Any:
    """Add a command that has subcommands, and return the object to which they are added."""
    return commands.add_parser(name, help=help).add_subparsers(title="commands", metavar="COMMAND", required=True)


def add_json(command: argparse.ArgumentParser, what: str) -> None:
    """Add --json to a command that prints a result."""
    command.add_argument("--json", metavar="FILE", type=a_path("--json"), help=f"also write the {what} to this file, as JSON")


def check_json(path: str | Path | None) -> None:
    """Check, before a command does its work, that its result can be written to `path`.

    Raises:
        SettingError: the file cannot be written.
    """
    if path is not None and (why := unwritable(Path(path))):
        raise SettingError(f"--json: cannot write {path}: {why}")


def print_result(parsed: argparse.Namespace, found: object, text: str) -> int:
    """Print a result, and write it to the file of --json. Returns exit status 0.

    Args:
        found: the result, a dataclass or JSON.
        text: the same for the terminal.

    Raises:
        SettingError: the file cannot be written.
    """
    if parsed.json:
        try:
            Path(parsed.json).write_text(json.dumps(to_stored(found), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise SettingError(f"--json: cannot write {parsed.json}: {error.strerror}") from error
    print(text)
    return 0
