"""The page of a run, or of two side by side, made of its sections."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from foreload.base.progress import duration
from foreload.trainer.pages import run_cache, run_learning, run_metrics, run_settings, run_store
from foreload.trainer.pages.markup import Html, count, missing, number, page, section, share, tag, tile
from foreload.trainer.pages.plots import key
from foreload.trainer.pages.run_figures import RunFigures

_SECTIONS: Sequence[tuple[str, Callable[[Sequence[RunFigures]], list[Html]], bool]] = (
    ("Losses and metrics", run_learning.learning, True),
    ("Throughput", run_learning.throughput, True),
    ("Where step time goes", run_learning.step_time, True),
    ("Cache", run_cache.cache, True),
    ("Store shards and trainers over time", run_store.store, False),
    ("Slots and memory", run_cache.memory, False),
    ("Calibration", run_learning.calibration, False),
    ("Settings", run_settings.settings, False),
)
"""Title, contents, and whether the section is empty before the first step."""


def run_page(runs: Sequence[RunFigures]) -> str:
    """Return the HTML of one run, or of several on the same axes."""
    names = " beside ".join(run.name for run in runs)
    colours = key((f"c{place}", run.name) for place, run in enumerate(runs)) if len(runs) > 1 else None
    trained = any(len(run.steps.steps) for run in runs)
    sections = [
        section(title, contents(runs) if trained or not of_steps else missing("No step has been trained yet."))
        for title, contents, of_steps in _SECTIONS
    ]
    made_from = "Made by foreload from metrics.jsonl, events.jsonl, summary.json and manifest.json of the run, and its schedule."
    return page(
        f"{names} · foreload",
        tag("header", tag("h1", f"Run{'s' * (len(runs) > 1)} {names}"), [_summary(run) for run in runs], colours),
        _tiles(runs),
        sections,
        tag("footer", made_from),
    )


def _summary(run: RunFigures) -> Html:
    """Return a sentence that describes a run."""
    job, stage, story = run.manifest.job, run.manifest.stages[-1], run.story
    last = run.steps.last
    after = f" after step {int(last[-1]):,}" if len(last) else ""
    when = f", {story.began[:16].replace('T', ' ')} to {story.ended[:16].replace('T', ' ')} UTC" if story.began else ""
    calls = f" in {story.calls} calls" if story.calls > 1 else ""
    parity = job.get("parity")
    words = (
        f"{run.name}: {run.state}{after}{when}{calls}. Model {job.get('model')} on schedule {stage.path.rsplit('/', 1)[-1]}, "
        f"{run.manifest.lanes} lanes on {job.get('trainers')} trainer(s), store {job.get('store')}"
        f"{'' if parity is None else f', parity {parity}'}."
    )
    return tag("p", words, class_="quiet")


def _ratio(over: float, under: float) -> float:
    return over / under if under else float("nan")


_TILES: Sequence[tuple[str, Callable[[RunFigures], str], str]] = (
    ("steps", lambda run: count(run.steps.steps.sum()), "trained"),
    (
        "time",
        lambda run: duration(run.story.seconds) if run.story.calls else "-",
        "of all calls, start and evaluation too",
    ),
    ("samples a second", lambda run: count(_ratio(1000 * run.steps.total("samples"), run.steps.total("ms"))), "over all steps"),
    ("a step", lambda run: f"{number(_ratio(run.steps.total('ms'), run.steps.steps.sum()))} ms", "of the slowest trainer, mean"),
    ("waiting for rows", lambda run: share(_ratio(run.steps.total("ms_waiting"), run.steps.total("ms"))), "of the step time"),
    (
        "cache hits",
        lambda run: share(1 - _ratio(run.steps.total("rows_arrived"), run.steps.total("rows_used"))),
        "of rows used",
    ),
    (
        "losses survived",
        lambda run: f"{run.story.happened('shard-lost')} + {run.story.happened('trainer-lost')}",
        "store shards + trainers",
    ),
)
"""Headline figures besides the metrics: name, value, and a note."""


def _tiles(runs: Sequence[RunFigures]) -> Html:
    figures = [*run_metrics.metric_tiles(runs), *((name, [read(run) for run in runs], more) for name, read, more in _TILES)]
    return tag("div", [tile(name, values, more, len(runs) > 1) for name, values, more in figures], class_="tiles")
