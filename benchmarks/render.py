"""The benchmarks' results, kept by machine, and the pages made of them: one a machine, and all claims side by side.

python benchmarks/render.py [--results build/benchmarks] [--docs docs] [--machine NAME]

docs/benchmarks/NAME/results has the newest result of each script on a machine; its README.md and plots, and the table in docs/benchmarks.md, are
made of all that is kept, so scripts and machines that were not run keep the figures they had.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from comparison import MINUTES, given_name, machine_name, show, tell, verdict, write_json
from plots import draw, file_name

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- made of the results by `make bench` -->", "<!-- end of what is made -->"
_NOTHING = "-"

Result = dict[str, Any]
"""What `comparison.save` has written; where the script's last run failed: `failed` and `failed_on`, beside the result before, if there is one."""


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [_line(columns), _line(["---"] * len(columns)), *(_line(row) for row in rows), ""]


def _plain(figure: float | None) -> str:
    if figure is None:
        return _NOTHING
    return f"{figure:,.0f}" if abs(figure) >= 1000 else f"{figure:.2g}" if abs(figure) < 0.1 else f"{figure:.3f}"


def _marked(word: str) -> str:
    return f"**{word}**" if word == "missed" else word


def keep(results: Path, docs: Path, name: str | None) -> None:
    """Put a folder's results to those of their machines. name: of the machine, if not its own.

    What failed leaves the result before in its place, and so does what ran with --quick beside one that did not.
    """
    for path in sorted(results.glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        folder = docs / "benchmarks" / (name or machine_name(result["machine"])) / "results"
        folder.mkdir(parents=True, exist_ok=True)
        kept = folder / f"{result['script']}.json"
        before = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
        if "failed" in result:
            result = {**before, "script": result["script"], "failed": result["failed"], "failed_on": result["date"]}
        elif result["quick"] and not before.get("quick", True):
            tell(f"{path}: of a run with --quick, which does not replace {kept}")
            continue
        write_json(kept, result)


def kept_results(docs: Path) -> dict[str, list[Result]]:
    """All that is kept, by machine, scripts in their order."""
    order = list(MINUTES)
    machines = {}
    for folder in sorted((docs / "benchmarks").glob("*/results")):
        results = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*.json")]
        results.sort(key=lambda one: order.index(one["script"]) if one["script"] in order else len(order))
        machines[folder.parent.name] = results
    return machines


def _claims(result: Result) -> list[list[str]]:
    """A script's lines in its machine's table of claims."""
    script = result["script"]
    place = f"[{script}](#{script})"
    if "claims" not in result:
        return [[f"all of bench_{script}.py", *[_NOTHING] * 4, "**failed**", place]]
    lines = []
    for claim in result["claims"]:
        value, figure = claim["value"], claim["figure"]
        of_pairs = _NOTHING
        if isinstance(value, dict):
            median = f"median {_plain(value['median'])}; " if claim.get("by_bound") else ""
            of_pairs = f"{median}{_plain(value['low'])} to {_plain(value['high'])}"
        word = _marked(verdict(figure, claim["least"], claim["most"]))
        lines.append([claim["name"], claim["against"], claim["bar"], _plain(figure), of_pairs, word, place])
    return lines


def _section(result: Result, folder: Path) -> list[str]:
    """A script's part of its machine's page; its plots are drawn into the folder."""
    script = result["script"]
    failure = [f"**Failed** on {result['failed_on'][:10]}: {result['failed']}", ""] if "failed" in result else []
    if "claims" not in result:
        return [f'## <a name="{script}"></a>bench_{script}.py', "", *failure]
    lines = [f'## <a name="{script}"></a>{result["title"]}', "", *failure]
    quick = ", --quick" if result["quick"] else ""
    lines += [f"`benchmarks/bench_{script}.py`{quick}, {result['date'][:16].replace('T', ' ')} UTC.", ""]
    for note in result["notes"]:
        lines += [note, ""]
    if result["settings"]:
        lines += ["Settings: " + ", ".join(f"{name} {show(value)}" for name, value in result["settings"].items()) + ".", ""]
    for table in result["tables"]:
        lines += [f"**{table['title']}**", ""]
        lines += _table(table["columns"], [[show(cell) for cell in row] for row in table["rows"]])
        if table["note"]:
            lines += [table["note"], ""]
    for claim in result["claims"]:
        if claim["note"]:
            lines += [f"{claim['name']}: {claim['note']}", ""]
    for plot in result["plots"]:
        name = file_name(script, plot["title"])
        if plot["data"]:
            draw(plot, folder / name)
        lines += [f"![{plot['title']}]({name})", ""]
    return lines


def _hardware(result: Result) -> str:
    own = result["machine"]
    device = f", {own['gpu']}" if own.get("gpu") else ""
    return f"{own['cpu']} (torch set to use {own['cpu_capability']}), {own['cores']} cores, {own['memory_gib']} GiB{device}, {own['kernel']}"


def _machines(results: Sequence[Result]) -> list[str]:
    """The machine and the versions, with the scripts that ran on each where these differ."""
    seen: dict[str, list[str]] = {}
    for one in results:
        if "claims" in one:
            versions = ", ".join(f"{name} {version}" for name, version in one["versions"].items())
            seen.setdefault(f"{_hardware(one)}; {versions}", []).append(one["script"])
    if len(seen) <= 1:
        return [f"Machine: {text}." for text in seen] + [""]
    return [f"- {', '.join(scripts)}: {text}" for text, scripts in seen.items()] + [""]


def _machine_page(name: str, results: Sequence[Result], folder: Path) -> None:
    """Write a machine's README.md and plots; plots that no result has any more go."""
    kept = {file_name(one["script"], plot["title"]) for one in results for plot in one.get("plots", ())}
    for old in folder.glob("*.png"):
        if old.name not in kept:
            old.unlink()
    lines = [
        f"# Benchmarks: {name}",
        "",
        "Written by `make bench`; [what is measured and how](../../benchmarks.md), and this machine beside others.",
        "",
        *_machines(results),
        "## Claims",
        "",
        *_table(
            ["claim", "against", "bar", "figure", "spread", "", "script"], [line for one in results for line in _claims(one)]
        ),
    ]
    for one in results:
        lines += _section(one, folder)
    (folder / "README.md").write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


def _newest(results: Sequence[Result]) -> Result:
    """Of one script on several machines: the newest that has a figure, or the newest."""
    return max(results, key=lambda one: (any(claim["figure"] is not None for claim in one["claims"]), one["date"]))


def _cell(name: str, result: Result | None, claim: Mapping[str, Any]) -> str:
    """A machine's figure of a claim, held against the bar that the newest result of all has."""
    same = (
        [one for one in result["claims"] if (one["name"], one["against"]) == (claim["name"], claim["against"])] if result else []
    )
    if result is None or not same:
        return _NOTHING
    figure = same[0]["figure"]
    if figure is None:
        return "not measured"
    comparable = bool(same[0].get("by_bound")) == bool(claim.get("by_bound"))
    word = _marked(verdict(figure, claim["least"], claim["most"])) if comparable else "median, not held against this bar"
    quick = ", --quick" if result["quick"] else ""
    return f"[{_plain(figure)}](benchmarks/{name}/README.md#{result['script']}) {word}, {result['date'][:10]}{quick}"


def _side_by_side(machines: Mapping[str, Sequence[Result]]) -> list[str]:
    """The machines, and all claims with a column for each."""
    lines = []
    for name, results in machines.items():
        texts = dict.fromkeys(_hardware(one) for one in results if "claims" in one)
        text = f"[{name}](benchmarks/{name}/README.md): {'; '.join(texts) or 'nothing measured'}"
        lines += textwrap.wrap(
            text, 100, initial_indent="- ", subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
    by_script: dict[str, dict[str, Result]] = {script: {} for script in MINUTES}
    for name, results in machines.items():
        for one in results:
            if "claims" in one:
                by_script.setdefault(one["script"], {})[name] = one
    rows = [
        [claim["name"], claim["against"], claim["bar"], *(_cell(name, of_script.get(name), claim) for name in machines)]
        for of_script in by_script.values()
        if of_script
        for claim in _newest(list(of_script.values()))["claims"]
    ]
    return [*lines, "", *_table(["claim", "against", "bar", *machines], rows)]


def render(docs: Path) -> Path:
    """Write the pages of all machines that have results in `docs`, and `docs`/benchmarks.md. Raises SystemExit where there are none."""
    machines = kept_results(docs)
    if not machines:
        raise SystemExit(f"{docs / 'benchmarks'}: holds no results; run `make bench` first")
    for name, results in machines.items():
        _machine_page(name, results, docs / "benchmarks" / name)
    before, _, rest = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    path = docs / "benchmarks.md"
    path.write_text("\n".join([f"{before}{BEGIN}", "", *_side_by_side(machines), f"{END}{after}"]), encoding="utf-8")
    return path


def main() -> None:
    """Keep the results that the command line names, and render all that is kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("build/benchmarks"), metavar="DIR")
    parser.add_argument("--docs", type=Path, default=Path("docs"), metavar="DIR")
    parser.add_argument(
        "--machine", type=given_name, metavar="NAME", help="of the results' machine; by default of its processor and cores"
    )
    given = parser.parse_args()
    keep(given.results, given.docs, given.machine)
    print(render(given.docs))


if __name__ == "__main__":
    main()
