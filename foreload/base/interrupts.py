"""Handling of Ctrl-C, SIGTERM and SIGHUP (the end of the terminal) where the program can stop."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# Interval between checks whether the main thread has left a place that would lose the exception.
_AGAIN_SECONDS = 0.005
# Within this time, the same signal from the terminal and from the parent process counts as one.
_RELAY_SECONDS = 1.0
_COMPILERS = ("/numba/", "/llvmlite/")  # in the paths of Python code that the compiler calls


def heeded_signals() -> list[signal.Signals]:
    """Return the signals of SIGNALS that are handled.

    A SIGHUP that is ignored, as under nohup, stays ignored.
    """
    return [number for number in SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]


class Interrupts:
    """A context in which signals raise KeyboardInterrupt in the main thread.

    While `defer_signals` is set, signals are only recorded.

    A SIGHUP that is ignored, as under nohup, stays ignored. If it is not ignored and arrives,
    output to the terminal is discarded from then on, since a write to a closed terminal is an
    error.

    Python prints and drops an exception raised within a finalizer, or within a callback from
    foreign code such as numba's compiler. A signal that arrives there is handled as soon as the
    main thread has left that place. A signal that arrives while Python itself waits for a lock may
    end that wait with "release unlocked lock". A RuntimeError that was caused by a
    KeyboardInterrupt leaves this context as KeyboardInterrupt.

    Args:
        relayed: whether signals arrive twice, from the terminal and from the process that started
            this one (torchrun). The same signal within a second then counts once.

    Attributes:
        received: the numbers of the signals, in order of arrival. They include those that arrived
            while another Interrupts was entered within this one.
        defer_signals: see above.
    """

    def __init__(self, relayed: bool = False) -> None:
        self.received: list[int] = []
        self._relayed = relayed
        self._received_at = 0.0  # monotonic time of the last signal
        self.defer_signals = False
        self._due = False  # a signal arrived, and KeyboardInterrupt is not raised yet

    def __enter__(self) -> Interrupts:
        self._terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]
        self._before = {number: signal.signal(number, self._note) for number in heeded_signals()}
        self._before[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._again)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        # An Interrupts that was entered before this one records these signals too.
        outer = getattr(self._before[signal.SIGINT], "__self__", None)
        if isinstance(outer, Interrupts):
            outer.received += self.received
        if self._due and kind is None:
            raise KeyboardInterrupt
        if isinstance(error, RuntimeError) and came_of_interrupt(error):
            raise KeyboardInterrupt from error

    def heed(self) -> None:
        """Stop deferring signals.

        Raises:
            KeyboardInterrupt: a signal was recorded.
        """
        self.defer_signals = False
        if self.received:
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Record a signal. This is the handler of SIGNALS.

        It raises KeyboardInterrupt now or, by an alarm, soon.
        """
        if number == signal.SIGHUP:
            self._leave_terminals()
            if number in self.received:
                # The shell sends one SIGHUP when its terminal closes, and the kernel another when
                # the shell ends.
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
        """Raise KeyboardInterrupt if it is due and would not be lost in `frame`.

        If it would be lost, set an alarm to try again. This is also the handler of SIGALRM.
        """
        if any(_would_lose_it(caller) for caller in _stack(frame)):
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_SECONDS)
            return
        due, self._due = self._due and not self.defer_signals, False
        if due:
            raise KeyboardInterrupt

    def _leave_terminals(self) -> None:
        """Redirect stdout and stderr to /dev/null if they go to a terminal."""
        with contextlib.suppress(OSError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            for descriptor in self._terminals:
                os.dup2(nowhere, descriptor)
            os.close(nowhere)


@contextlib.contextmanager
def heeded_afterwards() -> Iterator[None]:
    """Defer signals while the context is entered, and handle them when it is left.

    This is for imports and for starting processes. An exception raised during an import would leave
    the module as an error of its own. An exception raised while a process starts would lose the
    information which process that is.
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
    """Return whether an error is a KeyboardInterrupt, or was caused by one.

    An error that was raised while a KeyboardInterrupt was handled counts too.
    """
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
    """Return whether Python prints and drops an exception raised below this frame."""
    name, file = frame.f_code.co_name, frame.f_code.co_filename
    # The import system removes its locks in the callback of a weak reference.
    forgets = name == "cb" and file.startswith("<frozen importlib")
    return name == "__del__" or forgets or any(folder in file for folder in _COMPILERS)
