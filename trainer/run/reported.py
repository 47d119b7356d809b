"""What earlier calls of a run reported in metrics.jsonl."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from foreload.base.codec import parse_json

_TAIL_BYTES = 1 << 16  # in which the last steps stand
_NUMBER, _EVALUATION = re.compile(rb'\{"kind": "step", "step": (\d+),'), b'{"kind": "evaluation", "step": %d,'  # as lines begin


def evaluations_reported(path: Path, step: int) -> set[str]:
    """Lines of metrics.jsonl about evaluations after a step, of which the run did not go back behind that step since. A last line that its writer was
    killed in is cut off, so that the next one begins a line.
    """
    lines: set[str] = set()
    last, whole = -1, 0
    if not path.exists():
        return lines
    with open(path, "rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                os.truncate(path, whole)
                break
            whole += len(line)
            number = _NUMBER.match(line)
            if number is not None:
                before, last = last, int(number[1])
                if last <= min(before, step):
                    lines.clear()
            elif line.startswith(_EVALUATION % step):
                lines.add(line.decode())
    return lines


def reported_step(path: Path) -> int | None:
    """The last training step that metrics.jsonl reports; None if there is none."""
    try:
        with open(path, "rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - _TAIL_BYTES, 0))
            lines = file.read().split(b"\n")
    except OSError:
        return None
    for line in reversed(lines):
        with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError):
            entry = parse_json(line)
            # A checkpoint is reported long after its step.
            if entry["kind"] == "step":
                return int(entry["step"])
    return None
