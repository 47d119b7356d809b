"""Whether a schedule's slots fit the memory given, with the rows that this model and these optimizers have."""

from __future__ import annotations

from pipelines.schedule import Schedule
from trainer.assembly import default_staging_rows, partition_bytes
from trainer.errors import JobError
from trainer.job import TrainJob
from trainer.layout import layouts
from trainer.models import load_model


def readable(size_bytes: float) -> str:
    """Bytes for a person: 1.5 GiB."""
    for unit in ("B", "KiB", "MiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} B" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} GiB"


def check_fit(job: TrainJob, schedule: Schedule) -> str:
    """What the slots of a lane really take, staging included, in words. Raises JobError if --memory, or prepare's, is less."""
    header = schedule.header
    common, single = job.row_optimizers()
    rows = layouts(header.features, load_model(job.model, job.model_folder), job.dim, common, single)
    lane = max(range(header.lanes), key=lambda v: header.slots[v])
    protected = job.code(job.shards)[1] > 0
    taken = partition_bytes(schedule, rows, lane, default_staging_rows(schedule), with_base=protected)
    prepared = header.settings.get("memory_bytes")
    limit = job.memory_bytes if job.memory_bytes is not None else prepared
    columns = [row.width + row.state_width for row in rows]
    words = f"{header.lanes} lanes x {header.slots[lane]:,} slots, {readable(taken)} a lane with staging"
    if min(columns) < max(columns):
        idle = max(columns) - min(columns)
        words += (
            f"; every slot is as wide as the widest row, {max(columns)} columns, of which the narrowest table leaves {idle} idle"
        )
    if limit is not None and taken > limit:
        source = "--memory" if job.memory_bytes is not None else "the schedule's --memory"
        raise JobError(
            f"{source}: {header.slots[lane]:,} slots of this model take {readable(taken)} a lane, the limit is {readable(limit)}; "
            f"give --memory {taken} if there is that much, a smaller --dim, or prepare with --row-bytes {4 * max(columns) + 12}"
        )
    return words
