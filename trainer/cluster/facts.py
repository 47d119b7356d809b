"""What stands on the board, each fact a class of its own: agreements of the trainers and the coordinator.

It imports nothing heavy, since the keeper, for which trainers wait, imports it.

Where a fact stands more than once, its place is told: numbers after its name. What trainers are started with, and how they ended, is in `messages`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


def contiguous_lanes(lanes: int, trainers: int) -> list[int]:
    """The lane map of an undisturbed job: lane -> rank, in blocks that differ by at most one lane."""
    return [lane * trainers // lanes for lane in range(lanes)]


@dataclass(frozen=True, slots=True)
class Term:
    """Who trains in a term, at (number): members, the trainers' numbers, in the order of their ranks; hosts: of each lane, the trainer."""

    number: int
    members: tuple[int, ...]
    hosts: tuple[int, ...]

    @classmethod
    def of(cls, number: int, members: Sequence[int], lanes: int) -> Term:
        """These trainers, with the lanes spread over them."""
        return cls(number, tuple(members), tuple(members[rank] for rank in contiguous_lanes(lanes, len(members))))

    @property
    def lane_map(self) -> list[int]:
        """Of each lane, the rank of its trainer."""
        return [self.members.index(host) for host in self.hosts]

    def lanes_of(self, trainer: int) -> list[int]:
        """The lanes that a trainer hosts."""
        return [lane for lane, host in enumerate(self.hosts) if host == trainer]

    @property
    def leader(self) -> int:
        """The trainer that hosts lane 0: it speaks for all where one has to."""
        return self.hosts[0]


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The numerics of the first trainer, for the others of a run that has none yet."""

    fields: dict[str, str]


@dataclass(frozen=True, slots=True)
class Go:
    """All trainers are ready: training begins."""


@dataclass(frozen=True, slots=True)
class StopWanted:
    """A clean stop is asked for."""


@dataclass(frozen=True, slots=True)
class StopAfter:
    """The step after which all trainers stop."""

    step: int


@dataclass(frozen=True, slots=True)
class Orphaned:
    """The launcher is gone."""


@dataclass(frozen=True, slots=True)
class RunSaved:
    """The launcher has published how far the run is."""


@dataclass(frozen=True, slots=True)
class ShardsLooked:
    """Whether a trainer found a store shard lost since the turn before, at (turn, trainer)."""

    found_lost: bool


@dataclass(frozen=True, slots=True)
class SegmentFound:
    """A trainer has a segment's files, or knows what is wrong with them, at (segment, trainer)."""

    failure: str | None


@dataclass(frozen=True, slots=True)
class SegmentVerdict:
    """Whether all trainers begin a segment, at (segment); failure: what is wrong with it, None where the user wants a stop, or nothing is."""

    begin: bool
    failure: str | None
