"""A model of a lane that passes from owner to owner (docs/protocol.md, Takeover), small enough to be explored in full.

Here: its rules, the state, and the settings in which it is explored. `protocol_model` has one owner and everything that its servers and
connections can do to it; here are several owners, one after the other, of which the earlier ones may go on, and what each of them knows of the
schedule. `takeover_owner` says what can come next, `takeover_explorer` visits every world that can be reached.

Two things are coarser than there. A shard executes and acknowledges a command in one step, and an owner's reads are one step: both only where
nothing else could come between. And a batch's data and the reads of the next are two steps, not one exchange.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from protocol_model import OK, WIDTH_BYTES, Cells, Change, Marker, Row, Setting

NUMBERS_PER_TERM = 100  # 2^40 in the code

SomeCells = tuple[tuple[int, int], ...]  # some cells of a shard: stripe, value


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of a takeover; each False (or another word) is a takeover with one of them left out.

    Of the fence: fence; fence_first: the log is read when all shards are fenced or lost. fenced: how many shards a new owner must have fenced
    unless the old one is known to be dead: "more than r"; "half": more than half of them, where 2 r >= shards; "": any number.
    Of the log: log_per_term; numbers_by_term; base_first: the base of a row is read before the log holds its batch.
    record_copied: a new owner holds the record that it has read in its own log before it plays it.
    Of the empty record, which a new owner writes: empty_record; empty_held: it is in the log, and not only on the shards; empty_names_before: it
    names the number before it; empty_played: an owner that finds it brings the shards to its number.
    Of what the store has: committed_only: only rows that ended by committed steps are handed over; owed_looked_at, ended_looked_at: the tags
    of owed rows, and of those that ended last, are looked at before anything is written (without parity, where they are not, they are taken for
    stored); told_each_step: released(v) is told with the changes of every step.
    Without parity: marked: a new owner marks the shards; stale: a marker older than what released(v) allows shows that rows are missing;
    told_when_stored: released(v) is told when the rows are acknowledged.
    """

    fence: bool = True
    fence_first: bool = True
    fenced: str = "more than r"
    log_per_term: bool = True
    numbers_by_term: bool = True
    record_copied: bool = True
    base_first: bool = True
    empty_record: bool = True
    empty_held: bool = True
    empty_names_before: bool = True
    empty_played: bool = True
    committed_only: bool = True
    owed_looked_at: bool = True
    ended_looked_at: bool = True
    told_each_step: bool = True
    marked: bool = True
    stale: bool = True
    told_when_stored: bool = True


class Contents(NamedTuple):
    """What a store shard holds of the lane."""

    cells: Cells
    marker: Marker


class Command(NamedTuple):
    """One atomic write: some cells (stripe, new value) and a marker, None: left as it is."""

    cells: SomeCells
    marker: Marker | None


class Shard(NamedTuple):
    """One store shard. term: of the owner that fenced it last; past: what else it may come back with."""

    contents: Contents
    term: int
    past: frozenset[Contents] = frozenset()

    def written(self, command: Command) -> Shard:
        """The shard after a write."""
        cells = list(self.contents.cells)
        for stripe, cell in command.cells:
            cells[stripe] = cell
        contents = Contents(tuple(cells), command.marker or self.contents.marker)
        return self if contents == self.contents else Shard(contents, self.term, self.past | {self.contents})


class Record(NamedTuple):
    """A batch in the log, or without changes the empty record. before: the number of the batch before it.

    after is no part of it: the lane's rows in the store once it is played, by which it is checked.
    """

    number: int
    before: int
    changes: tuple[Change, ...]
    after: Cells


class Ended(NamedTuple):
    """A row that ended at a boundary."""

    boundary: int
    row: Row


class Owner(NamedTuple):
    """An owner of the lane.

    phase: of a takeover "fence" "read" "trusted" "copied" "play parity" "play data" "hold" "mark" "look", without parity "fence" "read" "mark";
    then "idle" "cut" "held" "parity" "data" "rebuild"; at last perhaps "dead". n: its last batch that is stored, or the last of the owner
    before.
    views: of a shard: "" not fenced yet, "fenced", then OK, LOST or REBUILDING. out: sent, not yet applied; awaited: acknowledgements, False
    also from a shard that it gave up. queue: rows handed over, not yet in a batch; batch, taken: the one under way, and its rows.
    limit: the last boundary whose step before it knows to be committed; handed: the last that it handed over. stored: the rows in the store, once
    what is under way is; nobody knows them, they are there to be checked. written: rows that it takes for written.
    """

    term: int
    phase: str
    n: int
    views: tuple[str, ...]
    out: tuple[Command | None, ...]
    awaited: tuple[bool, ...]
    stored: Cells
    written: frozenset[Row]
    limit: int
    handed: int
    queue: tuple[Ended, ...] = ()
    batch: Record | None = None
    taken: tuple[Ended, ...] = ()
    parity: tuple[SomeCells, ...] = ()  # by shard, the parity rows of the batch, until they are sent
    record: Record | None = None  # what a new owner read from the log

    @property
    def released(self) -> int:
        """The last boundary up to which everything handed over is stored."""
        waiting = self.taken + self.queue
        return min((ended.boundary for ended in waiting), default=self.handed + 1) - 1

    @property
    def lost(self) -> set[int]:
        """The shards that are not OK for it."""
        return {shard for shard, view in enumerate(self.views) if view not in (OK, "fenced", "")}

    @property
    def trains(self) -> bool:
        """Whether it is through with its takeover."""
        return self.phase in ("idle", "cut", "held", "parity", "data", "rebuild")


class Told(NamedTuple):
    """What the copies know to be released: a boundary, and the number of its last batch."""

    boundary: int
    number: int


class World(NamedTuple):
    """Everything. committed: the last boundary whose step before is committed; in_charge: the last owner that holds
    a record; cuts: connections yet to break, at most; logs: by term, or where all share one, by turn."""

    shards: tuple[Shard, ...]
    logs: tuple[Record | None, ...]
    owners: tuple[Owner, ...]
    committed: int
    told: Told
    in_charge: int
    cuts: int


class WrongStep(Exception):
    """An owner cannot go on, or goes on from something that is not so."""


@dataclass(frozen=True)
class Scope:
    """What is explored. ends: by boundary, from 1, the rows that end there; owners: how many at most, one more looks at every world.

    cuts: how many times at most an owner fails to reach a shard, or gives one up, though nothing is wrong with it. rebuilds: whether owners
    rebuild what they lost. one_by_one: whether batches may have fewer rows than wait.
    """

    k: int
    r: int
    shards: int
    stripes: int
    ends: tuple[tuple[Row, ...], ...]
    owners: int = 2
    cuts: int = 0
    rebuilds: bool = False
    one_by_one: bool = True

    @cached_property
    def geometry(self) -> Setting:
        """Which place of a stripe is on which shard, and the code."""
        return Setting(self.k, self.r, self.shards, self.stripes, ())

    @property
    def last(self) -> int:
        """The last boundary."""
        return len(self.ends)

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """All rows, in the order of `Owner.stored`."""
        return tuple((g, m) for g in range(self.stripes) for m in range(self.k))

    @cached_property
    def values(self) -> dict[Row, dict[int, int]]:
        """By row, and boundary at which it ended, its value; 0: never written."""
        versions = [(row, b) for b, rows in enumerate(self.ends, 1) for row in rows]
        assert len(versions) <= WIDTH_BYTES
        values: dict[Row, dict[int, int]] = {row: {0: 0} for row in self.rows}
        for place, (row, boundary) in enumerate(versions):
            values[row][boundary] = 1 << 8 * place
        return values

    def before(self, ended: Ended) -> int:
        """The boundary at which a row ended the time before, 0: never; its stored tag."""
        return max(b for b in self.values[ended.row] if b < ended.boundary)

    def ended(self, after: int, upto: int) -> list[Ended]:
        """The rows that ended at boundaries after + 1 .. upto."""
        return [Ended(b, row) for b in range(after + 1, upto + 1) for row in self.ends[b - 1]]

    def value(self, ended: Ended) -> int:
        """The value with which a row ended."""
        return self.values[ended.row][ended.boundary]

    def place(self, row: Row) -> int:
        """The index of a row in `rows`."""
        return row[0] * self.k + row[1]

    def cells(self, shard: int, stored: Cells) -> Cells:
        """What a shard has when the store has these rows."""
        places = self.geometry.places[shard]
        return tuple(
            0 if place is None else self.geometry.combine(place, stored[g * self.k : (g + 1) * self.k])
            for g, place in enumerate(places)
        )

    def all_cells(self, stored: Cells) -> tuple[Cells, ...]:
        """`cells` of every shard."""
        if stored not in self._cells:
            self._cells[stored] = tuple(self.cells(shard, stored) for shard in range(self.shards))
        return self._cells[stored]

    @cached_property
    def _cells(self) -> dict[Cells, tuple[Cells, ...]]:
        return {}
