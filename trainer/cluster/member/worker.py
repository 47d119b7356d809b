"""A trainer process: it joins a job, trains its lanes, and leaves rows and dense part where the next one finds them.

The launcher starts it (`own_process`), or has a forked process run `main`; a scheduler's process calls `work` itself.
Its instructions come over the rendezvous store, passwords in its environment.
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
from foreload.cache.errors import RowsLost
from foreload.trainer.cluster.member.joined_trainer import JOIN_TIMEOUT, JoinedTrainer
from foreload.trainer.cluster.member.trainer_process import TrainerProcess
from foreload.trainer.cluster.messages.rendezvous import EventSender, Rendezvous, join_store
from foreload.trainer.cluster.messages.trainers import Failed, LaunchSpec, LostRows
from foreload.trainer.cluster.processes.starting import TrainerStart
from foreload.trainer.errors import PeerLost, TrainerError
from foreload.trainer.job.job import TrainJob
from foreload.trainer.run.model_code import exits_reported

LAUNCHER_PAUSE = timedelta(milliseconds=200)  # between two looks whether the launcher lives, before training begins

_ready = threading.Event()  # set when this process no longer leaves with the launcher
_leaving = threading.Event()  # set when it is to hand its lanes over, and leave


def main() -> int:
    """The process that the launcher starts; returns its exit status."""
    signal.signal(signal.SIGTERM, _leave)
    start = TrainerStart.of_environment(os.environ)
    threading.Thread(target=_leave_with, args=(start.launcher,), name="launcher", daemon=True).start()
    try:
        return work(start)
    except PeerLost as error:
        sys.stderr.write(f"foreload: error: {error}\n")
        return 2


def _leave(number: int, _: object) -> None:
    """SIGTERM at this trainer alone: as soon as it trains it leaves in order; before, nothing is lost with it."""
    if _ready.is_set():
        _leaving.set()
    else:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)


def _leave_with(launcher: int) -> None:
    """End this process if the launcher dies before the trainer is ready: until then nothing is lost, whatever it waits for."""
    while not _ready.wait(LAUNCHER_PAUSE.total_seconds()):
        if os.getppid() != launcher:
            os._exit(2)


def work(start: TrainerStart, interrupts: Interrupts | None = None) -> int:
    """Train; returns the exit status: 0, 2 where it reported to the coordinator why it failed, 1 for an error that was not foreseen, with its
    traceback.

    interrupts: of a process that a scheduler started; once training begins, a signal asks for a clean stop of all trainers. Raises PeerLost where the
    rendezvous store is not there.
    """
    trainer, store = start.trainer, join_store(start.rendezvous, JOIN_TIMEOUT)
    rendezvous = Rendezvous(store)
    sender = EventSender(rendezvous, trainer)
    try:
        spec = rendezvous.read(LaunchSpec)
        job, on_host = TrainJob.of(spec.job), start.on_host
        if on_host is not None and on_host.schedule is not None:
            job = replace(job, schedule=on_host.schedule)
        # What was imported stays: a search for cycles of garbage that goes through it takes a tenth of a second, and may come in any step.
        gc.freeze()
        with exits_reported(f"trainer {trainer}"):
            joined = JoinedTrainer(start, store, rendezvous, sender, spec, job, interrupts)
            TrainerProcess(joined, _ready, _leaving).run()
    except ForeloadError as error:
        if start.on_host is not None and not start.on_host.has_run:
            sys.stderr.write(f"foreload: error: trainer {trainer}: {error}\n")  # on its own host, the coordinator reports it
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
