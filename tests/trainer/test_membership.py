"""Terms from the coordinator's side: who is lost, who takes over whose lanes, and from which step training goes on."""

from __future__ import annotations

import itertools
import shutil
import tempfile
import weakref
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from small_call import small_call
from test_rendezvous import TIMEOUT

from foreload.trainer.cluster.coordinator.membership import (
    CLOSED_SILENCE,
    FRUITLESS_TERMS,
    LEAVE_TIMEOUT,
    UNCOVERED_TIMEOUT,
    Membership,
)
from foreload.trainer.cluster.coordinator.terms import first_term, next_term
from foreload.trainer.cluster.messages.facts import Lease, Term, TermBegins, TermOver
from foreload.trainer.cluster.messages.rendezvous import Rendezvous, host_store
from foreload.trainer.cluster.messages.trainers import Ready, TermLeft
from foreload.trainer.errors import LanesLost
from foreload.trainer.run.event_log import read_events

SILENCE = timedelta(seconds=5)


def left(term: Term, trainer: int, step: int, complete: bool = True) -> TermLeft:
    """What a trainer tells that has all copies that the term gives it, or none."""
    copies = tuple(lane for lane, holders in enumerate(term.copies) if trainer in holders and complete)
    return TermLeft(term.number, step, copies, False, "")


@pytest.mark.parametrize(("trainers", "lanes", "copies"), [*itertools.product((1, 2, 3, 4), (4, 7), (1, 2, 3))])
def test_every_lane_has_as_many_copies_as_are_wanted_on_trainers_that_do_not_host_it(
    trainers: int, lanes: int, copies: int
) -> None:
    term = first_term(1, range(trainers), lanes, copies, -1)
    held = [sum(trainer in holders for holders in term.copies) for trainer in range(trainers)]
    for host, holders in zip(term.hosts, term.copies, strict=True):
        assert len(holders) == len(set(holders)) == min(copies, trainers) - 1
        assert host not in holders
    assert max(held) - min(held) <= 2


@pytest.mark.parametrize(("trainers", "copies"), [(2, 2), (3, 2), (4, 2), (4, 3)])
def test_whoever_is_lost_a_trainer_with_a_copy_takes_over_and_no_other_lane_moves(trainers: int, copies: int) -> None:
    before = first_term(7, range(trainers), 4, copies, 10)
    for count in range(1, copies):
        for gone in itertools.combinations(range(trainers), count):
            there = {t: left(before, t, 20 + t % 2) for t in range(trainers) if t not in gone}
            after = next_term(before, there, copies)
            assert (after.number, after.members, after.committed) == (8, tuple(there), min(e.step for e in there.values()))
            for lane, (was, host) in enumerate(zip(before.hosts, after.hosts, strict=True)):
                assert host == was or (was in gone and host in before.copies[lane])
                assert host not in after.copies[lane]
                assert len(after.copies[lane]) == min(copies, len(there)) - 1
                kept = [holder for holder in before.copies[lane] if holder in there and holder != host]
                assert set(kept) <= set(after.copies[lane])


def test_a_lane_without_a_complete_copy_is_lost_with_its_owner() -> None:
    before = first_term(1, range(3), 3, 2, 10)
    there = {trainer: left(before, trainer, 12, complete=False) for trainer in (1, 2)}
    with pytest.raises(LanesLost, match=r"trainer 0: lost, and with it the last steps of lane 0, .*--resume.*--copies") as error:
        next_term(before, there, 2)
    assert (error.value.lanes, error.value.trainers, error.value.exit_status) == ((0,), (0,), 3)


class Coordinator:
    """A membership on a rendezvous of its own, with a clock that stands still until it is moved."""

    def __init__(self, trainers: int, copies: int = 2) -> None:
        self.now = 0.0
        self.rendezvous = Rendezvous(host_store("127.0.0.1", TIMEOUT))
        self.terms: list[int] = []
        self.killed: list[int] = []
        self.told: list[str] = []
        term = first_term(1, range(trainers), 4, copies, -1)
        self.folder = Path(tempfile.mkdtemp())
        weakref.finalize(self, shutil.rmtree, self.folder)
        call = small_call(self.folder, trainers=trainers, copies=copies, peer_timeout=SILENCE.total_seconds())
        call.say = self.told.append
        call.run.raise_term = self.terms.append  # type: ignore[method-assign, assignment]
        call.clock = lambda: self.now
        self.of = Membership(call, self.rendezvous, term, self._kill)

    @property
    def noted(self) -> list[dict[str, Any]]:
        """The events without their times."""
        return [{name: value for name, value in event.items() if name != "time"} for event in read_events(self.folder)]

    def _kill(self, trainer: int) -> bool:
        self.killed.append(trainer)
        return True

    def ready(self) -> None:
        for trainer in self.of.term.members:
            self.of.receive(trainer, Ready(self.of.term.number, {}))
        assert self.of.may_begin
        self.of.begin()

    def leave(self, *trainers: int, step: int) -> None:
        for trainer in trainers:
            self.of.receive(trainer, left(self.of.term, trainer, step))


def test_a_term_begins_when_all_members_are_ready() -> None:
    job = Coordinator(2)
    job.of.receive(0, Ready(1, {}))
    assert not job.of.may_begin
    job.of.receive(1, Ready(0, {}))  # of an earlier term
    assert not job.of.may_begin
    assert job.rendezvous.poll(TermBegins, 1) is None
    job.ready()
    assert job.rendezvous.poll(TermBegins, 1) is not None
    assert not job.of.may_begin


def test_a_dead_trainer_ends_the_term_and_the_next_begins_when_the_others_have_left() -> None:
    job = Coordinator(3)
    job.ready()
    assert not job.of.poll({}, ())
    assert not job.of.poll({1: "was killed by SIGKILL"}, ())
    assert job.rendezvous.poll(TermOver, 1) is not None
    job.leave(0, step=8)
    assert not job.of.poll({1: "was killed by SIGKILL"}, ())
    job.leave(2, step=9)
    assert job.of.poll({1: "was killed by SIGKILL"}, ())
    assert job.rendezvous.read(Term, 2) == job.of.term
    assert (job.of.term.members, job.of.term.committed) == ((0, 2), 8)
    assert (job.terms, job.killed) == ([2], [1])
    assert "trainer 1: lost (was killed by SIGKILL); training goes on after step 8" in job.told[0]
    job.ready()
    taker = job.of.term.hosts[2]
    at = {"step": 8, "term": 2, "cause": None}
    assert [event["kind"] for event in job.noted] == ["term-began", "trainer-lost", "lanes-taken-over", "term-began"]
    assert job.noted[1:] == [
        {"kind": "trainer-lost", "step": -1, "term": 1, "trainer": 1, "cause": "was killed by SIGKILL"},
        {"kind": "lanes-taken-over", "lanes": [2], "from_trainer": 1, "to_trainer": taker} | at,
        {"kind": "term-began", "members": [0, 2], "lanes": [0, 0, taker, 2]} | at,
    ]


def test_one_that_ended_in_order_is_not_missed() -> None:
    job = Coordinator(2)
    job.ready()
    assert not job.of.poll({1: "ended with status 0"}, [1])
    assert job.rendezvous.poll(TermOver, 1) is None


def test_one_that_has_ended_and_is_dead_is_lost_once_others_have_to_go_on() -> None:
    job = Coordinator(3)
    job.ready()
    dead = {2: "was killed by SIGKILL"}
    assert not job.of.poll(dead, [1, 2])
    job.leave(0, 1, step=9)
    assert job.of.poll(dead, [1, 2])
    assert "trainer 2: lost (was killed by SIGKILL)" in job.told[0]


def test_one_that_does_not_leave_is_lost_too() -> None:
    job = Coordinator(4)
    job.ready()
    job.leave(0, 1, 2, step=3)
    assert not job.of.poll({}, ())
    job.now += LEAVE_TIMEOUT.total_seconds()
    assert job.of.poll({}, ())
    assert job.of.term.members == (0, 1, 2)
    assert "it does not leave the term" in job.told[0]


def test_one_whose_connection_another_found_closed_is_lost_once_it_does_not_renew_its_lease() -> None:
    soon = timedelta(seconds=CLOSED_SILENCE * SILENCE.total_seconds())
    for closed, renews, lost in ((2, False, True), (2, True, False), (None, False, False)):
        job = Coordinator(4)
        job.ready()
        job.rendezvous.publish(Lease(0), 2)
        assert not job.of.poll({}, ())
        for trainer in (0, 1, 3):
            job.of.receive(trainer, replace(left(job.of.term, trainer, 3), closed=closed))
        job.now += soon.total_seconds()
        assert not job.of.poll({}, ())
        if renews:
            job.rendezvous.publish(Lease(1), 2)
        job.now += 0.1
        assert job.of.poll({}, ()) == lost
        if lost:
            assert (job.of.term.members, job.killed) == ((0, 1, 3), [2])
            assert "trainer 2: lost (its connections are closed, and it sends no messages)" in job.told[0]
        else:
            # It comes later, and is a member of the next term.
            job.leave(2, step=3)
            assert job.of.poll({}, ())
            assert (job.of.term.members, job.killed) == ((0, 1, 2, 3), [])


def test_one_that_alone_has_lanes_and_may_be_alive_is_waited_for() -> None:
    job = Coordinator(4)
    job.ready()
    job.of.poll({1: "gone"}, ())
    job.leave(0, step=3)
    job.now += LEAVE_TIMEOUT.total_seconds()
    assert not job.of.poll({1: "gone"}, ())
    assert not job.of.poll({1: "gone"}, ())
    assert len(job.told) == 1
    assert "it does not leave the term; waiting for it, since no other trainer has a complete copy of lane" in job.told[0]
    assert not job.killed
    job.leave(2, 3, step=4)
    assert job.of.poll({1: "gone"}, ())
    assert (job.of.term.members, job.of.term.committed, job.killed) == ((0, 2, 3), 3, [1])


def test_nobody_is_waited_for_for_ever() -> None:
    job = Coordinator(4)
    job.ready()
    job.of.poll({1: "gone"}, ())
    job.leave(0, step=3)
    job.now += UNCOVERED_TIMEOUT.total_seconds() + 1
    with pytest.raises(
        LanesLost, match=r"^trainer 1 \(gone\), 2 \(it does not leave the term\), 3 \(it does.*\): lost, and with it"
    ):
        job.of.poll({1: "gone"}, ())


def test_the_only_one_that_is_left_may_be_silent() -> None:
    job = Coordinator(2)
    job.ready()
    job.rendezvous.publish(Lease(0), 0)
    job.of.poll({1: "gone"}, ())
    job.leave(0, step=3)
    assert job.of.poll({1: "gone"}, ())
    job.ready()
    for _ in range(20):
        assert not job.of.poll({1: "gone"}, ())
        job.now += SILENCE.total_seconds() / 10
    assert job.rendezvous.poll(TermOver, 2) is None


def test_a_trainer_that_renews_no_lease_is_lost_unless_the_coordinator_itself_was_stopped() -> None:
    job = Coordinator(2)
    job.ready()
    counts = itertools.count()

    def renew(*trainers: int) -> None:
        for trainer in trainers:
            job.rendezvous.publish(Lease(next(counts)), trainer)

    renew(0, 1)
    job.of.poll({}, ())
    job.now += 100  # nobody looked meanwhile
    assert not job.of.poll({}, ())
    assert job.rendezvous.poll(TermOver, 1) is None
    for _ in range(12):
        job.now += SILENCE.total_seconds() / 10
        renew(0)
        job.of.poll({}, ())
    assert job.rendezvous.poll(TermOver, 1) is not None
    job.leave(0, step=5)
    assert job.of.poll({}, ())
    assert job.of.term.members == (0,)
    assert job.killed == [1]
    assert "it sends no messages" in job.told[0]


def test_two_that_cannot_reach_each_other_end_terms_until_one_of_them_goes() -> None:
    job = Coordinator(3)
    for _ in range(FRUITLESS_TERMS - 1):
        job.ready()
        job.leave(*job.of.term.members, step=-1)
        assert job.of.poll({}, ())
        assert job.of.term.members == (0, 1, 2)
    job.ready()
    job.leave(0, 1, 2, step=-1)
    assert job.of.poll({}, ())
    assert job.of.term.members == (0, 1)
    assert job.killed == [2]
