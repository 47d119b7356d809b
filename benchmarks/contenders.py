"""The contenders that are compared: each a process of its own that trains runs of steps when told to.

    python benchmarks/contenders.py '{"contender": ..., ...}'

Between its runs it waits (interleaved.py), so the first steps of a run are left out: Foreload's traffic had fetched their rows while another
had its run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

from comparison import cpu_capability
from foreload.trainer.compute import numerics

# Before torch is imported, as in every trainer.
numerics.set_environment(cpu_capability())

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import baselines  # noqa: E402
import baselines_store  # noqa: E402
from foreload.cache.client.store import Store  # noqa: E402
from foreload.cache.parity.placement import Placement  # noqa: E402
from foreload.cache.protocol.ownership.batch_log import FileLog  # noqa: E402
from foreload.pipelines.schedule.reader import Schedule  # noqa: E402
from foreload.trainer.assembly.assembly import DenseModel, StoreAccess, begin_term, join_term  # noqa: E402
from foreload.trainer.assembly.start import Start  # noqa: E402
from foreload.trainer.compute.reports import StepReport  # noqa: E402
from foreload.trainer.job.job import TrainJob  # noqa: E402
from foreload.trainer.step.cuda_transport import NcclTransport  # noqa: E402
from foreload.trainer.step.transport import LocalHub, Transport  # noqa: E402
from interleaved import InterleavedRuns, Ranks, ready  # noqa: E402
from workload import PARITY, ROOT, job, last_batches  # noqa: E402

PROTECTED = "foreload, 2+1"
FORELOAD = {"foreload": (1, 0), PROTECTED: PARITY}  # this project's contenders, and how many rows and parity rows a stripe has
SILENCE = timedelta(minutes=10)  # while another contender has its run, nothing is sent
_REPORT_FIELDS = {"exchange": "seconds_exchange", "waiting for rows": "seconds_waiting"}


@dataclass(frozen=True, slots=True)
class ContenderSpec:
    """What a contender is told when it starts.

    urls: of its store, where it has one; ids: of Workload.ids and first: the schedule that filled the store, for contenders that do not train
    from a schedule; slots: of an LRU cache; skipped: steps of the schedule before the first one that such a contender trains. log: a folder for
    write-back batches, where there is parity; device: of the dense part, and of this project's partition.
    """

    contender: str
    schedule: str
    model: str
    ids: str = ""
    first: str = ""
    urls: tuple[str, ...] = ()
    slots: int = 0
    skipped: int = 0
    log: str = ""
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class Answer:
    """A run: the milliseconds of each step counted, and of processor time, on average; by part, on average, what they went to where the contender
    tells; and the last step's loss.
    """

    ms: tuple[float, ...]
    processor_ms: float
    parts: dict[str, float]
    loss: float

    @property
    def mean_ms(self) -> float:
        """Of a step."""
        return sum(self.ms) / len(self.ms)


class Contender:
    """The controller's end of a contender's process, which is ready once this is made. steps: how many it has trained or skipped."""

    def __init__(self, spec: ContenderSpec) -> None:
        self.spec = spec
        self.steps = spec.skipped
        command = [sys.executable, str(Path(__file__).resolve()), json.dumps(asdict(spec))]
        self._ranks = Ranks(spec.contender, [command], {"PYTHONPATH": str(ROOT)})

    def run(self, steps: int, discarded: int) -> Answer:
        """Train `discarded` steps, then `steps` more; the answer is about these."""
        self.steps += discarded + steps
        (answer,) = self._ranks.run(steps, discarded)
        parts = {name: 1000 * sum(of) / len(of) for name, of in answer["further"].items()}
        ms = tuple(1000 * seconds for seconds in answer["seconds"])
        return Answer(ms, 1000 * answer["processor"] / len(ms), parts, answer["loss"])

    def close(self) -> None:
        """End the process."""
        self._ranks.close()


def run_foreload(spec: ContenderSpec, schedule: Schedule, dense: DenseModel, interleaved: InterleavedRuns) -> None:
    """This project's trainer, assembled as its worker does it."""
    transport: Transport
    if spec.device == "cpu":
        (transport,) = LocalHub([0]).transports()
    else:
        transport = NcclTransport(dist.HashStore(), 0, 0, [0], SILENCE, torch.device(spec.device))
    with Store(spec.urls, timedelta(seconds=60)) as store:
        training = TrainJob.of(job(Path(spec.schedule), spec.model, device=spec.device))
        placement = Placement.spread(len(spec.urls), *FORELOAD[spec.contender])
        log = FileLog(Path(spec.log)) if placement.r else None
        parts = dense.parts(training, schedule)
        access = StoreAccess(store, placement, training.run_namespace, log)
        trainer, events = begin_term(
            parts, access, join_term(parts, transport, [0]), Start(schedule.header.first_step - 1, last_batches(schedule))
        )

        def on_step(report: StepReport) -> None:
            interleaved.step(report.loss, {name: getattr(report, seconds) for name, seconds in _REPORT_FIELDS.items()})

        interleaved.begin()
        trainer.run(events, lambda step: False, on_step, lambda report: None)


def run_baseline(spec: ContenderSpec, schedule: Schedule, dense: DenseModel, interleaved: InterleavedRuns) -> None:
    """One of the other contenders; all train their steps in the same loop."""
    make: dict[str, Callable[[baselines.Setting], baselines.Rows]] = {
        "floor": baselines.Floor,
        "one table": baselines.OneTable,
        "26 bags": baselines.Bags,
        "on demand": baselines_store.OnDemand,
        "on demand, shards in turn": baselines_store.OnDemandByShard,
        "LRU": baselines_store.Lru,
    }
    first = Schedule(spec.first) if spec.first else schedule
    setting = baselines.Setting(schedule, np.load(spec.ids, mmap_mode="r"), first, spec.urls, spec.slots, spec.device)
    rows = make[spec.contender](setting)
    interleaved.begin()
    for loss, parts in baselines.steps(setting, dense, rows, spec.skipped):
        interleaved.step(loss, parts)


def main() -> None:
    """Run the contender that the command line describes."""
    given = json.loads(sys.argv[1])
    spec = ContenderSpec(**{**given, "urls": tuple(given["urls"])})
    numerics.set_up(1, spec.device)
    if spec.contender not in FORELOAD:
        # What only the trainer needs; without it some of torch's operations are faster.
        torch.use_deterministic_algorithms(False)
    schedule = Schedule(spec.schedule)
    dense = DenseModel.build(TrainJob.of(job(Path(spec.schedule), spec.model, device=spec.device)), schedule)
    ready()
    (run_foreload if spec.contender in FORELOAD else run_baseline)(spec, schedule, dense, InterleavedRuns())


if __name__ == "__main__":
    main()
