"""The slices of the first epoch's steps, kept for later epochs in the same order (docs/definitions.md, Steps and slices)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from foreload.pipelines.compiler.serial_pass import Step


class KeptSlices:
    """Which lane took each sample: a file of one byte a sample. What the disk has no room for raises OSError."""

    def __init__(self, path: Path, filled: bool = False) -> None:
        """filled: it is there, with all of an epoch; nothing is kept any more."""
        path.parent.mkdir(exist_ok=True)
        self.filled = filled
        self._file = path.open("rb" if filled else "w+b")

    def keep(self, step: Step) -> None:
        """Add the step after the last one kept."""
        if step.order is None:
            raise ValueError("step: must have an order of its samples to keep")
        # Which lane each place of the batch went to, from which places went to each lane: the inverse, in an eighth of the room.
        lane = np.empty(len(step.order), np.uint8)
        lane[step.order] = np.repeat(np.arange(len(step.firsts) - 1, dtype=np.uint8), np.diff(step.firsts))
        self.keep_lanes(lane)

    def keep_lanes(self, lane: np.ndarray) -> None:
        """Add a step, of whose places in the batch these lanes are: uint8 [samples]."""
        self._file.write(lane.data)

    def order(self, first: int, samples: int) -> np.ndarray:
        """Samples `first` .. `first` + `samples` - 1 of the epoch, a batch, slice by slice: int64 [samples], places in the batch."""
        self._file.seek(first)
        lane = np.frombuffer(self._file.read(samples), np.uint8)
        return np.argsort(lane, kind="stable")

    def close(self) -> None:
        """Close the file."""
        self._file.close()
