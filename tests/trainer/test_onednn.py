"""Layers by oneDNN: what they compute, and what is left to torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from foreload.trainer.compute import onednn


def results(of: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None, gradient: Tensor) -> list[Tensor]:
    """Of a linear function: its value, and the gradients of all that it is given."""
    given = [tensor.clone().requires_grad_() for tensor in (x, weight, *([] if bias is None else [bias]))]
    y = of(*given)
    return [y.detach(), *torch.autograd.grad(y, given, gradient)]


@pytest.mark.parametrize(("samples", "inputs", "outputs"), [(1, 13, 64), (7, 63, 1), (129, 367, 64), (64, 1024, 33)])
@pytest.mark.parametrize("biased", [True, False], ids=["with bias", "without"])
def test_values_and_gradients_are_those_of_the_product(samples: int, inputs: int, outputs: int, biased: bool) -> None:
    torch.manual_seed(0)
    x, weight, gradient = torch.randn(samples, inputs), torch.randn(outputs, inputs), torch.randn(samples, outputs)
    bias = torch.randn(outputs) if biased else None
    double = None if bias is None else bias.double()
    exact = results(torch.nn.functional.linear, x.double(), weight.double(), double, gradient.double())
    for ours, theirs in zip(results(onednn.linear, x, weight, bias, gradient), exact, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-6 * max(samples, inputs, outputs))


def test_a_gradient_that_is_expanded_is_taken_as_it_is() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(8, 5, requires_grad=True), torch.randn(3, 5, requires_grad=True)
    ours = torch.autograd.grad(onednn.linear(x, weight).sum(), [x, weight])
    theirs = torch.autograd.grad(torch.nn.functional.linear(x, weight).sum(), [x, weight])
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("shape", "dtype"), [((5,), torch.float32), ((2, 3, 5), torch.float32), ((4, 5), torch.float64), ((4, 5), torch.bfloat16)]
)
def test_other_shapes_and_types_are_torchs_own(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight, bias = torch.randn(shape).to(dtype), torch.randn(3, 5).to(dtype), torch.randn(3).to(dtype)
    assert torch.equal(onednn.linear(x, weight, bias), torch.nn.functional.linear(x, weight, bias))
