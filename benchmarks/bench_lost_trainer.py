"""Losing a trainer of several whose lanes have copies: the gap between two steps, beside the machine's own pause, and torchft's.

python benchmarks/bench_lost_trainer.py [--quick] [--out DIR] [--pairs N]
"""

from __future__ import annotations

import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from comparison import Budget, Cell, Claim, Results, Table, arguments, save, tell
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.job.job import TrainJob
from foreload.trainer.run.timeline import Timeline
from shard_loss import Pulse, launched, run_training
from torchft_environment import TORCHFT
from trainer_loss import TrainerFault, TrainerInjector, TrainerLoss
from virtual_environment import NotToBeHad
from workload import BATCH, ROOT, SEED

LANES = 4
COPIES = 2
ROWS = "--rows {rows} --values 20000 --epochs {epochs} --slots 10000"  # so few slots that rows are fetched and written back in every step
TIMEOUT_SECONDS = 5.0  # --peer-timeout's default with copies
MEDIAN_SECONDS, MOST_SECONDS = 0.25, 0.5  # that a gap may take beyond an ordinary step
PARAMETERS = 60_000  # of the dense part that torchft's replicas train, about those of the small model
CALM = (1.5, 40)  # seconds and steps between two losses
KILL, KILL_LEADER, STOP = (
    TrainerFault(signal.SIGKILL, False),
    TrainerFault(signal.SIGKILL, True),
    TrainerFault(signal.SIGSTOP, False),
)


@dataclass(frozen=True, slots=True)
class Plan:
    """A training: how many trainers, whether with parity, and what is done to them, one after the other."""

    trainers: int
    parity: str
    faults: tuple[TrainerFault, ...]


# 24 kills, half of them of the leader, and three stops.
PLANS = (
    Plan(4, "2+1", (KILL_LEADER, KILL, KILL_LEADER)),
    Plan(2, "off", (KILL,)),
    Plan(3, "2+1", (KILL, KILL_LEADER)),
    Plan(4, "off", (KILL, KILL_LEADER, KILL)),
    Plan(2, "2+1", (KILL_LEADER,)),
    Plan(3, "off", (KILL_LEADER, KILL)),
    Plan(3, "2+1", (STOP, KILL)),
    Plan(2, "2+1", (KILL,)),
    Plan(4, "2+1", (KILL, KILL_LEADER, STOP)),
    Plan(3, "off", (KILL, KILL_LEADER)),
    Plan(2, "off", (STOP,)),
    Plan(4, "2+1", (KILL_LEADER, KILL, KILL)),
    Plan(2, "2+1", (KILL_LEADER,)),
    Plan(2, "off", (KILL_LEADER,)),
)
QUICK_PLANS = (Plan(3, "2+1", (KILL_LEADER, KILL)), Plan(2, "off", (KILL,)))


@dataclass(frozen=True, slots=True)
class Gap:
    """What a loss did: the longest gap between two steps from the fault on, the median step before, the machine's longest pause meanwhile; seconds.

    begin: of the training's steps, as the loss's moments.
    """

    plan: Plan
    loss: TrainerLoss
    begin: float
    seconds: float
    median_step: float
    pause: float

    @property
    def signal(self) -> str:
        """What was sent to the trainer."""
        return signal.Signals(self.loss.fault.signal_number).name

    @property
    def net_seconds(self) -> float:
        """Seconds beyond an ordinary step, and beyond the timeout where the trainer was stopped."""
        timeout = TIMEOUT_SECONDS if self.signal == "SIGSTOP" else 0.0
        return self.seconds - self.median_step - timeout


def schedule_of(folder: Path, quick: bool) -> Schedule:
    """Epochs over the same samples in four lanes."""
    rows, epochs = (200_000, 6) if quick else (300_000, 8)
    out = folder / f"gaps-{rows}-{epochs}"
    if not (out / "schedule.json").exists():
        words = ROWS.format(rows=rows, epochs=epochs).split()
        tell(f"preparing the schedule of the gaps: {out}")
        given = ["--format", "synthetic", "--batch-size", str(BATCH), "--seed", str(SEED), "--lanes", str(LANES)]
        command = [sys.executable, "-m", "foreload.pipelines.prepare", *given, *words, "--out", str(out), "--overwrite"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
    return Schedule(out)


def gaps_of(plan: Plan, injector: TrainerInjector, pulse: Pulse) -> list[Gap]:
    """The gaps of one training."""
    timeline: Timeline = injector.timeline
    ends = [*(loss.injected for loss in injector.trainer_losses[1:]), float(timeline.ended[-1])]
    return [
        Gap(
            plan,
            loss,
            float(timeline.ended[0]),
            timeline.longest_gap(loss.injected, min(loss.ready + CALM[0], end)),
            timeline.median_step(loss.since, loss.injected),
            pulse.longest_pause(loss.injected, loss.ready),
        )
        for loss, end in zip(injector.trainer_losses, ends, strict=True)
    ]


def train(schedule: Schedule, folder: Path, plan: Plan, seed: int) -> list[Gap]:
    """One training, in which everything of the plan happens."""
    with tempfile.TemporaryDirectory(dir=folder, prefix="lost-") as name:
        run = Path(name) / "run"
        injector = TrainerInjector(run, plan.faults, CALM, seed)
        with Pulse() as pulse:
            run_training(
                TrainJob.of(launched(schedule, run, trainers=plan.trainers, copies=COPIES, parity=plan.parity)), injector
            )
    if len(injector.trainer_losses) < len(plan.faults):
        raise SystemExit("the training ended before all that was to happen to it had happened")
    gaps = gaps_of(plan, injector, pulse)
    for gap in gaps:
        tell(
            f"{gap.loss.trainers} trainers, parity {plan.parity}: {gap.signal}, gap {1000 * gap.seconds:.0f} ms, "
            f"left after {1000 * (gap.loss.left - gap.loss.injected):.0f}, ready after {1000 * (gap.loss.ready - gap.loss.injected):.0f}, "
            f"step {1000 * gap.median_step:.0f}, pause {1000 * gap.pause:.0f}"
        )
    return gaps


def gap_table(gaps: Sequence[Gap]) -> Table:
    """A line for every loss."""
    rows: list[list[Cell]] = [
        [
            gap.loss.trainers, gap.plan.parity, gap.signal, "yes" if gap.loss.fault.leader else "no",
            f"{1000 * gap.seconds:.0f}", f"{1000 * gap.pause:.0f}", f"{1000 * gap.median_step:.1f}",
            f"{1000 * (gap.loss.left - gap.loss.injected):.0f}", f"{1000 * (gap.loss.ready - gap.loss.injected):.0f}",
        ]
        for gap in gaps
    ]  # fmt: skip
    columns = [
        "trainers", "parity", "signal", "the leader", "longest gap, ms", "machine's pause, ms", "median step, ms", "left after, ms",
        "ready after, ms",
    ]  # fmt: skip
    note = (
        "Left and ready: when the launcher knew of the first trainer that left the term, and that all were ready for the next one. The "
        f"machine's pause is the longest time in between in which a thread of the launcher that sleeps "
        f"{1000 * Pulse.PERIOD_SECONDS:g} ms at a time was not run."
    )
    return Table("Losses of trainers", columns, rows, note)


def gap_claims(gaps: Sequence[Gap]) -> list[Claim]:
    """The bars of the gaps by kill and by stop."""
    kills = [gap.net_seconds for gap in gaps if gap.signal == "SIGKILL"]
    stops = [gap.net_seconds for gap in gaps if gap.signal == "SIGSTOP"]
    against = "an ordinary step, in the same run"
    claims = [
        Claim("gap after SIGKILL of a trainer, s beyond a step, median", against, f"<= {MEDIAN_SECONDS}", statistics.median(kills),
              most=MEDIAN_SECONDS, note=f"{len(kills)} times."),
        Claim("gap after SIGKILL of a trainer, s beyond a step, longest", against, f"<= {MOST_SECONDS}", max(kills), most=MOST_SECONDS,
              note=f"{len(kills)} times."),
    ]  # fmt: skip
    if stops:
        claims.append(
            Claim("gap after SIGSTOP of a trainer, s beyond a step and the timeout, longest", against, f"<= {MOST_SECONDS}", max(stops),
                  most=MOST_SECONDS, note=f"{len(stops)} times.")
        )  # fmt: skip
    return claims


def measure(folder: Path, quick: bool, rounds: int, budget: Budget) -> list[Gap]:
    """All trainings, as far as there is time."""
    schedule = schedule_of(folder, quick)
    gaps: list[Gap] = []
    longest = 0.0
    for number in range(rounds):
        for place, plan in enumerate(QUICK_PLANS if quick else PLANS):
            started = time.monotonic()
            if number and started + longest > budget.until(1.0):
                return gaps
            gaps += train(schedule, folder, plan, 1000 * number + place)
            longest = max(longest, time.monotonic() - started)
    return gaps


def torchft(step_seconds: float, quick: bool) -> tuple[Table | None, str]:
    """torchft's replicas that lose one after the other: a table, and a note. step_seconds: of an ordinary step."""
    try:
        if quick and not TORCHFT.is_there():
            raise NotToBeHad("--quick does not make its virtual environment; python benchmarks/torchft_environment.py does")
        python = TORCHFT.make()
    except NotToBeHad as error:
        tell(f"skipped: torchft could not be had: {error}")
        return None, f"torchft could not be had: {error}"
    rows: list[list[Cell]] = []
    gaps: list[float] = []
    for seed, replicas in enumerate((3,) if quick else (3, 4, 3, 2)):
        spec = {"replicas": replicas, "kills": replicas - 1, "parameters": PARAMETERS, "step_seconds": step_seconds, "seed": seed}
        command = [str(python), str(ROOT / "benchmarks" / "torchft_contender.py"), json.dumps(spec)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        if done.returncode:
            return None, f"torchft's contender failed: {(done.stderr.strip().splitlines() or ['no word'])[-1]}"
        for count, kill in enumerate(json.loads(done.stdout.splitlines()[-1])):
            rows.append([replicas - count, f"{1000 * kill['gap']:.0f}", f"{1000 * kill['step']:.1f}"])
            gaps.append(kill["gap"] - kill["step"])
            tell(f"torchft, {replicas - count} replicas: gap {1000 * kill['gap']:.0f} ms, step {1000 * kill['step']:.0f}")
    note = (
        f"torchft {TORCHFT.installed[-1][0]}: replicas of a dense part of {PARAMETERS:,} parameters alone, over gloo, one thread each, its "
        "lighthouse on the same machine; quorums wait 100 ms for those that they know. The median gap is "
        f"{statistics.median(gaps):.3f} s beyond a step. It has no embedding rows, and a killed replica's samples "
        "are not trained."
    )
    return Table("Losses of replicas under torchft's nightly", ["replicas", "longest gap, ms", "median step, ms"], rows), note


def main() -> None:
    """Measure and save."""
    given = arguments(__doc__, pairs=(1, 1))
    folder = (given.out / "work").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    gaps = measure(folder, given.quick, given.pairs, given.budget)
    steps = [gap.median_step for gap in gaps if math.isfinite(gap.median_step)]
    notes = [
        f"Synthetic Criteo-shaped rows, 26 tables, batch {BATCH:,}, {LANES} lanes, the small model, three local store shards, "
        f"--copies {COPIES}, trainings by the launcher; an ordinary step takes {1000 * min(steps):.0f} to {1000 * max(steps):.0f} ms. "
        "A gap is counted from the signal, between "
        "the moments at which steps are committed.",
    ]
    table, note = torchft(0.02, given.quick)
    tables = [gap_table(gaps), *([] if table is None else [table])]
    notes.append(note)
    settings: dict[str, str | int | float | bool] = {
        "lanes": LANES,
        "copies": COPIES,
        "peer timeout": TIMEOUT_SECONDS,
    }
    save(
        Results("lost_trainer", "Losing a trainer", gap_claims(gaps), tables, settings=settings, notes=notes),
        given.out,
    )


if __name__ == "__main__":
    main()
