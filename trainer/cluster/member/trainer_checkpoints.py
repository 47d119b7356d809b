"""A trainer's side of checkpoints that are saved during training.

The trainers agree on a step. After it each of them copies what the next step changes, and a thread
writes the files while training goes on.

The plan says that a checkpoint is wanted; while none is, no step asks the rendezvous for anything.
Once all trainers know of the checkpoint, the coordinator lets the leader name its step. The leader
names it before the first step of a term, or after a step, and before it sends anything of the next
one. No other trainer can finish that next step without the leader's messages, and each polls for
the name after every step, so each reads it in time.
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

LEAST_SHARE = 0.1  # of the traffic's time, so that a checkpoint completes at all
_STEPS = 16  # number of steps whose median is compared
# Median step time during a checkpoint, relative to the median without one. Above the first the
# share goes down, below the second it goes up.
_TOO_SLOW, _HARDLY_SLOWER = 1.06, 1.03


class StepPace:
    """Adapts the checkpoint's share of the traffic's time to how much it slows a trainer's steps.

    Medians over several steps are compared, so that a single slow step does not count.

    Attributes:
        share: Share of the traffic's time that a checkpoint may take.
    """

    def __init__(self) -> None:
        self._before: deque[float] = deque(maxlen=8 * _STEPS)
        self._meanwhile: list[float] = []
        self._last: float | None = None
        self.share = SHARE

    def step(self, now: float, beside: bool) -> None:
        """Note that a step has ended, and adapt the share.

        Args:
            now: Time in seconds, by a monotonic clock.
            beside: Whether a checkpoint was being saved during the step.
        """
        last, self._last = self._last, now
        if last is None:
            return
        if not beside:
            self._before.append(now - last)
            return
        self._meanwhile.append(now - last)
        if len(self._meanwhile) < _STEPS:
            return
        # Without enough earlier steps to compare with, the steps count as not slower.
        slower = median(self._meanwhile) / median(self._before) if len(self._before) >= _STEPS else 1.0
        self._meanwhile.clear()
        if slower > _TOO_SLOW:
            self.share = max(self.share / 1.5, LEAST_SHARE)
        elif slower < _HARDLY_SLOWER:
            self.share = min(self.share * 1.2, SHARE)


_PAUSE_SECONDS = 0.02  # between two polls whether a part is written, or whether training goes on
# The leader's message to the other trainers after an evaluation.
_GO_ON, _TAKE, _WAIT = 0, 1, 2


@dataclass(frozen=True, slots=True)
class _Taken:
    """What a trainer holds in memory of a checkpoint.

    Attributes:
        dense: Returns file name and contents of the dense part. None if this trainer does not lead.
        began: When the copy was begun, time.monotonic().
        room: Memory that holds the copy of the slots, by lane.
    """

    snapshot: Snapshot
    parts: TrainerParts
    dense: Callable[[], tuple[str, bytes]] | None
    began: float
    room: dict[int, Future[SlotCopy]]


class TrainerCheckpoints:
    """One trainer's part of the checkpoint under way. Only its main thread uses this.

    Attributes:
        watched: Returns the evaluation results of early stopping so far. It is called after the
            checkpoint's step.
    """

    def __init__(self, joined: JoinedTrainer) -> None:
        self._rendezvous, self._events, self._come_to = joined.rendezvous, joined.events, joined.reach_point
        self._job = joined.job
        self._begun: Callable[[], int] = lambda: 0
        self.watched: Callable[[], Watched | None] = lambda: None
        self._wanted: CheckpointPlan | None = None
        self._last = 0  # number of the checkpoint that was begun last
        self._at: int | None = None  # step of the checkpoint, once it is named
        self._taken: _Taken | None = None
        self._report: CheckpointReport  # set once the checkpoint is taken
        self._part: PartWriter | None = None
        # Memory for the copy, by lane. `_taken` holds it while a checkpoint is written, and gives
        # it back when the thread that writes has ended.
        self._room: dict[int, Future[SlotCopy]] = {}
        self._room_stays = False
        self._keeps_best = False
        # On the leader: the term in which training waits after the last evaluation.
        self._waits_in: int | None = None
        self._pace = StepPace()
        # A thread allocates the memory, because that takes long.
        self._maker = ThreadPoolExecutor(1, "checkpoint memory")

    def prepare(self, layouts: Sequence[RowLayout]) -> None:
        """Prepare the job's checkpoints before training begins, so that no step waits for that."""
        job = self._job
        self._room_stays, self._keeps_best = job.saves_checkpoints, job.keep_best is not None
        if job.saves_checkpoints:
            rehearse_part(layouts, LEAST_BITS if job.checkpoint_bits == "auto" else job.checkpoint_bits)

    def now_trains(self, trainer: Trainer, begun: Callable[[], int]) -> None:
        """Note that a term begins.

        Args:
            trainer: The trainer of this term.
            begun: Returns how many segments of the schedule were begun. It is called after the
                checkpoint's step.
        """
        self._begun = begun
        if self._room_stays:
            self._make_room(trainer)

    def _make_room(self, trainer: Trainer) -> None:
        """Start allocating memory for copies of the lanes' slots, for lanes that have none yet."""
        partitions = trainer.lanes.partitions
        if self._room.keys() != partitions.keys():
            self._room = {
                lane: self._room.get(lane) or self._maker.submit(SlotCopy, partition) for lane, partition in partitions.items()
            }

    def follow(self, plan: CheckpointPlan | None) -> None:
        """Do what the plan says about the checkpoint under way, or begin a new one.

        Args:
            plan: The plan's checkpoint. If None, the checkpoint under way is dropped.
        """
        if self._wanted is not None and (plan is None or plan.number != self._wanted.number):
            self.drop("it was given up")
        if plan is None:
            return
        if plan.number > self._last:
            self._begin(plan)
        elif self._wanted is not None:
            before, self._wanted = self._wanted, plan
            # Where other trainers were faster, the plan names the folder before this trainer has
            # taken its copy. Then this does nothing, and `_take` starts the writing.
            if before.part is None:
                self._begin_writing()

    def _begin(self, wanted: CheckpointPlan) -> None:
        """Poll for the step of this checkpoint after every step from now on."""
        warm_up()
        self._wanted, self._at, self._last = wanted, None, wanted.number
        self._events.send(CheckpointReport(wanted.number))
        self._come_to("checkpoint asked for")

    def drop(self, why: str) -> None:
        """Abandon the checkpoint under way, for which no process waits.

        Args:
            why: The reason, for messages.
        """
        if self._wanted is not None:
            if self._taken is not None:
                self._taken.snapshot.abandon(why)
            self._wanted = self._taken = self._part = None
            if not self._room_stays:
                self._room = {}

    def before_steps(self, step: int, leads: bool) -> None:
        """Name the step of the checkpoint that the term begins with, if it begins with one.

        To be called before the first step of a term, once this trainer has read the newest plan.

        Args:
            step: The last step before the term.
            leads: Whether this trainer leads the term.
        """
        if leads and self._wanted is not None and self._at is None:
            self._at = self._named(self._wanted, step, leads)

    def after_step(self, trainer: Trainer, step: int) -> None:
        """Take the copy if the checkpoint is of this step.

        To be called after each training step, before this trainer sends anything of the next one.
        """
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
        """Copy what the next step changes, or report that there is not enough memory for it."""
        try:
            self._take(wanted, trainer, step)
        except MemoryError:
            self.drop("there is not enough memory for it")
            self._events.send(CheckpointReport(wanted.number, failed="there is not enough memory for it"))

    def waits_in(self, term: int, step: int) -> int | None:
        """Decide whether training waits after an evaluation for a checkpoint of its step.

        With --keep-best training waits if no copy of that step was taken for this evaluation. Only
        the leader calls this, and reports the result to the coordinator.

        Args:
            term: Number of the current term.
            step: Training step before the evaluation.

        Returns:
            The term if training waits, else None.
        """
        wanted, taken = self._wanted, self._taken
        in_memory = wanted is not None and taken is not None and taken.snapshot.step == step and step in wanted.steps
        self._waits_in = term if self._keeps_best and not in_memory else None
        return self._waits_in

    def after_evaluation(self, trainer: Trainer, step: int, check: Callable[[], None], look: Callable[[bool], object]) -> None:
        """Wait after an evaluation if the leader says so, until its checkpoint is decided.

        Every trainer calls this after each evaluation. The wait ends when the coordinator wants no
        checkpoint of this step, or when it begins one, of which this trainer then takes its copy.

        Args:
            trainer: The trainer of this term.
            step: Training step before the evaluation.
            check, look: As in `finish`. `look` is called with True here: do everything at once.

        Raises:
            PeerLost: Another trainer was lost.
        """
        if not self._keeps_best:
            return
        waits_in, self._waits_in = self._waits_in, None
        leads, session = trainer.session.leads, trainer.session
        # The leader repeats its message, so that a trainer that died or stopped is noticed within
        # the timeout of a step.
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
                # `look` has just read the plan, so this trainer knows what the leader knew when it
                # said _TAKE.
                if self._wanted is not None and self._wanted.behind == step:
                    self._make_room(trainer)
                    self._take_if_room(self._wanted, trainer, step)
                return
            time.sleep(_PAUSE_SECONDS)

    def _next_of_wait(self, waits_in: int | None, step: int) -> int:
        """Return the leader's next message to the trainers that wait with it.

        Args:
            waits_in: The term in which training waits. If None, training does not wait.
            step: Training step before the evaluation.
        """
        if (
            waits_in is None
            or self._rendezvous.poll(GoOnAfter, waits_in, step) is not None
            or self._rendezvous.poll(Orphaned) is not None
        ):
            return _GO_ON
        return _TAKE if self._wanted is not None and self._wanted.behind == step and self._taken is None else _WAIT

    def _named(self, wanted: CheckpointPlan, step: int, leads: bool) -> int | None:
        """Return the step of the checkpoint, or None while it is not named.

        The leader names a step after `step`, and publishes it. The other trainers poll for it.
        """
        if not leads:
            at = self._rendezvous.poll(CheckpointAt, wanted.number)
            return None if at is None else at.step
        if not wanted.ready:
            return None
        to_come = [one for one in wanted.steps if one > step]
        if wanted.every is not None:
            # Steps count from 0, so after step n there were n + 1 steps. This is the first step
            # after `step` at which that number is a multiple of `every`.
            to_come.append(-(-(step + 2) // wanted.every) * wanted.every - 1)
        if not to_come:
            return None
        named = CheckpointAt(min(to_come))
        self._rendezvous.publish(named, wanted.number)
        return named.step

    def _take(self, wanted: CheckpointPlan, trainer: Trainer, step: int) -> None:
        """Copy what the next step changes, and report that to the coordinator."""
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
        """Start the thread that writes the files, if the copy is taken and the folder known."""
        plan, taken, changed = None if self._wanted is None else self._wanted.part, self._taken, None
        if plan is None or taken is None:
            return
        # An increment holds only the rows that changed after the step of its base.
        if plan.since >= 0:
            schedule = taken.parts.schedule
            changed = partial(_changed, schedule.path, schedule.follow, plan.since, taken.snapshot.step)
        layouts, folder = taken.parts.layouts, place(plan.folder)
        sink = RowSink(folder, layouts, plan.bits, plan.known, lambda file: self._come_to("checkpoint file written"))
        self._part = PartWriter(taken.snapshot, layouts, sink, plan.since, changed, taken.dense, taken.began)
        self._part.start()

    def report(self) -> None:
        """Report to the coordinator once the files are written, or that they cannot be written."""
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
        """Finish the checkpoint under way when training is over, or drop it after GRACE_SECONDS.

        While the checkpoint may be of the best model, and nobody asks for an end, the time limit
        starts anew.

        Args:
            check: Called repeatedly during the wait; it may raise an error.
            look: Does what the plan says, and reports to the coordinator.
        """
        deadline = time.monotonic() + GRACE_SECONDS
        if self._taken is not None:
            self._taken.snapshot.hurry()
        while self._taken is not None and time.monotonic() < deadline:
            if self._part is None and self._rendezvous.poll(Orphaned) is not None:
                break  # the launcher is gone, so no plan will name the folder
            if self._may_take_longer():
                deadline = time.monotonic() + GRACE_SECONDS
            check()
            look()
            time.sleep(_PAUSE_SECONDS)
        self.drop("training is over")

    def _may_take_longer(self) -> bool:
        """Return whether the checkpoint may be of the best model, and nobody asks for an end."""
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
    """Return which rows changed after step `since`, up to and including step `until`.

    Returns:
        Lane -> bool array over the lane's tables, one after the other, and their ordinals, as
        `Snapshot.want` takes it.
    """
    # A schedule object of its own, because the one that training reads belongs to its thread.
    lanes = changed_rows(Schedule(schedule, follow), since, until)
    return {lane: np.concatenate(tables) for lane, tables in enumerate(lanes)}


def _dense_file(tensors: dict[str, Tensor], step: int) -> tuple[str, bytes]:
    return DENSE, encode_dense(tensors, step)
