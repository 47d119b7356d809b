"""Putting a trainer together: from a job, a schedule and a place in it to the parts that `foreload.trainer.compute.step.Trainer` runs."""

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
from foreload.pipelines.schedule.replay import Position, state_after
from foreload.trainer.compute.choose_kernels import kernels_for
from foreload.trainer.compute.dense_optimizers import build_dense_optimizer
from foreload.trainer.compute.exchange import Exchange
from foreload.trainer.compute.layouts import (
    BlockLayout,
    UpdateRules,
    layouts,
    model_spec,
)
from foreload.trainer.compute.step import TrainerParts
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


def _lane_plan(schedule: Schedule, position: Position, lane: int, start: Start, protected: bool) -> LanePlan:
    # What was given an ordinal was trained, and so written back when the step before `start` was the last.
    written = np.array(position.lanes[lane].ordinals, np.int64) if protected else None
    return LanePlan(lane, _plan(schedule, position, lane), start.last_batches[lane], start.step, written)


def remaining(schedule: Schedule, position: Position) -> Iterator[Event]:
    """The events from a position on."""
    if position.next_event is None:
        return
    for event in schedule.events(position.segment):
        if event.index >= position.next_event.index:
            yield event


def _enter(partition: Partition, position: Position, lane: int, stored: StoredRows) -> None:
    """Fill a lane's slots with the rows that sat there, as a clean stop wrote them back."""
    state = position.lanes[lane]
    who = state.occupants
    if not len(state.slots):
        return
    rows = read_rows(stored, Expected(lane, who.table, who.ordinal, who.id, who.tag))
    arrivals = Arrivals(state.slots, who.table, who.ordinal, who.id, who.tag, np.full(len(state.slots), -1, np.int32))
    partition.admit(arrivals, Staged(rows.weights, rows.state, timedelta()))


def assemble(
    job: TrainJob,
    schedule: Schedule,
    dense: DenseModel,
    start: Start,
    lane_map: Sequence[int],
    transport: Transport,
    store: Store,
    placement: Placement,
    log: BatchLog | None = None,
    check_tags: bool = True,
    ownership: Ownership = UNFENCED,
    on_shard: Callable[[ShardChange], None] | None = None,
) -> tuple[TrainerParts, Iterator[Event]]:
    """One trainer's parts, and the events that it runs, from `start` on. log, ownership, on_shard: as Traffic has them, where there is parity.

    Raises CacheError.
    """
    device = torch.device(job.device)
    rows = dense.layouts
    rules = UpdateRules.of(rows)
    hosted = [lane for lane, host in enumerate(lane_map) if host == transport.rank]
    position = state_after(schedule, start.step)
    stored = StoredRows(store, placement, rows, job.run_namespace)
    evaluation_slots = schedule.manifest["evaluation_slots"] if schedule.complete else [0] * schedule.header.lanes
    partitions = {
        lane: Partition(schedule.slots[lane], evaluation_slots[lane], rules.width, rules.state_width, device, placement.r > 0)
        for lane in hosted
    }
    given = np.array([lane.ordinals for lane in position.lanes], np.int64)
    stored.stripes = _written_stripes(placement, lambda: given)
    take_over(stored, ownership, {lane: start.last_batches[lane] for lane in hosted})
    for lane, partition in partitions.items():
        _enter(partition, position, lane, stored)
    traffic = Traffic(
        stored,
        job.seed,
        staging_rows=staging_rows(max(schedule.slots)),
        check_tags=check_tags,
        log=log,
        ownership=ownership,
        on_shard=on_shard,
    )
    for lane in hosted:
        traffic.add_lane(_lane_plan(schedule, position, lane, start, protected=placement.r > 0))
    kernels = kernels_for(job.device)
    part = TrainerParts(
        schedule=schedule,
        module=dense.module,
        optimizer=dense.optimizer,
        block=BlockLayout.of(schedule.header.features, rows),
        rules=rules,
        kernels=kernels,
        exchange=Exchange(transport, lane_map, kernels, rules.width),
        traffic=traffic,
        partitions=partitions,
        seed=job.seed,
        device=device,
        allow_nan=job.allow_nan,
        bytes_sent=lambda: sum(transport.bytes_sent.values()),
    )
    return part, remaining(schedule, position)
