"""Writes a schedule's files: the segments, the header, the row table and the manifest.

The segments come from the serial pass and the oracles, as these produce them.
"""

from __future__ import annotations

import hashlib
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import numpy as np
import pyarrow as pa

from foreload.base.codec import JsonForm
from foreload.base.files import replacing, write_sealed
from foreload.pipelines.compiler.lane_planner import LanePart
from foreload.pipelines.compiler.row_table import RowTable
from foreload.pipelines.compiler.serial_pass import SerialPass, Step
from foreload.pipelines.errors import ScheduleError
from foreload.pipelines.samples.features import FeatureSpec
from foreload.pipelines.samples.pieces import OrderedSource, Samples
from foreload.pipelines.schedule.arrow_files import write_lists
from foreload.pipelines.schedule.format import (
    FORMAT_VERSION,
    HEADER,
    MANIFEST,
    OCCUPANT_BYTES,
    ROW_TABLE,
    FileEntry,
    Header,
    Kind,
    LaneFiles,
    RowTableEntry,
    ScheduleManifest,
    Segment,
    mask_dtype,
    segment_name,
)

ENTRY_SHARE = 10  # entry states take at most one part in this many of a schedule
# The size of a row used in a lane's moves, without the mask of next users: slot (4), early (1).
_USED_BYTES = 5


def _written(files: tuple[FileEntry, ...]) -> Future[tuple[FileEntry, ...]]:
    done: Future[tuple[FileEntry, ...]] = Future()
    done.set_result(files)
    return done


@dataclass(frozen=True, slots=True)
class SampleFiles:
    """The samples of a segment, which are those of consecutive steps of one kind and epoch.

    Attributes:
        kind: Training or evaluation.
        first: The first step's number, among the steps of its kind.
        samples: The number of samples of each step.
        writing: The future of `files`.
    """

    kind: Kind
    epoch: int
    first: int
    samples: tuple[int, ...]
    writing: Annotated[Future[tuple[FileEntry, ...]], JsonForm(tuple[FileEntry, ...], Future.result, _written)]

    @property
    def files(self) -> tuple[FileEntry, ...]:
        """The manifest entry of each lane's file. Waits until the files are written.

        Raises:
            OSError: If a file cannot be written.
        """
        return self.writing.result()

    @property
    def end(self) -> int:
        """The number of the step after the last one."""
        return self.first + len(self.samples)


class _Column:
    """Arrays of consecutive events, one after the other, in memory that every segment reuses."""

    def __init__(self, kind: np.dtype | type) -> None:
        self._values = np.empty(0, kind)
        self._ends: list[int] = [0]

    def room(self, size: int, share: float) -> np.ndarray:
        """Return the next event's array, for the caller to fill.

        If the memory is too small, it grows to what a whole segment is expected to need.

        Args:
            size: The number of values.
            share: The fraction of the segment that precedes this event, from 0 to 1.
        """
        start = self._ends[-1]
        end = start + size
        if end > len(self._values):
            # Extrapolate from the part of the segment so far, with a tenth to spare.
            whole = max(end, int((end if share <= 0 else start / share) * 1.1))
            values = np.empty(whole, self._values.dtype)
            values[:start] = self._values[:start]
            self._values = values
        self._ends.append(end)
        return self._values[start:end]

    def lists(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the offsets and the values of the list column so far.

        The values are a view, valid until `clear`.
        """
        return np.array(self._ends, np.int32), self._values[: self._ends[-1]]

    def clear(self) -> None:
        """Begin the next segment."""
        self._ends = [0]


class SampleWriter:
    """Collects the slices of consecutive events of one kind, and writes them as sample files.

    Attributes:
        bytes: The size of the segment collected so far.
    """

    def __init__(
        self, out: Path, features: FeatureSpec, lanes: int, kind: Kind, segment_bytes: int, thread: ThreadPoolExecutor
    ) -> None:
        """Prepare to write; nothing is written yet.

        Args:
            out: The schedule's folder.
            kind: Training or evaluation.
            segment_bytes: The bound on a segment's size, from which the memory for it is estimated.
            thread: Writes one segment while the next one is collected.
        """
        self._out, self._features, self._kind, self._segment_bytes = out, features, kind, segment_bytes
        kinds: dict[str, np.dtype | type] = {"labels": np.float32}
        if features.weight is not None:
            kinds["weights"] = np.float32
        if features.group is not None and kind == "evaluate":
            kinds["groups"] = np.int64
        kinds |= {"dense": np.float32, "index": np.int32}
        if features.multi_valued:
            kinds["offsets"] = np.int32
        kinds |= {"numbers": np.int64, "users": mask_dtype(lanes)}
        self._thread = thread
        # The columns of the segment that is collected, and those of the one that is written
        # meanwhile.
        self._columns, self._others = (
            [{name: _Column(kind) for name, kind in kinds.items()} for _ in range(lanes)] for _ in range(2)
        )
        self._writing: Future[tuple[FileEntry, ...]] | None = None
        self._index = np.empty(0, np.int32)
        self._samples: list[int] = []
        self._files = 0
        self.bytes = 0

    @property
    def events(self) -> int:
        """The number of events collected so far."""
        return len(self._samples)

    def add(self, samples: Samples, numbers: np.ndarray, serial: SerialPass, step: Step) -> None:
        """Add the event that the serial pass has just processed.

        Args:
            samples: The batch.
            numbers: int64 [samples], the samples' numbers.
        """
        if len(self._index) < len(samples.ids):
            self._index = np.empty(len(samples.ids), np.int32)
        index = self._index[: len(samples.ids)]
        serial.local_index(step, index)
        width = len(self._features.features)
        share = self.bytes / self._segment_bytes
        given = {"numbers": numbers, "weights": samples.weights, "groups": samples.groups}
        of_samples = {name: values for name, values in given.items() if values is not None and name in self._columns[0]}
        for lane, columns in enumerate(self._columns):
            a, b = step.firsts[lane], step.firsts[lane + 1]
            chosen = slice(a, b) if step.order is None else step.order[a:b]
            lookups, users = slice(step.bounds[lane], step.bounds[lane + 1]), step.lanes[lane].users
            columns["labels"].room((b - a) * samples.labels.shape[1], share)[:] = samples.labels[chosen].reshape(-1)
            for name, values in of_samples.items():
                columns[name].room(b - a, share)[:] = values[chosen]
            columns["dense"].room((b - a) * samples.dense.shape[1], share)[:] = samples.dense[chosen].reshape(-1)
            columns["index"].room(lookups.stop - lookups.start, share)[:] = index[lookups]
            if samples.offsets is not None:
                columns["offsets"].room((b - a) * width + 1, share)[:] = _offsets(samples.offsets, chosen, width)
            columns["users"].room(len(users), share)[:] = users
            self.bytes += users.nbytes
        self._samples.append(len(samples))
        self.bytes += index.nbytes + samples.labels.nbytes + samples.dense.nbytes + sum(v.nbytes for v in of_samples.values())

    def close(self, epoch: int, end: int) -> SampleFiles:
        """Start writing the files of the steps collected.

        Args:
            epoch: The epoch of the steps.
            end: The number of the step after the last one.

        Raises:
            OSError: If the files of the segment before could not be written.
        """
        # There are two sets of columns. The other one is free only after its segment is written.
        if self._writing is not None:
            self._writing.result()
        self._writing = self._thread.submit(self._write, self._columns, self._files)
        result = SampleFiles(self._kind, epoch, end - self.events, tuple(self._samples), self._writing)
        self._columns, self._others = self._others, self._columns
        self._files += 1
        self._samples, self.bytes = [], 0
        return result

    def _write(self, of_lanes: list[dict[str, _Column]], number: int) -> tuple[FileEntry, ...]:
        name, files = "samples" if self._kind == "train" else "evaluation", []
        for lane, columns in enumerate(of_lanes):
            lists = {name: column.lists() for name, column in columns.items()}
            files.append(write_lists(self._out / f"{name}-{number:06d}-{lane:02d}.arrow", lists))
            for column in columns.values():
                column.clear()
        return tuple(files)


def _offsets(offsets: np.ndarray, chosen: Any, width: int) -> np.ndarray:
    """Return the CSR offsets of the chosen samples' values, from 0.

    int64 [chosen samples * width + 1].
    """
    values = np.diff(offsets).reshape(-1, width)[chosen].reshape(-1)
    return np.concatenate([[0], np.cumsum(values)])


class EntryShare:
    """Decides which segments have entry states.

    Entry states take at most their share of the size that a schedule has for certain without them.
    The decision does not depend on anything that a lane's oracle decides.
    """

    def __init__(self, mask_bytes: int) -> None:
        """Start before the first segment.

        Args:
            mask_bytes: The size of a mask of the lanes that use a row.
        """
        self._used_bytes = _USED_BYTES + mask_bytes
        self._bytes = self._entry_bytes = 0
        self._known: set[str] = set()

    def begin(self, occupied: int) -> bool:
        """Return whether the next segment has an entry state.

        Args:
            occupied: The slots of all lanes that hold a row before the segment.
        """
        size = occupied * OCCUPANT_BYTES
        if ENTRY_SHARE * (self._entry_bytes + size) > self._bytes:
            return False
        self._entry_bytes += size
        return True

    def end(self, samples: SampleFiles, rows_used: int) -> None:
        """Count a segment's size.

        Args:
            rows_used: The rows that its steps use, over all lanes.
        """
        self._bytes += self._used_bytes * rows_used
        for entry in samples.files:
            # Later epochs and passes refer to files that count already.
            if entry["name"] not in self._known:
                self._known.add(entry["name"])
                self._bytes += entry["bytes"]


def write_segment(out: Path, index: int, samples: SampleFiles, parts: Sequence[LanePart]) -> str:
    """Publish a segment, all of whose files exist; return the checksum of its manifest.

    Args:
        out: The schedule's folder.
        parts: Each lane's part.
    """
    ordinals = [part.ordinals for part in parts]
    segment = Segment(
        index=index,
        kind=samples.kind,
        epoch=samples.epoch,
        first=samples.first,
        samples=samples.samples,
        files=tuple(cast(LaneFiles, {"samples": entry, **part.files}) for entry, part in zip(samples.files, parts, strict=True)),
        evaluation_slots=tuple(part.evaluation_slots for part in parts),
        ordinals=None if None in ordinals else tuple(tuple(of_lane) for of_lane in ordinals if of_lane is not None),
        counts={name: sum(part.counts[name] for part in parts) for name in parts[0].counts},
    )
    return write_sealed(out / segment_name(index), segment)


def write_row_table(out: Path, table: RowTable, first_step: int = 0, repeated: int = 0) -> RowTableEntry:
    """Write rows.arrow: the table, id, lane, ordinal and tag of every row ever trained.

    Rows are in order of (table, id).

    Args:
        out: The schedule's folder.
        first_step: The first training step that the row table has processed in this schedule.
        repeated: How many steps follow those that the row table has processed, and use the same
            rows in the same order. The tags of rows used from `first_step` on are raised by this
            number.

    Returns:
        The row table's manifest entry.
    """
    schema = pa.schema(
        [("table", pa.int16()), ("id", pa.int64()), ("lane", pa.uint8()), ("ordinal", pa.int64()), ("tag", pa.int32())]
    )
    path = out / ROW_TABLE
    count = 0
    with replacing(path) as temporary:
        with pa.OSFile(str(temporary), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
            for batch in table.by_table_and_id():
                batch["tag"][batch["tag"] > first_step] += repeated
                writer.write_batch(pa.RecordBatch.from_arrays([pa.array(batch[name]) for name in schema.names], schema=schema))
                count += len(batch["id"])
        with pa.memory_map(str(temporary)) as file:
            return {"name": path.name, "rows": count, "bytes": file.size(), "crc32": zlib.crc32(file.read_buffer())}


@dataclass(frozen=True, slots=True)
class SlotsWanted:
    """How many slots a lane is to have.

    Attributes:
        wanted: A number, "min" (the rows of the largest step) or "all" (no row ever leaves).
        at_most: Whether the number is an upper limit. If so, a lane gets no more slots than there
            can be rows.
    """

    wanted: int | Literal["min", "all"]
    at_most: bool = False

    def number(self, header: Header) -> int | None:
        """Return the number of slots for a schedule with the header's samples.

        Returns None if "min" or "all" was given, because the number then follows from the data.
        """
        if not isinstance(self.wanted, int) or not self.at_most:
            return self.wanted if isinstance(self.wanted, int) else None
        return max(min(self.wanted, header.features.most_rows(header.training_samples) or self.wanted), 1)


def counted(header: Header, source: OrderedSource) -> Header:
    """Return the header with its numbers of samples; the source may have to be read on for them.

    Raises:
        ScheduleError: If there are too many steps.
    """
    header = replace(header, training_samples=source.training_samples, evaluation_samples=source.evaluation_samples)
    if header.evaluation_sets:
        of_sets = zip(header.set_names, source.evaluation_sets, strict=True)
        header = replace(header, evaluation_sets=tuple(of_sets))
    if header.end_step >= 2**31 - 2:
        raise ScheduleError(f"steps: must be below 2^31; got {header.end_step}; use a larger --batch-size")
    return header


class ScheduleOutput:
    """Writes a schedule's header, segments and manifest. The constructor writes the header."""

    def __init__(self, out: Path, header: Header) -> None:
        self._out, self._header = out, header
        self._checksums: list[str] = []
        self._evaluation_slots = np.zeros(header.lanes, np.int64)
        self._totals: Counter[str] = Counter()
        write_sealed(out / HEADER, header)

    def publish(self, samples: SampleFiles, parts: Sequence[LanePart]) -> None:
        """Publish the next segment.

        Args:
            parts: Each lane's part, whose files are written.
        """
        self._checksums.append(write_segment(self._out, len(self._checksums), samples, parts))
        self._evaluation_slots = np.maximum(self._evaluation_slots, [part.evaluation_slots for part in parts])
        if samples.kind == "train":
            for part in parts:
                self._totals.update(part.counts)

    def finish(
        self, occupied: Sequence[int], minimum_slots: Sequence[int], lookahead_ratio: float, rows: RowTableEntry
    ) -> ScheduleManifest:
        """Write the manifest, which completes the schedule.

        Args:
            occupied: For each lane, the slots that hold a row at the end.
            minimum_slots: For each lane, the rows of its largest step.
            lookahead_ratio: The least lookahead of any decision to end a residency, in units of
                slots / arrivals per step. Infinite if all of the future was known.
            rows: The row table's manifest entry.
        """
        totals = self._totals
        manifest: ScheduleManifest = {
            "version": FORMAT_VERSION,
            "header": hashlib.sha256((self._out / HEADER).read_bytes()).hexdigest(),
            "segments": self._checksums,
            "evaluation_slots": [int(n) for n in self._evaluation_slots],
            "occupied": list(occupied),
            "minimum_slots": list(minimum_slots),
            "end_step": self._header.end_step,
            "counts": {
                "training_samples": self._header.training_samples * self._header.epochs,
                "training_steps": self._header.end_step - self._header.first_step,
                "evaluation_samples": self._header.evaluation_samples,
                "rows_used": totals["rows_used"],
                "arrivals": totals["arrivals"],
                "initial": totals["initial"],
                "stored": totals["arrivals"] - totals["initial"],
                "write_backs": totals["write_backs"] + sum(occupied),
            },
            "lookahead": {
                "cover": None if lookahead_ratio == float("inf") else lookahead_ratio,
                "bound": 3,
                "exact": lookahead_ratio >= 3,
            },
            "rows": rows,
        }
        write_sealed(self._out / MANIFEST, manifest)
        return manifest


Progress = Callable[[int, int], None]
"""Called with the number of training steps compiled so far, and their total number."""
