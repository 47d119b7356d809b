"""Concurrent calls that wait for others' answers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TypeVar

_Key = TypeVar("_Key")
_Given = TypeVar("_Given")


def results_of(given: Mapping[_Key, _Given | Exception]) -> dict[_Key, _Given]:
    """Return the results of calls.

    Raises:
        Exception: the first one in order, if a call raised.
    """
    results: dict[_Key, _Given] = {}
    for key, result in given.items():
        if isinstance(result, Exception):
            raise result
        results[key] = result
    return results


def at_once(calls: Mapping[_Key, Callable[[], _Given]]) -> dict[_Key, _Given | Exception]:
    """Make calls concurrently, and wait until all have ended.

    One call runs in the calling thread, and each other call in a thread of its own. If the caller
    is interrupted meanwhile, it leaves these threads behind. They do not keep the process alive.

    Returns:
        The result of each call, or the exception that it raised, in order.
    """
    given: dict[_Key, _Given | Exception] = {}

    def make(key: _Key, call: Callable[[], _Given]) -> None:
        try:
            given[key] = call()
        except Exception as error:
            given[key] = error

    waiting = list(calls.items())
    threads = [threading.Thread(target=make, args=call, daemon=True) for call in waiting[1:]]
    for thread in threads:
        thread.start()
    for call in waiting[:1]:
        make(*call)
    for thread in threads:
        thread.join()
    return {key: given[key] for key in calls}
