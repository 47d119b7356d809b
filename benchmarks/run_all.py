"""All benchmarks one after the other, unattended, then docs/benchmarks.md: what `make bench` does.

    python benchmarks/run_all.py [--quick] [--out DIR] [--only NAME,...]

A script that fails does not keep the others from running; at the end the exit status is 1, and a line says which failed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from comparison import tell
from render import ORDER

FOLDER = Path(__file__).resolve().parent


def main() -> int:
    """Run them; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"), metavar="DIR")
    parser.add_argument("--docs", type=Path, default=Path("docs"), metavar="DIR")
    parser.add_argument("--only", metavar="NAME,...", help="these alone, by what follows bench_ in their names")
    given = parser.parse_args()
    names = {path.stem.removeprefix("bench_") for path in FOLDER.glob("bench_*.py")}
    wanted = sorted(names, key=lambda name: (ORDER.index(name) if name in ORDER else len(ORDER), name))
    if given.only:
        wanted = given.only.split(",")
        if unknown := sorted(set(wanted) - names):
            parser.error(f"--only: knows {', '.join(sorted(names))}; got {unknown[0]}")
    # The workload is made once and shared by the scripts; what an earlier version of the code made is not used.
    shutil.rmtree(given.out / "work", ignore_errors=True)
    failed = []
    for name in wanted:
        tell(f"bench_{name}.py")
        (given.out / f"{name}.json").unlink(missing_ok=True)
        begun = time.monotonic()
        command = [
            sys.executable,
            str(FOLDER / f"bench_{name}.py"),
            "--out",
            str(given.out),
            *(["--quick"] if given.quick else []),
        ]
        environment = {**os.environ, "PYTHONPATH": str(FOLDER.parent)}
        status = subprocess.run(command, env=environment, check=False).returncode
        tell(f"bench_{name}.py: {f'failed with status {status}' if status else 'done'} in {time.monotonic() - begun:.0f} s")
        if status:
            failed.append(name)
    shutil.rmtree(given.out / "work", ignore_errors=True)
    if any(given.out.glob("*.json")):
        command = [sys.executable, str(FOLDER / "render.py"), "--results", str(given.out), "--docs", str(given.docs)]
        if subprocess.run(command, check=False).returncode:
            failed.append("render")
    if failed:
        tell(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
