"""What a training in one process leaves behind: its reports, its dense part, and what the store has of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from foreload.cache.client.resp import MARKER
from foreload.cache.client.store import Store
from foreload.cache.parity.placement import Placement
from foreload.cache.protocol.shards.reading import StoredRows
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.assembly.assembly import DenseModel
from foreload.trainer.assembly.start import Start
from foreload.trainer.cluster.messages.facts import Term
from foreload.trainer.compute.dense_optimizers import optimizer_state
from foreload.trainer.compute.reports import EvaluationReport, StepReport
from foreload.trainer.job.job import TrainJob
from foreload.trainer.saved.model_rows import model_rows
from foreload.trainer.saved.saved_model import Digest
from foreload.trainer.saved.stopped_stores import find_stopped_rows


@dataclass(frozen=True, slots=True)
class Trained:
    """What a training left behind.

    Attributes:
        digest: the digest of the model.
        steps: the leader's reports, by step.
        evaluations: the leader's reports, by step and, within a step, in the order of the sets.
        stopped_at: the last step, or None if the schedule was trained to its end.
        failure: the loss that was not finite, if that stopped the training.
        start: where a resume starts.
        dense: the dense part of the last leader.
        terms: all terms.
        compared: how often a copy was compared with its owner's lane.
        stored: as `stored_fields` returns it.
    """

    digest: str
    steps: list[StepReport]
    evaluations: list[EvaluationReport]
    stopped_at: int | None
    failure: str | None
    start: Start
    dense: DenseModel
    terms: list[Term]
    compared: int
    stored: list[dict[bytes, bytes]]


def stored_fields(
    job: TrainJob, schedule: Schedule, dense: DenseModel, urls: Sequence[str], at: Start, placement: Placement
) -> list[dict[bytes, bytes]]:
    """Return every row and parity row that the store has of the run, by lane and shard, as field to value."""
    fields = []
    with Store(urls, timedelta(seconds=10)) as store:
        stored = StoredRows(store, placement, dense.layouts, job.run_namespace)
        find_stopped_rows(stored, schedule, at)
        for lane in range(schedule.header.lanes):
            for shard, key in enumerate(stored.keys(lane)):
                pairs = store.command(shard, "HGETALL", key)
                assert isinstance(pairs, list)
                fields.append({field: value for field, value in zip(pairs[::2], pairs[1::2], strict=True) if field != MARKER})
    return fields


def digest(job: TrainJob, schedule: Schedule, dense: DenseModel, urls: Sequence[str], at: Start, placement: Placement) -> str:
    """Return the digest of the model as the store and a trainer hold it."""
    whole = Digest()
    parameters = dense.module.named_parameters(), optimizer_state(dense.module, dense.optimizer).items()
    whole.dense(*({name: value.detach().numpy() for name, value in part} for part in parameters))
    with Store(urls, timedelta(seconds=10)) as store:
        stored = StoredRows(store, placement, dense.layouts, job.run_namespace)
        find_stopped_rows(stored, schedule, at)
        rows = model_rows(schedule, at.step, stored, at.last_batches)
        pending = next(rows, None)
        for number, table in enumerate(schedule.header.features.tables):
            whole.table(table.name)
            while pending is not None and pending.table == number:
                whole.rows(pending.ids, pending.weights, pending.state)
                pending = next(rows, None)
    return whole.hexdigest()
