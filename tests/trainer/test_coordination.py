"""The coordinator against trainers that come and go, whose reports are late and repeated: no lane has two owners, and nobody waits for ever."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from coordinated_world import LANES, STAGES, World
from simulated_checkpoints import Broken
from small_call import small_call

from foreload.trainer.checkpoints.best import Best
from foreload.trainer.cluster.coordinator import terms
from foreload.trainer.cluster.coordinator.checkpointing import Checkpointing, CheckpointUnderWay
from foreload.trainer.cluster.coordinator.membership import Membership
from foreload.trainer.cluster.coordinator.scaling import Scaling
from foreload.trainer.cluster.coordinator.training_call import TrainingCall
from foreload.trainer.cluster.coordinator.wanted_checkpoints import BestEvaluation, WantedCheckpoints
from foreload.trainer.cluster.member.trainer_checkpoints import TrainerCheckpoints
from foreload.trainer.cluster.messages.facts import Term
from foreload.trainer.cluster.messages.trainers import CheckpointPlan, CheckpointReport, CopiesReport, Ready, TermLeft

BEST = "best"
CHECKPOINTS = (None, "1", "4", BEST)
"""After how many steps one is due, or where an evaluation is the best."""
DISTURBANCES = (*2 * ("kill", "leave", "drain", "scale"), "replace", "stop", "go on", "wait", "end", *STAGES)


def drawn_faults(draw: Random, kinds: tuple[str, ...]) -> list[tuple[int, str, int]]:
    """Of each: how many things happen before it, what it is, and which trainer, or how many."""
    return [(draw.randint(0, 60), draw.choice(kinds), draw.randint(0, 5)) for _ in range(draw.randint(0, 6))]


class _Events:
    """Instead of a run's events."""

    step = term = 0

    def note(self, event: object) -> None: ...

    def see_messages(self) -> None: ...


def calls(run: Path) -> dict[tuple[int, int, str | None], TrainingCall]:
    """Of each number of trainers and copies, a call, with a checkpoint due now and then, or none."""
    made = {}
    for trainers, copies, every in itertools.product(range(1, LANES + 1), (1, 2, 3), CHECKPOINTS):
        further: dict[str, Any] = {} if every is None else {"checkpoint_every": every}
        if every == BEST:
            further = {"keep_best": "log_loss"}
        made[trainers, copies, every] = small_call(run, LANES, trainers=trainers, copies=copies, **further)
        made[trainers, copies, every].events = _Events()  # type: ignore[assignment]
    return made


def lived(call: TrainingCall, drawn: int, killable: bool, faults: list[tuple[int, str, int]]) -> World:
    """A world in which these faults happen, one after the other, and then none. Raises Broken."""
    world = World(call, drawn, killable)
    for moves, fault, which in faults:
        for _ in range(moves):
            world.move()
            if world.is_over:
                world.close()
                return world
        world.disturb(fault, which)
    world.run_to_end()
    world.close()
    return world


def live_through(run: Path, histories: int, first: int = 0, saved: bool = True) -> None:
    """Have so many jobs live, each with other faults; first: others than with another number; saved: many of them save checkpoints. Raises Broken
    where something is wrong in one.
    """
    made, due = calls(run), CHECKPOINTS if saved else (None,)
    kinds = (*DISTURBANCES, "checkpoint", "checkpoint") if saved else DISTURBANCES

    for number in range(histories):
        draw = Random(f"{first} {number}")  # the same on every machine, whatever else was tested before
        trainers, copies, every = draw.randint(1, LANES), draw.choice((1, 2, 2, 2, 3)), draw.choice(due)
        drawn, killable, faults = draw.getrandbits(32), draw.random() < 0.5, drawn_faults(draw, kinds)
        try:
            lived(made[trainers, copies, every], drawn, killable, faults)
        except Broken as error:
            error.add_note(f"history {number} of {first}: {trainers=}, {copies=}, {every=}, {drawn=}, {killable=}, {faults=}")
            raise


def test_no_lane_has_two_owners_and_nobody_waits_for_ever(tmp_path: Path) -> None:
    live_through(tmp_path, 200)


@pytest.mark.full
@pytest.mark.parametrize("part", range(1, 41))
def test_a_hundred_thousand_histories(tmp_path: Path, part: int) -> None:
    live_through(tmp_path, 2_500, part)


def _greatest_step(before: Term, positions: Mapping[int, TermLeft]) -> int:
    return max((position.step for position in positions.values() if not position.joins), default=before.committed)


def _all_complete(before: Term, positions: Mapping[int, TermLeft]) -> object:
    everything = tuple(range(LANES))
    return LEFT_OF(before, {trainer: replace(position, copies=everything) for trainer, position in positions.items()})


def _any_report(members: Membership, trainer: int, event: Ready | TermLeft | CopiesReport) -> None:
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


def _written_by_one(saving: CheckpointUnderWay) -> dict[int, object]:
    return dict.fromkeys(saving.reports, next(iter(files), None)) if (files := WRITTEN(saving).values()) else {}


def _any_checkpoint(checkpointing: Checkpointing, trainer: int, report: CheckpointReport) -> None:
    saving = checkpointing._saving
    TAKE_REPORT(checkpointing, trainer, report if saving is None else replace(report, number=saving.number))


def _named_at_once(checkpoints: TrainerCheckpoints, wanted: CheckpointPlan, step: int, leads: bool) -> int | None:
    return NAMED(checkpoints, replace(wanted, ready=True), step, leads)


WRITTEN: Any = vars(CheckpointUnderWay)["written"].fget
TAKE_REPORT, NAMED = Checkpointing.receive, TrainerCheckpoints._named
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
def test_a_rule_of_terms_left_out_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: Any, name: str, instead: Any
) -> None:
    monkeypatch.setattr(where, name, instead)
    with pytest.raises(Broken):
        live_through(tmp_path, 20_000, saved=False)


@pytest.mark.parametrize(
    ("where", "name", "instead"),
    [
        (CheckpointUnderWay, "written", property(_written_by_one)),  # published once the first has written its part
        (Checkpointing, "receive", _any_checkpoint),  # reports of a checkpoint that was given up count for the next
        (Checkpointing, "on_term", lambda checkpointing: None),  # one goes on though lanes have gone to others
        (Checkpointing, "_discard", lambda checkpointing, saving: None),  # one that is given up leaves its files
        (WantedCheckpoints, "again", lambda wanted, one: None),  # what was asked for is forgotten where it gives way
        (TrainerCheckpoints, "_named", _named_at_once),  # its step is named before everyone looks for it
        (BestEvaluation, "go_on", lambda best, missing: best.end_wait()),  # those that wait behind an evaluation are told nothing
        (BestEvaluation, "so_far", lambda best, under_way: Best("", "", -1.0, 0)),  # no evaluation is ever better
    ],
    ids=["first written", "any checkpoint", "over terms", "not discarded", "not again", "named at once", "waits on", "none better"],
)  # fmt: skip
def test_a_rule_of_checkpoints_left_out_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: Any, name: str, instead: Any
) -> None:
    monkeypatch.setattr(where, name, instead)
    with pytest.raises(Broken):
        live_through(tmp_path, 20_000)
