"""Writing a schedule's segments: what the serial pass and the oracles produce, gathered per lane and published whole."""

from __future__ import annotations

import hashlib
import os
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from pipelines import numbering, oracle
from pipelines.files import write_sealed
from pipelines.lane_oracle import LaneOracle
from pipelines.row_table import RowTable
from pipelines.samples import Samples
from pipelines.schedule_format import HEADER, MOVE_COLUMNS, ROW_TABLE, Header, Segment, mask_dtype, segment_name, write_lists
from pipelines.serial_pass import SerialPass

ENTRY_SHARE = 10  # entry states take at most one part in this many of a schedule


def _lists(steps: list[np.ndarray], dtype: np.dtype | None = None) -> tuple[np.ndarray, np.ndarray]:
    offsets = np.zeros(len(steps) + 1, np.int32)
    np.cumsum([a.size for a in steps], out=offsets[1:])
    values = steps[0].reshape(-1) if len(steps) == 1 else np.concatenate([a.reshape(-1) for a in steps])
    return offsets, values if dtype is None else values.astype(dtype, copy=False)


class SampleWriter:
    """Gathers the lanes' slices of consecutive events and writes them as the sample files of a segment."""

    def __init__(self, out: Path, header: Header, name: str) -> None:
        self._out, self._header, self._name = out, header, name
        self._columns: list[dict[str, list[np.ndarray]]] = []
        self._samples: list[int] = []
        self._files = 0
        self.bytes = 0
        self._reset()

    def _reset(self) -> None:
        names = ["labels", "dense", "index", *(["offsets"] if self._header.features.multi_valued else []), "numbers", "users"]
        self._columns = [{name: [] for name in names} for _ in range(self._header.lanes)]
        self._samples = []
        self.bytes = 0

    @property
    def events(self) -> int:
        """Events gathered so far."""
        return len(self._samples)

    def add(
        self, samples: Samples, numbers: np.ndarray, serial: SerialPass, count: int, firsts: np.ndarray, bounds: np.ndarray
    ) -> None:
        """Add the event whose `count` distinct rows are in the serial pass's scratch."""
        width = len(self._header.features.features)
        mask = mask_dtype(self._header.lanes)
        index = np.empty(len(samples.ids), np.int32)
        owned = np.empty(self._header.lanes, np.int64)
        numbering.local_index(count, bounds, serial.scratch, owned, index)
        owner = serial.scratch.lane[:count]
        users = serial.scratch.users[:count].astype(mask)
        for lane, columns in enumerate(self._columns):
            a, b = firsts[lane], firsts[lane + 1]
            # Copies: the samples are views of a piece, which must not stay mapped until the segment is written.
            columns["labels"].append(samples.labels[a:b].copy())
            columns["dense"].append(samples.dense[a:b].copy())
            columns["index"].append(index[bounds[lane] : bounds[lane + 1]])
            if samples.offsets is not None:
                columns["offsets"].append(
                    (samples.offsets[a * width : b * width + 1] - samples.offsets[a * width]).astype(np.int32)
                )
            columns["numbers"].append(numbers[a:b].copy())
            columns["users"].append(users[owner == lane])
        self._samples.append(len(samples))
        self.bytes += index.nbytes + samples.labels.nbytes + samples.dense.nbytes + numbers.nbytes + users.nbytes

    def close(self) -> dict[str, Any]:
        """Write the files; returns {"samples": samples per event, "files": per lane, "sample_bytes": bytes}."""
        files = []
        for lane, columns in enumerate(self._columns):
            lists = {name: _lists(steps) for name, steps in columns.items()}
            files.append(write_lists(self._out / f"{self._name}-{self._files:06d}-{lane:02d}.arrow", lists))
        result = {"samples": self._samples, "files": files}
        self._files += 1
        self._reset()
        return result


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

    def begin(self, oracles: list[LaneOracle], rows: Any) -> None:
        """Before the first event of a segment: keep the entry state where the share allows."""
        size = sum(planner.occupied() for planner in oracles) * 26
        if self.checksums and ENTRY_SHARE * (self._entry_bytes + size) > self._bytes:
            self._entry = self._ordinals = None
            return
        self._entry = [planner.occupants(rows) for planner in oracles]
        self._ordinals = [[int(n) for n in planner.trained] for planner in oracles]

    def train(self, part: dict[str, Any], moves: list[list[oracle.Moves]]) -> None:
        """Publish a segment of training steps; part: what SampleWriter.close returned, with epoch and first step."""
        self._publish("train", part, moves, [0] * self._header.lanes)

    def evaluate(self, part: dict[str, Any], moves: list[list[oracle.Moves]], evaluation_slots: list[int]) -> None:
        """Publish a segment of evaluation steps."""
        self.evaluation_slots = np.maximum(self.evaluation_slots, evaluation_slots)
        self._publish("evaluate", part, moves, evaluation_slots)

    def _publish(self, kind: Any, part: dict[str, Any], moves: list[list[oracle.Moves]], evaluation_slots: list[int]) -> None:
        index = len(self.checksums)
        mask = mask_dtype(self._header.lanes)
        files = []
        counts = {"rows_used": 0, "arrivals": 0, "initial": 0, "write_backs": 0}
        for lane, steps in enumerate(moves):
            columns = {
                name: _lists([step[k] for step in steps], mask if name == "next_users" else None)
                for k, name in enumerate(MOVE_COLUMNS)
            }
            entries = {
                "samples": part["files"][lane],
                "moves": write_lists(self._out / f"moves-{index:06d}-{lane:02d}.arrow", columns),
            }
            if self._entry is not None:
                state = {name: _lists([values]) for name, values in self._entry[lane].items()}
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
            epoch=part["epoch"],
            first=part["first"],
            samples=tuple(part["samples"]),
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
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}")
    count = 0
    try:
        with pa.OSFile(str(temporary), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
            for batch in table.trained():
                writer.write_batch(pa.RecordBatch.from_arrays([pa.array(batch[name]) for name in schema.names], schema=schema))
                count += len(batch["id"])
        with pa.memory_map(str(temporary)) as file:
            entry = {"name": path.name, "rows": count, "bytes": file.size(), "crc32": zlib.crc32(file.read_buffer())}
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return entry
