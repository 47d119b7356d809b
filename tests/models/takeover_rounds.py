"""What can happen next in a world of `takeover_model`, but for the takeover itself: shards, schedule, and the rounds of an owner."""

from __future__ import annotations

from collections.abc import Iterator

from protocol_model import LOST, OK, REBUILDING, Change, Marker, Row, put, times
from takeover_model import (
    NUMBERS_PER_TERM,
    Command,
    Contents,
    Ended,
    Owner,
    Record,
    Rules,
    Scope,
    Shard,
    SomeCells,
    Told,
    World,
    WrongStep,
)


class Rounds:
    """What shards do with commands, the schedule with rows, and an owner in its rounds; `Model` adds the takeover."""

    def __init__(self, scope: Scope, rules: Rules) -> None:
        self.scope = scope
        self.rules = rules
        self.nothing: tuple[None, ...] = (None,) * scope.shards
        self.none_awaited = (False,) * scope.shards
        self.wrong: list[str] = []

    def start(self) -> World:
        """The first owner, before anything was written."""
        scope = self.scope
        nothing = (0,) * len(scope.rows)
        first = self._number(1, 0)
        shards = tuple(Shard(Contents((0,) * scope.stripes, Marker(first, first)), 1) for _ in range(scope.shards))
        record = Record(first, 0, (), nothing)
        owner = Owner(
            1, "idle", first, (OK,) * scope.shards, self.nothing, self.none_awaited, nothing, frozenset(), limit=1, handed=0
        )
        logs = (record, *(None,) * scope.owners) if self.rules.log_per_term else (record, None)
        return World(shards, logs, (owner,), 1, Told(0, first), 0, scope.cuts)

    def _number(self, term: int, before: int) -> int:
        """The first number of a term."""
        return term * NUMBERS_PER_TERM if self.rules.numbers_by_term else before + 1

    def valid(self, world: World) -> Record:
        """The record that a new owner goes by."""
        records = [record for record in world.logs if record is not None]
        return records[-1] if self.rules.log_per_term else max(records, key=lambda record: record.number)

    def steps(self, world: World) -> Iterator[World]:
        """All worlds that can come next; what goes wrong on the way to another is put into `wrong`."""
        for i, owner in enumerate(world.owners):
            for shard, command in enumerate(owner.out):
                if command is not None:
                    yield self._applied(world, i, shard)
            if owner.phase == "dead":
                continue
            yield from self._handed_over(world, i)
            yield from self._given_up(world, i)
            if not any(owner.awaited):
                try:
                    yield from self._goes_on(world, i)
                except WrongStep as error:
                    self.wrong.append(str(error))
        yield from self._committed(world)
        if len(world.owners) < self.scope.owners:
            yield self._next_owner(world)

    # The shards.

    def _applied(self, world: World, i: int, shard: int) -> World:
        owner = world.owners[i]
        command = owner.out[shard]
        assert command is not None
        owner = owner._replace(out=put(owner.out, shard, None), awaited=put(owner.awaited, shard, False))
        shards = put(world.shards, shard, world.shards[shard].written(command))
        return world._replace(shards=shards, owners=put(world.owners, i, owner))

    def accepts(self, world: World, owner: Owner, shard: int) -> bool:
        """Whether a shard executes an owner's commands, or answers that another was fenced in."""
        return world.shards[shard].term == owner.term or not self.rules.fence

    def _send(self, world: World, i: int, owner: Owner, commands: list[Command | None]) -> World:
        """Send to the shards that are OK; what a shard refuses is awaited for ever."""
        commands = [command if view == OK else None for command, view in zip(commands, owner.views, strict=True)]
        out = tuple(
            command if command is not None and self.accepts(world, owner, shard) else None
            for shard, command in enumerate(commands)
        )
        owner = owner._replace(out=out, awaited=tuple(command is not None for command in commands))
        return world._replace(owners=put(world.owners, i, owner))

    def _given_up(self, world: World, i: int) -> Iterator[World]:
        """An owner waits in vain for a shard, and goes on without it; what it sent may still arrive."""
        owner = world.owners[i]
        for shard, awaited in enumerate(owner.awaited):
            if awaited and world.cuts and len(self._out_of_reach(world, i) | {shard}) <= self.scope.r:
                given_up = owner._replace(views=put(owner.views, shard, LOST), awaited=put(owner.awaited, shard, False))
                yield world._replace(owners=put(world.owners, i, given_up), cuts=world.cuts - 1)

    def _out_of_reach(self, world: World, i: int) -> set[int]:
        """The shards that are lost for an owner, or for any that may be gone by if it is one of these."""
        if i < world.in_charge:
            return world.owners[i].lost
        return set().union(*(owner.lost for owner in world.owners[world.in_charge :]))

    def _fenced(self, world: World, i: int, shard: int) -> World:
        """A shard fenced: what earlier owners have under way there, and send later, is refused."""
        term = world.owners[i].term
        if not self.rules.fence:
            return world
        owners = tuple(
            other if j == i else other._replace(out=put(other.out, shard, None)) for j, other in enumerate(world.owners)
        )
        return world._replace(shards=put(world.shards, shard, world.shards[shard]._replace(term=term)), owners=owners)

    # The schedule.

    def _committed(self, world: World) -> Iterator[World]:
        """A further step is committed: all rows of it were there."""
        owner = world.owners[-1]
        following = world.committed + 1
        if following > self.scope.last or not owner.trains:
            return
        needed = max(self.scope.before(Ended(following, row)) for row in self.scope.ends[following - 1])
        if owner.released < needed:
            return
        owner = owner._replace(limit=following)
        released = self._claimed(owner)
        least = max(needed, world.told.boundary) if self.rules.told_each_step else world.told.boundary
        for boundary in range(least, released + 1):
            told = world.told if boundary == world.told.boundary else Told(boundary, owner.n)
            yield world._replace(owners=(*world.owners[:-1], owner), committed=following, told=told)

    def _claimed(self, owner: Owner) -> int:
        if self.rules.told_when_stored or owner.phase not in ("parity", "data"):
            return owner.released
        return owner._replace(taken=()).released

    def _handed_over(self, world: World, i: int) -> Iterator[World]:
        """The rows that ended at the next boundary go to the traffic."""
        owner = world.owners[i]
        most = min(owner.limit + (not self.rules.committed_only), self.scope.last)
        if owner.trains and owner.handed < most:
            queue = owner.queue + tuple(self.scope.ended(owner.handed, owner.handed + 1))
            yield world._replace(owners=put(world.owners, i, owner._replace(handed=owner.handed + 1, queue=queue)))

    # An owner.

    def _goes_on(self, world: World, i: int) -> Iterator[World]:
        """What an owner does next, now that nothing is awaited. Raises WrongStep."""
        raise NotImplementedError

    def _next_owner(self, world: World) -> World:
        scope = self.scope
        owner = Owner(
            len(world.owners) + 1, "fence" if self.rules.fence_first else "read", 0, ("",) * scope.shards, self.nothing,
            self.none_awaited, (), frozenset(), limit=world.committed, handed=world.committed,
        )  # fmt: skip
        return world._replace(owners=(*world.owners, owner))

    def _cuts(self, world: World, i: int) -> Iterator[World]:
        """A batch of rows that wait: reads for it."""
        owner = world.owners[i]
        sizes = {len(owner.queue)} | ({1} if self.scope.one_by_one else set())
        for size in sorted(sizes) if owner.queue else ():
            taken = owner.queue[:size]
            old = self._bases(world, owner, taken)
            if old is None:
                continue
            changes, known, stored = [], [], list(owner.stored)
            for ended, (base, read) in zip(taken, old, strict=True):
                new = self.scope.value(ended)
                changes.append(Change(ended.row, base, new))
                known.append(Change(ended.row, 0 if read and not self.rules.base_first else base, new))
                stored[self.scope.place(ended.row)] = new
            number = max(owner.n, self._number(owner.term, 0)) + 1 if self.rules.numbers_by_term else owner.n + 1
            parity = self._parity(world, owner, changes)
            if parity is None:
                continue
            record = Record(number, owner.n, tuple(known), tuple(stored))
            cut = owner._replace(phase="cut", queue=owner.queue[size:], taken=taken, batch=record, parity=parity)
            yield world._replace(owners=put(world.owners, i, cut))

    def _bases(self, world: World, owner: Owner, taken: tuple[Ended, ...]) -> list[tuple[int, bool]] | None:
        """Of each row its base, and whether it is read only now; None where a shard refuses."""
        found = []
        for ended in taken:
            if owner.term == 1:
                found.append((owner.stored[self.scope.place(ended.row)], False))
            elif ended.row not in owner.written:
                found.append((0, False))
            else:
                value = self.read(world, owner, ended.row)
                if value is None:
                    return None
                found.append((value, True))
        return found

    def read(self, world: World, owner: Owner, row: Row) -> int | None:
        """A row as an owner reads it, decoded where its shard is lost; None if a shard refuses."""
        g, m = row
        geometry = self.scope.geometry
        home = geometry.places_of(g)[m]
        wanted = [home] if owner.views[home] == OK else [s for s in geometry.places_of(g) if owner.views[s] == OK]
        if not all(self.accepts(world, owner, shard) for shard in wanted):
            return None
        if wanted == [home]:
            return world.shards[home].contents.cells[g]
        readable = tuple(
            shard.contents.cells if view == OK else None for shard, view in zip(world.shards, owner.views, strict=True)
        )
        return geometry.decode(g, readable)[m]

    def _parity(self, world: World, owner: Owner, changes: list[Change]) -> tuple[SomeCells, ...] | None:
        """The new parity rows, by shard; None where a shard refuses to be read."""
        geometry, k = self.scope.geometry, self.scope.k
        found = []
        for shard, places in enumerate(geometry.places):
            cells = []
            for stripe in sorted({change.row[0] for change in changes}):
                place = places[stripe]
                if place is None or place < k or owner.views[shard] != OK:
                    continue
                cell = 0
                if any((stripe, m) in owner.written for m in range(k)):
                    if not self.accepts(world, owner, shard):
                        return None
                    cell = world.shards[shard].contents.cells[stripe]
                for change in changes:
                    if change.row[0] == stripe:
                        cell ^= times(geometry.code.generator(place)[change.row[1]], change.old ^ change.new)
                cells.append((stripe, cell))
            found.append(tuple(cells))
        return tuple(found)

    def _held(self, world: World, owner: Owner, record: Record) -> tuple[Record | None, ...]:
        """The logs with a record."""
        return put(world.logs, owner.term - 1 if self.rules.log_per_term else record.number % 2, record)

    def _holds(self, world: World, i: int) -> World:
        owner = world.owners[i]
        assert owner.batch is not None
        logs = self._held(world, owner, owner.batch)
        return world._replace(logs=logs, owners=put(world.owners, i, owner._replace(phase="held")))

    def _sends_parity(self, world: World, i: int) -> World:
        owner = world.owners[i]
        assert owner.batch is not None
        marker = Marker(owner.batch.number, owner.batch.number - 1)
        commands: list[Command | None] = [Command(cells, marker) for cells in owner.parity]
        return self._send(world, i, owner._replace(phase="parity", parity=()), commands)

    def _sends_data(self, world: World, i: int) -> World:
        owner = world.owners[i]
        assert owner.batch is not None
        written = owner.written | {ended.row for ended in owner.taken}
        return self._send(world, i, owner._replace(phase="data", written=written), self._data(owner.batch))

    def _data(self, record: Record) -> list[Command | None]:
        places = self.scope.geometry.places
        marker = Marker(record.number, record.number)
        return [
            Command(tuple((c.row[0], c.new) for c in record.changes if of_shard[c.row[0]] == c.row[1]), marker)
            for of_shard in places
        ]

    def _released(self, world: World, i: int) -> World:
        """All shards that count have the batch."""
        owner = world.owners[i]
        assert owner.batch is not None
        number = owner.batch.number
        for later in world.owners[i + 1 :]:
            if later.record is not None and later.record.number < number and later.phase not in ("fence", "read"):
                raise WrongStep("a batch counts as stored of which the next owner knows nothing")
        owner = owner._replace(phase="idle", n=number, stored=owner.batch.after, batch=None, taken=())
        return world._replace(owners=put(world.owners, i, owner))

    def _rebuilds(self, world: World, i: int) -> Iterator[World]:
        """A shard that was lost is there: fenced, emptied and filled again."""
        owner = world.owners[i]
        if not self.scope.rebuilds:
            return
        for shard, view in enumerate(owner.views):
            if view != LOST or (world.shards[shard].term > owner.term and self.rules.fence):
                continue
            others = [s for s, other in enumerate(owner.views) if other == OK]
            if not all(self.accepts(world, owner, other) for other in others):
                continue
            world = self._fenced(world, i, shard)
            owner = world.owners[i]
            marker = Marker(owner.n, owner.n, rebuilding=True)
            emptied = Command(tuple((g, 0) for g in range(self.scope.stripes)), marker)
            shards = put(world.shards, shard, world.shards[shard].written(emptied))
            readable = tuple(s.contents.cells if v == OK else None for s, v in zip(world.shards, owner.views, strict=True))
            rows = [row for g in range(self.scope.stripes) for row in self.scope.geometry.decode(g, readable)]
            cells = self.scope.cells(shard, tuple(rows))
            commands: list[Command | None] = list(self.nothing)
            commands[shard] = Command(tuple(enumerate(cells)), marker)
            out = owner._replace(phase="rebuild", views=put(owner.views, shard, REBUILDING), out=tuple(commands))
            awaited = put(self.none_awaited, shard, True)
            yield world._replace(shards=shards, owners=put(world.owners, i, out._replace(awaited=awaited)))

    def _rebuilt(self, world: World, i: int) -> World | None:
        """The chunk is there: the marker says so; then the shard is whole."""
        owner = world.owners[i]
        if REBUILDING not in owner.views:
            return world._replace(owners=put(world.owners, i, owner._replace(phase="idle")))
        shard = owner.views.index(REBUILDING)
        if world.shards[shard].contents.marker == Marker(owner.n, owner.n):
            owner = owner._replace(phase="idle", views=put(owner.views, shard, OK))
            return world._replace(owners=put(world.owners, i, owner))
        if not self.accepts(world, owner, shard):
            return None
        done = Command((), Marker(owner.n, owner.n))
        owner = owner._replace(out=put(self.nothing, shard, done), awaited=put(self.none_awaited, shard, True))
        return world._replace(owners=put(world.owners, i, owner))
