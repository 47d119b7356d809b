"""What can happen next in a world of `move_model`, but for moves and takeovers: shards, batches, rebuilds, and what owners are told."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from move_judge import Judge
from move_model import NUMBERS_PER_TERM, Command, Contents, Migrated, Owner, Record, Rules, Scope, Shard, World
from protocol_model import LOST, NO_MARKER, OK, REBUILDING, Marker, put

NONE, JOINING = "none", "joining"  # views of a shard
Commands = Sequence[Sequence[Command]]  # by shard


class Rounds:
    """What shards do with commands, and an owner in its rounds; `Model` adds chunks and the takeover."""

    def __init__(self, scope: Scope, rules: Rules) -> None:
        self.scope = scope
        self.rules = rules
        self.judge = Judge(scope, rules)
        self.empty = Contents((0,) * scope.stripes, NO_MARKER)
        self.nothing: tuple[tuple[Command, ...], ...] = ((),) * scope.shards
        self.none_awaited = (0,) * scope.shards
        self.wrong: list[str] = []

    def start(self) -> World:
        """The first owner, before the first move."""
        scope, first = self.scope, NUMBERS_PER_TERM
        there = scope.of_version[0]
        shards = tuple(
            Shard(Contents(scope.cells(s, 0, 0, 0), Marker(first, first)), 1) if s in there else Shard(self.empty, 0)
            for s in range(scope.shards)
        )
        views = tuple(OK if s in there else NONE for s in range(scope.shards))
        record = Record(first, 0, 0, (), scope.held(0, 0))
        owner = Owner(
            1, "idle", first, 0, 0, views, (None,) * scope.shards, self.nothing, self.none_awaited, leftover=self.none_awaited
        )
        return World(shards, (record, *(None,) * scope.owners), (owner,), 0, 0, 0, scope.kills, scope.cuts, scope.wipes)

    def valid(self, world: World) -> Record:
        """The record that a new owner goes by."""
        return [record for record in world.logs if record is not None][-1]

    def steps(self, world: World) -> Iterator[World]:
        """All worlds that can come next; what goes wrong on the way to another is put into `wrong`."""
        for i, owner in enumerate(world.owners):
            for shard in range(self.scope.shards):
                if owner.out[shard] and world.shards[shard].contents is not None:
                    yield self._applied(world, i, shard)
                if owner.phase != "dead":
                    yield from self._noticed(world, i, shard)
                    yield from self._given_up(world, i, shard)
            if owner.phase != "dead" and not any(owner.awaited):
                yield from self._goes_on(world, i)
        for shard in range(self.scope.shards):
            yield from self._failed(world, shard)
        if len(world.owners) < self.scope.owners:
            yield self._next_owner(world)

    # The shards.

    def unprotecting(self, world: World) -> set[int]:
        """The shards that count as lost, for any owner that may be gone by."""
        lost = {s for s, shard in enumerate(world.shards) if shard.contents is None or shard.wiped}
        return lost.union(*(owner.lost for owner in world.owners[world.in_charge :]))

    def _may_lose(self, world: World, shard: int, i: int) -> bool:
        lost = world.owners[i].lost if i < world.in_charge else self.unprotecting(world)
        return len(lost | {shard}) <= self.scope.r

    def _applied(self, world: World, i: int, shard: int) -> World:
        """A shard executes an owner's next command; what it answers may show that it lost rows."""
        owner, server = world.owners[i], world.shards[shard]
        command, contents = owner.out[shard][0], server.contents
        assert contents is not None
        owner = owner._replace(
            out=put(owner.out, shard, owner.out[shard][1:]), awaited=put(owner.awaited, shard, max(owner.awaited[shard] - 1, 0))
        )
        world = self._with(world._replace(shards=put(world.shards, shard, server.written(command))), i, owner)
        before = command.before
        surprising = before is not None and contents.answer(command) != before.answer(command)
        if surprising and self.rules.answers_counted and owner.views[shard] == OK:
            return self._lost(world, i, shard)
        return world

    def _failed(self, world: World, shard: int) -> Iterator[World]:
        """A shard dies, or loses rows and stays connected."""
        server = world.shards[shard]
        if server.contents is None or server.contents == self.empty or not self._may_lose(world, shard, world.in_charge):
            return
        if world.kills:
            dead = Shard(None, server.term, server.history)
            owners = tuple(owner._replace(out=put(owner.out, shard, ())) for owner in world.owners)
            yield world._replace(shards=put(world.shards, shard, dead), owners=owners, kills=world.kills - 1)
        if world.wipes:
            cells, left = server.contents.cells, [("all", self.empty)]
            left += [("a row", server.contents._replace(cells=put(cells, g, 0))) for g, cell in enumerate(cells) if cell]
            for wiped, contents in left:
                after = Shard(contents, server.term, server.history, wiped)
                yield world._replace(shards=put(world.shards, shard, after), wipes=world.wipes - 1)

    def _noticed(self, world: World, i: int, shard: int) -> Iterator[World]:
        """An owner notices that a shard is dead, and goes on without it, or finds it to be there again as it was."""
        owner, server = world.owners[i], world.shards[shard]
        if server.contents is not None or owner.views[shard] not in (OK, REBUILDING):
            return
        if owner.awaited[shard] or owner.phase == "idle":
            yield self._lost(world, i, shard)
        if (
            not owner.awaited[shard]
            or owner.phase not in ("parity", "data")
            or owner.views[shard] != OK
            or server.term > owner.term
        ):
            return
        (sent,) = self._batch(owner, owner.phase)[shard]
        for contents in server.past:
            if self._as_it_was(contents, sent, owner.leftover[shard]):
                again = Shard(contents, owner.term, server.past)
                out = put(owner.out, shard, (sent._replace(before=None),))
                resent = owner._replace(out=out, awaited=put(owner.awaited, shard, 1))
                yield self._with(world._replace(shards=put(world.shards, shard, again)), i, resent)

    def _as_it_was(self, contents: Contents, sent: Command, leftover: int) -> bool:
        """Whether a shard lacks nothing but a command of a batch that was under way. leftover: rows that it has besides."""
        assert sent.before is not None
        if self.rules.moved_compared and contents.migrated != sent.before.migrated:
            return False
        before = sent.before if contents.marker == sent.before.marker else sent.before.after(sent)
        return contents.marker == before.marker and contents.rows == before.rows + leftover

    def _given_up(self, world: World, i: int, shard: int) -> Iterator[World]:
        """An owner waits in vain for a shard, and goes on without it; what it sent may still arrive."""
        owner = world.owners[i]
        if world.cuts and owner.awaited[shard] and owner.views[shard] in (OK, REBUILDING) and self._may_lose(world, shard, i):
            yield self._lost(world._replace(cuts=world.cuts - 1), i, shard)

    def _lost(self, world: World, i: int, shard: int) -> World:
        owner = world.owners[i]
        views, awaited, migrated = put(owner.views, shard, LOST), put(owner.awaited, shard, 0), put(owner.migrated, shard, None)
        leftover = put(owner.leftover, shard, 0)
        return self._with(world, i, owner._replace(views=views, awaited=awaited, migrated=migrated, leftover=leftover))

    def _fenced(self, world: World, i: int, shard: int) -> World:
        """A shard fenced: what was sent before, and what earlier owners send later, is refused."""
        owners = tuple(other._replace(out=put(other.out, shard, ())) for other in world.owners)
        server = world.shards[shard]._replace(term=world.owners[i].term)
        return world._replace(shards=put(world.shards, shard, server), owners=owners)

    def _send(self, world: World, i: int, owner: Owner, commands: Commands) -> World:
        """Send to the shards that are OK or being rebuilt; what a shard refuses is awaited for ever."""
        sent = [tuple(of) if view in (OK, REBUILDING) else () for of, view in zip(commands, owner.views, strict=True)]
        out = tuple(
            (*before, *of) if server.contents is not None and server.term <= owner.term else before
            for before, of, server in zip(owner.out, sent, world.shards, strict=True)
        )
        return self._with(world, i, owner._replace(out=out, awaited=tuple(map(len, sent))))

    def _with(self, world: World, i: int, owner: Owner) -> World:
        return world._replace(owners=put(world.owners, i, owner))

    # An owner.

    def _goes_on(self, world: World, i: int) -> Iterator[World]:
        """What an owner does next, now that nothing is awaited."""
        raise NotImplementedError

    def _next_owner(self, world: World) -> World:
        scope, rules = self.scope, self.rules
        asked = scope.asked(world.current, world.announced)
        fenced = {"old": scope.of_version[world.current], "new": scope.of_version[world.announced]}.get(rules.fenced, asked)
        views = tuple("" if s in fenced else "fenced" if s in asked else NONE for s in range(scope.shards))
        term = len(world.owners) + 1
        nothing = (None,) * scope.shards
        owner = Owner(term, "fence", 0, 0, 0, views, nothing, self.nothing, self.none_awaited, leftover=self.none_awaited)
        return world._replace(owners=(*world.owners, owner))

    def _agreed(self, world: World, i: int) -> Iterator[World]:
        """The last owner is through: the move is over, or another is announced."""
        owner, scope = world.owners[i], self.scope
        if i < len(world.owners) - 1 and owner.told < world.announced and not self.rules.told_in_term:
            yield self._told(world, i, world.announced)
        if i < len(world.owners) - 1 or owner.told != world.announced or owner.at != world.announced * scope.stripes:
            return
        if world.current < world.announced:
            views = tuple(view if s in scope.of_version[owner.told] else NONE for s, view in enumerate(owner.views))
            yield self._with(world._replace(current=owner.told), i, owner._replace(views=views))
        elif world.announced + 1 < len(scope.placements):
            announced = world.announced + 1
            yield self._told(world._replace(announced=announced), i, announced)

    def _told(self, world: World, i: int, version: int) -> World:
        """An owner hears of a further placement."""
        owner, asked = world.owners[i], self.scope.of_version[version]
        views = tuple(JOINING if view == NONE and s in asked else view for s, view in enumerate(owner.views))
        return self._with(world, i, owner._replace(views=views, told=version))

    def _joins(self, world: World, i: int) -> Iterator[World]:
        """New shards are fenced, and get a marker."""
        owner = world.owners[i]
        joining = [s for s, view in enumerate(owner.views) if view == JOINING]
        if not joining or any(world.shards[s].term > owner.term for s in joining):
            return
        for shard in joining:
            world = self._fenced(world, i, shard)
        command = self.judge.joined(owner.n, owner.at, owner.term)
        views = tuple(OK if view == JOINING else view for view in owner.views)
        migrated = tuple(command.migrated if s in joining else one for s, one in enumerate(owner.migrated))
        joins = owner._replace(phase="join", views=views, migrated=migrated, out=world.owners[i].out)
        yield self._send(world, i, joins, [(command,) if s in joining else () for s in range(self.scope.shards)])

    # A batch.

    def _holds(self, world: World, i: int) -> World:
        owner, scope = world.owners[i], self.scope
        batch = owner.batch + 1
        record = Record(owner.n + 1, owner.n, batch, scope.batches[owner.batch], self._held(owner, batch))
        world = world._replace(logs=put(world.logs, owner.term - 1, record))
        return self._with(world, i, owner._replace(phase="held", n=record.number, batch=batch))

    def _held(self, owner: Owner, batch: int) -> tuple[tuple[int, int, int], ...]:
        """`Scope.held`, with what shards keep."""
        arithmetic = self.scope.held(batch, owner.at)
        return tuple((a + more, b + more, c + more) for (a, b, c), more in zip(arithmetic, owner.leftover, strict=True))

    def _sends(self, world: World, i: int, phase: str) -> World:
        owner = world.owners[i]
        return self._send(world, i, owner._replace(phase=phase), self._batch(owner, phase))

    def _batch(self, owner: Owner, phase: str) -> Commands:
        """The commands of a batch's parity or data."""
        scope, n, b, ahead = self.scope, owner.n, owner.batch, int(phase == "parity")
        commands = []
        for shard, view in enumerate(owner.views):
            marker = Marker(n, n - ahead, view == REBUILDING)
            here = scope.cells(shard, b - ahead, b - 1, owner.at)
            after = scope.cells(shard, b, b - ahead, owner.at)
            upto = owner.rebuilt if view == REBUILDING else scope.stripes
            cells = tuple((g, cell) for g, cell in enumerate(after[:upto]) if cell != here[g])
            before = None if view == REBUILDING else Contents(here, Marker(n - ahead, n - 1), owner.migrated[shard])
            commands.append((Command(cells, marker, None, before),))
        return commands

    # A rebuild.

    def _rebuilds(self, world: World, i: int) -> Iterator[World]:
        """A shard that was lost is there: fenced and emptied; or one that is being rebuilt gets its rows of the next stripe."""
        owner, scope = world.owners[i], self.scope
        for shard, view in enumerate(owner.views):
            server = world.shards[shard]
            if view == LOST and scope.rebuilds and server.term <= owner.term and REBUILDING not in owner.views:
                fenced = self._fenced(world, i, shard)
                emptied = Contents(self.empty.cells, Marker(owner.n, owner.n, rebuilding=True))
                shards = put(fenced.shards, shard, Shard(emptied, owner.term, server.history))
                begun = fenced.owners[i]._replace(views=put(owner.views, shard, REBUILDING), rebuilt=0)
                yield self._with(fenced._replace(shards=shards), i, begun)
            if view == REBUILDING:
                cells = scope.cells(shard, owner.batch, owner.batch, owner.at)
                rows = tuple((g, cells[g]) for g in (owner.rebuilt,) if cells[g])
                command = Command(rows, Marker(owner.n, owner.n, rebuilding=True))
                yield self._send(world, i, owner._replace(phase="rebuild"), put(self.nothing, shard, (command,)))

    def _finishes(self, world: World, i: int) -> World:
        """Another stripe is rebuilt; after the last one the marker says that the shard is whole."""
        owner, scope = world.owners[i], self.scope
        if REBUILDING not in owner.views:
            return self._with(world, i, owner._replace(phase="idle", rebuilt=0))
        if owner.rebuilt + 1 < scope.stripes:
            return self._with(world, i, owner._replace(phase="idle", rebuilt=owner.rebuilt + 1))
        shard = owner.views.index(REBUILDING)
        rows = sum(cell != 0 for cell in scope.cells(shard, owner.batch, owner.batch, owner.at))
        migrated = Migrated(owner.at, owner.at, True, owner.n, rows, owner.term) if self.rules.rebuilt_moved else None
        owner = owner._replace(phase="finish", migrated=put(owner.migrated, shard, migrated))
        return self._send(world, i, owner, put(self.nothing, shard, (Command((), Marker(owner.n, owner.n), migrated),)))

    def _rebuilt(self, world: World, i: int) -> World:
        owner = world.owners[i]
        views = tuple(OK if view == REBUILDING else view for view in owner.views)
        return self._with(world, i, owner._replace(phase="idle", views=views, rebuilt=0))
