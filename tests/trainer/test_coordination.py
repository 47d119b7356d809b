"""The coordinator against trainers that come and go, whose reports are late and repeated: no lane has two owners, and nobody waits for ever."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from coordinated_world import LANES, STAGES, Broken, World
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from small_call import small_call

from foreload.trainer.cluster.coordinator import terms
from foreload.trainer.cluster.coordinator.membership import Membership
from foreload.trainer.cluster.coordinator.scaling import Scaling
from foreload.trainer.cluster.coordinator.training_call import TrainingCall
from foreload.trainer.cluster.messages.facts import Term
from foreload.trainer.cluster.messages.trainers import CopiesTold, Ready, TermLeft

FAULTS = st.lists(
    st.tuples(
        st.integers(0, 60),  # things that happen before it
        st.sampled_from(["kill", "kill", "stop", "go on", "leave", "leave", "scale", "scale", "wait", "end", *STAGES]),
        st.integers(0, 5),
    ),
    max_size=6,
)


class _Events:
    """Instead of a run's events."""

    step = term = 0

    def note(self, event: object) -> None: ...

    def see_messages(self) -> None: ...


def calls(run: Path) -> dict[tuple[int, int], TrainingCall]:
    """Of each number of trainers and copies, a call."""
    made = {}
    for trainers, copies in itertools.product(range(1, LANES + 1), (1, 2, 3)):
        made[trainers, copies] = small_call(run, LANES, trainers=trainers, copies=copies)
        made[trainers, copies].events = _Events()  # type: ignore[assignment]
    return made


def lived(call: TrainingCall, drawn: int, killable: bool, faults: list[tuple[int, str, int]]) -> World:
    """A world in which these faults happen, one after the other, and then none. Raises Broken."""
    world = World(call, drawn, killable)
    for moves, fault, which in faults:
        for _ in range(moves):
            world.move()
            if world.is_over:
                return world
        world.disturb(fault, which)
    world.settle()
    return world


def live_through(run: Path, histories: int, first: int = 0) -> None:
    """Have so many jobs live, each with other faults; first: others than with another number. Raises Broken where something is wrong in one."""
    made = calls(run)

    @seed(first)
    @settings(max_examples=histories, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
    @given(st.integers(1, LANES), st.sampled_from((1, 2, 2, 2, 3)), st.integers(0, 2**32), st.booleans(), FAULTS)
    def hold(trainers: int, copies: int, drawn: int, killable: bool, faults: list[tuple[int, str, int]]) -> None:
        lived(made[trainers, copies], drawn, killable, faults)

    hold()


def test_no_lane_has_two_owners_and_nobody_waits_for_ever(tmp_path: Path) -> None:
    live_through(tmp_path, 500)


@pytest.mark.full
@pytest.mark.parametrize("part", range(1, 11))
def test_a_hundred_thousand_histories(tmp_path: Path, part: int) -> None:
    live_through(tmp_path, 10_000, part)


def _greatest_step(before: Term, positions: Mapping[int, TermLeft]) -> int:
    return max((position.step for position in positions.values() if not position.joins), default=before.committed)


def _all_complete(before: Term, positions: Mapping[int, TermLeft]) -> object:
    everything = tuple(range(LANES))
    return LEFT_OF(before, {trainer: replace(position, copies=everything) for trainer, position in positions.items()})


def _any_report(members: Membership, trainer: int, event: Ready | TermLeft | CopiesTold) -> None:
    RECEIVE(members, trainer, replace(event, term=members.term.number))


def _at_once(members: Membership, _: Mapping[int, str]) -> None:
    members._handing.clear()


def _not_again(members: Membership, present: list[int]) -> None:
    asked = members._asked
    BEGIN_NEXT(members, present)
    members._asked = asked


def _all_that_leave(scaling: Scaling, members: Membership, ended: Mapping[int, str], goes_on: bool) -> None:
    POLL(scaling, members, ended, goes_on)
    members.change = replace(members.change, leaving=tuple(sorted(scaling._leaving)))


RECEIVE, BEGIN_NEXT, POLL, LEFT_OF = Membership.receive, Membership._begin_next, Scaling.poll, terms._left_of


@pytest.mark.parametrize(
    ("where", "name", "instead"),
    [
        (terms, "_least_step", _greatest_step),  # who is behind would have to make steps up
        (Membership, "receive", _any_report),  # a report of an earlier term counts in this one
        (Membership, "_see_handed_over", _at_once),  # nobody sees to one that dies before it has handed its lanes over
        (Membership, "_begin_next", _not_again),  # the next change of lanes is never asked for
        (Membership, "all_ready", property(lambda members: bool(members.ready))),  # steps begin when the first can
        (terms, "_left_of", _all_complete),  # lanes go to trainers without a complete copy
        (Scaling, "poll", _all_that_leave),  # the last one is to leave, too
    ],
    ids=["greatest step", "any report", "not handed over", "asked once", "first ready", "no copy", "the last one"],
)  # fmt: skip
def test_a_coordinator_with_a_rule_left_out_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: Any, name: str, instead: Any
) -> None:
    monkeypatch.setattr(where, name, instead)
    with pytest.raises(Broken):
        live_through(tmp_path, 5000)
