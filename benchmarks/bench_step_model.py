"""How well step times are predicted: live configurations, the model fitted to a third of them, the rest predicted.

python benchmarks/bench_step_model.py [--quick] [--out DIR] [--pairs N] [--minutes M]

What was measured stays in DIR/step_model_turns.jsonl: called again, it goes on from there.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from comparison import Cell, Claim, Results, Table, arguments, save, tell
from foreload.trainer.assembly.assembly import DenseModel
from foreload.trainer.job.job import TrainJob
from foreload.trainer.resources.step_model import Observation, StepModel
from step_configurations import Configuration, Piece, Turn, job_of, observation, schedule_of, trainers, turn

SHARDS = ((1, "off"), (2, "off"), (3, "off"), (5, "off"), (3, "2+1"), (4, "2+1"), (5, "2+1"))
SLOTS = (6_000, 10_000, 30_000)
BATCHES = (1024, 2048)
COUNT, QUICK_COUNT = 30, 6
TURN_COUNT, QUICK_TURN_COUNT = 9, 2
MOST_TURNS = 16  # until there are so many amid which the machine's speed did not change
DRIFT = 0.15  # by more of which it did
TURN_SECONDS = 0.35  # about
WARM_UP = 12
STEPS = 200  # of a schedule

Visits = dict[Configuration, list[list[Turn]]]


def chosen(count: int) -> list[Configuration]:
    """So many of all configurations, the same each time: each brings most levels, and pairs of them, that others before have less often."""
    everything = [
        Configuration(trainers, shards, parity, slots, model, batch)
        for trainers, (shards, parity), slots, model, batch in itertools.product(
            (1, 2, 3, 4), SHARDS, SLOTS, ("small", "large"), BATCHES
        )
    ]
    random.Random(0).shuffle(everything)
    return spread_out(everything, count)


def spread_out(configurations: Sequence[Configuration], count: int) -> list[Configuration]:
    """Of these, so many that differ in as many levels and pairs of levels as can be."""
    left, taken = list(configurations), list[Configuration]()
    seen: dict[object, int] = {}

    def keys(one: Configuration) -> list[object]:
        levels = one.levels()
        return [*levels, *itertools.combinations(levels, 2)]

    while left and len(taken) < count:
        best = max(left, key=lambda one: sum(1 / (1 + seen.get(key, 0)) ** 2 for key in keys(one)))
        left.remove(best)
        taken.append(best)
        for key in keys(best):
            seen[key] = seen.get(key, 0) + 1
    return taken


def measured_before(path: Path) -> Visits:
    """What an earlier call has measured."""
    visits: Visits = {}
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            told = json.loads(line)
            visits.setdefault(Configuration(**told["configuration"]), []).append([Turn(**one) for one in told["turns"]])
    return visits


def visit(configuration: Configuration, work: Path, piece: Piece, count: int) -> list[Turn]:
    """Start a configuration, and train it turn by turn: so many, those amid which the machine changed its speed left out if there are enough."""
    schedule = schedule_of(work, configuration.batch_size, configuration.slots, STEPS)
    with trainers(configuration, schedule, work) as (ranks, stores):
        first = turn(ranks, stores, piece, WARM_UP)
        steps = round(TURN_SECONDS / max(first.total * first.unit_ms / 1000, 1e-4))
        most = (STEPS - WARM_UP - 1) // MOST_TURNS - 2  # the schedule's steps are not to run out
        turns: list[Turn] = []
        while len(turns) < MOST_TURNS and sum(one.drift <= DRIFT for one in turns) < count:
            turns.append(turn(ranks, stores, piece, max(min(steps, most), 3)))
        return sorted(turns, key=lambda one: one.drift > DRIFT)[:count]


def dense_parameters(work: Path) -> dict[str, int]:
    """Of both models."""
    counts = {}
    for model in ("small", "large"):
        schedule = schedule_of(work, BATCHES[0], SLOTS[-1], STEPS)
        built = DenseModel.build(TrainJob.of(job_of(schedule, model)), schedule)
        counts[model] = sum(parameter.numel() for parameter in built.module.parameters())
    return counts


def off(model: StepModel, one: Observation) -> float:
    """Relative error of the prediction."""
    return float(abs(model.predict(one.setup, one.load).total[0] / one.total[0] - 1))


def tables(visits: Visits, dense: dict[str, int], quick: bool) -> tuple[list[Table], list[Claim]]:
    """Fit a third, predict the rest, with and without counts."""
    observed = {one: observation(one, dense[one.model], [t for turns in of_it for t in turns]) for one, of_it in visits.items()}
    fitted = spread_out(list(observed), max(-(-len(observed) // 3), 3))
    rest = [one for one in observed if one not in fitted]
    models = {counts: StepModel([observed[one] for one in fitted], counts) for counts in (True, False)}
    errors = {counts: [off(model, observed[one]) for one in rest] for counts, model in models.items()}
    repeats = [_difference(turns) for turns in visits.values() if len(turns) > 1]
    rows: list[list[Cell]] = []
    for one in observed:
        measured, predicted = observed[one], models[True].predict(observed[one].setup, observed[one].load)
        rows.append([
            one.trainers, one.shards, one.parity, one.slots, one.model, one.batch_size, "fitted" if one in fitted else "predicted",
            f"{measured.total[0]:.3f}", f"{predicted.total[0]:.3f}", f"{off(models[True], measured):.1%}", f"{off(models[False], measured):.1%}",
            f"{measured.thread[0]:.3f}", f"{predicted.thread[0]:.3f}",
        ])  # fmt: skip
    repeat = statistics.median(repeats) if repeats else float("nan")
    bar = max(0.1, 2 * repeat) if repeats else 0.1
    summary = Table(
        "Errors of predicted step times",
        ["model", "configurations predicted", "median", "worst"],
        [
            ["with the schedule's counts", len(rest), f"{statistics.median(errors[True]):.1%}", f"{max(errors[True]):.1%}"],
            ["the same fit without them", len(rest), f"{statistics.median(errors[False]):.1%}", f"{max(errors[False]):.1%}"],
            [
                "difference of two visits to a configuration",
                len(repeats),
                f"{repeat:.1%}",
                f"{max(repeats, default=float('nan')):.1%}",
            ],
        ],
        f"{len(observed)} configurations, {len(fitted)} of them fitted; interval told: x / {1 + models[True].margin:.2f}.",
    )
    columns = [
        "trainers", "shards", "parity", "slots a lane", "model", "batch", "", "measured, units a step", "predicted", "off", "off without counts",
        "step's thread", "predicted",
    ]  # fmt: skip
    claims = [
        Claim("step time, median error", "measured", f"<= {bar:.1%}", statistics.median(errors[True]), most=bar),
        Claim("step time, worst error", "measured", "<= 30 %", max(errors[True]), most=0.3),
    ]
    return [summary, Table("Configurations", columns, rows), _terms(models[True])], claims


def _difference(visits: Sequence[Sequence[Turn]]) -> float:
    """How far two visits to a configuration are apart, relative to their mean."""
    one, other = (statistics.median(turn.total for turn in turns) for turns in visits[:2])
    return abs(one - other) / ((one + other) / 2)


def _terms(model: StepModel) -> Table:
    rows: list[list[Cell]] = [
        [fit, name, f"{value:.3g}"] for fit, terms in model.coefficients.items() for name, value in terms.items() if value
    ]
    return Table("Terms that are not 0", ["fit", "term", "units"], rows)


def main() -> None:
    """Measure, as far as the time goes, and save."""
    given = arguments(__doc__, pairs=(2, 1))
    work = given.out / "work"
    work.mkdir(parents=True, exist_ok=True)
    log = given.out / ("step_model_turns_quick.jsonl" if given.quick else "step_model_turns.jsonl")
    configurations = chosen(QUICK_COUNT if given.quick else COUNT)
    visits, piece = measured_before(log), Piece()
    dense = dense_parameters(work)
    for number in range(given.pairs):
        for place, configuration in enumerate(configurations):
            if len(visits.get(configuration, [])) > number or time.monotonic() > given.budget.until(0.93):
                continue
            turns = visit(configuration, work.absolute(), piece, QUICK_TURN_COUNT if given.quick else TURN_COUNT)
            visits.setdefault(configuration, []).append(turns)
            with open(log, "a", encoding="utf-8") as file:
                file.write(json.dumps({"configuration": asdict(configuration), "turns": [asdict(one) for one in turns]}) + "\n")
            told = statistics.median(one.total for one in turns)
            unit = np.median([one.unit_ms for one in turns])
            tell(f"{number + 1}, {place + 1} of {len(configurations)}: {configuration}: {told:.3f} units of {unit:.1f} ms")
    of_them = {one: visits[one] for one in configurations if one in visits}
    made, claims = tables(of_them, dense, given.quick)
    notes = [
        "Trainers live in processes of their own, on an empty store of local servers; between two turns of about a third of a second each a fixed "
        "piece of work is done, on all cores, and times are told in its units. A turn amid which the machine changed its speed is done again. "
        "A configuration is what the median of its turns says.",
    ]
    save(Results("step_model", "Predicted step times", claims, made, notes=notes), given.out)


if __name__ == "__main__":
    main()
