"""The page of a run, or of two beside each other: `run_page` puts its sections together."""

from __future__ import annotations

from collections.abc import Sequence

from foreload.trainer.pages import run_cache, run_learning, run_metrics, run_settings, run_store
from foreload.trainer.pages.markup import Html, count, duration, number, page, share, tag, tile
from foreload.trainer.pages.plots import key
from foreload.trainer.pages.run_figures import RunFigures


def run_page(runs: Sequence[RunFigures]) -> str:
    """HTML of one run, or of several on the same axes."""
    names = " beside ".join(run.name for run in runs)
    return page(
        f"{names} · foreload",
        tag("header", tag("h1", f"Run{'s' * (len(runs) > 1)} {names}"), [_told(run) for run in runs], _runs_key(runs)),
        _tiles(runs),
        run_learning.learning(runs),
        run_learning.throughput(runs),
        run_learning.step_time(runs),
        run_cache.cache(runs),
        run_store.store(runs),
        run_cache.memory(runs),
        run_learning.calibration(runs),
        run_settings.settings(runs),
        tag(
            "footer",
            "Made by foreload from metrics.jsonl, events.jsonl, summary.json and manifest.json of the run, and its schedule.",
        ),
    )


def _runs_key(runs: Sequence[RunFigures]) -> Html | None:
    if len(runs) < 2:
        return None
    return key([(f"var(--c{place})", run.name) for place, run in enumerate(runs)])


def _told(run: RunFigures) -> Html:
    """A sentence of what it is."""
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


def _tiles(runs: Sequence[RunFigures]) -> Html:
    steps = [run.steps for run in runs]
    several = len(runs) > 1
    seconds = [one.total("ms") / 1000 for one in steps]
    rows = [one.total("rows_used") for one in steps]

    def ratio(over: float, under: float) -> float:
        return over / under if under else float("nan")

    def survived(run: RunFigures) -> str:
        shards, trainers = run.story.happened("shard-lost"), run.story.happened("trainer-lost")
        return f"{shards} + {trainers}"

    figures = [
        *run_metrics.metric_tiles(runs),
        ("steps", [count(one.steps.sum()) for one in steps], "trained"),
        (
            "time",
            [duration(run.story.seconds) if run.story.calls else "-" for run in runs],
            "of all calls, start and evaluation too",
        ),
        (
            "samples a second",
            [count(ratio(one.total("samples"), time)) for one, time in zip(steps, seconds, strict=True)],
            "over all steps",
        ),
        (
            "a step",
            [f"{number(ratio(1000 * time, one.steps.sum()))} ms" for one, time in zip(steps, seconds, strict=True)],
            "of the slowest trainer, mean",
        ),
        (
            "waiting for rows",
            [share(ratio(one.total("ms_waiting") / 1000, time)) for one, time in zip(steps, seconds, strict=True)],
            "of the step time",
        ),
        (
            "cache hits",
            [share(1 - ratio(one.total("rows_arrived"), used)) for one, used in zip(steps, rows, strict=True)],
            "of rows used",
        ),
        ("losses survived", [survived(run) for run in runs], "store shards + trainers"),
    ]
    return tag("div", [tile(name, values, more, several) for name, values, more in figures], class_="tiles")
