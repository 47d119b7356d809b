"""`wrap` of modules whose columns share a tensor: the rows, tables and features that follow from what forward does with its ids."""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from test_encodings import bags, encoders
from test_wrap import embeddings_of, names_of
from torch import Tensor, nn

import foreload
from foreload.pipelines.samples.feature_file import load_features
from foreload.trainer.compute.layouts import model_spec
from foreload.trainer.errors import ModelError
from foreload.trainer.models.building import build_model
from foreload.trainer.models.ids import UnsupportedUse
from foreload.trainer.models.spec import ModelSpec
from foreload.trainer.models.wrapping import Wrapped

ROWS = (7, 5, 9)
COLUMNS = ["user", "item", "site"]
Look = Callable[["Shared", Tensor], Tensor]


class Shared(nn.Module):
    """Ids [b, 3], which a test looks up."""

    offsets: Tensor

    def __init__(self, look: Look) -> None:
        super().__init__()
        self.look = look
        self.user, self.item, self.site = (nn.Embedding(rows, 4) for rows in ROWS)
        self.all = nn.Embedding(sum(ROWS), 4)
        self.bag, self.mean = nn.EmbeddingBag(sum(ROWS), 4, mode="sum"), nn.EmbeddingBag(sum(ROWS), 4)
        self.register_buffer("offsets", torch.tensor([0, 7, 12]))
        self.numbers = np.array([0, 7, 12])
        self.out = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(self.look(self, x)).squeeze(1)
        return logits


def parts(net: Shared, columns: Any) -> Tensor:
    """The sum of each column's rows, by a table of its own; columns are [b]."""
    user, item, site = columns
    rows: Tensor = net.user(user.long()) + net.item(item.long()) * 2 + net.site(site.long()) * 3
    return rows


def in_place(net: Shared, x: Tensor) -> Tensor:
    x = x.clone().long()
    x += net.offsets
    return net.all(x).sum(1)


def in_place_by_column(net: Shared, x: Tensor) -> Tensor:
    x = x.clone().long()
    x[:, 1] += 7
    x[:, 2:].add_(12)
    return net.all(x).sum(1)


LOOKS: dict[str, Look] = {
    "slices": lambda net, x: parts(net, (x[:, 0:1].squeeze(1), x[:, 1:2].squeeze(), x[:, -1:].view(-1))),
    "slices of one row": lambda net, x: (net.user(x[:, 0:1].long()) + net.item(x[:, 1:2].long())).squeeze(1),
    "indices": lambda net, x: parts(net, (x[:, 0], x[..., 1], x[:, -1])),
    "split": lambda net, x: parts(net, [part.squeeze(1) for part in torch.split(x, 1, dim=1)]),
    "chunks": lambda net, x: parts(net, [part.reshape(x.size(0)) for part in x.chunk(3, 1)]),
    "unbind": lambda net, x: parts(net, x.unbind(1)),
    "unbind of the transpose": lambda net, x: parts(net, x.long().t().unbind()),
    "select": lambda net, x: parts(net, [x.select(1, place) for place in range(3)]),
    "narrow": lambda net, x: parts(net, [x.narrow(1, place, 1).flatten() for place in range(3)]),
    "index_select": lambda net, x: parts(net, x.index_select(1, torch.tensor([2, 1, 0])).flip(1).unbind(1)),
    "lists of columns": lambda net, x: parts(net, x[:, [2, 0, 1]][:, [1, 2, 0]].unbind(-1)),
    "a mask of columns": lambda net, x: net.user(x[:, [True, False, False]].long()).sum(1),
    "joined": lambda net, x: parts(net, torch.cat([x[:, :1], x[:, 1:]], dim=1).unbind(1)),
    "stacked": lambda net, x: parts(net, torch.stack([x[:, 2], x[:, 1], x[:, 0]], 1)[:, [2, 1, 0]].unbind(1)),
    "joined with numbers": lambda net, x: parts(net, torch.cat([x.float(), torch.ones(x.shape[0], 2)], 1)[:, :3].unbind(1)),
    "one more dimension": lambda net, x: parts(net, x.unsqueeze(1).transpose(1, 2).view(x.size(0), 3).unbind(1)),
    "permuted": lambda net, x: parts(net, x[:, None].permute(0, 2, 1)[..., 0].to(torch.int64).unbind(1)),
    "offsets in a buffer": lambda net, x: net.all(x.long() + net.offsets).sum(1),
    "offsets first": lambda net, x: net.all(net.offsets.unsqueeze(0) + x.long()).sum(1),
    "offsets as the authors of torchfm add them": lambda net, x: net.all(x + x.new_tensor(net.numbers).unsqueeze(0)).sum(1),
    "offsets in NumPy": lambda net, x: net.all((x.long() + torch.from_numpy(net.numbers)).long()).sum(1),
    "offsets by column": lambda net, x: sum((net.all(x[:, k].long() + int(net.numbers[k])) for k in range(3)), torch.zeros(4)),
    "offsets taken away": lambda net, x: net.all(x.long() - -net.offsets).sum(1),
    "offsets in place": in_place,
    "offsets in place, by column": in_place_by_column,
    "end to end": lambda net, x: net.all((x + net.offsets).long().view(-1)).view(x.size(0), -1).view(-1, 3, 4).sum(1),
    "a table for all without offsets": lambda net, x: net.all(x.int()).sum(1),
    "a table for all in three dimensions": lambda net, x: net.all((x + net.offsets).long().view(-1, 3, 1)).sum((1, 2)),
    "expanded": lambda net, x: net.user(x[:, :1].long().expand(-1, 2)).sum(1),
    "a bag": lambda net, x: net.bag((x + net.offsets).long()),
    "the mean of a bag": lambda net, x: net.mean(x.long() + net.offsets),
    "two tables of a column": lambda net, x: net.user(x[:, 0].long()) * net.all(x[:, 0].long()),
}  # fmt: skip


def rows_of(plain: nn.Module, wrapped: Wrapped, ids: Mapping[str, Tensor], offsets: Mapping[str, int]) -> dict[str, Tensor]:
    """The rows of the module's own tables for each feature.

    offsets: what forward adds to a column's ids, where the feature's table is a part of the module's.
    """
    rows = {}
    for feature in wrapped.features:
        (path,) = (p for p, t in plain.named_modules() if p and feature.table.name in (p, f"{p}_{feature.column}"))
        shift = offsets[feature.column] if feature.table.name != path else 0
        rows[feature.name] = plain.get_parameter(f"{path}.weight").detach()[ids[feature.column] + shift].requires_grad_()
    return rows


@pytest.mark.parametrize("kind", [torch.int64, torch.float32])
@pytest.mark.parametrize("look", LOOKS)
def test_rows_are_those_that_the_module_looks_up_itself(look: str, kind: torch.dtype) -> None:
    torch.manual_seed(2)
    module = Shared(LOOKS[look])
    plain = copy.deepcopy(module)
    if look == "offsets as the authors of torchfm add them" and kind == torch.float32:
        pytest.skip("their ids are integers")
    wrapped = foreload.wrap(module, columns={"x": COLUMNS})
    for samples in (1, 3, 6, 3):
        ids = {column: torch.randint(0, 5, (samples,)) for column in COLUMNS}
        rows = rows_of(plain, wrapped, ids, dict(zip(COLUMNS, (0, 7, 12), strict=True)))
        with torch.no_grad():
            expected = plain(torch.stack(list(ids.values()), 1).to(kind if "for all" not in look else torch.int64))
        logits = wrapped(torch.empty(samples, 0), rows)
        assert torch.allclose(logits, expected, atol=1e-6, rtol=0) if "bag" in look else torch.equal(logits, expected)
    logits.sum().backward()
    assert all(value.grad is not None for value in rows.values())


def test_forward_is_followed_in_every_call() -> None:
    """What operations made of ids is kept for later calls, and a call that does something else is still noticed."""
    wrapped = foreload.wrap(Shared(lambda net, x: net.user(x[:, 1 if net.training else 0])), columns={"x": COLUMNS})
    rows = {"user": torch.randn(4, 4)}
    for _ in range(2):
        wrapped.eval()(torch.empty(4, 0), rows)
        with pytest.raises(ModelError, match=r"user: is given x\[1\], which it was not when `wrap` examined forward"):
            wrapped.train()(torch.empty(4, 0), rows)

    def assign(net: Shared, x: Tensor) -> Tensor:
        if net.training:
            x = x.clone()
            x[:, 1] = x[:, 0]
        return net.all(x).sum(1)

    wrapped = foreload.wrap(Shared(assign), columns={"x": COLUMNS})
    with pytest.raises(UnsupportedUse, match="forward assigns to the ids x in some of its calls only"):
        wrapped.train()(torch.empty(4, 0), {feature.name: torch.randn(4, 4) for feature in wrapped.features})


# torch.export has no values of tensors, so it cannot follow indices that are tensors.
@pytest.mark.parametrize("look", [look for look in LOOKS if look not in ("index_select", "a mask of columns")])
def test_an_export_has_the_logits_of_the_wrapped_module(look: str) -> None:
    wrapped = foreload.wrap(Shared(LOOKS[look]), columns={"x": COLUMNS}).eval()
    names = [feature.name for feature in wrapped.features]

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = wrapped

        def forward(self, dense: Tensor, block: Tensor) -> Tensor:
            logits: Tensor = self.inner(dense, dict(zip(names, block.unbind(1), strict=True)))
            return logits

    batch = torch.export.Dim("batch")
    given = (torch.empty(5, 0), torch.randn(5, len(names), 4))
    with torch.no_grad():
        program = torch.export.export(Block(), given, dynamic_shapes=({0: batch}, {0: batch})).module()
        for samples in (1, 3, 97):
            dense, block = torch.empty(samples, 0), torch.randn(samples, len(names), 4)
            assert torch.equal(program(dense, block), Block()(dense, block))


def test_a_table_for_all_fields_becomes_one_of_each_field(tmp_path: Path) -> None:
    wrapped = foreload.wrap(Shared(LOOKS["offsets in a buffer"]), columns={"x": COLUMNS})
    assert names_of(wrapped) == {f"all_{column}": (f"all_{column}", column) for column in COLUMNS}
    assert [feature.table.rows for feature in wrapped.features] == list(ROWS)
    assert wrapped.unused == ("user", "item", "site", "bag", "mean")
    wrapped.write_features(tmp_path / "features.toml", label="y")
    features = load_features(tmp_path / "features.toml")
    assert [(table.name, table.rows) for table in features.tables] == [
        (f"all_{c}", rows) for c, rows in zip(COLUMNS, ROWS, strict=True)
    ]
    assert [feature.column for feature in features.features] == COLUMNS
    build_model(
        lambda spec: foreload.wrap(Shared(LOOKS["offsets in a buffer"]), columns={"x": COLUMNS}), model_spec(features, 9), {}, 0
    )


def test_fields_with_one_offset_share_a_part_of_the_table() -> None:
    look: Look = lambda net, x: net.all(x + torch.tensor([0, 7, 7])).sum(1)  # noqa: E731
    wrapped = foreload.wrap(Shared(look), columns={"x": COLUMNS})
    assert names_of(wrapped) == {
        "all_user": ("all_user", "user"),
        "all_item": ("all_item", "item"),
        "all_site": ("all_item", "site"),
    }
    assert [feature.table.rows for feature in wrapped.features] == [7, 14, 14]


@pytest.mark.parametrize(
    ("look", "message"),
    [
        (
            lambda net, x: net.all(x + 99).sum(1),
            r"all: has 21 rows, and forward adds 99 to the ids x\[0\]; the constant must be below",
        ),
        (
            lambda net, x: net.all(x).sum(1) + net.all(x + 1).sum(1),
            r"all: looks up x\[0\] with 0 and with 1 added; one column has one row of a table; use two tables",
        ),
    ],
)
def test_offsets_that_make_no_tables_are_refused(look: Look, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        foreload.wrap(Shared(look), columns={"x": COLUMNS})


class Mixed(nn.Module):
    """Ids and dense values in one tensor of floats."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleDict({"user": nn.Embedding(7, 4), "item": nn.Embedding(5, 4)})
        self.wide = nn.ModuleDict({"user": nn.Embedding(7, 1), "item": nn.Embedding(5, 1)})
        self.places = {"user": (0, 1), "age": (1, 2), "item": (2, 3), "price": (3, 4)}
        self.net, self.line = nn.Linear(10, 1), nn.Linear(2, 1)

    def forward(self, X: Tensor) -> Tensor:
        deep = [table(X[:, slice(*self.places[name])].long()) for name, table in self.tables.items()]
        dense = torch.cat([X[:, 1:2], X[:, 3:4]], -1)
        logit = X.new_zeros((X.shape[0], 1))
        for name, table in self.wide.items():
            start, end = self.places[name]
            logit += table(X[:, start:end].long()).flatten(1)
        logit += self.line(dense)
        logit += self.net(torch.cat([torch.cat(deep, 1).flatten(1), dense * (dense > 0)], 1))
        return torch.sigmoid(logit)


def test_ids_and_dense_values_may_be_columns_of_one_tensor() -> None:
    torch.manual_seed(1)
    module = Mixed()
    plain = copy.deepcopy(module)
    wrapped = foreload.wrap(module, columns={"X": ["user", "age", "item", "price"]}, dense={"X": ["price", "age"]})
    assert wrapped.dense_names == ("price", "age")
    assert names_of(wrapped) == {
        "tables_user": ("tables_user", "user"), "tables_item": ("tables_item", "item"), "wide_user": ("wide_user", "user"),
        "wide_item": ("wide_item", "item"),
    }  # fmt: skip
    user, item, dense = torch.randint(0, 7, (6,)), torch.randint(0, 5, (6,)), torch.randn(6, 2)
    ids = {"user": user, "item": item}
    tables = dict(plain.named_modules())
    rows = {f"{kind}_{name}": tables[f"{kind}.{name}"].weight[ids[name]] for kind in ("tables", "wide") for name in ids}
    logits = wrapped(dense, rows)
    assert torch.equal(logits.sigmoid(), plain(torch.stack([user, dense[:, 1], item, dense[:, 0]], 1)).squeeze(1))


SIGMOIDS: dict[str, Callable[[Tensor], Any]] = {
    "the function": torch.sigmoid,
    "the method": lambda x: x.sigmoid(),
    "in place": lambda x: x.sigmoid_(),
    "the function in place": torch.sigmoid_,
    "of nn.functional": nn.functional.sigmoid,
    "the layer": nn.Sigmoid(),
    "then a column": lambda x: torch.sigmoid(x.view(-1, 1)),
    "then shapes": lambda x: torch.sigmoid(x[:, None]).view(-1).unsqueeze(1).reshape(-1, 1).squeeze(-1),
    "then limits": lambda x: torch.sigmoid(x).clamp(1e-6, 1 - 1e-6),
    "in a dict": lambda x: {"y_pred": torch.sigmoid(x)},
    "none": lambda x: x,
    "none, in a dict": lambda x: {"y_pred": x.unsqueeze(1)},
}


class Ending(nn.Module):
    """It ends as a test says, and has a gate with a sigmoid within."""

    def __init__(self, end: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.table, self.gate, self.out, self.end = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 1), end

    def forward(self, ad: Tensor) -> Any:
        rows = self.table(ad)
        return self.end(self.out(rows * torch.sigmoid(self.gate(rows))).squeeze(1))


@pytest.mark.parametrize("end", SIGMOIDS)
def test_a_final_sigmoid_is_left_out_and_no_other(end: str) -> None:
    module = Ending(SIGMOIDS[end])
    spec = ModelSpec(0, (("table", 4, "table"),))
    built = build_model(lambda spec: foreload.wrap(module), spec, {}, 0, twice=False)
    rows = torch.randn(5, 4)
    expected = module.out(rows * torch.sigmoid(module.gate(rows))).squeeze(1)
    for training in (True, False):
        assert torch.equal(built.train(training)(torch.empty(5, 0), {"table": rows}), expected)


def test_a_sigmoid_whose_result_is_used_further_stays() -> None:
    for end in (lambda x: torch.sigmoid(x) * 2, lambda x: torch.logit(torch.sigmoid(x)), lambda x: 1 - torch.sigmoid(x)):
        module = Ending(end)
        rows = torch.randn(5, 4)
        logits = foreload.wrap(module)(torch.empty(5, 0), {"table": rows})
        assert torch.equal(logits, end(module.out(rows * torch.sigmoid(module.gate(rows))).squeeze(1)))
        assert type(logits) is Tensor


def test_outputs_for_numbers_keep_their_sigmoid() -> None:
    class Two(Ending):
        def forward(self, ad: Tensor) -> Any:
            out = super().forward(ad)
            return torch.cat([torch.sigmoid(out[:, None]), torch.sigmoid(2 * out[:, None])], -1)

    rows = torch.randn(5, 4)
    for kinds in (("click", "number"), ("number", "click"), ("click", "click"), ("number", "number")):
        module = Two(lambda x: x)
        spec = ModelSpec(0, (("table", 4, "table"),), labels=("a", "b"), label_kinds=kinds)
        built = build_model(lambda spec, module=module: foreload.wrap(module), spec, {}, 0)
        out = module.out(rows * torch.sigmoid(module.gate(rows)))
        expected = [column if kind == "click" else column.sigmoid() for kind, column in zip(kinds, (out, 2 * out), strict=True)]
        assert torch.equal(built(torch.empty(5, 0), {"table": rows}), torch.cat(expected, 1))


def test_a_part_of_a_model_keeps_its_sigmoid() -> None:
    class Whole(nn.Module):
        def __init__(self, spec: ModelSpec) -> None:
            super().__init__()
            self.inner, self.last = foreload.wrap(Ending(torch.sigmoid)), nn.Linear(1, 1)

        def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Any:
            return self.last(self.inner(dense, embeddings)[:, None]).squeeze(1)

    spec = ModelSpec(0, (("table", 4, "table"),))
    built: Any = build_model(Whole, spec, {}, 0)
    rows = embeddings_of(spec, 5)
    inner = built.inner(torch.empty(5, 0), rows)
    assert ((inner > 0) & (inner < 1)).all()


class Several(nn.Module):
    """It returns several tensors by name, after an end that `wrap` does not recognise."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.first, self.second = nn.Embedding(9, 4), nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, ad: Tensor) -> dict[str, Tensor]:
        rows = self.table(ad)
        first, second = self.first(rows), self.second(rows)
        first += 1.0
        return {"a": 1 / (1 + torch.exp(-first)), "b": second.sigmoid(), "aux": rows}


def test_the_outputs_may_be_named() -> None:
    rows = {"table": torch.randn(5, 4)}
    one = foreload.wrap(module := Several(), output="b")
    assert torch.equal(one(torch.empty(5, 0), rows), module.second(rows["table"]).squeeze(1))
    both = foreload.wrap(module := Several(), output=["b", "a"])
    a = 1 / (1 + torch.exp(-(module.first(rows["table"]) + 1.0)))
    assert torch.equal(both(torch.empty(5, 0), rows), torch.cat([module.second(rows["table"]), a], 1))
    layer = foreload.wrap(module := Several(), logits="first")
    assert torch.equal(layer(torch.empty(5, 0), rows), module.first(rows["table"]).squeeze(1))
    layers = foreload.wrap(module := Several(), logits=["second", "first"])
    expected = torch.cat([module.second(rows["table"]), module.first(rows["table"])], 1)
    assert torch.equal(layers(torch.empty(5, 0), rows), expected)
    assert not module.first._forward_hooks


def test_outputs_that_cannot_be_chosen_are_refused() -> None:
    cases: list[tuple[Callable[[], object], str]] = [
        (
            lambda: foreload.wrap(Several()),
            'output: forward of Several returns a dict with a, b, aux; name the key .*: output="..."$',
        ),
        (lambda: foreload.wrap(Several(), output="c"), "returns a dict with a, b, aux; name the key .*; got c$"),
        (
            lambda: foreload.wrap(Ending(torch.sigmoid), output="c"),
            "forward of Ending must return a dict with c; got a tensor; leave output out",
        ),
        (lambda: foreload.wrap(Several(), logits="third"), "logits: Several has no layer third; it has table, first, second"),
        (lambda: foreload.wrap(Several(), logits="first", output="a"), "output and logits: only one of them may be given"),
        (lambda: foreload.wrap(Ending(torch.sigmoid), logits="end"), "logits: Ending has no layer end; it has table, gate, out"),
    ]
    for call, message in cases:
        with pytest.raises(ModelError, match=message):
            call()


class Padded(nn.Module):
    """A table for two columns, whose padding lies in the second one's part, and a table with padding of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.Embedding(12, 4, padding_idx=7)
        self.tags = nn.EmbeddingBag(9, 4, mode="mean", padding_idx=-1)

    def forward(self, x: Tensor, tags: Tensor) -> Tensor:
        looked_up: Tensor = self.all(x + torch.tensor([0, 5])).sum(1) + self.tags(tags)
        return looked_up.sum(1)


def test_a_padding_id_is_left_out_by_prepare(tmp_path: Path) -> None:
    wrapped = foreload.wrap(Padded(), columns={"x": ["user", "item"]})
    wrapped.write_features(tmp_path / "ids.toml", label="clicked")
    spec = load_features(tmp_path / "ids.toml")
    # Of row 7 of the whole, the second column's part has number 2; -1 is the last row.
    assert {feature.column: feature.padding for feature in spec.features} == {"user": (), "item": ("2",), "tags": ("8",)}
    wrapped.write_features(tmp_path / "raw.toml", label="clicked", encoding="vocabulary")
    text = (tmp_path / "raw.toml").read_text(encoding="utf-8")
    assert text.count("# padding = []  # the values that stand for nothing: the module has padding_idx=") == 2


def test_a_padding_id_has_zeros_and_no_gradient_as_in_the_module(tmp_path: Path) -> None:
    wrapped = foreload.wrap(Padded(), columns={"x": ["user", "item"]})
    wrapped.write_features(tmp_path / "ids.toml", label="clicked")
    ids = np.array([[1, 2, 3, 8], [4, 0, 8, 8], [3, 2, 8, 8], [0, 6, 5, 2]])
    data = {"user": pa.array(ids[:, 0]), "item": pa.array(ids[:, 1]), "tags": pa.array(ids[:, 2:].tolist())}
    spec, _, _, samples = encoders(data, tomllib.loads((tmp_path / "ids.toml").read_text(encoding="utf-8")))
    plain, embeddings = Padded().eval(), {}
    for feature in wrapped.features:
        weight = {"user": plain.all.weight, "item": plain.all.weight[5:], "tags": plain.tags.weight}[feature.column]
        rows = [weight[bag].mean(0) if bag else torch.zeros(4) for bag in bags(samples, spec, feature.name)]
        embeddings[feature.name] = torch.stack(rows)
    expected = plain(torch.from_numpy(ids[:, :2]), torch.from_numpy(ids[:, 2:]))
    assert torch.allclose(wrapped(torch.zeros(4, 0), embeddings), expected, atol=1e-6)
