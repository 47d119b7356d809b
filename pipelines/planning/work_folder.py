"""The folder in a schedule's in which one call of `prepare` and its workers work, and what the call takes from there into the schedule.

Workers write there alone. Whatever one does that was given up (of a call that was stopped or killed, on a host that was cut off) is in the folder of
its own call, which is gone, and no other call reads it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from foreload.pipelines.planning.plan import FOLDERS, RESERVE, RESERVE_BYTES, Plan
from foreload.pipelines.samples.features import ENCODING_FOLDER
from foreload.pipelines.schedule.format import FAILED, LOCK, REJECTS_FILE, WORK


def make(plan: Plan) -> None:
    """Make a call's folder; the schedule's own exists."""
    plan.work.mkdir()
    for folder in FOLDERS:
        (plan.work / folder).mkdir()
    (plan.work / RESERVE).write_bytes(bytes(RESERVE_BYTES))


def clear(out: Path) -> None:
    """Remove the folders of all calls but the lock."""
    for path in sorted((out / WORK).iterdir()):
        if path.name == LOCK:
            continue
        # At one stroke: a worker that still writes there finds its folder no more, and cannot put anything into what is being removed.
        gone = path.with_name(f"{path.name}.gone")
        with contextlib.suppress(OSError):
            path.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def give_encoding(plan: Plan) -> None:
    """Give the schedule its vocabularies and scales, if there are any; workers still read theirs."""
    if plan.encoding.exists():
        shutil.copytree(plan.encoding, plan.out / ENCODING_FOLDER, copy_function=_linked, dirs_exist_ok=True)


def give_rejects(plan: Plan) -> None:
    """Give the schedule's folder the malformed records that were found, if any were."""
    with contextlib.suppress(FileNotFoundError):
        os.replace(plan.written / REJECTS_FILE, plan.out / REJECTS_FILE)


def give_lanes(plan: Plan) -> None:
    """Give the schedule what workers have written for it, once all of it is there: all but what makes it one."""
    give_encoding(plan)
    for path in sorted(plan.written.iterdir()):
        # What an attempt left that another one has made good is not of it.
        if path.is_file() and path.name != FAILED and not path.name.startswith("."):
            os.replace(path, plan.out / path.name)


def _linked(source: str, target: str) -> None:
    """The same file under another name, where the file system has that; else a copy."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
