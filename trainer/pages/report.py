"""`foreload report`, and the page that every run leaves at its end."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from foreload.base.errors import SettingError
from foreload.base.files import unwritable, write_atomically
from foreload.base.settings import local
from foreload.pipelines.schedule.format import HEADER
from foreload.pipelines.schedule.format import MANIFEST as SCHEDULE_MANIFEST
from foreload.trainer.pages.run_figures import USES_AT_ONCE, read_run
from foreload.trainer.pages.run_page import run_page
from foreload.trainer.pages.schedule_figures import read_schedule
from foreload.trainer.pages.schedule_page import schedule_page
from foreload.trainer.run.directory import MANIFEST, REPORT


def report(places: list[str], out: str | None, state_of: Callable[[str], str]) -> Path:
    """Write the page of a run, of two runs side by side, or of a schedule, and return its path.

    Args:
        places: the folders of the runs or the schedule.
        out: the file to write. If None, report.html in the folder of one run. For a schedule,
            NAME-report.html, and for two runs, NAME-NAME-report.html, in the working directory.
        state_of: returns the state of a run in a word.

    Raises:
        SettingError: the folders do not go together, or the file cannot be written.
        RunError: a folder has no run.
        ScheduleError: the schedule is damaged.
    """
    folders = [Path(place) for place in places]
    schedules = [folder for folder in folders if not (folder / MANIFEST).exists() and _is_schedule(folder)]
    if schedules and len(folders) > 1:
        raise SettingError(
            f"report: takes one run, two runs, or one schedule; got schedule {schedules[0]} among two; give it alone"
        )
    names = "-".join(folder.absolute().name for folder in folders)
    alone = len(folders) == 1 and not schedules
    target = Path(local("--out", out)) if out is not None else folders[0] / REPORT if alone else Path(f"{names}-report.html")
    if schedules:
        _check(target)
        text = schedule_page(read_schedule(folders[0]))
    else:
        runs = [read_run(folder, state_of(str(folder))) for folder in folders]
        if len({run.name for run in runs}) < len(runs):
            runs = [replace(run, name=str(folder)) for run, folder in zip(runs, folders, strict=True)]
        _check(target)
        text = run_page(runs)
    try:
        write_atomically(target, text.encode())
    except OSError as error:
        raise SettingError(f"--out: cannot write {target}: {error.strerror}; name another file") from error
    return target


def leave_report(run: Path) -> None:
    """Write the page of a run that has stopped into its folder.

    If that fails, a line on stderr says why. No training fails because of its page.
    """
    try:
        write_atomically(run / REPORT, run_page([read_run(run, most_uses=USES_AT_ONCE)]).encode())
    except Exception as error:
        why = " ".join(str(error).split()) or type(error).__name__
        sys.stderr.write(f"foreload: warning: {run / REPORT}: is not written ({why}); `foreload report {run}` tries again\n")


def _is_schedule(folder: Path) -> bool:
    return (folder / SCHEDULE_MANIFEST).exists() or (folder / HEADER).exists()


def _check(target: Path) -> None:
    if why := unwritable(target):
        raise SettingError(f"--out: cannot write {target}: {why}")
