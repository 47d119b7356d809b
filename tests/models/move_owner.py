"""What can happen next in a world of `move_model`: the takeover, and what an owner does in which phase."""

from __future__ import annotations

from collections.abc import Iterator

from move_chunks import Chunks
from move_model import NUMBERS_PER_TERM, Command, Migrated, Record, World
from move_rounds import NONE
from protocol_model import LOST, OK, Marker, put


class Model(Chunks):
    """Moves under some rules in some scope."""

    def _goes_on(self, world: World, i: int) -> Iterator[World]:
        owner = world.owners[i]
        phase = owner.phase
        if phase == "idle":
            yield from self._idle(world, i)
        elif phase == "fence":
            yield from self._fences(world, i)
        elif phase == "held":
            yield self._sends(world, i, "parity")
        elif phase == "parity":
            following = self._sends(world, i, "data")
            yield following
            if not self.rules.flushed_first:
                yield from self.read_too_early(following, world, i)
        elif phase in ("data", "join", "mark"):
            yield self._with(world, i, owner._replace(phase="copy" if owner.chunk else "idle"))
        else:
            following_of = {
                "judge": self._judges, "resolve": self._stamps, "stamp": self._plays_parity, "play parity": self._plays_data,
                "play data": self._holds_empty, "hold": self._marks, "copy": self._copies, "copied": self._deletes, "delete": self._migrated,
                "rebuild": self._finishes, "finish": self._rebuilt,
            }  # fmt: skip
            yield following_of[phase](world, i)

    def _fences(self, world: World, i: int) -> Iterator[World]:
        """The next shard, which may be out of reach, or dead, or there again with what it once had."""
        owner = world.owners[i]
        shard = owner.views.index("")
        server = world.shards[shard]
        if server.contents is None:
            yield self._fence_is(world, i, shard, LOST)
            for contents in (self.empty, *server.past):
                again = server._replace(contents=contents, past=server.history)
                there = world._replace(shards=put(world.shards, shard, again))
                yield self._fence_is(self._fenced(there, i, shard), i, shard, "fenced")
        elif server.term < owner.term:
            yield self._fence_is(self._fenced(world, i, shard), i, shard, "fenced")
        if world.cuts and server.contents is not None and self._may_lose(world, shard, i):
            yield self._fence_is(world._replace(cuts=world.cuts - 1), i, shard, LOST)

    def _fence_is(self, world: World, i: int, shard: int, view: str) -> World:
        owner = world.owners[i]
        views = put(owner.views, shard, view)
        return self._with(world, i, owner._replace(views=views, phase="fence" if "" in views else "judge"))

    def _judges(self, world: World, i: int) -> World:
        """Read the log, hold a copy of its record, and finish or undo the chunk that was under way."""
        owner, scope = world.owners[i], self.scope
        record, versions = self.valid(world), (world.current, world.announced)
        asked, fenced = scope.asked(*versions), [view == "fenced" for view in owner.views]
        if sum(fenced) <= scope.r:
            # It goes on only because the others are known to be dead.
            dead = tuple(other._replace(phase="dead", awaited=self.none_awaited) for other in world.owners[:i])
            world = world._replace(owners=(*dead, *world.owners[i:]))
        found = tuple(world.shards[s].contents if fenced[s] and s in asked else None for s in range(scope.shards))
        judged = self.judge.judge(found, record, versions, owner.term)
        if judged is None or len(asked) - len(judged.commands) > scope.r:
            if i > world.in_charge:
                self.wrong.append("too few shards have what the log says")
            return self._with(world, i, owner._replace(phase="dead"))
        commands = [judged.commands.get(s) for s in range(scope.shards)]
        said = [None if one is None else one.migrated for one in found]
        leftover = self.judge.leftover(found, judged, record, versions)
        owner = owner._replace(
            phase="resolve", n=record.number, batch=record.batch, at=judged.at, record=record, told=world.announced,
            leftover=leftover,
            views=tuple(NONE if s not in asked else OK if s in judged.commands else LOST for s in range(scope.shards)),
            migrated=tuple(one if command is None else command.migrated for command, one in zip(commands, said, strict=True)),
        )  # fmt: skip
        world = world._replace(logs=put(world.logs, owner.term - 1, record), in_charge=max(world.in_charge, i))
        return self._send(world, i, owner, [() if command is None else (command,) for command in commands])

    def _stamps(self, world: World, i: int) -> World:
        """Every shard tells in this owner's name how far the lane is."""
        owner = world.owners[i]
        if not self.rules.stamped or not world.announced:
            return self._with(world, i, owner._replace(phase="stamp"))
        held = self._held(owner, owner.batch)
        migrated = tuple(Migrated(owner.at, owner.at, True, owner.n, rows, owner.term) for _, _, rows in held)
        commands = [(Command((), None, one),) for one in migrated]
        return self._send(world, i, owner._replace(phase="stamp", migrated=migrated), commands)

    def _plays_parity(self, world: World, i: int) -> World:
        return self._plays(world, i, "play parity")

    def _plays_data(self, world: World, i: int) -> World:
        return self._plays(world, i, "play data")

    def _plays(self, world: World, i: int, phase: str) -> World:
        owner = world.owners[i]
        assert owner.record is not None
        play = self.judge.parity_played if phase == "play parity" else self.judge.data_played
        commands: list[tuple[Command, ...]] = []
        for s, (shard, view) in enumerate(zip(world.shards, owner.views, strict=True)):
            lacks = view == OK and shard.contents is not None
            command = play(owner.record, s, shard.contents, owner.at) if lacks and shard.contents is not None else None
            commands.append(() if command is None else (command,))
        return self._send(world, i, owner._replace(phase=phase), commands)

    def _holds_empty(self, world: World, i: int) -> World:
        owner = world.owners[i]
        number = owner.term * NUMBERS_PER_TERM
        held = tuple((one[2],) * 3 for one in self._held(owner, owner.batch))
        record = Record(number, owner.n, owner.batch, (), held)
        world = world._replace(logs=put(world.logs, owner.term - 1, record))
        return self._with(world, i, owner._replace(phase="hold", n=number, record=None))

    def _marks(self, world: World, i: int) -> World:
        """The empty record's marker."""
        owner = world.owners[i]
        command = Command((), Marker(owner.n, owner.n))
        return self._send(world, i, owner._replace(phase="mark"), [(command,)] * self.scope.shards)
