"""The schedule's format: the contents of its manifests and files (docs/schedule.md)."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import numpy as np

from foreload.base.codec import MOST, Count, FormError, LeftOut, Name, Natural, between, of_json, to_stored
from foreload.pipelines.errors import ScheduleError
from foreload.pipelines.samples.features import StoredFeatures

FORMAT_VERSION = 1
"""The version of a schedule's manifest, and of its header unless it has encoding rule 2."""
HEADER_VERSIONS = (1, 2)
"""The versions of a header. The version is the rule by which its features are encoded."""
HEADER, MANIFEST, ROW_TABLE, FAILED = "header.json", "schedule.json", "rows.arrow", "failed.json"
REJECTS_FILE = "rejects.jsonl"  # the first malformed records, one JSON object a line
# The folder within a schedule's folder where `prepare` works, and the file in it that `prepare`
# locks.
WORK, LOCK = ".work", "lock"

OCCUPANT_BYTES = 26
"""The identity of the row in a slot: table (2), ordinal (8), id (8), tag (4), stored tag (4)."""
PROVENANCE = "provenance.json"
"""The record of how the schedule was made. It is no function of the data and the settings."""

SET_NAME = r"[A-Za-z0-9_-]+"
"""A regular expression for the name of an evaluation set."""

MOST_LANES = 64  # a mask of at most 64 bits holds the lanes that use a row

Slots = Annotated[int, between(0, (1 << 31) - 1)]
Kind = Literal["train", "evaluate"]
SampleAssignment = Literal["order", "locality"]

MOVE_COLUMNS = (
    *("slots", "early", "next_users", "ends"),
    *("arrival_slot", "arrival_table", "arrival_ordinal", "arrival_id", "arrival_tag", "arrival_after"),
)
"""The list columns of a moves file, in the order of `oracle.Moves` (docs/schedule.md, "Moves")."""


_SLOT_SETTINGS = ("slots", "memory_bytes", "row_bytes", "segment_bytes")


def mask_dtype(lanes: int) -> np.dtype:
    """Return the narrowest unsigned dtype that has a bit for each lane."""
    return np.dtype(next(t for t, bits in ((np.uint8, 8), (np.uint16, 16), (np.uint32, 32), (np.uint64, 64)) if lanes <= bits))


def segment_name(index: int) -> str:
    """Return the name of the manifest of segment `index`."""
    return f"segment-{index:06d}.json"


class FileEntry(TypedDict):
    """The manifest entry of a file."""

    name: Name
    bytes: Count
    crc32: Count


class RowTableEntry(FileEntry):
    """The manifest entry of the row table, with its number of rows."""

    rows: Count


class LaneFiles(TypedDict):
    """The files of a lane in a segment. `entry` exists only if the segment has an entry state."""

    samples: FileEntry
    moves: FileEntry
    entry: NotRequired[FileEntry]


class Counts(TypedDict):
    """The totals of a schedule."""

    training_samples: Count
    training_steps: Count
    evaluation_samples: Count
    rows_used: Count
    arrivals: Count
    initial: Count
    stored: Count
    write_backs: Count


_Cover = Annotated[float, between(0, MOST)] | None
# This form keeps "cover" a string: it is a word of the file, and not a name of the code.
Lookahead = TypedDict("Lookahead", {"cover": _Cover, "bound": int, "exact": bool})  # noqa: UP013
"""How far ahead decisions looked; see ScheduleOutput.finish."""


class ScheduleManifest(TypedDict):
    """The contents of schedule.json (docs/schedule.md)."""

    version: int
    header: str
    segments: list[str]
    evaluation_slots: list[Slots]
    occupied: list[Slots]
    minimum_slots: list[Slots]
    end_step: Count
    counts: Counts
    lookahead: Lookahead
    rows: RowTableEntry


@dataclass(frozen=True, slots=True)
class Header:
    """The settings of a schedule, known before its first segment.

    Attributes:
        version: The rule by which its features are encoded. An earlier version of the program,
            which would encode them differently, refuses to read the schedule.
        batch_size: Samples in a step, over all lanes.
        slots: The slots of each lane.
        shuffle_seed: None if epochs are not shuffled.
        training_samples: Samples of one epoch.
        evaluation_samples: Samples of one evaluation pass.
        first_step: The number of the first training step.
        first_number: The number of the first training sample.
        parent: SHA-256 of the parent's schedule.json, or None.
        settings: The options given (slots, memory_bytes, row_bytes, ...), and as "encoding" the
            identity of the encoding state.
        placement: How a training step's samples are placed in its slices. "order" if the file has
            no entry.
        eval_every: Steps of an epoch between evaluations during the epoch. None, which the file
            leaves out, means that no evaluation lies within an epoch.
        first_epoch: The number of the schedule's first epoch, counted over all epochs of its
            samples. The file leaves it out if it is 0, because the samples are new.
        evaluation_sets: The name and number of samples of each evaluation set, in order, if the
            sets have names. No step has samples of two sets.
    """

    version: int
    features: StoredFeatures
    batch_size: Natural
    lanes: Annotated[int, between(1, MOST_LANES)]
    slots: tuple[Slots, ...]
    epochs: Count
    shuffle_seed: int | None
    training_samples: Count
    evaluation_samples: Count
    first_step: Count
    first_number: Count
    parent: str | None
    settings: dict[str, Any]
    placement: SampleAssignment = "order"
    eval_every: LeftOut[Natural | None] = None
    first_epoch: LeftOut[Count] = 0
    evaluation_sets: LeftOut[tuple[tuple[str, Count], ...]] = ()

    @classmethod
    def of(cls, value: dict[str, Any]) -> Header:
        """Parse the header of a file.

        Raises:
            ScheduleError: If the file has another format version.
            FormError: If the file does not have the form of a header.
        """
        if value.get("version") not in HEADER_VERSIONS:
            raise ScheduleError(
                f"schedule format version: must be {' or '.join(map(str, HEADER_VERSIONS))}; got {value.get('version')!r:.100}; prepare the schedule "
                "again with this version"
            )
        header = of_json(value, cls)
        if header.features.rule != header.version:
            raise FormError(f"Header.features.rule: must be {header.version}, the header's version; got {header.features.rule}")
        if len(header.slots) != header.lanes:
            raise FormError(f"Header.slots: must be of {header.lanes} lanes; got {len(header.slots)}")
        if header.evaluation_sets and sum(samples for _, samples in header.evaluation_sets) != header.evaluation_samples:
            raise FormError("Header.evaluation_sets: must have all evaluation samples")
        return header

    @property
    def program(self) -> str:
        """SHA-256 of all settings except the number of slots.

        Schedules of one log that share it train the same samples in the same steps and lanes, and
        give their rows the same ordinals.
        """
        fields = to_stored(self)
        del fields["slots"]
        fields["settings"] = {name: value for name, value in self.settings.items() if name not in _SLOT_SETTINGS}
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()

    @property
    def steps_per_epoch(self) -> int:
        """The training steps of one epoch."""
        return -(-self.training_samples // self.batch_size)

    @property
    def set_names(self) -> tuple[str, ...]:
        """The names of the evaluation sets, in order; ("",) if they have no names."""
        return tuple(name for name, _ in self.evaluation_sets) or ("",)

    @property
    def set_steps(self) -> tuple[int, ...]:
        """The steps of each evaluation set in a pass."""
        sizes = [samples for _, samples in self.evaluation_sets] or [self.evaluation_samples]
        return tuple(-(-samples // self.batch_size) for samples in sizes)

    def set_of(self, step: int) -> str:
        """Return the name of the evaluation set of an evaluation step, "" if it has no name."""
        return self.set_names[bisect_right(list(accumulate(self.set_steps)), step % sum(self.set_steps))]

    @property
    def end_step(self) -> int:
        """The number of the training step after the last one."""
        return self.first_step + self.steps_per_epoch * self.epochs

    def is_within_epoch(self, step: int) -> bool:
        """Return whether an evaluation after training step `step` lies before its epoch's end."""
        return (step + 1 - self.first_step) % max(self.steps_per_epoch, 1) != 0

    def evaluates_within(self, step: int) -> bool:
        """Return whether an evaluation follows training step `step` within its epoch."""
        place = (step + 1 - self.first_step) % max(self.steps_per_epoch, 1)
        return self.eval_every is not None and place != 0 and place % self.eval_every == 0

    def next_evaluated(self, step: int) -> int | None:
        """Return the first training step after `step` that an evaluation follows, or None."""
        if not self.evaluation_samples or step >= self.end_step - 1:
            return None
        of_epoch, place = divmod(max(step + 1 - self.first_step, 0), self.steps_per_epoch)
        every = self.eval_every or self.steps_per_epoch
        last = min((place // every + 1) * every, self.steps_per_epoch)
        return self.first_step + of_epoch * self.steps_per_epoch + last - 1


@dataclass(frozen=True, slots=True)
class Segment:
    """The manifest of a segment: consecutive events of one kind and epoch.

    Attributes:
        index: The segment's place in the program.
        kind: Training or evaluation.
        first: The number of the first event, among those of its kind.
        samples: The samples of each event, over all lanes.
        files: For each lane, the manifest entries of "samples", "moves" and, if the segment has an
            entry state, "entry".
        evaluation_slots: For each lane, the slots that the events need besides the lane's own.
        ordinals: For each lane and table, the number of ordinals given before the segment. None if
            the segment has no entry state.
        counts: rows_used, arrivals, initial and write_backs, over all lanes.
    """

    index: Count
    kind: Kind
    epoch: Count
    first: Count
    samples: tuple[Count, ...]
    files: tuple[LaneFiles, ...]
    evaluation_slots: tuple[Slots, ...]
    ordinals: tuple[tuple[Count, ...], ...] | None
    counts: dict[str, Count]

    @property
    def last(self) -> int:
        """The number of the last event, among those of its kind."""
        return self.first + len(self.samples) - 1

    def check(self, index: int, header: Header) -> None:
        """Raise FormError if this is not segment `index` of a schedule with this header."""
        shape = [len(header.features.tables)] * header.lanes
        per_lane = {len(self.files), len(self.evaluation_slots)}
        if (
            self.index != index
            or per_lane != {header.lanes}
            or (self.ordinals and [len(lane) for lane in self.ordinals] != shape)
        ):
            raise FormError(f"Segment: must be segment {index} of {header.lanes} lanes and {len(header.features.tables)} tables")


@dataclass(frozen=True, slots=True)
class Event:
    """A step of the program.

    Attributes:
        kind: Training or evaluation.
        step: The step's number, among those of its kind.
        samples: The step's samples, over all lanes.
        index: The step's place in the program.
        row: The step's row in the segment.
    """

    kind: Kind
    step: int
    samples: int
    index: int
    epoch: int
    segment: int
    row: int


@dataclass(frozen=True, slots=True)
class RowColumns:
    """Rows of one lane, by columns.

    Attributes:
        table: int16 [n].
        ordinal: int64 [n], -1 for a row that was never trained, in evaluation only.
        id: int64 [n].
        tag: int32 [n].
    """

    table: np.ndarray
    ordinal: np.ndarray
    id: np.ndarray
    tag: np.ndarray

    def __len__(self) -> int:
        return len(self.table)

    def columns(self, which: np.ndarray | slice = slice(None)) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return the four columns of some of the rows.

        Args:
            which: A mask, places, or a slice. By default all rows, as views.
        """
        return self.table[which], self.ordinal[which], self.id[which], self.tag[which]


@dataclass(frozen=True, slots=True)
class Arrivals(RowColumns):
    """Rows that arrive in slots of one lane before an event.

    A tag of 0 means an initial arrival, for which the store is not read.

    Attributes:
        slot: int32 [A].
        after: int32 [A], the boundary of the row's last write-back, which the fetch must follow. -1
            if the row was stored before this schedule.
    """

    slot: np.ndarray
    after: np.ndarray


@dataclass(frozen=True, slots=True)
class LaneEvent:
    """One lane's part of an event, as read-only views of the schedule.

    The slice of the lane has b samples. Its partition has U rows that any lane uses, in the order
    of first lookup.

    Attributes:
        labels: float32 [b, labels].
        dense: float32 [b, n].
        index: int32 [lookups], the place of each lookup's row among the lane's local rows.
        offsets: int32 [b*F + 1], CSR into index. None if no feature is multi-valued.
        numbers: int64 [b], the samples' numbers.
        slots: int32 [U].
        users: unsigned [U], bit v is set if lane v uses the row.
        early: bool [U], whether the row may be sent while the step before computes.
        next_users: unsigned [U], as users, of the next training step.
        ends: int32, the slots whose residency ends at the boundary before the step.
        arrivals: The rows that arrive.
        weights: float32 [b]. None if there is no column of weights.
        groups: int64 [b], in an evaluation step. None if there is no column of groups.
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
    weights: np.ndarray | None = None
    groups: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class Occupants(RowColumns):
    """Rows that sit in slots. In a partition's entry state these are slots 0 .. n - 1.

    `tag` is that of the row as it is in the slot.

    Attributes:
        stored_tag: int32 [n], the tag of the version in the store, 0 if the row was never stored.
    """

    stored_tag: np.ndarray

    @classmethod
    def zeros(cls, count: int) -> Occupants:
        """Return columns of `count` rows, for the caller to write to."""
        return cls(*(np.zeros(count, kind) for kind in (np.int16, np.int64, np.int64, np.int32, np.int32)))
