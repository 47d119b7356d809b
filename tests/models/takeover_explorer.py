"""Every world of `takeover_model` that can be reached, and in each a further owner together with every loss.

In each world the owner may die there and then: commands under way are applied or not (each mixture is a world of its own). With it go all sets
of shards that may be lost, at most R with those that are lost already, each of them empty or back with any earlier contents. A case is *wrong* if
the next owner, which fences, reads the log, and may die after any of its commands and be followed by another,

- trusts a shard that then has a row or a parity row which is not what the log says,
- or trusts fewer than all but R shards;

a world, if then a row of the store is neither as it was written back last nor, where it is owed, as before; a step, if an owner goes on from
something that is not so.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from exploration import RIGHT, UNTRUSTED, WRONG, loss_sets, reached, wrong_cases
from protocol_model import OK
from takeover_model import Contents, Record, Rules, Scope, Shard, World
from takeover_owner import Model, trusts
from takeover_unprotected import NextUnprotectedOwner, UnprotectedModel


@dataclass(slots=True)
class Findings:
    """What was explored. worlds: distinct; cases: worlds x losses; wrong: cases; wrong_worlds, wrong_steps; finished: worlds in which the last
    owner has stored everything; overlapping: in which an earlier owner goes on beside one that trains."""

    worlds: int = 0
    cases: int = 0
    wrong: int = 0
    wrong_worlds: int = 0
    wrong_steps: int = 0
    finished: int = 0
    overlapping: int = 0
    kinds: dict[str, int] = field(default_factory=dict)

    @property
    def found(self) -> int:
        """How many wrong states there are."""
        return self.wrong + self.wrong_worlds + self.wrong_steps

    def note(self, kind: str) -> None:
        """Count what is wrong, by what it is."""
        self.kinds[kind] = self.kinds.get(kind, 0) + 1


@dataclass
class NextOwner:
    """What a further owner makes of a world."""

    model: Model
    _tallies: dict[tuple[tuple[Contents, ...], int, Record], tuple[int, ...]] = field(default_factory=dict)
    _counted: dict[tuple[tuple[Shard, ...], Record, frozenset[int]], tuple[int, int]] = field(default_factory=dict)

    def cases(self, world: World) -> tuple[int, int]:
        """Cases and wrong cases."""
        key = world.shards, self.model.valid(world), frozenset(world.owners[world.in_charge].lost)
        if key not in self._counted:
            self._counted[key] = self._count(*key)
        return self._counted[key]

    def _count(self, servers: tuple[Shard, ...], record: Record, lost: frozenset[int]) -> tuple[int, int]:
        """Shards recover independently of each other, so cases are counted by shard."""
        r, shards = self.model.scope.r, range(self.model.scope.shards)
        as_is = [self._tally((shard.contents,), s, record) for s, shard in enumerate(servers)]
        if_lost = [self._tally((shard.contents, *shard.past), s, record, empty=True) for s, shard in enumerate(servers)]
        cases = wrong = 0
        for more in loss_sets(shards, lost, r):
            tallies = [if_lost[s] if s in lost or s in more else as_is[s] for s in shards]
            total, of_them = wrong_cases(tallies, r)
            cases += total
            wrong += of_them
        return cases, wrong

    def _tally(self, contents: tuple[Contents, ...], shard: int, record: Record, empty: bool = False) -> tuple[int, ...]:
        key = contents, shard, record
        if key not in self._tallies:
            tally = [0, int(empty), 0]
            for one in contents:
                tally[self._outcome(one, shard, record)] += 1
            self._tallies[key] = tuple(tally)
        return self._tallies[key]

    def _outcome(self, contents: Contents, shard: int, record: Record) -> int:
        if not trusts(record, contents.marker):
            return UNTRUSTED
        truth = self.model.scope.all_cells(record.after)[shard]
        if (
            self._played(contents, shard, record, False).cells != truth
            or self._played(contents, shard, record, True).cells != truth
        ):
            return WRONG
        return RIGHT

    def _played(self, contents: Contents, shard: int, record: Record, twice: bool) -> Contents:
        """A shard after a recovery, or two of which the first died in between."""
        for play in (self.model.parity_played, self.model.data_played):
            for _ in range(1 + twice):
                command = play(record, shard, contents)
                if command is not None:
                    contents = Shard(contents, 0).written(command).contents
        return contents


def rows_are_known(model: Model, world: World) -> bool:
    """Whether each row of the store, once the log is played, is what the copies take it for."""
    scope = model.scope
    after = model.valid(world).after
    told, last = world.told.boundary, world.committed
    ahead = 0 if model.rules.committed_only else 1
    for row, value in zip(scope.rows, after, strict=True):
        boundaries = scope.values[row]
        stored = max(b for b in boundaries if b <= told)
        if not any(boundaries[b] == value for b in boundaries if b == stored or told < b <= last + ahead):
            return False
    return True


def owner_reads_right(model: Model, world: World) -> bool:
    """Whether the shards on which the last owner relies hold what it takes them to hold, while nothing is under way."""
    owner = world.owners[-1]
    if owner.phase != "idle":
        return True
    truth = model.scope.all_cells(owner.stored)
    return all(
        view != OK or shard.contents.cells == cells for view, shard, cells in zip(owner.views, world.shards, truth, strict=True)
    )


def explore(scope: Scope, rules: Rules | None = None, first_wrong: bool = False) -> Findings:
    """Visit everything; first_wrong: up to the first world with something wrong."""
    model: Model
    next_owner: NextOwner | NextUnprotectedOwner
    if scope.r:
        model = Model(scope, rules or Rules())
        next_owner = NextOwner(model)
    else:
        model = UnprotectedModel(scope, rules or Rules())
        next_owner = NextUnprotectedOwner(model)
    findings = Findings()
    for world in reached(model.start(), model.steps):
        owner = world.owners[-1]
        findings.worlds += 1
        findings.overlapping += owner.trains and any(
            other.phase != "dead" and not any(other.awaited) for other in world.owners[:-1]
        )
        done = owner.phase == "idle" and owner.handed == scope.last and not owner.queue
        findings.finished += done
        cases, wrong = next_owner.cases(world)
        findings.cases += cases
        findings.wrong += wrong
        if scope.r and not rows_are_known(model, world):
            findings.wrong_worlds += 1
            findings.note("a row is not what the copies take it for")
        elif not owner_reads_right(model, world):
            findings.wrong_worlds += 1
            findings.note("an owner would read something else")
        if first_wrong and (findings.found or model.wrong):
            break
    for error in model.wrong:
        findings.wrong_steps += 1
        findings.note(error)
    return findings
