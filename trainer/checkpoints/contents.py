"""What the manifest of a checkpoint says (docs/checkpoints.md, The format). Knows no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np

from foreload.base.codec import MOST, Amount, Count, JsonForm, Name, Step, between, of_json, to_stored
from foreload.base.files import sealed
from foreload.cache.rows.layout import RowLayout
from foreload.pipelines.samples.features import FeatureSpec, StoredFeatures
from foreload.trainer.checkpoints.files import FileEntry, RowFile
from foreload.trainer.checkpoints.policies import EXACT_BITS
from foreload.trainer.errors import CheckpointError
from foreload.trainer.run.manifest import Inexact, Manifest
from foreload.trainer.storage import AnyFolder, write_whole

if TYPE_CHECKING:
    from foreload.trainer.checkpoints.format import Checkpoint

FORMAT: Literal[1] = 1
MANIFEST, DENSE = "checkpoint.json", "dense.safetensors"

_ELSEWHERE: dict[str, Any] = {"store_urls": [], "local_stores": None}
"""What a run's manifest says of where its rows are, which a checkpoint does not keep; and what is read in its place."""


def _run_stored(run: Manifest) -> dict[str, Any]:
    return {name: value for name, value in to_stored(run).items() if name not in _ELSEWHERE}


def _run_of(stored: dict[str, Any]) -> Manifest:
    return of_json(_ELSEWHERE | stored, Manifest)


@dataclass(frozen=True, slots=True)
class Base:
    """The checkpoint that another is an increment of: its folder, beside the other's, and the SHA-256 of its manifest."""

    name: Name
    sha256: str


@dataclass(frozen=True, slots=True)
class Contents:
    """What a checkpoint's manifest says. step, state, totals: of the run's status; run: its manifest; tables: in order; ordinals: per lane and table,
    how many there are; rows: its files of rows, of each lane and table by ordinal; dense: the dense part with its optimizer. features,
    encoding: those of the header of its last schedule (the identity of the encoding state, None without one).

    base: None for all rows; else only those changed since are here. sizes: of the increments since the last one with all rows, its own last, as
    parts of all rows there were. inexact: of the rows as they are read from here, bases included, how a run that has them is.
    """

    step: Step
    state: Literal["stopped", "ended"]
    totals: dict[str, Amount]
    run: Annotated[Manifest, JsonForm(dict[str, Any], _run_stored, _run_of)]
    tables: tuple[RowLayout, ...]
    ordinals: tuple[tuple[Count, ...], ...]
    rows: tuple[RowFile, ...]
    dense: FileEntry
    features: StoredFeatures
    encoding: str | None
    base: Base | None = None
    sizes: tuple[Annotated[float, between(0, MOST)], ...] = ()
    inexact: Inexact | None = None
    format: Literal[1] = FORMAT

    def __post_init__(self) -> None:
        lanes, tables = self.run.lanes, len(self.tables)
        numbered = [table.table for table in self.tables] == list(range(tables))
        if not numbered or [len(lane) for lane in self.ordinals] != [tables] * lanes:
            raise CheckpointError(f"ordinals: must be of {lanes} lanes and {tables} tables, which are numbered in order")
        held: Counter[tuple[int, int]] = Counter()
        for file in self.rows:
            in_model = file.lane < lanes and file.table < tables and file.last < self.ordinals[file.lane][file.table]
            if not in_model or file.rows > file.last - file.first + 1:
                raise CheckpointError(f"rows: {file.name} must have ordinals of the model, each once")
            held[file.lane, file.table] += file.rows
        counted = tuple(tuple(held[lane, table] for table in range(tables)) for lane in range(lanes))
        if self.base is None and counted != self.ordinals:
            raise CheckpointError("rows: must have each row of the model")
        if [table.name for table in self.features.tables] != [table.name for table in self.tables]:
            raise CheckpointError("features: must be those of the tables")

    @property
    def files(self) -> tuple[FileEntry, ...]:
        """Every file but the manifest."""
        return (*self.rows, self.dense)

    @property
    def row_count(self) -> int:
        """How many rows the model has, of all tables, those in bases included."""
        return sum(map(sum, self.ordinals))

    def write(self, folder: AnyFolder) -> bytes:
        """Put the manifest into the folder of a checkpoint, last of all, durably; returns it. Raises OSError and CheckpointUnreachable."""
        data = sealed(to_stored(self))
        write_whole(folder / MANIFEST, data)
        return data

    @classmethod
    def made(
        cls,
        run: Manifest,
        features: FeatureSpec,
        encoding: str | None,
        step: int,
        totals: Mapping[str, float],
        tables: Sequence[RowLayout],
        ordinals: np.ndarray,
        rows: Sequence[RowFile],
        dense: FileEntry,
        base: Checkpoint | None = None,
        sizes: Sequence[float] = (),
    ) -> Contents:
        """The manifest of files that were written, in any order, after a step of a run. features, encoding: as the fields; ordinals: int64 [lanes,
        tables]; base: of which it is an increment; sizes: of the increments before it.
        """
        bits = min([file.bits for file in rows] + ([EXACT_BITS] if base is None else [base.bits]))
        inexact = run.inexact
        if bits < EXACT_BITS:
            inexact = (
                Inexact(step, bits, 0) if inexact is None else Inexact(inexact.since, min(inexact.bits, bits), inexact.restores)
            )
        size = sum(file.rows for file in rows) / max(int(ordinals.sum()), 1)
        return cls(
            step=step,
            # A run that was broken off, and whose rows are still those of its last clean stop, has no state that says how that was.
            state="ended" if step == run.stages[-1].end_step - 1 else "stopped",
            totals=dict(totals),
            run=run,
            tables=tuple(tables),
            ordinals=tuple(tuple(lane) for lane in ordinals.tolist()),
            rows=tuple(sorted(rows, key=lambda file: (file.table, file.first, file.lane))),
            dense=dense,
            features=features,
            encoding=encoding,
            base=None if base is None else Base(base.place.name, base.sha256),
            sizes=() if base is None else (*sizes, size),
            inexact=inexact,
        )
