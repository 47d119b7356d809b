"""The events of a run, from events.jsonl, over the time during which it trained.

The calls of the run follow one another on that time axis, without the pauses between them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from foreload.trainer.errors import after_step
from foreload.trainer.pages.plots import Mark

Span = tuple[float, float, str, str]
"""Begin and end, in seconds of training; colour; meaning."""

MOST_EVENTS = 200  # events that a page lists
_KINDS = {
    "shard-lost": ("bad", "store shard lost"),
    "shard-rebuilt": ("good", "store shard whole again"),
    "trainer-lost": ("bad", "trainer lost"),
    "rows-move": ("mid", "rows begin to move"),
}
_STATES = {
    "ok": ("c4", "whole"),
    "lost": ("bad", "lost: its rows come from parity"),
    "rebuilding": ("mid", "being rebuilt: its rows come from parity"),
}


@dataclass(frozen=True, slots=True)
class StoryEvent:
    """An event in the list on the page.

    Attributes:
        seconds: the seconds of training before the event.
        time: when the event happened, in UTC.
        step: the step after which it happened.
        what: the event, in words.
    """

    seconds: float
    time: str
    step: int
    what: str
    cause: str


@dataclass(slots=True)
class Story:
    """The events of a run.

    Attributes:
        seconds: the length of all calls, start and evaluation included.
        began: when the first call began, in ISO 8601; "" if not known.
        ended: when the last call ended, in ISO 8601; "" if not known.
        calls: the number of calls.
        shards: the spans of each shard, by number.
        trainers: the spans of each trainer, by number.
        marks: losses and migrations, by step.
        events: the first events, at most MOST_EVENTS.
        event_count: the number of all events.
    """

    seconds: float = 0.0
    began: str = ""
    ended: str = ""
    calls: int = 0
    shards: dict[int, list[Span]] = field(default_factory=dict)
    trainers: dict[int, list[Span]] = field(default_factory=dict)
    marks: list[Mark] = field(default_factory=list)
    events: list[StoryEvent] = field(default_factory=list)
    event_count: int = 0

    def happened(self, kind: str) -> int:
        """Return the number of marks for a kind of event."""
        name = _KINDS[kind][1]
        return sum(mark.name.startswith(name) for mark in self.marks)


class _StoryReader:
    """Makes the story from the events, one at a time.

    Args:
        shards: the numbers of the store shards that the run began with.
    """

    def __init__(self, shards: Iterable[int]) -> None:
        self.story = Story()
        self._shard_states = dict.fromkeys(shards, ("ok", 0.0))
        self._lost: set[int] = set()  # shards that are not whole
        self._members: dict[int, float] = {}  # trainer -> when it joined, in seconds of training
        self._call_began: datetime | None = None
        self._last: datetime | None = None
        self._before = 0.0  # seconds of the earlier calls

    def read(self, event: Mapping[str, Any]) -> None:
        """Add the next event.

        Raises:
            ValueError: the event is malformed; likewise KeyError and TypeError.
        """
        time, kind = datetime.fromisoformat(event["time"]), str(event["kind"])
        if kind == "call-began":
            self._end_call()
            self._call_began = time
            self.story.calls += 1
            self.story.began = self.story.began or event["time"]
        self._last = time
        now, step = self._now(time), int(event["step"])
        # Every trainer reports the loss of a shard. Only the first report counts as an event.
        again = kind == "shard-lost" and int(event["shard"]) in self._lost
        self._states(kind, event, now)
        if again:
            return
        if kind in _KINDS:
            colour, name = _KINDS[kind]
            self.story.marks.append(Mark(float(max(step, 0)), f"{name}: {_what(event)}, {after_step(step)}", colour))
        self.story.event_count += 1
        if len(self.story.events) < MOST_EVENTS:
            self.story.events.append(
                StoryEvent(now, str(event["time"])[:19].replace("T", " "), step, _what(event), str(event.get("cause") or ""))
            )
        if kind in ("call-ended", "call-failed"):
            self._end_call()

    def end(self, latest: float | None) -> Story:
        """End the last call, and return the story.

        Args:
            latest: when the run is known to have trained last, in seconds since 1970, for a call
                whose end is not logged.
        """
        if self._call_began is not None and latest is not None:
            self._last = max(self._last or self._call_began, datetime.fromtimestamp(latest, UTC))
        self._end_call()
        self.story.seconds = self._before
        self.story.ended = self._last.isoformat(timespec="seconds") if self._last is not None else ""
        for shard in list(self._shard_states):
            self._shard_now(shard, None, self._before)
        return self.story

    def _now(self, time: datetime) -> float:
        return self._before + (max((time - self._call_began).total_seconds(), 0.0) if self._call_began is not None else 0.0)

    def _end_call(self) -> None:
        if self._call_began is None or self._last is None:
            return
        self._before = self._now(self._last)
        for trainer in list(self._members):
            self._leave(trainer, self._before)
        self._call_began = None

    def _states(self, kind: str, event: Mapping[str, Any], now: float) -> None:
        """Update the states of shards and trainers after an event."""
        if kind == "shard-lost":
            shard = int(event["shard"])
            self._lost.add(shard)
            # A server that was restarted at once is rebuilding before the trainers report its loss.
            if self._shard_states.get(shard, ("ok", 0.0))[0] == "ok":
                self._shard_now(shard, "lost", now)
        elif kind == "shard-replaced":
            self._shard_now(int(event["shard"]), "rebuilding", now)
        elif kind == "shard-rebuilt":
            self._lost.discard(int(event["shard"]))
            self._shard_now(int(event["shard"]), "ok", now)
        elif kind == "rows-move":
            for shard in event["joining"]:
                self._shard_states.setdefault(int(shard), ("ok", now))
        elif kind == "rows-moved":
            for shard in event["leaving"]:
                self._shard_now(int(shard), None, now)
        elif kind == "term-began":
            members = {int(trainer) for trainer in event["members"]}
            for trainer in set(self._members) - members:
                self._leave(trainer, now)
            for trainer in members:
                self._members.setdefault(trainer, now)
        elif kind in ("trainer-lost", "trainer-left"):
            self._leave(int(event["trainer"]), now)

    def _leave(self, trainer: int, now: float) -> None:
        if trainer in self._members:
            self.story.trainers.setdefault(trainer, []).append((self._members.pop(trainer), now, "c0", "trains"))

    def _shard_now(self, shard: int, state: str | None, now: float) -> None:
        if shard in self._shard_states:
            before, since = self._shard_states.pop(shard)
            if now > since:
                self.story.shards.setdefault(shard, []).append((since, now, *_STATES[before]))
        if state is not None:
            self._shard_states[shard] = (state, now)


def story_of(events: Iterable[Mapping[str, Any]], shards: Iterable[int], latest: float | None) -> Story:
    """Return the story of a run.

    Args:
        events: the run's events, in order. Malformed ones are left out.
        shards: the numbers of the store shards that the run began with.
        latest: when the run is known to have trained last, in seconds since 1970, for a call whose
            end is not logged.
    """
    reader = _StoryReader(shards)
    for event in events:
        try:
            reader.read(event)
        except (ValueError, KeyError, TypeError):
            # The event is damaged, or a later version wrote it.
            continue
    return reader.end(latest)


def _what(event: Mapping[str, Any]) -> str:
    """Return an event in a few words: its kind and its fields."""
    kind = str(event["kind"])
    if kind.startswith("shard-"):
        url = f", {event['url']}" if event.get("url") else ""
        return f"store shard {event['shard']} {kind.removeprefix('shard-')}{url}"
    if kind.startswith("trainer-"):
        return f"trainer {event['trainer']} {kind.removeprefix('trainer-')}"
    fields = [
        f"{name.replace('_', ' ')} {_value(event[name])}"
        for name in event
        if name not in ("time", "kind", "step", "term", "cause")
    ]
    return " ".join([kind.replace("-", " "), *([f"({', '.join(fields)})"] if fields else [])])


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, Sequence) and not isinstance(value, str) else str(value)
