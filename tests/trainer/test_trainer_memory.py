"""What a trainer is told to hold at its peak."""

from __future__ import annotations

from dataclasses import replace

import pytest

from foreload.trainer.compute.reports import COLUMNS
from foreload.trainer.resources.job_memory import BASE_BYTES, LaneLoad, TrainerMemory
from foreload.trainer.resources.step_model import Setup, setup_of
from foreload.trainer.run.history import Profile, of_steps

MEMORY = TrainerMemory(columns=33, evaluation_slots=100, batch_size=256, mapped_bytes=1 << 20)
LOAD = LaneLoad(slots=10_000, occupied=8_000, used=900, arrived=100, ended=90)
SETUP = Setup(trainers=2, threads=1, copies=1, shards=3, k=1, r=0, lanes=4, dense=5_000, cores=4)


def test_it_is_the_base_and_what_its_lanes_take() -> None:
    nothing = replace(SETUP, lanes=0, shards=0, dense=0)
    assert MEMORY.peak_bytes(LOAD, nothing) == BASE_BYTES + MEMORY.mapped_bytes
    # A row of 33 float32 and who it is, in a slot and at the end on its way out; and batches of these rows, as they are made and sent.
    least = 2 * 8_000 * (2 * 4 * 33 + 26)
    assert least < MEMORY.peak_bytes(LOAD, SETUP) - BASE_BYTES - MEMORY.mapped_bytes < 4 * least


@pytest.mark.parametrize(
    ("load", "setup", "snapshots"),
    [
        (replace(LOAD, occupied=9_000), SETUP, False),
        (replace(LOAD, used=1_000), SETUP, False),
        (replace(LOAD, arrived=110), SETUP, False),
        (LOAD, replace(SETUP, trainers=1), False),
        (LOAD, replace(SETUP, copies=2), False),
        (LOAD, replace(SETUP, k=2, r=1), False),
        (LOAD, replace(SETUP, shards=4), False),
        (LOAD, replace(SETUP, dense=6_000), False),
        (LOAD, SETUP, True),
    ],
)
def test_it_grows_with_whatever_a_trainer_has_to_hold(load: LaneLoad, setup: Setup, snapshots: bool) -> None:
    assert MEMORY.peak_bytes(load, setup, snapshots) > MEMORY.peak_bytes(LOAD, SETUP)
    assert replace(MEMORY, averaged=True).peak_bytes(load, setup, snapshots) > MEMORY.peak_bytes(load, setup, snapshots)


def profile(peak_bytes: int, arrived: float = 1_200.0) -> Profile:
    """One of 40 steps; 20 rows more arrive at each than leave."""
    told = {"samples": 256.0, "rows_used": 3_600.0, "rows_arrived": arrived, "rows_written_back": arrived - 20} | {"ms": 5.0}
    steps, stride = of_steps([[told.get(name, 0.0) for name in COLUMNS]] * 40)
    settings = {name: getattr(SETUP, name) for name in ("trainers", "threads", "copies", "shards", "k", "r", "lanes")}
    settings |= {"slots": 10_000, "dense_parameters": 5_000, "local_store": True, "saves_checkpoints": False}
    return Profile(settings, {"cores": 4}, [{"kind": "trainer", "peak_bytes": peak_bytes}], steps, stride)


def test_what_a_like_job_held_beyond_its_lanes_is_the_base() -> None:
    seen = profile(900 << 20)
    known = MEMORY.with_profiles([seen])
    assert known.peak_bytes(LaneLoad.of_profile(seen), setup_of(seen)) == 900 << 20
    # Only 200 slots of each lane were taken then; where all are, there is more.
    assert LaneLoad.of_profile(seen).occupied == 200
    assert known.peak_bytes(LOAD, SETUP) > 900 << 20


def test_a_peak_that_cannot_be_lowers_the_base_so_far_only() -> None:
    assert MEMORY.with_profiles([profile(1 << 20)]).base_bytes == BASE_BYTES // 2
    assert MEMORY.with_profiles([profile(0)]) == MEMORY
