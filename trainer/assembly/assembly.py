"""Assemble a trainer.

This makes the loss, the parts that outlive terms, the lanes that the trainer opens, and its session
in the term that it joins. `foreload.trainer.step.program.Trainer` runs the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from foreload.base.errors import SettingError
from foreload.cache.client.store import Store
from foreload.cache.parity.placement import Placement
from foreload.cache.protocol.ownership.batch_log import BatchLog
from foreload.cache.protocol.ownership.ownership import (
    UNFENCED,
    Ownership,
    take_over,
)
from foreload.cache.protocol.rounds.lanes import LanePlan
from foreload.cache.protocol.shards.reading import Expected, StoredRows, read_rows
from foreload.cache.protocol.shards.shard_status import PATIENCE, Patience, ShardNews
from foreload.cache.rows.layout import RowLayout
from foreload.cache.rows.partition import Partition
from foreload.cache.traffic import Traffic
from foreload.pipelines.errors import ScheduleError
from foreload.pipelines.planning.sizing import staging_rows
from foreload.pipelines.samples.features import FeatureSpec
from foreload.pipelines.schedule.format import Arrivals, Event
from foreload.pipelines.schedule.reader import Schedule
from foreload.pipelines.schedule.walk import Position, state_after
from foreload.trainer.assembly.start import Start, written_stripes
from foreload.trainer.compute.choose_kernels import kernels_for
from foreload.trainer.compute.dense_optimizers import build_dense_optimizer
from foreload.trainer.compute.layouts import BlockLayout, UpdateRules, model_spec
from foreload.trainer.compute.own_loss import checked_loss
from foreload.trainer.compute.rates import Rates
from foreload.trainer.compute.training_loss import TrainingLoss
from foreload.trainer.job.job import TrainJob, layouts_of
from foreload.trainer.models.building import build_model, load_model
from foreload.trainer.models.layers import takes_step
from foreload.trainer.step.commits import Commits
from foreload.trainer.step.hosted_lanes import HostedLanes, LaneReplica
from foreload.trainer.step.program import Trainer
from foreload.trainer.step.term_session import TermSession, TrainerParts
from foreload.trainer.step.transport import Transport


def training_loss(job: TrainJob, features: FeatureSpec) -> TrainingLoss:
    """Return the loss that a job trains. A user's own loss is tried first.

    Raises:
        SettingError: weights are given for labels that do not exist, or for a single label.
        ModelError: the user's own loss does not work.
    """
    names, weights = [label.name for label in features.labels], job.label_weights
    if unknown := sorted(set(weights) - set(names)):
        raise SettingError(f"--label-weights: must name labels of the schedule, {', '.join(names)}; got {unknown[0]}")
    if weights and len(names) == 1:
        raise SettingError(f"--label-weights: is for several labels, and the schedule has one, {names[0]}; leave it out")
    kinds = tuple(label.kind for label in features.labels)
    if job.loss is None:
        return TrainingLoss(kinds, tuple(weights.get(name, 1.0) for name in names))
    own = checked_loss(job.loss, job.model_folder, model_spec(features, job.dim))
    return TrainingLoss(kinds, (1.0,) * len(names), own)


@dataclass(frozen=True, slots=True)
class DenseModel:
    """The dense part of the model, the same on every trainer, and the layouts that follow from it.

    Attributes:
        layouts: the layouts of the rows, by table.
        loss: the loss that is trained.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer
    layouts: list[RowLayout]
    loss: TrainingLoss

    @classmethod
    def build(cls, job: TrainJob, schedule: Schedule, *, twice: bool = False) -> DenseModel:
        """Build a new model and its optimizer from a job's settings.

        Args:
            twice: passed on to `build_model`.

        Raises:
            ModelError: the model cannot be built.
            SettingError: a setting is not valid.
        """
        features = schedule.header.features
        model = load_model(job.model, job.model_folder)
        rows = layouts_of(job, features)
        spec = model_spec(features, job.dim)
        module = build_model(model, spec, job.model_options, job.seed, twice=twice, drop_weights=job.drop_weights).to(job.device)
        optimizer = build_dense_optimizer(job.dense_optimizer, float(job.dense_lr), job.dense_options, module)
        return cls(module, optimizer, rows, training_loss(job, features))

    def parts(self, job: TrainJob, schedule: Schedule) -> TrainerParts:
        """Return the parts that a trainer of this model keeps as long as its process lives."""
        optimizers = tuple(job.row_optimizers(schedule.header.features))
        rules = UpdateRules.of(self.layouts, optimizers)
        return TrainerParts(
            schedule=schedule,
            module=self.module,
            takes_step=takes_step(self.module),
            parameters=[parameter for parameter in self.module.parameters() if parameter.requires_grad],
            optimizer=self.optimizer,
            layouts=self.layouts,
            block=BlockLayout.of(schedule.header.features, self.layouts),
            rules=rules,
            rates=Rates(rules, optimizers, job.lr_schedule, float(job.dense_lr), job.dense_lr_schedule),
            clip_dense=job.dense_clip,
            dense_ema=job.dense_ema,
            kernels=kernels_for(job.device),
            loss=self.loss,
            seed=job.seed,
            device=torch.device(job.device),
            allow_nan=job.allow_nan,
        )


def _plan(schedule: Schedule, position: Position, lane: int) -> Iterator[tuple[int, Arrivals] | None]:
    """Return a lane's arrivals from a position on."""
    if position.next_event is None:
        return iter(())
    return arrivals_from(schedule, position.segment, position.next_event.index, lane)


def arrivals_from(schedule: Schedule, segment: int, following: int, lane: int) -> Iterator[tuple[int, Arrivals] | None]:
    """Yield a lane's arrivals from event number `following` on.

    The event is in `segment` or behind it. None is yielded where the next event is not known yet,
    or cannot be read. In the latter case the trainer reports the error when it reaches that
    segment.

    Yields:
        (event number, arrivals), or None.
    """
    while True:
        try:
            for event in schedule.known_events(segment):
                if event is None:
                    yield None
                elif event.index >= following:
                    arrivals = schedule.arrivals(event, lane)
                    following = event.index + 1
                    yield event.index, arrivals
            return
        except ScheduleError:
            yield None


def remaining(schedule: Schedule, position: Position) -> Iterator[Event]:
    """Return the events from a position on."""
    if position.next_event is None:
        return iter(())
    return events_from(schedule, position.segment, position.next_event.index)


def events_from(schedule: Schedule, segment: int, index: int) -> Iterator[Event]:
    """Return the program's events from number `index` on, which is in `segment` or behind it."""
    return (event for event in schedule.events(segment) if event.index >= index)


@dataclass(frozen=True, slots=True)
class StoreAccess:
    """The store that has a run's rows, as an owner of lanes uses it.

    Attributes:
        placement: which shards have which rows.
        namespace: the run's name on the servers.
        log: as in Traffic. It is needed if there is parity.
        ownership: the term and identity with which lanes are taken over.
        on_shards: as in Traffic.
        on_action: as in Traffic.
        patience: as in Traffic.
    """

    store: Store
    placement: Placement
    namespace: str
    log: BatchLog | None = None
    ownership: Ownership = UNFENCED
    on_shards: Callable[[ShardNews], None] | None = None
    on_action: Callable[[str], None] | None = None
    patience: Patience = PATIENCE


def free_partitions(parts: TrainerParts, lanes: Sequence[int], with_base: bool) -> dict[int, Partition]:
    """Return new partitions for the lanes, with every slot free.

    Args:
        with_base: whether the partitions keep the base of each row, as parity needs it.
    """
    schedule, rules = parts.schedule, parts.rules
    evaluation_slots = schedule.manifest["evaluation_slots"] if schedule.complete else [0] * schedule.header.lanes
    return {
        lane: Partition(schedule.slots[lane], evaluation_slots[lane], rules.width, rules.state_width, parts.device, with_base)
        for lane in lanes
    }


def open_lanes(parts: TrainerParts, access: StoreAccess, lanes: Sequence[int], start: Start, position: Position) -> HostedLanes:
    """Take over the lanes of a run that has not begun or was stopped, and begin their traffic.

    From then on no earlier owner can write them. The rows that sat in their slots are read back
    from the store.

    Args:
        start: where the run stopped.
        position: the schedule's position after that step.

    Raises:
        CacheError: the store refuses a request, or has lost something.
    """
    stored = StoredRows(access.store, access.placement, parts.layouts, access.namespace)
    partitions = free_partitions(parts, lanes, with_base=access.placement.r > 0)
    given = np.array([state.ordinals for state in position.lanes], np.int64)
    stored.stripes = written_stripes(stored.placement, lambda: given)
    # This fences the earlier owners, so it must come before rows are read.
    take_over(stored, access.ownership, {lane: start.last_batches[lane] for lane in lanes})
    for lane, partition in partitions.items():
        slots, who = position.lanes[lane].slots, position.lanes[lane].occupants
        rows = read_rows(stored, Expected(*who.columns(), lane))
        # -1 means that the rows need not wait for any write-back of this schedule.
        partition.admit(Arrivals(*who.columns(), slots, np.full(len(slots), -1, np.int32)), rows)
    hosted = _with_traffic(parts, access, stored)
    for lane, partition in partitions.items():
        # Every row with an ordinal was trained, and written back when the run stopped.
        plan = LanePlan(lane, _plan(parts.schedule, position, lane), start.last_batches[lane], start.step, given[lane].copy())
        hosted.add(partition, plan, given[lane])
    return hosted


def open_no_lanes(parts: TrainerParts, access: StoreAccess) -> HostedLanes:
    """Return the hosted lanes of a trainer that hosts none yet.

    They have the traffic that will serve the lanes that the trainer takes over. Raises CacheError.
    """
    stored = StoredRows(access.store, access.placement, parts.layouts, access.namespace)
    # Without lanes, this only finds the shards that are lost.
    take_over(stored, access.ownership, {})
    return _with_traffic(parts, access, stored)


def _with_traffic(parts: TrainerParts, access: StoreAccess, stored: StoredRows) -> HostedLanes:
    """Start the traffic with the store, without any lanes yet."""
    traffic = Traffic(
        stored,
        parts.seed,
        staging_rows=staging_rows(max(parts.schedule.slots)),
        log=access.log,
        ownership=access.ownership,
        on_shards=access.on_shards,
        on_action=access.on_action,
        patience=access.patience,
    )
    return HostedLanes(stored, traffic)


def join_term(
    parts: TrainerParts, transport: Transport, lane_map: Sequence[int], copy_map: Sequence[Sequence[int]] = ()
) -> TermSession:
    """Return a trainer's session in the term whose group `transport` is.

    Args:
        lane_map: for each lane, the rank that hosts it.
        copy_map: for each lane, the ranks that hold a replica of it.
    """
    return TermSession(transport, lane_map, parts.kernels, parts.rules.width, copy_map)


def begin_term(parts: TrainerParts, access: StoreAccess, session: TermSession, start: Start) -> tuple[Trainer, Iterator[Event]]:
    """Open the lanes that the first term of a call gives this trainer.

    Args:
        start: where the run stopped, or its beginning.

    Returns:
        The trainer for that term, and the events of the schedule after `start`.

    Raises:
        CacheError: the store refuses a request, or has lost something.
    """
    position = state_after(parts.schedule, start.step)
    hosted = open_lanes(parts, access, session.hosted, start, position)
    commits = _commits(parts, hosted, session, start, position)
    return Trainer(parts, hosted, session, start.step, commits), remaining(parts.schedule, position)


def _commits(parts: TrainerParts, hosted: HostedLanes, session: TermSession, start: Start, position: Position) -> Commits | None:
    """Return the commit state of a term whose lanes have replicas, or None if they have none.

    A replica of a lane without any rows in its slots is complete. The others are seeded before
    training begins.
    """
    if not session.has_copies:
        return None
    header = parts.schedule.header
    empty = [not state.slots.size for state in position.lanes]
    partitions = free_partitions(parts, session.copied, with_base=False)
    tables = len(header.features.tables)
    copies = {lane: LaneReplica(lane, partition, tables, empty[lane]) for lane, partition in partitions.items()}
    seeded = [(lane, rank) for lane, ranks in enumerate(session.copy_map) for rank in ranks if empty[lane]]
    return Commits(parts, hosted, session, copies, start.step, seeded, seeds_first=True)
