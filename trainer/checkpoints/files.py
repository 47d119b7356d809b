"""The files of a checkpoint, as its manifest names them (docs/checkpoints.md, The format)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from foreload.base.codec import Count, Natural, RelativePath, one_of
from foreload.trainer.checkpoints.policies import BITS


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file of a checkpoint, as its manifest has it: name, size, SHA-256."""

    name: RelativePath
    bytes: Count
    sha256: str


@dataclass(frozen=True, slots=True)
class RowFile(FileEntry):
    """A file of rows: `rows` of them, of a table in a lane, with ordinals from `first` to `last`, all of these where there are as many; bits: that a
    weight has.
    """

    lane: Count
    table: Count
    first: Count
    last: Count
    rows: Natural
    bits: Annotated[int, one_of(*BITS)]

    @property
    def gapless(self) -> bool:
        """Whether it has all ordinals from first to last, and so no column of them."""
        return self.last - self.first + 1 == self.rows


@dataclass(frozen=True, slots=True)
class PartFiles:
    """What a trainer wrote. dense: the dense part, by the trainer that leads; seconds: from the copy on."""

    rows: tuple[RowFile, ...]
    dense: FileEntry | None
    seconds: float
