"""The findings of a scrub."""

from __future__ import annotations

from dataclasses import dataclass, field

NAMED = 1000  # the most findings that are kept one by one


@dataclass(frozen=True, slots=True)
class Finding:
    """A stripe that a scrub found wrong.

    Attributes:
        first: the first ordinal of the stripe.
        last: the last ordinal of the stripe.
        shards: the store shards of the stripe in order, those of the members first.
        what: a description of the mismatch.
    """

    lane: int
    table: int
    first: int
    last: int
    shards: tuple[int, ...]
    what: str


@dataclass(slots=True)
class Findings:
    """The findings of a scrub.

    Attributes:
        stripes: stripes checked.
        rows: rows checked.
        parity_rows: parity rows checked.
        stripes_repaired: stripes repaired.
        stripes_damaged: damaged stripes, which the scrub left unchanged.
        repaired: the first 1,000 repaired stripes.
        damaged: the first 1,000 damaged stripes.
    """

    stripes: int = 0
    rows: int = 0
    parity_rows: int = 0
    stripes_repaired: int = 0
    stripes_damaged: int = 0
    repaired: list[Finding] = field(default_factory=list)
    damaged: list[Finding] = field(default_factory=list)

    def add(self, other: Findings) -> None:
        """Add the findings of another part of the scrub."""
        for name in ("stripes", "rows", "parity_rows", "stripes_repaired", "stripes_damaged"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.repaired += other.repaired[: NAMED - len(self.repaired)]
        self.damaged += other.damaged[: NAMED - len(self.damaged)]


@dataclass(frozen=True, slots=True)
class Scrubbed:
    """The progress of a scrub of lanes that are trained.

    Attributes:
        stripes: how many stripes there were when the scrub began.
        findings: the findings so far.
        done: whether the scrub is complete.
    """

    stripes: int
    findings: Findings
    done: bool
