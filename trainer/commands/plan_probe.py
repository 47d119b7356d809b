"""Short runs of a schedule, for configurations that the history has no profile of.

Each run trains a few seconds, in a folder that is deleted afterwards. If `foreload plan` is killed,
its short run stops cleanly, and the next plan deletes the folder.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from foreload.base.own_process import command_of
from foreload.trainer.errors import RunError, TrainerError
from foreload.trainer.run.directory import locked
from foreload.trainer.run.history import Profile, read

STEPS = 60  # steps of a short run, if they take less than MOST_SECONDS
LEAST_SECONDS, MOST_SECONDS = 2.0, 12.0  # seconds of training in a short run
# The limit from a run's start to its first step, and from the stop signal to the process's end.
_DEADLINE_SECONDS = 300.0
_PAUSE_SECONDS = 0.1
_PREFIX = "foreload-plan-"  # prefix of the folders' names
_PR_SET_PDEATHSIG = 1
_LIBRARY = ctypes.CDLL(None) if sys.platform == "linux" else None


@dataclass(frozen=True, slots=True)
class Probe:
    """A configuration to run for a moment."""

    trainers: int
    shards: int
    parity: str

    def __str__(self) -> str:
        parity = "" if self.parity == "off" else f", parity {self.parity}"
        return f"{self.trainers} trainer{'s' if self.trainers > 1 else ''}, local:{self.shards}{parity}"


def probe(one: Probe, settings: Sequence[str], log: Callable[[str], None]) -> Profile:
    """Train some steps, stop cleanly, and return the run's profile.

    Args:
        settings: the schedule and the settings of the model, as words of `foreload train`.

    Raises:
        TrainerError: the run failed.
    """
    log(f"running it briefly: {one}")
    with _folder() as (folder, lock):
        history, run = folder / "history.sqlite", folder / "run"
        command = command_of("foreload.trainer.cli", "train", *settings, "--run", str(run), "--history", str(history))
        command += ["--store", f"local:{one.shards}", "--trainers", str(one.trainers), "--parity", one.parity]
        with open(folder / "said", "w+b") as said:
            # The process inherits the lock, so that the folder is not deleted while the process
            # uses it.
            process = subprocess.Popen(
                command,
                stdout=said,
                stderr=said,
                start_new_session=True,
                pass_fds=(lock,),
                preexec_fn=_end_with_parent,  # noqa: PLW1509 - one system call, which takes no lock
            )
            try:
                _stop_after_steps(process, run / "metrics.jsonl")
            finally:
                _end(process)
            said.seek(0)
            words = said.read().decode(errors="replace").strip().splitlines()
        profiles = read(history)
        if not profiles:
            why = next((line for line in reversed(words) if "error" in line), words[-1] if words else "it printed nothing")
            raise TrainerError(f"plan: a short run with {one} left no profile: {why}")
        return profiles[-1]


@contextmanager
def _folder() -> Iterator[tuple[Path, int]]:
    """Make a folder, locked and deleted at exit; yield it with the descriptor of the lock.

    Folders that killed processes left behind are deleted first.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError, RunError), locked(left):
            shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as folder, locked(Path(folder)) as lock:
        assert lock is not None
        yield Path(folder), lock


def _end_with_parent() -> None:
    """Between fork and exec: have the kernel send SIGHUP to this process when its parent dies.

    The signal asks for a clean stop. This works on Linux; elsewhere the process runs to its end.

    A parent that is killed ends thread by thread, and its child is handed from one thread to the
    next, with the signal each time. The run counts SIGHUP only once. The default handler is
    restored, so that the run heeds the signal even if the parent runs under nohup.
    """
    if _LIBRARY is not None:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        _LIBRARY.prctl(_PR_SET_PDEATHSIG, signal.SIGHUP)


def _stop_after_steps(process: subprocess.Popen[bytes], metrics: Path) -> None:
    """Ask for a clean stop once there are enough steps.

    Returns when the process has ended, or its time is over.
    """
    begun, first, asked = time.monotonic(), 0.0, False
    while process.poll() is None:
        now = time.monotonic()
        steps = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        if steps and not first:
            first = now
        if not asked and first and ((steps >= STEPS and now - first >= LEAST_SECONDS) or now - first >= MOST_SECONDS):
            asked, begun = True, now
            process.send_signal(signal.SIGINT)
        if now - max(begun, first) > _DEADLINE_SECONDS:
            return
        time.sleep(_PAUSE_SECONDS)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and what it started.

    The process leads a session of its own, to which its trainers and servers belong.
    """
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_DEADLINE_SECONDS / 10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
