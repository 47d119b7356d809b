"""Benchmarks one after the other, unattended, then their pages: what `make bench` does.

    python benchmarks/run_all.py [--quick] [--all | --only NAME,...] [--machine NAME] [--out DIR] [--docs DIR]

Without --all these are the scripts of an hour (comparison.HOUR). A script that fails, or takes longer than it may, does not keep the others from
running: the machine's page says what became of it, and at the end the exit status is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from comparison import HOUR, MINUTES, given_name, machine, now, tell, write_json

FOLDER = Path(__file__).resolve().parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(FOLDER.parent)}
RESERVE_MINUTES = (5.0, 0.6)  # in full and with --quick, that scripts may take together beyond what each may
ENDING_SECONDS = 60  # that a script has to end its servers when it is stopped


def run(command: Sequence[str], seconds: float) -> str:
    """Run a script to its end; nothing, or why it failed: its status and last words, or that it was stopped after `seconds`."""
    process = subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stderr is not None
    last: deque[str] = deque(maxlen=1)

    def pass_on() -> None:
        for line in process.stderr or ():
            sys.stderr.write(line)
            if line.strip():
                last.append(line.strip())

    reader = threading.Thread(target=pass_on, daemon=True)
    reader.start()
    why = ""
    try:
        if status := process.wait(seconds):
            reader.join(ENDING_SECONDS)
            why = f"status {status}: {''.join(last)}"
    except subprocess.TimeoutExpired:
        why = f"stopped after {seconds:.0f} s"
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(ENDING_SECONDS)
    finally:
        # Whatever it has left behind belongs to its session.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return why


def main() -> int:
    """Run them; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"), metavar="DIR")
    parser.add_argument("--docs", type=Path, default=Path("docs"), metavar="DIR")
    parser.add_argument(
        "--machine", type=given_name, metavar="NAME", help="this machine's in the docs; by default of its processor and cores"
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--only", metavar="NAME,...", help="these alone, by what follows bench_ in their names")
    which.add_argument("--all", action="store_true", help="all scripts, which takes up to three and a half hours")
    given = parser.parse_args()
    wanted = list(MINUTES if given.all else HOUR)
    if given.only:
        wanted = given.only.split(",")
        if unknown := sorted(set(wanted) - set(MINUTES)):
            parser.error(f"--only: knows {', '.join(MINUTES)}; got {unknown[0]}")
    given.out.mkdir(parents=True, exist_ok=True)
    # The workload is made once and shared by the scripts; what an earlier version of the code made is not used.
    shutil.rmtree(given.out / "work", ignore_errors=True)
    for earlier in given.out.glob("*.json"):  # the docs keep them
        earlier.unlink()
    begun, allowed, failed = time.monotonic(), RESERVE_MINUTES[given.quick], []
    for name in wanted:
        tell(f"bench_{name}.py")
        started = time.monotonic()
        allowed += MINUTES[name][given.quick]
        command = [sys.executable, str(FOLDER / f"bench_{name}.py"), "--out", str(given.out)]
        why = run([*command, *(["--quick"] if given.quick else [])], 60 * allowed - (started - begun))
        tell(f"bench_{name}.py: {f'failed, {why}' if why else 'done'}, {time.monotonic() - started:.0f} s")
        if why:
            failed.append(name)
            write_json(given.out / f"{name}.json", {"script": name, "failed": why, "date": now(), "machine": machine()})
    # Where a script was stopped, its own folders are left beside that of the workload.
    for folder in [path for path in given.out.iterdir() if path.is_dir()]:
        shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, str(FOLDER / "render.py"), "--results", str(given.out), "--docs", str(given.docs)]
    command += ["--machine", given.machine] if given.machine else []
    if subprocess.run(command, env=ENVIRONMENT, check=False).returncode:
        failed.append("render")
    tell(f"{time.monotonic() - begun:.0f} s in all" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
