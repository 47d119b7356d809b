"""Settings and fixtures common to all tests: deterministic property tests, one thread, the data sets' folder, servers, commands.

There is one conftest.py: a second one would be a second module of that name, and so a second call of mypy.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from foreload.trainer.compute import numerics

if TYPE_CHECKING:
    from clicks import Clicks
    from command_line import Command
    from held import Hold
    from tls import TlsServer

    from foreload.cache.client.local import LocalStores
    from foreload.cache.client.store import Store

# What tests and the processes that they kill leave in the temporary folder is removed when the session ends. The name is
# short, since sockets lie in it; the folders of `tmp_path` stay where pytest keeps them.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    _TEMPORARY = tempfile.TemporaryDirectory(prefix="fl", ignore_cleanup_errors=True)
    tempfile.tempdir = os.environ["TMPDIR"] = _TEMPORARY.name

# What runs leave of themselves for later ones goes into no user's folder.
os.environ["XDG_DATA_HOME"] = tempfile.mkdtemp(prefix="data-home-")

# Before any test imports torch; processes that tests start inherit it.
numerics.set_environment()

settings.register_profile(
    "deterministic", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.load_profile("deterministic")


_OF_RUNNING_WORK = {"Command", "Hold", "held", "stop_after", "launched", "interrupted_when"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that act on running work, by what their modules use."""
    for item in items:
        if isinstance(item, pytest.Function) and _OF_RUNNING_WORK & vars(item.module).keys():
            item.add_marker("running")


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder with criteo/ and talkingdata/, named by FORELOAD_DATA; tests that need it are skipped where it is not set."""
    root = os.environ.get("FORELOAD_DATA")
    if not root:
        pytest.skip("FORELOAD_DATA names no folder with the data sets")
    return Path(root)


@pytest.fixture(scope="session", autouse=True)
def processes() -> Iterator[None]:
    """Trainings in this process take longer if that is asked for; the process that forks others ends with the session."""
    from forking import FORKER
    from injection import slow_steps

    slow_steps()
    yield
    FORKER.close()


@pytest.fixture(scope="module")
def one_thread() -> None:
    """The settings of exact arithmetic in this process, with one thread: for modules that train in it."""
    numerics.set_up(1)


@pytest.fixture(scope="module")
def cases_on_path() -> Iterator[None]:
    """`model_cases` and `loss_cases` can be imported by their names, as a user's modules can."""
    folder = str(Path(__file__).parent / "trainer")
    sys.path.insert(0, folder)
    yield
    sys.path.remove(folder)


@pytest.fixture(scope="session")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> Clicks:
    """A small log and its schedule, prepared through the command line; tests damage copies of it only."""
    from clicks import Clicks

    return Clicks.prepare(tmp_path_factory.mktemp("clicks"))


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two authorities, and a certificate of the first for localhost: see tls.write_certificates."""
    from tls import write_certificates

    folder = tmp_path_factory.mktemp("certificates")
    write_certificates(folder)
    return folder


@pytest.fixture(params=["its own", "a front's"])
def tls_server(request: pytest.FixtureRequest, tmp_path: Path, certificates: Path) -> Iterator[TlsServer]:
    """A server that is reached over TLS, its own or that of a front before it."""
    from tls import tls_server_or_skip

    server = tls_server_or_skip(tmp_path / "tls", certificates, request.param)
    yield server
    server.close()


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStores]:
    """Three local servers, for the session; what a test leaves there is the next one's, unless it asks for `store`."""
    from foreload.cache.client.local import LocalStores

    with LocalStores(3, Path(tmp_path_factory.mktemp("stores"))) as stores:
        yield stores


@pytest.fixture
def store(servers: LocalStores) -> Iterator[Store]:
    """A client of the three servers, from which everything was deleted before."""
    from foreload.cache.client.store import Store

    with Store(servers.urls, timedelta(seconds=10)) as store:
        for shard in range(store.shards):
            store.command(shard, "FLUSHALL")
        yield store


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStores]:
    """Three servers of a module, which it may kill and start again."""
    from foreload.cache.client.local import LocalStores

    with LocalStores(3, tmp_path_factory.mktemp("three")) as stores:
        yield stores


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStores]:
    """Four servers of a module."""
    from foreload.cache.client.local import LocalStores

    with LocalStores(4, tmp_path_factory.mktemp("four")) as stores:
        yield stores


@pytest.fixture(scope="module")
def five(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStores]:
    """Five servers of a module."""
    from foreload.cache.client.local import LocalStores

    with LocalStores(5, tmp_path_factory.mktemp("five")) as stores:
        yield stores


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[LocalStores]:
    """Three servers of a test's own."""
    from foreload.cache.client.local import LocalStores

    with LocalStores(3, tmp_path / "stores") as stores:
        yield stores


@pytest.fixture
def urls(three: LocalStores) -> Sequence[str]:
    """Those of a module's three servers, from which everything was deleted before."""
    from foreload.cache.client.store import Store

    with Store(three.urls, timedelta(seconds=10)) as store:
        for shard in range(store.shards):
            store.command(shard, "FLUSHALL")
    return three.urls


@pytest.fixture
def launched() -> Iterator[Callable[..., Command]]:
    """Starts `foreload` with these arguments, as Command takes them. None of it is left afterwards."""
    from command_line import Command

    started: list[Command] = []

    def launch(*arguments: object, **how: Any) -> Command:
        started.append(Command(*arguments, **how))
        return started[-1]

    yield launch
    for one in started:
        one.clear()


@pytest.fixture
def hold(tmp_path: Path) -> Iterator[Hold]:
    """Starts `foreload train` and holds it: hold(words, through=10, ...) takes what Command takes, and gives a HeldRun that has trained `through`.

    The second word is the schedule. wait=False: return as soon as it is started. Nothing of the run is left afterwards.
    """
    from held import holding

    with holding(tmp_path) as start:
        yield start


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file: while it exists, each step of trainings that are started takes a second longer. For what a held run cannot show (`hold`)."""
    from injection import SLOWER

    file = tmp_path / "slow"
    file.touch()
    monkeypatch.setenv(SLOWER, f"1:{file}")
    return file


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 16 MiB; the test is skipped where none may be mounted."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", disk], check=False, capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a small disk: {mounted.stderr.strip()}")
    yield disk
    # Lazily: maps of files there may not have been collected yet.
    subprocess.run(["umount", "-l", disk], check=True)


@pytest.fixture(scope="module")
def small_pieces() -> Iterator[None]:
    """Sort in small buckets, so that there are many of them."""
    from portable_job import PIECE_ROWS

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("foreload.pipelines.planning.plan.PIECE_ROWS", PIECE_ROWS)
        yield


@pytest.fixture(scope="module")
def logs_to_prepare(tmp_path_factory: pytest.TempPathFactory, small_pieces: None) -> list[str]:
    """The command line of `prepare` for small click logs, without --out."""
    from portable_job import click_logs

    return click_logs(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def prepared_logs(logs_to_prepare: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of the schedule that one worker in this process makes of them, undisturbed."""
    from portable_job import contents

    from foreload.pipelines import prepare

    out = tmp_path_factory.mktemp("expected")
    summary = prepare.run([*logs_to_prepare, f"--out={out}"])
    files = contents(out)
    assert summary["rejected"] > 0
    assert summary["fetched"] > 0
    assert {"schedule.json", "rejects.jsonl", "encoding/encoding.json", "segment-000003.json"} <= set(files)
    assert not (out / ".work").exists()
    return files
