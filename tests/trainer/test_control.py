"""The control socket of a run that trains: typed requests and answers, JSON lines on the wire."""

from __future__ import annotations

import errno
import json
import os
import select
import socket
import socketserver
import tempfile
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from waiting import DEADLINE_SECONDS

from foreload.cache.protocol.shards.shard_status import ShardSnapshot, ShardStatus
from foreload.trainer.cluster.coordinator.control_socket import ControlSocket, RequestQueue
from foreload.trainer.cluster.messages.control import (
    Answer,
    AskRowCounts,
    AskScrubbed,
    AskStatus,
    AskStop,
    ControlRequest,
    Refused,
    RowCountsAnswer,
    RunStatus,
    Stopping,
    ask,
    training_status,
)
from foreload.trainer.errors import MessageError, RunError, ShardsLost

SHARDS = ShardSnapshot((ShardStatus("redis://a:1", "rebuilding", "", 0.25), ShardStatus("redis://b:1")))
STATUS = RunStatus("training", 7, 0, (0, 0, 1), {0: 100, 1: 101}, SHARDS)


def said(run: Path, line: bytes) -> dict[str, Any]:
    """What is answered to a line, as it stands on the wire."""
    with socket.socket(socket.AF_UNIX) as asking, asking.makefile("rwb") as stream:
        asking.connect(os.path.realpath(run / "control.sock"))
        stream.write(line + b"\n")
        stream.flush()
        answer: dict[str, Any] = json.loads(stream.readline())
        return answer


def test_a_client_that_goes_away_before_its_answer_is_no_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    handlers: list[threading.Thread] = []
    asked, gone = threading.Event(), threading.Event()

    def respond(_: ControlRequest) -> Answer:
        if not handlers:
            handlers.append(threading.current_thread())
            asked.set()
            gone.wait()
        return STATUS

    control = ControlSocket(tmp_path, respond)
    try:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(tmp_path / "control.sock"))
            client.sendall(b'{"do": "status"}\n' * 2)
            asked.wait()
        gone.set()
        handlers[0].join()
        assert training_status(tmp_path) == STATUS
    finally:
        control.close()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("depth", [1, 12], ids=["short path", "path longer than a socket's may be"])
def test_the_control_socket_answers_requests_and_refuses_others(tmp_path: Path, depth: int) -> None:
    run = tmp_path.joinpath(*["a folder"] * depth)
    run.mkdir(parents=True)
    asked: list[ControlRequest] = []

    def respond(request: ControlRequest) -> Answer:
        asked.append(request)
        return STATUS if isinstance(request, AskStatus) else Stopping()

    control = ControlSocket(run, respond)
    try:
        assert training_status(run) == STATUS
        assert said(run, b'{"do": "status"}') == {
            "state": "training", "step": 7, "term": 0, "lanes": [0, 0, 1], "trainers": {"0": 100, "1": 101},
            "shards": {"shards": [
                {"url": "redis://a:1", "state": "rebuilding", "why": "", "rebuilt": 0.25},
                {"url": "redis://b:1", "state": "ok", "why": "", "rebuilt": 1.0},
            ], "version": 0, "migrated": 1.0},
            "members": [], "copies": [],
        }  # fmt: skip
        assert said(run, b'{"do": "fly"}') == {
            "error": "cannot do 'fly'; use one of status, stop, replace, move, scrub, scrubbed, row_counts, scale, scaled, checkpoint, checkpointed"
        }
        for malformed in (b"status", b"[]", b'{"ask": 1}', b"[" * 200_000, b'{"do": ' + b"[" * 200_000):
            assert said(run, malformed) == {"error": 'a request is a line such as {"do": "status"}'}
        assert said(run, b'{"do": "replace", "old": "1", "with": "2"}') == {
            "error": "replace: AskReplace: must have 'new'; got old, with"
        }
        assert ask(run, AskStop()) == Stopping()
        assert asked == [AskStatus(), AskStatus(), AskStop()]
    finally:
        control.close()
    assert training_status(run) is None
    assert not list(run.iterdir())


@pytest.mark.parametrize("anywhere", [True, False], ids=["elsewhere", "nowhere"])
def test_where_the_runs_folder_takes_no_socket_it_is_elsewhere_or_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], anywhere: bool
) -> None:
    bind = socketserver.ThreadingUnixStreamServer.server_bind
    elsewhere = Path(tempfile.mkdtemp(prefix="fl"))  # short, since a socket lies there
    monkeypatch.setattr(tempfile, "tempdir", str(elsewhere))

    def refused(server: socketserver.ThreadingUnixStreamServer) -> None:
        if not anywhere or Path(str(server.server_address)).parent == tmp_path:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        bind(server)

    monkeypatch.setattr(socketserver.ThreadingUnixStreamServer, "server_bind", refused)
    control = ControlSocket(tmp_path, lambda _: STATUS)
    assert training_status(tmp_path) == (STATUS if anywhere else None)
    control.close()
    assert not list(elsewhere.iterdir())
    assert not list(tmp_path.iterdir())
    told = f"foreload: warning: {tmp_path / 'control.sock'}: cannot be made (Operation not supported), so the run answers no commands"
    assert capfd.readouterr().err == ("" if anywhere else f"{told} while it trains\n")
    monkeypatch.undo()
    elsewhere.rmdir()


def test_what_is_no_request_is_answered_with_an_error_and_the_next_one_heeded(tmp_path: Path) -> None:
    control = ControlSocket(tmp_path, lambda _: STATUS)
    try:
        with socket.socket(socket.AF_UNIX) as rude, rude.makefile("rwb") as stream:
            rude.connect(str(tmp_path / "control.sock"))
            stream.write(b"\xff\n[]\n")
            stream.flush()
            assert "error" in json.loads(stream.readline())
            assert "error" in json.loads(stream.readline())
        assert training_status(tmp_path) == STATUS
    finally:
        control.close()


def test_a_launcher_that_ends_while_it_is_asked_counts_as_one_that_trains_no_more(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "control.sock"))
        listening.listen()
        with ThreadPoolExecutor(1) as pool:
            told = pool.submit(training_status, tmp_path)
            asked, _ = listening.accept()
            assert asked.recv(100)
            asked.close()
            assert told.result() is None


def test_an_answer_that_is_none_is_refused(tmp_path: Path) -> None:
    for answer, message in ((b"7", "RunStatus: "), (b"[" * 200_000, "nested too deeply")):
        with socket.socket(socket.AF_UNIX) as listening, ThreadPoolExecutor(1) as pool:
            (tmp_path / "control.sock").unlink(missing_ok=True)
            listening.bind(str(tmp_path / "control.sock"))
            listening.listen()
            told = pool.submit(training_status, tmp_path)
            asked, _ = listening.accept()
            with asked:
                asked.sendall(answer + b"\n")
                with pytest.raises(MessageError, match=message):
                    told.result()


def test_a_launcher_that_was_stopped_is_told_of(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "control.sock"))
        listening.listen()
        with pytest.raises(RunError, match="its launcher has not answered"):
            ask(tmp_path, AskStatus(), timedelta(seconds=0.2))


def test_requests_are_answered_by_the_coordinators_thread_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    requests, counted = RequestQueue(), Future[Answer]()
    threads: set[threading.Thread] = set()

    def respond(request: ControlRequest) -> Answer | Future[Answer]:
        threads.add(threading.current_thread())
        match request:
            case AskStatus():
                return STATUS
            case AskRowCounts():
                return counted
            case AskStop():
                raise ShardsLost("shard 1 is lost", [1])
            case _:
                raise ZeroDivisionError("a fault")

    control = ControlSocket(tmp_path, requests.ask)
    try:
        with ThreadPoolExecutor(8) as pool:
            later = pool.submit(ask, tmp_path, AskRowCounts(), timedelta(seconds=DEADLINE_SECONDS))
            patience = timedelta(seconds=DEADLINE_SECONDS)
            several: list[Future[Any]] = [
                pool.submit(ask, tmp_path, AskStatus(), patience),
                pool.submit(ask, tmp_path, AskStop(), patience),
                pool.submit(ask, tmp_path, AskScrubbed(), patience),
            ]
            while not all(one.done() for one in several):
                select.select([requests], [], [], 0.01)
                requests.answer(respond)
            assert [one.result() for one in several] == [
                STATUS,
                Refused("shard 1 is lost"),
                Refused("the request failed: ZeroDivisionError: a fault"),
            ]
            assert not later.done()
            counted.set_result(RowCountsAnswer(()))
            while not later.done():
                requests.answer(respond)
            assert later.result() == RowCountsAnswer(())
    finally:
        requests.close()
        control.close()
    assert threads == {threading.current_thread()}
    assert capfd.readouterr().err.count("Traceback") == 1


@pytest.mark.parametrize("known", [False, True], ids=["not looked at yet", "to be answered later"])
def test_who_still_waits_as_training_ends_is_told_that_nothing_trains(tmp_path: Path, known: bool) -> None:
    requests = RequestQueue()
    control = ControlSocket(tmp_path, requests.ask)
    try:
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(ask, tmp_path, AskStop(), timedelta(seconds=DEADLINE_SECONDS))
            select.select([requests], [], [])
            if known:
                requests.answer(lambda request: Future())
            requests.close()
            assert asked.result() is None
        assert ask(tmp_path, AskStop()) is None
    finally:
        control.close()
