"""The schedule on disk: its format, its reader (docs/schedule.md).

A schedule is a folder: `header.json` (settings, published first), per segment and lane Arrow IPC files with one row per event and list
columns, `segment-NNNNNN.json` (published when its files are complete), `rows.arrow` (the row table) and, last, `schedule.json`, which names
and checks everything before it. Trainers map the files; a step's arrays are views on them.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from pipelines.errors import ScheduleError
from pipelines.features import FeatureSpec

FORMAT_VERSION = 1
HEADER, MANIFEST, ROW_TABLE, FAILED = "header.json", "schedule.json", "rows.arrow", "failed.json"

Kind = Literal["train", "evaluate"]

SAMPLE_COLUMNS = ("labels", "dense", "index", "offsets", "numbers", "users")
MOVE_COLUMNS = (
    *("slots", "early", "next_users", "ends"),
    *("arrival_slot", "arrival_table", "arrival_ordinal", "arrival_id", "arrival_tag", "arrival_after"),
)


def mask_dtype(lanes: int) -> np.dtype:
    """The narrowest unsigned type that holds a bit per lane."""
    return np.dtype(next(t for t, bits in ((np.uint8, 8), (np.uint16, 16), (np.uint32, 32), (np.uint64, 64)) if lanes <= bits))


def segment_name(index: int) -> str:
    """The manifest of segment `index`."""
    return f"segment-{index:06d}.json"


def write_atomically(path: Path, data: bytes | pa.Buffer) -> None:
    """Write a file under a temporary name and rename it: it is there whole, or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: object) -> str:
    """Write canonical JSON atomically; returns its SHA-256."""
    data = (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()
    write_atomically(path, data)
    return hashlib.sha256(data).hexdigest()


def write_lists(path: Path, columns: dict[str, tuple[np.ndarray, np.ndarray]]) -> dict[str, Any]:
    """Write list columns, name -> (offsets int32 [events + 1], values), as one Arrow record batch.

    Returns the file's entry in a manifest: name, bytes and CRC-32.
    """
    arrays = [pa.ListArray.from_arrays(pa.array(offsets), pa.array(values)) for offsets, values in columns.values()]
    batch = pa.RecordBatch.from_arrays(arrays, names=list(columns))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    buffer = sink.getvalue()
    write_atomically(path, buffer)
    return {"name": path.name, "bytes": buffer.size, "crc32": zlib.crc32(buffer)}


@dataclass(frozen=True, slots=True)
class Header:
    """The settings of a schedule, known before its first segment.

    slots: per lane; first_step: number of its first training step; first_number: number of its first training sample; parent: SHA-256 of
    the parent's schedule.json, or None; lookahead: what the oracle was allowed (see CompileSettings).
    """

    version: int
    features: FeatureSpec
    batch_size: int
    lanes: int
    slots: tuple[int, ...]
    epochs: int
    shuffle_seed: int | None
    training_samples: int
    evaluation_samples: int
    first_step: int
    first_number: int
    parent: str | None
    settings: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {name: getattr(self, name) for name in self.__slots__} | {
            "features": self.features.to_dict(),
            "slots": list(self.slots),
        }

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> Header:
        """Inverse of to_dict; raises ScheduleError for another format version."""
        if value.get("version") != FORMAT_VERSION:
            raise ScheduleError(
                f"schedule format version: must be {FORMAT_VERSION}, is {value.get('version')}: prepare the schedule again with this version"
            )
        return cls(**{**value, "features": FeatureSpec.from_dict(value["features"]), "slots": tuple(value["slots"])})

    @property
    def steps_per_epoch(self) -> int:
        """Training steps of one epoch."""
        return -(-self.training_samples // self.batch_size)

    @property
    def end_step(self) -> int:
        """Number of the training step after the last one."""
        return self.first_step + self.steps_per_epoch * self.epochs


@dataclass(frozen=True, slots=True)
class Segment:
    """One segment's manifest: consecutive events of one kind and epoch.

    first: number of the first event of this kind; samples: per event, over all lanes; files: per lane, "samples" and "moves" and, where the
    segment has one, "entry"; evaluation_slots: per lane, what its events need.
    """

    index: int
    kind: Kind
    epoch: int
    first: int
    samples: tuple[int, ...]
    files: tuple[dict[str, dict[str, Any]], ...]
    evaluation_slots: tuple[int, ...]
    ordinals: tuple[tuple[int, ...], ...] | None  # with an entry state: per lane and table, the ordinals given before the segment
    counts: dict[str, int]

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return asdict(self)

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> Segment:
        """Inverse of to_dict."""
        ordinals = value["ordinals"]
        return cls(
            **{
                **value,
                "samples": tuple(value["samples"]),
                "files": tuple(value["files"]),
                "evaluation_slots": tuple(value["evaluation_slots"]),
                "ordinals": None if ordinals is None else tuple(tuple(lane) for lane in ordinals),
            }
        )


@dataclass(frozen=True, slots=True)
class Event:
    """A step of the program: its kind, number (of its kind), samples over all lanes, place in the program, segment, row in the segment."""

    kind: Kind
    step: int
    samples: int
    index: int
    epoch: int
    segment: int
    row: int


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Rows that arrive in slots of one lane before an event.

    slot int32, table int16, ordinal int64 (-1: never trained, evaluation only), id int64, tag int32 (0: initial, nothing is asked of the
    store), after int32: the boundary of the row's last write-back, which the fetch must follow; -1: stored before this schedule. All [A].
    """

    slot: np.ndarray
    table: np.ndarray
    ordinal: np.ndarray
    id: np.ndarray
    tag: np.ndarray
    after: np.ndarray

    def __len__(self) -> int:
        return len(self.slot)


@dataclass(frozen=True, slots=True)
class LaneEvent:
    """One lane's part of an event: read-only views of the schedule.

    Its slice: labels float32 [b], dense float32 [b, n], index int32 [lookups] (place among the lane's local rows), offsets int32 [b*F + 1]
    or None, numbers int64 [b]. Its partition, rows in the order of first lookup: slots int32 [U], users uint64 [U] (bit v: lane v uses
    it), early bool [U], next_users uint64 [U]; ends int32: slots whose residency ends at the boundary before the step; arrivals.
    """

    labels: np.ndarray
    dense: np.ndarray
    index: np.ndarray
    offsets: np.ndarray | None
    numbers: np.ndarray
    slots: np.ndarray
    users: np.ndarray
    early: np.ndarray
    next_users: np.ndarray
    ends: np.ndarray
    arrivals: Arrivals


@dataclass(frozen=True, slots=True)
class Occupants:
    """A partition's entry state: slots 0..n-1 and who sits there. table int16, ordinal int64, id int64, tag int32, stored int32, all [n]."""

    table: np.ndarray
    ordinal: np.ndarray
    id: np.ndarray
    tag: np.ndarray
    stored: np.ndarray


class MappedLists:
    """A mapped Arrow file of list columns: `column(name, row)` is a view."""

    def __init__(self, path: Path, entry: dict[str, Any]) -> None:
        try:
            size = path.stat().st_size
            source = pa.memory_map(str(path))
        except OSError as error:
            raise ScheduleError(f"schedule file {path}: cannot be read ({error.strerror}): prepare the schedule again") from None
        if size != entry["bytes"] or zlib.crc32(source.read_buffer()) != entry["crc32"]:
            raise ScheduleError(
                f"schedule file {path}: its checksum is not the manifest's: the file is damaged; prepare the schedule again"
            )
        source.seek(0)
        batch = pa.ipc.open_file(source).get_batch(0)
        self._columns = {
            name: (batch.column(name).offsets.to_numpy(), batch.column(name).values.to_numpy()) for name in batch.schema.names
        }

    def column(self, name: str, row: int) -> np.ndarray:
        """Row `row` of a list column; empty where the file has no such column."""
        offsets, values = self._columns[name]
        return values[offsets[row] : offsets[row + 1]]

    def has(self, name: str) -> bool:
        """Whether the file has this column."""
        return name in self._columns


def _load_json(path: Path, what: str) -> tuple[dict[str, Any], str]:
    try:
        data = path.read_bytes()
        return json.loads(data), hashlib.sha256(data).hexdigest()
    except FileNotFoundError:
        raise ScheduleError(f"{what} {path}: is missing: not a whole schedule; prepare it again") from None
    except (ValueError, OSError):
        raise ScheduleError(f"{what} {path}: cannot be read: the file is damaged; prepare the schedule again") from None


class Schedule:
    """A schedule on disk, read by memory map.

    With follow=True it may still be growing: `events` waits for segments as they are published. Otherwise one that is unfinished, has
    failed, or whose manifests do not match their checksums is refused with ScheduleError.
    """

    POLL = timedelta(milliseconds=200)

    def __init__(self, path: Path | str, follow: bool = False) -> None:
        self.path = Path(path)
        self.follow = follow
        self._files: dict[tuple[int, int], tuple[MappedLists, MappedLists]] = {}
        self._segments: list[Segment] = []
        self._lock = threading.Lock()  # a trainer's threads read one schedule at different places
        if not self.path.is_dir():
            raise ScheduleError(f"schedule {self.path}: is not a folder: give what `foreload prepare --out` wrote")
        if follow:
            while not (self.path / HEADER).exists():
                self._refuse_failed()
                time.sleep(self.POLL.total_seconds())
        elif not (self.path / MANIFEST).exists():
            self._refuse_failed()
            state = "unfinished" if (self.path / HEADER).exists() else "not a schedule"
            raise ScheduleError(
                f"schedule {self.path}: is {state} (no {MANIFEST}): wait for `foreload prepare`, or train with --follow"
            )
        header, header_sum = _load_json(self.path / HEADER, "schedule header")
        self.header = Header.from_dict(header)
        if self.complete and self.manifest["header"] != header_sum:
            raise ScheduleError(
                f"schedule header {self.path / HEADER}: its checksum is not the manifest's: prepare the schedule again"
            )

    def _refuse_failed(self) -> None:
        if (self.path / FAILED).exists():
            failure, _ = _load_json(self.path / FAILED, "schedule failure")
            raise ScheduleError(f"schedule {self.path}: preparing it failed: {failure['error']}")

    @property
    def complete(self) -> bool:
        """Whether schedule.json is there."""
        return (self.path / MANIFEST).exists()

    @cached_property
    def _manifest(self) -> tuple[dict[str, Any], str]:
        return _load_json(self.path / MANIFEST, "schedule manifest")

    @property
    def manifest(self) -> dict[str, Any]:
        """The manifest over all: counts, lookahead, checksums."""
        return self._manifest[0]

    @property
    def checksum(self) -> str:
        """SHA-256 of schedule.json: the identity of a complete schedule."""
        return self._manifest[1]

    @property
    def identity(self) -> str:
        """SHA-256 of header.json: known from the start, the same when complete."""
        return hashlib.sha256((self.path / HEADER).read_bytes()).hexdigest()

    def segment(self, index: int) -> Segment | None:
        """Segment `index`, or None past the end; waits for it while the schedule grows."""
        if index < len(self._segments):
            return self._segments[index]
        with self._lock:
            return self._wait_for(index)

    def _wait_for(self, index: int) -> Segment | None:
        while len(self._segments) <= index:
            k = len(self._segments)
            if self.complete and k >= len(self.manifest["segments"]):
                return None
            path = self.path / segment_name(k)
            if not path.exists() and not self.complete:
                self._refuse_failed()
                time.sleep(self.POLL.total_seconds())
                continue
            value, checksum = _load_json(path, "segment manifest")
            if self.complete and self.manifest["segments"][k] != checksum:
                raise ScheduleError(f"segment manifest {path}: its checksum is not the manifest's: prepare the schedule again")
            self._segments.append(Segment.from_dict(value))
        return self._segments[index]

    def segments(self) -> Iterator[Segment]:
        """All segments in order."""
        k = 0
        while (segment := self.segment(k)) is not None:
            yield segment
            k += 1

    def events(self, first_segment: int = 0) -> Iterator[Event]:
        """The program from a segment on, in order; waits where the schedule still grows."""
        return (event for event in self.known_events(first_segment, wait=True) if event is not None)

    def known_events(self, first_segment: int = 0, wait: bool = False) -> Iterator[Event | None]:
        """The program from a segment on; unless it is to wait, None stands where the next event is not published yet."""
        place = sum(len(segment.samples) for segment, _ in zip(self.segments(), range(first_segment), strict=False))
        k = first_segment
        while True:
            while not wait and not self._published(k):
                yield None
            segment = self.segment(k)
            if segment is None:
                return
            for row, samples in enumerate(segment.samples):
                yield Event(segment.kind, segment.first + row, samples, place, segment.epoch, k, row)
                place += 1
            k += 1

    def _published(self, index: int) -> bool:
        """Whether it is known what segment `index` is, or that there is none, or that preparing failed."""
        return (
            index < len(self._segments)
            or (self.path / segment_name(index)).exists()
            or self.complete
            or (self.path / FAILED).exists()
        )

    def _open(self, segment: int, lane: int) -> tuple[MappedLists, MappedLists]:
        found = self._files.get((segment, lane))
        if found is None:
            files = self._segments[segment].files[lane]
            samples, moves = (MappedLists(self.path / files[part]["name"], files[part]) for part in ("samples", "moves"))
            # Threads read ahead and behind one another by a few steps; two segments back nobody reads.
            for old in [k for k in list(self._files) if k[1] == lane and k[0] < segment - 2]:
                self._files.pop(old, None)
            self._files[segment, lane] = found = samples, moves
        return found

    def lane(self, event: Event, lane: int) -> LaneEvent:
        """One lane's part of an event."""
        samples, moves = self._open(event.segment, lane)
        row = event.row
        labels = samples.column("labels", row)
        return LaneEvent(
            labels=labels,
            dense=samples.column("dense", row).reshape(len(labels), len(self.header.features.dense)),
            index=samples.column("index", row),
            offsets=samples.column("offsets", row) if samples.has("offsets") else None,
            numbers=samples.column("numbers", row),
            slots=moves.column("slots", row),
            users=samples.column("users", row).astype(np.uint64),
            early=moves.column("early", row).astype(bool),
            next_users=moves.column("next_users", row).astype(np.uint64),
            ends=moves.column("ends", row),
            arrivals=self.arrivals(event, lane),
        )

    def arrivals(self, event: Event, lane: int) -> Arrivals:
        """The rows that arrive in a lane before an event."""
        _, moves = self._open(event.segment, lane)
        return Arrivals(*(moves.column(f"arrival_{name}", event.row) for name in Arrivals.__slots__))

    def final_ends(self, lane: int) -> np.ndarray:
        """The slots (int32) whose residency ends with the schedule: all that are occupied."""
        return np.arange(self.manifest["occupied"][lane], dtype=np.int32)

    def entry(self, segment: int, lane: int) -> Occupants | None:
        """Who sat in a lane's slots before a segment, or None where the segment has no entry state."""
        found = self.segment(segment)
        assert found is not None
        entry = found.files[lane].get("entry")
        if entry is None:
            return None
        lists = MappedLists(self.path / entry["name"], entry)
        return Occupants(*(lists.column(name, 0) for name in Occupants.__slots__))

    def rows(self, batch_rows: int = 1 << 18) -> Iterator[dict[str, np.ndarray]]:
        """The row table by (table, id), in batches: table int16, id int64, lane uint8, ordinal int64, tag int32."""
        entry = self.manifest["rows"]
        path = self.path / ROW_TABLE
        try:
            source = pa.memory_map(str(path))
        except OSError as error:
            raise ScheduleError(f"row table {path}: cannot be read ({error.strerror}): prepare the schedule again") from None
        if source.size() != entry["bytes"] or zlib.crc32(source.read_buffer()) != entry["crc32"]:
            raise ScheduleError(
                f"row table {path}: its checksum is not the manifest's: the file is damaged; prepare the schedule again"
            )
        source.seek(0)
        reader = pa.ipc.open_file(source)
        for k in range(reader.num_record_batches):
            batch = reader.get_batch(k)
            for start in range(0, batch.num_rows, batch_rows):
                part = batch.slice(start, batch_rows)
                yield {name: part.column(name).to_numpy() for name in part.schema.names}
