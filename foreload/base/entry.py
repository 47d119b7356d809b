"""What a program needs of the process that it runs in, before it imports anything heavy."""

from __future__ import annotations

import io
import os
import sys

from foreload.base.errors import SettingError

UTF8 = {"PYTHONUTF8": "1"}
"""The environment of every process that is started: Python's UTF-8 mode, so that names of files are UTF-8 whatever the locale is."""


def use_utf8() -> None:
    """Have names of files be UTF-8, and output never fail because a terminal cannot show it.

    Where the locale has another encoding, this starts the program again, in the same process, in Python's UTF-8 mode: the encoding of names is fixed
    when Python starts, and libraries written in C take UTF-8 alone.
    """
    if sys.getfilesystemencoding() != "utf-8" and UTF8.items() - os.environ.items():
        os.environ.update(UTF8)
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def working_directory() -> str:
    """The path of the working directory. Raises SettingError where it was deleted."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise SettingError("working directory: must exist; it was deleted; change to another one") from None
