"""Dense optimizers: by name, with options, and going on from saved state as if never stopped."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from command_line import ROOT
from torch import nn

from foreload.base.errors import SettingError
from foreload.trainer.compute.dense_optimizers import (
    DENSE_OPTIMIZERS,
    build_dense_optimizer,
    load_optimizer_state,
    optimizer_state,
)
from foreload.trainer.compute.dense_optimizers import step as step_of
from foreload.trainer.errors import RunError


def steps(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    first: int,
    last: int,
    update: Callable[[torch.optim.Optimizer], object] = step_of,
) -> None:
    """Steps first .. last - 1 with gradients that are a function of the step's number."""
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        for parameter in module.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        update(optimizer)


def network() -> nn.Module:
    """The same parameters at every call."""
    torch.manual_seed(0)
    return nn.Linear(5, 3)


@pytest.mark.parametrize("name", DENSE_OPTIMIZERS)
def test_a_step_has_the_bits_of_torchs_own(name: str) -> None:
    ours, theirs = network(), network()
    steps(ours, build_dense_optimizer(name, 0.01, {}, ours), 0, 5)
    steps(theirs, build_dense_optimizer(name, 0.01, {}, theirs), 0, 5, lambda optimizer: optimizer.step())
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_torchs_compiler_is_not_imported() -> None:
    program = (
        "import sys, torch; from foreload.trainer.compute import numerics; numerics.set_up(1); "
        "from foreload.trainer.compute.dense_optimizers import *; one = torch.nn.Linear(2, 2); "
        "found = build_dense_optimizer('adagrad', 0.1, {}, one); one(torch.ones(1, 2)).sum().backward(); step(found); "
        "load_optimizer_state(one, found, optimizer_state(one, found)); print(sorted({'torch._dynamo', 'sympy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_a_model_that_torch_compiles_is_deterministic_too() -> None:
    program = (
        "import torch; from foreload.trainer.compute import numerics; numerics.set_up(1); import torch._inductor.config as inductor; "
        "print(inductor.deterministic, torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split() == ["True", "True", "False"]


@pytest.mark.parametrize("name", DENSE_OPTIMIZERS)
def test_saved_state_goes_on_with_the_same_bits(name: str) -> None:
    whole, cut, resumed = network(), network(), network()
    steps(whole, build_dense_optimizer(name, 0.01, {}, whole), 0, 6)
    before = build_dense_optimizer(name.upper(), 0.01, {}, cut)
    steps(cut, before, 0, 3)
    saved = optimizer_state(cut, before)
    assert all(value.dtype == torch.float32 for value in saved.values())
    resumed.load_state_dict(cut.state_dict())
    after = build_dense_optimizer(name, 0.01, {}, resumed)
    load_optimizer_state(resumed, after, saved)
    steps(resumed, after, 3, 6)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))


def test_options_are_torchs() -> None:
    module, reference = network(), network()
    optimizer = build_dense_optimizer("adamw", 0.1, {"betas": "0.8,0.9", "weight_decay": "0.5", "amsgrad": "true"}, module)
    torchs = torch.optim.AdamW(reference.parameters(), lr=0.1, betas=(0.8, 0.9), weight_decay=0.5, amsgrad=True)
    steps(module, optimizer, 0, 3)
    steps(reference, torchs, 0, 3, lambda optimizer: optimizer.step())
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), reference.parameters(), strict=True))
    assert sorted(optimizer_state(module, optimizer)) == [
        f"{name}/{key}" for name in ("bias", "weight") for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step")
    ]


@pytest.mark.parametrize(
    ("name", "lr", "options", "message"),
    [
        ("LBFGS", 0.1, {}, "LBFGS evaluates the model several times a step"),
        ("SparseAdam", 0.1, {}, "SparseAdam takes sparse gradients only"),
        ("Sagd", 0.1, {}, "must be one of SGD, Adam"),
        ("SGD", float("inf"), {}, "dense-lr: must be a finite number"),
        ("SGD", 0.1, {"momentun": 1}, "SGD has no option momentun; it has momentum, dampening"),
        ("SGD", 0.1, {"foreach": "true"}, "has no option foreach"),
        ("SGD", 0.1, {"momentum": "fast"}, "dense-options: momentum: must be a number; got 'fast'"),
        ("SGD", 0.1, {"momentum": "-1"}, "dense-options: SGD: Invalid momentum"),
        ("Adam", 0.1, {"betas": "0.9"}, "must be 2 numbers with commas"),
    ],
)
def test_what_has_no_fixed_update_or_does_not_exist_is_refused(
    name: str, lr: float, options: dict[str, object], message: str
) -> None:
    with pytest.raises(SettingError, match=message):
        build_dense_optimizer(name, lr, options, network())


def test_state_of_another_model_is_refused() -> None:
    module = network()
    optimizer = build_dense_optimizer("adam", 0.1, {}, module)
    for saved in ({"other/step": torch.zeros(())}, {"weight/exp_avg": torch.zeros(4, 4)}):
        with pytest.raises(RunError, match="belongs to no parameter"):
            load_optimizer_state(module, optimizer, saved)
