"""Settings common to all tests: deterministic property tests, one thread, and the data sets' folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from foreload.trainer.compute import numerics

if TYPE_CHECKING:
    from command_line import Clicks
    from tls import TlsServer

# Before any test imports torch; processes that tests start inherit it.
numerics.set_environment()

settings.register_profile(
    "deterministic", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.load_profile("deterministic")


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder with criteo/ and talkingdata/, named by FORELOAD_DATA; tests that need it are skipped where it is not set."""
    root = os.environ.get("FORELOAD_DATA")
    if not root:
        pytest.skip("FORELOAD_DATA names no folder with the data sets")
    return Path(root)


@pytest.fixture(scope="session")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> Clicks:
    """A small log and its schedule, prepared through the command line."""
    from command_line import Clicks

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
