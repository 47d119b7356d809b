"""The promise under losses: store shards are killed in the middle of training, and digest, rows and parity rows are those of an undisturbed run."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_exact import FEATURES, LANES
from training import job_in_memory, train
from waiting import DEADLINE_SECONDS, wait_until

from foreload.cache.client.local import LocalStores
from foreload.cache.client.resp import MARKER
from foreload.cache.client.store import Store
from foreload.cache.protocol.shards.fence import read_epochs
from foreload.cache.protocol.shards.namespace import lane_key
from foreload.cache.traffic import Traffic
from foreload.pipelines import prepare
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.compute.reports import StepReport
from foreload.trainer.step.program import Trainer

pytestmark = pytest.mark.usefixtures("one_thread")

Contents = list[list[dict[bytes, bytes]]]
"""Per store shard, per lane: field -> row or parity row, as it is stored."""
CODES = [(2, 1), (4, 1), (4, 2)]
"""(k, r)"""
NAMESPACE = "losses"


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


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a training left: its digest, and what the store holds, but for markers, which tell how often there was a write-back batch."""

    digest: str
    contents: Contents


Disturbance = Callable[[LocalStores, list[Traffic]], None]
"""What happens to a training's servers; it is told the traffic of every trainer, too."""


def run(
    schedule: Schedule,
    folder: Path,
    code: tuple[int, int],
    trainers: int,
    after_step: dict[int, Disturbance],
    in_rebuild: Disturbance | None = None,
) -> Outcome:
    """Train on servers of one's own. after_step: what happens after which step; in_rebuild: what does once trainer 0 has a third rebuilt, before the
    last step: a trainer that is through with its lanes would not see it.
    """
    left, later = dict(after_step), [in_rebuild] if in_rebuild else []
    in_rebuild_done = threading.Event()
    job = job_in_memory(
        model="dlrm", dim=8, model_options={"bottom": "16-8", "top": "16-1"}, row_optimizer="rowwise_adagrad", dense_optimizer="Adam",
        namespace=NAMESPACE,
    )  # fmt: skip
    traffics: list[Traffic] = []

    def on_step(report: StepReport) -> None:
        if report.step in left:
            left.pop(report.step)(stores, traffics)
        if in_rebuild and report.step == schedule.header.end_step - 2:
            assert in_rebuild_done.wait(DEADLINE_SECONDS), [(traffic.shards, traffic._monitor.failure) for traffic in traffics]

    def break_it(number: int, trainer: Trainer) -> None:
        traffics.append(trainer.lanes.traffic)
        if number == 0 and later:
            rebuild = trainer.lanes.traffic._rebuild
            # What it calls after each of its actions, by name.
            rebuild._on_action = lambda action: on_action(trainer.lanes.traffic, action)

    def on_action(traffic: Traffic, action: str) -> None:
        rebuilt = traffic.shards.not_whole.values()
        if later and action == "rows rebuilt" and rebuilt and min(rebuilt) >= 1 / 3:
            later.pop()(stores, traffics)
            in_rebuild_done.set()

    with LocalStores(sum(code), folder / "stores") as stores:
        outcome = train(job, schedule, stores.urls, trainers, parity=code, on_step=on_step, break_it=break_it)
        assert not left
        assert not later
        with Store(stores.urls) as store:
            contents = []
            for shard in range(store.shards):
                epochs = read_epochs(store, shard, NAMESPACE, range(LANES))
                of_lanes = []
                for lane, epoch in enumerate(epochs):
                    pairs = store.command(shard, "HGETALL", lane_key(NAMESPACE, lane, epoch or 0))
                    assert isinstance(pairs, list)
                    of_lanes.append({name: value for name, value in zip(pairs[::2], pairs[1::2], strict=True) if name != MARKER})
                contents.append(of_lanes)
    return Outcome(outcome.digest, contents)


@pytest.fixture(scope="module")
def undisturbed(schedule: Schedule, tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[int, int]], Outcome]:
    """A training with a code that nothing happens to."""
    known: dict[tuple[int, int], Outcome] = {}

    def of(code: tuple[int, int]) -> Outcome:
        if code not in known:
            known[code] = run(schedule, tmp_path_factory.mktemp("undisturbed"), code, 1, {})
        return known[code]

    return of


def restart(*shards: int) -> Disturbance:
    """Kills servers, which are there again at once, empty."""

    def do(stores: LocalStores, _: list[Traffic]) -> None:
        for shard in shards:
            # The process itself: a server that has just been restarted may not have written its process id yet.
            stores._processes[shard].kill()
            stores._processes[shard].wait()
        for shard in shards:
            assert stores.restart(shard)

    return do


def once_whole(what: Disturbance) -> Disturbance:
    """Lets something happen when all shards are whole."""

    def do(stores: LocalStores, traffics: list[Traffic]) -> None:
        wait_until(lambda: not any(traffic.shards.not_whole for traffic in traffics))
        what(stores, traffics)

    return do


def seeded_step(schedule: Schedule, *seed: int) -> int:
    """A step that is neither among the first nor the last ones."""
    return int(np.random.default_rng(seed).integers(5, schedule.header.end_step - 5))


def check(disturbed: Outcome, undisturbed: Outcome) -> None:
    """The same model, and every row and parity row of every shard the same bytes."""
    assert disturbed.digest == undisturbed.digest
    assert disturbed.contents == undisturbed.contents
    assert all(rows for of_lanes in disturbed.contents for rows in of_lanes)


# Each shard in turn, or, where parity covers two, each pair of them at once.
SHARD_LOSSES = [
    (code, trainers, lost) for code in CODES for trainers in (1, 2) for lost in itertools.combinations(range(sum(code)), code[1])
]
SOME_PAIRS = ((1, 2), (4, 5))


# When they are killed, and the codes of which some cases of that run in every test run. (One loss in the last step has a test of its own.)
MOMENTS = {"at a seeded step": CODES, "and again in their rebuild": [(2, 1), (4, 2)], "in the last step": [(4, 2)]}


def always(trainers: int, lost: tuple[int, ...]) -> bool:
    """What is in every test run: each shard once, with as many trainers as its number says, or some pairs."""
    return trainers == 1 + lost[0] % 2 and (len(lost) == 1 or lost in SOME_PAIRS)


def grid() -> list[Any]:
    """All of SHARD_LOSSES at all MOMENTS; those that are not `always` run in the full suite only."""
    return [
        pytest.param(moment, code, trainers, lost, marks=() if code in codes and always(trainers, lost) else pytest.mark.full)
        for moment, codes in MOMENTS.items()
        for code, trainers, lost in SHARD_LOSSES
    ]


@pytest.mark.parametrize(("moment", "code", "trainers", "lost"), grid())
def test_shards_that_are_killed_change_neither_the_model_nor_what_is_stored(
    schedule: Schedule,
    tmp_path: Path,
    undisturbed: Callable[[tuple[int, int]], Outcome],
    moment: str,
    code: tuple[int, int],
    trainers: int,
    lost: tuple[int, ...],
) -> None:
    seed = (*code, trainers, *lost, list(MOMENTS).index(moment))
    step = schedule.header.end_step - 1 if moment == "in the last step" else seeded_step(schedule, *seed)
    in_rebuild = restart(*lost) if moment == "and again in their rebuild" else None
    check(run(schedule, tmp_path, code, trainers, {step: restart(*lost)}, in_rebuild), undisturbed(code))


@pytest.mark.parametrize("trainers", [pytest.param(1, marks=pytest.mark.full), 2])
def test_one_shard_killed_again_and_again_and_another_in_the_last_step(
    schedule: Schedule, tmp_path: Path, undisturbed: Callable[[tuple[int, int]], Outcome], trainers: int
) -> None:
    last = schedule.header.end_step - 1
    after_step = {10: restart(1), 11: restart(1), 12: restart(1), last: once_whole(restart(2))}
    check(run(schedule, tmp_path, (2, 1), trainers, after_step), undisturbed((2, 1)))
