"""The facts in the rendezvous store, on which trainers and coordinator agree. Each is a class.

This module imports nothing heavy, because the rendezvous host imports it, and trainers wait for
that process to start.

A fact that exists more than once has a place, numbers that follow its name in the store. The
docstrings give the place as "at (...)". What trainers are started with, and how they ended, is in
`trainers`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Self

from foreload.base.codec import Name


def contiguous_lanes(lanes: int, trainers: int) -> list[int]:
    """Return the lane map of an undisturbed job: the rank of each lane.

    Each trainer gets a block of consecutive lanes. Block sizes differ by at most one.
    """
    return [lane * trainers // lanes for lane in range(lanes)]


@dataclass(frozen=True, slots=True)
class Term:
    """The members and lanes of a term, at (number).

    Attributes:
        members: Numbers of the trainers, in the order of their ranks.
        hosts: The trainer that hosts each lane.
        copies: For each lane, the trainers that hold a replica of it.
        complete: For each lane, the trainers whose replica lacks nothing when the term begins.
        committed: The last committed training step, after which the term begins.
        stopping: Whether training was about to end after that step, so that owners may have handed
            over all rows in their slots.
        dead: Whether the lost trainers are known to be dead.
        targets: For each lane, the trainer that shall host it once it has a complete replica. For
            a lane that stays, its host.
        former: For each lane, the trainer that hosted it so far and hands it over when this term
            begins. None for a lane that stays, or whose trainer was lost. If empty, None for all
            lanes.
        joined: The members that do not yet have the state that the others hold in memory.
        left: The trainers that left in order, in this term or before it.
        keeps: Why no step is trained in this term. Instead, the host of each lane writes the rows
            that the store lacks to the run's folder. If None, steps are trained.
    """

    number: int
    members: tuple[int, ...]
    hosts: tuple[int, ...]
    copies: tuple[tuple[int, ...], ...]
    complete: tuple[tuple[int, ...], ...]
    committed: int
    stopping: bool = False
    dead: bool = True
    targets: tuple[int, ...] = ()
    former: tuple[int | None, ...] = ()
    joined: tuple[int, ...] = ()
    left: tuple[int, ...] = ()
    keeps: str | None = None

    @property
    def lane_map(self) -> list[int]:
        """The rank of each lane's trainer."""
        return [self.members.index(host) for host in self.hosts]

    @property
    def copy_map(self) -> list[list[int]]:
        """For each lane, the ranks of the trainers that hold a replica."""
        return [[self.members.index(holder) for holder in holders] for holders in self.copies]

    @property
    def seeded(self) -> set[tuple[int, int]]:
        """(lane, rank) of each replica that lacks nothing when the term begins."""
        return {
            (lane, self.members.index(holder))
            for lane, holders in enumerate(self.copies)
            for holder in holders
            if holder in self.complete[lane]
        }

    def lanes_of(self, trainer: int) -> list[int]:
        """Return the lanes that a trainer hosts."""
        return [lane for lane, host in enumerate(self.hosts) if host == trainer]

    @property
    def leader(self) -> int:
        """The trainer that hosts lane 0, which acts for all trainers where one of them has to."""
        return self.hosts[0]


@dataclass(frozen=True, slots=True)
class EndsKeeping:
    """A trainer cannot go on, at (term), so the next term keeps what the store lacks.

    A peer that is missing afterwards may have left for this reason, and need not be lost.
    """


@dataclass(frozen=True, slots=True)
class Bytes:
    """A fact beside which bytes are in the rendezvous store (`Rendezvous.publish_bytes`).

    Attributes:
        size: Number of bytes.
        checksum: SHA-256 of the bytes, in hexadecimal.
        step: Training step after which the bytes were made.
    """

    size: int
    checksum: str
    step: int

    @classmethod
    def of(cls, data: bytes, step: int, **further: Any) -> Self:
        """Make the fact for these bytes.

        Args:
            further: Fields of a subclass.
        """
        return cls(len(data), hashlib.sha256(data).hexdigest(), step, **further)


@dataclass(frozen=True, slots=True)
class DenseAtStart(Bytes):
    """The dense part that a resumed run starts from, for trainers without the run's folder."""


@dataclass(frozen=True, slots=True)
class DenseAtEnd(Bytes):
    """The dense part at the end, from a leader without the run's folder, at (term)."""


@dataclass(frozen=True, slots=True)
class KeptFileElsewhere(Bytes):
    """A file for the run to keep, from a trainer without its folder, at (term, trainer, count).

    Attributes:
        name: Name of the file.
    """

    name: Name


@dataclass(frozen=True, slots=True)
class TrainerPlace:
    """Where a trainer of a job over several hosts takes records of the batch log, at (trainer).

    Attributes:
        host, port: Address at which the trainer listens for records.
        has_run: Whether the trainer's host has the run's folder.
    """

    host: str
    port: int
    has_run: bool


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The numerics fingerprint of the first trainer, for the others if the run has none yet."""

    fields: dict[str, str]


@dataclass(frozen=True, slots=True)
class Go:
    """All trainers are ready, and training begins."""


@dataclass(frozen=True, slots=True)
class TermBegins:
    """All members of a term are ready, and its steps begin, at (number)."""


@dataclass(frozen=True, slots=True)
class TermOver:
    """A term has ended early, at (number).

    Its members leave it, and the next term says which trainers go on.
    """


@dataclass(frozen=True, slots=True)
class Lease:
    """A sign of life, published repeatedly, at (trainer).

    Attributes:
        count: Number of renewals before this one.
    """

    count: int


@dataclass(frozen=True, slots=True)
class Admitted:
    """A trainer that joins is a member from term `term` on, at (trainer)."""

    term: int


@dataclass(frozen=True, slots=True)
class HandedOver:
    """A trainer has handed over the lanes that a term gives to others, at (term, trainer).

    All rows that it gave to its traffic are stored.
    """


@dataclass(frozen=True, slots=True)
class StopWanted:
    """A request for a clean stop, or for the planned end of a term.

    Attributes:
        term: The term that shall end, so that the next one can have other members or hosts. If
            None, training shall stop.
    """

    term: int | None = None


@dataclass(frozen=True, slots=True)
class StopAfter:
    """The step after which all trainers stop, or leave a term together.

    Attributes:
        step: The last step.
        term: The term that all trainers leave. If None, training stops.
    """

    step: int
    term: int | None = None


@dataclass(frozen=True, slots=True)
class CheckpointAt:
    """The step after which a checkpoint is taken, at (number of the checkpoint)."""

    step: int


@dataclass(frozen=True, slots=True)
class GoOnAfter:
    """Training goes on after an evaluation, at (term, training step before the evaluation).

    No trainer needs to wait for a checkpoint of that step.
    """


@dataclass(frozen=True, slots=True)
class Orphaned:
    """The launcher has died."""


@dataclass(frozen=True, slots=True)
class RunSaved:
    """The launcher has published the state of the run."""


@dataclass(frozen=True, slots=True)
class ShardsLooked:
    """Whether a trainer has found a store shard lost since the turn before.

    It is at (term, turn, trainer).
    """

    found_lost: bool


@dataclass(frozen=True, slots=True)
class SegmentFound:
    """A trainer's report on a segment's files, at (term, segment, trainer).

    Attributes:
        failure: What is wrong with the files. None if the trainer has them.
    """

    failure: str | None


@dataclass(frozen=True, slots=True)
class SegmentVerdict:
    """The leader's verdict whether all trainers begin a segment, at (term, segment).

    Attributes:
        begin: Whether they begin it.
        failure: What is wrong with the segment. None if nothing is, or if the user asked for a
            stop.
        goes_on: The segment does not begin in this term, because the term ends as planned.
    """

    begin: bool
    failure: str | None
    goes_on: bool = False
