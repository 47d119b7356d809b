"""Training in one process, for tests: several trainers as threads over the in-memory transport, on real redis-servers."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from foreload.cache.client.store import Store
from foreload.cache.parity.placement import Placement
from foreload.cache.protocol.batch_log import FileLog
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.compute.dense_optimizers import load_optimizer_state, optimizer_state
from foreload.trainer.compute.step import EvaluationReport, StepReport, Trainer
from foreload.trainer.compute.transport import LocalHub
from foreload.trainer.errors import LossNotFinite
from foreload.trainer.run.assembly import (
    DenseModel,
    Start,
    assemble,
    stored_rows_at,
)
from foreload.trainer.run.digest import Digest
from foreload.trainer.run.job import TrainJob
from foreload.trainer.run.model_rows import model_rows


@dataclass(slots=True)
class Trained:
    """What a training left: the digest, the reports of rank 0, where it stopped (None: at the end), and what a resume starts from.

    failure: the loss that was not finite, if that is why it stopped.
    """

    digest: str
    steps: list[StepReport]
    evaluations: list[EvaluationReport]
    stopped_at: int | None
    start: Start
    failure: str | None = None
    dense: list[DenseModel] = field(default_factory=list)


def spread(lanes: int, trainers: int) -> list[int]:
    """Lane -> trainer, in blocks."""
    return [lane * trainers // lanes for lane in range(lanes)]


def train(
    job: TrainJob,
    schedule: Schedule,
    urls: Sequence[str],
    trainers: int = 1,
    stop_after: Callable[[int], bool] = lambda step: False,
    resume: Trained | None = None,
    check_tags: bool = True,
    parity: tuple[int, int] = (1, 0),
    break_it: Callable[[int, Trainer], None] = lambda rank, trainer: None,
    on_step: Callable[[StepReport], None] = lambda report: None,
    timeout: timedelta = timedelta(seconds=10),
) -> Trained:
    """Run a schedule to its end, or to a stop, with `trainers` trainers in threads.

    parity: k and r; (1, 0): none. break_it: may put faults into a rank's trainer. on_step: called by rank 0 after each step. With parity, shards that
    are lost meanwhile are waited for at the end.
    """
    hub = LocalHub(trainers)
    transports = hub.transports()
    placement = Placement.spread(len(urls), *parity)
    lane_map = spread(schedule.header.lanes, trainers)
    start = resume.start if resume is not None else Start.anew(schedule)
    batches = list(start.last_batches)
    outcome = Trained("", [], [], None, start)
    failures: list[BaseException] = []
    denses = [DenseModel.build(job, schedule) for _ in range(trainers)]
    if resume is not None:
        for dense in denses:
            dense.module.load_state_dict(resume.dense[0].module.state_dict())
            state = optimizer_state(resume.dense[0].module, resume.dense[0].optimizer)
            load_optimizer_state(dense.module, dense.optimizer, state)

    logs = Path(tempfile.mkdtemp())

    def run(rank: int) -> None:
        store = Store(urls, timeout)
        try:
            part, events = assemble(
                job, schedule, denses[rank], start, lane_map, transports[rank], store, placement, FileLog(logs), check_tags
            )
            try:
                trainer = Trainer(part)
                break_it(rank, trainer)
                mine = rank == 0
                trained = start.step

                def note(report: StepReport) -> None:
                    nonlocal trained
                    trained = report.step
                    if mine:
                        outcome.steps.append(report)
                        on_step(report)

                failure = None
                try:
                    stopped = trainer.run(events, stop_after, note, outcome.evaluations.append)
                except LossNotFinite as error:
                    stopped, failure = trained, str(error)
                last = schedule.header.end_step - 1 if stopped is None else stopped
                trainer.write_everything_back(last + 1, at_stop=stopped is not None)
                # What rank 0 does after the last step has happened before anyone looks for shards that are lost.
                transports[rank].barrier()
                assert part.traffic.repair_shards(timedelta(seconds=30)) == []
                for lane in trainer.lanes:
                    batches[lane] = part.traffic.last_batch(lane)
                if mine:
                    outcome.stopped_at, outcome.failure = stopped, failure
            finally:
                part.traffic.abort()
        except BaseException as error:
            failures.append(error)
        finally:
            transports[rank].close()
            store.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(trainers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    shutil.rmtree(logs)
    if failures:
        raise failures[0]
    last = schedule.header.end_step - 1 if outcome.stopped_at is None else outcome.stopped_at
    outcome.start = Start(last, tuple(batches))
    outcome.dense = denses
    outcome.digest = digest(job, schedule, denses[0], urls, outcome.start, placement)
    return outcome


def digest(job: TrainJob, schedule: Schedule, dense: DenseModel, urls: Sequence[str], at: Start, placement: Placement) -> str:
    """The digest of the model as the store and a trainer hold it."""
    found = Digest()
    found.dense(dict(dense.module.named_parameters()), optimizer_state(dense.module, dense.optimizer))
    with Store(urls, timedelta(seconds=10)) as store:
        stored = stored_rows_at(store, placement, dense.layouts, job.run_namespace, schedule, at)
        rows = model_rows(schedule, at.step, stored, at.last_batches)
        pending = next(rows, None)
        for number, table in enumerate(schedule.header.features.tables):
            found.table(table.name)
            while pending is not None and pending.table == number:
                found.rows(pending.ids, pending.weights, pending.state)
                pending = next(rows, None)
    return found.hexdigest()
