"""Commands as a user types them, in this process or in one of their own, and nothing of them left when they have ended."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
from forker import FORKER

from foreload.trainer.cli import main
from foreload.trainer.cluster.control import training_status

if TYPE_CHECKING:
    from forked_command import ForkedPopen

ROOT = Path(__file__).resolve().parents[1]
DEADLINE_SECONDS = 180
"""How long is waited for what a command must bring about, its end included."""
MARK = "FORELOAD_TEST_COMMAND"

# What commands say on stderr besides errors.
_PROGRESS = re.compile(
    r"prepare: .*|train: .*|store .*: does not answer yet; .*|"
    r"\d+ lanes x .*|epoch \d+[^:]*: .*|foreload: stopped|stopped after step \d+; go on with: .*|resumed .*|"
)


class Remains:
    """What a command leaves: processes, which inherit a mark of it, and temporary files, for which it gets a folder of its own."""

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex
        # Short, since sockets may lie there.
        self.temporary = Path(tempfile.mkdtemp(prefix="fl"))
        self.environment = {"TMPDIR": str(self.temporary), MARK: self.mark}
        # Of processes that are forked, which have the environment of the one that forked them.
        self.name = self.mark[:15]

    def processes(self) -> list[psutil.Process]:
        """Those that are alive."""
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def _is_ours(self, process: psutil.Process) -> bool:
        if _environment(process).get(MARK) == self.mark:
            return True
        try:
            named = Path(f"/proc/{process.pid}/comm").read_text().strip() == self.name
            return named and process.status() != psutil.STATUS_ZOMBIE
        except (psutil.Error, OSError):
            return False

    def check(self, err: str) -> None:
        """Assert that there are none, a moment after the command has ended; remove them if there are."""
        deadline = time.monotonic() + 10
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        commands = [process.cmdline() for process in left]
        # The libraries' caches and logs stay.
        files = [path.name for path in self.temporary.iterdir() if not path.name.startswith(("torchinductor", "torchelastic"))]
        self.remove()
        assert not commands, (commands, err)
        assert not files, (files, err)

    def kill(self) -> None:
        """End every process at once."""
        alive = self.processes()
        for process in alive:
            process.kill()
        psutil.wait_procs(alive, timeout=10)

    def remove(self) -> None:
        """End and delete everything."""
        self.kill()
        shutil.rmtree(self.temporary, ignore_errors=True)


class Command:
    """A `foreload` command (or another module's) started in a process, and process group, of its own.

    terminal: the path of one, to be its controlling terminal and to print to. within: a command line that starts what follows it, as in another
    namespace. environment: further variables; None for one that it is not to inherit.
    """

    def __init__(
        self,
        *arguments: object,
        module: str = "foreload.trainer.cli",
        terminal: str | None = None,
        within: Sequence[str] = (),
        **environment: str | None,
    ) -> None:
        self.remains = Remains()
        variables = os.environ | {"PYTHONPATH": str(ROOT)} | self.remains.environment | environment
        # The first terminal that the leader of a session opens is its controlling one.
        at_terminal = ["sh", "-c", 'exec "$@" <>"$0" >&0 2>&0', terminal] if terminal is not None else []
        self.process: subprocess.Popen[str] | ForkedPopen = subprocess.Popen(
            [*at_terminal, *within, sys.executable, "-m", module, *map(str, arguments)],
            env={name: value for name, value in variables.items() if value is not None},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def until(self, satisfied: Callable[[], bool]) -> None:
        """Wait for something that the command brings about."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not satisfied():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def interrupt(self, satisfied: Callable[[], bool], number: int = signal.SIGINT) -> None:
        """Once something has come about, do what Ctrl-C in a terminal does: a signal to the whole process group."""
        self.until(satisfied)
        os.killpg(self.process.pid, number)

    @property
    def workers(self) -> list[psutil.Process]:
        """The trainers' processes, in order."""
        workers = [process for process in self.remains.processes() if "foreload.trainer.cluster.worker" in process.cmdline()]
        return sorted(workers, key=lambda process: int(process.environ()["FORELOAD_TRAINER"]))

    def clear(self) -> None:
        """Let nothing be left, whatever became of it."""
        self.remains.remove()
        self.process.communicate()

    def end(self) -> tuple[int, str, str]:
        """Exit status, output and errors; asserts that neither a process nor a temporary file is left."""
        try:
            out, err = self.process.communicate(timeout=DEADLINE_SECONDS)
        except subprocess.TimeoutExpired:
            self.clear()
            raise
        self.remains.check(err)
        return self.process.wait(), out, err


def run_here(*arguments: object, **environment: str) -> tuple[int, str, str]:
    """The same as Command(...).end(), within this process: quicker, as everything is imported already."""
    remains, out, err = Remains(), io.StringIO(), io.StringIO()
    before, folder = dict(os.environ), tempfile.tempdir
    os.environ.update(remains.environment | environment)
    tempfile.tempdir = str(remains.temporary)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main([str(argument) for argument in arguments])
    finally:
        tempfile.tempdir = folder
        os.environ.clear()
        os.environ.update(before)
    remains.check(err.getvalue())
    deadline = time.monotonic() + 10
    while (left := FORKER.alive()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, ([process.pid for process in left], err.getvalue())
    return status, out.getvalue(), err.getvalue()


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ() if process.status() != psutil.STATUS_ZOMBIE else {}
    except (psutil.Error, OSError):
        return {}


def done(*arguments: object, **environment: str) -> str:
    """Run a command that must succeed, in this process; returns what it printed."""
    status, out, err = run_here(*arguments, **environment)
    assert status == 0, err
    return out


def error_of(status: int, err: str) -> str:
    """The one line that says what is wrong; asserts that there is nothing else but progress, and the status 2."""
    assert "Traceback" not in err, err
    wrong = [line for line in err.splitlines() if not _PROGRESS.fullmatch(line)]
    assert len(wrong) == 1, err
    assert wrong[0].startswith("foreload: error: "), err
    assert status == 2
    return wrong[0].removeprefix("foreload: error: ")


def refused(*arguments: object, **environment: str) -> str:
    """Run a command that must be refused, in this process; returns the line that says why."""
    status, _, err = run_here(*arguments, **environment)
    return error_of(status, err)


def free_port() -> int:
    """A TCP port of this host's loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def reached(run: Path, step: int) -> Callable[[], bool]:
    """Whether the run tells through its control socket that it has trained a step."""

    def asked() -> bool:
        told = training_status(run)
        return told is not None and told.step >= step

    return asked


FEATURES = """
label = "clicked"
[table.ad]
rows = 300
{ad_dimension}
[[dense]]
name = "price"
[[feature]]
name = "ad"
table = "ad"
encoding = "id"
[[feature]]
name = "user"
rows = 1000
[[feature]]
name = "site"
rows = 40
"""
COLUMNS = ("clicked", "price", "ad", "user", "site")
CLICKS_ROWS, CLICKS_HELD_OUT = 1200, 120
"""Rows of the log of `Clicks`, and how many of them, the last ones, are for evaluation."""


def write_features(path: Path, ad_dimension: int | None = None) -> Path:
    """The feature file of the logs that write_log writes. ad_dimension: that of the table `ad`, where it is not the job's."""
    path.write_text(FEATURES.format(ad_dimension="" if ad_dimension is None else f"dimension = {ad_dimension}"))
    return path


def click_columns(rows: int) -> dict[str, list[Any]]:
    """Random clicks: columns by name."""
    random = np.random.default_rng(5)
    user = (random.zipf(1.2, rows) - 1) % 700
    return {
        "clicked": (random.random(rows) < 0.2 + 0.5 * (user % 3 == 0)).astype(int).tolist(),
        "price": [round(float(x), 3) for x in random.exponential(5, rows)],
        "ad": ((random.zipf(1.3, rows) - 1) % 300).tolist(),
        "user": [f"u{k}" for k in user],
        "site": [f"s{k}" for k in random.integers(0, 50, rows)],
    }


def write_log(
    path: Path, rows: int, changes: dict[tuple[int, str], str] | None = None, columns: tuple[str, ...] = COLUMNS
) -> Path:
    """Random clicks as CSV. changes: (row from 0, column) -> another text."""
    values = click_columns(rows)
    for (row, column), text in (changes or {}).items():
        values[column][row] = text
    lines = [",".join(columns), *(",".join(str(values[column][row]) for column in columns) for row in range(rows))]
    path.write_text("\n".join(lines) + "\n")
    return path


@dataclass(frozen=True)
class Clicks:
    """A log, its feature file, and its schedule: 2 epochs of 108 steps in 2 lanes, evaluation after each, in several segments."""

    log: Path
    features: Path
    schedule: Path

    @classmethod
    def prepare(cls, folder: Path, **further: object) -> Clicks:
        """Write the log, and prepare the schedule. further: see `options`."""
        clicks = cls(write_log(folder / "log.csv", CLICKS_ROWS), write_features(folder / "features.toml"), folder / "schedule")
        done("prepare", clicks.log, *clicks.options(clicks.schedule, **further))
        return clicks

    def options(self, out: Path, **further: object) -> list[object]:
        """What `foreload prepare` is given, the source aside; further: other values, by flag, None for a flag that is left out."""
        values: dict[str, object] = {
            "format": "csv", "features": self.features, "batch_size": 10, "lanes": 2, "slots": 40, "epochs": 2,
            "eval_fraction": CLICKS_HELD_OUT / CLICKS_ROWS, "segment_bytes": 16000, "out": out,
        }  # fmt: skip
        given = {name: value for name, value in (values | further).items() if value is not None}
        return [word for name, value in given.items() for word in ("--" + name.replace("_", "-"), value)]

    def copy(self, to: Path) -> Path:
        """A copy of the schedule, to be damaged."""
        shutil.copytree(self.schedule, to)
        return to


def fill(disk: Path, leave_bytes: int) -> None:
    """Leave so many bytes free on a disk that others write to."""
    with open(disk / "ballast", "wb") as ballast:
        while (excess := shutil.disk_usage(disk).free - leave_bytes) > 0:
            try:
                os.posix_fallocate(ballast.fileno(), os.fstat(ballast.fileno()).st_size, excess)
            except OSError:
                continue


def flip(path: Path, place: int) -> None:
    """Change one bit of the byte at `place`, counted from the end where negative."""
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(bytes(data))


SMALL = ("--dim", "4", "--lr", "0.05", "--model-options", "bottom=8-4", "top=8-1")
"""A small model for `foreload train`."""
