"""A lane that passes from owner to owner without parity: no log, no base, and a shard that lacks rows is an error.

A new owner fences every shard, compares the markers with what the copies know to be released, looks at the tags of what is owed, and marks the shards
with a number of its term. What is not stored is handed over again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from protocol_model import OK, Marker, put
from takeover_model import Command, Contents, Ended, World, WrongStep
from takeover_owner import Model

RIGHT, STALE, WRONG = range(3)


class UnprotectedModel(Model):
    """`Model` where a batch is one command a shard."""

    def _goes_on(self, world: World, i: int) -> Iterator[World]:
        owner = world.owners[i]
        if owner.phase == "fence":
            yield from self._fences(world, i)
        elif owner.phase == "idle":
            yield from self._writes(world, i)
        elif owner.phase == "data":
            number = owner.n + 1
            owner = owner._replace(phase="idle", n=number, stored=self.with_rows(owner.stored, owner.taken), taken=())
            yield world._replace(owners=put(world.owners, i, owner))
        elif owner.phase == "read":
            yield from self._looks_and_marks(world, i)
        elif owner.phase == "mark":
            yield world._replace(owners=put(world.owners, i, owner._replace(phase="idle")))

    def with_rows(self, stored: tuple[int, ...], rows: tuple[Ended, ...]) -> tuple[int, ...]:
        """The lane's rows with some written."""
        found = list(stored)
        for ended in rows:
            found[self.scope.place(ended.row)] = self.scope.value(ended)
        return tuple(found)

    def commands(self, rows: tuple[Ended, ...], marker: Marker | None) -> list[Command | None]:
        """Rows as commands, by shard; one without rows or a marker is none."""
        found: list[Command | None] = []
        for shard in range(self.scope.shards):
            own = tuple((e.row[0], self.scope.value(e)) for e in rows if self.scope.geometry.places[shard][e.row[0]] == e.row[1])
            found.append(Command(own, marker) if own or marker is not None else None)
        return found

    def _writes(self, world: World, i: int) -> Iterator[World]:
        """A batch of rows that wait."""
        owner = world.owners[i]
        for size in sorted({len(owner.queue)} | ({1} if self.scope.one_by_one else set())) if owner.queue else ():
            taken = owner.queue[:size]
            writing = owner._replace(phase="data", queue=owner.queue[size:], taken=taken)
            yield self._send(world, i, writing, self.commands(taken, Marker(owner.n + 1, owner.n + 1)))

    # A takeover.

    def _fences(self, world: World, i: int) -> Iterator[World]:
        """The next shard, each of which must be there."""
        owner = world.owners[i]
        shard = owner.views.index("")
        if world.shards[shard].term >= owner.term:
            return
        last = shard == self.scope.shards - 1
        owner = owner._replace(views=put(owner.views, shard, "fenced"), phase="read" if last else "fence")
        yield self._fenced(world._replace(owners=put(world.owners, i, owner)), i, shard)

    def _looks_and_marks(self, world: World, i: int) -> Iterator[World]:
        """At the markers, and at the tags of what is owed; then marks the shards."""
        owner, scope = world.owners[i], self.scope
        if not all(self.accepts(world, owner, shard) for shard in range(scope.shards)):
            return
        if any(self.is_stale(world, shard.contents) for shard in world.shards):
            raise WrongStep("a shard that lacks nothing counts as stale")
        # What is not looked at is taken for stored.
        stored, queue = list(self.with_rows((0,) * len(scope.rows), tuple(scope.ended(0, owner.limit)))), []
        for ended in self.owed(world, owner.limit):
            value, before = (
                world.shards[self.home(ended)].contents.cells[ended.row[0]],
                scope.values[ended.row][scope.before(ended)],
            )
            if value not in (before, scope.value(ended)):
                raise WrongStep(f"row {ended.row} has neither of its tags")
            if value == before:
                stored[scope.place(ended.row)] = before
                queue.append(ended)
        owner = owner._replace(views=(OK,) * scope.shards, stored=tuple(stored), queue=tuple(queue), phase="mark")
        owner = owner._replace(n=self._number(owner.term, 0))
        world = world._replace(in_charge=max(world.in_charge, i))
        marker = Marker(owner.n, owner.n) if self.rules.marked else None
        yield self._send(world, i, owner, self.commands((), marker))

    def home(self, ended: Ended) -> int:
        """The shard that has a row."""
        return self.scope.geometry.places_of(ended.row[0])[ended.row[1]]

    def is_stale(self, world: World, contents: Contents) -> bool:
        """Whether a shard's marker says that it lacks rows that the copies know to be released."""
        return self.rules.stale and contents.marker.d < world.told.number

    def owed(self, world: World, upto: int) -> tuple[Ended, ...]:
        """What a new owner looks at."""
        rules = self.rules
        return tuple(
            ended
            for ended in self.scope.ended(world.told.boundary, upto)
            if (rules.ended_looked_at if ended.boundary == upto else rules.owed_looked_at)
        )


@dataclass
class NextUnprotectedOwner:
    """What a further owner makes of a world in which each shard is as it is, or back with any earlier contents, or with nothing."""

    model: UnprotectedModel

    def cases(self, world: World) -> tuple[int, int]:
        """Cases and wrong cases; a shard that lacks rows and is found out is right."""
        cases = wrong = 0
        scope = self.model.scope
        owed = {
            ended.row: (scope.values[ended.row][scope.before(ended)], scope.value(ended))
            for ended in self.model.owed(world, world.committed)
        }
        truth = self.model.with_rows((0,) * len(scope.rows), tuple(scope.ended(0, world.committed)))
        for shard, cells in enumerate(scope.all_cells(truth)):
            places = scope.geometry.places[shard]
            server = world.shards[shard]
            empty = Contents((0,) * scope.stripes, Marker(0, 0))
            for contents in (server.contents, *server.past, empty):
                cases += 1
                if self.model.is_stale(world, contents):
                    wrong += contents is server.contents
                    continue
                wrong += not all(
                    cell in owed.get((g, place), (must,))
                    for g, (place, cell, must) in enumerate(zip(places, contents.cells, cells, strict=True))
                    if place is not None
                )
        return cases, wrong
