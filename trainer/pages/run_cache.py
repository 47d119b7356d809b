"""Parts of a run's page: the cache, and slots and memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from foreload.trainer.job.memory_check import readable
from foreload.trainer.pages.markup import Html, count, missing, table, tag
from foreload.trainer.pages.plots import Plot, Series, bars, of_total
from foreload.trainer.pages.run_figures import CacheCounts, RunFigures
from foreload.trainer.pages.run_metrics import lines, named


def cache(runs: Sequence[RunFigures]) -> list[Html]:
    """Return the arrivals over the steps, and beside the minimum and those of an LRU cache."""
    several = len(runs) > 1
    if several:
        drawn = lines(runs, "arrivals", lambda steps: [steps.mean("rows_arrived")], dashed=True)
        read = "Rows that come into a slot for a step; the other rows used are in a slot already. Lower is less traffic."
        arrivals = Plot("Arrivals", "rows a step", read, drawn, from_zero=True).html()
    else:
        arrivals = _arrivals(runs[0])
    rates = lines(runs, "hits", lambda steps: [100 * steps.hit_rate], dashed=True)
    read = "Higher is better: the share of the rows that a step uses which are in a slot already. The first steps have to bring in every row."
    hits = Plot("Cache hits", "per cent of rows used", read, rates).html()
    return [tag("div", arrivals, hits, class_="plots"), *(_compared(run, several) for run in runs)]


def _arrivals(run: RunFigures) -> Html:
    """Plot the arrivals over the steps: new rows, fetched rows, and those of an LRU cache."""
    steps = run.steps
    fetched = steps.mean("rows_fetched")
    drawn = [
        Series("fetched from the store", steps.middle, fetched, "c0", "area"),
        Series("new: never trained before", steps.middle, steps.mean("rows_arrived") - fetched, "c2", "area"),
    ]
    beside = ""
    if run.cache is not None and run.cache.lru_steps is not None and len(steps.first) and steps.first[0] >= run.cache.first_step:
        lru = _in_points(run.cache, steps.first, steps.last)
        drawn.append(Series("an LRU cache's arrivals", steps.middle, lru, "c1", "dash"))
        beside = " The dashed line is what an LRU cache of as many slots would have brought in."
    read = f"Rows that come into a slot for a step; lower is less traffic. New rows need no read from the store.{beside}"
    return Plot("Arrivals", "rows a step", read, drawn, from_zero=True).html()


def _in_points(counts: CacheCounts, first: np.ndarray, last: np.ndarray) -> np.ndarray:
    """Return the mean LRU arrivals of a step in each point; NaN beyond the schedule.

    Args:
        first: the first step of each point.
        last: the last step of each point.
    """
    assert counts.lru_steps is not None
    before = np.concatenate([[0], np.cumsum(counts.lru_steps)])
    begin, end = (first - counts.first_step).astype(int), (last - counts.first_step).astype(int) + 1
    known = end < len(before)
    safe = np.minimum(end, len(before) - 1), np.minimum(begin, len(before) - 1)
    return np.where(known, (before[safe[0]] - before[safe[1]]) / np.maximum(end - begin, 1), np.nan)


def _compared(run: RunFigures, several: bool) -> Html:
    counts = run.cache
    arrived, used = run.steps.total("rows_arrived"), run.steps.total("rows_used")
    fetched, written = run.steps.total("rows_fetched"), run.steps.total("rows_written_back")
    text = (
        f"{f'{run.name}: ' if several else ''}{count(used)} rows used, {count(arrived)} arrived, {count(fetched)} of them fetched; "
        f"{count(written)} were written back during training."
    )
    if counts is None:
        why = "The minimum and LRU are not shown: the schedule is not where it was, or is not complete yet."
        return tag("div", tag("p", text), missing(why))
    known = {"this schedule": ("c0", counts.planned), "the minimum": ("c2", counts.fewest), "an LRU cache": ("c1", counts.lru)}
    rows = [
        (name, colour, value, of_total(value, counts.rows_used)) for name, (colour, value) in known.items() if value is not None
    ]
    read = (
        "Over all steps of the schedule, shorter is less traffic. The minimum is Belady's: no cache of as many slots has fewer arrivals. "
        "LRU, which does not know the future, drops the row that was not used for longest."
    )
    drawn = bars(named(run, "Arrivals compared with the minimum and LRU", several), "rows; of the rows used", read, rows)
    return tag("div", tag("p", text), drawn, missing(f"LRU is not shown: {counts.why}.") if counts.why else None)


def memory(runs: Sequence[RunFigures]) -> list[Html]:
    """Return the rows that a step uses beside the slots, and the memory of lanes and trainers."""
    plots, drawn = [], list[Series]()
    for run, used in zip(runs, lines(runs, "rows a step uses", lambda steps: [steps.mean("rows_used")]), strict=True):
        if not len(run.steps.steps):
            continue
        drawn.append(used)
        if run.schedule is not None:
            ends, slots = np.array([run.steps.first[0], run.steps.last[-1]]), np.full(2, float(sum(run.schedule.slots)))
            several = len(runs) > 1
            drawn.append(Series(named(run, "slots", several), ends, slots, used.colour if several else "c4", "dash"))
    if drawn:
        read = (
            "The line has to stay below the slots, of all lanes together. The free slots above it keep rows for later steps: with more of them, "
            "fewer rows arrive."
        )
        plots.append(Plot("Rows a step uses, and slots", "rows", read, drawn, from_zero=True).html())
    columns = [_memory_rows(run) for run in runs]
    names = list(dict.fromkeys(name for column in columns for name in column))
    rows = [[name, *(column.get(name, "-") for column in columns)] for name in names]
    listed = table(["", *(run.name for run in runs)], rows)
    gone = [
        missing(f"{run.name}: its schedule no longer exists, so its slots are not shown.") for run in runs if run.schedule is None
    ]
    without_memory = [
        missing(f"{run.name}: memory is recorded at the end of a call, by versions that record it.")
        for run in runs
        if not (run.summary or {}).get("memory")
    ]
    return [tag("div", plots, tag("div", listed, gone, without_memory), class_="plots")]


def _memory_rows(run: RunFigures) -> dict[str, str]:
    rows = {}
    if run.schedule is not None:
        rows["lanes"] = count(run.schedule.header.lanes)
        rows["slots per lane that are ever used"] = " / ".join(map(count, _ends(run.schedule.slots)))
        if run.schedule.complete:
            needed = _ends(run.schedule.manifest["minimum_slots"])
            rows["slots per lane that the largest step needs"] = " / ".join(map(count, needed))
    figures = (run.summary or {}).get("memory") or {}
    if "lane_bytes" in figures:
        rows["memory of a lane, including staging"] = readable(figures["lane_bytes"])
    for place, peak in enumerate(figures.get("trainers_peak_bytes", ())):
        rows[f"peak memory of trainer process {place + 1}"] = readable(peak)
    traffic = (run.summary or {}).get("store_traffic") or {}
    for name in ("bytes_fetched", "bytes_written"):
        if name in traffic:
            rows[f"{name.replace('_', ' ')} from the store" if "fetched" in name else "bytes written to the store"] = readable(
                traffic[name]
            )
    return rows


def _ends(values: Sequence[int]) -> list[int]:
    """Return the least and the most of the values, or the one value if all are equal."""
    return sorted({min(values), max(values)})
