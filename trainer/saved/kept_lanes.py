"""RUN/kept/lanes: the rows that trainers could not write to the store when training ended.

There is one file for each lane. `lanes.json` is written last; without it nothing is kept. The
process that writes the rows to the store takes the lanes over from these files, as from another
trainer's replicas (docs/protocol.md, Takeover). It may die at any moment: the next attempt begins
again. Once the rows are on the store, the run has stopped cleanly.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from foreload.base.codec import fault, of_json
from foreload.base.files import read_sealed, replacing, write_atomically, write_sealed
from foreload.cache.protocol.handover.takeover import CopiedLane
from foreload.cache.protocol.ownership.batch_log import LoggedBatch
from foreload.cache.rows.partition import Partition
from foreload.cache.rows.staging import EndedRows
from foreload.pipelines.schedule.format import Occupants
from foreload.trainer.errors import RunRefused
from foreload.trainer.run.directory import KEPT_LANES
from foreload.trainer.run.manifest import Manifest, Status
from foreload.trainer.saved.kept_manifest import KeptFile, KeptLanes

DENSE = "dense.safetensors"
_IN_SLOTS = -1  # stands for the boundary of rows in slots
_COLUMNS = ("table", "ordinal", "id", "tag", "stored_tag", "weights", "state")
_TYPES = dict(zip(_COLUMNS, (np.int16, np.int64, np.int64, np.int32, np.int32, np.float32, np.float32), strict=True))


@dataclass(frozen=True, slots=True)
class KeptLane:
    """Rows of a lane that the store lacks after a step.

    Attributes:
        ordinals: As in `CopiedLane`.
        owed: As in `CopiedLane`.
        ending: The rows that sat in slots.
        released: As in `CopiedLane`.
        record: The last record of the lane's batch log. None if the log lies in the run's folder.
    """

    ordinals: np.ndarray
    owed: Sequence[tuple[int, EndedRows]]
    ending: EndedRows
    released: tuple[int, int]
    record: LoggedBatch | None = None

    @classmethod
    def of(
        cls,
        partition: Partition,
        ordinals: np.ndarray,
        owed: Sequence[tuple[int, EndedRows]],
        released: tuple[int, int],
        record: LoggedBatch | None,
    ) -> KeptLane:
        """Make it from the lane's slots and the rows whose residency ended before."""
        # The store has the rows in slots whose tag is the stored tag.
        here, slots = partition.occupants, partition.occupied()
        return cls(ordinals, owed, partition.rows_in(slots[here.tag[slots] != here.stored_tag[slots]]), released, record)

    @property
    def copied(self) -> CopiedLane:
        """What a takeover needs to know of the lane."""
        ending = self.ending
        return CopiedLane(self.ordinals, Occupants(*ending.columns(), ending.stored_tag), self.owed, ending, self.released)


def folder_of(run: Path) -> Path:
    """Return the folder for the kept lanes of a run, whether or not it exists."""
    return (run / KEPT_LANES).parent


def write_lane(run: Path, lane: int, kept: KeptLane) -> KeptFile:
    """Write a lane's file, completely and durably, and return its entry. Raises OSError."""
    # The file is a sequence of NumPy arrays; `read_lane` reads them in the same order.
    parts = [*kept.owed, (_IN_SLOTS, kept.ending)]
    boundary = np.concatenate([np.full(len(rows), number, np.int64) for number, rows in parts])
    path = folder_of(run) / f"lane-{lane:02d}.rows"
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, durable=True) as temporary, open(temporary, "wb") as file:
        for array in (np.array(kept.released, np.int64), kept.ordinals.astype(np.int64), boundary):
            np.save(file, array, allow_pickle=False)
        for name, kind in _TYPES.items():
            np.save(file, np.concatenate([getattr(rows, name) for _, rows in parts]).astype(kind, copy=False), allow_pickle=False)
        if (record := kept.record) is not None:
            held = np.zeros((0, 3), np.int64) if record.held is None else record.held
            for array in (np.array([record.number, record.before], np.int64), record.fields, record.old, record.new, held):
                np.save(file, array, allow_pickle=False)
    return KeptFile(path.name, _sha256(path))


def write_kept(run: Path, name: str, data: bytes) -> None:
    """Write a file that comes from another host, as `write_lane` does. Raises OSError."""
    path = folder_of(run) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, data, durable=True)


def checked(run: Path, file: KeptFile) -> Path:
    """Return the path of a file if it is as it was written. Raises RunRefused if it is not."""
    path = folder_of(run) / file.name
    try:
        if _sha256(path) == file.sha256:
            return path
        why = "its checksum does not match"
    except OSError as error:
        why = str(error)
    raise RunRefused(f"run {run}: {path} is damaged ({why}), and its rows exist nowhere else; restore it")


def read_lane(run: Path, file: KeptFile) -> KeptLane:
    """Read what `write_lane` wrote. Raises RunRefused if the file is not as it was written."""
    with open(checked(run, file), "rb") as opened:
        released, ordinals, boundary, *columns = (np.load(opened, allow_pickle=False) for _ in range(3 + len(_TYPES)))
        # The arrays of a log record follow only if the lane has one.
        record = None
        if opened.peek(1):
            (number, before), fields, old, new, held = (np.load(opened, allow_pickle=False) for _ in range(5))
            record = LoggedBatch(int(number), fields, old, new, held if len(held) else None, int(before))
    rows = EndedRows(*columns)
    owed = [(int(number), rows.select(boundary == number)) for number in np.unique(boundary) if number != _IN_SLOTS]
    return KeptLane(ordinals, owed, rows.select(boundary == _IN_SLOTS), (int(released[0]), int(released[1])), record)


def kept_lanes(run: Path) -> KeptLanes | None:
    """Return what a run keeps of lanes; None if it keeps nothing.

    Raises RunRefused if `lanes.json` is damaged.
    """
    path = run / KEPT_LANES
    if not path.exists():
        return None
    try:
        return of_json(read_sealed(path)[0], KeptLanes)
    except (OSError, ValueError) as error:
        raise RunRefused(fault(f"run {run}: {path}", error, "restore the run's folder")) from error


def write_kept_lanes(run: Path, why: str, manifest: Manifest, status: Status, files: Sequence[KeptFile]) -> None:
    """Publish the files that trainers have written. Raises OSError.

    Args:
        run: The run's folder.
        why: The reason why training ended.
        manifest: The run's manifest once the rows are on the store.
        status: The run's status once the rows are on the store.
        files: One file per lane, in order.
    """
    dense = KeptFile(DENSE, _sha256(folder_of(run) / DENSE))
    write_sealed(run / KEPT_LANES, KeptLanes(why, manifest, status, dense, tuple(files)), durable=True)


def forget_kept_lanes(run: Path) -> None:
    """Delete the kept lanes: their rows are on the store, or the run goes on without them."""
    folder = folder_of(run)
    # Without `lanes.json` nothing is kept, so it goes first.
    if folder.exists():
        (run / KEPT_LANES).unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
