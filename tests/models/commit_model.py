"""A model of how trainers commit a step, and of the loss of one at any moment (docs/protocol.md, Takeover), explored in full.

Each trainer owns one lane, and holds the copy of the lane before its own. It applies step after step; what it sends is received in any
order, or never. `wrong` says what is not so when a trainer dies in a world, or when none does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from protocol_model import put


@dataclass(frozen=True, slots=True)
class Rules:
    """Each False is a protocol with one rule left out.

    state_gates, weights_gate: gradients of step t + 1 are sent only when the state of the rows that t changed, and the weights of them that
    travel with the exchange, have come from every lane whose copy is held. everyones: a step counts as committed when the gradients of all have
    come, and not of one. handed_when_committed: rows that ended go to the store then, and not when the step is applied. copies_counted:
    what a trainer has is the last step applied of which its copies are complete, too. least: the next term goes by the least of these.
    """

    state_gates: bool = True
    weights_gate: bool = True
    everyones: bool = True
    handed_when_committed: bool = True
    copies_counted: bool = True
    least: bool = True


class Message(NamedTuple):
    """One that was sent and not received. kind: "state" of step t, "weights" of step t (with the exchange of t + 1), "gradients" of step t + 1."""

    kind: str
    step: int  # t
    sender: int
    receiver: int


class Trainer(NamedTuple):
    """applied: its last step; committed: the last that it knows to be; exchanged: whether it has sent the exchange of the next; ready: and its
    gradients."""

    applied: int = 0
    committed: int = 0
    exchanged: bool = False
    ready: bool = False


class World(NamedTuple):
    """Everything. got: the messages received that are of use yet."""

    trainers: tuple[Trainer, ...]
    under_way: frozenset[Message]
    got: frozenset[Message]


class CommitModel:
    """Trainers that train some steps under some rules."""

    def __init__(self, trainers: int, steps: int, rules: Rules) -> None:
        self.count, self.steps, self.rules = trainers, steps, rules

    def start(self) -> World:
        """The world in which step 0 is applied, committed and copied."""
        copied = {Message(kind, 0, i, self.holder(i)) for kind in ("state", "weights") for i in range(self.count)}
        return World((Trainer(),) * self.count, frozenset(), frozenset(copied))

    def holder(self, owner: int) -> int:
        """Who holds the copy of an owner's lane."""
        return (owner + 1) % self.count

    def following(self, world: World) -> Iterator[World]:
        """All worlds that can come next."""
        for message in world.under_way:
            yield world._replace(under_way=world.under_way - {message}, got=world.got | {message})
        for i, trainer in enumerate(world.trainers):
            if trainer.applied == self.steps:
                continue
            t, others = trainer.applied, [j for j in range(self.count) if j != i]
            if not trainer.exchanged:
                weights = Message("weights", t, i, self.holder(i))
                yield self._with(world, i, trainer._replace(exchanged=True), {weights} - world.got)
            elif not trainer.ready and self._copies_let(world, i):
                sent = {Message("gradients", t, i, j) for j in others}
                yield self._with(world, i, trainer._replace(ready=True), sent)
            elif trainer.ready:
                here = [Message("gradients", t, j, i) in world.got for j in others]
                if all(here) if self.rules.everyones else any(here):
                    applied = Trainer(t + 1, t)
                    yield self._with(world, i, applied, {Message("state", t + 1, i, self.holder(i))})

    def _with(self, world: World, i: int, trainer: Trainer, sent: set[Message]) -> World:
        return world._replace(trainers=put(world.trainers, i, trainer), under_way=world.under_way | sent)

    def _holds(self, world: World, i: int, kind: str, step: int) -> bool:
        return Message(kind, step, (i - 1) % self.count, i) in world.got

    def _copies_let(self, world: World, i: int) -> bool:
        """Whether the copies here are complete up to the step applied, so far as the rules ask for it."""
        t, rules = world.trainers[i].applied, self.rules
        state = self._holds(world, i, "state", t) or not rules.state_gates
        return state and (self._holds(world, i, "weights", t) or not rules.weights_gate)

    def wrong(self, world: World) -> list[str]:
        """What is not so if a trainer dies here, for each."""
        found = []
        for dead in range(self.count):
            left = [i for i in range(self.count) if i != dead]
            steps = []
            for i in left:
                t = world.trainers[i].applied
                complete = all(self._holds(world, i, kind, t) for kind in ("state", "weights"))
                steps.append(t if complete or not self.rules.copies_counted else t - 1)
            c = min(steps) if self.rules.least else max(steps)
            known = max(trainer.committed for trainer in world.trainers)
            handed = known if self.rules.handed_when_committed else max(trainer.applied for trainer in world.trainers)
            if known > c:
                found.append("a step that is committed for one is undone")
            if handed > c:
                found.append("the store has rows of a step that is undone")
            if any(world.trainers[i].applied not in (c, c + 1) for i in left):
                found.append("more than one step is to be undone, or one is missing")
            holder = self.holder(dead)
            if not all(self._holds(world, holder, kind, c) for kind in ("state", "weights")):
                found.append("no copy of the lost lane has what the next term goes by")
        return found


def explore_commits(
    trainers: int, steps: int, rules: Rules | None = None, first_wrong: bool = False
) -> tuple[int, int, dict[str, int]]:
    """Visit every world, or up to the first wrong one: worlds, those in which all have applied the last step, what is wrong and how often."""
    model = CommitModel(trainers, steps, rules or Rules())
    start = model.start()
    seen, waiting = {start}, [start]
    finished, kinds = 0, dict[str, int]()
    while waiting and not (first_wrong and kinds):
        world = waiting.pop()
        finished += all(trainer.applied == steps for trainer in world.trainers)
        for kind in model.wrong(world):
            kinds[kind] = kinds.get(kind, 0) + 1
        for following in model.following(world):
            if following not in seen:
                seen.add(following)
                waiting.append(following)
    return len(seen), finished, kinds
