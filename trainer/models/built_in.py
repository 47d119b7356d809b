"""The models that come with the project, known without torch: where their classes are, and what columns their rows have."""

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
    """The columns per row of a model besides the embedding: (name, columns) in order. model, folder: as `load_model` takes them.

    A class of the user's own declares them, so it is imported. Raises ModelError.
    """
    if model in MODELS:
        return tuple(_FURTHER_COLUMNS.get(model, {}).items())
    from foreload.trainer.models.building import load_model
    from foreload.trainer.models.spec import further_columns

    return further_columns(load_model(model, folder))
