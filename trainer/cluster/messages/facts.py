"""What stands in the rendezvous store, each fact a class of its own: agreements of the trainers and the coordinator.

It imports nothing heavy, since the rendezvous host, for which trainers wait, imports it.

Where a fact stands more than once, its place is given: numbers after its name. What trainers are started with, and how they ended, is in `messages`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Self

from foreload.base.codec import Name


def contiguous_lanes(lanes: int, trainers: int) -> list[int]:
    """The lane map of an undisturbed job: lane -> rank, in blocks that differ by at most one lane."""
    return [lane * trainers // lanes for lane in range(lanes)]


@dataclass(frozen=True, slots=True)
class Term:
    """Who trains in a term, at (number): members, the trainers' numbers, in the order of their ranks; hosts: of each lane, the trainer.

    copies: of each lane, the trainers that hold a copy of it; complete: those whose copy lacks nothing when the term begins. committed: the last
    training step that is committed, after which the term begins; stopping: whether training was to end behind it, so that owners may have handed over
    all that sat in their slots. dead: whether those that were lost are known to be dead.

    targets: of each lane, the trainer that is to host it once it has a complete copy; the host where it stays. former: of each lane, the trainer that
    hosted it until now and hands it over as this term begins, None where it does not move or its trainer is lost; none at all: so for all lanes.
    joined: the members that have yet to get what the others have in memory. left: the trainers that left in order, in this term or before it. keeps:
    why no step is trained in it, but what the store lacks of each lane is left in the run's folder by the trainer that hosts it; None: steps are.
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
        """Of each lane, the rank of its trainer."""
        return [self.members.index(host) for host in self.hosts]

    @property
    def copy_map(self) -> list[list[int]]:
        """Of each lane, the ranks of the trainers that hold a copy."""
        return [[self.members.index(holder) for holder in holders] for holders in self.copies]

    @property
    def seeded(self) -> set[tuple[int, int]]:
        """(lane, rank) of the copies that lack nothing when the term begins."""
        return {
            (lane, self.members.index(holder))
            for lane, holders in enumerate(self.copies)
            for holder in holders
            if holder in self.complete[lane]
        }

    def lanes_of(self, trainer: int) -> list[int]:
        """The lanes that a trainer hosts."""
        return [lane for lane, host in enumerate(self.hosts) if host == trainer]

    @property
    def leader(self) -> int:
        """The trainer that hosts lane 0: it speaks for all where one has to."""
        return self.hosts[0]


@dataclass(frozen=True, slots=True)
class EndsKeeping:
    """A trainer cannot go on, at (term): the next one is to keep what the store lacks. Another trainer that is gone then need not be lost."""


@dataclass(frozen=True, slots=True)
class Bytes:
    """That bytes stand in the rendezvous store (`Rendezvous.publish_bytes`). checksum: SHA-256; step: the training step after which they are what
    they are.
    """

    size: int
    checksum: str
    step: int

    @classmethod
    def of(cls, data: bytes, step: int, **further: Any) -> Self:
        """The fact of these bytes."""
        return cls(len(data), hashlib.sha256(data).hexdigest(), step, **further)


@dataclass(frozen=True, slots=True)
class DenseAtStart(Bytes):
    """The dense part that a call goes on from, for trainers that do not have the run's folder."""


@dataclass(frozen=True, slots=True)
class DenseAtEnd(Bytes):
    """The dense part at the end, of a leader that does not have the run's folder, at (term)."""


@dataclass(frozen=True, slots=True)
class KeptFileElsewhere(Bytes):
    """A file that the run is to keep, of a trainer that does not have the run's folder, at (term, trainer, count)."""

    name: Name


@dataclass(frozen=True, slots=True)
class TrainerPlace:
    """Of a run over several hosts, at (trainer): where the trainer takes records of the batch log, and whether it has the run's folder."""

    host: str
    port: int
    has_run: bool


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The numerics of the first trainer, for the others of a run that has none yet."""

    fields: dict[str, str]


@dataclass(frozen=True, slots=True)
class Go:
    """All trainers are ready: training begins."""


@dataclass(frozen=True, slots=True)
class TermBegins:
    """All members of a term have what they need: its steps begin, at (number)."""


@dataclass(frozen=True, slots=True)
class TermOver:
    """A term has ended before its time, at (number): its members leave it, and the next one says who goes on."""


@dataclass(frozen=True, slots=True)
class Lease:
    """A trainer is alive, at (trainer), published again and again. count: how many times."""

    count: int


@dataclass(frozen=True, slots=True)
class Admitted:
    """A trainer that can join is a member from a term on, at (trainer). term: its number."""

    term: int


@dataclass(frozen=True, slots=True)
class HandedOver:
    """A trainer hosts none of the lanes any more that a term gives to others, at (term, trainer): all that it handed to its traffic is stored."""


@dataclass(frozen=True, slots=True)
class StopWanted:
    """A clean stop is asked for; or, where a term is given, that this term ends so that the next one can have other members or hosts."""

    term: int | None = None


@dataclass(frozen=True, slots=True)
class StopAfter:
    """The step after which all trainers stop; or, where a term is given, leave that term together."""

    step: int
    term: int | None = None


@dataclass(frozen=True, slots=True)
class CheckpointAt:
    """The step of which a checkpoint is to be, at (its number)."""

    step: int


@dataclass(frozen=True, slots=True)
class GoOnAfter:
    """Training goes on behind an evaluation, at (term, the training step before it): no checkpoint of that step is waited for (any more)."""


@dataclass(frozen=True, slots=True)
class Orphaned:
    """The launcher is gone."""


@dataclass(frozen=True, slots=True)
class RunSaved:
    """The launcher has published how far the run is."""


@dataclass(frozen=True, slots=True)
class ShardsLooked:
    """Whether a trainer found a store shard lost since the turn before, at (term, turn, trainer)."""

    found_lost: bool


@dataclass(frozen=True, slots=True)
class SegmentFound:
    """A trainer has a segment's files, or knows what is wrong with them, at (term, segment, trainer)."""

    failure: str | None


@dataclass(frozen=True, slots=True)
class SegmentVerdict:
    """Whether all trainers begin a segment, at (term, segment); failure: what is wrong with it, None where the user wants a stop, or nothing is.

    goes_on: it is not begun in this term, since that ends, as is planned.
    """

    begin: bool
    failure: str | None
    goes_on: bool = False
