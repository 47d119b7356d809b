"""Models as people publish them, written for plain PyTorch alone; and `..._here`, functions by which foreload trains them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

import foreload

if TYPE_CHECKING:
    from foreload.trainer.models.spec import ModelSpec
    from foreload.trainer.models.wrapping import Wrapped

ROWS = {"site": 40, "ad": 30, "user": 120}


def mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class DLRM(nn.Module):
    """Dense values, and per table offsets and indices, as in the paper's code. Gives [b, 1]."""

    def __init__(self, sizes: Sequence[int], dimension: int, dense: int) -> None:
        super().__init__()
        self.emb_l = nn.ModuleList(nn.EmbeddingBag(rows, dimension, mode="sum", sparse=True) for rows in sizes)
        self.bot_l = mlp(dense, 8, dimension)
        vectors = len(sizes) + 1
        self.top_l = mlp(dimension + vectors * (vectors - 1) // 2, 8, 1)

    def apply_emb(self, lS_o: Sequence[Tensor], lS_i: Sequence[Tensor]) -> list[Tensor]:
        ly = []
        for k, sparse_index_group_batch in enumerate(lS_i):
            ly.append(self.emb_l[k](sparse_index_group_batch, lS_o[k]))
        return ly

    def interact_features(self, x: Tensor, ly: list[Tensor]) -> Tensor:
        (batch_size, d) = x.shape
        T = torch.cat([x, *ly], dim=1).view((batch_size, -1, d))
        Z = torch.bmm(T, torch.transpose(T, 1, 2))
        _, ni, nj = Z.shape
        li = torch.tensor([i for i in range(ni) for j in range(i)])
        lj = torch.tensor([j for i in range(nj) for j in range(i)])
        return torch.cat([x, Z[:, li, lj]], dim=1)

    def forward(self, dense_x: Tensor, lS_o: Sequence[Tensor], lS_i: Sequence[Tensor]) -> Tensor:
        x = self.bot_l(dense_x)
        ly = self.apply_emb(lS_o, lS_i)
        logits: Tensor = self.top_l(self.interact_features(x, ly))
        return logits


class TwoTower(nn.Module):
    """A user's id, age and history on one side, an ad and the ad before it, of one table, on the other."""

    def __init__(self, users: int, ads: int, sites: int, dimension: int) -> None:
        super().__init__()
        self.user_emb = nn.Embedding(users, dimension)
        self.ad_emb = nn.Embedding(ads, dimension)
        self.history_emb = nn.EmbeddingBag(sites, 2 * dimension, mode="mean")
        self.user_tower = mlp(3 * dimension + 1, 8, 4)
        self.ad_tower = mlp(2 * dimension, 8, 4)
        self.last_norm = nn.LayerNorm(4)

    def forward(
        self, user: Tensor, ad: Tensor, last_ad: Tensor, history: Tensor, offsets: Tensor | None = None, *, age: Tensor
    ) -> Tensor:
        person = torch.cat([self.user_emb(user.long()), self.history_emb(history, offsets), age.unsqueeze(1)], dim=-1)
        item = torch.cat([self.ad_emb(ad), self.ad_emb(last_ad)], dim=-1).view(ad.size(0), -1)
        return (self.last_norm(self.user_tower(person)) * self.ad_tower(item)).sum(dim=1)


class WideDeep(nn.Module):
    """A dict of ids; for each a deep table, of widths of their own, and a wide one, which is one number a row."""

    def __init__(self, rows: dict[str, int], dimensions: dict[str, int], dense: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.deep = nn.ModuleDict({name: nn.Embedding(count, dimensions[name]) for name, count in rows.items()})
        self.wide = nn.ModuleDict({name: nn.Embedding(count, 1) for name, count in rows.items()})
        self.linear = nn.Linear(dense, 1)
        self.net = nn.Sequential(mlp(sum(dimensions.values()) + dense, 8, 1), nn.Dropout(dropout))

    def forward(self, ids: dict[str, Tensor], numbers: Tensor) -> Tensor:
        wide = torch.stack([self.wide[name](value).squeeze(-1) for name, value in ids.items()]).sum(0)
        deep = self.net(torch.cat([*(self.deep[name](value) for name, value in ids.items()), numbers], -1))
        return wide + (deep + self.linear(numbers)).view(-1)


def dlrm() -> DLRM:
    return DLRM([*ROWS.values(), ROWS["site"]], 4, 2)


def two_tower() -> TwoTower:
    return TwoTower(ROWS["user"], ROWS["ad"], ROWS["site"], 3)


def wide_deep(dropout: float = 0.0) -> WideDeep:
    return WideDeep(ROWS, {"site": 2, "ad": 3, "user": 5}, 2, dropout)


def dlrm_here(spec: ModelSpec) -> Wrapped:
    return foreload.wrap(dlrm(), dense={"dense_x": ["x", "age"]}, columns={"lS_i": ["site", "ad", "user", "visited"]})


def two_tower_here(spec: ModelSpec) -> Wrapped:
    return foreload.wrap(two_tower(), dense={"age": "age"}, columns={"history": "visited", "last_ad": "ad_before"})


def wide_deep_here(spec: ModelSpec, *, dropout: float = 0.0) -> Wrapped:
    return foreload.wrap(wide_deep(dropout), dense={"numbers": ["age", "x"]}, columns={"ids": {name: name for name in ROWS}})


class Gated(nn.Module):
    """A gate that sharpens as training goes on; its weights are NumPy's."""

    def __init__(self, users: int, ads: int, dimension: int) -> None:
        super().__init__()
        self.user_emb, self.ad_emb = nn.Embedding(users, dimension), nn.Embedding(ads, dimension)
        self.gate, self.out = nn.Linear(2 * dimension + 1, 2 * dimension + 1), nn.Linear(2 * dimension + 1, 1)
        with torch.no_grad():
            self.gate.weight.copy_(torch.from_numpy(np.random.uniform(-1, 1, self.gate.weight.shape)))  # noqa: NPY002

    def forward(self, user: Tensor, ad: Tensor, progress: int, age: Tensor) -> Tensor:
        inputs = torch.cat([self.user_emb(user), self.ad_emb(ad), age.unsqueeze(1)], 1)
        return self.out(inputs * torch.sigmoid(self.gate(inputs) * (1 + progress / 8)))


def annealed_here(spec: ModelSpec) -> Wrapped:
    return foreload.wrap(Gated(ROWS["user"], ROWS["ad"], 4), dense={"age": "age"}, step="progress")


class Native(nn.Module):
    """Written for foreload: its layers take no indices, nor does its forward."""

    def __init__(self, *, dimension: int) -> None:
        super().__init__()
        self.ad = foreload.nn.Embedding("ad")
        self.towers = nn.ModuleDict({"visited": foreload.nn.EmbeddingBag("visited"), "user": foreload.nn.Embedding("user")})
        self.net = mlp(3 * dimension + 1, 6, 1)

    def forward(self, dense: Tensor) -> Tensor:
        seen = torch.cat([self.ad(), *(tower() for tower in self.towers.values()), dense], 1)
        # A layer called again gives the same rows.
        logits: Tensor = self.net(seen).squeeze(1) + (self.ad() * self.towers["user"]()).sum(1)
        return logits


def native_here(spec: ModelSpec) -> Native:
    (dimension,) = {dimension for _, dimension, _ in spec.features}
    return Native(dimension=dimension)


NATIVE_FEATURES = """
label = "clicked"
[table.place]
rows = 60
dimension = 4
[[feature]]
name = "ad"
rows = 30
dimension = 4
encoding = "id"
[[feature]]
name = "visited"
table = "place"
pooling = "mean"
[[feature]]
name = "user"
table = "place"
[[dense]]
name = "age"
transform = "standard"
"""
