"""Waiting for the servers of a store, and saying so."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from datetime import timedelta

from foreload.cache.client.store import Store
from foreload.cache.client.url import StoreUrl, parse_url

SAID_AFTER = timedelta(seconds=1)


def reach(urls: Sequence[str | StoreUrl], silence: timedelta, patience: timedelta = timedelta(seconds=10)) -> None:
    """Return when every server has answered; which one is waited for stands on stderr after a second. Raises StoreError.

    silence: for which a server that is connected may be silent; patience: for which one that cannot be reached is tried.
    """
    for url in urls:
        parsed = url if isinstance(url, StoreUrl) else parse_url(url)
        left_seconds = (patience + silence - SAID_AFTER).total_seconds()
        words = f"store {parsed}: does not answer yet; it is waited for, {left_seconds:.0f} s more at most\n"
        timer = threading.Timer(SAID_AFTER.total_seconds(), sys.stderr.write, [words])
        timer.daemon = True
        timer.start()
        try:
            Store([parsed], silence, patience).close()
        finally:
            timer.cancel()
            timer.join()
