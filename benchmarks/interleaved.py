"""Interleaved runs of steps: processes that live as long as a benchmark and train only when told to, so that contenders alternate, started once.

A line "STEPS DISCARDED" on stdin makes a process train STEPS steps and answer with a line of JSON: the seconds of each step after the first
DISCARDED ones, the processor time of the process in them, and the loss of the last step. Between its runs it waits.
This module needs the standard library alone: the processes may be those of another virtual environment.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class InterleavedRuns:
    """A process's end of the conversation: `begin` waits for the next run, `step` counts.

    Of the run under way, left and discarded: steps still to be trained, and of them those still to be discarded; seconds: of each counted step;
    further: other figures, a list by name.
    """

    left: int = 0
    discarded: int = 0
    seconds: list[float] = field(default_factory=list)
    further: dict[str, list[float]] = field(default_factory=dict)
    _last: float = 0.0
    _processor: float = 0.0

    def begin(self) -> None:
        """Wait for a run if none is under way; the process ends with its stdin."""
        if self.left:
            return
        line = sys.stdin.readline()
        if not line:
            sys.stdout.flush()
            os._exit(0)
        self.left, self.discarded = (int(word) for word in line.split())
        self.seconds, self.further = [], {}
        self._last, self._processor = time.perf_counter(), time.process_time()

    def step(self, loss: float, further: Mapping[str, float] | None = None) -> None:
        """A step is done; at the end of a run the answer goes out, and the next run is waited for."""
        now = time.perf_counter()
        if self.discarded:
            self.discarded -= 1
            self._processor = time.process_time()
        else:
            self.seconds.append(now - self._last)
            for name, value in (further or {}).items():
                self.further.setdefault(name, []).append(value)
        self.left -= 1
        if not self.left:
            processor = time.process_time() - self._processor
            print(
                json.dumps({"seconds": self.seconds, "processor": processor, "loss": loss, "further": self.further}), flush=True
            )
            self.begin()
        self._last = time.perf_counter()


def ready() -> None:
    """Tell the controller that the process waits for its first run."""
    print("{}", flush=True)


class Ranks:
    """The controller's end: the processes that are one contender. commands: one each; all have started when the constructor returns.

    Raises SystemExit, naming the contender, where one ends.
    """

    def __init__(self, name: str, commands: Sequence[Sequence[str]], environment: Mapping[str, str]) -> None:
        self.name = name
        self._processes = [
            subprocess.Popen(
                list(command), env={**os.environ, **environment}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            for command in commands
        ]
        self._answers()

    def run(self, steps: int, discarded: int) -> list[dict[str, Any]]:
        """Train `discarded` steps, then `steps` more: every process's answer about these."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{discarded + steps} {discarded}\n")
            process.stdin.flush()
        return self._answers()

    def _answers(self) -> list[dict[str, Any]]:
        answers = []
        for process in self._processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            while line and not line.startswith("{"):
                line = process.stdout.readline()
            if not line:
                status = process.wait()
                self.close()
                raise SystemExit(f"{self.name}: a process ended with status {status}")
            answers.append(json.loads(line))
        return answers

    def close(self) -> None:
        """End the processes and wait until their memory is free."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
