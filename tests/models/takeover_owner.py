"""What can happen next in a world of `takeover_model`: shards apply commands, and each owner, also one that is none any more, goes on."""

from __future__ import annotations

from collections.abc import Iterator

from protocol_model import LOST, OK, Marker, put, times
from takeover_model import (
    Command,
    Contents,
    Record,
    World,
    WrongStep,
)
from takeover_rounds import Rounds


def trusts(record: Record, marker: Marker) -> bool:
    """Whether a shard with this marker has what it takes to play the record."""
    return not marker.rebuilding and {marker.p, marker.d} <= {record.number, record.before}


class Model(Rounds):
    """Takeovers under some rules in some scope."""

    def _goes_on(self, world: World, i: int) -> Iterator[World]:
        owner = world.owners[i]
        if owner.phase == "fence":
            yield from self._fences(world, i)
        elif owner.phase == "idle":
            yield from self._cuts(world, i)
            yield from self._rebuilds(world, i)
        else:
            following = {
                "read": self._reads_log, "trusted": self._copies_record, "copied": self._plays_parity,
                "play parity": self._plays_data, "play data": self._holds_empty, "hold": self._marks,
                "mark": self._looks, "look": self._looks, "cut": self._holds, "held": self._sends_parity, "parity": self._sends_data,
                "data": self._released, "rebuild": self._rebuilt,
            }  # fmt: skip
            after = following[owner.phase](world, i)
            if after is not None:
                yield after

    # A takeover.

    def _fences(self, world: World, i: int) -> Iterator[World]:
        """The next shard, which may be out of reach."""
        owner = world.owners[i]
        shard = owner.views.index("")
        last = shard == self.scope.shards - 1
        outcomes = [(OK, world.cuts)] if world.shards[shard].term < owner.term else []
        if world.cuts and len(self._out_of_reach(world, i) | {shard}) <= self.scope.r:
            outcomes.append((LOST, world.cuts - 1))
        for view, cuts in outcomes:
            views = put(owner.views, shard, "fenced" if view == OK else view)
            fences = owner._replace(views=views, phase="read" if last else "fence")
            following = world._replace(owners=put(world.owners, i, fences), cuts=cuts)
            if view == OK:
                following = self._fenced(following, i, shard)
            if last and not self.rules.fence_first:
                following = self._trusts(following, i)
            yield following

    def _reads_log(self, world: World, i: int) -> World:
        owner = world.owners[i]
        record = self.valid(world)
        world = world._replace(owners=put(world.owners, i, owner._replace(record=record, phase="fence")))
        return self._trusts(world, i) if self.rules.fence_first else world

    def _trusts(self, world: World, i: int) -> World:
        """Which shards have what it takes; the parity that they lack of the record."""
        owner, scope = world.owners[i], self.scope
        record = owner.record
        assert record is not None
        fenced = sum(view == "fenced" for view in owner.views)
        enough = {
            "more than r": fenced > scope.r, "half": 2 * scope.r < scope.shards or 2 * fenced > scope.shards, "": True
        }  # fmt: skip
        if not enough[self.rules.fenced]:
            # It goes on only because the others are known to be dead.
            dead = tuple(other._replace(phase="dead", awaited=self.none_awaited) for other in world.owners[:i])
            world = world._replace(owners=(*dead, *world.owners[i:]))
        views = tuple(
            OK if view == "fenced" and trusts(record, shard.contents.marker) else LOST
            for view, shard in zip(owner.views, world.shards, strict=True)
        )
        if views.count(LOST) > scope.r:
            if i > world.in_charge:
                raise WrongStep("too few shards have what the log says")
            return world._replace(owners=put(world.owners, i, owner._replace(phase="dead")))
        owner = owner._replace(views=views, n=record.number, stored=record.after, phase="trusted")
        return world._replace(owners=put(world.owners, i, owner))

    def _copies_record(self, world: World, i: int) -> World:
        """The record that is to be played becomes the new owner's own, whatever earlier owners still log."""
        owner = world.owners[i]
        assert owner.record is not None
        logs = self._held(world, owner, owner.record) if self.rules.record_copied else world.logs
        return world._replace(
            logs=logs, owners=put(world.owners, i, owner._replace(phase="copied")), in_charge=max(world.in_charge, i)
        )

    def _plays_parity(self, world: World, i: int) -> World:
        owner = world.owners[i]
        assert owner.record is not None
        commands = [self.parity_played(owner.record, s, shard.contents) for s, shard in enumerate(world.shards)]
        return self._send(world, i, owner._replace(phase="play parity"), commands)

    def parity_played(self, record: Record, shard: int, contents: Contents) -> Command | None:
        """What brings a shard to a record's parity; None if it is there."""
        if contents.marker.p == record.number or not (record.changes or self.rules.empty_played):
            return None
        if not record.changes:
            return Command((), Marker(record.number, record.number))
        geometry = self.scope.geometry
        cells = dict(enumerate(contents.cells))
        for (stripe, member), old, new in record.changes:
            place = geometry.places[shard][stripe]
            if place is not None and place >= self.scope.k:
                cells[stripe] ^= times(geometry.code.generator(place)[member], old ^ new)
        return Command(tuple(cells.items()), Marker(record.number, contents.marker.d))

    def data_played(self, record: Record, shard: int, contents: Contents) -> Command | None:
        """What brings a shard that has a record's parity to its data; None if it is there."""
        if contents.marker.d == record.number or not record.changes:
            return None
        return self._data(record)[shard]

    def _plays_data(self, world: World, i: int) -> World:
        owner = world.owners[i]
        assert owner.record is not None
        commands = [self.data_played(owner.record, s, shard.contents) for s, shard in enumerate(world.shards)]
        return self._send(world, i, owner._replace(phase="play data"), commands)

    def _holds_empty(self, world: World, i: int) -> World:
        owner, rules = world.owners[i], self.rules
        assert owner.record is not None
        if not rules.empty_record:
            return world._replace(owners=put(world.owners, i, owner._replace(phase="look")))
        number = self._number(owner.term, owner.n)
        record = Record(number, owner.n if rules.empty_names_before else number - 1, (), owner.stored)
        logs = self._held(world, owner, record) if rules.empty_held else world.logs
        return world._replace(logs=logs, owners=put(world.owners, i, owner._replace(phase="hold", n=number)))

    def _marks(self, world: World, i: int) -> World:
        owner = world.owners[i]
        commands: list[Command | None] = [Command((), Marker(owner.n, owner.n))] * self.scope.shards
        return self._send(world, i, owner._replace(phase="mark"), commands)

    def _looks(self, world: World, i: int) -> World | None:
        """What of owed, and of the rows that ended last, is stored: by their tags."""
        owner, rules, scope = world.owners[i], self.rules, self.scope
        told = world.told.boundary
        written = {row for row in scope.rows if any(0 < b <= told for b in scope.values[row])}
        queue = []
        for ended in scope.ended(told, owner.limit):
            before = scope.before(ended)
            if not (rules.ended_looked_at if ended.boundary == owner.limit else rules.owed_looked_at):
                queue.append(ended)
                written |= {ended.row} if before else set()
                continue
            value = self.read(world, owner, ended.row)
            if value is None:
                return None
            if value == scope.value(ended):
                written.add(ended.row)
            elif value == scope.values[ended.row][before]:
                queue.append(ended)
                written |= {ended.row} if before else set()
            else:
                raise WrongStep(f"row {ended.row} has neither of its tags")
        owner = owner._replace(phase="idle", queue=tuple(queue), written=frozenset(written))
        return world._replace(owners=put(world.owners, i, owner))
