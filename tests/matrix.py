"""Whether the tests depend on speed: the suite, and the tests that act on running work, under four conditions (`make test-matrix`).

a: as it is. b: beside two busy loops. c: pinned to one core. d: every training step takes longer (`injection.SLOWER`).

Each run of tests gets a line in build/test-matrix.jsonl: commit, tests, condition, number, seconds, result and what pytest counted. A call does what
that file lacks for the present commit, so one that was stopped goes on where it stopped. The exit status is 1 unless every run passed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "harness"))

from injection import SLOWER  # noqa: E402

RESULTS = ROOT / "build" / "test-matrix.jsonl"
MARKS = {"suite": "not full", "running": "running and not full"}
RUNS = [
    *(("suite", condition, number) for condition, count in (("a", 3), ("b", 1), ("c", 1)) for number in range(1, count + 1)),
    *(("running", condition, number) for condition, first in (("b", 2), ("c", 2), ("d", 1)) for number in range(first, 4)),
]
"""Which tests, under which condition, for the how manieth time. Those on running work three times in each: the suite has them, too."""
DELAY_SECONDS = 0.05
"""What condition d adds to a step, which takes some 5 ms in these tests: they take ten times as long."""


@contextlib.contextmanager
def condition(name: str) -> Iterator[None]:
    """Have what is started within it run under a condition."""
    if name == "b":
        loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
        try:
            yield
        finally:
            for loop in loops:
                loop.kill()
                loop.wait()
    elif name == "c":
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(cores)})
        try:
            yield
        finally:
            os.sched_setaffinity(0, cores)
    elif name == "d":
        os.environ[SLOWER] = str(DELAY_SECONDS)
        try:
            yield
        finally:
            del os.environ[SLOWER]
    else:
        yield


def run_tests(tests: str, name: str, workers: int, log: Path) -> dict[str, Any]:
    """Run them once; what the line of it says of the result. log: gets pytest's output."""
    command = [sys.executable, "-m", "pytest", "-q", "-rfEs", "-m", MARKS[tests], "-n", str(workers), "--dist", "worksteal"]
    began = time.monotonic()
    with condition(name), log.open("wb") as out:
        status = subprocess.run(command, cwd=ROOT, stdout=out, stderr=out, check=False).returncode
    text = log.read_text(encoding="utf-8", errors="replace")
    counts = {word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)", text.splitlines()[-1])}
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)
    result = "passed" if status == 0 else "failed"
    return {"seconds": round(time.monotonic() - began), "result": result, **counts, **({"which": failed} if failed else {})}


def present_commit() -> str:
    """The commit that is checked out; with "-dirty" where files were changed since."""
    described = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, check=True, capture_output=True, text=True)
    return described.stdout.strip()


def main() -> int:
    """Do what is missing; 0 if all runs of this commit passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, help="of pytest")
    parser.add_argument("--tests", choices=MARKS, help="these alone")
    parser.add_argument("--condition", choices=("a", "b", "c", "d"), help="this one alone")
    given = parser.parse_args()
    commit = present_commit()
    RESULTS.parent.mkdir(exist_ok=True)
    lines = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    done = {(line["tests"], line["condition"], line["number"]): line for line in lines if line["commit"] == commit}
    wanted = [run for run in RUNS if run[0] == (given.tests or run[0]) and run[1] == (given.condition or run[1])]
    for run in wanted:
        if run not in done:
            tests, name, number = run
            log = RESULTS.with_name(f"test-matrix-{tests}-{name}-{number}.log")
            line = {"commit": commit, "tests": tests, "condition": name, "number": number}
            done[run] = line | run_tests(tests, name, given.workers, log)
            with RESULTS.open("a") as file:
                file.write(json.dumps(done[run]) + "\n")
        print(json.dumps(done[run]), flush=True)
    return 0 if all(done[run]["result"] == "passed" for run in wanted) else 1


if __name__ == "__main__":
    sys.exit(main())
