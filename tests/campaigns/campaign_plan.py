"""What a day of the campaign may bring: the kinds of faults, and an episode drawn from a seed and a number."""

from __future__ import annotations

import random
from dataclasses import dataclass

STEPS, MEMBER_STEPS = 3000, 600
"""Training steps of an episode's schedule: of one that is mostly about stores, and of one about trainers."""
LANES, MEMBER_LANES = 2, 4
"""Lanes of these."""
LOST = {"kill", "flush", "stop", "readonly", "oom", "busy", "sleep", "wrong_type"}
"""Faults after which a store shard may count as lost. (A connection that is cut is made again.)"""
SERVER_FAULTS = (*sorted(LOST), "cut")
ALL_SERVERS_FAULTS = ("silence", "long_silence", "cut_all")
"""All servers stand still for a while, for less or for longer than they are waited for, or cut all their connections: no row is lost by that."""
DISK_FAULTS = ("disk",)
TRAINER_FAULTS = ("kill_trainer", "stop_trainer")
COPY_FAULTS = ("copy_folder", "delete_copy")
"""A copy of the run's folder is made; `foreload delete` is called for it, and must be refused. Where the rows are on servers by URL."""
MODEL_FAULTS = ("edit_model",)
"""The file of the model is changed: a resume with it must be refused. Where the model is the user's own."""
FAILING_MODEL = ("model_fails",)
"""The model's code raises, until the next call."""
LAUNCHER_FAULTS = ("kill_launcher", "int", "term", "hup")
SHARD_CHANGES = ("add_shard", "remove_shard", "move_shard")
"""What is no fault either: rows move to other store shards, by whatever else happens."""
LOOKS = ("status", "run_status", "scrub", "second")
"""What is no fault, but meets a run that trains: commands that look at it, and a second training of the same run."""
MEMBER_FAULTS = (*TRAINER_FAULTS, "kill_two", "trainer_and_shard", "leave", "scale", "replace")
"""After which trainers come or go; and `kill_launcher`, where there are copies."""


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
    """An episode. store: local, tcp or tls; shards: of the store; parity: as --parity has it; faults: in the order of their steps.

    own: whether the model is the user's own, in a file. auto: whether each call is the same command, with --resume=auto.
    adjusts: whether each call has --auto.
    members: whether it is about trainers that come and go; trainers: of each call, over and over; copies, peer_timeout: as `train` has them.
    """

    number: int
    store: str
    shards: int
    parity: str
    trainers: tuple[int, ...]
    faults: tuple[Fault, ...]
    members: bool = False
    copies: int = 1
    peer_timeout: float | None = None
    own: bool = False
    auto: bool = False
    adjusts: bool = False

    @classmethod
    def draw(cls, seed: int, number: int, focus: str | None = None) -> Plan:
        """The episode of a number: a pure function of all three. focus: members or stores; None: now one, now the other."""
        dice = random.Random(f"{seed}/{number}")
        members = dice.random() < 0.5
        return (
            cls._of_members(dice, number) if (members if focus is None else focus == "members") else cls._of_stores(dice, number)
        )

    @classmethod
    def _of_stores(cls, dice: random.Random, number: int) -> Plan:
        store = dice.choice(("local", "local", "tcp", "tls"))
        shards, parity = dice.choice(((1, "off"), (3, "2+1"), (3, "2+1"), (3, "off"), (4, "2+1"), (4, "2+2")))
        # Without parity hardly any fault of a server can be survived: there it is mostly the processes that are tried.
        kinds = (
            (*LAUNCHER_FAULTS, "stop_trainer", "cut", "sleep", "flush", *LOOKS)
            if parity == "off"
            else (*3 * SERVER_FAULTS, *LAUNCHER_FAULTS, *TRAINER_FAULTS, *LOOKS)
        )
        own = dice.random() < 0.3
        kinds += DISK_FAULTS if store != "tls" else ()
        kinds += 2 * COPY_FAULTS if store != "local" else ()
        kinds += 2 * (*MODEL_FAULTS, *FAILING_MODEL) if own else ()
        kinds += 2 * ALL_SERVERS_FAULTS
        kinds += 3 * SHARD_CHANGES if store != "tls" else ()
        faults = _faults(dice, kinds, STEPS, dice.randint(5, 14))
        trainers, auto = (dice.choice((1, 2)),), dice.random() < 0.5
        return cls(number, store, shards, parity, trainers, faults, own=own, auto=auto, adjusts=_adjusts(dice, store))

    @classmethod
    def _of_members(cls, dice: random.Random, number: int) -> Plan:
        store = dice.choice(("local", "local", "tcp"))
        shards, parity = dice.choice(((1, "off"), (3, "2+1"), (3, "2+1")))
        trainers = tuple(dice.choice((2, 3, 3, 4, 4)) for _ in range(4))
        copies = dice.choice((2, 2, 3, 4))
        kinds = (
            *5 * ("kill_trainer",), *3 * ("stop_trainer",), *(2 if copies > 2 else 1) * ("kill_two",), *3 * ("scale",), *2 * ("leave",), "replace",
            *2 * ("kill_launcher",), "int", "term", "run_status", "cut", *ALL_SERVERS_FAULTS,
            *(() if parity == "off" else (*3 * ("trainer_and_shard",), "kill", "stop", "flush")),
        )  # fmt: skip
        faults = _faults(dice, kinds, MEMBER_STEPS, dice.randint(8, 16))
        silence = dice.choice((2.0, 4.0, None))
        auto = dice.random() < 0.5
        return cls(
            number, store, shards, parity, trainers, faults, True, copies, silence, auto=auto, adjusts=_adjusts(dice, store)
        )

    @property
    def losses_covered(self) -> int:
        """How many store shards may be lost at once."""
        return 0 if self.parity == "off" else int(self.parity.partition("+")[2])


def _adjusts(dice: random.Random, store: str) -> bool:
    """Whether an episode has --auto: only where it has servers that may be added."""
    return dice.random() < 0.4 and store == "local"


def _faults(dice: random.Random, kinds: tuple[str, ...], steps: int, count: int) -> tuple[Fault, ...]:
    """So many faults of these kinds, in the order of their steps."""
    return tuple(
        Fault(
            dice.choice(kinds),
            step,
            round(dice.uniform(0.0, 6.0), 2) if dice.random() < 0.1 else None,
            dice.randrange(64),
            round(dice.choice((0.2, 0.6, 1.5, 3.0)), 2),
        )
        for step in sorted(dice.randrange(1, steps - 20) for _ in range(count))
    )
