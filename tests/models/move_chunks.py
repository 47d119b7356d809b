"""A chunk of a move, as the owner of a lane in `move_model` does it: read, copy, delete."""

from __future__ import annotations

from collections.abc import Iterator

from move_model import Command, Contents, Migrated, Owner, SomeCells, World
from move_rounds import JOINING, NONE, Commands, Rounds
from protocol_model import OK, Marker


class Chunks(Rounds):
    """`Rounds` with chunks between batches."""

    def _idle(self, world: World, i: int) -> Iterator[World]:
        """What an owner may do between its batches."""
        owner = world.owners[i]
        if owner.batch < len(self.scope.batches):
            yield self._holds(world, i)
        for upto in self._chunks(world, owner):
            yield self._reads_chunk(world, i, upto)
        yield from self._joins(world, i)
        yield from self._agreed(world, i)
        yield from self._rebuilds(world, i)

    def _chunks(self, world: World, owner: Owner) -> list[int]:
        """Up to where the next chunk may go."""
        whole = all(view in (OK, NONE) for view in owner.views)
        if JOINING in owner.views or not (whole or not self.rules.whole):
            return []
        end = (owner.told if self.rules.told_in_term else world.announced) * self.scope.stripes
        return [owner.at + stripes for stripes in self.scope.chunks if owner.at + stripes <= end]

    def read_too_early(self, following: World, world: World, i: int) -> Iterator[World]:
        """A chunk that is read while the data of a batch is under way."""
        owner = following.owners[i]
        for upto in self._chunks(world, owner):
            copies, _ = self._read(world, owner._replace(batch=0), upto)
            yield self._with(following, i, owner._replace(chunk=(owner.at, upto), copies=copies))

    def _read(self, world: World, owner: Owner, upto: int) -> tuple[tuple[SomeCells, ...], set[int]]:
        """By shard, what comes to it, as it is where it was; the shards that should have it and do not."""
        scope = self.scope
        copies, lacking = [], set()
        for shard in range(scope.shards):
            cells = []
            for stripe in scope.moving(shard, owner.at, upto)[0]:
                place = scope.place(shard, stripe, upto)
                source = next(s for s in range(scope.shards) if scope.place(s, stripe, owner.at) == place)
                contents = world.shards[source].contents
                known = scope.cells(source, owner.batch, owner.batch, owner.at)[stripe]
                if owner.views[source] != OK:
                    cells.append((stripe, known))  # decoded
                elif contents is None or (known and not contents.cells[stripe]):
                    lacking.add(source)
                else:
                    cells.append((stripe, contents.cells[stripe]))
            copies.append(tuple((stripe, cell) for stripe, cell in cells if cell))
        return tuple(copies), lacking

    def _reads_chunk(self, world: World, i: int, upto: int) -> World:
        """Read it, or give it up without a trace."""
        owner = world.owners[i]
        copies, lacking = self._read(world, owner, upto)
        for shard in lacking:
            world = self._lost(world, i, shard)
        if lacking:
            return world
        return self._with(world, i, owner._replace(phase="copy", chunk=(owner.at, upto), copies=copies))

    def _kept(self, world: World, owner: Owner) -> tuple[int, ...]:
        """By shard, how many rows of the chunk stay where they were, as all rows leave that shard."""
        scope, b = self.scope, owner.batch
        assert owner.chunk is not None
        start, upto = owner.chunk
        keeping = scope.keeping(world.current, owner.told)
        return tuple(
            sum(scope.cells(s, b, b, start)[g] != 0 for g in scope.moving(s, start, upto)[1]) if s in keeping else 0
            for s in range(scope.shards)
        )

    def _moves(self, world: World, owner: Owner, copied: bool) -> tuple[Commands, tuple[Migrated | None, ...]]:
        """By shard, the command that copies, or that deletes; and what the shards then say."""
        scope, rules, b = self.scope, self.rules, owner.batch
        assert owner.chunk is not None
        start, upto = owner.chunk
        targets, kept = tuple(shard for shard, copies in enumerate(owner.copies) if copies), self._kept(world, owner)
        commands: list[tuple[Command, ...]] = []
        says: list[Migrated | None] = []
        for shard, copies in enumerate(owner.copies):
            leaving = scope.moving(shard, start, upto)[1]
            cells, alone = scope.cells(shard, b, b, start), rules.deleted_alone
            told = owner.views[shard] == OK and (not copied or bool(copies))
            if not told:
                commands.append(())
                says.append(owner.migrated[shard])
                continue
            if not copied:
                here = dict(enumerate(cells)) | dict(copies)
                cells = tuple(here.values())
                changed = () if kept[shard] else tuple((g, 0) for g in leaving if cells[g])
                rows = sum(cell != 0 for cell in cells) - len(changed)
            else:
                changed, rows, alone = copies, sum(cell != 0 for cell in cells) + len(copies), rules.copied_alone
            rows += owner.leftover[shard]
            migrated, marker = Migrated(start, upto, not copied, owner.n, rows, owner.term, targets), Marker(owner.n, owner.n)
            command = Command(changed, marker if rules.marked else None, migrated, Contents(cells, marker, owner.migrated[shard]))
            says.append(migrated)
            commands.append(self._parts(command, alone))
        return commands, tuple(says)

    def _parts(self, command: Command, alone: str) -> tuple[Command, ...]:
        """A command, or two."""
        if not alone or not command.cells:
            return (command,)
        migrated, rows = command._replace(cells=(), before=None), Command(command.cells)
        return (migrated, rows) if alone == "migrated" else (rows, migrated)

    def _copies(self, world: World, i: int) -> World:
        owner = world.owners[i]
        copies, migrated = self._moves(world, owner, copied=True)
        if self.rules.copies_awaited:
            return self._send(world, i, owner._replace(phase="copied", migrated=migrated), copies)
        deletions, migrated = self._moves(world, owner._replace(migrated=migrated), copied=False)
        both = [(*one, *other) for one, other in zip(copies, deletions, strict=True)]
        return self._send(world, i, owner._replace(phase="delete", migrated=migrated), both)

    def _deletes(self, world: World, i: int) -> World:
        owner = world.owners[i]
        deletions, migrated = self._moves(world, owner, copied=False)
        world = self._send(world, i, owner._replace(phase="delete", migrated=migrated), deletions)
        if self.rules.done_awaited:
            return world
        return self._migrated(self._with(world, i, world.owners[i]._replace(awaited=self.none_awaited)), i)

    def _migrated(self, world: World, i: int) -> World:
        owner = world.owners[i]
        assert owner.chunk is not None
        kept = self._kept(world, owner)
        leftover = tuple(
            before + kept[s] if owner.views[s] == OK and self.rules.leftover else 0 for s, before in enumerate(owner.leftover)
        )
        return self._with(world, i, owner._replace(phase="idle", at=owner.chunk[1], chunk=None, copies=(), leftover=leftover))
