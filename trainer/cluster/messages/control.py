"""RUN/control.sock: what other commands ask of a run that trains, and what it answers.

JSON lines over a Unix socket: one request a line, such as {"do": "status"} or {"do": "replace", "old": "1", "new": "redis://..."}, and one answer
a line: the fields of the request's answer below, or {"error": "..."}.
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import ClassVar, Generic, Literal, TypeVar, get_args

from foreload.base.codec import to_json
from foreload.cache.protocol.shards.shard_status import ShardSnapshot
from foreload.cache.repair.findings import Scrubbed
from foreload.trainer.cluster.messages.codec import of_json
from foreload.trainer.cluster.messages.trainers import HeldRows
from foreload.trainer.errors import MessageError, RunError
from foreload.trainer.run.directory import CONTROL
from foreload.trainer.run.shard_change import Change

_MALFORMED = 'a request is a line such as {"do": "status"}'


@dataclass(frozen=True, slots=True)
class CopyStatus:
    """A copy of a lane, on a trainer that does not host it: slots seeded, of how many (0 where it has not reported); complete: it lacks nothing."""

    lane: int
    trainer: int
    slots: int
    of: int
    complete: bool


@dataclass(frozen=True, slots=True)
class RunStatus:
    """How a training is. lanes: of each, the trainer; trainers: process ids by number, of those that the launcher
    started; shards: how they are for all trainers together, none while no trainer has reported any. members: the trainers of the term; copies: of
    lanes, none where one trainer has each.
    """

    state: Literal["starting", "training"]
    step: int
    term: int
    lanes: tuple[int, ...]
    trainers: dict[int, int]
    shards: ShardSnapshot
    members: tuple[int, ...] = ()
    copies: tuple[CopyStatus, ...] = ()

    @property
    def exposed(self) -> list[int]:
        """The lanes whose trainer cannot be lost now: no other has a complete copy."""
        whole = {copy.lane for copy in self.copies if copy.complete}
        return [lane for lane in range(len(self.lanes)) if lane not in whole]


@dataclass(frozen=True, slots=True)
class Stopping:
    """A clean stop is asked for."""

    stopping: Literal[True] = True


@dataclass(frozen=True, slots=True)
class Replacing:
    """A server is about to take a shard's place. replacing: the shard's number; by: the server's URL, without password."""

    replacing: int
    by: str


@dataclass(frozen=True, slots=True)
class MoveBegun:
    """Rows are about to move. version: of the placement that says where to; joining, leaving: the numbers of shards."""

    version: int
    joining: tuple[int, ...]
    leaving: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ScrubBegun:
    """A scrub is begun; its number."""

    scrub: int


@dataclass(frozen=True, slots=True)
class ScrubProgress:
    """How far the last scrub is: done, for all trainers; stripes of those that have reported it, and what each reported."""

    done: bool
    stripes: int
    trainers: tuple[Scrubbed, ...]


@dataclass(frozen=True, slots=True)
class RowCountsAnswer:
    """What each trainer counts; nothing where one does not answer in time."""

    trainers: tuple[HeldRows, ...]


@dataclass(frozen=True, slots=True)
class ScaleBegun:
    """Another number of trainers is on its way: which change it is, counted from 1, and from how many to how many."""

    number: int
    before: int
    after: int


@dataclass(frozen=True, slots=True)
class ScaleProgress:
    """How far that is. trainers: how many train; wanted: how many are to; starting: how many are not members yet; lanes_to_move: how many lanes are
    not yet where they are to be; done: nothing of it is left; failed: why it will not come to that.
    """

    trainers: int
    wanted: int
    starting: int
    lanes_to_move: int
    done: bool
    failed: str | None = None


@dataclass(frozen=True, slots=True)
class CheckpointBegun:
    """A checkpoint is to be saved; the number of the request."""

    checkpoint: int


@dataclass(frozen=True, slots=True)
class CheckpointProgress:
    """What became of it. done: it is over; path: of the checkpoint, where there is one; failed: why there is none."""

    done: bool
    path: str | None = None
    failed: str | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """What was asked for cannot be."""

    error: str


_Answer = TypeVar("_Answer")


class Asks(Generic[_Answer]):
    """A request, whose answer is of the class `answer` or Refused. do: what it is called on the wire."""

    __slots__ = ()
    do: ClassVar[str]
    answer: ClassVar[type]


@dataclass(frozen=True, slots=True)
class AskStatus(Asks[RunStatus]):
    """How is the training?"""

    do = "status"
    answer = RunStatus


@dataclass(frozen=True, slots=True)
class AskStop(Asks[Stopping]):
    """Stop cleanly."""

    do = "stop"
    answer = Stopping


@dataclass(frozen=True, slots=True)
class AskReplace(Asks[Replacing]):
    """Have a server take the place of a store shard's. old: URL or number of the shard; new: URL."""

    do = "replace"
    answer = Replacing
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class AskMove(Asks[MoveBegun]):
    """Have shards added, or one removed or moved; change, shard, urls: as in `migrate.ShardChange`."""

    do = "move"
    answer = MoveBegun
    change: Change
    shard: str = ""
    urls: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AskScrub(Asks[ScrubBegun]):
    """Begin a scrub. rows: the folder in RUN/scrub that says which rows there are."""

    do = "scrub"
    answer = ScrubBegun
    rows: str


@dataclass(frozen=True, slots=True)
class AskScrubbed(Asks[ScrubProgress]):
    """How far is the last scrub?"""

    do = "scrubbed"
    answer = ScrubProgress


@dataclass(frozen=True, slots=True)
class AskRowCounts(Asks[RowCountsAnswer]):
    """What do the stores hold?"""

    do = "row_counts"
    answer = RowCountsAnswer


@dataclass(frozen=True, slots=True)
class AskScale(Asks[ScaleBegun]):
    """Train with so many trainers from now on."""

    do = "scale"
    answer = ScaleBegun
    trainers: int


@dataclass(frozen=True, slots=True)
class AskScaled(Asks[ScaleProgress]):
    """How far is that change of the number of trainers?"""

    do = "scaled"
    answer = ScaleProgress
    number: int


@dataclass(frozen=True, slots=True)
class AskCheckpoint(Asks[CheckpointBegun]):
    """Save a checkpoint. to: the folder of checkpoints, absolute; None: the run's."""

    do = "checkpoint"
    answer = CheckpointBegun
    to: str | None = None


@dataclass(frozen=True, slots=True)
class AskCheckpointed(Asks[CheckpointProgress]):
    """What became of the checkpoint that was asked for?"""

    do = "checkpointed"
    answer = CheckpointProgress
    number: int


_Repair = AskReplace | AskMove | AskScrub | AskScrubbed | AskRowCounts
_RepairAnswer = Replacing | MoveBegun | ScrubBegun | ScrubProgress | RowCountsAnswer
ControlRequest = AskStatus | AskStop | _Repair | AskScale | AskScaled | AskCheckpoint | AskCheckpointed
Answer = RunStatus | Stopping | _RepairAnswer | ScaleBegun | ScaleProgress | CheckpointBegun | CheckpointProgress | Refused

_REQUESTS: dict[str, type[ControlRequest]] = {kind.do: kind for kind in get_args(ControlRequest)}


def request_of(line: bytes) -> ControlRequest:
    """What a line of a client asks. Raises MessageError for what is no request."""
    try:
        fields = json.loads(line)
        do = fields.pop("do")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:  # the last, of JSON nested too deeply
        raise MessageError(_MALFORMED) from error
    if not isinstance(do, str) or do not in _REQUESTS:
        raise MessageError(f"cannot do {do!r}; there are {', '.join(_REQUESTS)}")
    try:
        return of_json(fields, _REQUESTS[do])
    except MessageError as error:
        raise MessageError(f"{do}: {error}") from error


def training_status(run: Path) -> RunStatus | None:
    """How a training is; None where nothing trains. Raises RunError and MessageError."""
    answer = ask(run, AskStatus())
    if isinstance(answer, Refused):
        raise RunError(f"run {run}: {answer.error}")
    return answer


def ask(run: Path, request: Asks[_Answer], timeout: timedelta = timedelta(seconds=5)) -> _Answer | Refused | None:
    """Ask a training run through its control socket; None if nothing trains there, or no more.

    Raises RunError if it does not answer in time, MessageError for an answer that is none, as of another version.
    """
    # A link leads to the socket where the run's own path is too long for one.
    path = os.path.realpath(run / CONTROL)
    line = json.dumps({"do": request.do} | to_json(request)).encode()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout.total_seconds())
        try:
            connection.connect(path)
        except OSError:
            return None
        try:
            connection.sendall(line + b"\n")
            with connection.makefile("r", encoding="utf-8") as answers:
                answer = answers.readline()
        except TimeoutError as error:
            raise RunError(
                f"run {run}: is being trained, but its launcher does not answer for {timeout.total_seconds():g} s; is that process stopped?"
            ) from error
        except OSError:
            return None
    if not answer:  # it ended meanwhile
        return None
    try:
        fields = json.loads(answer)
    except RecursionError as error:
        raise MessageError(f"run {run}: its answer is nested too deeply to be one") from error
    except ValueError:  # it ended while it answered
        return None
    if isinstance(fields, dict) and "error" in fields:
        return of_json(fields, Refused)
    typed: _Answer = of_json(fields, request.answer)
    return typed
