"""Layers and `wrap` for PyTorch models whose tables are features of the data (docs/models.md).

Importing this module imports torch.
"""

from foreload.trainer.models.layers import Embedding, EmbeddingBag
from foreload.trainer.models.wrapping import Wrapped, wrap

__all__ = ["Embedding", "EmbeddingBag", "Wrapped", "wrap"]
