"""Signals reach the program wherever it is when they arrive."""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from numba import njit
from numba.core import event
from waiting import DEADLINE_SECONDS, wait_until

from foreload.base.interrupts import SIGNALS, Interrupts


@pytest.fixture(autouse=True)
def with_a_terminal() -> Iterator[None]:
    """As in a terminal, also where these tests themselves run under nohup: the end of a terminal is not ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def send(number: int = signal.SIGINT) -> None:
    """A signal to this process."""
    os.kill(os.getpid(), number)


def wait() -> None:
    """Wait for the KeyboardInterrupt that a signal raises here; returns, and the test fails, if none has come by the deadline."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline:
        time.sleep(0.001)


class Finalized:
    """Sends the signal within its finalizer, where an exception would be lost."""

    def __init__(self, number: int) -> None:
        self.number, self.ended = number, list[bool]()

    def __del__(self) -> None:
        send(self.number)
        self.ended.append(True)


class Listener(event.Listener):
    """Sends the signal as numba's compiler begins and ends."""

    def on_start(self, event: Any) -> None:
        send()

    def on_end(self, event: Any) -> None:
        send()


def finalize(number: int) -> None:
    """Send it within a finalizer."""
    thing = Finalized(number)
    ended = thing.ended
    del thing
    assert ended == [True]


def in_plain_code(number: int) -> None:
    send(number)
    wait()


def in_a_finalizer(number: int) -> None:
    finalize(number)
    wait()


def in_the_wait_for_a_lock(number: int) -> None:
    """As in `Condition.wait`, where that has just given the lock back: to leave the block releases it once more."""
    lock = threading.Lock()
    with lock:
        lock.release()
        send(number)
        wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("place", [in_plain_code, in_a_finalizer, in_the_wait_for_a_lock])
def test_a_signal_ends_the_work(place: Callable[[int], None], number: int) -> None:
    before = [signal.getsignal(n) for n in (*SIGNALS, signal.SIGALRM)]
    with Interrupts() as outer:
        with pytest.raises(KeyboardInterrupt), Interrupts() as interrupts:
            place(number)
        assert interrupts.received == outer.received == [number]
    assert [signal.getsignal(n) for n in (*SIGNALS, signal.SIGALRM)] == before


def test_under_nohup_the_end_of_the_terminal_is_none_of_ours() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts:
            send(signal.SIGHUP)
        assert interrupts.received == []
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_while_numba_compiles() -> None:
    @njit
    def twice(x: int) -> int:
        return 2 * x

    def compile_and_wait() -> None:
        with event.install_listener("numba:compile", Listener()):
            assert twice(4) == 8
            wait()

    with pytest.raises(KeyboardInterrupt) as caught, Interrupts() as interrupts:
        compile_and_wait()
    assert interrupts.received == [signal.SIGINT] * 2
    assert twice.signatures, "it was compiled to the end"
    assert not [at for at in traceback.extract_tb(caught.tb) if "/numba/" in at.filename]


def test_a_signal_at_the_very_end_is_not_lost() -> None:
    with pytest.raises(KeyboardInterrupt), Interrupts():
        finalize(signal.SIGINT)


def test_a_deferred_signal_is_only_noted_and_a_terminal_that_hangs_up_twice_is_noted_once() -> None:
    with Interrupts() as interrupts:
        interrupts.defer_signals = True
        send(signal.SIGHUP)
        send(signal.SIGHUP)
        send(signal.SIGTERM)
        finalize(signal.SIGINT)
        # The finalizer's own may be handled a little later.
        wait_until(lambda: len(interrupts.received) == 3)
    assert interrupts.received == [signal.SIGHUP, signal.SIGTERM, signal.SIGINT]
