"""`foreload evaluate`: log loss, AUC and normalised entropy of a run's model on the evaluation steps of a schedule."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from foreload.cache.protocol.reading import Expected, read_rows
from foreload.cache.rows.initial import initial_weights
from foreload.pipelines.schedule.format import Event, LaneEvent
from foreload.pipelines.schedule.kept import last_occupants, ordinals_after
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.compute import numerics
from foreload.trainer.compute.choose_kernels import kernels_for
from foreload.trainer.compute.layouts import BlockLayout, Lookups, model_spec
from foreload.trainer.compute.metrics import BinaryMetrics
from foreload.trainer.errors import LossNotFinite, RunError
from foreload.trainer.models import build_model, load_model
from foreload.trainer.run.dense_file import load_parameters
from foreload.trainer.run.saved_run import SavedRun, open_saved

_KEY = np.dtype([("table", np.int16), ("id", np.int64)])


@dataclass(frozen=True, slots=True)
class EvaluationStep:
    """An evaluation step: its number, its lanes' parts, and per lane what row sits in each slot of its list, _KEY [U]."""

    number: int
    lanes: tuple[LaneEvent, ...]
    rows: tuple[np.ndarray, ...]


def run(path: str, store: str | None, schedule: str | None) -> dict[str, Any]:
    """Evaluate on the run's own schedule, or on another one of the same features.

    Raises RunError where that has nothing to evaluate, LossNotFinite where the model gives NaN or infinities.
    """
    with open_saved(path, store) as saved:
        numerics.set_up(saved.job.threads, cpu_capability=saved.job.cpu_capability)
        used = saved.schedule if schedule is None else _fitting(saved, Schedule(schedule))
        wanted = _distinct_rows(used)
        weights = _weights(saved, wanted)
        module = _module(saved)
        metrics = BinaryMetrics()
        for step in _last_pass(used):
            for lane, logits in _logits(saved, module, step, wanted, weights):
                if not logits.isfinite().all():
                    raise LossNotFinite(f"run {path}, evaluation step {step.number}", lane, math.nan)
                metrics.add(logits.numpy(), step.lanes[lane].labels)
        found = metrics.result()
    return {
        "schedule": str(used.path),
        "step": saved.status.step,
        "samples": found.samples,
        "log_loss": found.log_loss,
        "auc": found.auc,
        "normalized_entropy": found.normalized_entropy,
    }


def _fitting(saved: SavedRun, schedule: Schedule) -> Schedule:
    mine, other = saved.schedule.header, schedule.header
    if other.features != mine.features or other.settings.get("encoding") != mine.settings.get("encoding"):
        raise RunError(
            f"schedule {schedule.path}: its features or their encoding are not those that the run was trained on ({saved.schedule.path}); "
            "prepare it with the same feature file, and --after that schedule where vocabularies or standardised columns are counted"
        )
    return schedule


def _last_pass(schedule: Schedule) -> Iterator[EvaluationStep]:
    """The evaluation steps after the last epoch."""
    header = schedule.header
    first = next(
        (segment.index for segment in schedule.segments() if segment.kind == "evaluate" and segment.epoch == header.epochs - 1),
        None,
    )
    if first is None:
        raise RunError(f"schedule {schedule.path}: has no evaluation steps; prepare one with --eval-source or --eval-fraction")
    total = schedule.slots, schedule.manifest["evaluation_slots"]
    held = [np.zeros(slots + further, _KEY) for slots, further in zip(*total, strict=True)]
    for rows, (table, row_id) in zip(held, last_occupants(schedule), strict=True):
        rows["table"][: len(table)], rows["id"][: len(table)] = table, row_id
    for event in schedule.events(first):
        if event.kind == "evaluate":
            yield _step(schedule, event, held)


def _step(schedule: Schedule, event: Event, held: list[np.ndarray]) -> EvaluationStep:
    lanes = tuple(schedule.lane(event, lane) for lane in range(schedule.header.lanes))
    for moves, rows in zip(lanes, held, strict=True):
        rows["table"][moves.arrivals.slot] = moves.arrivals.table
        rows["id"][moves.arrivals.slot] = moves.arrivals.id
    return EvaluationStep(event.step, lanes, tuple(rows[moves.slots] for moves, rows in zip(lanes, held, strict=True)))


def _distinct_rows(schedule: Schedule) -> np.ndarray:
    """All rows that the pass uses, by (table, id): _KEY [n]."""
    found = [np.unique(np.concatenate(step.rows)) for step in _last_pass(schedule)]
    return np.unique(np.concatenate(found))


def _weights(saved: SavedRun, wanted: np.ndarray) -> Tensor:
    """The rows' weights, float32 [n, W of the widest]: from the store where trained, else initial."""
    weights = np.zeros((len(wanted), max(layout.width for layout in saved.layouts)), np.float32)
    for table, layout in enumerate(saved.layouts):
        of_table = np.flatnonzero(wanted["table"] == table)
        own = np.zeros((len(of_table), weights.shape[1]), np.float32)
        ids = np.ascontiguousarray(wanted["id"][of_table])
        initial_weights(saved.job.seed, table, ids, layout.scale, own, layout.init_columns)
        weights[of_table] = own
    ordinals = None
    if saved.status.step < saved.schedule.header.end_step - 1:
        ordinals = ordinals_after(saved.schedule, saved.status.step)
    for batch in saved.schedule.rows():
        keys = np.empty(len(batch["id"]), _KEY)
        keys["table"], keys["id"] = batch["table"], batch["id"]
        places = np.searchsorted(wanted, keys)
        hit = (places < len(wanted)) & (wanted[np.minimum(places, len(wanted) - 1)] == keys)
        if ordinals is not None:
            hit &= batch["ordinal"] < ordinals[batch["lane"], batch["table"]]
        for lane in np.unique(batch["lane"][hit]):
            chosen = np.flatnonzero(hit & (batch["lane"] == lane))
            tags = np.minimum(batch["tag"][chosen], saved.status.step + 1)
            tables, ordinals_here, ids = (batch[name][chosen] for name in ("table", "ordinal", "id"))
            expected = Expected(int(lane), tables, ordinals_here, ids, tags, tag_at_most=True)
            weights[places[chosen]] = read_rows(saved.stored, expected, saved.last_batches[lane]).weights
    return torch.from_numpy(weights)


def _module(saved: SavedRun) -> nn.Module:
    job = saved.job
    spec = model_spec(saved.schedule.header.features, job.dim)
    module = build_model(load_model(job.model, job.model_folder), spec, job.model_options, job.seed)
    load_parameters(module, saved.dense()[0])
    return module.eval()


def _logits(
    saved: SavedRun, module: nn.Module, step: EvaluationStep, wanted: np.ndarray, weights: Tensor
) -> Iterator[tuple[int, Tensor]]:
    """Lane and logits float32 [b] of each slice that has samples."""
    block_layout = BlockLayout.of(saved.schedule.header.features, saved.layouts)
    kernels = kernels_for("cpu")
    places = [np.searchsorted(wanted, rows) for rows in step.rows]
    for lane, moves in enumerate(step.lanes):
        if not len(moves.labels):
            continue
        used = [
            found[(owner.users >> np.uint64(lane)) & np.uint64(1) == 1] for found, owner in zip(places, step.lanes, strict=True)
        ]
        rows = weights[torch.from_numpy(np.concatenate(used))]
        block = torch.empty((len(moves.labels), len(block_layout.names), block_layout.width))
        dense = torch.empty(moves.dense.shape, dtype=torch.float32)
        # A mapped view may lie at any address, and the bits of a product depend on its alignment.
        dense.numpy()[...] = moves.dense
        kernels.gather_block(rows, Lookups(moves.index, moves.offsets, block_layout), block)
        with torch.no_grad():
            yield lane, module(dense, block_layout.embeddings(block))
