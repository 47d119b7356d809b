"""Models: what they compute, the same bits from the block as from a plain dict, their options, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from clicks import Clicks
from command_line import run_here
from torch import Tensor, nn

from foreload.trainer.compute.numerics import ENVIRONMENTS, fingerprint
from foreload.trainer.errors import ModelError
from foreload.trainer.models.building import build_model, load_model
from foreload.trainer.models.built_in import MODELS, further_columns_of
from foreload.trainer.models.checking import ignored_inputs
from foreload.trainer.models.dlrm import (
    SMALL,
    PairwiseDots,
    TorchPairwiseDots,
    with_pairwise_dots,
)
from foreload.trainer.models.spec import Embeddings, ModelSpec, further_columns

pytestmark = pytest.mark.usefixtures("cases_on_path")

OPTIONS: list[tuple[str, dict[str, object]]] = [
    ("dlrm", {}),
    ("dlrm", {"bottom": "8-4", "top": "5-1"}),
    ("wide_deep", {}),
    ("wide_deep", {"deep": "", "dropout": "0.5"}),
    ("dcn", {"layers": "3", "rank": "2"}),
    ("dcn", {"deep": ""}),
    ("deepfm", {"deep": [7, 3]}),
    ("shared_bottom", {}),
    ("shared_bottom", {"bottom": "", "tower": "", "dropout": "0.2"}),
    ("mmoe", {"experts": "3", "expert": "6", "tower": "5-2"}),
    ("mmoe", {"experts": 1, "tower": "", "dropout": 0.3}),
]


def spec_of(dense_width: int = 3, dimension: int = 4, features: int = 3) -> ModelSpec:
    return ModelSpec(dense_width, tuple((f"c{i}", dimension, f"t{i}") for i in range(features)))


def inputs(module: nn.Module, spec: ModelSpec, samples: int, padding: int = 0) -> tuple[Tensor, Embeddings]:
    """Dense values, and embeddings as the trainer gives them, in a block wider than any row by `padding` columns, as other tables' rows make it."""
    parts = [(("weights", dimension), *further_columns(type(module))) for _, dimension, _ in spec.features]
    width = max(sum(columns for _, columns in own) for own in parts) + padding
    block = torch.randn(samples, len(parts), width)
    return torch.randn(samples, spec.dense_width), Embeddings.split(block.requires_grad_(), spec.names, parts)


def results(module: nn.Module, dense: Tensor, embeddings: Mapping[str, Tensor], block: Tensor) -> list[Tensor]:
    """Logits, and the gradients of the block and of each parameter."""
    torch.manual_seed(1)
    logits = module(dense, embeddings)
    gradients = torch.autograd.grad(logits.sigmoid().sum(), [block, *module.parameters()])
    return [logits.detach(), *gradients]


@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize("dense_width", [0, 3])
@pytest.mark.parametrize(("name", "options"), OPTIONS)
def test_block_and_plain_dict_give_the_same_bits(name: str, options: dict[str, object], dense_width: int, padding: int) -> None:
    spec = spec_of(dense_width)
    module = build_model(load_model(name), spec, options, seed=3)
    dense, embeddings = inputs(module, spec, 11, padding)
    by_block = results(module, dense, embeddings, embeddings.block)
    plain = results(module, dense, dict(embeddings), embeddings.block)
    assert all(torch.equal(a, b) for a, b in zip(by_block, plain, strict=True))
    assert by_block[0].shape == (11,)
    assert any(value.abs().sum() > 0 for value in by_block[1:])


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_a_function_of_the_seed(name: str) -> None:
    first, again, other = (build_model(load_model(name), spec_of(), {}, seed) for seed in (5, 5, 6))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in first.parameters())


def test_building_leaves_the_random_state_and_the_threads() -> None:
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    build_model(load_model("deepfm"), spec_of(), {"dropout": 0.3}, 1)
    assert torch.equal(before, torch.get_rng_state())
    assert threads == torch.get_num_threads()


def all_pairs(n: int) -> tuple[Tensor, Tensor, int]:
    """For n vectors: pairs and places, as with_pairwise_dots takes them, and n."""
    rows, columns = torch.tril_indices(n, n, -1)
    places = torch.full((n, n), len(rows))
    places[rows, columns] = places[columns, rows] = torch.arange(len(rows))
    return rows * n + columns, places.flatten(), n


def test_pairwise_dots_have_the_gradient_of_their_formula() -> None:
    module = load_model("dlrm")(spec_of(features=4))
    vectors = torch.randn(3, 5, 4, dtype=torch.float64, requires_grad=True)
    dots = TorchPairwiseDots.apply(vectors, module.pairs, module.places)
    expected = [(vectors[:, i] * vectors[:, j]).sum(1) for i in range(5) for j in range(i)]
    assert torch.allclose(dots, torch.stack(expected, 1))
    assert torch.autograd.gradcheck(lambda v: TorchPairwiseDots.apply(v, module.pairs, module.places), (vectors,))


def fused(a: np.ndarray, b: np.ndarray, s: np.ndarray) -> np.ndarray:
    """a * b + s, rounded once: the product is exact in float64, and a sum rounded to odd there rounds rightly to float32."""
    product, s = a.astype(np.float64) * b, s.astype(np.float64)
    total = product + s
    part = total - product
    error = (product - (total - part)) + (s - part)
    even = total.view(np.int64) & 1 == 0
    return np.where((error != 0) & even, np.nextafter(total, np.copysign(np.inf, error)), total).astype(np.float32)


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Matrix products a [.., n, m] @ b [.., m, c] as docs/definitions.md says: from 0, in the order of the m terms, fused where there are many."""
    total = np.zeros((*a.shape[:-1], b.shape[-1]), np.float32)
    for k in range(b.shape[-2]):
        x, y = a[..., :, k, None], b[..., k, None, :]
        total = fused(x, y, total) if total[0].size * b.shape[-2] >= SMALL else total + x * y
    return total


# Sizes on both sides of SMALL, of one vector and of many, and widths that are no multiple of a register's.
@pytest.mark.parametrize("with_low", [True, False])
@pytest.mark.parametrize(
    ("count", "columns"),
    [(1, 3), (2, 8), (3, 16), (4, 4), (6, 8), (7, 1), (8, 6), (4, 41), (8, 8), (8, 16), (15, 13), (16, 32), (26, 32), (33, 64)],
)
def test_pairwise_dots_add_up_as_defined_on_every_processor(count: int, columns: int, with_low: bool) -> None:
    generator = torch.Generator().manual_seed(count * columns)
    low = torch.randn(9, columns if with_low else 0, generator=generator, requires_grad=True)
    vectors = torch.randn(9, count, columns, generator=generator, requires_grad=True)
    pairs, places, n = all_pairs(count + with_low)
    dots = with_pairwise_dots(low, vectors, pairs, places)
    together = torch.cat([low.unsqueeze(1), vectors], 1) if with_low else vectors
    whole = together.detach().numpy()
    products = product(whole, whole.transpose(0, 2, 1)).reshape(9, -1)[:, pairs.numpy()]
    assert np.array_equal(dots.detach().numpy(), np.hstack([low.detach().numpy(), products]))

    gradient = torch.randn(dots.shape, generator=generator)
    symmetric = np.zeros((9, n, n), np.float32)
    symmetric.reshape(9, -1)[:, pairs.numpy()] = gradient[:, low.shape[1] :]
    expected = product(symmetric + symmetric.transpose(0, 2, 1), whole)
    low_gradient, vectors_gradient = torch.autograd.grad(dots, [low, vectors], gradient)
    assert np.array_equal(vectors_gradient.numpy(), expected[:, int(with_low) :])
    if with_low:
        assert np.array_equal(low_gradient.numpy(), gradient[:, :columns].numpy() + expected[:, 0])


@pytest.mark.parametrize(("count", "columns"), [(4, 41), (8, 8), (8, 16), (15, 13), (16, 32), (26, 32), (33, 64)])
def test_compiled_pairwise_dots_have_the_bits_of_mkl_where_it_follows_the_branch(count: int, columns: int) -> None:
    followed = fingerprint()["mkl_cbwr"]
    if followed != ENVIRONMENTS["avx2"]["MKL_CBWR"]:
        pytest.skip(f"MKL follows {followed} here, and adds up otherwise; on the CPU its products of this size are not used")
    pairs, places, _ = all_pairs(count)
    low, vectors = torch.empty(9, 0), torch.randn(9, count, columns, requires_grad=True)
    compiled, by_mkl = PairwiseDots.apply(low, vectors), TorchPairwiseDots.apply(vectors, pairs, places)
    assert torch.equal(compiled, by_mkl)
    gradient = torch.randn(by_mkl.shape)
    assert torch.equal(*(torch.autograd.grad(dots, [vectors], gradient)[0] for dots in (compiled, by_mkl)))


def test_deepfm_sums_the_dot_products_of_all_pairs() -> None:
    spec = spec_of(dense_width=0)
    module = build_model(load_model("deepfm"), spec, {}, 0)
    for parameter in module.parameters():
        nn.init.zeros_(parameter)
    dense, embeddings = inputs(module, spec, 5)
    vectors = [embeddings[name] for name in spec.names]
    expected = sum(((vectors[i] * vectors[j]).sum(1) for i in range(3) for j in range(i)), torch.zeros(5))
    expected = expected + sum(embeddings[f"{name}.linear"].squeeze(1) for name in spec.names)
    assert torch.allclose(module(dense, embeddings), expected, atol=1e-5)


THREE = ("clicked", "liked", "seconds")


def three_labels(name: str, **options: object) -> tuple[ModelSpec, nn.Module]:
    """A spec of three labels, and a model of it."""
    spec = replace(spec_of(), labels=THREE, label_kinds=("click", "click", "number"))
    return spec, build_model(load_model(name), spec, options, 2)


@pytest.mark.parametrize("name", ["shared_bottom", "mmoe"])
def test_models_of_several_labels_have_an_output_and_a_tower_for_each(name: str) -> None:
    spec, module = three_labels(name)
    dense, embeddings = inputs(module, spec, 11)
    by_block, plain = (results(module, dense, given, embeddings.block) for given in (embeddings, dict(embeddings)))
    assert all(torch.equal(a, b) for a, b in zip(by_block, plain, strict=True))
    assert by_block[0].shape == (11, 3)
    towers = module.get_submodule("towers.of_label")
    for label in range(3):
        output = module(dense, embeddings)[:, label].sum()
        for parameter, gradient in zip(
            dict(towers.named_parameters()), torch.autograd.grad(output, list(towers.parameters())), strict=True
        ):
            assert bool(gradient.any()) == parameter.startswith(f"{label}."), parameter


def test_mmoe_mixes_the_experts_by_each_labels_gate() -> None:
    spec, module = three_labels("mmoe", experts=5, expert="7", tower="")
    dense, embeddings = inputs(module, spec, 9)
    x = torch.cat([dense, *(embeddings[name] for name in spec.names)], 1)
    weights = dict(module.named_parameters())
    for label in range(3):
        gate = torch.softmax(x @ weights[f"gates.{label}.weight"].T, 1)
        mixed = torch.zeros(9, 7)
        for k in range(5):
            expert = torch.relu(x @ weights[f"experts.{k}.0.weight"].T + weights[f"experts.{k}.0.bias"])
            mixed = mixed + gate[:, k, None] * expert
        tower = f"towers.of_label.{label}.0"
        expected = mixed @ weights[f"{tower}.weight"].T + weights[f"{tower}.bias"]
        assert torch.allclose(module(dense, embeddings)[:, label], expected.squeeze(1), atol=1e-6)


@pytest.mark.parametrize("name", ["dlrm", "deepfm"])
def test_products_of_embeddings_need_one_dimension(name: str) -> None:
    spec = ModelSpec(2, (("a", 4, "a"), ("b", 8, "b")))
    with pytest.raises(ModelError, match="a 4, b 8"):
        build_model(load_model(name), spec, {}, 0)
    for other in ("wide_deep", "dcn", "shared_bottom", "mmoe"):
        module = build_model(load_model(other), spec, {}, 0)
        dense, embeddings = inputs(module, spec, 2)
        assert torch.equal(module(dense, embeddings), module(dense, dict(embeddings)))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("dlrm", {"botom": "4"}, "has no option botom; it has bottom, top"),
        ("dlrm", {"bottom": "8"}, "last size of bottom must be the dimension of the embeddings, 4; got 8"),
        ("dlrm", {"top": "8-2"}, "last size of top must be 1"),
        ("dlrm", {"top": "8-x"}, "must be layer sizes such as 64-32"),
        ("dlrm", {"top": 8}, "must be layer sizes"),
        ("dcn", {"layers": "0"}, "layers must be at least 1"),
        ("dcn", {"layers": "2.5"}, "must be an integer; got '2.5'"),
        ("dcn", {"layers": 2.5}, "must be an integer; got 2.5"),
        ("dcn", {"rank": "99"}, "rank must be 0"),
        ("deepfm", {"dropout": "1"}, "dropout: must be at least 0 and below 1"),
        ("dlrm", {"init_std": "-1"}, "dlrm: init_std must be a finite number of at least 0; got -1"),
        ("mmoe", {"init_std": "inf"}, "mmoe: init_std must be a finite number of at least 0; got inf"),
        ("deepfm", {"dropout": "much"}, "must be a number; got 'much'"),
        ("shared_bottom", {"bottom": "8-x"}, "shared_bottom: bottom: must be layer sizes"),
        ("shared_bottom", {"dropout": "1"}, "shared_bottom: dropout: must be at least 0 and below 1"),
        ("mmoe", {"experts": "0"}, "mmoe: experts must be at least 1; got 0"),
        ("mmoe", {"expert": ""}, "mmoe: expert must have at least one layer, such as 64-32; got ''"),
        ("mmoe", {"tower": "0"}, "mmoe: tower: must be layer sizes"),
        ("model_cases:Sum", {"flag": "maybe"}, "must be true or false"),
        ("model_cases:Demanding", {}, "needs size"),
    ],
)
def test_options_that_do_not_fit_are_refused(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        build_model(load_model(name), spec_of(), options, 0)


def test_a_model_may_be_a_function_that_builds_one() -> None:
    module, same = (build_model(load_model(f"model_cases:{name}"), spec_of(), {"scale": "0.5"}, 0) for name in ("a_sum", "Sum"))
    assert type(module) is type(same)
    assert module.arguments == same.arguments
    with pytest.raises(ModelError, match="a_sum has no option size; it has scale"):
        build_model(load_model("model_cases:a_sum"), spec_of(), {"size": 1}, 0)


def test_a_users_model_gets_options_of_the_types_of_its_defaults() -> None:
    module = build_model(load_model("model_cases:Sum"), spec_of(), {"scale": "0.5", "flag": "true", "steps": "7"}, 0)
    assert module.arguments == (0.5, True, 7)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("Counting", "it changes calls"),
        ("Normed", "it changes norm.*BatchNorm"),
        ("Remembering", "must keep no state"),
        ("Wide", r"\[3\], for 3 samples; got torch.float32 \[3, 1\]"),
        ("Squeezing", r"\[1\], for 1 samples; got torch.float32 \[\]"),
        ("Tupled", "got tuple"),
        ("Double", "parameter bias must be float32"),
        ("Lazy", "parameter lazy.weight must be float32"),
        ("Sparse", "table.weight has a sparse gradient"),
        ("Bare", "has no parameters"),
        ("Failing", "forward failed on 3 synthetic samples: KeyError"),
        (
            "AlwaysNormed",
            "AlwaysNormed: forward must leave buffers as they are.*; it changes norm.*; leave out BatchNorm and the like, use LayerNorm",
        ),
        ("Paired", "forward failed on 1 synthetic sample: .*; it must work on slices of any size, from one sample on"),
        ("Rooted", "forward must return finite logits for synthetic samples .*; got nan; look for a division by zero"),
        (
            "Norm",
            "Norm: backward must give finite gradients for synthetic samples, and does not for feature c0; look for a root or norm",
        ),
        ("Layered", r"must return finite logits .*; got (nan|-inf); look for .* negative, in deep.1.1 \(Logarithm\)"),
        ("Rooted", "or a logarithm or root of a value that may be negative, in its own forward, not in a layer"),
        ("Probable", "Probable: forward must return logits, and ends in a sigmoid; return the sigmoid's input"),
        ("Failing", r"KeyError: 'nothing of this name' \(model_cases.py, line \d+\); it must work on slices"),
        ("not_a_model", "not_a_model: must return a torch.nn.Module; got NoneType"),
        ("wide_and_deep", "wide_and_deep: returns WideDeep, which has further_columns; name that class as the model"),
        ("Unbuildable", r"cannot be built: RuntimeError: no such luck \(model_cases.py, line \d+\)"),
    ],
)
def test_modules_that_cannot_be_trained_exactly_are_refused(case: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        build_model(load_model(f"model_cases:{case}"), spec_of(), {}, 0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("dlrn", "must be one of dlrm, wide_deep, dcn, deepfm, shared_bottom, mmoe, package.module:Class or file.py:Class"),
        ("no_such_module:Model", "cannot import no_such_module:Model: ModuleNotFoundError"),
        ("model_cases:Nothing", "cannot import model_cases:Nothing: AttributeError"),
        ("model_cases:POISON_ABOVE", "must be a subclass of torch.nn.Module, or a function that builds one from a ModelSpec$"),
        (
            "model_cases:BUILT",
            "a function that builds one from a ModelSpec; it is built when it is imported, so --seed does not affect it",
        ),
        ("model_cases:BadColumns", "must map names .not weights. to positive integers"),
    ],
)
def test_what_is_no_model_is_refused(name: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load_model(name)


@pytest.mark.parametrize(
    ("case", "options", "ignored"),
    [
        ("Sum", {}, []),
        ("Zero", {}, []),
        ("Deaf", {"hears": 1}, ["c1", "c2"]),
        ("Deaf", {"hears": 3, "sees": False}, ["dense values"]),
    ],
)
def test_what_a_model_ignores_is_found(case: str, options: dict[str, object], ignored: list[str]) -> None:
    model = load_model(f"model_cases:{case}")
    assert ignored_inputs(build_model(model, spec_of(features=3), options, 0), spec_of(features=3)) == ignored


@pytest.mark.parametrize("name", MODELS)
def test_our_models_ignore_nothing(name: str) -> None:
    assert ignored_inputs(build_model(load_model(name), spec_of(), {}, 0), spec_of()) == []


def test_training_a_model_that_ignores_features_warns_once(clicks: Clicks, tmp_path: Path) -> None:
    # It then ends, before it has started anything.
    status, _, err = run_here(
        "train", clicks.schedule, "--run", tmp_path / "run", "--store", "redis://127.0.0.1:1", "--model", "model_cases:Deaf"
    )
    assert status == 2
    warnings = [line for line in err.splitlines() if "warning" in line]
    assert warnings == ["foreload: warning: model model_cases:Deaf: ignores user, site: its logits do not depend on them"]


@pytest.mark.parametrize("name", MODELS)
def test_the_columns_of_rows_are_known_without_the_class(name: str) -> None:
    assert further_columns_of(name, "") == further_columns(load_model(name))


@pytest.mark.parametrize("name", sorted(MODELS))
def test_linear_layers_begin_with_the_deviation_that_is_given(name: str) -> None:
    layers = [
        layer
        for layer in build_model(load_model(name), spec_of(), {"init_std": "0.01"}, 1).modules()
        if isinstance(layer, nn.Linear)
    ]
    weights = torch.cat([layer.weight.detach().flatten() for layer in layers])
    assert len(weights) > 1000
    assert abs(weights.mean()) < 0.001
    assert 0.009 < weights.std() < 0.011
    assert all(not layer.bias.any() for layer in layers if layer.bias is not None)
