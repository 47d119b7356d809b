"""Reads a schedule by memory map.

A schedule is a folder. It holds `header.json` (the settings, published first); for each segment and
lane, Arrow IPC files with one row per event and list columns; `segment-NNNNNN.json` (published when
the segment's files are complete); `rows.arrow` (the row table); and `schedule.json`, published
last, which names everything before it with its checksum. Trainers map the files, and the arrays of
a step are views on them. See docs/schedule.md.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from foreload.base.codec import FormError, fault, of_json, parse_json
from foreload.base.files import read_sealed, unreadable
from foreload.pipelines.errors import ScheduleError
from foreload.pipelines.schedule.arrow_files import MappedLists, map_file
from foreload.pipelines.schedule.at_work import Watch
from foreload.pipelines.schedule.format import (
    FAILED,
    HEADER,
    LOCK,
    MANIFEST,
    PROVENANCE,
    ROW_TABLE,
    WORK,
    Arrivals,
    Event,
    Header,
    LaneEvent,
    Occupants,
    ScheduleManifest,
    Segment,
    segment_name,
)

# Columns of moves and of entry states, in the order of the fields of Arrivals and Occupants.
_ARRIVAL_COLUMNS = ("table", "ordinal", "id", "tag", "slot", "after")
_ENTRY_COLUMNS = ("table", "ordinal", "id", "tag", "stored")


def _load_json(path: Path, what: str) -> tuple[dict[str, Any], str]:
    try:
        return read_sealed(path)
    except FileNotFoundError:
        raise ScheduleError(f"{what} {path}: is missing, so the schedule is incomplete; prepare it again") from None
    except OSError as error:
        raise ScheduleError(f"{what} {path}: {unreadable(error, 'prepare the schedule again')}") from None
    except ValueError:
        raise ScheduleError(f"{what} {path}: cannot be read: the file is damaged; prepare the schedule again") from None


@contextmanager
def _parsing(path: Path, what: str) -> Iterator[None]:
    """Raise ScheduleError if the value parsed in the context does not have the expected form."""
    try:
        yield
    except FormError as error:
        raise ScheduleError(fault(f"{what} {path}", error, "prepare the schedule again")) from error


class Schedule:
    """A schedule on disk, read by memory map.

    With follow=True the schedule may still be growing: `events` waits for segments to be published,
    as long as `foreload prepare` is at work on them. Otherwise the constructor raises ScheduleError
    for a schedule that is unfinished, has failed, or whose manifests do not match their checksums.

    An open schedule keeps what it has read. If the folder is removed or prepared again, the reader
    notices, and uses nothing of another schedule. If the new schedule is the same, byte for byte,
    it counts as the same.

    Attributes:
        follow: Whether the schedule may still be growing.
        identity: SHA-256 of header.json. Known from the start, and unchanged when the schedule is
            complete.
        slots: For each lane, the slots that a trainer needs. These are the header's, or, if the
            schedule was complete when it was opened, those that a row ever sat in. In the files,
            evaluation slots follow the header's slots; in the results of `lane` and `arrivals` they
            follow these.
    """

    POLL = timedelta(milliseconds=200)

    def __init__(self, path: Path | str, follow: bool = False) -> None:
        self.path = Path(path)
        self.follow = follow
        self._files: dict[tuple[int, int], tuple[MappedLists, MappedLists]] = {}
        self._segments: list[Segment] = []
        self._checksums: list[str] = []  # SHA-256 of the segments' manifests
        self._complete = False
        self._watch = Watch(self.path / WORK / LOCK)
        self._lock = threading.Lock()  # a trainer's threads read one schedule at different places
        if not self.path.is_dir():
            raise ScheduleError(f"schedule {self.path}: is not a folder; give the folder that `foreload prepare --out` wrote")
        if follow:
            while not (self.path / HEADER).exists():
                self._check_at_work((self.path / HEADER).exists)
                time.sleep(self.POLL.total_seconds())
        elif not (self.path / MANIFEST).exists():
            self._refuse_failed()
            state = "unfinished" if (self.path / HEADER).exists() else "not a schedule"
            raise ScheduleError(
                f"schedule {self.path}: is {state} (no {MANIFEST}): wait for `foreload prepare`, or train with --follow"
            )
        header, self.identity = _load_json(self.path / HEADER, "schedule header")
        with _parsing(self.path / HEADER, "schedule header"):
            self.header = Header.of(header)
        self._header_file = self._stat(HEADER)
        if self.complete and self.manifest["header"] != self.identity:
            raise ScheduleError(
                f"schedule header {self.path / HEADER}: its checksum does not match the manifest: prepare the schedule again"
            )
        used = self.manifest["occupied"] if self.complete else self.header.slots
        self.slots = tuple(max(slots, 1) for slots in used)

    def _refuse_failed(self) -> None:
        if (self.path / FAILED).exists():
            try:
                reason = parse_json((self.path / FAILED).read_bytes())["error"]
            except (OSError, ValueError, KeyError, TypeError):
                reason = f"{FAILED}, which has the reason, is damaged"
            raise ScheduleError(f"schedule {self.path}: preparing it failed: {reason}")

    def check_growing(self, index: int) -> None:
        """Raise ScheduleError if segment `index` is missing and no process is at work on it."""
        self._check_at_work(lambda: self.published(index))

    def _check_at_work(self, there: Callable[[], bool]) -> None:
        self._refuse_failed()
        # The order of the two checks matters. Once `prepare` has exited, all that it published is
        # visible. So a segment that is missing after that will never exist.
        if self._watch.gone() and not there():
            self._refuse_failed()
            raise ScheduleError(
                f"schedule {self.path}: is not complete, and no `foreload prepare` is working on it; prepare it again, then continue with --resume"
            )

    def _stat(self, name: str) -> tuple[int, int] | None:
        try:
            stat = (self.path / name).stat()
        except OSError:
            return None
        return stat.st_ino, stat.st_mtime_ns

    @property
    def complete(self) -> bool:
        """Whether schedule.json exists, or has existed since the schedule was opened."""
        if not self._complete:
            self._complete = (self.path / MANIFEST).exists()
        return self._complete

    @cached_property
    def _manifest(self) -> tuple[ScheduleManifest, str]:
        path = self.path / MANIFEST
        stored, checksum = _load_json(path, "schedule manifest")
        with _parsing(path, "schedule manifest"):
            return self._checked(of_json(stored, ScheduleManifest)), checksum

    def _checked(self, manifest: ScheduleManifest) -> ScheduleManifest:
        header = self.header
        for slots in (manifest["evaluation_slots"], manifest["occupied"], manifest["minimum_slots"]):
            if len(slots) != header.lanes:
                raise FormError(f"slots: must be of {header.lanes} lanes; got {len(slots)}")
        if any(occupied > slots for occupied, slots in zip(manifest["occupied"], header.slots, strict=True)):
            raise FormError("occupied: must be at most the slots in the header")
        if manifest["end_step"] != header.end_step:
            raise FormError(f"end_step: must be {header.end_step}; got {manifest['end_step']}")
        return manifest

    @property
    def manifest(self) -> ScheduleManifest:
        """The schedule's manifest: counts, lookahead, checksums."""
        return self._manifest[0]

    @property
    def checksum(self) -> str:
        """SHA-256 of schedule.json: the identity of a complete schedule."""
        return self._manifest[1]

    def prefix(self, segments: int) -> str:
        """Return the SHA-256 of the manifests of the first segments, and wait for these.

        It identifies what was trained from them.

        Raises:
            ScheduleError: If a segment cannot be read or will not be published.
        """
        if segments:
            self.segment(segments - 1)
        return hashlib.sha256("".join(self._checksums[:segments]).encode()).hexdigest()

    def made_with(self, option: str) -> Any:
        """Return the value of an option that `foreload prepare` was given, by name.

        Returns None if the value is not known. Options are no part of the schedule.
        """
        try:
            return parse_json((self.path / PROVENANCE).read_bytes())["options"][option]
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def segment(self, index: int) -> Segment | None:
        """Return segment `index`, or None past the end.

        If the schedule is growing, this waits for the segment.
        """
        if index < len(self._segments):
            return self._segments[index]
        with self._lock:
            return self._wait_for(index)

    def _wait_for(self, index: int) -> Segment | None:
        while len(self._segments) <= index:
            k = len(self._segments)
            if not self.published(k):
                self.check_growing(k)
                time.sleep(self.POLL.total_seconds())
                continue
            self._check_same()
            if self.complete and k >= len(self.manifest["segments"]):
                return None
            path = self.path / segment_name(k)
            value, checksum = _load_json(path, "segment manifest")
            if self.complete and self.manifest["segments"][k] != checksum:
                raise ScheduleError(
                    f"segment manifest {path}: its checksum does not match the manifest: prepare the schedule again"
                )
            with _parsing(path, "segment manifest"):
                segment = of_json(value, Segment)
                segment.check(k, self.header)
            self._segments.append(segment)
            self._checksums.append(checksum)
        return self._segments[index]

    def _check_same(self) -> None:
        """Raise ScheduleError if the folder now holds another schedule than the one opened.

        Only a schedule that grows is checked.
        """
        if not self.follow or self._stat(HEADER) == self._header_file:
            return
        now = self._stat(HEADER)
        checksums = [_load_json(self.path / HEADER, "schedule header")[1]]
        checksums += [_load_json(self.path / segment_name(k), "segment manifest")[1] for k in range(len(self._checksums))]
        if checksums != [self.identity, *self._checksums]:
            raise ScheduleError(
                f"schedule {self.path}: was prepared again, from other data or with other options, while it was read; prepare it as before, and "
                "continue with --resume"
            )
        self._header_file = now

    def segments(self) -> Iterator[Segment]:
        """Yield all segments in order."""
        k = 0
        while (segment := self.segment(k)) is not None:
            yield segment
            k += 1

    def events(self, first_segment: int = 0) -> Iterator[Event]:
        """Yield the program from a segment on, in order. Waits while the schedule is growing."""
        return (event for event in self.known_events(first_segment, wait=True) if event is not None)

    def known_events(self, first_segment: int = 0, wait: bool = False) -> Iterator[Event | None]:
        """Yield the program from a segment on.

        Unless `wait` is set, yields None each time the next event is not published yet.
        """
        place = sum(len(segment.samples) for segment, _ in zip(self.segments(), range(first_segment), strict=False))
        k = first_segment
        while True:
            while not wait and not self.published(k):
                yield None
            segment = self.segment(k)
            if segment is None:
                return
            for row, samples in enumerate(segment.samples):
                yield Event(segment.kind, segment.first + row, samples, place, self.header.first_epoch + segment.epoch, k, row)
                place += 1
            k += 1

    def published(self, index: int) -> bool:
        """Return whether segment `index` can be read without waiting.

        This is also the case if the schedule is complete and has no such segment.
        """
        return index < len(self._segments) or (self.path / segment_name(index)).exists() or self.complete

    def open(self, segment: int) -> None:
        """Map the files of a published segment, if it exists.

        Raises:
            ScheduleError: If the files do not match their manifests.
        """
        if self.segment(segment) is not None:
            for lane in range(self.header.lanes):
                self._open(segment, lane)

    def _open(self, segment: int, lane: int) -> tuple[MappedLists, MappedLists]:
        mapped = self._files.get((segment, lane))
        if mapped is None:
            files = self._segments[segment].files[lane]
            samples, moves = (MappedLists(self.path / entry["name"], entry) for entry in (files["samples"], files["moves"]))
            self._check_fits(self._segments[segment], lane, moves, samples)
            # The trainer's threads are a few steps apart, so none of them reads from a segment that
            # is more than two back.
            for old in [k for k in list(self._files) if k[1] == lane and k[0] < segment - 2]:
                self._files.pop(old, None)
            self._files[segment, lane] = mapped = samples, moves
        return mapped

    def _check_fits(self, segment: Segment, lane: int, moves: MappedLists, samples: MappedLists | None = None) -> None:
        """Raise ScheduleError if a lane's files of a segment do not agree with the manifests."""
        features, first, most = self.header.features, self.header.slots[lane], self.slots[lane]
        fits = moves.rows == len(segment.samples)
        if samples is not None:
            numbers = len(samples.whole("numbers")[1])
            fits &= samples.rows == moves.rows
            fits &= len(samples.whole("labels")[1]) == numbers * len(features.labels)
            fits &= len(samples.whole("dense")[1]) == numbers * len(features.dense)
        for name in ("slots", "arrival_slot"):
            slots = moves.whole(name)[1]
            # Evaluation slots have numbers from the header's number of slots on.
            held = slots[slots < first] if segment.kind == "evaluate" else slots
            fits &= held.min(initial=0) >= 0 and held.max(initial=-1) < most
            fits &= slots.max(initial=-1) < first + segment.evaluation_slots[lane] or segment.kind == "train"
        if not fits:
            raise ScheduleError(
                f"schedule {self.path}: the files of segment {segment.index}, lane {lane} do not match its manifests; prepare it again"
            )

    def lane(self, event: Event, lane: int) -> LaneEvent:
        """Return one lane's part of an event."""
        samples, moves = self._open(event.segment, lane)
        row = event.row
        numbers, slots = samples.column("numbers", row), moves.column("slots", row)
        features = self.header.features
        if event.kind == "evaluate" and self._unused(lane):
            slots = np.where(slots < self.header.slots[lane], slots, slots - np.int32(self._unused(lane)))
        return LaneEvent(
            labels=samples.column("labels", row).reshape(len(numbers), len(features.labels)),
            dense=samples.column("dense", row).reshape(len(numbers), len(features.dense)),
            index=samples.column("index", row),
            offsets=samples.column("offsets", row) if samples.has("offsets") else None,
            numbers=numbers,
            slots=slots,
            users=samples.column("users", row),
            early=moves.column("early", row).view(bool),
            next_users=moves.column("next_users", row),
            ends=moves.column("ends", row),
            arrivals=self.arrivals(event, lane),
            weights=samples.column("weights", row) if samples.has("weights") else None,
            groups=samples.column("groups", row) if samples.has("groups") else None,
        )

    def columns(self, segment: int, lane: int) -> tuple[MappedLists, MappedLists]:
        """Return a lane's samples and moves in a segment, as columns over all of its events.

        Raises:
            IndexError: If the segment does not exist.
            ScheduleError: If the files do not match their manifests.
        """
        if self.segment(segment) is None:
            raise IndexError(segment)
        return self._open(segment, lane)

    def arrivals(self, event: Event, lane: int) -> Arrivals:
        """Return the rows that arrive in a lane before an event."""
        _, moves = self._open(event.segment, lane)
        table, ordinal, row_id, tag, slot, after = (moves.column(f"arrival_{name}", event.row) for name in _ARRIVAL_COLUMNS)
        if event.kind == "evaluate" and self._unused(lane):
            slot = slot - np.int32(self._unused(lane))
        return Arrivals(table, ordinal, row_id, tag, slot, after)

    def moves(self, segment: int, lane: int) -> MappedLists:
        """Return the moves of a lane in a published segment, one row for each event.

        The samples are not read. The file is mapped anew by each call.
        """
        manifest = self.segment(segment)
        assert manifest is not None
        entry = manifest.files[lane]["moves"]
        lists = MappedLists(self.path / entry["name"], entry)
        self._check_fits(manifest, lane, lists)
        return lists

    def _unused(self, lane: int) -> int:
        """Return how many of the header's slots no row ever sat in, 0 while that is not known.

        Evaluation slots move down by this number.
        """
        return self.header.slots[lane] - self.slots[lane]

    def entry(self, segment: int, lane: int) -> Occupants | None:
        """Return the rows in a lane's slots before a segment, or None if it has no entry state."""
        manifest = self.segment(segment)
        assert manifest is not None
        entry = manifest.files[lane].get("entry")
        if entry is None:
            return None
        lists = MappedLists(self.path / entry["name"], entry)
        return Occupants(*(lists.column(name, 0) for name in _ENTRY_COLUMNS))

    def rows(self, batch_rows: int = 1 << 18) -> Iterator[dict[str, np.ndarray]]:
        """Yield the row table by (table, id), in batches.

        The columns are table int16, id int64, lane uint8, ordinal int64 and tag int32.
        """
        entry = self.manifest["rows"]
        reader = pa.ipc.open_file(pa.py_buffer(map_file(self.path / ROW_TABLE, entry, "row table")))
        for k in range(reader.num_record_batches):
            batch = reader.get_batch(k)
            for start in range(0, batch.num_rows, batch_rows):
                part = batch.slice(start, batch_rows)
                yield {name: part.column(name).to_numpy() for name in part.schema.names}

    def rows_per_table(self) -> list[int]:
        """Count the rows of each table that were ever trained.

        This reads only a few places of the row table, so it does not verify the checksum.
        """
        reader = pa.ipc.open_file(pa.memory_map(str(self.path / ROW_TABLE)))
        tables = np.arange(len(self.header.features.tables), dtype=np.int16)
        counts = np.zeros(len(tables), np.int64)
        for k in range(reader.num_record_batches):
            ends = np.searchsorted(reader.get_batch(k).column("table").to_numpy(), tables, side="right")
            counts += np.diff(ends, prepend=0)
        return [int(count) for count in counts]


@dataclass(frozen=True, slots=True)
class FoundRows:
    """Those rows of one table that the row table has, k of the rows that were asked for.

    Attributes:
        places: int64 [k], the places of the rows among the ids that were asked for.
        lane: uint8 [k].
        ordinal: int64 [k].
        id: int64 [k].
        tag: int32 [k].
    """

    places: np.ndarray
    lane: np.ndarray
    ordinal: np.ndarray
    id: np.ndarray
    tag: np.ndarray


class RowIndex:
    """The row table of a complete schedule, mapped and checked once."""

    def __init__(self, schedule: Schedule) -> None:
        # Without a bound, each batch of the file is returned whole, as views on it.
        """Map the row table. Raises ScheduleError if it is damaged."""
        no_bound = 1 << 62
        self._batches = list(schedule.rows(no_bound))

    def find(self, table: int, ids: np.ndarray) -> FoundRows:
        """Return those rows with the given ids that were ever trained.

        Args:
            ids: int64 [n], in any order.
        """
        parts = [self._in_batch(batch, table, ids) for batch in self._batches]
        columns = [np.concatenate([part[k] for part in parts]) if parts else np.empty(0, np.int64) for k in range(5)]
        return FoundRows(*columns)

    @staticmethod
    def _in_batch(batch: dict[str, np.ndarray], table: int, ids: np.ndarray) -> tuple[np.ndarray, ...]:
        # Rows are sorted by (table, id), so the rows of a table are a range in which ids ascend.
        first, last = np.searchsorted(batch["table"], (table, table + 1))
        table_ids = batch["id"][first:last]
        nearest = np.searchsorted(table_ids, ids)  # the place of each id that is present
        places = np.flatnonzero(nearest < len(table_ids))
        places = places[table_ids[nearest[places]] == ids[places]]
        rows = first + nearest[places]
        return places, *(batch[name][rows] for name in ("lane", "ordinal", "id", "tag"))
