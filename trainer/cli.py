"""The command line: find the command, run it, and turn an error into an exit status.

The commands are declared in `trainer.command_line`.
"""

from __future__ import annotations

import argparse
import errno
import gc
import importlib
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import foreload
from foreload.base import process
from foreload.base.errors import ForeloadError, OutputLost
from foreload.base.files import is_full
from foreload.base.interrupts import Interrupts, heeded_afterwards
from foreload.base.output import results_written
from foreload.base.process import use_utf8, working_directory
from foreload.trainer.cluster.processes.starting import ChildProcess, StartProcess
from foreload.trainer.command_line.shared import Command, Parser, check_json
from foreload.trainer.run.model_code import exits_reported

if TYPE_CHECKING:
    from foreload.trainer.cluster.messages.faults import RunObserver

ABOUT = """\
Trains click models whose embedding tables live in Redis. The order of the data is known before training begins, so `prepare` compiles it into a
schedule that says, for every step, which rows the trainers need; `train` follows it, and always has them in time."""

EXAMPLES = """\
a first training, which needs nothing but this package:
  foreload prepare --format synthetic --rows 200000 --eval-fraction 0.1 --batch-size 1024 --lanes 4 --out clicks
  foreload train clicks --run first --store local:3 --trainers 2 --dim 16
  foreload evaluate first

`foreload COMMAND --help` explains each command."""

_READER_GONE = 141  # the exit status of a program that SIGPIPE ends
# These commands leave a schedule or a run, and a scheduler may act on their exit status. If the
# reader of stdout is gone, they report the error that others pass over.
_LEAVE_SOMETHING = ("prepare", "train", "drill")


def main(
    arguments: Sequence[str] | None = None, start_process: StartProcess = ChildProcess, observer: RunObserver | None = None
) -> int:
    """Run a command.

    Args:
        arguments: the words of the command line. If None, those of the process.
        start_process: starts the processes of a training, or of a host that joins one.
        observer: the observer of `foreload train`. Drills have their own.

    Returns:
        The exit status: 0 on success, 2 after a one-line error message, and 128 + N if signal N
        stopped the command. 1: the work is done, but the result could not be written to stdout. 3:
        rows were lost, because more store shards are lost than parity covers. 4: `scrub` found a
        stripe that it cannot repair. 5 and 6: see FULL and PERMANENT in `command_line.training`.
    """
    if arguments is None:
        use_utf8()
    return process.note_exit_status(_run(arguments, start_process, observer))


def _run(arguments: Sequence[str] | None, start_process: StartProcess, observer: RunObserver | None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        with Interrupts() as interrupts, results_written():
            # This comes first: without a working directory, a library that torch loads ends the
            # process.
            working_directory()
            if given[:1] == ["prepare"]:
                # Beam takes long to import, and only prepare needs it.
                with heeded_afterwards():
                    from foreload.pipelines.prepare import run

                gc.enable()
                run(given[1:])
                return 0
            parsed = parser().parse_args(given)
            check_json(getattr(parsed, "json", None))
            parsed.start_process, parsed.observer = start_process, observer
            command: Command = parsed.command
            if parsed.module is not None:
                # The import may take seconds. A signal during it is handled afterwards, since an
                # exception within an import would surface as an error of the module.
                with heeded_afterwards():
                    importlib.import_module(f"foreload.trainer.commands.{parsed.module}")
            gc.enable()
            with exits_reported(f"foreload {given[0]}"):
                return command(parsed)
    except ForeloadError as error:
        if isinstance(error, OutputLost) and error.reader_gone and not {*given[:1]} & {*_LEAVE_SOMETHING}:
            return _READER_GONE
        print(f"foreload: error: {' '.join(str(error).splitlines())}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        print("foreload: stopped", file=sys.stderr)
        return 128 + (interrupts.received or [int(signal.SIGINT)])[0]
    except OSError as error:
        if is_full(error):
            print("foreload: error: the disk is full: free space where this command writes, and start it again", file=sys.stderr)
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            print(
                f"foreload: error: {error.filename}: {error.strerror}; give a place that can be read and written", file=sys.stderr
            )
        else:
            raise
        return 2


def parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line, except for the flags of `prepare`."""
    with heeded_afterwards():
        from foreload.trainer.command_line import (
            beam,
            checkpoints,
            completion,
            models,
            resources,
            stores,
            training,
        )

    top = Parser(
        prog="foreload",
        description=ABOUT,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"foreload {foreload.__version__}", help="print the version and exit")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    commands.add_parser("prepare", help="compile click logs into a schedule", add_help=False)
    training.add_to(commands)
    models.add_to(commands)
    stores.add_to(commands)
    checkpoints.add_to(commands)
    resources.add_to(commands)
    beam.add_to(commands)
    completion.add_to(commands, top)
    return top


if __name__ == "__main__":
    sys.exit(main())
