"""Servers that do not answer are asked all at once, by whatever asks several."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from foreload.cache.errors import StoreError
from foreload.trainer.memory.seen_servers import ask_servers
from foreload.trainer.run.reach import reach
from foreload.trainer.saved.migration import NewServers

LONG = timedelta(seconds=60)


def ask(urls: Sequence[str]) -> None:
    reports = ask_servers(dict(enumerate(urls)), "namespace", 1)
    assert [(report["shard"], report["state"]) for report in reports] == [(0, "down"), (1, "down"), (2, "down")]


def wait_for(urls: Sequence[str]) -> None:
    with pytest.raises(StoreError, match=r"0\.sock"):
        reach(urls, LONG, timedelta(seconds=1))


def leave(urls: Sequence[str]) -> None:
    manifest: Any = SimpleNamespace(namespace="namespace", identity=None, lanes=1)
    assert NewServers(manifest, LONG, None, lambda placement, urls: None).leave(dict(enumerate(urls))) == set()


def connected_at_once(paths: Sequence[Path], listening: Sequence[socket.socket]) -> list[bool]:
    """Take a connection at each, and only then look which are still open; then end them all."""
    with ExitStack() as stack:
        connections = [stack.enter_context(one.accept()[0]) for one in listening]
        ended = select.poll()
        for connection in connections:
            ended.register(connection, select.POLLRDHUP)
        over = {descriptor for descriptor, _ in ended.poll(0)}
        # Whoever tries again is refused.
        for path in paths:
            path.unlink()
        return [connection.fileno() not in over for connection in connections]


@pytest.mark.parametrize("act", [ask, wait_for, leave])
def test_all_are_connected_to_while_none_has_answered(tmp_path: Path, act: Callable[[Sequence[str]], None]) -> None:
    paths = [tmp_path / f"{number}.sock" for number in range(3)]
    with ExitStack() as stack, ThreadPoolExecutor(1) as pool:
        listening = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in paths]
        for one, path in zip(listening, paths, strict=True):
            one.bind(str(path))
            one.listen()
            one.settimeout(LONG.total_seconds())
        seen = pool.submit(connected_at_once, paths, listening)
        act([f"unix://{path}" for path in paths])
        assert seen.result() == [True] * 3
