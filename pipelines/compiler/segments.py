"""Writing a schedule's segments: what the serial pass and the oracles produce, gathered per lane and published whole."""

from __future__ import annotations

import hashlib
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from foreload.pipelines.base.files import replacing, write_sealed
from foreload.pipelines.compiler.lane_oracle import Columns, Oracle
from foreload.pipelines.compiler.row_table import Rows, RowTable
from foreload.pipelines.compiler.serial_pass import SerialPass, Step
from foreload.pipelines.samples.pieces import Samples
from foreload.pipelines.schedule.format import (
    HEADER,
    ROW_TABLE,
    Header,
    Segment,
    mask_dtype,
    segment_name,
    write_lists,
)

ENTRY_SHARE = 10  # entry states take at most one part in this many of a schedule
_OCCUPANT_BYTES = 26  # of a slot in an entry state: table (2), ordinal (8), id (8), tag (4), stored tag (4)


@dataclass(frozen=True, slots=True)
class SampleFiles:
    """The samples of a segment, as written: those of consecutive steps of one epoch.

    first: the first step's number, among training or evaluation steps; samples: how many each step has; files: a manifest entry for each lane.
    """

    epoch: int
    first: int
    samples: tuple[int, ...]
    files: tuple[dict[str, Any], ...]

    @property
    def end(self) -> int:
        """The number of the step that follows."""
        return self.first + len(self.samples)


class _Column:
    """Arrays of consecutive events, one after the other in memory that is used again for the next segment."""

    def __init__(self, kind: np.dtype | type) -> None:
        self._values = np.empty(0, kind)
        self._ends: list[int] = [0]

    def room(self, size: int, share: float) -> np.ndarray:
        """The next event's array, to be filled.

        share: how much of the segment stands before it, from 0 to 1; memory that is too small grows to what a whole segment will take by that.
        """
        start = self._ends[-1]
        end = start + size
        if end > len(self._values):
            whole = max(end, int((end if share <= 0 else start / share) * 1.1))
            values = np.empty(whole, self._values.dtype)
            values[:start] = self._values[:start]
            self._values = values
        self._ends.append(end)
        return self._values[start:end]

    def lists(self) -> tuple[np.ndarray, np.ndarray]:
        """The list column so far; a view, valid until `clear`."""
        return np.array(self._ends, np.int32), self._values[: self._ends[-1]]

    def clear(self) -> None:
        """Begin the next segment."""
        self._ends = [0]


class SampleWriter:
    """Gathers the lanes' slices of consecutive events and writes them as the sample files of a segment.

    segment_bytes: what a segment is bounded by, for the room that it is given.
    """

    def __init__(self, out: Path, header: Header, name: str, segment_bytes: int) -> None:
        self._out, self._header, self._name, self._segment_bytes = out, header, name, segment_bytes
        kinds: dict[str, np.dtype | type] = {"labels": np.float32, "dense": np.float32, "index": np.int32}
        if header.features.multi_valued:
            kinds["offsets"] = np.int32
        kinds |= {"numbers": np.int64, "users": mask_dtype(header.lanes)}
        self._columns = [{name: _Column(kind) for name, kind in kinds.items()} for _ in range(header.lanes)]
        self._index = np.empty(0, np.int32)
        self._samples: list[int] = []
        self._files = 0
        self.bytes = 0

    @property
    def events(self) -> int:
        """Events gathered so far."""
        return len(self._samples)

    def add(self, samples: Samples, numbers: np.ndarray, serial: SerialPass, step: Step) -> None:
        """Add the event that the serial pass has just gone through; numbers int64 [samples]: the samples' numbers."""
        if len(self._index) < len(samples.ids):
            self._index = np.empty(len(samples.ids), np.int32)
        index = self._index[: len(samples.ids)]
        serial.local_index(step, index)
        width = len(self._header.features.features)
        users = serial.scratch.users[serial.scratch.order[: step.count]]
        own = np.concatenate([[0], np.cumsum(serial.owned)])
        share = self.bytes / self._segment_bytes
        for lane, columns in enumerate(self._columns):
            a, b = step.firsts[lane], step.firsts[lane + 1]
            chosen = slice(a, b) if step.order is None else step.order[a:b]
            lookups = slice(step.bounds[lane], step.bounds[lane + 1])
            columns["labels"].room(b - a, share)[:] = samples.labels[chosen]
            columns["dense"].room((b - a) * samples.dense.shape[1], share)[:] = samples.dense[chosen].reshape(-1)
            columns["index"].room(lookups.stop - lookups.start, share)[:] = index[lookups]
            if samples.offsets is not None:
                columns["offsets"].room((b - a) * width + 1, share)[:] = _offsets(samples.offsets, chosen, width)
            columns["numbers"].room(b - a, share)[:] = numbers[chosen]
            columns["users"].room(own[lane + 1] - own[lane], share)[:] = users[own[lane] : own[lane + 1]]
        self._samples.append(len(samples))
        mask_bytes = step.count * mask_dtype(self._header.lanes).itemsize
        self.bytes += index.nbytes + samples.labels.nbytes + samples.dense.nbytes + numbers.nbytes + mask_bytes

    def close(self, epoch: int, end: int) -> SampleFiles:
        """Write the files of the steps gathered, which come before step `end` and are of one epoch."""
        files = []
        for lane, columns in enumerate(self._columns):
            lists = {name: column.lists() for name, column in columns.items()}
            files.append(write_lists(self._out / f"{self._name}-{self._files:06d}-{lane:02d}.arrow", lists))
            for column in columns.values():
                column.clear()
        result = SampleFiles(epoch, end - self.events, tuple(self._samples), tuple(files))
        self._files += 1
        self._samples, self.bytes = [], 0
        return result


def _offsets(offsets: np.ndarray, chosen: Any, width: int) -> np.ndarray:
    """The CSR offsets int64 [chosen samples * width + 1] of some samples' values, from 0."""
    values = np.diff(offsets).reshape(-1, width)[chosen].reshape(-1)
    return np.concatenate([[0], np.cumsum(values)])


class SegmentWriter:
    """Publishes segments: moves, entry states within their share, manifests."""

    def __init__(self, out: Path, header: Header) -> None:
        self._out, self._header = out, header
        self.checksums: list[str] = []
        self.evaluation_slots = np.zeros(header.lanes, np.int64)
        self._bytes = self._entry_bytes = 0
        self._known: set[str] = set()
        self._entry: list[dict[str, np.ndarray]] | None = None
        self._ordinals: list[list[int]] | None = None

    def header_checksum(self) -> str:
        """SHA-256 of the published header."""
        return hashlib.sha256((self._out / HEADER).read_bytes()).hexdigest()

    def begin(self, planner: Oracle, rows: Rows) -> None:
        """Before the first event of a segment: keep the entry state where the share allows."""
        lanes = range(self._header.lanes)
        size = sum(planner.occupied(lane) for lane in lanes) * _OCCUPANT_BYTES
        if self.checksums and ENTRY_SHARE * (self._entry_bytes + size) > self._bytes:
            self._entry = self._ordinals = None
            return
        self._entry = [planner.occupants(rows, lane) for lane in lanes]
        self._ordinals = planner.parts.ordinals.tolist()

    def train(self, samples: SampleFiles, moves: list[Columns]) -> None:
        """Publish a segment of training steps: their samples, and the lanes' moves."""
        self._publish("train", samples, moves, [0] * self._header.lanes)

    def evaluate(self, samples: SampleFiles, moves: list[Columns], evaluation_slots: list[int]) -> None:
        """Publish a segment of evaluation steps; evaluation_slots: what each lane needs besides its slots."""
        self.evaluation_slots = np.maximum(self.evaluation_slots, evaluation_slots)
        self._publish("evaluate", samples, moves, evaluation_slots)

    def _publish(self, kind: Any, samples: SampleFiles, moves: list[Columns], evaluation_slots: list[int]) -> None:
        index = len(self.checksums)
        files = []
        counts = {"rows_used": 0, "arrivals": 0, "initial": 0, "write_backs": 0}
        for lane, columns in enumerate(moves):
            entries = {
                "samples": samples.files[lane],
                "moves": write_lists(self._out / f"moves-{index:06d}-{lane:02d}.arrow", columns),
            }
            if self._entry is not None:
                state = {name: (np.array([0, len(values)], np.int32), values) for name, values in self._entry[lane].items()}
                entries["entry"] = write_lists(self._out / f"entry-{index:06d}-{lane:02d}.arrow", state)
                self._entry_bytes += entries["entry"]["bytes"]
            for entry in entries.values():
                if entry["name"] not in self._known:
                    self._known.add(entry["name"])
                    self._bytes += entry["bytes"]
            files.append(entries)
            counts["rows_used"] += int(columns["slots"][1].size)
            counts["arrivals"] += int(columns["arrival_tag"][1].size)
            counts["initial"] += int((columns["arrival_tag"][1] == 0).sum())
            counts["write_backs"] += int(columns["ends"][1].size)
        segment = Segment(
            index=index,
            kind=kind,
            epoch=samples.epoch,
            first=samples.first,
            samples=samples.samples,
            files=tuple(files),
            evaluation_slots=tuple(int(n) for n in evaluation_slots),
            ordinals=None if self._ordinals is None else tuple(tuple(lane) for lane in self._ordinals),
            counts=counts,
        )
        self.checksums.append(write_sealed(self._out / segment_name(index), segment.to_dict()))


def write_row_table(out: Path, table: RowTable) -> dict[str, Any]:
    """Write rows.arrow: (table, id, lane, ordinal, tag) of every row ever trained, by (table, id). Returns its manifest entry."""
    schema = pa.schema(
        [("table", pa.int16()), ("id", pa.int64()), ("lane", pa.uint8()), ("ordinal", pa.int64()), ("tag", pa.int32())]
    )
    path = out / ROW_TABLE
    count = 0
    with replacing(path) as temporary:
        with pa.OSFile(str(temporary), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
            for batch in table.by_table_and_id():
                writer.write_batch(pa.RecordBatch.from_arrays([pa.array(batch[name]) for name in schema.names], schema=schema))
                count += len(batch["id"])
        with pa.memory_map(str(temporary)) as file:
            entry = {"name": path.name, "rows": count, "bytes": file.size(), "crc32": zlib.crc32(file.read_buffer())}
    return entry
