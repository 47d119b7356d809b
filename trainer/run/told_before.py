"""What earlier calls of a run told in metrics.jsonl."""

from __future__ import annotations

import os
import re
from pathlib import Path

_NUMBER, _EVALUATION = re.compile(rb'\{"kind": "step", "step": (\d+),'), b'{"kind": "evaluation", "step": %d,'  # as lines begin


def evaluations_told(path: Path, step: int) -> set[str]:
    """Lines of metrics.jsonl about evaluations after a step, of which the run did not go back behind that step since. A last line that its writer was
    killed in is cut off, so that the next one begins a line.
    """
    told: set[str] = set()
    last, whole = -1, 0
    if not path.exists():
        return told
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
                    told.clear()
            elif line.startswith(_EVALUATION % step):
                told.add(line.decode())
    return told
