"""Connections to store shards, by redis-py."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from foreload.cache.client.url import StoreUrl


def new_connection(url: StoreUrl, timeout: timedelta) -> Any:
    """A redis-py connection, not yet connected, that never retries or reconnects by itself.

    timeout: for connecting and for each answer of the handshake. Raises StoreTls where an option names a file that is not there.
    """
    settings: dict[str, Any] = {
        "db": url.database,
        "username": url.username,
        "password": url.password,
        "socket_timeout": timeout.total_seconds(),
        "socket_connect_timeout": timeout.total_seconds(),
        "retry": Retry(NoBackoff(), 0),
        "retry_on_timeout": False,
        "health_check_interval": 0,
        "protocol": 2,
    }
    if url.path is not None:
        return redis.UnixDomainSocketConnection(path=url.path, **settings)
    settings |= {"host": url.host, "port": url.port, "socket_keepalive": True}
    return redis.Connection(**settings) if url.scheme == "redis" else redis.SSLConnection(**settings | url.tls_settings())
