"""The schedule's format: what its manifests and files hold (docs/schedule.md)."""

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
"""Of a schedule's manifest, and of its header, unless the features are encoded by rule 2."""
HEADER_VERSIONS = (1, 2)
"""Of a header: the rule that its features are encoded by."""
HEADER, MANIFEST, ROW_TABLE, FAILED = "header.json", "schedule.json", "rows.arrow", "failed.json"
REJECTS_FILE = "rejects.jsonl"  # the first malformed records, one JSON object a line
WORK, LOCK = ".work", "lock"  # the folder in a schedule's where `prepare` works, and in it the file that says so

PROVENANCE = "provenance.json"
"""How the schedule came to be: the one file of it that is not a function of the data and the settings."""

SET_NAME = r"[A-Za-z0-9_-]+"
"""A regular expression of what an evaluation set can be called."""

MOST_LANES = 64  # the lanes that use a row are a mask of up to 64 bits

Slots = Annotated[int, between(0, (1 << 31) - 1)]
Kind = Literal["train", "evaluate"]
SampleAssignment = Literal["order", "locality"]

MOVE_COLUMNS = (
    *("slots", "early", "next_users", "ends"),
    *("arrival_slot", "arrival_table", "arrival_ordinal", "arrival_id", "arrival_tag", "arrival_after"),
)
"""The list columns of a moves file, in the order in which the oracle fills them (docs/schedule.md, Moves)."""


_SLOT_SETTINGS = ("slots", "memory_bytes", "row_bytes", "segment_bytes")


def mask_dtype(lanes: int) -> np.dtype:
    """The narrowest unsigned type that holds a bit per lane."""
    return np.dtype(next(t for t, bits in ((np.uint8, 8), (np.uint16, 16), (np.uint32, 32), (np.uint64, 64)) if lanes <= bits))


def segment_name(index: int) -> str:
    """The manifest of segment `index`."""
    return f"segment-{index:06d}.json"


class FileEntry(TypedDict):
    """A file in a manifest."""

    name: Name
    bytes: Count
    crc32: Count


class RowTableEntry(FileEntry):
    """The row table in a manifest, with how many rows it has."""

    rows: Count


class LaneFiles(TypedDict):
    """The files of a lane in a segment; entry: where the segment has an entry state."""

    samples: FileEntry
    moves: FileEntry
    entry: NotRequired[FileEntry]


class Counts(TypedDict):
    """What a schedule adds up to."""

    training_samples: Count
    training_steps: Count
    evaluation_samples: Count
    rows_used: Count
    arrivals: Count
    initial: Count
    stored: Count
    write_backs: Count


_Cover = Annotated[float, between(0, MOST)] | None
# Written so since "cover" is the file's word, and no name of the code.
Lookahead = TypedDict("Lookahead", {"cover": _Cover, "bound": int, "exact": bool})  # noqa: UP013
"""How far decisions looked ahead: see ScheduleOutput.finish."""


class ScheduleManifest(TypedDict):
    """schedule.json (docs/schedule.md)."""

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

    version: the rule that its features are encoded by, so that no earlier version reads what it would encode otherwise.
    slots: per lane; training_samples: of one epoch; evaluation_samples: of one pass; first_step: number of its first training step; first_number:
    number of its first training sample; parent: SHA-256 of the parent's schedule.json, or None; settings: what was asked for (slots, memory_bytes,
    row_bytes, ..), and as "encoding" the identity of the encoding state; placement: of a training step's samples in its slices, in order where a
    header does not say; eval_every: steps of an epoch between evaluations amid it; None, which a header does not say: there are none.
    first_epoch: the number of its first epoch, of the samples that it has; not said where that is 0, since they are new ones. evaluation_sets: where
    they have names, the sets that the evaluation samples are, in order: name and samples of each; no step has samples of two.
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
        """The header in a file; raises ScheduleError for another format version, FormError for another form."""
        if value.get("version") not in HEADER_VERSIONS:
            raise ScheduleError(
                f"schedule format version: must be {' or '.join(map(str, HEADER_VERSIONS))}, is {value.get('version')!r:.100}: prepare the schedule "
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
        """SHA-256 of all that it says but how many slots there are: of one log, schedules that have it in common train the same samples in the same
        steps and lanes, and give their rows the same ordinals.
        """
        fields = to_stored(self)
        del fields["slots"]
        fields["settings"] = {name: value for name, value in self.settings.items() if name not in _SLOT_SETTINGS}
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()

    @property
    def steps_per_epoch(self) -> int:
        """Training steps of one epoch."""
        return -(-self.training_samples // self.batch_size)

    @property
    def set_names(self) -> tuple[str, ...]:
        """Of the evaluation sets, in order; "" alone where they have no names."""
        return tuple(name for name, _ in self.evaluation_sets) or ("",)

    @property
    def set_steps(self) -> tuple[int, ...]:
        """Steps of each evaluation set in a pass."""
        sizes = [samples for _, samples in self.evaluation_sets] or [self.evaluation_samples]
        return tuple(-(-samples // self.batch_size) for samples in sizes)

    def set_of(self, step: int) -> str:
        """The name of the evaluation set that evaluation step `step` has samples of, "" where it has none."""
        return self.set_names[bisect_right(list(accumulate(self.set_steps)), step % sum(self.set_steps))]

    @property
    def end_step(self) -> int:
        """Number of the training step after the last one."""
        return self.first_step + self.steps_per_epoch * self.epochs

    def is_amid(self, step: int) -> bool:
        """Whether an evaluation after training step `step` is amid its epoch, and not at its end."""
        return (step + 1 - self.first_step) % max(self.steps_per_epoch, 1) != 0

    def evaluates_amid(self, step: int) -> bool:
        """Whether there is one, after that step, amid its epoch."""
        place = (step + 1 - self.first_step) % max(self.steps_per_epoch, 1)
        return self.eval_every is not None and place != 0 and place % self.eval_every == 0

    def next_evaluated(self, step: int) -> int | None:
        """The first training step after `step` that an evaluation follows; None where there is none."""
        if not self.evaluation_samples or step >= self.end_step - 1:
            return None
        of_epoch, place = divmod(max(step + 1 - self.first_step, 0), self.steps_per_epoch)
        every = self.eval_every or self.steps_per_epoch
        last = min((place // every + 1) * every, self.steps_per_epoch)
        return self.first_step + of_epoch * self.steps_per_epoch + last - 1


@dataclass(frozen=True, slots=True)
class Segment:
    """One segment's manifest: consecutive events of one kind and epoch.

    index: its place in the program; first: number of its first event, among those of its kind; samples: per event, over all lanes; files: per
    lane, the manifest entries of "samples", "moves" and, where the segment has one, "entry"; evaluation_slots: per lane, what its events need
    besides the lane's slots; counts: rows_used, arrivals, initial and write_backs of all its lanes.
    """

    index: Count
    kind: Kind
    epoch: Count
    first: Count
    samples: tuple[Count, ...]
    files: tuple[LaneFiles, ...]
    evaluation_slots: tuple[Slots, ...]
    ordinals: (
        tuple[tuple[Count, ...], ...] | None
    )  # with an entry state: per lane and table, the ordinals given before the segment
    counts: dict[str, Count]

    @property
    def last(self) -> int:
        """Number of its last event, among those of its kind."""
        return self.first + len(self.samples) - 1

    def check(self, index: int, header: Header) -> None:
        """Raise FormError where it is not segment `index` of a schedule with this header."""
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
    """A step of the program: its kind, number (of its kind), samples over all lanes, place in the program, segment, row in the segment."""

    kind: Kind
    step: int
    samples: int
    index: int
    epoch: int
    segment: int
    row: int


@dataclass(frozen=True, slots=True)
class RowColumns:
    """Rows of one lane, by columns: table int16, ordinal int64 (-1: never trained, evaluation only), id int64, tag int32, all [n]."""

    table: np.ndarray
    ordinal: np.ndarray
    id: np.ndarray
    tag: np.ndarray

    def __len__(self) -> int:
        return len(self.table)

    def columns(self, which: np.ndarray | slice = slice(None)) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """The four columns of the rows of a mask, of places or of a slice; of all by default, in no memory of their own."""
        return self.table[which], self.ordinal[which], self.id[which], self.tag[which]


@dataclass(frozen=True, slots=True)
class Arrivals(RowColumns):
    """Rows that arrive in slots of one lane before an event. tag 0: initial, nothing is asked of the store.

    slot int32; after int32: the boundary of the row's last write-back, which the fetch must follow; -1: stored before this schedule. Both [A].
    """

    slot: np.ndarray
    after: np.ndarray


@dataclass(frozen=True, slots=True)
class LaneEvent:
    """One lane's part of an event: views of the schedule, not to be written to.

    Its slice: labels float32 [b, labels], dense float32 [b, n], index int32 [lookups] (place among the lane's local rows), offsets int32 [b*F + 1]
    (CSR into index) or None where no feature is multi-valued, numbers int64 [b]. Its partition, the rows of the lane that any lane uses, in the
    order of first lookup: slots int32 [U], users, unsigned, [U] (bit v: lane v uses it), early bool [U] (the row may be sent while the step
    before computes), next_users, as users, [U] (of the next training step); ends int32: slots whose residency ends at the boundary before the
    step; arrivals. Of its slice also weights float32 [b] and, in an evaluation step, groups int64 [b]; None where there is no column of them.
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
    """Rows that sit in slots: of a partition's entry state, in slots 0 .. n-1. tag: of the row as it is there.

    stored_tag: int32 [n], of the version that the store has, 0 where the row was never stored.
    """

    stored_tag: np.ndarray

    @classmethod
    def zeros(cls, count: int) -> Occupants:
        """Columns of so many rows, to be written to."""
        return cls(*(np.zeros(count, kind) for kind in (np.int16, np.int64, np.int64, np.int32, np.int32)))
