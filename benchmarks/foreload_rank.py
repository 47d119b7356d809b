"""One trainer of Foreload's contender of bench_torchrec.py: a process that trains runs of steps (interleaved.py) among `ranks` trainers.

    python benchmarks/foreload_rank.py '{"rank": 0, ...}'

It is put together as `foreload.trainer.cluster.worker` does it; only the launcher is left out, since the store is already full.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from comparison import cpu_capability
from foreload.trainer.compute import numerics

# Before torch is imported, as in every trainer.
numerics.set_environment(cpu_capability())

import torch.distributed as dist  # noqa: E402

from foreload.cache.client.store import Store  # noqa: E402
from foreload.cache.parity.placement import Placement  # noqa: E402
from foreload.pipelines.schedule.reader import Schedule  # noqa: E402
from foreload.trainer.cluster.facts import contiguous_lanes  # noqa: E402
from foreload.trainer.compute.reports import StepReport  # noqa: E402
from foreload.trainer.compute.transport import GlooTransport  # noqa: E402
from foreload.trainer.run.assembly import DenseModel, Start, StoreAccess, begin_term, join_term  # noqa: E402
from foreload.trainer.run.job import TrainJob  # noqa: E402
from interleaved import InterleavedRuns, ready  # noqa: E402
from workload import SHARDS, job, last_batches  # noqa: E402

SILENCE = timedelta(minutes=10)  # after which a peer counts as lost: while another contender has its run, nothing is sent
TOLD = ("seconds_compute", "seconds_exchange", "seconds_waiting", "rows_arrived", "rows_fetched", "rows_used", "bytes_sent")


@dataclass(frozen=True, slots=True)
class RankSpec:
    """What a trainer is told. port: where rank 0 listens; urls: of the store shards."""

    rank: int
    ranks: int
    port: int
    schedule: str
    model: str
    urls: Sequence[str]


def main() -> None:
    """Run the trainer that the command line describes."""
    spec = RankSpec(**json.loads(sys.argv[1]))
    numerics.set_up(1)
    schedule = Schedule(spec.schedule)
    training = TrainJob.of(job(Path(spec.schedule), spec.model))
    dense = DenseModel.build(training, schedule)
    rendezvous = dist.TCPStore("127.0.0.1", spec.port, None, spec.rank == 0, SILENCE)
    transport = GlooTransport(rendezvous, 0, spec.rank, range(spec.ranks), SILENCE)
    lane_map = contiguous_lanes(schedule.header.lanes, spec.ranks)
    interleaved = InterleavedRuns()

    def on_step(report: StepReport) -> None:
        interleaved.step(report.loss, {name: getattr(report, name) for name in TOLD})

    with Store(list(spec.urls), timedelta(seconds=60)) as store:
        parts = dense.parts(training, schedule)
        access = StoreAccess(store, Placement.spread(SHARDS), training.run_namespace)
        trainer, events = begin_term(
            parts, access, join_term(parts, transport, lane_map), Start(schedule.header.first_step - 1, last_batches(schedule))
        )
        with trainer.lanes.traffic:
            ready()
            interleaved.begin()
            trainer.run(events, lambda step: False, on_step, lambda report: None)


if __name__ == "__main__":
    main()
