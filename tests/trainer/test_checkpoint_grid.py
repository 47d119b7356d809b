"""Checkpoints of any place of a training, on any trainers, store, parity and slots: each is a run that stopped there, and goes on anywhere else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations, product
from pathlib import Path

import pytest
from command_line import Command, done
from grids import Case, pairs_of, pairwise
from held import Hold
from small_job import summary, synthetic_schedule
from training import Trained, job_in_memory, train

from foreload.cache.client.local import LocalStores
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.checkpoints.contents import Checkpoint
from foreload.trainer.job.job import TrainJob
from foreload.trainer.run.directory import Run

SLOTS = {"few": 430, "many": 4000}
"""423 are needed, and more than 4000 rows are in no lane."""
EVERY = {"amid an epoch": 25, "before an evaluation": 41, "at a schedule's end": 82, "while it follows": 10}
"""Where a checkpoint is saved: behind every so many steps, of 82, of which each 41st is followed by an evaluation."""
LAST = 81
MODEL = {"dim": 4, "lr": 0.05, "model_options": {"bottom": "512-512-4", "top": "512-512-1"}}
"""Its dense part is large, so that steps take a while."""
FLAGS = ("--dim", 4, "--lr", 0.05, "--model-options", "bottom=512-512-4", "top=512-512-1")

FACTORS: dict[str, list[object]] = {"place": list(EVERY)}
for end in ("from", "to"):
    FACTORS |= {f"{end} trainers": [1, 2, 4], f"{end} shards": [1, 3, 5], f"{end} parity": ["off", "2+1", "4+1"]}
    FACTORS[f"{end} slots"] = list(SLOTS)


def can_be(case: Case) -> bool:
    """Whether there are shards enough for the parity, at both ends."""
    least = {"off": 1, "2+1": 3, "4+1": 5}
    return all(least[str(case[f"{end} parity"])] <= int(str(case[f"{end} shards"])) for end in ("from", "to"))


GRID = pairwise(FACTORS, can_be)


def test_the_grid_has_every_two_values() -> None:
    assert all(can_be(case) for case in GRID)
    there = set[object]().union(*map(pairs_of, GRID))
    # What stands in no other value's way.
    free: Case = {name: 5 if "shards" in name else "off" if "parity" in name else values[0] for name, values in FACTORS.items()}
    for one, other in combinations(FACTORS, 2):
        for pair in product(FACTORS[one], FACTORS[other]):
            possible = can_be(free | {one: pair[0], other: pair[1]})
            assert possible == (((one, pair[0]), (other, pair[1])) in there)
    assert len(GRID) < 25


@dataclass
class Trainings:
    """Schedules by their slots, what was trained on each, and the digests of one training that nothing happened to."""

    folder: Path
    urls: list[str]
    made: dict[str, Path] = field(default_factory=dict)

    def schedule(self, slots: str) -> Path:
        """Two epochs in four lanes, in many segments, with evaluation after each."""
        further = "--eval-fraction 0.1 --epochs 2 --segment-bytes 300KB"
        return self._prepared(slots, 5700, SLOTS[slots], further)

    def after(self, slots: str, next_slots: str) -> Path:
        """The schedule after that, for which there are other slots."""
        further = f"--seed 3 --eval-fraction 0.1 --after {self.schedule(slots)}"
        return self._prepared(f"{next_slots}-after-{slots}", 2000, SLOTS[next_slots], further)

    def _prepared(self, name: str, rows: int, slots: int, further: str) -> Path:
        if name not in self.made:
            (self.folder / name).mkdir()
            self.made[name] = synthetic_schedule(self.folder / name, rows, lanes=4, slots=slots, further=further)
        return self.made[name]

    @cached_property
    def digests(self) -> dict[int, str]:
        """By step, of a run that stopped there."""
        job, schedule = job_in_memory(**MODEL), Schedule(self.schedule("many"))
        stops = sorted({step for every in EVERY.values() for step in range(every - 1, LAST, every)})
        digests, before = dict[int, str](), None
        for stop in (*stops, LAST):
            before = self._until(job, schedule, stop, before)
            digests[stop] = before.digest
        return digests

    def _until(self, job: TrainJob, schedule: Schedule, stop: int, before: Trained | None) -> Trained:
        return train(job, schedule, self.urls, stop_after=lambda step: step == stop, resume=before)

    @cached_property
    def digest_after(self) -> str:
        """Of the schedule after that, too."""
        run, place = self.folder / "whole", ("--store", "local:1", "--trainers", 1)
        self.end(run, self.begin(run, self.schedule("many"), *FLAGS, *place))
        self.end(run, self.begin(run, self.after("many", "many"), "--resume", *place))
        return str(summary(run)["digest"])

    def begin(self, run: Path, *further: object) -> Command:
        return Command("train", *further, "--run", run, "--digest")

    def end(self, run: Path, training: Command) -> str:
        """Wait for it; returns the digest."""
        status, _, err = training.end()
        assert status == 0, err
        assert "Traceback" not in err
        return str(summary(run)["digest"])


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Iterator[Trainings]:
    folder = tmp_path_factory.mktemp("grid")
    with LocalStores(1, folder / "servers") as servers:
        yield Trainings(folder, list(servers.urls))


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if place == 4 else pytest.mark.full, id=str(place)) for place, case in enumerate(GRID)],
)
def test_it_goes_on_anywhere_to_the_same_bits(trainings: Trainings, tmp_path: Path, case: Case, hold: Hold) -> None:
    ends = [
        ("--store", f"local:{case[f'{end} shards']}", "--parity", case[f"{end} parity"], "--trainers", case[f"{end} trainers"])
        for end in ("from", "to")
    ]
    place, few, slots = str(case["place"]), str(case["from slots"]), str(case["to slots"])
    run, saved, schedule = tmp_path / "run", tmp_path / "saved", trainings.schedule(few)
    options = (*FLAGS, *ends[0], "--checkpoint-every", EVERY[place], "--keep", 20, "--checkpoint", saved)
    training: Command
    if place == "while it follows":
        # The rest is published once a checkpoint is saved.
        training = follows = hold(["train", schedule, "--run", run, "--digest", *options], 5)
        follows.train_until(lambda _: bool(list(saved.glob("step-*"))))
    else:
        training = trainings.begin(run, schedule, *options)
    assert trainings.end(run, training) == trainings.digests[LAST]
    there = sorted((Checkpoint.open(path) for path in saved.glob("step-*")), key=lambda one: one.contents.step)
    for one in there:
        one.verify()
        assert done("digest", one.path).strip() == trainings.digests[one.contents.step]
    at_end = place == "at a schedule's end"
    # The last one of which something is left to be trained, so an increment, where there are any.
    going_on = [one for one in there if at_end or one.contents.step < LAST][-1]
    schedule = trainings.after(few, slots) if at_end else trainings.schedule(slots)
    new = tmp_path / "new"
    training = trainings.begin(new, schedule, "--from", going_on.path, *ends[1])
    assert trainings.end(new, training) == (trainings.digest_after if at_end else trainings.digests[LAST])
    assert [stage.path for stage in Run.open(new).manifest.stages][-1] == str(schedule)
