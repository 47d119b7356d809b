"""Whether a checkpoint goes on with a schedule of other slots: the same samples, and its rows where that has them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.checkpoints.chain import newest_rows
from foreload.trainer.checkpoints.format import Checkpoint
from foreload.trainer.errors import CheckpointError, after_step
from foreload.trainer.run.manifest import Manifest, Stage
from foreload.trainer.saved.expected_rows import given_ordinals, table_rows


def on_other_slots(checkpoint: Checkpoint, schedule: Schedule) -> Manifest:
    """What the run of a checkpoint is, its last schedule being this one where the two differ in slots alone; otherwise what it was.

    Costs, where they do, what reading all rows of the checkpoint does, and 12 bytes of memory a row of the largest table. Raises CheckpointError
    where the rows are not those of this schedule, ScheduleError.
    """
    contents = checkpoint.contents
    run, stage = contents.run, Stage.of(schedule)
    last = run.stages[-1]
    if contents.state == "ended" or stage.identity == last.identity or stage.program != last.program:
        return run
    if not schedule.complete:
        raise CheckpointError(
            f"checkpoint {checkpoint.place}: was saved with other --slots than schedule {schedule.path} has, which is to be complete for that; wait "
            "for `foreload prepare`"
        )
    ordinals = given_ordinals(schedule, contents.step)
    if ordinals.tolist() != [list(lane) for lane in contents.ordinals] or not _same_rows(checkpoint, schedule, ordinals):
        raise CheckpointError(
            f"checkpoint {checkpoint.place}: its rows are not those that schedule {schedule.path} has trained {after_step(contents.step)}; prepare "
            f"that from the same log as {last.path}, with the same options but for --slots"
        )
    begun = next(
        segment.index + 1
        for segment in schedule.segments()
        if segment.kind == "train" and segment.first + len(segment.samples) > contents.step
    )
    stage = replace(stage, segments=begun, prefix=schedule.prefix(begun))
    return replace(run, stages=(*run.stages[:-1], stage))


def _same_rows(checkpoint: Checkpoint, schedule: Schedule, ordinals: np.ndarray) -> bool:
    """Whether every row has, at its ordinal, the id that a schedule gives it, and the tag, where that is known. ordinals: see `table_rows`."""
    for lane, expected in table_rows(schedule, checkpoint.contents.step, ordinals):
        for first, rows in newest_rows(checkpoint, lane, expected.table):
            part = slice(first, first + len(rows.id))
            known = expected.exact[part]
            if not np.array_equal(rows.id, expected.id[part]) or not np.array_equal(rows.tag[known], expected.tag[part][known]):
                return False
    return True
