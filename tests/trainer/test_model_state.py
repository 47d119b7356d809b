"""A model is a function of --seed, the samples and the step: what its constructor draws is seeded, and what its forward keeps is found."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from loss_cases import CALLS
from torch import nn

import foreload
from foreload.trainer.compute.own_loss import check_loss, load_loss
from foreload.trainer.compute.training_loss import OwnLoss
from foreload.trainer.errors import ModelError
from foreload.trainer.models.building import build_model, load_model
from foreload.trainer.models.diagnosis import checksum, first_change, hidden_state
from foreload.trainer.models.layers import takes_step
from foreload.trainer.models.spec import Embeddings, ModelSpec

SPEC = ModelSpec(2, tuple((f"c{i}", 4, f"t{i}") for i in range(3)))
pytestmark = pytest.mark.usefixtures("cases_on_path")


def build(name: str, seed: int = 7, **options: object) -> nn.Module:
    return build_model(load_model(f"random_models:{name}"), SPEC, options, seed, twice=True)


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_what_a_constructor_draws_follows_from_the_seed_alone() -> None:
    built: list[nn.Module] = []
    for seed in (7, 7, 8, 2**40 + 1):
        # Whatever the caller has drawn, and whatever it draws next, is its own affair.
        random.seed(len(built))
        np.random.mtrand._rand.seed(len(built))
        torch.manual_seed(len(built))
        built.append(build("Drawn", seed))
        drawn = random.random(), np.random.mtrand._rand.random_sample(), torch.rand(()).item()
        random.seed(len(built) - 1)
        np.random.mtrand._rand.seed(len(built) - 1)
        torch.manual_seed(len(built) - 1)
        assert drawn == (random.random(), np.random.mtrand._rand.random_sample(), torch.rand(()).item())
    assert same(built[0], built[1])
    assert not same(built[0], built[2])
    assert not same(built[0], built[3])


def test_it_is_what_the_generators_give_under_that_seed() -> None:
    module = build("Drawn", 5)
    torch.manual_seed(5)
    hidden = nn.Linear(SPEC.width, 6)
    assert torch.equal(nn.Linear(6, 1).weight, module.get_parameter("out.weight"))
    expected = np.random.RandomState(5).normal(0, 0.3, hidden.weight.shape).astype(np.float32)
    assert np.array_equal(module.get_parameter("hidden.weight").detach().numpy(), expected)
    assert module.get_parameter("out.bias").item() == np.float32(random.Random(5).uniform(-0.5, 0.5))
    assert np.array_equal(
        module.get_parameter("hidden.bias").detach().numpy()[:4], np.random.RandomState(0).rand(4).astype(np.float32)
    )


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("SystemParameter", "built twice under one seed, parameter out.bias differs; draw random numbers from torch, numpy.random or random"),
        ("UnseededBuffer", "built twice under one seed, buffer noise differs"),
        ("SharedGenerator", "built twice under one seed, parameter hidden.bias differs"),
        ("SystemAttribute", "its forward gives different outputs for the same samples, though parameters and buffers are equal"),
        ("FirstBatch", "do not keep the first samples in attributes"),
    ],
)  # fmt: skip
def test_a_constructor_that_gives_another_model_each_time_is_refused(case: str, message: str) -> None:
    with pytest.raises(ModelError, match=f"^{case}: .*{message}"):
        build(case)


@pytest.mark.parametrize(
    ("place", "change"),
    [
        ("int", "held: 4, then 6"),
        ("list", r"len\(held\): 4, then 6"),
        ("dict", r"held\['seen'\]: 4, then 6"),
        ("set", "held: 5: "),
        ("array", r"held: float64 \[3\] with checksum \w+, then float64 \[3\] with"),
        ("big", r"held\[0\]: float64 \[40000\] with checksum"),
        ("tensor", r"held: torch.float32 \[2\] with checksum"),
        ("deep", r"held\['a'\]\[0\]\[0\].notes.count: 4, then 6"),
        ("count", r"held: count\(4\), then count\(6\)"),
        ("torch generator", "held: Generator in state"),
        ("numpy generator", "held: Generator in state"),
        ("python generator", "held: Random in state"),
        ("module", r"held\[0\]._parameters\['bias'\]: torch.float32 \[1\] "),
        ("closure", "heldadd.count: 4, then 6"),
        ("class", r"Keeping.of_class\[0\]: "),
        ("global", r"Keeping.CALLS: \d+, then \d+"),
        ("evaluation", "held: 3, then 5"),
    ],
)
def test_a_forward_that_keeps_a_state_is_refused_with_the_attribute(place: str, change: str) -> None:
    mode = " in evaluation mode" if place == "evaluation" else ""
    with pytest.raises(
        ModelError,
        match=f"^Keeping: forward must keep no state of its own.* after two forwards{mode} of the same samples under one seed an attribute differs: "
        f"{change}.*; if something is to change during training, make it depend on the step: forward\\(self, dense, embeddings, step\\)",
    ):
        build("Keeping", place=place)


class _Layered(nn.Module):
    """It takes the rows by layers, and notes what else it is given."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.rows = nn.ModuleList(foreload.nn.Embedding(name) for name in spec.names)
        self.bias = nn.Parameter(torch.zeros(1))

    def outputs(self, *others: torch.Tensor) -> torch.Tensor:
        return torch.cat([*(layer() for layer in self.rows), *others], 1).sum(1) + self.bias


class _StepAlone(_Layered):
    def forward(self, step: int) -> torch.Tensor:
        return self.outputs() * (step + 1)


class _DenseAndStep(_Layered):
    def forward(self, dense: torch.Tensor, *, step: int) -> torch.Tensor:
        return self.outputs(dense) * (step + 1)


class _StepWithDefault(_Layered):
    def forward(self, dense: torch.Tensor, embeddings: Embeddings, step: int = 7, further: int = 0) -> torch.Tensor:
        return self.outputs(dense) * (step + 1) + further


class _NoStep(_Layered):
    def forward(self, dense: torch.Tensor, **rest: int) -> torch.Tensor:
        assert not rest
        return self.outputs(dense)


@pytest.mark.parametrize("model", [_StepAlone, _DenseAndStep, _StepWithDefault, _NoStep])
def test_a_forward_gets_the_step_if_it_has_a_parameter_of_that_name(model: type[_Layered]) -> None:
    module = build_model(model, SPEC, {}, 0, twice=True)
    assert takes_step(module) == (model is not _NoStep)
    block = torch.ones(2, 3, 4)
    given = torch.ones(2, 2), Embeddings.split(block, SPEC.names, [(("weights", 4),)] * 3)
    width = 12 if model is _StepAlone else 14
    if takes_step(module):
        assert module(*given, step=4).tolist() == [width * 5.0] * 2
    else:
        assert module(*given).tolist() == [width] * 2


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("Late", "an attribute differs: n: 4, then 6"),
        ("MovesParameter", "forward must leave parameters as they are.*; it changes out.bias"),
        ("SeldomNoise", "draw random numbers from torch's generator alone, which every step seeds; it draws from numpy.random"),
        ("StepFirst", r"step must be the last parameter of forward; got forward\(dense, step, embeddings\)"),
    ],
)
def test_other_states_are_refused(case: str, message: str) -> None:
    with pytest.raises(ModelError, match=f"^{case}: .*{message}"):
        build(case)


def test_what_is_equal_behind_the_same_samples_may_be_kept() -> None:
    module = build("Caching")
    assert len(module.masks) > 1  # type: ignore[arg-type]
    assert module.loss is not None
    assert all(parameter.grad is None for parameter in module.parameters())


def test_a_search_for_state_is_bounded_and_survives_any_object() -> None:
    class Hostile:
        def __getattribute__(self, name: str) -> object:
            raise RuntimeError(name)

    class Endless(dict[str, object]):
        def items(self) -> object:  # type: ignore[override]
            return iter(lambda: ("again", [object()]), None)

    module = nn.Module()
    module.hostile, module.endless, module.many = [Hostile()], Endless(), list(range(10**6))  # type: ignore[assignment]
    module.last = 3  # type: ignore[assignment]
    values = hidden_state(module)
    assert values["last"] == "3"
    assert values["len(many)"] == "1000000"
    assert len(values) < 110_000
    assert first_change(values, values | {"last": "4"}) == "last: 3, then 4"


@pytest.mark.parametrize(
    "value",
    [torch.zeros(()), torch.zeros(0, 3), torch.tensor([True]), torch.zeros(2, dtype=torch.bfloat16), torch.eye(2).to_sparse(), np.zeros(2)],
)  # fmt: skip
def test_checksums_tell_values_shapes_and_dtypes_apart(value: torch.Tensor | np.ndarray) -> None:
    assert checksum(value) == checksum(value)
    others = [torch.zeros(2), torch.tensor([0.0, -0.0]), torch.zeros(1, 2), torch.zeros(2, dtype=torch.float64)]
    assert len({checksum(one) for one in (value, *others)}) == 5


def test_a_loss_that_counts_its_calls_is_refused_before_its_values_show_it() -> None:
    CALLS[0] = 0
    name = "loss_cases:late"
    with pytest.raises(
        ModelError, match=r"must keep no state; it changes an attribute from call to call: late.CALLS\[0\]: \d+, then \d+"
    ):
        check_loss(OwnLoss(name, load_loss(name)), SPEC)
