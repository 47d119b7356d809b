"""The root of all errors that foreload raises on purpose, and errors of settings and output.

Each message is one line: field, rule, value received, remedy. Further branches are in
pipelines/errors.py, cache/errors.py and trainer/errors.py; docs/errors.md lists them all.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

ROWS_LOST = 3
"""The exit status of a command for which rows are gone."""


class ForeloadError(Exception):
    """The base class of all errors that foreload raises on purpose.

    Attributes:
        code: a word for programs. It stays when a class or a message changes, and each class has
            its own.
        exit_status: the status of a command that ends with the error.
        permanent: whether the same command fails again until its input is changed.
    """

    code: ClassVar[str] = "error"
    exit_status: int = 2
    permanent: ClassVar[bool] = False


class SettingError(ForeloadError):
    """A setting (a flag, a line of the job file, an argument) is unknown, missing, malformed, or does not fit the others."""

    code = "setting"
    permanent = True


class OutputLost(ForeloadError):
    """A command has done its work, but its result cannot be written to stdout.

    Attributes:
        reader_gone: whether the reader of stdout closed it.
    """

    code = "output-lost"
    exit_status = 1

    def __init__(self, why: str, reader_gone: bool = False) -> None:
        super().__init__(
            f"stdout: the result cannot be written ({why}); the command has done its work, and only its output is missing"
        )
        self.reader_gone = reader_gone


def all_errors(root: type[ForeloadError] = ForeloadError) -> Iterator[type[ForeloadError]]:
    """Yield the imported error classes from a root on, in the order of their definition."""
    yield root
    for kind in root.__subclasses__():
        yield from all_errors(kind)


def error_of(code: str, message: str) -> ForeloadError:
    """Recreate an error of another process from its code and message.

    A class that takes more than a message becomes the nearest class above that takes no more. An
    unknown code becomes the root.
    """
    kind = next((known for known in all_errors() if known.code == code), ForeloadError)
    while kind.__init__ is not Exception.__init__:  # it takes more than a message
        kind = kind.__bases__[0]
    return kind(message)
