"""What a day of the campaign may bring: the kinds of faults, and an episode drawn from a seed and a number."""

from __future__ import annotations

import random
from dataclasses import dataclass

STEPS = 3000
"""Training steps of an episode's schedule."""
LOST = {"kill", "flush", "stop", "readonly", "oom", "busy", "sleep"}
"""Faults after which a store shard may count as lost. (A connection that is cut is made again.)"""
SERVER_FAULTS = (*sorted(LOST), "cut")
DISK_FAULTS = ("disk",)
TRAINER_FAULTS = ("kill_trainer", "stop_trainer")
LAUNCHER_FAULTS = ("kill_launcher", "int", "term", "hup")
LOOKS = ("status", "scrub", "second")
"""What is no fault, but meets a run that trains: commands that look at it, and a second training of the same run."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens: after `step` (counted over the run), or `seconds` after the start of a call where that is given.

    kind: one of the above; target: a number from which the shard or trainer that it meets follows; lasts: seconds until it is undone, if it can be.
    """

    kind: str
    step: int
    seconds: float | None
    target: int
    lasts: float


@dataclass(frozen=True, slots=True)
class Plan:
    """An episode. store: local, tcp or tls; shards: of the store; parity: as --parity has it; faults: in the order of their steps."""

    number: int
    store: str
    shards: int
    parity: str
    trainers: int
    faults: tuple[Fault, ...]

    @classmethod
    def draw(cls, seed: int, number: int) -> Plan:
        """The episode of a number: a pure function of both."""
        dice = random.Random(f"{seed}/{number}")
        store = dice.choice(("local", "local", "tcp", "tls"))
        shards, parity = dice.choice(((1, "off"), (3, "2+1"), (3, "2+1"), (3, "off"), (4, "2+1"), (4, "2+2")))
        # Without parity hardly any fault of a server can be survived: there it is mostly the processes that are tried.
        kinds = (
            (*LAUNCHER_FAULTS, "stop_trainer", "cut", "sleep", "flush", *LOOKS)
            if parity == "off"
            else (*3 * SERVER_FAULTS, *LAUNCHER_FAULTS, *TRAINER_FAULTS, *LOOKS)
        )
        kinds += DISK_FAULTS if store == "local" else ()
        steps = sorted(dice.randrange(1, STEPS - 20) for _ in range(dice.randint(5, 14)))
        faults = tuple(
            Fault(
                dice.choice(kinds),
                step,
                round(dice.uniform(0.0, 6.0), 2) if dice.random() < 0.1 else None,
                dice.randrange(64),
                round(dice.choice((0.2, 0.6, 1.5, 3.0)), 2),
            )
            for step in steps
        )
        return cls(number, store, shards, parity, dice.choice((1, 2)), faults)

    @property
    def losses_covered(self) -> int:
        """How many store shards may be lost at once."""
        return 0 if self.parity == "off" else int(self.parity.partition("+")[2])
