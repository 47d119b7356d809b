"""One trainer of Foreload's contenders of bench_torchrec.py and bench_copies.py: a process that trains runs of steps (interleaved.py) among `ranks`.

    python benchmarks/foreload_rank.py '{"rank": 0, ...}'

It is put together as `foreload.trainer.cluster.member.worker` does it; only the launcher is left out, since the store is already full.
"""

from __future__ import annotations

import json
import os
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
from foreload.cache.protocol.ownership.batch_log import FileLog  # noqa: E402
from foreload.pipelines.schedule.reader import Schedule  # noqa: E402
from foreload.trainer.assembly.assembly import DenseModel, StoreAccess, begin_term, join_term  # noqa: E402
from foreload.trainer.assembly.start import Start  # noqa: E402
from foreload.trainer.cluster.coordinator.terms import first_term  # noqa: E402
from foreload.trainer.compute.reports import StepReport  # noqa: E402
from foreload.trainer.job.job import TrainJob  # noqa: E402
from foreload.trainer.step.exchange import REPLICA  # noqa: E402
from foreload.trainer.step.transport import LinkedTransport  # noqa: E402
from interleaved import InterleavedRuns, ready  # noqa: E402
from workload import PARITY, SHARDS, job, last_batches  # noqa: E402

SILENCE = timedelta(minutes=10)  # after which a peer counts as lost: while another contender has its run, nothing is sent
TOLD = ("seconds_compute", "seconds_exchange", "seconds_waiting", "rows_arrived", "rows_fetched", "rows_used", "bytes_sent")


@dataclass(frozen=True, slots=True)
class RankSpec:
    """What a trainer is told. port: where rank 0 listens; urls: of the store shards; copies: how many trainers have each lane.

    log: a folder for write-back batches where the store has parity, else empty; bound: the process runs on one core alone, each rank on another.
    """

    rank: int
    ranks: int
    port: int
    schedule: str
    model: str
    urls: Sequence[str]
    copies: int = 1
    log: str = ""
    bound: bool = False


def resident_bytes() -> int:
    """Memory of this process, what it shares with others left out."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


def main() -> None:
    """Run the trainer that the command line describes."""
    spec = RankSpec(**json.loads(sys.argv[1]))
    if spec.bound:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[spec.rank % len(cores)]})
    numerics.set_up(1)
    schedule = Schedule(spec.schedule)
    training = TrainJob.of(job(Path(spec.schedule), spec.model))
    dense = DenseModel.build(training, schedule)
    rendezvous = dist.TCPStore("127.0.0.1", spec.port, None, spec.rank == 0, SILENCE)
    transport = LinkedTransport(rendezvous, 0, spec.rank, range(spec.ranks), SILENCE)
    term = first_term(1, range(spec.ranks), schedule.header.lanes, spec.copies, schedule.header.first_step - 1)
    interleaved = InterleavedRuns()

    def on_step(report: StepReport) -> None:
        further = {name: getattr(report, name) for name in TOLD}
        further |= {"replica_bytes_so_far": transport.bytes_sent[REPLICA], "resident_bytes": 0}
        if interleaved.left == 1:
            further["resident_bytes"] = resident_bytes()
        interleaved.step(report.loss, further)

    with Store(list(spec.urls), timedelta(seconds=60)) as store:
        parts = dense.parts(training, schedule)
        log = FileLog(Path(spec.log)) if spec.log else None
        access = StoreAccess(store, Placement.spread(SHARDS, *(PARITY if spec.log else (1, 0))), training.run_namespace, log)
        session = join_term(parts, transport, term.lane_map, term.copy_map)
        trainer, events = begin_term(parts, access, session, Start(schedule.header.first_step - 1, last_batches(schedule)))
        with trainer.lanes.traffic:
            ready()
            interleaved.begin()
            trainer.run(events, lambda step: False, on_step, lambda report: None)


if __name__ == "__main__":
    main()
