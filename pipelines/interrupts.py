"""Ctrl-C and SIGTERM, heeded where the program can be stopped."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from types import FrameType

_AGAIN_SECONDS = 0.005
_COMPILERS = ("/numba/", "/llvmlite/")


class Interrupts:
    """While entered, both signals raise KeyboardInterrupt in the main thread; with `gentle` set they are only noted.

    An exception that is raised within a finalizer, or within a callback from foreign code such as numba's compiler, is printed and
    lost. A signal that arrives there is heeded as soon as the main thread has left the place.

    received: numbers of the signals, in the order of their arrival, those included that came while another Interrupts was entered within.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self.gentle = False
        self._due = False

    def __enter__(self) -> Interrupts:
        self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        self._before[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._again)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        outer = getattr(self._before[signal.SIGINT], "__self__", None)
        if isinstance(outer, Interrupts):
            outer.received += self.received
        if self._due and kind is None:
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)
        if not self.gentle:
            self._due = True
            self._again(number, frame)

    def _again(self, _: int, frame: FrameType | None) -> None:
        if any(_would_lose_it(at) for at in _stack(frame)):
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_SECONDS)
            return
        due, self._due = self._due and not self.gentle, False
        if due:
            raise KeyboardInterrupt


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _would_lose_it(frame: FrameType) -> bool:
    name, file = frame.f_code.co_name, frame.f_code.co_filename
    # The import system forgets its locks in a weak reference's callback.
    forgets = name == "cb" and file.startswith("<frozen importlib")
    return name == "__del__" or forgets or any(folder in file for folder in _COMPILERS)
