"""A trainer's side of checkpoints that are saved while it trains: the step is agreed on, the copy made behind it, the files written meanwhile.

No step asks the rendezvous for anything while none is wanted. A checkpoint is wanted by the plan. When all trainers have reported that they
know of it, the coordinator lets the one that leads name the step. It does so behind a step, before it sends anything of the next: so no other one can
end that without seeing the name, if it looks behind every step from then on.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch import Tensor

from foreload.cache.protocol.rounds.background import SHARE
from foreload.cache.protocol.rounds.snapshot import Snapshot, warm_up
from foreload.cache.rows.layout import RowLayout
from foreload.cache.rows.slot_copy import SlotCopy
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.assembly.dense_file import dense_tensors, encode_dense
from foreload.trainer.checkpoints.changed_rows import changed_rows
from foreload.trainer.checkpoints.contents import DENSE
from foreload.trainer.checkpoints.files import LEAST_BITS
from foreload.trainer.checkpoints.part import GRACE_SECONDS, PartWriter
from foreload.trainer.checkpoints.part import warm_up as rehearse_part
from foreload.trainer.checkpoints.row_files import RowSink
from foreload.trainer.cluster.member.joined_trainer import JoinedTrainer
from foreload.trainer.cluster.messages.facts import CheckpointAt, GoOnAfter, Orphaned, StopWanted
from foreload.trainer.cluster.messages.trainers import (
    CheckpointPlan,
    CheckpointReport,
    CopyTaken,
)
from foreload.trainer.job.metric_choice import Watched
from foreload.trainer.step.dense_agreement import dense_checksums
from foreload.trainer.step.program import Trainer
from foreload.trainer.step.term_session import TrainerParts
from foreload.trainer.storage import place

LEAST_SHARE = 0.1  # so that a checkpoint comes to its end
_STEPS = 16  # that are looked at together
_TOO_SLOW, _HARDLY_SLOWER = 1.06, 1.03  # of a step, against one without a checkpoint


class StepPace:
    """Of one trainer. Its steps are reported one after the other; medians of some are compared, so that single slow ones do not count."""

    def __init__(self) -> None:
        self._before: deque[float] = deque(maxlen=8 * _STEPS)
        self._meanwhile: list[float] = []
        self._last: float | None = None
        self.share = SHARE

    def step(self, now: float, beside: bool) -> None:
        """A step has ended. now: in seconds; beside: a checkpoint was being saved."""
        last, self._last = self._last, now
        if last is None:
            return
        if not beside:
            self._before.append(now - last)
            return
        self._meanwhile.append(now - last)
        if len(self._meanwhile) < _STEPS:
            return
        slower = median(self._meanwhile) / median(self._before) if len(self._before) >= _STEPS else 1.0
        self._meanwhile.clear()
        if slower > _TOO_SLOW:
            self.share = max(self.share / 1.5, LEAST_SHARE)
        elif slower < _HARDLY_SLOWER:
            self.share = min(self.share * 1.2, SHARE)


_PAUSE_SECONDS = 0.02  # between two looks whether a part is written, or training goes on
_GO_ON, _TAKE, _WAIT = 0, 1, 2  # what the trainer that leads says behind an evaluation


@dataclass(frozen=True, slots=True)
class _Taken:
    """What a trainer has in memory of a checkpoint. dense: gives file name and contents of the dense part; began: time.monotonic() of the copy;
    room: what it was made in, by lane.
    """

    snapshot: Snapshot
    parts: TrainerParts
    dense: Callable[[], tuple[str, bytes]] | None
    began: float
    room: dict[int, Future[SlotCopy]]


class TrainerCheckpoints:
    """Of one trainer, the checkpoint under way; its main thread uses it."""

    def __init__(self, joined: JoinedTrainer) -> None:
        self._rendezvous, self._events, self._come_to = joined.rendezvous, joined.events, joined.reach_point
        self._job = joined.job
        self._begun: Callable[[], int] = lambda: 0
        # What evaluations have been, asked behind the step that a checkpoint is of.
        self.watched: Callable[[], Watched | None] = lambda: None
        self._wanted: CheckpointPlan | None = None
        self._last = 0  # the number of the one that was begun last
        self._at: int | None = None
        self._taken: _Taken | None = None
        self._report: CheckpointReport  # once it is taken
        self._part: PartWriter | None = None
        # Memory for the copy, by lane. Whoever writes it has it meanwhile, and gives it back if all goes well.
        self._room: dict[int, Future[SlotCopy]] = {}
        self._room_stays = False
        self._keeps_best = False
        # The term in which training waits behind the evaluation that is over, where this trainer leads.
        self._waits_in: int | None = None
        self._pace = StepPace()
        self._maker = ThreadPoolExecutor(1, "checkpoint memory")  # to be given memory takes long

    def prepare(self, layouts: Sequence[RowLayout]) -> None:
        """Before training: have ready what the job's checkpoints need."""
        job = self._job
        self._room_stays, self._keeps_best = job.saves_checkpoints, job.keep_best is not None
        if job.saves_checkpoints:
            rehearse_part(layouts, LEAST_BITS if job.checkpoint_bits == "auto" else job.checkpoint_bits)

    def now_trains(self, trainer: Trainer, begun: Callable[[], int]) -> None:
        """A term begins. begun: how many segments of the schedule were begun, asked behind the step that a checkpoint is of."""
        self._begun = begun
        if self._room_stays:
            self._make_room(trainer)

    def _make_room(self, trainer: Trainer) -> None:
        """Have memory for copies of the lanes' slots made, where there is none."""
        partitions = trainer.lanes.partitions
        if self._room.keys() != partitions.keys():
            self._room = {
                lane: self._room.get(lane) or self._maker.submit(SlotCopy, partition) for lane, partition in partitions.items()
            }

    def follow(self, plan: CheckpointPlan | None) -> None:
        """Do what is planned for the checkpoint under way, or another one."""
        if self._wanted is not None and (plan is None or plan.number != self._wanted.number):
            self.drop("it is given up")
        if plan is None:
            return
        if plan.number > self._last:
            self._begin(plan)
        elif self._wanted is not None:
            before, self._wanted = self._wanted, plan
            # Where others were faster, it is known where it is to be written before it is taken here.
            if before.part is None:
                self._begin_writing()

    def _begin(self, wanted: CheckpointPlan) -> None:
        """Look for the step of this checkpoint from now on."""
        warm_up()
        self._wanted, self._at, self._last = wanted, None, wanted.number
        self._events.send(CheckpointReport(wanted.number))
        self._come_to("checkpoint asked for")

    def drop(self, why: str) -> None:
        """Do no more for the checkpoint under way; nobody waits for it any more."""
        if self._wanted is not None:
            if self._taken is not None:
                self._taken.snapshot.abandon(why)
            self._wanted = self._taken = self._part = None
            if not self._room_stays:
                self._room = {}

    def after_step(self, trainer: Trainer, step: int) -> None:
        """Behind each training step, before anything of the next one leaves: make the copy, if the checkpoint is of this step."""
        wanted, taken = self._wanted, self._taken
        self._pace.step(time.monotonic(), beside=taken is not None)
        if taken is not None:
            taken.snapshot.share = self._pace.share
        if wanted is None or taken is not None or wanted.behind is not None:
            return
        self._make_room(trainer)
        if self._at is None:
            self._at = self._named(wanted, step, trainer.session.leads)
        if self._at == step:
            self._take_if_room(wanted, trainer, step)

    def _take_if_room(self, wanted: CheckpointPlan, trainer: Trainer, step: int) -> None:
        """Copy what changes with the next step, or report that there is no memory for that."""
        try:
            self._take(wanted, trainer, step)
        except MemoryError:
            self.drop("there is not enough memory for it")
            self._events.send(CheckpointReport(wanted.number, failed="there is not enough memory for it"))

    def waits_in(self, term: int, step: int) -> int | None:
        """The term, if training is to wait behind an evaluation, after training step `step`, as no copy of that step was made for evaluations. The
        trainer that leads asks this, and then tells the coordinator.
        """
        wanted, taken = self._wanted, self._taken
        has_replica = wanted is not None and taken is not None and taken.snapshot.step == step and step in wanted.steps
        self._waits_in = term if self._keeps_best and not has_replica else None
        return self._waits_in

    def after_evaluation(self, trainer: Trainer, step: int, check: Callable[[], None], look: Callable[[bool], object]) -> None:
        """Behind each evaluation, on every trainer alike: where the one that leads says so, wait until the coordinator wants none of this step, or
        a checkpoint of it is begun, and make the copy. check, look: as in `finish`. Raises PeerLost.

        All ask the one that leads again and again, so that nobody waits for one that is gone, or stands still, for longer than in a step.
        """
        if not self._keeps_best:
            return
        waits_in, self._waits_in = self._waits_in, None
        leads, session = trainer.session.leads, trainer.session
        while True:
            said = self._next_of_wait(waits_in, step) if leads else _GO_ON
            said = int(session.exchange.agree(torch.tensor([said], device=session.transport.device)).item())
            if said == _GO_ON:
                if self._taken is not None:
                    self._taken.snapshot.throttled = True
                return
            if self._taken is not None:
                self._taken.snapshot.hurry()
            self._come_to("best waited for")
            check()
            self._events.flush()
            look(True)
            if said == _TAKE:
                # What the one that leads had received before, this one has received by now.
                if self._wanted is not None and self._wanted.behind == step:
                    self._make_room(trainer)
                    self._take_if_room(self._wanted, trainer, step)
                return
            time.sleep(_PAUSE_SECONDS)

    def _next_of_wait(self, waits_in: int | None, step: int) -> int:
        """What the trainer that leads says to the others, which wait with it."""
        if (
            waits_in is None
            or self._rendezvous.poll(GoOnAfter, waits_in, step) is not None
            or self._rendezvous.poll(Orphaned) is not None
        ):
            return _GO_ON
        return _TAKE if self._wanted is not None and self._wanted.behind == step and self._taken is None else _WAIT

    def _named(self, wanted: CheckpointPlan, step: int, leads: bool) -> int | None:
        """The step of the checkpoint, once it has one: whoever leads names one that is yet to come."""
        if not leads:
            at = self._rendezvous.poll(CheckpointAt, wanted.number)
            return None if at is None else at.step
        if not wanted.ready:
            return None
        to_come = [one for one in wanted.steps if one > step]
        if wanted.every is not None:
            to_come.append(-(-(step + 2) // wanted.every) * wanted.every - 1)
        if not to_come:
            return None
        named = CheckpointAt(min(to_come))
        self._rendezvous.publish(named, wanted.number)
        return named.step

    def _take(self, wanted: CheckpointPlan, trainer: Trainer, step: int) -> None:
        """Copy what changes with the next step."""
        began = time.monotonic()
        parts, lanes, room = trainer.parts, trainer.lanes, self._room
        self._room = {}
        held = {
            lane: (room[lane].result().of(partition), lanes.given[lane].copy()) for lane, partition in lanes.partitions.items()
        }
        snapshot = lanes.traffic.snapshots.begin(step, held)
        dense = None
        if trainer.session.leads:
            tensors = {name: value.clone() for name, value in dense_tensors(parts.module, parts.optimizer).items()}
            dense = partial(_dense_file, tensors, step)
        self._taken = _Taken(snapshot, parts, dense, began, room)
        snapshot.share = self._pace.share
        segments = self._begun()
        sums = dense_checksums(parts) if trainer.session.transport.world > 1 else {}
        seconds = time.monotonic() - began
        prefix = parts.schedule.prefix(segments)
        given = {lane: tuple(ordinals.tolist()) for lane, (_, ordinals) in held.items()}
        copy = CopyTaken(step, seconds, segments, prefix, given, sums, self.watched())
        self._report = CheckpointReport(wanted.number, copy)
        self._events.send(self._report)
        self._come_to("checkpoint taken")
        self._begin_writing()

    def _begin_writing(self) -> None:
        """Write the files of what is taken, in a thread of their own, once it is known where."""
        plan, taken, changed = None if self._wanted is None else self._wanted.part, self._taken, None
        if plan is None or taken is None:
            return
        if plan.since >= 0:
            schedule = taken.parts.schedule
            changed = partial(_changed, schedule.path, schedule.follow, plan.since, taken.snapshot.step)
        layouts, folder = taken.parts.layouts, place(plan.folder)
        sink = RowSink(folder, layouts, plan.bits, plan.known, lambda file: self._come_to("checkpoint file written"))
        self._part = PartWriter(taken.snapshot, layouts, sink, plan.since, changed, taken.dense, taken.began)
        self._part.start()

    def tell(self) -> None:
        """Report to the coordinator when the files are written, or cannot be."""
        part, wanted = self._part, self._wanted
        if part is None or wanted is None or part.is_alive():
            return
        taken = self._taken
        self._wanted = self._taken = self._part = None
        if taken is not None and self._room_stays:
            self._room = taken.room
        if part.result is None:
            self._events.send(
                CheckpointReport(wanted.number, failed=part.failure or "the thread that writes it has ended; see above")
            )
            return
        self._events.send(replace(self._report, files=part.result))
        self._come_to("checkpoint part written")

    def finish(self, check: Callable[[], None], look: Callable[[], object]) -> None:
        """Training is over: finish what is under way, or give it up, within a bound from where it is not the best model, or an end is asked for.

        check: called again and again meanwhile, may raise; look: does what is planned, and reports what is.
        """
        deadline = time.monotonic() + GRACE_SECONDS
        if self._taken is not None:
            self._taken.snapshot.hurry()
        while self._taken is not None and time.monotonic() < deadline:
            if self._part is None and self._rendezvous.poll(Orphaned) is not None:
                break  # nobody will say where it is to be written
            if self._may_take_longer():
                deadline = time.monotonic() + GRACE_SECONDS
            check()
            look()
            time.sleep(_PAUSE_SECONDS)
        self.drop("training is over")

    def _may_take_longer(self) -> bool:
        """Whether what is written may be the best model of all, and nobody wants an end."""
        wanted, taken = self._wanted, self._taken
        if (
            wanted is None
            or taken is None
            or wanted.part is None
            or not self._keeps_best
            or taken.snapshot.step not in wanted.steps
        ):
            return False
        return self._rendezvous.poll(StopWanted) is None and self._rendezvous.poll(Orphaned) is None


def _changed(schedule: Path, follow: bool, since: int, until: int) -> dict[int, np.ndarray]:
    """By lane, the rows that changed, as `Snapshot.want` has it."""
    # One of its own: the schedule of the steps belongs to their thread.
    lanes = changed_rows(Schedule(schedule, follow), since, until)
    return {lane: np.concatenate(tables) for lane, tables in enumerate(lanes)}


def _dense_file(tensors: dict[str, Tensor], step: int) -> tuple[str, bytes]:
    return DENSE, encode_dense(tensors, step)
