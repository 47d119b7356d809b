"""This project's dense part with FBGEMM's table-batched embedding, with torch's own embedding, and alone: contenders of bench_cuda.py.

    python benchmarks/cuda_contender.py '{"rows": "device", ...}'

FBGEMM's run in the virtual environment of fbgemm_environment.py, or, on the CPU, of torchrec_environment.py: all 26 tables are one batched operator,
with row-wise Adagrad fused into its backward pass. The others need torch alone. Weights and the dense part are float32, as this project's are.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from torch import Tensor, nn

from foreload.trainer.models.dlrm import DLRM
from foreload.trainer.models.spec import Embeddings, ModelSpec
from interleaved import InterleavedRuns, ready

EPSILON = 1e-8


@dataclass(frozen=True, slots=True)
class CudaSpec:
    """What a contender is told.

    rows: where they are: "device"; "managed cache": in host memory behind a cache of `slots` rows on the device; "host" (the CPU);
    "torch": all in one nn.Embedding with sparse gradients on the device, and torch's Adagrad; "nowhere": the dense floor, whose
    embeddings never change. device: cpu or cuda; samples: the folder of LanesWorkload.slices; tables: rows of each.
    """

    rows: str
    device: str
    samples: str
    tables: list[int]
    slots: int
    dim: int
    lr: float
    dense_lr: float
    dense_width: int
    model: dict[str, Any]
    seed: int


def embedding(spec: CudaSpec) -> Callable[[Tensor, Tensor], Tensor]:
    """All tables as one operator: (ids by feature and sample, offsets) -> [b, F * D]."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen

    place = {
        "device": EmbeddingLocation.DEVICE,
        "managed cache": EmbeddingLocation.MANAGED_CACHING,
        "host": EmbeddingLocation.HOST,
    }[spec.rows]
    compute = ComputeDevice.CUDA if spec.device == "cuda" else ComputeDevice.CPU
    module: Any = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, spec.dim, place, compute) for rows in spec.tables],
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=spec.lr,
        eps=EPSILON,
        cache_load_factor=spec.slots / sum(spec.tables),
        pooling_mode=PoolingMode.SUM,
        bounds_check_mode=BoundsCheckMode.NONE,
        stochastic_rounding=False,
        device=torch.device(spec.device),
    )
    with torch.no_grad():
        for weights in module.split_embedding_weights():
            bound = len(weights) ** -0.5
            weights.uniform_(-bound, bound)
    batched: Callable[[Tensor, Tensor], Tensor] = module
    return batched


def embeddings(spec: CudaSpec, samples: int) -> tuple[Callable[[Tensor], Tensor], list[Tensor]]:
    """The function from a step's ids to what the dense part is given, [b, F, D], and what of it an optimizer must update."""
    features = len(spec.tables)
    if spec.rows == "nowhere":
        block = torch.empty(samples, features, spec.dim, device=spec.device).uniform_(-0.01, 0.01)
        return lambda ids: block.detach().requires_grad_(), []
    if spec.rows == "torch":
        bases = torch.tensor([0, *accumulate(spec.tables)][:-1], device=spec.device).unsqueeze(1)
        table = nn.Embedding(sum(spec.tables), spec.dim, sparse=True, device=spec.device)
        nn.init.uniform_(table.weight, -0.01, 0.01)
        return lambda ids: table(ids.view(features, samples) + bases).transpose(0, 1), [table.weight]
    batched = embedding(spec)
    offsets = torch.arange(samples * features + 1, device=spec.device)
    return lambda ids: batched(ids, offsets).view(samples, features, spec.dim), []


def batches(spec: CudaSpec) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Ids, dense values and labels of every step, on the device."""
    ids, dense, labels = (np.load(Path(spec.samples) / f"{name}-0.npy", mmap_mode="r") for name in ("ids", "dense", "labels"))
    for step in zip(ids, dense, labels, strict=True):
        one, two, three = (torch.from_numpy(array.copy()).to(spec.device) for array in step)
        yield one, two, three


def main() -> None:
    """Run the contender that the command line describes."""
    spec = CudaSpec(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    torch.manual_seed(spec.seed)
    names = [f"c{k}" for k in range(len(spec.tables))]
    dense = DLRM(ModelSpec(spec.dense_width, tuple((name, spec.dim, f"t{k}") for k, name in enumerate(names))), **spec.model)
    dense.to(spec.device)
    optimizer = torch.optim.Adagrad(dense.parameters(), lr=spec.dense_lr, fused=True if spec.device == "cpu" else None)
    samples = np.load(Path(spec.samples) / "labels-0.npy", mmap_mode="r").shape[1]
    look_up, weights = embeddings(spec, samples)
    optimizers: list[torch.optim.Optimizer] = [optimizer]
    if weights:
        optimizers.append(torch.optim.Adagrad(weights, lr=spec.lr, eps=EPSILON))
    interleaved = InterleavedRuns()
    ready()
    interleaved.begin()
    for ids, values, labels in batches(spec):
        for each in optimizers:
            each.zero_grad()
        block = look_up(ids)
        loss = nn.functional.binary_cross_entropy_with_logits(dense(values, Embeddings({}, block)), labels)
        loss.backward()
        for each in optimizers:
            each.step()
        # Waits for the device.
        interleaved.step(float(loss.detach()))


if __name__ == "__main__":
    main()
