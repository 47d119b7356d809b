"""`foreload status`: report how far a run is.

If the run trains, the report also shows which trainer has which lanes and replicas, and whether the
run would survive the loss of a trainer now.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from foreload.trainer.cluster.messages.control import RunStatus, training_status
from foreload.trainer.run.directory import Run


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
class Status:
    """How far a run is.

    The fields from `survives` on are for a run that trains; otherwise they are None or empty.

    Attributes:
        state: "starting", "training", "broken off" (the run crashed), "kept", "stopped", "ended" or
            "never trained".
        step: the last step that all trainers have finished. If None, no step has been trained.
        survives: whether the run would survive the loss of any one trainer now.
        shards: the number of store shards in each state.
    """

    run: str
    state: str
    step: int | None
    term: int
    survives: bool | None = None
    trainers: tuple[TrainerLanes, ...] = ()
    lanes: tuple[LaneHolders, ...] = ()
    shards: dict[str, int] = field(default_factory=dict)

    def text(self) -> str:
        """Return the report for the terminal."""
        after = "" if self.step is None else f" after step {self.step}"
        lines = [f"run {self.run}: {self.state}{after}, term {self.term}"]
        lines += [trainer.text() for trainer in self.trainers] + [lane.text() for lane in self.lanes]
        if self.shards:
            lines.append(f"store shards: {', '.join(f'{count} {state}' for state, count in self.shards.items())}")
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
        return _of_training(path, training)
    status = asked.status
    state: str = "never trained" if status is None else "broken off" if status.state == "training" else status.state
    if asked.keeps_lanes:
        state = "kept"
    started = status is not None and status.step >= asked.manifest.stages[0].first_step
    return Status(path, state, status.step if status is not None and started else None, 0 if status is None else status.term)


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
