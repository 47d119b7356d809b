"""`foreload evaluate`: compute the metrics of a model on the evaluation steps of a schedule.

The metrics are log loss, AUC and normalised entropy. The model is that of a run or a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foreload.base.codec import to_stored
from foreload.cache.rows.layout import widest
from foreload.pipelines.schedule.format import LaneEvent
from foreload.pipelines.schedule.kept import last_evaluation, last_occupants
from foreload.pipelines.schedule.reader import Schedule
from foreload.pipelines.schedule.walk import empty_slots, local_rows, rows_used
from foreload.trainer.assembly.assembly import training_loss
from foreload.trainer.checkpoints.saved_checkpoint import open_model
from foreload.trainer.compute import numerics
from foreload.trainer.compute.reports import without_calibration
from foreload.trainer.errors import LossNotFinite, RunError
from foreload.trainer.run.report import metrics_of_set
from foreload.trainer.saved.saved_model import SavedModel, check_fitting
from foreload.trainer.saved.trained_model import DenseForward
from foreload.trainer.saved.unknown_values import UnknownValues
from foreload.trainer.step.program import EvaluationPass


@dataclass(frozen=True, slots=True)
class EvaluationStep:
    """An evaluation step.

    Attributes:
        number: the step's number among the evaluation steps.
        lanes: the event of each lane.
        rows: per lane, the row of each slot in the lane's list of used slots, ROW [U].
    """

    number: int
    lanes: tuple[LaneEvent, ...]
    rows: tuple[np.ndarray, ...]


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A slice of an evaluation step, and the model's outputs for it.

    Attributes:
        step: the number of the evaluation step.
        outputs: float32 [b] or [b, labels].
    """

    step: int
    slice: LaneEvent
    outputs: Tensor


def run(path: str, store: str | None, schedule: str | None, accept_model: bool = False) -> dict[str, Any]:
    """Evaluate the model of a run or a checkpoint.

    Args:
        path: the folder of the run or the checkpoint.
        store: the URLs of the run's servers. If None, the run's own.
        schedule: a schedule with the same features. If None, the model's own schedule.
        accept_model: whether the model's code may differ from the code that it was trained with.

    Returns:
        The metrics of the first evaluation set, those of each named set in "sets", and in
        "unknown", by feature, the values that the model has never seen.

    Raises:
        RunError: the schedule has no evaluation steps.
        LossNotFinite: the model gives NaN or infinities.
    """
    with open_model(path, store, accept_model=accept_model) as model:
        used = model.schedule if schedule is None else check_fitting(model, Schedule(schedule))
        evaluation = EvaluationPass(used.header, training_loss(model.job, used.header.features))
        unknown = UnknownValues(model.features)
        for one in evaluated(model, used, unknown):
            evaluation.add(one.step, one.slice, one.outputs)
    unknown.warn("evaluate")
    reports = [without_calibration(to_stored(report)) for report in evaluation.reports(model.step, used.header.epochs - 1)]
    first = {name: value for name, value in reports[0].items() if name not in ("epoch", "set")}
    sets = {"sets": {of_set["set"]: metrics_of_set(of_set) for of_set in reports}} if used.header.evaluation_sets else {}
    return {"schedule": str(used.path), **first, **sets, "unknown": unknown.to_dict()}


def evaluated(model: SavedModel, schedule: Schedule, unknown: UnknownValues | None = None) -> Iterator[Evaluated]:
    """Evaluate the model on every slice of the evaluation after a schedule's last epoch.

    Args:
        unknown: counts the lookups of all slices, and those of untrained rows.

    Raises:
        RunError: the schedule has no evaluation steps.
        LossNotFinite: the model gives NaN or infinities.
    """
    numerics.set_up(model.job.threads, cpu_capability=model.job.cpu_capability)
    wanted = _distinct_rows(schedule)
    (weights, trained), dense_part = _weights(model, wanted), DenseForward(model)
    dense_part.note_mixing("a score")
    for step in last_pass(schedule):
        for lane, used, outputs in _outputs(dense_part, step, wanted, weights):
            if unknown is not None:
                of_slice = used[step.lanes[lane].index]
                unknown.add(wanted["id"][of_slice], step.lanes[lane].offsets, trained[of_slice])
            if not outputs.isfinite().all():
                raise LossNotFinite(f"{model.name}, evaluation step {step.number}", lane, math.nan)
            yield Evaluated(step.number, step.lanes[lane], outputs)


def last_pass(schedule: Schedule) -> Iterator[EvaluationStep]:
    """Yield the evaluation steps after the last epoch.

    Raises:
        RunError: the schedule has no evaluation steps.
    """
    segments = last_evaluation(schedule)
    if not segments:
        raise RunError(f"schedule {schedule.path}: has no evaluation steps; prepare one with --eval-source or --eval-fraction")
    held = empty_slots(schedule)
    for rows, (table, row_id) in zip(held, last_occupants(schedule), strict=True):
        rows["table"][: len(table)], rows["id"][: len(table)] = table, row_id
    for event in schedule.events(segments[0].index):
        yield EvaluationStep(event.step, *rows_used(schedule, event, held))


def _distinct_rows(schedule: Schedule) -> np.ndarray:
    """Return the distinct rows that the pass uses, sorted by (table, id): ROW [n]."""
    of_steps = [np.unique(np.concatenate(step.rows)) for step in last_pass(schedule)]
    return np.unique(np.concatenate(of_steps))


def _weights(model: SavedModel, wanted: np.ndarray) -> tuple[Tensor, np.ndarray]:
    """Return the rows' weights, float32 [n, W of the widest], and which are trained, bool [n].

    The weights of a row that was never trained are its initial ones.
    """
    weights = np.zeros((len(wanted), widest(model.layouts)), np.float32)
    reader, trained = model.row_source(), np.zeros(len(wanted), bool)
    for table, layout in enumerate(model.layouts):
        of_table = np.flatnonzero(wanted["table"] == table)
        weights[of_table, : layout.width], trained[of_table] = reader.read(table, wanted["id"][of_table])
    return torch.from_numpy(weights), trained


def _outputs(
    dense_part: DenseForward, step: EvaluationStep, wanted: np.ndarray, weights: Tensor
) -> Iterator[tuple[int, np.ndarray, Tensor]]:
    """Yield the lane, the used rows and the outputs of each slice that has samples.

    The used rows are indices into `wanted`, int64 [local rows]; the outputs are float32 [b] or [b,
    labels].
    """
    places = tuple(np.searchsorted(wanted, rows) for rows in step.rows)
    for lane, moves in enumerate(step.lanes):
        if not len(moves.labels):
            continue
        used = local_rows(step.lanes, places, lane)
        yield lane, used, dense_part.outputs(weights[torch.from_numpy(used)], moves.index, moves.offsets, moves.dense)
