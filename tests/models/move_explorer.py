"""Every world of `move_model` that can be reached, and in each a further owner together with every loss.

In each world the owner may die there and then: commands under way are applied or not (each mixture is a world of its own). With it go all sets
of shards that may be lost, at most R with those that are lost already, each of them out of reach, empty, or back with any earlier contents. A case
is *wrong* if the next owner

- trusts a shard that then has a row or a parity row which is not what the log and the cursor say,
- or does not trust one that was neither lost nor given up, or fewer than all but R;

a world, if an owner relies on a shard that does not hold what it takes it to hold; a step, if a new owner, dying or followed by another, finds fewer
than all but R shards that it can trust. Without parity the same, no shard being lost; besides, where one is, none may be trusted that is wrong.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product

from exploration import loss_sets, reached
from move_judge import Outcome
from move_model import Contents, Record, Rules, Scope, World
from move_owner import Model
from protocol_model import OK, Marker

Found = tuple[Contents | None, ...]  # by shard; None: out of reach


@dataclass(slots=True)
class Findings:
    """What was explored. worlds: distinct; cases: worlds x losses; wrong: cases; wrong_worlds, wrong_steps; unnoticed: worlds in which an owner
    takes a shard for whole that was emptied and written to since.

    finished: worlds in which all rows have migrated, and all batches are stored; halfway: in which some shards say that a chunk is done, and others
    do not; undone: in which a new owner rolled one back; restored: finished after a loss, with all shards OK again.
    """

    worlds: int = 0
    cases: int = 0
    wrong: int = 0
    wrong_worlds: int = 0
    wrong_steps: int = 0
    unnoticed: int = 0
    finished: int = 0
    halfway: int = 0
    undone: int = 0
    restored: int = 0

    @property
    def found(self) -> int:
        """How many wrong states there are."""
        return self.wrong + self.wrong_worlds + self.wrong_steps + self.unnoticed

    def note(self, model: Model, world: World) -> None:
        """Count a world."""
        scope, owner = model.scope, world.owners[-1]
        self.worlds += 1
        says = [
            shard.contents.migrated
            for shard in world.shards
            if shard.contents is not None and shard.contents.migrated is not None
        ]
        self.halfway += owner.phase == "delete" and len({migrated.done and migrated.upto for migrated in says}) > 1
        self.undone += (
            any(migrated.start == migrated.upto and migrated.term > 1 for migrated in says) and owner.phase == "resolve"
        )
        if (
            owner.phase == "idle"
            and owner.batch == len(scope.batches)
            and owner.at == (len(scope.placements) - 1) * scope.stripes
        ):
            self.finished += 1
            self.restored += world.kills < scope.kills and not owner.lost
        wrong = [shard for shard in relied_on(model, world) if not is_right(model, world, shard)]
        self.wrong_worlds += any(not world.shards[shard].wiped for shard in wrong)
        self.unnoticed += any(world.shards[shard].wiped == "covered" for shard in wrong)


def relied_on(model: Model, world: World) -> list[int]:
    """The shards on which the last owner relies, while nothing is under way."""
    owner = world.owners[-1]
    if owner.phase != "idle":
        return []
    return [s for s, view in enumerate(owner.views) if view == OK and world.shards[s].contents is not None and not owner.out[s]]


def is_right(model: Model, world: World, shard: int) -> bool:
    """Whether a shard holds, and says, what the last owner takes it to."""
    owner, contents = world.owners[-1], world.shards[shard].contents
    assert contents is not None
    keeps = shard in model.scope.keeping(world.current, world.announced)
    there = model.scope.as_it_should(shard, contents.cells, owner.batch, owner.at, keeps)
    return there and contents.marker == Marker(owner.n, owner.n) and contents.at.upto == owner.at


@dataclass
class NextOwner:
    """What a further owner makes of a world."""

    model: Model
    _outcomes: dict[tuple[Found, Record, tuple[int, int]], tuple[Outcome, set[int]]] = field(default_factory=dict)
    _counted: dict[object, tuple[int, int]] = field(default_factory=dict)

    def cases(self, world: World) -> tuple[int, int]:
        """Cases and wrong cases."""
        record, lost = self.model.valid(world), frozenset(self.model.unprotecting(world))
        servers = tuple((shard.contents, shard.past) for shard in world.shards)
        given_up = frozenset[int]().union(*(owner.lost for owner in world.owners))
        key = servers, record, lost, given_up, world.current, world.announced
        if key not in self._counted:
            self._counted[key] = self._count(world, record, lost, given_up)
        return self._counted[key]

    def _count(self, world: World, record: Record, lost: frozenset[int], given_up: frozenset[int]) -> tuple[int, int]:
        scope, versions = self.model.scope, (world.current, world.announced)
        asked = scope.asked(*versions)
        cases = wrong = 0
        for more in loss_sets(asked, lost & asked, scope.r + scope.uncorrectable):
            gone = (lost & asked) | set(more)
            bad = {Outcome.WRONG} if len(gone) > scope.r else {Outcome.WRONG, Outcome.TOO_FEW}
            options = [
                (None,) if s not in asked else (None, self.model.empty, *shard.history) if s in gone else (shard.contents,)
                for s, shard in enumerate(world.shards)
            ]
            for found in product(*options):
                cases += 1
                outcome, untrusted = self._outcome(found, record, versions)
                wrong += outcome in bad or (len(gone) <= scope.r and not untrusted <= gone | given_up)
        return cases, wrong

    def _outcome(self, found: Found, record: Record, versions: tuple[int, int]) -> tuple[Outcome, set[int]]:
        key = found, record, versions
        if key not in self._outcomes:
            self._outcomes[key] = self.model.judge.taken_over(*key)
        return self._outcomes[key]


def explore(scope: Scope, rules: Rules | None = None, first_wrong: bool = False) -> Findings:
    """Visit everything; first_wrong: up to the first world with something wrong."""
    model = Model(scope, rules or Rules())
    next_owner = NextOwner(model)
    findings = Findings()
    for world in reached(model.start(), model.steps):
        findings.note(model, world)
        cases, wrong = next_owner.cases(world)
        findings.cases += cases
        findings.wrong += wrong
        if first_wrong and (findings.found or model.wrong):
            break
    findings.wrong_steps = len(model.wrong)
    return findings
