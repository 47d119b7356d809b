"""What a trainer holds of memory at its peak, told from the schedule and the job before it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foreload.cache.rows.layout import RowLayout
from foreload.pipelines.planning.sizing import OCCUPANT_BYTES, slot_bytes, staging_rows
from foreload.pipelines.schedule.format import Segment
from foreload.pipelines.schedule.reader import Schedule

BASE_BYTES = 415 << 20  # of a trainer without lanes: interpreter, torch, compiled kernels, connections; by measurement
_SEGMENTS = 3  # that are mapped at once: threads read ahead and behind by some steps
_DENSE_COPIES = 5  # of a parameter: itself, its gradient, the sum of all trainers', and two of an optimizer's state
_SHARD_BYTES = (1 << 17) + (1 << 18)  # buffers of a connection to a store shard


@dataclass(frozen=True, slots=True)
class TrainerSetup:
    """What of a job a trainer's memory depends on. lanes, copies: how many it hosts, and how many copies of others' it holds; shards: of the store;
    with_base: there is parity; dense_parameters: of the model; snapshots: checkpoints are saved while it trains.
    """

    lanes: int
    copies: int
    shards: int
    with_base: bool
    dense_parameters: int
    snapshots: bool = False


def peak_bytes(schedule: Schedule, layouts: Sequence[RowLayout], setup: TrainerSetup, base_bytes: int = BASE_BYTES) -> int:
    """The most that a trainer of a complete schedule holds at once, resident. base_bytes: of one without lanes."""
    columns = max(row.width for row in layouts) + max(row.state_width for row in layouts)
    slots, evaluation = max(schedule.slots), max(schedule.manifest["evaluation_slots"], default=0)
    events = max(schedule.header.batch_size, 1)
    counts = schedule.manifest["counts"]
    steps = max(schedule.header.steps_per_epoch * schedule.header.epochs, 1)
    # Staging is bounded, and holds no more than some steps' rows.
    arrive = min(staging_rows(slots), 8 * counts["arrivals"] // (steps * schedule.header.lanes) + events)
    leave = min(staging_rows(slots), 4 * counts["write_backs"] // (steps * schedule.header.lanes) + events)
    lane = slot_bytes(columns, setup.with_base) * slots + slot_bytes(columns, False) * evaluation
    lane += slot_bytes(columns, False) * arrive + slot_bytes(columns, setup.with_base) * leave
    copy = slot_bytes(columns, False) * slots
    # At the end all rows are on their way to the store at once, out of their slots: a copy is told of them, too.
    at_end = 4 * columns * slots * (setup.lanes * (1 + setup.with_base) + setup.copies)
    # Local rows of a step: their weights in a block, gradients, and what can be undone of them.
    block = 4 * (4 * columns + OCCUPANT_BYTES) * counts["rows_used"] // (steps * schedule.header.lanes)
    held = setup.lanes * (lane + block) + setup.copies * (copy + block) + setup.snapshots * setup.lanes * copy + at_end
    dense = 4 * _DENSE_COPIES * setup.dense_parameters
    return base_bytes + held + dense + setup.shards * _SHARD_BYTES + mapped_bytes(schedule)


def mapped_bytes(schedule: Schedule) -> int:
    """The most of the schedule that is mapped at once; it is page cache, and counts as the trainer's as long as it is mapped."""
    sizes = [_bytes_of(segment) for segment in schedule.segments()]
    return max((sum(sizes[first : first + _SEGMENTS]) for first in range(max(len(sizes) - _SEGMENTS + 1, 1))), default=0)


def _bytes_of(segment: Segment) -> int:
    return sum(int(lane[part]["bytes"]) for lane in segment.files for part in ("samples", "moves"))
