"""A trainer process: it joins a job, trains its lanes, and saves rows and dense part for a resume.

The launcher starts it (`own_process`), or lets a forked process run `main`. A process of a
scheduler calls `work` itself. The trainer gets its instructions over the rendezvous store, and
passwords from its environment.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
import traceback
from dataclasses import replace
from datetime import timedelta

from foreload.base.errors import ForeloadError
from foreload.base.files import is_full
from foreload.base.interrupts import Interrupts
from foreload.base.json_log import log_as
from foreload.cache.errors import RowsLost
from foreload.trainer.cluster.member.joined_trainer import JOIN_TIMEOUT, JoinedTrainer
from foreload.trainer.cluster.member.trainer_process import TrainerProcess
from foreload.trainer.cluster.messages.rendezvous import EventSender, Rendezvous, join_store
from foreload.trainer.cluster.messages.trainers import Failed, LaunchSpec, LostRows
from foreload.trainer.cluster.processes.starting import TrainerStart
from foreload.trainer.errors import PeerLost, TrainerError
from foreload.trainer.job.job import TrainJob
from foreload.trainer.run.model_code import exits_reported

# Between two checks whether the launcher is alive, before training begins.
LAUNCHER_PAUSE = timedelta(milliseconds=200)

_ready = threading.Event()  # set when this process no longer ends together with the launcher
_leaving = threading.Event()  # set when this trainer shall hand over its lanes and leave


def main() -> int:
    """Run a trainer in the process that the launcher started, and return the exit status."""
    signal.signal(signal.SIGTERM, _leave)
    start = TrainerStart.of_environment(os.environ)
    threading.Thread(target=_leave_with, args=(start.launcher,), name="launcher", daemon=True).start()
    try:
        return work(start)
    except PeerLost as error:
        sys.stderr.write(f"foreload: error: {error}\n")
        return 2


def _leave(number: int, _: object) -> None:
    """Handle a SIGTERM that was sent to this trainer alone: once it trains, it leaves in order."""
    if _ready.is_set():
        _leaving.set()
    else:
        # Before training begins nothing is lost with this process, so the signal ends it at once.
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)


def _leave_with(launcher: int) -> None:
    """End this process if the launcher dies before the trainer is ready.

    Until then nothing is lost with it, so it ends whatever it waits for.
    """
    while not _ready.wait(LAUNCHER_PAUSE.total_seconds()):
        if os.getppid() != launcher:
            os._exit(2)


def work(start: TrainerStart, interrupts: Interrupts | None = None) -> int:
    """Join a job, and train until the end.

    Args:
        start: What the process was started with.
        interrupts: Signals of a process that a scheduler started. Once training begins, a signal
            asks for a clean stop of all trainers. If None, the launcher started this process.

    Returns:
        The exit status: 0 for success; 2 for a known error, which the trainer reports to the
        coordinator; 1 for an unexpected error, whose traceback it prints.

    Raises:
        PeerLost: The rendezvous store cannot be reached.
    """
    trainer, store = start.trainer, join_store(start.rendezvous, JOIN_TIMEOUT)
    rendezvous = Rendezvous(store)
    sender = EventSender(rendezvous, trainer)
    try:
        spec = rendezvous.read(LaunchSpec)
        job, on_host = TrainJob.of(spec.job), start.on_host
        if on_host is not None and on_host.schedule is not None:
            job = replace(job, schedule=on_host.schedule)
        log_as(job.log_format, {"trainer": trainer})
        # A full garbage collection scans all imported modules, which takes a tenth of a second, and
        # may come in any step. Imported modules stay anyway, so the collector can ignore them.
        gc.freeze()
        with exits_reported(f"trainer {trainer}"):
            joined = JoinedTrainer(start, store, rendezvous, sender, spec, job, interrupts)
            TrainerProcess(joined, _ready, _leaving).run()
    except ForeloadError as error:
        if start.on_host is not None and not start.on_host.has_run:
            # The coordinator reports the error too, but only on its own host.
            sys.stderr.write(f"foreload: error: trainer {trainer}: {error}\n")
        with contextlib.suppress(PeerLost):
            sender.send(Failed(error.code, str(error), _lost_rows(error) if isinstance(error, RowsLost) else None))
        return 2
    except Exception as error:
        if isinstance(error, OSError) and is_full(error):
            with contextlib.suppress(PeerLost):
                sender.send(Failed(TrainerError.code, f"trainer {trainer}: the disk is full: free space there"))
            return 2
        traceback.print_exc()
        with contextlib.suppress(PeerLost):
            sender.send(Failed(TrainerError.code, f"trainer {trainer}: {type(error).__name__}: {error} (see above)"))
        return 1
    return 0


def _lost_rows(error: RowsLost) -> LostRows:
    return LostRows(tuple(error.shards), error.covered, None if error.rows is None else dict(error.rows))
