"""Malformed records summed up: what is wrong most often, and whether the feature file can help."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import pyarrow as pa

from foreload.base.codec import JsonForm
from foreload.pipelines.samples.cells import parses
from foreload.pipelines.samples.convert import required_numbers
from foreload.pipelines.samples.features import FeatureSpec
from foreload.pipelines.samples.records import Cause, RejectedRecord

MOST_CAUSES = 1000
"""Causes that are kept; of more, the most frequent."""

_SHOWN_CAUSES = 5
_SHOWN_VALUES = 5
_SHOWN_CHARACTERS = 40
_OFTEN = 10  # so often the same text in place of a number is hardly a slip
_MARKERS = frozenset(
    (
        "-",
        "--",
        "-1",
        "?",
        "\\n",
        "#n/a",
        "<na>",
        "(null)",
        "missing",
        "n/a",
        "na",
        "nan",
        "nat",
        "nil",
        "none",
        "null",
        "undefined",
        "unknown",
    )
)


CauseCount = tuple[Annotated[Cause, JsonForm(list[str], list, lambda parts: Cause(*parts))], int]
"""A cause, and how many records it has."""


@dataclass(frozen=True, slots=True)
class TaskRejects:
    """The malformed records of a task: the first, and all causes."""

    first: list[RejectedRecord]
    causes: list[CauseCount]


@dataclass(frozen=True, slots=True)
class Rejected:
    """How many records are malformed, and why."""

    count: int
    causes: list[CauseCount]


def add_causes(causes: Counter[Cause], more: Mapping[Cause, int]) -> None:
    """Count more causes; far more than MOST_CAUSES different ones are cut to the most frequent."""
    causes.update(more)
    if len(causes) > 10 * MOST_CAUSES:
        kept = causes.most_common(MOST_CAUSES)
        causes.clear()
        causes.update(dict(kept))


def by_frequency(causes: Mapping[Cause, int]) -> list[tuple[Cause, int]]:
    """The most frequent first, at most MOST_CAUSES."""
    return sorted(causes.items(), key=lambda item: (-item[1], item[0]))[:MOST_CAUSES]


def summed_up(causes: list[tuple[Cause, int]], rejected: int) -> str:
    """The most frequent causes, as by_frequency has them, on a line. rejected: malformed records in all."""
    shown = causes[:_SHOWN_CAUSES]
    parts = [f"{cause.field} {_short(cause.value)!r} {count:,} {'time' if count == 1 else 'times'}" for cause, count in shown]
    others = rejected - sum(count for _, count in shown)
    return ", ".join(parts + ([f"{others:,} others"] if others else []))


def remedy(causes: list[tuple[Cause, int]], spec: FeatureSpec) -> str | None:
    """The line of the feature file that takes for missing what seems to mean it, if anything does."""
    values = dict.fromkeys(cause.value for cause, count in causes if _means_missing(cause, count, spec))
    if not values:
        return None
    texts = [*spec.text.missing, *list(values)[:_SHOWN_VALUES]]
    return f"missing = {json.dumps(texts, ensure_ascii=False)} under [text] of the feature file"


def _means_missing(cause: Cause, count: int, spec: FeatureSpec) -> bool:
    """Whether a value stands where one may be missing, and is a usual sign of it, or frequent and no number."""
    ids = {feature.column for feature in spec.features if feature.encoding == "id"}
    required = {column for column, _ in required_numbers(spec)}
    if cause.field in required or cause.field not in {entry.column for entry in spec.dense} | ids | {spec.order_by}:
        return False
    text = cause.value.strip()
    often = count >= _OFTEN and len(text) <= _SHOWN_CHARACTERS and text.isprintable() and not parses(text, pa.float64())
    return text == cause.value and bool(text) and (text.lower() in _MARKERS or often)


def _short(value: str) -> str:
    return value if len(value) <= _SHOWN_CHARACTERS else value[: _SHOWN_CHARACTERS - 3] + "..."
