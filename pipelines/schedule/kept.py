"""Keeps the part of a schedule that is needed to read and evaluate the model trained with it.

The kept part is a folder of its own, which `Schedule` opens like a whole schedule. It has
everything but the training steps: manifests, encoding, the row table and the last evaluation. In
place of the training steps it records how many ordinals had been given when training stopped, and
which row sits in each slot at the end, where evaluation finds it. Files are hard links where
possible.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from foreload.base.codec import Count, Step, of_json
from foreload.base.files import read_sealed, replacing, write_sealed
from foreload.pipelines.errors import ScheduleError
from foreload.pipelines.samples.features import ENCODING_FOLDER
from foreload.pipelines.schedule.arrow_files import MappedLists, write_lists
from foreload.pipelines.schedule.format import HEADER, MANIFEST, PROVENANCE, ROW_TABLE, FileEntry, Segment, segment_name
from foreload.pipelines.schedule.reader import Schedule
from foreload.pipelines.schedule.walk import state_after

POSITION = "position.json"
"""The file that records where training stopped (docs/schedule.md, "What a run keeps")."""


def keep(schedule: Schedule, folder: Path) -> None:
    """Keep a complete schedule in a new folder, which appears whole or not at all.

    Raises:
        OSError: If a file cannot be linked or copied.
    """
    folder.parent.mkdir(exist_ok=True)
    with replacing(folder) as temporary:
        temporary.mkdir()
        for name in _files(schedule):
            (temporary / name).parent.mkdir(exist_ok=True)
            _link(schedule.path / name, temporary / name)


def note_position(schedule: Schedule, folder: Path, step: int) -> None:
    """Record in a kept folder what its missing training steps would show.

    The rows in the slots are always those at the schedule's end, and are written only once.

    Args:
        schedule: The whole schedule.
        folder: The kept folder.
        step: The step after which training stopped.

    Raises:
        OSError: If a file cannot be written.
        ScheduleError: If the schedule cannot be read.
    """
    end = schedule.header.end_step - 1
    occupants: list[Any] = []
    if last_evaluation(schedule) and not (folder / POSITION).exists():
        for lane, state in enumerate(state_after(schedule, end).lanes):
            values = {"table": state.occupants.table, "id": state.occupants.id}
            columns = {name: (np.array([0, len(array)], np.int32), array) for name, array in values.items()}
            occupants.append(write_lists(folder / f"occupants-{lane:02d}.arrow", columns))
    elif (folder / POSITION).exists():
        occupants = _position(folder)["occupants"]
    # At the schedule's end, the ordinals follow from the row table.
    ordinals = None if step == end else ordinals_after(schedule, step).tolist()
    write_sealed(folder / POSITION, {"step": step, "ordinals": ordinals, "occupants": occupants})


def ordinals_after(schedule: Schedule, step: int) -> np.ndarray:
    """Count the ordinals that a complete schedule has given after a training step.

    Returns:
        int64 [lanes, tables].

    Raises:
        ScheduleError: If the schedule cannot be read.
    """
    header = schedule.header
    # At the schedule's end, every row of the row table has its ordinal. So the steps need not be
    # replayed.
    if step == header.end_step - 1:
        tables = len(header.features.tables)
        counts = np.zeros(header.lanes * tables, np.int64)
        for batch in schedule.rows():
            counts += np.bincount(batch["lane"].astype(np.int64) * tables + batch["table"], minlength=len(counts))
        return counts.reshape(header.lanes, tables)
    if (schedule.path / POSITION).exists():
        position = _position(schedule.path)
        if position["step"] == step and position["ordinals"] is not None:
            return np.array(position["ordinals"], np.int64)
    return np.array([lane.ordinals for lane in state_after(schedule, step).lanes], np.int64)


def last_occupants(schedule: Schedule) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return, for each lane, the row in each of slots 0, 1, ... at the end of a schedule.

    Returns:
        For each lane, table int16 [n] and id int64 [n].

    Raises:
        ScheduleError: If the schedule cannot be read.
    """
    if not (schedule.path / POSITION).exists():
        lanes = state_after(schedule, schedule.header.end_step - 1).lanes
        return [(lane.occupants.table, lane.occupants.id) for lane in lanes]
    files = [MappedLists(schedule.path / entry["name"], entry) for entry in _position(schedule.path)["occupants"]]
    return [(file.column("table", 0), file.column("id", 0)) for file in files]


class Position(TypedDict):
    """The contents of position.json.

    Attributes:
        step: The step after which training stopped.
        ordinals: The numbers of ordinals given, by lane and table. None at the schedule's end.
        occupants: The file of each lane's occupants. Empty if the schedule has no evaluation.
    """

    step: Step
    ordinals: list[list[Count]] | None
    occupants: list[FileEntry]


def _position(folder: Path) -> Position:
    try:
        return of_json(read_sealed(folder / POSITION)[0], Position)
    except (OSError, ValueError) as error:
        raise ScheduleError(f"{folder / POSITION}: cannot be read ({error}); put the whole schedule back") from None


def last_evaluation(schedule: Schedule) -> list[Segment]:
    """Return the segments of the evaluation at a schedule's end; none if it has no evaluation."""
    segments: list[Segment] = []
    for segment in schedule.segments():
        if segment.kind == "train":
            segments.clear()
        else:
            segments.append(segment)
    return segments


def _files(schedule: Schedule) -> Iterator[str]:
    """Yield the names of the files to keep, relative to the schedule's folder."""
    yield from (HEADER, MANIFEST, ROW_TABLE)
    yield from (segment_name(segment.index) for segment in schedule.segments())
    yield from (
        lane[part]["name"] for segment in last_evaluation(schedule) for lane in segment.files for part in ("samples", "moves")
    )
    if (schedule.path / PROVENANCE).exists():
        yield PROVENANCE
    folder = schedule.path / ENCODING_FOLDER
    if folder.exists():
        yield from (f"{folder.name}/{path.name}" for path in sorted(folder.iterdir()))


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        # The target is on another file system, or the file system has no hard links.
        shutil.copyfile(source, target)
