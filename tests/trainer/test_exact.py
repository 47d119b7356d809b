"""The promise: one digest, whatever the trainers, shards and slots, and it is that of plain training in memory (`reference`). On TalkingData."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import reference
import reference_config
import reference_data
import torch
from serving import take_wrong_rows
from training import Trained, job_in_memory, train

from foreload.cache.client.local import LocalStores
from foreload.cache.errors import RowError
from foreload.cache.rows.layout import ROW_OPTIMIZERS
from foreload.cache.rows.staging import EndedRows
from foreload.pipelines import prepare
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.compute import onednn
from foreload.trainer.job.job import TrainJob
from foreload.trainer.models.building import load_model
from foreload.trainer.step.program import Trainer

FEATURES = """
label = "is_attributed"
order_by = "click_time"
[table.ip]
rows = 50000
[table.app]
rows = 500
[table.device]
rows = 1000
[table.os]
rows = 500
[table.channel]
rows = 500
[[feature]]
name = "ip"
column = "..ip"
[[feature]]
name = "app"
[[feature]]
name = "device"
[[feature]]
name = "os"
[[feature]]
name = "channel"
"""
CLICK_TIME = 5
"""The column of the log that FEATURES orders it by."""
LANES, BATCH, EPOCHS, HELD_OUT = 4, 256, 2, 0.1
pytestmark = pytest.mark.usefixtures("one_thread")

OPTIONS = {
    "dlrm": {"bottom": "16-8", "top": "16-1"},
    "wide_deep": {"deep": "16-8"},
    "dcn": {"deep": "16-8", "layers": 2},
    "deepfm": {"deep": "16-8"},
    "shared_bottom": {"bottom": "16", "tower": "8"},
    "mmoe": {"experts": 3, "expert": "16-8", "tower": "4"},
}


@dataclass(frozen=True, slots=True)
class Log:
    """A part of TalkingData, and its feature file. prepared: its schedules so far, by kind."""

    source: Path
    features: Path
    prepared: dict[str, Schedule] = field(default_factory=dict)

    def schedule(self, kind: str) -> Schedule:
        """Prepared when it is first asked for.

        kind: slots of a lane: `min`, as few as a step allows; `twice` as many; `all`, one for every row; or `min, in order`, which differs in the
        placement of samples.
        """
        if kind not in self.prepared:
            slots, _, placement = kind.partition(", in ")
            if slots == "twice":
                slots = str(2 * max(self.schedule("min").manifest["minimum_slots"]))
            out = self.source.parent / kind
            options = {
                "format": "csv", "features": self.features, "batch-size": BATCH, "lanes": LANES, "slots": slots,
                "placement": placement or "locality", "epochs": EPOCHS, "eval-fraction": HELD_OUT, "segment-bytes": 200000, "out": out,
            }  # fmt: skip
            prepare.run([str(self.source), *(f"--{name}={value}" for name, value in options.items())])
            self.prepared[kind] = Schedule(out)
        return self.prepared[kind]


def _log(folder: Path, data: Path, every: int) -> Log:
    """Each so many-th click of the sample."""
    lines = (data / "talkingdata" / "train_sample.csv").read_text().splitlines(keepends=True)
    source, features = folder / "clicks.csv", folder / "features.toml"
    source.write_text("".join([lines[0], *lines[1::every]]))
    features.write_text(FEATURES)
    return Log(source, features)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Log:
    """Every tenth click: 36 steps an epoch, the last one short."""
    return _log(tmp_path_factory.mktemp("tenth"), data, 10)


@pytest.fixture(scope="module")
def short_log(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Log:
    """Every fortieth click."""
    return _log(tmp_path_factory.mktemp("fortieth"), data, 40)


@pytest.fixture(scope="module")
def whole_log(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Log:
    """All clicks."""
    return _log(tmp_path_factory.mktemp("whole"), data, 1)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStores]:
    """Five servers, for as many store shards as a test wants."""
    with LocalStores(5, tmp_path_factory.mktemp("stores")) as stores:
        yield stores


def _job(model: str = "dlrm", row_optimizer: str = "rowwise_adagrad", dense_optimizer: str = "Adam") -> TrainJob:
    return job_in_memory(
        model=model, dim=8, model_options=OPTIONS[model], seed=3, row_optimizer=row_optimizer, lr=0.05, dense_optimizer=dense_optimizer,
        dense_lr=0.01,
    )  # fmt: skip


def _train(
    log: Log, servers: LocalStores, job: TrainJob, trainers: int = 1, shards: int = 1, slots: str = "min", **rest: object
) -> Trained:
    """Train on one of the log's schedules. rest: as `training.train` has it."""
    return train(job, log.schedule(slots), servers.urls[:shards], trainers, **rest)  # type: ignore[arg-type]


def _reference(log: Log, job: TrainJob, placement: str = "locality") -> reference.ReferenceResult:
    return reference.train(
        reference_config.Config(
            log=reference_data.read_features(log.features),
            sources=(log.source,),
            model=load_model(job.model),
            dim=job.dim,
            batch_size=BATCH,
            lanes=LANES,
            placement=placement,
            epochs=EPOCHS,
            seed=job.seed,
            evaluation_fraction=HELD_OUT,
            model_options=job.model_options,
            row_optimizer=job.row_optimizer,
            lr=job.lr,
            dense_optimizer=job.dense_optimizer,
            dense_options={"lr": job.dense_lr, **job.dense_options},
        )
    )


GRID = list(itertools.product((1, 2, 4), (1, 3, 5), ("min", "twice", "all")))
# Every value of trainers, shards and slots stands beside every value of the others in one of these.
COVERING = {
    (t, s, k) for i, t in enumerate((1, 2, 4)) for j, s in enumerate((1, 3, 5)) for k in (("min", "twice", "all")[(i + j) % 3],)
}


@pytest.fixture(scope="module")
def expected(log: Log) -> reference.ReferenceResult:
    """What plain training in memory gives."""
    return _reference(log, _job())


@pytest.mark.parametrize(("trainers", "shards", "slots"), sorted(COVERING))
def test_the_digest_is_that_of_plain_training(
    log: Log, servers: LocalStores, expected: reference.ReferenceResult, trainers: int, shards: int, slots: str
) -> None:
    outcome = _train(log, servers, _job(), trainers, shards, slots)
    assert outcome.digest == expected.digest
    assert [step.loss for step in outcome.steps] == expected.log_losses
    assert [e.auc for e in outcome.evaluations] == pytest.approx([e.auc for e in expected.evaluations])
    assert [e.log_loss for e in outcome.evaluations] == pytest.approx([e.log_loss for e in expected.evaluations])


PROTECTED = [(1, 3, "min", (2, 1)), (2, 5, "twice", (4, 1)), (4, 5, "min", (3, 2)), (2, 3, "all", (1, 2)), (1, 2, "min", (1, 1))]


@pytest.mark.parametrize(("trainers", "shards", "slots", "parity"), PROTECTED)
def test_parity_changes_nothing(
    log: Log,
    servers: LocalStores,
    expected: reference.ReferenceResult,
    trainers: int,
    shards: int,
    slots: str,
    parity: tuple[int, int],
) -> None:
    assert _train(log, servers, _job(), trainers, shards, slots, parity=parity).digest == expected.digest


@pytest.mark.parametrize("trainers", [pytest.param(1, marks=pytest.mark.full), 4])
def test_samples_placed_in_order_train_as_in_memory_too(
    log: Log, servers: LocalStores, expected: reference.ReferenceResult, trainers: int
) -> None:
    outcome = _train(log, servers, _job(), trainers, 3, "min, in order")
    assert outcome.digest == _reference(log, _job(), "order").digest
    assert outcome.digest != expected.digest, "the placement is part of what the model is a function of"


@pytest.mark.full
@pytest.mark.parametrize(("trainers", "shards", "slots"), GRID)
def test_the_digest_is_that_of_plain_training_on_all_clicks(
    whole_log: Log, servers: LocalStores, whole_expected: reference.ReferenceResult, trainers: int, shards: int, slots: str
) -> None:
    assert _train(whole_log, servers, _job(), trainers, shards, slots).digest == whole_expected.digest


@pytest.fixture(scope="module")
def whole_expected(whole_log: Log) -> reference.ReferenceResult:
    """What plain training in memory gives on all clicks."""
    return _reference(whole_log, _job())


def test_the_log_has_what_exactness_is_hard_for(log: Log) -> None:
    """With the fewest slots many rows come back from the store, and the last step of an epoch is short."""
    counts = log.schedule("min").manifest["counts"]
    assert counts["stored"] >= 0.3 * counts["arrivals"]
    assert counts["training_samples"] // EPOCHS % BATCH != 0


# Of these each model and each row optimizer stand in every test run; wide_deep has rows of two parts, which row-wise Adagrad tells apart.
ALWAYS = {
    *(("dlrm", row_optimizer) for row_optimizer in ROW_OPTIMIZERS),
    ("wide_deep", "rowwise_adagrad"),
    ("dcn", "sgd"),
    ("deepfm", "adagrad"),
    ("mmoe", "adagrad"),
}


@pytest.mark.parametrize(
    ("model", "row_optimizer"),
    [
        pytest.param(*pair, marks=() if pair in ALWAYS else pytest.mark.full)
        for pair in itertools.product(OPTIONS, ROW_OPTIMIZERS)
    ],
)
def test_every_model_and_row_optimizer_trains_as_in_memory(
    short_log: Log, servers: LocalStores, model: str, row_optimizer: str
) -> None:
    job = _job(model, row_optimizer, "SGD")
    assert _train(short_log, servers, job, 2, 3).digest == _reference(short_log, job).digest


# SGD and Adam train in other tests here; that each has the bits of torch's own is test_dense_optimizers.py's.
@pytest.mark.parametrize(
    "dense_optimizer",
    [
        *("Adagrad", "NAdam", "Rprop", "ASGD"),
        *(
            pytest.param(name, marks=pytest.mark.full)
            for name in ("SGD", "Adam", "AdamW", "RMSprop", "Adadelta", "Adamax", "RAdam")
        ),
    ],
)
def test_every_dense_optimizer_trains_as_in_memory(short_log: Log, servers: LocalStores, dense_optimizer: str) -> None:
    job = _job(dense_optimizer=dense_optimizer, row_optimizer="sgd")
    assert _train(short_log, servers, job, 2, 3, "all").digest == _reference(short_log, job).digest


@pytest.mark.parametrize("trainers", [1, 2, pytest.param(4, marks=pytest.mark.full)])
def test_layers_by_onednn_train_as_in_memory(
    short_log: Log, servers: LocalStores, monkeypatch: pytest.MonkeyPatch, trainers: int
) -> None:
    monkeypatch.setattr(torch.nn.functional, "linear", onednn.linear)
    job = job_in_memory(model="dlrm", dim=8, model_options={"bottom": "300-8", "top": "300-200-1"}, seed=3)
    assert _train(short_log, servers, job, trainers, 3).digest == _reference(short_log, job).digest


# After the first step, two in a row, the last of the first epoch, the first of the second, the last step but one.
@pytest.mark.parametrize(
    ("stops", "parity"),
    [
        *(((0,), (2, 1)), ((10, 11), (1, 0)), ((35,), (1, 0)), ((36, 70), (2, 1))),
        *(
            pytest.param(*pair, marks=pytest.mark.full)
            for pair in (((0,), (1, 0)), ((10, 11), (2, 1)), ((35,), (2, 1)), ((36, 70), (1, 0)))
        ),
    ],
)
def test_stopping_and_going_on_changes_nothing(
    log: Log, servers: LocalStores, expected: reference.ReferenceResult, stops: tuple[int, ...], parity: tuple[int, int]
) -> None:
    job, outcome = _job(), None
    # The last part stops after no step.
    for trainers, stop in zip(itertools.cycle((1, 2, 4)), (*stops, None)):
        outcome = _train(
            log,
            servers,
            job,
            trainers,
            3,
            "twice",
            stop_after=lambda step, stop=stop: step == stop,
            resume=outcome,
            parity=parity,
        )
    assert outcome is not None
    assert outcome.digest == expected.digest


def _drop_a_write_back(number: int, trainer: Trainer) -> None:
    """One row of lane 2 that leaves late enough to come back never reaches the store."""
    traffic, write_back = trainer.lanes.traffic, trainer.lanes.traffic.write_back
    dropped: list[int] = []

    def broken(lane: int, boundary: int, ended: EndedRows, at_stop: bool = False) -> float:
        if lane == 2 and boundary > 40 and len(ended) and not dropped:
            dropped.append(boundary)
            ended = ended.select(np.arange(1, len(ended)))
        return write_back(lane, boundary, ended, at_stop)

    traffic.write_back = broken  # type: ignore[method-assign]


def _write_a_stale_row(number: int, trainer: Trainer) -> None:
    """One row is written back as it was before its last residency."""
    traffic, write_back = trainer.lanes.traffic, trainer.lanes.traffic.write_back
    staled: list[int] = []

    def broken(lane: int, boundary: int, ended: EndedRows, at_stop: bool = False) -> float:
        places = np.flatnonzero(ended.stored_tag > 0)
        if lane == 1 and len(places) and not staled:
            staled.append(boundary)
            ended.tag[places[0]] = ended.stored_tag[places[0]] - 1
            ended.weights[places[0]] *= 0.5
        return write_back(lane, boundary, ended, at_stop)

    traffic.write_back = broken  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("trainers", "bug"),
    [
        (2, _drop_a_write_back),
        (1, _write_a_stale_row),
        pytest.param(1, _drop_a_write_back, marks=pytest.mark.full),
        pytest.param(2, _write_a_stale_row, marks=pytest.mark.full),
    ],
)
def test_a_lost_or_stale_row_stops_the_run_by_its_tag(
    log: Log, servers: LocalStores, bug: Callable[[int, Trainer], None], trainers: int
) -> None:
    with pytest.raises(RowError, match="tag must be"):
        _train(log, servers, _job(), trainers, 3, "min", break_it=bug)


def test_without_the_check_of_tags_a_stale_row_changes_the_digest(
    log: Log, servers: LocalStores, expected: reference.ReferenceResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_wrong_rows(monkeypatch)
    broken = _train(log, servers, _job(), 1, 3, "min", break_it=_write_a_stale_row)
    assert broken.digest != expected.digest


def _swap_the_last_two_lanes(number: int, trainer: Trainer) -> None:
    """Lane 3's part of a row's gradient is added before lane 2's."""
    exchange = trainer.session.exchange
    add_part = exchange._kernels.add_part
    held: list[torch.Tensor] = []

    def broken(total: torch.Tensor, users: np.ndarray, lane: int, part: torch.Tensor) -> None:
        if lane == 2:
            held.append(part)
        elif lane == 3:
            _add_in_order(total, users, [(3, part), (2, held.pop())])
        else:
            add_part(total, users, lane, part)

    exchange._kernels.add_part = broken  # type: ignore[method-assign]


def _add_in_order(total: torch.Tensor, users: np.ndarray, parts: list[tuple[int, torch.Tensor]]) -> None:
    """What `add_part` does, for the parts of lanes 2 and 3 in this order, those of lanes 0 and 1 being in the total."""
    begun = (users & np.uint64(0b0011)) != 0
    for lane, part in parts:
        places = np.flatnonzero(users >> np.uint64(lane) & np.uint64(1))
        for source, place in enumerate(places):
            total[place] = total[place] + part[source] if begun[place] else part[source]
            begun[place] = True


def test_two_lanes_swapped_in_the_sum_of_gradients_change_the_digest(
    log: Log, servers: LocalStores, expected: reference.ReferenceResult
) -> None:
    assert _train(log, servers, _job(), 1, 1, "all", break_it=_swap_the_last_two_lanes).digest != expected.digest


@pytest.mark.parametrize("slots", ["min", pytest.param("all", marks=pytest.mark.full)])
def test_new_data_after_an_earlier_schedule_give_the_digest_of_the_whole(
    tmp_path: Path, servers: LocalStores, data: Path, slots: str
) -> None:
    lines = (data / "talkingdata" / "train_sample.csv").read_text().splitlines(keepends=True)
    clicks = sorted(lines[1::20], key=lambda line: line.split(",")[CLICK_TIME])
    cut = 11 * BATCH
    for name, part in (("whole", clicks), ("first", clicks[:cut]), ("second", clicks[cut:])):
        (tmp_path / f"{name}.csv").write_text("".join([lines[0], *part]))
    (tmp_path / "features.toml").write_text(FEATURES)

    def prepared(name: str, *more: str) -> Schedule:
        given = [f"{tmp_path}/{name}.csv", "--format=csv", f"--features={tmp_path}/features.toml", f"--batch-size={BATCH}"]
        prepare.run([*given, f"--lanes={LANES}", f"--slots={slots}", f"--out={tmp_path}/{name}", *more])
        return Schedule(tmp_path / name)

    whole = train(_job(row_optimizer="adam"), prepared("whole"), servers.urls[:3], 2)
    job = _job(row_optimizer="adam")  # whose steps are counted on
    first = train(job, prepared("first"), servers.urls[:3], 4)
    second = train(job, prepared("second", f"--after={tmp_path}/first"), servers.urls[:3], 1, resume=first)
    assert second.digest == whole.digest
    assert [step.loss for step in first.steps + second.steps] == [step.loss for step in whole.steps]
