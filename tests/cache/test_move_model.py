"""No state of a move of rows is wrong in any scope explored; and each of its rules is needed: without it there are some."""

from __future__ import annotations

from dataclasses import replace

import pytest
from move_explorer import Findings, explore
from move_model import Rules, Scope

A, B, OTHER = (0, 0), (0, 1), (1, 0)  # the two rows of a stripe, and one of another
STORED = (A, B, OTHER)

# From three shards to a fourth, which takes a member of the first stripe.
ADDED = Scope(2, 1, (((0, 1, 2), (1, 2, 0)), ((3, 1, 2), (1, 2, 0))), ((A,), (B,)), STORED)
# Two new shards, which take two of the three rows of a stripe.
TWO = Scope(2, 1, (((0, 1, 2),), ((3, 4, 2),)), ((A,),), (A, B))
# A shard that all rows leave, one stripe after the other.
LEFT = Scope(1, 1, (((0, 1), (1, 0)), ((2, 1), (1, 2))), ((A,),), (A, OTHER))
# One shard leaves, and nothing else.
LEAVES = Scope(1, 0, (((0,), (1,)), ((2,), (1,))), ((A,),), (A,))

SCOPES = {
    "2+1, a member": ADDED,
    "2+1, parity rows": Scope(2, 1, (((0, 1, 2), (1, 2, 0)), ((0, 1, 3), (1, 2, 3))), ((OTHER,),), (A, B)),
    "2+1, two targets": TWO,
    "2+1, two targets in two stripes": Scope(2, 1, (((0, 1, 2), (0, 2, 1)), ((3, 1, 2), (4, 2, 1))), ((A, OTHER),), STORED),
    "2+1, a shard that takes and gives": Scope(2, 1, (((0, 1, 2), (1, 2, 3)), ((3, 1, 2), (1, 2, 0))), ((A,), (OTHER,)), STORED),
    "2+2, a member": Scope(2, 2, (((0, 1, 2, 3),), ((4, 1, 2, 3),)), ((A,),), (A, B)),
    "2+1, rows vanish": replace(TWO, batches=(), wipes=1),
    "2+1, two targets, a loss": replace(TWO, batches=(), kills=1, rebuilds=True),
    "1+1, a shard is left": LEFT,
    "without parity": replace(LEAVES, uncorrectable=1),
}
FULL = {
    "2+1, a member, two owners, no batch": replace(ADDED, batches=(), owners=2),
    "2+1, a member, no batch, a loss and a rebuild": replace(ADDED, batches=(), kills=1, rebuilds=True),
    "1+1, a shard is left, two owners": replace(LEFT, owners=2),
    "1+1, a shard is left, a loss and a rebuild": replace(LEFT, kills=1, rebuilds=True),
    "1+1, a shard is left, rows vanish": replace(LEFT, wipes=1),
    "1+1, a shard is left, two owners, a shard out of reach": replace(LEFT, batches=(), owners=2, cuts=1),
    "1+2, two owners, shards out of reach": Scope(1, 2, (((0, 1, 2),), ((3, 1, 2),)), (), (A,), owners=2, cuts=2),
    "2+1, a member, two owners": replace(ADDED, batches=((A,),), owners=2),
    "2+1, a member, two owners, a shard out of reach": replace(ADDED, batches=(), owners=2, cuts=1),
    "2+1, two targets, two owners, a shard out of reach": replace(TWO, batches=(), owners=2, cuts=1),
    "2+1, two targets, two owners, shards out of reach": replace(TWO, batches=(), owners=2, cuts=2),
    "2+1, two targets, a batch, a loss and a rebuild": replace(TWO, kills=1, rebuilds=True),
    "2+1, a member, a loss": replace(ADDED, kills=1),
    "2+1, a member, a loss and a rebuild": replace(ADDED, kills=1, rebuilds=True),
    "2+1, a shard that takes and gives, a loss and a rebuild": Scope(
        2, 1, (((0, 1, 2), (1, 2, 3)), ((3, 1, 2), (1, 2, 0))), ((A,), (OTHER,)), STORED, kills=1, rebuilds=True
    ),
    "2+1, two moves, a loss and a rebuild": Scope(
        2, 1, (((0, 1, 2),), ((3, 1, 2),), ((3, 4, 2),)), ((A,),), (A, B), kills=1, rebuilds=True
    ),
    "2+1, two moves of two stripes, a loss and a rebuild": Scope(
        2, 1, (((0, 1, 2), (1, 2, 0)), ((3, 1, 2), (1, 2, 0)), ((3, 1, 4), (1, 2, 0))), ((A,),), STORED, kills=1, rebuilds=True
    ),
    "2+1, a member, rows vanish": replace(ADDED, batches=((A,),), wipes=1),
    "without parity, two owners": replace(LEAVES, owners=2),
    "without parity, three owners": replace(LEAVES, batches=(), owners=3),
}
ALL = SCOPES | FULL

# (rule left out, how, a scope that shows it)
LEFT_OUT = [
    ("a chunk is read while no batch is under way", Rules(flushed_first=False), "2+1, two targets"),
    ("copies are acknowledged before anything is deleted", Rules(copies_awaited=False), "2+1, two targets"),
    ("deletions are acknowledged before a batch goes by the new cursor", Rules(done_awaited=False), "2+1, a member"),
    ("rows and migrated in one command: migrated first", Rules(copied_alone="migrated"), "2+1, a shard that takes and gives"),
    ("rows and migrated in one command: rows first", Rules(copied_alone="rows"), "2+1, a shard that takes and gives"),
    ("deletion and migrated in one transaction: migrated first", Rules(deleted_alone="migrated"), "2+1, a member"),
    ("deletion and migrated in one transaction: deletion first", Rules(deleted_alone="rows"), "2+1, a member"),
    ("migrated names the targets", Rules(targets_named=False), "2+1, parity rows"),
    ("commands of a chunk have the marker", Rules(marked=False), "2+1, a member, rows vanish"),
    ("answers are counted", Rules(answers_counted=False), "2+1, rows vanish"),
    ("the shards of both placements are fenced, not of the old", Rules(fenced="old"), "without parity, two owners"),
    ("the shards of both placements are fenced, not of the new", Rules(fenced="new"), "without parity, two owners"),
    ("a target that lacks its copies is not trusted", Rules(stale_targets=False), "2+1, a member"),
    ("what lacks a chunk before the last batch is not trusted", Rules(at_n=False), "2+1, a member, rows vanish"),
    ("what says something else is not trusted", Rules(others_left=False), "2+1, a member"),
    ("what speaks of an earlier placement is not trusted", Rules(versions=False), "2+1, a member"),
    ("where only copies are, they are rolled back", Rules(rolled_back=False), "2+1, two targets"),
    ("what is rolled back has a later term", Rules(rolled_back_by_term=False), "2+1, a member, two owners, a shard out of reach"),
    ("rows are counted by migrated", Rules(held=False), "2+1, a member"),
    ("a shard that comes in is whole", Rules(joining=False), "2+1, a member"),
    ("the end of a rebuild writes migrated", Rules(rebuilt_moved=False), "2+1, two targets, a loss"),
    ("migrated is compared after a broken connection", Rules(moved_compared=False), "2+1, a member, a loss"),
    ("a shard that joins writes migrated", Rules(joined_moved=False), "2+1, two moves, a loss and a rebuild"),
    ("a chunk begins while all shards are whole", Rules(whole=False), "2+1, a member, no batch, a loss and a rebuild"),
    ("a new owner writes its term on all shards", Rules(stamped=False), "1+2, two owners, shards out of reach"),
    ("only owners of the term are told of a move", Rules(told_in_term=False), "2+1, a member, two owners, no batch"),
    ("what a shard that is left keeps is counted", Rules(leftover=False), "1+1, a shard is left"),
]


def explored(name: str, rules: Rules | None = None, first_wrong: bool = False) -> Findings:
    """Explore a scope, and say what was found."""
    found = explore(ALL[name], rules, first_wrong)
    print(f"{name}: {found}")
    return found


@pytest.mark.parametrize("name", [*SCOPES, *(pytest.param(name, marks=pytest.mark.full) for name in FULL)])
def test_no_state_of_a_move_is_wrong(name: str) -> None:
    found = explored(name)
    assert found.found == 0
    assert min(found.finished, found.halfway) > 0
    assert found.cases > 1000
    if ALL[name].owners > 1:
        assert found.undone
    if ALL[name].kills and ALL[name].rebuilds:
        assert found.restored


@pytest.mark.parametrize("name", [*SCOPES, *(pytest.param(name, marks=pytest.mark.full) for name in FULL)])
def test_no_loss_that_parity_covers_needs_the_next_newest(name: str) -> None:
    """It helps where an owner gave up more shards than were lost (test_interrupted_migration)."""
    assert explored(name, Rules(fewest=False)).found == 0


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.full)], ids=["", "whole"])
@pytest.mark.parametrize(("rules", "name"), [case[1:] for case in LEFT_OUT], ids=[case[0] for case in LEFT_OUT])
def test_without_a_rule_wrong_states_are_found(rules: Rules, name: str, whole: bool) -> None:
    assert explored(name, rules, first_wrong=not whole).found > 0
