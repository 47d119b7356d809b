"""Training steps on a CUDA device: the partition in its memory, beside torch's embedding and FBGEMM's table-batched one with all rows there, and
FBGEMM's managed cache.

python benchmarks/bench_cuda.py [--quick] [--out DIR] [--pairs N]

Without a CUDA device nothing is measured; with --quick the same code runs on the CPU then, which tells that it works and nothing of a device. Where
FBGEMM's build for CUDA cannot be had, the others are measured.
"""

from __future__ import annotations

import json
import statistics
import sys
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
PLAIN = "torch, all tables in device memory"
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


def claims_of(model: str, measured: Mapping[str, Sequence[Turn]], missing: str = "") -> list[Claim]:
    """What a device's figures say. missing: why there are none of a contender that was not measured."""

    def ms(contender: str) -> list[float]:
        return [turn["ms"] for turn in measured[contender]]

    share = spread([1 - floor / own for own, floor in zip(ms(OURS), ms(OUR_FLOOR), strict=True)]) if measured else None
    return [
        Claim(SHARE.format(model), BESIDE, "none", share, note="" if measured else missing),
        *(
            Claim(RATE.format(model), other, "none", ratio(ms(other), ms(OURS)))
            if other in measured
            else Claim(RATE.format(model), other, "none", None, note=missing)
            for other in (PLAIN, ALL_IN_MEMORY, CACHED)
        ),
    ]


def others(fbgemm: Path | None, schedule: Schedule, slices: Path, model: str, device: str, stack: ExitStack) -> dict[str, Ranks]:
    """The contenders that train without a schedule, started, until the stack ends. fbgemm: the Python of its environment, if it can be had."""
    tables = schedule.header.features.tables
    places = {FLOOR: (Path(sys.executable), "nowhere"), PLAIN: (Path(sys.executable), "torch")}
    if fbgemm:
        places[ALL_IN_MEMORY] = (fbgemm, "device" if device == "cuda" else "host")
        if device == "cuda":
            places[CACHED] = (fbgemm, "managed cache")
    started = {}
    for name, (python, rows) in places.items():
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
        command = [str(python), str(ROOT / "benchmarks" / "cuda_contender.py"), json.dumps(spec)]
        started[name] = Ranks(name, [command], {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"})
        stack.callback(started[name].close)
    return started


def turn_of(ranks: Ranks, plan: Plan) -> Turn:
    """A turn of a contender that trains without a schedule."""
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


def contest(work: LanesWorkload, fbgemm: Path | None, model: str, device: str, plan: Plan, until: float) -> dict[str, list[Turn]]:
    """All contenders' turns over the same steps."""
    second = work.second(steps=plan.end)
    slices = work.slices(second)
    with ExitStack() as stack:
        urls = stack.enter_context(work.stores()).urls
        tell(f"{model}: starting the contenders on {device}")
        ranks = others(fbgemm, second, slices, model, device, stack)
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


def find_fbgemm(quick: bool, device: str) -> tuple[Path | None, str]:
    """The Python of FBGEMM's environment, or why it cannot be had; with --quick it is not made."""
    wanted = FBGEMM if device else TORCHREC
    try:
        if quick and not wanted.is_there():
            raise NotToBeHad(
                f"--quick does not make its virtual environment; python benchmarks/{wanted.name}_environment.py does"
            )
        return wanted.make(), ""
    except NotToBeHad as error:
        return None, f"FBGEMM could not be had: {error}"


def main() -> None:
    """Measure and save."""
    given = arguments(__doc__, pairs=(40, 3))
    device, models = graphics(), ["small"] if given.quick else list(MODELS)
    measures = bool(device) or given.quick
    fbgemm, without = find_fbgemm(given.quick, device) if measures else (None, "")
    missing = without if device else "no CUDA device"
    tables, claims = [], []
    work = LanesWorkload(given.out / "work", QUICK if given.quick else FULL, 1)
    for place, model in enumerate(models, 1):
        measured: dict[str, list[Turn]] = {}
        if measures:
            pairs = given.pairs if model == "small" else given.pairs // 2
            plan = Plan(pairs, 12, 5) if given.quick else Plan(pairs)
            measured = contest(work, fbgemm, model, "cuda" if device else "cpu", plan, given.budget.until(place / len(models)))
            title = f"{model[0].upper()}{model[1:]} model" + (
                "" if device else ", tried on the CPU: that it works, and nothing of a device"
            )
            tables.append(table_of(title, measured, bool(device)))
        claims += claims_of(model, measured if device else {}, missing)
    notes = [f"Nothing measured: {missing}."]
    if device:
        rows, row_bytes = int(work.bases[-1]), 4 * (DIM + 1)
        notes = [
            describe(work),
            f"{device}. All {rows:,} rows with their state take {rows * row_bytes / 1e6:,.0f} MB, the partition's {SLOTS:,} slots "
            f"{SLOTS * row_bytes / 1e6:,.0f} MB; FBGEMM's managed cache has as many rows, and the tables in host memory behind it.",
            "torch: all tables in one nn.Embedding with sparse gradients, and torch.optim.Adagrad. FBGEMM 1.8.0: one batched "
            "operator for all tables, row-wise Adagrad fused into its backward pass, as it comes. A floor is the dense part alone "
            "on the device; what a step takes beyond its floor is what embeddings take. Foreload's gives the same bits each time.",
            *([without] if without else []),
        ]
    save(Results("cuda", TITLE, claims, tables, notes=notes), given.out)


if __name__ == "__main__":
    main()
