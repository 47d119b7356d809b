"""Putting a trainer together: the parts that outlive terms, lanes that are opened and closed, and a term that is joined.

`foreload.trainer.compute.program.Trainer` runs what comes of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache

import numpy as np
import torch
from torch import nn

from foreload.cache.client.store import Store
from foreload.cache.parity.placement import Placement
from foreload.cache.parity.stripes import LaneStripes
from foreload.cache.protocol.batch_log import BatchLog
from foreload.cache.protocol.lanes import LanePlan
from foreload.cache.protocol.ownership import (
    UNFENCED,
    Ownership,
    find_rows,
    take_over,
)
from foreload.cache.protocol.reading import Expected, StoredRows, read_rows
from foreload.cache.protocol.server_probe import ShardChange
from foreload.cache.rows.layout import RowLayout
from foreload.cache.rows.partition import Partition
from foreload.cache.rows.staging import Staged
from foreload.cache.traffic import Traffic
from foreload.pipelines.errors import ScheduleError
from foreload.pipelines.planning.sizing import staging_rows
from foreload.pipelines.schedule.format import Arrivals, Event
from foreload.pipelines.schedule.kept import ordinals_after
from foreload.pipelines.schedule.reader import Schedule
from foreload.pipelines.schedule.replay import LaneState, Position, state_after
from foreload.trainer.compute.choose_kernels import kernels_for
from foreload.trainer.compute.dense_optimizers import build_dense_optimizer
from foreload.trainer.compute.hosted_lanes import HostedLanes
from foreload.trainer.compute.layouts import (
    BlockLayout,
    UpdateRules,
    layouts,
    model_spec,
)
from foreload.trainer.compute.parts import TrainerParts
from foreload.trainer.compute.program import Trainer
from foreload.trainer.compute.term_session import TermSession
from foreload.trainer.compute.transport import Transport
from foreload.trainer.models import build_model, load_model
from foreload.trainer.run.job import TrainJob


@dataclass(frozen=True, slots=True)
class Start:
    """Where a trainer begins: the last step trained before, and per lane the number of its last write-back batch."""

    step: int
    last_batches: tuple[int, ...]

    @classmethod
    def anew(cls, schedule: Schedule) -> Start:
        """The beginning of a schedule whose lanes wrote nothing yet."""
        return cls(schedule.header.first_step - 1, (0,) * schedule.header.lanes)


@dataclass(frozen=True, slots=True)
class DenseModel:
    """The dense part of the model, the same on every trainer, and the layouts that follow from the model."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    layouts: list[RowLayout]

    @classmethod
    def build(cls, job: TrainJob, schedule: Schedule) -> DenseModel:
        """A new model and its optimizer, as the job says. Raises ModelError and SettingError."""
        features = schedule.header.features
        model = load_model(job.model, job.model_folder)
        common, single = job.row_optimizers()
        rows = layouts(features, model, job.dim, common, single)
        module = build_model(model, model_spec(features, job.dim), job.model_options, job.seed).to(job.device)
        optimizer = build_dense_optimizer(job.dense_optimizer, float(job.dense_lr), job.dense_options, module)
        return cls(module, optimizer, rows)

    def parts(self, job: TrainJob, schedule: Schedule) -> TrainerParts:
        """What a trainer of this model has as long as it lives."""
        return TrainerParts(
            schedule=schedule,
            module=self.module,
            parameters=[parameter for parameter in self.module.parameters() if parameter.requires_grad],
            optimizer=self.optimizer,
            layouts=self.layouts,
            block=BlockLayout.of(schedule.header.features, self.layouts),
            rules=UpdateRules.of(self.layouts),
            kernels=kernels_for(job.device),
            seed=job.seed,
            device=torch.device(job.device),
            allow_nan=job.allow_nan,
        )


def _plan(schedule: Schedule, position: Position, lane: int) -> Iterator[tuple[int, Arrivals] | None]:
    """A lane's arrivals from a position on; None, too, for what cannot be read: the trainer says so when it comes to that segment."""
    if position.next_event is None:
        return
    following = position.next_event.index
    while True:
        try:
            for event in schedule.known_events(position.segment):
                if event is None:
                    yield None
                elif event.index >= following:
                    arrivals = schedule.arrivals(event, lane)
                    following = event.index + 1
                    yield event.index, arrivals
            return
        except ScheduleError:
            yield None


def _written_stripes(placement: Placement, ordinals: Callable[[], np.ndarray]) -> Callable[[int], LaneStripes]:
    """The stripes of each lane when so many ordinals were given, int64 [lanes, tables], and all rows were written back."""

    known = cache(ordinals)

    @cache
    def of(lane: int) -> LaneStripes:
        return placement.stripes(lane, known()[lane])

    return of


def stored_rows_at(
    store: Store, placement: Placement, rows: Sequence[RowLayout], namespace: str, schedule: Schedule, at: Start
) -> StoredRows:
    """The rows of a run that rests after a step, found on the store shards that have them. Raises StoreError and RowsLost."""
    stored = StoredRows(store, placement, rows, namespace)
    stored.stripes = _written_stripes(placement, lambda: ordinals_after(schedule, at.step))
    find_rows(stored, at.last_batches)
    return stored


def remaining(schedule: Schedule, position: Position) -> Iterator[Event]:
    """The events from a position on."""
    if position.next_event is None:
        return
    for event in schedule.events(position.segment):
        if event.index >= position.next_event.index:
            yield event


@dataclass(frozen=True, slots=True)
class StoreAccess:
    """The store that has a run's rows, as an owner of lanes comes to it.

    log, check_tags, on_shard: as Traffic has them, the log needed where there is parity; ownership: whose lanes are taken over.
    """

    store: Store
    placement: Placement
    namespace: str
    log: BatchLog | None = None
    check_tags: bool = True
    ownership: Ownership = UNFENCED
    on_shard: Callable[[ShardChange], None] | None = None


def _new_partition(parts: TrainerParts, lane: int, with_base: bool) -> Partition:
    """A lane's arrays, every slot free."""
    schedule, rules = parts.schedule, parts.rules
    evaluation_slots = schedule.manifest["evaluation_slots"][lane] if schedule.complete else 0
    return Partition(schedule.slots[lane], evaluation_slots, rules.width, rules.state_width, parts.device, with_base)


def _fill(partition: Partition, state: LaneState, lane: int, stored: StoredRows) -> None:
    """Put the rows that sat in a lane's slots there, as whoever closed the lane wrote them back."""
    who = state.occupants
    if not len(state.slots):
        return
    rows = read_rows(stored, Expected(lane, who.table, who.ordinal, who.id, who.tag))
    arrivals = Arrivals(state.slots, who.table, who.ordinal, who.id, who.tag, np.full(len(state.slots), -1, np.int32))
    partition.admit(arrivals, Staged(rows.weights, rows.state, timedelta()))


def open_lanes(parts: TrainerParts, access: StoreAccess, lanes: Sequence[int], start: Start, position: Position) -> HostedLanes:
    """Take lanes over, which rest since the step that `start` tells, and begin their traffic. position: of the schedule after that step.

    From here on this trainer alone may write them, until `close_lanes`. Raises CacheError.
    """
    schedule, protected = parts.schedule, access.placement.r > 0
    stored = StoredRows(access.store, access.placement, parts.layouts, access.namespace)
    given = np.array([state.ordinals for state in position.lanes], np.int64)
    stored.stripes = _written_stripes(access.placement, lambda: given)
    take_over(stored, access.ownership, {lane: start.last_batches[lane] for lane in lanes})
    partitions = {}
    for lane in lanes:
        partitions[lane] = _new_partition(parts, lane, with_base=protected)
        _fill(partitions[lane], position.lanes[lane], lane, stored)
    traffic = Traffic(
        stored,
        parts.seed,
        staging_rows=staging_rows(max(schedule.slots)),
        check_tags=access.check_tags,
        log=access.log,
        ownership=access.ownership,
        on_shard=access.on_shard,
    )
    for lane in lanes:
        # What was given an ordinal was trained, and so written back when the step before was the last.
        written = given[lane] if protected else None
        traffic.add_lane(LanePlan(lane, _plan(schedule, position, lane), start.last_batches[lane], start.step, written))
    return HostedLanes(partitions, traffic)


def close_lanes(lanes: HostedLanes, step: int) -> dict[int, int]:
    """Write everything back that lanes hold after training step `step`, and end their traffic; they rest then, and anyone may open them.

    Returns of each lane the number of its last write-back batch. Raises CacheError.
    """
    with lanes.traffic:
        lanes.write_everything_back(step + 1, at_stop=True)
        return lanes.last_batches()


def join_term(parts: TrainerParts, transport: Transport, lane_map: Sequence[int]) -> TermSession:
    """A trainer's part in a term, whose group `transport` is. lane_map: of each lane, the rank that hosts it."""
    return TermSession(transport, lane_map, parts.kernels, parts.rules.width)


def begin_term(parts: TrainerParts, access: StoreAccess, session: TermSession, start: Start) -> tuple[Trainer, Iterator[Event]]:
    """Open the lanes that a term gives this trainer, which all rest after `start.step`: who trains them, and the program from there on.

    Raises CacheError.
    """
    position = state_after(parts.schedule, start.step)
    lanes = open_lanes(parts, access, session.hosted, start, position)
    return Trainer(parts, lanes, session), remaining(parts.schedule, position)
