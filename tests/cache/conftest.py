"""Real redis-servers for the tests of the store: three of them for the whole session, emptied between tests."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from foreload.cache.client.local import LocalStores
from foreload.cache.client.store import Store


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStores]:
    """Three local servers, for the session."""
    with LocalStores(3, Path(tmp_path_factory.mktemp("stores"))) as stores:
        yield stores


@pytest.fixture
def store(servers: LocalStores) -> Iterator[Store]:
    """A client of the three servers, which are empty."""
    with Store(servers.urls, timedelta(seconds=10)) as store:
        for shard in range(store.shards):
            store.command(shard, "FLUSHALL")
        yield store
