"""Wait for the servers of a store, and report it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from datetime import timedelta
from functools import partial

from foreload.base.at_once import at_once, results_of
from foreload.cache.client.store import Store
from foreload.cache.client.url import StoreUrl, parse_url

SAID_AFTER = timedelta(seconds=1)


def reach(urls: Sequence[str | StoreUrl], silence: timedelta, patience: timedelta = timedelta(seconds=10)) -> None:
    """Wait until every server has answered.

    A server that has not answered after a second is reported on stderr.

    Args:
        silence: how long a connected server may take to answer.
        patience: how long to retry a server that cannot be reached.

    Raises:
        StoreError: a server did not answer in time.
    """

    def reached(url: StoreUrl) -> None:
        left_seconds = (patience + silence - SAID_AFTER).total_seconds()
        words = f"store {url}: does not answer yet; waiting {left_seconds:.0f} s more at most\n"
        timer = threading.Timer(SAID_AFTER.total_seconds(), sys.stderr.write, [words])
        timer.daemon = True
        timer.start()
        try:
            Store([url], silence, patience).close()
        finally:
            timer.cancel()
            timer.join()

    parsed = [url if isinstance(url, StoreUrl) else parse_url(url) for url in urls]
    results_of(at_once({place: partial(reached, url) for place, url in enumerate(parsed)}))
