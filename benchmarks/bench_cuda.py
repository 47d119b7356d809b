"""Training steps on a CUDA device: the partition in its memory, beside FBGEMM's table-batched embedding there and behind its managed cache.

python benchmarks/bench_cuda.py [--quick] [--out DIR] [--pairs N]

Without a CUDA device nothing is measured; with --quick the same code runs on the CPU then, which tells that it works and nothing of a device.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from comparison import Cell, Claim, Results, Table, alternate, arguments, graphics, ratio, save, spread, tell
from contenders import Contender, ContenderSpec
from fbgemm_environment import FBGEMM
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.compute.layouts import model_spec
from interleaved import Ranks
from lanes import LanesWorkload
from torchrec_environment import TORCHREC
from virtual_environment import NotToBeHad
from workload import BATCH, DIM, FULL, LR, MODELS, QUICK, ROOT, SEED, SLOTS, describe

TITLE = "On a CUDA device"
DENSE_LR = 0.01
OURS, OUR_FLOOR = "foreload, partition in device memory", "dense floor with foreload's arithmetic"
FLOOR = "dense floor as torch comes"
ALL_IN_MEMORY, CACHED = "FBGEMM, all tables in device memory", "FBGEMM, managed cache of as many rows"
SHARE, RATE, BESIDE = (
    "embedding time on a CUDA device, share of the step, {} model",
    "trained samples/s on a CUDA device, {} model",
    "the dense floor with the same arithmetic",
)


@dataclass(frozen=True, slots=True)
class Plan:
    """Steps before the first run, of a run those counted and those discarded before them (traffic fetches 8 ahead), and the most pairs."""

    pairs: int
    warm_up: int = 60
    steps: int = 10
    discarded: int = 9

    @property
    def end(self) -> int:
        """The step after the last one."""
        return self.warm_up + self.pairs * (self.discarded + self.steps)


Turn = Mapping[str, float]


def claims_of(model: str, measured: Mapping[str, Sequence[Turn]], note: str = "") -> list[Claim]:
    """What a device's figures say; without any, why there are none."""

    def ms(contender: str) -> list[float]:
        return [turn["ms"] for turn in measured[contender]]

    share = spread([1 - floor / own for own, floor in zip(ms(OURS), ms(OUR_FLOOR), strict=True)]) if measured else None
    return [
        Claim(SHARE.format(model), BESIDE, "none", share, note=note),
        *(
            Claim(RATE.format(model), other, "none", ratio(ms(other), ms(OURS)) if measured else None, note=note)
            for other in (ALL_IN_MEMORY, CACHED)
        ),
    ]


def others(python: Path, schedule: Schedule, slices: Path, model: str, device: str, stack: ExitStack) -> dict[str, Ranks]:
    """The contenders of FBGEMM's environment, started, until the stack ends."""
    tables = schedule.header.features.tables
    places = {FLOOR: "nowhere", ALL_IN_MEMORY: "device" if device == "cuda" else "host"}
    if device == "cuda":
        places[CACHED] = "managed cache"
    started = {}
    for name, rows in places.items():
        spec = {
            "rows": rows,
            "device": device,
            "samples": str(slices),
            "tables": [table.rows for table in tables],
            "slots": SLOTS,
            "dim": DIM,
            "lr": LR,
            "dense_lr": DENSE_LR,
            "dense_width": model_spec(schedule.header.features, DIM).dense_width,
            "model": MODELS[model],
            "seed": SEED,
        }
        command = [str(python), str(ROOT / "benchmarks" / "fbgemm_contender.py"), json.dumps(spec)]
        started[name] = Ranks(name, [command], {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"})
        stack.callback(started[name].close)
    return started


def turn_of(ranks: Ranks, plan: Plan) -> Turn:
    """A turn of a contender of FBGEMM's environment."""
    (answer,) = ranks.run(plan.steps, plan.discarded)
    return {
        "ms": 1000 * sum(answer["seconds"]) / plan.steps,
        "processor": 1000 * answer["processor"] / plan.steps,
        "loss": answer["loss"],
    }


def our_turn(contender: Contender, plan: Plan) -> Turn:
    """A turn of this project's contender."""
    answer = contender.run(plan.steps, plan.discarded)
    return {
        "ms": answer.mean_ms,
        "processor": answer.processor_ms,
        "loss": answer.loss,
        "waiting": answer.parts.get("waiting for rows", 0.0),
    }


def contest(work: LanesWorkload, python: Path, model: str, device: str, plan: Plan, until: float) -> dict[str, list[Turn]]:
    """All contenders' turns over the same steps."""
    second = work.second(steps=plan.end)
    slices = work.slices(second)
    with ExitStack() as stack:
        urls = stack.enter_context(work.stores()).urls
        tell(f"{model}: starting FBGEMM and Foreload on {device}")
        ranks = others(python, second, slices, model, device, stack)
        own = {
            OURS: Contender(ContenderSpec("foreload", str(second.path), model, urls=urls, device=device)),
            OUR_FLOOR: Contender(ContenderSpec("floor", str(second.path), model, str(work.ids(second)), device=device)),
        }
        for contender in own.values():
            stack.callback(contender.close)
            contender.run(1, plan.warm_up - 1)
        for rank in ranks.values():
            rank.run(1, plan.warm_up - 1)
        contenders = {name: partial(our_turn, contender, plan) for name, contender in own.items()}
        return alternate(contenders | {name: partial(turn_of, rank, plan) for name, rank in ranks.items()}, plan.pairs, until)


def table_of(title: str, measured: Mapping[str, Sequence[Turn]], on_device: bool) -> Table:
    """Every contender's steps, and what of them goes to embeddings."""

    def median(contender: str, figure: str) -> float:
        return statistics.median(turn[figure] for turn in measured[contender])

    rows: list[list[Cell]] = []
    for name, turns in measured.items():
        ms = spread([turn["ms"] for turn in turns])
        floors = measured[OUR_FLOOR if name in (OURS, OUR_FLOOR) else FLOOR]
        above = statistics.median(turn["ms"] - floor["ms"] for turn, floor in zip(turns, floors, strict=True))
        rows.append([
            name if on_device else name.partition(",")[0], 1000 * BATCH / ms.median, f"{ms.median:.2f}", f"{ms.low:.2f} to {ms.high:.2f}",
            f"{above:.2f}", f"{above / ms.median:.1%}", f"{median(name, 'waiting'):.2f}" if name == OURS else None,
            f"{median(name, 'processor'):.2f}", f"{median(name, 'loss'):.4f}",
        ])  # fmt: skip
    columns = [
        "contender", "samples/s", "ms a step", "spread", "embeddings: ms beyond its floor", "of the step", "waiting for rows, ms", "processor ms",
        "loss of the last",
    ]  # fmt: skip
    return Table(title, columns, rows, f"{len(measured[OURS])} pairs.")


def environment(quick: bool, device: str) -> tuple[Path | None, str]:
    """The Python of FBGEMM's environment, and why nothing is measured on a device, if so; with --quick it must be there."""
    missing = "" if device else "no CUDA device"
    if missing and not quick:
        return None, missing
    wanted = FBGEMM if device else TORCHREC
    try:
        if quick and not wanted.is_there():
            raise NotToBeHad(
                f"--quick does not make its virtual environment; python benchmarks/{wanted.name}_environment.py does"
            )
        return wanted.make(), missing
    except NotToBeHad as error:
        return None, missing or f"FBGEMM could not be had: {error}"


def main() -> None:
    """Measure and save."""
    given = arguments(__doc__, pairs=(40, 3))
    device, models = graphics(), ["small"] if given.quick else list(MODELS)
    python, missing = environment(given.quick, device)
    tables, claims = [], []
    work = LanesWorkload(given.out / "work", QUICK if given.quick else FULL, 1)
    for place, model in enumerate(models, 1):
        measured: dict[str, list[Turn]] = {}
        if python is not None:
            pairs = given.pairs if model == "small" else given.pairs // 2
            plan = Plan(pairs, 12, 5) if given.quick else Plan(pairs)
            measured = contest(work, python, model, "cuda" if device else "cpu", plan, given.budget.until(place / len(models)))
            title = f"{model[0].upper()}{model[1:]} model" + (
                "" if device else ", tried on the CPU: that it works, and nothing of a device"
            )
            tables.append(table_of(title, measured, bool(device)))
        claims += claims_of(model, {} if missing else measured, missing)
    notes = [f"Nothing measured: {missing}."]
    if not missing:
        rows, row_bytes = int(work.bases[-1]), 4 * (DIM + 1)
        notes = [
            describe(work),
            f"{device}. All {rows:,} rows with their state take {rows * row_bytes / 1e6:,.0f} MB, the partition's {SLOTS:,} slots "
            f"{SLOTS * row_bytes / 1e6:,.0f} MB; FBGEMM's managed cache has as many rows, and the tables in host memory behind it.",
            "FBGEMM 1.8.0: one batched operator for all tables, row-wise Adagrad fused into its backward pass, as it comes. A floor is the dense "
            "part alone on the device; what a step takes beyond its floor is what embeddings take. Foreload's gives the same bits each time.",
        ]
    save(Results("cuda", TITLE, claims, tables, notes=notes), given.out)


if __name__ == "__main__":
    main()
