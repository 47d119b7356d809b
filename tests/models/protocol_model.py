"""A model of the store protocol (docs/protocol.md), small enough to be explored in full.

Here: its rules, the state, and the settings in which it is explored. One lane, its owner (the *writer*), its log and its store shards are
one immutable `World`. `protocol_writer` says what can come next, `protocol_explorer` visits every world that can be reached and lets the writer
die in each.

Cells are bytes: some elements of GF(2^8), in an int. Every version of every row is a unit vector, so that no two wrong sums agree by chance.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from foreload.cache.parity.erasure import Code

WIDTH_BYTES = 24  # of a cell: a byte a version, so a program has no more versions
_ONES = int.from_bytes(b"\x01" * WIDTH_BYTES, "little")

OK, LOST, REBUILDING = "ok", "lost", "rebuilding"

Row = tuple[int, int]  # stripe, place among its K members
Cells = tuple[int, ...]  # what one shard holds, by stripe: a member, a parity row, or 0 where there is none


@lru_cache(None)
def times(factor: int, cell: int) -> int:
    """factor x every byte of cell, in GF(2^8)."""
    total = 0
    while factor:
        if factor & 1:
            total ^= cell
        cell, factor = (cell & (_ONES * 0x7F)) << 1 ^ (cell >> 7 & _ONES) * 0x1D, factor >> 1
    return total


@dataclass(frozen=True, slots=True)
class Rules:
    """The protocol's rules; each False is a protocol with one of them left out.

    reads_leave_first is none of them: reads and data of one exchange may be served in either order.
    Of the writer: flushed_first: what is decoded is read while no batch is between its phases. written_noted: whether a stripe was ever written is
    asked of all batches cut, not only of those stored. parity_awaited: parity is acknowledged before the next read phase is sent.
    parity_first: parity is sent before data. log_first: a batch is in the log before its first byte leaves. held_until_stored: it stays there until
    its data is acknowledged. exact_resend: after a broken connection a shard is trusted only with a marker that the phase allows (False: p,
    d in {n - 1, n}). narrowed: (n, n - 1) is not allowed any more once data of n is acknowledged.
    Of a rebuild: every_stripe: none is skipped. cut_after_chunk: what a batch leaves out for a rebuilding shard is decided after the stripes before
    it are rebuilt. rebuilding_noted: markers sent to a rebuilding shard say so. restart: a rebuilding shard whose connection broke is
    rebuilt from the start.
    Of a shard: first_alone: "": marker and rows change together; "marker" or "rows": these change first, by a command of their own.
    two_markers: p and d are apart.
    Of the log, which False leaves out altogether: records_in_turn: the batch before stays in it until the next is there as a whole.
    Of a takeover: fence; marker_compared; p_heeded: a difference is applied only where p < n.
    Of a shard that loses rows under a living connection: answers_counted: how many fields of a write were new to it is compared with what the writer
    knows; rows_counted: after a broken connection, and at a takeover, so is how many rows it has.
    """

    reads_leave_first: bool = True
    flushed_first: bool = True
    written_noted: bool = True
    parity_awaited: bool = True
    parity_first: bool = True
    log_first: bool = True
    held_until_stored: bool = True
    exact_resend: bool = True
    narrowed: bool = True
    every_stripe: bool = True
    cut_after_chunk: bool = True
    rebuilding_noted: bool = True
    restart: bool = True
    first_alone: str = ""
    two_markers: bool = True
    log: bool = True
    fence: bool = True
    marker_compared: bool = True
    records_in_turn: bool = True
    p_heeded: bool = True
    answers_counted: bool = True
    rows_counted: bool = True


class Marker(NamedTuple):
    """p and d: the last batch whose parity and whose data a shard has."""

    p: int
    d: int
    rebuilding: bool = False


NO_MARKER = Marker(-1, -1)


class Contents(NamedTuple):
    """What a store shard holds of the lane."""

    cells: Cells
    marker: Marker

    @property
    def rows(self) -> int:
        """How many rows and parity rows there are."""
        return sum(cell != 0 for cell in self.cells)

    def new(self, command: Command) -> int:
        """How many fields of a command are not there."""
        rows = sum(cell != 0 and self.cells[stripe] == 0 for stripe, cell in command.cells)
        return rows + (command.marker is not None and self.marker == NO_MARKER)


class Command(NamedTuple):
    """One atomic command: a read of everything, or some cells and a marker (None: left as it is).

    before: the marker that stands for what the writer knows to be there.
    """

    cells: tuple[tuple[int, int], ...] = ()  # (stripe, new value)
    marker: Marker | None = None
    read: bool = False
    epoch: int = 0  # of the connection that it was sent over
    before: Marker = NO_MARKER


class Server(NamedTuple):
    """One store shard. contents None: empty, or dead: what it comes back with is open until someone looks."""

    contents: Contents | None
    past: frozenset[Contents] = frozenset()  # all earlier contents, any of which a dead one may come back with
    alive: bool = True
    connected: bool = True
    epoch: int = 0  # commands of another one are refused
    queue: tuple[Command, ...] = ()  # sent, not yet applied
    zombies: tuple[Command, ...] = ()  # sent over connections that are no more
    wiped: str = ""  # "a row" or "all": lost under a living connection; "covered": all, and written to since

    @property
    def history(self) -> frozenset[Contents]:
        """All contents so far."""
        return self.past if self.contents is None else self.past | {self.contents}

    def received(self, command: Command, stripes: int) -> Server:
        """The server after a write, which it refuses if another connection has been fenced in since."""
        if command.epoch != self.epoch:
            return self
        cells, marker = self.contents or Contents((0,) * stripes, NO_MARKER)
        changed = dict(command.cells)
        cells = tuple(changed.get(stripe, cell) for stripe, cell in enumerate(cells))
        contents = Contents(cells, command.marker or marker)
        wiped = "covered" if self.wiped == "all" else self.wiped
        return self if contents == self.contents else self._replace(contents=contents, past=self.history, wiped=wiped)


class Change(NamedTuple):
    """One row of a logged batch."""

    row: Row
    old: int
    new: int


class Log(NamedTuple):
    """Held outside the writer: one batch, n, until the next replaces it; by then it is fully stored.

    stored: n - 1; changes: of batch n, () where there is none. whole False: nothing can be read from it.
    """

    stored: int
    changes: tuple[Change, ...] = ()
    whole: bool = True

    @property
    def last(self) -> int:
        """The last batch that is stored once the log is played."""
        return self.stored + bool(self.changes)


class Writer(NamedTuple):
    """The lane's owner. n: the last batch whose parity is acknowledged. phase: what it does, or waits for."""

    n: int
    phase: str  # "round" | "read" | "decode" | "hold" | "held" | "parity" | "flush" | "chunk" | "rebuild" | "finish" | "done"
    views: tuple[str, ...]
    awaited: tuple[int, ...]  # acknowledgements, by shard
    sent: tuple[tuple[Command, ...], ...]  # in this phase, by shard
    later: tuple[tuple[Command, ...], ...]  # what batch n has yet to send, by shard
    stored: bool  # whether batch n's data is acknowledged
    replies: tuple[Cells | None, ...]
    parity_read: tuple[Cells | None, ...]  # the replies of the read phase of batch n + 1
    asked: tuple[bool, ...]  # the shards that were OK when this phase began
    cursor: tuple[int, ...]  # by shard, the next stripe to rebuild
    cut: tuple[int, ...]  # the cursors by which the next batch is cut: a rebuilding shard is written to below its cursor
    rebuilt: int = -1  # the shard that this phase rebuilds


class World(NamedTuple):
    """Everything."""

    servers: tuple[Server, ...]
    writer: Writer
    log: Log
    kills: int  # yet to come, at most
    cuts: int
    wipes: int


class WrongRead(Exception):
    """The living writer took a row for something that it is not."""


def put(values: tuple, index: int, value: object) -> tuple:
    """A tuple with one entry replaced."""
    return (*values[:index], value, *values[index + 1 :])


@dataclass(frozen=True)
class Setting:
    """What is explored. batches: the rows that each write-back batch changes; stored: the rows that the store has at the start.

    kills, cuts, wipes: how many times at most a shard dies, a connection breaks, and a shard loses a row or all that it has and stays connected,
    while the writer lives; never are more than R shards lost at once.
    Place i of stripe g (members first, then parity rows) is on shard (g + i) mod shards.
    """

    k: int
    r: int
    shards: int
    stripes: int
    batches: tuple[tuple[Row, ...], ...]
    stored: tuple[Row, ...] = ()
    kills: int = 0
    cuts: int = 0
    wipes: int = 0

    @cached_property
    def code(self) -> Code:
        """The erasure code of cache/."""
        return Code(self.k, self.r)

    @cached_property
    def places(self) -> tuple[tuple[int | None, ...], ...]:
        """By shard and stripe: which place of the stripe the shard holds, if any."""
        places = [[(shard - stripe) % self.shards for stripe in range(self.stripes)] for shard in range(self.shards)]
        return tuple(tuple(place if place < self.k + self.r else None for place in of_shard) for of_shard in places)

    def places_of(self, stripe: int) -> list[int]:
        """The shards of a stripe's members and parity rows, in order."""
        return [(stripe + place) % self.shards for place in range(self.k + self.r)]

    @cached_property
    def versions(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """By batch (0: the start), stripe and member: the row's value once the batch is stored."""
        unit = iter(1 << 8 * version for version in range(WIDTH_BYTES))
        rows = {(g, m): next(unit) if (g, m) in self.stored else 0 for g in range(self.stripes) for m in range(self.k)}
        found = []
        for changed in ((), *self.batches):
            rows |= {row: next(unit) for row in changed}
            found.append(tuple(tuple(rows[g, m] for m in range(self.k)) for g in range(self.stripes)))
        return tuple(found)

    @cached_property
    def truth(self) -> tuple[tuple[Cells, ...], ...]:
        """By batch and shard: the cells once the batch is stored."""
        return tuple(
            tuple(
                tuple(0 if place is None else self.combine(place, rows[g]) for g, place in enumerate(of_shard))
                for of_shard in self.places
            )
            for rows in self.versions
        )

    def known(self, shard: int, stripe: int, marker: Marker) -> int:
        """What a shard with this marker has of a stripe."""
        place = self.places[shard][stripe]
        if place is None or marker == NO_MARKER:
            return 0
        return self.truth[marker.d if place < self.k else marker.p][shard][stripe]

    def lacking(self, shard: int, contents: Contents) -> frozenset[int]:
        """The stripes of which a shard has no row, though its marker says so."""
        cells, marker = contents
        return frozenset(stripe for stripe, cell in enumerate(cells) if not cell and self.known(shard, stripe, marker))

    def new(self, shard: int, command: Command) -> int:
        """How many fields of a command the writer knows not to be there."""
        return sum(cell != 0 and not self.known(shard, stripe, command.before) for stripe, cell in command.cells)

    def combine(self, place: int, members: tuple[int, ...]) -> int:
        """The row at a place of a stripe with these members."""
        total = 0
        for factor, member in zip(self.code.generator(place), members, strict=True):
            total ^= times(factor, member)
        return total

    def decode(self, stripe: int, of_shards: tuple[Cells | None, ...]) -> tuple[int, ...]:
        """The members of a stripe from the shards that have cells."""
        cells = {}
        for shard, cells_there in enumerate(of_shards):
            place = self.places[shard][stripe]
            if place is not None and cells_there is not None:
                cells[place] = cells_there[stripe]
        known = sorted(cells)[: self.k]
        if len(known) < self.k:
            raise WrongRead(f"stripe {stripe} has only places {known}")
        members = []
        for member in range(self.k):
            total = cells.get(member, 0)
            if member not in cells:
                for place, factor in zip(known, self.code.decoding(known, member), strict=True):
                    total ^= times(int(factor), cells[place])
            members.append(total)
        return tuple(members)
