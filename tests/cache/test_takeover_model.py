"""A takeover has no wrong state in any scope explored, nor has the commit of a step; and each of their rules is needed: without it there are some."""

from __future__ import annotations

import commit_model
import pytest
from commit_model import explore_commits
from takeover_explorer import Findings, explore
from takeover_model import Rules, Scope

A, B, OTHER = (0, 0), (0, 1), (1, 0)  # the two rows of a stripe, and one of another

SCOPES = {
    "2+1, a row": Scope(2, 1, 3, 1, ((A,),)),
    "2+1, the second row of a stripe": Scope(2, 1, 3, 1, ((A,), (B,))),
    "2+1, a row returns": Scope(2, 1, 3, 1, ((A,), (A,))),
    "2+1, a shard out of reach": Scope(2, 1, 3, 1, ((A,),), cuts=1),
    "1+1, shards out of reach": Scope(1, 1, 2, 1, ((A,),), cuts=2),
    "2+2, a row": Scope(2, 2, 4, 1, ((A,),)),
    "without parity": Scope(1, 0, 2, 2, ((A,), (OTHER,), (A,))),
}
FULL = {
    "2+1, a row, three owners": Scope(2, 1, 3, 1, ((A,),), owners=3),
    "1+1, a row, four owners": Scope(1, 1, 2, 1, ((A,),), owners=4),
    "2+1, a row returns beside the second": Scope(2, 1, 3, 1, ((A,), (B,), (A,))),
    "2+1, both rows, and one returns": Scope(2, 1, 3, 1, ((A, B), (A,))),
    "2+1, two stripes": Scope(2, 1, 3, 2, ((A, OTHER), (B,))),
    "2+1 on 5, the second row of a stripe": Scope(2, 1, 5, 1, ((A,), (B,))),
    "2+1, the second row, a shard out of reach": Scope(2, 1, 3, 1, ((A,), (B,)), cuts=1),
    "2+1, a shard out of reach and rebuilt": Scope(2, 1, 3, 1, ((A,),), cuts=1, rebuilds=True),
    "2+1, the second row, a shard out of reach and rebuilt": Scope(2, 1, 3, 1, ((A,), (B,)), cuts=1, rebuilds=True),
    "1+1, a row returns, shards out of reach": Scope(1, 1, 2, 1, ((A,), (A,)), cuts=2),
    "1+2, shards out of reach": Scope(1, 2, 3, 1, ((A,),), cuts=3),
    "2+2, a shard out of reach": Scope(2, 2, 4, 1, ((A,),), cuts=1),
    "without parity, three owners": Scope(1, 0, 2, 2, ((A, OTHER), (A,)), owners=3),
}
ALL = SCOPES | FULL

# (rule left out, how, a scope that shows it)
LEFT_OUT = [
    ("the fence", Rules(fence=False), "2+1, a row"),
    ("the fence before the log is read", Rules(fence_first=False), "2+1, a row"),
    ("more than r shards are fenced, or the old owner is dead", Rules(fenced=""), "1+1, shards out of reach"),
    ("not only more than half of them", Rules(fenced="half"), "1+2, shards out of reach"),
    ("a log a term", Rules(log_per_term=False), "2+1, a row"),
    ("numbers by term", Rules(numbers_by_term=False), "2+1, a shard out of reach"),
    (
        "the record that was read is held before it is played",
        Rules(record_copied=False),
        "1+1, a row returns, shards out of reach",
    ),
    ("the empty record", Rules(empty_record=False), "2+1, a row"),
    ("it is in the log", Rules(empty_held=False), "2+1, a row"),
    ("it names the number before", Rules(empty_names_before=False), "2+1, a row"),
    ("it is played", Rules(empty_played=False), "2+1, a row, three owners"),
    ("committed rows only", Rules(committed_only=False), "2+1, the second row of a stripe"),
    ("the tags of owed rows", Rules(owed_looked_at=False), "2+1, the second row of a stripe"),
    ("the tags of E(c + 1)", Rules(ended_looked_at=False), "2+1, a row"),
    ("a base is read before the log holds the batch", Rules(base_first=False), "2+1, a row returns"),
    ("what is released is told in every step", Rules(told_each_step=False), "2+1, a row returns"),
    ("without parity: the fence", Rules(fence=False), "without parity"),
    ("without parity: numbers by term", Rules(numbers_by_term=False), "without parity"),
    ("without parity: committed rows only", Rules(committed_only=False), "without parity"),
    ("without parity: the tags of owed rows", Rules(owed_looked_at=False), "without parity"),
    ("without parity: the tags of E(c + 1)", Rules(ended_looked_at=False), "without parity"),
    ("without parity: the marker", Rules(marked=False), "without parity"),
    ("without parity: a marker that is too old", Rules(stale=False), "without parity"),
    ("without parity: released is what is acknowledged", Rules(told_when_stored=False), "without parity"),
]

COMMIT_LEFT_OUT = [
    ("state gates", commit_model.Rules(state_gates=False)),
    ("weights gate", commit_model.Rules(weights_gate=False)),
    ("the gradients of all", commit_model.Rules(everyones=False)),
    ("handed over when committed", commit_model.Rules(handed_when_committed=False)),
    ("copies are counted", commit_model.Rules(copies_counted=False)),
    ("the least of all", commit_model.Rules(least=False)),
]


def explored(name: str, rules: Rules | None = None, first_wrong: bool = False) -> Findings:
    """Explore a scope, and say what was found."""
    found = explore(ALL[name], rules, first_wrong)
    print(f"{name}: {found}")
    return found


@pytest.mark.parametrize("name", [*SCOPES, *(pytest.param(name, marks=pytest.mark.full) for name in FULL)])
def test_no_state_of_a_takeover_is_wrong(name: str) -> None:
    found = explored(name)
    assert found.found == 0
    assert min(found.finished, found.overlapping) > 0
    assert found.cases > 1000


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.full)], ids=["", "whole"])
@pytest.mark.parametrize(("rules", "name"), [case[1:] for case in LEFT_OUT], ids=[case[0] for case in LEFT_OUT])
def test_without_a_rule_wrong_states_are_found(rules: Rules, name: str, whole: bool) -> None:
    assert explored(name, rules, first_wrong=not whole).found > 0


@pytest.mark.parametrize(
    ("trainers", "steps"), [(2, 3), (3, 2), *(pytest.param(*case, marks=pytest.mark.full) for case in [(3, 3), (4, 1)])]
)
def test_no_state_of_a_commit_is_wrong(trainers: int, steps: int) -> None:
    worlds, finished, wrong = explore_commits(trainers, steps)
    print(f"{trainers} trainers, {steps} steps: {worlds} worlds")
    assert not wrong
    assert worlds > 100
    assert finished


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.full)], ids=["", "whole"])
@pytest.mark.parametrize("rules", [case[1] for case in COMMIT_LEFT_OUT], ids=[case[0] for case in COMMIT_LEFT_OUT])
def test_without_a_rule_of_the_commit_wrong_states_are_found(rules: commit_model.Rules, whole: bool) -> None:
    worlds, _, wrong = explore_commits(3, 2, rules, first_wrong=not whole)
    print(f"{worlds} worlds: {wrong}")
    assert wrong
