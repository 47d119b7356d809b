"""Trained samples a second beside tables in memory.

python benchmarks/bench_step.py [--quick] [--out DIR] [--pairs N]
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

from comparison import Claim, Results, Table, alternate, arguments, ratio, save, spread, tell
from sides import Order, Side
from workload import FULL, QUICK, Workload, describe, shares

WARM_UP = 50
DISCARDED = 12
STEPS = 30


def main() -> None:
    """Measure and save."""
    given = arguments(__doc__)
    size = QUICK if given.quick else FULL
    work = Workload(given.out / "work", size)
    second = work.second()
    ids = work.ids(second)
    with ExitStack() as stack:
        urls = stack.enter_context(work.stores()).urls
        sides = {}
        for name in ("floor", "one table", "foreload"):
            sides[name] = Side(Order(name, str(second.path), "small", str(ids), urls=urls if name == "foreload" else ()))
            stack.callback(sides[name].close)
        for name, side in sides.items():
            tell(f"{name}: warming up")
            side.turn(1, WARM_UP - 1)

        def turn(name: str) -> dict[str, float]:
            answer = sides[name].turn(STEPS, DISCARDED)
            return {"ms": 1000 * sum(answer["seconds"]) / len(answer["seconds"]), "loss": answer["loss"]}

        found = alternate({name: partial(turn, name) for name in sides}, given.pairs)
    ms = {name: [r["ms"] for r in of] for name, of in found.items()}
    gain = ratio(ms["one table"], ms["foreload"])
    claim = Claim("trained samples/s, small model", "tables in memory", ">= 1.15", gain, least=1.15)
    table = Table(
        "Step time, small model (ms)", ["side", "median (spread)"], [[name, str(spread(of))] for name, of in ms.items()]
    )
    done = WARM_UP + given.pairs * (DISCARDED + STEPS)
    seen = shares(second, WARM_UP, done)
    notes = [describe(work), f"Arrivals fetched from the store: {seen['fetched_share']:.1%}."]
    save(Results("step", "Training steps", [claim], [table], notes=notes, settings=dict(seen)), given.out)


if __name__ == "__main__":
    main()
