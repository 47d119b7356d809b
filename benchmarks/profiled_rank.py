"""One trainer of bench_step_model.py and bench_profiling.py: a process that trains runs of steps (interleaved.py) among others, on an empty store.

    python benchmarks/profiled_rank.py '{"rank": 0, ...}'

It is put together as `foreload.trainer.cluster.member.worker` does it, and tells what a profile keeps of each step.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from foreload.trainer.compute import numerics

# Before torch is imported, as in every trainer.
numerics.set_environment("avx2")

import torch.distributed as dist  # noqa: E402

from foreload.cache.client.store import Store  # noqa: E402
from foreload.cache.parity.placement import Placement  # noqa: E402
from foreload.cache.protocol.ownership.batch_log import FileLog  # noqa: E402
from foreload.pipelines.schedule.reader import Schedule  # noqa: E402
from foreload.trainer.assembly.assembly import DenseModel, StoreAccess, begin_term, join_term  # noqa: E402
from foreload.trainer.assembly.start import Start  # noqa: E402
from foreload.trainer.cluster.coordinator.terms import first_term  # noqa: E402
from foreload.trainer.compute.reports import StepReport  # noqa: E402
from foreload.trainer.job.job import TrainJob  # noqa: E402
from foreload.trainer.step import term_session  # noqa: E402
from foreload.trainer.step.transport import LinkedTransport  # noqa: E402
from interleaved import InterleavedRuns, ready  # noqa: E402

SILENCE = timedelta(minutes=10)
TOLD = (
    *("samples", "rows_used", "rows_arrived", "rows_fetched", "rows_written_back", "bytes_sent"),
    *("seconds_processor", "seconds_thread"),
)


@dataclass(frozen=True, slots=True)
class RankSpec:
    """What a trainer is told. job: the settings of TrainJob; port: where rank 0 listens; urls: of the store shards; parity: k and r.

    log: a folder for write-back batches where there is parity, else empty; in_turn: every other run of steps is trained without looking at the clocks
    of which a profile is made.
    """

    rank: int
    ranks: int
    port: int
    job: dict[str, Any]
    urls: Sequence[str]
    parity: tuple[int, int]
    copies: int = 1
    log: str = ""
    in_turn: bool = False


def main() -> None:
    """Run the trainer that the command line describes."""
    spec = RankSpec(**json.loads(sys.argv[1]))
    numerics.set_up(1)
    training = TrainJob.of(spec.job)
    schedule = Schedule(training.schedule)
    dense = DenseModel.build(training, schedule)
    rendezvous = dist.TCPStore("127.0.0.1", spec.port, None, spec.rank == 0, SILENCE)
    transport = LinkedTransport(rendezvous, 0, spec.rank, range(spec.ranks), SILENCE)
    term = first_term(1, range(spec.ranks), schedule.header.lanes, spec.copies, schedule.header.first_step - 1)
    interleaved = InterleavedRuns()
    # The module's own name for the clocks, so that nothing else is touched.
    without = SimpleNamespace(perf_counter=time.perf_counter, process_time=lambda: 0.0, thread_time=lambda: 0.0)

    def on_step(report: StepReport) -> None:
        before = interleaved.left
        interleaved.step(report.loss, {name: getattr(report, name) for name in TOLD})
        if spec.in_turn and interleaved.left >= before:
            vars(term_session)["time"] = without if vars(term_session)["time"] is time else time

    with Store(list(spec.urls), timedelta(seconds=60)) as store:
        parts = dense.parts(training, schedule)
        placement = Placement.spread(len(spec.urls), *spec.parity)
        access = StoreAccess(store, placement, training.run_namespace, FileLog(Path(spec.log)) if spec.log else None)
        session = join_term(parts, transport, term.lane_map, term.copy_map)
        start = Start(schedule.header.first_step - 1, (0,) * schedule.header.lanes)
        trainer, events = begin_term(parts, access, session, start)
        with trainer.lanes.traffic:
            ready()
            interleaved.begin()
            trainer.run(events, lambda step: False, on_step, lambda report: None)


if __name__ == "__main__":
    main()
