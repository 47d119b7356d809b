"""The promise under losses: store shards are killed in the middle of training, and digest, rows and parity rows are those of an undisturbed run."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from test_exact import FEATURES, LANES
from training import Trained, train

from cache.fence import read_epochs
from cache.local import LocalStores
from cache.namespace import lane_key
from cache.store import Store
from cache.traffic import Traffic
from pipelines import prepare
from pipelines.schedule import Schedule
from trainer import numerics
from trainer.job import TrainJob
from trainer.step import StepReport

Contents = list[list[dict[bytes, bytes]]]
CODES = [(2, 1), (4, 1), (4, 2)]
NAMESPACE = "losses"
DEADLINE_SECONDS = 30


@pytest.fixture(scope="module")
def schedule(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Schedule:
    """Two epochs of every twentieth click in four lanes, with the fewest slots."""
    folder = tmp_path_factory.mktemp("clicks")
    lines = (data / "talkingdata" / "train_sample.csv").read_text().splitlines(keepends=True)
    (folder / "clicks.csv").write_text("".join([lines[0], *lines[1::20]]))
    (folder / "features.toml").write_text(FEATURES)
    given = f"{folder}/clicks.csv --format=csv --features={folder}/features.toml --batch-size=128 --lanes={LANES} --slots=min --epochs=2"
    prepare.run([*given.split(), f"--out={folder}/schedule"])
    return Schedule(folder / "schedule")


@pytest.fixture(autouse=True)
def _arithmetic() -> None:
    numerics.set_up(1)


def job() -> TrainJob:
    return TrainJob.of(
        {
            "schedule": "-", "run": "-", "store": "-", "model": "dlrm", "dim": 8, "model_options": {"bottom": "16-8", "top": "16-1"},
            "row_optimizer": "rowwise_adagrad", "dense_optimizer": "Adam", "namespace": NAMESPACE,
        }
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a training left: its digest, and what every shard holds of each lane, but for markers."""

    trained: Trained
    contents: Contents


def run(
    schedule: Schedule, folder: Path, code: tuple[int, int], trainers: int, losses: dict[int, Callable[[LocalStores], None]]
) -> Outcome:
    """Train on stores of one's own; losses: what happens to the stores after which step."""
    left = dict(losses)
    traffics: list[Traffic] = []

    def on_step(report: StepReport) -> None:
        if report.step in left:
            if report.step == schedule.header.end_step - 1:
                # Another shard than before: that one must be whole again.
                deadline = time.monotonic() + DEADLINE_SECONDS
                while any(traffic.lost_or_rebuilding() for traffic in traffics):
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
            left.pop(report.step)(stores)

    with LocalStores(sum(code), folder / "stores") as stores:
        trained = train(
            job(),
            schedule,
            stores.urls,
            trainers,
            parity=code,
            on_step=on_step,
            break_it=lambda _, trainer: traffics.append(trainer.part.traffic),
        )
        assert not left
        with Store(stores.urls) as store:
            contents = []
            for shard in range(store.shards):
                epochs = read_epochs(store, shard, NAMESPACE, LANES)
                of_lanes = []
                for lane, epoch in enumerate(epochs):
                    pairs = store.command(shard, "HGETALL", lane_key(NAMESPACE, lane, int(epoch)))
                    assert isinstance(pairs, list)
                    of_lanes.append({name: value for name, value in zip(pairs[::2], pairs[1::2], strict=True) if name != b"m"})
                contents.append(of_lanes)
    return Outcome(trained, contents)


@pytest.fixture(scope="module")
def undisturbed(schedule: Schedule, tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[int, int]], Outcome]:
    """A training with a code that nothing happens to."""
    known: dict[tuple[int, int], Outcome] = {}

    def of(code: tuple[int, int]) -> Outcome:
        if code not in known:
            known[code] = run(schedule, tmp_path_factory.mktemp("undisturbed"), code, 1, {})
        return known[code]

    return of


def restart(*shards: int) -> Callable[[LocalStores], None]:
    """Kills servers, which are there again at once, empty."""

    def do(stores: LocalStores) -> None:
        for shard in shards:
            # The process itself: a server that has just been restarted may not have written its process id yet.
            stores._processes[shard].kill()
            stores._processes[shard].wait()
        for shard in shards:
            assert stores.restart(shard)

    return do


def seeded_step(schedule: Schedule, *seed: int) -> int:
    """A step that is neither among the first nor the last ones."""
    return int(np.random.default_rng(seed).integers(5, schedule.header.end_step - 5))


def check(found: Outcome, expected: Outcome) -> None:
    assert found.trained.digest == expected.trained.digest
    assert found.contents == expected.contents


LOSSES = [
    (code, trainers, lost) for code in CODES for trainers in (1, 2) for lost in itertools.combinations(range(sum(code)), code[1])
]
# Each shard once, with as many trainers as its number says; of the pairs, those of neighbours that are not the first two.
SOME = [one for one in LOSSES if one[1] == 1 + one[2][0] % 2 and (len(one[2]) == 1 or one[2] in ((1, 2), (4, 5)))]


@pytest.mark.parametrize(
    ("code", "trainers", "lost"), [pytest.param(*one, marks=() if one in SOME else pytest.mark.full) for one in LOSSES]
)
def test_shards_killed_at_a_seeded_step(
    schedule: Schedule,
    tmp_path: Path,
    undisturbed: Callable[[tuple[int, int]], Outcome],
    code: tuple[int, int],
    trainers: int,
    lost: tuple[int, ...],
) -> None:
    step = seeded_step(schedule, *code, trainers, *lost)
    check(run(schedule, tmp_path, code, trainers, {step: restart(*lost)}), undisturbed(code))


@pytest.mark.parametrize("trainers", [1, 2])
def test_a_shard_killed_again_and_again_during_its_rebuild_and_in_the_last_step(
    schedule: Schedule, tmp_path: Path, undisturbed: Callable[[tuple[int, int]], Outcome], trainers: int
) -> None:
    last = schedule.header.end_step - 1
    losses = {10: restart(1), 11: restart(1), 12: restart(1), last: restart(2)}
    check(run(schedule, tmp_path, (2, 1), trainers, losses), undisturbed((2, 1)))
