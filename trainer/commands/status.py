"""`foreload status`: how far a run is, and, while it trains, who has which lanes and copies of them, and whether a loss is survived now."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from foreload.trainer.cluster.messages.control import RunStatus, training_status
from foreload.trainer.run.directory import Run


@dataclass(frozen=True, slots=True)
class TrainerLanes:
    """The lanes that a trainer has. pid: None where it runs on another host, or under a scheduler."""

    trainer: int
    pid: int | None
    lanes: tuple[int, ...]

    def text(self) -> str:
        """As a line."""
        process = "of another host or scheduler" if self.pid is None else f"process {self.pid}"
        return f"trainer {self.trainer}  {process}  {_lanes(self.lanes)}"


@dataclass(frozen=True, slots=True)
class SeededReplica:
    """A copy of a lane: how many of its slots are there."""

    trainer: int
    slots: int
    of: int
    complete: bool

    def text(self) -> str:
        """In words."""
        if self.complete:
            return f"trainer {self.trainer}"
        return f"trainer {self.trainer} ({f'{self.slots:,} of {self.of:,} slots seeded' if self.of else 'not seeded yet'})"


@dataclass(frozen=True, slots=True)
class LaneHolders:
    """Who has a lane, and who has copies of it."""

    lane: int
    trainer: int
    copies: tuple[SeededReplica, ...]

    def text(self) -> str:
        """As a line."""
        return f"lane {self.lane}  trainer {self.trainer}  copies: {', '.join(copy.text() for copy in self.copies) or 'none'}"


@dataclass(frozen=True, slots=True)
class Status:
    """state: starting, training, broken off, kept, stopped, ended or never trained; step: the last one of all trainers, None before any.

    Of a run that trains, else empty, or None: trainers; lanes; shards: how many are in which state; survives: whether any one trainer can be lost.
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
        """For a person."""
        after = "" if self.step is None else f" after step {self.step}"
        lines = [f"run {self.run}: {self.state}{after}, term {self.term}"]
        lines += [trainer.text() for trainer in self.trainers] + [lane.text() for lane in self.lanes]
        if self.shards:
            lines.append(f"store shards: {', '.join(f'{count} {state}' for state, count in self.shards.items())}")
        if self.survives is False:
            exposed = tuple(one.lane for one in self.lanes if not any(copy.complete for copy in one.copies))
            lines.append(f"the loss of a trainer is not survived now: no other has all of {_lanes(exposed)}")
        return "\n".join(lines)


def run(path: str) -> Status:
    """Ask the run, or its folder where it does not train. Raises RunError and MessageError."""
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
