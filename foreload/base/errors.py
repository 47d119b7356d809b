"""The root of every error that foreload raises on purpose, and those of preparing or reading a schedule.

Each message is one line: field, rule, value received, remedy. The other branches stand in cache/errors.py and trainer/errors.py; docs/errors.md
lists them all.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

ROWS_LOST = 3
"""The exit status of a command for which rows are gone."""


class ForeloadError(Exception):
    """Anything that foreload raises on purpose.

    code: a word for programs, which stays where a class or a message changes; every class has its own. exit_status: what a command that ends
    with it exits with. permanent: the same command ends with it again, however often, until what it was given is changed.
    """

    code: ClassVar[str] = "error"
    exit_status: int = 2
    permanent: ClassVar[bool] = False


class SettingError(ForeloadError):
    """A setting (a flag, a line of the job file, an argument) is unknown, missing or malformed, or does not fit the others."""

    code = "setting"
    permanent = True


class OutputLost(ForeloadError):
    """A command has done its work, and its result cannot be written to stdout. reader_gone: since whoever read it has had enough."""

    code = "output-lost"
    exit_status = 1

    def __init__(self, why: str, reader_gone: bool = False) -> None:
        super().__init__(
            f"stdout: the result cannot be written ({why}); the command has done its work, and only its output is missing"
        )
        self.reader_gone = reader_gone


def all_errors(root: type[ForeloadError] = ForeloadError) -> Iterator[type[ForeloadError]]:
    """The classes of the tree that are imported by now, from a root on, in the order of their definition."""
    yield root
    for kind in root.__subclasses__():
        yield from all_errors(kind)


def error_of(code: str, message: str) -> ForeloadError:
    """An error that another process raised, made again from its code and message.

    Of a class that takes more than a message it is the nearest class above; of an unknown code, the root.
    """
    kind = next((known for known in all_errors() if known.code == code), ForeloadError)
    while kind.__init__ is not Exception.__init__:  # it takes more than a message
        kind = kind.__bases__[0]
    return kind(message)
