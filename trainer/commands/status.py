"""`foreload status`: how far a run is, and, while it trains, who has which lanes and copies of them, and whether a loss is survived now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foreload.trainer.cluster.messages.control import RunStatus, training_status
from foreload.trainer.run.directory import Run


def run(path: str) -> dict[str, Any]:
    """Returns {"run", "state", "step", "term", "survives", "trainers", "lanes", "shards"}.

    state: starting, training, broken off, kept, stopped, ended or never trained; step: the last one of all trainers, None before any. Of a run that
    trains, else empty, or None: trainers: {"trainer", "pid", "lanes"}; lanes: {"lane", "trainer", "copies"}, a copy {"trainer", "slots", "of",
    "complete"}; shards: how many are in which state; survives: whether any one trainer can be lost now. Raises RunError and MessageError.
    """
    asked = Run.open(path)
    training = training_status(asked.path)
    if training is not None:
        return {"run": path} | _of_training(training)
    status = asked.status
    state: str = "never trained" if status is None else "broken off" if status.state == "training" else status.state
    if asked.keeps_lanes:
        state = "kept"
    started = status is not None and status.step >= asked.manifest.stages[0].first_step
    return {
        "run": path,
        "state": state,
        "step": status.step if status is not None and started else None,
        "term": 0 if status is None else status.term,
        "survives": None,
        "trainers": [],
        "lanes": [],
        "shards": {},
    }


def _of_training(training: RunStatus) -> dict[str, Any]:
    states = [shard.state for shard in training.shards.shards]
    return {
        "state": training.state,
        "step": training.step if training.step >= 0 else None,
        "term": training.term,
        "survives": not training.exposed,
        "trainers": [
            {
                "trainer": trainer,
                "pid": training.trainers.get(trainer),
                "lanes": [lane for lane, host in enumerate(training.lanes) if host == trainer],
            }
            for trainer in training.members
        ],
        "lanes": [
            {
                "lane": lane,
                "trainer": host,
                "copies": [
                    {"trainer": copy.trainer, "slots": copy.slots, "of": copy.of, "complete": copy.complete}
                    for copy in training.copies
                    if copy.lane == lane
                ],
            }
            for lane, host in enumerate(training.lanes)
        ],
        "shards": {state: states.count(state) for state in sorted(set(states))},
    }


def text(status: Mapping[str, Any]) -> str:
    """What `run` found, for a person."""
    after = "" if status["step"] is None else f" after step {status['step']}"
    lines = [f"run {status['run']}: {status['state']}{after}, term {status['term']}"]
    for one in status["trainers"]:
        pid = "of another host or scheduler" if one["pid"] is None else f"process {one['pid']}"
        lines.append(f"trainer {one['trainer']}  {pid}  {_lanes(one['lanes'])}")
    for lane in status["lanes"]:
        copies = ", ".join(map(_copy, lane["copies"])) or "none"
        lines.append(f"lane {lane['lane']}  trainer {lane['trainer']}  copies: {copies}")
    if status["shards"]:
        counts = ", ".join(f"{count} {state}" for state, count in status["shards"].items())
        lines.append(f"store shards: {counts}")
    if status["survives"] is False:
        exposed = [lane["lane"] for lane in status["lanes"] if not any(copy["complete"] for copy in lane["copies"])]
        lines.append(f"the loss of a trainer is not survived now: no other has all of {_lanes(exposed)}")
    return "\n".join(lines)


def _lanes(lanes: list[int]) -> str:
    return f"lane {', '.join(map(str, lanes))}" if lanes else "no lane"


def _copy(copy: Mapping[str, Any]) -> str:
    if copy["complete"]:
        return f"trainer {copy['trainer']}"
    seeded = f"{copy['slots']:,} of {copy['of']:,} slots seeded" if copy["of"] else "not seeded yet"
    return f"trainer {copy['trainer']} ({seeded})"
