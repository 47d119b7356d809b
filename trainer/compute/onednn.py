"""Layers multiplied by oneDNN.

oneDNN uses AVX-512 on every processor that has it. torch's default is MKL, which uses AVX2 on
AMD's. In a process under `--cpu-capability avx512-onednn` (numerics), oneDNN replaces
`torch.nn.functional.linear`, which torch.nn.Linear calls too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_torchs_own = torch.nn.functional.linear


def take_over() -> None:
    """Replace `torch.nn.functional.linear` in this process by `linear`."""
    torch.nn.functional.linear = linear


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return input [n, k] times the transpose of weight [m, k], plus bias [m]: [n, m].

    Tensors that are not float32 on the CPU, and inputs of other dimensions, are left to torch.
    """
    tensors = (input, weight) if bias is None else (input, weight, bias)
    if input.dim() != 2 or any(tensor.dtype != torch.float32 or tensor.device.type != "cpu" for tensor in tensors):
        return _torchs_own(input, weight, bias)
    return _Linear.apply(input, weight, bias)


def _product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return a [n, k] times the transpose of b [m, k], plus bias [m]."""
    return torch.ops.mkldnn._linear_pointwise(a, b, bias, "none", [], "")


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(input, weight)
        return _product(input, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        input, weight = ctx.saved_tensors
        of_input, of_weight, of_bias = ctx.needs_input_grad
        gradient = gradient.contiguous()
        return (
            _product(gradient, weight.t()) if of_input else None,
            _product(gradient.t(), input.t()) if of_weight else None,
            gradient.sum(0) if of_bias else None,
        )
