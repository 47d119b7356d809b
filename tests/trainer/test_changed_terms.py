"""Trainers that join and leave, from the coordinator's side: which lanes move to whom, when, and how many trainers are wanted and started."""

from __future__ import annotations

import itertools

import pytest
from small_call import small_call
from test_membership import Coordinator, left

from foreload.trainer.cluster.coordinator.membership import LEAVE_TIMEOUT
from foreload.trainer.cluster.coordinator.scaling import FRUITLESS_STARTS, JOIN_PATIENCE, Scaling
from foreload.trainer.cluster.coordinator.terms import NO_CHANGE, Change, changed_term, first_term, next_term, wants_change
from foreload.trainer.cluster.messages.control import AskScale, AskScaled, Refused, ScaleBegun, ScaleProgress
from foreload.trainer.cluster.messages.facts import Admitted, HandedOver, StopWanted, Term, TermOver
from foreload.trainer.cluster.messages.trainers import CopiesReport, SeededCopy, TermLeft


def planned(term: Term, trainer: int, complete: bool = True, step: int = 9) -> TermLeft:
    """What a member tells that leaves a term as was planned, with all copies that the term gives it, or with those that it began with."""
    held = [lane for lane, holders in enumerate(term.copies) if trainer in holders]
    return TermLeft(term.number, step, tuple(v for v in held if complete or trainer in term.complete[v]), False, None)


def until_done(term: Term, change: Change, copies: int) -> list[Term]:
    """All terms from one on until nothing is to change any more; copies are complete when the term after the one that began them is due."""
    terms = [term]
    while wants_change(terms[-1], [set(holders) for holders in terms[-1].copies], change):
        before = terms[-1]
        terms.append(changed_term(before, {t: planned(before, t) for t in before.members}, copies, change))
        change = Change((), change.leaving)
        assert len(terms) < 7
    return terms


def check_step(before: Term, after: Term) -> None:
    """Nobody hosts a lane without having a complete copy of it, or having hosted it; who hosted it is told, and there."""
    assert after.number == before.number + 1
    for lane, (was, host) in enumerate(zip(before.hosts, after.hosts, strict=True)):
        assert host in after.members
        assert host not in after.copies[lane]
        assert host == was or host in before.copies[lane]
        assert after.former[lane] == (None if host == was else was)
        assert set(after.copies[lane]) <= set(after.members)


SCALES = [(a, b) for a, b in itertools.product((1, 2, 3, 4, 7), repeat=2) if a != b]


@pytest.mark.parametrize("copies", [1, 2, 3])
@pytest.mark.parametrize(("before", "after"), SCALES)
def test_lanes_are_balanced_by_as_few_moves_as_can_be(before: int, after: int, copies: int) -> None:
    lanes = 7
    first = first_term(3, range(before), lanes, copies, 9)
    joining, leaving = tuple(range(before, after)), tuple(range(after, before))
    terms = until_done(first, Change(joining, leaving), copies)
    for one, following in itertools.pairwise(terms):
        check_step(one, following)
    last = terms[-1]
    assert set(last.members) == set(range(after))
    counts = [last.hosts.count(trainer) for trainer in last.members]
    assert max(counts) - min(counts) <= 1
    moves = sum(len([lane for lane, former in enumerate(term.former) if former is not None]) for term in terms[1:])
    # What newcomers get, or leavers had.
    held = last if joining else first
    assert moves == sum(held.hosts.count(trainer) for trainer in (*joining, *leaving))
    assert last.leader == 0
    assert [len(holders) for holders in last.copies] == [min(copies, after) - 1] * lanes
    assert tuple(sorted(last.left)) == leaving
    assert terms[1].joined == joining


@pytest.mark.parametrize(("before", "after"), SCALES)
def test_a_lane_is_never_without_a_complete_copy_while_trainers_change(before: int, after: int) -> None:
    if 1 in (before, after):
        return
    term = first_term(3, range(before), 7, 2, 9)
    term = changed_term(term, {t: planned(term, t) for t in term.members}, 2, NO_CHANGE)
    for one in until_done(term, Change(tuple(range(before, after)), tuple(range(after, before))), 2):
        assert all(set(holders) & set(one.complete[lane]) for lane, holders in enumerate(one.copies))


def test_who_joins_gets_copies_first_and_lanes_when_they_are_complete() -> None:
    first = first_term(1, [0], 4, 1, 9)
    second = changed_term(first, {0: planned(first, 0)}, 1, Change((5,)))
    assert (second.hosts, second.copies, second.targets) == ((0,) * 4, ((), (), (5,), (5,)), (0, 0, 5, 5))
    assert not wants_change(second, [set(), set(), {5}, set()], NO_CHANGE)
    assert wants_change(second, [set(), set(), {5}, {5}], NO_CHANGE)


def test_one_that_is_lost_before_it_hosts_a_lane_is_not_missed() -> None:
    first = first_term(1, [0, 1], 4, 2, 9)
    second = changed_term(first, {t: planned(first, t) for t in (0, 1)}, 2, Change((2,)))
    third = next_term(second, {t: left(second, t, 11) for t in (0, 1)}, 2)
    assert (third.members, third.hosts, third.targets) == ((0, 1), first.hosts, first.hosts)
    assert not wants_change(third, third.complete, NO_CHANGE)


def test_a_loss_while_lanes_are_to_move_does_not_stop_them() -> None:
    first = first_term(1, [0, 1], 4, 2, 9)
    second = changed_term(first, {t: planned(first, t) for t in (0, 1)}, 2, Change((2, 3)))
    there = {t: left(second, t, 11, complete=False) for t in (0, 2, 3)}
    third = next_term(second, {**there, 0: left(second, 0, 11)}, 2)
    assert set(third.hosts) == {0}
    assert third.committed == 11
    hosts = until_done(third, NO_CHANGE, 2)[-1].hosts
    assert sorted(hosts.count(trainer) for trainer in (0, 2, 3)) == [1, 1, 2]


def test_who_has_no_state_yet_is_at_no_step_and_joins_again() -> None:
    first = first_term(1, [0, 1], 4, 2, 9)
    second = changed_term(first, {t: planned(first, t) for t in (0, 1)}, 2, Change((2,)))
    standings = {0: left(second, 0, 11), 2: TermLeft(2, -1, (), False, "lost 1", joins=True)}
    third = next_term(second, standings, 2)
    assert (third.members, third.committed, third.joined) == ((0, 2), 11, (2,))


def _plan(job: Coordinator, change: Change) -> None:
    """What was planned is asked for, and the leader's agreement on a step made; all members leave."""
    job.ready()
    job.of.change = change
    assert not job.of.poll({}, ())
    assert job.rendezvous.read(StopWanted) == StopWanted(job.of.term.number)
    for trainer in job.of.term.members:
        assert not job.of.poll({}, ())
        job.of.receive(trainer, planned(job.of.term, trainer))
    assert job.of.poll({}, ())


def test_a_term_ends_as_planned_and_the_next_has_who_joins() -> None:
    job = Coordinator(2)
    _plan(job, Change((2,)))
    assert job.rendezvous.poll(TermOver, 1) is None
    assert job.rendezvous.poll(StopWanted) is None
    assert job.rendezvous.read(Admitted, 2) == Admitted(2)
    assert (job.of.term.members, job.of.term.joined) == ((0, 1, 2), (2,))
    job.of.change = NO_CHANGE
    job.ready()
    assert not job.of.is_stable
    whole = {lane: SeededCopy(9, 9, True) for lane, holders in enumerate(job.of.term.copies) if 2 in holders}
    job.of.receive(2, CopiesReport(2, whole))
    assert not job.of.poll({}, ())
    assert job.rendezvous.read(StopWanted) == StopWanted(2)


def test_who_leaves_is_waited_for_and_ended_where_it_is_too_slow_or_dead() -> None:
    for gone in ({}, {2: "was killed by SIGKILL"}):
        job = Coordinator(3, copies=3)
        _plan(job, Change((), (2,)))
        assert (job.of.term.members, job.of.term.left) == ((0, 1), (2,))
        job.of.poll({}, ())
        assert job.rendezvous.poll(HandedOver, 2, 2) is None
        if not gone:
            job.now += LEAVE_TIMEOUT.total_seconds() + 1
        job.of.poll(gone, ())
        assert job.rendezvous.poll(HandedOver, 2, 2) is not None


class Wanted:
    """A Scaling whose processes are numbers, and a membership that does as it is told."""

    def __init__(self, trainers: int, restarts: bool = True) -> None:
        self.job = Coordinator(trainers)
        self.job.ready()
        self.now = 0.0
        self.started: list[int] = []
        self.ended: list[int] = []
        self.told: list[str] = []
        call = small_call(self.job.folder, trainers=trainers, no_restart=not restarts)
        call.say = self.told.append
        call.clock = lambda: self.now
        self.of = Scaling(call, self.started.append, self.ended.append)

    def poll(self, ended: dict[int, str] | None = None, goes_on: bool = True) -> Change:
        self.of.poll(self.job.of, ended or {}, goes_on)
        return self.job.of.change

    def number(self, trainers: int) -> int:
        begun = self.of.ask(AskScale(trainers), self.job.of)
        assert isinstance(begun, ScaleBegun)
        return begun.number

    def progress(self, number: int) -> ScaleProgress:
        progress = self.of.progress(AskScaled(number))
        assert isinstance(progress, ScaleProgress)
        return progress


def test_so_many_are_started_as_are_missing_and_all_join_at_once() -> None:
    wanted = Wanted(2)
    number = wanted.number(4)
    assert not wanted.progress(number).done
    assert wanted.poll() == NO_CHANGE
    assert wanted.started == [2, 3]
    wanted.of.can_join(3)
    assert wanted.poll() == NO_CHANGE
    wanted.of.can_join(2)
    assert wanted.poll() == Change((2, 3))
    assert wanted.progress(number) == ScaleProgress(2, 4, 2, 0, False)


def test_those_that_can_join_wait_for_others_no_longer_than_a_while() -> None:
    wanted = Wanted(2)
    wanted.number(4)
    wanted.poll()
    wanted.of.can_join(3)
    assert wanted.poll() == NO_CHANGE
    wanted.now += JOIN_PATIENCE.total_seconds()
    assert wanted.poll() == Change((3,))


def test_the_last_ones_leave_and_one_that_was_asked_to() -> None:
    wanted = Wanted(4)
    assert wanted.of.leave(1, wanted.job.of)
    assert wanted.poll() == Change((), (1,))
    wanted.number(2)
    assert wanted.poll() == Change((), (1, 3))
    assert not wanted.started
    assert wanted.of.leave(2, wanted.job.of)
    assert not wanted.of.leave(0, wanted.job.of)


def test_more_trainers_than_lanes_and_none_are_refused() -> None:
    for count in (0, -1, 5):
        wanted = Wanted(2)
        refused = wanted.of.ask(AskScale(count), wanted.job.of)
        assert isinstance(refused, Refused)
        assert refused.error.startswith("the number of trainers must be 1 to the schedule's lanes, 4; got ")


def test_another_takes_the_place_of_one_that_is_to_be_replaced() -> None:
    wanted = Wanted(2)
    begun = wanted.of.ask(AskScale(None, 0), wanted.job.of)
    assert begun == ScaleBegun(1, 2, 2)
    assert wanted.poll() == Change((), (0,))
    assert wanted.started == [2]
    assert not wanted.progress(1).done
    refused = wanted.of.ask(AskScale(None, 0), wanted.job.of)
    assert refused == Refused("trainer 0 does not train, or is leaving; the trainers are 1")


def test_one_of_another_host_is_not_replaced_from_here() -> None:
    wanted = Wanted(2)
    wanted.of._call.guests = {1}
    refused = wanted.of.ask(AskScale(None, 1), wanted.job.of)
    assert isinstance(refused, Refused)
    assert "start one in its place with `foreload join`" in refused.error


def test_one_that_is_lost_is_replaced_unless_that_is_not_wanted() -> None:
    for restarts in (True, False):
        wanted = Wanted(3, restarts)
        wanted.of.lost(1)
        wanted.job.of.poll({1: "gone"}, ())
        wanted.job.leave(0, 2, step=8)
        wanted.job.of.poll({1: "gone"}, ())
        wanted.job.ready()
        wanted.poll()
        assert wanted.started == ([3] if restarts else [])


def test_trainers_that_do_not_join_are_not_started_for_ever() -> None:
    wanted = Wanted(2)
    number = wanted.number(3)
    for trainer in range(2, 2 + FRUITLESS_STARTS):
        wanted.poll()
        assert wanted.started[-1] == trainer
        wanted.of.cannot_join(trainer, "the store does not answer")
        wanted.poll({trainer: "ended with status 2"})
    assert len(wanted.started) == FRUITLESS_STARTS
    assert wanted.told[0] == "trainer 2: did not join: the store does not answer"
    failed = wanted.progress(number).failed
    assert failed is not None
    assert "were lost before they trained a step" in failed
    wanted.number(3)
    wanted.poll()
    assert len(wanted.started) == FRUITLESS_STARTS + 1


def test_where_training_ends_nobody_joins() -> None:
    wanted = Wanted(2)
    wanted.number(4)
    wanted.poll()
    wanted.of.can_join(2)
    wanted.of.can_join(3)
    assert wanted.poll(goes_on=False) == NO_CHANGE
    assert sorted(wanted.ended) == [2, 3]


def test_another_number_that_is_asked_for_meanwhile_is_told() -> None:
    wanted = Wanted(2)
    first = wanted.number(4)
    wanted.number(3)
    assert wanted.of.progress(AskScaled(first)) == Refused("another number of trainers was requested meanwhile, 3")


def test_the_last_one_stays_until_another_joins_though_it_was_asked_to_leave() -> None:
    wanted = Wanted(2)
    members = wanted.job.of
    assert wanted.of.leave(1, members)
    assert wanted.poll() == Change((), (1,))
    dead = {0: "was killed by SIGKILL"}
    members.poll(dead, ())
    wanted.job.leave(1, step=8)
    assert members.poll(dead, ())
    assert members.term.members == (1,)
    wanted.of.lost(0)
    wanted.job.ready()
    assert wanted.poll() == Change()
    assert wanted.started == [2]
    wanted.of.can_join(2)
    assert wanted.poll() == Change((2,), (1,))


def test_who_is_to_leave_with_the_only_copies_does_once_others_have_them_though_a_trainer_was_lost() -> None:
    before = first_term(1, range(4), 4, 2, -1)
    there = {trainer: left(before, trainer, 8) for trainer in (0, 1, 2)}
    after = next_term(before, there, 2, leaving=(0,))
    for lane, host in enumerate(after.hosts):
        assert set(after.copies[lane]) & {1, 2} - {host}
    complete = [{*holders} for holders in after.copies]
    assert wants_change(after, complete, Change((), (0,)))
