"""Part of a run's page: its settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from foreload.trainer.pages.markup import Html, table, tag
from foreload.trainer.pages.run_figures import RunFigures

_OF_SCHEDULE = (
    *("batch_size", "lanes", "epochs", "eval_every", "shuffle_seed", "placement"),
    *("training_samples", "evaluation_samples"),
)


def settings(runs: Sequence[RunFigures]) -> list[Html]:
    """Return the settings of the job, the schedule and the numerics.

    For two runs, the settings in which they differ come first.
    """
    columns = [_of_run(run) for run in runs]
    names = list(dict.fromkeys(name for column in columns for name in column))
    rows = [[name, *(column.get(name, "-") for column in columns)] for name in names]
    several = len(runs) > 1
    if several:
        rows.sort(key=lambda row: len(set(row[1:])) == 1)
    differing = [place for place, row in enumerate(rows) if several and len(set(row[1:])) > 1]
    head = ["setting", *(run.name for run in runs)]
    listed = table(head, rows, words=range(1, len(head)), differing=differing)
    words = (
        f"{len(differing)} of {len(rows)} differ: these come first, in bold."
        if several
        else "What the run was started with, its schedule, and what its arithmetic depends on. Passwords are not kept in a run."
    )
    return [tag("p", words, class_="read"), listed]


def _of_run(run: RunFigures) -> dict[str, str]:
    entries = {f"--{name.replace('_', '-')}": _value(value) for name, value in run.manifest.job.items()}
    for place, stage in enumerate(run.manifest.stages):
        which = f"schedule {place + 1}" if len(run.manifest.stages) > 1 else "schedule"
        entries[which] = f"{stage.path}, steps {stage.first_step:,} to {stage.end_step - 1:,}"
    if run.schedule is not None:
        header = run.schedule.header
        for name in _OF_SCHEDULE:
            entries[f"schedule: {name.replace('_', ' ')}"] = _value(getattr(header, name))
        entries["schedule: slots per lane"] = _value(sorted({*header.slots}))
    for name, value in (run.manifest.fingerprint or {}).items():
        entries[f"numerics: {name.replace('_', ' ')}"] = _value(value)
    return {name: value for name, value in entries.items() if value}


def _value(value: Any) -> str:
    """Format a value; "" for one that was not given."""
    if value is None or value == {} or value == "":
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={_value(one)}" for name, one in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_value, value))
    return str(value)
