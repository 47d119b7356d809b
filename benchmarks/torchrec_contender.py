"""One rank of TorchRec's contender of bench_torchrec.py; runs in the virtual environment of torchrec_environment.py.

    python benchmarks/torchrec_contender.py '{"rank": 0, ...}'

As fast as TorchRec was found to run on a CPU: tables whole on one rank each, large and small ones in turn, FBGEMM's table-batched
embeddings with row-wise Adagrad fused into the backward pass, the dense part under DistributedDataParallel with its gradients as views of one
bucket, and batches made KeyedJaggedTensors of int64 by one copy, since what they hold lies on disk in TorchRec's own order.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from torch import Tensor, nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper, DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from foreload.trainer.models.dlrm import DLRM
from foreload.trainer.models.spec import Embeddings, ModelSpec
from interleaved import InterleavedRuns, ready

EPSILON = 1e-8


@dataclass(frozen=True)
class RankSpec:
    """What a rank is told. samples: the folder of LanesWorkload.slices; port: where rank 0 listens."""

    rank: int
    ranks: int
    port: int
    samples: str
    tables: list[int]  # rows of each
    dim: int
    lr: float
    dense_lr: float
    dense_width: int
    model: dict[str, Any]
    seed: int


@dataclass
class Batch:
    """A rank's slice of a step."""

    dense: Tensor
    sparse: KeyedJaggedTensor
    labels: Tensor


class Model(nn.Module):
    """Embeddings of one row a feature, and the project's own dense part."""

    def __init__(self, rank: RankSpec, names: list[str]) -> None:
        super().__init__()
        configs = [
            EmbeddingBagConfig(name=f"t{k}", num_embeddings=rows, embedding_dim=rank.dim, feature_names=[name])
            for k, (name, rows) in enumerate(zip(names, rank.tables, strict=True))
        ]
        self.embeddings = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
        torch.manual_seed(rank.seed)
        spec = ModelSpec(rank.dense_width, tuple((name, rank.dim, f"t{k}") for k, name in enumerate(names)))
        self.dense = DLRM(spec, **rank.model)
        self._shape = (len(names), rank.dim)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The loss of the rank's slice, and its logits [b]."""
        block = self.embeddings(batch.sparse).values().view(-1, *self._shape)
        logits = self.dense(batch.dense, Embeddings({}, block))
        # Gradients are averaged over the ranks, whose slices are equal.
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, logits


def batches(rank: RankSpec, names: list[str]) -> Iterator[Batch]:
    """The rank's slices, in order."""
    folder = Path(rank.samples)
    ids, dense, labels = (np.load(folder / f"{name}-{rank.rank}.npy", mmap_mode="r") for name in ("ids", "dense", "labels"))
    samples = labels.shape[1]
    lengths = torch.ones(samples * len(names), dtype=torch.int64)
    offsets = torch.arange(samples * len(names) + 1)
    for step in range(len(labels)):
        sparse = KeyedJaggedTensor(
            keys=names, values=torch.from_numpy(ids[step].copy()), lengths=lengths, offsets=offsets, stride=samples
        )
        yield Batch(torch.from_numpy(dense[step].copy()), sparse, torch.from_numpy(labels[step].copy()))


def sharded(rank: RankSpec, names: list[str]) -> DistributedModelParallel:
    """The model over all ranks: each table whole on one of them, by descending size in turn."""
    model = Model(rank, names)
    by_size = sorted(range(len(names)), key=lambda k: -rank.tables[k])
    rank_of = {f"t{k}": table_wise(rank=place % rank.ranks, compute_kernel="fused") for place, k in enumerate(by_size)}
    fused = {
        "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        "learning_rate": rank.lr,
        "eps": EPSILON,
        "bounds_check_mode": BoundsCheckMode.NONE,
    }
    sharder = EmbeddingBagCollectionSharder(fused_params=fused)
    plan = construct_module_sharding_plan(
        model.embeddings, rank_of, sharder=sharder, local_size=rank.ranks, world_size=rank.ranks, device_type="cpu"
    )
    group = dist.group.WORLD
    assert group is not None
    return DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(group),
        device=torch.device("cpu"),
        plan=ShardingPlan({"embeddings": plan}),
        sharders=[sharder],
        data_parallel_wrapper=DefaultDataParallelWrapper(static_graph=False, bucket_cap_mb=64),
    )


def main() -> None:
    """Run the rank that the command line describes."""
    rank = RankSpec(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(rank.port), RANK=str(rank.rank), WORLD_SIZE=str(rank.ranks))
    os.environ.update(LOCAL_RANK=str(rank.rank), LOCAL_WORLD_SIZE=str(rank.ranks))
    dist.init_process_group("gloo")
    names = [f"c{k}" for k in range(len(rank.tables))]
    model = sharded(rank, names)
    optimizer = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda parameters: torch.optim.Adagrad(parameters, lr=rank.dense_lr, fused=True),
    )
    interleaved = InterleavedRuns()
    ready()
    interleaved.begin()
    for batch in batches(rank, names):
        optimizer.zero_grad()
        loss, _ = model(batch)
        loss.backward()
        optimizer.step()
        interleaved.step(float(loss.detach()))


if __name__ == "__main__":
    main()
