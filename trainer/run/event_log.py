"""RUN/events.jsonl: what befell a run, a line each, for what watches it and raises alarms (docs/operations.md, events.jsonl).

The launcher alone appends to it while the run trains, in its main thread; where that was killed, the trainer that ends the run in its place. Of a
run that rests, a command that reads its model may.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

from foreload.base.codec import parse_json
from foreload.base.errors import ForeloadError
from foreload.base.output import messages_lost
from foreload.trainer.run.directory import EVENTS


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvent:
    """Something that befell a run. kind: what it is called there; cause: why, in words; None where there is nothing to say."""

    kind: ClassVar[str]
    cause: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CallBegan(RunEvent):
    """A call of `foreload train` has the run. copies: how many trainers hold each lane; resumed: it goes on with what an earlier call left."""

    kind: ClassVar = "call-began"
    trainers: int
    copies: int
    resumed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CallEnded(RunEvent):
    """The run has come to rest. state: stopped or ended; cause: what stopped it early, where that is not a user."""

    kind: ClassVar = "call-ended"
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFailed(RunEvent):
    """A call ends without the run coming to rest, or refuses to begin. code: of the error (docs/errors.md), as `cause` says it."""

    kind: ClassVar = "call-failed"
    code: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TermBegan(RunEvent):
    """The steps of a term begin. members: the trainers; lanes: of each lane, the trainer that hosts it."""

    kind: ClassVar = "term-began"
    members: tuple[int, ...]
    lanes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerLost(RunEvent):
    """A trainer is gone, or counts as gone."""

    kind: ClassVar = "trainer-lost"
    trainer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerJoined(RunEvent):
    """A trainer is a member that was none before."""

    kind: ClassVar = "trainer-joined"
    trainer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerLeft(RunEvent):
    """A trainer is no member any more, and handed over what it had."""

    kind: ClassVar = "trainer-left"
    trainer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LanesTakenOver(RunEvent):
    """Lanes of a trainer that was lost have a new one, which had copies of them."""

    kind: ClassVar = "lanes-taken-over"
    lanes: tuple[int, ...]
    from_trainer: int
    to_trainer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LanesMoved(RunEvent):
    """Lanes were handed over from one trainer to another."""

    kind: ClassVar = "lanes-moved"
    lanes: tuple[int, ...]
    from_trainer: int
    to_trainer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebalanced(RunEvent):
    """Lanes are to leave a trainer that is slower than others. lanes: of each lane, the trainer that is to host it."""

    kind: ClassVar = "rebalanced"
    lanes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiesIncomplete(RunEvent):
    """Lanes have no complete copy for now: if their trainer is lost, so are their last steps."""

    kind: ClassVar = "copies-incomplete"
    lanes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiesComplete(RunEvent):
    """Every lane has a complete copy again."""

    kind: ClassVar = "copies-complete"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLost(RunEvent):
    """A store shard is lost: its rows come from parity."""

    kind: ClassVar = "shard-lost"
    shard: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardReplaced(RunEvent):
    """Another server takes the place of a store shard's, or its own was started again, empty. url: without password; None for a local server."""

    kind: ClassVar = "shard-replaced"
    shard: int
    url: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRebuilt(RunEvent):
    """A store shard has all of its rows again."""

    kind: ClassVar = "shard-rebuilt"
    shard: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsMove(RunEvent):
    """Rows begin to move, since store shards are added, removed or moved: those that join have none before, those that leave none after."""

    kind: ClassVar = "rows-move"
    joining: tuple[int, ...]
    leaving: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsMoved(RunEvent):
    """All rows have moved; shards that leave are removed."""

    kind: ClassVar = "rows-moved"
    joining: tuple[int, ...]
    leaving: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved(RunEvent):
    """A checkpoint was saved while it trained. checkpoint: its folder."""

    kind: ClassVar = "checkpoint-saved"
    checkpoint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointNotSaved(RunEvent):
    """A checkpoint that was due could not be saved; the one before stays."""

    kind: ClassVar = "checkpoint-not-saved"


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeAccepted(RunEvent):
    """A call was asked to use other code of the model than the run was trained with. cause: which files differ."""

    kind: ClassVar = "code-accepted"


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAsked(RunEvent):
    """A clean stop is asked for."""

    kind: ClassVar = "stop-asked"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsKept(RunEvent):
    """The run cannot go on, and keeps in its folder what its servers lack. cause: why it cannot."""

    kind: ClassVar = "rows-kept"


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagesLost(RunEvent):
    """Messages of the call could not be written to stderr, and are missing there from now on, until it takes some again."""

    kind: ClassVar = "messages-lost"


def _now() -> datetime:
    return datetime.now(UTC)


class EventLog:
    """The launcher's end of the file. What cannot be written is left out, which is said once: it is not worth the end of a training.

    step, term: the last step of all trainers, and the term; what is noted has them. clock: the wall time.
    """

    def __init__(self, run: Path, step: int, term: int, clock: Callable[[], datetime] = _now) -> None:
        self._path, self._clock = run / EVENTS, clock
        self.step, self.term = step, term
        self._said = self._messages_lost = False

    def see_messages(self) -> None:
        """Note that messages were lost, the first time; to be called often."""
        if not self._messages_lost and (why := messages_lost()) is not None:
            self._messages_lost = True
            self.note(MessagesLost(cause=why))

    def note(self, event: RunEvent) -> None:
        """Append a line: one write, so that a line is there whole unless the disk is full or this process is killed in it."""
        self.see_messages()
        line = {
            "time": self._clock().isoformat(timespec="milliseconds"),
            "kind": event.kind,
            "step": self.step,
            "term": self.term,
        }
        line |= {field.name: getattr(event, field.name) for field in fields(event) if field.name != "cause"}
        text = json.dumps(line | {"cause": event.cause}).encode() + b"\n"
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                size = os.fstat(descriptor).st_size
                # What another writer was killed in, or had no room for.
                torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
                whole = (b"\n" if torn else b"") + text
                if os.write(descriptor, whole) < len(whole):
                    self._say("the disk is full")
            finally:
                os.close(descriptor)
        except OSError as error:
            self._say(error.strerror or str(error))

    @contextmanager
    def failures(self) -> Iterator[None]:
        """While entered, an error that ends the call is noted: two signals, or one before training began, as "interrupted", a bug as "unforeseen"."""
        try:
            yield
        except ForeloadError as error:
            self.note(CallFailed(code=error.code, cause=str(error)))
            raise
        except KeyboardInterrupt:
            self.note(CallFailed(code="interrupted"))
            raise
        except Exception as error:
            self.note(CallFailed(code="unforeseen", cause=f"{type(error).__name__}: {error}"))
            raise

    def _say(self, why: str) -> None:
        if not self._said:
            self._said = True
            sys.stderr.write(f"foreload: warning: {self._path}: cannot be written ({why}), so events are missing\n")


def read_events(run: Path) -> Iterator[dict[str, Any]]:
    """The events of a run, in order; none where there is no file. A line that is not whole is left out."""
    with suppress(FileNotFoundError):
        for line in (run / EVENTS).read_bytes().split(b"\n"):
            with suppress(ValueError):
                event = parse_json(line)
                if isinstance(event, dict):
                    yield event
