"""Output of a process: messages on stderr and results on stdout.

Failing to write a message never ends the work of a process. Failing to write a result may. The
reader of the messages may have exited or stalled, and the disk that they go to may be full.
Messages are then left out.
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

# How long to wait for a reader that takes nothing. After one such wait, there is no further one
# until the reader takes something again.
_PATIENCE_MS = 1000
_CLOSED = "it was closed when foreload began"
# The standard streams that were closed when foreload began.
_closed: set[int] = set()


def open_closed() -> None:
    """Open /dev/null in place of stdin, stdout and stderr if they are closed.

    Otherwise the next file that is opened would take their place. Writing to stdout remains an
    error, as it was: results were requested and cannot be delivered.
    """
    for descriptor, flags in enumerate((os.O_RDONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(descriptor)
        except OSError:
            # open() returns the lowest free descriptor, which is this one.
            os.open(os.devnull, flags)
            os.set_inheritable(descriptor, True)
            _closed.add(descriptor)
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - open for as long as the process lives
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - the same


class Messages(io.TextIOBase):
    """A replacement for a stream, on which a write raises no error and takes at most a second.

    Any thread may use it.

    Attributes:
        stream: what it replaces.
        lost: why something could not be written for the first time. If None, everything was
            written.
    """

    def __init__(self, stream: TextIO, lost: str | None = None) -> None:
        self.lost = lost
        # The lock is reentrant, since a signal handler may write during a write.
        self.stream, self._lock = stream, threading.RLock()
        # Whether the reader took nothing during the last wait.
        self._stuck = False
        # Whether something was left out after the last text that was written.
        self._left_out = False
        self._descriptor: int | None = None
        with contextlib.suppress(OSError, ValueError):
            self._descriptor = stream.fileno()

    def write(self, text: str) -> int:
        """Write as much as possible. Returns the length of the text, whatever was written."""
        with self._lock:
            # After a gap, first say that messages are missing. Blank text alone does not end a gap.
            if self._left_out and text.strip():
                self._left_out = not self._put("foreload: some messages could not be written here, and are missing\n")
            if self._left_out or not self._put(text):
                self._left_out = True
        return len(text)

    def _put(self, text: str) -> bool:
        """Write a text, and return whether that succeeded."""
        try:
            if self._descriptor is None:
                self.stream.write(text)
                self.stream.flush()
                return True
            data = memoryview(text.encode(self.encoding, self.errors))
            while data:
                # A pipe that reports room takes PIPE_BUF bytes whole and without blocking.
                if not self._takes():
                    self.lost = self.lost or "nobody reads it"
                    return False
                data = data[os.write(self._descriptor, data[: select.PIPE_BUF]) :]
        except BlockingIOError:
            self._stuck, self.lost = True, self.lost or "nobody reads it"
            return False
        except (OSError, ValueError) as error:
            self.lost = self.lost or str(getattr(error, "strerror", None) or error)
            return False
        return True

    def _takes(self) -> bool:
        """Return whether the reader takes something now, or soon."""
        poll = select.poll()
        poll.register(self._descriptor or 0, select.POLLOUT)
        self._stuck = not poll.poll(0 if self._stuck else _PATIENCE_MS)
        return not self._stuck

    def flush(self) -> None:
        """Do nothing, since nothing is buffered."""

    def fileno(self) -> int:
        """Return the descriptor of the stream.

        Raises:
            OSError: the stream has none.
        """
        return self.stream.fileno()

    def isatty(self) -> bool:
        """Return whether the stream is a terminal."""
        return self._descriptor is not None and os.isatty(self._descriptor)

    def writable(self) -> bool:
        """Return True."""
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The encoding of the stream."""
        return self.stream.encoding or "utf-8"

    @property
    def errors(self) -> str:  # type: ignore[override]
        """How to write a character that the encoding lacks."""
        return "backslashreplace"


class Results(io.TextIOBase):
    """A replacement for a stream whose errors are OutputLost.

    So they can be distinguished from errors of other files.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a text.

        Raises:
            OutputLost: it cannot be written.
        """
        with self._as_lost():
            return self._stream.write(text)

    def flush(self) -> None:
        """Write what is buffered.

        Raises:
            OutputLost: it cannot be written.
        """
        with self._as_lost():
            self._stream.flush()

    @contextlib.contextmanager
    def _as_lost(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            # Discard what is buffered and whatever follows. Otherwise Python would report the error
            # again when it exits.
            with contextlib.suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)
            why = _CLOSED if 1 in _closed else error.strerror or str(error)
            raise OutputLost(why, isinstance(error, BrokenPipeError)) from error

    def fileno(self) -> int:
        """Return the descriptor of the stream.

        Raises:
            OSError: the stream has none.
        """
        return self._stream.fileno()

    def isatty(self) -> bool:
        """Return whether the stream is a terminal."""
        return self._stream.isatty()

    def writable(self) -> bool:
        """Return True."""
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The encoding of the stream."""
        return self._stream.encoding or "utf-8"


@contextlib.contextmanager
def results_written() -> Iterator[None]:
    """Replace stdout by `Results` while the context is entered, and flush it at the end.

    Raises:
        OutputLost: stdout cannot be written.
    """
    stream = sys.stdout
    results = Results(stream)
    sys.stdout = results
    try:
        yield
        results.flush()
    # --help ends with SystemExit.
    except SystemExit:
        results.flush()
        raise
    except BaseException:
        with contextlib.suppress(OutputLost):
            results.flush()
        raise
    finally:
        sys.stdout = stream


def guard_messages(results: bool) -> None:
    """Replace stderr by `Messages` in this process from now on.

    Args:
        results: whether stdout is for the results of a command. If not, stdout is for messages too.
    """
    open_closed()
    if not isinstance(sys.stderr, Messages):
        sys.stderr = Messages(sys.stderr, _CLOSED if 2 in _closed else None)
    if not results and not isinstance(sys.stdout, Messages):
        sys.stdout = Messages(sys.stdout)


def messages_lost() -> str | None:
    """Return why a message of this process could not be written for the first time.

    If None, all messages were written.
    """
    return sys.stderr.lost if isinstance(sys.stderr, Messages) else None
