"""The layouts of rows, of update rules and of the embedding block follow from features, model and row optimizers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from foreload.base.errors import SettingError
from foreload.cache.rows.layout import ROW_OPTIMIZERS
from foreload.pipelines.planning.sizing import TRAILER_BYTES
from foreload.pipelines.samples.features import (
    Dense,
    Feature,
    FeatureSpec,
    Label,
    Table,
)
from foreload.trainer.compute.layouts import MEAN, SINGLE, BlockLayout, UpdateRules, model_spec
from foreload.trainer.compute.row_optimizers import RowOptimizer, layouts
from foreload.trainer.models.dlrm import DLRM
from foreload.trainer.models.spec import further_columns
from foreload.trainer.models.wide_deep import WideDeep

FEATURES = FeatureSpec(
    labels=(Label("label", "label"),),
    dense=(Dense("d", "d", "none"),),
    features=(
        Feature("a", 1, "a", "hash"),
        Feature("b", 0, "b", "hash", pooling="mean"),
        Feature("c", 1, "c", "hash"),
    ),
    tables=(Table("small", 10), Table("large", 1000, 6)),
)
SGD = RowOptimizer("sgd", 0.5)


def test_rows_have_the_tables_dimension_and_the_models_columns() -> None:
    rows = layouts(FEATURES, further_columns(WideDeep), 4, [SGD, RowOptimizer("rowwise_adagrad", 0.1)])
    assert [row.parts for row in rows] == [(("weights", 4), ("linear", 1)), (("weights", 6), ("linear", 1))]
    assert [(row.width, row.state_width, row.optimizer) for row in rows] == [
        (5, 0, "sgd"),
        (7, 2, "rowwise_adagrad"),
    ]
    # A weight and its state for each of 4 and 6 columns, and id and tag.
    with_state = layouts(FEATURES, further_columns(DLRM), 4, [RowOptimizer("adagrad", 0.1)] * 2)
    assert [row.row_bytes for row in with_state] == [2 * 4 * 4 + TRAILER_BYTES, 2 * 4 * 6 + TRAILER_BYTES]
    rules = UpdateRules.of(rows, [SGD, RowOptimizer("rowwise_adagrad", 0.1)])
    assert rules.kinds.tolist() == [0, 2]
    assert rules.parts.tolist() == [4, 1, 6, 1]
    assert rules.part_offsets.tolist() == [0, 2, 4]
    assert rules.rates.tolist() == [np.float32(0.5), np.float32(0.1)]
    assert (rules.width, rules.state_width) == (7, 2)


def test_the_model_is_told_names_dimensions_and_tables_in_order() -> None:
    spec = model_spec(FEATURES, 4)
    assert spec.dense_width == 1
    assert spec.features == (("a", 6, "large"), ("b", 4, "small"), ("c", 6, "large"))


def test_embeddings_are_views_of_the_block() -> None:
    layout = BlockLayout.of(FEATURES, layouts(FEATURES, further_columns(WideDeep), 4, [SGD, SGD]))
    assert layout.pooling.tolist() == [SINGLE, MEAN, SINGLE]
    assert layout.widths.tolist() == [7, 5, 7]
    assert layout.width == 7
    block = torch.randn(3, 3, 7)
    embeddings = layout.embeddings(block)
    assert list(embeddings) == ["a", "a.linear", "b", "b.linear", "c", "c.linear"]
    for name, expected in {
        "a": block[:, 0, :6],
        "b": block[:, 1, :4],
        "b.linear": block[:, 1, 4:5],
        "c.linear": block[:, 2, 6:7],
    }.items():
        view = embeddings[name]
        assert torch.equal(view, expected)
        assert view.stride() == expected.stride()
        assert view.data_ptr() == expected.data_ptr()


def test_gradients_of_views_come_together_in_the_block() -> None:
    layout = BlockLayout.of(FEATURES, layouts(FEATURES, further_columns(WideDeep), 4, [SGD, SGD]))
    block = torch.randn(3, 3, 7, requires_grad=True)
    embeddings = layout.embeddings(block)
    (embeddings["b"].sum() * 2 + embeddings["a.linear"].sum() * 3).backward()
    expected = torch.zeros(3, 3, 7)
    expected[:, 1, :4], expected[:, 0, 6] = 2, 3
    assert block.grad is not None
    assert torch.equal(block.grad, expected)


@pytest.mark.parametrize(
    ("name", "lr", "message"),
    [
        ("lion", 0.1, f"must be one of {', '.join(ROW_OPTIMIZERS)}; got 'lion'"),
        ("ftrl", 0, "lr: must be above 0 with row-optimizer ftrl"),
        ("ftrl", 1e-50, "lr: must be above 0 with row-optimizer ftrl"),
        ("sgd", -1, "not negative"),
        ("sgd", float("nan"), "finite"),
    ],
)
def test_settings_of_row_optimizers_are_checked(name: str, lr: float, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        RowOptimizer(name, lr)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("sgd", {"epsilon": 1e-8}, "row-options: sgd has no option epsilon; it has none"),
        ("adagrad", {"beta1": 0.5}, "row-options: adagrad has no option beta1; it has epsilon, decay"),
        ("rowwise_adagrad", {"decay": 1.5}, "row-options: decay of rowwise_adagrad must be above 0 and at most 1; got 1.5"),
        ("adagrad", {"decay": 1e-60}, "must be above 0 and at most 1"),
        ("adagrad", {"epsilon": 0.0}, "row-options: epsilon of adagrad must be from 1e-30 to 1; got 0"),
        ("adam", {"beta2": 1.0}, "row-options: beta2 of adam must be at least 0 and, as a float32, below 1; got 1"),
        ("adam", {"beta1": 0.99999999}, "beta1 of adam must be at least 0 and, as a float32, below 1"),
        ("adam", {"beta1": -0.1}, "beta1 of adam must be at least 0"),
        ("ftrl", {"l2": -1.0}, "row-options: l2 of ftrl must be from 0 to 1e\\+30; got -1"),
        ("ftrl", {"beta": 0.0}, "row-options: beta of ftrl must be from 1e-30 to 1e\\+30; got 0"),
    ],
)
def test_options_of_row_optimizers_are_checked(name: str, options: dict[str, float], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        RowOptimizer(name, 0.1, options)


def test_what_does_not_fit_the_features_is_refused() -> None:
    with pytest.raises(SettingError, match="dim: must be at least 1; got 0"):
        layouts(FEATURES, further_columns(DLRM), 0, [SGD, SGD])
