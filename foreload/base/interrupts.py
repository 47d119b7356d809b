"""Ctrl-C, SIGTERM and the end of the terminal (SIGHUP), heeded where the program can be stopped."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_AGAIN_SECONDS = 0.005  # between two looks whether the main thread has left a place that would lose the exception
_RELAY_SECONDS = 1.0  # within which the same signal from the terminal and from the parent is one
_COMPILERS = ("/numba/", "/llvmlite/")  # in the paths of Python code that the compiler calls back


def heeded_signals() -> list[signal.Signals]:
    """Those of SIGNALS that are heeded: SIGHUP that is ignored, as under nohup, stays so."""
    return [number for number in SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]


class Interrupts:
    """While entered, these signals raise KeyboardInterrupt in the main thread; with `defer_signals` set they are only noted.

    SIGHUP that is ignored, as under nohup, stays so. Where it is not, output that went to the terminal goes nowhere from then on, for a write to
    a terminal that is gone is an error.

    An exception that is raised within a finalizer, or within a callback from foreign code such as numba's compiler, is printed and
    lost. A signal that arrives there is heeded as soon as the main thread has left the place. One that arrives amid Python's own waiting for a
    lock may leave that as "release unlocked lock": a RuntimeError that came of KeyboardInterrupt leaves this as KeyboardInterrupt.

    relayed: signals come twice, from the terminal and from what started this process (torchrun); the same one within a second is one.

    received: numbers of the signals, in the order of their arrival, those included that came while another Interrupts was entered within.
    """

    def __init__(self, relayed: bool = False) -> None:
        self.received: list[int] = []
        self._relayed = relayed
        self._received_at = 0.0  # of the last signal, by the monotonic clock
        self.defer_signals = False
        self._due = False  # a signal has come for which KeyboardInterrupt is not raised yet

    def __enter__(self) -> Interrupts:
        self._terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]
        self._before = {number: signal.signal(number, self._note) for number in heeded_signals()}
        self._before[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._again)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        outer = getattr(self._before[signal.SIGINT], "__self__", None)
        if isinstance(outer, Interrupts):
            outer.received += self.received
        if self._due and kind is None:
            raise KeyboardInterrupt
        if isinstance(error, RuntimeError) and came_of_interrupt(error):
            raise KeyboardInterrupt from error

    def heed(self) -> None:
        """Raise KeyboardInterrupt from now on, and at once if a signal was only noted so far."""
        self.defer_signals = False
        if self.received:
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        """The handler of SIGNALS: notes the signal, and raises KeyboardInterrupt now or, by the alarm, soon."""
        if number == signal.SIGHUP:
            self._leave_terminals()
            if number in self.received:
                # The shell sends one as its terminal closes, and the kernel another as the shell ends.
                return
        now = time.monotonic()
        if self._relayed and number in self.received and now - self._received_at < _RELAY_SECONDS:
            return
        self._received_at = now
        self.received.append(number)
        if not self.defer_signals:
            self._due = True
            self._again(number, frame)

    def _again(self, _: int, frame: FrameType | None) -> None:
        """Raise KeyboardInterrupt if it is due and would not be lost in `frame`, else have SIGALRM, whose handler this is too, look again."""
        if any(_would_lose_it(caller) for caller in _stack(frame)):
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_SECONDS)
            return
        due, self._due = self._due and not self.defer_signals, False
        if due:
            raise KeyboardInterrupt

    def _leave_terminals(self) -> None:
        """Send stdout and stderr nowhere, where they went to a terminal."""
        with contextlib.suppress(OSError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            for descriptor in self._terminals:
                os.dup2(nowhere, descriptor)
            os.close(nowhere)


@contextlib.contextmanager
def heeded_afterwards() -> Iterator[None]:
    """Have signals that come while entered heeded behind that: amid imports an exception would come out of a module as an error of its own, and as a
    process is started, it would be lost which one that is.
    """
    entered = getattr(signal.getsignal(signal.SIGINT), "__self__", None)
    if not isinstance(entered, Interrupts) or entered.defer_signals:
        yield
        return
    entered.defer_signals = True
    try:
        yield
    finally:
        entered.defer_signals = False
    entered.heed()


def came_of_interrupt(error: BaseException) -> bool:
    """Whether an error is a KeyboardInterrupt, or was raised while one was handled, or because of one."""
    origins, seen = [error], set[int]()
    while origins:
        origin = origins.pop()
        if isinstance(origin, KeyboardInterrupt):
            return True
        if id(origin) not in seen:
            seen.add(id(origin))
            origins += [before for before in (origin.__cause__, origin.__context__) if before is not None]
    return False


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _would_lose_it(frame: FrameType) -> bool:
    """Whether an exception raised below this frame is printed and dropped instead of reaching the main program."""
    name, file = frame.f_code.co_name, frame.f_code.co_filename
    # The import system forgets its locks in a weak reference's callback.
    forgets = name == "cb" and file.startswith("<frozen importlib")
    return name == "__del__" or forgets or any(folder in file for folder in _COMPILERS)
