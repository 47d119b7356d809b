"""What a profile costs: steps with and without the looks at the processor clocks, in turns of one run, and what is done at a run's end.

python benchmarks/bench_profiling.py [--quick] [--out DIR] [--pairs N] [--minutes M]
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from comparison import Cell, Claim, Ratio, Results, Table, arguments, save, tell
from foreload.trainer.assembly.job_shape import machine
from foreload.trainer.compute.reports import COLUMNS
from foreload.trainer.run import history
from foreload.trainer.step.term_session import Clock
from step_configurations import Configuration, schedule_of, trainers

CONFIGURATION = Configuration(trainers=2, shards=3, parity="2+1", slots=30_000, model="small", batch_size=1024)
MOST = 0.005
TURN_STEPS, DISCARDED, STEPS = 6, 1, 4_000
QUICK_STEPS = 200
LOOKS = 20_000
POINTS = 10_000  # steps of the run whose profile is written


def looks_seconds() -> float:
    """What a step's looks at the processor clocks take: a clock's making and its question, less those of one that has none."""

    def taken(with_clocks: bool) -> float:
        begun = time.perf_counter()
        for _ in range(LOOKS):
            if with_clocks:
                _ = Clock().processor_seconds
            else:
                _ = Clock(process=0.0, thread=0.0)
        return (time.perf_counter() - begun) / LOOKS

    return statistics.median(taken(True) - taken(False) for _ in range(5))


def end_seconds() -> float:
    """What writing the profile of a run of POINTS steps takes."""
    lines = np.random.default_rng(0).random((POINTS, len(COLUMNS))).tolist()
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        steps, stride = history.of_steps(lines)
        history.add(Path(folder) / "history.sqlite", history.Profile({}, machine(), [], steps, stride))
        return time.perf_counter() - begun


def pairs_of(work: Path, steps: int, most: int, until: float) -> tuple[list[float], float]:
    """Ratios of turns with and without, and the median ms of a step."""
    ratios: list[float] = []
    milliseconds: list[float] = []
    schedule = schedule_of(work, CONFIGURATION.batch_size, CONFIGURATION.slots, steps)
    count = min(most, (steps - 20) // (2 * (TURN_STEPS + DISCARDED)))
    with trainers(CONFIGURATION, schedule, work, in_turn=True) as (ranks, _):

        def turn() -> float:
            answers = ranks.run(TURN_STEPS, DISCARDED)
            return max(statistics.median(answer["seconds"]) for answer in answers)

        # An even number of turns, so that every pair has first one with, then one without; the order is even anyway, as turns are many and short.
        ranks.run(5, 5)
        ranks.run(5, 4)
        last = turn()
        for number in range(2 * count - 1):
            now = turn()
            # Each turn is held against the one before it, which had the other: the machine's pace hardly changes between them.
            ratios.append(last / now if number % 2 == 0 else now / last)
            milliseconds.append(1000 * now)
            last = now
            if time.monotonic() > until:
                tell(f"{number + 1} pairs: there is no time for more")
                break
    return ratios, statistics.median(milliseconds)


def main() -> None:
    """Measure and save."""
    given = arguments(__doc__, pairs=(280, 10))
    work = (given.out / "work").absolute()
    work.mkdir(parents=True, exist_ok=True)
    ratios, step_ms = pairs_of(work, QUICK_STEPS if given.quick else STEPS, given.pairs, given.budget.until(0.9))
    looks, end = looks_seconds(), end_seconds()
    middle = statistics.median(ratios)
    # The median's own uncertainty, by resampling, is told as its spread.
    drawn = np.median(np.random.default_rng(0).choice(ratios, (1000, len(ratios))), axis=1)
    spread = Ratio(middle, float(np.quantile(drawn, 0.05)), float(np.quantile(drawn, 0.95)), tuple(ratios))
    claims = [
        Claim("step time with profiling", "without", f"<= {1 + MOST}", spread, most=1 + MOST),
        Claim("the looks at the clocks alone, of a step", "step time", f"<= {MOST:.1%}", 1000 * looks / step_ms, most=MOST),
    ]
    rows: list[list[Cell]] = [
        ["pairs of turns", len(ratios)],
        ["ms a step", f"{step_ms:.2f}"],
        ["with over without, median (5 to 95 % of resampled medians)", str(spread)],
        ["looks at the clocks, us a step and trainer", f"{1e6 * looks:.2f}"],
        [f"writing the profile of {POINTS:,} steps at a run's end, ms", f"{1000 * end:.1f}"],
        ["of a step of such a run", f"{end / POINTS / (step_ms / 1000):.5%}"],
    ]
    notes = [
        "Turns of a few steps with and without, one after the other in the same trainers; each ratio is of two turns that follow each other."
    ]
    tables = [Table("What a profile costs", ["", ""], rows)]
    save(Results("profiling", "Cost of profiling", claims, tables, notes=notes), given.out)


if __name__ == "__main__":
    main()
