"""The reference's parts against closed forms, loops and torch's own embeddings, since everything else is held against the reference."""

from __future__ import annotations

import gzip
import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
import reference_tables
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import train
from reference_config import Config
from reference_data import (
    Dense,
    Feature,
    Label,
    Log,
    Table,
    criteo,
    hash64,
    key,
    key_array,
    load,
    mix,
    read_features,
    shuffled,
    slice_bounds,
    sort_order,
)
from reference_metrics import metrics
from reference_sums import add_lanes, sum_in_order
from reference_tables import initial_weights, sum_of_squares
from reference_trainer import Lookups, Trainer
from torch import Tensor, nn

from foreload.trainer.models.spec import ModelSpec

pytestmark = pytest.mark.usefixtures("one_thread")


class Sums(nn.Module):
    """The logit is the sum of all embeddings, times a learnt factor."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.names = spec.names
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, dense: Tensor, embeddings: dict[str, Tensor]) -> Tensor:
        return self.factor * torch.stack([embeddings[name].sum(1) for name in self.names]).sum(0)


def float_rows(*shape: int, seed: int = 0) -> np.ndarray:
    """Random float32, large enough that another order of a sum shows."""
    return (np.random.default_rng(seed).standard_normal(shape) * 3).astype(np.float32)


# -- Mixing ------------------------------------------------------------------------------------------------------------------------------------


def test_mix_is_splitmix64() -> None:
    assert [mix(0), mix(0x9E3779B97F4A7C15)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]


def test_key_chains_and_takes_negative_numbers_in_twos_complement() -> None:
    assert key(3, -1) == mix(mix(3) ^ (2**64 - 1))
    np.testing.assert_array_equal(
        key_array((3, 1), np.array([-1, 0, 7])), np.array([key(3, 1, n) for n in (-1, 0, 7)], np.uint64)
    )


def test_hash64_is_of_the_length_and_padded_words() -> None:
    assert hash64(b"") == mix(0)
    assert hash64(b"abc") == mix(mix(3) ^ int.from_bytes(b"abc", "little"))
    assert hash64(b"12345678x") == mix(mix(mix(9) ^ int.from_bytes(b"12345678", "little")) ^ ord("x"))


# -- Reading and order -------------------------------------------------------------------------------------------------------------------------


# A missing time, a tie of two times, missing values of either dense column, an empty value among several.
CSV = """\
when,y,x,z,city,tags
3,1,2,,Rome,a|b
1,0,,1,,
2,1,-1,3,Oslo,b
,0,0,5,Rome,c|
2,0,7,7,Bern,a
"""
MIXED = Log(
    (Label("y", "y"),),
    (Dense("x", "x", "log"), Dense("z", "z", "standard")),
    (Feature("city", 0, "city", "hash"), Feature("tags", 1, "tags", "vocabulary", "mean", 1)),
    (Table("city", 100), Table("tags", None)),
    "when",
    "number",
)


@pytest.fixture
def log_file(tmp_path: Path) -> Path:
    path = tmp_path / "log.csv.gz"
    path.write_bytes(gzip.compress(CSV.encode()))
    return path


def test_a_log_is_ordered_split_and_encoded_as_defined(log_file: Path) -> None:
    data = load(MIXED, [log_file], evaluation_fraction=0.2)
    assert (len(data.training), len(data.evaluation)) == (4, 1)
    np.testing.assert_array_equal(data.training.labels[:, 0], [0, 0, 1, 0])  # when: missing, 1, 2, 2
    # Tags of the training samples: c, '' | '' | b | a; each once, so by text: a 2, b 3, c 4.
    assert [list(bags[1]) for bags in data.training.bags] == [[4, 0], [0], [3], [2]]
    assert [list(bags[1]) for bags in data.evaluation.bags] == [[2, 3]]
    assert data.rows == (100, 5)
    cities = [1 + hash64(text) % 99 for text in (b"Rome", b"Oslo", b"Bern")]
    assert [int(bags[0][0]) for bags in data.training.bags] == [cities[0], 0, cities[1], cities[2]]
    np.testing.assert_array_equal(data.training.dense[:, 0], np.array([0, 0, 0, math.log1p(7)], np.float32))
    # z of the training samples: 5, 1, 3, 7; mean 4, deviation sqrt(5).
    np.testing.assert_allclose(data.training.dense[:, 1], np.array([1, -3, -1, 3]) / math.sqrt(5), rtol=1e-6)
    assert data.evaluation.dense[0, 1] == 0


def test_a_second_source_is_encoded_with_the_vocabulary_of_the_first(log_file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.csv"
    other.write_text("when,y,x,z,city,tags\n1,1,1,1,Rome,zz|a\n")
    data = load(MIXED, [log_file], [other])
    assert [list(bags[1]) for bags in data.evaluation.bags] == [[1, 2]]
    assert len(data.training) == 5


def test_a_column_sorts_by_value_or_bytes_with_missing_values_first() -> None:
    values = ["10", "9", "", "9", "é"]
    assert sort_order(values, "text") == [2, 0, 1, 3, 4]
    assert sort_order(values[:4], "number") == [2, 1, 3, 0]


def test_a_shuffle_sorts_numbers_by_key() -> None:
    assert shuffled(5, 1, 20).tolist() == sorted(range(20), key=lambda number: key(5, 1, number))


@given(st.integers(0, 300), st.integers(1, 64))
def test_slices_cut_a_step_evenly(samples: int, lanes: int) -> None:
    bounds = slice_bounds(samples, lanes)
    assert bounds[0][0] == 0
    assert bounds[-1][1] == samples
    assert all(a[1] == b[0] for a, b in itertools.pairwise(bounds))
    assert {last - first for first, last in bounds} <= {samples // lanes, -(-samples // lanes)}


def test_criteo_has_40_columns_and_a_table_for_each_category() -> None:
    log = criteo(50)
    assert len(log.columns) == 40
    assert len(log.tables) == len(log.features) == 26
    assert len(log.dense) == 13


def test_a_feature_file_describes_a_log(tmp_path: Path) -> None:
    path = tmp_path / "features.toml"
    path.write_text(
        """
        label = "y"
        order_by = "when"
        order_type = "number"
        [table.city]
        rows = 100
        [[feature]]
        name = "city"
        table = "city"
        [[feature]]
        name = "tags"
        encoding = "vocabulary"
        pooling = "mean"
        [[dense]]
        name = "x"
        [[dense]]
        name = "z"
        transform = "standard"
        """
    )
    assert read_features(path) == replace(MIXED, rule=2)


# -- Sums, rows and optimizers -----------------------------------------------------------------------------------------------------------------


def test_initial_weights_are_the_documented_function() -> None:
    weights = initial_weights(7, 2, np.array([0, 5, 2**40]), 1000, 5)
    scale = np.float32(1 / math.sqrt(1000))
    for place, row in enumerate((0, 5, 2**40)):
        for column in range(5):
            b = mix(key(7, 2, row) ^ (column // 2))
            u = b >> 40 if column % 2 == 0 else (b >> 16) & 0xFFFFFF
            assert weights[place, column] == np.float32((u - 2**23) * 2.0**-23) * scale


@given(st.lists(st.integers(0, 4), min_size=1, max_size=30), st.integers(0, 99))
def test_gradients_are_added_one_after_the_other_from_the_first(groups: list[int], seed: int) -> None:
    names, numbered = np.unique(groups, return_inverse=True)
    values = float_rows(len(groups), 3, seed=seed)
    expected: dict[int, np.ndarray] = {}
    for group, value in zip(numbered.tolist(), values, strict=True):
        expected[group] = expected[group] + value if group in expected else value
    np.testing.assert_array_equal(sum_in_order(numbered, values, len(names)), np.stack([expected[g] for g in range(len(names))]))


def test_lanes_are_added_in_lane_order_and_another_order_gives_other_bits() -> None:
    parts = [
        (np.array([1, 4]), float_rows(2, 50, seed=1)),
        (np.array([4]), float_rows(1, 50, seed=2)),
        (np.array([0, 4]), float_rows(2, 50, seed=3)),
    ]
    ids, total = add_lanes(parts)
    assert ids.tolist() == [0, 1, 4]
    np.testing.assert_array_equal(total[0], parts[2][1][0])
    np.testing.assert_array_equal(total[1], parts[0][1][0])
    np.testing.assert_array_equal(total[2], (parts[0][1][1] + parts[1][1][0]) + parts[2][1][1])
    assert (add_lanes([parts[0], parts[2], parts[1]])[1] != total).any()
    np.testing.assert_array_equal(add_lanes([parts[1], parts[0], parts[2]])[1], total)


@pytest.mark.parametrize("columns", [1, 2, 7, 8, 9, 16, 33])
def test_a_sum_of_squares_has_eight_running_sums_and_a_tree(columns: int) -> None:
    g = float_rows(4, columns)
    for row, total in zip(g, sum_of_squares(g), strict=True):
        p = [np.float32(0)] * 8
        for column, value in enumerate(row):
            p[column % 8] = p[column % 8] + value * value
        assert total == ((p[0] + p[4]) + (p[2] + p[6])) + ((p[1] + p[5]) + (p[3] + p[7]))


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad"])
def test_row_optimizers_follow_their_formulas(optimizer: str) -> None:
    lr, eps = np.float32(0.3), np.float32(1e-8)
    table = reference_tables.Table(5, [4, 1], optimizer, 0.3)
    table.weights[:] = float_rows(5, 5)
    w, s = table.weights.copy(), table.state.copy()
    for seed in (1, 2):
        g = float_rows(2, 5, seed=seed)
        table.update(np.array([1, 3]), g)
        for place, row in enumerate((1, 3)):
            for part, number in ((slice(0, 4), 0), (slice(4, 5), 1)):
                own = g[place, part]
                if optimizer == "sgd":
                    w[row, part] = w[row, part] - lr * own
                    continue
                if optimizer == "adagrad":
                    s[row, part] = s[row, part] + own * own
                    root = np.sqrt(s[row, part])
                else:
                    s[row, number] = s[row, number] + sum_of_squares(own[None])[0] / np.float32(own.size)
                    root = np.sqrt(s[row, number])
                w[row, part] = w[row, part] - (lr * own) / (root + eps)
    np.testing.assert_array_equal(table.weights, w)
    np.testing.assert_array_equal(table.state, s)
    assert table.used.tolist() == [False, True, False, True, False]


# -- Training ----------------------------------------------------------------------------------------------------------------------------------


def log_of(tmp_path: Path, rows: int) -> tuple[Log, Path]:
    """Random clicks: a feature of one value, and one of several that is read twice, into the same table (mean) and into another (sum)."""
    random = np.random.default_rng(1)
    path = tmp_path / "clicks.csv"
    lines = ["y,x,a,b"]
    for _ in range(rows):
        tags = "|".join(str(n) for n in random.integers(0, 6, random.integers(1, 4)))
        lines.append(f"{random.integers(0, 2)},{random.random():.3f},{random.integers(0, 9)},{tags}")
    path.write_text("\n".join(lines) + "\n")
    features = (Feature("a", 0, "a", "id"), Feature("b", 0, "b", "id", "mean"), Feature("c", 1, "b", "id", "sum"))
    return Log((Label("y", "y"),), (Dense("x", "x", "none"),), features, (Table("t", 9, 4), Table("u", 9, 6))), path


def config_of(tmp_path: Path, **changed: Any) -> Config:
    log, path = log_of(tmp_path, 50)
    return replace(
        Config(
            log, (path,), Sums, dim=8, batch_size=16, lanes=3, epochs=2, evaluation_fraction=0.2, row_optimizer="adagrad", lr=0.1
        ),
        **changed,
    )


def test_training_is_that_of_torch_embeddings_up_to_rounding(tmp_path: Path) -> None:
    config = config_of(tmp_path, row_optimizer="sgd", lanes=1, epochs=3)
    data = load(config.log, config.sources, (), config.evaluation_fraction)
    trainer = Trainer(config, data)
    tables = nn.ParameterList([nn.Parameter(torch.tensor(table.weights)) for table in trainer.tables])
    factor = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([{"params": tables, "lr": config.lr}, {"params": [factor], "lr": 0.01}], lr=0.0)
    step = 0
    for _ in range(config.epochs):
        for first in range(0, len(data.training), config.batch_size):
            samples = data.training.take(np.arange(first, min(first + config.batch_size, len(data.training))))
            loss = trainer.step(step, samples, [list(range(len(samples)))])
            logits = []
            for bags in samples.bags:
                a, b, c = (torch.tensor(bag) for bag in bags)
                logits.append(factor * (tables[0][a].sum() + tables[0][b].mean(0).sum() + tables[1][c].sum()))
            expected = nn.functional.binary_cross_entropy_with_logits(torch.stack(logits), torch.tensor(samples.labels[:, 0]))
            assert loss == pytest.approx(float(expected.detach()), rel=1e-5)
            optimizer.zero_grad()
            expected.backward()
            optimizer.step()
            step += 1
    for table, weights in zip(trainer.tables, tables, strict=True):
        np.testing.assert_allclose(table.weights, weights.detach().numpy(), atol=2e-6)
    assert float(trainer.parameters["factor"].detach()) == pytest.approx(float(factor.detach()), rel=1e-5)


def test_a_run_is_repeated_to_the_bit_and_depends_on_its_seed_and_lanes(tmp_path: Path) -> None:
    first = train(config_of(tmp_path))
    again = train(config_of(tmp_path))
    assert (first.digest, first.log_losses, first.evaluations) == (again.digest, again.log_losses, again.evaluations)
    others = [
        train(config_of(tmp_path, **change)).digest for change in ({"seed": 1}, {"lanes": 2}, {"shuffle_seed": 1}, {"lr": 0.2})
    ]
    assert len({first.digest, *others}) == 5


def test_more_lanes_than_samples_leave_empty_slices_that_change_little(tmp_path: Path) -> None:
    one, many = train(config_of(tmp_path, lanes=1)), train(config_of(tmp_path, lanes=40))
    np.testing.assert_allclose(one.log_losses, many.log_losses, rtol=1e-4)
    np.testing.assert_allclose(one.logits, many.logits, atol=1e-4)


def test_evaluation_changes_nothing(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    data = load(config.log, config.sources, (), config.evaluation_fraction)
    trainer = Trainer(config, data)
    before = trainer.digest()
    trainer.evaluate(data.evaluation, 0)
    assert trainer.digest() == before


def test_a_block_holds_pooled_rows_and_zeros_beyond(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    data = load(config.log, config.sources)
    trainer = Trainer(config, data)
    samples = data.training.take([0, 1])
    block = trainer.block(Lookups.of(samples), 2).numpy()
    t, u = trainer.tables[0].weights, trainer.tables[1].weights
    for place, (a, b, c) in enumerate(samples.bags):
        np.testing.assert_array_equal(block[place, 0], [*t[a[0]], 0, 0])
        total = np.zeros(4, np.float32)
        for row in b:
            total = total + t[row]
        np.testing.assert_array_equal(block[place, 1], [*(total / np.float32(len(b))), 0, 0])
        total = np.zeros(6, np.float32)
        for row in c:
            total = total + u[row]
        np.testing.assert_array_equal(block[place, 2], total)


def test_metrics_of_a_small_case_by_hand() -> None:
    measured = metrics(np.array([0, 0, 2, -1], np.float32), np.array([0, 1, 1, 0], np.float32))
    # Of the four pairs of a click and no click, the click is above in three, and one is a tie.
    assert measured.auc == 3.5 / 4
    log_loss = (2 * math.log(2) + math.log1p(math.exp(-2)) + math.log1p(math.exp(-1))) / 4
    assert measured.log_loss == pytest.approx(log_loss)
    assert measured.normalized_entropy == pytest.approx(log_loss / math.log(2))


def test_the_command_line_prints_every_epoch_and_the_digest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "criteo.tsv"
    line = "\t".join(["1", *["5"] * 13, *["ab"] * 26])
    path.write_text("\n".join([line, line.replace("1", "0", 1)] * 4) + "\n")
    flags = f"{path} --eval-source {path} --format criteo --batch-size 4 --epochs 2 --dim 4 --model dlrm"
    reference.main([*flags.split(), "--model-options", "bottom=8-4", "top=8-1"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[:2]] == ["epoch 0", "epoch 1"]
    assert lines[2].startswith("digest ")
    assert len(lines[2]) == len("digest ") + 64
