"""Terms: one ends after a step, another begins with other lanes on other trainers, and what comes out is that of an undisturbed training."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from training import Term, Trained, spread, train

from foreload.cache.client.local import LocalStores
from foreload.pipelines import prepare
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.compute import numerics
from foreload.trainer.compute.choose_kernels import kernels_for
from foreload.trainer.compute.program import Trainer
from foreload.trainer.compute.term_session import TermSession
from foreload.trainer.compute.transport import LocalHub, LocalTransport
from foreload.trainer.run.job import TrainJob

FEATURES = """
label = "label"
[table.who]
rows = 400
[table.what]
rows = 60
[[feature]]
name = "who"
[[feature]]
name = "what"
"""
LANES, STEPS, PARITY = 4, 24, ((1, 0), (2, 1))
ALONE, APART, CROSSED, MOVED = (0, 0, 0, 0), spread(LANES, 4), (1, 0, 1, 0), (2, 2, 3, 0)
"""Lane maps: one trainer; four; two with every other lane; three, of which one may be new, with lane 0 on none that had it."""
LAST = {"the first step": 0, "within a segment": 5, "before an evaluation": 11, "after one": 12, "the last step but one": 22}

_namespaces = itertools.count()


@pytest.fixture(scope="module")
def schedule(tmp_path_factory: pytest.TempPathFactory) -> Schedule:
    """Two epochs of 12 steps, each with its evaluation, in segments of a few steps, with as few slots as can be."""
    folder = tmp_path_factory.mktemp("terms")
    generator = torch.Generator().manual_seed(5)
    lines = ["label,who,what"]
    for _ in range(12 * 32 + 40):
        who, what = (torch.rand(2, generator=generator) ** 2 * torch.tensor([400, 60])).long().tolist()
        lines.append(f"{(who + what) % 2},{who},{what}")
    (folder / "log.csv").write_text("\n".join(lines) + "\n")
    (folder / "features.toml").write_text(FEATURES)
    given = [f"{folder}/log.csv", "--format=csv", f"--features={folder}/features.toml", f"--out={folder}/schedule", "--slots=min"]
    given += [
        "--batch-size=32",
        f"--lanes={LANES}",
        "--epochs=2",
        f"--eval-fraction={40 / (12 * 32 + 40)}",
        "--segment-bytes=4000",
    ]
    prepare.run(given)
    found = Schedule(folder / "schedule")
    assert found.header.end_step == STEPS
    assert len(list(found.segments())) > 4
    return found


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStores]:
    """Three stores."""
    with LocalStores(3, tmp_path_factory.mktemp("stores")) as stores:
        yield stores


@pytest.fixture(autouse=True)
def _arithmetic() -> None:
    numerics.set_up(1)


def _train(schedule: Schedule, stores: LocalStores, *terms: Term, **rest: object) -> Trained:
    job = TrainJob.of(
        {
            "schedule": "-", "run": "-", "store": "-", "model": "dlrm", "dim": 8, "model_options": {"bottom": "8", "top": "8-1"}, "seed": 3,
            "row_optimizer": "rowwise_adagrad", "lr": 0.05, "dense_optimizer": "Adam", "dense_lr": 0.01, "namespace": f"terms-{next(_namespaces)}",
        }
    )  # fmt: skip
    return train(job, schedule, stores.urls, terms=terms, **rest)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def undisturbed(schedule: Schedule, three: LocalStores) -> Trained:
    """One trainer, one term."""
    numerics.set_up(1)
    trained = _train(schedule, three, Term(ALONE))
    assert [e.step for e in trained.evaluations] == [11, 23]
    return trained


def _same(found: Trained, undisturbed: Trained) -> None:
    assert found.digest == undisturbed.digest
    assert [(step.step, step.loss) for step in found.steps] == [(step.step, step.loss) for step in undisturbed.steps]
    assert [(e.step, e.epoch, e.auc, e.log_loss) for e in found.evaluations] == [
        (e.step, e.epoch, e.auc, e.log_loss) for e in undisturbed.evaluations
    ]


MAPS = (ALONE, APART, CROSSED, MOVED)
CHANGES = [(before, after) for before, after in itertools.product(MAPS, MAPS) if before != after]
# Every map is left and entered, every place of a change stands with and without parity.
COVERING = [
    (*CHANGES[(3 * i + 5 * j) % len(CHANGES)], last, parity)
    for i, last in enumerate(LAST.values())
    for j, parity in enumerate(PARITY)
]


@pytest.mark.parametrize(("before", "after", "last", "parity"), COVERING)
def test_lanes_that_move_between_two_terms_change_nothing(
    schedule: Schedule,
    three: LocalStores,
    undisturbed: Trained,
    before: tuple[int, ...],
    after: tuple[int, ...],
    last: int,
    parity: tuple[int, int],
) -> None:
    _same(_train(schedule, three, Term(before, last), Term(after), parity=parity), undisturbed)


@pytest.mark.full
@pytest.mark.parametrize("parity", PARITY)
@pytest.mark.parametrize("last", LAST.values(), ids=LAST)
@pytest.mark.parametrize(("before", "after"), CHANGES)
def test_every_change_of_lanes_at_every_place_changes_nothing(
    schedule: Schedule,
    three: LocalStores,
    undisturbed: Trained,
    before: tuple[int, ...],
    after: tuple[int, ...],
    last: int,
    parity: tuple[int, int],
) -> None:
    _same(_train(schedule, three, Term(before, last), Term(after), parity=parity), undisturbed)


@pytest.mark.parametrize("parity", PARITY)
def test_a_term_after_every_few_steps_changes_nothing(
    schedule: Schedule, three: LocalStores, undisturbed: Trained, parity: tuple[int, int]
) -> None:
    """Trainers join, leave and come back; a lane returns to who had it."""
    terms = [Term(hosts, last) for hosts, last in zip(itertools.cycle(MAPS), (0, 1, 4, 8, 11, 15, 16))]
    _same(_train(schedule, three, *terms, Term(APART), parity=parity), undisturbed)


def test_a_stop_in_a_later_term_is_gone_on_from(schedule: Schedule, three: LocalStores, undisturbed: Trained) -> None:
    stopped = _train(schedule, three, Term(CROSSED, 3), Term(MOVED), stop_after=lambda step: step == 8)
    assert stopped.stopped_at == 8
    assert stopped.digest != undisturbed.digest
    assert [step.loss for step in stopped.steps] == [step.loss for step in undisturbed.steps[:9]]


def test_no_message_is_left_over_where_training_stops_within_a_segment(schedule: Schedule, three: LocalStores) -> None:
    transports: list[LocalTransport] = []

    def keep(number: int, trainer: Trainer) -> None:
        assert isinstance(trainer.session.transport, LocalTransport)
        transports.append(trainer.session.transport)

    _train(schedule, three, Term(APART), stop_after=lambda step: step == 5, break_it=keep)
    assert len(transports) == 4
    assert not transports[0].hub.messages


def test_a_lane_map_names_every_rank_and_no_other() -> None:
    first, _ = LocalHub(range(2)).transports()
    for lane_map in ([0, 0], [0, 1, 2]):
        with pytest.raises(ValueError, match=r"each rank of 0 \.\. 1"):
            TermSession(first, lane_map, kernels_for("cpu"), 8)
    assert TermSession(first, [1, 0], kernels_for("cpu"), 8).hosted == [1]
    assert not TermSession(first, [1, 0], kernels_for("cpu"), 8).leads
