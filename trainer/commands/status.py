"""`foreload status`: report how far a run is.

If the run trains, the report also shows which trainer has which lanes and replicas, and whether the
run would survive the loss of a trainer now.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from foreload.base.codec import LeftOut
from foreload.trainer.adjusting.size import Size
from foreload.trainer.cluster.messages.control import RunStatus, training_status
from foreload.trainer.errors import after_step
from foreload.trainer.run.directory import Run
from foreload.trainer.run.event_log import Adjusted, AdjustmentJudged, read_events


@dataclass(frozen=True, slots=True)
class TrainerLanes:
    """The lanes that a trainer hosts.

    Attributes:
        pid: the process of the trainer. If None, the trainer runs on another host or under a
            scheduler.
    """

    trainer: int
    pid: int | None
    lanes: tuple[int, ...]

    def text(self) -> str:
        """Return the trainer as one line."""
        process = "on another host, or under a scheduler" if self.pid is None else f"process {self.pid}"
        return f"trainer {self.trainer}  {process}  {_lanes(self.lanes)}"


@dataclass(frozen=True, slots=True)
class SeededReplica:
    """A replica of a lane, and how much of it has been seeded.

    Attributes:
        trainer: the trainer that holds the replica.
        slots: the number of slots that have been seeded.
        of: the number of slots in total; 0 if seeding has not begun.
    """

    trainer: int
    slots: int
    of: int
    complete: bool

    def text(self) -> str:
        """Describe the replica."""
        if self.complete:
            return f"trainer {self.trainer}"
        return f"trainer {self.trainer} ({f'{self.slots:,} of {self.of:,} slots seeded' if self.of else 'not seeded yet'})"


@dataclass(frozen=True, slots=True)
class LaneHolders:
    """The trainer that hosts a lane, and the replicas of the lane."""

    lane: int
    trainer: int
    copies: tuple[SeededReplica, ...]

    def text(self) -> str:
        """Return the lane as one line."""
        return f"lane {self.lane}  trainer {self.trainer}  copies: {', '.join(copy.text() for copy in self.copies) or 'none'}"


@dataclass(frozen=True, slots=True)
class LastChange:
    """The last change that --auto made.

    Attributes:
        trainers: the number of trainers after it.
        shards: the number of store shards after it.
        step: the step after which it began.
        reason: why it was made.
        gain: by which share it was found to make steps faster, or None while that is not known.
    """

    trainers: int
    shards: int
    step: int
    reason: str
    gain: float | None

    def text(self) -> str:
        """Return the change as one line."""
        found = "" if self.gain is None else f"; steps are {abs(self.gain):.0%} {'faster' if self.gain >= 0 else 'slower'} since"
        size = Size(self.trainers, self.shards)
        return f"changed by --auto {after_step(self.step)}, to {size}: {self.reason}{found}"


@dataclass(frozen=True, slots=True)
class Status:
    """How far a run is.

    The fields from `survives` on are for a run that trains; otherwise they are None or empty.

    Attributes:
        state: "starting", "training", "broken off" (the run crashed), "kept", "stopped", "ended" or
            "never trained".
        step: the last step that all trainers have finished. If None, no step has been trained.
        survives: whether the run would survive the loss of any one trainer now.
        shards: the number of store shards in each state.
        changed: the last change that --auto made, if it made any.
    """

    run: str
    state: str
    step: int | None
    term: int
    survives: bool | None = None
    trainers: tuple[TrainerLanes, ...] = ()
    lanes: tuple[LaneHolders, ...] = ()
    shards: dict[str, int] = field(default_factory=dict)
    changed: LeftOut[LastChange | None] = None

    def text(self) -> str:
        """Return the report for the terminal."""
        after = "" if self.step is None else f" after step {self.step}"
        lines = [f"run {self.run}: {self.state}{after}, term {self.term}"]
        lines += [trainer.text() for trainer in self.trainers] + [lane.text() for lane in self.lanes]
        if self.shards:
            lines.append(f"store shards: {', '.join(f'{count} {state}' for state, count in self.shards.items())}")
        if self.changed is not None:
            lines.append(self.changed.text())
        if self.survives is False:
            exposed = tuple(one.lane for one in self.lanes if not any(copy.complete for copy in one.copies))
            lines.append(
                f"the run would not survive the loss of a trainer now: no other trainer has a complete copy of {_lanes(exposed)}"
            )
        return "\n".join(lines)


def run(path: str) -> Status:
    """Get the status from the run if it trains, otherwise from its folder.

    Raises:
        RunError: there is no run at `path`, or the run does not answer.
        MessageError: the run's answer is malformed.
    """
    asked = Run.open(path)
    training = training_status(asked.path)
    if training is not None:
        return replace(_of_training(path, training), changed=_last_change(asked))
    status = asked.status
    state: str = "never trained" if status is None else "broken off" if status.state == "training" else status.state
    if asked.keeps_lanes:
        state = "kept"
    started = status is not None and status.step >= asked.manifest.stages[0].first_step
    step, term = (None, 0) if status is None else (status.step if started else None, status.term)
    return Status(path, state, step, term, changed=_last_change(asked))


def _last_change(asked: Run) -> LastChange | None:
    """Return the last change by --auto from the run's events."""
    last: LastChange | None = None
    for event in read_events(asked.path):
        with suppress(KeyError, TypeError, ValueError):
            if event["kind"] == Adjusted.kind and not event["dry_run"]:
                last = LastChange(int(event["trainers"]), int(event["shards"]), int(event["step"]), str(event["cause"]), None)
            elif event["kind"] == AdjustmentJudged.kind and last is not None:
                last = replace(last, gain=float(event["gain"]))
    return last


def _of_training(path: str, training: RunStatus) -> Status:
    hosts = training.lanes
    shards = Counter(shard.state for shard in training.shards.shards)
    return Status(
        path,
        training.state,
        training.step if training.step >= 0 else None,
        training.term,
        survives=not training.exposed,
        trainers=tuple(
            TrainerLanes(
                trainer, training.trainers.get(trainer), tuple(lane for lane, host in enumerate(hosts) if host == trainer)
            )
            for trainer in training.members
        ),
        lanes=tuple(
            LaneHolders(
                lane,
                host,
                tuple(SeededReplica(one.trainer, one.slots, one.of, one.complete) for one in training.copies if one.lane == lane),
            )
            for lane, host in enumerate(hosts)
        ),
        shards={state: shards[state] for state in sorted(shards)},
    )


def _lanes(lanes: Sequence[int]) -> str:
    return f"lane {', '.join(map(str, lanes))}" if lanes else "no lane"
