"""RUN/events.jsonl: one line per event of a run, for monitoring (docs/run-files.md, events.jsonl).

While the run trains, only the launcher's main thread appends to the file. If the launcher was
killed, the trainer that ends the run in its place appends. While the run is stopped, a command that
reads its model may append.
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

from foreload.base import json_log
from foreload.base.codec import parse_json
from foreload.base.errors import ForeloadError
from foreload.base.output import messages_lost
from foreload.trainer.run.directory import EVENTS


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvent:
    """Something that happened to a run.

    Attributes:
        kind: the name of the event in the file.
        cause: why it happened, for a person to read, or None.
    """

    kind: ClassVar[str]
    cause: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CallBegan(RunEvent):
    """A call of `foreload train` owns the run.

    Attributes:
        copies: the number of trainers that hold each lane.
        resumed: whether the call continues from the state that an earlier call left.
    """

    kind: ClassVar = "call-began"
    trainers: int
    copies: int
    resumed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CallEnded(RunEvent):
    """The run has stopped training and is saved.

    Attributes:
        state: "stopped" or "ended".
        cause: why the run stopped early, unless a user asked for that.
    """

    kind: ClassVar = "call-ended"
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFailed(RunEvent):
    """A call ends without a saved run, or refuses to begin.

    Attributes:
        code: the error's code (docs/errors.md); `cause` is its message.
    """

    kind: ClassVar = "call-failed"
    code: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TermBegan(RunEvent):
    """The steps of a term begin.

    Attributes:
        members: the trainers.
        lanes: for each lane, the trainer that hosts it.
    """

    kind: ClassVar = "term-began"
    members: tuple[int, ...]
    lanes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerLost(RunEvent):
    """A trainer died, or counts as dead."""

    kind: ClassVar = "trainer-lost"
    trainer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerJoined(RunEvent):
    """A trainer became a member."""

    kind: ClassVar = "trainer-joined"
    trainer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerLeft(RunEvent):
    """A trainer handed over its lanes and is no longer a member."""

    kind: ClassVar = "trainer-left"
    trainer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LanesTakenOver(RunEvent):
    """Another trainer, which had replicas of them, took over the lanes of a lost trainer."""

    kind: ClassVar = "lanes-taken-over"
    lanes: tuple[int, ...]
    from_trainer: int
    to_trainer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LanesMoved(RunEvent):
    """One trainer handed lanes over to another."""

    kind: ClassVar = "lanes-moved"
    lanes: tuple[int, ...]
    from_trainer: int
    to_trainer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebalanced(RunEvent):
    """Lanes are to leave a trainer that is slower than others.

    Attributes:
        lanes: for each lane, the trainer that is to host it.
    """

    kind: ClassVar = "rebalanced"
    lanes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Adjusted(RunEvent):
    """--auto changes the numbers of trainers or store shards, or replaces what is slow.

    Attributes:
        trainers: the number of trainers after this change.
        shards: the number of store shards after it.
        shard: the slow shard whose rows move to another server, or None.
        trainer: the slow trainer that another one replaces, or None.
        gain_seconds: the time that it is predicted to save, after its cost, up to the schedule's
            end. None for a change that is not made to save time.
        cost_seconds: the time that it is predicted to take from training.
        undoes: whether it undoes an earlier change, which did not pay.
        dry_run: whether it is only reported.
    """

    kind: ClassVar = "adjusted"
    trainers: int
    shards: int
    shard: int | None = None
    trainer: int | None = None
    gain_seconds: float | None = None
    cost_seconds: float = 0.0
    undoes: bool = False
    dry_run: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AdjustmentJudged(RunEvent):
    """What a change by --auto has brought, as measured.

    Attributes:
        trainers: the number of trainers since.
        shards: the number of store shards since.
        gain: by which share the steps are faster than before, for the same work; negative if they
            are slower.
        kept: whether the change is kept.
    """

    kind: ClassVar = "adjustment-judged"
    trainers: int
    shards: int
    gain: float
    kept: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiesIncomplete(RunEvent):
    """Lanes have no complete replica for now. If their trainer is lost, so are their last steps."""

    kind: ClassVar = "copies-incomplete"
    lanes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiesComplete(RunEvent):
    """Every lane has a complete replica again."""

    kind: ClassVar = "copies-complete"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLost(RunEvent):
    """A store shard is lost. Its rows are decoded from parity."""

    kind: ClassVar = "shard-lost"
    shard: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardReplaced(RunEvent):
    """A store shard has another server, or its own server was started again, empty.

    Attributes:
        url: the server's URL without password, or None for a local server.
    """

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
    """A migration began, because store shards are added, removed or moved.

    Attributes:
        joining: the shards that have no rows before the migration.
        leaving: the shards that have no rows after it.
    """

    kind: ClassVar = "rows-move"
    joining: tuple[int, ...]
    leaving: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsMoved(RunEvent):
    """A migration is complete, and the shards that left are removed.

    Attributes:
        joining: as in `RowsMove`.
        leaving: as in `RowsMove`.
    """

    kind: ClassVar = "rows-moved"
    joining: tuple[int, ...]
    leaving: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved(RunEvent):
    """A checkpoint was saved during training.

    Attributes:
        checkpoint: its folder.
    """

    kind: ClassVar = "checkpoint-saved"
    checkpoint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointNotSaved(RunEvent):
    """A checkpoint that was due could not be saved. The checkpoint before it is kept."""

    kind: ClassVar = "checkpoint-not-saved"


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeAccepted(RunEvent):
    """A call was asked to use other code of the model than the run was trained with.

    Attributes:
        cause: the files that differ.
    """

    kind: ClassVar = "code-accepted"


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAsked(RunEvent):
    """A clean stop was requested."""

    kind: ClassVar = "stop-asked"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsKept(RunEvent):
    """The run cannot go on, and its folder keeps the rows that its servers lack.

    Attributes:
        cause: why the run cannot go on.
    """

    kind: ClassVar = "rows-kept"


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagesLost(RunEvent):
    """Messages of the call could not be written to stderr.

    They are missing there until writes succeed again.
    """

    kind: ClassVar = "messages-lost"


def _now() -> datetime:
    return datetime.now(UTC)


class EventLog:
    """Appends events to the file.

    An event that cannot be written is dropped, because it is not worth stopping a training for. The
    first such event is reported on stderr.

    Attributes:
        step: the last step that all trainers have trained; every event is stamped with it.
        term: the current term; every event is stamped with it.
    """

    def __init__(self, run: Path, step: int, term: int, clock: Callable[[], datetime] = _now) -> None:
        self._path, self._clock = run / EVENTS, clock
        self.step, self.term = step, term
        self._said = self._messages_lost = False

    def see_messages(self) -> None:
        """Record, once, that messages to stderr were lost. To be called often."""
        if not self._messages_lost and (why := messages_lost()) is not None:
            self._messages_lost = True
            self.note(MessagesLost(cause=why))

    def note(self, event: RunEvent) -> None:
        """Append an event.

        The line is a single write, so it is complete unless the disk is full or this process is
        killed during the write.
        """
        self.see_messages()
        line: dict[str, Any] = {
            "time": self._clock().isoformat(timespec="milliseconds"),
            "kind": event.kind,
            "step": self.step,
            "term": self.term,
        }
        line |= {field.name: getattr(event, field.name) for field in fields(event) if field.name != "cause"}
        line["cause"] = event.cause
        json_log.record(line)
        text = json.dumps(line).encode() + b"\n"
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                size = os.fstat(descriptor).st_size
                # If the last line has no end, its writer was killed or the disk was full.
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
        """Record an error that ends the call, and raise it again.

        An interruption (two signals, or one before training began) gets the code "interrupted", a
        bug "unforeseen".
        """
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
    """Yield the events of a run in order.

    Incomplete lines are skipped; a missing file has no events.
    """
    with suppress(FileNotFoundError):
        for line in (run / EVENTS).read_bytes().split(b"\n"):
            with suppress(ValueError):
                event = parse_json(line)
                if isinstance(event, dict):
                    yield event
