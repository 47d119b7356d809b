"""What `prepare` reports about the data.

The report covers labels, missing, unknown and distinct values, and malformed records. It has a few
lines for the terminal, and all figures as JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from foreload.pipelines.samples.column_counts import ColumnCounts
from foreload.pipelines.samples.convert import remedy, summed_up
from foreload.pipelines.samples.features import FeatureSpec
from foreload.pipelines.samples.records import Cause
from foreload.pipelines.schedule.reader import Schedule

_SHOWN_COLUMNS = 5
_PREFIXES = {"training": "", "evaluation": "evaluation data: "}  # before the warnings of each set
_FLAGS = {"training": "", "evaluation": " of --eval-source"}  # after the figures of each set


def data_summary(
    schedule: Schedule, spec: FeatureSpec, causes: Sequence[tuple[Sequence[str], int]], columns: Mapping[str, ColumnCounts]
) -> dict[str, Any]:
    """Return the figures about the data for the summary.

    Args:
        causes: The causes of malformed records, most frequent first, each as ((column, value,
            rule), number of records).
        columns: The counts of each set.

    Returns:
        "malformed"; "tables", with the rows of each that were ever trained; "data", the report of
            each set (ColumnCounts.report); and "warnings", which are lines of text.
    """
    counts = {which: columns[which] for which in _FLAGS}
    names = [table.name for table in spec.tables]
    return {
        "malformed": [{"column": c[0], "value": c[1], "rule": c[2], "records": count} for c, count in causes],
        "tables": [{"name": name, "rows": rows} for name, rows in zip(names, schedule.rows_per_table(), strict=True)],
        "data": {which: count.report(spec) for which, count in counts.items() if count.samples},
        "warnings": [
            f"{_PREFIXES[which]}{line}" for which, count in counts.items() if count.samples for line in count.warnings(spec)
        ],
    }


def data_lines(summary: Mapping[str, Any], spec: FeatureSpec) -> list[str]:
    """Return the lines to print about a `data_summary`.

    Their length is bounded for any number of columns.
    """
    lines = []
    rates = [f"{report['label_rate']:.2%}{_FLAGS[which]}" for which, report in summary["data"].items() if "label_rate" in report]
    if rates:
        lines.append(f"labels        {', '.join(rates)} are 1")
    for which, report in summary["data"].items():
        lines += _label_lines(report, _FLAGS[which])
    for kind in ("missing", "unknown", "clipped"):
        for which, report in summary["data"].items():
            shares = {
                c["name"]: c[kind] / (report["samples"] if kind == "missing" else c["values"])
                for c in report["columns"]
                if c.get(kind)
            }
            if shares:
                lines.append(f"{kind:13} {_most(shares, _percent)}{_FLAGS[which]}")
    rows = {table["name"]: table["rows"] for table in summary["tables"]}
    if rows:
        lines.append(f"distinct ids  {_most(rows, '{:,}'.format)}")
    if summary["malformed"]:
        causes = [(Cause(c["column"], c["value"], c["rule"]), c["records"]) for c in summary["malformed"]]
        missing_line = remedy(causes, spec)
        lines.append(f"malformed     {summed_up(causes, summary['rejected'])}")
        lines += [f"              if these stand for missing values, write {missing_line}"] if missing_line else []
    return lines


def _label_lines(report: Mapping[str, Any], flag: str) -> list[str]:
    """Return the lines about several labels, about labels that are numbers, and about weights.

    `flag` is the text to add to the figures of the set.
    """
    labels, lines = report.get("labels", ()), []
    clicks = [f"{label['name']} {label['rate']:.2%}" for label in labels if "rate" in label]
    numbers = [
        f"{label['name']} {label['mean']:.6g} with deviation {label['deviation']:.4g}, {_range(label)}"
        for label in labels
        if "mean" in label
    ]
    if clicks:
        lines.append(f"labels        {_first(clicks, ', ')}{flag} are 1")
    if numbers:
        lines.append(f"numbers       {_first(numbers, '; ')}{flag}")
    if "weights" in report:
        lines.append(f"weights       {report['weights']['sum']:,.6g} in all, {_range(report['weights'])}{flag}")
    return lines


def _range(figures: Mapping[str, Any]) -> str:
    return f"{figures['least']:.6g} to {figures['largest']:.6g}"


def _first(parts: Sequence[str], between: str) -> str:
    """Join the first parts, and say how many more there are."""
    more = [f"and {len(parts) - _SHOWN_COLUMNS:,} more"] if len(parts) > _SHOWN_COLUMNS else []
    return between.join([*parts[:_SHOWN_COLUMNS], *more])


def _percent(share: float) -> str:
    return f"{share:.2%}" if share >= 0.0001 else "< 0.01%"


def _most(values: Mapping[str, float], text: Callable[[float], str]) -> str:
    """List the largest values with their names, and say how many more there are."""
    ordered = sorted(values.items(), key=lambda item: -item[1])
    parts = [f"{name} {text(value)}" for name, value in ordered[:_SHOWN_COLUMNS]]
    return ", ".join(parts) + (f", and {len(ordered) - _SHOWN_COLUMNS:,} more" if len(ordered) > _SHOWN_COLUMNS else "")
