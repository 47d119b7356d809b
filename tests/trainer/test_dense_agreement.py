"""The dense part is compared between trainers: where it differs, all of them stop with one line, and nothing of it is saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import small_terms
import torch
from clicks import Clicks
from command_line import done, refused, run_here
from training import train

from foreload.cache.client.local import LocalStores
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.cluster.coordinator.checkpointing import CheckpointUnderWay
from foreload.trainer.cluster.coordinator.wanted_checkpoints import Wanted
from foreload.trainer.cluster.messages.trainers import CheckpointReport, CopyTaken
from foreload.trainer.compute.reports import StepReport
from foreload.trainer.errors import DenseDiverged
from foreload.trainer.run.directory import Run
from foreload.trainer.step.dense_agreement import check_alike
from foreload.trainer.step.program import Trainer

HERE = Path(__file__).parent
pytestmark = pytest.mark.usefixtures("one_thread", "cases_on_path")

Change = Callable[[Trainer], None]


@pytest.fixture(scope="module")
def schedule(tmp_path_factory: pytest.TempPathFactory) -> Schedule:
    return small_terms.schedule(tmp_path_factory.mktemp("agreement"))


@pytest.fixture(scope="module")
def one_segment(tmp_path_factory: pytest.TempPathFactory) -> Schedule:
    """The same with one segment an epoch."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.raises(AssertionError):  # it has fewer segments than the others want
        small_terms.schedule(folder, "--segment-bytes=64MiB")
    return Schedule(folder / "schedule")


def move_parameter(trainer: Trainer) -> None:
    """One unit in the last place of one value."""
    with torch.no_grad():
        bias = trainer.parts.module.get_parameter("top.2.bias")
        bias.copy_(torch.nextafter(bias, torch.full_like(bias, 9)))


def move_state(trainer: Trainer) -> None:
    state = trainer.parts.optimizer.state[trainer.parts.module.get_parameter("top.0.weight")]
    state["exp_avg"][0, 0] += 1e-6


def at(point: str, step: int, change: Change, of: int = 1) -> Callable[[int, Trainer], None]:
    """Have trainer `of` change its dense part at a point of a step."""

    def break_it(number: int, trainer: Trainer) -> None:
        before = trainer.on_point

        def reach_point(name: str, now: int) -> None:
            before(name, now)
            if (name, now) == (point, step):
                change(trainer)

        if number == of:
            trainer.on_point = reach_point

    return break_it


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize(
    ("point", "step", "change", "name"),
    [
        ("dense part applied", 1, move_parameter, "top.2.bias"),
        ("dense part applied", 5, move_state, "top.0.weight/exp_avg"),
        ("evaluating", 11, move_parameter, "top.2.bias"),
        ("dense part applied", 23, move_parameter, "top.2.bias"),
    ],
)
def test_all_trainers_stop_where_one_has_another_dense_part(
    schedule: Schedule, servers: LocalStores, point: str, step: int, change: Change, name: str, copies: int
) -> None:
    with pytest.raises(DenseDiverged) as caught:
        train(small_terms.job(dense_ema=None), schedule, servers.urls, 3, break_it=at(point, step, change), copies=copies)
    message = str(caught.value)
    assert f", {name} has one value on trainers 0, 2, and another one on trainer 1; " in message
    ends = [segment.first + len(segment.samples) - 1 for segment in schedule.segments() if segment.kind == "train"]
    assert f"after step {min(end for end in ends if end >= step)}, " in message


def test_it_is_compared_before_the_first_step_and_none_is_trained(schedule: Schedule, servers: LocalStores) -> None:
    steps: list[StepReport] = []

    def break_it(number: int, trainer: Trainer) -> None:
        if number == 0:
            move_parameter(trainer)

    with pytest.raises(
        DenseDiverged, match=r"before the first step, top.2.bias has one value on trainer 0, and another one on trainer 1"
    ):
        train(small_terms.job(), schedule, servers.urls, 2, break_it=break_it, on_step=steps.append)
    assert not steps


def test_it_is_compared_at_a_stop_within_a_segment(one_segment: Schedule, servers: LocalStores) -> None:
    given = (small_terms.job(), one_segment, servers.urls, 2)
    with pytest.raises(DenseDiverged, match=r"after step 5, top.2.bias has one value"):
        train(*given, stop_after=lambda step: step == 5, break_it=at("dense part applied", 3, move_parameter))


@pytest.mark.parametrize(
    ("sums", "message"),
    [
        ({0: {"a": "1", "b": "2"}, 3: {"a": "1", "b": "2"}}, None),
        ({0: {}, 3: {}}, None),
        ({3: {"a": "1", "b": "2"}, 0: {"a": "1", "b": "3"}}, "b has one value on trainer 0, and another one on trainer 3"),
        ({0: {"a": "1"}, 1: {"a": "1", "b": "2"}, 2: {"a": "1"}}, "b has one value on trainers 0, 2, and another one on trainer 1"),
        ({0: {"a": "1"}, 1: {"a": "2"}, 2: {"a": "3"}}, "on trainer 0, and another one on trainer 1, and another one on trainer 2"),
    ],
)  # fmt: skip
def test_the_first_name_that_differs_is_told_with_who_has_which(sums: dict[int, dict[str, str]], message: str | None) -> None:
    if message is None:
        check_alike(sums, 4)
    else:
        with pytest.raises(DenseDiverged, match=message):
            check_alike(sums, 4)


def test_a_checkpoint_is_compared_as_soon_as_a_second_trainer_has_taken_it() -> None:
    saving = CheckpointUnderWay(1, Wanted(Path("checkpoints"), None, None, ()), 0.0)
    taken = CheckpointReport(1, CopyTaken(39, 0.0, 1, "", {}, {"out.bias": "1"}))
    saving.note(0, taken)
    saving.note(2, taken)
    with pytest.raises(
        DenseDiverged, match=r"after step 39, out.bias has one value on trainers 0, 2, and another one on trainer 1"
    ):
        saving.note(1, CheckpointReport(1, CopyTaken(39, 0.0, 1, "", {}, {"out.bias": "2"})))


# -- Through the command line ----------------------------------------------------------------------------------------------------------


def given(schedule: Path, run: Path, model: str, *rest: object) -> list[object]:
    model_of = ["--model", f"random_models.py:{model}", "--model-folder", HERE, "--dim", 4]
    return ["train", schedule, "--run", run, "--store", "local:1", *model_of, *rest]


def test_trainers_whose_constructor_depends_on_the_process_are_stopped_before_the_first_step(
    clicks: Clicks, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    message = refused(*given(clicks.schedule, run, "OfProcess", "--trainers", 2))
    assert message.startswith(
        "dense part: must be the same on all trainers; before the first step, out.bias has one value on trainer 0, and another one on trainer 1; "
        "the model's constructor must draw random numbers from torch, numpy.random or random, which --seed seeds"
    )
    assert Run.open(run).saved_status().step == -1
    assert not Run.open(run).dense(-1).exists()
    # A single trainer has nobody to differ from.
    done(*given(clicks.schedule, run, "OfProcess", "--overwrite"))


def test_nothing_is_saved_of_trainers_that_drift_apart(clicks: Clicks, tmp_path: Path) -> None:
    log, run, whole = clicks.log, tmp_path / "run", tmp_path / "schedule"
    done("prepare", log, *clicks.options(whole, segment_bytes=None))
    status, _, err = run_here(*given(whole, run, "DriftsFrom", "--trainers", 2, "--checkpoint-every", 5, "--keep", 99))
    message = err.splitlines()[-1]
    assert status == 2
    assert message.startswith("foreload: error: dense part: must be the same on all trainers; after step ")
    assert ", out.bias has one value on trainer 0, and another one on trainer 1; " in message
    saved = [
        int(folder.name.partition("-")[2])
        for folder in (run / "checkpoints").glob("step-*")
        if (folder / "manifest.json").exists()
    ]
    assert all(step < 30 for step in saved)
    assert Run.open(run).saved_status().step == -1
    assert "evaluation" not in (run / "metrics.jsonl").read_text()
