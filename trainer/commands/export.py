"""`foreload export`: every trained row as Parquet, one file a table, and the dense part as safetensors.

Ids of a vocabulary stand beside their values; where values are hashed, encoding.json says how.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors.torch import save_file

from foreload.cache.rows.layout import RowLayout
from foreload.pipelines.base.files import replacing, write_json
from foreload.pipelines.samples.features import FeatureSpec
from foreload.pipelines.samples.vocabulary import Vocabulary
from foreload.trainer.commands.predict import encoding_of
from foreload.trainer.errors import RunError
from foreload.trainer.run.model_rows import ModelRows
from foreload.trainer.run.saved_run import SavedRun, open_saved

MODEL, DENSE_STATE, ABOUT, ENCODING = "model.safetensors", "optimizer.safetensors", "export.json", "encoding.json"
_HASH = (
    "id = 1 + hash64(UTF-8 bytes of the text) mod (rows - 1), 0 where missing; hash64 is defined (docs/definitions.md, Mixing)"
)


def run(path: str, store: str | None, out: str) -> dict[str, Any]:
    """Write the folder `out`, whole or not at all; returns what stands in its export.json. Raises RunError if it exists."""
    target = Path(out)
    if target.exists():
        raise RunError(f"--out: {out} exists already; choose a new folder")
    there = next(folder for folder in target.absolute().parents if folder.exists())
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        raise RunError(f"--out: cannot write {out}: {there} is no folder that may be written to; choose another folder")
    with open_saved(path, store) as saved:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with replacing(target) as temporary:
                temporary.mkdir()
                about = _write(saved, temporary)
        except OSError as error:
            raise RunError(
                f"--out: cannot write {out}: {error.strerror or error}; free the disk or choose another folder"
            ) from error
    return about


def _write(saved: SavedRun, folder: Path) -> dict[str, Any]:
    parameters, state = saved.dense()
    save_file(parameters, folder / MODEL)
    save_file(state, folder / DENSE_STATE)
    names = [quote(layout.name, safe=" ") + ".parquet" for layout in saved.layouts]
    counts = [0] * len(names)
    batches = saved.rows()
    batch = next(batches, None)
    features, encoder = encoding_of(saved.schedule)
    for table, layout in enumerate(saved.layouts):
        vocabulary = encoder.vocabularies.get(table)
        with pq.ParquetWriter(folder / names[table], _schema(layout, vocabulary), compression="zstd") as writer:
            while batch is not None and batch.table == table:
                writer.write_table(_arrow(batch, layout, vocabulary))
                counts[table] += len(batch.ids)
                batch = next(batches, None)
    job = saved.manifest.job
    about = {
        "step": saved.status.step,
        "seed": saved.job.seed,
        "model": {name: job[name] for name in ("model", "model_options", "dim")},
        "dense": MODEL,
        "dense_optimizer_state": DENSE_STATE,
        "tables": [
            {
                "name": layout.name, "file": names[table], "rows": counts[table], "table_rows": layout.rows,
                "parts": [list(part) for part in layout.parts], "optimizer": layout.optimizer,
            }
            for table, layout in enumerate(saved.layouts)
        ],
    }  # fmt: skip
    if any(feature.encoding == "hash" for feature in features.features):
        about["encoding"] = ENCODING
        write_json(folder / ENCODING, _encoding(features))
    write_json(folder / ABOUT, about)
    return about


def _encoding(features: FeatureSpec) -> dict[str, Any]:
    """How raw values become ids."""
    told = [
        {
            "name": one.name, "column": one.column, "table": features.tables[one.table].name, "encoding": one.encoding,
            "pooling": one.pooling, **({} if one.pooling == "single" else {"separator": one.separator}),
        }
        for one in features.features
    ]  # fmt: skip
    tables = [{"name": table.name, "rows": table.rows} for table in features.tables]
    return {"features": told, "tables": tables, "missing": ["", *features.text.missing], "hash": _HASH}


def _schema(layout: RowLayout, vocabulary: Vocabulary | None) -> pa.Schema:
    columns = [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("weight", pa.list_(pa.float32(), layout.width)),
        pa.field("state", pa.list_(pa.float32(), layout.state_width)),
    ]
    # None for the ids of what is missing, and of all values that the vocabulary does not have.
    return pa.schema(columns + ([] if vocabulary is None else [pa.field("value", pa.string())]))


def _arrow(batch: ModelRows, layout: RowLayout, vocabulary: Vocabulary | None) -> pa.Table:
    columns: list[pa.Array] = [pa.array(batch.ids)]
    for values, width in ((batch.weights, layout.width), (batch.state, layout.state_width)):
        flat = pa.array(np.ascontiguousarray(values).reshape(-1))
        kind = pa.list_(pa.float32(), width)
        columns.append(pa.FixedSizeListArray.from_arrays(flat, type=kind) if width else pa.array([[]] * len(batch.ids), kind))
    if vocabulary is not None:
        columns.append(vocabulary.texts(batch.ids))
    return pa.Table.from_arrays(columns, schema=_schema(layout, vocabulary))
