"""The signals that a call of `foreload train` heeds."""

from __future__ import annotations

import signal
from types import FrameType


class Interrupts:
    """Ctrl-C and SIGTERM: before trainers run they end the call at once; then the first asks for a stop and the second kills."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self.gentle = False

    def __enter__(self) -> Interrupts:
        self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        self.received.append(number)
        if not self.gentle:
            raise KeyboardInterrupt
