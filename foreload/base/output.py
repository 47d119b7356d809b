"""What a process writes: messages on stderr, which are never worth the end of its work, and results on stdout, which may be.

Whoever read the messages may be gone, or stand still, and the disk that they go to may be full. Then they are left out.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
import threading
from collections.abc import Iterator
from typing import TextIO

from foreload.base.errors import OutputLost

_PATIENCE_MS = 1000  # for a reader that takes nothing; once it has not, it is not waited for until it takes something again
_PIPE_BYTES = 512  # POSIX's least PIPE_BUF: what a pipe takes whole, or not at all, without making the writer wait, if it says that it takes some
_CLOSED = "it was closed when foreload began"
_closed: set[int] = set()  # of stdout and stderr, those that were


def open_closed() -> None:
    """Open /dev/null in the place of stdin, stdout and stderr where they are closed; else the next file to be opened would be taken for one of them.

    Writing to stdout is an error then, as it was: results were asked for, and cannot be had.
    """
    for descriptor, flags in enumerate((os.O_RDONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(descriptor)
        except OSError:
            # The lowest number that is free is this one.
            os.open(os.devnull, flags)
            os.set_inheritable(descriptor, True)
            _closed.add(descriptor)
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - open for as long as the process lives
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - the same


class Messages(io.TextIOBase):
    """A stream in the place of `stream`, to which writing is no error, and takes a second at most; any thread may use it.

    lost: why something could not be written for the first time; None where all was.
    """

    def __init__(self, stream: TextIO, lost: str | None = None) -> None:
        self.lost = lost
        self._stream, self._lock = stream, threading.RLock()  # a signal's handler may write amid a write
        self._stuck = False  # the reader took nothing when it was last waited for
        self._left_out = False  # something was, since something was written
        self._descriptor: int | None = None
        with contextlib.suppress(OSError, ValueError):
            self._descriptor = stream.fileno()

    def write(self, text: str) -> int:
        """Write what can be written; returns its length, whatever became of it."""
        with self._lock:
            if self._left_out and text.strip():
                self._left_out = not self._put("foreload: some messages could not be written here, and are missing\n")
            if self._left_out or not self._put(text):
                self._left_out = True
        return len(text)

    def _put(self, text: str) -> bool:
        """Write it; whether that was done."""
        try:
            if self._descriptor is None:
                self._stream.write(text)
                self._stream.flush()
                return True
            data = memoryview(text.encode(self.encoding, self.errors))
            while data:
                if not self._takes():
                    self.lost = self.lost or "nobody reads it"
                    return False
                data = data[os.write(self._descriptor, data[:_PIPE_BYTES]) :]
        except BlockingIOError:
            self._stuck, self.lost = True, self.lost or "nobody reads it"
            return False
        except (OSError, ValueError) as error:
            self.lost = self.lost or str(getattr(error, "strerror", None) or error)
            return False
        return True

    def _takes(self) -> bool:
        """Whether it takes something now, or soon."""
        poll = select.poll()
        poll.register(self._descriptor or 0, select.POLLOUT)
        self._stuck = not poll.poll(0 if self._stuck else _PATIENCE_MS)
        return not self._stuck

    def flush(self) -> None:
        """Nothing is held back."""

    def fileno(self) -> int:
        """The descriptor behind it. Raises OSError where there is none."""
        return self._stream.fileno()

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return self._descriptor is not None and os.isatty(self._descriptor)

    def writable(self) -> bool:
        """It always is."""
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """That of the stream."""
        return self._stream.encoding or "utf-8"

    @property
    def errors(self) -> str:  # type: ignore[override]
        """What becomes of a character that the encoding lacks."""
        return "backslashreplace"


class Results(io.TextIOBase):
    """A stream in the place of `stream` whose errors are OutputLost, so that they are known from those of other files."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write it. Raises OutputLost."""
        with self._as_lost():
            return self._stream.write(text)

    def flush(self) -> None:
        """Write what is held back. Raises OutputLost."""
        with self._as_lost():
            self._stream.flush()

    @contextlib.contextmanager
    def _as_lost(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            # What is held back, and whatever follows, goes nowhere: else Python would complain as it ends.
            with contextlib.suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)
            why = _CLOSED if 1 in _closed else error.strerror or str(error)
            raise OutputLost(why, isinstance(error, BrokenPipeError)) from error

    def fileno(self) -> int:
        """The descriptor behind it. Raises OSError where there is none."""
        return self._stream.fileno()

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return self._stream.isatty()

    def writable(self) -> bool:
        """It is."""
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """That of the stream."""
        return self._stream.encoding or "utf-8"


@contextlib.contextmanager
def results_written() -> Iterator[None]:
    """Have stdout be `Results` while entered; all of it is written at the end. Raises OutputLost."""
    stream = sys.stdout
    results = Results(stream)
    sys.stdout = results
    try:
        yield
        results.flush()
    except SystemExit:  # of --help
        results.flush()
        raise
    except BaseException:
        with contextlib.suppress(OutputLost):
            results.flush()
        raise
    finally:
        sys.stdout = stream


def guard_messages(results: bool) -> None:
    """Have stderr be `Messages` in this process from now on. results: stdout has those of a command; else it, too, is for messages."""
    open_closed()
    if not isinstance(sys.stderr, Messages):
        sys.stderr = Messages(sys.stderr, _CLOSED if 2 in _closed else None)
    if not results and not isinstance(sys.stdout, Messages):
        sys.stdout = Messages(sys.stdout)


def messages_lost() -> str | None:
    """Why a message of this process could not be written for the first time; None where all were."""
    return sys.stderr.lost if isinstance(sys.stderr, Messages) else None
