"""How every benchmark compares: contenders in turn, ratios of pairs, the results as records, and their file.

A script takes `arguments`, runs its contenders by `alternate`, states each claim as a `Claim` and hands all to `save`, which prints it and writes
`<out>/<script>.json` with the machine, the versions and the settings. `render.py` keeps those files by machine and makes pages of them.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import math
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

from foreload.cache.client.local_server import find_executable, version_of
from foreload.trainer.compute.numerics import environment

Result = TypeVar("Result", float, Mapping[str, float])
Cell = str | int | float | None
Point = tuple[str | float, float]

MINUTES = {
    "step": (15.0, 4.0),
    "links": (6.0, 0.7),
    "torchrec": (6.0, 2.5),
    "growth": (4.0, 0.7),
    "store": (2.0, 0.4),
    "recovery": (19.0, 1.5),
    "oracle": (3.0, 0.4),
    "compile": (4.0, 0.7),
    "prepare": (8.0, 1.0),
    "follow": (3.0, 1.0),
    "locality": (2.0, 0.4),
    "exchange": (3.0, 0.7),
    "messages": (3.0, 0.7),
    "memory": (5.0, 0.6),
    "cuda": (4.0, 1.0),
    "lost_trainer": (8.0, 2.0),
    "copies": (8.0, 1.5),
    "checkpoint_bytes": (10.0, 2.5),
    "checkpoint_stall": (12.0, 2.5),
    "checkpoint_restore": (15.0, 2.5),
    "memory_forecast": (8.0, 3.0),
    "step_model": (15.0, 3.0),
    "migration": (40.0, 7.0),
    "profiling": (4.0, 1.0),
    "plan": (15.0, 4.0),
    "auto": (20.0, 6.0),
    "warm_start": (30.0, 3.0),
    "aftercare": (10.0, 4.0),
    "pool": (15.0, 6.0),
    "clusters": (15.0, 3.0),
    "ray_gaps": (12.0, 4.0),
}
"""What each script may take, in full and with --quick, on two cores; in the order of the report."""

HOUR = tuple(MINUTES)[: list(MINUTES).index("lost_trainer")]
"""The scripts that `make bench` runs, in about an hour; the others by their names, or all with ALL=1."""

LEAST_PAIRS = 3  # that are run even where the time is over
PACKAGES = ("torch", "numpy", "numba", "pyarrow", "apache-beam", "redis", "hiredis")


@dataclass(frozen=True, slots=True)
class Budget:
    """The time that a script has, from its start."""

    seconds: float
    begun: float = field(default_factory=time.monotonic)

    def until(self, share: float) -> float:
        """When a share of it has gone, by time.monotonic."""
        return self.begun + share * self.seconds


def arguments(description: str | None, pairs: tuple[int, int] = (5, 3), **further: str) -> argparse.Namespace:
    """The command line of a benchmark: `quick`, `out` (a folder, made if it is not there), `pairs` and `budget`.

    pairs: how often each contender runs at most, in full and with --quick; further: options that the script must be given, name -> what it is.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--quick", action="store_true", help="less data and fewer pairs: tells that it works, not how fast")
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"), metavar="DIR", help="folder of the results")
    parser.add_argument(
        "--pairs",
        type=int,
        metavar="N",
        help=f"how often each contender runs at most (default {pairs[0]}, with --quick {pairs[1]})",
    )
    parser.add_argument("--minutes", type=float, metavar="M", help="after which no more pairs are begun than 3")
    for name, meaning in further.items():
        parser.add_argument(f"--{name}", required=True, metavar=name.upper(), help=meaning)
    given = parser.parse_args()
    if given.pairs is None:
        given.pairs = pairs[given.quick]
    full, quick = MINUTES.get(Path(sys.argv[0]).stem.removeprefix("bench_"), (5.0, 1.0))
    given.budget = Budget(60 * (given.minutes or (quick if given.quick else full)))
    if given.pairs < 1:
        parser.error(f"--pairs must be at least 1, got {given.pairs}")
    given.out.mkdir(parents=True, exist_ok=True)
    os.environ["GLIBC_TUNABLES"] = environment()["GLIBC_TUNABLES"]  # for all contenders alike
    # Ended from outside, a benchmark still ends the servers and the contenders that it has started.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    return given


def cpu_capability() -> str:
    """What --cpu-capability is the fastest on this processor: what a user would take for speed."""
    try:
        told = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return "avx2"
    if "avx512f" not in told:
        return "avx2"
    return "avx512-onednn" if "AuthenticAMD" in told else "avx512"


def tell(text: str) -> None:
    """One line of progress on stderr."""
    print(f"[{datetime.datetime.now():%H:%M:%S}] {text}", file=sys.stderr, flush=True)


def alternate(
    contenders: Mapping[str, Callable[[], Result]], pairs: int, until: float = math.inf, least: int = LEAST_PAIRS
) -> dict[str, list[Result]]:
    """Run every contender `pairs` times, in turn; the order is reversed in every other round, so that a drift favours none.

    until: no round begins that would end after it (Budget.until), once there are `least`. Returns for each contender its results (a figure, or
    several by name), one per round.
    """
    results: dict[str, list[Result]] = {name: [] for name in contenders}
    longest = 0.0
    for run in range(pairs):
        started = time.monotonic()
        if run >= least and started + longest > until:
            tell(f"{run} of {pairs} pairs: there is no time for more")
            break
        for name in list(contenders) if run % 2 == 0 else list(contenders)[::-1]:
            begun = time.monotonic()
            result = contenders[name]()
            results[name].append(result)
            tell(f"{run + 1}/{pairs} {name}: {_figures(result)} ({time.monotonic() - begun:.1f} s)")
        longest = max(longest, time.monotonic() - started)
    return results


def _figures(result: float | Mapping[str, float]) -> str:
    if isinstance(result, Mapping):
        return ", ".join(f"{name} {value:.4g}" for name, value in result.items())
    return f"{result:.4g}"


@dataclass(frozen=True, slots=True)
class Ratio:
    """Ratios of pairs: their median, and the least and greatest as the spread."""

    median: float
    low: float
    high: float
    values: tuple[float, ...]

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


def spread(values: Sequence[float]) -> Ratio:
    """Median, least and greatest of figures that are no ratios of pairs."""
    return Ratio(statistics.median(values), min(values), max(values), tuple(values))


def lower_bound(values: Sequence[float], confidence: float = 0.95) -> float:
    """A lower bound, one-sided, of the median of what `values` were drawn from: an order statistic, so it holds whatever their distribution.

    The k-th least of n values is above that median only where fewer than k are below it, which has the probability P(Bin(n, 1/2) < k). k is the
    greatest for which that is at most 1 - confidence; -inf where there is none (95 %: fewer than 5 values).
    """
    count = len(values)
    k = ways = 0
    while k < count and (ways := ways + math.comb(count, k)) <= (1 - confidence) * 2**count:
        k += 1
    return sorted(values)[k - 1] if k else -math.inf


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """The ratios of two contenders' results of `alternate`, round by round. Both have the same length, and denominators are positive."""
    return spread([over / under for over, under in zip(numerators, denominators, strict=True)])


@dataclass(frozen=True, slots=True)
class Claim:
    """One figure with its bar.

    `value` is a ratio of pairs or a plain figure, None where it could not be measured here (`note` says why: then it is neither met nor
    missed). `least` and `most` are the bar's bounds, inclusive; `bar` says it in words. A spread is judged by its median, or, with `by_bound`, by
    the lower 95 % bound of the median (lower_bound). Claims of several machines are compared by name and `against`: neither has a figure in it.
    """

    name: str
    against: str
    bar: str
    value: Ratio | float | None
    least: float | None = None
    most: float | None = None
    note: str = ""
    by_bound: bool = False

    @property
    def figure(self) -> float | None:
        """What is held against the bar; None where there is nothing, or too few pairs for a bound."""
        if not isinstance(self.value, Ratio):
            return self.value
        if not self.by_bound:
            return self.value.median
        bound = lower_bound(self.value.values)
        return None if bound == -math.inf else bound


@dataclass(frozen=True, slots=True)
class Table:
    """A table of the report; every row has a cell per column. Floats are shown with 4 significant digits: give text for another form."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Series:
    """A plot. `data` is for each line (or kind of bar, or layer) its points (x, y); for bars x is a word, in the order of the first line."""

    title: str
    x_label: str
    y_label: str
    kind: Literal["lines", "bars", "stacked"]
    data: Mapping[str, Sequence[Point]]


@dataclass(frozen=True, slots=True)
class Results:
    """The results of a script. `script` names it and its file: bench_<script>.py, <script>.json."""

    script: str
    title: str
    claims: Sequence[Claim] = ()
    tables: Sequence[Table] = ()
    plots: Sequence[Series] = ()
    settings: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    notes: Sequence[str] = ()  # paragraphs: what was measured, and how


def graphics() -> str:
    """The first CUDA device, by its name; empty where there is none."""
    if not (program := shutil.which("nvidia-smi")):
        return ""
    told = subprocess.run([program, "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, check=False)
    return (told.stdout.splitlines() or [""])[0].strip() if told.returncode == 0 else ""


def machine_name(machine: Mapping[str, str | int | float]) -> str:
    """A machine's short name, which stays: of its processor, cores and CUDA device, as in intel-xeon-2.50ghz-2-cores."""
    words = re.sub(
        r"\((?:r|tm)\)|\b(?:processor|cpu)\b|@",
        " ",
        f"{machine['cpu']} {machine['cores']} cores {machine.get('gpu', '')}".lower(),
    )
    return re.sub(r"[^a-z0-9.]+", "-", words).strip("-.")


def given_name(text: str) -> str:
    """A machine's name as an argument. Raises argparse.ArgumentTypeError."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", text):
        raise argparse.ArgumentTypeError(f"must be of a-z, 0-9, dots and dashes, got {text!r}")
    return text


def machine() -> dict[str, str | int | float]:
    """Processor, cores that this process may use, memory, kernel, and the CUDA device if there is one."""
    names = [
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if line.startswith("model name")
    ]
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    gpu = graphics()
    return {
        "cpu": names[0] if names else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(total / 2**30, 1),
        "cpu_capability": cpu_capability(),
        "kernel": f"{platform.system()} {platform.release()}",
        **({"gpu": gpu} if gpu else {}),
    }


def versions() -> dict[str, str]:
    """Versions of Python, of the packages that matter and of the server that local stores run."""
    installed = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    kind, version = version_of(find_executable()).split(" ", 1)
    return installed | {f"{kind}-server": version}


def show(cell: Cell) -> str:
    """A cell as text."""
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:,.0f}" if abs(cell) >= 10_000 else f"{cell:.4g}"
    return f"{cell:,}" if isinstance(cell, int) else cell


def verdict(figure: float | None, least: float | None, most: float | None) -> str:
    """A figure beside a bar's bounds: met, missed, not measured, or, without a bar, reported."""
    if figure is None:
        return "not measured"
    if least is None and most is None:
        return "reported"
    return "met" if (least is None or figure >= least) and (most is None or figure <= most) else "missed"


def _print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(line[place]) for line in [columns, *rows]) for place in range(len(columns))]
    print(f"\n{title}")
    for line in [columns, ["-" * width for width in widths], *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _plain(claim: Claim) -> dict[str, object]:
    return {**asdict(claim), "figure": claim.figure}


def save(results: Results, out: Path) -> Path:
    """Print the tables and claims, and write `out`/`script`.json by an atomic rename; returns its path."""
    for table in results.tables:
        _print_table(table.title, table.columns, [[show(cell) for cell in row] for row in table.rows])
    rows = [
        [
            claim.name,
            claim.against,
            claim.bar,
            show(claim.figure),
            str(claim.value) if isinstance(claim.value, Ratio) else "",
            verdict(claim.figure, claim.least, claim.most),
        ]
        for claim in results.claims
    ]
    if rows:
        _print_table("Claims", ["claim", "against", "bar", "figure", "median and spread", ""], rows)
    for claim in results.claims:
        if claim.note:
            print(f"{claim.name}: {claim.note}")
    content = {
        "script": results.script,
        "title": results.title,
        "date": now(),
        "machine": machine(),
        "versions": versions(),
        "quick": "--quick" in sys.argv,
        "settings": dict(results.settings),
        "notes": list(results.notes),
        "claims": [_plain(claim) for claim in results.claims],
        "tables": [asdict(table) for table in results.tables],
        "plots": [asdict(plot) for plot in results.plots],
    }
    path = out / f"{results.script}.json"
    write_json(path, content)
    tell(f"wrote {path}")
    return path


def now() -> str:
    """The date and time, UTC, as results have it."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Write a file by an atomic rename."""
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)
