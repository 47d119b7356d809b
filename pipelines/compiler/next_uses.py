"""All accesses of a schedule on disk, lane by lane, and the next use of each, found in reverse.

For each lane, memory holds 8 bytes a row and a chunk of the accesses. Epochs in the same order have
the same accesses, so the disk holds these only once. The next use of an epoch's last access to a
row is then the row's first access in the epoch after.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import numpy as np

from foreload.base.compiled import nb
from foreload.base.intrinsics import prefetch
from foreload.pipelines.compiler.numbering import LANE_ROW
from foreload.pipelines.compiler.oracle import NEVER, Accesses
from foreload.pipelines.compiler.row_table import AHEAD
from foreload.pipelines.compiler.serial_pass import LaneStep
from foreload.pipelines.schedule.format import mask_dtype

_BUFFER_BYTES = 1 << 17  # for each of the 7 files that are written for a lane
_CHUNK = 1 << 20  # accesses of a lane that are processed together, unless one step has more
ALL_ACCESSES = np.uint64(2**64 - 1)
"""The `ring` of Accesses that hold all accesses in order, so that no place is used twice."""


class _File:
    """An array on disk that is read and written in parts."""

    def __init__(self, file: BinaryIO, kind: np.dtype | type) -> None:
        self.kind, self._file = np.dtype(kind), file

    def read(self, first: int, last: int) -> np.ndarray:
        """Return entries first .. last - 1."""
        values = np.empty(last - first, self.kind)
        room, done = values.view(np.uint8).data, 0
        while done < len(room):
            count = os.preadv(self._file.fileno(), [room[done:]], first * self.kind.itemsize + done)
            if not count:
                raise OSError(errno.EIO, "ends early", self._file.name)
            done += count
        return values

    def write(self, first: int, values: np.ndarray) -> None:
        """Write `values` from entry `first` on."""
        room, done = values.view(np.uint8).data, 0
        while done < len(room):
            done += os.pwrite(self._file.fileno(), room[done:], first * self.kind.itemsize + done)

    def all(self) -> np.ndarray:
        """Return the whole array, read into memory."""
        return self.read(0, self._bytes // self.kind.itemsize)

    def mapped(self) -> np.ndarray:
        """Return the whole array, memory-mapped for random reads."""
        if not self._bytes:
            return np.empty(0, self.kind)
        return np.memmap(self._file, self.kind, mode="c").view(np.ndarray)

    @property
    def _bytes(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        self._file.close()


def _kinds(mask: np.dtype) -> dict[str, np.dtype | type]:
    """Return the files of a lane's accesses, as a map from name to dtype.

    There are files of training steps, of evaluation steps and of rows. `counts` holds two numbers
    for each training step: the rows used and the rows numbered.
    """
    used: dict[str, np.dtype | type] = {"numbers": np.int32, "users": mask, "counts": np.int32}
    return used | {"evaluated": np.int32, "evaluated_counts": np.int32, "rows": LANE_ROW, "unknown": LANE_ROW}


class AccessWriter:
    """Writes the accesses of one lane, which the serial pass finds, to files in a folder.

    The files hold the rows of each step, and the identity of each row. Writing raises OSError if
    the disk is full.
    """

    def __init__(self, folder: Path, lane: int, mask: np.dtype) -> None:
        """Open the files of a lane for writing.

        Args:
            folder: Is created if it does not exist.
            mask: An unsigned dtype with a bit for every lane.
        """
        folder.mkdir(exist_ok=True)
        names = _kinds(mask)
        self._files = {name: (folder / f"{name}-{lane:02d}").open("wb", buffering=_BUFFER_BYTES) for name in names}
        self._unknown = 0  # rows looked up so far that were never trained
        self.rows = 0
        """The rows that training steps have numbered so far."""

    def add(self, step: LaneStep) -> None:
        """Append a training step."""
        self._append("numbers", step.numbers)
        self._append("users", step.users)
        self._append("rows", step.newcomers)
        self._append("counts", np.array([(len(step.numbers), len(step.newcomers))], np.int32))
        self.rows += len(step.newcomers)

    def add_evaluation(self, step: LaneStep) -> None:
        """Append an evaluation step."""
        # Each step numbers its rows that were never trained from 0. The file `unknown` is one list
        # of all of them, so the numbers are shifted by the rows it already has.
        self._append("evaluated", np.where(step.numbers < 0, step.numbers - np.int32(self._unknown), step.numbers))
        self._append("rows", step.newcomers)
        self._append("unknown", step.unknown)
        self._append("evaluated_counts", np.array([len(step.numbers)], np.int32))
        self._unknown += len(step.unknown)

    def _append(self, name: str, values: np.ndarray) -> None:
        self._files[name].write(values.data)

    def close(self) -> None:
        """Close the files after the last step was appended."""
        for file in self._files.values():
            file.close()


@contextmanager
def access_writers(folder: Path, lanes: int) -> Iterator[list[AccessWriter]]:
    """Open a writer for every lane; the files are complete when the context is left."""
    with ExitStack() as files:
        yield [files.enter_context(closing(AccessWriter(folder, lane, mask_dtype(lanes)))) for lane in range(lanes)]


class LaneAccesses:
    """The accesses of a lane that an `AccessWriter` wrote, and the next use of each.

    Reading beyond the end of a file raises OSError (EIO).
    """

    def __init__(self, folder: Path, lane: int, mask: np.dtype, same: bool, scratch: Path) -> None:
        """Open the files of a lane. Raises OSError if a file is missing.

        Args:
            folder: The folder that the lane's `AccessWriter` wrote.
            mask: An unsigned dtype with a bit for every lane.
            same: Whether all epochs have the same accesses, so that the files hold only the first
                epoch's.
            scratch: A folder for the files of next uses. Is created if it does not exist.
        """
        scratch.mkdir(exist_ok=True)
        self._same, self._mask = same, mask
        self._files = {name: _File((folder / f"{name}-{lane:02d}").open("rb"), kind) for name, kind in _kinds(mask).items()}
        written: dict[str, np.dtype | type] = {"nexts": np.int32, "next_users": mask}
        self._files |= {name: _File((scratch / f"{name}-{lane:02d}").open("w+b"), kind) for name, kind in written.items()}
        used, self._newcomers = self._files["counts"].all().reshape(-1, 2).T.astype(np.int64)
        self._evaluated = [0, *np.cumsum(self._files["evaluated_counts"].all()).tolist()]
        self.starts = np.concatenate([[0], np.cumsum(used)])
        self.rows, self.unknown = self._files["rows"].mapped(), self._files["unknown"].mapped()

    def find_next_uses(self, progress: Callable[[int], object] = lambda steps: None) -> None:
        """Find the next use of every access, in a pass in reverse. Call this before `accesses`.

        Args:
            progress: Called with 0 after each chunk, so that the caller can raise an error to stop
                the pass.
        """
        steps = len(self.starts) - 1
        lasts = np.full((len(self.rows), 2), NEVER, np.int32)
        if self._same:
            # After the last step comes the epoch's first one again, so a row's next use is its
            # first use in the next epoch. Its place is read only if that is the very next step,
            # step 0. There the rows are numbered from 0 in order, so a row's place is its number.
            first_steps = np.repeat(np.arange(steps, dtype=np.int32), self._newcomers)
            lasts[: len(first_steps), 0] = steps + first_steps
            lasts[:, 1] = np.arange(len(self.rows), dtype=np.int32)
        following = self._users_of(0) if steps else np.empty(0, self._mask)
        # `following` always holds the users of the rows of the step right after the chunk.
        for first, last in reversed(list(self._chunks(0, steps))):
            begin, end = int(self.starts[first]), int(self.starts[last])
            users = self._files["users"].read(begin, end)
            nexts, next_users = np.empty(end - begin, np.int32), np.empty(end - begin, self._mask)
            starts = self.starts[first : last + 1] - begin
            next_uses(self._files["numbers"].read(begin, end), starts, users, following, first, lasts, nexts, next_users)
            self._files["nexts"].write(begin, nexts)
            self._files["next_users"].write(begin, next_users)
            following = users[: starts[1]].copy()
            progress(0)

    def accesses(self, first: int, last: int) -> Iterator[tuple[int, int, Accesses, np.ndarray]]:
        """Yield training steps first .. last - 1 in parts.

        Yields:
            The part's first step, its last step + 1, its accesses, and an int64 array of steps + 1
                places where the accesses of each step begin.
        """
        for start, stop in self._chunks(first, last):
            begin, end = int(self.starts[start]), int(self.starts[stop])
            numbers, nexts, next_users = (self._files[name].read(begin, end) for name in ("numbers", "nexts", "next_users"))
            yield start, stop, Accesses(numbers, nexts, next_users, ALL_ACCESSES), self.starts[start : stop + 1] - begin

    def evaluated(self, first: int, steps: int) -> Iterator[np.ndarray]:
        """Yield the row numbers of each of `steps` evaluation steps.

        Args:
            first: The first step, counted over all evaluation passes.
            steps: How many steps.

        Yields:
            int32 [rows used]; a number -1 - n stands for the nth row of `unknown`.
        """
        first %= len(self._evaluated) - 1
        for start, end in pairwise(self._evaluated[first : first + steps + 1]):
            yield self._files["evaluated"].read(start, end)

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()

    def _users_of(self, step: int) -> np.ndarray:
        return self._files["users"].read(int(self.starts[step]), int(self.starts[step + 1]))

    def _chunks(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        while first < last:
            stop = int(np.searchsorted(self.starts, self.starts[first] + _CHUNK, side="right")) - 1
            stop = min(max(stop, first + 1), last)
            yield first, stop
            first = stop


@nb.njit(nogil=True, cache=True)
def next_uses(
    numbers: np.ndarray,
    starts: np.ndarray,
    users: np.ndarray,
    following: np.ndarray,
    first: int,
    lasts: np.ndarray,
    nexts: np.ndarray,
    next_users: np.ndarray,
) -> None:
    """Find the next use of every access of some consecutive steps, going through them in reverse.

    Before: `lasts` describes the steps after these. After: it describes these steps and all later
    ones.

    Args:
        numbers: int32 [accesses], the number of the row of each access.
        starts: int64 [steps + 1], the first access of each step, and the end of the last step.
        users: unsigned [accesses], the lanes that use the row at the access.
        following: unsigned [rows], the lanes that use each row of the step after these steps.
        first: The number of the first of the steps.
        lasts: int32 [rows, 2], the step of each row's next use, and the row's place within that
            step.
        nexts: int32 [accesses], filled with the step of each access's next use.
        next_users: unsigned [accesses], filled with the lanes of the next use if that is in the
            step right after the access, else with 0.
    """
    for k in range(starts.size - 2, -1, -1):
        step = np.int32(first + k)
        begin, end = starts[k], starts[k + 1]
        for i in range(end - 1, begin - 1, -1):
            prefetch(lasts, np.int64(numbers[max(i - AHEAD, 0)]) * 2)
            number = np.uint64(numbers[i])
            following_step, place = lasts[number, 0], lasts[number, 1]
            lasts[number, 0], lasts[number, 1] = step, np.int32(i - begin)
            nexts[i] = following_step
            next_users[i] = following[place] if following_step == step + 1 else 0
        following = users[begin:end]
