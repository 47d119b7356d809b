"""Three jobs that arrive one after the other on a Ray cluster: shared by `--auto`, one after the other, and with equal fixed shares.

    python benchmarks/bench_pool.py [--quick] [--out DIR]

The cluster is this machine's, with more cores by Ray's count than it has: most of a step is a wait in the model's forward, which stands for
computing on cores that are not there.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

from bench_auto import TRAIN, command
from comparison import Cell, Claim, Results, Table, arguments, save, tell
from foreload.trainer.cluster.engines.ray_pool import state

CORES, LANES, BATCH, SLOTS = 12, 12, 120, 2000
STEPS, QUICK_STEPS = 250, 60
SECONDS_A_SAMPLE = 0.008
LEAST = 2  # cores of a job with one trainer and one server
WEIGHTS = (2, 1, 1)
APART = 40.0  # seconds between two arrivals
SHARED, FIXED, AFTER, KILLED = "shared by --auto", "equal fixed shares", "one after the other", "shared, the second one is killed"
MODEL = f"""
import time
from foreload.trainer.models.dlrm import DLRM

class Model(DLRM):
    def forward(self, dense, embeddings):
        time.sleep({SECONDS_A_SAMPLE} * len(dense))
        return super().forward(dense, embeddings)
"""


@dataclass(frozen=True, slots=True)
class Seen:
    """The pool at one moment. cores: by the name of each job's run, what it uses, and what it is to have."""

    at: float
    cores: dict[str, tuple[float, float]]

    @property
    def has_its_shares(self) -> bool:
        """Whether every job has what it is to have."""
        return all(uses == aim for uses, aim in self.cores.values())

    @property
    def used(self) -> float:
        """The cores that all jobs use."""
        return sum(uses for uses, _ in self.cores.values())

    def shows(self, jobs: int) -> bool:
        """Whether so many jobs have what they are to have, and each more than it begins with."""
        return len(self.cores) == jobs and self.has_its_shares and min(uses for uses, _ in self.cores.values()) > LEAST


@dataclass(slots=True)
class Ran:
    """Jobs that were run.

    Attributes:
        each: the seconds of each job, from its start to its end.
        seconds: from the first one's start to the last one's end.
        digests: of their models.
        seen: the pool, from time to time.
    """

    each: list[float] = field(default_factory=list)
    seconds: float = 0.0
    digests: set[str] = field(default_factory=set)
    seen: list[Seen] = field(default_factory=list)

    def shares(self, jobs: int) -> dict[str, float]:
        """The cores that each of so many jobs used when all had what they were to have for the first time, by name."""
        most = next((one for one in self.seen if one.shows(jobs)), Seen(0.0, {}))
        return {name: uses for name, (uses, _) in most.cores.items()}


class Jobs:
    """Jobs of one schedule on a Ray cluster."""

    def __init__(self, folder: Path, steps: int, address: str) -> None:
        self.folder, self.address = folder, address
        self.schedule = folder / f"clicks-{steps}"
        if not self.schedule.exists():
            words = ["prepare", "--format", "synthetic", "--rows", str(steps * BATCH), "--batch-size", str(BATCH)]
            command(*words, "--lanes", str(LANES), "--slots", str(SLOTS), "--out", str(self.schedule), "--overwrite")
        (folder / "waiting.py").write_text(MODEL, encoding="utf-8")

    def start(self, name: str, *further: str) -> subprocess.Popen[bytes]:
        """Start a job."""
        shutil.rmtree(self.folder / name, ignore_errors=True)
        words = [
            *TRAIN,
            "train",
            str(self.schedule),
            "--run",
            str(self.folder / name),
            "--model",
            f"{self.folder / 'waiting.py'}:Model",
        ]
        words += f"--engine ray --ray-address {self.address} --store engine:1 --no-report --digest --dim 8 --history off".split()
        with (self.folder / f"{name}.log").open("wb") as said:
            return subprocess.Popen([*words, *further], stdout=said, stderr=said)

    def run(self, names: Sequence[str], further: Sequence[Sequence[str]], apart: float | None, kills: str | None = None) -> Ran:
        """Run jobs to their ends. Each is deleted then, as after an export, so that its servers end as well.

        Args:
            further: the further settings of each.
            apart: the seconds between two starts. None if each waits for the one before.
            kills: a job whose driver is killed once all jobs have what they are to have. The others are killed once they have taken over its part.
        """
        ran, began, starts = Ran(), time.monotonic(), list[float]()
        jobs, ends = dict[str, subprocess.Popen[bytes]](), dict[str, float]()
        while len(ends) < len(names):
            now = time.monotonic()
            due = not jobs if apart is None else now - began >= apart * len(starts)
            if len(starts) < len(names) and due:
                name = names[len(starts)]
                jobs[name] = self.start(name, *further[len(starts)])
                starts.append(now)
            ran.seen.append(self.look())
            if kills in jobs and sum(seen.shows(len(names)) for seen in ran.seen) > 5:
                jobs[kills].kill()
            if kills in ends and taken_over(ran, str(kills)) < float("inf"):
                return self.kill(ran, names, jobs)
            for name, job in list(jobs.items()):
                if job.poll() is not None:
                    ends[name] = time.monotonic()
                    del jobs[name]
                    if name != kills:
                        self.close(name, job.returncode, ran)
            time.sleep(0.5)
        ran.each = [ends[name] - since for name, since in zip(names, starts, strict=True)]
        ran.seconds = max(ends.values()) - began
        return ran

    def kill(self, ran: Ran, names: Sequence[str], jobs: Mapping[str, subprocess.Popen[bytes]]) -> Ran:
        """Kill the jobs that are left, and delete all."""
        for job in jobs.values():
            job.kill()
            job.wait()
        for name in names:
            # Its trainers stop once they notice that the driver has died.
            while subprocess.run([*TRAIN, "delete", str(self.folder / name)], capture_output=True, check=False).returncode:
                time.sleep(1)
        return ran

    def close(self, name: str, status: int, ran: Ran) -> None:
        """Note the digest of a job that has ended, and delete its run."""
        if status:
            raise SystemExit((self.folder / f"{name}.log").read_text()[-2000:])
        ran.digests.add(str(json.loads((self.folder / name / "summary.json").read_text())["digest"]))
        command("delete", str(self.folder / name))

    @staticmethod
    def look() -> Seen:
        """The pool now."""
        there = state()
        jobs = () if there is None else there.jobs
        cores = {Path(one.run).name: (one.bid.uses.cores, one.share.aim.cores) for one in jobs if one.share.aim is not None}
        return Seen(time.monotonic(), cores)


def taken_over(ran: Ran, killed: str) -> float:
    """The seconds from the moment when the pool no longer knows a killed job until the others use more, and have what they are to have."""
    last = max((one for one in ran.seen if killed in one.cores), key=lambda one: one.at)
    others = last.used - last.cores[killed][0]
    after = [one for one in ran.seen if one.at > last.at]
    return next((one.at - after[0].at for one in after if one.has_its_shares and one.used > others), float("inf"))


def measure(given: argparse.Namespace, jobs: Jobs) -> None:
    """All three ways, and a job that is killed."""
    auto = [("--auto", "--pool", f"weight={weight}") for weight in WEIGHTS]
    fixed = [("--trainers", str(CORES // len(WEIGHTS) - 1))] * len(WEIGHTS)
    apart = APART / 2 if given.quick else APART
    ran = {
        SHARED: jobs.run(["shared-1", "shared-2", "shared-3"], auto, apart),
        FIXED: jobs.run(["fixed-1", "fixed-2", "fixed-3"], fixed, apart),
        AFTER: jobs.run(["after-1", "after-2", "after-3"], [("--auto",)] * len(WEIGHTS), None),
        KILLED: jobs.run(["killed-1", "killed-2", "killed-3"], auto, apart, kills="killed-2"),
    }
    shares = ran[SHARED].shares(len(WEIGHTS))
    for name, of in ran.items():
        tell(f"{name}: {of.seconds:.1f} s, {[round(one, 1) for one in of.each]}, {of.shares(len(WEIGHTS))}")
    digests = set().union(*(of.digests for of in ran.values()))
    claims = [
        Claim("time of three jobs", AFTER, "<= 1", ran[SHARED].seconds / ran[AFTER].seconds, most=1.0),
        Claim("time of three jobs", FIXED, "<= 1", ran[SHARED].seconds / ran[FIXED].seconds, most=1.0),
        Claim("seconds until a killed job's part is used", "-", "-", taken_over(ran[KILLED], "killed-2")),
        Claim("digests", "-", "1", float(len(digests)), most=1.0),
    ]
    rows: list[list[Cell]] = [[name, of.seconds, *of.each] for name, of in ran.items() if of.each]
    table = Table("Seconds", ["jobs", "in all", "first", "second", "third"], rows)
    told = ", ".join(f"{cores:g}" for cores in shares.values())
    note = (
        f"{len(WEIGHTS)} jobs of {LANES} lanes, {apart:g} s apart, on {CORES} cores by Ray's count; the model waits {1000 * SECONDS_A_SAMPLE:g} ms "
        f"for each sample. With weights {':'.join(map(str, WEIGHTS))}, once all three were measured, they used {told} cores, a server's included."
    )
    save(Results("pool", "Jobs that share a cluster", claims, [table], notes=[note]), given.out)


def main() -> None:
    """Measure, print, save."""
    given = arguments(__doc__, pairs=(1, 1))
    folder = given.out / "work" / "pool"
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    nodes = Cluster(
        initialize_head=True, head_node_args={"num_cpus": CORES, "object_store_memory": 80 << 20, "include_dashboard": False}
    )
    try:
        ray.init(address=nodes.address, log_to_driver=False, logging_level=logging.ERROR)
        measure(given, Jobs(folder.absolute(), QUICK_STEPS if given.quick else STEPS, str(nodes.address)))
    finally:
        if ray.is_initialized():
            ray.shutdown()
        nodes.shutdown()


if __name__ == "__main__":
    main()
