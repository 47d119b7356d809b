"""A job without steps, rows or processes: the real coordinator, and trainers that do nothing but what keeps a run together.

What each trainer has of each lane is one number, the last training step that it knows all of. So it shows at once where a lane goes to a trainer that
lacks its rows, where a step is undone that cannot be, or where two trainers own a lane. Who does what next is drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest import mock

from engine_twin import TwinEngine
from simulated_checkpoints import Broken, CoordinatedCheckpoints, MemberCheckpoints, StepCounts, step_ended

from foreload.cache.protocol.shards.shard_status import ShardSnapshot
from foreload.trainer.cluster.coordinator.coordinator import Coordinator
from foreload.trainer.cluster.coordinator.training_call import TrainingCall
from foreload.trainer.cluster.engines.engine import Draining
from foreload.trainer.cluster.messages.control import (
    AskCheckpoint,
    AskCheckpointed,
    AskScale,
    AskStop,
    CheckpointBegun,
    CheckpointProgress,
)
from foreload.trainer.cluster.messages.facts import Admitted, HandedOver, Lease, Term, TermBegins, TermOver
from foreload.trainer.cluster.messages.rendezvous import Rendezvous, StopAgreement
from foreload.trainer.cluster.messages.trainers import (
    CanJoin,
    CopiesReport,
    Ended,
    Events,
    LeaveWanted,
    Ready,
    SeededCopy,
    TermLeft,
    TrainerEnd,
)
from foreload.trainer.errors import LanesLost, TrainerError

LANES = 4
TRAINS = ("training", "evaluating")
STAGES = ("can join", "forming", "ready", "evaluating", "behind the last step", "left", "next term", "ended")
"""At which a trainer may die."""
FAILURES_LEFT = 3  # of disks and memory, after the last fault
PATIENT_LOOKS = 4000  # after the last fault, within which the trainers must train on: far more than there ever are


class Board(Rendezvous):
    """A rendezvous in memory: what stands there is the message itself."""

    def __init__(self) -> None:
        self._stands: dict[tuple[type, tuple[int, ...]], Any] = {}

    def publish(self, fact: Any, *place: int) -> None:
        """See Rendezvous."""
        self._stands[type(fact), place] = fact

    def poll(self, kind: type[Any], *place: int) -> Any:
        """See Rendezvous."""
        return self._stands.get((kind, place))

    def read(self, kind: type[Any], *place: int) -> Any:
        """See Rendezvous: what is not there is never waited for here."""
        return self._stands[kind, place]

    def take(self, kind: type[Any], *place: int) -> Any:
        """See Rendezvous."""
        return self._stands.pop((kind, place), None)


@dataclass
class Trainer:
    """One trainer. stage: starting, can join, forming, ready, training, left, ended, or gone; knows: by lane, the last step of which it has all rows,
    as its owner or in a copy. alive: its process is; stands_still: and does nothing.
    """

    world: World
    number: int
    stage: str
    term: Term | None = None
    step: int = -1
    knows: dict[int, int] = field(default_factory=dict)
    owned: set[int] = field(default_factory=set)
    joins: bool = False
    alive: bool = True
    stands_still: bool = False
    wants_to_leave: bool = False
    left_early: bool = False  # the term that it is in
    dies_at: str | None = None  # the stage at which it will die
    outbox: list[Any] = field(default_factory=list)
    sent: list[Any] = field(default_factory=list)
    delivered: int = 0
    lease: int = 0
    agreement: StopAgreement | None = None
    plan: int = 0  # the version that it is started with
    round: int = 0  # of those behind an evaluation

    def __post_init__(self) -> None:
        self.checkpoints = MemberCheckpoints(self.world, self, self.plan)

    @property
    def acts(self) -> bool:
        """Whether it does anything."""
        return self.alive and not self.stands_still

    def say(self, event: Any) -> None:
        """Report something, which the coordinator may get later."""
        self.outbox.append(event)

    def deliver(self) -> None:
        """The oldest report reaches the rendezvous."""
        event = self.outbox.pop(0)
        self.sent.append(event)
        self.world.board.publish(Events((event,)), self.number, self.delivered)
        self.delivered += 1

    def repeat(self, event: Any) -> None:
        """A report reaches it once more."""
        self.world.board.publish(Events((event,)), self.number, self.delivered)
        self.delivered += 1

    # What it does next; returns whether it did anything.

    def act(self) -> bool:
        """Do one thing, if there is one to do."""
        if self.stage in ("forming", "ready", "training", "evaluating", "behind the last step", "ended") and self._is_over():
            return self._leave("the term is over")
        if self.stage == self.dies_at:
            self.alive = False
            return True
        act: Callable[[], bool] = getattr(self, "_" + self.stage.replace(" ", "_"))
        return act()

    def _is_over(self) -> bool:
        assert self.term is not None
        return self.world.board.poll(TermOver, self.term.number) is not None

    def _starting(self) -> bool:
        self.say(CanJoin())
        self.stage = "can join"
        return True

    def _can_join(self) -> bool:
        admitted = self.world.board.poll(Admitted, self.number)
        if admitted is None:
            return False
        self._adopt(self.world.board.read(Term, admitted.term))
        return True

    def _adopt(self, term: Term) -> None:
        """Come to a term: undo what is not committed, hand over what goes to others, wait for what comes from others."""
        world, before = self.world, self.owned
        if self.number not in (*term.members, *term.left):
            self.stage, self.owned = "gone", set()
            self.alive = False
            return
        if any(step > term.committed for step in world.checkpoints.published):
            raise Broken(f"a checkpoint is of a step after {term.committed}, which is undone: {world.checkpoints.published}")
        if not self.joins and not self.step - 1 <= term.committed <= self.step:
            raise Broken(f"trainer {self.number}: is at step {self.step}, and is to go on after {term.committed}")
        self.knows = {lane: min(step, term.committed) for lane, step in self.knows.items()}
        self.term, self.step = term, term.committed
        self.owned = {lane for lane in before if term.hosts[lane] == self.number}
        if before - self.owned:
            world.board.publish(HandedOver(), term.number, self.number)
        if self.number in term.left:
            self.stage, self.alive = "gone", False
            return
        holds = {lane for lane, holders in enumerate(term.copies) if self.number in holders}
        self.knows = {lane: step for lane, step in self.knows.items() if lane in holds or term.hosts[lane] == self.number}
        for lane, holders in enumerate(term.complete):
            if self.number in holders and lane in holds and self.knows.get(lane) != term.committed:
                raise Broken(f"trainer {self.number}: is said to have lane {lane} after step {term.committed}, and has not")
        self.agreement = StopAgreement(world.board, term.leader == self.number, term.number)
        self.stage, self.left_early = "forming", False

    def _forming(self) -> bool:
        assert self.term is not None
        term, world = self.term, self.world
        if any(not world.trainers[other].alive for other in term.members):
            return self._leave("a trainer is gone")
        if any(world.trainers[other].term != term for other in term.members):
            return False
        for lane in term.lanes_of(self.number):
            if lane in self.owned:
                continue
            former = term.former[lane] if term.former else None
            if former is not None and world.board.poll(HandedOver, term.number, former) is None:
                return False
            if term.number > 1 and not self.joins and self.knows.get(lane) != term.committed:
                raise Broken(f"trainer {self.number}: takes lane {lane} over after step {term.committed}, and knows {self.knows}")
            if self.joins:
                raise Broken(f"trainer {self.number}: joins, and hosts lane {lane} at once")
            self.owned.add(lane)
            self.knows[lane] = term.committed
        if self.joins and not world.trainers[term.leader].acts:
            return False  # who leads has yet to send it what the others have in memory
        self.joins = False
        self.say(Ready(term.number, {}))
        self._report_copies()
        self.stage = "ready"
        return True

    def _ready(self) -> bool:
        assert self.term is not None
        if self.world.board.poll(TermBegins, self.term.number) is None:
            return False
        for lane in range(LANES):
            owners = [one.number for one in self.world.trainers if one.acts and one.term == self.term and lane in one.owned]
            if owners != [self.term.hosts[lane]] and self.world.trainers[self.term.hosts[lane]].acts:
                raise Broken(f"lane {lane} in term {self.term.number}: is owned by {owners}, must be by {self.term.hosts[lane]}")
        assert self.agreement is not None
        if self.agreement.reached(self.step):
            self.stage = "behind the last step"
        else:
            self.checkpoints.steps_begin(self.step)
            self._go_on_behind_step()
        return True

    def _go_on_behind_step(self) -> None:
        """Evaluate, where that is due, or train on."""
        assert self.term is not None
        is_due = (
            self.world.call.job.keep_best is not None
            and self.step >= 0
            and self.world.evaluated_after(self.step - 1) == self.step
        )
        self.stage, self.round = "evaluating" if is_due else "training", 0
        if is_due and self.term.leader == self.number:
            self.say(self.checkpoints.enter_evaluation(self.term.number, self.step))

    def _evaluating(self) -> bool:
        """Behind an evaluation: who leads says, round by round, whether all wait, and all take part in each round."""
        assert self.term is not None
        others = [self.world.trainers[other] for other in self.term.members]
        if any(not other.alive or other.left_early for other in others):
            return self._leave("a trainer is gone")
        said, place = self.world.said, (self.term.number, self.step, self.round)
        if place not in said:
            if self.term.leader != self.number or not all(other.has_come_to(*place) for other in others):
                return False
            said[place] = self.checkpoints.said_behind(self.step)
        self.round += 1
        if self.checkpoints.heed(said[place], self.step):
            self.stage = "training"
        return True

    def has_come_to(self, term: int, step: int, turn: int) -> bool:
        """Whether it takes part in a round behind an evaluation."""
        return (
            self.acts
            and self.term is not None
            and (self.term.number, self.stage, self.step, self.round) == (term, "evaluating", step, turn)
        )

    def _training(self) -> bool:
        assert self.term is not None
        assert self.agreement is not None
        others = [self.world.trainers[other] for other in self.term.members]
        if any(not other.alive or other.left_early for other in others):
            return self._leave("a trainer is gone")
        if self.wants_to_leave:
            self.wants_to_leave = False
            self.say(LeaveWanted())
        # A step ends once all others take part in it.
        if any(other.term != self.term or other.step < self.step or not other.acts for other in others):
            return False
        if any(other.stage in ("ready", "evaluating") and other.step == self.step for other in others):
            return False
        self.step += 1
        for lane in self.knows:
            self.knows[lane] = self.step
        self.say(step_ended(self.step))
        self.world.sometimes(self.checkpoints.look)
        self.checkpoints.step_ended(self.step)
        if self.agreement.stop_after(self.step):
            self.stage = "behind the last step"
        else:
            self._go_on_behind_step()
        return True

    def _behind_the_last_step(self) -> bool:
        """Wait until all others are: who leaves closes its connections."""
        assert self.term is not None
        assert self.agreement is not None
        others = [self.world.trainers[other] for other in self.term.members]
        if any(not other.alive or other.left_early for other in others):
            return self._leave("a trainer is gone")
        if any(other.term == self.term and other.stage in TRAINS for other in others):
            return False
        if self.agreement.goes_on():
            return self._leave(None)
        self.world.sometimes(self.checkpoints.write)
        self.checkpoints.look()
        if self.checkpoints.is_at_work and self.world.draw.random() < 0.9:
            return True
        self.checkpoints.drop("training is over")
        return self._end(True)

    def seed(self) -> None:
        """A copy becomes complete."""
        assert self.term is not None
        missing = [lane for lane, holders in enumerate(self.term.copies) if self.number in holders and lane not in self.knows]
        if missing and self.stage == "training":
            self.knows[self.world.draw.choice(missing)] = self.step
            self._report_copies()

    def _report_copies(self) -> None:
        assert self.term is not None
        held = [lane for lane, holders in enumerate(self.term.copies) if self.number in holders]
        if held:
            self.say(CopiesReport(self.term.number, {lane: SeededCopy(1, 1, lane in self.knows) for lane in held}))

    def _end(self, stopped: bool) -> bool:
        assert self.term is not None
        end = TrainerEnd(self.step, stopped, None, 0, {}, {}, (), 0, "", mock.sentinel.totals)
        self.world.board.publish(end, self.term.number, self.number)
        self.say(Ended())
        self.stage = "ended"
        return True

    def _ended(self) -> bool:
        return False

    def _leave(self, why: str | None) -> bool:
        assert self.term is not None
        copies = tuple(sorted(lane for lane in self.knows if lane not in self.owned))
        stopping = self.stage == "ended"
        self.left_early = why is not None
        self.checkpoints.drop("the term is over")
        step = -1 if self.joins else self.step
        # Who is dead has closed its connections, and so has who has left; who stands still may be taken for it.
        others = [other for other in self.term.members if other != self.number]
        closed = [other for other in others if not self.world.trainers[other].acts or self.world.trainers[other].left_early]
        named = self.world.draw.choice([None, *closed]) if why is not None else None
        self.say(TermLeft(self.term.number, step, () if self.joins else copies, stopping, why, joins=self.joins, closed=named))
        self.stage = "left"
        return True

    def _left(self) -> bool:
        assert self.term is not None
        term = self.world.board.poll(Term, self.term.number + 1)
        if term is None:
            return False
        if self.dies_at == "next term":
            self.alive = False
            return True
        self._adopt(term)
        return True

    def _gone(self) -> bool:
        return False


class _Engine(TwinEngine):
    """Machines drain as the world says."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def draining(self) -> Draining:
        """See Engine."""
        return Draining(frozenset(self._world.drained))


class Processes:
    """The trainers' processes, as the coordinator starts and ends them. killable: they are on its own machine."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.forgotten: set[int] = set()
        self.engine = _Engine(world)

    @property
    def pids(self) -> dict[int, int]:
        """See SpawnedTrainers."""
        return {one.number: one.number for one in self._world.trainers}

    def ended(self) -> dict[int, str]:
        """See SpawnedTrainers."""
        return {one.number: "has ended" for one in self._world.trainers if not one.alive and one.number not in self.forgotten}

    def start(self, trainer: int, plan: int) -> None:
        """See SpawnedTrainers."""
        assert trainer == len(self._world.trainers)
        self._world.trainers.append(Trainer(self._world, trainer, "starting", joins=True, plan=plan))

    def end(self, trainer: int) -> bool:
        """See SpawnedTrainers."""
        if not self._world.killable:
            return not self._world.trainers[trainer].alive
        self._world.trainers[trainer].alive = False
        self.forgotten.add(trainer)
        return True

    def forget(self, trainer: int) -> None:
        """See SpawnedTrainers."""
        self.forgotten.add(trainer)

    def take_offers(self, offer: object, plan: int) -> list[int]:
        """See SpawnedTrainers."""
        return []


class World:
    """A job of so many trainers, with so many copies of each lane. draw: who does what next; killable: whether a silent trainer can be ended."""

    def __init__(self, call: TrainingCall, seed: int, killable: bool = True) -> None:
        self.now, self.draw, self.killable, self.board = 0.0, Random(seed), killable, Board()
        self.asked: list[Any] = []
        self.trainers: list[Trainer] = []
        self.drained: set[int] = set()  # trainers whose machines are about to be taken away
        self.call = replace(call, clock=lambda: self.now, say=lambda line: None, start=replace(call.start))
        self.call.run = mock.Mock(
            path=call.run.path, placement=SimpleNamespace(text="", r=0, shard_count=1, removed=(), migrating=False)
        )
        requests = SimpleNamespace(answer=self._answer)
        shards = mock.Mock(memory=None, together=ShardSnapshot(()), local=None, urls=[], plain_urls=())
        shards.take_replacement.return_value = None
        report = StepCounts(range(call.job.trainers), -1)
        self.coordinator = Coordinator(self.call, self.board, Processes(self), shards, requests, report)  # type: ignore[arg-type]
        self.checkpoints = CoordinatedCheckpoints(self.call, self.board, self.coordinator._plan, report, self.draw)
        self.coordinator.checkpointing = self.checkpoints
        self._tickets: list[int] = []
        self.said: dict[tuple[int, int, int], int] = {}  # by term, step and round, behind evaluations
        self.evaluated_after = self.call.schedule.header.next_evaluated
        self.coordinator._linger = self.coordinator._take_events  # type: ignore[method-assign]
        self.coordinator.begin()
        term = self.coordinator.members.term
        for trainer in range(call.job.trainers):
            self.trainers.append(Trainer(self, trainer, "forming"))
        for one in self.trainers:
            one.joins = False
            one._adopt(term)
            one.knows = dict.fromkeys(term.lanes_of(one.number), -1)
            one.owned = set(one.knows)
        self.failed: TrainerError | None = None

    def _answer(self, respond: Callable[[Any], Any]) -> None:
        for request in self.asked:
            if isinstance(answer := respond(request), CheckpointBegun):
                self._tickets.append(answer.checkpoint)
        self.asked.clear()

    def look(self) -> None:
        """The coordinator looks once. Raises what it does."""
        for one in self.trainers:
            if one.acts:
                one.lease += 1
                self.board.publish(Lease(one.lease), one.number)
        self.now += 0.03
        try:
            self.coordinator.look()
        except LanesLost as error:
            self._check_lost(error)
            self.failed = error
        except TrainerError as error:
            # A loss is survived only with copies, and once training has begun.
            if self.coordinator.members.survives and any(one.step >= 0 for one in self.trainers):
                raise Broken(f"the job ends: {error}") from error
            self.failed = error
        except (ArithmeticError, LookupError) as error:
            raise Broken(f"the coordinator fails: {type(error).__name__}: {error}") from error

    def _check_lost(self, error: LanesLost) -> None:
        """Lanes may be lost only with their owner, where no trainer that is there has a complete copy."""
        term = self.coordinator.members.term
        there = [
            one for one in self.trainers if one.acts and one.stage == "left" and one.number in term.members and not one.outbox
        ]
        for lane in error.lanes:
            if any(lane in one.knows for one in there):
                raise Broken(f"lane {lane}: is given up, though a trainer has it")

    def move(self) -> None:
        """Something happens: what, is drawn."""
        one = self.draw.choice(self.trainers)
        kind = self.draw.random()
        if kind < 0.25:
            self.look()
        elif kind < 0.45 and one.outbox:
            one.deliver()
        elif kind < 0.5 and one.acts and one.term is not None and one.stage == "training":
            one.seed()
        elif kind < 0.52 and (reported := [event for event in one.sent if isinstance(event, Ready | TermLeft | CopiesReport)]):
            one.repeat(self.draw.choice(reported))
        elif kind < 0.56:
            self.checkpoints.work.do_one()
        elif kind < 0.6 and one.acts:
            one.checkpoints.write()
        elif one.acts:
            one.act()

    def sometimes(self, act: Callable[[], object]) -> None:
        """Do something, or not."""
        if self.draw.random() < 0.5:
            act()

    def disturb(self, fault: str, which: int) -> None:
        """Put a fault in, or ask for something. which: trainer, or how many."""
        one = self.trainers[which % len(self.trainers)]
        if fault == "kill":
            one.alive = False
        elif fault in STAGES:
            one.dies_at = fault
        elif fault == "stop":
            one.stands_still = True
        elif fault == "go on":
            one.stands_still = False
        elif fault == "leave":
            one.wants_to_leave = True
        elif fault == "drain":
            self.drained.add(one.number)
        elif fault == "scale":
            self.asked.append(AskScale(1 + which % LANES))
        elif fault == "replace":
            self.asked.append(AskScale(None, one.number))
        elif fault == "end":
            self.asked.append(AskStop())
        elif fault == "checkpoint":
            self.asked.append(AskCheckpoint(None))
        elif fault == "wait":
            self.now += 7.0 * (1 + which)

    @property
    def is_over(self) -> bool:
        """Whether nothing further can happen: all have ended, or lanes are lost, or nobody is left."""
        return self.failed is not None or self.coordinator.all_ended

    def run_to_end(self) -> None:
        """Without further faults, and soon none of disks either: the trainers train on, or the job ends. Raises Broken where they do neither."""
        for one in self.trainers:
            one.stands_still = False
        self.checkpoints.failures_left = FAILURES_LEFT
        members, begun, published = self.coordinator.members, None, len(self.checkpoints.published)
        due = int(self.call.job.checkpoint_every is not None)
        further = 3 if self.call.job.keep_best is None else 9  # so that an evaluation is among them
        for _ in range(PATIENT_LOOKS):
            if self.is_over:
                return
            before = self._state()
            for one in list(self.trainers):
                while one.outbox:
                    one.deliver()
                if one.acts:
                    one.act()
                    one.checkpoints.write()
                    if one.stage == "training":
                        one.seed()
            self.checkpoints.work.do_one()
            self.look()
            trained = [self.trainers[trainer] for trainer in members.term.members]
            left = not self.drained & {*members.term.members} or self.drained >= {*members.term.members}
            if members.is_stable and left and all(one.stage in TRAINS for one in trained):
                step = min(one.step for one in trained)
                begun = step if begun is None else begun
                saved = len(self.checkpoints.published) - published
                if step > begun + further and saved >= due and self._has_all_checkpoints():
                    return
            else:
                begun = None
            if self._state() == before:
                self.now += 1.0
        raise Broken(
            f"nobody trains on: {[(one.number, one.stage, one.step) for one in self.trainers if one.alive]}, {members.term}"
        )

    def _has_all_checkpoints(self) -> bool:
        """Whether everyone who asked for one knows what became of it."""
        told = [self.checkpoints.wanted.progress(AskCheckpointed(ticket)) for ticket in self._tickets]
        return all(isinstance(progress, CheckpointProgress) and progress.done for progress in told)

    def close(self) -> None:
        """The call ends, as `TrainerGroup` ends it. Raises Broken where a checkpoint is half there, or somebody is not told."""
        if self.failed is None and self.coordinator.all_ended:
            self.checkpoints.finish(self.coordinator.members.term.members, lambda future, at_most: self.checkpoints.work.close())
        self.checkpoints.close(stopped=self.failed is None)
        if self.failed is None and self.coordinator.all_ended:
            self.checkpoints.check_best()
        self.checkpoints.check_over()
        if not self._has_all_checkpoints():
            raise Broken(f"who asked for a checkpoint is never told: {self._tickets}")

    def _state(self) -> object:
        return [(one.stage, one.step, one.term and one.term.number, one.delivered) for one in self.trainers]
