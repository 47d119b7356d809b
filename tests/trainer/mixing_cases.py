"""Models whose outputs depend on other samples than their own, for what their docstring says, and some whose do not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from foreload.trainer.models.spec import ModelSpec


class Apart(nn.Module):
    """Attention over the features of a sample, dropout, norms over its own values: each output is its sample's alone."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        dimension, width = spec.features[0][1], spec.width + spec.dense_width
        self.names = spec.names
        self.attention = nn.MultiheadAttention(dimension, 2, batch_first=True, dropout=0.1)
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(0.3)
        self.hidden, self.out = nn.Linear(width, 16), nn.Linear(16, 1)

    def attended(self, embeddings: Mapping[str, Tensor]) -> Tensor:
        """The features of each sample, [b, F * D]."""
        stacked = torch.stack([embeddings[name] for name in self.names], 1)
        return (stacked + self.attention(stacked, stacked, stacked, need_weights=False)[0]).flatten(1)

    def column(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Tensor:
        """Logits [b, 1]."""
        inputs = self.norm(torch.cat([dense, self.attended(embeddings)], 1))
        return self.out(self.drop(torch.relu(self.hidden(inputs))))

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Tensor:
        return self.column(dense, embeddings).squeeze(1)


class HalfPrecision(Apart):
    """In bfloat16 on the way, whose last bits may differ from place to place."""

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(dense, embeddings).float()


class BatchSecond(Apart):
    """Attention without batch_first: over the samples."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self.attention = nn.MultiheadAttention(spec.features[0][1], 2)


class TransposedAttention(Apart):
    """Attention over the samples, as BatchSecond, though batch_first: it is given [F, b, D]."""

    def attended(self, embeddings: Mapping[str, Tensor]) -> Tensor:
        stacked = torch.stack([embeddings[name] for name in self.names], 0)
        return (stacked + self.attention(stacked, stacked, stacked, need_weights=False)[0]).transpose(0, 1).flatten(1)


class Centred(Apart):
    """The mean of the slice is taken away."""

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Tensor:
        logits = super().forward(dense, embeddings)
        return logits - logits.mean()


class CentredInTraining(Apart):
    """The same in training mode alone."""

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Tensor:
        logits = super().forward(dense, embeddings)
        return logits - logits.mean() if self.training else logits


class CentredInEvaluation(Apart):
    """The same in evaluation mode alone."""

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Tensor:
        logits = super().forward(dense, embeddings)
        return logits if self.training else logits - logits.mean()


class SoftmaxOfSlice(Apart):
    """A softmax over dimension 0."""

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Tensor:
        return torch.log_softmax(self.column(dense, embeddings), 0).squeeze(1)


class Broadcast(Apart):
    """[b] with [b, 1] is [b, b], whose mean over a dimension is [b] again."""

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Tensor:
        column = self.column(dense, embeddings)
        return (column + column.squeeze(1)).mean(0)


class Normalised(Apart):
    """Divided by the norm of the slice's outputs: F.normalize over dimension 0."""

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Tensor:
        return nn.functional.normalize(super().forward(dense, embeddings), dim=0)


class Neighbour(Apart):
    """A sample sees the one before it."""

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Tensor:
        logits = super().forward(dense, embeddings)
        return logits + 0.01 * logits.roll(1)


class AtFirstNothing(Apart):
    """The mean of the slice counts by a parameter that is zero at first."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self.share = nn.Parameter(torch.zeros(1))

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Tensor:
        logits = super().forward(dense, embeddings)
        return logits - self.share * logits.mean()


class ByPlace(Apart):
    """The place in the slice is added."""

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Tensor:
        return super().forward(dense, embeddings) + 0.01 * torch.arange(len(dense))


class BySize(Apart):
    """Divided by the number of samples."""

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Tensor:
        return super().forward(dense, embeddings) / len(dense)


class OfRealData(Apart):
    """The mean of the slice is taken away where dense values are as large as none that is made up."""

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Tensor:
        logits = super().forward(dense, embeddings)
        return logits - logits.mean() if dense.numel() and float(dense.max()) > 20 else logits


class Declared(Neighbour):
    """It says so."""

    mixes_samples: ClassVar[bool] = True


class Uneven(Apart):
    """Its last bits depend on the place in the tile, which is no more than other sums would do."""

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Tensor:
        return super().forward(dense, embeddings) * (1 + 1e-6 * torch.arange(len(dense)) / len(dense))
