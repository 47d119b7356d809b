"""`wrap` and foreload.nn: what a wrapped module is given and gives; and the feature file that goes with it."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import plain_models
import pytest
import torch
from torch import Tensor, nn

import foreload
from foreload.pipelines.samples.feature_file import load_features
from foreload.pipelines.samples.features import Label
from foreload.trainer.compute.layouts import model_spec
from foreload.trainer.errors import ModelError
from foreload.trainer.models.building import build_model
from foreload.trainer.models.layers import connect
from foreload.trainer.models.spec import Embeddings, ModelSpec
from foreload.trainer.models.wrapping import Wrapped


def spec_of(wrapped: Wrapped) -> ModelSpec:
    """The data that go with a wrapped module."""
    features = tuple((feature.name, feature.table.dimension, feature.table.name) for feature in wrapped.features)
    return ModelSpec(len(wrapped.dense_names), features, wrapped.dense_names, tuple(f.table.pooling for f in wrapped.features))


def embeddings_of(spec: ModelSpec, samples: int) -> Embeddings:
    """Rows of synthetic samples, as a trainer gives them."""
    width = max(dimension for _, dimension, _ in spec.features)
    block = torch.randn(samples, len(spec.features), width, requires_grad=True)
    return Embeddings.split(block, spec.names, [[("weights", dimension)] for _, dimension, _ in spec.features])


def names_of(wrapped: Wrapped) -> dict[str, tuple[str, str]]:
    """Table and column of each feature."""
    return {feature.name: (feature.table.name, feature.column) for feature in wrapped.features}


class Net(nn.Module):
    """One table, and what a test makes of it: use(net, argument) gives [b, 3]."""

    table: Any
    other: Any
    again: Any
    table_a: Any
    logits: Any
    no_such_layer: Any

    def __init__(
        self, use: Callable[[Net, Any], Tensor] = lambda net, ids: net.table(ids), table: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 3) if table is None else table
        self.other = nn.Embedding(5, 3)
        self.out = nn.Linear(3, 1)
        self.use = use

    def forward(self, ids: Any) -> Tensor:
        logits: Tensor = self.out(self.use(self, ids)).squeeze(1)
        return logits


class Two(nn.Module):
    """Its forward takes two arguments, of which a test makes [b, 3]."""

    def __init__(self, use: Callable[[Two, Any, Any], Tensor]) -> None:
        super().__init__()
        self.table, self.use = nn.Embedding(10, 3), use

    def forward(self, first: Any, second: Any) -> Tensor:
        return self.use(self, first, second).sum(1)


@pytest.mark.parametrize("name", ["dlrm", "two_tower", "wide_deep"])
def test_logits_and_gradients_are_those_of_the_module(name: str) -> None:
    # As plain_models..._here says: where each feature's ids are among the module's arguments.
    torch.manual_seed(1)
    module = getattr(plain_models, name)()
    plain = copy.deepcopy(module)
    wrapped = getattr(plain_models, f"{name}_here")(ModelSpec(0, ()))
    wrapped.module.load_state_dict(
        {key: value for key, value in plain.state_dict().items() if key in wrapped.module.state_dict()}
    )
    spec, samples = spec_of(wrapped), 6
    ids = {feature.column: torch.randint(0, 30, (samples,)) for feature in wrapped.features}
    tables = {feature.name: plain.get_submodule(path_of(feature.table.name)) for feature in wrapped.features}
    rows = {f.name: tables[f.name].weight.detach()[ids[f.column]].requires_grad_() for f in wrapped.features}
    dense = torch.randn(samples, spec.dense_width)

    logits = wrapped(dense, rows)
    if name == "dlrm":
        columns = [ids[column] for column in ("site", "ad", "user", "visited")]
        expected = plain(dense, [torch.arange(samples)] * 4, columns).squeeze(1)
    elif name == "two_tower":
        expected = plain(ids["user"], ids["ad"], ids["ad_before"], ids["visited"], torch.arange(samples), age=dense[:, 0])
    else:
        expected = plain({column: ids[column] for column in ("site", "ad", "user")}, dense)
    assert torch.equal(logits, expected)
    logits.sum().backward()
    expected.sum().backward()
    for feature in wrapped.features:
        if sum(other.table == feature.table for other in wrapped.features) == 1:
            gradient = tables[feature.name].weight.grad.to_dense()
            summed = torch.zeros_like(gradient).index_add(0, ids[feature.column], rows[feature.name].grad)
            assert torch.allclose(summed, gradient, atol=1e-6)
    for path, parameter in wrapped.module.named_parameters():
        assert torch.equal(parameter.grad, plain.get_parameter(path).grad)


def path_of(table: str) -> str:
    return re.sub(r"^(emb_l|deep|wide)_", r"\1.", table)


def test_the_parameters_begin_as_the_modules_own_and_nothing_else_is_drawn() -> None:
    torch.manual_seed(3)
    plain, after = plain_models.two_tower(), torch.rand(1)
    torch.manual_seed(3)
    wrapped = plain_models.two_tower_here(ModelSpec(0, ()))
    assert torch.equal(torch.rand(1), after)
    assert wrapped.training
    own = dict(wrapped.module.named_parameters())
    assert own.keys() == {name for name, _ in plain.named_parameters() if "emb" not in name}
    assert all(torch.equal(value, plain.get_parameter(name)) for name, value in own.items())


@pytest.mark.parametrize("name", ["dlrm", "two_tower", "wide_deep"])
def test_the_feature_file_is_that_of_the_module(name: str, tmp_path: Path) -> None:
    build = getattr(plain_models, f"{name}_here")
    wrapped = build(ModelSpec(0, ()))
    wrapped.write_features(tmp_path / "features.toml", label="clicked")
    features = load_features(tmp_path / "features.toml")
    assert model_spec(features, 99) == replace(spec_of(wrapped), labels=("clicked",))
    assert [feature.column for feature in features.features] == [feature.column for feature in wrapped.features]
    assert {table.name: table.rows for table in features.tables} == {f.table.name: f.table.rows for f in wrapped.features}
    assert isinstance(build_model(build, model_spec(features, 99), {}, 0), Wrapped)
    with pytest.raises(ModelError, match=r"cannot write the feature file \(File exists\)"):
        wrapped.write_features(tmp_path / "features.toml", label="clicked")
    with pytest.raises(ModelError, match="encoding: must be one of hash, vocabulary, id; got 'ids'"):
        wrapped.write_features(tmp_path / "other.toml", label="clicked", encoding="ids")
    wrapped.write_features(tmp_path / "several.toml", label=["clicked", "liked"])
    several = load_features(tmp_path / "several.toml")
    assert several == replace(features, labels=(Label("clicked", "clicked"), Label("liked", "liked")))
    with pytest.raises(ModelError, match=r"label: must be the column of labels, .* each once; got \['y', 'y'\]"):
        wrapped.write_features(tmp_path / "twice.toml", label=["y", "y"])
    wrapped.write_features(tmp_path / "counted.toml", label="clicked", encoding="vocabulary")
    assert {table.rows for table in load_features(tmp_path / "counted.toml").tables} == {None}


def test_a_layer_given_one_argument_twice_is_one_feature() -> None:
    wrapped = foreload.wrap(Two(lambda net, first, second: net.table(first) * net.table(first)))
    assert names_of(wrapped) == {"table": ("table", "first")}
    rows = torch.randn(4, 3, requires_grad=True)
    assert torch.equal(wrapped(torch.empty(4, 0), {"table": rows}), (rows * rows).sum(1))


def test_a_layer_given_two_arguments_is_two_features_of_one_table() -> None:
    wrapped = foreload.wrap(Two(lambda net, first, second: net.table(first) - net.table(second)), columns={"second": "b"})
    assert names_of(wrapped) == {"table_first": ("table", "first"), "table_b": ("table", "b")}
    rows = {name: torch.randn(4, 3) for name in names_of(wrapped)}
    assert torch.equal(wrapped(torch.empty(4, 0), rows), (rows["table_first"] - rows["table_b"]).sum(1))


def test_a_layer_that_stands_in_two_places_is_one_table() -> None:
    net = Net(lambda net, ids: net.table(ids["a"]) + net.again["x"](ids["b"]))
    net.again = nn.ModuleDict({"x": net.table})
    assert names_of(foreload.wrap(net)) == {"table_a": ("table", "a"), "table_b": ("table", "b")}


def test_a_table_that_forward_does_not_use_is_left_out_and_told(tmp_path: Path) -> None:
    wrapped = foreload.wrap(Net())
    assert names_of(wrapped) == {"table": ("table", "ids")}
    assert wrapped.unused == ("other",)
    wrapped.write_features(tmp_path / "features.toml", label="y")
    assert "\n# other: not used in forward, so no feature has it\n" in (tmp_path / "features.toml").read_text()


def test_nested_modules_have_tables_by_their_paths() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleList([Net(), Net()])

        def forward(self, x: Any) -> Tensor:
            logits: Tensor = self.inner[0](x[0]) + self.inner[1](x[:, 1])
            return logits

    wrapped = foreload.wrap(Outer(), columns={"x": ["a", "b"]})
    assert names_of(wrapped) == {"inner_0_table": ("inner_0_table", "a"), "inner_1_table": ("inner_1_table", "b")}
    renamed = foreload.wrap(Outer(), columns={"x": ["a", "b"]}, names={"inner.1.table": "b"})
    assert names_of(renamed) == {"inner_0_table": ("inner_0_table", "a"), "b": ("b", "b")}


def test_ids_are_picked_and_reshaped_as_tensors_are() -> None:
    def use(net: Net, x: Any) -> Tensor:
        assert x.shape == (len(x[0]), 2)
        assert x.size(0) == x[0].shape[0] == x.size()[0]
        assert (len(x), x.dim(), x[0].dim(), x.dtype) == (2, 2, 1, torch.int64)
        first, second = x.unbind(1)
        mask = torch.ones(x.size(0), 1, device=x.device)
        assert [column.text() for column in x] == [first.text(), second.text()] == [x[..., 0].text(), x[-1].text()]
        rows: Tensor = net.table(first.long().view(-1).to("cpu", non_blocking=True)) + net.other(
            second.reshape((-1,)).squeeze(-1).flatten().int()
        )
        return rows * mask

    wrapped = foreload.wrap(Net(use), columns={"ids": ["a", "b"]})
    assert names_of(wrapped) == {"table": ("table", "a"), "other": ("other", "b")}


class Pooling(Enum):
    """As TorchRec has it."""

    SUM = "SUM"
    MEAN = "MEAN"


class EmbeddingBagCollection(nn.Module):
    """As much of TorchRec's as `wrap` looks at; its tables are within it as there."""

    def __init__(self, *configs: SimpleNamespace, is_weighted: bool = False) -> None:
        super().__init__()
        self._configs, self._weighted = configs, is_weighted
        self.embedding_bags = nn.ModuleDict(
            {c.name: nn.EmbeddingBag(c.num_embeddings, c.embedding_dim, max_norm=1.0) for c in configs}
        )

    def embedding_bag_configs(self) -> tuple[SimpleNamespace, ...]:
        return self._configs

    def is_weighted(self) -> bool:
        return self._weighted


def config(name: str, dimension: int, features: list[str], pooling: Pooling = Pooling.SUM, **rest: object) -> SimpleNamespace:
    return SimpleNamespace(
        name=name,
        num_embeddings=20,
        embedding_dim=dimension,
        feature_names=features,
        pooling=pooling,
        **{"data_type": Pooling.SUM, **rest},
    )


CONFIGS = [
    config("t_user", 2, ["user", "friend"], data_type=SimpleNamespace(value="FP32")),
    config("t_tags", 3, ["tags", "user"], Pooling.MEAN, data_type=SimpleNamespace(value="FP32")),
]


def test_a_collection_as_torchrecs_has_features_of_its_own(tmp_path: Path) -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ebc = EmbeddingBagCollection(*CONFIGS)
            self.out = nn.Linear(10, 1)

        def forward(self, features: Any) -> Tensor:
            keyed = self.ebc(features)
            assert keyed.keys() == ["user@t_user", "friend", "tags", "user@t_tags"]
            assert keyed.length_per_key() == [2, 2, 3, 3]
            by_key = torch.cat([keyed[key] for key in keyed.to_dict()], 1)
            assert torch.equal(by_key, keyed.values())
            logits: Tensor = self.out(by_key.reshape(features.stride(), -1))
            return logits

    wrapped = foreload.wrap(Sparse())
    assert names_of(wrapped) == {
        "user_t_user": ("t_user", "user"), "friend": ("t_user", "friend"), "tags": ("t_tags", "tags"), "user_t_tags": ("t_tags", "user"),
    }  # fmt: skip
    wrapped.write_features(tmp_path / "features.toml", label="y")
    features = load_features(tmp_path / "features.toml")
    assert [(table.name, table.rows, table.dimension) for table in features.tables] == [("t_user", 20, 2), ("t_tags", 20, 3)]
    assert [feature.pooling for feature in features.features] == ["sum", "sum", "mean", "mean"]
    build_model(lambda spec: foreload.wrap(Sparse()), model_spec(features, 1), {}, 0)
    rows = embeddings_of(spec_of(wrapped), 5)
    logits = wrapped(torch.empty(5, 0), rows)
    out: Any = wrapped.module.out
    assert torch.equal(logits, out(torch.cat(list(rows.values()), 1)).squeeze(1))


def test_tables_may_be_on_no_device_and_their_options_without_a_meaning_here_are_taken() -> None:
    table = nn.EmbeddingBag(10**12, 3, include_last_offset=True, sparse=True, device="meta")
    wrapped = foreload.wrap(Net(table=table))
    assert (wrapped.features[0].table.rows, wrapped.features[0].table.pooling) == (10**12, "mean")


class Sequence(nn.Module):
    """A module that attends to a history of items, as if each sample had several, or where `pooled` uses it as it is given here."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.item, self.how = nn.Embedding(20, 8), how
        self.attention = nn.MultiheadAttention(8, 2)
        self.out = nn.Linear(16, 1)

    def forward(self, item: Tensor, history: Tensor) -> Tensor:
        query, rows = self.item(item), self.item(history)
        if self.how == "scores":
            scores = torch.softmax((rows * query.unsqueeze(1)).sum(2), 1)
            rows = (scores.unsqueeze(2) * rows).sum(1)
        elif self.how == "products":
            rows = torch.softmax(query @ rows.T, 1) @ rows
        elif self.how == "layer":
            rows = self.attention(query.unsqueeze(1), rows.unsqueeze(1), rows.unsqueeze(1))[0].squeeze(1)
        elif self.how == "mask":
            rows = rows.masked_fill(torch.ones(len(rows), 1, dtype=torch.bool), 0.0)
        pooled: Tensor = self.out(torch.cat([query, rows], 1)).squeeze(1)
        return pooled


@pytest.mark.parametrize("how", ["pooled", "mask"])
def test_a_sequence_that_is_used_as_it_is_given_is_taken(how: str) -> None:
    assert len(foreload.wrap(Sequence(how)).features) == 2


@pytest.mark.parametrize("as_keywords", [False, True])
def test_ids_and_dense_values_may_be_in_one_dict(as_keywords: bool) -> None:
    class Batched(Net):
        def forward(self, batch: Any) -> Tensor:
            numbers = torch.cat([batch["numbers"], batch["age"].unsqueeze(1)], 1)
            logits: Tensor = self.out(self.table(batch["ad"]) * numbers)
            return logits

    class Keywords(Batched):
        def forward(self, **batch: Any) -> Tensor:  # type: ignore[override]
            return super().forward(batch)

    dense: Any = {"batch": {"age": "a", "numbers": ["n", "m"]}}
    wrapped = foreload.wrap((Keywords if as_keywords else Batched)(), dense=dense, columns={"batch": {"ad": "ad_id"}})
    assert (names_of(wrapped), wrapped.dense_names) == ({"table": ("table", "ad_id")}, ("a", "n", "m"))
    rows, values = torch.randn(4, 3), torch.randn(4, 3)
    expected = wrapped.module.out(rows * values[:, [1, 2, 0]]).squeeze(1)  # type: ignore[operator]
    for one in (wrapped, copy.deepcopy(wrapped)):
        assert torch.equal(one(values, {"table": rows}), expected)


def test_an_embedding_of_indices_of_its_own_may_be_kept() -> None:
    use = lambda net, ids: net.table(ids) + net.other(torch.arange(ids.size(0)) % 5)  # noqa: E731
    with pytest.raises(
        ModelError, match=r'forward gives Tensor to the embedding other \(.*\); .*; for indices of its own, say keep=\["other"\]'
    ):
        foreload.wrap(Net(use))
    wrapped = foreload.wrap(Net(use), keep=["other"])
    assert names_of(wrapped) == {"table": ("table", "ids")}
    assert "module.other.weight" in dict(wrapped.named_parameters())
    with pytest.raises(ModelError, match="forward takes embedding of the ids ids"):
        foreload.wrap(Net(), keep=["table"])


class Own(nn.Module):
    """The sum of features, by layers of theirs."""

    parts: Any

    def __init__(self, *features: str, bag: bool = False) -> None:
        super().__init__()
        kind = foreload.nn.EmbeddingBag if bag else foreload.nn.Embedding
        self.parts = nn.ModuleList(kind(feature) for feature in features)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self) -> Tensor:
        logits: Tensor = torch.stack([part() for part in self.parts]).sum(0).sum(1) * self.scale
        return logits


class WithDense(Own):
    """Its forward takes dense values."""

    def forward(self, dense: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward() + dense.sum(1)


class WithBoth(Own):
    """Its forward takes what the contract says."""

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Tensor:  # type: ignore[override]
        return super().forward() + embeddings["b"].sum(1)


@pytest.mark.parametrize("kind", [Own, WithDense, WithBoth])
def test_layers_of_features_give_the_rows_that_the_model_is_called_with(kind: type[Own]) -> None:
    spec = ModelSpec(2, (("a", 3, "a"), ("b", 3, "b")))
    module = build_model(lambda spec: kind("a", "b"), spec, {}, 0)
    rows, dense = embeddings_of(spec, 4), torch.randn(4, 2)
    expected = (rows["a"] + rows["b"]).sum(1)
    expected = expected + {Own: torch.zeros(4), WithDense: dense.sum(1), WithBoth: rows["b"].sum(1)}[kind]
    # A copy of a model has layers of its own.
    for one in (module, copy.deepcopy(module)):
        assert torch.equal(one(dense, rows), expected)
    with pytest.raises(KeyError):
        module(dense, {})
    for part in module.parts:  # type: ignore[union-attr]
        with pytest.raises(ModelError, match="its rows exist only while the model's forward runs"):
            part()


def test_a_layer_gives_rows_that_may_be_changed_in_place() -> None:
    spec = ModelSpec(0, (("a", 3, "a"), ("b", 2, "b")))

    class InPlace(Own):
        def forward(self) -> Tensor:
            logits: Tensor = self.parts[0]().relu_().view(-1).view(-1, 3).sum(1) + self.parts[0]().sum(1) * self.scale
            return logits

    module, rows = connect(InPlace("a")), embeddings_of(spec, 4)
    before = rows["a"].clone()
    assert torch.equal(module(torch.empty(4, 0), rows), before.relu().sum(1) + before.sum(1))
    assert torch.equal(rows["a"], before)


def test_a_wrapped_module_may_be_part_of_a_model_with_layers_of_its_own() -> None:
    class Whole(Own):
        def __init__(self, spec: ModelSpec) -> None:
            super().__init__("b")
            self.inner = foreload.wrap(Net())

        def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Tensor:  # type: ignore[override]
            logits: Tensor = self.inner(dense, embeddings)
            return logits + super().forward()

    spec = ModelSpec(0, (("table", 3, "t"), ("b", 3, "b")))
    module, rows = build_model(Whole, spec, {}, 0), embeddings_of(spec, 4)
    expected = module.inner.module.out(rows["table"]).squeeze(1) + rows["b"].sum(1)  # type: ignore[union-attr, operator]
    assert torch.equal(module(torch.empty(4, 0), rows), expected)


class Penalised(nn.Module):
    """Samples and parameters add terms to the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.last = nn.Embedding(10, 4), nn.Linear(4, 1)

    def forward(self, ad: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.emb(ad)
        return self.last(rows), rows.square().mean(1, keepdim=True)

    def penalty(self) -> Tensor:
        return self.last.weight.square().sum()


def test_terms_of_its_own_stay_terms_of_the_loss_if_wrap_is_told_so() -> None:
    rows, module = {"emb": torch.randn(3, 4)}, Penalised()
    wrapped = foreload.wrap(module, own_loss=True)
    outputs, losses = wrapped(torch.zeros(3, 0), rows)
    assert torch.equal(outputs, module.last(rows["emb"]).squeeze(1))
    assert torch.equal(losses, rows["emb"].square().mean(1))
    assert wrapped.penalty == module.penalty
    # Else two outputs are those of two labels.
    assert foreload.wrap(Penalised())(torch.zeros(3, 0), rows).shape == (3, 2)
    assert not hasattr(foreload.wrap(nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 1))), "penalty")
