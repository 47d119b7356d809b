"""Calls that wait for others' answers, made at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TypeVar

_Key = TypeVar("_Key")
_Given = TypeVar("_Given")


def results_of(given: Mapping[_Key, _Given | Exception]) -> dict[_Key, _Given]:
    """What calls gave. Raises the first exception in order, where there is one."""
    results: dict[_Key, _Given] = {}
    for key, result in given.items():
        if isinstance(result, Exception):
            raise result
        results[key] = result
    return results


def at_once(calls: Mapping[_Key, Callable[[], _Given]]) -> dict[_Key, _Given | Exception]:
    """What each call gives, or the exception that it raises, in order: as soon as all are over. Several run in a thread each.

    Whoever is interrupted meanwhile leaves them behind: they do not keep the process.
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
