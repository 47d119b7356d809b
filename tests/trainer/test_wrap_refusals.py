"""What `wrap` refuses, and with what words."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import plain_models
import pytest
import torch
from test_wrap import CONFIGS, EmbeddingBagCollection, Net, Own, Sequence, config, spec_of
from torch import Tensor, nn

import foreload
from foreload.trainer.errors import ModelError
from foreload.trainer.models.building import build_model
from foreload.trainer.models.spec import ModelSpec
from foreload.trainer.models.wrapping import Wrapped


def frozen() -> nn.Embedding:
    table = nn.Embedding(10, 3)
    table.weight.requires_grad_(False)
    return table


def hooked() -> nn.Embedding:
    table = nn.Embedding(10, 3)
    table.register_forward_hook(lambda layer, given, output: output * 2)
    return table


class Scaled(nn.Embedding):
    """It has a forward of its own."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


TABLES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "norm": (lambda: nn.EmbeddingBag(10, 3, max_norm=2.0), "wrap: table: max_norm must be None; got 2.0; "),
    "frequency": (
        lambda: nn.Embedding(10, 3, scale_grad_by_freq=True),
        "wrap: table: scale_grad_by_freq must be False; got True; ",
    ),
    "max": (lambda: nn.EmbeddingBag(10, 3, mode="max"), """wrap: table: mode must be "sum" or "mean"; got 'max'"""),
    "frozen": (frozen, "wrap: table: weight is frozen"),
    "double": (
        lambda: nn.Embedding(10, 3, dtype=torch.float64),
        "wrap: table: weight must be a parameter of torch.float32; got torch.float64",
    ),
    "parametrized": (
        lambda: nn.utils.parametrizations.weight_norm(nn.Embedding(10, 3)),
        "wrap: table: weight must be a parameter of torch.float32; got a parametrization",
    ),
    "forward": (lambda: Scaled(10, 3), "wrap: table: Scaled has a forward of its own"),
    "hooks": (hooked, "wrap: table: Embedding has a forward of its own"),
    "weighted collection": (lambda: EmbeddingBagCollection(*CONFIGS, is_weighted=True), "wrap: table: is_weighted must be False"),
    "collection of halves": (
        lambda: EmbeddingBagCollection(config("t", 2, ["a"], data_type=SimpleNamespace(value="FP16"))),
        "wrap: table.t: data_type must be FP32; got FP16",
    ),
    "collection of maxima": (
        lambda: EmbeddingBagCollection(config("t", 2, ["a"], SimpleNamespace(value="MAX"))),  # type: ignore[arg-type]
        "wrap: table.t: pooling must be sum or mean; got max",
    ),
}


@pytest.mark.parametrize(("table", "message"), TABLES.values(), ids=TABLES)
def test_tables_that_would_train_otherwise_are_refused(table: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ModelError, match=re.escape(message)):
        foreload.wrap(Net(table=table()))


USES: dict[str, tuple[Callable[[Net, Any], Any], str]] = {
    "multiplication": (lambda net, ids: net.table(ids * 2), "forward takes mul of the ids ids (test_wrap_refusals.py, line "),
    "multiplication with tensors": (lambda net, ids: net.table(torch.ones(1) * ids), "forward takes mul of the ids ids"),
    "a difference": (lambda net, ids: net.table(5 - ids), "forward takes rsub of the ids ids"),
    "a fraction added": (lambda net, ids: net.table(ids + 0.5), "forward takes add of the ids ids (test_wrap_refusals.py, line "),
    "ids added": (lambda net, ids: net.table(ids + ids), "forward takes add of the ids ids"),
    "another number for each sample": (
        lambda net, ids: net.table(ids + torch.arange(len(ids))),
        "; add the same numbers to the ids of all samples",
    ),
    "comparison": (lambda net, ids: net.table(ids) * (ids != 0)[:, None], "forward takes ne of the ids ids"),
    "equality": (lambda net, ids: net.table(ids) * (ids == 0)[:, None], "forward takes eq of the ids ids"),
    "truth": (lambda net, ids: net.table(ids) if ids else None, "forward takes bool of the ids ids"),
    "a number": (lambda net, ids: net.table(ids) * ids.max().item(), "forward takes max of the ids ids"),
    "a method": (lambda net, ids: net.table(ids.clamp(0, 3)), "forward takes clamp of the ids ids"),
    "a function of torch": (lambda net, ids: net.table(torch.where(ids, 1, 2)), "forward takes where of the ids ids"),
    "the function of the layer": (
        lambda net, ids: nn.functional.embedding(ids, torch.ones(3, 3)),
        "forward takes embedding of the ids ids",
    ),
    "dense values": (lambda net, ids: net.out(ids), 'if they are dense values, say dense={"ids": [...]}'),
    "other bits": (lambda net, ids: net.table(ids.view(torch.int32)), "forward takes view of the ids ids"),
    "rows of samples": (lambda net, ids: net.table(ids[1:]), "forward takes [slice(1, None, None)] of the ids ids"),
    "samples in another order": (lambda net, ids: net.table(ids.flip(0)), "with samples left out, repeated or in another order"),
    "samples repeated": (lambda net, ids: net.table(ids.repeat(2)), "with samples left out, repeated or in another order"),
    "some samples": (lambda net, ids: net.table(ids.narrow(0, 0, 9)), "forward takes narrow of the ids ids"),
    "chosen samples": (lambda net, ids: net.table(ids[torch.arange(9)]), "forward takes getitem of the ids ids"),
    "NumPy": (lambda net, ids: net.table(torch.tensor(ids.numpy())), "forward takes numpy of the ids ids"),
    "a set": (lambda net, ids: net.table(next(iter({ids}))), "unhashable type: 'Ids'"),
    "the last": (
        lambda net, ids: net.table(ids[-1]),
        '; say how many they are: columns={"ids": [...]}',
    ),
    "all of them": (
        lambda net, ids: sum(net.table(x) for x in ids),
        '; say how many they are: columns={"ids": [...]}',
    ),
    "weights": (lambda net, ids: net.table(ids, None, torch.ones(3)), "forward gives per_sample_weights to the embedding table"),
    "a tensor": (lambda net, ids: net.table(torch.zeros(3, dtype=torch.int64)), "forward gives Tensor to the embedding table"),
    "the table": (lambda net, ids: net.table.weight[0], "forward takes .weight of the embedding table"),
    "nothing": (lambda net, ids: torch.zeros(3, 3), "forward of Net uses none of its tables: table, other"),
    "an error": (lambda net, ids: net.no_such_layer(ids), "has no attribute 'no_such_layer' (test_wrap_refusals.py, line "),
}


@pytest.mark.parametrize(("use", "message"), USES.values(), ids=USES)
def test_forwards_that_need_more_than_rows_are_refused(use: Callable[[Net, Any], Any], message: str) -> None:
    with pytest.raises(ModelError, match=r"^wrap: ") as refusal:
        foreload.wrap(Net(use, nn.EmbeddingBag(10, 3, mode="sum")))
    assert message in str(refusal.value)


@pytest.mark.parametrize(("how", "shape"), [("scores", "[b, b, 8]"), ("products", "[b, b]"), ("layer", "[2, b, b]")])
def test_a_sequence_that_is_not_pooled_is_refused_unless_samples_are_to_be_mixed(
    how: str, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelError) as refused:
        foreload.wrap(Sequence(how))
    line = str(refused.value)
    assert line.startswith(f"wrap: Sequence: forward pairs every sample with every other, in a tensor {shape} (")
    assert "sequences that are not pooled are not supported yet; pool them, or leave them out" in line
    monkeypatch.setattr(Sequence, "mixes_samples", True, raising=False)
    assert len(foreload.wrap(Sequence(how)).features) == 2


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("mean", lambda rows: rows.mean(1)),
        ("sum", lambda rows: rows.sum(1)),
        ("the largest", lambda rows: rows.max(1).values),
        ("another dimension", lambda rows: rows.mean(dim=-2)),
        ("GRU", lambda rows: nn.GRU(4, 4, batch_first=True)(rows)[1][0]),
        ("products", lambda rows: torch.einsum("bld,bd->bl", rows, rows)),
    ],
)
def test_a_sequence_that_forward_pools_itself_is_refused_with_what_to_do(name: str, use: Callable[[Tensor], Tensor]) -> None:
    def forward(net: Net, ids: Any) -> Tensor:
        return torch.cat([net.table(ids), use(net.table(ids))], 1)

    with pytest.raises(ModelError) as refused:
        foreload.wrap(Net(forward, nn.Embedding(9, 4)))
    line = str(refused.value)
    assert line.startswith("wrap: Net: forward failed: ")
    assert (
        "; if it uses a sequence: an embedding gives the rows of its feature pooled, [b, dimension], and sequences that are not pooled are not "
        "supported yet; pool them, or leave them out" in line
    )
    with pytest.raises(ModelError) as refused:
        foreload.wrap(Net(forward, nn.EmbeddingBag(9, 4)))
    assert "sequence" not in str(refused.value), "bags are pooled"


@pytest.mark.parametrize(
    ("use", "columns", "called_with"),
    [
        (lambda net, ids: net.table(ids[next(iter(ids.keys()))]), {}, "ids, one tensor of ids"),
        (lambda net, ids: net.table(ids.get("user")), {"ids": ["user", "item"]}, "ids, one tensor of user, item"),
        (lambda net, ids: net.table(ids[:, 0]), {"ids": {"user": "uid", "item": "iid"}}, "ids, a dict of user, item"),
        (lambda net, ids: net.table(ids.long()), {"ids": {"user": "uid"}}, "ids, a dict of user"),
        (lambda net, ids: net.table(ids["no such"]), {"ids": {"user": "uid"}}, "ids, a dict of user"),
    ],
)
def test_ids_of_another_form_than_forward_takes_are_named(
    use: Callable[[Net, Any], Tensor], columns: Any, called_with: str
) -> None:
    with pytest.raises(ModelError, match=f"it was called with {called_with}; give columns and dense as forward takes them"):
        foreload.wrap(Net(use), columns=columns)


class Pair(nn.Module):
    """Two tables."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item, self.out = nn.Embedding(50, 8), nn.Embedding(20, 8), nn.Linear(16, 1)

    def forward(self, user: Any, item: Any) -> Tensor:
        logits: Tensor = self.out(torch.cat([self.user(user), self.item(item)], 1)).squeeze(1)
        return logits


GIVEN: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "drawn": (nn.init.xavier_uniform_, ""),
    "drawn from random": (lambda weight: weight.copy_(torch.tensor([random.random() for _ in range(400)]).view(50, 8)), ""),
    "scaled": (lambda weight: weight.mul_(0.1), ""),
    "zeros": (lambda weight: weight.zero_(), ""),
    "a row of zeros": (lambda weight: weight[0].zero_(), ""),
    "a column of zeros": (lambda weight: weight[:, 2].zero_(), ""),
    "constant": (lambda weight: weight.fill_(0.5), "weights, the same under any seed"),
    "vectors": (lambda weight: weight.copy_(torch.arange(400.0).view(50, 8)), "weights, the same under any seed"),
    "some vectors": (lambda weight: weight[5:45].copy_(torch.arange(320.0).view(40, 8)), "weights in 40 of 50 rows, the same under any seed"),
    "a row": (lambda weight: weight[33].fill_(7.0), "weights in 1 of 50 rows, the same under any seed"),
    "a column": (lambda weight: weight[:, 3].fill_(1.0), "weights in 1 of 8 columns, the same under any seed"),
    "drawn without a seed": (
        lambda weight: weight.copy_(torch.from_numpy(np.random.default_rng().normal(size=weight.shape))),
        "weights, not the same when built twice under one seed",
    ),
    "a row drawn without a seed": (
        lambda weight: weight[2].copy_(torch.from_numpy(np.random.default_rng().normal(size=8))),
        "weights, not the same when built twice under one seed",
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", GIVEN)
def test_what_a_table_was_given_is_told_from_what_its_constructor_drew(how: str) -> None:
    fill, told = GIVEN[how]

    def net(_: object) -> Wrapped:
        bare = Pair()
        with torch.no_grad():
            fill(bare.user.weight)
        return foreload.wrap(bare)

    spec = spec_of(net(None))
    if not told:
        build_model(net, spec, {}, 3, twice=True)
        return
    with pytest.raises(
        ModelError, match=f"user was given {told}, and would lose them, since rows begin with random values of --seed"
    ):
        build_model(net, spec, {}, 3, twice=True)
    build_model(net, spec, {}, 3, twice=True, drop_weights=True)


def test_what_wrap_is_told_must_fit_the_module() -> None:
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: foreload.wrap(Net(), dense={"x": ["a"]}), "forward of Net has no argument x; it has ids"),
        (
            lambda: foreload.wrap(Net(), dense={"ids": ["a"]}, columns={"ids": "a"}),
            "argument ids: must be dense values or ids, not both, except for the keys of a dict",
        ),
        (
            lambda: foreload.wrap(Net(), dense={"ids": {"a": "a"}}, columns={"ids": {"a": "a"}}),
            "argument ids: must be dense values or ids",
        ),
        (lambda: foreload.wrap(Net(), step="now"), "forward of Net has no argument now; it has ids"),
        (
            lambda: foreload.wrap(Net(), columns={"ids": "a"}, step="ids"),
            "argument ids: must be the step, dense values or ids, and only one",
        ),
        (lambda: foreload.wrap(Net(), names={"tabel": "a"}), "names: Net has no table at tabel; it has table, other"),
        (lambda: foreload.wrap(Net(), keep=["tabel"]), "keep: Net has no table at tabel; it has table, other"),
        (
            lambda: foreload.wrap(Net(), names={"table": "other"}),
            "table other: table and other would both have this name; give one another name",
        ),
        (lambda: foreload.wrap(nn.Embedding(3, 3)), "Embedding: is an embedding itself"),
        (lambda: foreload.wrap(nn.Linear(3, 3)), "Linear has no nn.Embedding, nn.EmbeddingBag or EmbeddingBagCollection"),
        (
            lambda: foreload.wrap(Net(lambda net, x: net.table(x[2])), columns={"ids": ["a", "b"]}),
            "ids has 2 columns, as given to wrap",
        ),
        (
            lambda: foreload.wrap(Net(lambda net, x: net.table(x.flatten()), nn.EmbeddingBag(9, 3)), columns={"ids": ["a", "b"]}),
            r"forward gives 2 columns end to end to the embedding table .*; give them side by side, \[b, n\]",
        ),
        (
            lambda: foreload.wrap(Net(), columns={"ids": ["a", "b"]}, dense={"ids": ["b"]}),
            r"forward gives dense values, ids\[1\], to an embedding .*; take them out of dense",
        ),
        (
            lambda: foreload.wrap(Net(), columns={"ids": ["a", "b"]}, dense={"ids": ["c"]}),
            "argument ids: dense value c must be one of its columns; got a, b",
        ),
        (
            lambda: foreload.wrap(Net(), columns={"ids": ["a", "a"]}, dense={"ids": ["a"]}),
            "argument ids: columns must differ; got a, a",
        ),
    ]
    for call, message in cases:
        with pytest.raises(ModelError, match=message):
            call()


def test_names_that_collide_are_refused() -> None:
    net = Net(lambda net, ids: net.table(ids["a"]) + net.table(ids["b"]) + net.table_a(ids["c"]))
    net.table_a = nn.Embedding(3, 3)
    with pytest.raises(ModelError, match="feature table_a: table and table_a would both have this name"):
        foreload.wrap(net)


def test_a_table_whose_weight_is_used_elsewhere_is_refused() -> None:
    net = Net()
    net.logits = nn.Linear(3, 10, bias=False)
    net.logits.weight = net.table.weight
    with pytest.raises(ModelError, match=r"wrap: table: its weight is also logits.weight"):
        foreload.wrap(net)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (ModelSpec(0, (("tabel", 3, "t"),)), "Net: table: feature table: is not in the feature file, which has tabel"),
        (ModelSpec(0, (("table", 4, "t"),)), "feature table: must have rows of dimension 3; got 4; say dimension = 3"),
        (ModelSpec(0, (("table", 3, "t"),), (), ("mean",)), "feature table: must have pooling single; got mean"),
    ],
)
def test_data_that_do_not_fit_are_refused(spec: ModelSpec, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        build_model(lambda spec: foreload.wrap(Net()), spec, {}, 0)


@pytest.mark.parametrize("names", [("x", "age"), ("age",), ("age", "x", "z")])
def test_dense_values_must_be_those_that_wrap_was_told(names: tuple[str, ...]) -> None:
    spec = spec_of(plain_models.wide_deep_here(ModelSpec(0, ())))
    other = ModelSpec(len(names), spec.features, names, spec.poolings)
    with pytest.raises(
        ModelError, match=f"WideDeep: dense values must be age, x, in this order, as given to `wrap`; got {', '.join(names)};"
    ):
        build_model(plain_models.wide_deep_here, other, {}, 0)


def test_a_forward_that_looks_up_something_else_in_training_is_refused() -> None:
    wrapped_of = lambda spec: foreload.wrap(Net(lambda net, ids: net.table(ids["b" if net.training else "a"])))  # noqa: E731
    with pytest.raises(ModelError, match=r'table: is given ids\["b"\], which it was not when `wrap` examined forward'):
        build_model(wrapped_of, ModelSpec(0, (("table", 3, "t"),)), {}, 0)


def test_layers_of_features_that_do_not_fit_the_data_are_refused() -> None:
    cases: list[tuple[Callable[[], nn.Module], tuple[str, ...], str]] = [
        (lambda: Own("c"), ("single",), "Own: parts.0: feature c: is not in the feature file, which has a"),
        (
            lambda: Own("a"),
            ("mean",),
            "parts.0: feature a: must have pooling single; got mean; change the feature file, or the layer",
        ),
        (lambda: Own(""), ("single",), r"foreload.nn.Embedding: needs the name of a feature of the feature file; got ''"),
    ]
    for build, poolings, message in cases:
        with pytest.raises(ModelError, match=message):
            build_model(lambda spec, build=build: build(), ModelSpec(0, (("a", 3, "a"),), (), poolings), {}, 0)
    build_model(lambda spec: Own("a", bag=True), ModelSpec(0, (("a", 3, "a"),), (), ("mean",)), {}, 0)
