"""The `foreload` command: handle signals and `--version` before the slow imports."""

from __future__ import annotations

import gc
import os
import signal
import sys
from types import FrameType

from foreload.base.errors import OutputLost
from foreload.base.interrupts import heeded_signals
from foreload.base.output import guard_messages, results_written


def main() -> int:
    """Run the command line (`foreload.trainer.cli.main`).

    A signal that arrives before the command line can handle it ends the process at once.
    """
    for number in heeded_signals():
        signal.signal(number, _stop)
    guard_messages(results=True)
    import foreload

    if sys.argv[1:] == ["--version"]:
        try:
            with results_written():
                sys.stdout.write(f"foreload {foreload.__version__}\n")
        except OutputLost as error:
            return error.exit_status
        return 0
    if foreload.KERNEL_CACHE:
        sys.stderr.write(f"foreload: note: {foreload.KERNEL_CACHE}\n")
    # Nearly all that imports make is kept. To search it for garbage again and again would take a
    # seventh of their time. The command line enables the collector after its imports.
    gc.disable()
    from foreload.trainer.cli import main as run

    return run()


def beam_worker() -> int:
    """Run `foreload beam-worker`, as a command of its own."""
    sys.argv.insert(1, "beam-worker")
    return main()


def _stop(number: int, _: FrameType | None) -> None:
    """Handle a signal while modules are imported.

    No work has begun. An exception would surface as an error of whichever module is being imported.
    """
    sys.stderr.write("foreload: stopped\n")
    os._exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
