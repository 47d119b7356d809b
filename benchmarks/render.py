"""docs/benchmarks.md of the benchmarks' results: the machine, all claims, each script's tables and plots.

python benchmarks/render.py [--results build/benchmarks] [--docs docs]
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from comparison import MINUTES, Point, show

_NOTHING = "-"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [_line(columns), _line(["---"] * len(columns)), *(_line(row) for row in rows), ""]


def _plain(figure: float) -> str:
    return f"{figure:,.0f}" if abs(figure) >= 1000 else f"{figure:.2g}" if abs(figure) < 0.1 else f"{figure:.3f}"


def _claims(result: dict[str, Any]) -> list[list[str]]:
    """A script's lines in the table of all claims."""
    script = result["script"]
    place = f"[{script}](#{script})"
    if "failed" in result:
        return [[f"all of bench_{script}.py", *[_NOTHING] * 4, "**failed**", place]]
    lines = []
    for claim in result["claims"]:
        value, figure = claim["value"], claim["figure"]
        of_pairs = f"{_plain(value['low'])} to {_plain(value['high'])}" if isinstance(value, dict) else _NOTHING
        verdict = {True: "met", False: "**missed**", None: "not measured"}[claim["met"]]
        shown = _NOTHING if figure is None else _plain(figure)
        lines.append([claim["name"], claim["against"], claim["bar"], shown, of_pairs, verdict, place])
    return lines


def _file_name(script: str, title: str) -> str:
    return f"{script}-{re.sub(r'[^a-z0-9]+', '-', title.lower()).strip('-')}.png"


def _draw(axes: Axes, plot: dict[str, Any]) -> None:
    data: dict[str, list[Point]] = plot["data"]
    if plot["kind"] == "lines":
        for name, points in data.items():
            axes.plot([x for x, _ in points], [y for _, y in points], marker="o", label=name)
        numbers = [x for points in data.values() for x, _ in points if isinstance(x, int | float)]
        if numbers and min(numbers) > 0 and max(numbers) > 20 * min(numbers):
            axes.set_xscale("log")
        axes.set_ylim(bottom=0)
    else:
        words = list(dict.fromkeys(str(x) for points in data.values() for x, _ in points))
        base = [0.0] * len(words)
        for place, (name, points) in enumerate(data.items()):
            heights = {str(x): y for x, y in points}
            values = [heights.get(word, 0.0) for word in words]
            if plot["kind"] == "stacked":
                axes.bar(words, values, bottom=base, label=name)
                base = [low + value for low, value in zip(base, values, strict=True)]
            else:
                width = 0.8 / len(data)
                axes.bar(
                    [number + (place - (len(data) - 1) / 2) * width for number in range(len(words))], values, width, label=name
                )
        axes.set_xticks(range(len(words)), [word.replace(", ", ",\n") for word in words])
    axes.set_title(plot["title"])
    axes.set_xlabel(plot["x_label"])
    axes.set_ylabel(plot["y_label"])
    if len(data) > 1:
        axes.legend()
    axes.grid(axis="y", alpha=0.3)


def _plot(plot: dict[str, Any], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
    _draw(axes, plot)
    # Without the date and matplotlib's version the same figures make the same file.
    figure.savefig(path, dpi=90, metadata={"Software": None})
    plt.close(figure)


def _section(result: dict[str, Any], folder: Path) -> list[str]:
    script = result["script"]
    if "failed" in result:
        return [f'## <a name="{script}"></a>bench_{script}.py', "", f"It failed: {result['failed']}", ""]
    lines = [f'## <a name="{script}"></a>{result["title"]}', ""]
    quick = ", --quick" if result["settings"].get("quick") else ""
    lines += [f"`benchmarks/bench_{script}.py`{quick}, {result['date'][:16].replace('T', ' ')} UTC.", ""]
    for note in result["notes"]:
        lines += [note, ""]
    settings = {name: value for name, value in result["settings"].items() if name != "quick"}
    if settings:
        lines += ["Settings: " + ", ".join(f"{name} {show(value)}" for name, value in settings.items()) + ".", ""]
    for table in result["tables"]:
        lines += [f"**{table['title']}**", ""]
        lines += _table(table["columns"], [[show(cell) for cell in row] for row in table["rows"]])
        if table["note"]:
            lines += [table["note"], ""]
    for claim in result["claims"]:
        if claim["note"]:
            lines += [f"{claim['name']}: {claim['note']}", ""]
    for plot in result["plots"]:
        name = _file_name(script, plot["title"])
        _plot(plot, folder / name)
        lines += [f"![{plot['title']}]({folder.name}/{name})", ""]
    return lines


def _machines(results: Sequence[dict[str, Any]]) -> list[str]:
    """Every machine and its versions, with the scripts that ran there; usually one."""
    seen: dict[str, list[str]] = {}
    for one in results:
        if "failed" in one:
            continue
        own, versions = one["machine"], ", ".join(f"{name} {version}" for name, version in one["versions"].items())
        text = f"{own['cpu']} (torch told to use {own['cpu_capability']}), {own['cores']} cores, {own['memory_gib']} GiB, {own['kernel']}; {versions}"
        seen.setdefault(text, []).append(one["script"])
    if len(seen) <= 1:
        return [f"Machine: {text}." for text in seen] + [""]
    return [f"- {', '.join(scripts)}: {text}" for text, scripts in seen.items()] + [""]


def render(results: Path, docs: Path) -> Path:
    """Write `docs`/benchmarks.md and its plots from the JSON files in `results`. Raises SystemExit where there are none."""
    measured = [json.loads(path.read_text(encoding="utf-8")) for path in results.glob("*.json")]
    if not measured:
        raise SystemExit(f"{results}: holds no results; run `make bench` first")
    order = list(MINUTES)
    measured.sort(key=lambda one: order.index(one["script"]) if one["script"] in order else len(order))
    folder = docs / "benchmarks"
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.png"):
        old.unlink()
    lines = [
        "# Benchmarks",
        "",
        "Written by `make bench`. A ratio is the median over pairs of interleaved runs, with least and greatest as its spread; contenders run "
        "alternately, in one run.",
        "",
        *_machines(measured),
        "## Claims",
        "",
        *_table(
            ["claim", "against", "bar", "figure", "spread", "", "script"],
            [line for one in measured for line in _claims(one)],
        ),
    ]
    for one in measured:
        lines += _section(one, folder)
    path = docs / "benchmarks.md"
    path.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
    return path


def main() -> None:
    """Render the folders that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("build/benchmarks"), metavar="DIR")
    parser.add_argument("--docs", type=Path, default=Path("docs"), metavar="DIR")
    given = parser.parse_args()
    print(render(given.results, given.docs))


if __name__ == "__main__":
    main()
