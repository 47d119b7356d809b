"""What the copies of lanes weigh: bytes of replicas, counted by the schedule as `foreload.trainer.step.replication` sends them."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from comparison import tell
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.cluster.coordinator.terms import first_term
from foreload.trainer.cluster.messages.facts import Term
from workload import BATCH, DIM, ROOT, SEED, SLOTS

LANES = 4
HEAD_BYTES = 16
STATE_BYTES = {"row-wise Adagrad": 4, "Adagrad": 4 * DIM}
PLACEMENTS = ("locality", "order")


@dataclass(frozen=True, slots=True)
class Volume:
    """A row optimizer, a placement of samples and a number of trainers: bytes that all replicas of a step have (sent), on average; those of full
    replication, with all weights and states of the rows changed (full); and of the rows changed, the share that the copy's trainer uses next.
    """

    optimizer: str
    placement: str
    trainers: int
    sent: float
    full: float
    used_next: float


def schedule_of(folder: Path, placement: str, steps: int) -> Schedule:
    """A schedule of four lanes, from an empty cache."""
    out = folder / f"replicas-{placement}-{steps}"
    if not (out / "schedule.json").exists():
        tell(f"preparing {steps} steps in {LANES} lanes, placed by {placement}")
        given = ["--format", "synthetic", "--rows", str(steps * BATCH), "--batch-size", str(BATCH), "--seed", str(SEED)]
        more = ["--lanes", str(LANES), "--slots", str(SLOTS // LANES), "--placement", placement, "--out", str(out), "--overwrite"]
        command = [sys.executable, "-m", "foreload.pipelines.prepare", *given, *more]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
    return Schedule(out)


def rows_of_replicas(schedule: Schedule, term: Term) -> tuple[int, int, int]:
    """Over all steps but the last: copies of lanes that were told of a step, rows changed, and of these those that are sent with their weights."""
    masks = [sum(1 << lane for lane in term.lanes_of(trainer)) for trainer in term.members]
    parts = changed = with_weights = 0
    for event in schedule.events():
        if event.kind != "train" or event.step + 1 == schedule.header.end_step:
            continue
        for lane, ranks in enumerate(term.copy_map):
            following = schedule.lane(event, lane).next_users
            parts, changed = parts + len(ranks), changed + len(ranks) * following.size
            with_weights += sum(int(np.count_nonzero((following & np.uint64(masks[rank])) == 0)) for rank in ranks)
    return parts, changed, with_weights


def volumes(folder: Path, steps: int, copies: int = 2) -> list[Volume]:
    """What replicas weigh for each optimizer, placement and 2 and 4 trainers."""
    weighed = []
    for placement in PLACEMENTS:
        schedule = schedule_of(folder, placement, steps)
        for trainers in (2, 4):
            parts, changed, sent = rows_of_replicas(schedule, first_term(1, range(trainers), LANES, copies, -1))
            for optimizer, state in STATE_BYTES.items():
                of_step = (HEAD_BYTES * parts + 4 * DIM * sent + state * changed) / (steps - 1)
                full = (HEAD_BYTES * parts + (4 * DIM + state) * changed) / (steps - 1)
                weighed.append(Volume(optimizer, placement, trainers, of_step, full, 1 - sent / changed))
    return weighed
