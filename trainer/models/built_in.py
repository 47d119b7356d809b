"""The models that come with the project: their classes, and the further columns of their rows.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping

MODELS = {
    "dlrm": "foreload.trainer.models.dlrm:DLRM",
    "wide_deep": "foreload.trainer.models.wide_deep:WideDeep",
    "dcn": "foreload.trainer.models.dcn:DCN",
    "deepfm": "foreload.trainer.models.deepfm:DeepFM",
    "shared_bottom": "foreload.trainer.models.multi_task:SharedBottom",
    "mmoe": "foreload.trainer.models.multi_task:MMoE",
}
LINEAR = {"linear": 1}
"""The further columns of a model with a linear part."""
_FURTHER_COLUMNS: Mapping[str, Mapping[str, int]] = {"wide_deep": LINEAR, "deepfm": LINEAR}


def further_columns_of(model: str, folder: str) -> tuple[tuple[str, int], ...]:
    """Return the columns per row of a model besides the embedding: (name, columns) in order.

    A user's own class declares them, so it is imported.

    Args:
        model: the model, as `load_model` takes it.
        folder: the folder to search, as `load_model` takes it.

    Raises:
        ModelError: the class cannot be imported, or its declaration is not valid.
    """
    if model in MODELS:
        return tuple(_FURTHER_COLUMNS.get(model, {}).items())
    from foreload.trainer.models.building import load_model
    from foreload.trainer.models.spec import further_columns

    return further_columns(load_model(model, folder))
