"""From raw text to a schedule: the accesses and values that the reference reads are those that the schedule holds."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
from oracle_twin import Step, check_program, steps_of
from reference_data import Data, Log, Placement, Samples, load, read_features, rows_of, shuffled

from foreload.pipelines import prepare
from foreload.pipelines.samples import encoding_state
from foreload.pipelines.samples.feature_file import load_features as read_spec
from foreload.pipelines.samples.features import ENCODING_FOLDER
from foreload.pipelines.schedule.reader import Schedule

LANES, BATCH_SIZE, EPOCHS = 3, 7, 2

FEATURES = """
{order}
weight = "weight"
group = "home"
[[label]]
name = "click"
[[label]]
name = "high"
column = "rating"
at_least = -0.5
[[label]]
name = "rating"
kind = "number"
[text]
missing = ["NULL"]
[table.place]
rows = 30
dimension = 4
[[feature]]
name = "home"
table = "place"
[[feature]]
name = "away"
table = "place"
[[feature]]
name = "tags"
encoding = "vocabulary"
pooling = "mean"
min_count = 3
separator = ";"
[[feature]]
name = "number"
encoding = "id"
rows = 12
[[dense]]
name = "x"
[[dense]]
name = "z"
transform = "standard"
[[dense]]
name = "plain"
column = "x"
transform = "none"
"""


def write_log(path: Path, rows: int, seed: int) -> Path:
    """Random clicks with missing values, quotes, non-ASCII text and ties in `at`."""
    random = np.random.default_rng(seed)
    places = ["Rome", "Zürich", '"a, ""b"""', "NULL", "", "007", "7"]
    lines = ["at,click,home,away,tags,number,x,z,rating,weight"]
    for _ in range(rows):
        tags = ";".join(random.choice(["a", "b", "c", "é", "", "NULL", f"rare{random.integers(99)}"], random.integers(1, 4)))
        x = "" if random.random() < 0.2 else f"{random.normal() * 10:.4f}"
        z = "NULL" if random.random() < 0.1 else f"{random.normal() * 1e3:.6g}"
        number = "" if random.random() < 0.1 else str(random.integers(12))
        at = "" if random.random() < 0.1 else str(random.integers(-5, 15))
        home, away, rating, weight = (
            random.choice(places),
            random.choice(places),
            random.normal(),
            random.choice(["0", "1", "2.7"]),
        )
        lines.append(f"{at},{random.integers(2)},{home},{away},{tags},{number},{x},{z},{rating:.7g},{weight}")
    data = ("\n".join(lines) + "\n").encode()
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    return path


def check(schedule: Schedule, data: Data, log: Log, shuffle_seed: int | None, kind_of_placement: str) -> None:
    """The schedule is one of exactly these samples, in this order."""
    assert tuple(table.rows for table in schedule.header.features.tables) == data.rows
    program: list[Step] = []
    samples: list[Samples] = []
    numbers: list[np.ndarray] = []
    placement = Placement(LANES, kind_of_placement)
    first_epoch: list[Step] = []
    for epoch in range(EPOCHS):
        count = len(data.training)
        order = np.arange(count) if shuffle_seed is None else shuffled(shuffle_seed, epoch, count)
        for kind, part, places in (
            ("train", data.training, order),
            ("evaluate", data.evaluation, np.arange(len(data.evaluation))),
        ):
            if kind == "train" and epoch > 0 and shuffle_seed is None:
                steps = first_epoch
            else:
                steps = steps_of(kind, rows_of(log, part.take(places)), BATCH_SIZE, placement)
            first_epoch = first_epoch or steps
            program += steps
            for n, step in enumerate(steps):
                chosen = places[[n * BATCH_SIZE + place for slice_ in step.slices for place in slice_]]
                numbers.append(chosen)
                samples.append(part.take(chosen))
    events = list(schedule.events())
    manifest = schedule.manifest
    check_program(events, schedule.lane, program, schedule.slots, manifest["evaluation_slots"], manifest["occupied"])
    for event, batch, named in zip(events, samples, numbers, strict=True):
        parts = [schedule.lane(event, lane) for lane in range(LANES)]
        np.testing.assert_array_equal(np.concatenate([part.labels for part in parts]), batch.labels)
        np.testing.assert_array_equal(np.concatenate([part.weights for part in parts if part.weights is not None]), batch.weights)
        groups = [part.groups for part in parts if part.groups is not None]
        np.testing.assert_array_equal(
            np.concatenate([np.empty(0, np.int64), *groups]), batch.groups if event.kind == "evaluate" else []
        )
        np.testing.assert_array_equal(np.concatenate([part.dense for part in parts]), batch.dense)
        np.testing.assert_array_equal(np.concatenate([part.numbers for part in parts]), named)
        counts = [len(bag) for bags in batch.bags for bag in bags]
        if schedule.header.features.multi_valued:
            offsets = [part.offsets for part in parts if part.offsets is not None]
            assert [n for lane in offsets for n in np.diff(lane).tolist()] == counts


@pytest.mark.parametrize(
    ("order", "held_out", "shuffle_seed", "name", "placement"),
    [
        ("", "fraction", None, "a.csv", "locality"),
        ('order_by = "at"\norder_type = "text"', "source", None, "a.csv", "locality"),
        ('order_by = "at"', "fraction", None, "a.csv", "order"),
        ('order_by = "at"\norder_type = "number"', "fraction", 5, "a.csv.gz", "locality"),
    ],
    ids=[
        "file order, tail",
        "ordered by text, second source",
        "ordered by what the column holds, tail, placed in order",
        "ordered by number, shuffled, tail, gzip",
    ],
)
def test_a_schedule_of_a_log_is_what_the_reference_reads(
    tmp_path: Path, order: str, held_out: str, shuffle_seed: int | None, name: str, placement: str
) -> None:
    features = tmp_path / "features.toml"
    features.write_text(FEATURES.format(order=order))
    sources = [write_log(tmp_path / name, 60, 1), write_log(tmp_path / f"more-{name}", 41, 2)]
    other = write_log(tmp_path / "other.csv", 16, 3)
    flags = [*map(str, sources), "--format", "csv", "--features", str(features), "--out", str(tmp_path / "schedule")]
    flags += ["--batch-size", str(BATCH_SIZE), "--lanes", str(LANES), "--epochs", str(EPOCHS), "--slots", "min"]
    flags += ["--eval-fraction", "0.15"] if held_out == "fraction" else ["--eval-source", str(other)]
    flags += [] if shuffle_seed is None else ["--shuffle-seed", str(shuffle_seed)]
    flags += [] if placement == "locality" else ["--placement", placement]
    prepare.run(flags)
    log = read_features(features)
    data = load(log, sources, [other] if held_out == "source" else [], 0.15 if held_out == "fraction" else 0.0)
    assert len(data.evaluation) == (15 if held_out == "fraction" else 16)
    check(Schedule(tmp_path / "schedule"), data, log, shuffle_seed, placement)


@pytest.mark.parametrize("flags", [(), ("--shuffle-seed=3",)], ids=["in order", "shuffled"])
@pytest.mark.parametrize("order", ["", 'order_by = "at"'], ids=["file", "column"])
def test_a_held_out_record_that_the_transform_makes_malformed_keeps_its_place_in_the_split(
    tmp_path: Path, order: str, flags: tuple[str, ...]
) -> None:
    rows, wrong = 200, {180: "3e38", 191: "-3e38", 199: "3.4e38"}
    x = [wrong.get(k, f"{1 + 1e-9 * (k % 2):.10f}") for k in range(rows)]
    lines = [f"{k},{k % 2},only{k},{x[k]}" for k in range(rows)]
    if order:
        lines = [lines[k] for k in np.random.default_rng(0).permutation(rows)]
    (tmp_path / "log.csv").write_text("\n".join(["at,y,a,x", *lines, ""]))
    (tmp_path / "f.toml").write_text(
        f'label = "y"\n{order}\n[[feature]]\nname = "a"\nencoding = "vocabulary"\n[[dense]]\nname = "x"\ntransform = "standard"\n'
    )
    out = tmp_path / "schedule"
    given = (
        f"--features={tmp_path / 'f.toml'}",
        f"--out={out}",
        "--batch-size=16",
        "--slots=min",
        "--eval-fraction=0.2",
        "--max-rejects=3",
    )
    told = prepare.run([str(tmp_path / "log.csv"), "--format=csv", *given, *flags])
    assert (told["training_samples"], told["evaluation_samples"], told["rejected"]) == (160, 37, 3)
    encoder = encoding_state.load(out / ENCODING_FOLDER, read_spec(tmp_path / "f.toml"))[1]
    assert sorted(encoder.vocabularies[0].values.to_pylist()) == sorted(f"only{k}".encode() for k in range(160))
    values = np.array([float(text) for text in x[:160]])
    assert (encoder.scales[0].origin, encoder.scales[0].unit) == pytest.approx((values.mean(), values.std()), rel=1e-6)
