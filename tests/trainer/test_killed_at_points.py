"""`foreload train --copies N` whose trainers are killed at every named point: the others go on, and the model is that of an undisturbed run."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from command_line import Command
from held import Hold
from small_job import arguments, summary, synthetic_schedule, train_undisturbed

from foreload.trainer.cluster.coordinator.terms import first_term, next_term
from foreload.trainer.cluster.messages.control import AskStop, Stopping, ask
from foreload.trainer.cluster.messages.facts import Term
from foreload.trainer.cluster.messages.faults import (
    BEST_POINTS,
    CHECKPOINT_POINTS,
    END_POINTS,
    KEPT_POINTS,
    STEP_POINTS,
    STORE_POINTS,
    TAKEOVER_POINTS,
    TRAINER_POINTS,
    Fault,
    FaultPoints,
    TrainerFault,
)
from foreload.trainer.cluster.messages.trainers import TermLeft
from foreload.trainer.run.directory import METRICS, Run

MOVE_POINTS = ("rows to move read", "rows copied", "rows moved")  # at which test_migration_commands.py has trainers killed
TRAINERS, LANES, STEPS = 4, 4, 82
PLAIN, PARITY = "local:1", "local:3"


@pytest.fixture(scope="module")
def schedule(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two epochs in four lanes, with evaluation after each, and few slots."""
    return synthetic_schedule(
        tmp_path_factory.mktemp("schedule"), 5700, lanes=LANES, slots=500, further="--eval-fraction 0.1 --epochs 2"
    )


@pytest.fixture(scope="module")
def undisturbed(schedule: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with one trainer that nothing happened to."""
    run = train_undisturbed(schedule, tmp_path_factory.mktemp("run"))
    assert summary(run)["steps"] == STEPS
    return run


def rows_of(run: Path) -> list[tuple[int, ...]]:
    """Of each step in the run's metrics.jsonl, and of the whole run in its summary.json, the figures that the schedule determines."""
    lines = [json.loads(line) for line in (run / METRICS).read_text(encoding="utf-8").splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    return [
        tuple(told[name] for name in ("samples", "rows_used", "rows_arrived", "rows_fetched", "rows_written_back"))
        for told in (*steps, summary(run))
    ]


def killed(trainer: int, point: str, step: int) -> TrainerFault:
    return TrainerFault(trainer, point, step, signal.SIGKILL)


def check_faults(
    schedule: Path,
    undisturbed: Path,
    run: Path,
    faults: Sequence[TrainerFault | Fault],
    store: str,
    copies: int,
) -> str:
    """Train with these faults, each of which kills a trainer or a shard; returns what was told of it."""
    further = ["--store", store, "--trainers", str(TRAINERS), "--copies", str(copies), "--peer-timeout", "60", "--digest"]
    if all(isinstance(fault, TrainerFault) for fault in faults):
        further.append("--no-restart")  # else store shards are started again, and so are trainers
    status, _, err = Command(*arguments(schedule, run, *further), faults=faults).end()
    assert status == 0, err
    lost = [int(trainer) for trainer in re.findall(r"trainer (\d): lost \(was killed by SIGKILL\)", err)]
    of_trainers = [fault for fault in faults if isinstance(fault, TrainerFault)]
    assert set(lost) <= {fault.trainer for fault in of_trainers}, err
    # One that has ended may be missed by nobody.
    assert set(lost) >= {fault.trainer for fault in of_trainers if fault.point != "ended"}, err
    assert len(lost) == len(set(lost))
    assert summary(run)["digest"] == summary(undisturbed)["digest"]
    assert summary(run)["steps"] == STEPS
    assert rows_of(run) == rows_of(undisturbed)
    assert "Traceback" not in err
    assert not list(run.rglob("*.tmp"))
    return err


def successor(gone: int, copies: int) -> int:
    """Who takes over the lane of the first trainer that is gone."""
    term = first_term(1, range(TRAINERS), LANES, copies, -1)
    there = [trainer for trainer in range(TRAINERS) if trainer != gone]

    def left(trainer: int, of: Term = term) -> TermLeft:
        return TermLeft(1, 5, tuple(lane for lane, holders in enumerate(of.copies) if trainer in holders), False, "")

    return next_term(term, {trainer: left(trainer) for trainer in there}, copies).hosts[gone]


def later(trainer: int, points: Sequence[str], first: int, apart: int) -> list[TrainerFault]:
    """Trainers from `trainer` on are killed one after the other, each at its point."""
    return [killed(trainer + place, point, first + apart * place) for place, point in enumerate(points)]


ONE_BY_ONE = [
    (PARITY, later(0, ("batch logged", "exchanged", "replicated"), 10, 20)),
    (PLAIN, later(1, ("before fetch", "rows staged", "early rows sent"), 10, 20)),
    (PARITY, later(0, ("forward done", "gradients sent", "committed"), 15, 20)),
    (PLAIN, later(1, ("rows applied", "dense part applied", "evaluating"), 15, 15)),
    (PARITY, later(1, ("parity leaves", "parity acknowledged", "data leaves"), 10, 20)),
    (PARITY, later(0, ("data acknowledged", "fetch leaves", "batch logged"), 10, 20)),
    (PLAIN, later(1, ("data leaves", "data acknowledged", "fetch leaves"), 10, 20)),
    (PARITY, later(1, ("evaluating", "committed", "data acknowledged"), 15, 15)),
]
"""Three trainers each, far enough apart that others have whole copies again."""
AT_THE_END = [
    (PARITY, [killed(3, "last write-back", 10), killed(2, "last rows written", 10), killed(0, "dense part written", 10)]),
    (PLAIN, [killed(0, "dense part written", 10), killed(3, "ended", 10), killed(2, "last rows written", 10)]),
    (PARITY, [killed(1, "last rows written", 10), killed(0, "ended", 10), killed(3, "last write-back", 10)]),
    (PLAIN, [killed(0, "last write-back", 10), killed(1, "dense part written", 10)]),
]
"""All copies are everywhere: no step comes any more in which they could be seeded."""
TAKEOVERS = [
    *((store, point) for store in (PLAIN, PARITY) for point in ("term over", "left", "rolled back", "group formed", "ready")),
    *((PLAIN, point) for point in ("fenced", "rows looked at", "marker written")),
    *((PARITY, point) for point in TAKEOVER_POINTS if point not in ("term over", "left", "rolled back", "group formed", "ready")),
    (PARITY, "base read"),
]  # fmt: skip


def test_every_point_is_there() -> None:
    named = [fault.point for _, faults in (*ONE_BY_ONE, *AT_THE_END) for fault in faults]
    assert {*named, *(point for _, point in TAKEOVERS), "rows rebuilt", *MOVE_POINTS} == set(TRAINER_POINTS) - {
        *CHECKPOINT_POINTS,
        *BEST_POINTS,
        *KEPT_POINTS,
    }
    assert not set(STEP_POINTS) & {*STORE_POINTS, *END_POINTS, *TAKEOVER_POINTS}
    with pytest.raises(ValueError, match="point: must be one of before fetch, "):
        killed(0, "rows lost", 3)


def test_a_fault_is_injected_once_and_not_before_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    monkeypatch.setattr(signal, "pthread_kill", lambda thread, number: sent.append(number))
    told: list[TrainerFault] = []
    faults = [killed(1, "exchanged", 3), killed(0, "exchanged", 3), killed(1, "left", 0), killed(1, "rows staged", 4)]
    points = FaultPoints(faults, 1, told.append)
    points.reach_point("left")  # no step has begun
    points.in_step("exchanged", 2)
    assert not sent
    points.reach_point("left")
    points.in_step("exchanged", 5)
    points.in_step("exchanged", 6)
    points.in_traffic("rows staged")
    assert told == [faults[2], faults[0]]
    assert sent == [signal.SIGKILL] * 2


def _covered(cases: Sequence[object], first: int) -> list[object]:
    """The first ones run in `make test`."""
    return [pytest.param(*case, marks=() if place < first else pytest.mark.full) for place, case in enumerate(cases)]  # type: ignore[misc]


@pytest.mark.parametrize(("store", "faults"), _covered(ONE_BY_ONE, 1))
def test_trainers_are_killed_one_after_the_other(
    schedule: Path, undisturbed: Path, tmp_path: Path, store: str, faults: list[TrainerFault]
) -> None:
    check_faults(schedule, undisturbed, tmp_path / "run", faults, store, copies=2)
    assert Run.open(tmp_path / "run").saved_status().term == 1 + len(faults)


@pytest.mark.parametrize(("store", "faults"), _covered(AT_THE_END, 0))
def test_trainers_are_killed_at_the_end(
    schedule: Path, undisturbed: Path, tmp_path: Path, store: str, faults: list[TrainerFault]
) -> None:
    check_faults(schedule, undisturbed, tmp_path / "run", faults, store, copies=4)


@pytest.mark.parametrize(("store", "point"), _covered(TAKEOVERS, 1))
def test_who_takes_lanes_over_is_killed_meanwhile(
    schedule: Path, undisturbed: Path, tmp_path: Path, store: str, point: str
) -> None:
    gone = 2
    faults = [killed(gone, "gradients sent", 20), killed(successor(gone, 3), point, 0)]
    check_faults(schedule, undisturbed, tmp_path / "run", faults, store, copies=3)


@pytest.mark.full
def test_a_trainer_is_killed_while_a_shard_is_rebuilt(schedule: Path, undisturbed: Path, tmp_path: Path) -> None:
    faults: list[Fault | TrainerFault] = [Fault(20, 1, signal.SIGKILL), killed(2, "rows rebuilt", 20), killed(0, "committed", 60)]
    err = check_faults(schedule, undisturbed, tmp_path / "run", faults, PARITY, copies=2)
    assert "store shard 1: is whole again" in err


@pytest.mark.full
@pytest.mark.parametrize("point", ["committed", "parity leaves", "data leaves"])
def test_a_trainer_and_a_shard_are_killed_in_the_same_step(schedule: Path, undisturbed: Path, tmp_path: Path, point: str) -> None:
    faults: list[Fault | TrainerFault] = [Fault(20, 1, signal.SIGKILL), killed(0, point, 22), killed(2, point, 50)]
    err = check_faults(schedule, undisturbed, tmp_path / "run", faults, PARITY, copies=2)
    assert "store shard 1: is whole again" in err


@pytest.mark.full
@pytest.mark.parametrize("point", ["committed", "exchanged", "data leaves"])
def test_two_that_have_a_lane_are_killed_in_the_same_step_and_a_third_has_it(
    schedule: Path, undisturbed: Path, tmp_path: Path, point: str
) -> None:
    check_faults(schedule, undisturbed, tmp_path / "run", [killed(0, point, 20), killed(1, point, 20)], PARITY, copies=3)


@pytest.mark.full
@pytest.mark.parametrize("store", [PLAIN, PARITY])
def test_where_all_that_have_a_lane_are_killed_the_run_ends_and_a_resume_begins_where_rows_were_saved_last(
    schedule: Path, undisturbed: Path, tmp_path: Path, store: str, hold: Hold
) -> None:
    run = tmp_path / "run"
    command = arguments(schedule, run, "--store", store, "--trainers", str(TRAINERS), "--copies", "2", "--digest")
    both = [killed(0, "committed", 20), killed(1, "committed", 20)]
    status, _, err = Command(*command, faults=both).end()
    assert status == 3
    how = "was killed by SIGKILL"
    assert (
        f"trainer 0 ({how}), 1 ({how}): lost, and with it the last steps of lane 0, 1, of which no other trainer has a complete copy"
        in err
    )
    # Nothing was saved before.
    job = hold([*command, "--resume"], 30)
    assert ask(run, AskStop()) == Stopping()
    status, _, err = job.stopped()
    assert status == 0, err
    assert "resumed from the beginning: the run has crashed since" in err
    stopped = job.step
    both = [killed(2, "committed", 70), killed(3, "committed", 70)]
    status, _, err = Command(*command, "--resume", faults=both).end()
    assert status == 3, err
    status, _, err = Command(*command, "--resume").end()
    assert status == 0, err
    assert f"resumed after step {stopped}: the run has crashed since" in err
    assert summary(run)["digest"] == summary(undisturbed)["digest"]
    assert rows_of(run)[-1] == rows_of(undisturbed)[-1]
