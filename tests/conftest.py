"""Settings common to all tests: deterministic property tests, one thread, and the data sets' folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from trainer import numerics

if TYPE_CHECKING:
    from command_line import Clicks

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
