"""Plots as inline SVG, with axes in HTML.

The SVG is stretched to the space that it has. Text is HTML, so that it is as large on a phone as on
a wide screen.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from foreload.trainer.pages.markup import Child, Html, number, share, short, table, tag

_SIZE = 1000.0  # width and height of a plot, in its own units
_TICKS = 5
_LEAST_RANGE = 1e-9
# If a plot may be cut, values above _CUT times the _FEW-th percentile are cut off.
_CUT = 3.0
_FEW = 95.0


@dataclass(frozen=True, slots=True)
class Series:
    """A line of a plot.

    An area stands on the areas before it.

    Attributes:
        x: float64 [n].
        y: float64 [n].
        colour: one of c0 to c4.
        style: "line", "dash", "dots" or "area".
        low: the lower end of the band around the line, float64 [n].
        high: the upper end of the band, float64 [n].
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    colour: str = "c0"
    style: str = "line"
    low: np.ndarray | None = None
    high: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment on the x axis.

    Attributes:
        colour: one of bad, mid and good.
    """

    x: float
    name: str
    colour: str


@dataclass(frozen=True, slots=True)
class Plot:
    """The content of a plot.

    Attributes:
        unit: the unit of the y axis.
        read: how to read the plot.
        x_unit: the unit of the x axis.
        from_zero: whether the y axis begins at 0.
        log_x: whether the x axis is logarithmic.
        x_from_zero: whether the x axis begins at 0.
        cut: whether the y axis may end below single values that are far above all others. The plot
            then says so.
    """

    title: str
    unit: str
    read: str
    series: Sequence[Series]
    marks: Sequence[Mark] = ()
    x_unit: str = "step"
    from_zero: bool = False
    log_x: bool = False
    x_from_zero: bool = False
    cut: bool = False

    def html(self) -> Html:
        """Return the plot with its key, how to read it, and its figures as a table."""
        xs, ys = self._scales()
        most = max((float(np.nanmax(one)) for one in self._values() if np.isfinite(one).any()), default=0.0)
        beyond = f" What is above the top is cut off; the highest is {number(most, 3)}." if most > ys.high else ""
        drawn = [shape for series, base in self._stacked() for shape in _shapes(series, base, xs, ys)]
        marks = [
            tag("path", tag("title", mark.name), d=f"M{xs.place(mark.x):.1f} 0V1000", class_="mark", stroke=_css(mark.colour))
            for mark in self.marks
        ]
        grid = tag("path", d="".join(f"M0 {_SIZE - ys.place(value):.1f}H1000" for value in ys.ticks), class_="grid")
        svg = tag(
            "svg",
            tag("title", f"{self.title}, {self.unit}, by {self.x_unit}"),
            grid,
            drawn,
            self._hover(xs, ys),
            marks,
            viewBox="0 0 1000 1000",
            preserveAspectRatio="none",
            role="img",
            aria_label=f"{self.title}: {self.read}",
        )
        ylabels = [tag("i", short(value), style=f"bottom:{ys.place(value) / 10:.2f}%") for value in ys.ticks]
        places = [(value, xs.place(value) / 10) for value in xs.ticks]
        xlabels = [
            tag("i", short(value), style=f"left:{place:.2f}%", class_="end" if place > 95 else "start" if place < 3 else None)
            for value, place in places
        ]
        parts = [(ylabels, "ys"), (svg, "area"), (xlabels, "xs"), (self.x_unit, "unit")]
        frame = tag("div", [tag("div", part, class_=kind) for part, kind in parts], class_="frame")
        return _figure(self.title, self.unit, self.read + beyond, self._key(), frame, figures=self._figures())

    def _scales(self) -> tuple[_Scale, _Scale]:
        values = self._values()
        if self.cut:
            every = np.concatenate(values)
            usual = float(np.percentile(every[np.isfinite(every)], _FEW)) if np.isfinite(every).any() else 0.0
            values = [np.minimum(one, _CUT * usual) if usual else one for one in values]
        places = [series.x for series in self.series] + [np.array([mark.x for mark in self.marks])]
        return _Scale.of(places, self.log_x, self.x_from_zero, 0.0), _Scale.of(values, False, self.from_zero, 0.06)

    def _values(self) -> list[np.ndarray]:
        """Return the values that the y axis has to reach."""
        tops = [series.y + base for series, base in self._stacked()]
        return [*tops, *(band for series in self.series for band in (series.low, series.high) if band is not None)]

    def _stacked(self) -> list[tuple[Series, np.ndarray]]:
        """Return each series with the values that it stands on."""
        under: np.ndarray | None = None
        placed = []
        for series in self.series:
            base = np.zeros(len(series.y)) if under is None or series.style != "area" else under
            placed.append((series, base))
            if series.style == "area":
                under = base + np.nan_to_num(series.y)
        return placed

    def _key(self) -> Html | None:
        entries = [(series.colour, series.name) for series in self.series]
        named = {(mark.colour, mark.name.split(":")[0]): None for mark in self.marks}
        if len(entries) + len(named) < 2 and not any(series.low is not None for series in self.series):
            return None
        return key([*entries, *named])

    def _hover(self, xs: _Scale, ys: _Scale) -> list[Html]:
        """Return strips over the first series. A strip shows its figures to a pointer on it."""
        x = self.series[0].x
        if len(x) < 2:
            return []
        middles = (x[1:] + x[:-1]) / 2
        edges = [xs.place(value) for value in (x[0], *middles, x[-1])]
        strips = []
        for k, value in enumerate(x):
            lines = [f"{self.x_unit} {number(float(value), 6)}"]
            lines += [
                f"{series.name} {number(float(series.y[_nearest(series.x, float(value))]))}"
                for series in self.series
                if len(series.x)
            ]
            left = edges[k]
            strip = tag(
                "rect",
                tag("title", "\n".join(lines)),
                x=f"{left:.1f}",
                y=0,
                width=f"{max(edges[k + 1] - left, 0.5):.1f}",
                height=1000,
                class_="hover",
            )
            strips.append(strip)
        return strips

    def _figures(self) -> Html:
        bands = any(series.low is not None for series in self.series)
        several = len(self.series) > 1
        rows = []
        for series in self.series:
            for k in range(len(series.x)):
                row = [number(float(series.x[k]), 6), *([series.name] if several else []), number(float(series.y[k]), 6)]
                if bands:
                    row += ["-" if band is None else number(float(band[k]), 6) for band in (series.low, series.high)]
                rows.append(row)
        head = [self.x_unit, *(["line"] if several else []), self.unit, *(["lowest", "highest"] if bands else [])]
        return tag("details", tag("summary", "the figures"), table(head, rows, words=[1] if several else []))


@dataclass(frozen=True, slots=True)
class _Scale:
    """A scale from values to places between 0 and 1000."""

    low: float
    high: float
    log: bool
    ticks: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[np.ndarray], log: bool, from_zero: bool, margin: float) -> _Scale:
        """Return the scale of all finite values.

        Args:
            margin: the share of the range that stays free at each end of a linear scale.
        """
        every = np.concatenate([np.empty(0), *values])
        every = every[np.isfinite(every) & ((every > 0) | (not log))]
        low, high = (float(every.min()), float(every.max())) if len(every) else (0.0, 1.0)
        if log:
            high = max(high, low * 1.01)
            decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
            round_ones = [factor * 10.0**k for k in decades for factor in ((1, 2, 5) if len(decades) < _TICKS else (1,))]
            return cls(low, high, True, tuple(value for value in round_ones if low <= value <= high))
        low = min(low, 0.0) if from_zero else low
        spread = max(high - low, _LEAST_RANGE, abs(high) * 1e-6)
        high = high + margin * spread if high != low else high + spread
        low = low if from_zero and low == 0 else low - margin * spread
        return cls(low, high, False, _nice(low, high))

    def place(self, value: float) -> float:
        """Return the place of a value."""
        if not self.log:
            return _SIZE * (min(value, self.high) - self.low) / (self.high - self.low)
        return _SIZE * math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)


def _nice(low: float, high: float) -> tuple[float, ...]:
    """Return about _TICKS round values between two values."""
    raw = (high - low) / _TICKS
    size = 10.0 ** math.floor(math.log10(raw))
    stride = next(factor * size for factor in (1, 2, 2.5, 5, 10) if factor * size >= raw * 0.999)
    first = math.ceil(low / stride - 1e-9)
    return tuple(stride * k for k in range(first, math.floor(high / stride + 1e-9) + 1))


def _nearest(x: np.ndarray, value: float) -> int:
    """Return the index of the nearest of ascending values."""
    after = min(int(np.searchsorted(x, value)), len(x) - 1)
    return after - 1 if after and abs(x[after - 1] - value) <= abs(x[after] - value) else after


def _path(x: np.ndarray, y: np.ndarray, xs: _Scale, ys: _Scale) -> str:
    """Return a line through all finite points, interrupted at the others."""
    drawn, begun = [], False
    for right, up in zip(x.tolist(), y.tolist(), strict=True):
        if not math.isfinite(up):
            begun = False
            continue
        drawn.append(f"{'L' if begun else 'M'}{xs.place(right):.1f} {_SIZE - ys.place(up):.1f}")
        begun = True
    return "".join(drawn)


def _between(x: np.ndarray, low: np.ndarray, high: np.ndarray, xs: _Scale, ys: _Scale) -> str:
    """Return the area between two lines, over the points where both are finite."""
    kept = np.isfinite(low) & np.isfinite(high)
    if kept.sum() < 2:
        return ""
    way = _path(np.concatenate([x[kept], x[kept][::-1]]), np.concatenate([high[kept], low[kept][::-1]]), xs, ys)
    return f"{way}Z"


def _shapes(series: Series, base: np.ndarray, xs: _Scale, ys: _Scale) -> list[Html]:
    colour, shapes = _css(series.colour), []
    if series.low is not None and series.high is not None and series.style != "dots":
        shapes.append(tag("path", d=_between(series.x, series.low, series.high, xs, ys), class_="band", fill=colour))
    if series.style == "area":
        filled = _between(series.x, base, base + np.nan_to_num(series.y), xs, ys)
        return [tag("path", d=filled, fill=colour, fill_opacity=0.82)]
    if series.style == "dots" or len(series.x) == 1:
        finite = [(xs.place(x), _SIZE - ys.place(y)) for x, y in zip(series.x, series.y, strict=True) if math.isfinite(y)]
        if series.low is not None and series.high is not None:
            ends = zip(series.x, series.low, series.high, strict=True)
            bars = "".join(
                f"M{xs.place(x):.1f} {_SIZE - ys.place(low):.1f}V{_SIZE - ys.place(high):.1f}" for x, low, high in ends
            )
            shapes.append(tag("path", d=bars, class_="line", stroke=colour))
        # Each dot is a line without length. Its round ends keep their shape when the plot is
        # stretched.
        shapes.append(tag("path", d="".join(f"M{x:.1f} {y:.1f}h.01" for x, y in finite), class_="dots", stroke=colour))
        return shapes
    kind = "line dash" if series.style == "dash" else "line"
    return [*shapes, tag("path", d=_path(series.x, series.y, xs, ys), class_=kind, stroke=colour)]


def _css(colour: str) -> str:
    return f"var(--{colour})"


def _figure(title: str, unit: str, read: str, *body: Child, figures: Html | None = None) -> Html:
    """Return a plot under its title, with how to read it, and its figures as a table."""
    caption = tag("figcaption", title, " ", tag("span", f"({unit})"))
    return tag("figure", caption, *body, tag("p", read, class_="read"), figures)


def key(entries: Iterable[tuple[str, str]]) -> Html:
    """Return the meaning of colours, given as (colour, name)."""
    return tag("ul", [tag("li", tag("i", style=f"background:{_css(colour)}"), name) for colour, name in entries], class_="key")


def bars(title: str, unit: str, read: str, rows: Sequence[tuple[str, str, float, str]]) -> Html:
    """Return bars beside names.

    Args:
        rows: the name, the colour, the value, and the figure in words.
    """
    most = max((value for _, _, value, _ in rows), default=0) or 1.0
    drawn: list[Html] = []
    for name, colour, value, figure in rows:
        bar = tag("span", tag("i", style=_width(value, most, colour)), class_="bar")
        drawn += [tag("span", name), bar, tag("span", figure, class_="n")]
    return _figure(title, unit, read, tag("div", drawn, class_="bars"))


def bars_of(title: str, unit: str, read: str, colour: str, values: Mapping[str, int], most: int | None = None) -> Html:
    """Return bars of one colour, each with its share of the sum of all.

    Args:
        values: the values by name.
        most: how many bars are drawn, from the first on. If None, all.
    """
    rows = [(name, colour, value, of_total(value, sum(values.values()))) for name, value in values.items()]
    return bars(title, unit, read, rows[:most])


def of_total(value: int, total: int) -> str:
    """Format a number and its share of a total."""
    return f"{value:,} · {share(value / total if total else None)}"


def whole(title: str, unit: str, read: str, parts: Sequence[tuple[str, str, float, str]]) -> Html:
    """Return one bar that is cut into its parts.

    Args:
        parts: the name, the colour, the value, and the figure in words.
    """
    total = sum(value for _, _, value, _ in parts) or 1.0
    cut = [tag("i", style=_width(value, total, colour), title=f"{name}: {figure}") for name, colour, value, figure in parts]
    named = key((colour, f"{name} {figure}") for name, colour, _, figure in parts)
    return _figure(title, unit, read, tag("div", cut, class_="whole"), named)


def _width(value: float, whole: float, colour: str) -> str:
    return f"width:{100 * value / whole:.2f}%;background:{_css(colour)}"


def spans(
    title: str, unit: str, read: str, rows: Sequence[tuple[str, Sequence[tuple[float, float, str, str]]]], end: float
) -> Html:
    """Return a row for each name, with the spans of time during which something was so.

    Args:
        rows: a name and its spans; a span is its begin, end, colour and meaning.
        end: the end of the axis, which begins at 0.
    """
    end = max(end, _LEAST_RANGE)
    drawn: list[Html] = []
    for name, parts in rows:
        cut = [
            tag(
                "i",
                style=f"left:{100 * begin / end:.2f}%;{_width(until - begin, end, colour)}",
                title=f"{what}, {number(begin, 3)} to {number(until, 3)} {unit}",
            )
            for begin, until, colour, what in parts
        ]
        drawn += [tag("span", name), tag("div", cut, class_="row")]
    ticks = [tag("i", short(value), style=f"left:{100 * value / end:.2f}%") for value in _nice(0.0, end) if value < 0.97 * end]
    drawn += [tag("span"), tag("div", ticks, class_="xs")]
    named = dict.fromkeys((colour, what) for _, parts in rows for _, _, colour, what in parts)
    return _figure(title, unit, read, key(named), tag("div", drawn, class_="lanes"))
