"""`foreload export`: write a model's rows as Parquet and its dense part as safetensors.

There is one Parquet file for each table. A full export has every trained row; an increment has the
rows that changed since its predecessor. Rows of a vocabulary table have their value beside the id;
encoding.json describes how values become ids.
"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from safetensors.numpy import save as save_arrays
from safetensors.torch import save
from torch import Tensor, nn

from foreload.base.files import write_json
from foreload.base.settings import settings_of
from foreload.pipelines.samples.features import FeatureSpec
from foreload.trainer.checkpoints.saved_checkpoint import names_checkpoint, open_model
from foreload.trainer.compute.dense_average import beside_served, to_serve
from foreload.trainer.errors import ExportError, ModelError
from foreload.trainer.job.job import TrainJob
from foreload.trainer.models.diagnosis import mixes_samples
from foreload.trainer.saved.model_encoder import encoder_of
from foreload.trainer.saved.model_rows import RowsByTable
from foreload.trainer.saved.saved_model import SavedModel
from foreload.trainer.saved.trained_model import dense_module
from foreload.trainer.serving.format import (
    ABOUT,
    BUFFERS,
    DENSE_STATE,
    ENCODING,
    MODEL,
    About,
    Contents,
    Export,
    ExportRows,
    TableWriter,
    check_new,
    check_same_model,
    new_folder,
    state_of,
    write_about,
)
from foreload.trainer.serving.plain_files import weights_of

_HASH = (
    "id = 1 + hash64(UTF-8 bytes of the text) mod (rows - 1), 0 where missing; hash64 is defined (docs/definitions.md, Mixing)"
)
_RULES = {
    1: "a text is encoded as it is written, a whole number of any other type in decimal",
    2: (
        "a whole number is encoded in decimal, also where a text is one written as a float, -?(0|[1-9][0-9]*)[.]0+ (26.0 is 26); any other text is "
        "encoded as it is written (docs/definitions.md, Encoding)"
    ),
}
_IN_THE_MODEL = ("model", "model_options", "dim")


@dataclass(frozen=True, slots=True)
class Predecessor:
    """The model that an increment follows.

    Attributes:
        step: the step of the model.
        state: the state of the model. If None, only the step is known.
        about: the manifest of the model's export, or the one that an export of it would have,
            without its files. If None, only the step is known.
        where: the path of the checkpoint or the export, for messages.
    """

    step: int
    state: str | None = None
    about: Contents | None = None
    where: str = ""


def run(
    path: str, store: str | None, out: str, since: str | None = None, schedule: str | None = None, accept_model: bool = False
) -> About:
    """Write the folder `out`, whole or not at all.

    Args:
        path: the folder of a run, or of a checkpoint.
        store: the URLs of the run's servers. If None, the run's own.
        since: a step, a checkpoint or an export. If given, the export is the increment that follows
            it.
        schedule: the folder where a checkpoint's schedule is now. It is needed if there are
            vocabularies.
        accept_model: whether the model's code may differ from the code that it was trained with.

    Returns:
        The contents of the export's export.json.

    Raises:
        ExportError: `out` exists or cannot be written, or `since` does not fit.
    """
    target = check_new(out)
    before = None if since is None else predecessor(since)
    with open_model(path, store, schedule, accept_model) as model:
        module = _module(model, code_may_miss=names_checkpoint(path))
        buffers = {} if module is None else _buffers(module)
        dense = dense_files(model)
        contents = contents_of(model)
        if model.manifest.mixes_samples if module is None else mixes_samples(module):
            contents["mixes_samples"] = True
        if before is not None:
            _check_since(model, before, contents)
        with new_folder(target) as folder:
            for name, data in dense.items():
                (folder / name).write_bytes(data)
            if buffers:
                (folder / BUFFERS).write_bytes(save(buffers))
                contents["buffers"] = BUFFERS
            return _write(model, folder, contents, before)


def _module(model: SavedModel, code_may_miss: bool) -> nn.Module | None:
    """Return the model's module.

    Args:
        code_may_miss: if the model's code is missing or has changed, warn on stderr and return
            None. A checkpoint is exported even then.

    Raises:
        ModelError: the model's code differs from the code that it was trained with.
    """
    try:
        return dense_module(model)
    except ModelError as error:
        if not code_may_miss:
            raise
        sys.stderr.write(f"foreload: warning: buffers of {model.job.model}, if it has any, are left out: {error}\n")
        return None


def _buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the entries of a module's state that are not parameters."""
    parameters = dict(module.named_parameters())
    return {name: value.clone().contiguous() for name, value in weights_of(module).items() if name not in parameters}


def predecessor(since: str) -> Predecessor:
    """Return the predecessor that --since names.

    Args:
        since: the number of a step, or the folder of a checkpoint or of an export.

    Raises:
        ExportError: `since` is none of these, or the export cannot be used.
        CheckpointError: the checkpoint cannot be used.
    """
    if since.isdecimal():
        return Predecessor(int(since))
    if names_checkpoint(since):
        with open_model(since, None) as model:
            contents = contents_of(model)
            return Predecessor(model.step, state_with(contents, dense_files(model)), contents, since)
    if not (Path(since) / ABOUT).exists():
        raise ExportError(
            f"--since: must be the number of a step, a checkpoint or an export; got {since!r}, which has the manifest of neither"
        )
    export = Export.open(since)
    return Predecessor(export.step, export.state, export.about, since)


def _check_since(model: SavedModel, before: Predecessor, contents: Contents) -> None:
    first = model.manifest.stages[0].first_step
    if not first <= before.step < model.step:
        raise ExportError(
            f"--since: must be from a step in {first} .. {model.step - 1}, before that of {model.name}, {model.step}; got {before.step}"
            + ("; nothing was trained since" if before.step == model.step else "")
        )
    if before.about is None and contents["inexact"] is not None:
        raise ExportError(
            f"--since: must be a checkpoint or an export, since weights were rounded in {model.name}: the number of a step does not show whether "
            f"that was before; got {before.step}"
        )
    if before.about is not None:
        check_same_model(model.name, contents, before.about, before.about["tables"], before.where)


def dense_files(model: SavedModel) -> dict[str, bytes]:
    """Return the files of a model's dense part, by name."""
    dense = model.dense()
    return {MODEL: save_arrays(to_serve(*dense)), DENSE_STATE: save_arrays(beside_served(*dense))}


def state_with(contents: Contents, dense: dict[str, bytes]) -> str:
    """Return the state of a model, as its exports record it.

    Args:
        contents: from `contents_of`.
        dense: from `dense_files`.
    """
    return state_of(contents, *(hashlib.sha256(dense[name]).hexdigest() for name in (MODEL, DENSE_STATE)))


def contents_of(model: SavedModel) -> Contents:
    """Return the manifest of an export of the model, before any rows are written."""
    # A run of an older version lacks the settings that were added since. They have their defaults.
    job = model.job.to_dict() | model.manifest.job
    return {
        "step": model.step,
        "seed": model.job.seed,
        "model": {name: job[name] for name in _IN_THE_MODEL},
        "settings": {
            name: job[name]
            for name, setting in settings_of(TrainJob).items()
            if setting.stated and setting.resume in ("fixed", "rates") and name not in (*_IN_THE_MODEL, "seed")
        },
        "inexact": model.manifest.caveats["inexact"],
        "dense": MODEL,
        "dense_optimizer_state": DENSE_STATE,
        "tables": [
            {
                "name": layout.name,
                "file": quote(layout.name, safe=" ") + ".parquet",
                "table_rows": layout.rows,
                "parts": list(layout.parts),
                "initial": layout.initial,
                "optimizer": layout.optimizer,
                "rows": 0,
            }
            for layout in model.layouts
        ],
    }


def _write(model: SavedModel, folder: Path, contents: Contents, before: Predecessor | None) -> About:
    features = model.features
    vocabularies = encoder_of(model)[1].vocabularies if features.vocabulary_tables else {}
    whole = model.row_counts()
    batches = RowsByTable(model.rows(None if before is None else before.step))
    for table, (layout, entry) in enumerate(zip(model.layouts, contents["tables"], strict=True)):
        vocabulary = vocabularies.get(table)
        with TableWriter(folder / entry["file"], layout, vocabulary is not None) as writer:
            for batch in batches.of(table):
                values = None if vocabulary is None else vocabulary.texts(batch.ids)
                writer.add(ExportRows(batch.ids, batch.weights, batch.state, values))
        entry["rows"] = writer.rows
        if before is not None:
            entry["whole_rows"] = int(whole[table])
    if before is not None:
        contents["since"] = {"step": before.step, "state": before.state}
    contents["encoding"] = ENCODING
    write_json(folder / ENCODING, _encoding(features))
    return write_about(folder, contents)


def _encoding(features: FeatureSpec) -> dict[str, Any]:
    """Describe how raw values become ids, for encoding.json."""
    entries = [one.encoding_entries() | {"table": features.tables[one.table].name} for one in features.features]
    tables = [{"name": table.name, "rows": table.rows} for table in features.tables]
    return {
        "features": entries,
        "tables": tables,
        "missing": ["", *features.text.missing],
        "rule": _RULES[features.rule],
        "hash": _HASH,
    }
