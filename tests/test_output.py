"""Where a command's messages and results go: what cannot be told is not worth the end of a training."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from command_line import ROOT

from foreload.base.errors import OutputLost
from foreload.base.output import Messages, Results
from foreload.pipelines import prepare
from foreload.trainer.run.directory import Run
from foreload.trainer.run.event_log import read_events

Sink = Literal["reader gone", "nobody reads", "disk full", "closed"]
WHY: dict[Sink, str] = {
    "reader gone": "Broken pipe",
    "nobody reads": "nobody reads it",
    "disk full": "No space left on device",
    "closed": "it was closed when foreload began",
}
FOLDER = "run"


@contextlib.contextmanager
def _opened(sink: Sink) -> Iterator[int]:
    """The descriptor of a file that takes nothing; of one that is to be closed, any."""
    if sink in ("disk full", "closed"):
        descriptor = os.open("/dev/full", os.O_WRONLY)
        yield descriptor
        os.close(descriptor)
        return
    reader, writer = os.pipe()
    if sink == "reader gone":
        os.close(reader)
    else:
        os.set_blocking(writer, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writer, b"." * 4096)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writer, b".")
        os.set_blocking(writer, True)
    yield writer
    os.close(writer)
    if sink != "reader gone":
        os.close(reader)


def _foreload(*arguments: object, out: Sink | None = None, err: Sink | None = None) -> tuple[int, str, str]:
    """Run a command as a user does; its status, and what was written where that goes to a pipe that is read."""
    command = [sys.executable, "-m", "foreload", *map(str, arguments)]
    closed = "".join(f" {number}>&-" for number, sink in ((1, out), (2, err)) if sink == "closed")
    if closed:
        command = ["sh", "-c", f'exec "$@"{closed}', "sh", *command]
    with contextlib.ExitStack() as stack:
        to: list[Any] = [subprocess.PIPE if sink is None else stack.enter_context(_opened(sink)) for sink in (out, err)]
        ended = subprocess.run(command, stdout=to[0], stderr=to[1], text=True, cwd=ROOT, check=False)
    return ended.returncode, ended.stdout or "", ended.stderr or ""


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A schedule with an evaluation, of which stderr is told while it trains."""
    out = tmp_path_factory.mktemp("schedule") / "clicks"
    prepare.run(f"--format synthetic --rows 1100 --batch-size 125 --lanes 2 --eval-fraction 0.1 --out {out}".split())
    return out


def _train(clicks: Path, folder: Path) -> list[object]:
    few = ["--dim", "4", "--store", "local:1", "--trainers", "2", "--history", "off", "--digest", "--no-report"]
    return ["train", clicks, "--run", folder / FOLDER, *few]


def _outcome(folder: Path) -> tuple[str, str]:
    """The state of a run, and its digest."""
    return Run.open(folder / FOLDER).saved_status().state, json.loads((folder / FOLDER / "summary.json").read_text())["digest"]


def _messages_lost(folder: Path) -> list[str]:
    return [event["cause"] for event in read_events(folder / FOLDER) if event["kind"] == "messages-lost"]


@pytest.fixture(scope="module")
def undisturbed(clicks: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The outcome where all can be told."""
    folder = tmp_path_factory.mktemp("undisturbed")
    status, out, err = _foreload(*_train(clicks, folder))
    assert status == 0, err
    assert "digest" in out
    assert not _messages_lost(folder)
    return _outcome(folder)


@pytest.mark.parametrize(
    "sink", ["disk full", *(pytest.param(sink, marks=pytest.mark.full) for sink in WHY if sink != "disk full")]
)
def test_a_training_whose_messages_are_lost_ends_as_ever_and_notes_that(
    sink: Sink, clicks: Path, undisturbed: tuple[str, str], tmp_path: Path
) -> None:
    status, out, _ = _foreload(*_train(clicks, tmp_path), err=sink)
    assert status == 0
    assert undisturbed[1] in out
    assert _outcome(tmp_path) == undisturbed
    assert _messages_lost(tmp_path) == [WHY[sink]]


# One that does not read is waited for, as by any program.
@pytest.mark.parametrize(
    "sink", ["reader gone", *(pytest.param(sink, marks=pytest.mark.full) for sink in ("disk full", "closed"))]
)
def test_a_training_whose_result_is_lost_is_saved_and_says_so(
    sink: Sink, clicks: Path, undisturbed: tuple[str, str], tmp_path: Path
) -> None:
    summary = tmp_path / "told.json"
    status, _, err = _foreload(*_train(clicks, tmp_path), "--json", summary, out=sink)
    assert status == 1
    wrong = f"stdout: the result cannot be written ({WHY[sink]}); the command has done its work, and only its output is missing"
    assert err.splitlines()[-1] == f"foreload: error: {wrong}"
    assert _outcome(tmp_path) == undisturbed
    assert json.loads(summary.read_text())["digest"] == undisturbed[1]


def test_with_nothing_open_at_all_a_training_is_saved(clicks: Path, undisturbed: tuple[str, str], tmp_path: Path) -> None:
    assert _foreload(*_train(clicks, tmp_path), out="closed", err="closed")[0] == 1
    assert _outcome(tmp_path) == undisturbed


def test_preparing_without_anybody_to_tell(tmp_path: Path) -> None:
    options = ["--format", "synthetic", "--rows", 300, "--batch-size", 50, "--lanes", 1, "--out"]
    assert _foreload("prepare", *options, tmp_path / "first", err="reader gone")[0] == 0
    assert _foreload("prepare", *options, tmp_path / "second", out="reader gone")[0] == 1
    assert (tmp_path / "first" / "header.json").read_bytes() == (tmp_path / "second" / "header.json").read_bytes()


def test_a_command_that_is_done_ends_quietly_with_its_reader(clicks: Path, tmp_path: Path) -> None:
    for arguments in (["--help"], ["report", clicks, "--out", tmp_path / "page.html"]):
        assert _foreload(*arguments, out="reader gone") == (141, "", "")
        status, _, err = _foreload(*arguments, out="disk full")
        assert (status, err.count("\n")) == (1, 1)
    assert _foreload("--version", out="disk full")[0] == 1


class _Pipe:
    """A pipe, and a stream that writes to it."""

    def __init__(self) -> None:
        self.reader, writer = os.pipe()
        self.stream = os.fdopen(writer, "w", encoding="utf-8")

    def fill(self) -> None:
        """Until it takes nothing more."""
        os.set_blocking(self.stream.fileno(), False)
        with contextlib.suppress(BlockingIOError):
            while os.write(self.stream.fileno(), b"." * 4096):
                pass
        os.set_blocking(self.stream.fileno(), True)

    def read(self) -> str:
        """What is in it."""
        os.set_blocking(self.reader, False)
        read = b""
        with contextlib.suppress(BlockingIOError):
            while more := os.read(self.reader, 65536):
                read += more
        return read.decode()

    def close(self) -> None:
        """Both ends."""
        os.close(self.reader)
        with contextlib.suppress(OSError):
            self.stream.close()


def test_messages_say_that_some_are_missing_once_they_are_read_again() -> None:
    pipe = _Pipe()
    messages = Messages(pipe.stream)
    assert messages.write("größer\n") == 7
    assert pipe.read() == "größer\n"
    pipe.fill()
    for number in range(3):
        messages.write(f"line {number}\n")
    assert messages.lost == "nobody reads it"
    pipe.read()
    messages.write("line 3\n")
    messages.write("line 4\n")
    assert pipe.read() == "foreload: some messages could not be written here, and are missing\nline 3\nline 4\n"
    long = "é" * 5000 + "\n"
    messages.write(long)
    assert pipe.read() == long
    pipe.close()


def test_messages_to_a_stream_without_a_descriptor() -> None:
    stream = io.StringIO()
    messages = Messages(stream)
    print("a", "b", file=messages, flush=True)
    assert (stream.getvalue(), messages.lost, messages.isatty()) == ("a b\n", None, False)
    stream.close()
    messages.write("c")
    assert messages.lost == "I/O operation on closed file"


def test_results_that_are_lost_are_lost_once() -> None:
    with open("/dev/full", "w", encoding="utf-8") as stream:
        results = Results(stream)
        results.write("digest")
        with pytest.raises(OutputLost, match="No space left on device"):
            results.flush()
        results.write("digest")
        results.flush()
