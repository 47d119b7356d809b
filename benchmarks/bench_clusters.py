"""`foreload prepare` on Flink and on Dask, with one and two workers, beside one process."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from bench_prepare import BATCH, SLOTS, Contenders, check_equal
from click_logs import write_features, write_parquet
from comparison import Cell, Results, Table, alternate, arguments, save, spread
from dask_cluster import DaskCluster

_SPEC = importlib.util.spec_from_file_location("cluster", Path(__file__).parents[1] / "deploy" / "flink" / "cluster.py")
assert _SPEC is not None
assert _SPEC.loader is not None
flink: Any = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(flink)

LANES = 2
COUNTS = (1, 2)


@contextmanager
def flink_flags(folder: Path) -> Iterator[dict[str, list[str]]]:
    """Flags for one and two workers of a Flink cluster, by the contender's name; none where the machine lacks Java or Maven."""
    if flink.missing():
        yield {}
        return
    cluster = flink.Cluster(folder, flink.resolve_jars(flink.FOLDER), {})
    try:
        flags = cluster.await_ready()
        # The last flag of a name holds.
        yield {f"Flink, {count} worker{'s' * (count > 1)}": [*flags, f"--parallelism={count}"] for count in COUNTS}
    finally:
        cluster.stop()


@contextmanager
def dask_flags(folder: Path) -> Iterator[dict[str, list[str]]]:
    """Flags for a Dask cluster of one worker and one of two, by the contender's name."""
    with ExitStack() as stack:
        flags = {}
        for count in COUNTS:
            place = folder / str(count)
            place.mkdir()
            cluster = DaskCluster(place, count, os.environ)
            stack.callback(cluster.stop)
            flags[f"Dask, {count} worker{'s' * (count > 1)}"] = cluster.flags
        yield flags


def main() -> None:
    """Make the file, start the clusters, run the contenders, save."""
    given = arguments(__doc__, pairs=(3, 1))
    rows = 100_000 if given.quick else 4_000_000
    with tempfile.TemporaryDirectory(prefix="clusters-") as name, ExitStack() as stack:
        work = Path(name)
        for folder in ("flink", "dask"):
            (work / folder).mkdir()
        contenders = Contenders(work)
        write_features(contenders.features)
        source = work / "all.parquet"
        write_parquet(source, rows)
        of_clusters: dict[str, Sequence[str]] = {
            **stack.enter_context(flink_flags(work / "flink")),
            **stack.enter_context(dask_flags(work / "dask")),
        }
        alone = work / "alone"
        contenders.prepare(source, f"--lanes={LANES}")
        shutil.copytree(contenders.prepared, alone)

        def prepare(flags: Sequence[str]) -> float:
            taken = contenders.prepare(source, f"--lanes={LANES}", *flags)
            (contenders.prepared / "provenance.json").unlink()
            check_equal(alone, contenders.prepared)
            return taken

        measured = alternate(
            {"one process": partial(prepare, ()), **{which: partial(prepare, flags) for which, flags in of_clusters.items()}},
            given.pairs,
            given.budget.until(1.0),
        )
    table: list[list[Cell]] = [[which, spread(taken).median, rows / spread(taken).median] for which, taken in measured.items()]
    results = Results(
        script="clusters",
        title="prepare on clusters",
        claims=[],
        tables=[
            Table(
                "prepare on one machine",
                ["where", "seconds", "rows/s"],
                table,
                f"{rows:,} rows of Parquet, {LANES} lanes; from the command's start to its end. Clusters run already; a worker is one process.",
            )
        ],
        settings={"rows": rows, "batch_size": BATCH, "slots": SLOTS, "lanes": LANES, "pairs": len(measured["one process"])},
        notes=["Every schedule is the same, byte for byte, which is checked."],
    )
    save(results, given.out)


if __name__ == "__main__":
    main()
