"""Part of a run's page: store shards and trainers over time."""

from __future__ import annotations

from collections.abc import Sequence

from foreload.trainer.job.memory_check import readable
from foreload.trainer.pages.markup import Html, count, fixed, missing, number, table, table_of, tag
from foreload.trainer.pages.plots import spans
from foreload.trainer.pages.run_figures import RunFigures
from foreload.trainer.pages.run_metrics import named


def store(runs: Sequence[RunFigures]) -> list[Html]:
    """Return when each shard and trainer took part, the events, and shards' response times."""
    return [part for run in runs for part in _of_run(run, len(runs) > 1)]


def _of_run(run: RunFigures, several: bool) -> list[Html]:
    story = run.story
    if not story.calls:
        return [missing(f"{run.name}: not shown, since it has no events.jsonl, which earlier versions did not write.")]
    rows = [(f"store shard {shard}", story.shards[shard]) for shard in sorted(story.shards)]
    rows += [(f"trainer {trainer}", story.trainers[trainer]) for trainer in sorted(story.trainers)]
    read = (
        "A bar for each, from left to right over the time in which it takes part. "
        "While a shard is lost or being rebuilt, training goes on, and its rows come from the "
        "parity on the others: until it is whole again, the run survives one loss less."
    )
    drawn = [
        spans(
            named(run, "Store shards and trainers that took part", several),
            "seconds of all calls, start and evaluation included",
            read,
            rows,
            story.seconds,
        )
    ]
    answers = (run.summary or {}).get("store_shards") or []
    if answers:
        listed = [
            {
                "store shard": str(one["shard"]),
                "exchanges": count(one["exchanges"]),
                "ms an answer": fixed(one["ms_answer"], 3),
                "ms a step waited for it alone": fixed(one["ms_a_step"], 3),
                "traffic": readable(one["bytes"]),
                "stands out": _odd(one),
            }
            for one in answers
        ]
        read = "Of the last call. A shard that takes longer than the others delays all of them: check its host and its link."
        drawn.append(tag("div", table_of(listed, words=("stands out",)), tag("p", read, class_="read")))
    elif run.summary is None:
        drawn.append(missing("How long shards take to answer is recorded at the end of a call."))
    event_rows = [
        [number(one.seconds, 4), one.time, count(one.step) if one.step >= 0 else "-", one.what, one.cause] for one in story.events
    ]
    beyond = story.event_count - len(story.events)
    summary = f"what happened to it: {story.event_count:,} events" + (
        f", the first {len(story.events)} here, all in events.jsonl" if beyond else ""
    )
    listed_events = table(["second", "UTC", "after step", "what", "why"], event_rows, words=[3, 4])
    return [*drawn, tag("details", tag("summary", summary), listed_events, open="" if len(event_rows) <= 12 else None)]


def _odd(one: dict[str, object]) -> str:
    words = [f"{name}, {one[name]:.1f} x the others" for name in ("slow", "hot") if isinstance(one[name], float)]
    return "; ".join(words) or "no"
