"""Step time and processor time of these sources beside those of another revision, turn by turn, two trainers each.

python benchmarks/bench_versions.py --base REVISION [--quick] [--out DIR] [--pairs N] [--minutes M]
"""

from __future__ import annotations

import io
import shutil
import statistics
import subprocess
import tarfile
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np

from bench_torchrec import RANKS, Plan, foreload, run, steps_of
from comparison import Cell, Claim, Ratio, Results, Table, alternate, arguments, save, tell
from foreload.trainer.compute.numerics import ENVIRONMENTS, LINEAR
from lanes import LanesWorkload
from workload import FULL, QUICK, ROOT, describe

MOST = 1.01
PLANS = {"small": Plan(10, 10, 80, 0.5), "Bagpipe's": Plan(4, 9, 24, 1.0)}
QUICK_PLANS = {"small": Plan(8, 10, 5, 1.0)}
OURS = "these sources"
# The default of `foreload train`, which every revision has.
NUMERICS = ENVIRONMENTS["avx2"] | {LINEAR: "torch"}


def sources(revision: str, folder: Path) -> tuple[Path, str]:
    """A copy of a revision's files in a folder of its own, and the commit that it is. Raises SystemExit where there is no such revision."""
    asked = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--short", f"{revision}^{{commit}}"], capture_output=True, text=True, check=False
    )
    if asked.returncode:
        raise SystemExit(f"--base: must be a revision of this repository; got {revision!r}")
    commit = asked.stdout.strip()
    out = folder / f"sources-{commit}"
    shutil.rmtree(out, ignore_errors=True)
    archive = subprocess.run(["git", "-C", str(ROOT), "archive", commit], capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(out, filter="data")
    return out, commit


def resampled(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """The median of the pairs' ratios, and as its spread the 5th to the 95th percentile of medians of what is drawn from them again."""
    ratios = np.array(numerators) / np.array(denominators)
    drawn = np.median(np.random.default_rng(0).choice(ratios, (1000, len(ratios))), axis=1)
    return Ratio(
        float(np.median(ratios)), float(np.quantile(drawn, 0.05)), float(np.quantile(drawn, 0.95)), tuple(ratios.tolist())
    )


def compare(work: LanesWorkload, base: Path, commit: str, model: str, plan: Plan, until: float) -> tuple[list[Claim], Table]:
    """One model's claims and its table."""
    schedule = work.second(steps=steps_of(plan, plan.pairs))
    theirs = f"revision {commit}"
    with ExitStack() as stack:
        tell(f"{model}: starting both")
        contenders = {}
        for name, root in ((OURS, ROOT), (theirs, base)):
            contenders[name] = foreload(schedule, model, stack.enter_context(work.stores()), NUMERICS, root)
            stack.callback(contenders[name].close)
        for contender in contenders.values():
            contender.run(1, plan.discarded)  # compiles
        measured = alternate({name: partial(run, contender, plan) for name, contender in contenders.items()}, plan.pairs, until)

    def figures(contender: str, figure: str) -> list[float]:
        return [result[figure] for result in measured[contender]]

    claims = [
        Claim(
            f"step time, 2 trainers, {model} model",
            theirs,
            f"<= {MOST}",
            resampled(figures(OURS, "ms"), figures(theirs, "ms")),
            most=MOST,
        ),
        Claim(
            f"processor time a step, 2 trainers, {model} model",
            theirs,
            "none",
            resampled(figures(OURS, "processor_ms"), figures(theirs, "processor_ms")),
        ),
    ]
    columns = ["contender", "pairs", "ms a step, median", "processor ms of both trainers", "loss of the last"]
    rows: list[list[Cell]] = [
        [
            name,
            len(results),
            *(statistics.median(figures(name, figure)) for figure in ("ms", "processor_ms")),
            repr(results[-1]["loss"]),
        ]
        for name, results in measured.items()
    ]
    return claims, Table(f"Two trainers, {model} model", columns, rows)


def main() -> None:
    """Measure and save."""
    given = arguments(__doc__, pairs=(80, 5), base="the revision that is held against, such as a tag or a commit")
    plans = QUICK_PLANS if given.quick else PLANS
    folder = (given.out / "work").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    base, commit = sources(given.base, folder)
    work = LanesWorkload(folder, QUICK if given.quick else FULL, RANKS)
    results = [
        compare(
            work,
            base,
            commit,
            model,
            Plan(plan.steps, plan.discarded, min(plan.pairs, given.pairs), plan.share),
            given.budget.until(plan.share),
        )
        for model, plan in plans.items()
    ]
    notes = [
        describe(work),
        "Both contenders' processes live throughout, each with its own servers; each trains runs of steps while the other waits. The spread is that "
        "of the median, by resampling the pairs.",
    ]
    claims = [claim for of, _ in results for claim in of]
    save(Results("versions", "Beside an earlier revision", claims, [table for _, table in results], notes=notes), given.out)


if __name__ == "__main__":
    main()
