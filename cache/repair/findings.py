"""What a scrub found."""

from __future__ import annotations

from dataclasses import dataclass, field

NAMED = 1000  # findings that are kept one by one


@dataclass(frozen=True, slots=True)
class Finding:
    """A stripe that was not as it must be: ordinals first to last of a table in a lane, its store shards in order, members first; what was wrong."""

    lane: int
    table: int
    first: int
    last: int
    shards: tuple[int, ...]
    what: str


@dataclass(slots=True)
class Findings:
    """What scrubbing found: how many stripes, rows and parity rows were checked; stripes repaired, and damaged, which were left alone.

    repaired, damaged: the first 1,000 of each.
    """

    stripes: int = 0
    rows: int = 0
    parity_rows: int = 0
    stripes_repaired: int = 0
    stripes_damaged: int = 0
    repaired: list[Finding] = field(default_factory=list)
    damaged: list[Finding] = field(default_factory=list)

    def add(self, other: Findings) -> None:
        """Count in what another part found."""
        for name in ("stripes", "rows", "parity_rows", "stripes_repaired", "stripes_damaged"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.repaired += other.repaired[: NAMED - len(self.repaired)]
        self.damaged += other.damaged[: NAMED - len(self.damaged)]


@dataclass(frozen=True, slots=True)
class Scrubbed:
    """How far a scrub of lanes that are trained is. stripes: how many there were when it began."""

    stripes: int
    findings: Findings
    done: bool
