"""Commands as a user types them, in this process or in one of their own, and nothing of them left when they have ended."""

from __future__ import annotations

import contextlib
import io
import itertools
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
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from forking import COMMAND_LINE, FORKER, ForkedCommand
from waiting import DEADLINE_SECONDS, wait_until

from foreload.trainer import cli
from foreload.trainer.cluster.messages.control import RunStatus, training_status
from foreload.trainer.errors import RunError

if TYPE_CHECKING:
    from injection import AnyFault

ROOT = Path(__file__).resolve().parents[2]
MARK = "FORELOAD_TEST_COMMAND"

_READ_LATE = {"FORELOAD_JOB_TOKEN", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
"""Variables that are read when a command runs: it may be forked from a process that has other ones."""

# What commands say on stderr besides errors.
_PROGRESS = re.compile(
    r"prepare: .*|train: .*|store .*: does not answer yet; .*|trainer \d+: (store shard .*: does not answer, .*|the store shards answer again)|"
    r"test: .*|\d+ lanes x .*|epoch \d+[^:]*: .*|foreload: (?!error: |warning: ).*|stopped after step \d+; go on with: .*|resumed .*|"
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
            named = Path(f"/proc/{process.pid}/comm").read_text(encoding="utf-8").strip() == self.name
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

    def wait_for_python(self) -> None:
        """Wait until none of the processes is alive but stores' servers."""
        left = [process for process in self.processes() if _runs_python(process)]
        psutil.wait_procs(left, timeout=DEADLINE_SECONDS)

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


def main(arguments: Sequence[str]) -> int:
    """`foreload.trainer.cli.main` in this process, which forks the rendezvous host and the trainers of a training."""
    return cli.main(arguments, FORKER)


class Command:
    """A `foreload` command (or another module's) in a process, and process group, of its own. None of it may be left at its `end`.

    It is forked from a process that has imported everything, unless `anew` is set, for what must start as a user starts it, or libraries would read
    other settings as they are imported, or one of the arguments after `anew` is given.
    """

    def __init__(
        self,
        *arguments: object,
        faults: Sequence[AnyFault] = (),
        may_kill: bool = True,
        anew: bool = False,
        module: str = COMMAND_LINE,
        terminal: str | None = None,
        within: Sequence[str] = (),
        folder: Path | None = None,
        **environment: str | None,
    ) -> None:
        """faults, may_kill: what is injected into a training (`injection.Injector`); terminal: the path of one, to be its controlling terminal and to
        print to; within: a command line that starts what follows it, as in another namespace; folder: its working directory, by default this
        process'; environment: further variables, None for one that it does not inherit.
        """
        self.remains = Remains()
        self._texts: tuple[str, str] | None = None
        words = [str(argument) for argument in arguments]
        variables = os.environ | {"PYTHONPATH": str(ROOT)} | self.remains.environment
        # Files, not pipes, so that what it has said so far can be read at any time.
        self._output = Path(tempfile.mkdtemp(prefix="said"))
        self.process: subprocess.Popen[bytes] | ForkedCommand
        with open(self._output / "out", "wb") as out, open(self._output / "err", "wb") as err:
            own = anew or terminal or within or environment.keys() - _READ_LATE or module != COMMAND_LINE
            variables = {name: value for name, value in (variables | environment).items() if value is not None}
            if not own and FORKER.can_fork(words):
                self.process = FORKER.command(words, variables, self.remains.name, out, err, faults, may_kill, folder)
                return
            assert not faults, "faults are injected into forked commands only"
            assert may_kill
            # The first terminal that the leader of a session opens is its controlling one.
            # Under nohup this process ignores the end of a terminal, and what it starts would, too.
            heeding = ["env", "--default-signal=HUP", "sh", "-c", 'exec "$@" <>"$0" >&0 2>&0']
            at_terminal = [*heeding, terminal] if terminal is not None else []
            self.process = subprocess.Popen(
                [*at_terminal, *within, sys.executable, "-m", module, *words],
                env=variables, cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True,
            )  # fmt: skip

    @property
    def said(self) -> str:
        """What it has written to stderr so far."""
        return self._text("err") if self._texts is None else self._texts[1]

    def _text(self, name: str) -> str:
        return (self._output / name).read_text(encoding="utf-8")

    def until(self, satisfied: Callable[[], bool]) -> None:
        """Wait for something that the command brings about, and that stays true."""

        def over() -> bool:
            # The command may have ended just after it was looked at.
            ended, is_satisfied = self.process.poll() is not None, satisfied()
            assert is_satisfied or not ended, (self.process.poll(), self.said)
            return is_satisfied

        wait_until(over, lambda: self.said)

    def answer(self, run: Path) -> RunStatus:
        """What the run that it trains tells, as soon as it answers."""
        told: list[RunStatus | None] = []

        def answered() -> bool:
            told.append(status_of(run))
            return told[-1] is not None

        self.until(answered)
        assert told[-1] is not None
        return told[-1]

    def stand(self) -> None:
        """Wait until it stands still, as a CallFault or a LauncherFault with SIGSTOP has it."""
        process = psutil.Process(self.process.pid)
        self.until(lambda: process.status() == psutil.STATUS_STOPPED)

    def interrupt(self, satisfied: Callable[[], bool]) -> None:
        """Once something has come about, do what Ctrl-C in a terminal does: a signal to the whole process group."""
        self.until(satisfied)
        os.killpg(self.process.pid, signal.SIGINT)

    @property
    def workers(self) -> list[psutil.Process]:
        """The trainers' processes that are alive, in order."""
        if isinstance(self.process, ForkedCommand):
            alive = {process.pid: process for process in self.remains.processes()}
            return [alive[pid] for _, (pid, _) in sorted(self.process.trainers().items()) if pid in alive]
        workers = [
            process for process in self.remains.processes() if "foreload.trainer.cluster.member.worker" in process.cmdline()
        ]
        return sorted(workers, key=lambda process: int(process.environ()["FORELOAD_TRAINER"]))

    @property
    def statuses(self) -> dict[int, int | None]:
        """The exit status of each trainer of a forked command that has ended, by number."""
        assert isinstance(self.process, ForkedCommand)
        return {trainer: status for trainer, (_, status) in self.process.trainers().items()}

    def clear(self) -> None:
        """Leave nothing of it, whatever it did."""
        self.remains.remove()
        self.process.wait(timeout=DEADLINE_SECONDS)
        shutil.rmtree(self._output, ignore_errors=True)
        if isinstance(self.process, ForkedCommand):
            self.process.close()

    def communicate(self) -> tuple[str, str]:
        """Wait until it has ended, and all that it started but servers of its own; return its output and errors."""
        try:
            self.process.wait(timeout=DEADLINE_SECONDS)
        except subprocess.TimeoutExpired:
            self.clear()
            raise
        if self._texts is None:
            self.remains.wait_for_python()
            self._texts = self._text("out"), self._text("err")
            shutil.rmtree(self._output)
        return self._texts

    def end(self) -> tuple[int, str, str]:
        """Exit status, output and errors; asserts that neither a process nor a temporary file is left."""
        out, err = self.communicate()
        self.remains.check(err)
        return self.process.wait(), out, err


def refused_apart(*arguments: object, **environment: Any) -> str:
    """Run a command that must be refused in a process of its own, where nothing of it can hide; returns the line that says why."""
    status, _, err = Command(*arguments, **environment).end()
    return error_of(status, err)


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


def _runs_python(process: psutil.Process) -> bool:
    try:
        return "python" in Path(process.exe()).name
    except (psutil.Error, OSError):
        return False


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


_FIRST_PORT = 11_000 + 1_000 * (int(os.environ.get("PYTEST_XDIST_WORKER", "gw9")[2:]) % 10) + os.getpid() % 1_000
_PORTS = itertools.cycle(range(_FIRST_PORT, _FIRST_PORT + 1_000))
"""Below those that Linux gives to connections, and others for each of pytest's processes, so that nobody takes one between its choice and its use."""


def free_port() -> int:
    """A TCP port of this host's loopback that nobody listens on, and that nobody else is given before it is used."""
    with socket.socket() as probe:
        for port in _PORTS:
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return port
    raise AssertionError("no port is free")


def status_of(run: Path) -> RunStatus | None:
    """What a run that trains tells; None where nothing trains, and where the launcher is too busy to answer in time."""
    with contextlib.suppress(RunError):
        return training_status(run)
    return None


def reached(run: Path, step: int) -> Callable[[], bool]:
    """Whether the run tells through its control socket that it has trained a step."""

    def asked() -> bool:
        told = status_of(run)
        return told is not None and told.step >= step

    return asked


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
