"""Check that a schedule's slots fit the memory, with the rows of this model and optimizers."""

from __future__ import annotations

from foreload.base.errors import SettingError
from foreload.base.memory import available_bytes
from foreload.cache.rows.layout import slot_columns
from foreload.pipelines.planning.sizing import lane_bytes, slot_bytes, slots_of_size, staging_rows, stored_bytes
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.job.job import TrainJob, layouts_of

_PROCESS_BYTES = 400 << 20  # of a trainer without its lanes
_ENTRY_BYTES = 64  # of a server's hash, beside the row
_KEPT_ROW_BYTES = 34  # table, ordinal, id, tag, stored tag and boundary


def readable(size_bytes: float) -> str:
    """Return a number of bytes as text, such as 1.5 GiB."""
    for unit in ("B", "KiB", "MiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} B" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} GiB"


def columns_of(job: TrainJob, schedule: Schedule) -> tuple[int, int]:
    """Return the columns of the widest and of the narrowest row, including optimizer state.

    The slots of a partition are as wide as the widest row.
    """
    rows = layouts_of(job, schedule.header.features)
    return slot_columns(rows), min((row.width + row.state_width for row in rows), default=0)


def check_fit(job: TrainJob, schedule: Schedule) -> str:
    """Describe the memory that the slots of a lane take, including staging.

    Raises:
        SettingError: --memory, of the job or of `prepare`, is less than that, or this machine has
            no room for replicas.
    """
    header, slots = schedule.header, max(schedule.slots)
    columns, narrowest = columns_of(job, schedule)
    protected = job.code(job.store.count).r > 0
    taken = lane_bytes(slots, columns, with_base=protected)
    limit = job.memory.bytes if job.memory is not None else header.settings.get("memory_bytes")
    words = f"{header.lanes} lanes x {slots:,} slots, {readable(taken)} a lane with staging"
    copy_bytes, further = slot_bytes(columns, with_base=False) * slots, job.replicas_held - 1
    _check_copies(job, header.lanes, taken, copy_bytes)
    if further:
        words += f"; {further} further cop{'y' if further == 1 else 'ies'} of each, {readable(copy_bytes)} apiece"
    words += f"; up to {readable(kept_bytes(header.lanes, slots, columns))} on disk where servers do not answer at the end"
    if job.saves_checkpoints:
        words += f"; a copy of each for checkpoints, {readable(copy_bytes)} apiece"
    if narrowest < columns:
        words += f"; every slot is as wide as the widest row, {columns} columns, of which the narrowest table leaves {columns - narrowest} idle"
    if limit is not None and taken > limit:
        source = "--memory" if job.memory is not None else "the schedule's --memory"
        fitting = slots_of_size(limit, columns, with_base=protected)
        needed = max(schedule.manifest["minimum_slots"]) if schedule.complete else 1
        fewer = f", or prepare with --slots {fitting} or --row-bytes {stored_bytes(columns)}" if fitting >= needed else ""
        raise SettingError(
            f"{source}: {slots:,} slots of this model take {readable(taken)} a lane, the limit is {readable(limit)}; "
            f"give --memory {taken} if there is that much, or a smaller --dim{fewer}"
        )
    return words


def trainer_bytes(job: TrainJob, schedule: Schedule) -> int:
    """Return about how much memory a trainer takes: a process with torch, its lanes, and the replicas that it holds."""
    columns, _ = columns_of(job, schedule)
    slots, lanes = max(schedule.slots), -(-schedule.header.lanes // job.trainers)
    copies = job.replicas_held - 1 + job.saves_checkpoints
    lane = lane_bytes(slots, columns, with_base=job.code(job.store.count).r > 0)
    return _PROCESS_BYTES + lanes * (lane + copies * slot_bytes(columns, with_base=False) * slots)


def store_bytes(job: TrainJob, schedule: Schedule, k: int, r: int) -> int:
    """Return about how much memory all store servers take for their rows; 0 if the schedule is not complete yet.

    Args:
        k, r: The data shards and parity shards of the code.
    """
    if not schedule.complete:
        return 0
    rows, layouts = schedule.rows_per_table(), layouts_of(job, schedule.header.features)
    widest = sum(count * (layout.row_bytes + _ENTRY_BYTES) for count, layout in zip(rows, layouts, strict=True))
    return int(widest * (k + r) / k)


def kept_bytes(lanes: int, slots: int, columns: int) -> int:
    """Return the most bytes that all lanes' rows can take in the run's folder (`kept_lanes`).

    Rows on their way to the store are included.
    """
    return lanes * (slots + staging_rows(slots)) * (4 * columns + _KEPT_ROW_BYTES)


def _check_copies(job: TrainJob, lanes: int, taken: int, copy_bytes: int) -> None:
    """Raise SettingError if this machine's memory holds the lanes, but not further copies of them.

    Further copies are replicas, and the copies that checkpoints need.

    Args:
        taken: the bytes of one lane.
        copy_bytes: the bytes of one replica of it.
    """
    if job.engine != "local":
        return
    lanes_here, available = -(-lanes * job.trainers_here // job.trainers), available_bytes()
    held = taken * lanes_here
    held_by_others = held + copy_bytes * lanes_here * (job.replicas_held - 1)
    with_checkpoints = held_by_others + copy_bytes * lanes_here * job.saves_checkpoints
    refused = f"in the {job.trainers_here} of this machine, where {readable(available)} are available"
    if held <= available < held_by_others:
        raise SettingError(
            f"--copies: {job.replicas_held} trainers hold each lane, which takes {readable(held_by_others)} {refused}; give --copies 1, with which "
            "the loss of a trainer ends the call, or prepare with fewer --slots"
        )
    if held_by_others <= available < with_checkpoints:
        raise SettingError(
            f"--checkpoint-every: checkpoints need a copy of the slots, with which lanes take {readable(with_checkpoints)} {refused}; leave them "
            "out, and save one when the run is stopped, or prepare with fewer --slots"
        )
