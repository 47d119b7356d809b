"""A model of rows that move between store shards while a lane's owner trains (docs/protocol.md, Rows move), small enough to be explored in full.

Here: its rules, the state, and the settings in which it is explored. `protocol_model` has what batches, connections and rebuilds can do to one
owner, `takeover_model` what owners know of each other; here are chunks of a move between batches, and new owners that finish them or roll them back.
`move_rounds`, `move_chunks` and `move_owner` say what can come next, `move_judge` what a new owner makes of what it finds, `move_explorer` visits
every world that can be reached.

Coarser than there: a shard executes and acknowledges a command in one step, an owner's reads are one step, and so is a rebuild's chunk, which is a
stripe. The log is one a term, and numbers are by term.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from protocol_model import LOST, NO_MARKER, REBUILDING, Cells, Marker, Row, Setting

NUMBERS_PER_TERM = 100  # 2^40 in the code

SomeCells = tuple[tuple[int, int], ...]  # some cells of a shard: stripe, value; 0: deleted
Members = tuple[int, ...]  # of a stripe: the shards of its members and parity rows, in order


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of a move; each False (or another word) is a move with one of them left out.

    Of a chunk: flushed_first: it is read while no batch is under way. copies_awaited: copies are acknowledged before anything is deleted.
    done_awaited: deletions are acknowledged before a batch goes by the new cursor. copied_alone, deleted_alone: "": migrated and the rows that
    come, or leave, in one command; "migrated" or "rows": these first, by a command of their own. targets_named: migrated names the shards that
    got copies, so that one which got none need not be told. marked: commands of a chunk have the marker. whole: a chunk begins only while all
    shards are whole.
    Of a new owner: fenced: the shards of "both" placements, of the "old" or the "new" one. stale_targets: a target at the cursor before, while
    another says done, is not trusted; at_n: nor is one that does not say so where a later batch is in the log; others_left: nor any that says
    something else; versions: which is what one that speaks of an earlier placement does. rolled_back: where only copies are, they are.
    rolled_back_by_term: what is rolled back has a later term than what it undoes; stamped: so has then every shard that is trusted. fewest: what
    would leave more than r shards not trusted is not so. held: rows are counted by migrated where its n is the marker's. leftover: what a shard that
    is left keeps counts, too. joining: a shard that comes in, and has nothing yet, is whole. Of shards: joined_moved, rebuilt_moved: migrated is
    written when a shard joins, and at the end of a rebuild. moved_compared: after a broken connection, too. answers_counted: how many fields were
    new, or deleted, is compared with what the owner knows. told_in_term: only the owner of this term is told of a further move.
    """

    flushed_first: bool = True
    copies_awaited: bool = True
    done_awaited: bool = True
    copied_alone: str = ""
    deleted_alone: str = ""
    targets_named: bool = True
    marked: bool = True
    whole: bool = True
    fenced: str = "both"
    stale_targets: bool = True
    at_n: bool = True
    others_left: bool = True
    versions: bool = True
    rolled_back: bool = True
    rolled_back_by_term: bool = True
    stamped: bool = True
    fewest: bool = True
    held: bool = True
    leftover: bool = True
    joining: bool = True
    joined_moved: bool = True
    rebuilt_moved: bool = True
    moved_compared: bool = True
    answers_counted: bool = True
    told_in_term: bool = True


class Migrated(NamedTuple):
    """How far a shard is. Positions are stripes of one placement after the other: version w ends at w x stripes.

    start, upto: the last chunk; done: its rows are deleted where they were; n: the last batch before it; held: rows and parity rows on the shard;
    term: of the owner that made the chunk, or took the lane over as it was then (start = upto); targets: the shards that got copies.
    """

    start: int
    upto: int
    done: bool
    n: int
    held: int
    term: int
    targets: tuple[int, ...] = ()


UNMIGRATED = Migrated(0, 0, True, -1, 0, 0)  # what a shard says that says nothing


class Contents(NamedTuple):
    """What a store shard holds of the lane."""

    cells: Cells
    marker: Marker
    migrated: Migrated | None = None

    @property
    def rows(self) -> int:
        """How many rows and parity rows there are."""
        return sum(cell != 0 for cell in self.cells)

    @property
    def at(self) -> Migrated:
        """How far the shard is."""
        return self.migrated or UNMIGRATED

    def after(self, command: Command) -> Contents:
        """The contents after a command."""
        changed = dict(command.cells)
        cells = tuple(changed.get(stripe, cell) for stripe, cell in enumerate(self.cells))
        return Contents(cells, command.marker or self.marker, command.migrated or self.migrated)

    def answer(self, command: Command) -> tuple[int, int]:
        """How many fields of a command are not there, and how many of those that it deletes are."""
        cells = command.cells
        new = sum(cell != 0 and self.cells[stripe] == 0 for stripe, cell in cells)
        new += (command.marker is not None and self.marker == NO_MARKER) + (
            command.migrated is not None and self.migrated is None
        )
        return new, sum(cell == 0 and self.cells[stripe] != 0 for stripe, cell in cells)


class Command(NamedTuple):
    """One atomic write: some cells, a marker and migrated, None: left as they are. before: what its owner takes to be there."""

    cells: SomeCells = ()
    marker: Marker | None = None
    migrated: Migrated | None = None
    before: Contents | None = None


class Shard(NamedTuple):
    """One store shard. contents None: dead; what it comes back with is open until someone looks. term: of the owner that fenced it last.

    past: what else it may come back with. wiped: "a row" or "all": lost under a living connection; "covered": all, and written to since.
    """

    contents: Contents | None
    term: int
    past: frozenset[Contents] = frozenset()
    wiped: str = ""

    @property
    def history(self) -> frozenset[Contents]:
        """All contents so far."""
        return self.past if self.contents is None else self.past | {self.contents}

    def written(self, command: Command) -> Shard:
        """The shard after a write."""
        assert self.contents is not None
        contents = self.contents.after(command)
        wiped = "covered" if self.wiped == "all" else self.wiped
        return self if contents == self.contents else Shard(contents, self.term, self.history, wiped)


class Record(NamedTuple):
    """A batch in the log, or without rows the empty record. before: the number of the batch before it; batch: how many of the scope's batches are
    stored once it is played; rows: those it changes; held: by shard, how many rows it has before it, with its parity, and with its data."""

    number: int
    before: int
    batch: int
    rows: tuple[Row, ...]
    held: tuple[tuple[int, int, int], ...]


class Owner(NamedTuple):
    """An owner of the lane.

    phase: of a takeover "fence" "judge" "resolve" "stamp" "play parity" "play data" "hold" "mark"; then "idle" "held" "parity" "data" "copy" "copied"
    "delete" "join" "rebuild" "finish"; at last perhaps "dead". n: its last batch that is stored, or is under way; batch: how many of the scope's
    batches that makes. at: where the cursor is. views: of a shard: "" not fenced yet, "fenced", then OK, LOST or REBUILDING; "none": no
    placement that it knows has it; "joining": new. migrated: what the shards say. out: sent, not yet applied, in order; awaited: acknowledgements.
    told: the version of the placement that rows move to. chunk: from where to where; copies: by shard, what was read for it. record: what
    a new owner read from the log. rebuilt: of a shard that is being rebuilt, how many stripes are. leftover: by shard, how many rows have moved away
    and are there still.
    """

    term: int
    phase: str
    n: int
    batch: int
    at: int
    views: tuple[str, ...]
    migrated: tuple[Migrated | None, ...]
    out: tuple[tuple[Command, ...], ...]
    awaited: tuple[int, ...]
    told: int = 0
    chunk: tuple[int, int] | None = None
    copies: tuple[SomeCells, ...] = ()
    record: Record | None = None
    rebuilt: int = 0
    leftover: tuple[int, ...] = ()

    @property
    def lost(self) -> set[int]:
        """The shards that are not OK for it."""
        return {shard for shard, view in enumerate(self.views) if view in (LOST, REBUILDING)}


class World(NamedTuple):
    """Everything. current: the version of the placement that is; announced: the one that rows move to, or the same; in_charge: the last owner that
    holds a record; kills, cuts, wipes: yet to come, at most."""

    shards: tuple[Shard, ...]
    logs: tuple[Record | None, ...]
    owners: tuple[Owner, ...]
    current: int
    announced: int
    in_charge: int
    kills: int
    cuts: int
    wipes: int


@dataclass(frozen=True)
class Scope:
    """What is explored. placements: by version and stripe, its shards, members first, then parity rows.

    batches: the rows that each changes; stored: those there at the start. owners: how many at most; one more looks at every world. kills, cuts,
    wipes: how many times at most a shard dies, an owner gives one up though nothing is wrong with it, and a shard loses a row or all and stays
    connected. rebuilds: whether owners rebuild what they lost. chunks: how many stripes a chunk may have. uncorrectable: how many shards more than
    r may be lost when the owner dies: then it is enough that no shard is trusted that should not be.
    """

    k: int
    r: int
    placements: tuple[tuple[Members, ...], ...]
    batches: tuple[tuple[Row, ...], ...]
    stored: tuple[Row, ...] = ()
    owners: int = 1
    kills: int = 0
    cuts: int = 0
    wipes: int = 0
    rebuilds: bool = False
    chunks: tuple[int, ...] = (1, 2)
    uncorrectable: int = 0

    @property
    def stripes(self) -> int:
        """How many stripes there are."""
        return len(self.placements[0])

    @cached_property
    def shards(self) -> int:
        """How many shards there are in all."""
        return 1 + max(shard for placement in self.placements for members in placement for shard in members)

    @cached_property
    def geometry(self) -> Setting:
        """Values of rows, and the code; not its places."""
        return Setting(self.k, self.r, self.shards, self.stripes, self.batches, self.stored)

    @cached_property
    def of_version(self) -> tuple[frozenset[int], ...]:
        """By version, the shards that it names."""
        return tuple(frozenset(shard for members in placement for shard in members) for placement in self.placements)

    def asked(self, current: int, announced: int) -> frozenset[int]:
        """The shards of a placement, and of the one that rows move to."""
        return self.of_version[current] | self.of_version[announced]

    def place(self, shard: int, stripe: int, at: int) -> int | None:
        """Which place of a stripe a shard holds, the cursor being there."""
        version = (at - stripe - 1) // self.stripes + 1 if at > stripe else 0
        members = self.placements[version][stripe]
        return members.index(shard) if shard in members else None

    def cells(self, shard: int, parity: int, data: int, at: int) -> Cells:
        """What a shard holds that has the parity and the data of so many batches."""
        key = shard, parity, data, at
        if key not in self._cells:
            places = [self.place(shard, stripe, at) for stripe in range(self.stripes)]
            self._cells[key] = tuple(
                0 if place is None
                else self.geometry.combine(place, self.geometry.versions[data if place < self.k else parity][stripe])
                for stripe, place in enumerate(places)
            )  # fmt: skip
        return self._cells[key]

    @cached_property
    def _cells(self) -> dict[tuple[int, int, int, int], Cells]:
        return {}

    def keeping(self, current: int, announced: int) -> frozenset[int]:
        """The shards that all rows leave, and that keep them until nobody asks them any more; without parity none does."""
        return self.of_version[current] - self.of_version[announced] if self.r else frozenset()

    def as_it_should(self, shard: int, cells: Cells, batch: int, at: int, keeps: bool) -> bool:
        """Whether a shard has what it must; one that keeps its rows may have any where it has no place."""
        pairs = enumerate(zip(cells, self.cells(shard, batch, batch, at), strict=True))
        return all(cell == must or (keeps and self.place(shard, g, at) is None) for g, (cell, must) in pairs)

    def moving(self, shard: int, start: int, upto: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The stripes of a chunk that come to a shard, and that leave it."""
        stripes = [
            (g, self.place(shard, g, start) is not None, self.place(shard, g, upto) is not None) for g in range(self.stripes)
        ]
        return tuple(g for g, was, will in stripes if will and not was), tuple(g for g, was, will in stripes if was and not will)

    def held(self, batch: int, at: int) -> tuple[tuple[int, int, int], ...]:
        """By shard, how many rows it has before a batch, with its parity, and with its data."""
        stages = [(max(batch - 1, 0),) * 2, (batch, max(batch - 1, 0)), (batch, batch)]
        counts = [[sum(cell != 0 for cell in self.cells(s, p, d, at)) for p, d in stages] for s in range(self.shards)]
        return tuple((one[0], one[1], one[2]) for one in counts)
