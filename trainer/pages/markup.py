"""HTML as text, and numbers formatted for a page.

Text that is not `Html` is escaped.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

STYLE = """
:root{color-scheme:light dark;
--page:#fff;--panel:#f6f7f9;--ink:#1b1f24;--quiet:#57606a;--rule:#d5dae0;--c0:#0067a8;--c1:#c4540a;--c2:#0b7d5f;
--c3:#a3477f;--c4:#8a929b;--bad:#c4540a;--mid:#d9a100;--good:#0b7d5f}
@media(prefers-color-scheme:dark){:root{--page:#14171b;--panel:#1d2127;--ink:#e8eaed;--quiet:#a3abb5;--rule:#383f48;--c0:#5cb3ea;--c1:#f2914e;
--c2:#42c79c;--c3:#dd8fbc;--c4:#7d8691;--bad:#f2914e;--mid:#f0c94a;--good:#42c79c}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:72rem;padding:1.25rem 1.25rem 3rem;
background:var(--page);color:var(--ink);font:15px/1.5 system-ui,"DejaVu Sans",sans-serif}
h1{font-size:1.5rem;line-height:1.25;margin:0;overflow-wrap:anywhere}
h2{font-size:1.15rem;margin:2.25rem 0 .6rem;padding-top:.6rem;border-top:1px solid var(--rule)}
p{margin:.35rem 0}.quiet,.read,.missing{color:var(--quiet)}.read,.missing{font-size:.88rem;max-width:62rem}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(11.5rem,1fr));gap:.55rem;margin:1rem 0 0}
.tile{background:var(--panel);border-radius:.5rem;padding:.5rem .65rem}
.tile b{display:block;font-size:1.3rem;font-weight:600;line-height:1.35;font-variant-numeric:tabular-nums;white-space:nowrap}
.tile .name{font-size:.82rem;color:var(--quiet);display:block}.tile .more{font-size:.78rem;color:var(--quiet)}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,27rem),1fr));gap:1.25rem 1.75rem}
.plots.three{grid-template-columns:repeat(auto-fit,minmax(min(100%,20rem),1fr))}.plots>*{min-width:0}
figure{margin:.4rem 0;min-width:0}figcaption{font-weight:600;font-size:.95rem;margin-bottom:.3rem}
figcaption span{font-weight:400;color:var(--quiet)}
.frame{display:grid;grid-template-columns:3.4rem minmax(0,1fr);font-size:.74rem;color:var(--quiet);font-variant-numeric:tabular-nums}
.frame .ys{position:relative}.frame .ys i{position:absolute;right:.4rem;transform:translateY(50%);font-style:normal;white-space:nowrap}
.frame .area{position:relative;height:12.5rem;border-bottom:1px solid var(--quiet);border-left:1px solid var(--rule)}
.frame .xs{grid-column:2;position:relative;height:1.25rem}
.frame .xs i{position:absolute;transform:translateX(-50%);font-style:normal;white-space:nowrap;top:.1rem}
.frame .xs i.end{transform:translateX(-100%)}.frame .xs i.start{transform:none}
.frame .unit{grid-column:2;text-align:center}
svg{position:absolute;inset:0;width:100%;height:100%;overflow:visible}
svg *{vector-effect:non-scaling-stroke}.grid{stroke:var(--rule);stroke-width:1;fill:none}
.line{fill:none;stroke-width:1.8;stroke-linejoin:round}.dash{stroke-dasharray:6 4}.dots{fill:none;stroke-width:8;stroke-linecap:round}
.band{opacity:.2;stroke:none}.hover{fill:transparent}.hover:hover{fill:var(--quiet);fill-opacity:.16}
.mark{stroke-width:1.5;stroke-dasharray:2 3;fill:none}
.key{display:flex;flex-wrap:wrap;gap:.1rem 1rem;font-size:.82rem;margin:.25rem 0;padding:0;list-style:none}
.key i{display:inline-block;width:.9rem;height:.6rem;border-radius:2px;margin-right:.35rem}
.bars{display:grid;grid-template-columns:max-content minmax(0,1fr) max-content;gap:.3rem .6rem;align-items:center;font-size:.85rem}
.bars .bar{height:1rem;display:flex}.bars .bar i{display:block;border-radius:2px;min-width:1px}
.bars .n{font-variant-numeric:tabular-nums;text-align:right}
.whole{display:flex;height:1.5rem;border-radius:4px;overflow:hidden;margin:.3rem 0}.whole i{display:block;min-width:1px}
.lanes{display:grid;grid-template-columns:max-content minmax(0,1fr);gap:.3rem .6rem;font-size:.8rem;align-items:center}
.lanes .row{position:relative;height:.95rem;background:var(--panel);border-radius:2px;overflow:hidden}
.lanes .row i{position:absolute;top:0;bottom:0;min-width:2px}
.lanes .xs{position:relative;height:1.2rem;color:var(--quiet)}.lanes .xs i{position:absolute;font-style:normal}
details{font-size:.84rem;margin:.3rem 0}summary{cursor:pointer;color:var(--quiet)}
.scroll{overflow-x:auto;max-height:24rem;overflow-y:auto}
table{border-collapse:collapse;font-size:.84rem;font-variant-numeric:tabular-nums}
th,td{text-align:right;padding:.16rem .8rem .16rem 0;border-bottom:1px solid var(--rule);vertical-align:top}
th{font-weight:600;color:var(--quiet)}th:first-child,td:first-child,td.word,th.word{text-align:left}
td{white-space:nowrap}td:first-child,td.word{white-space:normal}td.word{min-width:7rem}tr.differs td{font-weight:600}
footer{margin-top:2.5rem;font-size:.82rem;color:var(--quiet)}
@media(max-width:34rem){body{padding:.9rem .8rem 2rem}.tiles{grid-template-columns:repeat(2,minmax(0,1fr))}.tile b{font-size:1.1rem}
.frame{grid-template-columns:2.9rem minmax(0,1fr)}.frame .area{height:10.5rem}}
"""


class Html(str):
    """Text that is HTML already."""


Child: TypeAlias = str | Sequence["str | None"] | None
"""The content of an element: text, which is escaped unless it is Html; several contents; or None."""


def tag(name: str, *children: Child, **attributes: str | float | None) -> Html:
    """Return an element.

    Args:
        attributes: the element's attributes. `class_` stands for class, and other underscores for
            dashes. Attributes that are None are left out.
    """
    words = [
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    ]
    return Html(f"<{name}{''.join(words)}>{joined(children)}</{name}>")


def joined(children: Iterable[Child]) -> Html:
    """Return elements and texts, one after the other."""
    written = []
    for child in children:
        if isinstance(child, str):
            written.append(child if isinstance(child, Html) else html.escape(child))
        elif child is not None:
            written.append(joined(child))
    return Html("".join(written))


def page(title: str, *children: Child) -> str:
    """Return a whole file. It contains its style, and loads nothing from elsewhere."""
    # The policy makes the browser refuse whatever would be loaded from elsewhere, and every script.
    policy = Html("<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">")
    head = tag(
        "head",
        Html('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        policy,
        tag("title", title),
        tag("style", Html(STYLE)),
    )
    return f"<!doctype html>\n{tag('html', head, tag('body', *children), lang='en')}\n"


def section(title: str, *children: Child) -> Html:
    """Return a part of a page under a heading."""
    return tag("section", tag("h2", title), *children)


def table(head: Sequence[str], rows: Iterable[Sequence[str]], words: Sequence[int] = (), differing: Sequence[int] = ()) -> Html:
    """Return a table.

    Args:
        words: the indices of text columns, besides the first. Other columns are numbers.
        differing: the indices of rows to highlight.
    """
    kinds = ["word" if place in words else None for place in range(len(head))]
    cells = [tag("th", text, class_=kind, scope="col") for text, kind in zip(head, kinds, strict=True)]
    body = [
        tag(
            "tr",
            [tag("td", text, class_=kind) for text, kind in zip(row, kinds, strict=True)],
            class_="differs" if place in differing else None,
        )
        for place, row in enumerate(rows)
    ]
    return tag("div", tag("table", tag("thead", tag("tr", cells)), tag("tbody", body)), class_="scroll", tabindex="0")


def table_of(rows: Sequence[Mapping[str, str]], words: Sequence[str] = ()) -> Html:
    """Return a table of rows that are given by column.

    There is at least one row, and all rows have the same columns.

    Args:
        words: the names of text columns, besides the first. Other columns are numbers.
    """
    places = [place for place, name in enumerate(rows[0]) if name in words]
    return table(list(rows[0]), [list(row.values()) for row in rows], words=places)


def missing(why: str) -> Html:
    """Return a paragraph in place of something that is not known."""
    return tag("p", why, class_="missing")


def tile(name: str, values: Sequence[str], more: str = "", colours: bool = False) -> Html:
    """Return a headline figure of one run, or of several.

    Args:
        values: the figure of each run.
        more: a note below the figure.
        colours: whether each value has its run's colour.
    """
    shown = [
        tag("b", value, style=f"color:var(--c{place})" if colours else None, class_="figure")
        for place, value in enumerate(values)
    ]
    return tag("div", tag("span", name, class_="name"), shown, tag("span", more, class_="more") if more else None, class_="tile")


def count(value: float | None) -> str:
    """Format a whole number with commas; "-" for None and NaN."""
    return fixed(value, 0)


def number(value: float | None, digits: int = 4) -> str:
    """Format a number to `digits` significant digits, with commas; "-" for None and NaN."""
    if value is None or not math.isfinite(value):
        return "-"
    if not value:
        return "0"
    places = max(digits - 1 - math.floor(math.log10(abs(value))), 0)
    return f"{value:,.{min(places, 8)}f}"


def share(value: float | None) -> str:
    """Format a share as a percentage; "-" for None and NaN."""
    if value is None or not math.isfinite(value):
        return "-"
    return f"{100 * value:.{2 if abs(value) < 0.1 else 1}f} %"


def fixed(value: float | None, places: int) -> str:
    """Format a number to `places` decimal places, with commas; "-" for None and NaN."""
    return "-" if value is None or not math.isfinite(value) else f"{value:,.{places}f}"


def short(value: float) -> str:
    """Format a number for an axis, such as 1.2k or 3M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{letter}"
    return f"{value:.4g}"
