"""Messages as JSON, one object a line, for tools that collect logs (`--log-format json`).

The objects are described in docs/monitoring.md.
"""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, TextIO

from foreload.base.output import Messages

_PREFIX = re.compile(r"(?:foreload: )?(warning|error|note): ")


class JsonLines(Messages):
    """A replacement for stderr that writes each line of text as an object of kind "message".

    Any thread may use it.

    Args:
        always: entries of every object.
    """

    def __init__(self, stream: TextIO, lost: str | None, always: Mapping[str, Any]) -> None:
        super().__init__(stream, lost)
        self._always = dict(always)
        self._rest, self._lines = "", threading.RLock()

    def write(self, text: str) -> int:
        """Write the lines that the text completes, except for blank ones."""
        with self._lines:
            *lines, self._rest = (self._rest + text).split("\n")
            for line in filter(str.strip, lines):
                prefix = _PREFIX.match(line)
                level, words = (prefix[1], line[prefix.end() :]) if prefix else ("info", line.removeprefix("foreload: "))
                self.record({"kind": "message", "level": level, "text": words})
        return len(text)

    def record(self, entries: Mapping[str, Any]) -> None:
        """Write an object. Its time is now, unless the entries say it."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        super().write(json.dumps({"time": now, **entries, **self._always}) + "\n")

    def isatty(self) -> bool:
        """Return False: nothing is overwritten, also on a terminal."""
        return False


def log_as(form: object, always: Mapping[str, Any] | None = None) -> None:
    """Write the messages of this process as JSON from now on, if `form` is "json".

    Args:
        always: entries of every object.
    """
    if form != "json":
        return
    stderr, stdout_has_messages = sys.stderr, isinstance(sys.stdout, Messages)
    stream, lost = (stderr.stream, stderr.lost) if isinstance(stderr, Messages) else (stderr, None)
    sys.stderr = JsonLines(stream, lost, always or {})
    if stdout_has_messages:
        sys.stdout = sys.stderr


def record(entries: Mapping[str, Any]) -> bool:
    """Write an object if messages are written as JSON, as JsonLines does; return whether they are."""
    if not isinstance(sys.stderr, JsonLines):
        return False
    sys.stderr.record(entries)
    return True
