"""The page of a schedule.

It shows rows by frequency, the working set over time, arrivals against slots, and the tables'
shares.
"""

from __future__ import annotations

import numpy as np

from foreload.trainer.job.memory_check import readable
from foreload.trainer.pages.markup import Html, count, missing, page, section, share, table, table_of, tag, tile
from foreload.trainer.pages.plots import Plot, Series, bars_of
from foreload.trainer.pages.schedule_figures import ScheduleFigures

_MOST_TABLES = 30  # tables that are drawn, those with most rows


def schedule_page(figures: ScheduleFigures) -> str:
    """Return the HTML of a schedule."""
    return page(
        f"{figures.name} · foreload",
        tag("header", tag("h1", f"Schedule {figures.name}"), tag("p", _summary(figures), class_="quiet")),
        _tiles(figures),
        section("What is counted", missing(f"No more is shown: {figures.why}.")) if figures.why else None,
        _frequency(figures),
        _over_steps(figures),
        _slots(figures),
        _tables(figures),
        _settings(figures),
        tag("footer", "Made by foreload from the files of the schedule."),
    )


def _summary(figures: ScheduleFigures) -> str:
    header, counts = figures.header, figures.manifest["counts"]
    return (
        f"{header.epochs} epoch(s) in steps of {header.batch_size:,} samples, cut into {header.lanes} lanes; "
        f"{counts['evaluation_samples']:,} samples are held out for evaluation. Steps {header.first_step:,} to {header.end_step - 1:,}."
    )


def _tiles(figures: ScheduleFigures) -> Html:
    counts, used = figures.manifest["counts"], figures.manifest["counts"]["rows_used"]
    slots = figures.manifest["occupied"]
    tiles = [
        ("training samples", count(counts["training_samples"]), "over all epochs"),
        ("evaluation samples", count(counts["evaluation_samples"]), "of one pass"),
        ("steps", count(counts["training_steps"]), "of training"),
        ("rows", count(figures.manifest["rows"]["rows"]), "ever trained"),
        ("rows used", count(used), "distinct in a step, all steps"),
        ("arrivals", count(counts["arrivals"]), "rows that come into a slot"),
        ("of them fetched", count(counts["stored"]), "from the store"),
        ("cache hits", share(1 - counts["arrivals"] / used if used else None), "of rows used"),
        ("slots per lane", count(max(slots)), f"{count(max(figures.manifest['minimum_slots']))} needed"),
        ("on disk", readable(figures.bytes), "all files"),
    ]
    return tag("div", [tile(name, [value], more) for name, value, more in tiles], class_="tiles")


def _frequency(figures: ScheduleFigures) -> Html | None:
    if (groups := figures.by_frequency) is None:
        return None
    names = [f"{least:,}" if least == 1 else f"{least:,} to {2 * least - 1:,}" for least in groups.least.tolist()]
    read = "How many rows are used in how many steps. A long bar at 1: many rows are seen once, and no cache helps with these."
    of_rows = dict(zip(names, groups.rows.tolist(), strict=True))
    drawn = [bars_of("Rows by how many steps use them", "rows; of all rows", read, "c0", of_rows)]
    read = "The same rows, by how often they are used: few frequent rows make up most of the uses where the lower bars are long. These stay in slots."
    of_uses = dict(zip(names, groups.uses.tolist(), strict=True))
    drawn.append(bars_of("Uses, by the same groups", "rows used, of all steps; of all uses", read, "c2", of_uses))
    return section("Rows by frequency", tag("div", drawn, class_="plots"))


def _over_steps(figures: ScheduleFigures) -> Html | None:
    if (over := figures.over_steps) is None:
        return None
    ends, slots = over.middle[[0, -1]], float(sum(figures.manifest["occupied"]))
    lines = [
        Series("rows alive", over.middle, over.alive, "c0"),
        Series("rows a step uses", over.middle, over.used, "c2"),
        Series("slots of all lanes", ends, np.full(2, slots), "c4", "dash"),
    ]
    read = (
        "A row is alive from its first use to its last. Where that line is above the slots, rows have to leave and return; the part below costs "
        "nothing but the first arrival. The rows that a step uses always have to fit."
    )
    working = Plot("Working set", "rows", read, lines, from_zero=True)
    read = "Rows that come into a slot for a step, as planned; the other rows used are in a slot already. Lower is less traffic with the store."
    arrivals = Plot("Arrivals", "rows a step", read, [Series("arrivals", over.middle, over.arrived)], from_zero=True)
    return section("Working set over time", tag("div", working.html(), arrivals.html(), class_="plots"))


def _slots(figures: ScheduleFigures) -> Html | None:
    if (by := figures.by_slots) is None:
        return None
    slots = by.slots.astype(np.float64)
    lines = [
        Series("the minimum (Belady)", slots, by.fewest.astype(np.float64), "c2"),
        Series("an LRU cache", slots, by.lru.astype(np.float64), "c1", "dash"),
    ]
    lanes = figures.header.lanes
    of = "all lanes together" if by.lanes == lanes else f"the first {by.lanes} of {lanes} lanes together"
    here = int(np.searchsorted(by.slots, max(figures.manifest["occupied"])))
    if here < len(slots):
        lines.append(
            Series("this schedule's slots", slots[here : here + 1], by.fewest[here : here + 1].astype(np.float64), "c0", "dots")
        )
    read = (
        f"Of {of}. To the left are the fewest slots that the largest step can be trained with, to the right as many as a lane has rows: there every "
        "row arrives once, and more slots change nothing. Prepare with --slots where the curve flattens."
    )
    x_unit = "slots per lane (logarithmic)"
    plot = Plot("Arrivals against slots", "rows, over all steps", read, lines, x_unit=x_unit, log_x=True, from_zero=True)
    listed = table_of(
        [
            {
                "slots per lane": count(slots),
                "the minimum": count(fewest),
                "an LRU cache": count(lru),
                "LRU / minimum": f"{lru / fewest:.2f} x" if fewest else "-",
            }
            for slots, fewest, lru in zip(by.slots.tolist(), by.fewest.tolist(), by.lru.tolist(), strict=True)
        ]
    )
    return section("Arrivals against slots", tag("div", plot.html(), listed, class_="plots"))


def _tables(figures: ScheduleFigures) -> Html | None:
    if figures.tables is None:
        return None
    shown = sorted(figures.tables, key=lambda one: -one.rows)
    drawn = []
    for title, colour, read in (
        ("Rows", "c0", "Rows ever trained: these fill the store, and most of a checkpoint."),
        ("Uses", "c2", "Rows used, over all steps: trainers exchange and update these."),
        ("Arrivals", "c1", "Rows that come into slots: these are fetched, or newly created."),
    ):
        values = {one.name: getattr(one, title.lower()) for one in shown}
        drawn.append(bars_of(title, "rows; of all tables", read, colour, values, _MOST_TABLES))
    beyond = len(shown) - _MOST_TABLES
    rest = missing(f"{beyond} smaller tables are not drawn.") if beyond > 0 else None
    return section("Tables' shares", tag("div", drawn, class_="plots three"), rest)


def _settings(figures: ScheduleFigures) -> Html:
    header, manifest = figures.header, figures.manifest
    rows = [
        [name.replace("_", " "), str(getattr(header, name))]
        for name in ("batch_size", "lanes", "epochs", "placement", "shuffle_seed")
    ]
    if header.eval_every is not None:
        rows.append(["evaluations within epochs", f"every {header.eval_every:,} steps"])
    rows += [
        ["slots, by lane", ", ".join(map(count, manifest["occupied"]))],
        ["needed by the largest step", ", ".join(map(count, manifest["minimum_slots"]))],
    ]
    exact = bool(manifest["lookahead"]["exact"])
    rows.append(["arrivals are the minimum", "yes" if exact else "for the lookahead that --window gave"])
    rows += [[name.replace("_", " "), str(value)] for name, value in header.settings.items() if value not in (None, False)]
    return section("Settings", table(["setting", figures.name], rows, words=[1]))
