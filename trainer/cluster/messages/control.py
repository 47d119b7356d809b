"""RUN/control.sock: requests of other commands to a run that trains, and the answers.

Both are lines of JSON over a Unix socket. A line asks for one thing, such as {"do": "status"} or
{"do": "replace", "old": "1", "new": "redis://..."}. The answer is one line: the fields of the
request's answer class below, or {"error": "..."}.
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
    """A replica of a lane, on a trainer that does not host the lane.

    Attributes:
        slots: Number of slots that are seeded.
        of: Number of slots in all; 0 if the trainer has not reported yet.
        complete: Whether the replica lacks nothing.
    """

    lane: int
    trainer: int
    slots: int
    of: int
    complete: bool


@dataclass(frozen=True, slots=True)
class RunStatus:
    """The status of a run that trains.

    Attributes:
        lanes: The trainer of each lane.
        trainers: Process ids, by trainer, of the trainers that the launcher started.
        shards: The store shards as all trainers together see them; empty while no trainer has
            reported.
        members: The trainers of the term.
        copies: The replicas of lanes; empty if lanes have no replicas.
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
        """The lanes without a complete replica, whose trainer must not be lost now."""
        whole = {copy.lane for copy in self.copies if copy.complete}
        return [lane for lane in range(len(self.lanes)) if lane not in whole]


@dataclass(frozen=True, slots=True)
class Stopping:
    """Answer: the clean stop is requested."""

    stopping: Literal[True] = True


@dataclass(frozen=True, slots=True)
class Replacing:
    """Answer: a server is about to replace a shard's server.

    Attributes:
        replacing: Number of the shard.
        by: URL of the new server, without password.
    """

    replacing: int
    by: str


@dataclass(frozen=True, slots=True)
class MoveBegun:
    """Answer: a migration is about to begin.

    Attributes:
        version: Version of the placement to which rows migrate.
        joining: Numbers of the shards that are added.
        leaving: Numbers of the shards that are removed.
    """

    version: int
    joining: tuple[int, ...]
    leaving: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ScrubBegun:
    """Answer: the scrub of this number has begun."""

    scrub: int


@dataclass(frozen=True, slots=True)
class ScrubProgress:
    """Answer: the progress of the last scrub.

    Attributes:
        done: Whether all trainers have finished.
        stripes: Number of stripes of the trainers that have reported.
        trainers: The report of each of these trainers.
    """

    done: bool
    stripes: int
    trainers: tuple[Scrubbed, ...]


@dataclass(frozen=True, slots=True)
class RowCountsAnswer:
    """Answer: the rows that each trainer counts, or nothing if one does not answer in time."""

    trainers: tuple[HeldRows, ...]


@dataclass(frozen=True, slots=True)
class ScaleBegun:
    """Answer: the change to another number of trainers has begun.

    Attributes:
        number: Number of the change, counted from 1.
        before: Number of trainers before.
        after: Number of trainers wanted.
    """

    number: int
    before: int
    after: int


@dataclass(frozen=True, slots=True)
class ScaleProgress:
    """Answer: the progress of a change of the number of trainers.

    Attributes:
        trainers: Number of trainers that train.
        wanted: Number of trainers that are wanted.
        starting: Number of trainers that have started but are not members yet.
        lanes_to_move: Number of lanes that are not yet on their new trainer.
        done: Whether the change is complete.
        failed: Why the change will not be completed, or None.
    """

    trainers: int
    wanted: int
    starting: int
    lanes_to_move: int
    done: bool
    failed: str | None = None


@dataclass(frozen=True, slots=True)
class CheckpointBegun:
    """Answer: a checkpoint will be saved, for the request of this number."""

    checkpoint: int


@dataclass(frozen=True, slots=True)
class CheckpointProgress:
    """Answer: the progress of a requested checkpoint.

    Attributes:
        done: Whether the request is over, with or without success.
        path: Path of the checkpoint, if it was saved.
        failed: Why no checkpoint was saved, or None.
    """

    done: bool
    path: str | None = None
    failed: str | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """Answer: the request is refused."""

    error: str


_Answer = TypeVar("_Answer")


class Asks(Generic[_Answer]):
    """A request.

    Attributes:
        do: Name of the request on the wire.
        answer: Class of the answer, unless it is Refused.
    """

    __slots__ = ()
    do: ClassVar[str]
    answer: ClassVar[type]


@dataclass(frozen=True, slots=True)
class AskStatus(Asks[RunStatus]):
    """Request the status of the training."""

    do = "status"
    answer = RunStatus


@dataclass(frozen=True, slots=True)
class AskStop(Asks[Stopping]):
    """Request a clean stop."""

    do = "stop"
    answer = Stopping


@dataclass(frozen=True, slots=True)
class AskReplace(Asks[Replacing]):
    """Request that a new server replaces the server of a store shard.

    Attributes:
        old: URL or number of the shard.
        new: URL of the new server.
    """

    do = "replace"
    answer = Replacing
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class AskMove(Asks[MoveBegun]):
    """Request to add shards, or to remove or move a shard.

    Attributes:
        change, shard, urls: As in `run.shard_change.ShardChange`.
    """

    do = "move"
    answer = MoveBegun
    change: Change
    shard: str = ""
    urls: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AskScrub(Asks[ScrubBegun]):
    """Request a scrub.

    Attributes:
        rows: Folder in RUN/scrub that lists the rows that exist.
    """

    do = "scrub"
    answer = ScrubBegun
    rows: str


@dataclass(frozen=True, slots=True)
class AskScrubbed(Asks[ScrubProgress]):
    """Request the progress of the last scrub."""

    do = "scrubbed"
    answer = ScrubProgress


@dataclass(frozen=True, slots=True)
class AskRowCounts(Asks[RowCountsAnswer]):
    """Request the number of rows that the store shards hold."""

    do = "row_counts"
    answer = RowCountsAnswer


@dataclass(frozen=True, slots=True)
class AskScale(Asks[ScaleBegun]):
    """Request another number of trainers, or another trainer in the place of one.

    Attributes:
        trainers: How many there are to be from now on. If None, as many as before.
        replaces: The number of the trainer whose place another one takes, or None.
    """

    do = "scale"
    answer = ScaleBegun
    trainers: int | None
    replaces: int | None = None


@dataclass(frozen=True, slots=True)
class AskScaled(Asks[ScaleProgress]):
    """Request the progress of change `number` of the number of trainers."""

    do = "scaled"
    answer = ScaleProgress
    number: int


@dataclass(frozen=True, slots=True)
class AskCheckpoint(Asks[CheckpointBegun]):
    """Request a checkpoint.

    Attributes:
        to: Absolute path of the folder of checkpoints. If None, the run's own folder.
    """

    do = "checkpoint"
    answer = CheckpointBegun
    to: str | None = None


@dataclass(frozen=True, slots=True)
class AskCheckpointed(Asks[CheckpointProgress]):
    """Request the progress of the checkpoint of request `number`."""

    do = "checkpointed"
    answer = CheckpointProgress
    number: int


_Repair = AskReplace | AskMove | AskScrub | AskScrubbed | AskRowCounts
_RepairAnswer = Replacing | MoveBegun | ScrubBegun | ScrubProgress | RowCountsAnswer
ControlRequest = AskStatus | AskStop | _Repair | AskScale | AskScaled | AskCheckpoint | AskCheckpointed
Answer = RunStatus | Stopping | _RepairAnswer | ScaleBegun | ScaleProgress | CheckpointBegun | CheckpointProgress | Refused

_REQUESTS: dict[str, type[ControlRequest]] = {kind.do: kind for kind in get_args(ControlRequest)}


def request_of(line: bytes) -> ControlRequest:
    """Decode a client's line to a request. Raises MessageError for anything else."""
    try:
        fields = json.loads(line)
        do = fields.pop("do")
    # RecursionError is for JSON nested too deeply.
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise MessageError(_MALFORMED) from error
    if not isinstance(do, str) or do not in _REQUESTS:
        raise MessageError(f"cannot do {do!r}; use one of {', '.join(_REQUESTS)}")
    try:
        return of_json(fields, _REQUESTS[do])
    except MessageError as error:
        raise MessageError(f"{do}: {error}") from error


def training_status(run: Path) -> RunStatus | None:
    """Return the status of a training run, or None if nothing trains there.

    Raises RunError and MessageError as `ask` does, and RunError if the run refuses to answer.
    """
    answer = ask(run, AskStatus())
    if isinstance(answer, Refused):
        raise RunError(f"run {run}: {answer.error}")
    return answer


def ask(run: Path, request: Asks[_Answer], timeout: timedelta = timedelta(seconds=5)) -> _Answer | Refused | None:
    """Send a request to a training run over its control socket, and return the answer.

    Args:
        run: Folder of the run.
        request: The request.
        timeout: How long to wait for the answer.

    Returns:
        The answer. None if nothing trains there, or training ended before the answer.

    Raises:
        RunError: The run does not answer in time.
        MessageError: The answer is malformed, for example of another version of foreload.
    """
    # If the run's path is too long for a socket, RUN/control.sock is a link to the socket.
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
                f"run {run}: is being trained, but its launcher has not answered for {timeout.total_seconds():g} s; is that process stopped?"
            ) from error
        except OSError:
            return None
    if not answer:  # training ended before the answer
        return None
    try:
        fields = json.loads(answer)
    except RecursionError as error:
        raise MessageError(f"run {run}: its answer is nested too deeply to be valid") from error
    except ValueError:  # training ended in the middle of the answer
        return None
    if isinstance(fields, dict) and "error" in fields:
        return of_json(fields, Refused)
    typed: _Answer = of_json(fields, request.answer)
    return typed
